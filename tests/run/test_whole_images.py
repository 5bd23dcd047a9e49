"""Networks with norms and global poolings, on an image that one patch covers, equal their definition in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.support.graph_runs import CPU, HERE, Maps, assert_equal, planned, ran, references
from tests.support.seeded_graphs import Case, weights_of
from znnpy import admissible as admissible_module
from znnpy.admissible import admissible, geometry_of, refuse_non_local
from znnpy.errors import ShapeError
from znnpy.formats.wiring import Given, network_of
from znnpy.geometry import Interval
from znnpy.graph_columns import TurnedGraph
from znnpy.graph_shapes import GlobalPoolShape, NormShape, PointShape
from znnpy.kernels.contract import Primitive
from znnpy.layers import (
    Activate,
    Add,
    Concat,
    Conv,
    Crop,
    GlobalPool,
    Multiply,
    Norm,
    Pool,
    Scale,
    Upsample,
)
from znnpy.many_intervals import of_ranges
from znnpy.network import Network
from znnpy.patches import Box
from znnpy.planner.request import Target
from znnpy.shapes import Vec3

ONES = ((1, 1, 1), (1, 1, 1))
LEAKY = Activate("leaky_relu", (0.01,))


def same(out: int, stride: Vec3 = (1, 1, 1)) -> Conv:
    return Conv((3, 3, 3), out, stride=stride, padding=ONES)


def block(name: str, out: int, norm: Norm, stride: Vec3 = (1, 1, 1)) -> list[Given]:
    """Return what nnU-Net repeats: a convolution, a norm with its factors, a function."""
    return [
        Given(same(out, stride), f"{name}.conv"),
        Given(norm, f"{name}.norm"),
        Given(Scale(), f"{name}.scale"),
        Given(LEAKY, f"{name}.end"),
    ]


INSTANCE = Norm("instance_norm")
UNET = [
    *block("top", 4, INSTANCE),
    *block("low", 6, Norm("group_norm", groups=3), (1, 2, 2)),
    *block("middle", 6, INSTANCE),
    Given(Upsample((1, 2, 2)), "up"),
    Given(Concat(), "joined", ("top.end", "up")),
    *block("last", 3, Norm("layer_norm", 1e-3)),
]
EXCITED = [  # a squeeze-and-excitation block, with a maximum beside the mean
    *block("first", 4, INSTANCE, (1, 2, 2)),
    Given(GlobalPool(), "mean"),
    Given(Conv((1, 1, 1), 2, "relu"), "squeeze"),
    Given(Conv((1, 1, 1), 4), "excite"),
    Given(GlobalPool("max"), "largest", ("first.end",)),
    Given(Add("sigmoid"), "gate", ("largest", "excite")),
    Given(Multiply(), "scaled", ("gate", "first.end")),
    Given(Add("relu"), "sum", ("scaled", "excite")),
]
PYRAMID = [  # image pooling as in DeepLab
    Given(same(3), "features"),
    Given(GlobalPool(), "pooled"),
    Given(Conv((1, 1, 1), 2, "relu"), "context"),
    Given(Upsample(like="features", how="linear"), "spread"),
    Given(Concat(), "joined", ("features", "spread")),
    Given(Conv((1, 1, 1), 2), "head"),
]
CROPPED = [  # a part of what norms give is needed, or read
    Given(same(3), "conv"),
    Given(Norm("instance_norm", affine=True, activation="relu"), "norm"),
    Given(Crop((1, 0, 2), (0, 1, 1)), "crop"),
    Given(Norm("layer_norm"), "again"),
    Given(GlobalPool("max"), "pooled"),
    Given(Multiply(), "gated", ("again", "pooled")),
    Given(Crop((0, 2, 1), (1, 1, 0)), "cut"),
    Given(Conv((1, 1, 1), 2, stride=(1, 2, 2)), "head"),
]
ADDED = [  # a convolution that may not add one voxel itself, and factors that are not merged with those of a norm
    Given(same(4), "first"),
    Given(Norm("group_norm", groups=2, affine=True), "norm"),
    Given(Scale("tanh"), "scale"),
    Given(GlobalPool(), "mean"),
    Given(same(4), "wide", ("scale",)),
    Given(Add(), "sum", ("wide", "mean")),
]
POOLED = [Given(Conv((3, 3, 3), 2), "conv"), Given(GlobalPool(), "pooled"), Given(Conv((1, 1, 1), 3), "answer")]
NETWORKS = {"unet": UNET, "excited": EXCITED, "pyramid": PYRAMID, "cropped": CROPPED, "added": ADDED, "pooled": POOLED}


@pytest.fixture
def whole_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans be made for networks that are computed on whole images."""

    def refuse(network: Network) -> None:
        refuse_non_local(replace(network, asked_meaning="windows"))

    monkeypatch.setattr(admissible_module, "refuse_non_local", refuse)
    TurnedGraph.of.cache_clear()


