"""Graphs in precision bf16: tensors, kept planes, input and output are bfloat16, however the output is divided."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.run.test_graph_session import SEEDS, unet
from tests.support.bf16_twins import compiler, twin
from tests.support.graph_runs import (
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
from znnpy.kernels.cpu import bf16_steps
from znnpy.machine import AMX, AVX512_BF16
from znnpy.planner.graph_tilings import GraphTiling
from znnpy.planner.request import Target

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
@pytest.mark.parametrize("seed", one_in(10, SEEDS[:200]))
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
