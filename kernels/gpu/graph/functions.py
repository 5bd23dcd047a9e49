"""Pass the functions of graphs to kernels: functions.cuh computes them.

Tested  tests/kernels/gpu/graph/test_functions.py
"""

from __future__ import annotations

from collections.abc import Sequence

from znnpy.layers import DEFAULT_PARAMETERS, FUNCTIONS, Function


def numbers_of(function: Function, parameters: Sequence[float]) -> tuple[int, float, float]:
    """Return what a kernel takes for a function: its number, and its parameters or else the usual ones, then zeros."""
    a, b = (*(parameters or DEFAULT_PARAMETERS.get(function, ())), 0.0, 0.0)[:2]
    return FUNCTIONS.index(function), float(a), float(b)
