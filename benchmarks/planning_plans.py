"""Plans beside the planner's pick: uniform choices, random ones, and all that differ from it in one choice.

A recipe is what a plan decides; `Maker.plan` works out what follows from it, memory included, as the search does, and
says None of what does not apply or does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from math import inf
from typing import Any

import numpy as np

from znnpy.errors import NoPlanError, ShapeError
from znnpy.kernels.primitive import Footprint, Primitive, Variant
from znnpy.kernels.table import TABLE, find
from znnpy.machine import Limits, Machine
from znnpy.network import Network, Pool
from znnpy.planner.cost_model import Rates
from znnpy.planner.layer_options import CARRY_TRAFFIC, JOIN_TRAFFIC, OptionTable
from znnpy.planner.layout import carried_bytes, carried_planes, chain, place
from znnpy.planner.memory import DeviceKind, context_bytes
from znnpy.planner.plan import Choice, Plan, device_of, patch_in
from znnpy.planner.search import make_plan
from znnpy.planner.tiling_search import SIZES_AT_ONCE, TilingSearch
from znnpy.planner.tilings import (
    FusionGroup,
    Tiling,
    TilingSpace,
    all_spaces,
    axis_sizes,
    carry_bytes,
    fusion_groups,
    log_spaced,
    splits,
    tiling_of,
)
from znnpy.shapes import LayerShape, Precision, Vec3, fused, turned, turned_back

MOST_TRIES = 5000  # of random plans, most of which fit nowhere


@dataclass(frozen=True, slots=True)
class Ground:
    """What plans are made for and from."""

    machine: Machine
    limits: Limits
    rates: Rates
    baseline: int  # bytes of a process that has nothing but the weights
    device: DeviceKind = "cpu"
    precision: Precision = "fp32"
    context: int = 0  # bytes that CUDA took
    table: tuple[Primitive, ...] = TABLE
    _ways: dict[LayerShape, list[tuple[Primitive, Variant]]] = field(default_factory=dict, repr=False, compare=False)

    def plan(self, network: Network, output: Vec3, **wishes: Any) -> Plan:
        """The planner's; NoPlanError where nothing fits."""
        return make_plan(
            network,
            output,
            self.machine,
            self.limits,
            rates=self.rates,
            baseline=self.baseline,
            device=self.device,
            precision=self.precision,
            context=self.context,
            table=self.table,
            **wishes,
        )

    @property
    def primitives(self) -> tuple[Primitive, ...]:
        """Of this device."""
        return tuple(primitive for primitive in self.table if device_of(primitive.name) == self.device)

    def ways(self, shape: LayerShape) -> list[tuple[Primitive, Variant]]:
        """Every primitive and variant that runs a layer, those that are predicted to be the fastest first."""
        known = self._ways.get(shape)
        if known is None:
            found = [
                (primitive, variant)
                for primitive in self.primitives
                if primitive.kind == shape.kind and primitive.why_not(shape, self.machine) is None
                if self.rates.why_not(primitive, shape) is None
                for variant in primitive.variants(shape, self.machine)
            ]
            known = self._ways[shape] = sorted(found, key=lambda way: self.rates.seconds(way[0], shape, way[1]))
        return known


