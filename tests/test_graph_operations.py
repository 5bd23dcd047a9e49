"""A convolution whose result is only added to another tensor, pooled or normalised, is one operation with that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from znnpy.formats.wiring import Given, network_of
from znnpy.geometry import Interval
from znnpy.graph_columns import TurnedGraph
from znnpy.graph_shapes import GraphConvShape, Normed, Pooled
from znnpy.layers import ONE, Add, AveragePool, Concat, Conv, Crop, Function, Norm, Pool, Upsample
from znnpy.planner.graph_extents import Figures
from znnpy.shapes import Vec3

CONV = Conv((3, 3, 3), 2, padding=(ONE, ONE))
VALID = Conv((3, 3, 3), 2)
SIZE: Vec3 = (8, 8, 8)


def graph_of(*given: Given, output: list[str] | None = None) -> TurnedGraph:
    return TurnedGraph.of(network_of("net", 2, given, output=output), SIZE, 0)


def computed(graph: TurnedGraph) -> list[str]:
    """Return the operations in words: what is computed of what, and what is added."""
    names = ["input", *graph.network.names]
    words = []
    for operation in graph.operations:
        one = f"{names[operation.tensor]} of {', '.join(names[read.tensor] for read in operation.reads)}"
        if operation.addend is not None:
            one += f" + {names[operation.addend.tensor]}"
            one += "" if operation.addend.shift == (0, 0, 0) else f" at {operation.addend.shift}"
        words.append(one)
    return words


def test_a_residual_is_one_operation() -> None:
    graph = graph_of(Given(CONV, "conv"), Given(Add("elu", (0.5,)), "sum", ("conv", "input")), Given(CONV, "last"))
    assert computed(graph) == ["sum of input + input", "last of sum"]
    assert graph.stored == (0, 2, 3)
    assert graph.operations[0].sources == (0, 0)
    figures = Figures.of(graph)
    assert (figures.first.tolist(), figures.last.tolist()) == ([0, 1, 2], [1, 2, 3])


@pytest.mark.parametrize("reads", [("one", "two"), ("two", "one")])
def test_the_later_of_two_convolutions_adds_the_other(reads: tuple[str, str]) -> None:
    graph = graph_of(Given(CONV, "one"), Given(CONV, "two", ("input",)), Given(Add(), "sum", reads))
    assert computed(graph) == ["one of input", "sum of input + one"]


def test_an_addend_may_be_cropped() -> None:
    graph = graph_of(
        Given(CONV, "first"),
        Given(VALID, "conv"),
        Given(Crop((0, 1, 2), (2, 1, 0)), "crop", ("first",)),
        Given(Add(), "sum", ("crop", "conv")),
    )
    assert computed(graph) == ["first of input", "sum of first + first at (0, 1, 2)"]


def test_sums_follow_each_other() -> None:
    graph = graph_of(
        Given(CONV, "a"),
        Given(Add("relu"), "a sum", ("a", "input")),
        Given(CONV, "b"),
        Given(Add("relu"), "b sum", ("a sum", "b")),
        output=["a sum", "b sum"],
    )
    assert computed(graph) == ["a sum of input + input", "b sum of a sum + a sum"]


def test_a_convolution_does_not_wait_for_its_addend() -> None:
    """Its inputs, of which there may be many more maps, would be kept until then."""
    half = Conv((1, 1, 1), 2, stride=(2, 2, 2))
    graph = graph_of(
        Given(CONV, "skip"),
        Given(half, "down", ("input",)),
        Given(Upsample((2, 2, 2)), "up"),
        Given(Add(), "sum", ("skip", "up")),
    )
    assert computed(graph) == ["skip of input", "down of input", "up of down", "sum of skip, up"]


@pytest.mark.parametrize("function", ["relu", "elu", "softmax"])
def test_a_convolution_with_a_function_stays(function: Function) -> None:
    conv = replace(CONV, activation=function)
    assert len(graph_of(Given(conv, "conv"), Given(Add(), "sum", ("conv", "input"))).operations) == 2


POOL = Pool((2, 2, 2))


def test_a_convolution_and_the_pooling_behind_it_may_be_one_operation() -> None:
    graph = graph_of(
        Given(CONV, "conv"),
        Given(Add("relu"), "sum", ("conv", "input")),
        Given(POOL, "down"),
        Given(CONV, "low"),
        Given(Upsample((2, 2, 2)), "up"),
        Given(Concat(), "joined", ("sum", "up")),
        Given(CONV, "last"),
    )
    assert computed(graph)[:2] == ["sum of input + input", "down of sum"]
    both = replace(graph.operations[0], pool=2)
    assert graph.pairs == {0: both}
    assert (both.layers, both.tensors, both.tensor) == ((0, 2), (2, 3), 2)
    merged = (both, *graph.operations[2:])
    last = len(graph.operations)
    assert graph.spans_of(merged)[3] == (1, 2), "it is there from the convolution on"
    assert graph.spans_of(graph.operations)[3] == (2, 3)
    assert graph.spans_of(merged)[2] == (1, last - 1)


@pytest.mark.parametrize(
    "pool", [Pool((2, 2, 2), (1, 1, 1)), Pool((2, 2, 2), padding=(ONE, ONE)), Pool((3, 3, 3), ceil=True)], ids=str
)
def test_poolings_whose_windows_are_not_side_by_side_stay(pool: Pool) -> None:
    assert not graph_of(Given(CONV, "conv"), Given(pool, "down")).pairs


def test_poolings_of_other_tensors_stay() -> None:
    crop = Given(Crop((1, 0, 0), (1, 0, 0)), "crop")
    assert not graph_of(Given(CONV, "conv"), crop, Given(POOL, "down")).pairs
    skip, down = Given(CONV, "skip"), Given(POOL, "down", ("conv",))
    assert not graph_of(Given(CONV, "conv"), skip, down, output=["skip", "down"]).pairs, "not the next one"
    assert not graph_of(Given(CONV, "conv"), Given(AveragePool((2, 2, 2)), "down")).pairs
    assert not graph_of(Given(POOL, "down")).pairs


NORM = Norm("instance_norm", affine=True, activation="leaky_relu", parameters=(0.01,))


def test_a_convolution_and_the_norm_behind_it_may_be_one_operation() -> None:
    graph = graph_of(
        Given(CONV, "conv"), Given(NORM, "norm"), Given(CONV, "deep"), Given(Concat(), "last", ("norm", "deep"))
    )
    both = replace(graph.operations[0], norm=1)
    assert graph.pairs == {0: both}
    assert (both.layers, both.tensors, both.tensor, both.result) == ((0, 1), (2,), 2, 1)
    assert 1 not in graph.spans_of((both, *graph.operations[2:])), "what the convolution gives is in no memory"
    region = (Interval(0, 8),) * 3
    shape = graph.shape_of(both, region)
    assert isinstance(shape, GraphConvShape)
    maps = graph.network.maps[2]
    assert shape.normed == Normed(maps, 1e-5, True, "leaky_relu", (0.01,))
    assert shape.norm_shape == graph.shape_of(graph.operations[1], region)
    assert replace(shape, normed=None) == graph.shape_of(graph.operations[0], region)
    assert shape.weight_bytes - replace(shape, normed=None).weight_bytes == 4 * 2 * maps
    assert str(shape).endswith(f"none and norm groups {maps} affine leaky_relu")
    assert graph.computing([shape])[:2] == (both, graph.operations[2])


def test_norms_of_other_tensors_stay() -> None:
    conv, norm = Given(CONV, "conv"), Given(NORM, "norm")
    assert not graph_of(conv, norm, output=["conv", "norm"]).pairs, "an output is kept"
    assert not graph_of(conv, norm, Given(Concat(), "both", ("conv", "norm"))).pairs, "another reads it"
    assert not graph_of(Given(replace(CONV, activation="relu"), "conv"), norm).pairs, "a function is between"
    assert not graph_of(conv, Given(Add(), "sum", ("conv", "input")), norm).pairs, "an addend is between"
    assert not graph_of(Given(POOL, "down"), norm).pairs


def test_windows_of_a_region_are_whole() -> None:
    graph = graph_of(Given(CONV, "conv"), Given(Pool((1, 2, 3)), "down"))
    region = Interval(3, 7), Interval(3, 8), Interval(2, 3)
    for wanted, first, m in (
        (None, (0, 1, 1), (0, 0, 0)),
        ((Interval(4, 6), Interval(2, 4), Interval(1, 1)), (0, 1, 1), (0, 0, 0)),
    ):
        shape = graph.shape_of(graph.pairs[0], region, wanted)
        assert isinstance(shape, GraphConvShape)
        assert shape.pooled == Pooled((1, 2, 3), first, m)
    region = Interval(3, 7), Interval(3, 8), Interval(2, 7)
    shape = graph.shape_of(graph.pairs[0], region)
    assert isinstance(shape, GraphConvShape)
    assert shape.pooled == Pooled((1, 2, 3), (0, 1, 1), (4, 2, 1))
    assert shape.pooled_bytes == 4 * 2 * 4 * 2 * 1
    assert str(shape).endswith("none and its maxima 1x2x3")
    fewer = graph.shape_of(graph.pairs[0], region, (Interval(4, 6), Interval(3, 4), Interval(1, 2)))
    assert isinstance(fewer, GraphConvShape)
    assert fewer.pooled == Pooled((1, 2, 3), (1, 3, 1), (2, 1, 1))


def test_what_others_read_and_sums_of_other_inputs_stay() -> None:
    conv, sum_ = Given(CONV, "conv"), Given(Add(), "sum", ("conv", "input"))
    assert len(graph_of(conv, sum_, Given(Concat(), "joined", ("conv", "sum"))).operations) == 3
    assert len(graph_of(conv, sum_, output=["conv", "sum"]).operations) == 2
    assert len(graph_of(conv, Given(Add(), "sum", ("conv", "conv"))).operations) == 2
    assert len(graph_of(conv, Given(Add(), "sum", ("conv", "input", "input"))).operations) == 2
    one = Given(replace(CONV, out=1), "conv")
    assert len(graph_of(one, sum_).operations) == 2, "one map is added to all"
