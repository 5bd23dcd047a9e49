"""Leave out of a run the windows that cover nothing of a mask: voxels that only they cover are zero."""

from __future__ import annotations

from dataclasses import dataclass, replace

from znnpy.patches import Box, Column, Columns, Patch
from znnpy.shapes import Vec3, subtract
from znnpy.volume.mask import WantedOutputs
from znnpy.window_cover import WindowCover, WindowStep


@dataclass(frozen=True)
class MaskedWindows(Columns):
    """The rows of windows of a plan; those windows are computed that cover a voxel where output is wanted."""

    whole: WindowCover
    wanted: WantedOutputs

    @property
    def counts(self) -> Vec3:
        return self.whole.counts

    def _at(self, place: Vec3) -> Column:
        part, row, _ = place
        return self._left(self.whole[part * self.counts[1] + row])

    def begun_at(self, index: int) -> Column:
        """Return a column as `WindowCover.begun_at` does."""
        return self._left(self.whole.begun_at(index))

    def goes_on(self, index: int) -> bool:
        """Return whether a column continues the one before it."""
        return self.whole.goes_on(index)

    def _left(self, column: Column) -> Column:
        return Column(tuple(self._step(step) for step in column.steps if step.writes or self._touches(step)))

    def _step(self, step: Patch) -> Patch:
        return step if self._touches(step) else replace(step, computed=False)

    def _touches(self, step: Patch) -> bool:
        """Return whether a window covers a voxel where output is wanted."""
        assert isinstance(step.step, WindowStep), "windows say what they are"
        region = self.whole.region
        covered = self.whole.read(step.step).clipped(region).shifted(subtract((0, 0, 0), region.lo))
        return self.wanted.touches([Box(covered.lo, covered.hi)])

    @property
    def share(self) -> float:
        """Share of the windows that are computed."""
        computed = [step.computed for column in self for step in column.steps]
        return sum(computed) / len(computed)

    @property
    def skipped(self) -> int:
        """Voxels of the output that are not computed."""
        return sum(step.write.voxels for column in self for step in column.steps if not step.computed)