@dataclass(frozen=True, slots=True)
class Chosen:
    """Who runs one layer, or two in one."""

    layers: FusionGroup
    primitive: Primitive
    variant: Variant


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that a plan decides. Sizes have the axis along which columns walk first."""

    axis: int
    walks: bool
    patch: Vec3
    column: int
    at_once: tuple[int, ...]  # images behind each pooling; 0: all there are
    chosen: tuple[Chosen, ...]


@dataclass(frozen=True, slots=True)
class Rival:
    """A plan to be held against the pick."""

    kind: str  # uniform | random | neighbour
    what: str
    plan: Plan | None  # None: see `failure`
    failure: str | None = None


@dataclass
class Maker:
    """Makes plans for the output of one pick."""

    ground: Ground
    network: Network
    pick: Plan
    _searches: dict[tuple[bool, int], TilingSearch] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        ground = self.ground
        options = OptionTable(ground.primitives, ground.machine, ground.limits.threads, ground.rates, frozenset())
        for space in all_spaces(self.network, self.pick.output, ground.precision):
            self._searches[space.streams, space.axis] = TilingSearch(
                space=space,
                limits=ground.limits,
                itemsize_in=self.pick.itemsize_in,
                itemsize_out=self.pick.itemsize_out,
                patch=None,
                options=options,
                device=ground.device,
                baseline=ground.baseline,
                context=context_bytes(ground.context) if ground.device == "gpu" else 0,
                masks=False,
                splits=splits(space.network),
            )

    @property
    def spaces(self) -> list[TilingSpace]:
        return [search.space for search in self._searches.values()]

    def recipe(self, plan: Plan) -> Recipe:
        """What a plan decided."""
        chosen = tuple(Chosen(c.layers, find(c.primitive, self.ground.table), c.variant) for c in plan.choices)
        at_once = []
        for index, choice in enumerate(plan.choices):
            if isinstance(self.network.layers[choice.layers[1]], Pool):
                behind = plan.choices[index + 1].shape.batch if index + 1 < len(plan.choices) else 0
                at_once.append(behind if behind < choice.shape.out_shape[0] else 0)
        return Recipe(
            plan.axis, plan.streams, turned(plan.patch_out, plan.axis), plan.column_planes, tuple(at_once), chosen
        )

    def plan(self, recipe: Recipe) -> Plan | None:
        """A recipe worked out; None where a primitive does not apply, or memory is short."""
        search = self._searches[recipe.walks, recipe.axis]
        network = search.space.network
        try:
            shape = self.shaped(recipe)
        except ShapeError:
            return None
        steps: list[tuple[Chosen, LayerShape, Footprint]] = []
        for chosen in recipe.chosen:
            layer = _layer(shape, chosen.layers)
            if layer is None or (chosen.primitive, chosen.variant) not in self.ground.ways(layer):
                return None
            footprint = chosen.primitive.footprint(layer, chosen.variant, self.ground.limits.threads)
            steps.append((chosen, layer, footprint))
        new = patch_in(network, shape.patch, 0, streams=recipe.walks)[0]
        tensors, arena = place(chain([(layer, footprint) for _, layer, footprint in steps], new))
        memory = replace(
            search.fixed_memory(shape),
            arena=arena,
            carries=carried_bytes([layer for _, layer, _ in steps], new),
            weights=sum(footprint.resident for _, _, footprint in steps),
            pinned=sum(footprint.host for _, _, footprint in steps),
            allowance=max(footprint.allowance for _, _, footprint in steps),
        )
        if memory.excess(self.ground.limits) != (0, 0):
            return None
        patch_out = turned_back(recipe.patch, recipe.axis)
        return replace(
            self.pick,
            patch_out=patch_out,
            patch_in=patch_in(self.network, patch_out, recipe.axis, streams=recipe.walks),
            axis=recipe.axis,
            column_planes=recipe.column,
            choices=tuple(self._choice(shape, *step) for step in steps),
            tensors=tensors,
            memory=memory,
            columns=len(shape.cover),
            other=None,
            runners_up=(),
            alternatives=(),
        )

    def shaped(self, recipe: Recipe) -> Tiling:
        """Every layer's shape; ShapeError where the patch is none."""
        shape = tiling_of(self._searches[recipe.walks, recipe.axis].space, recipe.patch)
        return replace(shape, column_planes=recipe.column).split(recipe.at_once)

    def _choice(self, shape: Tiling, chosen: Chosen, layer: LayerShape, footprint: Footprint) -> Choice:
        primitive, rates = chosen.primitive, self.ground.rates
        moved = 0.0
        if shape.space.streams:
            moved = (CARRY_TRAFFIC + (0.0 if footprint.reads_carried else JOIN_TRAFFIC)) * carry_bytes(layer)
        first, last = chosen.layers
        return Choice(
            layers=chosen.layers,
            shape=layer,
            primitive=primitive.name,
            version=primitive.version,
            device=self.ground.device,
            variant=chosen.variant,
            seconds=rates.seconds(primitive, layer, chosen.variant) + moved / rates.copy_bandwidth,
            executions=shape.steps[last] * shape.sub_batches[first],
            measured=rates.measured_similar(primitive, layer, chosen.variant),
            fitted=rates.all_fitted(primitive, layer, chosen.variant),
            resident_bytes=footprint.resident,
            working_bytes=footprint.working(layer),
        )

    def adapted(self, recipe: Recipe) -> Recipe | None:
        """With another variant of the same primitive where its own does not apply; None where none does."""
        try:
            shape = self.shaped(recipe)
        except ShapeError:
            return None
        found = []
        for chosen in recipe.chosen:
            layer = _layer(shape, chosen.layers)
            variants = [] if layer is None else [v for p, v in self.ground.ways(layer) if p is chosen.primitive]
            if not variants:
                return None
            found.append(chosen if chosen.variant in variants else replace(chosen, variant=variants[0]))
        return replace(recipe, chosen=tuple(found))


