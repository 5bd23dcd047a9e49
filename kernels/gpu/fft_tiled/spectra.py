"""Spectra of a layer's kernels on a GPU, as the product kernel takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from znnpy.kernels.gpu.fft_tiled.tiles import MAPS, Block, Spectra, frequencies, padded

if TYPE_CHECKING:
    from znnpy.network import ConvWeights
    from znnpy.shapes import Vec3

SLICE = MAPS  # output maps whose kernels are transformed at a time
WORDS: dict[Spectra, int] = {"half": 1, "split": 2}
_TOP = 2.0**11  # float16 spectra of kernels stay below it: far from infinity, and as far as can be from nothing


@dataclass(frozen=True, slots=True)
class KernelSpectra:
    """(word, frequency, 2 * maps out, 2 * maps in) float16, maps padded, and what other kernels need to know of them."""

    packed: Any
    bias: Any  # (f',) float32
    alpha: float  # what the product multiplies its sums by, so that they fit what they are stored as
    factor: float  # what brings the inverse transform's results back to size


def resident_bytes(fin: int, fout: int, tile: Vec3, spectra: Spectra) -> int:
    """Of `KernelSpectra`."""
    return WORDS[spectra] * frequencies(tile) * 4 * padded(fin) * padded(fout) * 2 + 4 * fout


def preparing_bytes(fin: int, k: Vec3, tile: Vec3) -> int:
    """What `transform_kernels` takes beside them while it runs."""
    return fin * SLICE * (8 * frequencies(tile) + 4 * k[0] * k[1] * k[2]) + 8


def transform_kernels(weights: ConvWeights, tile: Vec3, spectra: Spectra, block: Block, device: Any) -> KernelSpectra:
    """Transform kernels (f', f, kz, ky, kx), a slice of output maps at a time: first to see how large spectra get.

    A kernel is an image of one tile: input maps are its tiles, output maps its maps.
    """
    fout, fin, *k = weights.weight.shape
    count = frequencies(tile)
    forward = device.kernels("fft_tiled/forward.cu", [block.instance("forward", "float", "Floats")])
    pack = device.kernels("fft_tiled/weights.cu", ["weight_bounds", "pack_weights"])
    transform = forward[block.instance("forward", "float", "Floats")]
    words = WORDS[spectra]
    nbytes = words * count * 4 * padded(fin) * padded(fout) * 2
    packed = device.allocate(nbytes, "kernel spectra")
    device.clear(packed)
    apart = nbytes // 2 // words
    work = device.allocate(8 * count * fin * SLICE, "a slice of kernel spectra")
    image = device.allocate(4 * fin * SLICE * k[0] * k[1] * k[2], "a slice of kernels")
    bounds = device.allocate(8, "bounds of kernel spectra")
    device.clear(bounds)
    images = device.view(image, (fin, *k, SLICE), np.float32)
    most, total = device.view(bounds, (1,), np.float32), device.view(bounds, (1,), np.float32, offset=4)

    def transformed(first: int) -> int:
        """Spectra of the output maps from `first` on into `work`; returns how many they are."""
        some = weights.weight[first : first + SLICE]
        host = np.zeros((fin, *k, SLICE), np.float32)
        host[..., : len(some)] = some.transpose(1, 2, 3, 4, 0)
        device.copy_async(images, host, device.stream)
        device.synchronize(device.stream)  # `host` must live until then
        grid = fin * SLICE // block.maps
        sizes = (0, fin, 1, 1, 1, 1, 1, 1, *k, SLICE, int(np.prod(k)) * SLICE, 0, 0, SLICE)
        transform((grid,), (block.threads,), images, None, work, None, *sizes, shared=block.shared_bytes)
        return len(some)

    blocks = (4 * device.gpu.multiprocessors,)
    for first in range(0, fout, SLICE):
        transformed(first)
        pack["weight_bounds"](blocks, (256,), work, count, fin, SLICE, most, total)
    largest, heaviest = (float(device.get(word)[0]) for word in (most, total))
    scale = 2.0 ** np.floor(np.log2(_TOP / largest)) if 0 < largest < np.inf else 1.0
    for first in range(0, fout, SLICE):
        some = transformed(first)
        sizes = (count, fin, SLICE, first, some, padded(fout), padded(fin), words, apart)
        pack["pack_weights"](blocks, (256,), work, packed, *sizes, float(scale))
    # |X| <= 2^15, so |Y| / alpha <= 2^15 * scale * heaviest; the passes along y and x may add up all its numbers.
    alpha = 1.0
    if spectra == "half" and 0 < heaviest < np.inf:
        alpha = 2.0 ** np.floor(-np.log2(scale * heaviest * tile[1] * tile[2]))
    bias = device.put(weights.bias, "biases")
    # Spectra of inputs and of kernels are twice their size; transforms there and back multiply by the tile's voxels.
    factor = 1.0 / (4.0 * scale * alpha * float(np.prod(tile)))
    return KernelSpectra(packed, bias, float(alpha), float(factor))
