"""Find functions such as GELU that a model spells out in several operators, by the values that these give.

What operators compute of one array and of numbers is compared with the known functions at many points, so that the
order in which an exporter writes the operators does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import erf, pi, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.importing.onnx_file import OnnxModel, Step
from znnpy.importing.onnx_tensors import Array

Points = npt.NDArray[np.float64]
_LAST = ("Mul", "Div", "Where")  # operators with which functions end
MOST_STEPS = 14  # operators that one function is looked for in

_FAR = np.geomspace(1e-3, 1e4, 40)
POINTS: Points = np.concatenate([-_FAR[::-1], np.linspace(-8, 8, 161), _FAR])
_erf = np.vectorize(erf, otypes=[np.float64])


def _sigmoid(x: Points) -> Points:
    return 0.5 + 0.5 * np.tanh(0.5 * x)


def _hard_sigmoid(x: Points, a: Mapping[str, Any]) -> Points:
    line: Points = a.get("alpha", 0.2) * x + a.get("beta", 0.5)
    return np.clip(line, 0, 1)


def _chosen(which: Points, x: Points, y: Points) -> Points:
    return np.asarray(np.where(which, x, y), np.float64)


_VALUES: dict[str, Callable[..., Points]] = {
    "Add": lambda a, x, y: x + y,
    "Sub": lambda a, x, y: x - y,
    "Mul": lambda a, x, y: x * y,
    "Div": lambda a, x, y: x / y,
    "Pow": lambda a, x, y: x**y,
    "Neg": lambda a, x: -x,
    "Erf": lambda a, x: _erf(x),
    "Tanh": lambda a, x: np.tanh(x),
    "Sigmoid": lambda a, x: _sigmoid(x),
    "HardSigmoid": lambda a, x: _hard_sigmoid(x, a),
    "Relu": lambda a, x: np.maximum(x, 0),
    "Softplus": lambda a, x: np.logaddexp(x, 0),
    "Greater": lambda a, x, y: np.greater(x, y),
    "Where": lambda a, which, x, y: _chosen(which, x, y),
    "Clip": lambda a, x, least, most: np.clip(x, least, most),
    "Identity": lambda a, x: x,
}
_FOUND: tuple[tuple[str, dict[str, Any], Points], ...] = (  # operators, and their values at the points
    ("Gelu", {"approximate": "none"}, POINTS * 0.5 * (1 + _erf(POINTS / sqrt(2)))),
    ("Gelu", {"approximate": "tanh"}, POINTS * 0.5 * (1 + np.tanh(sqrt(2 / pi) * (POINTS + 0.044715 * POINTS**3)))),
    ("Swish", {}, POINTS * _sigmoid(POINTS)),
    ("HardSwish", {}, POINTS * np.clip(POINTS / 6 + 0.5, 0, 1)),
    ("Softplus", {}, np.logaddexp(POINTS, 0)),
)


def with_functions(model: OnnxModel) -> OnnxModel:
    """Return the model with one operator for each function that is found; others may then be unused."""
    makers = {output: at for at, step in enumerate(model.steps) for output in step.outputs[:1]}
    numbers = {name: float(array.reshape(-1)[0]) for name, array in model.constants.items() if _is_number(array)}
    steps = [
        found if step.kind in _LAST and (found := _function(step, model.steps, makers, numbers)) else step
        for step in model.steps
    ]
    return replace(model, steps=tuple(steps))


def _is_number(array: Array) -> bool:
    return array.size == 1 and array.ndim < 2 and array.dtype.kind in "iuf"


def _function(
    last: Step, steps: Sequence[Step], makers: Mapping[str, int], numbers: Mapping[str, float]
) -> Step | None:
    """Return the function that ends with an operator: go back until all depends on one array, and compare values."""
    taken: list[Step] = []
    open_names = {last.outputs[0]}
    while len(taken) < MOST_STEPS:
        name = max(open_names, key=lambda one: makers.get(one, -1))  # the latest: all that it reads is before
        at = makers.get(name)
        if at is None or steps[at].kind not in _VALUES or not all(steps[at].inputs):
            return None
        taken.append(steps[at])
        open_names = (open_names - {name}) | {one for one in steps[at].inputs if one not in numbers}
        if len(open_names) == 1:
            (root,) = open_names
            found = _compared(taken[::-1], root, numbers)
            if found is not None:
                kind, attributes = found
                return Step(last.name, kind, (root,), last.outputs[:1], attributes)
        if not open_names:
            return None
    return None


def _compared(steps: Sequence[Step], root: str, numbers: Mapping[str, float]) -> tuple[str, dict[str, Any]] | None:
    """Return the operator that gives what steps in a row give for an array."""
    values: dict[str, Points | float] = {root: POINTS}
    with np.errstate(all="ignore"):
        for step in steps:
            given = [values[name] if name in values else numbers[name] for name in step.inputs]
            try:
                values[step.outputs[0]] = _VALUES[step.kind](step.attributes, *given)
            except TypeError:  # another number of inputs
                return None
        found = np.broadcast_to(values[steps[-1].outputs[0]], POINTS.shape)
        for kind, attributes, expected in _FOUND:
            if np.allclose(found, expected, rtol=1e-5, atol=1e-6):
                return kind, attributes
    return None
