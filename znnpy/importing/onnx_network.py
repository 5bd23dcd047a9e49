"""Make a network of an ONNX model, for volumes of any size or of the one that the model is for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from znnpy.errors import NetworkFileError
from znnpy.geometry import vector
from znnpy.importing.builder import Builder
from znnpy.importing.finish import LARGEST_SIZE, LIKELY_SIZES, Walk, Wishes, imported
from znnpy.importing.imported import Imported
from znnpy.importing.onnx_file import OnnxModel
from znnpy.importing.onnx_graph import read_onnx, walk
from znnpy.importing.tensors import LayoutError
from znnpy.shapes import Vec3


def imported_onnx(path: Path, name: str, wishes: Wishes) -> Imported:
    """Return the network of an .onnx file; NetworkFileError for whatever is wrong with it."""
    model = read_onnx(path)
    order, size = _suitable(model, wishes.order)
    fixed = all(n is not None for n in model.input.size(order))
    return imported(name, lambda volume: _walked(model, volume, order), size, wishes, model.source, fixed=fixed)


def _walked(model: OnnxModel, size: Vec3, order: str) -> Walk:
    builder = Builder()
    return Walk(size, builder, walk(model, builder, size, order), order)


def _suitable(model: OnnxModel, asked: str | None) -> tuple[str, Vec3]:
    """Return the order of the input's dimensions and a size of the volume with which the model can be walked.

    asked  the only order that will do; None: any

    LayoutError of the first attempt if there are none.
    """
    if asked is not None and asked not in model.input.orders:
        raise NetworkFileError(
            f"the input has the axes {asked.replace('n', 'b')}, and the model takes {len(model.input.dims)} dimensions "
            f"({model.input.words}); correct the axes, one letter for each dimension"
        )
    refused: LayoutError | None = None
    for order, size in _attempts(model, asked):
        try:
            _walked(model, size, order)
        except LayoutError as error:
            refused = refused or error
        else:
            return order, size
    assert refused is not None, "at least one size was tried"
    raise refused


def _attempts(model: OnnxModel, asked: str | None) -> Iterator[tuple[str, Vec3]]:
    """Yield orders and sizes to try: likely sizes in each order, then all sizes in the usual one."""
    orders = model.input.orders if asked is None else (asked,)
    for order in orders:
        for n in LIKELY_SIZES if None in model.input.size(order) else LIKELY_SIZES[:1]:
            yield order, _filled(model, order, n)
    for n in range(16, LARGEST_SIZE) if None in model.input.size(orders[0]) else ():
        yield orders[0], _filled(model, orders[0], n)


def _filled(model: OnnxModel, order: str, n: int) -> Vec3:
    return vector(n if size is None else size for size in model.input.size(order))
