"""What patch shapes not yet worked out can reach at best, from what the layers of others reached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from znnpy.network import Network
from znnpy.planner.candidates import Candidate, spans
from znnpy.planner.trade import Front, relaxed
from znnpy.shapes import FLOAT32

OPTIMISM = 0.9  # assumed: per voxel no layer needs less time or arena than this share of the least seen so far

Pairs = list[tuple[float, int]]  # seconds and bytes, fastest first, no pair worse in both


@dataclass
class _Learnt:
    """What one span of layers reached in the patch shapes seen so far."""

    paces: Pairs = field(default_factory=lambda: [(0.0, 0)])  # seconds per output voxel, prepared weights
    leanest: float = 0.0  # least bytes of the arena per byte of input and output
    seen: bool = False


class Bounds:
    """Assumed lower bounds on the time of patch shapes of a network; they get better with every shape learnt from."""

    def __init__(self, network: Network) -> None:
        self._maps = network.maps
        self._spans = spans(network)
        self._learnt = [_Learnt() for _ in self._spans]

    def moved(self, shape: Candidate, span: int) -> int:
        """Bytes of a span's input and output; spans are counted as in `spans`."""
        maps, voxels, (first, last) = self._maps, shape.voxels, self._spans[span]
        return FLOAT32 * (voxels[first] * maps[first] + voxels[last + 1] * maps[last + 1])

    def learn(self, shape: Candidate, span: int, options: Front) -> None:
        """Remember what the options of one span reach."""
        if not options:
            return
        learnt = self._learnt[span]
        voxels = shape.voxels[self._spans[span][1] + 1]
        leanest = min(option.live for option in options) / self.moved(shape, span)
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
                voxels = OPTIMISM * shape.voxels[self._spans[index][1] + 1]
                pairs.append([(pace * voxels, int(OPTIMISM * resident)) for pace, resident in learnt.paces])
                live = max(live, int(OPTIMISM * learnt.leanest * self.moved(shape, index)))
        return shape.patches * relaxed(pairs, room - live)

    def fastest(self, shape: Candidate) -> tuple[float, int]:
        """Seconds for the whole output, and bytes, with every span at its best pace so far: no bound, a guess."""
        paces = [learnt.paces[0] for learnt in self._learnt]
        seconds = sum(pace * shape.voxels[last + 1] for (pace, _), (_, last) in zip(paces, self._spans, strict=True))
        arena = max(learnt.leanest * self.moved(shape, index) for index, learnt in enumerate(self._learnt))
        return shape.patches * seconds, int(arena) + sum(resident for _, resident in paces)


def _pairs(pairs: Iterable[tuple[float, int]]) -> Pairs:
    """Those that no other beats, fastest first."""
    kept: Pairs = []
    for seconds, nbytes in sorted(pairs):
        if not kept or nbytes < kept[-1][1]:
            kept.append((seconds, nbytes))
    return kept