def _layer(shape: Tiling, layers: FusionGroup) -> LayerShape | None:
    first, last = layers
    return shape.shapes[first] if first == last else fused(shape.shapes[first], shape.shapes[last])


def carried(plan: Plan) -> tuple[int, ...]:
    """Planes that come from the step before, of every choice's input."""
    return carried_planes([choice.shape for choice in plan.choices], plan.patch_in[plan.axis])


def uniform(maker: Maker) -> Iterator[Rival]:
    """One primitive for every convolution that it applies to, with the patches that suit it; each primitive in turn."""
    ground = maker.ground
    for primitive in ground.primitives:
        if primitive.kind != "conv":
            continue
        try:
            plan = ground.plan(maker.network, maker.pick.output, only=[primitive.name])
        except NoPlanError as error:
            yield Rival("uniform", primitive.name, None, str(error))
            continue
        if any(choice.primitive == primitive.name for choice in plan.choices):
            yield Rival("uniform", primitive.name, plan)
        else:
            yield Rival("uniform", primitive.name, None, "it applies to no layer of this network")


def neighbours(maker: Maker) -> Iterator[Rival]:
    """Everything that differs from the pick in one choice, and fits."""
    recipe = maker.recipe(maker.pick)
    seen = {recipe}
    for what, changed in (*_other_ways(maker, recipe), *_other_parts(maker, recipe), *_other_sizes(maker, recipe)):
        if changed not in seen:
            seen.add(changed)
            if (plan := maker.plan(changed)) is not None:
                yield Rival("neighbour", what, plan)
    try:
        other = maker.ground.plan(maker.network, maker.pick.output, columns=not recipe.walks)
    except NoPlanError as error:
        yield Rival("neighbour", "the other cover", None, str(error))
    else:
        yield Rival("neighbour", "columns" if other.streams else "patches", other)


