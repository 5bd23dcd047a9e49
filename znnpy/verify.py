"""Check an output against the definition: recompute sampled voxels by literally sliding the window, in float64."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import VerifyError, VolumeError
from znnpy.formats.networks import read_network, shipped
from znnpy.formats.weights import sha256
from znnpy.kernels.reference import dense_by_sliding
from znnpy.network import Network
from znnpy.patches import Box
from znnpy.shapes import Vec3, add
from znnpy.trained import TrainedNetwork, load_trained
from znnpy.volume import open_volume
from znnpy.volume.store import store_for
from znnpy.volume.volume import Volume

BATCH_BYTES = 2**22  # of fields of view recomputed at a time, in float64 with the most maps: they stay in cache

Real = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """How far an output is from the definition, at the sampled voxels."""

    output: str
    samples: int
    worst: float  # largest |written - definition| of a voxel that is a number
    where: Vec3  # that voxel, (z, y, x) of the output
    channel: int  # that voxel's map
    written: float
    definition: float
    allowed: float  # the tolerance asked for, and half a step of the output's dtype
    dtype: str
    seconds: float

    def lines(self) -> list[str]:
        """In words, one line each."""
        step = "" if self.dtype == "float32" else f" (half a step of {self.dtype} included)"
        return [
            f"{self.output}: {self.samples} voxels recomputed by sliding the window in float64 ({self.seconds:.1f} s)",
            f"worst error {self.worst:.2e} at (z, y, x) = {self.where}, map {self.channel}: "
            f"{self.written:.8f} written, {self.definition:.8f} by definition; allowed {self.allowed:.2e}{step}",
        ]

    def as_json(self) -> dict[str, Any]:
        """For machines: plain dictionaries, numbers and text."""
        return asdict(self)


def verify(
    output: str | Path,
    volume: str | Path,
    *,
    network: str | Path | None = None,
    weights: str | Path | None = None,
    samples: int = 1000,
    seed: int = 0,
    tolerance: float = 1e-5,
) -> VerifyReport:
    """Recompute `samples` voxels of `output`, drawn with `seed`, from the field of view of each in `volume`.

    network    file or shipped name; default: the shipped network that the output names.
    weights    default: the file that the network names.
    tolerance  largest |written - definition| allowed. Outputs of float16 and uint8 may differ by half a step more:
               2^-11 of the value, and 1/510.

    Returns the worst voxel. VerifyError when it is beyond the tolerance, when NaN stands where the field of view holds
    numbers or the other way round, and when network, weights or volume are not those that made the output. VolumeError
    when a file cannot be read.
    """
    started = time.perf_counter()
    output = Path(output)
    with open_volume(output) as prediction:
        said = store_for(output).attributes_of(output)
        if not {"job", "network", "offset"} <= said.keys():
            raise VolumeError(f"{output} was not written by znnpy; give what `znnpy infer` wrote")
        job = json.loads(said["job"])
        trained = _trained(job, said["network"], output, network, weights)
        with open_volume(Path(volume), job["volume"]["dataset"] or None) as source:
            _check_volume(job, source, output)
            at = _positions(prediction.size, samples, seed)
            written = np.stack([_voxel(prediction, where) for where in at])
            corners = at + np.array(said["offset"]) - (np.array(trained.network.field_of_view) - 1) // 2
            exact = _by_definition(trained, source, corners)
    error, step = _errors(written, exact)
    sample, channel = (int(i) for i in np.unravel_index((error - step).argmax(), error.shape))
    report = VerifyReport(
        output=str(output),
        samples=samples,
        worst=float(error[sample, channel]),
        where=(int(at[sample, 0]), int(at[sample, 1]), int(at[sample, 2])),
        channel=channel,
        written=float(_values(written)[sample, channel]),
        definition=float(exact[sample, channel]),
        allowed=tolerance + float(step[sample, channel]),
        dtype=written.dtype.name,
        seconds=time.perf_counter() - started,
    )
    beyond = int((error > tolerance + step).any(axis=1).sum())
    if beyond:
        raise VerifyError(
            f"{beyond} of {samples} voxels are wrong; {report.lines()[1]}; check that the network, its weights and the "
            "volume are unchanged and predict again with --overwrite, or report the plan in the output's attributes"
        )
    return report


def _trained(
    job: dict[str, Any], name: str, output: Path, network: str | Path | None, weights: str | Path | None
) -> TrainedNetwork:
    """The network that made the output; VerifyError when what is given is another."""
    if network is None and name not in shipped():
        raise VerifyError(
            f"{output} was predicted with {name}, which does not ship with znnpy; give its file as --network"
        )
    trained = load_trained(read_network(name if network is None else network), weights)
    for what, given in (("network", trained.network.sha256), ("weights", sha256(trained.weights))):
        if given != job[what]:
            raise VerifyError(
                f"{output} was predicted with other {what}: digest {job[what][:12]} against {given[:12]} of what is "
                f"given; give the files that made it as --network and --weights"
            )
    return trained


def _check_volume(job: dict[str, Any], volume: Volume, output: Path) -> None:
    """VerifyError when the volume's shape, dtype or sampled content differ; a copy elsewhere is the same volume."""
    made, given = job["volume"], volume.identity()
    for field in ("shape", "dtype", "samples_sha256"):
        if made[field] != given[field]:
            raise VerifyError(
                f"{volume} is not the volume {output} was predicted from: {field} was {made[field]} and is "
                f"{given[field]}; give the volume as it was, or predict again with --overwrite"
            )


