"""The contract between planner, session and kernels (compare FFTW's solvers).

The planner calls `why_not`, `variants`, `footprint` and `work`: arithmetic on shapes, no arrays. The session calls
`prepare` once per layer, `bind` once per shape, and the step's `run` once per patch. The session owns all arrays.

A convolution whose shape has a `pool` is two layers in one; primitives that cannot fuse them refuse (`why_not_plain`).
So is one of a graph whose shape is `pooled`, which gives two outputs, or `normed` (`why_not_two`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from znnpy.graph_shapes import GraphConvShape
from znnpy.layer_shapes import LayerShape
from znnpy.network import ConvWeights as ConvWeights
from znnpy.shapes import CPU_PRECISIONS, ConvShape, FilterShape, MaxoutShape, PoolShape, Sized

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Machine
    from znnpy.shapes import Vec3

    Array = npt.NDArray[np.float32]
    Bytes = npt.NDArray[np.uint8]

Kind = Literal[
    "conv", "pool", "maxfilter", "maxout",
    "graph_conv", "conv_transpose", "window_pool", "upsample", "point", "pad",  # of graphs, as in graph_shapes.py
    "norm", "global_pool",  # of graphs, over whole images
]  # fmt: skip
# The resources that rates are measured for.
Unit = Literal[
    "product",
    "fft",
    "copy",
    "pool",
    "lane_product",
    "lane_bf16_product",  # products of spectra in words of bfloat16 with sums in float32, on AVX512-BF16
    "lane_amx_product",  # the same on AMX
    "lane_fft",
    "lane_stream",
    "amx_product",  # products of bfloat16
    "bf16_product",
    "gpu_fft16",  # transforms of the fused tiled FFT, by the longest side of a tile
    "gpu_fft24",
    "gpu_fft32",
    "gpu_half_product",  # products of spectra in float16
    "gpu_split_product",  # products of spectra, each split into two float16
    "gpu_float_product",  # products of complex64 matrices
    "gpu_direct",
    "gpu_gemm_float",  # the implicit matrix product: on float32 units, in float16, in split float16
    "gpu_gemm_half",
    "gpu_gemm_split",
    "gpu_wgmma_half",  # the same where tensor cores read shared memory
    "gpu_wgmma_split",
    "gpu_scatter_half",  # a product in float16 whose results are scattered
    "gpu_first",
    "gpu_block",
    "gpu_cuconv",
    "gpu_stream",  # poolings, copies
    "gpu_upload",  # uploads from pinned host memory while a kernel runs: the time they add to the kernel
    "gpu_link",  # copies between pinned host memory and the device, one way
    "gpu_cufft",
    "gpu_cudnn_fp32",
    "gpu_cudnn_tf32",
    "gpu_cudnn_fp16",
]

ALIGNMENT = 64  # bytes, for scratch and tensors in the arena: one cache line, one AVX-512 register


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings inside a primitive that the planner may choose, such as tile=(16, 16, 16): pure data."""

    parameters: tuple[tuple[str, int | str | tuple[int, int, int]], ...] = ()

    @classmethod
    def of(cls, **parameters: int | str | Vec3) -> Variant:
        return cls(tuple(sorted(parameters.items())))

    def count(self, name: str) -> int:
        value = self._value(name)
        if not isinstance(value, int):
            raise TypeError(f"{name} is {value}, not a count")
        return value

    def size(self, name: str) -> Vec3:
        value = self._value(name)
        if not isinstance(value, tuple):
            raise TypeError(f"{name} is {value}, not a size")
        return value

    def text(self, name: str) -> str:
        value = self._value(name)
        if not isinstance(value, str):
            raise TypeError(f"{name} is {value}, not a text")
        return value

    def _value(self, name: str) -> int | str | Vec3:
        for known, value in self.parameters:
            if known == name:
                return value
        raise KeyError(name)

    def __str__(self) -> str:
        return " ".join(
            f"{name}={'x'.join(map(str, value)) if isinstance(value, tuple) else value}"
            for name, value in self.parameters
        )


