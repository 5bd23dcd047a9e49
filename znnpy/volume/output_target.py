"""Choose where an output goes: to a file, or to an object of the caller."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from znnpy.errors import OutputError
from znnpy.files import Inputs
from znnpy.messages import excerpt, option
from znnpy.volume.journal import default_output
from znnpy.volume.location import Location, volume_location
from znnpy.volume.output import Mode, Output
from znnpy.volume.run_output import RunOutput
from znnpy.volume.sliceable import Assignable, BlockOutput, Sliceable
from znnpy.volume.store import OutputArray, Storage


def mode_of(*, overwrite: bool, resume: bool) -> Mode:
    """Return how to begin an output; ValueError if both options are given."""
    if overwrite and resume:
        raise ValueError("overwrite starts again and resume continues: give one of them")
    return "overwrite" if overwrite else "resume" if resume else "new"


def target_of(volume: str | Path | Sliceable, out: str | Path | Assignable | None, network: str) -> Path | Location:
    """Return the path or the URL of an output, or a description of an array. ValueError where nothing determines it.

    network  name of the network, for an output beside the volume.
    """
    if isinstance(out, str | os.PathLike):
        place = place_of(out)
        return place.path if place.is_local else place
    if out is not None:
        return Path(f"the {type(out).__name__}")
    if isinstance(volume, str | os.PathLike):
        return default_output(volume_location(volume), network)
    raise ValueError(f"the volume is not a file, so the output needs a path or an array: give {option('out')}")


def place_of(out: str | os.PathLike[str]) -> Location:
    """Read the name of an output; OutputError for a name that cannot be read."""
    try:
        place = Location.of(out)
    except ValueError as error:
        raise OutputError(f"{error}; check the name in {option('out')}") from None
    if place.dataset is not None:
        raise OutputError(
            f"{place} names the dataset {excerpt(place.dataset)}, and outputs name theirs themselves; "
            f"leave it out of {option('out')}"
        )
    return place


def prefix_of(out: object) -> str | None:
    """Return the word before the name of an output that says its format; None: there is none."""
    return place_of(out).prefix if isinstance(out, str | os.PathLike) else None


def output_for(
    out: str | Path | Assignable | None,
    target: Path | Location,
    volume: str | Path | Sliceable,
    *,
    inputs: Inputs,
    arrays: Sequence[OutputArray],
    dtype: np.dtype[Any],
    mode: Mode,
    job: dict[str, Any],
    sharded: bool,
    multiscale: int,
    mask: object = None,
) -> RunOutput:
    """Return the output to write to; parameters as for `Output` and `Storage`. An object takes arrays of one size.

    mask  what else is read, and must not be replaced.

    OutputError if it does not fit, ValueError for a mode that only files have.
    """
    if out is None or isinstance(out, str | os.PathLike):
        storage = Storage(prefix_of(out), sharded, multiscale)
        if isinstance(target, Location):
            from znnpy.volume.bucket_output import BucketOutput

            read = [volume_location(one) for one in (volume, mask) if isinstance(one, str | Path)]
            return BucketOutput(target, arrays=arrays, dtype=dtype, mode=mode, job=job, storage=storage, reads=read)
        return Output(target, inputs=inputs, arrays=arrays, dtype=dtype, mode=mode, job=job, storage=storage)
    for word, asked in (("sharded", sharded), ("multiscale", multiscale)):
        if asked:
            raise ValueError(f"{option(word, asked)} is for an output with a path, not for an array: omit it")
    if mode != "new":
        raise ValueError(f"{option(mode, True)} is for an output with a path, not for an array: omit it")
    maps = [array.shape[0] for array in arrays]
    return BlockOutput(out, volume=volume, shape=(sum(maps), *arrays[0].size), dtype=dtype, maps=maps)
