"""The layers of ONNX's operators on each value: arithmetic with known values or two arrays, and functions."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import numpy.typing as npt

from znnpy.formats.entries import FLOAT32_MAX
from znnpy.importing.onnx_site import Site, Value, operator
from znnpy.importing.onnx_tensors import FLOAT, Array, type_name
from znnpy.importing.tensors import LayoutError, Tensor, combinations, kinds, whole
from znnpy.layers import Function

Factors = npt.NDArray[np.float64]


def per_map(site: Site, x: Tensor, known: Array) -> Factors:
    """Return known values that are joined with an array: one for all, or one for each map of its node.

    LayoutError if they differ from voxel to voxel, or are more than the array's.
    """
    if known.dtype.kind not in "iuf":
        raise site.error(f"joins an array with known values of type {known.dtype}, and only numbers can be")
    added = len(x.dims) - known.ndim
    shape = (1,) * added + known.shape
    if added < 0 or any(n not in (1, own) for n, own in zip(shape, x.shape, strict=True)):
        raise LayoutError(
            f"{site.builder.here} joins an array of shape {x.shape} with known values of shape {known.shape}"
        )
    values = np.asarray(known, np.float64).reshape(shape)
    index = np.zeros((), np.int64)
    for at, dim in enumerate(x.dims):
        if kinds(dim) != ["c"] and values.shape[at] > 1:
            if (values != values.take([0], at)).any():
                raise LayoutError(
                    f"{site.builder.here} joins an array of shape {x.shape} with known values of shape {known.shape} "
                    "that differ from voxel to voxel, which cannot be computed"
                )
            values = values.take([0], at)
        maps = tuple(factor for factor in dim if factor.of == "c")
        index = np.add.outer(index, [one["c"] for one in combinations(maps, ("c",))])
    if values.size == 1:
        return values.reshape(())
    found = np.zeros(x.maps)
    found[index] = np.broadcast_to(values, index.shape)
    return found


def scaled(site: Site, x: Tensor, factor: Array, offset: Array) -> Tensor:
    """Multiply an array by known values and add others, each one for all voxels or one per map."""
    one, two = per_map(site, x, factor), per_map(site, x, offset)
    if (one == 1).all() and not two.any():
        return x
    made = site.builder.affine(whole(x.node, x.maps, x.size), one, two)
    return replace(made, dims=x.dims)


def _number(value: float) -> Array:
    return np.asarray(value, np.float64)


# --- arithmetic ---


@operator("Add", "Sub", "Mul", "Div")
def _binary(site: Site) -> Value:
    first, second = site.value(0), site.value(1)
    kind = site.step.kind
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return _two(site, kind, first, second)
    if isinstance(first, Tensor):
        known = site.known(1)
        return _with_known(site, kind, first, np.asarray(known, np.float64))
    x, known = site.tensor(1), np.asarray(site.known(0), np.float64)
    if kind == "Sub":
        return scaled(site, x, _number(-1), known)
    if kind == "Div":
        raise site.error("divides by an array that depends on the image, which cannot be computed")
    return _with_known(site, kind, x, known)


def _with_known(site: Site, kind: str, x: Tensor, known: Array) -> Tensor:
    if kind == "Div" and not known.all():
        raise site.error("divides by 0; save the model again")
    if kind in ("Mul", "Div"):
        return scaled(site, x, known if kind == "Mul" else 1 / known, _number(0))
    return scaled(site, x, _number(1), known if kind == "Add" else -known)


def _two(site: Site, kind: str, first: Tensor, second: Tensor) -> Tensor:
    """Join two arrays of the network."""
    if kind == "Div":
        raise site.error("divides by an array that depends on the image, which cannot be computed")
    first, second = _without_copies(first, second), _without_copies(second, first)
    if kind == "Mul":
        return site.builder.multiply(first, second)
    if kind == "Sub":
        second = scaled(site, second, _number(-1), _number(0))
    elif first == second:
        return scaled(site, first, _number(2), _number(0))
    return site.builder.add(first, second)


def _without_copies(x: Tensor, other: Tensor) -> Tensor:
    """Return an array without dimensions of copies that the other one has in full, since joining repeats it anyway."""
    if len(x.dims) != len(other.dims):
        return x
    shape = zip(x.dims, x.shape, other.shape, strict=True)
    return replace(x, dims=tuple(() if kinds(dim) == ["copies"] and n == full else dim for dim, n, full in shape))


@operator("Sum")
def _sum(site: Site) -> Value:
    found = site.value(0)
    for at in range(1, len(site.given)):
        other = site.value(at)
        if isinstance(found, Tensor):
            found = (
                _two(site, "Add", found, other) if isinstance(other, Tensor) else _with_known(site, "Add", found, other)
            )
        else:
            found = _with_known(site, "Add", other, found) if isinstance(other, Tensor) else found + other
    return found


@operator("Neg")
def _negative(site: Site) -> Value:
    return scaled(site, site.tensor(), _number(-1), _number(0))


@operator("Pow")
def _power(site: Site) -> Value:
    x, exponent = site.tensor(), site.number(1, 1.0)
    if exponent == 1:
        return x
    if exponent != 2:
        raise site.error(f"has the exponent {exponent:g}, and only 1 and 2 can be computed")
    return site.builder.multiply(x, x)


@operator("Abs")
def _abs(site: Site) -> Value:
    """Return relu(x) + relu(-x), of which one is 0."""
    x = site.tensor()
    negative = site.builder.activation(scaled(site, x, _number(-1), _number(0)), "relu")
    return site.builder.add(site.builder.activation(x, "relu"), negative)


@operator("Min", "Max")
def _limit(site: Site) -> Value:
    tensors = [at for at, value in enumerate(site.given) if not isinstance(value, np.ndarray)]
    numbers = [site.number(at, 0.0) for at in range(len(site.given)) if at not in tensors]
    x, *others = (site.tensor(at) for at in tensors)
    largest = site.step.kind == "Max"
    for other in others:
        x = site.builder.maximum(x, other) if largest else _smaller(site, x, other)
    if not numbers:
        return x
    return _clipped(site, x, max(numbers), np.inf) if largest else _clipped(site, x, -np.inf, min(numbers))


def _smaller(site: Site, first: Tensor, second: Tensor) -> Tensor:
    """Take the smaller of two arrays at each value."""
    one, two = (scaled(site, x, _number(-1), _number(0)) for x in (first, second))
    return scaled(site, site.builder.maximum(one, two), _number(-1), _number(0))


@operator("Clip")
def _clip(site: Site) -> Value:
    return _clipped(site, site.tensor(), site.number(1, -np.inf), site.number(2, np.inf))


def _clipped(site: Site, x: Tensor, least: float, most: float) -> Tensor:
    least, most = max(least, -FLOAT32_MAX), min(most, FLOAT32_MAX)
    if not least < most:
        raise site.error(
            f"has the limits {least:g} and {most:g}, of which the first must be smaller; save the model again"
        )
    if (least, most) == (-FLOAT32_MAX, FLOAT32_MAX):
        return x
    if (least, most) == (0, FLOAT32_MAX):
        return site.builder.activation(x, "relu")
    return site.builder.activation(x, "clip", least, most)


@operator("MatMul")
def _matmul(site: Site) -> Value:
    x, weight = site.tensor(), site.known(1)
    if weight.ndim < 2 or prod(weight.shape[:-2]) != 1:
        raise site.error(f"multiplies by an array of shape {weight.shape}, and only (in, out) can be")
    return site.builder.linear(x, weight.reshape(weight.shape[-2:]).T)


@operator("Gemm")
def _gemm(site: Site) -> Value:
    x, weight, bias = site.tensor(), site.known(1), site.optional(2)
    site.only("transA", 0, usual=0)
    if weight.ndim != 2:
        raise site.error(f"multiplies by an array of shape {weight.shape}, and only two dimensions can be")
    weight = weight if site.count("transB", 0) else weight.T
    weight = (weight * np.float64(site.real("alpha", 1.0))).astype(np.float32)
    if bias is None:
        return site.builder.linear(x, weight)
    if bias.size not in (1, len(weight)):
        raise LayoutError(f"{site.builder.here} adds an array of shape {bias.shape} to {len(weight)} maps")
    each = np.broadcast_to(bias.reshape(-1) * np.float64(site.real("beta", 1.0)), (len(weight),))
    return site.builder.linear(x, weight, each.astype(np.float32))


# --- functions of each value ---

PLAIN: dict[str, Function] = {
    "Relu": "relu", "Sigmoid": "sigmoid", "Tanh": "tanh", "Softplus": "softplus", "HardSwish": "hardswish",
}  # fmt: skip


@operator(*PLAIN)
def _plain(site: Site) -> Value:
    return site.builder.activation(site.tensor(), PLAIN[site.step.kind])


@operator("LeakyRelu")
def _leaky_relu(site: Site) -> Value:
    return site.builder.activation(site.tensor(), "leaky_relu", site.real("alpha", 0.01))


@operator("Elu", "Celu")
def _elu(site: Site) -> Value:
    if site.step.kind == "Celu":
        site.only("alpha", 1.0, usual=1.0)
    return site.builder.activation(site.tensor(), "elu", site.real("alpha", 1.0))


@operator("Selu")
def _selu(site: Site) -> Value:
    alpha, gamma = site.real("alpha", 1.6732632), site.real("gamma", 1.0507010)
    if abs(alpha - 1.6732632) > 1e-5 or abs(gamma - 1.0507010) > 1e-5:
        raise site.error(f"has alpha={alpha:g} and gamma={gamma:g}, and only those of SELU can be computed")
    return site.builder.activation(site.tensor(), "selu")


@operator("Gelu")
def _gelu(site: Site) -> Value:
    site.only("approximate", "none", "tanh", usual="none")
    return site.builder.activation(site.tensor(), "gelu" if site.word("approximate", "none") == "none" else "gelu_tanh")


@operator("Swish")
def _swish(site: Site) -> Value:
    x, alpha = site.tensor(), site.real("alpha", 1.0)
    if alpha == 1:
        return site.builder.activation(x, "silu")
    gate = site.builder.activation(scaled(site, x, _number(alpha), _number(0)), "sigmoid")
    return site.builder.multiply(x, gate)


@operator("Mish")
def _mish(site: Site) -> Value:
    x = site.tensor()
    return site.builder.multiply(x, site.builder.activation(site.builder.activation(x, "softplus"), "tanh"))


@operator("HardSigmoid")
def _hard_sigmoid(site: Site) -> Value:
    line = scaled(site, site.tensor(), _number(site.real("alpha", 0.2)), _number(site.real("beta", 0.5)))
    return site.builder.activation(line, "clip", 0.0, 1.0)


@operator("PRelu")
def _prelu(site: Site) -> Value:
    x = site.tensor()
    slopes = per_map(site, x, site.known(1)).astype(np.float32)
    made = site.builder.prelu(whole(x.node, x.maps, x.size), slopes)
    return replace(made, dims=x.dims)


@operator("Softmax")
def _softmax(site: Site) -> Value:
    x = site.tensor()
    return site.builder.softmax(x, site.axis(site.count("axis", -1), len(x.dims)))


# --- what changes nothing ---


@operator("Identity")
def _identity(site: Site) -> Value:
    return site.tensor()


@operator("Dropout")
def _dropout(site: Site) -> Value:
    if site.number(2, 0.0):
        raise site.error("drops values at random, as in training; call model.eval() before the export")
    return site.tensor()


@operator("Cast")
def _cast(site: Site) -> Value:
    to = site.count("to", FLOAT)
    if to != FLOAT:
        raise site.error(
            f"converts values to {type_name(to)}, and networks are computed in float32; export the model in float32"
        )
    return site.tensor()