class Scratch(NamedTuple):
    """One buffer that a step needs besides input and output; it is live in stages `first`..`last`, both included."""

    name: str
    nbytes: int
    first: int = 0
    last: int = 0


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of one layer in bytes, stage by stage: enough to place it in an arena and count every tensor once.

    The input may be overwritten after stage `input_until`; the output is first written in stage `output_from`. If
    output_from > input_until, the two may share memory (Table II of the ZNNi paper: "FREE-MEMORY(I)").
    """

    resident: int = 0  # kept between patches: weights, transformed weights
    host: int = 0  # bytes kept between patches in pinned host memory (GPU only)
    input_until: int = 0
    output_from: int = 0
    stages: int = 1
    scratch: tuple[Scratch, ...] = ()
    reads_carried: bool = False  # its steps are `CarryingStep`s
    reads_peak: bool = False  # its steps need an upper bound of |x| (GPU only)
    raises_peak: bool = False  # its steps compute the largest |out| themselves (GPU only)
    # Memory that libraries (FFTW, BLAS, numpy) allocate themselves while it runs or while weights are prepared.
    allowance: int = 0

    def working(self, shape: LayerShape) -> int:
        """Return the peak bytes while running: input, output and scratch of the largest stage."""
        return (
            max(
                (shape.in_bytes if stage <= self.input_until else 0)
                + (shape.out_bytes + shape.pooled_bytes if stage >= self.output_from else 0)
                + sum(s.nbytes for s in self.scratch if s.first <= stage <= s.last)
                for stage in range(self.stages)
            )
            + self.allowance
        )


class Work(NamedTuple):
    """The work of one stage: arithmetic and bytes moved through memory, on one resource."""

    unit: Unit
    flops: float
    nbytes: float


class Step(Protocol):
    """A primitive bound to one shape: ready to run on any arrays of that shape."""

    def run(self, x: Array, out: Array, scratch: Mapping[str, Bytes]) -> None:
        """Compute the layer. Arrays are of float32, or of bfloat16 if the shape's precision is bf16.

        x        `shape.in_shape`; not modified, except that it may share memory with `out` if the footprint has
                 output_from > input_until. C order within an image; the batch axis may have any stride. Images are
                 aligned to a value only: planes that a column carries may precede them.
        out      `shape.out_shape`; overwritten; strides as for `x`. Its previous contents are undefined.
        scratch  one array of bytes per Scratch of the footprint, aligned to ALIGNMENT; contents undefined.

        Raises ValuesOverflowError if a convolution's result is infinite or not a number.
        """


class CarryingStep(Protocol):
    """A step that reads the first planes of its input from a column's carry buffer, so that nothing is copied."""

    def run(self, x: Array, out: Array, scratch: Mapping[str, Bytes], before: Array | None = None) -> None:
        """Compute the layer as `Step.run` does; along z the input is the planes of `before`, followed by those of `x`.

        before  (S, carried, y, x, f) float32; not modified; strides as for `x`. None: all planes are in `x`.
        x       (S, n_z - carried, y, x, f).
        """


class GraphStep(Protocol):
    """A primitive bound to one shape of `znnpy/graph_shapes.py`: ready to run on one image."""

    def run(
        self, inputs: Sequence[Array], out: Array, scratch: Mapping[str, Bytes], pooled: Array | None = None
    ) -> None:
        """Compute the layer. Arrays are of float32, or of bfloat16 if the shape's precision is bf16.

        inputs   one array (z, y, x, f) per input of the layer, of the shape's size `n`; not modified. The maps of a
                 voxel are contiguous; other strides are multiples of a value, and arrays are aligned to a value.
                 The addend of a convolution comes last and is as large as `out`. An input never shares memory with
                 `out`.
        out      (z, y, x, f') in C order, the shape's `out_shape` without the batch; overwritten. Its previous
                 contents are undefined.
        scratch  one array of bytes per Scratch of the footprint, aligned to ALIGNMENT; contents undefined.
        pooled   the second output of a convolution whose shape has one, of the shape's `pooled_shape` and as `out`;
                 only given to these.

        Raises ValuesOverflowError if a result of arithmetic is infinite or not a number.
        """


