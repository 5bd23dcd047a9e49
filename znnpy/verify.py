"""Check an output against the definition: recompute sampled voxels in float64 from what each depends on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite, prod
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import VerifyError
from znnpy.graph_voxels import GraphVoxels
from znnpy.kernels.reference import dense_by_sliding
from znnpy.messages import option
from znnpy.network import Network
from znnpy.nnunet.label_file import is_label_file
from znnpy.nnunet.names import model_of
from znnpy.option_declarations import function_of
from znnpy.option_values import Meaning
from znnpy.options import VerifyOptions
from znnpy.patches import Box
from znnpy.run_log import log_phase
from znnpy.shapes import Vec3, add
from znnpy.stated_job import check_volume, mask_of, place_of, trained_of
from znnpy.trained import TrainedNetwork
from znnpy.volume.base import MissingVoxels, Volume
from znnpy.volume.location import volume_location
from znnpy.volume.provenance import Provenance, array_names
from znnpy.volume.registry import open_volume
from znnpy.volume.written import dataset_of
from znnpy.window_voxels import WindowVoxels, result_of

# Largest allowed difference of a voxel, by precision: for fp32 its rounding, for the others ten times the rms
# error that a layer may have.
TOLERANCES = {"fp32": 1e-5, "tf32": 1e-2, "fp16": 5e-2, "bf16x2": 1e-4, "bf16": 5e-2}
BLOCK = 2**14  # samples judged at a time, so that memory does not grow with their number
HOW: Mapping[Meaning, str] = {
    "sliding": "by sliding the window",
    "whole": "from the part of the volume that each depends on",
    "windows": "from all windows around each",
}
BATCH_BYTES = 2**22  # fields of view recomputed at a time, in float64 with the most maps; fits the cache

Real = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The difference between an output and the definition at the sampled voxels."""

    output: str
    samples: int
    worst: float  # |written - definition| of the voxel with the largest error relative to the allowed one
    where: Vec3  # (z, y, x) of that voxel in the output
    channel: int  # map of that voxel
    written: float
    definition: float
    allowed: float  # error allowed there: `tolerance * magnitude`, plus half a step of the output's dtype
    tolerance: float
    magnitude: float  # size of the values there: the largest of 1, the rms of the map, and |definition|
    dtype: str
    precision: str | None  # the precision that `tolerance` belongs to; None where the caller gave a tolerance
    predicted_in: str  # the precision that the output states; only advice depends on it
    roi: str  # the region of the volume that the output covers, "z0:z1,y0:y1,x0:x1"; empty for the whole volume
    border: str
    seconds: float
    meaning: Meaning = "sliding"  # of the network
    dataset: str = ""  # array of that voxel; empty where there is one

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        parts = [f"{self.tolerance:.0e} times {self.magnitude:.3g}, the size of the values"] * (self.magnitude > 1)
        parts += ["the tolerance asked for" if self.precision is None else f"the tolerance of {self.precision}"]
        parts += [f"half a step of {self.dtype} included"] * (self.dtype != "float32")
        part = f"part {self.roi} of the volume" if self.roi else "the whole volume"
        of = f" of {self.dataset}" if self.dataset else ""
        how = f", border {self.border}" if self.meaning == "sliding" else ""
        return [
            f"{self.output}: {self.samples} voxels recomputed {HOW[self.meaning]} in float64 ({self.seconds:.1f} s)",
            f"the output covers {part}{how}",
            f"worst error {self.worst:.2e} at (z, y, x) = {self.where}, map {self.channel}{of}: "
            f"{self.written:.8f} written, {self.definition:.8f} by definition; allowed {self.allowed:.2e} "
            f"({'; '.join(parts)})",
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain dictionaries, numbers and text."""
        return asdict(self)


@function_of(VerifyOptions)
def verify(asked: VerifyOptions) -> VerifyReport:
    """Recompute sampled voxels of an output from the field of view of each in the volume.

    Those of a network that is computed whole are drawn in groups, since each may depend on a large part.

    OPTIONS

    Values round in proportion to their size, so the tolerance is multiplied by the largest of 1, |definition|, and the
    root mean square of the definition over up to 16384 samples of the same map. Outputs of float16 and uint8 may differ
    by half a step more: 2^-11 of the value, and 1/510.

    Returns the voxel nearest to its limit, or furthest beyond it. VerifyError if it is beyond; if NaN is written where
    the field of view holds numbers, or the reverse; if network, weights or volume are not those that made the output;
    or if its shape, dtype or offset do not follow from volume, region and border. VolumeError if a file cannot be read
    or an attribute is damaged. ValueError for samples or a tolerance that are not positive, an unknown precision, and a
    precision together with a tolerance.
    """
    return verify_as_asked(asked)


def verify_as_asked(asked: VerifyOptions) -> VerifyReport:
    """Return the report that `verify` returns for these options."""
    samples, output = asked.samples, volume_location(asked.output)
    if model_of(asked.network) is not None or (output.is_local and is_label_file(output.path)):
        raise VerifyError(
            f"{output} holds labels of a case of nnU-Net, which are made of the results of windows and placed among "
            "the voxels of its images, and cannot be verified; predict it again with "
            f"{option('paranoid', True)}, which checks windows as they are computed"
        )
    of_precision, allowed = _allowed(samples, asked.precision, asked.tolerance)
    started = time.perf_counter()
    with ExitStack() as stack:
        names = array_names(output)
        predictions = [stack.enter_context(open_volume(output, dataset_of(output, name))) for name in names]
        origin = Provenance.of(output, names)
        trained = trained_of(origin, output, asked)
        name = origin.job.volume.dataset or None if asked.dataset is None else asked.dataset
        absent, made = MissingVoxels(asked.fill_missing), origin.job.volume
        source = stack.enter_context(open_volume(asked.volume, name, absent, scale=made.scale, time=made.time))
        check_volume(origin.job, source, output)
        place = place_of(origin, names, predictions, source, trained.network, output)
        wanted = mask_of(origin.job, asked, place, output, stack)
        counts = [min(samples, prod(prediction.size)) for prediction in predictions]
        log_phase("opened", f"{output} and {source}")
        log_phase("running", f"{sum(counts)} voxels {HOW[trained.network.meaning]}")
        samples, beyond, worst, dataset = 0, 0, None, ""
        for number, (prediction, count) in enumerate(zip(predictions, counts, strict=True)):
            exactly: Callable[[npt.NDArray[np.int64]], Real]
            in_windows = trained.network if trained.network.meaning == "windows" else None
            if in_windows is not None:
                windows = WindowVoxels(trained, source, place.offset)
                blocks, exactly = windows.drawn(prediction.size, count, asked.seed), windows.at
            elif place.area is not None:
                graph = GraphVoxels(trained, source, number, place.area.regions[number].lo)
                blocks, exactly = graph.drawn(prediction.size, count, asked.seed), graph.at
            else:
                blocks = _positions(prediction.size, count, asked.seed)
                exactly = partial(at_voxels, trained, source, place.offset)
            inside = None if wanted is None else wanted.outputs[number].at
            judged, wrong, found = _judged(prediction, exactly, blocks, allowed, inside, in_windows)
            samples, beyond = samples + judged, beyond + wrong
            if worst is None or found.share > worst.share:
                worst, dataset = found, names[number]
        assert worst is not None, "an output has an array"
    report = VerifyReport(
        output=str(output),
        dataset=dataset,
        samples=samples,
        worst=worst.error,
        where=worst.where,
        channel=worst.channel,
        written=worst.written,
        definition=worst.definition,
        allowed=worst.allowed,
        tolerance=allowed,
        magnitude=worst.magnitude,
        dtype=origin.job.output_dtype,
        precision=of_precision,
        predicted_in=origin.precision,
        roi=origin.job.roi,
        border=origin.job.border,
        seconds=time.perf_counter() - started,
        meaning=trained.network.meaning,
    )
    log_phase("finished", f"{report.samples} voxels in {report.seconds:.1f} s")
    if beyond:
        raise VerifyError(f"{beyond} of {samples} voxels are wrong; {report.lines()[-1]}; {_advice(report)}")
    return report


def _judged(
    prediction: Volume,
    exactly: Callable[[npt.NDArray[np.int64]], Real],
    blocks: Iterator[npt.NDArray[np.int64]],
    allowed: float,
    inside: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.bool_]] | None = None,
    network: Network | None = None,
) -> tuple[int, int, Judged]:
    """Count the voxels of `prediction`, and those with more than the allowed error; find the block with the worst one.

    exactly  returns the maps (n, maps) at positions (n, 3) in the prediction by definition
    blocks   positions, at least one block
    allowed  tolerance for values around 1
    inside   returns which positions lie in the mask: all others must be zero; None: there is no mask
    network  that is computed in windows, of whose maps something else may be written; None: the maps are
    """
    samples, beyond, worst = 0, 0, None
    for at in blocks:
        written = np.stack([_voxel(prediction, where) for where in at])
        if network is not None and network.result.is_integer:
            written = written.astype(np.float64)
        if inside is None:
            exact = exactly(at) if network is None else result_of(exactly(at), network, written, allowed)
        else:
            exact, there = np.zeros(written.shape), inside(at)
            if there.any():
                found = exactly(at[there])
                exact[there] = found if network is None else result_of(found, network, written[there], allowed)
        judged = Judged.of(at, written, exact, allowed)
        if inside is not None and not there.all() and np.any(written[~there]):
            judged = Judged.of(at[~there], written[~there], exact[~there], float(np.finfo(np.float32).tiny))
        samples, beyond = samples + len(at), beyond + judged.beyond
        worst = judged if worst is None or judged.share > worst.share else worst
    assert worst is not None  # there is at least one sample
    return samples, beyond, worst


def _allowed(samples: int, precision: str | None, tolerance: float | None) -> tuple[str | None, float]:
    """Return the precision whose tolerance is allowed, None if the caller gave a tolerance, and that tolerance.

    ValueError: the arguments are not valid for `verify`.
    """
    if samples < 1:
        raise ValueError(f"{samples} samples show nothing: give 1 or more")
    if tolerance is not None and not (isfinite(tolerance) and tolerance > 0):
        raise ValueError(f"a tolerance must be positive and finite, not {tolerance}")
    if precision is not None and tolerance is not None:
        raise ValueError("a precision implies a tolerance: give one of them")
    if tolerance is not None:
        return None, tolerance
    return precision or "fp32", TOLERANCES[precision or "fp32"]


def _advice(report: VerifyReport) -> str:
    """Advise what to do about wrong voxels. The precision that an output claims must be requested to be allowed."""
    if report.precision == "fp32" and report.predicted_in != "fp32":
        return (
            f"the output says that it was predicted in {report.predicted_in}: if it was, allow "
            f"{TOLERANCES[report.predicted_in]:.0e} with {option('precision', report.predicted_in)}"
        )
    return (
        "check that the network, its weights and the volume are unchanged and predict again with "
        f"{option('overwrite', True)}, or report the plan in the output's attributes"
    )


@dataclass(frozen=True, slots=True)
class Judged:
    """Some samples compared with their limits: how many exceed them, and the worst one relative to its limit."""

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
        """Error as a share of the allowed error."""
        return self.error / self.allowed

    @classmethod
    def of(
        cls,
        at: npt.NDArray[np.int64],
        written: npt.NDArray[Any],
        exact: Real,
        tolerance: float,
        others: npt.NDArray[Any] | None = None,
    ) -> Judged:
        """Judge samples at `at` (n, 3) of the output, given what is written and what is exact, both (n, maps).

        others  other values of the output, (m, maps), if the samples are too few to show how large values are
        """
        error, step = _errors(written, exact)
        magnitude = magnitude_of(exact)
        if others is not None:
            known = _values(others)
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


def _positions(size: Vec3, samples: int, seed: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield `samples` different voxels, up to BLOCK at a time as (n, 3), in the order of the file.

    The voxels are divided into `samples` equal ranges and one is drawn from each, so all voxels are equally likely.
    """
    rng, voxels = np.random.default_rng(seed), prod(size)
    for first in range(0, samples, BLOCK):
        ends = [i * voxels // samples for i in range(first, min(first + BLOCK, samples) + 1)]
        yield np.stack(np.unravel_index(rng.integers(ends[:-1], ends[1:]), size), axis=1)


def magnitude_of(exact: Real) -> Real:
    """Return the size of the values that an error is compared with: the largest of 1, |value|, rms of the map."""
    known = np.nan_to_num(exact)
    count = np.maximum(1, np.isfinite(exact).sum(axis=0))
    rms: Real = np.sqrt(np.square(known).sum(axis=0) / count)
    return np.maximum(np.maximum(1.0, rms), np.abs(known))


def at_voxels(trained: TrainedNetwork, volume: Volume, offset: Vec3, at: npt.NDArray[np.int64]) -> Real:
    """Return the maps at positions of an output whose first voxel is at `offset` in the volume: (samples, maps)."""
    to_corner = np.array(offset) - (np.array(trained.network.field_of_view) - 1) // 2
    return by_definition(trained, volume, at + to_corner)


def by_definition(trained: TrainedNetwork, volume: Volume, corners: npt.NDArray[np.int64]) -> Real:
    """Apply the plain network to each field of view, given by its first voxel in `corners`: (samples, maps)."""
    network = trained.network
    batch = max(1, BATCH_BYTES // (8 * max(network.maps) * prod(network.field_of_view)))
    exact = [
        dense_by_sliding(network, trained.weights, np.stack([_crop(volume, network, at) for at in some]), [(0, 0, 0)])
        for some in (corners[i : i + batch] for i in range(0, len(corners), batch))
    ]
    return np.concatenate(exact)[:, 0]


def _crop(volume: Volume, network: Network, corner: npt.NDArray[np.int64]) -> Real:
    """Return one field of view, (z, y, x, c), normalised; mirrored beyond the volume, NaN where it is not finite."""
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
    """Return all channels of one voxel."""
    lo = (int(at[0]), int(at[1]), int(at[2]))
    voxel = np.empty((volume.channels, 1, 1, 1), volume.dtype)
    volume.read(Box(lo, add(lo, (1, 1, 1))), voxel)
    return voxel[:, 0, 0, 0]


def _values(written: npt.NDArray[Any]) -> Real:
    """Return the values that the stored numbers mean: uint8 counts 0..255 for 0..1."""
    return written / 255.0 if written.dtype == np.uint8 else written.astype(np.float64)


def _errors(written: npt.NDArray[Any], exact: Real) -> tuple[Real, Real]:
    """Return |written - definition|, inf if only one is a number, and half a step of the dtype; (samples, maps)."""
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
