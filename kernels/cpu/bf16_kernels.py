"""Pack the kernels of convolutions in the order in which the unit for bfloat16 reads them.

Tested   tests/kernels/cpu/test_bf16_conv.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.cpu.bf16_division import STEP, WIDTH
from znnpy.kernels.cpu.bf16_problem import Taps, transposed_taps, upsampled_taps, whole_taps
from znnpy.kernels.dtypes import bfloat16
from znnpy.shapes import FLOAT16

if TYPE_CHECKING:
    import numpy.typing as npt

    from znnpy.kernels.contract import Array, Bytes, ConvWeights, Variant
    from znnpy.shapes import Vec3


AT_ONCE = 2**17  # values that are divided into words at once


class Resident(NamedTuple):
    """The prepared weights, of each phase."""

    kernels: Sequence[Bytes]  # two panels after two panels (step, tap, word, panel, pair of maps, map, 2)
    bias: Array  # padded to whole panels


def packed_kernels(weights: ConvWeights, variant: Variant) -> Resident:
    """Return the kernels of each phase that a variant has, divided into its words."""
    kernels, words = weights.weight, variant.count("words")
    fout = len(weights.bias)
    bias = np.zeros(WIDTH * -(-fout // WIDTH), np.float32)
    bias[:fout] = weights.bias
    names = {name for name, _ in variant.parameters}
    if "stride" in names:
        kernels = kernels.swapaxes(0, 1)
        taps = transposed_taps(_size(kernels), variant.size("stride"), variant.size("dilation"))
        return Resident(tuple(_packed([_summed(kernels, phase)], words) for phase in taps), bias)
    if "upsampled" in names:
        begin, end = variant.count("from_map"), variant.count("to_map")
        low, others = kernels[:, begin:end], np.delete(kernels, slice(begin, end), axis=1)
        rest = [_summed(others, whole_taps(_size(kernels)))] if others.shape[1] else []
        taps = upsampled_taps(_size(kernels), variant.size("upsampled"))
        return Resident(tuple(_packed([*rest, _summed(low, phase)], words) for phase in taps), bias)
    if "shifts" in names:  # map f of tap d along x becomes map d * f' + f
        kernels = kernels.transpose(4, 0, 1, 2, 3).reshape(-1, *kernels.shape[1:4], 1)
    whole = kernels.reshape(*kernels.shape[:2], -1)
    if folds_taps(variant):
        whole = whole.swapaxes(1, 2).reshape(fout, -1, 1)
    return Resident((_packed([whole], words),), bias)


def folds_taps(variant: Variant) -> bool:
    """Return whether a variant gathers the inputs of all taps place by place."""
    return any(name == "fold" and value for name, value in variant.parameters)


def _size(kernels: Array) -> Vec3:
    z, y, x = kernels.shape[2:]
    return z, y, x


def _summed(kernels: Array, taps: Taps) -> Array:
    """Return the sums of some places of kernels (f', f, z, y, x), as (f', f, taps)."""
    found = np.zeros((*kernels.shape[:2], len(taps)), np.float32)
    for number, places in enumerate(taps):
        for z, y, x in places:
            found[:, :, number] += kernels[:, :, z, y, x]
    return found


def _packed(groups: Sequence[Array], words: int) -> Bytes:
    """Return kernels (f', f, taps) of all groups in the order in which the unit reads them, divided into words."""
    fout = len(groups[0])
    panels, factors = -(-fout // 16), sum(-(-kernels.shape[1] // STEP) * kernels.shape[2] for kernels in groups)
    store = aligned_bytes(FLOAT16 * 16 * panels * STEP * factors * words)
    values, first = store.view(bfloat16()), 0
    for map_ in range(0, fout, WIDTH):
        for kernels in groups:
            some = kernels[map_ : map_ + WIDTH]
            width, depth, taps = 16 if fout - map_ <= 16 else WIDTH, -(-kernels.shape[1] // STEP), kernels.shape[2]
            size = width * depth * STEP * taps * words
            target = values[first : first + size].reshape(depth, taps, words, width // 16, STEP // 2, 16, 2)
            at_once = max(1, AT_ONCE // (width * depth * STEP))
            for tap in range(0, taps, at_once):
                _divide(some[:, :, tap : tap + at_once], target[:, tap : tap + at_once])
            first += size
    return store


def _divide(kernels: Array, target: npt.NDArray[Any]) -> None:
    """Write kernels (f', f, taps) as words (step, tap, word, panel, pair of maps, map, 2)."""
    depth, taps, words, panels = target.shape[:4]
    whole = np.zeros((panels * 16, depth * STEP, taps), np.float32)
    whole[: kernels.shape[0], : kernels.shape[1]] = kernels
    # (panel, map, step, pair, 2, tap) becomes (step, tap, panel, pair, map, 2)
    rest = whole.reshape(panels, 16, depth, STEP // 2, 2, taps).transpose(2, 5, 0, 3, 1, 4)
    for word in range(words):
        target[:, :, word] = rest
        if word + 1 < words:
            rest = rest - target[:, :, word].astype(np.float32)
