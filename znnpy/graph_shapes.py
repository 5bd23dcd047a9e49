"""The shapes of layers of a graph over a part of a volume: all that determines their cost, memory and result.

An image is one part of a volume, (z, y, x, f) float32 or, in bf16, bfloat16. What a layer needs beyond a face of the
volume is not in its input: `before` and `behind` say how many voxels of padding there are on each side, 0 away from the
faces.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from znnpy.errors import ShapeError
from znnpy.layers import ONE, ZERO, Function, PadMode
from znnpy.shapes import FLOAT32, Precision, Sized, Vec3, text


class _OneImage(Sized):
    """Shapes of one image."""

    __slots__ = ()

    @property
    def batch(self) -> int:
        """Images at a time: one part of a volume."""
        return 1


@dataclass(frozen=True, slots=True)
class _MapByMap(_OneImage):
    """Shapes of layers that give as many maps as they get."""

    f: int
    n: Vec3

    @property
    def in_shape(self) -> tuple[int, int, int, int, int]:
        return 1, *self.n, self.f


@dataclass(frozen=True, slots=True)
class _Resampled(_MapByMap):
    """Shapes of layers whose output has a size of its own."""

    m: Vec3  # output size

    @property
    def out_shape(self) -> tuple[int, int, int, int, int]:
        return 1, *self.m, self.f


@dataclass(frozen=True, slots=True)
class Pooled:
    """A second output of a convolution: the maxima over windows of its output, which lie side by side."""

    window: Vec3
    first: Vec3  # voxels of the output that precede the first window
    m: Vec3  # windows, all of them within the output


@dataclass(frozen=True, slots=True)
class Normed:
    """A norm over the whole image of what a convolution gives, in its place; see `NormShape`."""

    groups: int
    epsilon: float
    affine: bool
    activation: Function = "none"
    parameters: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class GraphConvShape(_OneImage):
    """One convolution of a graph, of the maps of all its inputs one after the other, with zeros as padding.

    With an addend it has one more input, which is as large as the output and is added before the activation. It may
    give two outputs: its own, and the one that a max-pooling gives of it. Or it gives a norm of its own output alone.
    """

    fins: tuple[int, ...]  # maps of each input; together f
    fout: int
    n: Vec3  # voxels of each input that there are
    k: Vec3
    before: Vec3 = ZERO  # voxels of padding before the first
    behind: Vec3 = ZERO
    stride: Vec3 = ONE
    dilation: Vec3 = ONE
    groups: int = 1
    activation: Function = "none"
    parameters: tuple[float, ...] = ()  # of the activation
    precision: Precision = "fp32"
    kind: Literal["graph_conv"] = "graph_conv"
    addend: bool = False
    factors: tuple[Vec3, ...] = ()  # how often each voxel of each input counts along each axis; (): once
    first: Vec3 = ZERO  # voxels of upsampled inputs that precede the first one of `n`
    pooled: Pooled | None = None
    normed: Normed | None = None

    def __post_init__(self) -> None:
        if self.factors and len(self.factors) != len(self.fins):
            raise ShapeError(f"a convolution of {len(self.fins)} inputs has factors for {len(self.factors)}")

    @property
    def upsampled(self) -> bool:
        """Return whether an input has fewer voxels than `n` in memory, each of which counts several times."""
        return any(factor != ONE for factor in self.factors)

    def size_of(self, index: int) -> Vec3:
        """Return the voxels of an input in memory."""
        if not self.factors:
            return self.n
        axes = zip(self.n, self.first, self.factors[index], strict=True)
        z, y, x = (n if factor == 1 else -(-(first + n) // factor) for n, first, factor in axes)
        return z, y, x

    @property
    def fin(self) -> int:
        """Maps of all inputs."""
        return sum(self.fins)

    @property
    def padded(self) -> Vec3:
        """Size of an input with its padding."""
        z, y, x = (n + a + b for n, a, b in zip(self.n, self.before, self.behind, strict=True))
        return z, y, x

    @property
    def in_shape(self) -> tuple[int, int, int, int, int]:
        return 1, *self.n, self.fin

    @property
    def out_shape(self) -> tuple[int, int, int, int, int]:
        axes = zip(self.padded, self.k, self.dilation, self.stride, strict=True)
        z, y, x = ((n - d * (k - 1) - 1) // s + 1 for n, k, d, s in axes)
        return 1, z, y, x, self.fout

    @property
    def in_bytes(self) -> int:
        """Bytes of all inputs."""
        found = sum(maps * prod(self.size_of(index)) for index, maps in enumerate(self.fins))
        return self.itemsize * found + self.addend_bytes

    @property
    def pooled_shape(self) -> tuple[int, int, int, int]:
        """The shape (z, y, x, f) of the second output; without one it is empty."""
        z, y, x = ZERO if self.pooled is None else self.pooled.m
        return z, y, x, self.fout

    @property
    def pooled_bytes(self) -> int:
        return self.itemsize * prod(self.pooled_shape)

    @property
    def addend_bytes(self) -> int:
        """Bytes of the addend; 0 if there is none."""
        return self.out_bytes if self.addend else 0

    @property
    def plain(self) -> bool:
        """Return whether stride, dilation and groups are 1."""
        return self.stride == ONE and self.dilation == ONE and self.groups == 1

    def of_size(self, n: Vec3) -> GraphConvShape:
        """Return this convolution of so many voxels, with as many windows of its second output as there are then."""
        other = replace(self, n=n)
        if (pooled := self.pooled) is None:
            return other
        z, y, x = (
            max(0, size - first) // by for size, first, by in zip(other.out, pooled.first, pooled.window, strict=True)
        )
        return replace(other, pooled=replace(pooled, m=(z, y, x)))

    @property
    def norm_shape(self) -> NormShape | None:
        """Return the norm of the output as a layer of its own, if there is one."""
        if (norm := self.normed) is None:
            return None
        return NormShape(
            self.fout,
            self.out,
            norm.groups,
            norm.epsilon,
            norm.affine,
            norm.activation,
            norm.parameters,
            self.precision,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of kernels and biases in float32, and of the norm's weights, before any preparation."""
        affine = self.normed is not None and self.normed.affine
        return FLOAT32 * self.fout * ((self.fin // self.groups) * prod(self.k) + 1 + 2 * affine)

    def __str__(self) -> str:
        maps = "+".join(map(str, self.fins))
        words = [f"conv {maps}->{self.fout} @{text(self.n)} k{text(self.k)}"]
        words += [f"pad {text(self.before)} {text(self.behind)}"] if self.padded != self.n else []
        words += [f"stride {text(self.stride)}"] if self.stride != ONE else []
        words += [f"dilation {text(self.dilation)}"] if self.dilation != ONE else []
        words += [f"groups {self.groups}"] if self.groups > 1 else []
        if self.upsampled:
            words += [f"upsampled {'+'.join(map(text, self.factors))} from {text(self.first)}"]
        words += ["+ addend"] if self.addend else []
        words += [self.activation]
        words += [f"and its maxima {text(self.pooled.window)}"] if self.pooled is not None else []
        if (norm := self.normed) is not None:
            words += [f"and norm groups {norm.groups}{' affine' if norm.affine else ''} {norm.activation}"]
        return " ".join(words) + self._in_precision


@dataclass(frozen=True, slots=True)
class TransposeShape(_OneImage):
    """One transposed convolution: out[j] sums in[i] * w[d] over all i, d with i * stride + d * dilation = j + first."""

    fin: int
    fout: int
    n: Vec3
    m: Vec3  # output size
    k: Vec3
    first: Vec3  # where the output begins; may be negative
    stride: Vec3 = ONE
    dilation: Vec3 = ONE
    groups: int = 1
    activation: Function = "none"
    parameters: tuple[float, ...] = ()
    precision: Precision = "fp32"
    kind: Literal["conv_transpose"] = "conv_transpose"

    @property
    def in_shape(self) -> tuple[int, int, int, int, int]:
        return 1, *self.n, self.fin

    @property
    def out_shape(self) -> tuple[int, int, int, int, int]:
        return 1, *self.m, self.fout

    @property
    def weight_bytes(self) -> int:
        """Bytes of kernels and biases in float32, before any preparation."""
        return FLOAT32 * (self.fin * (self.fout // self.groups) * prod(self.k) + self.fout)

    def __str__(self) -> str:
        size = f"@{text(self.n)}->{text(self.m)} k{text(self.k)} stride {text(self.stride)}"
        return f"conv_transpose {self.fin}->{self.fout} {size} {self.activation}{self._in_precision}"


@dataclass(frozen=True, slots=True)
class WindowPoolShape(_MapByMap):
    """One max- or average pooling with any stride.

    A maximum ignores padding. A mean divides by the window's voxels in the image, or with `count_padding` also by those
    in the padding, but never by those of `overhang`, where windows reach beyond the padding (ceil mode).
    """

    window: Vec3
    stride: Vec3
    how: Literal["max", "average"] = "max"
    before: Vec3 = ZERO
    behind: Vec3 = ZERO
    overhang: Vec3 = ZERO  # the last of the voxels behind that are no padding
    count_padding: bool = True
    precision: Precision = "fp32"
    kind: Literal["window_pool"] = "window_pool"

    @property
    def out_shape(self) -> tuple[int, int, int, int, int]:
        axes = zip(self.n, self.before, self.behind, self.window, self.stride, strict=True)
        z, y, x = ((n + a + b - w) // s + 1 for n, a, b, w, s in axes)
        return 1, z, y, x, self.f

    def __str__(self) -> str:
        size = f"@{text(self.n)} window {text(self.window)} stride {text(self.stride)}"
        return f"pool {self.how} {self.f} {size}{self._in_precision}"


@dataclass(frozen=True, slots=True)
class UpsampleShape(_Resampled):
    """One upsampling: output voxel j lies at voxel j + `first` of the input upsampled by `factor`.

    nearest  out[j] = in[(j + first) // factor]
    linear   out[j] is in at (j + first + 0.5) / factor - 0.5, between its voxels, clamped at its ends
    """

    factor: Vec3
    first: Vec3
    how: Literal["nearest", "linear"] = "nearest"
    precision: Precision = "fp32"
    kind: Literal["upsample"] = "upsample"

    def __str__(self) -> str:
        return (
            f"upsample {self.how} {self.f} @{text(self.n)}->{text(self.m)} by {text(self.factor)}{self._in_precision}"
        )


@dataclass(frozen=True, slots=True)
class PointShape(_OneImage):
    """One layer that takes its inputs voxel by voxel: sum, product, concatenation, scale, or a function alone."""

    how: Literal["add", "multiply", "concat", "scale", "function"]
    fins: tuple[int, ...]  # maps of each input
    n: Vec3
    activation: Function = "none"
    parameters: tuple[float, ...] = ()
    precision: Precision = "fp32"
    kind: Literal["point"] = "point"
    single: tuple[int, ...] = ()  # inputs of a sum or product that have one voxel, which counts for all

    def size_of(self, index: int) -> Vec3:
        """Return the voxels of an input in memory."""
        return ONE if index in self.single else self.n

    @property
    def in_bytes(self) -> int:
        """Bytes of all inputs."""
        return self.itemsize * sum(maps * prod(self.size_of(index)) for index, maps in enumerate(self.fins))

    @property
    def f(self) -> int:
        """Maps of the output."""
        return sum(self.fins) if self.how == "concat" else max(self.fins)

    @property
    def in_shape(self) -> tuple[int, int, int, int, int]:
        return 1, *self.n, sum(self.fins)

    @property
    def out_shape(self) -> tuple[int, int, int, int, int]:
        return 1, *self.n, self.f

    def __str__(self) -> str:
        maps = "+".join(f"{f}{' of one voxel' * (index in self.single)}" for index, f in enumerate(self.fins))
        return f"{self.how} {maps} @{text(self.n)} {self.activation}{self._in_precision}"


@dataclass(frozen=True, slots=True)
class PadShape(_Resampled):
    """One padding: out[j] = in[j + first], with what lies outside `low` .. `high` as `how` says.

    The volume's voxels along an axis are `low` .. `high` - 1, counted from the first voxel of the input.
    """

    first: Vec3
    low: Vec3
    high: Vec3
    how: PadMode
    precision: Precision = "fp32"
    kind: Literal["pad"] = "pad"

    def __str__(self) -> str:
        return f"pad {self.how} {self.f} @{text(self.n)}->{text(self.m)}{self._in_precision}"


@dataclass(frozen=True, slots=True)
class NormShape(_MapByMap):
    """One norm of a whole image: (x - mean) / sqrt(variance + epsilon) * factor + offset, and a function of it.

    Mean and variance are those of all values of a group of neighbouring maps. Factors and offsets, one for each map,
    are weights of an affine norm, and 1 and 0 of another.
    """

    groups: int  # into which the maps are divided
    epsilon: float = 1e-5
    affine: bool = False
    activation: Function = "none"
    parameters: tuple[float, ...] = ()
    precision: Precision = "fp32"
    kind: Literal["norm"] = "norm"

    @property
    def out_shape(self) -> tuple[int, int, int, int, int]:
        return self.in_shape

    def __str__(self) -> str:
        words = f"norm {self.f} @{text(self.n)} groups {self.groups}{' affine' if self.affine else ''}"
        return f"{words} {self.activation}{self._in_precision}"


@dataclass(frozen=True, slots=True)
class GlobalPoolShape(_MapByMap):
    """The mean or the maximum of each map over a whole image, as an image of one voxel."""

    how: Literal["max", "average"] = "average"
    precision: Precision = "fp32"
    kind: Literal["global_pool"] = "global_pool"

    @property
    def out_shape(self) -> tuple[int, int, int, int, int]:
        return 1, *ONE, self.f

    def __str__(self) -> str:
        return f"global_pool {self.how} {self.f} @{text(self.n)}{self._in_precision}"


GraphShape = (
    GraphConvShape | TransposeShape | WindowPoolShape | UpsampleShape | PointShape | PadShape
    | NormShape | GlobalPoolShape
)  # fmt: skip
GRAPH_KINDS = ("graph_conv", "conv_transpose", "window_pool", "upsample", "point", "pad", "norm", "global_pool")