def _other_ways(maker: Maker, recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Another primitive or variant for a layer; two layers in one, or one after the other."""
    shape, ground, chosen = maker.shaped(recipe), maker.ground, recipe.chosen

    def name(way: tuple[Primitive, Variant]) -> str:
        return f"{way[0].name} {way[1]}".strip()

    for i, one in enumerate(chosen):
        first, last = one.layers
        layer = _layer(shape, one.layers)
        for way in ground.ways(layer) if layer else ():
            yield f"layer {first}: {name(way)}", _swapped(recipe, i, 1, Chosen(one.layers, *way))
        if first != last:
            ways = [ground.ways(shape.shapes[at]) for at in one.layers]
            if all(ways):
                two = [Chosen((at, at), *of[0]) for at, of in zip(one.layers, ways, strict=True)]
                yield f"layers {first} and {last}: one after the other", _swapped(recipe, i, 1, *two)
        elif (first, first + 1) in fusion_groups(shape.space.network):
            both = _layer(shape, (first, first + 1))
            for way in ground.ways(both) if both else ():
                yield (
                    f"layers {first} and {first + 1}: {name(way)}",
                    _swapped(recipe, i, 2, Chosen((first, first + 1), *way)),
                )


def _swapped(recipe: Recipe, index: int, count: int, *by: Chosen) -> Recipe:
    return replace(recipe, chosen=(*recipe.chosen[:index], *by, *recipe.chosen[index + count :]))


def _other_parts(maker: Maker, recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Another number of images at a time behind one pooling."""
    for at_once in splits(maker.network):
        if sum(a != b for a, b in zip(at_once, recipe.at_once, strict=True)) == 1:
            changed = maker.adapted(replace(recipe, at_once=at_once))
            if changed is not None:
                yield f"images at a time: {' '.join(map(str, at_once))}", changed


def _other_sizes(maker: Maker, recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """The next larger and the next smaller patch along each axis."""
    space = maker.shaped(recipe).space
    for axis in range(3):
        sizes = sorted({*axis_sizes(space.output[axis], space.network.period[axis]), recipe.patch[axis]})
        at = sizes.index(recipe.patch[axis])
        for size in (*sizes[max(0, at - 1) : at], *sizes[at + 1 : at + 2]):
            z, y, x = (size if i == axis else other for i, other in enumerate(recipe.patch))
            column = -(-recipe.column // z) * z
            changed = maker.adapted(replace(recipe, patch=(z, y, x), column=column))
            if changed is not None:
                yield f"patch {'x'.join(map(str, turned_back((z, y, x), recipe.axis)))}", changed


def random_plans(maker: Maker, count: int, rng: np.random.Generator) -> Iterator[Rival]:
    """Feasible ones: any cover, patch, parts, and any primitive and variant for each layer; fewer where few fit."""
    found = 0
    for _ in range(MOST_TRIES):
        if found == count:
            return
        plan = maker.plan(random_recipe(maker, rng))
        if plan is not None:
            found += 1
            yield Rival("random", f"random {found}", plan)


def random_recipe(maker: Maker, rng: np.random.Generator) -> Recipe:
    """Whether it fits or not."""

    def any_of(things: Sequence[Any]) -> Any:
        return things[int(rng.integers(len(things)))]

    space = any_of(maker.spaces)
    z, y, x = (
        int(any_of(log_spaced(axis_sizes(length, period), SIZES_AT_ONCE)))
        for length, period in zip(space.output, space.network.period, strict=True)
    )
    column = -(-space.output[0] // z) * z if space.walks else 0
    at_once = any_of(splits(space.network))
    shape = tiling_of(space, (z, y, x)).split(at_once)
    chosen: list[Chosen] = []
    for first, last in space.spans:
        both = _layer(shape, (first, last)) if last > first else None
        together = maker.ground.ways(both) if both else []
        if together and rng.random() < 0.5:
            chosen.append(Chosen((first, last), *any_of(together)))
            continue
        chosen.extend(
            Chosen((layer, layer), *any_of(maker.ground.ways(shape.shapes[layer]))) for layer in range(first, last + 1)
        )
    return Recipe(space.axis, space.walks, (z, y, x), column, at_once, tuple(chosen))


def all_rivals(maker: Maker, randoms: int, seed: int, most: int | None = None) -> list[Rival]:
    """Uniform choices, random plans and neighbours, in this order; of each kind at most `most`."""
    kinds = uniform(maker), random_plans(maker, randoms, np.random.default_rng(seed)), neighbours(maker)
    return [rival for kind in kinds for rival in islice(kind, most)]


def turns(rivals: Sequence[Rival], kinds: Sequence[str]) -> Iterator[Rival]:
    """The one of each kind that is predicted to be the fastest, then the next of each; those without a plan last."""
    by_kind = [
        sorted(
            (rival for rival in rivals if rival.kind == kind), key=lambda r: inf if r.plan is None else r.plan.seconds
        )
        for kind in kinds
    ]
    for turn in zip_longest(*by_kind):
        yield from (rival for rival in turn if rival is not None)
