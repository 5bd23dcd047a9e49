"""The work of the steps of a column, by its plan."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from znnpy.network import Network
from znnpy.patches import Cover, Patch
from znnpy.planner.plan import Plan


class StepWork:
    """The work of each step of a column by the plan: its output voxels, or fewer where few layers run."""

    def __init__(self, plan: Plan, network: Network) -> None:
        self._graph = plan.area is not None
        self._ahead = plan.warmup_work(network) if plan.streams and not self._graph else ()
        self._whole = float(prod(plan.patch_out))

    def of(self, number: int) -> float:
        """Return the work of step `number` of a column."""
        return self._whole * (self._ahead[number] if number < len(self._ahead) else 1.0)

    def of_first(self, steps: int) -> float:
        """Return the work of the first steps of a column."""
        return sum(self._ahead[:steps]) * self._whole + max(0, steps - len(self._ahead)) * self._whole

    def of_all(self, cover: Cover) -> float:
        """Return the work of all columns."""
        return len(cover) * sum(self._ahead) * self._whole + cover.steps(0) * self._whole

    def of_steps(self, steps: Sequence[Patch], *, goes_on: bool = False) -> list[float]:
        """Return the work of each step of a column: none where nothing is computed, less in the first steps behind it.

        goes_on  the first step continues another column, so that it gives output at once
        """
        found: list[float] = []
        number = len(self._ahead) if goes_on else 0
        for step in steps:
            if not step.computed:
                found.append(0.0)
                number = 0
                continue
            found.append(1.0 if self._graph else self.of(number))
            number += 1
        return found
