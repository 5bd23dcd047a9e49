"""Runs of modes.py: a plan of any mode, from the host's memory into the host's memory, and a corner to compare with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from math import prod
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
from contestants import random_network
from contestants_gpu import Held, Kept, Warm, noise, reference_side
from gpu_card import Lowest
from planning_points import part_of
from several_gpus import apart
from watch import PAUSE, Watch

from znnpy.formats.weights import random_weights
from znnpy.kernels.crew import Crew
from znnpy.machine import Limits, limits_of, this_machine
from znnpy.network import ConvWeights, Network
from znnpy.planner.plan import Plan
from znnpy.planner.search import make_plan
from znnpy.run import pipeline
from znnpy.run.devices import Site
from znnpy.run.hosted import HostedSession
from znnpy.run.lane import Lane
from znnpy.run.session import Session
from znnpy.run.sessions import Sessions, lanes_of, sessions_of
from znnpy.shapes import Vec3

DIAGONAL = tuple(range(4))  # voxels (i, i, i) of outputs that are kept, to be held against the definition
STEPS = 4  # at least, where two sides overlap
TOUCHED = 2**28  # bytes of memory that a thread touches
WARM_SECONDS = 10.0  # what is predicted to take as long runs without a first one that does not count


@dataclass(frozen=True)
class Corner:
    """A network, its volume of noise, and what the output's first corner is held against."""

    network: Network
    weights: tuple[ConvWeights, ...]
    source: Held
    voxels: npt.NDArray[np.floating]  # (maps, z, y, x): float32 of the processor, or float64 of the definition

    @classmethod
    def of(cls, name: str, side: int, threads: int, voxels: npt.NDArray[np.float64] | None = None) -> Corner:
        """voxels  (maps, z, y, x), to be held instead of what the processor makes."""
        network = random_network(name)
        source = Held(noise((side,) * 3, network.input_channels))
        limits = Limits(limits_of(this_machine()).ram_bytes, threads)
        held = voxels if voxels is not None else on_the_processor(network, source, corner_of(network, side), limits)[1]
        return cls(network, random_weights(network), source, held)

    def apart(self, voxels: npt.NDArray[np.float32]) -> float:
        """By how much an output (maps, z, y, x) is off, of the size of the values, where both are; NaN counts."""
        z, y, x = (min(a, b) for a, b in zip(voxels.shape[1:], self.voxels.shape[1:], strict=True))
        return apart(self.voxels[:, :z, :y, :x], voxels[:, :z, :y, :x]).most


def corner_of(network: Network, side: int) -> Vec3:
    """Output voxels of a volume of such a side that are held against others."""
    z, y, x = (min(reference_side(network), size) for size in network.dense_size((side,) * 3))
    return z, y, x


def on_the_processor(
    network: Network, source: Held, output: Vec3, limits: Limits
) -> tuple[Plan, npt.NDArray[np.float32]]:
    """The plan for a corner of a volume, with random weights, and its output (maps, z, y, x)."""
    plan = make_plan(network, output, this_machine(), limits)
    target = Kept(np.full((network.output_channels, *output), np.nan, np.float32))
    with Crew(limits.threads) as crew, Session(plan, network, random_weights(network), crew) as session:
        pipeline.run(session, crew, source, target, plan.cover(network))
    return plan, target.voxels


