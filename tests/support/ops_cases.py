"""Operations on arrays are tried on these odd and unequal sizes, on a CPU and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.kernels.contract import ConvWeights
from znnpy.shapes import Sliding, Vec3

ROUNDING = {"float32": 1e-6, "float16": 5e-4}  # of the rms answer
IMAGES = [(2, 3, 5, 4, 3), (1, 1, 1, 1, 1), (3, 1, 7, 9, 8), (2, 2, 3, 3, 40)]


@dataclass(frozen=True)
class Window:
    """A window on an image."""

    shape: tuple[int, int, int, int, int]
    window: Vec3
    sliding: Sliding


WINDOWS = [
    Window((2, 5, 6, 7, 3), (2, 3, 2), Sliding((2, 3, 2))),
    Window((2, 4, 7, 9, 8), (3, 2, 4), Sliding((1, 2, 3), (1, 0, 2))),
    Window((1, 1, 9, 5, 1), (1, 3, 3), Sliding((1, 2, 1), (0, 1, 2))),
    Window((3, 2, 3, 4, 4), (2, 3, 4), Sliding()),  # one voxel out
    Window((1, 2, 1, 3, 5), (3, 2, 5), Sliding((2, 2, 1), (2, 1, 4))),  # a window larger than the image
]


@dataclass(frozen=True)
class Convolution:
    """A convolution on arrays."""

    shape: tuple[int, int, int, int, int]
    fout: int
    k: Vec3
    sliding: Sliding

    def weights(self) -> ConvWeights:
        rng = np.random.default_rng(3)
        scale = np.float32(1 / np.sqrt(self.shape[4] * np.prod(self.k)))
        kernels = rng.standard_normal((self.fout, self.shape[4], *self.k), np.float32) * scale
        return ConvWeights(kernels, rng.standard_normal(self.fout, np.float32))


CONVOLUTIONS = [
    Convolution((2, 4, 6, 7, 3), 5, (3, 2, 4), Sliding((1, 2, 3), (1, 0, 2))),
    Convolution((1, 1, 9, 8, 2), 6, (1, 3, 3), Sliding((1, 1, 1), (0, 2, 2))),  # "full" of a 2D image
    Convolution((3, 3, 5, 4, 1), 1, (3, 5, 4), Sliding()),  # one voxel out
    Convolution((2, 2, 3, 3, 20), 18, (3, 1, 2), Sliding((2, 1, 1), (1, 3, 0))),  # rows of padding alone
]


def values(shape: tuple[int, ...], dtype: str = "float32", seed: int = 5) -> npt.NDArray[Any]:
    return (3 * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)


def assert_near(out: npt.NDArray[Any], exact: npt.NDArray[Any], dtype: str, limit: float | None = None) -> None:
    """Check type and shape, that nothing is left unwritten, and that rounding is no more than the type's."""
    assert out.dtype == dtype
    assert out.shape == exact.shape
    assert np.isfinite(out).all()
    error = np.sqrt(np.mean((out.astype(np.float64) - exact) ** 2) / np.mean(exact**2))
    assert error <= (limit or ROUNDING[dtype]), f"rms error {error:.2e}"
