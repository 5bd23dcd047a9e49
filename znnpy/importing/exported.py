"""Check what holds for every program of torch.export, in a file or in memory: words for types, names, and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from znnpy.errors import NetworkFileError
from znnpy.importing.in_place import check_in_place, references, writes
from znnpy.importing.program import Program
from znnpy.messages import excerpt

SHOWN = 60  # characters of a name in a message

EXPORT = "torch.export.save(torch.export.export(module.eval(), (torch.zeros(1, 1, 96, 96, 96),)), 'net.pt2')"
ONNX = "torch.onnx.export(module.eval(), (torch.zeros(1, 1, 96, 96, 96),), 'net.onnx')"

STATIC = "export it again with an array of a fixed size, without `dynamic_shapes`"
OWN_GRAPH = (
    "holds a graph of its own, as torch.cond, a loop, torch.no_grad or torch.autocast inside forward make; leave that "
    "out of forward and export again"
)
TRAINING = "as a network in training mode does; call module.eval() and export it again"


def call_name(path: str, target: str, results: Sequence[str]) -> str:
    """Return a call's name: the path of the module that it is in, or of its result where it is in none."""
    return path or (results[0] if results else target)


def symbolic(here: str) -> NetworkFileError:
    """Return the error for a node that takes a size or a number from an array."""
    return NetworkFileError(
        f"{here} computes with a size or a number that is known only while it runs; leave out .item(), and {STATIC}"
    )


def refused(what: str) -> NetworkFileError:
    """Return the error for a part of a program that no network from arrays to arrays has."""
    return NetworkFileError(f"{what} is of a kind that cannot be read; export only the part from arrays to arrays")


def changed(what: str) -> NetworkFileError:
    """Return the error for a graph that writes into its parameters or buffers."""
    return NetworkFileError(f"{what}, {TRAINING}")


def node(name: str, target: str) -> str:
    """Name a node of the graph in an error."""
    return f"node {excerpt(name, SHOWN)} ({excerpt(target, SHOWN)})"


def widened(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Return bfloat16 values as float32, from their bits."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def named_outputs(values: Sequence[str | None], words: Sequence[str] | None) -> dict[str, str]:
    """Return the outputs by their words, or by their numbers if there are none, or too few, or the same twice.

    values  names of what is given back; None for what is no array, such as a number, which is left out
    """
    if words is None or len(words) != len(values) or len(set(words)) < len(words):
        words = [str(number) for number in range(len(values))]
    found = {word: value for word, value in zip(words, values, strict=True) if value is not None}
    if not found:
        raise NetworkFileError("the network gives back no array; return one from forward and export it again")
    return found


def checked(program: Program, unreadable: Mapping[str, str]) -> Program:
    """Return the program. NetworkFileError if a value is read that is not there, or a stored array is written.

    unreadable  types of stored arrays that numpy does not know, by name; an error only where one is read
    """
    known = {name for name, _ in program.inputs} | set(program.constants)
    for call in program.calls:
        here = node(call.name, call.target)
        read = list(references(call.arguments.values()))
        for name in read:
            _check_known(name, known, unreadable, here)
        if writes(call.target) and read and read[0] in program.constants:
            raise changed(f"{here} changes the stored array {excerpt(read[0], SHOWN)}")
        for name in call.results:
            if name in known:
                raise NetworkFileError(f"{here} gives {excerpt(name, SHOWN)}, which is there already; export it again")
            known.add(name)
    for name in program.outputs.values():
        _check_known(name, known, unreadable, "the network's output")
    check_in_place(program)
    return program


def _check_known(name: str, known: set[str], unreadable: Mapping[str, str], here: str) -> None:
    if name in unreadable:
        raise NetworkFileError(
            f"{here} reads {excerpt(name, SHOWN)}, which is stored as {excerpt(unreadable[name], SHOWN)}; convert it "
            "with module.float() and export it again"
        )
    if name not in known:
        raise NetworkFileError(f"{here} reads {excerpt(name, SHOWN)}, which no node before it gives; export it again")
