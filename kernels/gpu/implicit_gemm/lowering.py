"""The problem description shared by all methods of the implicit matrix product."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from znnpy.shapes import FLOAT16, FLOAT32, Activation, ConvShape, Precision, Sliding, Vec3

if TYPE_CHECKING:
    import numpy.typing as npt


VALID = Sliding()


@dataclass(frozen=True, slots=True)
class Lowering:
    """A convolution with bias and activation, for any number of images; axes are z, y and x."""

    fin: int
    fout: int
    n: Vec3  # size of an image, including carried planes
    k: Vec3
    activation: Activation
    precision: Precision
    sliding: Sliding = VALID

    @classmethod
    def of(cls, shape: ConvShape) -> Lowering:
        return cls(shape.fin, shape.fout, shape.n, shape.k, shape.activation, shape.precision)

    @property
    def out(self) -> Vec3:
        return self.sliding.positions(self.n, self.k)

    @property
    def taps(self) -> int:
        return prod(self.k)

    @property
    def itemsize(self) -> int:
        return FLOAT16 if self.precision == "fp16" else FLOAT32

    @property
    def dtype(self) -> npt.DTypeLike:
        return np.float16 if self.precision == "fp16" else np.float32


def image_step(array: Any) -> int:
    """Return the values from one image to the next."""
    return int(array.strides[0] // array.dtype.itemsize)
