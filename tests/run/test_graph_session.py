"""Graphs in patches and columns: equal to the definition on the whole volume, however the output is divided."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from tests.support.graph_runs import (
    CPU,
    MACHINE,
    assert_equal,
    needed_at_once,
    planned,
    ran,
    reference,
    references,
    some_plan,
    some_region,
    whole_region,
)
from tests.support.seeded_graphs import Case, case, layers_in, weights_of
from tests.support.tiers import one_in
from znnpy import graph_operations
from znnpy.admissible import lattices_of, period_of
from znnpy.formats.wiring import Given, network_of
from znnpy.graph_columns import GraphCover, TurnedGraph
from znnpy.kernels.cpu.native.library import why_not
from znnpy.layers import (
    JOINS,
    Activate,
    Add,
    AveragePool,
    Concat,
    Conv,
    ConvTranspose,
    Crop,
    Layer,
    MaxFilter,
    Maxout,
    Pad,
    Pool,
    Scale,
    Upsample,
)
from znnpy.patches import Box
from znnpy.planner.graph_tilings import GraphTiling
from znnpy.shapes import Vec3

ONES = ((1, 1, 1), (1, 1, 1))
SEEDS = range(200)
SPLITS = 3  # of each case


def same(out: int = 3, how: str = "zeros") -> Conv:
    return Conv((3, 3, 3), out, "relu", padding=ONES, padding_mode=how)  # type: ignore[arg-type]


def up(count: int, step: int) -> int:
    """Return the next multiple of a step."""
    return -(-count // step) * step


def made(layers: list[Given], size: Vec3, seed: int = 5, output: list[str] | None = None) -> Case:
    """Return a case of a network that is given."""
    network = network_of("given", 1, layers, None, output)
    volume = np.random.default_rng(seed).standard_normal((1, *size)).astype(np.float32)
    return Case(seed, network, weights_of(network, seed), volume)


def unet(size: Vec3) -> Case:
    return made(
        [
            Given(same(), "top"),
            Given(Pool((2, 2, 2)), "down"),
            Given(same(4), "middle"),
            Given(Pool((2, 2, 1)), "down2"),
            Given(same(4), "bottom"),
            Given(Upsample((2, 2, 1)), "up2"),
            Given(Concat(), "joined2", ("middle", "up2")),
            Given(same(3), "after2"),
            Given(Upsample((2, 2, 2)), "up"),
            Given(Concat(), "joined", ("top", "up")),
            Given(same(2), "last"),
        ],
        size,
    )


@pytest.mark.parametrize("seed", one_in(10, SEEDS))
def test_any_split_of_a_random_graph_equals_the_definition(seed: int) -> None:
    one, rng = case(seed), random.Random(seed)
    exact = reference(one)
    for _ in range(SPLITS):
        region = some_region(one.geometry.size(one.network.outputs[0]), rng)
        plan = some_plan(one, region, rng)
        found = ran(plan, one).out
        what = f"{plan.axis} {plan.patch_out} {region} of {one}"
        assert_equal(found, exact[(slice(None), *region.slices)], what, np.abs(exact).max())


def decoder(rng: random.Random) -> Case:
    """Return a graph in which convolutions read upsamplings, alone or beside skips, with paddings on any side."""
    factor = rng.choice([(2, 2, 2), (1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 1, 2)])
    kernel = tuple(rng.choice([3, 5]) if by == 2 else rng.choice([1, 2, 3]) for by in factor)
    k: Vec3 = (kernel[0], kernel[1], kernel[2])
    before, behind = (tuple(rng.randint(0, extent - 1) for extent in k) for _ in range(2))
    after = Conv(k, rng.choice([3, 17]), padding=(before, behind))  # type: ignore[arg-type]
    layers = [
        Given(same(rng.choice([2, 16])), "skip"),
        Given(Pool(factor), "down"),
        Given(same(rng.choice([1, 18])), "low"),
    ]
    layers.append(Given(Upsample(factor), "up"))
    read = "up"
    if rng.random() < 0.7:
        layers.append(Given(Concat(), "joined", rng.choice([("skip", "up"), ("up", "skip"), ("skip", "up", "skip")])))
        read = "joined"
    if rng.random() < 0.5:
        layers.append(Given(replace(after, activation="tanh"), "addend", ("up",)))
        layers += [Given(after, "after", (read,)), Given(Add("elu"), "sum", ("after", "addend"))]
    else:
        layers.append(Given(replace(after, activation="relu"), "after", (read,)))
    if rng.random() < 0.5:
        layers.append(Given(Conv((2, 1, 3), 2), "valid"))
    size: Vec3 = (rng.randint(8, 20), rng.randint(8, 20), rng.randint(8, 20))
    return made(layers, size, rng.randrange(100))


@pytest.mark.parametrize("seed", one_in(6, range(120)))
def test_convolutions_repeat_the_voxels_of_upsamplings(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_operations, "UPSAMPLED_MAPS", 1)
    rng = random.Random(seed)
    one = decoder(rng)
    exact = reference(one)
    for _ in range(SPLITS):
        region = some_region(one.geometry.size(one.network.outputs[0]), rng)
        plan = some_plan(one, region, rng)
        graph = TurnedGraph.of(one.network, one.size, plan.axis)
        assert any(read.factor != (1, 1, 1) for operation in graph.operations for read in operation.reads)
        found = ran(plan, one).out
        what = f"{plan.axis} {plan.patch_out} {region} of {one}"
        assert_equal(found, exact[(slice(None), *region.slices)], what, np.abs(exact).max())


@pytest.mark.parametrize("method", ["fft_lanes", "direct_naive_gathered"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_unet_repeats_the_voxels_of_its_upsamplings(axis: int, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_operations, "UPSAMPLED_MAPS", 1)
    if (reason := why_not(MACHINE)) and method == "fft_lanes":
        pytest.skip(reason)
    one, rng = unet((13, 22, 11)), random.Random(axis)
    names = f"cpu.graph_conv.{method}", "cpu.graph_conv.taps"
    table = tuple(primitive for primitive in CPU if primitive.kind != "graph_conv" or primitive.name in names)
    exact, region = reference(one), whole_region(one)
    graph = TurnedGraph.of(one.network, one.size, axis)
    for _ in range(4):
        patch = (rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 3))
        column = rng.choice([0, up(graph.periods[0], patch[0])])
        plan = planned(one.network, one.size, region, patch, axis=axis, column=column, table=table)
        assert names[0] in {choice.primitive for choice in plan.choices}
        assert_equal(ran(plan, one).out, exact, f"{plan.axis} {plan.patch_out}")


@pytest.mark.parametrize("seed", one_in(10, SEEDS))
def test_further_outputs_of_any_nodes_equal_the_definition(seed: int) -> None:
    """They differ in lattice, size and place."""
    one, rng = case(seed), random.Random(seed)
    network = one.network
    further = sorted(set(range(1, len(network.layers) + 1)) - set(network.outputs))
    outputs = [*network.outputs, *rng.sample(further, min(rng.randint(1, 3), len(further)))]
    rng.shuffle(outputs)
    network = replace(network, wiring=replace(network.wiring, outputs=tuple(outputs)))  # type: ignore[type-var]
    one = replace(one, network=network)
    exact = references(one)
    for _ in range(SPLITS):
        region, *others = (some_region(one.geometry.size(tensor), rng) for tensor in outputs)
        plan = some_plan(one, region, rng, tuple(others))
        for found, output, box in zip(ran(plan, one).outs, exact, (region, *others), strict=True):
            what = f"{plan.axis} {plan.patch_out} {box} of {one}"
            assert_equal(found, output[(slice(None), *box.slices)], what, np.abs(output).max())


def test_random_graphs_have_every_layer() -> None:
    cases = [case(seed) for seed in SEEDS[::10]]
    every: set[type] = {
        Conv, Pool, MaxFilter, Maxout, ConvTranspose, AveragePool, Upsample, Crop, Pad, Scale, Activate, *JOINS,
    }  # fmt: skip
    assert layers_in(cases) == every
    layers = [layer for one in cases for layer in one.network.layers]
    assert any(isinstance(layer, Upsample) and layer.like for layer in layers)
    assert any(isinstance(layer, Upsample) and layer.how == "linear" for layer in layers)
    assert any(isinstance(layer, Crop) and layer.like for layer in layers)
    assert any(isinstance(layer, Pool | AveragePool) and layer.ceil for layer in layers)
    assert any(isinstance(layer, Conv) and layer.dilation != (1, 1, 1) for layer in layers)
    assert {layer.padding_mode for layer in layers if isinstance(layer, Conv)} == {"zeros", "reflect", "replicate"}
    assert {one.network.pad_to_period for one in cases if one.geometry.volume != one.size} == {
        "zeros", "reflect", "replicate",
    }  # fmt: skip
    assert max(len(set(lattices_of(one.network))) for one in cases) >= 4
    assert any(len(one.network.outputs) > 1 for one in cases)
    steps = {step for one in cases for step in lattices_of(one.network)[one.network.outputs[0]]}
    assert min(steps) < 1 < max(steps)


def test_convolutions_of_random_graphs_compute_sums() -> None:
    graphs = [TurnedGraph.of(one.network, one.size, 0) for one in map(case, SEEDS[::4])]
    sums = [one for graph in graphs for one in graph.operations if one.addend is not None]
    assert len(sums) >= 20
    assert any(one.addend and one.addend.tensor not in {read.tensor for read in one.reads} for one in sums)


@pytest.mark.parametrize("column", [0, 1, 2])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_convolution_adds_planes_that_were_kept(axis: int, column: int) -> None:
    """The addend is cropped, so that planes are read after the other convolution needs them no more."""
    one = made(
        [
            Given(same(4), "start"),
            Given(Conv((3, 3, 3), 4, "elu"), "first"),
            Given(Conv((3, 2, 1), 4), "second"),
            Given(Crop((0, 0, 1), (4, 3, 1)), "cropped", ("start",)),
            Given(Add("elu", (0.7,)), "sum", ("second", "cropped")),
            Given(same(2), "end"),
        ],
        (13, 11, 12),
    )
    graph = TurnedGraph.of(one.network, one.size, axis)
    assert len(graph.operations) == 4
    thick = max(1, column)
    region = whole_region(one)
    plan = planned(
        one.network, one.size, region, (thick, 4, 5), axis=axis, column=column and up(graph.periods[0], thick)
    )
    assert_equal(ran(plan, one).out, reference(one), plan)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("seed", one_in(8, range(100, 148)))
def test_a_column_of_the_whole_cross_section_computes_nothing_twice(seed: int, axis: int) -> None:
    one = case(seed)
    region = whole_region(one)
    graph = TurnedGraph.of(one.network, one.size, axis)
    for thick in (1, 2):
        plan = planned(
            one.network, one.size, region, (thick, *graph.periods[1:]), axis=axis, column=up(graph.periods[0], thick)
        )
        assert len(plan.work_items(one.network)) == 1
        assert ran(plan, one).written == needed_at_once(plan, one.network), f"{one}"


@pytest.mark.parametrize("column", [0, 1, 2])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_each_reader_of_a_node_has_its_own_faces(axis: int, column: int) -> None:
    """One is padded with zeros, one mirrored, and a maximum ignores what is outside."""
    one = made(
        [
            Given(Conv((1, 1, 1), 3), "shared"),
            Given(same(2), "zeros", ("shared",)),
            Given(same(2, "reflect"), "mirrored", ("shared",)),
            Given(Pool((3, 3, 3), (1, 1, 1), ONES), "most", ("shared",)),
            Given(same(2, "replicate"), "repeated", ("shared",)),
            Given(Concat(), "joined", ("zeros", "mirrored", "most", "repeated")),
            Given(Conv((1, 1, 1), 2), "last"),
        ],
        (5, 6, 7),
    )
    assert one.weights  # values below zero occur: a pooling that took zeros from outside would show
    patch = (1, 3, 4)
    plan = planned(one.network, one.size, whole_region(one), patch, axis=axis, column=3 * column)
    assert_equal(ran(plan, one).out, reference(one), one)


@pytest.mark.parametrize("size", [(4, 12, 8), (12, 4, 9), (9, 13, 2), (4, 4, 2)])
def test_a_volume_of_one_period_has_all_faces_at_once(size: Vec3) -> None:
    one = unet(size)
    assert period_of(one.network) == (4, 4, 2)
    for axis in range(3):
        graph = TurnedGraph.of(one.network, one.size, axis)
        plan = planned(one.network, one.size, whole_region(one), (1, 1, 1), axis=axis, column=graph.periods[0])
        assert_equal(ran(plan, one).out, reference(one), one)


def test_a_region_gives_the_voxels_of_the_whole() -> None:
    """To the bit, if steps begin at the same planes and have the same sizes."""
    one = unet((17, 18, 13))
    full = ran(planned(one.network, one.size, whole_region(one), (1, 2, 3), column=2), one).out
    region = Box((3, 5, 2), (15, 16, 11))
    part = ran(planned(one.network, one.size, region, (1, 2, 3), column=2), one).out
    assert_equal(part, full[(slice(None), *region.slices)], one)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_skips_hold_planes_until_they_are_joined(axis: int) -> None:
    """Tensors that keep as much as they get stay beside the arena; others are copied there."""
    one = unet((24, 17, 19))
    graph = TurnedGraph.of(one.network, one.size, axis)
    storages = set()
    for thick in (1, 2, 3):
        plan = planned(
            one.network, one.size, whole_region(one), (thick, 2, 3), axis=axis, column=up(graph.periods[0], thick)
        )
        tiling = GraphTiling(plan.graph_cover(one.network))
        storages |= {tiling.storage(tensor) for tensor in tiling.graph.stored}
        assert_equal(ran(plan, one).out, reference(one), one)
    assert storages == {"arena", "carried", "resident"}


def test_several_outputs_are_written_one_after_the_other() -> None:
    one = made(
        [
            Given(same(2), "first"),
            Given(Pool((2, 2, 2)), "down"),
            Given(Upsample((2, 2, 2), None, "linear"), "up"),
            Given(Add(), "sum", ("first", "up")),
            Given(Conv((1, 1, 1), 3, "softmax"), "classes"),
        ],
        (8, 9, 10),
        output=["classes", "first", "sum"],
    )
    assert one.network.output_channels == 7
    plan = planned(one.network, one.size, whole_region(one), (2, 2, 3), column=4)
    assert_equal(ran(plan, one).out, reference(one), one)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_an_output_is_held_until_it_is_given(axis: int) -> None:
    """Its reader is ahead, and needs it no longer when the column gets there."""
    one = made(
        [
            Given(same(2), "first"),
            Given(Crop((3, 3, 3)), "ahead"),
            Given(Pad((0, 0, 0), (3, 3, 3), "replicate"), "moved"),
            Given(Conv((1, 1, 1), 1), "last"),
        ],
        (8, 9, 10),
        output=["last", "first"],
    )
    patch = (1, 9, 10) if axis == 0 else (1, 8, 9)
    plan = planned(one.network, one.size, whole_region(one), patch, axis=axis, column=10)
    assert_equal(ran(plan, one).out, reference(one), one)


def test_columns_cover_every_voxel_of_the_region_once() -> None:
    one = unet((17, 18, 13))
    for axis in range(3):
        graph = TurnedGraph.of(one.network, one.size, axis)
        for patch, column in (((1, 1, 1), 0), ((1, 2, 1), 2), ((2, 1, 3), 4)):
            region = Box((1, 0, 3), (15, 18, 12))
            times = np.zeros(region.size, int)
            for walk in GraphCover(graph, patch, column, region):
                for step in walk.steps:
                    times[step.write.slices] += bool(step.write.voxels)
            assert (times == 1).all()


LAST: list[tuple[Layer, Vec3]] = [
    (Pool((2, 2, 2)), (2, 2, 2)),
    (Conv((3, 3, 3), 2, stride=(1, 2, 3), padding=ONES), (1, 2, 3)),
    (Upsample((1, 2, 2)), (1, 1, 1)),
    (ConvTranspose((2, 2, 2), 2, (2, 2, 2)), (1, 1, 1)),
]


@pytest.mark.parametrize(("layer", "period"), LAST, ids=str)
def test_outputs_on_other_lattices_cover_the_padded_volume(layer: Layer, period: Vec3) -> None:
    one = made([Given(same(2), "first"), Given(layer, "last")], (7, 9, 8))
    assert period_of(one.network) == period
    for axis in range(3):
        plan = planned(one.network, one.size, whole_region(one), (2, 1, 2), axis=axis, column=2)
        assert_equal(ran(plan, one).out, reference(one), one)


def test_refused_padding_is_no_matter_for_a_volume_that_divides() -> None:
    one = unet((8, 12, 6))
    assert one.network.wiring is not None
    refusing = replace(one, network=replace(one.network, wiring=replace(one.network.wiring, pad_to_period="refuse")))
    plan = planned(refusing.network, one.size, whole_region(refusing), (1, 2, 2), column=2)
    assert_equal(ran(plan, refusing).out, reference(one), one)
