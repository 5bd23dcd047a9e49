"""The contract between planner, session and kernels (FFTW's solver, mapped).

The planner asks `why_not`, `variants`, `footprint` and `work`: arithmetic on shapes, no arrays. The session calls
`prepare` once per layer, `bind` once per shape, and the step's `run` once per patch. Arrays belong to the session.

A convolution whose shape has a `pool` is two layers in one: primitives that cannot do that say so (`why_not_plain`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from znnpy.network import ConvWeights as ConvWeights
from znnpy.shapes import ConvShape, LayerShape

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from znnpy.kernels.crew import Crew
    from znnpy.machine import Machine
    from znnpy.shapes import Vec3

    Array = npt.NDArray[np.float32]
    Bytes = npt.NDArray[np.uint8]

Kind = Literal["conv", "pool", "maxfilter", "maxout"]
# What a rate is measured for.
Unit = Literal[
    "product",
    "fft",
    "copy",
    "pool",
    "lane_product",
    "lane_fft",
    "lane_stream",
    "gpu_fft16",  # transforms of the fused tiled FFT, by the longest side of a tile
    "gpu_fft24",
    "gpu_fft32",
    "gpu_half_product",  # of spectra in float16
    "gpu_split_product",  # of spectra as two float16 each
    "gpu_float_product",  # of complex64 matrices
    "gpu_direct",
    "gpu_gemm_float",  # the implicit matrix product: on float32 units, in float16, in two of them
    "gpu_gemm_half",
    "gpu_gemm_split",
    "gpu_wgmma_half",  # the same where tensor cores read shared memory
    "gpu_wgmma_split",
    "gpu_first",
    "gpu_block",
    "gpu_cuconv",
    "gpu_stream",  # poolings, copies
    "gpu_upload",  # from pinned memory of the host, by a kernel's side: what it takes of the kernel's time
    "gpu_link",  # copies between pinned memory of the host and the device, one way
    "gpu_cufft",
    "gpu_cudnn_fp32",
    "gpu_cudnn_tf32",
    "gpu_cudnn_fp16",
]

ALIGNMENT = 64  # bytes, of scratch and of tensors in the arena: one cache line, one AVX-512 register


@dataclass(frozen=True, slots=True)
class Variant:
    """What the search may choose inside a primitive: tile size, blocking, splits. Pure data, e.g. tile=(16, 16, 16)."""

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

    def word(self, name: str) -> str:
        value = self._value(name)
        if not isinstance(value, str):
            raise TypeError(f"{name} is {value}, not a word")
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
    """One buffer a step needs beside input and output, alive in stages `first`..`last`, both included."""

    name: str
    nbytes: int
    first: int = 0
    last: int = 0


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one layer, stage by stage: enough to lay it out in an arena without counting a tensor twice.

    The input may be overwritten after stage `input_until`; the output is first written in stage `output_from`.
    With output_from > input_until the two may share memory (Table II of the ZNNi paper: "FREE-MEMORY(I)").
    """

    resident: int = 0  # kept between patches: weights, transformed weights
    host: int = 0  # on a GPU: kept between patches in pinned memory of the host
    input_until: int = 0
    output_from: int = 0
    stages: int = 1
    scratch: tuple[Scratch, ...] = ()
    reads_carried: bool = False  # its steps are `CarryingStep`s
    reads_peak: bool = False  # on a GPU: its steps need the largest |x| there is
    raises_peak: bool = False  # on a GPU: its steps find the largest |out| themselves
    # What the libraries (FFTW, BLAS, numpy) allocate themselves while it runs, or while weights are prepared.
    allowance: int = 0

    def working(self, shape: LayerShape) -> int:
        """Peak bytes while running: input, output and scratch of the fullest stage."""
        return (
            max(
                (shape.in_bytes if stage <= self.input_until else 0)
                + (shape.out_bytes if stage >= self.output_from else 0)
                + sum(s.nbytes for s in self.scratch if s.first <= stage <= s.last)
                for stage in range(self.stages)
            )
            + self.allowance
        )


class Work(NamedTuple):
    """What one stage does: arithmetic and bytes moved through memory, of one kind of unit."""

    unit: Unit
    flops: float
    nbytes: float


class Step(Protocol):
    """A primitive bound to one shape: ready to run on any arrays of that shape."""

    def run(self, x: Array, out: Array, scratch: Mapping[str, Bytes]) -> None:
        """Compute the layer.

        x        `shape.in_shape` float32; not modified, except that it may share memory with `out` when the
                 footprint says output_from > input_until. C order within an image; the batch axis has any stride.
                 Images start on any float: planes that a column carries lie before what a step is given.
        out      `shape.out_shape` float32; overwritten; strides as `x`. No assumption on what it held.
        scratch  one array of bytes per Scratch of the footprint, on ALIGNMENT; no assumption on what they hold.

        Raises ValuesOverflowError when a convolution's result is infinite or not a number.
        """


