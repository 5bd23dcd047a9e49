"""Graphs in precision bf16: tensors, kept planes, input and output are bfloat16, however the output is divided."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.run.test_graph_session import SEEDS, made, same, unet
from tests.support.bf16_twins import compiler, twin
from tests.support.graph_runs import (
    CPU,
    MACHINE,
    assert_equal,
    planned,
    ran,
    reference,
    some_plan,
    some_region,
    whole_region,
)
from tests.support.seeded_graphs import case
from tests.support.tiers import one_in
from znnpy.formats.wiring import Given
from znnpy.kernels.cpu import bf16_conv, bf16_steps
from znnpy.layers import Add, Concat, Conv, Pool, Upsample
from znnpy.machine import AMX, AVX512_BF16
from znnpy.planner.graph_tilings import GraphTiling
from znnpy.planner.request import Target

if TYPE_CHECKING:
    from tests.support.seeded_graphs import Case
    from znnpy.shapes import Precision, Vec3

CLOSE = 6e-2  # of the largest value, over many layers
UNITS = (AMX, AVX512_BF16)


def target(unit: str) -> Target:
    return Target(replace(MACHINE, bf16=(unit,)), precision="bf16", mode="cpu")


@pytest.fixture(autouse=True)
def _on_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    if compiler() is None:
        pytest.skip("no C++ compiler is here")
    monkeypatch.setattr(bf16_steps, "unit_library", twin)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("seed", one_in(10, SEEDS[:100]))
def test_any_split_of_a_random_graph_is_close_to_the_definition(seed: int, unit: str) -> None:
    one, rng = case(seed), random.Random(seed)
    exact = reference(one)
    region = some_region(one.geometry.size(one.network.outputs[0]), rng)
    plan = some_plan(one, region, rng, target=target(unit))
    assert plan.precision == "bf16"
    assert_equal(ran(plan, one).out, exact[(slice(None), *region.slices)], one, np.abs(exact).max(), CLOSE)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("axis", "column"), [(0, 0), (0, 4), (1, 3), (2, 5)])
def test_a_unet_takes_half_the_memory_for_tensors(axis: int, column: int, unit: str) -> None:
    one = unet((16, 20, 12))
    region = whole_region(one)
    split: dict[str, Any] = {"axis": axis, "column": column}
    wide = planned(one.network, one.size, region, (1, 2, 2), **split)
    plan = planned(one.network, one.size, region, (1, 2, 2), **split, target=target(unit))
    tensors, halves = (
        {tensor.name: tensor.nbytes for tensor in found.stages[0].tensors if tensor.name.startswith("x")}
        for found in (wide, plan)
    )
    assert tensors == {name: 2 * nbytes for name, nbytes in halves.items()}
    assert plan.memory.last.carries * 2 == wide.memory.last.carries
    assert GraphTiling(plan.graph_cover(one.network)).graph.precision == "bf16"
    exact = reference(one)
    assert_equal(ran(plan, one).out, exact, one, float(np.abs(exact).max()), CLOSE)


def pooled_unet(size: Vec3) -> Case:
    """Return a net whose first result is kept for longer than its pooling asks for, and whose poolings differ."""
    return made(
        [
            Given(same(16), "first"),
            Given(Conv((3, 3, 3), 16, padding=((1, 1, 1), (1, 1, 1))), "second"),
            Given(Add("relu"), "sum", ("second", "first")),
            Given(Pool((2, 2, 2)), "down"),
            Given(same(16), "middle"),
            Given(Pool((1, 2, 2)), "down2"),
            Given(same(8), "bottom"),
            Given(Upsample((1, 2, 2)), "up2"),
            Given(Concat(), "joined2", ("middle", "up2")),
            Given(Conv((1, 1, 1), 8), "after2"),
            Given(Upsample((2, 2, 2)), "up"),
            Given(Conv((13, 1, 3), 4, padding=((6, 0, 1), (6, 0, 1))), "wide", ("sum",)),
            Given(Concat(), "joined", ("wide", "up")),
            Given(same(2), "last"),
        ],
        size,
    )


@pytest.mark.parametrize("precision", ["bf16", "bf16x2", "fp32"])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    "size",
    [(11, 9, 6), pytest.param((12, 8, 12), marks=pytest.mark.long), pytest.param((2, 4, 4), marks=pytest.mark.long)],
)
def test_a_convolution_pools_its_result_and_keeps_it(
    size: Vec3, unit: str, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives the same bits as two operations, and the memory that is promised holds both tensors."""
    one = pooled_unet(size)
    exact, region = reference(one), whole_region(one)
    kinds = ("graph_conv", "window_pool", "upsample", "point", "pad")
    table = [p for p in CPU if p.kind in kinds[1:] or p.name == f"cpu.graph_conv.{unit}"]
    here = replace(target(unit), precision=precision)
    for axis, patch, column in ((0, (1, 2, 2), 0), (0, (1, 9, 9), 8), (1, (2, 1, 3), 4), (2, (1, 3, 2), 5)):
        split: dict[str, Any] = {"axis": axis, "column": column, "table": table, "target": here}
        merged = planned(one.network, one.size, region, patch, **split)
        assert [choice.layers for choice in merged.choices][1:3] == [(1, 3), (4, 5)]
        out = ran(merged, one).out
        assert_equal(out, exact, one, float(np.abs(exact).max()), CLOSE if precision == "bf16" else 2e-5)
        with monkeypatch.context() as patched:
            patched.setattr(bf16_conv, "_why_not_kept", lambda shape: "not here" if shape.pooled else None)
            apart = planned(one.network, one.size, region, patch, **split)
            assert len(apart.choices) == len(merged.choices) + 2
            np.testing.assert_array_equal(ran(apart, one).out, out)
