"""What patch shapes not yet worked out can reach at best, from what the layers of others reached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from znnpy.planner.candidates import Candidate, Space
from znnpy.planner.trade import Front, relaxed

OPTIMISM = 0.9  # assumed: per voxel no layer needs less time or arena than this share of the least seen so far

Pairs = list[tuple[float, int]]  # seconds and bytes, fastest first, no pair worse in both


@dataclass
class _Learnt:
    """What one span of layers reached in the patch shapes seen so far."""

    paces: Pairs = field(default_factory=lambda: [(0.0, 0)])  # seconds per output voxel, prepared weights
    leanest: float = 0.0  # least bytes of the arena per byte of input and output
    seen: bool = False


class Bounds:
    """Assumed lower bounds on the time of the shapes of a space; they get better with every shape learnt from."""

    def __init__(self, space: Space) -> None:
        self._learnt = [_Learnt() for _ in space.spans]

    def learn(self, shape: Candidate, span: int, options: Front) -> None:
        """Remember what the options of one span reach."""
        if not options:
            return
        learnt = self._learnt[span]
        voxels, under = shape.voxels[span], shape.under[span]
        leanest = min(option.live - under for option in options) / shape.moved(span)
        paces = [(option.seconds / voxels, option.resident) for option in options]
        learnt.leanest = min(learnt.leanest, leanest) if learnt.seen else leanest
        learnt.paces = _pairs(paces + learnt.paces if learnt.seen else paces)
        learnt.seen = True

    def seconds(self, shape: Candidate, room: int, known: Mapping[int, Front]) -> float:
        """The least seconds for the whole output in `room` bytes, as far as OPTIMISM is right; infinite when none fits.

        Spans in `known` count as they are, the others at the best pace seen so far, less what OPTIMISM allows.
        """
        pairs = []
        live = 0
        for index, learnt in enumerate(self._learnt):
            if index in known:
                pairs.append(_pairs((o.seconds, o.resident) for o in known[index]))
                live = max(live, min(option.live for option in known[index]))
            else:
                voxels = OPTIMISM * shape.voxels[index]
                pairs.append([(pace * voxels, int(OPTIMISM * resident)) for pace, resident in learnt.paces])
                live = max(live, shape.under[index] + int(OPTIMISM * learnt.leanest * shape.moved(index)))
        return relaxed(pairs, room - live)

    def fastest(self, shape: Candidate) -> tuple[float, int]:
        """Seconds for the whole output, and bytes, with every span at its best pace so far: no bound, a guess."""
        paces = [learnt.paces[0] for learnt in self._learnt]
        seconds = sum(pace * voxels for (pace, _), voxels in zip(paces, shape.voxels, strict=True))
        arena = max(
            shape.under[index] + learnt.leanest * shape.moved(index) for index, learnt in enumerate(self._learnt)
        )
        return seconds, int(arena) + sum(resident for _, resident in paces)


def _pairs(pairs: Iterable[tuple[float, int]]) -> Pairs:
    """Those that no other beats, fastest first."""
    kept: Pairs = []
    for seconds, nbytes in sorted(pairs):
        if not kept or nbytes < kept[-1][1]:
            kept.append((seconds, nbytes))
    return kept
