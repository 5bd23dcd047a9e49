"""Direct convolution by NVIDIA's cuDNN, channels last: the baseline, and the best choice for some layers.

Method   cuDNN's implicit matrix product; only those of its plans are used that compute correctly (cudnn_plans.py).
         cuDNN's heuristics do not find the fastest one, so the variant selects a plan. Bias and activation are fused
         if the plan can, otherwise a kernel of ours applies them.
Layout   Channels last, as everywhere. A layer of 2^31 values or more is computed image by image and in slabs of planes;
         the parts are even smaller if cuDNN has only its naive plan for these, as in fp32.
Memory   Input, output, workspace.
Bound    Arithmetic.
Source   ZNNi IV-B.1; Chetlur et al., cuDNN (2014); nvidia-cudnn-frontend.
Tested   tests/kernels/gpu/test_conv_cudnn.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.extras import install
from znnpy.kernels.contract import Footprint, Kind, Scratch, Unit, Variant, Work, as_conv, why_not_plain
from znnpy.kernels.gpu.cudnn_plans import (
    MOST_VALUES,
    Chosen,
    best_division,
    check_bytes,
    choose,
    looks_plausible,
    refuse,
    reject,
)
from znnpy.kernels.gpu.kernel_source import KernelInstance
from znnpy.kernels.gpu.libraries import Convolution, RefusedError
from znnpy.layer_shapes import LayerShape
from znnpy.shapes import ACTIVATIONS, FLOAT32, ConvShape, valid

if TYPE_CHECKING:
    from znnpy.graph_shapes import GraphConvShape
    from znnpy.kernels.contract import ConvWeights
    from znnpy.kernels.gpu.device import Device
    from znnpy.machine import Gpu, Machine
    from znnpy.shapes import Precision

MIB = 2**20
LEAN_MIB = 16  # workspace besides a copy of the weights: enough for plans that copy neither input nor output
FEW_TAPS = 32  # taps of a kernel: with more, tf32 has no plan without copies (27 and 125 tried) except those of fp32
CHOICES = 4  # plans to choose from
OLDEST = (9, 16)  # version of cuDNN: 9.8 to 9.15 have 3D kernels with wrong results
ALIGNED = 16  # bytes: cuDNN's alignment of images; in a column they start on any plane
MOST_TERMS = 5000  # longest float32 sum, in sequence, for an error of 1e-6: 2,160 cost 5.8e-7, 10,000 1.3e-6
THREADS = 256
MOST_IMAGES = 65535  # blocks of a grid along y; a loop does the rest
UNITS: dict[Precision, Unit] = {"fp32": "gpu_cudnn_fp32", "tf32": "gpu_cudnn_tf32", "fp16": "gpu_cudnn_fp16"}


@dataclass(frozen=True, slots=True)
class ConvCudnn:
    """Convolution by cuDNN without a workspace."""

    name: str = "gpu.conv.cudnn"
    kind: Kind = "conv"
    version: int = 1
    summary: str = "small kernels in half precision; takes no memory besides input and output"
    source: str = "ZNNi IV-B.1; NVIDIA cuDNN 9"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        if reason := why_not_plain(shape, "gpu.conv.fft_tiled"):
            return reason
        shape = as_conv(shape)
        if machine.gpu is None:
            return "needs a CUDA device"
        if shape.activation == "softmax":
            return "softmax needs all maps of a voxel at once: see gpu.conv.direct"
        return why_no_cudnn(shape, machine.gpu, "gpu.conv.first")

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        """Return workspace sizes (in MiB), plan numbers and the precision, which decides the type of stored weights."""
        del machine
        shape = as_conv(shape)
        return tuple(
            Variant.of(choice=choice, precision=shape.precision, workspace=mib)
            for mib in self.workspaces(shape)
            for choice in range(CHOICES)
        )

    def workspaces(self, shape: ConvShape) -> tuple[int, ...]:
        """Return the useful sizes in MiB."""
        return (lean(shape),)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        del threads
        shape = as_conv(shape)
        small = Convolution(2, shape.fin, shape.fout, shape.n, shape.k, shape.precision, 0, 0, None)
        return Footprint(
            resident=resident_bytes(shape),
            scratch=(Scratch("workspace", variant.count("workspace") * MIB),),
            allowance=check_bytes(small, (1, 0, 0)),
        )

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        return (work_of(as_conv(shape), variant),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Device) -> Resident:
        return upload(weights, variant, device)

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, device: Device) -> _Step:
        return _Step(resident, as_conv(shape), variant, device)


@dataclass(frozen=True, slots=True)
class ConvCudnnWorkspace(ConvCudnn):
    """Convolution by cuDNN with a workspace."""

    name: str = "gpu.conv.cudnn_workspace"
    summary: str = "like gpu.conv.cudnn, but with plans that copy input or output to a layout they prefer"

    def workspaces(self, shape: ConvShape) -> tuple[int, ...]:
        return roomy(shape)


def lean(shape: ConvShape | GraphConvShape) -> int:
    """Return the MiB of workspace for plans that copy neither input nor output."""
    return LEAN_MIB + -(-shape.itemsize * shape.fout * shape.fin * prod(shape.k) // MIB)


def roomy(shape: ConvShape | GraphConvShape) -> tuple[int, ...]:
    """Return the MiB of workspace for plans that copy input or output, and for plans that copy both."""
    copied = [min(nbytes, MOST_VALUES * shape.itemsize) for nbytes in (shape.in_bytes, shape.out_bytes)]
    return tuple(lean(shape) + -(-nbytes // MIB) for nbytes in (max(copied), sum(copied)))


def resident_bytes(shape: ConvShape | GraphConvShape) -> int:
    """Return the bytes of kernels and biases on the device."""
    return shape.itemsize * shape.fout * shape.fin * prod(shape.k) + FLOAT32 * shape.fout


def work_of(shape: ConvShape | GraphConvShape, variant: Variant) -> Work:
    """Return the work of a plan with this workspace."""
    flops = 2.0 * prod(shape.out_shape) * shape.fin * prod(shape.k)
    copied = (variant.count("workspace") - lean(shape)) * MIB  # written and read
    slow = shape.precision == "tf32" and prod(shape.k) > FEW_TAPS and not copied
    unit = UNITS["fp32" if slow else shape.precision]
    return Work(unit, flops, float(shape.in_bytes + shape.out_bytes + 2 * copied))


def upload(weights: ConvWeights | None, variant: Variant, device: Device) -> Resident:
    """Upload kernels, in the precision that a variant names, and biases."""
    assert weights is not None
    dtype = np.float16 if variant.text("precision") == "fp16" else np.float32
    with np.errstate(over="ignore"):  # values beyond float16 show in the result, as any overflow
        kernels = np.ascontiguousarray(weights.weight.transpose(0, 2, 3, 4, 1), dtype)
    return Resident(
        device.put(kernels, "weights"), device.put(np.ascontiguousarray(weights.bias, np.float32), "biases")
    )


def instances() -> list[KernelInstance]:
    """Return all kernels that may be compiled."""
    return [KernelInstance("conv_cudnn.cu", f"finish<{value}>", 64) for value in ("float", "half")]


def why_no_cudnn(shape: ConvShape | GraphConvShape, gpu: Gpu, other: str) -> str | None:
    """Return None if cuDNN is there and can compute a layer exactly enough; else a reason.

    other  the primitive that takes any number of maps
    """
    if reason := _why_no_library(gpu):
        return reason
    if shape.fin * shape.itemsize % ALIGNED or shape.fout * shape.itemsize % ALIGNED:
        return (
            f"cuDNN needs images aligned to {ALIGNED} bytes, and planes of {shape.fin} or {shape.fout} maps in "
            f"{shape.precision} may not be: see {other}"
        )
    terms = shape.fin * prod(shape.k)
    if shape.precision == "fp32" and terms > MOST_TERMS:
        return f"cuDNN adds {terms:,} products in sequence, which costs more than 1e-6 in fp32"
    return None


def _why_no_library(gpu: Gpu) -> str | None:
    versions = dict(gpu.versions)
    if "cudnn-frontend" not in versions:
        return f"needs NVIDIA's cuDNN and its frontend: {install('cudnn')}"
    found = versions.get("cudnn-cu13", "9.16")  # not installed as a package: checked when it is loaded
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST:
        return f"cuDNN {found} has 3D kernels with wrong results: 9.16 or newer is needed"
    return None


class Resident(NamedTuple):
    """Weights on the device."""

    kernels: Any  # (f', kz, ky, kx, f) float32 or float16
    bias: Any  # (f',) float32


class _Call(NamedTuple):
    """A part of the layer that is convolved at once."""

    images: slice
    planes: slice  # planes of the output
    by: Chosen


class _Step:
    def __init__(self, resident: Resident, shape: ConvShape, variant: Variant, device: Device) -> None:
        self._resident, self._shape, self._device = resident, shape, device
        self._limit, self._choice = variant.count("workspace") * MIB, variant.count("choice")
        self._calls: dict[tuple[int, int], tuple[_Call, ...]] = {}
        self._seen: set[tuple[int, int]] = set()  # strides for which results were checked
        kernel = f"finish<{'half' if shape.precision == 'fp16' else 'float'}>"
        self._finish = device.kernels("conv_cudnn.cu", [kernel])[kernel]
        self._planned(prod(shape.in_shape[1:]), prod(shape.out_shape[1:]))

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
        del x_peak, out_peak  # the footprint requests neither
        assert before is None, "the footprint does not have reads_carried"
        steps = x.strides[0] // x.dtype.itemsize, out.strides[0] // out.dtype.itemsize
        if steps in self._seen:
            for call in self._planned(*steps):
                self._compute(call, x, out, scratch["workspace"])
            return
        while not all(self._tried(call, x, out, scratch["workspace"]) for call in self._planned(*steps)):
            del self._calls[steps]
        self._seen.add(steps)

    def _compute(self, call: _Call, x: Any, out: Any, workspace: Any) -> None:
        shape = self._shape
        given, into = self._parts(call, x, out)
        call.by.plan.run(given, self._resident.kernels, self._resident.bias, into, workspace)
        if call.by.problem.finish is None:
            images, size = into.shape[0], prod(into.shape[1:])
            self._finish(
                (-(-size // THREADS), min(images, MOST_IMAGES)),
                (THREADS,),
                into,
                self._resident.bias,
                *(images, size, into.strides[0] // into.dtype.itemsize, shape.fout),
                ACTIVATIONS.index(shape.activation),
            )

    def _tried(self, call: _Call, x: Any, out: Any, workspace: Any) -> bool:
        """Run a call for the first time; if the result is wrong, never choose its plan again and return False."""
        problem, plan = call.by
        try:
            self._compute(call, x, out, workspace)
        except RefusedError:  # some plans only now fail because a size is too large for them
            refuse(problem, plan)
            return False
        given, into = self._parts(call, x, out)
        right = looks_plausible(self._device, problem, given, *self._resident, into, self._shape.activation)
        if not right:
            reject(problem, plan)
        return right

    def _parts(self, call: _Call, x: Any, out: Any) -> tuple[Any, Any]:
        """Return the arrays that a call reads and writes."""
        wanted = slice(call.planes.start, call.planes.stop + self._shape.k[0] - 1)
        return x[call.images, wanted], out[call.images, call.planes]

    def _planned(self, x_step: int, out_step: int) -> tuple[_Call, ...]:
        """Return the calls for images with these strides in values, planned once."""
        found = self._calls.get((x_step, out_step))
        if found is None:
            found = self._calls[x_step, out_step] = self._plan(x_step, out_step)
        return found

    def _plan(self, x_step: int, out_step: int) -> tuple[_Call, ...]:
        return best_division(
            lambda most: parts(self._shape, x_step, out_step, most),
            lambda way: self._calls_for(way, x_step, out_step),
            self._shape,
        )

    def _calls_for(self, way: Sequence[tuple[slice, slice]], x_step: int, out_step: int) -> tuple[_Call, ...]:
        shape = self._shape
        chosen: dict[tuple[int, int], Chosen] = {}
        calls = []
        for images, planes in way:
            size = images.stop - images.start, planes.stop - planes.start
            if size not in chosen:
                n = (size[1] + shape.k[0] - 1, *shape.n[1:])
                asked = Convolution(
                    size[0], shape.fin, shape.fout, n, shape.k, shape.precision, x_step, out_step, shape.activation
                )
                if asked.batch == 1:  # cuDNN refuses strides of 2^31 even if there is no second image
                    size_in, size_out = prod(n) * shape.fin, prod(valid(n, shape.k)) * shape.fout
                    asked = replace(asked, x_step=size_in, out_step=size_out)
                chosen[size] = choose(self._device, asked, self._limit, self._choice)
            calls.append(_Call(images, planes, chosen[size]))
        return tuple(calls)


def parts(shape: ConvShape, x_step: int, out_step: int, most_values: int) -> list[tuple[slice, slice]]:
    """Divide images and planes of the output into parts, so that no tensor has `most_values` or more.

    Returns an empty list if a single plane has more than that.
    """
    mz, my, mx = shape.out
    line_in, line_out = shape.n[1] * shape.n[2] * shape.fin, my * mx * shape.fout
    image_in, image_out = shape.n[0] * line_in, mz * line_out
    if max(image_in, image_out) < most_values:
        most = min((most_values - 1 - image_in) // x_step, (most_values - 1 - image_out) // out_step) + 1
        return [(slice(i, min(i + most, shape.batch)), slice(0, mz)) for i in range(0, shape.batch, most)]
    height = min((most_values - 1) // line_in - shape.k[0] + 1, (most_values - 1) // line_out)
    if height < 1:
        return []
    return [
        (slice(image, image + 1), slice(first, min(first + height, mz)))
        for image in range(shape.batch)
        for first in range(0, mz, height)
    ]
