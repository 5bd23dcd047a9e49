"""What patch shapes not yet worked out can reach at best, from what the layers of others reached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from znnpy.planner.candidates import Candidate, Space
from znnpy.planner.trade import Front, relaxed

FASTER = 0.98  # assumed: per voxel no layer needs less time than this share of the least seen so far
LEANER = 0.9  # nor less of the arena, or of prepared weights

Fronts = Mapping[int, Front]  # of some spans of a shape
NOTHING: Fronts = {}

Pairs = list[tuple[float, int]]  # seconds and bytes, fastest first, no pair worse in both


@dataclass
class _Learnt:
    """What one span of layers reached in the shapes seen so far."""

    paces: dict[int, Pairs] = field(default_factory=dict)  # seconds per voxel computed, weights; by planes of a step
    leanest: float = inf  # least bytes of the arena per byte of input and output

    def at(self, planes: int) -> Pairs:
        """The paces of steps that are as thick, or the next thicker that were seen: thin steps are no faster."""
        thicker = [seen for seen in self.paces if seen >= planes]
        return self.paces[min(thicker)] if thicker else [(0.0, 0)]


class Bounds:
    """Assumed lower bounds on the time of the shapes of a space; they get better with every shape learnt from."""

    def __init__(self, space: Space) -> None:
        self._learnt = [_Learnt() for _ in space.spans]

    def learn(self, shape: Candidate, span: int, options: Front) -> None:
        """Remember what the options of one span reach; where there are none, that nothing does."""
        learnt = self._learnt[span]
        if not options:
            learnt.paces[shape.patch[0]] = [(inf, 0)]
            return
        voxels, under, carried, planes = shape.voxels[span], shape.under[span], shape.carries[span], shape.patch[0]
        leanest = min(option.live - under for option in options) / shape.moved(span)
        paces = [(option.seconds / voxels, option.resident - carried) for option in options]
        learnt.leanest = min(learnt.leanest, leanest)
        learnt.paces[planes] = _pairs(paces + learnt.paces.get(planes, []))

    def seconds(self, shape: Candidate, room: int, known: Fronts = NOTHING, whole: Fronts = NOTHING) -> float:
        """The least seconds for the whole output in `room` bytes, as far as FASTER and LEANER are right.

        Spans in `known` count as they are; those in `whole` as fast as the same shape undivided, of which it is a
        split; the others at the best pace seen so far, less what FASTER and LEANER allow. Infinite when nothing fits.
        """
        pairs = []
        live = 0
        for index, learnt in enumerate(self._learnt):
            if index in known:
                pairs.append(_pairs((o.seconds, o.resident) for o in known[index]))
                live = max(live, min(option.live for option in known[index]))
                continue
            carried = shape.carries[index]
            if index in whole:
                spent = _pairs((o.seconds, o.resident - carried) for o in whole[index])
            else:
                voxels = FASTER * shape.voxels[index]
                spent = [(pace * voxels, resident) for pace, resident in learnt.at(shape.patch[0])]
            pairs.append([(seconds, carried + int(LEANER * resident)) for seconds, resident in spent])
            lean = LEANER * learnt.leanest if learnt.leanest < inf else 0.0
            live = max(live, shape.under[index] + int(lean * shape.moved(index)))
        return relaxed(pairs, room - live)

    def at_best(self, planes: int, voxels: Sequence[int], paces: Mapping[int, float]) -> float:
        """The least seconds for so many voxels of each span in steps of so many planes, however much memory there is.

        As far as FASTER is right; spans in `paces` take so many seconds per voxel.
        """
        return sum(
            count * (paces[index] if index in paces else FASTER * learnt.at(planes)[0][0])
            for index, (learnt, count) in enumerate(zip(self._learnt, voxels, strict=True))
        )

    def unknown(self, planes: int) -> list[int]:
        """Spans of which no step as thick was learnt from."""
        return [index for index, learnt in enumerate(self._learnt) if planes not in learnt.paces]

    def fastest(self, shape: Candidate) -> tuple[float, int]:
        """Seconds for the whole output, and bytes, with every span at its best pace so far: no bound, a guess."""
        paces = [learnt.at(shape.patch[0])[0] for learnt in self._learnt]
        seconds = sum(pace * voxels for (pace, _), voxels in zip(paces, shape.voxels, strict=True))
        arena = max(
            shape.under[index] + learnt.leanest * shape.moved(index) for index, learnt in enumerate(self._learnt)
        )
        return seconds, int(arena) + sum(shape.carries) + sum(resident for _, resident in paces)


def _pairs(pairs: Iterable[tuple[float, int]]) -> Pairs:
    """Those that no other beats, fastest first."""
    kept: Pairs = []
    for seconds, nbytes in sorted(pairs):
        if not kept or nbytes < kept[-1][1]:
            kept.append((seconds, nbytes))
    return kept
