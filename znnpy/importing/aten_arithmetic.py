"""The layers that ATen operators stand for which are functions of each value, or of two arrays value by value."""

from __future__ import annotations

from typing import Any

import numpy as np

from znnpy.formats.entries import FLOAT32_MAX
from znnpy.importing.aten_walk import Arguments, aten, tensor
from znnpy.importing.builder import Builder
from znnpy.importing.tensors import Tensor, kinds
from znnpy.layers import Function

# --- functions of each value ---

LEAST_THRESHOLD = 17  # from here on, softplus is its argument in float32

PLAIN: tuple[Function, ...] = ("relu", "selu", "silu", "sigmoid", "tanh", "hardswish")  # as PyTorch calls them


def _register(function: Function) -> None:
    @aten(function)
    def plain(builder: Builder, a: Arguments) -> Tensor:
        return builder.activation(a["self"], function)


for _function in PLAIN:
    _register(_function)


@aten("leaky_relu")
def _leaky_relu(builder: Builder, a: Arguments) -> Tensor:
    return builder.activation(a["self"], "leaky_relu", float(a.get("negative_slope", 0.01)))


@aten("prelu")
def _prelu(builder: Builder, a: Arguments) -> Tensor:
    return builder.prelu(a["self"], a["weight"])


@aten("celu")
def _celu(builder: Builder, a: Arguments) -> Tensor:
    alpha = float(a.get("alpha", 1.0))
    if alpha == 1:
        return builder.activation(a["self"], "elu", 1.0)
    divided = builder.activation(_affine_in_place(builder, a["self"], 1 / alpha, 0.0), "elu", 1.0)
    return _affine_in_place(builder, divided, alpha, 0.0)


@aten("elu")
def _elu(builder: Builder, a: Arguments) -> Tensor:
    if a.get("scale", 1) != 1 or a.get("input_scale", 1) != 1:
        raise builder.error(
            f"has scale {a.get('scale', 1)} and input_scale {a.get('input_scale', 1)}, and only 1 can be"
        )
    return builder.activation(a["self"], "elu", float(a.get("alpha", 1.0)))


@aten("gelu")
def _gelu(builder: Builder, a: Arguments) -> Tensor:
    return builder.activation(a["self"], "gelu_tanh" if a.get("approximate", "none") == "tanh" else "gelu")


@aten("softplus")
def _softplus(builder: Builder, a: Arguments) -> Tensor:
    if a.get("beta", 1) != 1:
        raise builder.error(f"has beta {a['beta']}, and only 1 is supported")
    if a.get("threshold", 20) < LEAST_THRESHOLD:
        raise builder.error(f"has threshold {a['threshold']}, and only the usual 20 is supported")
    return builder.activation(a["self"], "softplus")


@aten("mish")
def _mish(builder: Builder, a: Arguments) -> Tensor:
    return builder.multiply(a["self"], builder.activation(builder.activation(a["self"], "softplus"), "tanh"))


@aten("hardsigmoid")
def _hardsigmoid(builder: Builder, a: Arguments) -> Tensor:
    return builder.activation(builder.affine(a["self"], 1 / 6, 0.5), "clip", 0.0, 1.0)


@aten("hardtanh")
def _hardtanh(builder: Builder, a: Arguments) -> Tensor:
    return builder.activation(a["self"], "clip", float(a.get("min_val", -1.0)), float(a.get("max_val", 1.0)))


@aten("relu6")
def _relu6(builder: Builder, a: Arguments) -> Tensor:
    return builder.activation(a["self"], "clip", 0.0, 6.0)


@aten("clamp", "clamp_min", "clamp_max", "clip")
def _clip(builder: Builder, a: Arguments) -> Tensor:
    least, most = a.get("min"), a.get("max")
    if isinstance(least, Tensor | np.ndarray) or isinstance(most, Tensor | np.ndarray):
        raise builder.error("has limits that are arrays, and only numbers are supported")
    least, most = (-FLOAT32_MAX if least is None else float(least)), (FLOAT32_MAX if most is None else float(most))
    return builder.activation(a["self"], "clip", least, most)


@aten("softmax", "_softmax")
def _softmax(builder: Builder, a: Arguments) -> Tensor:
    return builder.softmax(a["self"], a["dim"])


# --- arithmetic of two values ---


def per_map(builder: Builder, x: Tensor, array: Any) -> Any:
    """Return a number, or a known array with one value per map, as float64."""
    if not isinstance(array, np.ndarray):
        return float(array)
    if array.size == 1:
        return float(array.reshape(-1)[0])
    shape = (1,) * (len(x.dims) - array.ndim) + array.shape
    held = [i for i, dim in enumerate(x.dims) if kinds(dim) == ["c"]]
    if len(shape) != len(x.dims) or len(held) != 1 or array.size != shape[held[0]] or array.size != x.maps:
        raise builder.error(
            f"joins an array of shape {x.shape} with known values of shape {array.shape}, and only one value, or one "
            "per map, does not depend on the place in the volume"
        )
    return array.reshape(-1).astype(np.float64)


