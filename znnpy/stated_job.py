"""Check what is given to verify an output: its network, volume, mask, and place must be those that it states."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import prod

from znnpy.errors import ShapeError, VerifyError, ZnnpyError
from znnpy.formats.weights import sha256
from znnpy.job import arrays_of
from znnpy.messages import excerpt, option
from znnpy.network import Network
from znnpy.network_files import read_ensemble, shipped
from znnpy.options import VerifyOptions
from znnpy.shapes import text
from znnpy.trained import TrainedNetwork, load_trained
from znnpy.volume.base import MissingVoxels, Volume
from znnpy.volume.location import Location
from znnpy.volume.mask import WantedOutputs
from znnpy.volume.provenance import JobClaim, Provenance
from znnpy.volume.roi import parse_roi
from znnpy.volume.sliceable import open_given
from znnpy.volume.source import Source
from znnpy.volume.statistics import normalise_of

MOST_VOXELS = 2**28  # of a window that is computed again


def trained_of(origin: Provenance, output: Location, asked: VerifyOptions) -> TrainedNetwork:
    """Return the network that made the output; VerifyError if another one is given, or another meaning of it."""
    network, meaning = asked.network, origin.job.meaning
    if asked.meaning is not None and meaning not in (None, asked.meaning):
        raise VerifyError(
            f"{output} was predicted with {option('meaning', meaning)}; leave out {option('meaning', asked.meaning)}"
        )
    if network is None and origin.network not in shipped():
        raise VerifyError(
            f"{output} was predicted with {excerpt(origin.network)}, which does not ship with znnpy; give its file as "
            f"{option('network')}"
        )
    file = read_ensemble(origin.network if network is None else network, asked.meaning)
    if meaning == "windows":
        _check_windows(file.network, origin.job, output)
        network_in = replace(file.network, asked_meaning=meaning, windows=origin.job.windows, result=origin.job.result)
        file = replace(file, network=network_in)
    elif meaning == "whole" or (meaning == "sliding" and file.network.why_not_sliding is None):
        file = replace(file, network=replace(file.network, asked_meaning=meaning, windows=None))
    trained = load_trained(file, asked.weights)
    made = {"network": origin.job.network, "weights": origin.job.weights}
    for what, given in (("network", trained.network.sha256), ("weights", sha256(trained.weights))):
        if given != made[what]:
            raise VerifyError(
                f"{output} was predicted with other {what}: digest {made[what][:12]} against {given[:12]} of what is "
                f"given; give the files that made it as {option('network')} and {option('weights')}"
            )
    return _normalised_as_before(trained, origin.job, output)


def _check_windows(network: Network, job: JobClaim, output: Location) -> None:
    """Raise VerifyError for windows or a result that no run writes."""
    if job.windows is None:
        raise VerifyError(f"{output} was predicted in windows, and does not state them; predict it again")
    if prod(job.windows.size) > MOST_VOXELS:
        raise VerifyError(
            f"{output} states windows of {excerpt(text(job.windows.size), 60)}, more than the {MOST_VOXELS:,} voxels "
            "that are computed again; predict it again"
        )
    try:
        job.result.check([network.maps[tensor] for tensor in network.outputs])
    except ShapeError as error:
        raise VerifyError(f"{output} states a result that its network does not give: {error}") from None


def _normalised_as_before(trained: TrainedNetwork, job: JobClaim, output: Location) -> TrainedNetwork:
    """Return the network with the statistics of the volume that the output states, if it has such."""
    network = trained.network
    if network.statistics is None:
        return trained
    made = normalise_of(network, job.statistics)
    if made is None:
        raise VerifyError(
            f"{output} does not state the statistics of its volume by which {excerpt(network.name, 60)} normalises; "
            f"predict it again with {option('overwrite', True)}"
        )
    return replace(trained, network=replace(network, normalise=made))


def check_volume(job: JobClaim, volume: Volume, output: Location) -> None:
    """Raise VerifyError if the volume's shape, dtype or sampled content differ. Its path does not matter."""
    made, given = job.volume, volume.identity()
    for field, before, now in (
        ("shape", list(made.shape), given["shape"]),
        ("dtype", made.dtype, given["dtype"]),
        ("samples_sha256", made.samples_sha256, given["samples_sha256"]),
    ):
        if before != now:
            raise VerifyError(
                f"{volume} is not the volume {output} was predicted from: {field} was {excerpt(before)} and is {now}; "
                f"give the volume as it was, or another {option('dataset')}, or predict again with "
                f"{option('overwrite', True)}"
            )


def place_of(
    origin: Provenance,
    names: Sequence[str],
    predictions: Sequence[Volume],
    volume: Volume,
    network: Network,
    output: Location,
) -> Source:
    """Return what was predicted; VerifyError if arrays, shape, dtype or offset do not follow from it."""
    job = origin.job
    try:
        region = parse_roi(job.roi, volume.size) if job.roi else None
        slides = network.meaning == "sliding"
        source = Source(volume, roi=region, border=job.border, network=network, allow_nan=slides)
    except ZnnpyError as error:
        raise VerifyError(f"{output} names a region that cannot have been predicted: {error}") from None
    of = f"region {job.roi or 'of the whole volume'}, border {job.border} and the network's field of view"
    if not slides:
        of = f"region {job.roi or 'of the whole volume'} and the network"
    arrays = arrays_of(network, source)
    facts: list[tuple[str, str, object, object]] = [("", "arrays", tuple(names), tuple(one.name for one in arrays))]
    for array, prediction, offset, one in zip(arrays, predictions, origin.offsets, source.outputs, strict=False):
        facts += [
            (array.name, "shape (c, z, y, x)", prediction.shape, array.shape),
            (array.name, "offset", offset, one.offset),
            (array.name, "dtype", prediction.dtype.name, job.output_dtype),
        ]
    for name, what, found, due in facts:
        if found != due:
            there = f"{output}: {name}" if name else f"{output}"
            raise VerifyError(
                f"{there} has {what} {excerpt(found)}, and {due} follows from {of}: it was changed or cut after it "
                f"was predicted; predict it again with {option('overwrite', True)}"
            )
    return source


def mask_of(
    job: JobClaim, asked: VerifyOptions, source: Source, output: Location, stack: ExitStack
) -> WantedOutputs | None:
    """Open the mask of an output; VerifyError if it has none, or another one."""
    if asked.mask is None:
        if job.mask is None:
            return None
        raise VerifyError(
            f"{output} was predicted with a mask of {text(job.mask.shape[1:])} voxels, outside of which it is zero; "
            f"give it as {option('mask')}"
        )
    if job.mask is None:
        raise VerifyError(f"{output} was predicted without a mask; leave out {option('mask')}")
    mask = stack.enter_context(open_given(asked.mask, None, MissingVoxels()))
    wanted = WantedOutputs.of(mask, source)
    if wanted.mask.digest != job.mask.blocks_sha256:
        raise VerifyError(
            f"{mask} is not the mask {output} was predicted with: its digest is {wanted.mask.digest[:12]}, and that of "
            f"the mask was {job.mask.blocks_sha256[:12]}; give the mask as it was"
        )
    return wanted
