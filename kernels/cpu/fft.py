"""FFTW's plans, and the only import of pyFFTW.

Every transform here is one-threaded and planned for fixed shapes and strides; workers run it on arrays given at run
time (FFTW's new-array execution). Planning is serialised, because FFTW's planner is not thread-safe.

Rigor    FFTW_ESTIMATE where every line is one of FFTW's straight-line codelets (`CODELETS`; all tiles are): there is
         nothing to search. Other lengths may be measured, once for a machine: `Wisdom` holds what was found, and how
         many seconds may still be spent. FFTW_PATIENT takes ten times as long as FFTW_MEASURE and gains little more.
Measured 2 Zen 5 cores, one thread, ns a value, ESTIMATE / MEASURE / PATIENT, FFTW 3.3.5 (2026-11-21).
         80 maps innermost: x and y of 8, 12, 16, 20, 32: 0.52 0.61 0.66 0.77 0.80, all three alike within 1 %.
         One map, along y or z: 16 0.34, 20 0.36, 32 0.37, 64 0.41, all three alike; 48 1.39/0.90/0.66,
         96 2.15/0.87/0.66, 108 1.55/1.05/0.80. Along x back: 48 1.84/1.26/1.06, 64 1.48/1.19/0.86, 96 2.12/0.98/0.84.
         Of a whole-image convolution that is 6 % (8 x 80 -> 80 maps of 30^3) to 28 % (1 -> 16 of 96^3) of the time.
         To plan one transform: 0.1 / 20 to 80 / 80 to 800 ms; a layer has 7 or so.
Bytes    A plan follows from the sizes and the wisdom of that very transform alone: what else the process has gathered
         is set aside while we plan, and a transform that was just measured is planned again from what was found, as a
         run that goes on elsewhere would. Other wisdom rounds differently; no wisdom makes a transform wrong.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import pyfftw

from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.primitive import ALIGNMENT

Direction = Literal["FFTW_FORWARD", "FFTW_BACKWARD"]

CODELETS = frozenset((*range(1, 17), 20, 25, 32))  # lengths that FFTW has straight-line code for
TRANSFORM_SECONDS = 0.4  # to measure one transform at most: nobody looks at a stop flag meanwhile

_planner = threading.RLock()
_set_aside: list[tuple[bytes, bytes, bytes]] = []  # the process's wisdom while we plan; guarded by _planner


@contextmanager
def planning() -> Iterator[None]:
    """Inside, plans follow from sizes and from our `Wisdom`: what FFTW has learned in this process waits outside.

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


class Wisdom:
    """What FFTW found by measuring: for each transform, in words, the text that FFTW plans it from again.

    `with wisdom:` makes it that of the transforms planned inside, by this thread.
    """

    def __init__(self, known: Mapping[str, str] | None = None, seconds: float = 0.0) -> None:
        """known    found by earlier runs.
        seconds  that may be spent to measure transforms that are not known, all together.
        """
        self.known = dict(known or {})
        self.seconds = seconds
        self.used: dict[str, str] = {}  # by transforms that were planned inside
        self.learned: dict[str, str] = {}  # of those, what was not known
        self.refused: set[str] = set()  # of those that were known, what this FFTW makes nothing of
        self.sentences: list[str] = []  # that whoever keeps it has to say
        self._in_vain: set[str] = set()  # what was measured without a result

    def __enter__(self) -> Self:
        self._before = _wisdom.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _wisdom.reset(self._before)

    def give(self, problem: _Problem) -> None:
        """Let FFTW know what there is on `problem`, and nothing else. Call it within `planning`."""
        pyfftw.forget_wisdom()
        name = str(problem)
        for text in filter(None, (self.used.get(name), self.known.get(name))):
            if _given(text):
                self.used[name] = text
                return
            self.refused.add(name)
        if self.seconds > 0 and name not in self._in_vain:
            self._measure(name, problem)

    def _measure(self, name: str, problem: _Problem) -> None:
        limit = min(self.seconds, TRANSFORM_SECONDS)
        pyfftw.forget_wisdom()
        start = time.perf_counter()
        problem.measure(limit)
        spent = time.perf_counter() - start
        self.seconds -= spent
        text = pyfftw.export_wisdom()[1].decode()
        if spent < limit and _given(text):
            self.used[name] = self.learned[name] = text
        else:  # cut short, it found no more than an estimate; all workers shall have the same
            self._in_vain.add(name)
            pyfftw.forget_wisdom()


_wisdom: ContextVar[Wisdom | None] = ContextVar("wisdom of this thread's transforms", default=None)


def _given(text: str) -> bool:
    """Whether FFTW takes `text`; all it knew before is forgotten."""
    pyfftw.forget_wisdom()
    return bool(pyfftw.import_wisdom((b"", text.encode(), b""))[1])  # double, single and long double precision


def signature() -> str:
    """FFTW's version and the code it chose for this processor: wisdom belongs to them."""
    with planning():
        pyfftw.forget_wisdom()
        return str(pyfftw.export_wisdom()[1].decode().strip(" ()\n"))


class _Problem:
    """A transform to be planned."""

    def __init__(
        self, source: npt.NDArray[Any], target: npt.NDArray[Any], axes: Sequence[int], direction: Direction
    ) -> None:
        self._source, self._target, self._axes, self._direction = source, target, tuple(axes), direction
        self._in_place = source.ctypes.data == target.ctypes.data

    def __str__(self) -> str:
        target = "itself" if self._in_place else _layout(self._target)
        return f"{self._direction} {_layout(self._source)} to {target} axes {','.join(map(str, self._axes))}"

    @property
    def has_choices(self) -> bool:
        """Whether some line is longer than FFTW's straight-line code."""
        lengths = (max(self._source.shape[axis], self._target.shape[axis]) for axis in self._axes)
        return any(length not in CODELETS for length in lengths)

    def plan(self, rigor: str = "FFTW_ESTIMATE", limit: float | None = None) -> Any:
        return pyfftw.FFTW(
            self._source,
            self._target,
            axes=self._axes,
            direction=self._direction,
            flags=(rigor, "FFTW_DESTROY_INPUT"),
            threads=1,
            normalise_idft=False,
            planning_timelimit=limit,
        )

    def measure(self, limit: float) -> None:
        """Leave what FFTW finds in `limit` seconds in its wisdom.

        The memory for it, no more than the scratch of the layer, goes back to the system at once.
        """
        source = _mapped(self._source)
        target = source if self._in_place else _mapped(self._target)
        _Problem(source, target, self._axes, self._direction).plan("FFTW_MEASURE", limit)


def _layout(array: npt.NDArray[Any]) -> str:
    """e.g. `complex64 96x56 of 448,8 bytes`."""
    return f"{array.dtype} {'x'.join(map(str, array.shape))} of {','.join(map(str, array.strides))} bytes"


def _mapped(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """An array like this one that has memory: pages of its own."""
    nbytes = sum((size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)) + array.itemsize
    return np.ndarray(array.shape, array.dtype, mmap.mmap(-1, nbytes), 0, array.strides)


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
        problem, wisdom = _Problem(source, target, axes, direction), _wisdom.get()
        with planning():
            if wisdom is None or not problem.has_choices:
                self._plan = problem.plan()
                return
            wisdom.give(problem)
            self._plan = problem.plan()
            pyfftw.forget_wisdom()

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
