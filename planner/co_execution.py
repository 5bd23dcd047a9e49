"""Prediction of how the CPU and GPUs, each with a plan of its own, share an output cell by cell.

The CPU takes cells from the front, consecutive ones as one column; GPUs take the others (`run.balanced_queue`).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import ceil, prod
from statistics import fmean

from znnpy.patches import Cover
from znnpy.planner.plan import Plan

# Measured seconds of a CPU that works next to GPUs, over the predicted ones: 0.84 to 1.24 on two machines.
SLOWDOWNS = (0.85, 1.0, 1.1, 1.25)


@dataclass(frozen=True, slots=True)
class CoExecution:
    """The plans by which equal GPUs and the CPU compute one output.

    gpu      the plan of each GPU, for the whole output
    devices  number of GPUs
    cpu      the plan of the CPU, for the cells that lie behind each other along the axis of `gpu`
    """

    gpu: Plan
    devices: int
    cpu: Plan

    @property
    def cells(self) -> Cover:
        """The cells of the output.

        The first across the axis are as wide as the CPU's patch; later ones are as wide as the GPU columns that fit
        into it, so that a remainder that fills no GPU column may go to the CPU.
        """
        first = self.cpu.patch_out
        z, y, x = (max(1, size // step) * step for size, step in zip(first, self.gpu.patch_out, strict=True))
        return Cover(self.gpu.output, first, later=(z, y, x))

    def seconds(self, slowdown: float = 1.0) -> float:
        """Return the seconds until both are done, if the CPU takes `slowdown` times as long as predicted.

        The CPU begins a first cell as planned; how many more it takes is decided when that is done. A GPU that finishes
        earlier waits for as long as the CPU's last cell takes a GPU, and then computes that cell itself.
        """
        if not (planned := self.cpu_items()):
            return self.gpu_seconds(0)
        count = planned if slowdown == 1 else max(1, self.cpu_items(slowdown))
        others, own = self.gpu_seconds(count), slowdown * self.cpu_seconds(count)
        waits = sum(self.gpu_item_seconds())
        return max(others, own) if own <= others + waits else others + 2 * waits

    def expected_seconds(self) -> float:
        """Return the mean of these seconds over the slowdowns that a CPU may have."""
        return fmean(map(self.seconds, SLOWDOWNS))

    def cpu_items(self, slowdown: float = 1.0) -> int:
        """Return the number of cells that the CPU computes.

        It begins no cell that the GPUs, with everything left, would finish before it, and never the last one, which a
        GPU has from the start.
        """

        def in_vain(count: int) -> bool:
            return slowdown * self.cpu_seconds(count) >= self.gpu_seconds(count - 1)

        return bisect_left(range(1, len(self.cells)), True, key=in_vain)

    def cpu_seconds(self, count: int) -> float:
        """Return the CPU's seconds for so many cells; it streams from one to the next until the output ends."""
        columns = -(-count // self.cells.counts[self.gpu.axis])
        return count * self.cpu.seconds_per_step + columns * self.cpu.seconds_to_begin

    def gpu_seconds(self, count: int) -> float:
        """Return the GPUs' seconds for all but so many cells; each takes whole ones."""
        gpu, cells = self.gpu, self.cells
        left = len(cells) - count
        if not left:
            return 0.0
        stacks, cut = divmod(count, cells.counts[gpu.axis])
        columns = self._columns_per_stack()
        whole = sum(choice.total_seconds for choice in gpu.choices)
        all_columns = prod(ceil(gpu.output[i] / gpu.patch_out[i]) for i in self._across())
        spent = sum(columns[stacks:]) / all_columns * whole
        if cut:
            steps = cells.patch[gpu.axis] / gpu.patch_out[gpu.axis]
            spent -= cut * columns[stacks] * steps * gpu.seconds_per_step
        return gpu.seconds_for(spent / whole * ceil(left / self.devices) / left, self.devices)

    def cpu_share(self) -> float:
        """Return the share of the output that the CPU is to compute."""
        cells = self.cells
        rows, row = (cells.sizes(i) for i in self._across())
        stacks, long = [a * b for a in rows for b in row], cells.sizes(self.gpu.axis)
        whole, cut = divmod(self.cpu_items(), len(long))
        voxels = sum(stacks[:whole]) * sum(long)
        return (voxels + stacks[whole] * sum(long[:cut]) if cut else voxels) / prod(self.gpu.output)

    def gpu_item_seconds(self) -> tuple[float, float]:
        """Return a GPU's seconds in the first stack: to begin a run of cells, and for each cell."""
        gpu, columns = self.gpu, self._columns_per_stack()[0]
        steps = self.cells.patch[gpu.axis] // gpu.patch_out[gpu.axis]
        return columns * gpu.seconds_to_begin, columns * steps * gpu.seconds_per_step

    def _columns_per_stack(self) -> list[int]:
        """Return the number of GPU columns in each stack of cells."""
        cells = self.cells
        rows, row = ([ceil(size / self.gpu.patch_out[i]) for size in cells.sizes(i)] for i in self._across())
        return [a * b for a in rows for b in row]

    def _across(self) -> tuple[int, int]:
        """Return the two axes across the columns."""
        a, b = (i for i in range(3) if i != self.gpu.axis)
        return a, b
