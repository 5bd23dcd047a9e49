"""A plan awake: owns arena, prepared weights, bound steps and what columns carry; turns input into output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from traceback import clear_frames
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from znnpy.errors import VramError
from znnpy.kernels.crew import Crew
from znnpy.kernels.primitive import Primitive
from znnpy.kernels.table import TABLE, find
from znnpy.network import ConvWeights, Network
from znnpy.planner.layout import carried_planes, reads_apart
from znnpy.planner.plan import Choice, Plan
from znnpy.run.host import HostWorkshop
from znnpy.run.workshop import Workshop, dtype_of
from znnpy.shapes import turn

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device
    from znnpy.run.trace import Trace


@dataclass(frozen=True, slots=True)
class _Bound:
    """One layer, or two in one, with the arrays it runs on."""

    name: str  # `conv 3 cpu.conv.direct`, in traces
    layer: int  # the first of it
    step: Any  # a Step, CarryingStep or DeviceStep
    x: Any  # all images that there are at a time; `step` takes a part of them or all
    out: Any  # new planes of the next one's `x`
    scratch: Mapping[str, Any]
    apart: bool  # `step` reads carried planes where they are kept; else they lie in front of the new ones in `x`
    batch: int  # images that `step` takes
    pools: int  # images that come out of each
    from_step: int  # of a column, counted from the first that gives output; all before would come of virtual zeros
    carry: Any | None  # last planes of every image of `x`, for the next step of the column


class Session:
    """Runs the steps of one plan. A context manager: `with Session(...) as session: session.run(raw, out)`.

    Entering prepares weights and plans transforms; after that nothing of the size of a patch is allocated.

    In a column that walks, each layer's input is a few planes carried from the step before and the new ones behind
    them. A column begins with zeros for planes that are not there; no output that is kept depends on them, and a layer
    is not run while all it would compute does.

    A plan for the GPU runs on `device`, or on one that the session opens and closes. Then a step that is submitted is
    on its way through three stages, upload, computation and download, and so may be the next one.

    A `trace` is told of every layer of every step, for the images `first` to `last` of its input, and of what is moved;
    `lane` is what the device is called there, where there are several.
    """

    def __init__(
        self,
        plan: Plan,
        network: Network,
        weights: Sequence[ConvWeights],
        crew: Crew,
        table: tuple[Primitive, ...] = TABLE,
        *,
        device: Device | None = None,
        trace: Trace | None = None,
        lane: str | None = None,
    ) -> None:
        self.plan = plan
        self.network = network
        self.crew = crew
        self.written = [0] * len(plan.choices)  # voxels of one map that each choice has written, all images
        self._table = table
        self._weights = dict(zip(network.convolutions, weights, strict=True))
        self._along = network.turned(plan.axis)  # the axis walked along is the first within a session
        self._open = ExitStack()
        self._shop = _workshop(plan, network, crew, device, trace, lane or plan.device.upper())
        self._bound: tuple[_Bound, ...] = ()
        self._input: Any  # new planes of the first layer's input
        self._step = 0  # of the column, counted from the first that gives output

    @property
    def under_way(self) -> int:
        """Steps that may be submitted and not waited for when the next is; 0: `submit` computes."""
        return self._shop.under_way

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self._forget)
            stack.enter_context(self._shop)
            try:
                self._bind()
            except VramError as error:
                clear_frames(error.__traceback__)  # who plans again with less needs what they refer to
                raise
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.__exit__(kind, error, at)

    def _forget(self) -> None:
        """Let go of all arrays."""
        self._bound = ()
        self._input = None

    def _bind(self) -> None:
        plan, shop, steps = self.plan, self._shop, []
        primitives = [find(choice.primitive, self._table) for choice in plan.choices]
        for primitive, choice in zip(primitives, plan.choices, strict=True):
            weights = self._weights.get(choice.layers[0])
            resident = primitive.prepare(_turned(weights, plan.axis), choice.variant, shop.hands)
            steps.append(primitive.bind(resident, choice.shape, choice.variant, shop.hands))
        footprints = [
            primitive.footprint(choice.shape, choice.variant, self.crew.threads)
            for primitive, choice in zip(primitives, plan.choices, strict=True)
        ]
        shop.lay_out(plan.memory.arena, plan.tensors, footprints)
        shapes = [choice.shape for choice in plan.choices]
        carried = carried_planes(shapes, plan.patch_in[plan.axis])
        apart = [reads_apart(footprint, planes) for footprint, planes in zip(footprints, carried, strict=True)]
        xs, news, images = [], [], 1
        for i, shape in enumerate(shapes):
            joined = 0 if apart[i] else carried[i]
            size = (images, shape.in_shape[1] - carried[i] + joined, *shape.in_shape[2:])
            xs.append(shop.tensor(f"x{i}", size, dtype_of(shape)))
            news.append(xs[i][:, joined:])
            images = shape.out_shape[0]
        news.append(shop.tensor(f"x{len(xs)}", shapes[-1].out_shape, dtype_of(shapes[-1])))
        self._input = news[0][0]
        bound = []
        for i, (step, choice) in enumerate(
            zip(steps, plan.choices, strict=True)
        ):  # a generator would outlive `clear_frames`
            x, out, scratch = xs[i], news[i + 1], shop.scratch(i)
            pools = choice.shape.out_shape[0] // choice.shape.batch
            from_step = -self._steps_before(self._along.margins[choice.layers[1] + 1][0])
            carry = self._carry(i, carried[i])
            layer, batch = choice.layers[0], choice.shape.batch
            bound.append(_Bound(_name(choice), layer, step, x, out, scratch, apart[i], batch, pools, from_step, carry))
        self._bound = tuple(bound)

    def _carry(self, index: int, planes: int) -> Any | None:
        """Room for the last `planes` planes of every image of a choice's input, or None where it needs none."""
        if planes == 0:
            return None
        shape = self.plan.choices[index].shape
        images, _, y, x, f = shape.in_shape
        return self._shop.room((self.plan.parts[index] * images, planes, y, x, f), dtype_of(shape))

    def buffers(
        self, raw: np.dtype[Any], out: np.dtype[Any], *, reads: int, writes: int
    ) -> tuple[Iterable[npt.NDArray[Any]], Iterable[npt.NDArray[Any]]]:
        """Arrays for `submit` of these types: as many as keep a run going, and the plan counts.

        reads, writes  steps of the run, and those with output

        On a GPU they are pinned: only then do uploads and downloads go on beside the computation. That takes seconds
        for gigabytes, so each is made when it is asked for, from any thread.
        """
        return self._shop.buffers(raw, out, reads=reads, writes=writes)

    def run(self, raw: npt.NDArray[Any], out: npt.NDArray[Any] | None, *, begins: bool = True) -> None:
        """Compute one step of a column, or one patch: `submit` it and `wait`."""
        self.wait(self.submit(raw, out, begins=begins))

    def submit(self, raw: npt.NDArray[Any], out: npt.NDArray[Any] | None, *, begins: bool = True) -> Any:
        """Begin to compute one step of a column, or one patch; a ticket to `wait` with, in the order of submission.

        raw     (c, *patch_in), any real dtype, as the volume stores it; read only.
        out     (maps, *patch_out) float32, float16 or uint8 (`round(255 * clip(x, 0, 1))`); overwritten. None in the
                first steps of a column that walks: they give no output (`Cover.ahead`).
        begins  the first step of a column; every patch is one.

        No more than `under_way` steps may be without their wait. Until it, `raw` and `out` belong to the session.
        ValuesOverflowError, here or in `wait`, names the layer whose result is not finite.
        """
        axes = (0, *(1 + axis for axis in turn(self.plan.axis)))
        source, target = self._shop.take(raw, out, begins=begins)
        if begins:
            self._step = -self._steps_before(self._along.margins[0][0])
            for bound in self._bound:
                if bound.carry is not None:
                    with self._shop.span("clear", layer=bound.layer):
                        self._shop.clear(bound.carry)
        with self._shop.span("load"):
            self._shop.load(source.transpose(axes), self._input)
        self._advance(0, 0, None if target is None else target.transpose(axes))
        self._step += 1
        return self._shop.give()

    def abandon(self) -> None:
        """The device failed: nothing is asked of it any more, and leaving waits for nothing."""
        self._shop.abandon()

    def done(self, ticket: Any) -> bool:
        """`wait` would return at once."""
        return self._shop.done(ticket)

    def wait(self, ticket: Any) -> None:
        """Until the output of a step is there."""
        self._shop.wait(ticket)

    def _steps_before(self, margin: int) -> int:
        """Steps of a column that come before its output and matter to an activation that is `margin` planes larger."""
        return -(-margin // self.plan.patch_out[self.plan.axis]) if self.plan.walks else 0

    def _advance(self, index: int, first: int, out: Any | None) -> None:
        """Carry on from the input of choice `index`: `first` counts all images of a step up to those that are there."""
        if index == len(self._bound):
            if out is not None:
                fragments = self._bound[-1].out
                with self._shop.span("store", first=first, last=first + len(fragments) - 1):
                    self._shop.store(fragments, first, out)
            return
        bound = self._bound[index]
        runs = self._step >= bound.from_step
        if bound.carry is not None and not (runs and bound.apart):
            self._keep(bound, first, bound.x)
        if not runs:
            return
        for lo in range(0, len(bound.x), bound.batch):
            self._compute(index, first + lo, bound.x[lo : lo + bound.batch])
            self._advance(index + 1, (first + lo) * bound.pools, out)

    def _compute(self, index: int, first: int, x: Any) -> None:
        """Run choice `index` on a part of its input, whose first image is image `first` of all."""
        bound = self._bound[index]
        before = bound.carry[first : first + len(x)] if bound.apart and bound.carry is not None else None
        with self._shop.span(bound.name, layer=bound.layer, first=first, last=first + len(x) - 1):
            self._shop.run(index, bound.step, x, bound.out, bound.scratch, before)
        if before is not None:
            self._keep(bound, first, x)
        self.written[index] += prod(bound.out.shape[:4])

    def _keep(self, bound: _Bound, first: int, x: Any) -> None:
        """Keep the last planes of these images, the first of which is image `first` of all, for the next step."""
        assert bound.carry is not None
        with self._shop.span("carry", layer=bound.layer, first=first, last=first + len(x) - 1):
            self._shop.keep(bound.carry[first : first + len(x)], x, join=not bound.apart)


def _workshop(
    plan: Plan, network: Network, crew: Crew, device: Device | None, trace: Trace | None, lane: str
) -> Workshop:
    """Where a plan runs."""
    if plan.device == "cpu":
        return HostWorkshop(plan, network, crew, trace, lane)
    from znnpy.run.gpu import GpuWorkshop  # here: runs on the CPU need none of it

    return GpuWorkshop(plan, network, crew, device, trace, lane)


def _name(choice: Choice) -> str:
    """Kind, layers and primitive."""
    first, last = choice.layers
    layers = f"{first}" if first == last else f"{first}-{last}"
    return f"{choice.shape.kind} {layers} {choice.primitive}"


def _turned(weights: ConvWeights | None, axis: int) -> ConvWeights | None:
    """Kernels with `axis` first."""
    if weights is None or axis == 0:
        return weights
    order = (0, 1, *(2 + along for along in turn(axis)))
    return ConvWeights(np.ascontiguousarray(weights.weight.transpose(order)), weights.bias)
