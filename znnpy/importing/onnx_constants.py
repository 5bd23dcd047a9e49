"""Evaluate operators of an ONNX model whose inputs are all known, such as arithmetic of shapes, by onnx's own tools.

Only operators that are known to be harmless are evaluated, and how many values one gives is worked out before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, isfinite, prod
from typing import Any

import numpy as np

from znnpy.errors import NetworkFileError
from znnpy.importing.onnx_file import OnnxModel, Step
from znnpy.importing.onnx_tensors import Array
from znnpy.messages import excerpt

MOST_FOLDED = 2**26  # values that are made, besides twice as many as the file holds

_SAME = (  # as many values as the first input, or fewer
    "Abs", "Cast", "Ceil", "Exp", "Floor", "Identity", "Log", "Neg", "Not", "Reciprocal", "ReduceL2", "ReduceMax",
    "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Reshape", "Flatten", "Round", "ScatterND",
    "Shape", "Sign", "Size", "Slice", "Split", "Sqrt", "Squeeze", "Transpose", "Unsqueeze", "CumSum",
)  # fmt: skip
_BROADCAST = (
    "Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Or",
    "Pow", "Sub", "Sum", "Where",
)  # fmt: skip
# Errors that numpy and onnx's definitions raise for inputs that do not suit.
_UNSUITABLE = (
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    RuntimeError,
    ArithmeticError,
    AttributeError,
    AssertionError,
)


def _whole(array: Array) -> list[int]:
    return [int(value) for value in np.asarray(array).reshape(-1)]


def _positive(sizes: Sequence[int]) -> int:
    if min(sizes, default=0) < 0:
        raise ValueError(f"the sizes {excerpt(list(sizes), 60)} are negative")
    return prod(sizes)


def _broadcast(arrays: Sequence[Array]) -> int:
    return prod(np.broadcast_shapes(*(array.shape for array in arrays)))


def _range(arrays: Sequence[Array]) -> int:
    start, limit, delta = (float(array.reshape(-1)[0]) for array in arrays)
    count = (limit - start) / delta
    return max(0, ceil(count)) if isfinite(count) else MOST_FOLDED**2


def _gather(arrays: Sequence[Array], attributes: Mapping[str, Any]) -> int:
    data, index = arrays[0], arrays[1]
    sizes = [int(size) for size in data.shape]
    del sizes[int(attributes.get("axis", 0))]
    return prod(sizes) * int(index.size)


def _expand(arrays: Sequence[Array]) -> int:
    wanted = _whole(arrays[1])
    _positive(wanted)
    return prod(np.broadcast_shapes(arrays[0].shape, tuple(wanted)))


_COUNTS: dict[str, Callable[[Sequence[Array], Mapping[str, Any]], int]] = {
    **dict.fromkeys(_SAME, lambda arrays, _: arrays[0].size),
    **dict.fromkeys(_BROADCAST, lambda arrays, _: _broadcast(arrays)),
    "Concat": lambda arrays, _: sum(array.size for array in arrays),
    "ConstantOfShape": lambda arrays, _: _positive(_whole(arrays[0])),
    "Expand": lambda arrays, _: _expand(arrays),
    "Gather": _gather,
    "Range": lambda arrays, _: _range(arrays),
    "Tile": lambda arrays, _: arrays[0].size * _positive(_whole(arrays[1])),
}


@dataclass
class Folding:
    """Evaluates operators of a model, and counts the values that it makes.

    opset  version of the operators
    most   values that may be made in all
    """

    opset: int
    most: int
    _made: int = field(default=0)

    @classmethod
    def of(cls, model: OnnxModel) -> Folding:
        """Return one that may make as many values as suit the size of the model."""
        attributes = (value for step in model.steps for value in step.attributes.values())
        stored = [value.size for value in (*model.constants.values(), *attributes) if isinstance(value, np.ndarray)]
        return cls(model.opset, MOST_FOLDED + 2 * sum(stored))

    def evaluated(self, step: Step, given: Sequence[Array | None]) -> list[Array]:
        """Return what an operator gives; NetworkFileError if it is not evaluated, or its inputs do not suit."""
        if step.kind == "Constant":
            return [_constant(step)]
        if step.kind not in _COUNTS:
            raise NetworkFileError(
                f"{step.here} is computed of known values alone, and it is no operator that is evaluated; simplify the "
                "model with onnxsim, or export it again"
            )
        arrays = [array for array in given if array is not None]
        try:
            with np.errstate(all="ignore"):
                self._count(step, _COUNTS[step.kind](arrays, step.attributes))
                found = (
                    _constant_of_shape(step, arrays[0]) if step.kind == "ConstantOfShape" else self._run(step, given)
                )
        except NetworkFileError:
            raise
        except _UNSUITABLE as error:
            shapes = ", ".join(str(array.shape) for array in arrays)
            raise NetworkFileError(
                f"{step.here} cannot be evaluated for arrays of shapes {excerpt(shapes, 100)} "
                f"({excerpt(str(error).strip() or type(error).__name__, 100)}); save the model again"
            ) from error
        return [_stored(step, value) for value in found]

    def _count(self, step: Step, count: int) -> None:
        self._made += count
        if self._made > self.most:
            raise NetworkFileError(
                f"{step.here} would make {count} known values, which with others is more than the {self.most} that "
                "suit the model; export it without such large constants"
            )

    def _run(self, step: Step, given: Sequence[Array | None]) -> list[Any]:
        from onnx.helper import make_node
        from onnx.reference import ReferenceEvaluator

        names = [f"i{at}" if array is not None else "" for at, array in enumerate(given)]
        attributes = {key: value for key, value in step.attributes.items() if value is not None and value != []}
        node = make_node(step.kind, names, [f"o{at}" for at in range(len(step.outputs))], **attributes)
        evaluator = ReferenceEvaluator(node, opsets={"": self.opset})
        arrays = {name: array for name, array in zip(names, given, strict=True) if name}
        return list(evaluator.run(None, arrays))


def _constant(step: Step) -> Array:
    value = next((value for key, value in step.attributes.items() if key.startswith("value")), None)
    if value is None or isinstance(value, str):
        raise NetworkFileError(f"{step.here} has no array of numbers as its value; save the model again")
    if isinstance(value, np.ndarray):
        return value
    first = value[0] if isinstance(value, list) and value else value
    return np.asarray(value, np.float32 if isinstance(first, float) else np.int64)


def _constant_of_shape(step: Step, shape: Array) -> list[Array]:
    value = step.attributes.get("value", np.zeros(1, np.float32))
    return [np.broadcast_to(np.asarray(value).reshape(-1)[:1].reshape(()), tuple(_whole(shape)))]


def _stored(step: Step, value: Any) -> Array:
    """Return a result as an array of numbers; float16 and bfloat16 become float32."""
    array = np.asarray(value)
    if array.dtype.name in ("float16", "bfloat16"):
        array = array.astype(np.float32)
    if array.dtype.kind not in "biuf":
        raise NetworkFileError(
            f"{step.here} gives values of type {array.dtype}, and only numbers are read; export it again"
        )
    return array
