"""The targets of an output: a file with a name, or an object of the caller."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from znnpy.files import Inputs
from znnpy.messages import option
from znnpy.volume.journal import default_output
from znnpy.volume.output import Mode, Output
from znnpy.volume.sliceable import Assignable, BlockOutput, Sliceable


def mode_of(*, overwrite: bool, resume: bool) -> Mode:
    """How to begin an output; ValueError where both words are given."""
    if overwrite and resume:
        raise ValueError("overwrite starts again and resume goes on: ask for one of them")
    return "overwrite" if overwrite else "resume" if resume else "new"


def target_of(volume: str | Path | Sliceable, out: str | Path | Assignable | None, network: str) -> Path:
    """The path of an output; of one that blocks are assigned to, what it is called. ValueError where nothing says it.

    network  its name, for an output beside the volume.
    """
    if isinstance(out, str | os.PathLike):
        return Path(out)
    if out is not None:
        return Path(f"the {type(out).__name__}")
    if isinstance(volume, str | os.PathLike):
        return default_output(Path(volume), network)
    raise ValueError(f"the volume is not a file, so the output needs a path or an array: give {option('out')}")


def output_for(
    out: str | Path | Assignable | None,
    target: Path,
    volume: str | Path | Sliceable,
    *,
    inputs: Inputs,
    shape: tuple[int, int, int, int],
    dtype: np.dtype[Any],
    mode: Mode,
    job: dict[str, Any],
) -> Output | BlockOutput:
    """The output to write to; parameters as for `Output` and `BlockOutput`.

    OutputError where it does not fit, ValueError for a mode that only files have.
    """
    if out is None or isinstance(out, str | os.PathLike):
        return Output(target, inputs=inputs, shape=shape, dtype=dtype, mode=mode, job=job)
    if mode != "new":
        raise ValueError(f"{option(mode, True)} is for an output with a path, not for one that takes blocks: drop it")
    return BlockOutput(out, volume=volume, shape=shape, dtype=dtype)
