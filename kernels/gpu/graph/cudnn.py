"""Convolution of graphs by NVIDIA's cuDNN: padding, stride and dilation.

Method   cuDNN's implicit matrix product; plans are chosen and checked as for gpu.conv.cudnn (cudnn_plans.py).
         finish=cudnn  cuDNN adds the bias if a plan can, and applies relu where nothing comes between; a kernel of
                       ours does the rest in place and looks for the peak. finish.cu
         finish=own    That kernel adds the bias and applies relu too.
Layout   Inputs may be parts of larger images, with gaps between lines and planes; for these, cuDNN 9.19 on an H200 has
         fast plans only in fp16 and only with a bias, hence as for finish=cudnn. A layer of 2^31 values or more is
         computed in slabs of planes, the first and last of which have the padding.
Memory   Workspace.
Exact    In fp16 the sums that our kernel finishes are rounded to float16 before that. Those beyond the range are
         infinite, and so is the largest finite value, since some plans give it instead.
Bound    Arithmetic.
Source   Chetlur et al., cuDNN (2014); nvidia-cudnn-frontend.
Tested   tests/kernels/gpu/graph/test_cudnn.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels.contract import Footprint, Kind, Scratch, Variant, Work
from znnpy.kernels.gpu.conv_cudnn import (
    ALIGNED,
    CHOICES,
    MIB,
    Resident,
    lean,
    resident_bytes,
    roomy,
    upload,
    why_no_cudnn,
    work_of,
)
from znnpy.kernels.gpu.cudnn_plans import (
    Chosen,
    best_division,
    check_bytes,
    choose,
    looks_plausible,
    refuse,
    reject,
)
from znnpy.kernels.gpu.graph.finish import Finish, is_done
from znnpy.kernels.gpu.graph.inputs import steps_of
from znnpy.kernels.gpu.graph.layer import given, why_not_here
from znnpy.kernels.gpu.libraries import Convolution, RefusedError
from znnpy.shapes import text

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights
    from znnpy.kernels.gpu.device import Device
    from znnpy.machine import Machine
    from znnpy.shapes import Activation, Sized

GAPS = (1, 1, 1)  # voxels that the small layer which is tried may have between images, planes and lines


def fused(shape: GraphConvShape) -> Activation:
    """Return the activation that cuDNN applies after the bias, if it adds that."""
    return "relu" if shape.activation == "relu" and not shape.addend else "none"


@dataclass(frozen=True, slots=True)
class GraphConvCudnn:
    """Convolutions of graphs by cuDNN without a workspace."""

    name: str = "gpu.graph_conv.cudnn"
    kind: Kind = "graph_conv"
    version: int = 1
    summary: str = "convolutions of one input on tensor cores, strided and dilated ones too: NVIDIA's cuDNN"
    source: str = "NVIDIA cuDNN 9"

    def why_not(self, shape: Sized, machine: Machine) -> str | None:
        if reason := why_not_here(shape, machine, GraphConvShape, "convolutions of graphs"):
            return reason
        shape, other = given(shape, GraphConvShape), "gpu.graph_conv.direct"
        if len(shape.fins) > 1 or shape.upsampled:
            return f"takes one input as it is, and does not copy several, or upsampled ones: see {other}"
        if shape.groups > 1:
            return f"does not compute {shape.groups} groups apart: see {other}"
        if shape.activation == "softmax":
            return f"softmax needs all maps of a voxel at once: see {other}"
        reach = [d * (k - 1) for d, k in zip(shape.dilation, shape.k, strict=True)]
        if any(pad > most for pads in (shape.before, shape.behind) for pad, most in zip(pads, reach, strict=True)):
            pads = f"{text(shape.before)} and {text(shape.behind)}"
            return f"some of its windows hold nothing but padding, which is {pads} voxels: see {other}"
        assert machine.gpu is not None, "why_not_here says so"
        return why_no_cudnn(shape, machine.gpu, other)

    def variants(self, shape: Sized, machine: Machine) -> Sequence[Variant]:
        """Return what finishes the layer, cuDNN or a kernel of ours, and then as for gpu.conv.cudnn."""
        del machine
        shape = given(shape, GraphConvShape)
        return tuple(
            Variant.of(choice=choice, finish=finish, precision=shape.precision, workspace=mib)
            for mib in self.workspaces(shape)
            for finish in ("cudnn", "own")
            for choice in range(CHOICES)
        )

    def workspaces(self, shape: GraphConvShape) -> tuple[int, ...]:
        """Return the useful sizes in MiB."""
        return (lean(shape),)

    def footprint(self, shape: Sized, variant: Variant, threads: int) -> Footprint:
        del threads
        shape = given(shape, GraphConvShape)
        small = Convolution(
            *(1, shape.fin, shape.fout, shape.n, shape.k, shape.precision, 0, 0, None),
            *(shape.before, shape.behind, shape.stride, shape.dilation),
        )
        return Footprint(
            resident=resident_bytes(shape),
            scratch=(Scratch("workspace", variant.count("workspace") * MIB),),
            raises_peak=True,
            allowance=check_bytes(small, GAPS),
        )

    def work(self, shape: Sized, variant: Variant) -> Sequence[Work]:
        shape = given(shape, GraphConvShape)
        done = variant.text("finish") == "cudnn" and is_done(shape, fused(shape))
        written = 0 if done else shape.out_bytes + shape.addend_bytes
        return work_of(shape, variant), Work("gpu_stream", 0.0, float(shape.out_bytes + written))

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Device) -> Resident:
        return upload(weights, variant, device)

    def bind(self, resident: Any, shape: Sized, variant: Variant, device: Device) -> _Step:
        return _Step(resident, given(shape, GraphConvShape), variant, device)


@dataclass(frozen=True, slots=True)
class GraphConvCudnnWorkspace(GraphConvCudnn):
    """Convolutions of graphs by cuDNN with a workspace."""

    name: str = "gpu.graph_conv.cudnn_workspace"
    summary: str = "like gpu.graph_conv.cudnn, but with plans that copy input or output to a layout they prefer"

    def workspaces(self, shape: GraphConvShape) -> tuple[int, ...]:
        return roomy(shape)


class Slab(NamedTuple):
    """Planes that are convolved at once."""

    given: slice  # planes of the input
    before: int  # planes of padding
    behind: int
    planes: slice  # of the output


def slabs(shape: GraphConvShape, plane: int, most_values: int) -> list[Slab]:
    """Divide the planes of the output into parts of the same height, so that no tensor has `most_values` or more.

    Returns an empty list if a single plane has more than that, or if a part would read padding only.

    plane  values from plane to plane of the input
    """
    mz, my, mx = shape.out
    nz, stride, extent = shape.n[0], shape.stride[0], shape.dilation[0] * (shape.k[0] - 1) + 1
    if max(nz * plane, mz * my * mx * shape.fout) < most_values:
        return [Slab(slice(0, nz), shape.before[0], shape.behind[0], slice(0, mz))]
    read = (most_values - 1) // plane
    height = min((read - extent) // stride + 1, (most_values - 1) // (my * mx * shape.fout))
    if read < extent or height < 1:
        return []
    found = []
    for first in range(0, mz, height):
        last = min(first + height, mz)
        begin = first * stride - shape.before[0]
        end = begin + (last - first - 1) * stride + extent
        inside = slice(max(0, begin), min(nz, end))
        if inside.start >= inside.stop:
            return []
        found.append(Slab(inside, inside.start - begin, end - inside.stop, slice(first, last)))
    return found


class _Call(NamedTuple):
    slab: Slab
    by: Chosen


class _Step:
    """A GraphDeviceStep."""

    def __init__(self, resident: Resident, shape: GraphConvShape, variant: Variant, device: Device) -> None:
        self._resident, self._shape, self._device = resident, shape, device
        self._limit, self._choice = variant.count("workspace") * MIB, variant.count("choice")
        self._alone = variant.text("finish") == "own"  # the sums are all that is asked of cuDNN
        self._calls: dict[tuple[int, int], tuple[_Call, ...]] = {}  # by values from plane to plane and line to line
        self._seen: set[tuple[int, int]] = set()  # those for which results were checked
        self._finish = Finish(shape, device)

    def run(self, inputs: Sequence[Any], out: Any, scratch: Mapping[str, Any], *, out_peak: int = 0) -> None:
        x, *addend = inputs
        apart, workspace = self._apart(x, out), scratch["workspace"]
        if apart in self._seen:
            for call in self._planned(apart):
                self._convolve(call, x, out, workspace)
        else:
            while not all(self._tried(call, x, out, workspace) for call in self._planned(apart)):
                del self._calls[apart]
            self._seen.add(apart)
        for call in self._planned(apart):
            more = [one[call.slab.planes] for one in addend]
            self._finish.run(out[call.slab.planes], self._resident.bias, more, call.by.problem.finish, out_peak)

    def _apart(self, x: Any, out: Any) -> tuple[int, int]:
        """Return the values from plane to plane and from line to line of the input; ValueError if they do not do."""
        (nz, ny, nx), fin = self._shape.n, self._shape.fin
        plane, line, voxel = steps_of(x)
        line = line if ny > 1 else nx * fin
        plane = plane if nz > 1 else ny * line
        places = [self._device.address(array) for array in (x, out)]
        if (voxel != fin and nx > 1) or any(at % ALIGNED for at in (*places, *(s * x.itemsize for s in (plane, line)))):
            raise ValueError(
                f"cuDNN needs voxels side by side and lines that begin at multiples of {ALIGNED} bytes; an input of "
                f"{fin} maps at {places[0]} has steps of {plane}, {line} and {voxel} values, and its output is at "
                f"{places[1]}"
            )
        return plane, line

    def _convolve(self, call: _Call, x: Any, out: Any, workspace: Any) -> None:
        into = out[call.slab.planes][None]
        call.by.plan.run(x[call.slab.given][None], *self._resident, into, workspace)

    def _tried(self, call: _Call, x: Any, out: Any, workspace: Any) -> bool:
        """Run a call for the first time; if the result is wrong, never choose its plan again and return False."""
        problem, plan = call.by
        try:
            self._convolve(call, x, out, workspace)
        except RefusedError:  # some plans only now fail because a size is too large for them
            refuse(problem, plan)
            return False
        kernels, bias = self._resident
        given, into = x[call.slab.given][None], out[call.slab.planes][None]
        added = None if problem.finish is None else bias
        right = looks_plausible(self._device, problem, given, kernels, added, into, problem.finish or "none")
        if not right:
            reject(problem, plan)
        return right

    def _planned(self, apart: tuple[int, int]) -> tuple[_Call, ...]:
        """Return the calls for an input with these steps, planned once."""
        found = self._calls.get(apart)
        if found is None:
            found = self._calls[apart] = best_division(
                lambda most: slabs(self._shape, apart[0], most), lambda way: self._calls_for(way, apart), self._shape
            )
        return found

    def _calls_for(self, way: Sequence[Slab], apart: tuple[int, int]) -> tuple[_Call, ...]:
        chosen: dict[Convolution, Chosen] = {}
        calls = []
        for slab in way:
            asked = self._problem(slab, apart)
            if asked not in chosen:
                chosen[asked] = choose(self._device, asked, self._limit, self._choice)
            calls.append(_Call(slab, chosen[asked]))
        return tuple(calls)

    def _problem(self, slab: Slab, apart: tuple[int, int]) -> Convolution:
        """Return what is asked of cuDNN for some planes."""
        shape = self._shape
        (_, ny, nx), before, behind = shape.n, (slab.before, *shape.before[1:]), (slab.behind, *shape.behind[1:])
        n = slab.given.stop - slab.given.start, ny, nx
        plain = apart == (ny * nx * shape.fin, nx * shape.fin)
        out = (slab.planes.stop - slab.planes.start) * prod(shape.out[1:]) * shape.fout
        return Convolution(
            *(1, shape.fin, shape.fout, n, shape.k, shape.precision, n[0] * apart[0], out),
            None if self._alone and plain else fused(shape),
            *(before, behind, shape.stride, shape.dilation, None if plain else apart),
        )
