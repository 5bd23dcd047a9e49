"""The arithmetic of sizes and bytes, with a frozen dataclass for each kind of layer and no arrays.

These conventions hold in the whole project:

* Axes are (z, y, x), x fastest. Activations are `(S, z, y, x, f)`: channels last, C order, float32
  (float16 in precision fp16, bfloat16 in precision bf16).
* "Convolution" is cross-correlation: `out[i] = bias + sum over d of in[i + d] * w[d]`. "Valid": no padding.
* Max-pooling fragments: fragment `o = (oz * py + oy) * px + ox` of image `s` is image `s * P + o` of the output,
  P = pz * py * px; its voxel `i` is the maximum of the window that starts at `i * p + o`.

Glossary: S batch · f, fin, fout maps (feature maps) · n input size · k kernel · p pooling window · m output size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

from znnpy.errors import ShapeError

Vec3: TypeAlias = tuple[int, int, int]

Activation = Literal["none", "relu", "tanh", "sigmoid", "softmax"]
ACTIVATIONS: tuple[Activation, ...] = ("none", "relu", "tanh", "sigmoid", "softmax")

# fp32; tf32: stored in float32, products may have an rms error of up to 1e-3; fp16: stored in float16 too. On a CPU:
# bf16x2: stored in float32, factors of products in two bfloat16 each, with an rms error of up to 1e-5; bf16: stored in
# bfloat16, sums in float32.
Precision = Literal["fp32", "tf32", "fp16", "bf16x2", "bf16"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "fp16", "bf16x2", "bf16")
GPU_PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "fp16")
CPU_PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16x2", "bf16")

FLOAT32 = 4  # bytes
FLOAT16 = 2  # of float16 and of bfloat16
COMPLEX64 = 8  # bytes


def text(v: tuple[int, ...]) -> str:
    """Write `(4, 5, 6)` as `4x5x6`."""
    return "x".join(map(str, v))


def add(a: Vec3, b: Vec3) -> Vec3:
    """Return the sum of two sizes, axis by axis."""
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def subtract(a: Vec3, b: Vec3) -> Vec3:
    """Return the difference of two sizes, axis by axis."""
    return a[0] - b[0], a[1] - b[1], a[2] - b[2]


def multiply(a: Vec3, b: Vec3) -> Vec3:
    """Return the product of two sizes, axis by axis."""
    return a[0] * b[0], a[1] * b[1], a[2] * b[2]


def ceil_divide(a: Vec3, b: Vec3) -> Vec3:
    """Return the quotient of two sizes, axis by axis, rounded up."""
    return -(-a[0] // b[0]), -(-a[1] // b[1]), -(-a[2] // b[2])


def turned(v: Vec3, axis: int) -> Vec3:
    """Return `v` with the size along `axis` first and the others in their order: (y, z, x) for axis 1."""
    order = turn(axis)
    return v[order[0]], v[order[1]], v[order[2]]


def turned_back(v: Vec3, axis: int) -> Vec3:
    """Return a result of `turned` in the order (z, y, x) again."""
    z, y, x = (v[turn(axis).index(i)] for i in range(3))
    return z, y, x


def turn(axis: int) -> Vec3:
    """Return the axes with `axis` first and the others in their order, as numpy's `transpose` takes them."""
    first, second, third = sorted(range(3), key=lambda i: i != axis)
    return first, second, third


def valid(n: Vec3, k: Vec3) -> Vec3:
    """Return the number of positions of a window of size `k` inside `n`: n - k + 1."""
    return n[0] - k[0] + 1, n[1] - k[1] + 1, n[2] - k[2] + 1


