"""CPUs compute in float32 whatever less would do: plans for them are in fp32."""

from __future__ import annotations

from dataclasses import replace

import pytest

from znnpy.kernels.contract import Primitive
from znnpy.kernels.cpu.native.library import why_not as not_compiled
from znnpy.kernels.table import TABLE
from znnpy.layer_shapes import LayerShape
from znnpy.machine import this_machine
from znnpy.shapes import ConvShape, FilterShape, MaxoutShape, PoolShape

SHAPES: tuple[LayerShape, ...] = (
    ConvShape(1, 1, 8, (12, 13, 14), (3, 2, 3), "relu"),
    ConvShape(8, 16, 16, (12, 13, 14), (3, 2, 3), "relu"),
    PoolShape(2, 8, (5, 7, 9), (2, 2, 2)),
    PoolShape(2, 8, (4, 6, 8), (2, 2, 2), fragments=False),
    FilterShape(2, 8, (5, 7, 9), (2, 3, 1)),
    MaxoutShape(2, 8, (5, 7, 9), 2),
)
CPU = [p for p in TABLE if p.name.startswith("cpu.")]


@pytest.mark.parametrize("primitive", CPU, ids=lambda p: p.name)
def test_cpu_primitives_compute_in_fp32_only(primitive: Primitive) -> None:
    machine = this_machine()
    applying = [s for s in SHAPES if s.kind == primitive.kind and primitive.why_not(s, machine) is None]
    for shape in applying:
        assert primitive.why_not(replace(shape, precision="tf32"), machine) == "computes in fp32, not in tf32"
        assert primitive.why_not(replace(shape, precision="fp16"), machine) == "computes in fp32, not in fp16"
    assert applying or not_compiled(machine), f"no shape here is for {primitive.name}"
