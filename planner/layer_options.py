"""What may run each layer, and each convolution together with the pooling behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from znnpy.kernels.primitive import Footprint, Primitive, Variant
from znnpy.machine import Machine
from znnpy.planner.cost_model import Rates
from znnpy.planner.layout import ScratchPeaks, aligned, scratch_peaks
from znnpy.planner.pareto import LayerOption, LayerRun, ParetoFront, in_sequence, pareto_front, undominated
from znnpy.planner.tilings import carry_bytes
from znnpy.shapes import LayerShape, fused

CACHED_FRONTS = 1024  # fronts, for splits of a shape: most of their layers are what they are in others
CARRY_TRAFFIC = 2.0  # bytes moved per byte carried: read and written, to be kept for the next step
JOIN_TRAFFIC = 2.0  # and in front of the new planes, for primitives that do not read them where they are kept


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Where a span of layers stands in a step, and how often it runs."""

    live_elsewhere: int = 0  # bytes of the arena that stay while it runs
    input_bytes: int = 0  # bytes of its input, unless that stays anyway
    output_bytes: int = 0  # bytes that it writes its output to
    sub_batches: int = 1  # how often it runs in a step
    steps: tuple[int, ...] = (1,)  # of the whole output, per layer
    streams: bool = False  # a part of its input comes from the step before
    join_bytes: int = 0  # bytes that its input is larger by where that part is put in front of what is new


class _Candidate(NamedTuple):
    """A primitive for one shape, wherever that stands."""

    primitive: Primitive
    variant: Variant
    footprint: Footprint
    most: ScratchPeaks
    seconds: float  # of one run


def _undominated(found: Sequence[tuple[Primitive, Variant, Footprint, ScratchPeaks, float]]) -> tuple[_Candidate, ...]:
    """Those than which no other is as good or better in everything, whatever the place; of equal ones the first."""
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
    """Primitives and variants for spans of layers, less those that another beats."""

    table: tuple[Primitive, ...]
    machine: Machine
    threads: int
    rates: Rates
    only: frozenset[str]  # names; where one of them applies to a layer no other primitive is considered
    _alone: dict[tuple[LayerShape, frozenset[str]], tuple[_Candidate, ...]] = field(default_factory=dict)
    _applying: dict[LayerShape, frozenset[str]] = field(default_factory=dict)
    _fronts: dict[tuple[tuple[LayerShape, ...], LayerContext], ParetoFront] = field(default_factory=dict)

    def front(self, layers: tuple[LayerShape, ...], place: LayerContext) -> ParetoFront:
        """Of a layer, or of a convolution and the pooling behind it: layer by layer, and both in one.

        Seconds are those of the whole output, bytes those of a step.
        """
        known = self._fronts.get((layers, place))
        if known is None:
            if len(self._fronts) == CACHED_FRONTS:
                self._fronts.clear()
            known = self._fronts[layers, place] = self._front(layers, place)
        return known

    def _front(self, layers: tuple[LayerShape, ...], place: LayerContext) -> ParetoFront:
        if len(layers) == 1:
            return self._placed(layers[0], self._names(layers[0]), place, place.steps[0])
        conv, pool = layers
        first, second = (
            replace(place, output_bytes=aligned(pool.in_bytes)),
            replace(place, input_bytes=aligned(pool.in_bytes), join_bytes=0),
        )
        turns = in_sequence(
            self._placed(conv, self._names(conv), first, place.steps[0]),
            self._placed(pool, self._names(pool), second, place.steps[1]),
        )
        return pareto_front((*turns, *self._in_one(conv, pool, place)))

    def reads_carried(self, shape: LayerShape) -> bool:
        """A primitive for this layer reads planes that a column carries where they are kept."""
        names = self._names(shape)
        return any(alone.footprint.reads_carried for alone in self._variants(shape, names))

    def why_none(self, layer: LayerShape) -> str:
        """Every primitive's reason not to run a layer."""
        reasons = (f"{p.name}: {self._why_not(p, layer)}" for p in self.table if p.kind == layer.kind)
        return "; ".join(reasons) or f"there is none for a {layer.kind}"

    def _why_not(self, primitive: Primitive, shape: LayerShape) -> str | None:
        """Its own reason, or that of the machine where it was tried."""
        return primitive.why_not(shape, self.machine) or self.rates.why_not(primitive, shape)

    def _names(self, shape: LayerShape) -> frozenset[str]:
        """Primitives that apply; only those asked for where one of them does."""
        known = self._applying.get(shape)
        if known is None:
            names = {p.name for p in self.table if p.kind == shape.kind and self._why_not(p, shape) is None}
            known = self._applying[shape] = frozenset(names & self.only or names)
        return known

    def _in_one(self, conv: LayerShape, pool: LayerShape, place: LayerContext) -> ParetoFront:
        """Both layers by one primitive, but for those that take a layer from a primitive that was asked for."""
        shape = fused(conv, pool)
        if shape is None:
            return ()
        asked = [self._names(layer) & self.only for layer in (conv, pool)]
        both = frozenset(name for name in self._names(shape) if all(name in names or not names for names in asked))
        return self._placed(shape, both, place, place.steps[1])

    def _placed(self, shape: LayerShape, names: frozenset[str], place: LayerContext, steps: int) -> ParetoFront:
        """Ways to run a shape by the primitives of these names, at a place: those that no other beats."""
        carried = place.sub_batches * carry_bytes(shape) if place.streams else 0
        once = carried / self.rates.copy_bandwidth / place.sub_batches
        variants = self._variants(shape, names)
        spent = [
            alone.seconds + (CARRY_TRAFFIC if alone.footprint.reads_carried else CARRY_TRAFFIC + JOIN_TRAFFIC) * once
            for alone in variants
        ]
        weighed = [
            (
                seconds * steps * place.sub_batches,
                footprint.resident + carried,
                place.live_elsewhere
                + most.arena_bytes(place.input_bytes, place.output_bytes)
                + (0 if footprint.reads_carried else place.join_bytes),
                footprint.allowance,
                footprint.host,
            )
            for (_, _, footprint, most, _), seconds in zip(variants, spent, strict=True)
        ]
        found = []
        for index in undominated(weighed):
            primitive, variant, footprint, _, _ = variants[index]
            way = LayerRun(
                shape, primitive, variant, footprint, spent[index], place.sub_batches, steps * place.sub_batches
            )
            found.append(LayerOption((way,), *weighed[index][:4]))
        return tuple(found)

    def _variants(self, shape: LayerShape, names: frozenset[str]) -> tuple[_Candidate, ...]:
        """Equal shapes are worked out once. What another variant beats whatever the place is left out."""
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
