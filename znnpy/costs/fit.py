"""Fit the rates of units, and factors of primitives by size, to runs of whole layers.

Method  Every unit has two factors, on its arithmetic and on its traffic, and one more factor scales the time that a
        stage takes to begin. The fit searches for the factors that predict the runs best, along one direction after the
        other; the step halves when no direction improves the fit. The errors that remain are fitted method by method,
        to the runs of that method alone: least squares give a factor at each of SIZES, sizes in between are
        interpolated, and beyond the shortest and the longest run the factor stays constant. Errors are relative, and
        large ones count by their size, not by its square (Huber, 1964), because a disturbed run shall not move a rate
        on which the others agree. Short runs, in which a device mostly starts, count less for the rates; they decide
        the factors of their method at small sizes.
Prior   Each factor costs a little more the further it is from 1, so that a rate on which no run depends stays as it
        was assumed. In the same way, each factor of a method costs more the further it is from that at the next size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import log

import numpy as np
import numpy.typing as npt

from znnpy.costs.model import Rates
from znnpy.costs.size_trend import SIZES, interpolation_weights
from znnpy.kernels.contract import Unit, Work

PRIOR = 1e-2  # weight of the squared logarithm of a unit's factor in the loss
SMOOTH, TO_ONE = 2e-2, 1e-3  # weights for a method's factors: differences between neighbouring sizes, distance from 1
LARGE_ERROR = 0.2  # larger errors (logarithms of ratios) count by their size instead of its square
SHORT_SECONDS = 3e-4  # a run of this length counts half for the rates
MOST_FACTOR = log(1000.0)
MOST_OF_A_SIZE = log(4.0)  # limit of a method's factors, and of their fall to the next size: larger layers take longer
FIRST_STEP, LAST_STEP = 0.5, 0.004  # steps of the search, in logarithms of factors
MOST_SWEEPS = 200
ROUNDS = 8  # rounds of least squares; the errors of each give the weights of the next

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Run:
    """The work and the seconds of one run of a layer."""

    work: tuple[Work, ...]
    seconds: float
    method: str = ""  # name of the primitive that ran, and its precision


def fitted(rates: Rates, runs: Sequence[Run], *, begins: bool = True) -> Rates:
    """Return the rates that predict the runs best; units that no run uses keep theirs.

    begins  the seconds of the runs include the time that stages take to begin; without it, that time is not fitted
    """
    units = units_of(runs)
    if not units:
        return rates
    problem = _Problem(rates, runs, units, begins=begins)
    logs = problem.best()
    factors = np.exp(logs)
    found = rates.replaced(
        **{
            unit: rates.of(unit).times(float(factors[i]), float(factors[len(units) + i]))
            for i, unit in enumerate(units)
        }
    )
    return replace(
        found,
        stage_seconds=rates.stage_seconds * float(factors[-1]),
        fitted=rates.fitted | set(units),
        by_size={**rates.by_size, **_by_size(runs, problem, logs)},
    )


def units_of(runs: Sequence[Run]) -> tuple[Unit, ...]:
    """Return the units that the runs use, in the order of first use."""
    return tuple(dict.fromkeys(work.unit for run in runs for work in run.work))


class _Problem:
    """Runs as arrays with one entry per stage.

    The logarithms of factors stand in this order: arithmetic of all units, their traffic, the beginning of a stage.
    """

    def __init__(self, rates: Rates, runs: Sequence[Run], units: Sequence[Unit], *, begins: bool) -> None:
        stages = [(number, work) for number, run in enumerate(runs) for work in run.work]
        self._run = np.array([number for number, _ in stages])
        self._unit = np.array([units.index(work.unit) for _, work in stages])
        self._flops = np.array([work.flops / rates.of(work.unit).flops for _, work in stages])
        self._nbytes = np.array([work.nbytes / rates.of(work.unit).nbytes for _, work in stages])
        self._begin = np.array([len(run.work) * rates.stage_seconds if begins else 0.0 for run in runs])
        self._seconds = np.array([run.seconds for run in runs])
        self._weight = self._seconds / (self._seconds + SHORT_SECONDS)
        self._units = len(units)
        self._begins = begins

    def working(self, logs: Floats) -> Floats:
        """Return the seconds of every run without the beginnings of its stages."""
        flops, nbytes = np.exp(-logs[: self._units]), np.exp(-logs[self._units : -1])
        spent = np.maximum(self._flops * flops[self._unit], self._nbytes * nbytes[self._unit])
        return np.bincount(self._run, spent, len(self._begin)).astype(np.float64)

    def beginning(self, logs: Floats) -> Floats:
        """Return the seconds that the stages of every run take to begin."""
        return np.asarray(np.exp(logs[-1]) * self._begin)

    def loss(self, logs: Floats) -> float:
        predicted = self.working(logs) + self.beginning(logs)
        error = np.abs(np.log(predicted / self._seconds))
        huber = np.where(error < LARGE_ERROR, 0.5 * error**2, LARGE_ERROR * (error - 0.5 * LARGE_ERROR))
        return float((self._weight * huber).sum() + PRIOR * (logs**2).sum())

    def best(self) -> Floats:
        logs = np.zeros(2 * self._units + 1)
        least, step = self.loss(logs), FIRST_STEP
        directions = list(self._directions())
        for _ in range(MOST_SWEEPS):
            before = least
            for direction in directions:
                for change in (step, -step):
                    other = np.clip(logs + change * direction, -MOST_FACTOR, MOST_FACTOR)
                    if (loss := self.loss(other)) < least:
                        logs, least = other, loss
                        break
            if least == before:
                step /= 2
                if step < LAST_STEP:
                    break
        return logs

    def _directions(self) -> Iterator[Floats]:
        """Yield the directions: all units together, each unit's arithmetic and traffic together, each logarithm alone.

        A stage takes as long as the longer of its arithmetic and its traffic; if they are equal, neither helps alone.
        """
        each = np.eye(2 * self._units + 1)
        yield each[:-1].sum(axis=0)
        yield from each[: self._units] + each[self._units : -1]
        yield from each if self._begins else each[:-1]


def _by_size(runs: Sequence[Run], problem: _Problem, logs: Floats) -> dict[str, tuple[float, ...]]:
    """Return the factors on the seconds of every method at SIZES, fitted to its own runs."""
    working, beginning = problem.working(logs), problem.beginning(logs)
    measured = np.array([run.seconds for run in runs])
    found = {}
    for name in dict.fromkeys(run.method for run in runs if run.method):
        own = np.array([run.method == name for run in runs]) & (working > 0)
        if own.any():
            found[name] = _factors(working[own], beginning[own], measured[own])
    return found


def _factors(working: Floats, beginning: Floats, measured: Floats) -> tuple[float, ...]:
    """Fit factors at SIZES such that `working` times them plus `beginning` is what was measured (Gauss-Newton)."""
    hats = np.zeros((len(working), len(SIZES)))
    for row, size in zip(hats, working, strict=True):
        index, share = interpolation_weights(float(size))
        row[index], row[index + 1] = 1 - share, share
    steps = np.diff(np.eye(len(SIZES)), axis=0)
    prior = 2 * (SMOOTH * steps.T @ steps + TO_ONE * np.eye(len(SIZES)))
    logs: Floats = np.zeros(len(SIZES))
    for _ in range(ROUNDS):
        worked = working * np.exp(hats @ logs)
        errors = np.log(measured / (worked + beginning))
        moving = hats * (worked / (worked + beginning))[:, None]  # derivative of the logarithm of the predicted seconds
        weighted = moving.T * np.minimum(1.0, LARGE_ERROR / np.maximum(np.abs(errors), 1e-9))
        logs = logs + np.linalg.solve(prior + weighted @ moving, weighted @ errors - prior @ logs)
        logs = np.clip(logs, -MOST_OF_A_SIZE, MOST_OF_A_SIZE)
    shortest, longest = (hats[index] @ logs for index in (working.argmin(), working.argmax()))
    logs = np.where(np.array(SIZES) < working.min(), shortest, logs)
    logs = np.where(
        np.array(SIZES) > working.max(), longest, logs
    )  # a slope between two runs does not extend beyond them
    for index in range(len(SIZES) - 1, 0, -1):
        logs[index - 1] = min(logs[index - 1], logs[index] + MOST_OF_A_SIZE)
    return tuple(float(factor) for factor in np.exp(logs))
