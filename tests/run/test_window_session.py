"""Networks in windows: equal to the definition window by window, in any order and division, in poisoned memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.graph_runs import CPU, HERE, MACHINE, assert_equal
from tests.support.seeded_graphs import weights_of
from tests.support.tiers import one_in
from znnpy.errors import NoPlanError, PlanFileError, ShapeError, ValuesOverflowError, VerifyError
from znnpy.formats.wiring import Given, network_of
from znnpy.graph_columns import Area, cover_of_window
from znnpy.kernels.contract import ConvWeights, Primitive
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.kernels.whole import whole
from znnpy.layers import Activate, Concat, Conv, ConvTranspose, GlobalPool, Layer, Multiply, Norm, Pool
from znnpy.machine import Limits
from znnpy.network import Network
from znnpy.network_result import NetworkResult
from znnpy.normalisation import Normalise
from znnpy.patches import Box
from znnpy.planner.graph_plan import plan_graph, plan_of
from znnpy.planner.graph_search import GraphSearch
from znnpy.planner.plan import Plan, Sums
from znnpy.planner.request import Constraints, CostModel, PlanRequest, Target
from znnpy.planner.validate import check_plan
from znnpy.planner.window_tilings import WindowTiling, sums_bytes
from znnpy.run.sum_arrays import SumsOnCpu
from znnpy.run.window_session import WindowSession
from znnpy.run.window_sums import WindowSums
from znnpy.shapes import Vec3
from znnpy.trained import TrainedNetwork
from znnpy.volume.array import ArrayVolume
from znnpy.volume.source import Source
from znnpy.window_cover import WindowCover
from znnpy.window_voxels import WindowVoxels
from znnpy.windows.definition import blended
from znnpy.windows.settings import Windows

POISON = 0xFF  # four of these are a NaN, and so are two
ONES = ((1, 1, 1), (1, 1, 1))
SAME = {"padding": ONES}

NETWORKS: dict[str, list[tuple[str, Layer, tuple[str, ...]]]] = {
    "U-Net": [
        ("enter", Conv((3, 3, 3), 4, "relu", padding=ONES), ("input",)),
        ("down", Pool((1, 2, 2)), ("enter",)),
        ("deep", Conv((3, 3, 3), 6, "relu", padding=ONES), ("down",)),
        ("up", ConvTranspose((1, 2, 2), 4, (1, 2, 2)), ("deep",)),
        ("join", Concat(), ("enter", "up")),
        ("leave", Conv((3, 3, 3), 3, padding=ONES), ("join",)),
    ],
    "norms": [
        ("enter", Conv((3, 3, 3), 4, padding=ONES), ("input",)),
        ("norm", Norm("instance_norm", affine=True), ("enter",)),
        ("bend", Activate("leaky_relu", (0.01,)), ("norm",)),
        ("down", Conv((3, 3, 3), 6, stride=(1, 2, 2), padding=ONES), ("bend",)),
        ("group", Norm("group_norm", groups=3), ("down",)),
        ("squeeze", GlobalPool(), ("group",)),
        ("gate", Conv((1, 1, 1), 6, "sigmoid"), ("squeeze",)),
        ("gated", Multiply(), ("group", "gate")),
        ("up", ConvTranspose((1, 2, 2), 4, (1, 2, 2)), ("gated",)),
        ("join", Concat(), ("bend", "up")),
        ("leave", Conv((1, 1, 1), 3), ("join",)),
    ],
}
VOLUME = (23, 20, 25)


def network(name: str, windows: Windows, result: NetworkResult | None = None) -> Network:
    given = [Given(layer, node, reads) for node, layer, reads in NETWORKS[name]]
    made = network_of("net", 1, given, Normalise((100.0,), (50.0,)), None, None)
    return replace(made, asked_meaning="windows", windows=windows, result=result or NetworkResult())


def planned(
    net: Network,
    volume: Vec3,
    axis: int,
    sums: Sums,
    region: Box | None = None,
    ram: int = 2**34,
    *,
    target: Target = HERE,
    table: Sequence[Primitive] = CPU,
    only: tuple[str, ...] = (),
) -> Plan:
    """Return the plan with this order of windows and these sums."""
    area = Area(volume, region or Box((0, 0, 0), volume))
    limits = Limits(ram, 2, 2**34 if target.device == "gpu" else None)
    request = PlanRequest(net, area.region.size, limits, target, constraints=Constraints(only=only), area=area)
    search = GraphSearch(request, CostModel(table=tuple(table)).options(request), area)
    assert net.windows is not None
    cover = WindowCover(net.windows, volume, area.region, axis, sums.parts)
    found = search.solve(WindowTiling(cover_of_window(net, axis, target.device_precision), cover, sums, target.device))
    assert found is not None
    plan = plan_of(search, found)
    check_plan(plan, net, target.machine, table)
    return plan


def ran(
    plan: Plan,
    net: Network,
    weights: tuple[ConvWeights, ...],
    volume: npt.NDArray[Any],
    anew: tuple[int, ...] = (0,),
    device: Any = None,
) -> npt.NDArray[np.float32]:
    """Return what a session writes in memory that is full of NaN; the rows in `anew` forget what was before.

    device  of a plan for a GPU: emulated, so that its arrays are numpy's
    """
    assert plan.area is not None
    source = Source(ArrayVolume(volume), roi=plan.area.region, border="valid", network=net, allow_nan=False)
    dtype = np.dtype(np.uint8 if net.result.is_integer else np.float32)
    out = np.zeros((net.output_channels, *plan.area.region.size), dtype)
    written, cover = np.zeros(plan.area.region.size, np.int32), plan.window_cover(net)
    with ThreadPool(2) as pool, WindowSession(plan, net, weights, pool, device=device) as session:
        assert session._sums is not None
        for array in (session._sums._kept, session._sums._row):
            array.view(np.uint8)[...] = POISON
        (raw_buffer, _), (out_buffer, _) = session.buffers(source.dtype, dtype, reads=2, writes=2)
        for index in range(len(cover)):
            fresh = index in anew or not cover.goes_on(index)
            column = cover.begun_at(index) if fresh else cover[index]
            for number, step in enumerate(column.steps):
                assert step.size is not None
                raw = raw_buffer.reshape(-1)[: int(np.prod(step.size))].reshape(1, *step.size)
                source.read(step.read, raw)
                out_buffer.view(np.uint8)[...] = POISON
                session.run(raw, out_buffer if step.writes else None, begins=fresh and number == 0, step=step.step)
                if step.writes:
                    given = out_buffer[: net.output_channels * step.out.voxels]
                    out[(slice(None), *step.write.slices)] = given.reshape(net.output_channels, *step.out.size)
                    written[step.write.slices] += 1
    assert (written == 1).all()
    return out


def exact(net: Network, weights: tuple[ConvWeights, ...], volume: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the blended maps by definition."""
    assert net.windows is not None
    assert net.normalise is not None
    image = ((volume.astype(np.float64) - net.normalise.mean[0]) / net.normalise.std[0])[None]

    def computed(window: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        (found,) = whole(net, weights, window.transpose(1, 2, 3, 0))
        return found.transpose(3, 0, 1, 2)

    return blended(image, computed, net.windows)


@cache
def defined(name: str, windows: Windows, size: Vec3) -> npt.NDArray[np.float64]:
    """Return the blended maps of `volume_of(size)` with the weights of seed 7, which several tests compare with."""
    net = network(name, windows)
    return exact(net, weights_of(net, 7), volume_of(size))


def volume_of(size: Vec3, seed: int = 1) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


CASES = [
    Windows((8, 8, 8)),
    Windows((8, 10, 12), (0.25, 0.25, 0.25), "constant", mirror=(0, 2)),
    Windows((32, 8, 8), (0.75, 0.5, 0.0), mirror=(0, 1, 2)),  # higher than the volume
    Windows((5, 20, 26), (0.8, 0.5, 0.5), rule="nnunet"),
    Windows((7, 8, 8), (0.5, 0.5, 0.5), "bump", mirror=(1,)),
]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("axis", [0, pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("windows", one_in(2, CASES), ids=lambda windows: f"{windows.size}-{windows.rule}")
def test_equal_to_the_definition(name: str, windows: Windows, axis: int) -> None:
    net = network(name, windows)
    weights, volume = weights_of(net, 7), volume_of(VOLUME)
    plan = planned(net, VOLUME, axis, Sums())
    wanted = defined(name, windows, VOLUME)
    assert_equal(ran(plan, net, weights, volume), wanted, windows)
    most = WindowCover(windows, VOLUME, Box((0, 0, 0), VOLUME), axis).most_parts
    divided = planned(net, VOLUME, axis, Sums(parts=min(2, most)))
    assert_equal(ran(divided, net, weights, volume, anew=(0, 1, 2)), wanted, windows)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_region_gets_the_voxels_of_the_whole(axis: int) -> None:
    net = network("U-Net", Windows((8, 8, 8), mirror=(0,)))
    weights, volume, region = weights_of(net, 3), volume_of(VOLUME), Box((7, 1, 11), (20, 18, 13))
    plan = planned(net, VOLUME, axis, Sums(), region)
    assert_equal(ran(plan, net, weights, volume), exact(net, weights, volume)[(slice(None), *region.slices)], region)


@pytest.mark.parametrize("size", [(1, 1, 1), (8, 8, 8), (3, 40, 2)])
def test_volumes_smaller_than_a_window(size: Vec3) -> None:
    net = network("U-Net", Windows((8, 8, 8)))
    weights, volume = weights_of(net, 3), volume_of(size)
    plan = planned(net, size, 1, Sums())
    assert_equal(ran(plan, net, weights, volume), exact(net, weights, volume), size)


def test_sums_in_half_precision_are_as_near_as_they_say() -> None:
    """Sums that go through float16 between rows lose at most one part in 500."""
    net = network("U-Net", Windows((8, 8, 8), (0.75, 0.5, 0.5)))
    weights, volume = weights_of(net, 3), volume_of(VOLUME)
    found = ran(planned(net, VOLUME, 0, Sums("float16")), net, weights, volume)
    wanted = exact(net, weights, volume)
    assert_equal(found, wanted, "float16", close=2e-3)
    assert np.abs(found - wanted).max() > 1e-6 * np.abs(wanted).max()  # they were in float16 indeed


@pytest.mark.parametrize("windows", [Windows((8, 8, 8), rule="nnunet"), Windows((8, 8, 8), blend="bump")])
def test_weights_that_differ_widely_are_not_summed_up_in_half_precision(windows: Windows) -> None:
    """Such a plan is refused, and none is searched for: products with these weights leave the range of float16."""
    net = network("U-Net", windows)
    with pytest.raises(PlanFileError, match="does not hold weights like these"):
        planned(net, VOLUME, 0, Sums("float16"))
    area = Area((200, 400, 400), Box((0, 0, 0), (200, 400, 400)))
    request = PlanRequest(net, area.region.size, Limits(2**27, 2), HERE, area=area, baseline=2**26)
    try:
        plan = plan_graph(request, CostModel(table=CPU)).main
    except NoPlanError:
        return
    assert plan.sums is not None
    assert plan.sums.dtype == "float32"


def test_sums_beyond_half_precision_are_an_error() -> None:
    cover = WindowCover(Windows((8, 8, 8), blend="constant"), VOLUME, Box((0, 0, 0), VOLUME), 0)
    with ThreadPool(2) as pool:
        sums = WindowSums(cover, Sums("float16"), 1, SumsOnCpu(network("U-Net", Windows((8, 8, 8))), pool))
        sums.begin(0, (0, 0, 0))
        sums.add(np.full((8, 8, 8, 1), 1e6, np.float32), np.ones((8, 8, 8), np.float32), 1.0, 0, counts=True)
        with pytest.raises(ValuesOverflowError, match="exceed float16"):
            sums.begin(0, (1, 0, 0))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "labels", "above"])
def test_results(kind: Any) -> None:
    result = NetworkResult(kind, (0.1, -0.2, 0.0) if kind == "above" else ())
    net = network("U-Net", Windows((8, 8, 8)), result)
    weights, volume = weights_of(net, 5), volume_of(VOLUME)
    maps = exact(net, weights, volume)
    found = ran(planned(net, VOLUME, 0, Sums()), net, weights, volume)
    if kind == "softmax":
        assert_equal(found, np.exp(maps) / np.exp(maps).sum(axis=0), kind)
    elif kind == "sigmoid":
        assert_equal(found, 1 / (1 + np.exp(-maps)), kind)
    elif kind == "labels":
        assert found.shape == (1, *VOLUME)
        assert found.dtype == np.uint8
        assert (found[0] != maps.argmax(axis=0)).mean() < 1e-3
    else:
        assert (found != (maps > np.array([0.1, -0.2, 0.0])[:, None, None, None])).mean() < 1e-3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"area": Area((2**40,) * 3, Box((0, 0, 0), (2**40,) * 3))}, r"more than the 10,000,000 that can be planned"),
        ({"sums": Sums(parts=10**12)}, "divides the output into 1000000000000 parts, and its windows allow 4"),
        (
            {"area": Area((23, 20, 25), Box((0, 30, 0), (23, 50, 25)))},
            "voxels 0x30x0 to 23x50x25 of a volume of 23x20x25",
        ),
        ({"area": Area((23, 20, 25), Box((0, 9, 0), (23, 3, 25)))}, "voxels 0x9x0 to 23x3x25 of a volume of 23x20x25"),
    ],
)
def test_plans_of_windows_that_no_search_makes_are_refused(changes: dict[str, Any], words: str) -> None:
    net = network("U-Net", CASES[0])
    plan = planned(net, VOLUME, 0, Sums())
    tracemalloc.start()
    try:
        with pytest.raises(PlanFileError, match=words) as caught:
            check_plan(replace(plan, **changes), net, MACHINE, CPU)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)


