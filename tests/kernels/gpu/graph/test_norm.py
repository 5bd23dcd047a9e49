"""Norms over whole images on a GPU, and means and maxima of them, against the float64 definition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.kernels.gpu.graph.running import (
    WITH_GPU,
)
from tests.support.graph_cases import NORMS, with_parameters
from znnpy.graph_shapes import GlobalPoolShape, GraphShape, NormShape
from znnpy.kernels.gpu.graph.norm import GlobalPoolPasses, NormPasses

if TYPE_CHECKING:
    from znnpy.kernels.contract import Primitive

TABLE: tuple[Primitive, ...] = (NormPasses(), GlobalPoolPasses())
MORE: list[GraphShape] = [
    NormShape(24, (3, 20, 41), 4, 1e-5, True, "relu"),
    GlobalPoolShape(24, (3, 20, 41)),
    GlobalPoolShape(16, (3, 20, 41), "max"),
]
EACH: list[Any] = [with_parameters(s) for s in (*NORMS, *MORE)]


def primitives_for(shape: GraphShape) -> list[Primitive]:
    return [p for p in TABLE if p.why_not(shape, WITH_GPU) is None]
