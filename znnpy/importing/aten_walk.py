"""Walk a program of ATen operators and collect the layers that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np

from znnpy.errors import NetworkFileError
from znnpy.importing.aten_constants import FLOAT32, Evaluation
from znnpy.importing.builder import Builder
from znnpy.importing.finish import Walk
from znnpy.importing.in_place import references
from znnpy.importing.program import Call, Program, Ref
from znnpy.importing.tensors import LayoutError, Tensor
from znnpy.messages import excerpt
from znnpy.shapes import Vec3

# A handler gets the builder and the arguments by name, in which arrays are Tensors, or numpy arrays if they are known.
Arguments = Mapping[str, Any]
Handler = Callable[[Builder, Arguments], Any]
HANDLERS: dict[str, Handler] = {}
COPIES = ("clone", "lift_fresh_copy", "_to_copy")
IGNORED = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size", "_assert_async")


def aten(*names: str) -> Callable[[Handler], Handler]:
    """Register a function for operators, such as `conv3d`: the name in PyTorch without namespace and overload."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


@dataclass(slots=True)
class _Box:
    """A place for a value. Operators that change an array in place change it for all that refer to it."""

    value: Any


def walked(program: Program, size: Vec3) -> Walk:
    """Return the layers of a program whose input has a size.

    NetworkFileError: an operator or its arguments are not supported; the message names the module and the operator.
    """
    builder = Builder()
    ((name, shape),) = program.inputs
    order = "ncyx" if len(shape) == 4 else "nczyx"
    values = {key: _Box(array) for key, array in program.constants.items()}
    values[name] = _Box(builder.input(shape[1], size, order))
    evaluation = Evaluation.of(program.constants)
    for call in program.calls:
        _call(builder, evaluation, call, values)
    outputs = {}
    for word, value in program.outputs.items():
        found = values[value].value
        if not isinstance(found, Tensor):
            what = "is the indices of maxima" if found is None else "does not depend on its input"
            raise NetworkFileError(f"output {excerpt(word, 60)} of the network {what}; leave it out and export again")
        outputs[word] = found
    return Walk(size, builder, outputs, order, program.is_alone)


def _call(builder: Builder, evaluation: Evaluation, call: Call, values: dict[str, _Box]) -> None:
    operator = call.target.split(".")[1] if call.target.count(".") else call.target
    if operator in IGNORED:
        return
    builder.at(call.name, call.target)
    in_place = operator.endswith("_") and not operator.endswith("__")
    operator = operator.rstrip("_") if in_place else operator
    for name in references(call.arguments.values()):
        if values[name].value is None:
            raise builder.error(f"reads {excerpt(name, 60)}, indices of maxima, which are not computed; leave them out")
    arguments = {key: _resolved(value, values) for key, value in call.arguments.items()}
    if operator in IDENTITY:
        first = next(value for value in call.arguments.values() if isinstance(value, Ref))
        IDENTITY[operator](builder, arguments)
        known = values[first.name].value
        if operator in COPIES:  # what is then changed in place is one of the two
            values[call.results[0]] = _Box(known)
        elif isinstance(known, np.ndarray) and arguments.get("dtype") is not None:
            values[call.results[0]] = _Box(known.astype(np.float32))
        else:
            values[call.results[0]] = values[first.name]
        return
    result = _result(builder, evaluation, operator, arguments)
    if in_place:
        first = next(value for value in call.arguments.values() if isinstance(value, Ref))
        values[first.name].value = result
        values[call.results[0]] = values[first.name]
        return
    results = result if len(call.results) > 1 or isinstance(result, list) else [result]
    for key, value in zip(call.results, results, strict=True):
        values[key] = _Box(value)


def _result(builder: Builder, evaluation: Evaluation, operator: str, arguments: Mapping[str, Any]) -> Any:
    if not any(isinstance(value, Tensor) for value in _flat(arguments.values())):
        array = evaluation.evaluated(operator, arguments)
        if array is None:
            raise builder.error("makes an array that does not depend on the input, which is not supported here")
        return array
    handler = HANDLERS.get(operator)
    if handler is None:
        near = get_close_matches(operator, HANDLERS, n=1)
        raise builder.unsupported(near[0] if near else None, "znnpy.importing.aten_walk.aten")
    try:
        return handler(builder, arguments)
    except LayoutError as error:
        raise NetworkFileError(
            str(error) if str(error).startswith(builder.here) else f"{builder.here}: {error}"
        ) from None
    except KeyError as error:
        raise builder.error(f"lacks the argument {error}; export it again with a newer PyTorch") from None


def _resolved(value: object, values: Mapping[str, _Box]) -> Any:
    if isinstance(value, Ref):
        return values[value.name].value
    if isinstance(value, list | tuple):
        return [_resolved(one, values) for one in value]
    return value


def _flat(values: Any) -> list[Any]:
    found = []
    for value in values:
        found += _flat(value) if isinstance(value, list | tuple) else [value]
    return found


def _nothing(builder: Builder, a: Mapping[str, Any]) -> None:
    """Accept an operator that changes nothing."""


def _no_training(builder: Builder, a: Mapping[str, Any]) -> None:
    if a.get("train", a.get("training", False)):
        raise builder.error("drops values at random, as in training; call module.eval() before it is exported")


def _same_type(builder: Builder, a: Mapping[str, Any]) -> None:
    kind = a.get("dtype")
    if kind is not None and str(kind) not in FLOAT32:
        raise builder.error(f"converts values to {kind}, and networks are computed in float32; leave it out")


IDENTITY: dict[str, Callable[[Builder, Mapping[str, Any]], None]] = {
    **dict.fromkeys(("alias", "contiguous", "detach", "lift_fresh_copy", "clone", "identity"), _nothing),
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"), _no_training),
    **dict.fromkeys(("to", "_to_copy", "type_as"), _same_type),
}


def many(value: Any) -> list[int]:
    """Return one size for each dimension from what PyTorch takes: a number or a list."""
    return [] if value is None else [int(v) for v in value] if isinstance(value, list | tuple) else [int(value)]


def tensor(value: Any) -> Tensor:
    """Return an argument that is an array which depends on the input."""
    assert isinstance(value, Tensor), "known arrays are evaluated before"
    return value
