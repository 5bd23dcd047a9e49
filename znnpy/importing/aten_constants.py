"""Evaluate operators of a program whose inputs are all known arrays, such as a norm of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
MOST_VALUES = 2**26  # that are made, besides some for each value that a program stores
EACH = 16  # values that are made for each stored one: several operators compute a weight from others
FLOAT32 = ("float32", "torch.float32", "7")  # as programs write it


@dataclass
class Evaluation:
    """Evaluates operators of a program, and counts the values that it makes.

    left  how many it may still make
    """

    left: int

    @classmethod
    def of(cls, constants: Mapping[str, Array]) -> Evaluation:
        """Return one that may make as many values as suit the arrays that a program stores."""
        return cls(MOST_VALUES + EACH * sum(array.size for array in constants.values()))

    def evaluated(self, operator: str, arguments: Mapping[str, Any]) -> Array | None:
        """Return what an operator gives for arrays; None: it is not known, or would make too many values."""
        known = KNOWN.get(operator)
        rounded = arguments.get("rounding_mode") is not None
        if known is None or rounded or str(arguments.get("dtype") or FLOAT32[0]) not in FLOAT32:
            return None
        arrays = [value for value in arguments.values() if isinstance(value, np.ndarray)]
        try:
            counts = [prod(abs(n) for n in arguments.get("size") or ()), *(array.size for array in arrays)]
            if operator in _BROADCAST:
                counts.append(prod(np.broadcast_shapes(*(array.shape for array in arrays))))
            self.left -= max(counts)
            return None if self.left < 0 else np.asarray(known(arguments))
        except (ValueError, TypeError, KeyError, IndexError, ArithmeticError):  # an argument that it does not take
            return None


def _dims(a: Mapping[str, Any]) -> tuple[int, ...] | None:
    dims = a.get("dim")
    return None if dims is None else tuple(dims) if isinstance(dims, list | tuple) else (int(dims),)


def _variance(a: Mapping[str, Any]) -> Array:
    correction = a.get("correction")
    unbiased = 1 if correction is None and a.get("unbiased", True) else int(correction or 0)
    return np.asarray(np.var(a["self"], axis=_dims(a), ddof=unbiased, keepdims=bool(a.get("keepdim", False))))


def _weight_norm(a: Mapping[str, Any]) -> Array:
    v, g, dim = a["v"], a["g"], int(a.get("dim", 0))
    others = tuple(i for i in range(v.ndim) if i != dim)
    return np.asarray(v * (g / np.sqrt((v.astype(np.float64) ** 2).sum(others, keepdims=True))), v.dtype)


def _squeezed(a: Mapping[str, Any]) -> Array:
    x, dims = a["self"], _dims(a)
    asked = range(x.ndim) if dims is None else [dim % x.ndim for dim in dims]
    return np.asarray(x.reshape([n for dim, n in enumerate(x.shape) if n != 1 or dim not in asked]))


def _expanded(a: Mapping[str, Any]) -> Array:
    x, size = a["self"], a["size"]
    own = (1,) * (len(size) - x.ndim) + x.shape
    return np.broadcast_to(x, tuple(n if want == -1 else want for n, want in zip(own, size, strict=True)))


def _filled(value: float) -> Callable[[Mapping[str, Any]], Array]:
    """Return how an array of one value is made, which takes the memory of that value."""
    return lambda a: np.broadcast_to(np.float32(value), tuple(a["size"]))


_BROADCAST = ("add", "sub", "mul", "div")
KNOWN: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "add": lambda a: a["self"] + a.get("alpha", 1) * a["other"],
    "sub": lambda a: a["self"] - a.get("alpha", 1) * a["other"],
    "mul": lambda a: a["self"] * a["other"],
    "div": lambda a: a["self"] / a["other"],
    "neg": lambda a: -a["self"],
    "sqrt": lambda a: np.sqrt(a["self"]),
    "rsqrt": lambda a: 1 / np.sqrt(a["self"]),
    "reciprocal": lambda a: 1 / a["self"],
    "exp": lambda a: np.exp(a["self"]),
    "sigmoid": lambda a: 1 / (1 + np.exp(-a["self"])),
    "pow": lambda a: a["self"] ** a["exponent"],
    "view": lambda a: a["self"].reshape(a["size"]),
    "reshape": lambda a: a["self"].reshape(a["shape"]),
    "permute": lambda a: a["self"].transpose(a["dims"]),
    "transpose": lambda a: np.swapaxes(a["self"], a["dim0"], a["dim1"]),
    "unsqueeze": lambda a: np.expand_dims(a["self"], a["dim"]),
    "squeeze": _squeezed,
    "expand": _expanded,
    "mean": lambda a: np.mean(
        a["self"], axis=_dims(a), keepdims=bool(a.get("keepdim", False)), dtype=np.float64
    ).astype(a["self"].dtype),
    "sum": lambda a: np.sum(a["self"], axis=_dims(a), keepdims=bool(a.get("keepdim", False))),
    "var": _variance,
    "std": lambda a: np.sqrt(_variance(a)),
    "_weight_norm": _weight_norm,
    "zeros": _filled(0.0),
    "ones": _filled(1.0),
    "full": lambda a: np.broadcast_to(np.float32(a["fill_value"]), tuple(a["size"])),
}
