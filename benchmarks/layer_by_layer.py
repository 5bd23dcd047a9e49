"""The child of columns.py: seconds of every layer of a plan. A request on stdin, an answer on stdout, both JSON.

A descent is a step as a session runs it, from the raw voxels to the dense output, in the plan's arena, with the planes
that a column carries; but where layers take a part of the images at a time, only the first part goes through them. So
every layer runs once, on arrays of the size, strides and place that it has in a run, and on what the layer before gave.

Before the first descent every array is written to, and its seconds do not count: memory that the machine gives for the
first time is slow. Planes carried into the first descent are zeros.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from apart import limit_memory
from contestants import Noise, random_network

from znnpy.formats.weights import random_weights
from znnpy.inference import peak_bytes
from znnpy.kernels.crew import Crew
from znnpy.network import Network
from znnpy.planner.plan import Plan
from znnpy.run.session import Session
from znnpy.shapes import turn


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of one descent."""

    load: float  # raw voxels into the arena, normalised: once a step
    layers: tuple[float, ...]  # of one run of each choice, with its share of the planes carried for all its runs
    store: float  # the last part of the images to its places in the dense output

    def of_output(self, plan: Plan, network: Network) -> float:
        """For the whole output that the plan is for, if everything takes as long each time as it did this time."""
        cover = plan.cover(network)
        loads, stores = cover.steps(cover.margin), cover.steps(0) * plan.sub_batches[-1]
        runs = sum(choice.executions * spent for choice, spent in zip(plan.choices, self.layers, strict=True))
        return runs + loads * self.load + stores * self.store


class Descent(Session):
    """A session that measures its layers."""

    def touch(self) -> None:
        """Write to every array."""
        for bound in self._bound:
            bound.x.fill(0)
            bound.out.fill(0)
            for scratch in bound.scratch.values():
                scratch.fill(0)
            if bound.carry is not None:
                bound.carry.fill(0)

    def once(self, raw: npt.NDArray[Any], out: npt.NDArray[Any]) -> Seconds:
        """The first part of the images through every layer; raw and out as for `run`."""
        axes = (0, *(1 + axis for axis in turn(self.plan.axis)))
        load = timed(lambda: self._shop.load(raw.transpose(axes), self.input[0]))
        layers = []
        for index, bound in enumerate(self._bound):
            join = 0.0
            if bound.carry is not None and not bound.apart:
                join = timed(partial(self._shop.keep, bound.carry[: len(bound.x)], bound.x, join=True))
            run = timed(partial(self._compute, index, 0, bound.x[: bound.batch]))
            layers.append(run + join * bound.batch / len(bound.x))  # planes are joined for all images at once
        store = timed(lambda: self._shop.store(self._bound[-1].out, 0, out.transpose(axes)))
        return Seconds(load, tuple(layers), store)


def timed(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    request = json.load(sys.stdin)
    limit_memory(request["ram_bytes"])
    plan = Plan.from_json(request["plan"])
    network = random_network(request["network"])
    raw = np.empty((network.input_channels, *plan.patch_in), np.uint8)
    Noise(network.input_channels).read((0, 0, 0), raw)
    out = np.zeros((network.output_channels, *plan.patch_out), np.float32)
    found: list[Seconds] = []
    with Crew(plan.limits.threads) as crew, Descent(plan, network, random_weights(network), crew) as session:
        session.touch()
        session.once(raw, out)
        begin = time.perf_counter()
        while not found or time.perf_counter() - begin < request["repeat_seconds"]:
            found.append(session.once(raw, out))
    answer = {
        "seconds": [seconds.of_output(plan, network) for seconds in found],
        "descents": [{"load": s.load, "layers": s.layers, "store": s.store} for s in found],
        "peak_bytes": peak_bytes(),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
