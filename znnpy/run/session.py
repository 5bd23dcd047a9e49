"""A plan awake: owns arena, prepared weights, bound steps and what columns carry; turns input into output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import numpy.typing as npt

from znnpy.errors import ValuesOverflowError
from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.crew import Crew
from znnpy.kernels.primitive import Primitive, Step
from znnpy.kernels.table import TABLE, find
from znnpy.network import ConvWeights, Network, Pool
from znnpy.planner.layout import carried_planes, reads_apart
from znnpy.planner.plan import Plan
from znnpy.run.arena import Arena
from znnpy.shapes import FLOAT32, LayerShape, Vec3, turn

if TYPE_CHECKING:
    from znnpy.kernels.primitive import Array, Bytes, CarryingStep


@dataclass(frozen=True, slots=True)
class _Bound:
    """One layer, or two in one, with the arrays it runs on."""

    step: Step
    x: Array  # all images that there are at a time; `step` takes a part of them or all
    out: Array  # new planes of the next one's `x`
    scratch: dict[str, Bytes]
    apart: bool  # `step` reads carried planes where they are kept; else they lie in front of the new ones in `x`
    batch: int  # images that `step` takes
    pools: int  # images that come out of each
    from_step: int  # of a column, counted from the first that gives output; all before would come of virtual zeros
    carry: Array | None  # last planes of every image of `x`, for the next step of the column


class Session:
    """Runs the steps of one plan. A context manager: `with Session(...) as session: session.run(raw, out)`.

    Entering prepares weights and plans transforms; after that nothing of the size of a patch is allocated.

    In a column that walks, each layer's input is a few planes carried from the step before and the new ones behind
    them. A column begins with zeros for planes that are not there; no output that is kept depends on them, and a layer
    is not run while all it would compute does.
    """

    def __init__(
        self,
        plan: Plan,
        network: Network,
        weights: Sequence[ConvWeights],
        crew: Crew,
        table: tuple[Primitive, ...] = TABLE,
    ) -> None:
        self.plan = plan
        self.network = network
        self.crew = crew
        self.written = [0] * len(plan.choices)  # voxels of one map that each choice has written, all images
        self._table = table
        self._weights = dict(zip(network.convolutions, weights, strict=True))
        self._along = network.turned(plan.axis)  # the axis walked along is the first within a session
        self._bound: tuple[_Bound, ...] = ()
        self._input: Array  # new planes of the first layer's input
        self._step = 0  # of the column, counted from the first that gives output

    def __enter__(self) -> Self:
        plan, steps = self.plan, []
        primitives = [find(choice.primitive, self._table) for choice in plan.choices]
        for primitive, choice in zip(primitives, plan.choices, strict=True):
            weights = self._weights.get(choice.layers[0])
            resident = primitive.prepare(_turned(weights, plan.axis), choice.variant, self.crew)
            steps.append(primitive.bind(resident, choice.shape, choice.variant, self.crew))
        # Weights come first: their preparation needs room that the arena takes only when it is written to.
        arena = Arena(plan.memory.arena, plan.tensors)
        shapes = [choice.shape for choice in plan.choices]
        carried = carried_planes(shapes, plan.patch_in[plan.axis])
        apart = [
            reads_apart(primitive.footprint(choice.shape, choice.variant, self.crew.threads), planes)
            for primitive, choice, planes in zip(primitives, plan.choices, carried, strict=True)
        ]
        xs, news, images = [], [], 1
        for i, shape in enumerate(shapes):
            joined = 0 if apart[i] else carried[i]
            xs.append(arena.floats(f"x{i}", (images, shape.in_shape[1] - carried[i] + joined, *shape.in_shape[2:])))
            news.append(xs[i][:, joined:])
            images = shape.out_shape[0]
        news.append(arena.floats(f"x{len(xs)}", shapes[-1].out_shape))
        self._input = news[0][0]
        self._bound = tuple(
            _Bound(
                step=step,
                x=xs[i],
                out=news[i + 1],
                scratch=arena.scratch(i),
                apart=apart[i],
                batch=choice.shape.batch,
                pools=choice.shape.out_shape[0] // choice.shape.batch,
                from_step=-self._steps_before(self._along.margins[choice.layers[1] + 1][0]),
                carry=_carry(choice.shape, plan.parts[i], carried[i]),
            )
            for i, (step, choice) in enumerate(zip(steps, plan.choices, strict=True))
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bound = ()
        del self._input

    def run(self, raw: npt.NDArray[Any], out: npt.NDArray[Any] | None, *, begins: bool = True) -> None:
        """Compute one step of a column, or one patch.

        raw     (c, *patch_in), any real dtype, as the volume stores it; read only.
        out     (maps, *patch_out) float32, float16 or uint8 (`round(255 * clip(x, 0, 1))`); overwritten. None in the
                first steps of a column that walks: they give no output (`Cover.ahead`).
        begins  the first step of a column; every patch is one.

        ValuesOverflowError names the layer whose result is not finite.
        """
        axes = (0, *(1 + axis for axis in turn(self.plan.axis)))
        if begins:
            self._step = -self._steps_before(self._along.margins[0][0])
            for bound in self._bound:
                if bound.carry is not None:
                    self._clear(bound.carry.reshape(-1))
        self._load(raw.transpose(axes))
        self._advance(0, 0, None if out is None else out.transpose(axes))
        self._step += 1

    def _clear(self, kept: Array) -> None:
        """Zeros for the planes before a column: gigabytes, so all threads write them."""

        def piece(lo: int, hi: int, worker: int) -> None:
            del worker
            kept[lo:hi] = 0

        self.crew.each(piece, kept.size)

    def _steps_before(self, margin: int) -> int:
        """Steps of a column that come before its output and matter to an activation that is `margin` planes larger."""
        return -(-margin // self.plan.patch_out[self.plan.axis]) if self.plan.walks else 0

    def _advance(self, index: int, first: int, out: npt.NDArray[Any] | None) -> None:
        """Carry on from the input of choice `index`: `first` counts all images of a step up to those that are there."""
        if index == len(self._bound):
            if out is not None:
                self._store(first, out)
            return
        bound = self._bound[index]
        runs = self._step >= bound.from_step
        if bound.carry is not None and not (runs and bound.apart):
            self._keep(bound.carry[first : first + len(bound.x)], bound.x, join=not bound.apart)
        if not runs:
            return
        for lo in range(0, len(bound.x), bound.batch):
            self._compute(index, first + lo, bound.x[lo : lo + bound.batch])
            self._advance(index + 1, (first + lo) * bound.pools, out)

    def _compute(self, index: int, first: int, x: Array) -> None:
        """Run choice `index` on a part of its input, whose first image is image `first` of all."""
        bound = self._bound[index]
        try:
            if bound.apart and bound.carry is not None:
                before = bound.carry[first : first + len(x)]
                cast("CarryingStep", bound.step).run(x, bound.out, bound.scratch, before)
                self._keep(before, x, join=False)
            else:
                bound.step.run(x, bound.out, bound.scratch)
        except ValuesOverflowError as error:
            layer = self.plan.choices[index].layers[0]
            raise error.with_context(f"layer {layer} ({self.network.layers[layer]})") from None
        self.written[index] += prod(bound.out.shape[:4])

    def _keep(self, kept: Array, x: Array, *, join: bool) -> None:
        """Keep the last planes of every image for the next step of the column.

        kept  (S, carried, y, x, f); of the step before; overwritten.
        x     (S, new, y, x, f); if `join`, (S, carried + new, ..), and first `kept` goes into its first planes.
        """
        carried, planes = kept.shape[1], x.shape[1]

        def piece(lo: int, hi: int, worker: int) -> None:
            del worker
            for old, image in zip(kept[:, :, lo:hi], x[:, :, lo:hi], strict=True):
                if join:
                    image[:carried] = old
                    old[:] = image[planes - carried :]
                    continue
                for plane in range(carried):  # ascending: each moves to where nothing is needed any more
                    later = plane + planes
                    old[plane] = old[later] if later < carried else image[later - carried]

        self.crew.each(piece, x.shape[2])

    def _load(self, raw: npt.NDArray[Any]) -> None:
        """Normalise into the arena, channels last."""
        x = self._input
        normalise = self.network.normalise
        wide = raw.dtype.itemsize > 2 and raw.dtype != np.float32  # float32 would round before the mean is gone
        dtype = np.float64 if wide else np.float32

        @np.errstate(over="raise")
        def piece(lo: int, hi: int, worker: int) -> None:
            for channel in range(raw.shape[0]):
                target = x[lo:hi, ..., channel]
                if normalise is None:
                    np.copyto(target, raw[channel, lo:hi], casting="unsafe")
                    continue
                mean, std = dtype(normalise.mean[channel]), dtype(normalise.std[channel])
                np.subtract(raw[channel, lo:hi], mean, out=target, dtype=dtype, casting="unsafe")
                np.divide(target, np.float32(std), out=target)

        try:
            self.crew.each(piece, x.shape[0])
        except FloatingPointError:
            largest = max(abs(raw.max()), abs(raw.min()))
            raise ValuesOverflowError(
                f"the volume holds values up to {largest:.6g}, and normalised they exceed float32's largest number "
                f"{np.finfo(np.float32).max:.6g}; rescale the volume, or correct `normalise` in the network file"
            ) from None

    def _store(self, first: int, out: npt.NDArray[Any]) -> None:
        """Put fragments in their places in the dense patch, maps first, in the output's dtype; `first` of all is first.

        Voxel i of fragment o1 of the first pooling, o2 of the second, .. is voxel o1 + p1 * (o2 + p2 * (.. + i)).
        """
        fragments = self._bound[-1].out
        windows = [layer.window for layer in self._along.layers if isinstance(layer, Pool)]
        period = self._along.period
        places = [_place(windows, first + image) for image in range(len(fragments))]

        def piece(lo: int, hi: int, worker: int) -> None:
            del worker
            part = fragments[:, lo:hi]
            if out.dtype == np.uint8:
                np.clip(part, 0, 1, out=part)
                np.multiply(part, np.float32(255), out=part)
                np.rint(part, out=part)
            try:
                with np.errstate(over="raise"):
                    for image, (z, y, x) in zip(part, places, strict=True):
                        target = out[:, z :: period[0], y :: period[1], x :: period[2]]
                        np.copyto(target[:, lo:hi], np.moveaxis(image, 3, 0), casting="unsafe")
            except FloatingPointError:
                raise ValuesOverflowError(
                    f"the output holds {np.abs(part).max():.6g}, beyond {out.dtype}'s largest number "
                    f"{np.finfo(out.dtype).max:.6g}; choose --output-dtype float32"
                ) from None

        self.crew.each(piece, fragments.shape[1])


def _place(windows: Sequence[Vec3], fragment: int) -> Vec3:
    """Dense voxel at which a fragment begins."""
    z = y = x = 0
    for pz, py, px in reversed(windows):  # the last pooling's offset counts fastest
        fragment, offset = divmod(fragment, pz * py * px)
        z, y, x = z * pz + offset // (py * px), y * py + offset // px % py, x * px + offset % px
    return z, y, x


def _carry(shape: LayerShape, parts: int, planes: int) -> Array | None:
    """Room for the last `planes` planes of every image of a layer's input, or None where it needs none."""
    if planes == 0:
        return None
    images, _, y, x, f = shape.in_shape
    size = (parts * images, planes, y, x, f)
    return aligned_bytes(FLOAT32 * prod(size)).view(np.float32).reshape(size)


def _turned(weights: ConvWeights | None, axis: int) -> ConvWeights | None:
    """Kernels with `axis` first."""
    if weights is None or axis == 0:
        return weights
    order = (0, 1, *(2 + along for along in turn(axis)))
    return ConvWeights(np.ascontiguousarray(weights.weight.transpose(order)), weights.bias)
