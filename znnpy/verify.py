"""Check an output against the definition: recompute sampled voxels by literally sliding the window, in float64."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import isfinite, prod
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

# Largest difference of one voxel, by the precision of the prediction: of fp32 its rounding, of the others ten times the
# rms error that a layer may have.
TOLERANCES = {"fp32": 1e-5, "tf32": 1e-2, "fp16": 5e-2}
BLOCK = 2**14  # samples judged at a time: memory does not grow with their number
BATCH_BYTES = 2**22  # of fields of view recomputed at a time, in float64 with the most maps: they stay in cache

Real = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """How far an output is from the definition, at the sampled voxels."""

    output: str
    samples: int
    worst: float  # |written - definition| where it is the largest part, or multiple, of what is allowed
    where: Vec3  # that voxel, (z, y, x) of the output
    channel: int  # that voxel's map
    written: float
    definition: float
    allowed: float  # there: `tolerance * magnitude`, and half a step of the output's dtype
    tolerance: float
    magnitude: float  # there: the largest of 1, the rms of its map, and |definition|
    dtype: str
    precision: str  # that it was predicted in
    seconds: float

    def lines(self) -> list[str]:
        """In words, one line each."""
        parts = [f"{self.tolerance:.0e} times {self.magnitude:.3g}, the size of the values"] * (self.magnitude > 1)
        parts += [f"predicted in {self.precision}"] * (self.precision != "fp32")
        parts += [f"half a step of {self.dtype} included"] * (self.dtype != "float32")
        how = f" ({'; '.join(parts)})" if parts else ""
        return [
            f"{self.output}: {self.samples} voxels recomputed by sliding the window in float64 ({self.seconds:.1f} s)",
            f"worst error {self.worst:.2e} at (z, y, x) = {self.where}, map {self.channel}: "
            f"{self.written:.8f} written, {self.definition:.8f} by definition; allowed {self.allowed:.2e}{how}",
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
    tolerance: float | None = None,
) -> VerifyReport:
    """Recompute `samples` voxels of `output`, drawn with `seed`, from the field of view of each in `volume`.

    network    file or shipped name; default: the shipped network that the output names.
    weights    default: the file that the network names.
    samples    of more than the output has, each of its voxels is recomputed once.
    tolerance  largest |written - definition| allowed of values around 1 and smaller; default: that of the precision
               that the output says it was predicted in (TOLERANCES). Larger values round in proportion to their size,
               so it is multiplied by the largest of 1, |definition|, and the root mean square of the definition over
               up to 16384 samples of the same map. Outputs of float16 and uint8 may differ by half a step more: 2^-11
               of the value, and 1/510.

    Returns the voxel nearest to its limit, or furthest beyond. VerifyError when it is beyond, when NaN stands where the
    field of view holds numbers or the other way round, and when network, weights or volume are not those that made the
    output. VolumeError when a file cannot be read. ValueError for samples or a tolerance that are not positive.
    """
    if samples < 1:
        raise ValueError(f"{samples} samples show nothing: give 1 or more")
    if tolerance is not None and not (isfinite(tolerance) and tolerance > 0):
        raise ValueError(f"a tolerance must be positive and finite, not {tolerance}")
    started, output = time.perf_counter(), Path(output)
    worst, beyond = None, 0
    with open_volume(output) as prediction:
        said = store_for(output).attributes_of(output)
        if not {"job", "network", "offset"} <= said.keys():
            raise VolumeError(f"{output} was not written by znnpy; give what `znnpy infer` wrote")
        precision = _precision(said, output)
        tolerance = TOLERANCES[precision] if tolerance is None else tolerance
        job = json.loads(said["job"])
        trained = _trained(job, said["network"], output, network, weights)
        to_corner = np.array(said["offset"]) - (np.array(trained.network.field_of_view) - 1) // 2
        samples = min(samples, prod(prediction.size))
        with open_volume(Path(volume), job["volume"]["dataset"] or None) as source:
            _check_volume(job, source, output)
            for at in _positions(prediction.size, samples, seed):
                written = np.stack([_voxel(prediction, where) for where in at])
                judged = Judged.of(at, written, by_definition(trained, source, at + to_corner), tolerance)
                beyond += judged.beyond
                worst = judged if worst is None or judged.share > worst.share else worst
    assert worst is not None  # of one sample or more
    report = VerifyReport(
        output=str(output),
        samples=samples,
        worst=worst.error,
        where=worst.where,
        channel=worst.channel,
        written=worst.written,
        definition=worst.definition,
        allowed=worst.allowed,
        tolerance=tolerance,
        magnitude=worst.magnitude,
        dtype=prediction.dtype.name,
        precision=precision,
        seconds=time.perf_counter() - started,
    )
    if beyond:
        raise VerifyError(
            f"{beyond} of {samples} voxels are wrong; {report.lines()[1]}; check that the network, its weights and the "
            "volume are unchanged and predict again with --overwrite, or report the plan in the output's attributes"
        )
    return report


@dataclass(frozen=True, slots=True)
class Judged:
    """Some samples held to their limits: how many are beyond, and the one nearest to its limit or furthest beyond."""

    beyond: int
    where: Vec3
    channel: int
    written: float
    definition: float
    error: float
    allowed: float
    magnitude: float

    @property
    def share(self) -> float:
        """Of what is allowed."""
        return self.error / self.allowed

    @classmethod
    def of(
        cls,
        at: npt.NDArray[np.int64],
        written: npt.NDArray[Any],
        exact: Real,
        tolerance: float,
        beside: npt.NDArray[Any] | None = None,
    ) -> Judged:
        """Samples at `at` (n, 3) of the output: what stands there and what should, both (n, maps).

        beside  other values of the output, (m, maps), where the samples are too few to tell how large values are
        """
        error, step = _errors(written, exact)
        magnitude = magnitude_of(exact)
        if beside is not None:
            known = _values(beside)
            magnitude = np.maximum(magnitude, magnitude_of(np.where(np.isfinite(known), known, 0.0)).min(axis=0))
        allowed = tolerance * magnitude + step
        sample, channel = (int(i) for i in np.unravel_index((error / allowed).argmax(), error.shape))
        z, y, x = (int(i) for i in at[sample])
        return cls(
            beyond=int((error > allowed).any(axis=1).sum()),
            where=(z, y, x),
            channel=channel,
            written=float(_values(written)[sample, channel]),
            definition=float(exact[sample, channel]),
            error=float(error[sample, channel]),
            allowed=float(allowed[sample, channel]),
            magnitude=float(magnitude[sample, channel]),
        )


def _precision(said: Mapping[str, Any], output: Path) -> str:
    """What the output was predicted in; VolumeError when it is none of TOLERANCES."""
    precision = str(said.get("precision", "fp32"))  # outputs of versions without a GPU do not say it
    if precision not in TOLERANCES:
        raise VolumeError(
            f"{output} says it was predicted in {precision!r}, which this version does not know; verify it with the "
            "version that wrote it"
        )
    return precision


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


def _positions(size: Vec3, samples: int, seed: int) -> Iterator[npt.NDArray[np.int64]]:
    """`samples` different voxels, up to BLOCK of them at a time as (n, 3), in the order in which they lie on disk.

    The voxels are cut into as many equal stretches, and one is drawn from each: every voxel is as likely as any.
    """
    rng, voxels = np.random.default_rng(seed), prod(size)
    for first in range(0, samples, BLOCK):
        ends = [i * voxels // samples for i in range(first, min(first + BLOCK, samples) + 1)]
        yield np.stack(np.unravel_index(rng.integers(ends[:-1], ends[1:]), size), axis=1)


def magnitude_of(exact: Real) -> Real:
    """How large the values are that an error is held against: the largest of 1, |value|, rms of the map; as `exact`."""
    known = np.nan_to_num(exact)
    count = np.maximum(1, np.isfinite(exact).sum(axis=0))
    rms: Real = np.sqrt(np.square(known).sum(axis=0) / count)
    return np.maximum(np.maximum(1.0, rms), np.abs(known))


def by_definition(trained: TrainedNetwork, volume: Volume, corners: npt.NDArray[np.int64]) -> Real:
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
