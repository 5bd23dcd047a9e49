"""Options that several commands and functions share, each declared once. This module loads no numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING

from znnpy.network_result import NetworkResult
from znnpy.option_declarations import Checked, option
from znnpy.option_values import (
    BLENDS,
    BORDERS,
    COVERS,
    DEVICES,
    ENSEMBLES,
    MEANINGS,
    MODES,
    OUTPUT_DTYPES,
    RESULTS,
    WINDOW_RULES,
    AskedMode,
    Blend,
    Border,
    Cover,
    Device,
    Ensemble,
    Meaning,
    OutputDtype,
    Result,
    WindowRule,
)
from znnpy.shapes import PRECISIONS, Precision, Vec3

if TYPE_CHECKING:
    from znnpy.planner.run_plan import RunPlan
    from znnpy.volume.sliceable import Sliceable

MOST_THREADS = 2**12
NO_AXES = "none"
MOST_SCALE = 99
MOST_TIME = 10**7
THRESHOLD = 0.5
USUAL_DTYPE: OutputDtype = "float32"  # of an output

NETWORK = (
    "network file (.yaml, .znni, .onnx, .pt2, rdf.yaml), the name of a network that ships, or nnunet:FOLDER, a trained "
    "model of nnU-Net"
)
WITH_WEIGHTS = "or a TrainedNetwork, such as znnpy.from_torch gives"
SEVERAL = "repeatable: several with equal layers are an ensemble, which is computed in windows"


@dataclass(frozen=True, kw_only=True)
class MachineOptions(Checked):
    """Options that say how much of the machine is used."""

    ram: int | str | None = option(
        None,
        "memory limit of the whole process, such as 16G",
        "size",
        unset="3/4 of the machine's memory",
        in_python='in bytes or as "16G"',
    )
    threads: int | None = option(
        None,
        "threads that compute",
        "whole",
        unset="one for each core that the process may use",
        metavar="N",
        least=1,
        most=MOST_THREADS,
    )
    device: Device = option(
        "auto", "device to use; auto: the GPU if one works, otherwise the CPU", "text", values=DEVICES
    )
    precision: Precision | None = option(
        None,
        "precision, with the relative error of one layer: fp32, 1e-6; on a GPU tf32, 1e-3, and fp16, 5e-3 and half the "
        "memory; on a CPU with AMX or AVX512-BF16 bf16x2, 1e-5, and bf16, 5e-3 and half the memory. A CPU computes in "
        "fp32 where tf32 or fp16 is asked for",
        "text",
        unset="fp32",
        values=PRECISIONS,
    )


@dataclass(frozen=True, kw_only=True)
class ComputeOptions(MachineOptions):
    """Options that restrict the plan for one device."""

    cover: Cover | None = option(
        None,
        "how the output is cut; columns: each step keeps what the next one needs; patches: each is computed by itself",
        "text",
        unset="whichever is faster",
        values=COVERS,
    )
    patch: Vec3 | None = option(
        None,
        "output voxels Z,Y,X of one patch, or of one step of a column",
        "voxels",
        unset="the fastest size",
        metavar="Z,Y,X",
    )
    depth_first: bool = option(
        True,
        "let layers behind a pooling take its fragments in parts, which needs less memory",
        "flag",
        off="After a pooling, run each layer on all of its results (fragments) before the next layer begins, which "
        "needs more memory",
    )
    only: str | Sequence[str] = option(
        (),
        "use this primitive for every layer that it can compute; repeatable; `znnpy primitives` lists them",
        "names",
        metavar="PRIMITIVE",
        in_python="a name or several; empty: any primitive",
    )
    vram: int | str | None = option(
        None,
        "memory limit of each GPU, everything counted, such as 12G",
        "size",
        unset="90 % of what is free",
        in_python='in bytes or as "12G"',
    )

    @property
    def names(self) -> tuple[str, ...]:
        """Names in `only`."""
        return (self.only,) if isinstance(self.only, str) else tuple(self.only)


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(Checked):
    """Options that say which devices work together, and which measured costs are used."""

    mode: AskedMode = option(
        "auto",
        "how devices share the work; cpu, gpu: one kind computes everything; gpu-host: the first layers run one at a "
        "time with tensors in main memory, then the rest on the GPU; cpu-to-gpu: the CPU computes the first layers of "
        "each step, the GPU the others; side-by-side: CPU and GPUs compute different parts of the volume; auto: gpu or "
        "cpu, and another mode if a long run gains much. A mode other than auto decides the device too",
        "text",
        values=MODES,
    )
    gpus: int | str | None = option(None, 'number of identical GPUs to use, or "all"', "gpus", unset="1", metavar="N")
    costs: str | Path | None = option(
        None,
        "file of speeds that `znnpy measure --out` wrote on this machine",
        "path",
        unset="the speeds stored for this machine, if they still fit",
        metavar="FILE",
    )
    calibrate: bool = option(
        True,
        "measure a device of which no speeds are stored for at most 5 seconds; a processor only for a run of 10 "
        "seconds or more",
        "flag",
        off="Do not time this machine before the plan is made",
    )


@dataclass(frozen=True, kw_only=True)
class PlanningOptions(ComputeOptions, DeviceOptions):
    """Options that restrict the search for a plan."""


@dataclass(frozen=True, kw_only=True)
class RunOptions(PlanningOptions):
    """Options that give the plan of a run, or restrict the search for it."""

    plan: str | Path | RunPlan | None = option(
        None,
        "plan that `znnpy plan --out` wrote",
        "path",
        unset="the fastest plan is searched for",
        in_python="a file or a Plan",
    )


@dataclass(frozen=True, kw_only=True)
class MeaningOption(Checked):
    """The option that names the meaning of an output voxel."""

    meaning: Meaning | None = option(
        None,
        "meaning of an output voxel; sliding: what the network gives for the field of view around it; whole: what it "
        "gives there for the whole volume, with poolings that lower the resolution; windows: the mean of what it gives "
        "in overlapping windows",
        "text",
        unset="the one that the network file names, or sliding or whole if the network supports it",
        values=MEANINGS,
    )


@dataclass(frozen=True, kw_only=True)
class WindowOptions(MeaningOption):
    """Options that say in which windows a network is computed, and what is written of its maps."""

    window: Vec3 | None = option(
        None,
        "compute the network in windows of Z,Y,X voxels, each by itself, and write the weighted mean of their results",
        "voxels",
        unset="that of the network file; none if the network does not need windows",
        metavar="Z,Y,X",
    )
    overlap: float | Sequence[float] | None = option(
        None,
        "share of a window by which it overlaps the next one, or three shares Z,Y,X",
        "shares",
        unset="0.5",
        metavar="SHARE",
    )
    blend: Blend | None = option(
        None,
        "weights of the voxels of a window; gaussian: more in its middle; constant: equal; bump: much more in its "
        "middle",
        "text",
        unset="gaussian",
        values=BLENDS,
    )
    sigma: float | None = option(
        None,
        "standard deviation of the Gaussian, as a share of the window",
        "positive",
        unset="0.125",
        metavar="SHARE",
    )
    mirror: str | None = option(
        None,
        "axes, such as z,y,x, along which windows are computed mirrored too, in every combination, and averaged; or "
        "none",
        "axes",
        unset="those that the network states, or none",
        metavar="AXES",
    )
    windows_like: WindowRule | None = option(
        None,
        "whose positions and weights of windows are computed; monai: SlidingWindowInferer; nnunet: nnUNetPredictor",
        "text",
        unset="monai",
        values=WINDOW_RULES,
    )
    output: Result = option(
        "maps",
        "what is written; maps: what the network gives; softmax, sigmoid: the function of it; labels: the number of "
        "the largest map; above: 1 where a map is above its threshold, else 0",
        "text",
        values=RESULTS,
    )
    threshold: float | Sequence[float] | None = option(
        None, "threshold of the output above, or one for each map", "numbers", unset=f"{THRESHOLD}", metavar="NUMBER"
    )
    ensemble: Ensemble = option(
        "logits",
        "what is averaged of several networks; logits: what they give; probabilities: its softmax, or its sigmoid if "
        "that is written or compared with a threshold",
        "text",
        values=ENSEMBLES,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None and not (_several(self.window, Integral, 3) and min(self.window) > 0):
            raise ValueError(f"window is three numbers of voxels such as (128, 128, 128), not {self.window!r}")
        overlap = (self.overlap,) if not isinstance(self.overlap, Sequence | None) else self.overlap
        if overlap is not None and not (_several(overlap, Real, 1, 3) and all(0 <= share < 1 for share in overlap)):
            raise ValueError(
                f"overlap is a share of a window such as 0.5, or three, each below 1, and not {self.overlap!r}"
            )
        axes = self.mirror.split(",") if isinstance(self.mirror, str) else []
        known = axes == [NO_AXES] or (axes and set(axes) <= set("zyx") and len(set(axes)) == len(axes))
        if self.mirror is not None and not known:
            raise ValueError(f"mirror is axes with commas between them, such as 'z,y,x', or none, not {self.mirror!r}")
        if self.sigma is not None and not (isinstance(self.sigma, Real) and 0 < self.sigma < inf):
            raise ValueError(f"sigma is a share of a window such as 0.125, not {self.sigma!r}")
        limits: object = (self.threshold,) if isinstance(self.threshold, Real) else self.threshold
        if limits is not None and not _numbers(limits):
            raise ValueError(f"threshold is a number such as 0.5, or one for each map, not {self.threshold!r}")

    @property
    def result(self) -> NetworkResult:
        """The result that is written of the maps."""
        limits = THRESHOLD if self.threshold is None else self.threshold
        above = tuple(limits) if isinstance(limits, Sequence) else (limits,)
        thresholds = tuple(map(float, above)) if self.output == "above" else ()
        return NetworkResult(self.output, thresholds, self.ensemble == "probabilities")

    def check_result(self) -> None:
        """Raise ShapeError for a given option that has no effect on this result."""
        if self.threshold is not None:
            self.result.check_threshold()


def _numbers(values: object) -> bool:
    """Return whether a value is a sequence of finite numbers, one at least."""
    return (
        isinstance(values, Sequence) and all(isinstance(one, Real) and isfinite(one) for one in values) and values != ()
    )


def _several(values: object, kind: type, *counts: int) -> bool:
    """Return whether a value is a sequence of one of these numbers of values of a kind."""
    if not isinstance(values, Sequence) or len(values) not in counts:
        return False
    return all(isinstance(one, kind) for one in values)


@dataclass(frozen=True, kw_only=True)
class BorderOption(Checked):
    """The option that says how the faces of a volume are treated."""

    border: Border = option(
        "valid",
        "valid: the output is smaller than the input by the field of view minus 1; reflect: the output is as large as "
        "the input, which is mirrored at its faces",
        "text",
        values=BORDERS,
    )


@dataclass(frozen=True, kw_only=True)
class SourceOptions(Checked):
    """Options that say which array of a file or folder is read."""

    dataset: str | None = option(None, "array inside the file", "text", unset="the only 3D or 4D one")
    scale: int | None = option(
        None,
        "resolution to read of an image that is stored at several; 0 is the finest",
        "whole",
        unset="the finest",
        metavar="N",
        least=0,
        most=MOST_SCALE,
    )
    time: int | None = option(
        None,
        "point of time to read of a series, counted from 0",
        "whole",
        unset="the only one",
        metavar="T",
        least=0,
        most=MOST_TIME,
    )


@dataclass(frozen=True, kw_only=True)
class RegionOptions(SourceOptions, BorderOption, WindowOptions):
    """Options that say which part of a volume is predicted, and how the output is stored."""

    fill_missing: float | None = option(
        None,
        "value of voxels whose file is missing, or whose chunk is damaged",
        "number",
        unset="an error",
        metavar="VALUE",
    )
    roi: str | None = option(
        None,
        "part of the volume, z0:z1,y0:y1,x0:x1 in voxels, or with units as in 10um:20um,:,0nm:500nm by position",
        "region",
        unset="all of it",
        metavar="Z0:Z1,Y0:Y1,X0:X1",
    )
    mask: str | Path | Sliceable | None = option(
        None,
        "volume that is not zero where output is wanted, FILE or FILE::DATASET, also of another resolution; elsewhere "
        "the output is zero, and most of it is not computed",
        "place",
        unset="output is wanted everywhere",
        metavar="VOLUME",
    )
    output_dtype: OutputDtype = option(
        USUAL_DTYPE,
        "dtype of the output; uint8: 255 times the value, clipped to 0..1. Labels, and what is above a threshold, are "
        "uint8 where float32 is given, too",
        "text",
        values=OUTPUT_DTYPES,
    )

    def check_result(self) -> None:
        super().check_result()
        if self.output_dtype != USUAL_DTYPE:
            self.result.check_dtype(self.output_dtype)
