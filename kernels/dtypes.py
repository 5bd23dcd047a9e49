"""Say in which dtype values are kept between layers, by precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from znnpy.shapes import Precision


def kept_dtype(precision: Precision) -> np.dtype[Any]:
    """Return the dtype of a layer's input and output: float32, float16, or bfloat16, which ml_dtypes gives numpy."""
    if precision == "bf16":
        return bfloat16()
    return np.dtype(np.float16 if precision == "fp16" else np.float32)


def bfloat16() -> np.dtype[Any]:
    """Return the dtype of bfloat16: float32 without its last 16 bits. Conversions to it round to the nearest."""
    import ml_dtypes  # only runs in bf16 load it

    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found