def ran(plan: Plan, corner: Corner, gpu: Site, most_seconds: float, rounds: int) -> dict[str, Any]:
    """What a plan does, or the part of it that is `to_run`.

    gpu  an open one; plans of the processor leave it alone
    """
    network, here = corner.network, to_run(plan, corner.network, most_seconds)
    site = gpu if plan.device == "gpu" else Site(this_machine())
    target = Kept(np.full((network.output_channels, *here.output), np.nan, np.float32))
    assert gpu.gpu is not None
    assert gpu.free_bytes is not None
    with Taken() as taken, sessions_of(here, site, network, corner.weights) as sessions, Lowest(gpu.gpu) as lowest:
        warm: Any = {name: Warm(session) for name, session in sessions.items()}  # type: ignore[arg-type]
        _prepare(lanes_of(here, warm, network), corner.source, target)
        if here.seconds < WARM_SECONDS:
            pipeline.run_lanes(lanes_of(here, warm, network), corner.source, target)
        before = _busy(sessions)
        timings = [pipeline.run_lanes(lanes_of(here, warm, network), corner.source, target) for _ in range(rounds)]
        after = _busy(sessions)
    spent = [timing.seconds for timing in timings]
    busy = {side: (after[side] - before[side]) / len(spent) for side in after}
    cover = here.cover(network)
    return {
        "output": here.output,
        "seconds": spent,
        "planned_seconds": here.seconds,
        "voxels_per_second": plan.voxels_per_second * here.seconds / median(spent),
        "part_voxels_per_second": prod(here.output) / median(spent),
        "vram_bytes": gpu.free_bytes - lowest.free_bytes if plan.device == "gpu" else 0,
        "promised_vram_bytes": plan.memory.vram,
        "ram_bytes": taken.most_bytes,
        "promised_ram_bytes": plan.memory.peak - plan.memory.baseline,
        "memory": asdict(plan.memory),
        "not_written": int(np.isnan(target.voxels).sum()),
        "apart": corner.apart(target.voxels),
        "diagonal": target.voxels[:, DIAGONAL, DIAGONAL, DIAGONAL].T.tolist(),
        "busy": {side: seconds * len(spent) / sum(spent) for side, seconds in busy.items()},
        "steady": steady(busy, sum(spent) / len(spent), cover.steps(cover.margin)),
        "lanes": {lane.name: {"voxels": lane.voxels, **lane.seconds} for lane in timings[-1].lanes},
        "given_up": {lane.name: lane.given_up for lane in timings[-1].lanes if lane.given_up},
    }


class Taken(Watch):
    """The most memory that the process took while this was open, beside what it had.

    most_bytes  so far
    """

    def __init__(self, pause: float = PAUSE) -> None:
        super().__init__(pause)
        self._process = psutil.Process()
        self._before, self.most_bytes = self._process.memory_info().rss, 0

    def look(self) -> None:
        self.most_bytes = max(self.most_bytes, self._process.memory_info().rss - self._before)


def to_run(plan: Plan, network: Network, most_seconds: float) -> Plan:
    """For as much of the output as takes so many seconds, or STEPS where two sides overlap; side by side for all."""
    if plan.cpu_plan is not None:
        return plan
    part = part_of(plan, network, most_seconds)
    for axis in range(3) if plan.overlaps else ():
        while replace(plan, output=part).cover(network).steps(0) < STEPS and part[axis] < plan.output[axis]:
            size = min(part[axis] + plan.patch_out[axis], plan.output[axis])
            z, y, x = (size if i == axis else other for i, other in enumerate(part))
            part = z, y, x
    return plan.for_output(part, network, plan.memory)


def touch(nbytes: int, threads: int) -> None:
    """Have so much of the host's memory at once, written to by so many threads, and let go of it."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda size: np.full(size, 1, np.uint8), [TOUCHED] * (nbytes // TOUCHED) + [nbytes % TOUCHED]))


def _prepare(lanes: Sequence[Lane], source: Held, target: Kept) -> None:
    """Make the buffers of `Warm` sessions, and compile the kernels that come with them: a GPU's first takes 2 s."""
    for lane in lanes:
        reads, writes = lane.shares.moves()
        lane.session.buffers(source.dtype, target.dtype, reads=reads, writes=writes)


def steady(busy: Mapping[str, float], spent: float, steps: int) -> float | None:
    """For how much of a run's steady state the slower side is busy; None where there are no two sides.

    Without the step in which it waits for the other at the beginning of a run, or has been waited for at its end.
    """
    if len(busy) < 2:
        return None
    return max(busy.values()) / (spent - min(busy.values()) / steps)


def _busy(sessions: Sessions) -> Mapping[str, float]:
    """Seconds that each side of a step computed so far, where it goes through two."""
    hosted = (session for session in sessions.values() if isinstance(session, HostedSession))
    return {side: seconds for session in hosted for side, seconds in session.busy_seconds.items()}
