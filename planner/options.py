"""What may run each layer, and each convolution together with the pooling behind it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from znnpy.kernels.primitive import Primitive
from znnpy.machine import Machine
from znnpy.planner.cost import Rates, seconds
from znnpy.planner.layout import live_bytes
from znnpy.planner.trade import Front, Option, Way, front, in_turn
from znnpy.shapes import LayerShape, fused


@dataclass(frozen=True, slots=True)
class Options:
    """Primitives and variants for spans of layers, less those that another beats."""

    table: tuple[Primitive, ...]
    machine: Machine
    threads: int
    rates: Rates
    only: frozenset[str]  # names; where one of them applies to a layer no other primitive is considered
    _fronts: dict[tuple[LayerShape, ...], Front] = field(default_factory=dict)

    def of(self, layers: tuple[LayerShape, ...]) -> Front:
        """Of a layer, or of a convolution and the pooling behind it: layer by layer, and both in one.

        Equal spans are worked out once.
        """
        known = self._fronts.get(layers)
        if known is None:
            options: Iterable[Option]
            if len(layers) == 1:
                options = self._variants(layers[0], self._wanted(layers[0]))
            else:
                conv, pool = layers
                options = (*in_turn(self.of((conv,)), self.of((pool,))), *self._in_one(conv, pool))
            known = self._fronts[layers] = front(options)
        return known

    def why_none(self, layer: LayerShape) -> str:
        """Every primitive's reason not to run a layer."""
        reasons = (f"{p.name}: {p.why_not(layer, self.machine)}" for p in self.table if p.kind == layer.kind)
        return "; ".join(reasons) or f"there is none for a {layer.kind}"

    def _wanted(self, shape: LayerShape) -> list[Primitive]:
        """Primitives that apply; only those asked for where one of them does."""
        applying = [p for p in self.table if p.kind == shape.kind and p.why_not(shape, self.machine) is None]
        return [p for p in applying if p.name in self.only] or applying

    def _in_one(self, conv: LayerShape, pool: LayerShape) -> Iterator[Option]:
        """Both layers by one primitive, but for those that take a layer from a primitive that was asked for."""
        shape = fused(conv, pool)
        if shape is None:
            return
        asked = [{p.name for p in self._wanted(layer)} & self.only for layer in (conv, pool)]
        both = [p for p in self._wanted(shape) if all(p.name in names or not names for names in asked)]
        yield from self._variants(shape, both)

    def _variants(self, shape: LayerShape, primitives: Sequence[Primitive]) -> Iterator[Option]:
        for primitive in primitives:
            for variant in primitive.variants(shape, self.machine):
                footprint = primitive.footprint(shape, variant, self.threads)
                spent = seconds(primitive.work(shape, variant), self.rates)
                yield Option(
                    ways=(Way(shape, primitive, variant, footprint, spent),),
                    seconds=spent,
                    resident=footprint.resident,
                    live=live_bytes(shape, footprint),
                    allowance=footprint.allowance,
                )
