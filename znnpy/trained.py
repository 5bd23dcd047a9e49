"""A network with its weights, to call on numpy arrays."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import NetworkFileError
from znnpy.formats.networks import NetworkFile, read_network
from znnpy.formats.weights import read_weights
from znnpy.kernels.crew import Crew
from znnpy.network import ConvWeights, Network
from znnpy.patches import Box
from znnpy.planner.memory import baseline_bytes
from znnpy.planner.plan import Plan
from znnpy.planner.search import make_plan
from znnpy.run import pipeline
from znnpy.run.choice import columns_only
from znnpy.run.devices import Site, check_device_words, site_for
from znnpy.run.session import Session
from znnpy.run.wisdom import wisdom_kept
from znnpy.shapes import FLOAT32, Vec3
from znnpy.volume.array import ArrayVolume
from znnpy.volume.source import Source

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Result:
    """An output in memory, for the pipeline to write to."""

    array: npt.NDArray[np.float32]  # (maps, z, y, x)
    done: frozenset[int] = frozenset()

    @property
    def dtype(self) -> np.dtype[np.float32]:
        return self.array.dtype

    def write(self, box: Box, voxels: npt.NDArray[np.float32]) -> None:
        self.array[(slice(None), *box.slices)] = voxels

    def finish_column(self, index: int) -> None:
        """Nothing to record: what is in memory ends with the process."""


@dataclass(frozen=True)
class TrainedNetwork:
    """Layers and weights. Calling it gives the dense prediction of an array."""

    network: Network
    weights: tuple[ConvWeights, ...]

    def __call__(
        self,
        array: npt.NDArray[Any],
        *,
        border: str = "valid",
        ram: int | str | None = None,
        threads: int | None = None,
        patch: Vec3 | None = None,
        only: str | Sequence[str] = (),
        cover: str | None = None,
        depth_first: bool = True,
        device: str = "auto",
        vram: int | str | None = None,
        precision: str | None = None,
    ) -> npt.NDArray[np.float32]:
        """Dense prediction of a volume that fits into memory.

        array    (z, y, x) or (c, z, y, x), any integer or float dtype: grey values, before the network's `normalise`.
        border   "valid": the output is field of view - 1 smaller; "reflect": as large as the input.
        ram      limit for the whole process, bytes or "2G"; threads, patch, only, cover,
                 depth_first, device, vram, precision: as for `znnpy.infer`.
        Returns  (maps, z, y, x) float32.

        ShapeError when the array is smaller than the field of view, VolumeError for a dtype or values that cannot be
        used, NoPlanError when nothing fits into `ram` or `vram`, DeviceError when there is no GPU for device "gpu".
        """
        meant = check_device_words(device, vram, precision, (only,) if isinstance(only, str) else only)
        volume = ArrayVolume(array)
        source = Source(volume, roi=None, border=border, network=self.network, allow_nan=False)

        result_bytes = FLOAT32 * self.network.output_channels * prod(source.output)

        def make(site: Site) -> Plan:
            limits = site.limits(ram, threads, vram)
            return make_plan(
                self.network,
                source.output,
                site.machine,
                limits,
                itemsize_in=volume.dtype.itemsize,
                itemsize_out=4,
                patch=patch,
                only=only,
                columns=columns_only(cover),
                depth_first=depth_first,
                baseline=baseline_bytes() + site.later_bytes + result_bytes,
                rates=site.rates(self.network, limits),
                **site.words(),
            )

        with ExitStack() as stack:
            site, plan = stack.enter_context(site_for(make, meant, vram, precision))
            result = _Result(np.empty((self.network.output_channels, *source.output), np.float32))
            crew = stack.enter_context(Crew(plan.crew))
            with wisdom_kept(site.machine, plan.seconds) as wisdom:
                session = stack.enter_context(Session(plan, self.network, self.weights, crew, device=site.gpu))
            for sentence in (*site.sentences, *wisdom.sentences):
                _log.info("%s", sentence)
            pipeline.run(session, crew, source, result, plan.cover(self.network))
        return result.array


def load_network(where: str | Path, weights: str | Path | None = None) -> TrainedNetwork:
    """Read a network file (.yaml, .znni, or the name of one that ships) and its weights.

    `weights` overrides the file that the network names. NetworkFileError says what is wrong with either.
    """
    return load_trained(read_network(where), weights)


def load_trained(file: NetworkFile, weights: str | Path | None = None) -> TrainedNetwork:
    """The network of `file` with `weights`, or with those that the file names."""
    path = Path(weights) if weights is not None else file.weights
    if path is not None:
        return TrainedNetwork(file.network, read_weights(path, file.network))
    if not file.network.convolutions:
        return TrainedNetwork(file.network, ())
    also = "" if file.path.suffix == ".znni" else ", or name it in the network file (`weights: FILE.npz`)"
    raise NetworkFileError(f"{file.path} names no weights, and none were given; give --weights FILE.npz{also}")
