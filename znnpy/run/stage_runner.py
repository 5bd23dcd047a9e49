"""Runs the layers of one stage of a plan, step by step of a column, on the arrays of one backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from znnpy.kernels.contract import Primitive
from znnpy.kernels.table import find
from znnpy.network import ConvWeights, Network
from znnpy.planner.layout import carried_planes, reads_carry_in_place
from znnpy.planner.plan import Choice, Plan
from znnpy.run.backend import Backend, dtype_of
from znnpy.shapes import turn


@dataclass(frozen=True, slots=True)
class Bound:
    """One choice, bound to the arrays that it runs on."""

    name: str  # `conv 3 cpu.conv.direct`, in traces
    layer: int  # its first layer
    step: Any  # a Step, CarryingStep, DeviceStep or HostStep
    x: Any  # all images that are there at a time; `step` takes some or all of them
    out: Any  # new planes of the next one's `x`; None: the result is handed over to the next stage
    scratch: Mapping[str, Any]
    apart: bool  # `step` reads carried planes where they are kept; else they are in front of the new planes in `x`
    batch: int  # images that `step` takes at a time
    pools: int  # output images for each input image
    from_step: int  # first step of a column in which it runs, counted from the first step with output
    carry: Any | None  # the last planes of every image of `x`, for the next step of the column


class StageRunner:
    """Runs the choices of stage `number` of a plan, from their input to their output.

    In a column each layer's input is a few planes carried from the step before with the new planes behind them. A
    column begins with zeros for planes that are not there. No output that is kept depends on these zeros, and a layer
    does not run while everything that it would compute depends on them.
    """

    def __init__(
        self,
        plan: Plan,
        network: Network,
        weights: Sequence[ConvWeights],
        backend: Backend,
        table: Sequence[Primitive],
        number: int = 0,
    ) -> None:
        self.plan = plan
        self.network = network
        self.written = [0] * len(plan.choices)  # voxels of one map that each choice has written, all images
        self._stage, self._memory = plan.stages[number], plan.memory.stages[number]
        first = sum(len(stage.choices) for stage in plan.stages[:number])
        self._part = range(first, first + len(self._stage.choices))
        self._backend = backend
        self._table = tuple(table)
        self._weights = dict(zip(network.weighted, weights, strict=True))
        self._along = network.turned(plan.axis)  # the axis of columns comes first within a session
        self._bound: tuple[Bound, ...] = ()
        self._input: Any  # new planes of the first layer's input
        self._step = 0  # of the column, counted from the first step with output

    @property
    def input(self) -> Any:
        """New planes (S, z, y, x, f) of the first choice's input, of the images that it takes at a time."""
        return self._input

    def forget(self) -> None:
        """Let go of all arrays."""
        self._bound = ()
        self._input = None

    def bind(self) -> None:
        """Prepare weights, plan transforms, and lay the tensors in the arena."""
        plan, backend, part, choices = self.plan, self._backend, self._part, self._stage.choices
        primitives = [find(choice.primitive, self._table) for choice in choices]
        steps = []
        for primitive, choice in zip(primitives, choices, strict=True):
            weights, executor = self._weights.get(choice.layers[0]), backend.executor_for(choice)
            resident = primitive.prepare(_turned(weights, plan.axis), choice.variant, executor)
            steps.append(primitive.bind(resident, choice.shape, choice.variant, executor))
        footprints = [
            primitive.footprint(choice.shape, choice.variant, plan.compute_threads)
            for primitive, choice in zip(primitives, choices, strict=True)
        ]
        backend.allocate_arena(self._memory.arena, self._stage.tensors, footprints)
        shapes = [choice.shape for choice in choices]
        new = plan.choices[part.start - 1].shape.out[0] if part.start else plan.patch_in[plan.axis]
        carried = carried_planes(shapes, new)
        apart = [reads_carry_in_place(footprint, planes) for footprint, planes in zip(footprints, carried, strict=True)]
        xs, news, images = [], [], shapes[0].batch
        for i, shape in enumerate(shapes):
            joined = 0 if apart[i] else carried[i]
            size = (images, shape.in_shape[1] - carried[i] + joined, *shape.in_shape[2:])
            xs.append(backend.tensor(f"x{part[i]}", size, dtype_of(shape)))
            news.append(xs[i][:, joined:])
            images = shape.out_shape[0]
        ends = part.stop == len(plan.choices)
        news.append(backend.tensor(f"x{part.stop}", shapes[-1].out_shape, dtype_of(shapes[-1])) if ends else None)
        self._input = news[0]
        bound = []
        for i, (step, choice) in enumerate(zip(steps, choices, strict=True)):  # a generator would outlive clear_frames
            scratch = backend.scratch(part[i])
            pools = choice.shape.out_shape[0] // choice.shape.batch
            from_step = -self._steps_before(self._along.margins[choice.layers[1] + 1][0])
            carry = self._carry(part[i], carried[i])
            layer, batch = choice.layers[0], choice.shape.batch
            bound.append(
                Bound(_name(choice), layer, step, xs[i], news[i + 1], scratch, apart[i], batch, pools, from_step, carry)
            )
        self._bound = tuple(bound)

    def _carry(self, index: int, planes: int) -> Any | None:
        """Allocate the last `planes` planes of every image of a choice's input; None where there are none."""
        if planes == 0:
            return None
        shape = self.plan.choices[index].shape
        images, _, y, x, f = shape.in_shape
        return self._backend.allocate((self.plan.sub_batches[index] * images, planes, y, x, f), dtype_of(shape))

    def step(self, raw: Any, out: Any | None, *, begins: bool) -> bool:
        """Run a step of the first stage from raw voxels; return whether its last choice ran.

        raw     (c, z, y, x), any real dtype
        out     as for `advance`
        begins  the step is the first of a column
        """
        if begins:
            self.begin()
        gives = self._step >= self._bound[-1].from_step
        with self._backend.span("load"):
            self._backend.load(raw.transpose(self.axes), self._input[0])
        self.advance(0, out)
        self.end()
        return gives

    @property
    def axes(self) -> tuple[int, ...]:
        """The order of the axes of a dense array (maps, z, y, x) that puts the axis of columns first."""
        return (0, *(1 + axis for axis in turn(self.plan.axis)))

    def begin(self) -> None:
        """Prepare for the first step of a column."""
        self._step = -self._steps_before(self._along.margins[0][0])
        for bound in self._bound:
            if bound.carry is not None:
                with self._backend.span("clear", layer=bound.layer):
                    self._backend.clear_carry(bound.carry)

    def advance(self, first: int, out: Any | None) -> None:
        """Run the layers on `input`, whose first image is image `first` of all that there are in a step.

        out  takes the result: the dense patch (maps, z, y, x), or None in the first steps of a column; where a stage
             follows, all images (S, z, y, x, f) of its input that are new
        """
        self._advance(0, first, out)

    def end(self) -> None:
        """Count the step, at its end."""
        self._step += 1

    def _steps_before(self, margin: int) -> int:
        """Count the steps of a column before its output that matter to a tensor with `margin` more planes."""
        return -(-margin // self.plan.patch_out[self.plan.axis]) if self.plan.streams else 0

    def _advance(self, index: int, first: int, out: Any | None) -> None:
        """Run the choices from `index` on, of which the input begins with image `first` of all images."""
        if index == len(self._bound):
            fragments = self._bound[-1].out
            if out is not None and fragments is not None:
                with self._backend.span("store", first=first, last=first + len(fragments) - 1):
                    self._backend.store(fragments, first, out)
            return
        bound = self._bound[index]
        runs = self._step >= bound.from_step
        if bound.carry is not None and not (runs and bound.apart):
            self._keep(bound, first, bound.x)
        if not runs:
            return
        for lo in range(0, len(bound.x), bound.batch):
            self._compute(index, first + lo, bound.x[lo : lo + bound.batch], out)
            self._advance(index + 1, (first + lo) * bound.pools, out)

    def _compute(self, index: int, first: int, x: Any, handed: Any | None = None) -> None:
        """Run choice `index` on a part of its input that begins with image `first` of all images."""
        bound = self._bound[index]
        before = bound.carry[first : first + len(x)] if bound.apart and bound.carry is not None else None
        out = bound.out
        if out is None:
            assert handed is not None, "what is handed over goes somewhere"
            out = handed[first * bound.pools : (first + len(x)) * bound.pools]
        with self._backend.span(bound.name, layer=bound.layer, first=first, last=first + len(x) - 1):
            self._backend.run(self._part[index], bound.step, x, out, bound.scratch, before)
        if before is not None:
            self._keep(bound, first, x)
        self.written[self._part[index]] += prod(out.shape[:4])

    def _keep(self, bound: Bound, first: int, x: Any) -> None:
        """Save the last planes of these images, which begin with image `first` of all, for the next step."""
        assert bound.carry is not None
        with self._backend.span("carry", layer=bound.layer, first=first, last=first + len(x) - 1):
            self._backend.save_carry(bound.carry[first : first + len(x)], x, join=not bound.apart)


def _name(choice: Choice) -> str:
    """Return kind, layers and primitive of a choice."""
    first, last = choice.layers
    layers = f"{first}" if first == last else f"{first}-{last}"
    return f"{choice.shape.kind} {layers} {choice.primitive}"


def _turned(weights: ConvWeights | None, axis: int) -> ConvWeights | None:
    """Return weights with `axis` as the first axis of the kernels."""
    if weights is None or axis == 0:
        return weights
    order = (0, 1, *(2 + along for along in turn(axis)))
    return ConvWeights(np.ascontiguousarray(weights.weight.transpose(order)), weights.bias)
