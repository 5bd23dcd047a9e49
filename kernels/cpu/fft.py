"""FFTW's plans, and the only import of pyFFTW.

Every transform here is one-threaded and planned for fixed shapes and strides; workers run it on arrays given at run
time (FFTW's new-array execution). Planning is serialised, because FFTW's planner is not thread-safe.

Rigor. FFTW_ESTIMATE throughout: FFTW has straight-line codelets for the lines of a tile (8, 12, 16, 20, 32), so there
is nothing to search. Measured on 2 Zen 5 cores with 80 maps innermost, one thread, ns per real voxel, ESTIMATE against
MEASURE: 2-D forward 0.57/0.57 at 8, 0.69/0.70 at 16, 0.80/0.80 at 20, 0.86/0.87 at 32 (2026-11-20); MEASURE pays from
24 and 40 on (2.2/1.8, 3.1/1.5), which is why they are no tiles. An estimated plan follows from the sizes alone: the
same bytes in every process, without wisdom.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyfftw

Direction = Literal["FFTW_FORWARD", "FFTW_BACKWARD"]

ALIGNMENT = 64  # bytes; what every array handed to a Transform starts on (FFTW_UNALIGNED would cost the vector units)

_planner = threading.Lock()


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
        real ones. Unnormalised in both directions. `source` may be overwritten by the transform.
        """
        with _planner:
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


def _nowhere() -> npt.NDArray[np.uint8]:
    raw = np.zeros(4 * ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + 2 * ALIGNMENT]


_NOWHERE = _nowhere()


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


def export_wisdom() -> str:
    """What FFTW's planner has gathered in this process, as text: with it another process makes the same plans."""
    with _planner:
        wisdom = pyfftw.export_wisdom()
    return json.dumps([base64.b64encode(part).decode() for part in wisdom])


def import_wisdom(text: str) -> None:
    """Take over what `export_wisdom` wrote; ValueError when it is damaged or another FFTW's."""
    try:
        wisdom = tuple(base64.b64decode(part, validate=True) for part in json.loads(text))
    except (TypeError, ValueError) as error:
        raise ValueError(f"damaged FFTW wisdom: {error}") from None
    if len(wisdom) != len(pyfftw.export_wisdom()):
        raise ValueError(f"damaged FFTW wisdom: {len(wisdom)} parts, not {len(pyfftw.export_wisdom())}")
    with _planner:
        taken = pyfftw.import_wisdom(wisdom)
    if not taken[1]:
        raise ValueError("FFTW refused the wisdom: another version wrote it")
