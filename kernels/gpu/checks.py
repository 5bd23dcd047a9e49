"""Check kernel arguments, views of memory and copies before CUDA is called. Arithmetic only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np


def kernel_arguments(name: str, arguments: Sequence[Any], address: Callable[[Any], int]) -> tuple[Any, ...]:
    """Convert arguments to the types of a kernel's parameters.

    Arrays become pointers, int becomes `long long`, float becomes `float`, None the null pointer; numpy scalars stay as
    they are, and those of a structured type become arrays without axes: CuPy copies these as structs. TypeError for
    anything else, and for bool: its size differs between languages.
    """
    ready: list[Any] = []
    for place, value in enumerate(arguments):
        if isinstance(value, np.void):
            ready.append(np.array(value))
        elif isinstance(value, np.generic):
            ready.append(value)
        elif value is None:
            ready.append(np.uint64(0))
        elif isinstance(value, bool):
            raise TypeError(f"argument {place} of {name} is a bool: pass an int, or numpy.bool_ for a C++ bool")
        elif isinstance(value, int):
            ready.append(np.int64(value))
        elif isinstance(value, float):
            ready.append(np.float32(value))
        elif hasattr(value, "strides"):
            ready.append(np.uint64(address(value)))
        else:
            raise TypeError(f"argument {place} of {name} is a {type(value).__name__}, which kernels do not take")
    return tuple(ready)


def check_view(available: int, shape: Sequence[int], itemsize: int, offset: int, strides: Sequence[int] | None) -> None:
    """Raise ValueError unless an array of `shape` at `offset` lies within `available` bytes."""
    steps = c_strides(shape, itemsize) if strides is None else tuple(strides)
    if len(steps) != len(shape) or offset < 0 or any(step < 0 for step in steps):
        raise ValueError(f"shape {tuple(shape)}, strides {steps} and offset {offset} describe no array")
    last = sum((size - 1) * step for size, step in zip(shape, steps, strict=True)) + itemsize if prod(shape) else 0
    if offset + last > available:
        raise ValueError(
            f"an array of {tuple(shape)} with strides {steps} at {offset} ends {offset + last - available} bytes "
            f"beyond the {available} bytes of the memory it views"
        )


def copy_rows(target: Any, source: Any) -> tuple[int, int, int, int]:
    """Return the rows, bytes per row, and row strides of target and source, for a copy between two arrays.

    ValueError unless shapes and dtypes are equal and each array is in C order, except for the stride of its first axis.
    """
    if target.shape != source.shape or target.dtype != source.dtype:
        raise ValueError(
            f"a copy of {source.shape} {source.dtype} into {target.shape} {target.dtype}: they must be equal"
        )
    whole = target.flags.c_contiguous and source.flags.c_contiguous
    if whole or target.nbytes == 0:
        return 1, target.nbytes, target.nbytes, target.nbytes
    rows = target.shape[0]
    for array in (target, source):
        if not array[0].flags.c_contiguous:
            raise ValueError(
                f"a copy of {array.shape} with strides {array.strides}: all but the first must be in C order"
            )
    width = target[0].nbytes
    steps = [width if rows == 1 else array.strides[0] for array in (target, source)]
    return rows, width, steps[0], steps[1]


def c_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the bytes from one element to the next along each axis of an array in C order."""
    steps = [itemsize]
    for size in reversed(tuple(shape)[1:]):
        steps.append(steps[-1] * size)
    return tuple(reversed(steps))[: len(shape)] if shape else ()
