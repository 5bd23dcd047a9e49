"""PyTorch's conv2d in `papers.py`: in its benchmark mode it finds the plans that cuDNN has for two dimensions alone.

The search is limited. Of the algorithms that cuDNN's heuristics like best as many are tried as there is time for, by
what each took in the configurations before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from layer_entries_gpu import Entry, Input, Times
from papers_inputs import box

from znnpy.shapes import Precision, Vec3

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array

LAYOUTS = ("contiguous", "channels_last")
KNOWN, ENOUGH = 9, 3  # searches that tell how long the next takes, at most and at least


@dataclass(slots=True)
class Search:
    """How many algorithms PyTorch may try.

    seconds  for a configuration, all layouts
    most     algorithms of one layout
    fewest   that any layout was allowed, since it was last asked
    """

    seconds: float
    most: int
    _took: deque[float] = field(default_factory=lambda: deque(maxlen=KNOWN))  # seconds an algorithm
    _fewest: int | None = None

    def tried(self) -> int:
        """Of the next layout."""
        found = self.most
        if len(self._took) >= ENOUGH:
            each = self.seconds / len(LAYOUTS)
            found = max(1, min(self.most, int(each / max(median(self._took), 1e-9))))
        self._fewest = min(found, self._fewest or found)
        return found

    def took(self, seconds: float, tried: int) -> None:
        self._took.append(seconds / tried)

    def fewest(self) -> int | None:
        """None where nothing was searched."""
        found, self._fewest = self._fewest, None
        return found


class _Conv2d:
    """A run; the first one searches."""

    def __init__(self, image: Any, weight: Any, precision: Precision, search: Search) -> None:
        self._image, self._weight, self._precision, self._search = image, weight, precision, search
        self._tried = 0
        self.out: Any = None

    def __call__(self) -> None:
        if self._tried:
            self._run()
            return
        self._tried = self._search.tried()
        begin = time.perf_counter()
        self._run()
        if self._image.is_cuda:
            import torch

            torch.cuda.synchronize()
        self._search.took(time.perf_counter() - begin, self._tried)

    def _run(self) -> None:
        import torch
        from dense_torch import compute_in

        compute_in(self._precision, self._tried)
        with torch.inference_mode():
            self.out = None  # the memory of the run before is free for this one
            self.out = torch.nn.functional.conv2d(self._image, self._weight)


def torch_entries(given: Input, clock: Times, search: Search, where: str) -> Iterator[Entry]:
    """Both layouts.

    where  "cuda", or "cpu" to see that it works
    """
    import torch
    from dense_torch import DTYPES

    shape, weights = given.shape, given.weights
    assert weights is not None
    precision = shape.precision
    there = torch.from_dlpack(given.device)[:, 0].permute(0, 3, 1, 2)  # the input itself, maps first
    for layout in LAYOUTS:
        form = getattr(torch, f"{layout}_format" if layout == "contiguous" else layout)
        image = there.to(where).contiguous(memory_format=form)
        weight = torch.from_numpy(weights.weight[:, :, 0]).to(where, DTYPES[precision], memory_format=form)
        run = _Conv2d(image, weight, precision, search)

        def crop(corner: Vec3, run: _Conv2d = run) -> Array:
            picked = run.out.permute(0, 2, 3, 1)[:, None][box(shape.batch, corner)]
            return np.asarray(picked.float().cpu().numpy())

        yield Entry(f"PyTorch conv2d, {layout}", precision, "", shape, given, run, crop, clock)