def case_of(layers: list[Given], size: Vec3, output: list[str] | None = None) -> Case:
    network = replace(network_of("given", 1, layers, None, output), asked_meaning="whole")
    volume = np.random.default_rng(3).standard_normal((1, *size)).astype(np.float32)
    return Case(3, network, weights_of(network, 3), volume)


def in_one_patch(one: Case, table: Sequence[Primitive] = CPU, target: Target = HERE) -> list[Maps]:
    """Return the outputs of a session with one patch, (maps, z, y, x), computed with some primitives."""
    region, *others = (Box((0, 0, 0), one.geometry.size(tensor)) for tensor in one.network.outputs)
    periods = TurnedGraph.of(one.network, one.size, 0, "fp32").periods
    plan = planned(one.network, one.size, region, periods, table=table, others=tuple(others), target=target)
    assert len(list(plan.graph_cover(one.network))) == 1
    assert plan.precision == target.precision
    return [*ran(plan, one).outs]


@pytest.mark.usefixtures("whole_images")
@pytest.mark.parametrize("size", [(7, 12, 10), (8, 16, 6), (5, 8, 8)])
@pytest.mark.parametrize("name", NETWORKS)
def test_one_patch_equals_the_definition(name: str, size: Vec3) -> None:
    one = case_of(NETWORKS[name], size)
    for found, exact in zip(in_one_patch(one), references(one), strict=True):
        assert_equal(found, exact, f"{name} {size}")


@pytest.mark.usefixtures("whole_images")
@pytest.mark.parametrize("name", ["excited", "cropped"])
def test_numpy_suffices(name: str) -> None:
    one = case_of(NETWORKS[name], (7, 12, 10))
    table = [primitive for primitive in CPU if not primitive.name.endswith("lanes")]
    for found, exact in zip(in_one_patch(one, table), references(one), strict=True):
        assert_equal(found, exact, name)


@pytest.mark.usefixtures("whole_images")
def test_bfloat16_is_as_near_as_its_rounding() -> None:
    target = replace(HERE, precision="bf16")
    for name in ("unet", "excited"):
        one = case_of(NETWORKS[name], (7, 12, 10))
        for found, exact in zip(in_one_patch(one, target=target), references(one), strict=True):
            assert_equal(found, exact, name, close=0.03)


@pytest.mark.usefixtures("whole_images")
def test_outputs_may_be_of_one_voxel_and_of_many() -> None:
    one = case_of(EXCITED, (6, 8, 10), ["sum", "gate"])
    found, exact = in_one_patch(one), references(one)
    assert [array.shape for array in found] == [(4, 6, 4, 5), (4, 1, 1, 1)]
    for mine, its in zip(found, exact, strict=True):
        assert_equal(mine, its, "two outputs")


