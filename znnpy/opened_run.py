"""Open what a run reads (network, volume, mask), check that it fits together, and say what it will write."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from znnpy.costs.store import CostStore
from znnpy.errors import OutputError
from znnpy.job import arrays_of, job_of, roi_text, stored_as
from znnpy.machine import limits_of, this_machine
from znnpy.messages import option
from znnpy.network_files import read_asked
from znnpy.options import InferOptions
from znnpy.patches import Box
from znnpy.run.asked import AskedDevices, devices_asked
from znnpy.run_log import log_phase
from znnpy.shapes import text
from znnpy.trained import TrainedNetwork, load_trained
from znnpy.volume.base import MissingVoxels, Volume
from znnpy.volume.chunk_layers import check_unpacking
from znnpy.volume.location import Location, path_of
from znnpy.volume.mask import Mask, WantedOutputs
from znnpy.volume.output import Mode
from znnpy.volume.output_target import mode_of, output_for, prefix_of, target_of
from znnpy.volume.roi import parse_roi
from znnpy.volume.run_output import RunOutput
from znnpy.volume.sample import sample_of
from znnpy.volume.sliceable import open_given
from znnpy.volume.source import Source
from znnpy.volume.statistics import with_statistics
from znnpy.volume.store import OutputArray

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NamedRun:
    """A run as its options name it, before its volume is opened.

    trained      network and weights
    devices      that are asked for
    costs        measured speeds of the machine
    inputs       files that the output must not replace, by their role
    destination  of the output
    """

    asked: InferOptions
    trained: TrainedNetwork
    devices: AskedDevices
    costs: CostStore
    inputs: dict[str, Path | Collection[Path] | None]
    destination: Path | Location

    @property
    def mode(self) -> Mode:
        """How the output begins."""
        return mode_of(overwrite=self.asked.overwrite, resume=self.asked.resume)


def named_run(asked: InferOptions) -> NamedRun:
    """Read the network and the weights that options name; refuse options that do not go together."""
    mode_of(overwrite=asked.overwrite, resume=asked.resume)
    if asked.allow_nan and asked.output_dtype == "uint8":
        raise OutputError(
            f"uint8 has no NaN to write where the volume holds one; choose {option('output_dtype', 'float32')} or "
            f"{option('output_dtype', 'float16')}"
        )
    costs = CostStore(asked.costs, calibrate=asked.calibrate)
    devices = devices_asked(asked)  # conflicting options are refused before the network is read
    named = read_asked(asked.network, asked)
    trained = load_trained(named, asked.weights, asked.ram)
    inputs: dict[str, Path | Collection[Path] | None] = {
        "volume": path_of(asked.volume),
        "network": named.paths,
        "weights": [one.weights for one in (named.members or (named,)) if one.weights is not None]
        if asked.weights is None
        else Path(asked.weights),
        "plan": Path(asked.plan) if isinstance(asked.plan, str | Path) else None,
        "costs": costs.file,
        "mask": path_of(asked.mask),
        "trace": None if asked.trace is None else Path(asked.trace),
    }
    destination = target_of(asked.volume, asked.out, trained.network.name)
    return NamedRun(asked, trained, replace(devices, device=costs.meant(devices.device)), costs, inputs, destination)


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """A run whose inputs are open.

    trained  network and weights, with the statistics of the volume where the network asks for them
    volume   that is read
    absent   what is read in place of voxels that are missing
    source   input patches of the volume
    region   of the volume that was asked for; None: all of it
    wanted   where outputs are wanted; None: everywhere
    job      identity of the run
    arrays   of the output
    dtype    of the output
    doubts   sentences on what is odd
    """

    named: NamedRun
    trained: TrainedNetwork
    volume: Volume
    absent: MissingVoxels
    source: Source
    region: Box | None
    wanted: WantedOutputs | None
    job: dict[str, Any]
    arrays: tuple[OutputArray, ...]
    dtype: np.dtype[Any]
    doubts: tuple[str, ...]

    @property
    def asked(self) -> InferOptions:
        """The options of the run."""
        return self.named.asked

    def reopened(self) -> Volume:
        """Open the volume once more."""
        return _asked_volume(self.asked, self.absent)

    def output(self) -> RunOutput:
        """Return the output that the options name."""
        asked, out = self.asked, self.asked.out
        if out is not None and not isinstance(out, str | os.PathLike):
            self.source.check_one_size(self.trained.network, f"give a path as {option('out')}")
        return output_for(
            out,
            self.named.destination,
            asked.volume,
            inputs=self.named.inputs,
            arrays=self.arrays,
            dtype=self.dtype,
            mode=self.named.mode,
            job=self.job,
            sharded=asked.sharded,
            multiscale=asked.multiscale,
            mask=asked.mask,
        )


@contextmanager
def opened_run(named: NamedRun, statistics: object = None, mask: Mask | None = None) -> Iterator[OpenedRun]:
    """Open the volume and the mask of a run.

    statistics  of the volume, that an earlier part of the run took; None: they are taken here, if they are needed
    mask        that was read before; None: it is read here, if one is asked for
    """
    asked, trained = named.asked, named.trained
    absent = MissingVoxels(asked.fill_missing, asked.missing_chunks)
    with ExitStack() as stack:
        opened = stack.enter_context(_asked_volume(asked, absent))
        named.inputs["source of the volume"] = opened.files
        log_phase("opened", f"{opened}: {text(opened.size)} voxels of {opened.dtype}, network {trained.network.name}")
        region = parse_roi(asked.roi, opened.size, opened.space, opened) if asked.roi else None
        if trained.network.statistics is not None:
            trained = replace(trained, network=with_statistics(trained.network, opened, statistics))
        source = Source(opened, roi=region, border=asked.border, network=trained.network, allow_nan=asked.allow_nan)
        check_unpacking(opened, limits_of(this_machine(), asked.ram).ram_bytes)
        sample = sample_of(opened)
        wanted = None
        if asked.mask is not None:
            laid = mask.volume if mask else stack.enter_context(open_given(asked.mask, None, MissingVoxels()))
            named.inputs["mask"] = laid.files
            wanted = WantedOutputs.of(laid, source, mask)
        job = job_of(
            trained,
            opened,
            sample,
            roi_text(region, opened.size),
            asked.border,
            asked.output_dtype,
            allow_nan=asked.allow_nan,
            fill_missing=asked.fill_missing,
            stored=stored_as(prefix_of(asked.out), sharded=asked.sharded, multiscale=asked.multiscale),
            mask=None if wanted is None else wanted.mask,
            time=asked.time,
            scale=asked.scale,
        )
        yield OpenedRun(
            named,
            trained,
            opened,
            absent,
            source,
            region,
            wanted,
            job,
            arrays_of(trained.network, source),
            np.dtype(job["output_dtype"]),
            (*sample.doubts(trained.network), *(() if wanted is None else wanted.doubts())),
        )


def _asked_volume(asked: InferOptions, absent: MissingVoxels) -> Volume:
    """Open the volume that the options name."""
    return open_given(asked.volume, asked.dataset, absent, scale=asked.scale, time=asked.time)
