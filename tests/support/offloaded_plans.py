"""Plans whose first layers live with the host, that no search would choose, and a primitive for such layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.emulator import EMULATED_GPU
from tests.support.odd_networks import MACHINE, Ways, choice_of
from tests.support.reference_primitives import STAND_INS
from znnpy.errors import ValuesOverflowError
from znnpy.kernels import reference
from znnpy.kernels.contract import ConvWeights, Footprint, Kind, Primitive, Scratch, Variant, Work, as_conv
from znnpy.kernels.table import IN_HOST_RAM, TABLE
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.layer_shapes import LayerShape
from znnpy.machine import Limits, Machine
from znnpy.network import Network, Pool
from znnpy.planner.layout import place
from znnpy.planner.memory import Memory, staging_bytes
from znnpy.planner.plan import Plan, Stage, patch_in
from znnpy.planner.stages import handover_buffers, stage_needs
from znnpy.planner.tilings import TilingSpace, fusion_groups, tiling_of
from znnpy.planner.validate import check_plan
from znnpy.shapes import Precision, Vec3, fused, turned

WITH_GPU = replace(MACHINE, gpu=EMULATED_GPU)
SCRATCH = 200  # bytes


@dataclass(frozen=True, slots=True)
class Sublayers:
    """A convolution of tensors of the host on an emulated GPU, by the definition."""

    name: str = "gpu.conv.with_host"
    kind: Kind = "conv"
    version: int = 1
    summary: str = "computes the definition"
    source: str = "kernels/reference.py"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        return "does not pool" if as_conv(shape).pools else None

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        return (Variant(),)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        scratch = (Scratch("host_ram.x", SCRATCH, 0, 1), Scratch("host_ram.out", SCRATCH, 1, 1))
        return Footprint(host=64, input_until=-1, output_from=2, stages=2, scratch=scratch)

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        return (Work("gpu_direct", 1.0, 1.0),)

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Any) -> ConvWeights | None:
        assert device.stream is not None
        return weights

    def bind(self, resident: ConvWeights, shape: LayerShape, variant: Variant, device: Any) -> _Step:
        return _Step(resident, shape, device)


@dataclass(frozen=True, slots=True)
class _Step:
    weights: ConvWeights
    shape: LayerShape
    device: Any

    def run(
        self, x: npt.NDArray[Any], out: npt.NDArray[Any], scratch: Mapping[str, npt.NDArray[np.uint8]], pool: ThreadPool
    ) -> None:
        assert (x.shape, out.shape) == (self.shape.in_shape, self.shape.out_shape)
        assert {name: array.nbytes for name, array in scratch.items()} == dict.fromkeys(
            ("host_ram.x", "host_ram.out"), SCRATCH
        )
        pool.check()
        shape = as_conv(self.shape)

        def work() -> None:
            for array in scratch.values():
                array[:] = 0xFF

        self.device.stream.queue(work)
        self.device.synchronize(self.device.stream)
        with np.errstate(all="ignore"):
            out[...] = reference.convolve(x, self.weights.weight, self.weights.bias, shape.activation)
        if not np.isfinite(out).all():
            raise ValuesOverflowError("a result is not finite")


WITH_HOST = Sublayers()
EVERY: tuple[Primitive, ...] = (*TABLE, *IN_HOST_RAM, WITH_HOST, *STAND_INS)


def fronts(seed: int = 0, only: Sequence[str] = ()) -> Ways:
    """Return the ways to run host stages on the CPU."""
    return Ways(seed, only, True, MACHINE, TABLE, cheap=True)


def backs(seed: int = 0, *, in_one: bool = True) -> Ways:
    return Ways(seed, (), in_one, WITH_GPU, STAND_INS)


def offloaded_plan(
    network: Network,
    output: Vec3,
    patch: Vec3,
    theta: int,
    *,
    images: int = 1,
    later: int = 0,
    axis: int = 0,
    column: int = 0,
    overlaps: bool = True,
    front: Ways | None = None,
    back: Ways | None = None,
    with_host: Primitive | None = None,
    variant: Variant | None = None,
    precision: Precision = "fp32",
    threads: int = 2,
) -> Plan:
    """Return the plan of just this patch or column, of which the first `theta` layers are offloaded.

    images     of what is handed over that the GPU takes at a time
    later      the same behind each of its poolings; 0: all there are
    with_host  computes the offloaded convolutions, its cheapest variant or `variant`; None: the processor does
    """
    space = TilingSpace(network.turned(axis), turned(output, axis), axis, streams=column > 0, precision=precision)
    shapes = list(tiling_of(space, turned(patch, axis)).shapes)
    some = images
    for index in range(theta, len(shapes)):
        shapes[index] = replace(shapes[index], batch=some)
        some = shapes[index].out_shape[0]
        some = min(later or some, some) if isinstance(network.layers[index], Pool) else some
    shapes[:theta] = [replace(shape, precision="fp32") for shape in shapes[:theta]]
    cut = Network("cut", network.input_channels, space.network.layers[:theta])
    rest = Network("rest", network.maps[theta], space.network.layers[theta:])
    chosen: list[tuple[tuple[int, int], LayerShape, Primitive, Variant]] = []
    for ways, begin, part in (
        (front or fronts(), 0, fusion_groups(cut)),
        (back or backs(), theta, fusion_groups(rest)),
    ):
        for first, last in ((begin + a, begin + b) for a, b in part):
            both = fused(shapes[first], shapes[last]) if last > first and ways.in_one else None
            way = ways.of(both) if both and not (with_host and begin == 0) else None
            if both and way:
                chosen.append(((first, last), both, *way))
                continue
            for layer in range(first, last + 1):
                shape = shapes[layer]
                way = ways.of(shape)
                if with_host is not None and begin == 0 and shape.kind == "conv":
                    shape = replace(shape, precision=precision)
                    way = with_host, variant or with_host.variants(shape, WITH_GPU)[0]
                assert way is not None
                chosen.append(((layer, layer), shape, *way))
    offloaded = sum(last < theta for (_, last), _, _, _ in chosen)
    limits = Limits(2**32, threads, 2**32)
    pool = (limits.without_feed_threads(1) if overlaps else limits).threads
    footprints = [primitive.footprint(shape, of, pool) for _, shape, primitive, of in chosen]
    step = patch_in(network, patch, axis, streams=column > 0)
    steps = [(way[1], footprint) for way, footprint in zip(chosen, footprints, strict=True)]
    placed = [(needs.memory, *place(needs.tensors)) for needs in stage_needs(steps, offloaded, step[axis], "gpu")]
    choices = tuple(choice_of(*way, footprint) for way, footprint in zip(chosen, footprints, strict=True))
    handed = chosen[offloaded - 1][1].out_bytes
    parts = chosen[offloaded - 1][1].out_shape[0] // chosen[offloaded][1].batch
    memory = Memory(
        stages=tuple(replace(own, arena=arena) for own, _, arena in placed),
        baseline=0,
        reading=0,
        writing=0,
        staging=staging_bytes(handed // parts, 4 * network.output_channels * prod(patch)),
        handover=handover_buffers(overlap=overlaps) * handed,
    )
    plan = Plan(
        limits=limits,
        feed_threads=threads - pool,
        output=output,
        patch_out=patch,
        patch_in=step,
        axis=axis,
        column_planes=column,
        stages=tuple(
            Stage(own.device, some, tensors)
            for (own, tensors, _), some in zip(placed, (choices[:offloaded], choices[offloaded:]), strict=True)
        ),
        memory=memory,
        itemsize_in=1,
        itemsize_out=4,
        columns=1,
        overlap=overlaps,
    ).for_output(output, network)
    check_plan(plan, network, WITH_GPU, EVERY)
    return plan