def test_voxels_of_more_windows_than_are_planned_are_not_recomputed() -> None:
    """The windows that an output states need not be those of a run, nor need they be few."""
    net = network("U-Net", Windows((1, 1, 1), (0.0, 0.0, 0.0)))
    volume = ArrayVolume(np.broadcast_to(np.zeros((), np.uint8), (2**20,) * 3))
    voxels = WindowVoxels(TrainedNetwork(net, weights_of(net, 7)), volume, (5, 0, 0))
    tracemalloc.start()
    try:
        with pytest.raises(
            VerifyError, match="no run computes the windows that are stated: windows of 1x1x1"
        ) as caught:
            next(voxels.drawn((2**19, 2**20, 2**20), 10, seed=1))
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)


def test_the_plan_counts_the_sums() -> None:
    net = network("U-Net", Windows((8, 8, 8)))
    plan = planned(net, VOLUME, 0, Sums())
    assert plan.memory.last.carries == sums_bytes(plan.window_cover(net), Sums(), 3)
    assert plan.patch_in == plan.patch_out == (8, 8, 8)


def test_windows_that_the_network_does_not_take_are_refused() -> None:
    with pytest.raises(ShapeError, match="next larger one is 8x8x8"):
        planned(network("U-Net", Windows((8, 7, 8))), VOLUME, 0, Sums())
