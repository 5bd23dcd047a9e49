"""FFTW plans; the only module that imports pyFFTW.

Every transform here is single-threaded and planned for fixed shapes and strides; workers run it on arrays given at run
time (FFTW's new-array execution). Planning is serialised, because FFTW's planner is not thread-safe.

Rigor    FFTW_ESTIMATE is used where every line is one of FFTW's straight-line codelets (`CODELETS`; all tiles are):
         there is nothing to search. Other lengths may be measured, once per machine: `Wisdom` holds the results and the
         seconds that may still be spent. FFTW_PATIENT takes ten times as long as FFTW_MEASURE and gains little more.
Measured 2 Zen 5 cores, one thread, ns a value, ESTIMATE / MEASURE / PATIENT, FFTW 3.3.5 (2026-11-21).
         80 maps innermost: x and y of 8, 12, 16, 20, 32: 0.52 0.61 0.66 0.77 0.80, all three alike within 1 %.
         One map, along y or z: 16 0.34, 20 0.36, 32 0.37, 64 0.41, all three alike; 48 1.39/0.90/0.66, 96
         2.15/0.87/0.66, 108 1.55/1.05/0.80. Along x back: 48 1.84/1.26/1.06, 64 1.48/1.19/0.86, 96 2.12/0.98/0.84.
         The gain is 6 % (8 x 80 -> 80 maps of 30^3) to 28 % (1 -> 16 of 96^3) of a whole-image convolution's time.
         Planning one transform takes 0.1 / 20 to 80 / 80 to 800 ms; a layer has 7 or so.
Bytes    A plan follows from the sizes and the wisdom of that very transform alone: other wisdom of the process is set
         aside while we plan, and a transform that was just measured is planned again from the result, as a run resumed
         elsewhere would do. Different wisdom rounds differently; no wisdom makes a transform wrong.
"""

from __future__ import annotations

import importlib
import mmap
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec, module_from_spec
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import numpy.typing as npt

from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.contract import ALIGNMENT


def _bindings() -> Any:
    """Return pyFFTW's bindings to FFTW alone, unless the package is there already.

    The package itself imports all of SciPy's and dask's transforms where these are installed, which every process would
    wait for. Whoever imports it later gets all of it.
    """
    name = "pyfftw"
    spec = find_spec(name)
    if name in sys.modules or spec is None:
        return importlib.import_module(name)
    sys.modules[name] = module_from_spec(spec)  # it is not executed
    try:
        return importlib.import_module(f"{name}.{name}")
    finally:
        del sys.modules[name]


if TYPE_CHECKING:
    import pyfftw
else:
    pyfftw = _bindings()

Direction = Literal["FFTW_FORWARD", "FFTW_BACKWARD"]

CODELETS = frozenset((*range(1, 17), 20, 25, 32))  # lengths for which FFTW has straight-line code
TRANSFORM_SECONDS = 0.4  # limit for measuring one transform: the stop flag is not checked meanwhile

_planner = threading.RLock()
_set_aside: list[tuple[bytes, bytes, bytes]] = []  # the process's wisdom while we plan; guarded by _planner


@contextmanager
def planning() -> Iterator[None]:
    """Make plans depend on sizes and our `Wisdom` alone, by setting other wisdom of the process aside in this block.

    Setting it aside and restoring it costs 1.5 to 2 ms, so make the transforms of a layer within one block. Only one
    thread plans at a time; the process must not plan transforms of its own meanwhile (pyFFTW's lock is inaccessible).
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
    """The results of FFTW's measurements: the text from which FFTW plans a transform again, by its description.

    `with wisdom:` applies it to the transforms that this thread plans in the block.
    """

    def __init__(self, known: Mapping[str, str] | None = None, seconds: float = 0.0) -> None:
        """Start from the wisdom of earlier runs and a time budget.

        known    wisdom found by earlier runs.
        seconds  total time that may be spent to measure unknown transforms.
        """
        self.known = dict(known or {})
        self.seconds = seconds
        self.used: dict[str, str] = {}  # results for the transforms planned inside
        self.learned: dict[str, str] = {}  # the part of `used` that was not known
        self.refused: set[str] = set()  # names of known entries that this FFTW rejects
        self.sentences: list[str] = []  # warnings that the owner has to report
        self._in_vain: set[str] = set()  # names of transforms measured without a result

    def __enter__(self) -> Self:
        self._before = _wisdom.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _wisdom.reset(self._before)

    def give(self, problem: _Problem) -> None:
        """Replace FFTW's wisdom by the wisdom for `problem`. Call it within `planning`."""
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
        else:  # if cut short, it is no better than an estimate; all workers must plan alike
            self._in_vain.add(name)
            pyfftw.forget_wisdom()


