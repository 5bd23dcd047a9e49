"""What patch shapes not yet worked out can reach at best, from what the layers of others reached."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from znnpy.planner.pareto import ParetoFront, knapsack_bound, least_cost
from znnpy.planner.tilings import Tiling, TilingSpace

FASTER = 0.98  # assumed: per voxel no layer needs less time than this share of the least seen so far
LEANER = 0.9  # nor less of the arena, or of prepared weights

# Seconds per voxel computed, bytes of weights, bytes of the arena per byte of input and output: fastest first, none
# worse in all of them.
UnitCosts = list[tuple[float, int, float]]
Needs = list[tuple[float, int, int]]  # seconds, bytes that stay, bytes of the arena of one span: fastest first
UnitCostsByGroup = Mapping[int, UnitCosts]  # by some spans of a shape
NONE_KNOWN: Mapping[int, Any] = {}


@dataclass
class _GroupCosts:
    """What one span of layers reached in the shapes seen so far."""

    paces: dict[int, UnitCosts] = field(default_factory=dict)  # by planes of a step
    leanest: float = inf  # least bytes of the arena per byte of input and output

    def at(self, planes: int) -> UnitCosts:
        """The paces of steps that are as thick, or the next thicker that were seen: thin steps are no faster."""
        thicker = [seen for seen in self.paces if seen >= planes]
        return self.paces[min(thicker)] if thicker else [(0.0, 0, 0.0)]


class Bounds:
    """Assumed lower bounds on the time of the shapes of a space; they get better with every shape learnt from."""

    def __init__(self, space: TilingSpace) -> None:
        self._learnt = [_GroupCosts() for _ in space.groups]
        self._best: dict[int, list[float]] = {}  # least seconds per voxel, by planes of a step, as known now

    def learn(self, shape: Tiling, span: int, options: ParetoFront) -> None:
        """Remember what the options of one span reach; where there are none, that nothing does."""
        learnt = self._learnt[span]
        self._best.clear()
        if not options:
            learnt.paces[shape.patch[0]] = [(inf, 0, 0.0)]
            return
        found, planes = unit_costs(shape, span, options), shape.patch[0]
        learnt.leanest = min(learnt.leanest, *(lean for _, _, lean in found))
        learnt.paces[planes] = _undominated(found + learnt.paces.get(planes, []))

    def needs(self, shape: Tiling, whole: UnitCostsByGroup = NONE_KNOWN) -> list[Needs]:
        """What the options of every span need at least.

        Spans in `whole` count as fast as the same shape undivided, of which it is a split; the others at the best pace
        seen so far, less what FASTER and LEANER allow.
        """
        found = []
        for index, learnt in enumerate(self._learnt):
            voxels, carried, under = shape.voxels[index], shape.carries[index], shape.live_elsewhere[index]
            moved = LEANER * shape.io_bytes(index)
            faster, paces = (1.0, whole[index]) if index in whole else (FASTER, learnt.at(shape.patch[0]))
            found.append(
                [
                    (faster * pace * voxels, carried + int(LEANER * resident), under + int(lean * moved))
                    for pace, resident, lean in paces
                ]
            )
        return found

    def lower_bound(self, planes: int, voxels: Sequence[int], paces: Mapping[int, float] = NONE_KNOWN) -> float:
        """The least seconds for so many voxels of each span in steps of so many planes, however much memory there is.

        As far as FASTER is right; spans in `paces` take so many seconds per voxel.
        """
        best = self._best.get(planes)
        if best is None:
            best = self._best[planes] = [FASTER * learnt.at(planes)[0][0] for learnt in self._learnt]
        return sum(count * paces.get(index, pace) for index, (pace, count) in enumerate(zip(best, voxels, strict=True)))

    def unknown(self, planes: int) -> list[int]:
        """Spans of which no step as thick was learnt from."""
        return [index for index, learnt in enumerate(self._learnt) if planes not in learnt.paces]

    def guess(self, shape: Tiling) -> tuple[float, int]:
        """Seconds for the whole output, and bytes, with every span at its best pace so far: no bound, a guess."""
        paces = [learnt.at(shape.patch[0])[0] for learnt in self._learnt]
        seconds = sum(pace * voxels for (pace, _, _), voxels in zip(paces, shape.voxels, strict=True))
        arena = max(
            shape.live_elsewhere[index] + learnt.leanest * shape.io_bytes(index)
            for index, learnt in enumerate(self._learnt)
        )
        return seconds, int(arena) + sum(shape.carries) + sum(resident for _, resident, _ in paces)


def needs_of(options: ParetoFront) -> Needs:
    """What the options of one span need."""
    return [(o.seconds, o.resident, o.arena_bytes) for o in options]


def least_seconds(spans: Sequence[Needs], room: int, enough: float = inf) -> float:
    """A lower bound on the seconds of one option per span within `room` bytes; infinite when nothing fits.

    What finds no room for its arena and weights beside the least weights of the others does not count.

    enough  a bound that is no less is as good as any
    """
    fastest = [needs[0] for needs in spans]
    if sum([resident for _, resident, _ in fastest]) + max([arena for _, _, arena in fastest]) <= room:
        return sum([seconds for seconds, _, _ in fastest])
    least = [min([resident for _, resident, _ in needs]) for needs in spans]
    spare = room - sum(least)  # for the arena, and for weights beyond the least
    pairs, live = [], 0
    for needs, light in zip(spans, least, strict=True):
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
    return knapsack_bound(pairs, room - live, enough)


def least_priced(spans: Sequence[Needs], price: float) -> float:
    """The least seconds of one option per span where every byte of weights and of the arena adds `price` seconds.

    The arena is as large as the largest of the options' arenas. Exact, but that all bytes find room.
    """
    costs = (
        (arena, span, seconds + price * resident)
        for span, needs in enumerate(spans)
        for seconds, resident, arena in needs
    )
    return least_cost(costs, len(spans), price)[0]


def unit_costs(shape: Tiling, span: int, options: ParetoFront) -> UnitCosts:
    """What the options of one span reach."""
    voxels, carried = shape.voxels[span], shape.carries[span]
    under, moved = shape.live_elsewhere[span], shape.io_bytes(span)
    return [(o.seconds / voxels, o.resident - carried, (o.arena_bytes - under) / moved) for o in options]


def _undominated(paces: UnitCosts) -> UnitCosts:
    """Those that no other beats, fastest first."""
    kept: UnitCosts = []
    steps: list[tuple[int, float]] = []  # of those, what no other beats in memory: the more stays, the leaner the arena
    for pace, resident, lean in sorted(paces):
        at = bisect_right(steps, (resident, inf))
        if not at or steps[at - 1][1] > lean:
            kept.append((pace, resident, lean))
            beaten = sum(other >= lean for _, other in steps[at:])  # the next ones
            steps[at : at + beaten] = [(resident, lean)]
    return kept
