"""Options for each layer, and for each convolution together with the pooling or the norm behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from znnpy.costs.model import Rates
from znnpy.kernels.contract import Footprint, Primitive, Variant
from znnpy.layer_shapes import LayerShape
from znnpy.machine import Machine
from znnpy.planner.layout import ScratchPeaks, aligned, scratch_peaks
from znnpy.planner.pareto import LayerOption, LayerRun, ParetoFront, in_sequence, pareto_front, undominated
from znnpy.planner.tilings import carry_bytes
from znnpy.shapes import fused

CACHED_FRONTS = 1024  # fronts kept: splits of a tiling have most layers in common
CARRY_TRAFFIC = 2.0  # bytes moved per byte carried: read and written to be kept for the next step
JOIN_TRAFFIC = 2.0  # the same for putting them in front of the new planes, unless read where they are kept


@dataclass(frozen=True, slots=True)
class LayerContext:
    """The surroundings of a group of layers in a step, and how often it runs."""

    live_elsewhere: int = 0  # bytes of the arena that stay live while it runs
    input_bytes: int = 0  # bytes of its input, unless counted above
    output_bytes: int = 0  # bytes of its output
    sub_batches: int = 1  # executions in a step
    steps: tuple[int, ...] = (1,)  # for the whole output, per layer
    streams: bool = False  # a part of its input comes from the step before
    join_bytes: int = 0  # extra bytes of its input if that part is put in front of the new planes


class _Candidate(NamedTuple):
    """A primitive and variant for one shape, in any context."""

    primitive: Primitive
    variant: Variant
    footprint: Footprint
    most: ScratchPeaks
    seconds: float  # of one run


def _undominated(found: Sequence[tuple[Primitive, Variant, Footprint, ScratchPeaks, float]]) -> tuple[_Candidate, ...]:
    """Drop candidates that another matches or beats in every cost, in any context. Ties keep the first."""
    ranked = sorted(
        (seconds, (footprint.resident, footprint.host, footprint.allowance, *most), index)
        for index, (_, _, footprint, most, seconds) in enumerate(found)
    )
    kept: list[tuple[int, ...]] = []
    best = []
    for _, (a, b, c, d, e, f, g), index in ranked:
        for p, q, r, s, t, u, v in kept:
            if p <= a and q <= b and r <= c and s <= d and t <= e and u <= f and v <= g:
                break
        else:
            kept.append((a, b, c, d, e, f, g))
            best.append(_Candidate(*found[index]))
    return tuple(best)


@dataclass(frozen=True, slots=True)
class OptionTable:
    """The non-dominated primitives and variants for groups of layers."""

    table: tuple[Primitive, ...]
    machine: Machine
    threads: int
    rates: Rates
    only: frozenset[str]  # names: if one applies to a layer, no other primitive is considered
    _alone: dict[tuple[LayerShape, frozenset[str]], tuple[_Candidate, ...]] = field(default_factory=dict)
    _applying: dict[LayerShape, frozenset[str]] = field(default_factory=dict)
    _fronts: dict[tuple[tuple[LayerShape, ...], LayerContext], ParetoFront] = field(default_factory=dict)

    def front(self, layers: tuple[LayerShape, ...], context: LayerContext) -> ParetoFront:
        """Return the options of a layer, or of a convolution and the pooling behind it, fused and not.

        Seconds are for the whole output, bytes for a step.
        """
        known = self._fronts.get((layers, context))
        if known is None:
            if len(self._fronts) == CACHED_FRONTS:
                self._fronts.clear()
            known = self._fronts[layers, context] = self._front(layers, context)
        return known

    def _front(self, layers: tuple[LayerShape, ...], context: LayerContext) -> ParetoFront:
        if len(layers) == 1:
            return self._placed(layers[0], self._names(layers[0]), context, context.steps[0])
        conv, pool = layers
        first, second = (
            replace(context, output_bytes=aligned(pool.in_bytes)),
            replace(context, input_bytes=aligned(pool.in_bytes), join_bytes=0),
        )
        separate = in_sequence(
            self._placed(conv, self._names(conv), first, context.steps[0]),
            self._placed(pool, self._names(pool), second, context.steps[1]),
        )
        return pareto_front((*separate, *self.in_one((conv, pool), fused(conv, pool), context)))

    def reads_carried(self, shape: LayerShape) -> bool:
        """Return whether some primitive for this layer reads carried planes where they are kept."""
        names = self._names(shape)
        return any(alone.footprint.reads_carried for alone in self._variants(shape, names))

    def why_none(self, layer: LayerShape) -> str:
        """Return every primitive's reason not to run a layer."""
        reasons = (f"{p.name}: {self._why_not(p, layer)}" for p in self.table if p.kind == layer.kind)
        return "; ".join(reasons) or f"there is none for a {layer.kind}"

    def _why_not(self, primitive: Primitive, shape: LayerShape) -> str | None:
        """Return the primitive's own reason, or that of the machine where it was tried."""
        return primitive.why_not(shape, self.machine) or self.rates.why_not(primitive, shape)

    def _names(self, shape: LayerShape) -> frozenset[str]:
        """Return the names of primitives that apply; only requested ones if one of them does."""
        known = self._applying.get(shape)
        if known is None:
            names = {p.name for p in self.table if p.kind == shape.kind and self._why_not(p, shape) is None}
            known = self._applying[shape] = frozenset(names & self.only or names)
        return known

    def in_one(
        self, layers: tuple[LayerShape, LayerShape], both: LayerShape | None, context: LayerContext
    ) -> ParetoFront:
        """Return the options that compute both layers, unless a requested primitive would lose a layer to them.

        both  the shape of the two in one; None: there is none
        """
        if both is None:
            return ()
        asked = [self._names(layer) & self.only for layer in layers]
        able = frozenset(name for name in self._names(both) if all(name in names or not names for names in asked))
        return self._placed(both, able, context, context.steps[-1])

    def wants_in_one(self, layers: tuple[LayerShape, LayerShape], both: LayerShape) -> bool:
        """Return whether a requested primitive computes both layers in one, and none computes one of them alone."""
        alone = any(self._names(layer) & self.only for layer in layers)
        return not alone and bool(self._names(both) & self.only)

    def _placed(self, shape: LayerShape, names: frozenset[str], context: LayerContext, steps: int) -> ParetoFront:
        """Return the non-dominated options of a shape in a context, by the primitives of these names."""
        carried = context.sub_batches * carry_bytes(shape) if context.streams else 0
        once = carried / self.rates.copy_bandwidth / context.sub_batches
        variants = self._variants(shape, names)
        spent = [
            alone.seconds + (CARRY_TRAFFIC if alone.footprint.reads_carried else CARRY_TRAFFIC + JOIN_TRAFFIC) * once
            for alone in variants
        ]
        weighed = [
            (
                seconds * steps * context.sub_batches,
                footprint.resident + carried,
                context.live_elsewhere
                + most.arena_bytes(context.input_bytes, context.output_bytes)
                + (0 if footprint.reads_carried else context.join_bytes),
                footprint.allowance,
                footprint.host,
            )
            for (_, _, footprint, most, _), seconds in zip(variants, spent, strict=True)
        ]
        found = []
        for index in undominated(weighed):
            primitive, variant, footprint, _, _ = variants[index]
            way = LayerRun(
                shape, primitive, variant, footprint, spent[index], context.sub_batches, steps * context.sub_batches
            )
            found.append(LayerOption((way,), *weighed[index][:4]))
        return tuple(found)

    def _variants(self, shape: LayerShape, names: frozenset[str]) -> tuple[_Candidate, ...]:
        """Return the candidates for a shape that are not dominated in every context; each shape is worked out once."""
        known = self._alone.get((shape, names))
        if known is None:
            found = []
            for primitive in self.table:
                if primitive.name not in names or primitive.kind != shape.kind:
                    continue
                for variant in primitive.variants(shape, self.machine):
                    footprint = primitive.footprint(shape, variant, self.threads)
                    spent = self.rates.seconds(primitive, shape, variant)
                    found.append((primitive, variant, footprint, scratch_peaks(footprint), spent))
            known = self._alone[shape, names] = _undominated(found)
        return known
