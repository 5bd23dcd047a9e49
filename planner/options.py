"""What may run each layer, and each convolution together with the pooling behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from znnpy.kernels.primitive import Footprint, Primitive, Variant
from znnpy.machine import Machine
from znnpy.planner.candidates import kept_bytes
from znnpy.planner.cost import Rates
from znnpy.planner.layout import Fullest, aligned, fullest
from znnpy.planner.trade import Front, Option, Way, front, in_turn
from znnpy.shapes import LayerShape, fused

KEEPING = 2.0  # bytes moved per byte carried: read and written, to be kept for the next step
JOINING = 2.0  # and in front of the new planes, for primitives that do not read them where they are kept


@dataclass(frozen=True, slots=True)
class Place:
    """Where a span of layers stands in a step, and how often it runs."""

    under: int = 0  # bytes of the arena that stay while it runs
    x: int = 0  # bytes of its input, unless that stays anyway
    out: int = 0  # bytes that it writes its output to
    parts: int = 1  # how often it runs in a step
    steps: tuple[int, ...] = (1,)  # of the whole output, per layer
    walks: bool = False  # a part of its input comes from the step before
    joined: int = 0  # bytes that its input is larger by where that part is put in front of what is new


class _Alone(NamedTuple):
    """A primitive for one shape, wherever that stands."""

    primitive: Primitive
    variant: Variant
    footprint: Footprint
    most: Fullest
    seconds: float  # of one run

    @property
    def needs(self) -> tuple[int, ...]:
        """Bytes of every kind that weigh somewhere."""
        return self.footprint.resident, self.footprint.host, self.footprint.allowance, *self.most


def _unbeaten(found: Sequence[_Alone]) -> tuple[_Alone, ...]:
    """Those than which no other is as good or better in everything, whatever the place; of equal ones the first."""
    needs = np.array([alone.needs for alone in found], np.int64)
    ranked = np.lexsort((*needs.T[::-1], [alone.seconds for alone in found]))
    no_more = np.triu(np.ones((len(found), len(found)), np.bool_), 1)  # than every other, of those that are faster
    for need in needs[ranked].T:
        no_more &= need[:, np.newaxis] <= need
    return tuple(found[index] for index in ranked[~no_more.any(axis=0)])


@dataclass(frozen=True, slots=True)
class Options:
    """Primitives and variants for spans of layers, less those that another beats."""

    table: tuple[Primitive, ...]
    machine: Machine
    threads: int
    rates: Rates
    only: frozenset[str]  # names; where one of them applies to a layer no other primitive is considered
    _alone: dict[tuple[LayerShape, frozenset[str]], tuple[_Alone, ...]] = field(default_factory=dict)
    _applying: dict[LayerShape, frozenset[str]] = field(default_factory=dict)

    def of(self, layers: tuple[LayerShape, ...], place: Place) -> Front:
        """Of a layer, or of a convolution and the pooling behind it: layer by layer, and both in one.

        Seconds are those of the whole output, bytes those of a step.
        """
        if len(layers) == 1:
            return front(self._placed(layers[0], self._names(layers[0]), place, place.steps[0]))
        conv, pool = layers
        first, second = replace(place, out=aligned(pool.in_bytes)), replace(place, x=aligned(pool.in_bytes), joined=0)
        turns = in_turn(
            front(self._placed(conv, self._names(conv), first, place.steps[0])),
            front(self._placed(pool, self._names(pool), second, place.steps[1])),
        )
        return front((*turns, *self._in_one(conv, pool, place)))

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

    def _in_one(self, conv: LayerShape, pool: LayerShape, place: Place) -> Iterator[Option]:
        """Both layers by one primitive, but for those that take a layer from a primitive that was asked for."""
        shape = fused(conv, pool)
        if shape is None:
            return
        asked = [self._names(layer) & self.only for layer in (conv, pool)]
        both = frozenset(name for name in self._names(shape) if all(name in names or not names for names in asked))
        yield from self._placed(shape, both, place, place.steps[1])

    def _placed(self, shape: LayerShape, names: frozenset[str], place: Place, steps: int) -> Iterator[Option]:
        """Every way to run a shape by the primitives of these names, at a place."""
        carried = place.parts * kept_bytes(shape) if place.walks else 0
        once = carried / self.rates.carrying / place.parts
        for primitive, variant, footprint, most, seconds in self._variants(shape, names):
            apart = footprint.reads_carried
            spent = seconds + (KEEPING if apart else KEEPING + JOINING) * once
            yield Option(
                ways=(Way(shape, primitive, variant, footprint, spent, place.parts, steps * place.parts),),
                seconds=spent * steps * place.parts,
                resident=footprint.resident + carried,
                live=place.under + most.live(place.x, place.out) + (0 if apart else place.joined),
                allowance=footprint.allowance,
            )

    def _variants(self, shape: LayerShape, names: frozenset[str]) -> tuple[_Alone, ...]:
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
                    found.append(_Alone(primitive, variant, footprint, fullest(footprint), spent))
            known = self._alone[shape, names] = _unbeaten(found)
        return known
