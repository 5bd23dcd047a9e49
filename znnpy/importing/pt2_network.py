"""Make a network of an exported program of PyTorch (.pt2), which is for arrays of one size."""

from __future__ import annotations

from pathlib import Path

from znnpy.errors import NetworkFileError
from znnpy.importing.aten_program import walked
from znnpy.importing.finish import Walk, Wishes, imported
from znnpy.importing.imported import Imported
from znnpy.importing.program import Program
from znnpy.importing.pt2_file import read_pt2
from znnpy.messages import excerpt
from znnpy.shapes import Vec3


def imported_pt2(path: Path, name: str, wishes: Wishes) -> Imported:
    """Return the network of a .pt2 file; NetworkFileError for whatever is wrong with it."""
    program = read_pt2(path)
    size = exported_size(program)

    def walk(size: Vec3) -> Walk:
        return walked(program, size)

    return imported(name, walk, size, wishes, "an exported program of PyTorch", fixed=True)


def exported_size(program: Program) -> Vec3:
    """Return the voxels that a program is for. NetworkFileError unless it takes one array with a batch of 1."""
    if len(program.inputs) != 1:
        names = excerpt(", ".join(name for name, _ in program.inputs), 60)
        raise NetworkFileError(
            f"the network takes {len(program.inputs)} arrays ({names}), and only one volume can be given; export a "
            "module that takes one"
        )
    ((name, shape),) = program.inputs
    if len(shape) not in (4, 5) or shape[0] != 1:
        raise NetworkFileError(
            f"the network's input {excerpt(name, 60)} has the shape {shape}, but must be (1, channels, z, y, x), or "
            "(1, channels, y, x) for a network over images; export it with such an array"
        )
    return (1, shape[2], shape[3]) if len(shape) == 4 else (shape[2], shape[3], shape[4])
