"""Compute the spectra of a layer's kernels on a GPU, in the layout of the product kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from znnpy.kernels.gpu.fft_tiled.tiles import COLUMN_THREADS, MAPS, Spectra, frequencies, padded, plane_block

if TYPE_CHECKING:
    from znnpy.network import ConvWeights
    from znnpy.shapes import Vec3

SLABS = 32  # number of parts in which kernel spectra are streamed
SLICE = MAPS  # output maps whose kernels are transformed at a time
WORDS: dict[Spectra, int] = {"half": 1, "quick": 1, "split": 2}
_MOST_SCALE = 2.0**126  # largest scale of kernels: float32 holds little more, and kernels that need it are almost zero
_TOP = 2.0**11  # float16 spectra of kernels stay below it: far from infinity, and as far as possible from zero


@dataclass(frozen=True, slots=True)
class KernelSpectra:
    """Kernel spectra (word, frequency, 2 * maps out, 2 * maps in) float16, maps padded, and their scales."""

    packed: Any  # array on the device, or in pinned host memory
    bias: Any  # (f',) float32
    alpha: float  # factor of the product's sums, so that they fit their stored type
    factor: float  # factor that rescales the results of the inverse transform


def packed_bytes(fin: int, fout: int, tile: Vec3, spectra: Spectra) -> int:
    """Return the bytes of `KernelSpectra.packed`."""
    return WORDS[spectra] * frequencies(tile) * 4 * padded(fin) * padded(fout) * 2


def slab_frequencies(count: int) -> int:
    """Return how many of `count` frequencies are streamed to the device at a time."""
    return -(-count // SLABS)


def preparing_bytes(fin: int, k: Vec3, tile: Vec3, spectra: Spectra, *, streamed: bool) -> int:
    """Return the device bytes that `transform_kernels` takes temporarily, besides its result."""
    packed = packed_bytes(fin, SLICE, tile, spectra) if streamed else 0
    return packed + fin * SLICE * (8 * frequencies(tile) + 4 * k[0] * k[1] * k[2] + 4 * tile[0] * k[1] * k[2]) + 8


class _Slices:
    """Spectra of kernels, a slice of output maps at a time: (frequency, f, SLICE) complex64, doubled.

    A kernel is treated as an image of one tile: input maps are images, output maps are its maps.
    """

    def __init__(self, weights: ConvWeights, tile: Vec3, device: Any) -> None:
        self._weights, self._tile, self._device = weights.weight, tile, device
        _, self._fin, *k = weights.weight.shape
        self._k = k
        block = plane_block(tile[1], "split", SLICE, device.gpu.shared_block_bytes)
        assert block is not None, f"why_not lets no tiles of {tile} through on this GPU"
        self._block = block
        names = f"forward_z<{tile[0]}, Floats, float>", self._block.forward("Floats")
        kernels = device.kernels("fft_tiled/forward.cu", names)
        self._along_z, self._plane = (kernels[name] for name in names)
        images = device.allocate(4 * self._fin * SLICE * k[0] * k[1] * k[2], "a slice of kernels")
        self._images = device.view(images, (self._fin, *k, SLICE), np.float32)
        self._columns = device.allocate(4 * tile[0] * k[1] * k[2] * self._fin * SLICE, "their transforms along z")
        self.spectra = device.allocate(8 * frequencies(tile) * self._fin * SLICE, "their spectra")

    def transform(self, first: int) -> int:
        """Transform the slice of output maps from `first` on into `spectra`; return the number of maps."""
        some = self._weights[first : first + SLICE]
        host = np.zeros((self._fin, *self._k, SLICE), np.float32)
        host[..., : len(some)] = some.transpose(1, 2, 3, 4, 0)
        self._device.copy_async(self._images, host, self._device.stream)
        self._device.synchronize(self._device.stream)  # `host` must live until then
        kz, ky, kx = self._k
        self._along_z(
            (-(-kx * SLICE // 2 // COLUMN_THREADS), ky, self._fin),
            (COLUMN_THREADS,),
            *(self._images, None, self._columns, None),
            *(0, 1, 1, kz, ky, 0, ky, kx, SLICE, SLICE, kz * ky * kx * SLICE, 0, 0, 0),
        )
        planes = self._tile[0] // 2
        self._plane(
            (self._fin * planes,),
            (self._block.threads,),
            *(self._columns, self.spectra, self._fin, 1, 1, 1, 1, ky, kx, SLICE, planes),
            shared=self._block.shared_bytes,
        )
        return len(some)

    def close(self) -> None:
        """Free the memory."""
        self._device.free(self._images, self._columns, self.spectra)


def transform_kernels(
    weights: ConvWeights, tile: Vec3, spectra: Spectra, device: Any, *, streamed: bool = False
) -> KernelSpectra:
    """Transform kernels (f', f, kz, ky, kx) in two passes: one to find the largest spectra, one to store them.

    streamed  True: store them in pinned host memory, one slice of output maps after the other.
    """
    fout, fin = weights.weight.shape[:2]
    count, words = frequencies(tile), WORDS[spectra]
    pack = device.kernels("fft_tiled/weights.cu", ["weight_bounds", "pack_weights"])
    there = SLICE if streamed else padded(fout)  # output maps whose spectra are on the device at a time
    shape = words, count, 2 * there, 2 * padded(fin)
    packed = device.view(device.allocate(packed_bytes(fin, there, tile, spectra), "kernel spectra"), shape, np.float16)
    host = device.pinned((words, count, 2 * padded(fout), 2 * padded(fin)), np.float16) if streamed else None
    bounds = device.allocate(8, "bounds of kernel spectra")
    device.clear(packed)
    device.clear(bounds)
    most, total = device.view(bounds, (1,), np.float32), device.view(bounds, (1,), np.float32, offset=4)
    slices = _Slices(weights, tile, device)
    blocks = (4 * device.gpu.multiprocessors,)
    for first in range(0, fout, SLICE):
        slices.transform(first)
        pack["weight_bounds"](blocks, (256,), slices.spectra, count, fin, SLICE, most, total)
    largest, heaviest = (float(device.get(word)[0]) for word in (most, total))
    scale = min(_MOST_SCALE, 2.0 ** np.floor(np.log2(_TOP / largest))) if 0 < largest < np.inf else 1.0
    for first in range(0, fout, SLICE):
        some = slices.transform(first)
        sizes = (count, fin, SLICE, first % there, some, there, padded(fin), words, packed.nbytes // 2 // words)
        pack["pack_weights"](blocks, (256,), slices.spectra, packed, *sizes, float(scale))
        if host is not None:
            for word in range(words):
                part = host[word][:, 2 * first : 2 * (first + SLICE)]
                device.copy_async(part, packed[word], device.stream)
            device.clear(packed)  # the last slice may have fewer maps
    device.free(bounds, *([packed] if streamed else []))
    slices.close()
    # |X| <= 2^15, so |Y| / alpha <= 2^15 * scale * heaviest; the passes along y and x may add up all of its numbers.
    alpha = 1.0
    if spectra != "split" and 0 < heaviest < np.inf:
        alpha = 2.0 ** np.floor(-np.log2(scale * heaviest * tile[1] * tile[2]))
    # Spectra of inputs and of kernels are doubled; the two transforms multiply by the tile's voxels.
    factor = 1.0 / (4.0 * scale * alpha * float(np.prod(tile)))
    kept = packed if host is None else host
    return KernelSpectra(kept, device.put(weights.bias, "biases"), float(alpha), float(factor))
