"""CPUs compute in the precisions of CPUs alone: in fp32, and some primitives in bf16."""

from __future__ import annotations

from dataclasses import replace

import pytest

from znnpy.graph_shapes import (
    GlobalPoolShape,
    GraphConvShape,
    NormShape,
    PadShape,
    PointShape,
    TransposeShape,
    UpsampleShape,
    WindowPoolShape,
)
from znnpy.kernels.contract import Primitive
from znnpy.kernels.cpu.native.library import why_not as not_compiled
from znnpy.kernels.table import TABLE
from znnpy.layer_shapes import LayerShape
from znnpy.machine import AMX, AVX512_BF16, this_machine
from znnpy.shapes import ConvShape, FilterShape, MaxoutShape, PoolShape

SHAPES: tuple[LayerShape, ...] = (
    ConvShape(1, 1, 8, (12, 13, 14), (3, 2, 3), "relu"),
    ConvShape(8, 16, 16, (12, 13, 14), (3, 2, 3), "relu"),
    PoolShape(2, 8, (5, 7, 9), (2, 2, 2)),
    PoolShape(2, 8, (4, 6, 8), (2, 2, 2), fragments=False),
    FilterShape(2, 8, (5, 7, 9), (2, 3, 1)),
    MaxoutShape(2, 8, (5, 7, 9), 2),
    GraphConvShape((16, 8), 16, (12, 13, 14), (3, 2, 3), (1, 0, 1), (0, 1, 1), activation="relu"),
    GraphConvShape((16,), 8, (12, 13, 14), (3, 2, 3), stride=(2, 1, 2), dilation=(1, 2, 1)),
    GraphConvShape((16,), 16, (12, 13, 14), (3, 2, 3), groups=16),
    TransposeShape(16, 8, (5, 6, 7), (10, 12, 7), (2, 3, 1), (0, 0, 0), (2, 2, 1)),
    NormShape(8, (5, 7, 9), 8),
    GlobalPoolShape(8, (5, 7, 9)),
    WindowPoolShape(8, (5, 7, 9), (2, 3, 2), (2, 1, 2)),
    WindowPoolShape(8, (5, 7, 9), (2, 3, 2), (2, 1, 2), "average"),
    UpsampleShape(8, (5, 6, 7), (10, 12, 7), (2, 2, 1), (0, 0, 0)),
    UpsampleShape(8, (5, 6, 7), (10, 12, 7), (2, 2, 1), (0, 0, 0), "linear"),
    PointShape("add", (8, 8), (5, 6, 7), "relu"),
    PadShape(8, (5, 6, 7), (6, 8, 8), (-1, -1, 0), (0, 0, 0), (5, 6, 7), "reflect"),
)
CPU = [p for p in TABLE if p.name.startswith("cpu.")]


@pytest.mark.parametrize("primitive", CPU, ids=lambda p: p.name)
def test_cpu_primitives_refuse_precisions_of_gpus(primitive: Primitive) -> None:
    machine = this_machine()
    applying = [s for s in SHAPES if s.kind == primitive.kind and primitive.why_not(s, machine) is None]
    for shape in applying:
        refused = primitive.why_not(replace(shape, precision="bf16"), machine)
        assert refused in (None, "computes in fp32, not in bf16")
        computes = "computes in fp32" if refused else "computes in fp32 and bf16"
        assert primitive.why_not(replace(shape, precision="tf32"), machine) == f"{computes}, not in tf32"
        assert primitive.why_not(replace(shape, precision="fp16"), machine) == f"{computes}, not in fp16"
    absent = primitive.name.endswith(tuple({AMX, AVX512_BF16} - {*machine.bf16}))  # units of other processors
    assert applying or absent or not_compiled(machine), f"no shape here is for {primitive.name}"
