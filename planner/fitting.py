"""Rates of units fitted to runs of whole layers: what one machine reaches, from a handful of seconds.

Method  Every unit has a factor on its arithmetic and one on its traffic. Those that predict the runs best are searched
        for coordinate by coordinate, with steps that halve where none is an improvement. Errors are relative; large
        ones count by their size, not by its square (Huber, 1964): a run that was disturbed, or a primitive whose work
        says little of its time, shall not move what the others agree on.
Prior   What no run depends on keeps its assumed rate: a factor costs a little more the further it is from 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

import numpy as np

from znnpy.kernels.primitive import Unit, Work
from znnpy.planner.cost import Rates

PRIOR = 1e-3  # of a squared logarithm of a factor, against those of the errors
LARGE_ERROR = 0.2  # a logarithm, from which on errors count by their size
MOST_FACTOR = log(1000.0)
FIRST_STEP, LAST_STEP = 0.5, 0.004  # of a logarithm
MOST_SWEEPS = 200


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of a layer did and took."""

    work: tuple[Work, ...]
    seconds: float


def fitted(rates: Rates, runs: Sequence[Run]) -> Rates:
    """Rates that predict the runs best; as they were for units that no run names."""
    units = units_of(runs)
    if not units:
        return rates
    problem = _Problem(rates, runs, units)
    factors = np.exp(problem.best())
    return replace(
        rates.replaced(
            **{
                unit: rates.of(unit).times(float(factors[i]), float(factors[len(units) + i]))
                for i, unit in enumerate(units)
            }
        ),
        fitted=True,
    )


def units_of(runs: Sequence[Run]) -> tuple[Unit, ...]:
    """Units that the runs name, in the order of their first."""
    return tuple(dict.fromkeys(work.unit for run in runs for work in run.work))


class _Problem:
    """Runs as arrays: one entry per stage."""

    def __init__(self, rates: Rates, runs: Sequence[Run], units: Sequence[Unit]) -> None:
        stages = [(number, work) for number, run in enumerate(runs) for work in run.work]
        self._run = np.array([number for number, _ in stages])
        self._unit = np.array([units.index(work.unit) for _, work in stages])
        self._flops = np.array([work.flops / rates.of(work.unit).flops for _, work in stages])
        self._nbytes = np.array([work.nbytes / rates.of(work.unit).nbytes for _, work in stages])
        self._begin = np.array([len(run.work) * rates.stage_seconds for run in runs])
        self._seconds = np.log([run.seconds for run in runs])
        self._units = len(units)

    def loss(self, logs: np.ndarray) -> float:
        """Of logarithms of factors: of the arithmetic of all units, then of their traffic."""
        flops, nbytes = np.exp(-logs[: self._units]), np.exp(-logs[self._units :])
        spent = np.maximum(self._flops * flops[self._unit], self._nbytes * nbytes[self._unit])
        predicted = np.bincount(self._run, spent, len(self._begin)) + self._begin
        error = np.abs(np.log(predicted) - self._seconds)
        huber = np.where(error < LARGE_ERROR, 0.5 * error**2, LARGE_ERROR * (error - 0.5 * LARGE_ERROR))
        return float(huber.sum() + PRIOR * (logs**2).sum())

    def best(self) -> np.ndarray:
        logs = np.zeros(2 * self._units)
        least, step = self.loss(logs), FIRST_STEP
        for _ in range(MOST_SWEEPS):
            before = least
            for index in range(len(logs)):
                for change in (step, -step):
                    other = logs.copy()
                    other[index] = np.clip(other[index] + change, -MOST_FACTOR, MOST_FACTOR)
                    if (loss := self.loss(other)) < least:
                        logs, least = other, loss
                        break
            if least == before:
                step /= 2
                if step < LAST_STEP:
                    break
        return logs
