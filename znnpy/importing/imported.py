"""Describe what importers give: a network with its weights, and what was done to get there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from znnpy.network import ConvWeights, Network
from znnpy.shapes import Vec3

if TYPE_CHECKING:
    from znnpy.importing.processing import Processing


@dataclass(frozen=True, slots=True)
class Tested:
    """Arrays in .npy files: an input, and what each output is for it, with dimensions in these orders."""

    input: Path
    outputs: tuple[Path, ...]
    orders: tuple[str, ...]


@dataclass(frozen=True)
class Imported:
    """A network of another framework.

    weights  of the layers that take some, in order
    words    names of the outputs: keys, or numbers from 0
    planar   the network is over images, which are the planes of a volume
    fixed    the only size of a volume that the framework takes; None: it takes others
    order    of the letters n, c, z, y, x: dimensions of the framework's input
    folded   what was left out or joined with another layer, and how often
    source   what it was read from, such as `ONNX, opset 20, by pytorch 2.9`
    is_alone the framework gives one array, and no tuple or dictionary of it

    Of a description of bioimage.io alone:

    file        of the framework, beside the description
    processing  layers around those of the framework
    tested      returns arrays to compare with, if there are any
    """

    network: Network
    weights: tuple[ConvWeights, ...]
    words: tuple[str, ...] = ("0",)
    planar: bool = False
    fixed: Vec3 | None = None
    order: str = "nczyx"
    folded: Mapping[str, int] = field(default_factory=Counter)
    source: str = ""
    is_alone: bool = True
    file: Path | None = None
    processing: Processing | None = None
    tested: Callable[[], Tested | None] | None = None
