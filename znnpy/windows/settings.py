"""Settings of the windows of a volume: their size, overlap and weights, and whose rule places them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from znnpy.errors import ShapeError
from znnpy.option_values import BLENDS, WINDOW_RULES, Blend, WindowRule
from znnpy.shapes import Vec3, text, turn, turned

SIGMAS = (1e-3, 1e3)  # of a window: others are nearly a single voxel, or constant
DECIMALS = 12  # of a step that is stated as an overlap


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of one size that overlap, with weights by which their results are averaged.

    size     voxels of a window
    overlap  share of the window along each axis, 0 <= overlap < 1; nnU-Net's `tile_step_size` is 1 - overlap
    blend    weights: the same everywhere, a Gaussian, or a bump (`znnpy.windows.weights`)
    sigma    standard deviation of the Gaussian, as a share of the window
    mirror   axes, 0 is z, along which windows are also computed mirrored; results of all subsets are averaged
    rule     whose positions and Gaussian: MONAI's SlidingWindowInferer or nnU-Net's nnUNetPredictor
    """

    size: Vec3
    overlap: tuple[float, float, float] = (0.5, 0.5, 0.5)
    blend: Blend = "gaussian"
    sigma: float = 0.125
    mirror: tuple[int, ...] = ()
    rule: WindowRule = "monai"

    def __post_init__(self) -> None:
        if min(self.size) < 1:
            raise ShapeError(f"a window must have at least 1 voxel along every axis, not {text(self.size)}")
        if not all(0 <= share < 1 for share in self.overlap):
            raise ShapeError(f"windows must overlap by at least 0 and less than 1 of their size, not by {self.overlap}")
        if self.blend not in BLENDS:
            raise ShapeError(f"weights of windows are {', '.join(BLENDS)}, not {self.blend!r}")
        if not SIGMAS[0] <= self.sigma <= SIGMAS[1]:
            raise ShapeError(
                f"the sigma of weights must be a share of the window from {SIGMAS[0]:g} to {SIGMAS[1]:g}, not "
                f"{self.sigma}"
            )
        if self.mirror not in _subsets((0, 1, 2)):
            raise ShapeError(f"windows are mirrored along different axes of 0, 1, 2, ascending, not {self.mirror}")
        if self.rule not in WINDOW_RULES:
            raise ShapeError(f"windows follow the rule of {' or '.join(WINDOW_RULES)}, not {self.rule!r}")
        if self.rule == "nnunet":
            self._check_steps()

    def _check_steps(self) -> None:
        """Raise ShapeError where windows that overlap move by less than a voxel: nnU-Net would count some twice."""
        for axis, size, share in zip("zyx", self.size, self.steps, strict=True):
            if size > 1 and size * share < 1:
                raise ShapeError(
                    f"windows of {size} voxels that overlap by {1 - share:g} move by {size * share:g} voxels along "
                    f"{axis}, and nnU-Net's rule needs at least 1: make the overlap at most {1 - 1 / size:g}"
                )

    @property
    def steps(self) -> tuple[float, float, float]:
        """The share of a window by which the next one is moved, as nnU-Net takes it.

        It is rounded, as 1 - 0.8 is not the number 0.2, and one of them may need a window more than the other.
        """
        z, y, x = (round(1 - share, DECIMALS) for share in self.overlap)
        return z, y, x

    @property
    def mirrors(self) -> tuple[tuple[int, ...], ...]:
        """The subsets of axes along which a window is mirrored, in nnU-Net's order: the empty one first."""
        return _subsets(self.mirror)

    def turned(self, axis: int) -> Windows:
        """Return the same windows of a volume with `axis` first: sizes are reordered by `shapes.turned`."""
        order = turn(axis)
        overlap = (self.overlap[order[0]], self.overlap[order[1]], self.overlap[order[2]])
        mirror = tuple(sorted(order.index(one) for one in self.mirror))
        return replace(self, size=turned(self.size, axis), overlap=overlap, mirror=mirror)

    @property
    def suit_half_precision(self) -> bool:
        """Return whether weights differ so little that float16 holds sums of weighted values."""
        return self.blend == "constant" or (self.blend == "gaussian" and self.rule == "monai")

    @property
    def described(self) -> dict[str, Any]:
        """The settings that decide the result, as JSON has them."""
        sigma = {"sigma": self.sigma} if self.blend == "gaussian" else {}
        return {
            "size": list(self.size),
            "overlap": list(self.overlap),
            "blend": self.blend,
            **sigma,
            "mirror": list(self.mirror),
            "rule": self.rule,
        }


def _subsets(axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(subset for count in range(len(axes) + 1) for subset in combinations(axes, count))
