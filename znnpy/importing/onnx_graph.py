"""Walk the operators of an ONNX model and collect the layers that they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from znnpy.errors import NetworkFileError
from znnpy.importing import onnx_arithmetic, onnx_layout, onnx_operators
from znnpy.importing.builder import Builder
from znnpy.importing.onnx_constants import MOST_FOLDED, Folding
from znnpy.importing.onnx_file import OnnxModel, Step, read_model
from znnpy.importing.onnx_functions import with_functions
from znnpy.importing.onnx_site import HANDLERS, Part, Site, Value
from znnpy.importing.onnx_tensors import Array
from znnpy.importing.tensors import LayoutError, Tensor
from znnpy.messages import excerpt
from znnpy.shapes import Vec3

OPERATORS = (onnx_arithmetic, onnx_layout, onnx_operators)  # modules that register what operators are
_CONTROL = ("If", "Loop", "Scan")


def read_onnx(path: Path) -> OnnxModel:
    """Read a model and leave out what is not needed: NetworkFileError as from `read_model`."""
    model = _needed(read_model(path))
    return _needed(with_functions(_folded(model)))


def walk(model: OnnxModel, builder: Builder, size: Vec3, order: str) -> dict[str, Tensor]:
    """Collect the layers of a model for a volume of one size, and return its outputs by name.

    order  of the input's dimensions, one of `model.input.orders`

    NetworkFileError names the operator that is not supported. LayoutError: another order may suit.
    """
    values: dict[str, Value] = dict(model.constants)
    values[model.input.name] = builder.input(model.input.maps(order), size, order)
    folding = Folding(model.opset, MOST_FOLDED)
    for step in model.steps:
        builder.at(step.name, step.kind)
        given = [_value(values, step, name) for name in step.inputs]
        if all(value is None or isinstance(value, np.ndarray) for value in given):
            known = [value for value in given if value is None or isinstance(value, np.ndarray)]
            results: Sequence[Value] = folding.evaluated(step, known)
        else:
            results = _results(Site(builder, step, given, model.opset))
        values.update((name, value) for name, value in zip(step.outputs, results, strict=False) if name)
    return {name: _output(values, builder, name) for name in model.outputs}


def _value(values: dict[str, Value], step: Step, name: str) -> Value | None:
    if name and name not in values:
        raise NetworkFileError(
            f"{step.here} reads {excerpt(name, 60)}, a further output of another node, such as indices or a mask, "
            "which cannot be computed; write the model without it"
        )
    return values[name] if name else None


def _output(values: dict[str, Value], builder: Builder, name: str) -> Tensor:
    found = values.get(name)
    if isinstance(found, Part):
        builder.at(name, "output")
        found = builder.cut(found.of, found.dimension, found.begin, found.end)
    if not isinstance(found, Tensor):
        raise NetworkFileError(
            f"output {excerpt(name, 60)} of the model is no array that depends on its input; export it without that"
        )
    return found


def _results(site: Site) -> list[Value]:
    """Return what an operator gives for arrays of the network."""
    kind = site.step.kind
    if kind in _CONTROL:
        raise site.error(
            "decides while the model runs which operators come next, which cannot be computed; export it without "
            "conditions and loops"
        )
    handler = HANDLERS.get(kind)
    if handler is None:
        near = next(iter(get_close_matches(kind, HANDLERS, n=1)), None)
        raise site.builder.unsupported(near, "znnpy.importing.onnx_site.register_onnx")
    try:
        found = handler(site)
    except LayoutError as error:
        raise (error if str(error).startswith(site.builder.here) else error.with_context(site.builder.here)) from None
    return found if isinstance(found, list) else [found]


def _needed(model: OnnxModel) -> OnnxModel:
    """Return the model without operators and arrays that no output depends on."""
    wanted = set(model.outputs)
    kept: list[Step] = []
    for step in reversed(model.steps):
        if wanted & set(step.outputs):
            kept.append(step)
            wanted |= set(step.inputs)
    constants = {name: array for name, array in model.constants.items() if name in wanted}
    return replace(model, steps=tuple(kept[::-1]), constants=constants)


def _folded(model: OnnxModel) -> OnnxModel:
    """Return the model with the operators evaluated whose inputs are known for volumes of every size."""
    folding = Folding.of(model)
    known: dict[str, Array] = dict(model.constants)
    kept: list[Step] = []
    for step in model.steps:
        if _all_known(step.inputs, known):
            given = [known[name] if name else None for name in step.inputs]
            known.update(zip(step.outputs, folding.evaluated(step, given), strict=False))
        else:
            kept.append(step)
    return replace(model, steps=tuple(kept), constants=known)


def _all_known(names: Iterable[str], known: dict[str, Array]) -> bool:
    return all(not name or name in known for name in names)