_wisdom: ContextVar[Wisdom | None] = ContextVar("wisdom of this thread's transforms", default=None)


def _given(text: str) -> bool:
    """Return whether FFTW accepts `text`, which replaces all its wisdom."""
    pyfftw.forget_wisdom()
    return bool(pyfftw.import_wisdom((b"", text.encode(), b""))[1])  # double, single and long double precision


def signature() -> str:
    """Return FFTW's version and the code it chose for this processor; wisdom is valid for these only."""
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
        """Return whether some line is longer than FFTW's straight-line code."""
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
        """Measure for at most `limit` seconds and leave the result in FFTW's wisdom.

        The memory for it, no more than the scratch of the layer, is returned to the system at once.
        """
        source = _mapped(self._source)
        target = source if self._in_place else _mapped(self._target)
        _Problem(source, target, self._axes, self._direction).plan("FFTW_MEASURE", limit)


def _layout(array: npt.NDArray[Any]) -> str:
    """Describe shape and strides, e.g. `complex64 96x56 of 448,8 bytes`."""
    return f"{array.dtype} {'x'.join(map(str, array.shape))} of {','.join(map(str, array.strides))} bytes"


def _mapped(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array of the same layout in separate memory pages."""
    nbytes = sum((size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)) + array.itemsize
    return np.ndarray(array.shape, array.dtype, mmap.mmap(-1, nbytes), 0, array.strides)


class Transform:
    """One planned transform: shapes, strides and direction are fixed, arrays are given at each call. For one worker.

    The plan is made on addresses that are never touched (FFTW_ESTIMATE looks at sizes, strides and alignment only).
    """

    def __init__(
        self,
        source: npt.NDArray[Any],
        target: npt.NDArray[Any],
        axes: Sequence[int],
        direction: Direction = "FFTW_FORWARD",
    ) -> None:
        """Plan for arrays like `source` and `target` (made by `like`); pass the same array for a transform in place.

        The types are float32 -> complex64, complex64 -> complex64 or complex64 -> float32 along `axes`; real transforms
        halve the last axis. Neither direction is normalised. Arrays must be aligned to ALIGNMENT: FFTW_UNALIGNED would
        give up the vector units. The transform may overwrite `source`.
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
        """Transform `source` into `target`; shapes, strides and alignment must be as planned (else ValueError)."""
        self._plan.update_arrays(source, target)
        self._plan.execute()


def like(shape: Sequence[int], strides: Sequence[int], dtype: npt.DTypeLike, *, place: int = 0) -> npt.NDArray[Any]:
    """Return an array of this shape and these strides (bytes) to plan with; it has no memory to read or write.

    Arrays with different `place` count as different arrays, those with the same `place` as one (in-place transform).
    """
    return np.lib.stride_tricks.as_strided(_NOWHERE[place * ALIGNMENT :].view(dtype)[:1], shape, strides)


_NOWHERE = aligned_bytes(2 * ALIGNMENT)


def good_size(n: int) -> int:
    """Return the smallest size >= n that FFTW transforms fast: 2^a 3^b 5^c 7^d, optionally times 11 or 13."""
    while not _is_good(n):
        n += 1
    return n


def _is_good(n: int) -> bool:
    for prime in (2, 3, 5, 7):
        while n % prime == 0:
            n //= prime
    return n in (1, 11, 13)
