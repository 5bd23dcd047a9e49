"""Optimistic bounds on tilings not yet worked out, from what the layers of other tilings reached."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import mul
from typing import Any

from znnpy.planner.pareto import ParetoFront, knapsack_bound, least_cost
from znnpy.planner.tilings import Tiling, TilingSpace

FASTER = 0.98  # assumed: no layer takes less time per voxel than this share of the least seen so far
LEANER = 0.9  # assumed: no layer takes less of the arena or of prepared weights than this share

# Seconds per voxel computed, bytes of weights, and bytes of the arena per byte of input and output: non-dominated,
# fastest first.
UnitCosts = list[tuple[float, int, float]]
Needs = list[tuple[float, int, int]]  # seconds, resident bytes and arena bytes of one group: fastest first
UnitCostsByGroup = Mapping[int, UnitCosts]  # of some groups of a tiling
NONE_KNOWN: Mapping[int, Any] = {}


@dataclass
class _GroupCosts:
    """The least costs that one group reached in the tilings seen so far."""

    costs: dict[int, UnitCosts] = field(default_factory=dict)  # by planes of a step
    leanest: float = inf  # least bytes of the arena per byte of input and output

    def at(self, planes: int) -> UnitCosts:
        """Return the costs in steps as thick, or in the next thicker ones seen: thin steps are no faster."""
        thicker = [seen for seen in self.costs if seen >= planes]
        return self.costs[min(thicker)] if thicker else [(0.0, 0, 0.0)]


class Bounds:
    """Assumed lower bounds on the time of the tilings of a space; each tiling learnt from improves them."""

    def __init__(self, space: TilingSpace) -> None:
        self._learnt = [_GroupCosts() for _ in space.groups]
        self._best: dict[int, list[float]] = {}  # least known seconds per voxel, by planes of a step

    def learn(self, shape: Tiling, group: int, options: ParetoFront) -> None:
        """Remember what the options of one group reach, or that it has none."""
        learnt = self._learnt[group]
        self._best.clear()
        if not options:
            learnt.costs[shape.patch[0]] = [(inf, 0, 0.0)]
            return
        found, planes = unit_costs(shape, group, options), shape.patch[0]
        learnt.leanest = min(learnt.leanest, *(lean for _, _, lean in found))
        learnt.costs[planes] = _undominated(found + learnt.costs.get(planes, []))

    def needs(self, shape: Tiling, whole: UnitCostsByGroup = NONE_KNOWN) -> list[Needs]:
        """Return what the options of every group need at least.

        Groups in `whole` count as fast as in the undivided tiling that `shape` is a split of; the others count at the
        best costs seen so far, lowered by FASTER and LEANER.
        """
        found = []
        for index, learnt in enumerate(self._learnt):
            voxels, carried, under = shape.voxels[index], shape.carries[index], shape.live_elsewhere[index]
            moved = LEANER * shape.io_bytes(index)
            faster, costs = (1.0, whole[index]) if index in whole else (FASTER, learnt.at(shape.patch[0]))
            found.append(
                [
                    (faster * seconds_per_voxel * voxels, carried + int(LEANER * resident), under + int(lean * moved))
                    for seconds_per_voxel, resident, lean in costs
                ]
            )
        return found

    def lower_bound(self, planes: int, voxels: Sequence[int], costs: Mapping[int, float] = NONE_KNOWN) -> float:
        """Return the least seconds for so many voxels of each group in steps of so many planes, in any memory.

        It is a bound if FASTER holds. Groups in `costs` take that many seconds per voxel.
        """
        best = self._best.get(planes)
        if best is None:
            best = self._best[planes] = [FASTER * learnt.at(planes)[0][0] for learnt in self._learnt]
        if costs:
            best = [costs.get(index, seconds_per_voxel) for index, seconds_per_voxel in enumerate(best)]
        return sum(map(mul, voxels, best), 0.0)

    def unknown(self, planes: int) -> list[int]:
        """Return the groups with nothing learnt from steps as thick."""
        return [index for index, learnt in enumerate(self._learnt) if planes not in learnt.costs]

    def guess(self, shape: Tiling) -> tuple[float, int]:
        """Guess the seconds for the whole output, and the bytes, with every group at its best so far."""
        costs = [learnt.at(shape.patch[0])[0] for learnt in self._learnt]
        seconds = sum(
            seconds_per_voxel * voxels for (seconds_per_voxel, _, _), voxels in zip(costs, shape.voxels, strict=True)
        )
        arena = max(
            shape.live_elsewhere[index] + learnt.leanest * shape.io_bytes(index)
            for index, learnt in enumerate(self._learnt)
        )
        return seconds, int(arena) + sum(shape.carries) + sum(resident for _, resident, _ in costs)


def least_seconds(groups: Sequence[Needs], budget: int, enough: float = inf) -> float:
    """Return a lower bound on the seconds of one option per group within `budget` bytes; infinite if nothing fits.

    Options whose arena and weights do not fit together with the least weights of the others are ignored.

    enough  stop at a bound that is no less
    """
    fastest = [needs[0] for needs in groups]
    if sum([resident for _, resident, _ in fastest]) + max([arena for _, _, arena in fastest]) <= budget:
        return sum([seconds for seconds, _, _ in fastest])
    least = [min([resident for _, resident, _ in needs]) for needs in groups]
    spare = budget - sum(least)  # for the arena, and for weights beyond the least
    pairs, live = [], 0
    for needs, light in zip(groups, least, strict=True):
        most, leanest, kept = spare + light, inf, list[tuple[float, int]]()
        for seconds, resident, arena in needs:
            if arena + resident <= most:
                if arena < leanest:
                    leanest = arena
                if not kept or resident < kept[-1][1]:
                    kept.append((seconds, resident))
        if not kept:
            return inf
        pairs.append(kept)
        live = max(live, int(leanest))
    return knapsack_bound(pairs, budget - live, enough)


def least_priced(groups: Sequence[Needs], price: float) -> float:
    """Return the least seconds of one option per group, each byte of weights and of the arena adding `price` seconds.

    The arena is the largest of the options' arenas. This is exact if memory is unlimited.
    """
    costs = (
        (arena, group, seconds + price * resident)
        for group, needs in enumerate(groups)
        for seconds, resident, arena in needs
    )
    return least_cost(costs, len(groups), price)[0]


def unit_costs(shape: Tiling, group: int, options: ParetoFront) -> UnitCosts:
    """Return what the options of one group reach, per voxel and per byte."""
    voxels, carried = shape.voxels[group], shape.carries[group]
    under, moved = shape.live_elsewhere[group], shape.io_bytes(group)
    return [(o.seconds / voxels, o.resident - carried, (o.arena_bytes - under) / moved) for o in options]


def _undominated(costs: UnitCosts) -> UnitCosts:
    """Return the non-dominated costs, fastest first."""
    kept: UnitCosts = []
    steps: list[tuple[int, float]] = []  # the non-dominated ones in memory: more resident bytes, a smaller arena
    for seconds_per_voxel, resident, lean in sorted(costs):
        at = bisect_right(steps, (resident, inf))
        if not at or steps[at - 1][1] > lean:
            kept.append((seconds_per_voxel, resident, lean))
            beaten = sum(other >= lean for _, other in steps[at:])  # the next ones
            steps[at : at + beaten] = [(resident, lean)]
    return kept