def _affine_in_place(builder: Builder, x: Tensor, factor: Any, offset: Any) -> Tensor:
    """Scale an array that has its maps in any dimension."""
    if [i for i, dim in enumerate(x.dims) if kinds(dim) == ["c"]] in ([], [1]):
        return builder.affine(x, factor, offset)
    held = next(i for i, dim in enumerate(x.dims) if kinds(dim) == ["c"])
    order = [0, held, *(i for i in range(1, len(x.dims)) if i != held)]
    made = builder.affine(x.transposed(order), factor, offset)
    return made.transposed([order.index(i) for i in range(len(order))])


@aten("add")
def _add(builder: Builder, a: Arguments) -> Tensor:
    return _sum(builder, a)


def _sum(builder: Builder, a: Arguments) -> Tensor:
    """Add two values, the second one times `alpha`."""
    x, other, alpha = a["self"], a["other"], a.get("alpha", 1)
    if isinstance(x, Tensor) and isinstance(other, Tensor):
        return builder.add(x, other if alpha == 1 else _affine_in_place(builder, other, float(alpha), 0.0))
    if isinstance(x, Tensor):
        return _affine_in_place(builder, x, 1.0, alpha * per_map(builder, x, other))
    return _affine_in_place(builder, other, float(alpha), per_map(builder, other, x))


@aten("sub")
def _sub(builder: Builder, a: Arguments) -> Tensor:
    return _sum(builder, {**a, "alpha": -a.get("alpha", 1)})


@aten("rsub")
def _rsub(builder: Builder, a: Arguments) -> Tensor:
    return _sum(builder, {"self": a["other"], "other": a["self"], "alpha": -a.get("alpha", 1)})


@aten("mul")
def _mul(builder: Builder, a: Arguments) -> Tensor:
    x, other = a["self"], a["other"]
    if isinstance(x, Tensor) and isinstance(other, Tensor):
        return builder.multiply(x, other)
    x, other = (x, other) if isinstance(x, Tensor) else (other, x)
    return _affine_in_place(builder, x, per_map(builder, x, other), 0.0)


@aten("div")
def _div(builder: Builder, a: Arguments) -> Tensor:
    x, other = a["self"], a["other"]
    if isinstance(other, Tensor) or a.get("rounding_mode") is not None:
        raise builder.error("divides by an array that depends on the input, or rounds, which is not supported")
    divisor = np.asarray(per_map(builder, x, other))
    if not divisor.all():
        raise builder.error("divides by 0; correct the module")
    return _affine_in_place(builder, x, 1 / divisor, 0.0)


@aten("neg")
def _neg(builder: Builder, a: Arguments) -> Tensor:
    return _affine_in_place(builder, a["self"], -1.0, 0.0)


@aten("pow", "square")
def _pow(builder: Builder, a: Arguments) -> Tensor:
    exponent = a.get("exponent", 2)
    if isinstance(exponent, Tensor | np.ndarray):
        raise builder.error("raises to a power that is an array, and only 1 and 2 are supported")
    if exponent not in (1, 2):
        raise builder.error(f"raises to the power {exponent}, and only 1 and 2 are supported")
    return builder.multiply(a["self"], a["self"]) if exponent == 2 else a["self"]


@aten("maximum")
def _maximum(builder: Builder, a: Arguments) -> Tensor:
    if not isinstance(a["self"], Tensor) or not isinstance(a["other"], Tensor):
        raise builder.error("compares with known values, and only with another array or, as clamp, with a number")
    return builder.maximum(a["self"], a["other"])


@aten("max")
def _max(builder: Builder, a: Arguments) -> Any:
    if "other" in a:
        return _maximum(builder, a)
    if "dim" not in a:
        raise builder.error("is the maximum of all values, which depends on the whole volume")
    return [builder.largest_map(a["self"], a["dim"], keep=bool(a.get("keepdim", False))), None]


@aten("minimum")
def _minimum(builder: Builder, a: Arguments) -> Tensor:
    negative = {key: _affine_in_place(builder, tensor(a[key]), -1.0, 0.0) for key in ("self", "other")}
    return _affine_in_place(builder, builder.maximum(negative["self"], negative["other"]), -1.0, 0.0)


@aten("ones_like")
def _ones(builder: Builder, a: Arguments) -> Tensor:
    return _affine_in_place(builder, a["self"], 0.0, 1.0)


@aten("zeros_like", "full_like")
def _full(builder: Builder, a: Arguments) -> Tensor:
    return _affine_in_place(builder, a["self"], 0.0, float(a.get("fill_value", 0.0)))


@aten("abs")
def _abs(builder: Builder, a: Arguments) -> Tensor:
    """Return relu(x) + relu(-x), of which one is 0."""
    x = tensor(a["self"])
    negative = builder.activation(_affine_in_place(builder, x, -1.0, 0.0), "relu")
    return builder.add(builder.activation(x, "relu"), negative)


@aten("glu")
def _glu(builder: Builder, a: Arguments) -> Tensor:
    x = tensor(a["self"])
    dim = a.get("dim", -1) % len(x.dims)
    half = x.shape[dim] // 2
    if x.shape[dim] % 2:
        raise builder.error(f"halves dimension {dim} of {x.shape}, which is odd")
    first, second = builder.cut(x, dim, 0, half), builder.cut(x, dim, half, 2 * half)
    return builder.multiply(first, builder.activation(second, "sigmoid"))