class DeviceStep(Protocol):
    """A primitive bound to one shape on a GPU. Calls queue work on the device's stream and return at once."""

    def run(
        self,
        x: Any,
        out: Any,
        scratch: Mapping[str, Any],
        before: Any | None = None,
        *,
        x_peak: int = 0,
        out_peak: int = 0,
    ) -> None:
        """Compute the layer as `Step.run` and `CarryingStep.run` do, on arrays in device memory.

        Values are float16 if the shape's precision is fp16, else float32.

        x_peak    address of a float32 in device memory, no smaller than any |x|, `before` included; passed if the
                  footprint has reads_peak.
        out_peak  address of a float32 in device memory that is raised to the largest |out|, before rounding to float16,
                  if that is larger; infinity and NaN count as larger than every number. 0: not wanted. Passed only if
                  the footprint has raises_peak.
        """


class GraphDeviceStep(Protocol):
    """A primitive bound to one shape of `znnpy/graph_shapes.py` on a GPU: queues work on the device's stream."""

    def run(self, inputs: Sequence[Any], out: Any, scratch: Mapping[str, Any], *, out_peak: int = 0) -> None:
        """Compute the layer as `GraphStep.run` does, on arrays in device memory.

        Values are float16 if the shape's precision is fp16, else float32. Arrays are aligned to a value.

        out_peak  as for `DeviceStep.run`; passed only if the footprint has raises_peak, which the footprints of all
                  layers with arithmetic have.
        """


class HostStep(Protocol):
    """A primitive bound to one shape on a GPU whose input and output live in host memory."""

    def run(self, x: Any, out: Any, scratch: Mapping[str, Any], pool: ThreadPool) -> None:
        """Compute the layer as `Step.run` does; the work is done when the call returns.

        x, out   numpy arrays, pageable, any strides; float16 if the shape's precision is fp16, else float32.
        scratch  buffers in device memory.
        pool     thread pool that copies between the arrays and pinned buffers, and whose stop flag is checked between
                 copies.

        Raises Stopped once nothing runs on the device any more, and ValuesOverflowError as `Step.run` does.
        """


class Primitive(Protocol):
    """A method to compute one kind of layer on one kind of device."""

    @property
    def name(self) -> str:
        """The name `device.layer.method`, e.g. `cpu.conv.fft_tiled`."""

    @property
    def kind(self) -> Kind:
        """The kind of layer it computes."""

    @property
    def version(self) -> int:
        """A number raised when results or costs change: plans and measured costs record it."""

    @property
    def summary(self) -> str:
        """Say in one line for `znnpy primitives` when to choose it."""

    @property
    def source(self) -> str:
        """The source of the method."""

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        """Return None if the primitive applies; else the reason, in a phrase that the planner can print."""

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        """Return the variants to search; at least one if `why_not` returns None."""

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        """Return the bytes it needs when run by `threads` threads."""

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        """Return its work, stage by stage; rates turn it into seconds."""

    def prepare(self, weights: ConvWeights | None, variant: Variant, pool: Any, /) -> Any:
        """Return the transformed weights, computed once and shared by every shape; None for layers without weights.

        pool  the executor: a ThreadPool on the CPU, a Device on a GPU.
        """

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, pool: Any, /) -> Any:
        """Return a step for this shape: a Step or CarryingStep on the CPU, a DeviceStep or HostStep on a GPU.

        It may plan transforms, and keeps no memory besides their tables.
        """


def as_conv(shape: LayerShape) -> ConvShape:
    """Return `shape` as a convolution; TypeError if it is another kind of layer."""
    if not isinstance(shape, ConvShape):
        raise TypeError(f"a primitive for convolutions was given {shape}; ask why_not first")
    return shape


