"""Describe a volume on one screen, and what a network would make of it: `znnpy info`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from znnpy.errors import ShapeError, VolumeError
from znnpy.messages import excerpt
from znnpy.network import Network
from znnpy.network_files import DEFAULT, read_network
from znnpy.option_values import BORDERS, Border
from znnpy.options import InfoOptions
from znnpy.shapes import FLOAT32, Vec3, text
from znnpy.units import human_bytes
from znnpy.volume.about import About, Inside
from znnpy.volume.base import Volume
from znnpy.volume.lengths import short_name
from znnpy.volume.registry import format_of, open_volume
from znnpy.volume.sample import Greys, sample_of
from znnpy.volume.source import Source
from znnpy.volume.space import Space

MOST_LISTED = 12  # arrays or scales
NAME = 60  # characters of a name
ALIGNED = 1e-3  # tilt of an axis that is not worth a word
OPTION = "--"  # before the names of options in the command that is printed


@dataclass(frozen=True, slots=True)
class Fit:
    """The outputs that `infer` would give of a volume for a network.

    outputs  for each border that applies, the voxels of every output, or why there are none
    refused  why the network does not take the volume; empty: it does
    doubts   sentences about the grey values
    command  the command line
    """

    network: str
    outputs: dict[Border, tuple[Vec3, ...] | str]
    refused: str
    doubts: tuple[str, ...]
    command: str


@dataclass(frozen=True, slots=True)
class VolumeInfo:
    """The description of a volume. Axes are (z, y, x), or (c, z, y, x)."""

    name: str
    dataset: str
    format: str
    axes: str  # of the stored array
    stored_shape: tuple[int, ...]
    channels: int
    size: Vec3
    dtype: str
    nbytes: int
    stored_bytes: int | None  # None: it is not known
    chunk: Vec3
    times: int | None  # number of points of time; None: there is no axis of time
    about: About
    space: Space | None
    greys: tuple[Greys | None, ...]  # of sampled voxels, for each channel
    fit: Fit

    def lines(self) -> list[str]:
        """Return the description as lines of text."""
        about = self.about
        channels = f"{self.channels:,} channel{'s' if self.channels != 1 else ''}"
        z, y, x = self.size
        stored = "" if self.stored_bytes is None else f", {human_bytes(self.stored_bytes)} stored"
        lines = [
            f"volume     {excerpt(self.name)}{f': {excerpt(self.dataset, NAME)}' if self.dataset else ''}",
            f"format     {excerpt(self.format, NAME)}",
            f"voxels     z {z:,}, y {y:,}, x {x:,}; {channels}; {self.dtype}; stored as "
            f"({excerpt(self.axes, NAME)}) = {self.stored_shape}",
            f"bytes      {human_bytes(self.nbytes)}{stored}",
            f"chunks     {self._chunks()}",
            f"position   {placed(self.space)}",
        ]
        if self.times is not None and self.times > 1:
            lines.append(f"time       {self.times:,} points")
        lines += _listed("scales", about.scales) + _listed("inside", about.datasets)
        lines.append(f"values     {'; '.join(map(_grey, self.greys[:3]))} in sampled voxels")
        lines += [f"note       {excerpt(note)}" for note in (*about.notes, *turned(self.space))]
        return lines + self._fit()

    def _chunks(self) -> str:
        packed = excerpt(self.about.compression, NAME)
        if self.about.parts:
            return f"{self.about.parts}; {packed or 'not compressed'}"
        if self.chunk == (1, 1, 1):
            return f"none: voxels lie in one row{f', compressed as a whole by {packed}' if packed else ''}"
        shard = f", in files of {'x'.join(map(str, self.about.shard))}" if self.about.shard else ""
        return f"{text(self.chunk)} voxels{shard}; {packed or 'not compressed'}"

    def _fit(self) -> list[str]:
        fit = self.fit
        network = f"network    {excerpt(fit.network, NAME)}"
        if fit.refused:
            return [f"{network} does not take it: {fit.refused}"]
        lines = [network]
        for border, found in fit.outputs.items():
            if isinstance(found, str):
                lines.append(f"output     border {border}: none, since {found}")
                continue
            nbytes = human_bytes(FLOAT32 * sum(map(prod, found)))
            sizes = ", ".join(text(size) for size in found)
            lines.append(f"output     border {border}: {sizes} voxels, {nbytes} of float32 for each map")
        lines += [f"warning    {doubt}" for doubt in fit.doubts]
        return [*lines, f"command    {fit.command}"]

    def as_json(self) -> dict[str, Any]:
        """Return the description as plain dictionaries, numbers and text."""
        return {**asdict(self), "position": placed(self.space)}


def info_as_asked(asked: InfoOptions) -> VolumeInfo:
    """Describe a volume; VolumeError if it cannot be read, MissingExtraError if a package for its format is missing."""
    network = read_network(asked.network, None).network
    with open_volume(asked.volume, asked.dataset, scale=asked.scale, time=asked.time) as volume:
        about, sample = volume.about(), sample_of(volume)
        outputs, refused = _outputs(volume, network)
        doubts = () if refused else sample.doubts(network)
        fit = Fit(network.name, outputs, refused, doubts, _command(asked))
        return VolumeInfo(
            name=str(volume.location),
            dataset=volume.dataset,
            format=about.format or format_of(volume.location).name,
            axes=",".join(_axes(volume)),
            stored_shape=volume.arranged.stored,
            channels=volume.channels,
            size=volume.size,
            dtype=volume.dtype.name,
            nbytes=prod(volume.shape) * volume.dtype.itemsize,
            stored_bytes=volume.stored()[0] if volume.location.is_local else None,
            chunk=volume.chunk_size,
            times=volume.arranged.times,
            about=about,
            space=volume.space,
            greys=sample.channels,
            fit=fit,
        )


def _axes(volume: Volume) -> list[str]:
    """Return the names of the stored axes; 1 for those that a volume does not have."""
    places = {axis: name for axis, name in zip(volume.arranged.order, "czyx", strict=True) if axis is not None}
    return [places.get(axis, "1") for axis in range(len(volume.arranged.stored))]


def _outputs(volume: Volume, network: Network) -> tuple[dict[Border, tuple[Vec3, ...] | str], str]:
    """Return the outputs of a network for each border, and why it takes the volume in none."""
    found: dict[Border, tuple[Vec3, ...] | str] = {}
    for border in BORDERS if network.meaning == "sliding" else BORDERS[:1]:
        try:
            source = Source(volume, roi=None, border=border, network=network, allow_nan=False)
        except VolumeError as error:
            return {}, str(error)
        except ShapeError as error:
            found[border] = str(error)
        else:
            found[border] = tuple(one.size for one in source.outputs)
    return found, ""


def _command(asked: InfoOptions) -> str:
    """Return the command line that predicts the volume."""
    words = ["znnpy", "infer", str(asked.volume)]
    if asked.network != DEFAULT and isinstance(asked.network, str | Path):
        words += [f"{OPTION}network", str(asked.network)]
    for name, value in (("dataset", asked.dataset), ("scale", asked.scale), ("time", asked.time)):
        if value is not None:
            words += [f"{OPTION}{name}", str(value)]
    return shlex.join(words)


def placed(space: Space | None) -> str:
    """Describe the size of voxels and where the first one lies."""
    if space is None:
        return "no voxel size is stated"
    sizes = [f"{size:.6g}{_unit(unit)}" for size, unit in zip(space.scale, space.units, strict=True)]
    first = [f"{at:.6g}{_unit(unit)}" for at, unit in zip(space.translation, space.units, strict=True)]
    return f"voxels of {' x '.join(sizes)}, the first at {', '.join(first)}"


def turned(space: Space | None) -> list[str]:
    """Say in a sentence where the axes run, if they are turned or mirrored in the specimen."""
    if space is None or space.affine is None:
        return []
    ends = (("left", "right"), ("back", "front"), ("bottom", "top"))
    words, is_slanted = [], False
    for column in range(3):
        along = [row[column] for row in space.affine]
        most = max(range(3), key=lambda row: abs(along[row]))
        words.append(ends[most][along[most] > 0])
        is_slanted |= any(abs(part) > ALIGNED * abs(along[most]) for row, part in enumerate(along) if row != most)
    return [f"x, y and z run to the {', '.join(words)}{', at an angle' if is_slanted else ''}"]


def _unit(unit: str | None) -> str:
    return "" if unit is None else f" {short_name(unit)}"


def _listed(label: str, arrays: Sequence[Inside]) -> list[str]:
    """List arrays, one a line."""
    lines = []
    for number, one in enumerate(arrays[:MOST_LISTED]):
        size = "x".join(map(str, one.shape)) or "scalar"
        space = f", {placed(one.space)}" if one.space is not None else ""
        head = label if number == 0 else ""
        lines.append(f"{head:10} {excerpt(one.name, NAME) or '(root)'}: {size} {excerpt(one.dtype, NAME)}{space}")
    if len(arrays) > MOST_LISTED:
        lines.append(f"{'':10} and {len(arrays) - MOST_LISTED:,} more")
    return lines


def _grey(greys: Greys | None) -> str:
    if greys is None:
        return "none is finite"
    return f"{greys.lowest:.4g} to {greys.highest:.4g}, mean {greys.mean:.4g}"