class CarryingStep(Protocol):
    """A step that takes the first planes of its input from where a column keeps them, so that nothing is moved."""

    def run(self, x: Array, out: Array, scratch: Mapping[str, Bytes], before: Array | None = None) -> None:
        """Compute the layer as `Step.run` does, of the planes of `before` and, behind them along z, those of `x`.

        before  (S, carried, y, x, f) float32; not modified; strides as `x`. None: all planes are in `x`.
        x       (S, n_z - carried, y, x, f).
        """


class DeviceStep(Protocol):
    """A primitive bound to one shape on a GPU. Calls return before the work is done: it is queued on its stream."""

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
        """Compute the layer as `Step.run` and `CarryingStep.run` do, on arrays in the memory of the device.

        Values are float16 where the shape's precision is fp16, else float32.

        x_peak    address of a float32 in device memory, no smaller than any |x|, `before` included; given where the
                  footprint says reads_peak.
        out_peak  address of a float32 in device memory that is raised to the largest |out|, before it is rounded to
                  float16, if that is larger; infinity and NaN count as larger than every number. 0: nobody asks. Given
                  only where the footprint says raises_peak.
        """


class HostStep(Protocol):
    """A primitive bound to one shape on a GPU whose input and output live in the memory of the host."""

    def run(self, x: Any, out: Any, scratch: Mapping[str, Any], crew: Crew) -> None:
        """Compute the layer as `Step.run` does; it is done when this returns.

        x, out   numpy arrays, pageable, of any strides; float16 where the shape's precision is fp16, else float32.
        scratch  of the device.
        crew     whose threads copy between them and pinned buffers, and whose stop flag is looked at in between.

        Raises Stopped, nothing being under way on the device any more, and ValuesOverflowError as `Step.run`.
        """


class Primitive(Protocol):
    """A way to compute one kind of layer on one kind of device."""

    @property
    def name(self) -> str:
        """`device.layer.method`, e.g. `cpu.conv.fft_tiled`."""

    @property
    def kind(self) -> Kind:
        """The kind of layer it computes."""

    @property
    def version(self) -> int:
        """Raised when results or costs change: plans and measured costs name it."""

    @property
    def summary(self) -> str:
        """When it is the one to take, in one line for `znnpy primitives`."""

    @property
    def source(self) -> str:
        """Where the method comes from."""

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        """None if it applies; else the reason, in words the planner can print."""

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        """What the search may choose from; at least one where `why_not` is None."""

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        """Bytes it needs when run by `threads` threads."""

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        """What it does, stage by stage: a rate turns it into seconds."""

    def prepare(self, weights: ConvWeights | None, variant: Variant, crew: Any, /) -> Any:
        """Transformed weights, made once and shared by every shape that meets them. None for layers without weights.

        crew  who works: a Crew on the CPU, a Device on a GPU.
        """

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, crew: Any, /) -> Any:
        """A step for this shape: a Step or CarryingStep on the CPU, a DeviceStep or HostStep on a GPU.

        May plan transforms; allocates nothing that lasts but their tables.
        """


def as_conv(shape: LayerShape) -> ConvShape:
    """`shape`, which a primitive of kind "conv" was asked for; TypeError if it is another kind of layer."""
    if not isinstance(shape, ConvShape):
        raise TypeError(f"a primitive for convolutions was given {shape}; ask why_not first")
    return shape


def why_not_fp32(shape: LayerShape) -> str | None:
    """None if `shape` is in fp32; else what it is, for primitives that compute in nothing else."""
    return None if shape.precision == "fp32" else f"computes in fp32, not in {shape.precision}"


def why_not_plain(shape: LayerShape, pooling: str = "cpu.conv.fft_lanes") -> str | None:
    """None if `shape` is a convolution and nothing more; else what it is, for primitives that compute no more.

    pooling  the primitive of the same device that pools what it computes
    """
    if not isinstance(shape, ConvShape):
        return f"computes convolutions, not {shape.kind}"
    return f"does not pool into fragments what it computes: see {pooling}" if shape.pools else None


def why_not_on_gpu(shape: LayerShape, machine: Machine, *, softmax: bool = True) -> str | None:
    """None if `shape` is a convolution and nothing more and there is a GPU to compute it on; else what is in the way.

    softmax  False: for primitives that see some of a voxel's maps at a time
    """
    if machine.gpu is None:
        return "needs a CUDA device"
    if reason := why_not_plain(shape, "gpu.conv.fft_tiled"):
        return reason
    if as_conv(shape).activation == "softmax" and not softmax:
        return "softmax needs all maps of a voxel in one place: see gpu.conv.direct"
    return None