def _positions(size: Vec3, samples: int, seed: int) -> npt.NDArray[np.int64]:
    """Voxels drawn at random, (samples, 3), in the order in which they lie on disk."""
    at = np.random.default_rng(seed).integers(0, size, (samples, 3))
    return at[np.lexsort(at.T[::-1])]


def _by_definition(trained: TrainedNetwork, volume: Volume, corners: npt.NDArray[np.int64]) -> Real:
    """The plain network on each field of view: (samples, maps). `corners`: first voxel of each, volume coordinates."""
    network = trained.network
    batch = max(1, BATCH_BYTES // (8 * max(network.maps) * prod(network.field_of_view)))
    exact = [
        dense_by_sliding(network, trained.weights, np.stack([_crop(volume, network, at) for at in some]), [(0, 0, 0)])
        for some in (corners[i : i + batch] for i in range(0, len(corners), batch))
    ]
    return np.concatenate(exact)[:, 0]


def _crop(volume: Volume, network: Network, corner: npt.NDArray[np.int64]) -> Real:
    """One field of view, (z, y, x, c), normalised; mirrored beyond the volume's faces, NaN where it is not finite."""
    z, y, x = (
        np.pad(np.arange(n), fov, mode="reflect")[at + fov : at + 2 * fov]
        for n, fov, at in zip(volume.size, network.field_of_view, corner, strict=True)
    )
    box = Box((int(z.min()), int(y.min()), int(x.min())), (int(z.max()) + 1, int(y.max()) + 1, int(x.max()) + 1))
    stored = np.empty((volume.channels, *box.size), volume.dtype)
    volume.read(box, stored)
    inside = np.ix_(np.arange(volume.channels), z - box.lo[0], y - box.lo[1], x - box.lo[2])
    crop = stored[inside].astype(np.float64)
    crop[~np.isfinite(crop)] = np.nan
    channels_last = np.moveaxis(crop, 0, -1)
    if network.normalise is None:
        return channels_last
    return (channels_last - network.normalise.mean) / network.normalise.std


def _voxel(volume: Volume, at: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """All channels of one voxel."""
    lo = (int(at[0]), int(at[1]), int(at[2]))
    voxel = np.empty((volume.channels, 1, 1, 1), volume.dtype)
    volume.read(Box(lo, add(lo, (1, 1, 1))), voxel)
    return voxel[:, 0, 0, 0]


def _values(written: npt.NDArray[Any]) -> Real:
    """What the output's numbers mean: uint8 counts 0..255 for 0..1."""
    return written / 255.0 if written.dtype == np.uint8 else written.astype(np.float64)


def _errors(written: npt.NDArray[Any], exact: Real) -> tuple[Real, Real]:
    """|written - definition|, infinite where only one is a number, and half a step of the dtype; (samples, maps)."""
    if written.dtype == np.uint8:
        exact, step = np.clip(exact, 0, 1), np.full(exact.shape, 1 / 510)
    elif written.dtype == np.float16:
        step = np.maximum(2.0**-11 * np.abs(np.nan_to_num(exact)), 2.0**-25)
    else:
        step = np.zeros(exact.shape)
    values = _values(written)
    with np.errstate(invalid="ignore"):  # inf - inf
        error = np.abs(values - exact)
    error[np.isnan(values) & np.isnan(exact)] = 0.0
    error[np.isnan(error)] = np.inf
    return error, step
