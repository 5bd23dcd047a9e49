"""FFTW's plans, and the only import of pyFFTW.

Every transform here is one-threaded and planned for fixed shapes and strides; workers run it on arrays given at run
time (FFTW's new-array execution). Planning is serialised, because FFTW's planner is not thread-safe.

Rigor. FFTW_ESTIMATE throughout: FFTW has straight-line codelets for the lines of a tile (8, 12, 16, 20, 32), so there
is nothing to search. Measured on 2 Zen 5 cores with 80 maps innermost, one thread, ns per real voxel, ESTIMATE against
MEASURE: 2-D forward 0.57/0.57 at 8, 0.69/0.70 at 16, 0.80/0.80 at 20, 0.86/0.87 at 32 (2026-11-20); MEASURE pays from
24 and 40 on (2.2/1.8, 3.1/1.5), which is why they are no tiles. An estimated plan follows from the sizes alone, unless
FFTW remembers a better one: what the process has gathered for its own transforms (wisdom) is set aside while we plan,
so that every process computes the same bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyfftw

from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.primitive import ALIGNMENT

Direction = Literal["FFTW_FORWARD", "FFTW_BACKWARD"]

_planner = threading.RLock()
_set_aside: list[tuple[bytes, bytes, bytes]] = []  # the process's wisdom while we plan; guarded by _planner


@contextmanager
def planning() -> Iterator[None]:
    """Inside, plans follow from sizes alone: what FFTW has learned in this process waits outside.

    Taking it out and back costs 1.5 to 2 ms, so make the transforms of a layer within one. Only one thread plans at a
    time; the process must not plan transforms of its own meanwhile (pyFFTW's lock cannot be had).
    """
    with _planner:
        if _set_aside:
            yield
            return
        _set_aside.append(pyfftw.export_wisdom())
        pyfftw.forget_wisdom()
        try:
            yield
        finally:
            pyfftw.forget_wisdom()
            pyfftw.import_wisdom(_set_aside.pop())


class Transform:
    """One planned transform: shapes, strides and direction fixed, arrays given at each call. For one worker.

    The plan is made on addresses that are never touched (FFTW_ESTIMATE looks at sizes, strides and alignment only).
    """

    def __init__(
        self,
        source: npt.NDArray[Any],
        target: npt.NDArray[Any],
        axes: Sequence[int],
        direction: Direction = "FFTW_FORWARD",
    ) -> None:
        """Plan for arrays like `source` and `target` (made by `like`): the same array for a transform in place.

        float32 -> complex64, complex64 -> complex64 or complex64 -> float32 along `axes`, the last of them halved for
        real ones. Unnormalised in both directions. Arrays start on ALIGNMENT: FFTW_UNALIGNED would cost the vector
        units. `source` may be overwritten by the transform.
        """
        with planning():
            self._plan = pyfftw.FFTW(
                source,
                target,
                axes=tuple(axes),
                direction=direction,
                flags=("FFTW_ESTIMATE", "FFTW_DESTROY_INPUT"),
                threads=1,
                normalise_idft=False,
            )

    def __call__(self, source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
        """Transform `source` into `target`: shapes, strides and alignment as planned (ValueError otherwise)."""
        self._plan.update_arrays(source, target)
        self._plan.execute()


def like(shape: Sequence[int], strides: Sequence[int], dtype: npt.DTypeLike, *, place: int = 0) -> npt.NDArray[Any]:
    """An array of this shape and these strides (bytes) to plan with, never to read or write: it has no memory.

    Two of different `place` count as different arrays, two of the same as one (a transform in place).
    """
    return np.lib.stride_tricks.as_strided(_NOWHERE[place * ALIGNMENT :].view(dtype)[:1], shape, strides)


_NOWHERE = aligned_bytes(2 * ALIGNMENT)


def good_size(n: int) -> int:
    """The smallest size >= n that FFTW transforms fast: 2^a 3^b 5^c 7^d, times 11 or 13 or neither."""
    while not _is_good(n):
        n += 1
    return n


def _is_good(n: int) -> bool:
    for prime in (2, 3, 5, 7):
        while n % prime == 0:
            n //= prime
    return n in (1, 11, 13)
