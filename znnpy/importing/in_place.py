"""Find values of a program that an operator changes in place, such as `relu_`, and that are read afterwards.

PyTorch calls the changed array by a new name, the operator's result, so that most programs can be read as if nothing
were changed in place. Arrays that share memory with the changed one keep their names, and have other values then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from znnpy.errors import NetworkFileError
from znnpy.importing.program import Call, Program, Ref
from znnpy.messages import excerpt

SHOWN = 60  # characters of a name in a message

# Operators whose results share memory with their first argument, or may do so.
_SHARING = frozenset({
    "alias", "alpha_dropout", "as_strided", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_to", "chunk",
    "contiguous", "detach", "detach_", "diagonal", "dropout", "expand", "expand_as", "feature_alpha_dropout",
    "feature_dropout", "flatten", "lift_fresh", "moveaxis", "movedim", "narrow", "numpy_T", "permute", "positive",
    "ravel", "real", "reshape", "reshape_as", "resolve_conj", "resolve_neg", "select", "slice", "split",
    "split_with_sizes", "squeeze", "swapaxes", "swapdims", "t", "tensor_split", "to", "transpose", "type_as",
    "unbind", "unflatten", "unfold", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "unsqueeze", "view",
    "view_as",
})  # fmt: skip


def operator(target: str) -> str:
    """Return an operator's name without its library and its variant: `relu_` of `aten.relu_.default`."""
    return target.split(".")[-2] if "." in target else target


def writes(target: str) -> bool:
    """Return whether the operator writes into its first argument: its name ends in one underscore."""
    name = operator(target)
    return name.endswith("_") and not name.endswith("__") and name != "detach_"


def references(values: Iterable[object]) -> Iterator[str]:
    """Yield the names that the arguments of a call refer to."""
    for value in values:
        if isinstance(value, Ref):
            yield value.name
        elif isinstance(value, list):
            yield from references(value)


def check_in_place(program: Program) -> None:
    """Raise NetworkFileError if a value is read after an operator changed it under another name."""
    groups: dict[str, set[str]] = {}  # names that share memory, by each of them
    stale: dict[str, str] = {}  # values that changed, and the node that did it
    for call in program.calls:
        read = list(references(call.arguments.values()))
        for name in read:
            _check(name, stale, f"node {excerpt(call.name, SHOWN)}")
        if "out" in call.arguments:
            raise NetworkFileError(f"{_node(call)} writes into an array given by out=; leave that out and export again")
        if read and (writes(call.target) or operator(call.target) in _SHARING):
            group = groups.setdefault(read[0], {read[0]})
            if writes(call.target):
                stale.update(dict.fromkeys(group, _node(call)))
            group.update(call.results)
            groups.update(dict.fromkeys(call.results, group))
    for name in program.outputs.values():
        _check(name, stale, "the network's output")


def _check(name: str, stale: dict[str, str], reader: str) -> None:
    if name in stale:
        raise NetworkFileError(
            f"{reader} reads {excerpt(name, SHOWN)}, which {stale[name]} changes in place before; use that operator's "
            "variant that returns a new array, and export again"
        )


def _node(call: Call) -> str:
    return f"node {excerpt(call.name, SHOWN)} ({excerpt(call.target, SHOWN)})"