Windowed = PoolShape | FilterShape


def as_windowed(shape: LayerShape) -> Windowed:
    """Return `shape` as a pooling or a max-filter; TypeError if it is another kind of layer."""
    if not isinstance(shape, Windowed):
        raise TypeError(f"maxima over windows are computed here, not {shape}")
    return shape


def why_not_pooling(shape: LayerShape, *, fragments: bool, other: str) -> str | None:
    """Return None if `shape` is a pooling with, or without, fragments; else a reason.

    other  the primitive of the same device for the other kind of pooling
    """
    if not isinstance(shape, PoolShape):
        return f"computes poolings, not {shape.kind}"
    if shape.fragments == fragments:
        return None
    return f"{'plain pooling has no fragments' if fragments else 'dense output needs every offset'}: see {other}"


def why_not_filter(shape: LayerShape) -> str | None:
    """Return None if `shape` is a max-filter; else a reason."""
    return None if isinstance(shape, FilterShape) else f"computes max-filters, not {shape.kind}"


def why_not_maxout(shape: LayerShape) -> str | None:
    """Return None if `shape` is a maxout; else a reason."""
    return None if isinstance(shape, MaxoutShape) else f"computes maxouts, not {shape.kind}"


def why_not_fp32(shape: LayerShape | Sized) -> str | None:
    """Return None if fp32 is exact enough for `shape` and its values are float32, else a reason."""
    return None if shape.precision in ("fp32", "bf16x2") else f"computes in fp32, not in {shape.precision}"


def why_not_fp32_or_bf16(shape: LayerShape | Sized) -> str | None:
    """Return None if the values of `shape` are float32 or bfloat16 and no less exact arithmetic is needed."""
    if shape.precision in CPU_PRECISIONS:
        return None
    return f"computes in fp32 and bf16, not in {shape.precision}"


def why_not_plain(shape: LayerShape, pooling: str = "cpu.conv.fft_lanes") -> str | None:
    """Return None if `shape` is a convolution without fused pooling, else a reason.

    pooling  the primitive of the same device that fuses pooling
    """
    if not isinstance(shape, ConvShape):
        return f"computes convolutions, not {shape.kind}"
    return f"does not fuse pooling into fragments: see {pooling}" if shape.pools else None


def why_not_pooled(shape: Sized) -> str | None:
    """Return None unless `shape` is a convolution of a graph with a second output, its maxima over windows."""
    two = isinstance(shape, GraphConvShape) and shape.pooled is not None
    return "takes no maxima of its output: see cpu.graph_conv.amx" if two else None


def why_not_normed(shape: Sized) -> str | None:
    """Return None unless `shape` is a convolution of a graph that gives a norm of its output."""
    normed = isinstance(shape, GraphConvShape) and shape.normed is not None
    return "does not normalise its output: see gpu.graph_conv.normed" if normed else None


def why_not_two(shape: Sized) -> str | None:
    """Return None unless `shape` is a convolution of a graph in one with the pooling or the norm behind it."""
    return why_not_pooled(shape) or why_not_normed(shape)


def why_not_on_gpu(shape: LayerShape, machine: Machine, *, softmax: bool = True) -> str | None:
    """Return None if `shape` is a convolution without fused pooling and there is a GPU to compute it, else a reason.

    softmax  False: for primitives that see only some of a voxel's maps at a time
    """
    if machine.gpu is None:
        return "needs a CUDA device"
    if reason := why_not_plain(shape, "gpu.conv.fft_tiled"):
        return reason
    if as_conv(shape).activation == "softmax" and not softmax:
        return "softmax needs all maps of a voxel in one place: see gpu.conv.direct"
    return None


def device_of(primitive: str) -> str:
    """Return where a primitive runs, `cpu` or `gpu`: the first part of its name."""
    return primitive.partition(".")[0]
