"""The grammar of ZNNi's .znni files (its parser: code/include/znn/util/network.hpp), which list layers only.

    INPUTS:<channels>, LAYERS:<count>
    CONV a,b,c maps     valid convolution
    POOL a,b,c          max-pooling
    FOOL a,b,c          maximum at every position (stride 1); following layers are not dilated
    MAXOUT maps         maximum over groups of maps

Sizes are in the order of the array axes and stay so. 2D networks (two sizes) get depth 1. The format has no
activations: every convolution gets the rectifier, as in the paper ("A rectified linear transfer function is applied
after each convolutional layer").
"""

from __future__ import annotations

import re

from znnpy.errors import NetworkFileError
from znnpy.formats.files import COUNT, LARGEST, shown, suggestion
from znnpy.network import Conv, Layer, MaxFilter, Maxout, Network, Pool
from znnpy.shapes import Vec3

_NUMBER = r"\d{1,9}"
_HEADER = re.compile(rf"INPUTS:\s*({_NUMBER})\s*,\s*LAYERS:\s*({_NUMBER})")
_FIRST_LINE = "INPUTS:<channels>, LAYERS:<count>"
_SIZES = rf"({_NUMBER}(?:,{_NUMBER}){{1,2}})"  # two for a 2D network
_FORMS = {  # word -> what follows, and how a message shows it
    "CONV": (re.compile(rf"{_SIZES}\s+({_NUMBER})"), "CONV a,b,c maps"),
    "POOL": (re.compile(_SIZES), "POOL a,b,c"),
    "FOOL": (re.compile(_SIZES), "FOOL a,b,c"),
    "MAXOUT": (re.compile(rf"({_NUMBER})"), "MAXOUT maps"),
}


def parse(content: str, name: str) -> Network:
    """Read the network of a .znni file; the file does not name it.

    NetworkFileError for the first mistake; ShapeError if a maxout does not divide its maps.
    """
    lines = [(number, line.strip()) for number, line in enumerate(content.splitlines(), 1) if line.strip()]
    if not lines:
        raise NetworkFileError(f"the file is empty; its first line must be {_FIRST_LINE}")
    (at, header), *rest = lines
    if not (found := _HEADER.fullmatch(header)):
        raise NetworkFileError(f"line {at} is {shown(header)}, but must be {_FIRST_LINE}; correct it")
    channels, count = int(found[1]), int(found[2])
    if not 1 <= channels <= LARGEST:
        raise NetworkFileError(f"line {at}: INPUTS is {channels}, but must be {COUNT}; correct it")
    if count != len(rest):
        raise NetworkFileError(
            f"line {at} says LAYERS:{count}, but the layer lines after it are {len(rest)}; write "
            f"LAYERS:{len(rest)}, or {'delete what is too much' if len(rest) > count else 'add what is missing'}"
        )
    if not rest:
        raise NetworkFileError(f"line {at} says LAYERS:0, but a network needs at least one layer; add it")
    layers = tuple(_znni_layer(number, line) for number, line in rest)
    if len({line.count(",") for _, line in rest if "," in line}) > 1:
        raise NetworkFileError("some layers have two sizes and some three; write three everywhere, 1 along z for 2D")
    return Network(name, channels, layers)


def _znni_layer(number: int, line: str) -> Layer:
    word, *arguments = line.split(maxsplit=1)
    if word not in _FORMS:
        raise NetworkFileError(f"line {number}: unknown layer {shown(word)}; {suggestion(word, _FORMS)}")
    pattern, form = _FORMS[word]
    if not (found := pattern.fullmatch("".join(arguments))):
        raise NetworkFileError(f"line {number} is {shown(line)}, but must be {form}, all whole numbers; correct it")
    numbers = [int(number) for group in found.groups() for number in group.split(",")]
    if not all(1 <= value <= LARGEST for value in numbers):
        raise NetworkFileError(f"line {number} is {shown(line)}, but every number must be {COUNT}; correct it")
    if word == "MAXOUT":
        return Maxout(numbers[0])
    size = _depth_one(found[1])
    if word == "CONV":
        return Conv(size, numbers[-1], "relu")
    return Pool(size) if word == "POOL" else MaxFilter(size)


def _depth_one(sizes: str) -> Vec3:
    """Return `4,5,6` as (4, 5, 6), and `5,6` as (1, 5, 6)."""
    *z, y, x = map(int, sizes.split(","))
    return (z[0] if z else 1), y, x