@dataclass(frozen=True, slots=True)
class Sliding:
    """The movement of a window over an image along z, y and x (Chetlur et al., cuDNN, 2014, table 1: u, v, pad)."""

    stride: Vec3 = (1, 1, 1)
    padding: Vec3 = (0, 0, 0)  # zeros, equally many before and after the image

    def __post_init__(self) -> None:
        if min(self.stride) < 1:
            raise ShapeError(f"a stride must be at least 1 along every axis, not {text(self.stride)}")
        if min(self.padding) < 0:
            raise ShapeError(f"padding must be at least 0 along every axis, not {text(self.padding)}")

    def positions(self, n: Vec3, k: Vec3) -> Vec3:
        """Return the positions of a window of size `k` on images of size `n`: floor((n - k + 2 padding) / stride) + 1.

        ShapeError if there is none.
        """
        free = tuple(m + 2 * pad - size for m, pad, size in zip(n, self.padding, k, strict=True))
        if min(free) < 0:
            raise ShapeError(
                f"a window of {text(k)} is larger than the image of {text(n)} with {text(self.padding)} zeros around it"
            )
        z, y, x = (left // step + 1 for left, step in zip(free, self.stride, strict=True))
        return z, y, x


def _check_fits(shape: object, n: Vec3, k: Vec3, window: str) -> None:
    if (
        n[0] >= k[0] and n[1] >= k[1] and n[2] >= k[2]
    ):  # this is fast, since plans ask for hundreds of thousands of shapes
        return
    for axis, size, extent in zip("zyx", n, k, strict=True):
        if size < extent:
            raise ShapeError(
                f"input is smaller than the {window} along {axis}: {size} < {extent} ({shape}); "
                f"grow the patch by at least {extent - size} voxels along {axis}"
            )


def _check_pools(shape: object, n: Vec3, p: Vec3, *, fragments: bool) -> None:
    _check_fits(shape, n, p, "window")
    for axis, size, window in zip("zyx", n, p, strict=True):
        spare = (size + 1) % window if fragments else size % window
        if spare:
            rule = "(n + 1) mod p must be 0 for fragments" if fragments else "n mod p must be 0"
            raise ShapeError(
                f"pooling window {window} does not fit input {size} along {axis} ({shape}): {rule}; "
                f"the nearest sizes are {size - spare} and {size - spare + window}"
            )


def _check_positive(shape: object, **counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ShapeError(f"{name} must be at least 1, not {count} ({shape})")


def cpu_precision(asked: Precision | None) -> Precision:
    """Return the precision in which a CPU computes: fp32 where that of a GPU is asked for, or none."""
    return asked if asked is not None and asked in CPU_PRECISIONS else "fp32"


def itemsize_of(precision: Precision) -> int:
    """Return the bytes of a value between layers."""
    return FLOAT16 if precision in ("fp16", "bf16") else FLOAT32


class Sized(ABC):
    """Properties that follow from `in_shape`, `out_shape` and `precision`."""

    __slots__ = ()
    precision: Precision

    @property
    @abstractmethod
    def in_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of the input tensor: (S, z, y, x, f)."""

    @property
    @abstractmethod
    def out_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of the output tensor: (S', m_z, m_y, m_x, f')."""

    @property
    def itemsize(self) -> int:
        """Bytes of one value of input and output."""
        return itemsize_of(self.precision)

    @property
    def in_bytes(self) -> int:
        return self.itemsize * prod(self.in_shape)

    @property
    def out_bytes(self) -> int:
        return self.itemsize * prod(self.out_shape)

    @property
    def pooled_bytes(self) -> int:
        """Bytes of a second output, the maxima of the first over windows; 0 if there is none."""
        return 0

    @property
    def _in_precision(self) -> str:
        return "" if self.precision == "fp32" else f" {self.precision}"

    @property
    def out(self) -> Vec3:
        """Size of one output image, (z, y, x)."""
        return self.out_shape[1:4]


@dataclass(frozen=True, slots=True)
class ConvShape(Sized):
    """One valid (unpadded) 3D convolution with bias and activation: all that determines its cost and memory.

    With a `pool` other than 1x1x1 its result is max-pooled into fragments before it is written: two layers in one.
    Layers with equal ConvShapes are the same problem and share measured costs.
    """

    batch: int  # S: patches, or fragments after max-pooling
    fin: int  # f: input feature maps
    fout: int  # f': output feature maps
    n: Vec3  # input size
    k: Vec3  # kernel size
    activation: Activation = "none"
    pool: Vec3 = (1, 1, 1)  # window
    precision: Precision = "fp32"
    kind: Literal["conv"] = "conv"

    def __post_init__(self) -> None:
        _check_positive(self, batch=self.batch, fin=self.fin, fout=self.fout, kernel=min(self.k), window=min(self.pool))
        _check_fits(self, self.n, self.k, "kernel")
        if self.pools:
            _check_pools(self, self.unpooled, self.pool, fragments=True)

    @property
    def pools(self) -> bool:
        """Return whether the result is max-pooled into fragments."""
        return self.pool != (1, 1, 1)

    @property
    def unpooled(self) -> Vec3:
        """Size of one image of the result before it is pooled: n - k + 1."""
        return valid(self.n, self.k)

    @property
    def in_shape(self) -> tuple[int, int, int, int, int]:
        return self.batch, *self.n, self.fin

    @property
    def out_shape(self) -> tuple[int, int, int, int, int]:
        (nz, ny, nx), (kz, ky, kx), (pz, py, px) = (
            self.n,
            self.k,
            self.pool,
        )  # without `unpooled`, since this is called very often
        m = (nz - kz + 1) // pz, (ny - ky + 1) // py, (nx - kx + 1) // px
        return self.batch * pz * py * px, *m, self.fout

    @property
    def weight_bytes(self) -> int:
        """Bytes of kernels (f', f, k) and biases (f',) in float32, before any preparation."""
        return FLOAT32 * (self.fout * self.fin * prod(self.k) + self.fout)

    def __str__(self) -> str:
        pool = f" p{text(self.pool)}" if self.pools else ""
        maps = f"{self.batch}x{self.fin}->{self.fout}"
        return f"conv {maps} @{text(self.n)} k{text(self.k)} {self.activation}{pool}{self._in_precision}"


@dataclass(frozen=True, slots=True)
class PoolShape(Sized):
    """One max-pooling, plain (one image per input image) or into fragments (P images, one per offset)."""

    batch: int
    f: int
    n: Vec3
    p: Vec3  # window
    fragments: bool = True
    precision: Precision = "fp32"
    kind: Literal["pool"] = "pool"

    def __post_init__(self) -> None:
        _check_positive(self, batch=self.batch, f=self.f, window=min(self.p))
        _check_pools(self, self.n, self.p, fragments=self.fragments)

    @property
    def in_shape(self) -> tuple[int, int, int, int, int]:
        return self.batch, *self.n, self.f

    @property
    def out_shape(self) -> tuple[int, int, int, int, int]:
        m = (self.n[0] // self.p[0], self.n[1] // self.p[1], self.n[2] // self.p[2])
        return self.batch * (prod(self.p) if self.fragments else 1), *m, self.f

    def __str__(self) -> str:
        into = "fragments" if self.fragments else "max"
        return f"pool {into} {self.batch}x{self.f} @{text(self.n)} p{text(self.p)}{self._in_precision}"


@dataclass(frozen=True, slots=True)
class FilterShape(Sized):
    """One max-filter: the maximum over a window at every position (stride 1, valid), without fragments."""

    batch: int
    f: int
    n: Vec3
    p: Vec3  # window
    precision: Precision = "fp32"
    kind: Literal["maxfilter"] = "maxfilter"

    def __post_init__(self) -> None:
        _check_positive(self, batch=self.batch, f=self.f, window=min(self.p))
        _check_fits(self, self.n, self.p, "window")

    @property
    def in_shape(self) -> tuple[int, int, int, int, int]:
        return self.batch, *self.n, self.f

    @property
    def out_shape(self) -> tuple[int, int, int, int, int]:
        return self.batch, *valid(self.n, self.p), self.f

    def __str__(self) -> str:
        return f"maxfilter {self.batch}x{self.f} @{text(self.n)} p{text(self.p)}{self._in_precision}"


@dataclass(frozen=True, slots=True)
class MaxoutShape(Sized):
    """One maxout: the maximum over groups of `of` neighbouring maps, which gives f / of maps."""

    batch: int
    f: int
    n: Vec3
    of: int
    precision: Precision = "fp32"
    kind: Literal["maxout"] = "maxout"

    def __post_init__(self) -> None:
        _check_positive(self, batch=self.batch, f=self.f, group=self.of)
        if self.f % self.of:
            raise ShapeError(f"maxout of {self.of} does not divide {self.f} maps ({self})")

    @property
    def in_shape(self) -> tuple[int, int, int, int, int]:
        return self.batch, *self.n, self.f

    @property
    def out_shape(self) -> tuple[int, int, int, int, int]:
        return self.batch, *self.n, self.f // self.of

    def __str__(self) -> str:
        return f"maxout {self.batch}x{self.f} @{text(self.n)} of {self.of}{self._in_precision}"


ChainShape = ConvShape | PoolShape | FilterShape | MaxoutShape


def fused(conv: object, pool: object) -> ConvShape | None:
    """Return one convolution that pools its result into fragments for the two layers; None if they are not that.

    If the pooling takes planes from the previous step of a column (`Network.layer_shapes`), the convolution computes
    that many planes again.
    """
    if not isinstance(conv, ConvShape) or not isinstance(pool, PoolShape):
        return None
    if conv.pools or not pool.fragments or pool.p == (1, 1, 1):
        return None
    more = subtract(pool.n, conv.out)
    n = add(conv.n, more)
    return ConvShape(conv.batch, conv.fin, conv.fout, n, conv.k, conv.activation, pool.p, conv.precision)
