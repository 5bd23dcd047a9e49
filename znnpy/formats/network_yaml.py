"""The grammar of network.yaml, from the file's text to a network."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from znnpy.errors import NetworkFileError, ShapeError
from znnpy.formats.entries import (
    ONE_LINE,
    SIZE,
    Count,
    Entry,
    Finite,
    Percentile,
    Positive,
    Share,
    Size,
    Words,
    check,
)
from znnpy.formats.files import COUNT, shown
from znnpy.formats.layer_entries import Names, read_layer
from znnpy.formats.wiring import network_of
from znnpy.formats.yaml12 import read_yaml
from znnpy.network import Network, Normalise
from znnpy.normalisation import EPSILON, STATISTICS, StatisticsOf, VolumeStatistics
from znnpy.option_values import BLENDS, MEANINGS, WINDOW_RULES, Blend, Meaning, WindowRule
from znnpy.shapes import Vec3
from znnpy.sliding_layers import slides
from znnpy.windows.settings import Windows
from znnpy.wiring import PAD_TO_PERIOD, PadToPeriod

AxisName = Literal["z", "y", "x"]


class Parsed(NamedTuple):
    """The content of a network.yaml. `weights` is relative to it; `field_of_view` is not yet checked."""

    network: Network
    weights: str | None
    field_of_view: Vec3 | None


def _sequence(value: object) -> object:
    """Return one value per channel as a tuple; a single number stands for all channels."""
    return tuple(value) if isinstance(value, list) else (value,)


class _NormaliseEntry(Entry):
    mean: Annotated[tuple[Finite, ...], BeforeValidator(_sequence)] = Field(
        description="a finite number or one per input channel", examples=["130.0"]
    )
    std: Annotated[tuple[Positive, ...], BeforeValidator(_sequence)] = Field(
        description="a finite number above 0 or one per input channel", examples=["33.5"]
    )


class _StatisticsEntry(Entry):
    of_volume: StatisticsOf = Field(description=f"one of {', '.join(STATISTICS)}", examples=["mean_and_std"])
    jointly: bool = Field(False, description="true or false", examples=["true"])
    percentiles: Annotated[tuple[Percentile, Percentile], BeforeValidator(_sequence)] = Field(
        (0.0, 100.0), description="two numbers from 0 to 100, [low, high]", examples=["[1, 99.8]"]
    )
    epsilon: Positive = Field(EPSILON, description="a finite number above 0", examples=["1.0e-6"])


def _each(value: Any) -> Any:
    """Take one share for all axes."""
    return (value,) * 3 if isinstance(value, int | float) and not isinstance(value, bool) else _sequence(value)


class _WindowsEntry(Entry):
    size: Size = Field(description=SIZE, examples=["[128, 128, 128]"])
    overlap: Annotated[tuple[Share, Share, Share], BeforeValidator(_each)] = Field(
        (0.5, 0.5, 0.5), description="a share from 0 to below 1, or three of them", examples=["0.5"]
    )
    blend: Blend = Field("gaussian", description=f"one of {', '.join(BLENDS)}", examples=["gaussian"])
    sigma: Positive = Field(0.125, description="a finite number above 0", examples=["0.125"])
    mirror: Annotated[tuple[AxisName, ...], BeforeValidator(_sequence)] = Field(
        (), description="a list of some of z, y and x", examples=["[z, y, x]"]
    )
    like: WindowRule = Field("monai", description=f"one of {', '.join(WINDOW_RULES)}", examples=["monai"])


class _NetworkEntry(Entry):
    name: Words | None = Field(None, description=ONE_LINE, examples=["my_network"])
    description: str = Field("", description="text", examples=["what it was trained for"])
    input_channels: Count = Field(description=COUNT, examples=["1"])
    normalise: Any = None  # a _NormaliseEntry, a _StatisticsEntry or empty, checked separately
    weights: Words | None = Field(None, description=f"the path of a file, as {ONE_LINE}", examples=["my_network.npz"])
    layers: list[Any] = Field(  # each entry is checked separately
        min_length=1,
        description="a list of at least one layer",
        examples=["[{type: conv, kernel: [3, 3, 3], out: 1}]"],
    )
    field_of_view: Size | None = Field(None, description=SIZE, examples=["[27, 27, 27]"])
    output: Names | None = Field(None, description="the name of a node, or a list of names", examples=["conv3"])
    pad_to_period: PadToPeriod | None = Field(
        None, description=f"one of {', '.join(PAD_TO_PERIOD)}", examples=["reflect"]
    )
    meaning: Meaning | None = Field(None, description=f"one of {', '.join(MEANINGS)}", examples=["whole"])
    windows: Any = None  # a _WindowsEntry or empty, checked separately


def parse(content: str, name: str) -> Parsed:
    """Read the network of a network.yaml; it is called `name` unless the file names it.

    NetworkFileError for the first mistake; ShapeError if a maxout does not divide its maps.
    """
    raw = read_yaml(content)
    if not isinstance(raw, dict):
        raise NetworkFileError(
            f"the file is {shown(raw)}, but must be a mapping; write at least {_NetworkEntry.example()}"
        )
    entry = check(_NetworkEntry, raw, "")
    name = entry.name or name
    layers = [read_layer(index, layer) for index, layer in enumerate(entry.layers)]
    statistics = _statistics(entry.normalise)
    normalise = None if statistics else _normalise(entry.normalise, entry.input_channels)
    named = any(one.name is not None or one.reads is not None for one in layers)
    if named or entry.output or entry.pad_to_period or not all(slides(one.layer) for one in layers):
        network = network_of(name, entry.input_channels, layers, normalise, entry.output, entry.pad_to_period)
    else:
        network = Network(name, entry.input_channels, tuple(one.layer for one in layers), normalise)
    if entry.meaning == "sliding" and network.why_not_sliding is not None:
        raise NetworkFileError(
            f"meaning is sliding, but {network.why_not_sliding}; delete the line, so that it is computed whole"
        )
    windows = None if entry.windows is None else _windows(entry.windows)
    if windows is not None and entry.meaning not in (None, "windows"):
        raise NetworkFileError(f"meaning is {entry.meaning}, and windows are given; delete one of the two")
    network = replace(network, asked_meaning=entry.meaning, statistics=statistics, windows=windows)
    return Parsed(network, entry.weights, entry.field_of_view)


def _windows(raw: object) -> Windows:
    """Return the windows of an entry."""
    entry = check(_WindowsEntry, raw, "windows: ")
    mirror = tuple(axis for axis, name in enumerate("zyx") if name in entry.mirror)
    try:
        return Windows(entry.size, entry.overlap, entry.blend, entry.sigma, mirror, entry.like)
    except ShapeError as error:
        raise NetworkFileError(f"windows: {error}") from None


def _statistics(raw: object) -> VolumeStatistics | None:
    """Return the statistics of the volume that the normalisation follows from; None if it is another one."""
    if not isinstance(raw, dict) or "of_volume" not in raw:
        return None
    entry = check(_StatisticsEntry, raw, "normalise: ")
    low, high = entry.percentiles
    if low >= high:
        raise NetworkFileError(f"normalise: percentiles are {low:g} and {high:g}; write the low one first")
    return VolumeStatistics(entry.of_volume, entry.jointly, (low, high), entry.epsilon)


def _normalise(raw: object, channels: int) -> Normalise | None:
    if raw is None:
        return None
    entry = check(_NormaliseEntry, raw, "normalise: ")
    mean, std = entry.mean, entry.std
    for key, values in (("mean", mean), ("std", std)):
        if len(values) not in (1, channels):
            raise NetworkFileError(
                f"normalise: {key} has {len(values)} values for input_channels: {channels}; "
                "write one number, or one per channel"
            )
    return Normalise(mean * (channels // len(mean)), std * (channels // len(std)))
