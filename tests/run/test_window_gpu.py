"""Networks in windows on a GPU: equal to the definition window by window, with the operations recorded and not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.run.test_graph_gpu import CLOSE, GPU, target
from tests.run.test_window_session import NETWORKS, defined, exact, network, planned, ran, volume_of
from tests.support.graph_runs import assert_equal
from tests.support.seeded_graphs import weights_of
from tests.support.tiers import one_in
from znnpy.errors import ValuesOverflowError
from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels.gpu.graph_gemm.normed import GraphConvNormed
from znnpy.measure.gpu_layers import _layers_of_graph
from znnpy.network_result import NetworkResult
from znnpy.patches import Box
from znnpy.planner.plan import Sums
from znnpy.shapes import Precision, Vec3
from znnpy.window_cover import WindowCover
from znnpy.windows.settings import Windows

if TYPE_CHECKING:
    from znnpy.kernels.contract import Variant, Work
    from znnpy.layer_shapes import LayerShape

pytestmark = pytest.mark.slow
VOLUME = (15, 13, 17)
CASES = [
    Windows((10, 8, 10)),
    Windows((8, 12, 8), (0.25, 0.25, 0.25), "constant", mirror=(0, 2)),
    Windows((20, 8, 8), (0.75, 0.5, 0.0), mirror=(1,)),  # higher than the volume
    Windows((10, 12, 16), (0.5, 0.5, 0.5), rule="nnunet"),
]


@pytest.mark.parametrize("precision", CLOSE)
@pytest.mark.parametrize(
    ("name", "windows", "axis"),
    one_in(7, [(name, windows, axis) for name in NETWORKS for windows in CASES for axis in range(3)]),
    ids=str,
)
def test_equal_to_the_definition(gpu: Any, name: str, windows: Windows, axis: int, precision: Precision) -> None:
    net = network(name, windows)
    weights, volume = weights_of(net, 7), volume_of(VOLUME)
    wanted = defined(name, windows, VOLUME)
    most = WindowCover(windows, VOLUME, Box((0, 0, 0), VOLUME), axis).most_parts
    for sums, anew in ((Sums(), (0,)), (Sums(parts=min(2, most)), (0, 1))):
        plan = planned(net, VOLUME, axis, sums, target=target(precision), table=GPU)
        found = ran(plan, net, weights, volume, anew, gpu)
        assert_equal(found, wanted, windows, close=CLOSE[precision])
    assert not gpu.allocated, "a session gives back what it took"


class Chosen(GraphConvNormed):
    """Convolutions in one with their norms, which planning takes wherever they apply."""

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        return [one._replace(flops=0.0, nbytes=0.0) for one in super().work(shape, variant)]


@pytest.mark.parametrize("axis", [0, pytest.param(2, marks=pytest.mark.long)])
def test_norms_are_computed_with_their_convolutions(gpu: Any, axis: int) -> None:
    windows = CASES[1]
    net = network("norms", windows)
    weights, volume = weights_of(net, 7), volume_of(VOLUME)
    separate = tuple(primitive for primitive in GPU if primitive.name != Chosen().name)
    table = Chosen(), *separate
    plan, apart = (planned(net, VOLUME, axis, Sums(), target=target("fp16"), table=one) for one in (table, separate))
    assert [choice.primitive for choice in plan.choices].count(Chosen().name) == 2
    assert plan.memory.last.arena <= apart.memory.last.arena
    assert_equal(ran(plan, net, weights, volume, (0,), gpu), exact(net, weights, volume), windows, close=CLOSE["fp16"])
    assert not gpu.allocated, "a session gives back what it took"
    timed = [shape for (shape,), _ in _layers_of_graph(net, "fp16") if isinstance(shape, GraphConvShape)]
    assert sum(shape.normed is not None for shape in timed) == 2, "a card is asked how long they take"
    large = (replace(weights[0], bias=np.full_like(weights[0].bias, 1e6)), *weights[1:])
    with pytest.raises(ValuesOverflowError, match="node enter with bend: a result became not a number in float16"):
        ran(plan, net, large, volume, device=gpu)


def test_norms_are_computed_with_their_convolutions_if_that_is_asked_for() -> None:
    net = network("norms", CASES[1])
    names = ("gpu.graph_conv.normed",)
    plan = planned(net, VOLUME, 0, Sums(), target=target("fp16"), table=GPU, only=names)
    assert [choice.primitive for choice in plan.choices].count("gpu.graph_conv.normed") == 2
    plan = planned(net, VOLUME, 0, Sums(), target=target("fp16"), table=GPU, only=(*names, "gpu.graph_conv.direct"))
    assert "gpu.graph_conv.normed" not in [choice.primitive for choice in plan.choices], "it would replace the other"


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "labels", "above"])
def test_results(gpu: Any, kind: Any) -> None:
    result = NetworkResult(kind, (0.1, -0.2, 0.0) if kind == "above" else ())
    net = network("U-Net", Windows((10, 8, 10)), result)
    weights, volume = weights_of(net, 5), volume_of(VOLUME)
    maps = exact(net, weights, volume)
    found = ran(planned(net, VOLUME, 0, Sums(), target=target(), table=GPU), net, weights, volume, device=gpu)
    if kind == "softmax":
        assert_equal(found, np.exp(maps) / np.exp(maps).sum(axis=0), kind)
    elif kind == "sigmoid":
        assert_equal(found, 1 / (1 + np.exp(-maps)), kind)
    elif kind == "labels":
        assert (found[0] != maps.argmax(axis=0)).mean() < 1e-3
    else:
        assert (found != (maps > np.array([0.1, -0.2, 0.0])[:, None, None, None])).mean() < 1e-3


@pytest.mark.parametrize("size", [(1, 1, 1), (3, 40, 2)])
def test_volumes_smaller_than_a_window(gpu: Any, size: Vec3) -> None:
    net = network("U-Net", Windows((8, 8, 8), mirror=(0, 1)))
    weights, volume = weights_of(net, 3), volume_of(size)
    found = ran(planned(net, size, 1, Sums(), target=target(), table=GPU), net, weights, volume, device=gpu)
    assert_equal(found, exact(net, weights, volume), size)


@pytest.mark.parametrize("apart", [False, True])
def test_ensembles_are_averaged(gpu: Any, apart: bool) -> None:
    result = NetworkResult("softmax" if apart else "maps", apart=apart)
    net = network("U-Net", Windows((10, 8, 10)), result)
    volume, each = volume_of(VOLUME), [weights_of(net, seed) for seed in (2, 3, 4)]
    maps = [exact(net, weights, volume) for weights in each]
    both = replace(net, members=3)
    weights = tuple(one for some in each for one in some)
    found = ran(planned(both, VOLUME, 0, Sums(), target=target(), table=GPU), both, weights, volume, device=gpu)
    wanted = [np.exp(one) / np.exp(one).sum(axis=0) for one in maps] if apart else maps
    assert_equal(found, np.mean(wanted, axis=0), apart)


def test_sums_beyond_half_precision_are_an_error(gpu: Any) -> None:
    net = network("U-Net", Windows((10, 8, 10), blend="constant"))
    volume = volume_of(VOLUME)
    weights = list(weights_of(net, 5))
    weights[-1] = replace(weights[-1], bias=np.full_like(weights[-1].bias, 60000))
    plan = planned(net, VOLUME, 0, Sums("float16"), target=target(), table=GPU)
    with pytest.raises(
        ValuesOverflowError, match=r"exceed float16, in which a row keeps them for the next one .* more memory .`vram`."
    ):
        ran(plan, net, tuple(weights), volume, device=gpu)


def test_overflow_names_the_node(gpu: Any) -> None:
    net = network("U-Net", Windows((10, 8, 10)))
    weights = list(weights_of(net, 5))
    weights[0] = replace(weights[0], bias=np.full_like(weights[0].bias, 1e6))
    plan = planned(net, VOLUME, 0, Sums(), target=target("fp16"), table=GPU)
    with pytest.raises(ValuesOverflowError, match="node enter: its largest result is 1e"):
        ran(plan, net, tuple(weights), volume_of(VOLUME), device=gpu)


def test_a_region_gets_the_voxels_of_the_whole(gpu: Any) -> None:
    net = network("U-Net", Windows((8, 8, 8), mirror=(0,)))
    weights, volume, region = weights_of(net, 3), volume_of(VOLUME), Box((4, 1, 7), (13, 12, 9))
    plan = planned(net, VOLUME, 2, Sums(), region, target=target(), table=GPU)
    found = ran(plan, net, weights, volume, device=gpu)
    assert_equal(found, exact(net, weights, volume)[(slice(None), *region.slices)], region)
