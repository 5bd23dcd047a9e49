"""Every primitive for every layer of a plan, with the seconds it would take there or its reason not to run.

One layer is changed at a time, all else stays as the plan has it: the patch or column, its parts, the other layers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from znnpy.costs.model import Rates
from znnpy.kernels.contract import Footprint, Primitive, Variant, device_of
from znnpy.layer_shapes import LayerShape
from znnpy.lowering import lowered
from znnpy.machine import Machine
from znnpy.messages import excerpt
from znnpy.network import Network
from znnpy.planner.described_graph import node_names
from znnpy.planner.graph_tilings import GraphTiling
from znnpy.planner.layer_options import CARRY_TRAFFIC, JOIN_TRAFFIC
from znnpy.planner.layout import place
from znnpy.planner.plan import Choice, Memory, Plan
from znnpy.planner.stages import last_stage
from znnpy.planner.tilings import carry_bytes
from znnpy.report.wide_table import WideOrNarrow, columns_for, indented
from znnpy.shapes import fused
from znnpy.units import human_bytes, human_seconds


@dataclass(frozen=True, slots=True)
class Considered:
    """One primitive for a layer, or for two in one."""

    layers: tuple[int, int]  # the first and the last
    primitive: str
    taken: bool
    seconds: float | None  # for the whole output, by its fastest variant; None: it does not run
    why: str  # it was not taken, in words; empty where it was

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "layers": list(self.layers)}


def considered(
    plan: Plan, network: Network, machine: Machine, rates: Rates, table: Sequence[Primitive], only: Collection[str] = ()
) -> list[Considered]:
    """List all primitives of the plan's device for each layer, and for each convolution with what is behind it.

    machine, rates, table, only  as the plan was made with
    """
    tiling = GraphTiling(plan.graph_cover(network)) if plan.area is not None else None
    there = [primitive for primitive in table if device_of(primitive.name) == plan.device]
    whatever = _Plan(plan, machine, rates, there, frozenset(only), tiling)
    return list(whatever.considered(network))


def why_table(rows: Sequence[Considered], network: Network) -> RenderableType:
    """Lay out the answer of `znnpy plan --why`: a table, or on a narrow terminal each reason on lines of its own."""
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    table.add_column("layer", no_wrap=True)
    table.add_column("primitive", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("why not")
    paragraphs: list[RenderableType] = []
    names, whole = _names(network), network.meaning != "sliding"
    cells = [_cells(row, names, whole=whole) for row in rows]
    for before, row, (layer, name, spent, reason) in zip([None, *rows], rows, cells, strict=False):
        layer = "" if before is not None and row.layers == before.layers else layer
        table.add_row(layer, name, spent, reason)
        paragraphs += indented((layer, f"{name}  {spent}".rstrip(), reason))
    columns = list(zip(*cells, strict=True))[:3]
    return WideOrNarrow(table, Group(*paragraphs), columns_for(*columns, sentences=1))


def _names(network: Network) -> Sequence[str]:
    """Return the layers in words: those of a graph by the names of its nodes."""
    if network.meaning != "sliding":
        return [excerpt(name) for name in node_names(lowered(network))]
    return [f"{index} {layer}" for index, layer in enumerate(network.layers)]


def _cells(row: Considered, names: Sequence[str], *, whole: bool) -> tuple[str, str, str, str]:
    """Return layer, primitive, time and reason of a row; `whole`: layers have names, not numbers."""
    first, last = row.layers
    layer = names[first] + (f", {names[last] if whole else last} in one" if last > first else "")
    spent = "" if row.seconds is None else human_seconds(row.seconds)
    return layer, row.primitive, spent, "taken" if row.taken else row.why


@dataclass(frozen=True, slots=True)
class _Plan:
    """A plan and what it was made with."""

    plan: Plan
    machine: Machine
    rates: Rates
    table: Sequence[Primitive]
    only: frozenset[str]
    tiling: GraphTiling | None = None  # of a graph that is computed whole

    def considered(self, network: Network) -> Iterator[Considered]:
        plan = self.plan
        if plan.area is not None:
            yield from self._of_operations()
            return
        shapes = plan.layer_shapes(network)
        for index, shape in enumerate(shapes):
            yield from self._of((index, index), shape)
            both = fused(shape, shapes[index + 1]) if index + 1 < len(shapes) else None
            if both is not None:
                yield from self._of((index, index + 1), both)

    def _of_operations(self) -> Iterator[Considered]:
        """Yield every primitive for each operation of a graph, and those that compute two in one."""
        assert self.tiling is not None
        graph = self.tiling.graph
        for number, operation in enumerate(graph.operations):
            yield from self._of(operation.layers, self.tiling.shape(operation))
            if (both := graph.pairs.get(number)) is not None:
                rows = self._of(both.layers, self.tiling.shape(both))
                yield from (row for row in rows if row.seconds is not None)

    def _of(self, layers: tuple[int, int], shape: LayerShape) -> Iterator[Considered]:
        """Yield every primitive of the shape's kind: those that run, the fastest first, before the others."""
        rows = [self._row(primitive, layers, shape) for primitive in self.table if primitive.kind == shape.kind]
        yield from sorted(rows, key=lambda row: (row.seconds is None, row.seconds, row.primitive))

    def _row(self, primitive: Primitive, layers: tuple[int, int], shape: LayerShape) -> Considered:
        """Return the row of one primitive; one in the plan has the plan's seconds."""
        choices = [c for c in self.plan.choices if c.layers[0] <= layers[1] and layers[0] <= c.layers[1]]
        spent = sum(choice.executions * choice.seconds for choice in choices)
        if [(c.layers, c.primitive) for c in choices] == [(layers, primitive.name)]:
            return Considered(layers, primitive.name, True, spent, "")
        reason = primitive.why_not(shape, self.machine) or self.rates.why_not(primitive, shape)
        if reason:
            return Considered(layers, primitive.name, False, None, reason)
        variants = primitive.variants(shape, self.machine)
        once, variant = min(
            ((self._seconds(primitive, shape, v, layers), v) for v in variants), key=lambda pair: pair[0]
        )
        seconds = once * choices[-1].executions
        why = self._why(primitive, shape, variant, layers, choices, seconds / spent)
        return Considered(layers, primitive.name, False, seconds, why)

    def _seconds(self, primitive: Primitive, shape: LayerShape, variant: Variant, layers: tuple[int, int]) -> float:
        """Return the seconds of one run, with what it carries from step to step."""
        moved = 0.0
        if self.tiling is not None:
            graph = self.tiling.graph
            found = next(one for one in (*graph.operations, *graph.pairs.values()) if one.layers == layers)
            moved = sum(map(self.tiling.carry_traffic, found.tensors))
        elif self.plan.streams:
            apart = self._footprint(primitive, shape, variant).reads_carried
            moved = (CARRY_TRAFFIC if apart else CARRY_TRAFFIC + JOIN_TRAFFIC) * carry_bytes(shape)
        return self.rates.seconds(primitive, shape, variant) + moved / self.rates.copy_bandwidth

    def _why(
        self,
        primitive: Primitive,
        shape: LayerShape,
        variant: Variant,
        layers: tuple[int, int],
        choices: Sequence[Choice],
        ratio: float,
    ) -> str:
        """Say why a primitive that runs was not taken; `ratio` is its time over that of the layers' `choices`."""
        if self.only and primitive.name not in self.only and any(c.primitive in self.only for c in choices):
            return "another one is asked for"
        if choices[0].layers[0] < layers[0] or layers[1] < choices[-1].layers[1]:
            return f"runs in one with {'the layer before' if choices[0].layers[0] < layers[0] else 'the layer behind'}"
        over, over_vram = self._with(primitive, shape, variant, layers).excess(self.plan.limits)
        if over or over_vram:
            parts = [human_bytes(over)] * (over > 0) + [f"{human_bytes(over_vram)} of VRAM"] * (over_vram > 0)
            return f"{ratio:.2f} times as long, and does not fit: {' and '.join(parts)} more"
        return f"{ratio:.2f} times as long"

    def _with(self, primitive: Primitive, shape: LayerShape, variant: Variant, layers: tuple[int, int]) -> Memory:
        """Return the memory of the plan with this primitive for these layers, for which it has choices."""
        steps: list[tuple[LayerShape, Footprint]] = []
        replaced = [c for c in self.plan.choices if layers[0] <= c.layers[0] and c.layers[1] <= layers[1]]
        for choice in self.plan.choices:
            if choice not in replaced:
                own = next(p for p in self.table if p.name == choice.primitive)
                steps.append((choice.shape, self._footprint(own, choice.shape, choice.variant)))
            elif choice is replaced[0]:
                both = choice.shape
                if len(replaced) > 1:
                    both = fused(choice.shape, replaced[-1].shape) or shape
                steps.append((both, self._footprint(primitive, both, variant)))
        if self.tiling is not None:
            return self._of_graph(steps)
        new = self.plan.patch_in[self.plan.axis]
        needs = last_stage(steps, 0, new, self.plan.device)
        return replace(self.plan.memory, stages=(replace(needs.memory, arena=place(needs.tensors)[1]),))

    def _of_graph(self, steps: Sequence[tuple[LayerShape, Footprint]]) -> Memory:
        """Return the memory of the plan of a graph with these layers."""
        assert self.tiling is not None
        footprints = [footprint for _, footprint in steps]
        operations = self.tiling.graph.computing(shape for shape, _ in steps)
        stage = replace(
            self.plan.memory.stages[0],
            arena=place(self.tiling.tensors(operations, footprints))[1],
            weights=sum(footprint.resident for footprint in footprints),
            allowance=max(footprint.allowance for footprint in footprints),
        )
        return replace(self.plan.memory, stages=(stage,))

    def _footprint(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> Footprint:
        return primitive.footprint(shape, variant, self.plan.compute_threads)
