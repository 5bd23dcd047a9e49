"""Use NVIDIA's libraries: batched transforms by cuFFT, convolutions by cuDNN through its frontend.

A device offers them as `device.libraries`; tests implement the same interface with numpy
(tests/support/emulator/libraries.py). CuPy and cuDNN's frontend are imported when a library is first used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, Protocol

from znnpy.errors import DeviceError
from znnpy.layers import ONE, ZERO
from znnpy.shapes import FLOAT16, FLOAT32, Activation, Precision, Vec3, text

Kind = Literal["real", "complex"]


class Lines(Protocol):
    """A planned batch of one-dimensional transforms of adjacent lines, in place, unnormalised.

    real      a line of n float32 in n // 2 + 1 complex64: `forward` to as many frequencies, `backward` from them; n
              even
    complex   a line of n complex64
    work      scratch of `work_bytes(..)` bytes for the library, aligned to 256 bytes
    """

    def forward(self, values: Any, work: Any) -> None:
        """Transform `values`, (lines, n or n // 2 + 1) complex64 without gaps; queued on the device's stream."""

    def backward(self, values: Any, work: Any) -> None:
        """Transform with the opposite sign."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution as requested from cuDNN: channels last, any steps between images, planes and lines of the input."""

    batch: int
    fin: int
    fout: int
    n: Vec3
    k: Vec3
    precision: Precision  # precision of values and arithmetic
    x_step: int  # values from one image to the next
    out_step: int
    finish: Activation | None  # the activation, after the bias; None: neither bias nor activation
    before: Vec3 = ZERO  # voxels of zeros before each image, which are not in memory
    behind: Vec3 = ZERO
    stride: Vec3 = ONE
    dilation: Vec3 = ONE
    apart: tuple[int, int] | None = None  # values from plane to plane and from line to line of the input; None: no gaps

    @property
    def m(self) -> Vec3:
        """Size of the output."""
        axes = zip(self.n, self.before, self.behind, self.k, self.dilation, self.stride, strict=True)
        z, y, x = ((n + a + b - d * (k - 1) - 1) // s + 1 for n, a, b, k, d, s in axes)
        return z, y, x

    @property
    def itemsize(self) -> int:
        """Bytes of a value."""
        return FLOAT16 if self.precision == "fp16" else FLOAT32

    @property
    def steps(self) -> tuple[int, int]:
        """Values from plane to plane and from line to line of the input."""
        return self.apart or (self.n[1] * self.n[2] * self.fin, self.n[2] * self.fin)

    def __str__(self) -> str:
        words = [f"{self.batch}x{self.fin}->{self.fout} @{text(self.n)} k{text(self.k)}"]
        words += [f"pad {text(self.before)} {text(self.behind)}"] if self.before != ZERO or self.behind != ZERO else []
        words += [f"stride {text(self.stride)}"] if self.stride != ONE else []
        words += [f"dilation {text(self.dilation)}"] if self.dilation != ONE else []
        return " ".join([*words, self.precision])


class RefusedError(DeviceError):
    """cuDNN refuses to run a plan that it has built."""


class ConvolutionPlan(Protocol):
    """A method to compute one `Convolution`."""

    name: str  # the kernel and its settings: the same for equal methods at other sizes
    workspace_bytes: int

    def run(self, x: Any, kernels: Any, bias: Any, out: Any, workspace: Any) -> None:
        """Queue it on the device's stream.

        x, out     (S, n, f) and (S, m, f'), float32, or float16 if the precision is fp16; steps as planned.
        kernels    (f', k, f) of the same type, C order; bias (f',) float32.
        workspace  bytes; None if none are needed.

        Raises RefusedError.
        """


class Libraries(Protocol):
    """The libraries of a device."""

    def lines(self, kind: Kind, n: int, count: int) -> Lines:
        """Plan transforms of `count` lines of `n` points. DeviceError if the library refuses."""

    def convolutions(self, problem: Convolution) -> Iterator[ConvolutionPlan]:
        """Yield plans that can run, in cuDNN's order of preference, or none. Each takes time to build."""

    def same(self, problem: Convolution, plan: ConvolutionPlan) -> ConvolutionPlan | None:
        """Return the plan that does the same as `plan` for another problem; None if there is none."""


def work_bytes(kind: Kind, n: int, count: int) -> int:
    """Return the scratch bytes that cuFFT may use besides `count` lines.

    Measured with cuFFT 12.0, 2026-11-21, one H200: none for any complex n up to 2048 with factors 2, 3, 5, 7 alone, and
    for even real ones except multiples of 98 and 250; for those, 4 times as many bytes as values, and at most 1024
    more.
    """
    return FLOAT32 * n * count + 1024 if kind == "real" else 0


class LibraryDevice(Protocol):
    """The part of a device that its libraries use."""

    @property
    def number(self) -> int:
        """Its number among the devices that the process may see."""

    @property
    def stream(self) -> Any:
        """The stream that libraries queue their work on."""

    def address(self, array: Any) -> int:
        """Return the device address of an array's first element."""


class CudaLibraries:
    """cuFFT and cuDNN on one device."""

    def __init__(self, device: LibraryDevice) -> None:
        self._device = device
        self._handle: Any = None  # handle of cuDNN, created at first use

    def lines(self, kind: Kind, n: int, count: int) -> Lines:
        return _CufftLines(self._device, kind, n, count)

    def convolutions(self, problem: Convolution) -> Iterator[ConvolutionPlan]:
        cudnn = _cudnn()
        graph = self._graph(problem)
        try:
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        except cudnn.cudnnGraphNotSupportedError:
            return
        graph.deselect_numeric_notes(_forbidden(problem.precision))
        for index in range(graph.get_execution_plan_count()):
            if plan := self._built(graph, index):
                yield plan

    def same(self, problem: Convolution, plan: ConvolutionPlan) -> ConvolutionPlan | None:
        assert isinstance(plan, _CudnnPlan)
        graph = self._graph(problem)
        try:
            graph.create_execution_plan(*plan.graph.get_engine_and_knobs_at_index(plan.index))
        except (_cudnn().cudnnGraphNotSupportedError, RuntimeError):  # some knobs have no name in the frontend
            return next((other for other in self.convolutions(problem) if other.name == plan.name), None)
        return self._built(graph, graph.get_execution_plan_count() - 1)

    def _graph(self, problem: Convolution) -> Any:
        """Describe `problem` to cuDNN; dimensions are (S, f, z, y, x), strides give the layout."""
        cudnn = _cudnn()
        if self._handle is None:
            self._handle = cudnn.create_handle()
            cudnn.set_stream(self._handle, self._device.stream.ptr)
        values = cudnn.data_type.HALF if problem.precision == "fp16" else cudnn.data_type.FLOAT
        single = cudnn.data_type.FLOAT
        graph = cudnn.pygraph(
            handle=self._handle, io_data_type=values, intermediate_data_type=single, compute_data_type=single
        )
        p, m = problem, problem.m
        x = graph.tensor(dim=[p.batch, p.fin, *p.n], stride=[p.x_step, 1, *p.steps, p.fin], data_type=values, uid=_X)
        kernels = graph.tensor(
            dim=[p.fout, p.fin, *p.k], stride=_strides(prod(p.k) * p.fin, p.fin, p.k), data_type=values, uid=_KERNELS
        )
        out = graph.conv_fprop(
            image=x, weight=kernels, pre_padding=[*p.before], post_padding=[*p.behind], stride=[*p.stride],
            dilation=[*p.dilation], compute_data_type=single,
        )  # fmt: skip
        if p.finish is not None:
            bias = graph.tensor(
                dim=[1, p.fout, 1, 1, 1], stride=[p.fout, 1, p.fout, p.fout, p.fout], data_type=single, uid=_BIAS
            )
            out = graph.bias(input=out, bias=bias)
            if p.finish != "none":
                out = getattr(graph, p.finish)(out)
        out.set_output(True).set_data_type(values).set_uid(_OUT)
        out.set_dim([p.batch, p.fout, *m]).set_stride(_strides(p.out_step, p.fout, m))
        graph.validate()
        graph.build_operation_graph()
        return graph

    def _built(self, graph: Any, index: int) -> _CudnnPlan | None:
        """Build the plan; return None if cuDNN cannot."""
        try:
            graph.build_plan_at_index(index)
        except (_cudnn().cudnnGraphNotSupportedError, RuntimeError, ValueError):
            return None  # its heuristics propose plans that do not build
        name = graph.get_plan_name_at_index(index)
        return _CudnnPlan(graph, index, self._handle, name, graph.get_workspace_size_plan_at_index(index), self._device)


class _CufftLines:
    """Plans of cuFFT; if one needs a work area, one plan per address of that area."""

    def __init__(self, device: LibraryDevice, kind: Kind, n: int, count: int) -> None:
        self._device, self._kind, self._n, self._count = device, kind, n, count
        self._plans: dict[tuple[bool, int], Any] = {}
        self._needs = {back: self._plan(back, None) for back in ((False, True) if kind == "real" else (False,))}

    def forward(self, values: Any, work: Any) -> None:
        self._run(values, work, back=False)

    def backward(self, values: Any, work: Any) -> None:
        self._run(values, work, back=True)

    def _run(self, values: Any, work: Any, *, back: bool) -> None:
        from cupy.cuda import cufft

        kind = back and self._kind == "real"  # a complex plan serves both directions
        address = self._device.address(work) if self._needs[kind] else 0
        if (kind, address) not in self._plans:
            self._plan(kind, work)
        with self._device.stream:
            self._plans[kind, address].fft(values, values, cufft.CUFFT_INVERSE if back else cufft.CUFFT_FORWARD)

    def _plan(self, back: bool, work: Any) -> int:
        """Plan with this work area and return the bytes that cuFFT wants; without one, keep a plan that wants none."""
        from cupy import cuda
        from cupy.cuda import cufft

        n, count, half = self._n, self._count, self._n // 2 + 1
        before, after, kind = {
            ("complex", False): (n, n, cufft.CUFFT_C2C),
            ("real", False): (2 * half, half, cufft.CUFFT_R2C),
            ("real", True): (half, 2 * half, cufft.CUFFT_C2R),
        }[self._kind, back]
        address = self._device.address(work) if work is not None else 256  # any address: this plan is not run
        asked = [0]

        def area(nbytes: int) -> Any:
            asked.append(nbytes)
            return cuda.MemoryPointer(cuda.UnownedMemory(address, nbytes, work, self._device.number), 0)

        try:
            with cuda.using_allocator(area):
                plan = cufft.PlanNd((n,), (before,), 1, before, (after,), 1, after, kind, count, "C", 0, n)
        except cufft.CuFFTError as error:
            raise DeviceError(
                f"cuFFT refused to plan {count} transforms of {n} {self._kind} points: {error}"
            ) from error
        if sum(asked) > (work_bytes(self._kind, n, count) if work is None else work.nbytes):
            raise DeviceError(f"cuFFT wants {sum(asked)} bytes for {count} lines of {n} points, more than was planned")
        if not any(asked):
            self._plans[back, 0] = plan
        elif work is not None:
            self._plans[back, address] = plan
        return sum(asked)


class _CudnnPlan:
    def __init__(
        self, graph: Any, index: int, handle: Any, name: str, workspace_bytes: int, device: LibraryDevice
    ) -> None:
        self.graph, self.index, self.name, self.workspace_bytes = graph, index, name, workspace_bytes
        self._handle, self._device = handle, device

    def run(self, x: Any, kernels: Any, bias: Any, out: Any, workspace: Any) -> None:
        address = self._device.address
        given = {_X: address(x), _KERNELS: address(kernels), _BIAS: address(bias), _OUT: address(out)}
        area = 0 if workspace is None else address(workspace)
        try:
            self.graph.execute_plan_at_index(given, area, self.index, self._handle)
        except RuntimeError as error:  # the frontend raises it for cuDNN's codes
            raise RefusedError(f"cuDNN refused to run its plan {self.name}: {error}") from error


_X, _KERNELS, _BIAS, _OUT = 1, 2, 3, 4  # tensor identifiers


def _strides(image: int, maps: int, size: Vec3) -> list[int]:
    """Return the strides of (S, f, z, y, x), stored channels last."""
    return [image, 1, size[1] * size[2] * maps, size[2] * maps, maps]


def _forbidden(precision: Precision) -> list[Any]:
    """Return the notes of plans that compute with less precision than requested."""
    notes = _cudnn().numerical_note
    return [notes.DOWN_CONVERT_INPUTS, *([notes.TENSOR_CORE] if precision == "fp32" else [])]


def _cudnn() -> Any:
    import cudnn

    return cudnn
