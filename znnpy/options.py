"""The options of every command and of the Python function behind it, each declared once: name, type, default and help.

The command line (`znnpy.command_options`), the signatures and the docstrings of the Python functions are made from
these classes and those of `znnpy.shared_options`. Their instances carry what a caller asked for, checked, to the code
that does it. This module loads no numpy, as the command line does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from znnpy.network_files import DEFAULT
from znnpy.option_declarations import Checked, needed, option
from znnpy.option_values import (
    MEANINGS,
    MISSING_CHUNKS,
    RIGOR_LEVELS,
    Meaning,
    MissingChunks,
    RigorLevel,
)
from znnpy.run_log import log_once
from znnpy.shapes import PRECISIONS, Precision, Vec3
from znnpy.shared_options import (
    NETWORK,
    SEVERAL,
    WITH_WEIGHTS,
    BorderOption,
    MachineOptions,
    MeaningOption,
    PlanningOptions,
    RegionOptions,
    RunOptions,
    SourceOptions,
    WindowOptions,
)

if TYPE_CHECKING:
    import numpy.typing as npt
    from distributed import Client

    from znnpy.measure.budget import LayerTimer, Progress
    from znnpy.network_files import Trained
    from znnpy.report.memory_sweep import Point
    from znnpy.report.rejected import Considered
    from znnpy.run.pipeline import Event
    from znnpy.volume.sliceable import Assignable, Sliceable

MEASURE_MINUTES = 2.0
MOST_LEVELS = 16
_PART = re.compile(r"(\d{1,7})/(\d{1,7})")


def ignore(progress: Progress) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class PlanOptions(RegionOptions, PlanningOptions):
    """The options of `znnpy.plan`."""

    network: str | Path | Trained = option(DEFAULT, NETWORK, "text", argument=True, in_python=WITH_WEIGHTS)
    _: KW_ONLY
    volume: str | Path | None = option(
        None, "volume to plan for; without a volume or a shape, 1024^3 voxels are assumed", "place"
    )
    shape: Vec3 | None = option(None, "voxels Z,Y,X of the volume to plan for", "voxels", metavar="Z,Y,X")
    machine: str | Path | None = option(
        None,
        "plan for the machine described by FILE (from `znnpy measure --export`)",
        "path",
        unset="this machine",
        metavar="FILE",
    )
    rigor: RigorLevel = option(
        "estimate",
        "measure: time the layers of the best plans first; exhaustive: all layers that may be in the best plan",
        "text",
        values=RIGOR_LEVELS,
    )
    time_limit: float | None = option(
        None,
        "seconds after which no further layer is timed",
        "positive",
        unset="60 for measure, no limit for exhaustive",
        metavar="SECONDS",
    )
    paranoid: bool = option(
        False,
        "run each primitive of the plan on its layer, and compare the result with a slow, exact computation",
        "flag",
        in_python="VerifyError if they differ",
    )
    tell: Callable[[str], None] = option(
        log_once, "called with each message about a request that could not be met, such as that there is no GPU"
    )
    tell_why: Callable[[list[Considered]], None] | None = option(
        None, "called once with every primitive for every layer, its time in seconds, and why it was not chosen"
    )
    tell_point: Callable[[Point], None] | None = option(
        None, "called with the best plan within each of several memory limits, for 12 seconds at most"
    )
    tell_progress: Callable[[Progress], None] = option(ignore, "called before each layer that is timed or checked")


def part_of(word: str) -> tuple[int, int]:
    """Read `K/N`, part K of N; ValueError for anything else."""
    found = _PART.fullmatch(word.strip())
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"{word!r} is not a part K/N of 1 to N, such as 3/64")
    return int(found[1]), int(found[2])


@dataclass(frozen=True)
class ComputedOptions(RegionOptions, RunOptions):
    """Options that say what is computed of a volume, and by which network."""

    volume: str | Path | Sliceable = needed(
        "path or URL of the volume: HDF5, Zarr, N5, Neuroglancer precomputed, TIFF, a folder of TIFF slices, NIfTI, "
        "MRC, NRRD or .npy, integers or floating point; or anything that can be sliced, (z, y, x) or (c, z, y, x): an "
        "array of numpy, Zarr or dask, a dataset of h5py. It is read box by box, by one thread at a time. A memory "
        "map takes memory beyond `ram`: give the path of its file",
        "place",
    )
    network: str | Path | Trained | Sequence[str | Path | Trained] = option(
        DEFAULT, f"{NETWORK}; {SEVERAL}", "networks", in_python=WITH_WEIGHTS
    )
    _: KW_ONLY
    weights: str | Path | None = option(
        None, "weights file, .npz or .safetensors", "path", unset="the one that the network file names"
    )
    allow_nan: bool = option(
        False, "write NaN wherever the field of view holds NaN or infinity, which are errors otherwise", "flag"
    )
    missing_chunks: MissingChunks = option(
        "fill",
        "fill: chunks that were never written read as the fill value of the volume; error: they end the run",
        "text",
        values=MISSING_CHUNKS,
        in_python="shards within shards are not looked into, so that `error` refuses a Zarr volume of such",
    )


@dataclass(frozen=True)
class StreamOptions(ComputedOptions):
    """The options of `znnpy.stream`."""

    _: KW_ONLY
    progress: Callable[[Event], None] | None = option(
        None, "called with the latest Event, in the thread that waits for a block; what it raises ends the stream"
    )


@dataclass(frozen=True)
class InferOptions(ComputedOptions):
    """The options of `znnpy.infer`."""

    _: KW_ONLY
    out: str | Path | Assignable | None = option(
        None,
        "path or URL of the output, (maps, z, y, x), or (z, y, x) for one map: .h5, .zarr, .n5, .precomputed, .tif, "
        ".nii or .mrc; zarr2:// in front of a .zarr means OME-Zarr 0.4",
        "new place",
        unset="a file in the volume's folder, named after the volume and the network",
        in_python="or anything of such a shape and of `output_dtype` that takes assignment to slices: one thread "
        "assigns finished blocks, in any order. It has no journal: an error leaves it half written, and nothing can "
        "be resumed there",
    )
    sharded: bool = option(False, "write Zarr 3 with many chunks in a file, for outputs of very many chunks", "flag")
    multiscale: int = option(
        0,
        "coarser resolutions to write for viewers, each the mean of 2x2x2 voxels of the one before",
        "whole",
        metavar="N",
        least=0,
        most=MOST_LEVELS,
    )
    overwrite: bool = option(False, "replace the output, and the files of an unfinished run", "flag")
    resume: bool = option(
        False,
        "continue the interrupted run of this output, with its plan; begin if there is none",
        "flag",
        in_python="the bytes are those of an uninterrupted run",
    )
    paranoid: bool = option(
        False,
        "before a patch is written, compare some of its voxels with a slow, exact computation, which takes memory "
        "beyond the limit",
        "flag",
    )
    trace: str | Path | None = option(
        None,
        "record in this file what each device and thread does when, for `znnpy timeline`, or for the page "
        "chrome://tracing of the browser Chrome",
        "new path",
        in_python="it is also written if the run fails",
    )
    record: str | Path | None = option(
        None,
        "record the times and the memory of the run in this file, NAME.json, for `znnpy report`",
        "new path",
        unset="nothing is recorded",
    )
    cluster: str | None = option(
        None,
        "let workers of dask compute: ADDRESS of a scheduler, the scheduler file FILE.json, or local:N for N processes "
        "on this machine",
        "text",
        metavar="ADDRESS",
    )
    client: Client | None = option(None, "a client of dask, whose workers compute")
    part: str | None = option(
        None,
        "compute part K of N of the work items, in a job array; the option finish completes the output",
        "part",
        metavar="K/N",
        in_python="such as '3/64'",
    )
    finish: bool = option(
        False, "complete the output of a job whose parts are computed; what is missing is computed here", "flag"
    )
    items: Vec3 | None = option(
        None,
        "output voxels Z,Y,X of one work item of `cluster` or `part`",
        "voxels",
        unset="so that an item takes some minutes",
        metavar="Z,Y,X",
    )
    progress: Callable[[Event], None] | None = option(
        None,
        "called with an Event in the calling thread: before the first patch, after each one, and while the last ones "
        "are written; what it raises stops the run",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.part is not None:
            part_of(self.part)
        if self.overwrite and (self.part is not None or self.finish):
            raise ValueError("overwrite would remove what other parts have computed: leave it out")
        ways = [name for name in ("cluster", "client", "part", "finish") if getattr(self, name)]
        if len(ways) > 1:
            raise ValueError(f"{' and '.join(ways)} exclude one another: give one of them")
        if self.record is not None and ways:
            raise ValueError(f"record is of a run by one process, and {ways[0]} is of several: leave one of them out")


@dataclass(frozen=True)
class CallOptions(BorderOption, WindowOptions, RunOptions):
    """The options of a call of a network on an array."""

    array: npt.NDArray[Any] = needed(
        "(z, y, x) or (c, z, y, x), any integer or float dtype: grey values, before the network's `normalise`"
    )
    _: KW_ONLY
    progress: Callable[[Event], None] | None = option(
        None, "called with an Event in the calling thread, before the first patch and after each one"
    )


@dataclass(frozen=True)
class SessionOptions(BorderOption, WindowOptions, RunOptions):
    """The options of a session for arrays."""

    shape: tuple[int, ...] | None = option(
        None,
        "shape of the arrays, (z, y, x) or (c, z, y, x)",
        unset="arrays of any shape: the first of each is planned for and prepared",
    )
    _: KW_ONLY
    dtype: npt.DTypeLike = option(
        "float32",
        "dtype of the arrays, or one with as many bytes; arrays of types with fewer bytes are accepted too",
    )


@dataclass(frozen=True)
class MeasureOptions(MachineOptions, MeaningOption):
    """The options of `znnpy measure`."""

    network: str | Path | Trained | None = option(
        None,
        "network file, or the name of a network that ships: the layers of its best plans within `ram`, and within "
        "parts of it, are measured too",
        "text",
        argument=True,
    )
    _: KW_ONLY
    minutes: float = option(MEASURE_MINUTES, "minutes after which no further layer is measured", "positive")
    out: Path | None = option(None, "keep the measured speeds in this file, and not in the cache folder", "new path")
    overwrite: bool = option(False, "replace the files that are written", "flag")
    clock: LayerTimer | None = option(None, "clock that times layers instead of the device's own")
    tell: Callable[[Progress], None] = option(ignore, "called before each layer that is timed")


@dataclass(frozen=True, kw_only=True)
class DemoOptions(Checked):
    """The options of `znnpy demo`."""

    folder: Path = option(Path("demo"), "folder to write to", "path")
    size: int = option(160, "voxels along each axis of the volume", "whole", least=27, most=2**15)
    seed: int = option(0, "seed of the random volume", "whole", least=0)
    overwrite: bool = option(False, "replace what an earlier demo wrote", "flag")


@dataclass(frozen=True)
class InfoOptions(SourceOptions):
    """The options of `znnpy info`."""

    volume: str | Path = needed("volume to describe", "place")
    _: KW_ONLY
    network: str | Path | Trained = option(DEFAULT, f"what it would be predicted with: {NETWORK}", "text")


@dataclass(frozen=True)
class VerifyOptions(Checked):
    """The options of `znnpy verify`."""

    output: str | Path = needed("output of `znnpy infer`", "place")
    volume: str | Path = needed("volume that it was predicted from", "place")
    _: KW_ONLY
    network: str | Path | Trained | Sequence[str | Path | Trained] | None = option(
        None,
        f"{NETWORK}; {SEVERAL}",
        "networks",
        unset="the network that ships under the name in the output",
        in_python=WITH_WEIGHTS,
    )
    weights: str | Path | None = option(None, "weights file", "path", unset="the one that the network file names")
    meaning: Meaning | None = option(
        None,
        "meaning of an output voxel, sliding or whole, which must be that of the output",
        "text",
        unset="the one that the output names",
        values=MEANINGS,
    )
    dataset: str | None = option(None, "array inside the volume's file", "text", unset="the one that was predicted")
    mask: str | Path | Sliceable | None = option(
        None,
        "mask that the output was predicted with, outside of which it must be zero",
        "place",
        unset="the output has none",
        metavar="VOLUME",
    )
    fill_missing: float | None = option(
        None,
        "value that `znnpy infer` was given for voxels whose file is missing",
        "number",
        unset="an error",
        metavar="VALUE",
    )
    samples: int = option(
        1000, "number of voxels of each output to recompute; all of them if it has fewer", "whole", least=1
    )
    seed: int = option(0, "seed of the random choice of voxels", "whole", least=0)
    precision: Precision | None = option(
        None,
        "precision whose errors are allowed: 1e-5, 1e-4 in bf16x2, 1e-2 in tf32, 5e-2 in fp16 and bf16",
        "text",
        unset="fp32, even if the output names another precision",
        values=PRECISIONS,
    )
    tolerance: float | None = option(
        None,
        "largest difference allowed, instead of that of a precision; it grows in proportion for values above 1",
        "positive",
    )
