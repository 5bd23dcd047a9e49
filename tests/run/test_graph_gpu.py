"""Graphs on a GPU: equal to the definition on the whole volume, however the output is divided, in poisoned memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.run.test_graph_session import decoder, made, same, unet
from tests.support.emulator import EMULATED_GPU
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
from znnpy.errors import ValuesOverflowError
from znnpy.formats.wiring import Given, network_of
from znnpy.kernels.gpu.graph_gemm.phases import GraphConvPhases
from znnpy.kernels.table import TABLE
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.layers import Concat, Conv, Pool, Upsample
from znnpy.measure.gpu_layers import _layers_of_graph
from znnpy.planner.request import Target
from znnpy.run.graph_session import GraphSession
from znnpy.shapes import Precision, Vec3

if TYPE_CHECKING:
    from znnpy.kernels.contract import Variant, Work
    from znnpy.layer_shapes import LayerShape

GPU = tuple(primitive for primitive in TABLE if primitive.name.startswith("gpu."))
SEEDS = range(100)
SMALL = 4096  # bytes of peaks and of the tables of moves, which plans count with the context
CLOSE: dict[Precision, float] = {"fp32": 1e-5, "fp16": 5e-3}
pytestmark = pytest.mark.slow


def target(precision: Precision = "fp32") -> Target:
    return Target(replace(MACHINE, gpu=EMULATED_GPU), "gpu", precision=precision, mode="gpu")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("axis", range(3))
def test_columns_of_a_unet_equal_the_definition(gpu: Any, axis: int, precision: Precision) -> None:
    one = unet((17, 14, 12))
    exact = reference(one)
    for patch, column in (((2, 2, 2), 4), ((1, 1, 3), 6), ((9, 9, 9), 0)):
        plan = planned(
            one.network, one.size, whole_region(one), patch,
            axis=axis, column=column, table=GPU, target=target(precision),
        )  # fmt: skip
        found = ran(plan, one, gpu).out
        assert abs(found - exact).max() <= CLOSE[precision] * abs(exact).max()
        assert not gpu.allocated, "a session gives back what it took"


@pytest.mark.parametrize("seed", one_in(20, SEEDS))
def test_any_split_of_a_random_graph_equals_the_definition(gpu: Any, seed: int) -> None:
    one, rng = case(seed), random.Random(seed)
    exact = reference(one)
    region = some_region(one.geometry.size(one.network.outputs[0]), rng)
    plan = some_plan(one, region, rng, target=target(), table=GPU)
    found = ran(plan, one, gpu).out
    assert_equal(found, exact[(slice(None), *region.slices)], f"{plan.axis} {plan.patch_out} {region} of {one}")


@pytest.mark.parametrize("seed", one_in(10, range(20)))
def test_convolutions_repeat_the_voxels_of_upsamplings(gpu: Any, seed: int) -> None:
    rng = random.Random(seed)
    one = decoder(rng)
    exact, region = reference(one), whole_region(one)
    plan = some_plan(one, region, rng, target=target(), table=GPU)
    assert_equal(ran(plan, one, gpu).out, exact, f"{one}")


class Chosen(GraphConvPhases):
    """Phases that planning takes wherever they apply."""

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        return [one._replace(flops=0.0, nbytes=0.0) for one in super().work(shape, variant)]


@pytest.mark.parametrize("column", [0, 4])
def test_upsamplings_are_computed_by_phases(gpu: Any, column: int) -> None:
    """Steps of columns begin in the middle of repeated voxels, and at the faces of the volume."""
    one = made(
        [
            Given(same(16), "top"),
            Given(Pool((2, 2, 2)), "down"),
            Given(same(24), "bottom"),
            Given(Upsample((2, 2, 2)), "up"),
            Given(Concat(), "joined", ("top", "up")),
            Given(same(16), "decoded"),
            Given(same(16), "further"),
            Given(same(2), "last"),
        ],
        (18, 12, 10),
    )
    table = (Chosen(), *(primitive for primitive in GPU if primitive.name != Chosen().name))
    patch = (2, 2, 2) if column else (9, 3, 5)
    plan = planned(one.network, one.size, whole_region(one), patch, column=column, table=table, target=target("fp16"))
    assert [choice.primitive for choice in plan.choices].count(Chosen().name) == 1
    exact = reference(one)
    assert abs(ran(plan, one, gpu).out - exact).max() <= CLOSE["fp16"] * abs(exact).max()


def test_a_session_holds_the_planned_bytes(gpu: Any) -> None:
    one = unet((34, 28, 24))
    plan = planned(
        one.network, one.size, whole_region(one), (2, 3, 3), axis=1, column=8, table=GPU, target=target("fp16")
    )
    memory = plan.memory
    assert memory.last.device == "gpu"
    with ThreadPool(1) as pool, GraphSession(plan, one.network, one.weights, pool, device=gpu) as session:
        session.buffers(np.dtype(np.float32), np.dtype(np.float32), reads=2, writes=2)
        assert memory.last.prepared <= gpu.allocated <= memory.last.prepared + memory.staging + SMALL
    assert gpu.allocated == 0
    assert memory.vram >= memory.last.total + memory.staging


def test_overflow_names_the_node(gpu: Any) -> None:
    one = unet((17, 14, 12))
    weights = (replace(one.weights[0], bias=np.full_like(one.weights[0].bias, 1e6)), *one.weights[1:])
    plan = planned(one.network, one.size, whole_region(one), (9, 9, 9), table=GPU, target=target("fp16"))
    with pytest.raises(ValuesOverflowError, match="node top: its largest result is 1e"):
        ran(plan, replace(one, weights=weights), gpu)


def test_small_steps_may_have_scratch_that_the_largest_lacks() -> None:
    one = made([Given(same(128), "first"), Given(same(128), "second")], (66, 64, 64))
    plan = planned(one.network, one.size, whole_region(one), (64, 64, 64), table=GPU, target=target("fp16"))
    assert {choice.primitive for choice in plan.choices} & {"gpu.graph_conv.warpgroup"}
    assert any(tensor.name.endswith(".sums") for tensor in plan.stages[0].tensors)


@pytest.mark.parametrize("kernel", [(65, 65, 65), (3, 3, 3)])
def test_layers_are_timed_in_volumes_that_suit_the_network(kernel: Vec3) -> None:
    """A network that takes no volume of 64 voxels along a side is timed in larger ones."""
    network = network_of("given", 1, [Given(Conv(kernel, 2), "wide"), Given(Conv((1, 1, 1), 2), "last")], None, None)
    spans = list(_layers_of_graph(replace(network, asked_meaning="whole"), "fp32"))
    assert [len(shapes) for shapes, _ in spans] == [2 if kernel[0] > 64 else 3] * 2
