"""The identity of a run, the other settings that decide its bytes, and the attributes of its output."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import znnpy
from znnpy.formats.weights import sha256
from znnpy.machine import Machine
from znnpy.network import Network
from znnpy.network_result import MAPS
from znnpy.patches import Box, Columns
from znnpy.planner.run_plan import RunPlan
from znnpy.shapes import Vec3
from znnpy.trained import TrainedNetwork
from znnpy.volume.base import Volume
from znnpy.volume.journal import Settings
from znnpy.volume.mask import Mask
from znnpy.volume.output_names import OUTPUTS
from znnpy.volume.sample import Sample
from znnpy.volume.source import Predicted, Source
from znnpy.volume.statistics import statistics_record
from znnpy.volume.store import OutputArray


def job_of(
    trained: TrainedNetwork,
    volume: Volume,
    sample: Sample,
    roi: str,
    border: str,
    output_dtype: str,
    *,
    allow_nan: bool,
    fill_missing: float | None,
    stored: Mapping[str, Any],
    mask: Mask | None = None,
    time: int | None = None,
    scale: int | None = None,
) -> dict[str, Any]:
    """Return the identity of a run, which a resumed run must share.

    sample  of the volume
    stored  what `stored_as` says
    time    point of time that was asked for
    scale   resolution that was asked for: part of the identity where the name of the dataset does not tell it
    """
    named = {"time": time, "scale": None if volume.dataset else scale or None}
    filled = {} if fill_missing is None else {"fill_missing": str(fill_missing)}  # NaN too, which equals nothing
    return {
        "meaning": trained.network.meaning,
        "network": trained.network.sha256,
        "weights": sha256(trained.weights),
        "volume": {**volume.identity(sample), **{key: at for key, at in named.items() if at is not None}},
        "roi": roi,
        "border": border,
        "output_dtype": written_dtype(trained.network, output_dtype),
        **_windows_record(trained.network),
        "allow_nan": allow_nan,
        **filled,
        **stored,
        **({} if mask is None else {"mask": mask.identity()}),
        **statistics_record(trained.network),
    }


def written_dtype(network: Network, asked: str) -> str:
    """Return the dtype of an output: the one that was asked for, or that of labels."""
    return "uint8" if network.result.is_integer else asked


def _windows_record(network: Network) -> dict[str, Any]:
    """Return the windows and the result of a network, as far as they are not the usual ones."""
    windows = {} if network.windows is None else {"windows": network.windows.described}
    return windows if network.result == MAPS else {**windows, "result": network.result.described}


def stored_as(prefix: str | None, *, sharded: bool, multiscale: int) -> dict[str, Any]:
    """Return how an output is stored, as far as it is not the usual way."""
    return {
        **({} if prefix in (None, "zarr", "zarr3") else {"format": prefix}),
        **({"sharded": True} if sharded else {}),
        **({"multiscale": multiscale} if multiscale else {}),
    }


def columns_of(plan: RunPlan, network: Network) -> list[Columns]:
    """Return the columns that workers compute, to which the chunks of the output are fitted."""
    items: Columns = plan.work_items(network)
    if plan.sharing is None:
        return [items]
    cell = items[0].steps[0].write.size
    return [items, *(replace(worker.plan, output=cell).cover(network) for worker in plan.workers)]


def settings_of(only: Sequence[str], machine: Machine) -> Settings:
    """Return the settings that, besides the plan, decide the bytes of a run."""
    gpu = machine.gpu
    return {
        "only": sorted(only),
        "processor": machine.processor,  # numpy and FFTW choose their instructions by it
        "versions": {"znnpy": znnpy.__version__, **dict(machine.versions)},
        "gpu": None if gpu is None else {"name": gpu.name, "driver": gpu.driver, **dict(gpu.versions)},
    }


def arrays_of(network: Network, source: Source) -> tuple[OutputArray, ...]:
    """Return the arrays of an output, each with its position in the volume and in the specimen."""
    space = source.volume.space
    return tuple(
        OutputArray(
            (maps, *one.size),
            name,
            {
                "voxel_offset": np.array(one.offset, np.int64),
                "offset": np.array(one.offset, np.int64),  # replaced by a position where the resolution is known
                **({} if source.area is None else _lattice(one)),
            },
            None if space is None else space.behind(one.position, one.step),
        )
        for name, maps, one in zip(_names(network), network.output_maps, source.outputs, strict=True)
    )


def attributes_of(network: Network, source: Source, job: dict[str, Any], plan: RunPlan) -> dict[str, Any]:
    """Return the attributes that the arrays of an output share: how it was made."""
    several = {} if len(network.outputs) == 1 else {"outputs": json.dumps(_names(network))}
    padding = {} if source.area is None else {"pad_to_period": network.pad_to_period}
    return {
        "field_of_view": np.array(source.field_of_view, np.int64),
        "meaning": network.meaning,
        **padding,
        **several,
        "network": network.name,
        "network_sha256": network.sha256,
        "weights_sha256": job["weights"],
        "volume": json.dumps(job["volume"]),
        "roi": job["roi"],
        "border": job["border"],
        "plan": plan.to_json(),
        "precision": plan.precision,
        "znnpy_version": znnpy.__version__,
    }


def _lattice(one: Predicted) -> dict[str, Any]:
    """Return where the voxels of an output of a graph lie."""
    return {
        "voxel_position": np.array(one.position, np.float64),  # of the first voxel's centre, in the volume
        "voxel_step": np.array(one.step, np.float64),  # size of a voxel, in voxels of the volume
    }


def _names(network: Network) -> tuple[str, ...]:
    """Return the name of the array of each output in a file: after its node if there are several."""
    if len(network.outputs) == 1:
        return ("",)
    found: list[str] = []
    for tensor in network.outputs:
        name = f"{OUTPUTS}/{re.sub(r'[/.]', '_', network.names[tensor - 1])}"
        while name in found:
            name += "_"
        found.append(name)
    return tuple(found)


def roi_text(region: Box | None, size: Vec3) -> str:
    """Return a region in the one form `z0:z1,y0:y1,x0:x1`; empty for the whole volume."""
    if region is None or region == Box((0, 0, 0), size):
        return ""
    return ",".join(f"{lo}:{hi}" for lo, hi in zip(region.lo, region.hi, strict=True))