def test_norm_factors_and_function_are_one_operation() -> None:
    network = network_of("given", 1, UNET)
    graph = TurnedGraph.of(network, (8, 16, 16), 0)
    region = [graph.geometry.axes[axis].regions([*graph.wanted(axis, 0, 100)]) for axis in range(3)]
    shapes = [
        graph.shape_of(one, (region[0][one.tensor], region[1][one.tensor], region[2][one.tensor]))
        for one in graph.operations
    ]
    norms = [shape for shape in shapes if isinstance(shape, NormShape)]
    assert norms == [
        NormShape(4, (8, 16, 16), 4, 1e-5, True, "leaky_relu", (0.01,)),
        NormShape(6, (8, 8, 8), 3, 1e-5, True, "leaky_relu", (0.01,)),
        NormShape(6, (8, 8, 8), 6, 1e-5, True, "leaky_relu", (0.01,)),
        NormShape(3, (8, 16, 16), 1, 1e-3, True, "leaky_relu", (0.01,)),
    ]
    assert not any(isinstance(shape, PointShape) and shape.how in ("scale", "function") for shape in shapes)


def test_one_voxel_counts_for_all_without_a_copy() -> None:
    network = network_of("given", 1, EXCITED)
    graph = TurnedGraph.of(network, (6, 8, 10), 0)
    region = [graph.geometry.axes[axis].regions([*graph.wanted(axis, 0, 100)]) for axis in range(3)]
    shapes = [
        graph.shape_of(one, (region[0][one.tensor], region[1][one.tensor], region[2][one.tensor]))
        for one in graph.operations
    ]
    assert GlobalPoolShape(4, (6, 4, 5), "max") in shapes
    assert PointShape("multiply", (4, 4), (6, 4, 5), single=(0,)) in shapes
    assert PointShape("add", (4, 4), (6, 4, 5), "relu", single=(1,)) in shapes
    scaled = next(shape for shape in shapes if isinstance(shape, PointShape) and shape.how == "multiply")
    assert scaled.in_bytes == 4 * (4 + 4 * 6 * 4 * 5)


def test_every_voxel_needs_the_whole_image() -> None:
    network = network_of("given", 1, [*UNET, Given(Crop((2, 2, 2), (3, 3, 3)), "cut")])
    geometry = admissible(network, (12, 16, 16))
    for axis, size in zip(geometry.axes, (12, 16, 16), strict=True):
        regions = axis.regions([Interval(1, 2)])
        many = of_ranges(axis, [[Interval(1, 2)], [Interval(3, 5)]])
        for index, layer in enumerate(network.layers):
            if isinstance(layer, Norm):
                assert regions[index + 1] == Interval(0, axis.sizes[index + 1]), "it is computed at once"
        assert regions[0] == Interval(0, size)
        assert (many.lo[:, 0].tolist(), many.hi[:, 0].tolist()) == tuple(map(list, zip(*regions, strict=True)))


def test_networks_over_volumes_refuse_them_still() -> None:
    for layers, node in ((UNET, "top.norm"), (EXCITED, "first.norm"), (POOLED, "pooled")):
        network = replace(network_of("given", 1, layers), asked_meaning="whole")
        for refused in (admissible, geometry_of):
            with pytest.raises(ShapeError, match=f"every voxel of node {node} .* depends on the whole image"):
                refused(network, (8, 16, 16))
        with pytest.raises(ShapeError, match="depends on the whole image"):
            TurnedGraph.of(network, (8, 16, 16), 0)


def test_aligned_corners_are_refused_for_whole_images_too() -> None:
    layers = [Given(Pool((2, 2, 2))), Given(Upsample((2, 2, 2), None, "linear", True))]
    network = replace(network_of("given", 1, layers), asked_meaning="windows")
    with pytest.raises(ShapeError, match="align_corners"):
        admissible(network, (8, 8, 8))


def test_image_of_one_voxel_joins_no_image_but_by_sums_and_products() -> None:
    layers = [Given(same(2), "a"), Given(GlobalPool(), "p"), Given(Concat(), "both", ("a", "p"))]
    with pytest.raises(ShapeError, match=r"node both \(concat\) joins a of .* voxels along z with p of 1"):
        network_of("given", 1, layers)


def test_groups_must_divide_the_maps() -> None:
    with pytest.raises(ShapeError, match="has 3 groups, which do not divide the 4 maps it gets"):
        network_of("given", 1, [Given(same(4)), Given(Norm("group_norm", groups=3))])
