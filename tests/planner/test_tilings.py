"""Patch and column shapes worth a look, how often they run each layer, and what they need at least."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import ceil, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.brute_force import candidates, known, steps_of, ways
from tests.support.fake_primitives import BOTH, OVER, POOL, SLOW
from znnpy.network import Conv, Layer, MaxFilter, Maxout, Network, Pool
from znnpy.patches import Cover, cover
from znnpy.planner.layout import aligned, sub_batch_counts
from znnpy.planner.tilings import (
    TilingSpace,
    all_sizes,
    all_spaces,
    axis_sizes,
    fusion_groups,
    log_spaced,
    sizes_between,
    splits,
    tiling_of,
)
from znnpy.shapes import Vec3, turned_back


@given(st.integers(1, 3000), st.integers(1, 30))
def test_axis_sizes_equal_the_even_cuts(length: int, period: int) -> None:
    """ceil(length / i), rounded up to the period, for every i: none forgotten, none twice."""
    cuts = {ceil(ceil(length / i) / period) * period for i in range(1, length + 1)}
    fewest = {ceil(length / size): size for size in sorted(cuts, reverse=True)}  # the smallest for a count of patches
    assert axis_sizes(length, period) == tuple(sorted(fewest.values(), reverse=True))


def test_axis_sizes_of_a_paper_network_equal_those_by_hand() -> None:
    assert axis_sizes(512, 8) == (
        512, 256, 176, 128, 104, 88, 80, 64, 56, 48, 40, 32, 24, 16, 8,
    )  # fmt: skip
    assert axis_sizes(1, 4) == (4,)
    assert axis_sizes(5, 1) == (5, 3, 2, 1)


def test_log_spaced_sizes_keep_both_ends() -> None:
    sizes = tuple(range(1000, 0, -1))
    kept = log_spaced(sizes, 4)
    assert kept == (1000, 100, 10, 1)
    assert log_spaced(sizes[:3], 4) == sizes[:3]


def test_sizes_between_seen_neighbours_equal_those_by_hand() -> None:
    sizes = (512, 256, 176, 128, 104, 88, 80)
    seen = (512, 128, 80)
    assert sizes_between(sizes, seen, 128) == ((512, 128, 80), [256, 176, 104, 88])
    assert sizes_between(sizes, seen, 512) == ((512, 128), [256, 176])
    assert sizes_between(sizes, seen, 80) == ((128, 80), [104, 88])
    assert sizes_between(sizes, sizes, 128) == ((176, 128, 104), [])


def test_patch_counts_the_layer_shapes_of_the_network(tiny_network: Callable[..., Network]) -> None:
    space = TilingSpace(tiny_network(), (9, 7, 5))
    found = list(candidates(space, all_sizes(space)))
    assert len({c.patch for c in found}) == len(found) > 20
    for c in found:
        shapes = space.network.layer_shapes(c.patch)
        assert c.shapes == shapes
        assert (c.column_planes, c.patch_out) == (0, c.patch)
        assert c.sub_batches == (1, 1, 1, 1)
        count = len(cover((9, 7, 5), c.patch))
        assert c.steps == (count,) * 4
        # conv, pool, conv, conv: what the first gives need not be written if it is pooled at once
        assert c.voxels == tuple(count * prod(s.out_shape[:4]) for s in shapes[1:])
        assert c.tensor_bytes == tuple(
            aligned(n) for n in (*(s.in_bytes for s in (shapes[0], *shapes[2:])), shapes[-1].out_bytes)
        )
        assert c.largest == max(c.tensor_bytes)
        assert [c.io_bytes(span) for span in range(3)] == [
            c.tensor_bytes[span] + c.tensor_bytes[span + 1] for span in range(3)
        ]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_column_counts_the_planes_of_its_steps(tiny_network: Callable[..., Network], axis: int) -> None:
    network, output = tiny_network(), (9, 7, 5)
    space = next(space for space in all_spaces(network, output) if space.streams and space.axis == axis)
    for c in candidates(space, all_sizes(space)):
        assert c.shapes == network.turned(axis).layer_shapes(c.patch, streams=True)
        assert c.column_planes % c.patch[0] == 0
        assert c.column_planes - c.patch[0] < output[axis] <= c.column_planes
        beside = [i for i in range(3) if i != axis]
        assert c.patch_out[axis] == c.patch[0]
        assert len(c.cover) == prod(ceil(output[i] / c.patch_out[i]) for i in beside)
        for layer, steps in enumerate(c.steps):
            first = ceil(network.margins[layer + 1][axis] / c.patch[0])  # steps before the first that gives output
            assert steps == len(c.cover) * (first + c.column_planes // c.patch[0])
        assert c.voxels[-1] == c.steps[-1] * prod(c.patch)


def test_carried_planes_of_a_column_equal_those_by_hand() -> None:
    """Planes of a convolution's input, of a pooling's, and of both in one: the least of them."""
    wide = Network(
        "wide", 1, (Conv((3, 2, 2), 8), Pool((2, 1, 1)), Maxout(4), MaxFilter((4, 1, 1)), Conv((1, 3, 3), 2))
    )
    c = tiling_of(TilingSpace(wide, (40, 6, 6), streams=True), (4, 6, 6))
    plane = [4 * side * side * maps for side, maps in ((9, 1), (8, 8), (8, 8), (8, 2), (8, 2))]
    # in one: 3 planes of 1 map are less than 2 of 1 map and 1 of 8 maps; then 2 fragments of 4 - 1 planes
    assert c.carries == (3 * plane[0], 0, 2 * 3 * plane[3], 0)
    x = (7 * plane[0], 2 * 2 * plane[2], 2 * 5 * plane[3], 2 * 2 * plane[4], 2 * 2 * 4 * 36 * 2)
    assert c.tensor_bytes == tuple(map(aligned, x))
    thin = Network("thin", 64, (Conv((3, 2, 2), 1), Pool((2, 1, 1))))
    c = tiling_of(TilingSpace(thin, (40, 6, 6), streams=True), (4, 6, 6))
    assert c.carries == (4 * (2 * 49 * 64 + 36),)
    assert c.largest == c.carries[0] + max(c.tensor_bytes)


def test_inputs_beside_carried_planes_hold_only_new_planes() -> None:
    """They hold what is new; primitives that need the carried planes in front of it make them larger by those."""
    network = Network(
        "n", 1, (Conv((3, 2, 2), 8), Pool((2, 1, 1)), Maxout(4), MaxFilter((4, 1, 1)), Conv((1, 3, 3), 2))
    )
    space = TilingSpace(network, (40, 6, 6), streams=True, in_place_carries=frozenset({0, 2}))
    plane = [4 * side * side * maps for side, maps in ((9, 1), (8, 8), (8, 8), (8, 2), (8, 2))]
    c = tiling_of(space, (4, 6, 6))
    out = 2 * 2 * 4 * 36 * 2
    assert c.tensor_bytes == tuple(
        map(aligned, (4 * plane[0], 2 * 2 * plane[2], 2 * 2 * plane[3], 2 * 2 * plane[4], out))
    )
    assert [c.join_bytes(span) for span in range(4)] == [3 * plane[0], 0, 2 * 3 * plane[3], 0]
    one = c.split((1,))  # of two fragments at a time
    assert one.sub_batches == (1, 1, 2, 2, 2)
    assert one.tensor_bytes == tuple(
        map(aligned, (4 * plane[0], 2 * 2 * plane[2], 2 * plane[3], 2 * plane[4], out // 2))
    )
    assert [one.join_bytes(span) for span in range(4)] == [3 * plane[0], 0, 3 * plane[3], 0]
    assert one.carries == c.carries == (3 * plane[0], 0, 2 * 3 * plane[3], 0)
    behind = Network("behind", 1, (Conv((3, 2, 2), 8), Pool((2, 1, 1)), Conv((2, 1, 1), 2)))
    halves = tiling_of(TilingSpace(behind, (40, 6, 6), streams=True, in_place_carries=frozenset({1})), (4, 6, 6)).split(
        (1,)
    )
    assert (halves.sub_batches, halves.join_bytes(1)) == ((1, 1, 2), 2 * 4 * 36 * 8), (
        "both halves of its input are there"
    )
    together = replace(space, in_place_carries=frozenset())
    assert [tiling_of(together, (4, 6, 6)).join_bytes(span) for span in range(4)] == [0, 0, 0, 0]


def test_convolution_and_its_pooling_form_one_group(tiny_network: Callable[..., Network]) -> None:
    conv, pool = Conv((1, 1, 1), 2), Pool((2, 2, 2))
    network = tiny_network(pool, conv, pool, pool, conv, conv, pool, MaxFilter((2, 1, 1)))
    assert fusion_groups(network) == ((0, 0), (1, 2), (3, 3), (4, 4), (5, 6), (7, 7))


ALIKE = (Conv((3, 3, 3), 2), Pool((2, 2, 2)), Conv((2, 2, 2), 2), Maxout(2))
FLAT = (Conv((1, 3, 3), 2), Pool((1, 2, 2)))


@pytest.mark.parametrize(
    ("layers", "output", "axes"),
    [
        ((), (4, 4, 3), [0, 1, 2]),  # no two axes alike: every one
        (ALIKE, (20, 30, 40), [0, 1, 2]),
        (ALIKE, (20, 20, 20), [0]),
        (ALIKE, (20, 30, 20), [0, 1]),  # along x is along z turned
        (FLAT, (20, 30, 30), [1]),  # nothing to carry along z; along x is along y turned
        (FLAT, (20, 30, 40), [1, 2]),
        ((Conv((1, 1, 1), 2),), (20, 30, 40), []),
    ],
)
def test_columns_are_offered_along_axes_of_different_sizes(
    tiny_network: Callable[..., Network], layers: tuple[Layer, ...], output: Vec3, axes: list[int]
) -> None:
    network = tiny_network(*layers)
    first, *columns = all_spaces(network, output)
    assert first == TilingSpace(network, output)
    assert [space.axis for space in columns] == axes
    for space in columns:
        assert space.streams
        assert space.network == network.turned(space.axis)
        assert space.output[0] == output[space.axis]


def test_every_division_of_images_is_offered(tiny_network: Callable[..., Network]) -> None:
    conv, pool = Conv((2, 2, 2), 2), Pool((2, 2, 2))
    assert splits(tiny_network(conv, conv)) == [()]
    assert splits(tiny_network(conv, pool)) == [(0,)]  # nothing runs behind it
    assert splits(tiny_network(conv, pool, conv)) == [(0,), (4,), (2,), (1,)]
    assert splits(tiny_network(Pool((3, 2, 1)), conv)) == [(0,), (3,), (2,), (1,)]
    assert splits(tiny_network(Pool((1, 1, 1)), conv)) == [(0,)]
    assert splits(tiny_network(conv, Pool((2, 1, 1)), conv, pool, conv)) == [(0, 0), (1, 0), (0, 1), (1, 1)]  # singly
    assert splits(tiny_network(pool, Pool((2, 1, 1)), conv)) == [
        (0, 0), (4, 0), (2, 0), (1, 0), (0, 1), (4, 1), (2, 1), (1, 1),
    ]  # fmt: skip
    many = splits(tiny_network(*[Pool((2, 1, 1)), conv] * 5))
    assert many == [(0,) * 5, *[tuple(int(i == at) for i in range(5)) for at in range(5)], (1,) * 5]


LAYERS = st.one_of(
    st.builds(Conv, st.tuples(*[st.integers(1, 3)] * 3), st.integers(1, 3)),
    st.builds(Pool, st.sampled_from([(1, 1, 2), (2, 1, 1), (2, 2, 1), (3, 1, 2)])),
    st.builds(MaxFilter, st.tuples(*[st.integers(1, 2)] * 3)),
)


@given(st.lists(LAYERS, min_size=1, max_size=5), st.booleans(), st.data())
def test_parts_compute_every_image_once(layers: list[Layer], walks: bool, data: st.DataObject) -> None:
    """Every image goes through every layer once, in whatever parts."""
    network = Network("a", 1, tuple(layers))
    whole = tiling_of(TilingSpace(network, (13, 9, 7), streams=walks), network.period)
    at_once = data.draw(st.sampled_from(splits(network)))
    split = whole.split(at_once)
    assert split.shapes == network.layer_shapes(
        whole.patch, streams=walks, batches=[s.in_shape[0] for s in split.shapes]
    )
    assert split.sub_batches == sub_batch_counts(split.shapes)
    for parts, shape, all_images in zip(split.sub_batches, split.shapes, whole.shapes, strict=True):
        assert parts * shape.in_shape[0] == all_images.in_shape[0]
        assert parts * shape.out_shape[0] == all_images.out_shape[0]
    asked = dict(zip((i for i, layer in enumerate(layers) if isinstance(layer, Pool)), at_once, strict=True))
    images = 1
    for index, shape in enumerate(split.shapes):
        wanted = asked.get(index - 1, 0)
        assert shape.in_shape[0] == (wanted or images)
        images = shape.out_shape[0]
    assert (split.voxels, split.steps, split.column_planes) == (whole.voxels, whole.steps, whole.column_planes)
    assert split.carries == whole.carries
    assert whole.split((0,) * len(at_once)) == whole


def test_bytes_held_while_parts_run_equal_those_by_hand() -> None:
    network = Network(
        "a", 1, (Pool((2, 1, 1)), Conv((1, 1, 2), 3), Pool((1, 1, 2)), MaxFilter((1, 2, 1)), Conv((1, 1, 1), 1))
    )
    whole = tiling_of(TilingSpace(network, (2, 16, 64)), (2, 16, 64))
    x = (4 * 3 * 17 * 66, 2 * 4 * 17 * 66, 4 * 4 * 17 * 32 * 3, 4 * 4 * 16 * 32 * 3, 4 * 4 * 16 * 32)
    assert whole.tensor_bytes == tuple(map(aligned, x))
    assert whole.input_stays == (False,) * 4
    assert whole.live_elsewhere == (0,) * 4
    first = whole.split((1, 0))  # one of 2 images goes on: the rest waits, and so does the whole of it
    assert first.tensor_bytes == tuple(map(aligned, (x[0], x[1], x[2] // 2, x[3] // 2, x[4] // 2)))
    assert first.input_stays == (False, True, False, False)
    assert first.live_elsewhere == (0, *[aligned(x[1])] * 3)
    assert first.io_bytes(1) == aligned(x[2] // 2)
    assert first.io_bytes(2) == aligned(x[2] // 2) + aligned(x[3] // 2)
    both = whole.split((1, 1))  # and of the 2 images that it makes, one
    assert both.tensor_bytes == tuple(map(aligned, (x[0], x[1], x[2] // 2, x[3] // 4, x[4] // 4)))
    assert both.input_stays == (False, True, True, False)
    assert both.live_elsewhere == (0, aligned(x[1]), *[aligned(x[1]) + aligned(x[2] // 2)] * 2)
    assert both.sub_batches == (1, 2, 2, 4, 4)
    assert both.largest == max(aligned(x[0]), both.live_elsewhere[-1] + max(both.tensor_bytes[3:]))


@pytest.mark.slow
@pytest.mark.parametrize("layers", [(), ALIKE[:3]], ids=["tiny", "alike"])
@pytest.mark.parametrize("walks", [False, True])
def test_largest_layer_is_a_lower_bound_of_needed_bytes(
    tiny_network: Callable[..., Network], layers: tuple[Layer, ...], walks: bool
) -> None:
    """`largest` is what shapes are left out for: it is below what any primitives need, in one or not.

    A convolution that a pooling follows counts with the input that both in one need.
    """
    space = next(space for space in all_spaces(tiny_network(*layers), (4, 6, 5)) if space.streams == walks)
    tried = 0
    for whole in candidates(space, all_sizes(space)):
        for at_once in splits(space.network):
            shape = whole.split(at_once)
            steps = [steps_of(shape.cover, ahead) for ahead in space.warmup_planes]
            for runs in ways(shape.shapes, steps, (SLOW, OVER, BOTH, POOL)):
                plan = known(space, shape, runs, "cpu", split=any(at_once))
                assert shape.largest <= plan.assumed - plan.around
                tried += 1
    assert tried > 500


@pytest.mark.slow
@pytest.mark.parametrize("walks", [False, True])
@pytest.mark.parametrize("room", [1_000, 3_000, 10_000, 40_000])
def test_memory_limit_drops_only_unfit_sizes(tiny_network: Callable[..., Network], room: int, walks: bool) -> None:
    """Sizes that are left out are of no use, whatever the sizes along other axes and the parts that images come in."""
    for layers in ((), ALIKE):
        network = tiny_network(*layers)
        space = next(space for space in all_spaces(network, (40, 30, 50)) if space.streams == walks)
        sizes, fitting = all_sizes(space), all_sizes(space, room)
        useful = [
            c.patch
            for c in candidates(space, sizes)
            if any(c.split(at_once).largest <= room for at_once in splits(space.network))
        ]
        assert set(useful) <= set(product(*fitting))
        assert all(set(few) <= set(every) for few, every in zip(fitting, sizes, strict=True))
        assert room == 40_000 or sum(map(len, fitting)) < sum(map(len, sizes))


@given(
    st.integers(1, 29), st.integers(1, 5), st.integers(1, 5), st.integers(0, 11), st.sampled_from([(1, 1), (5, 4)]),
    st.integers(0, 2),
)  # fmt: skip
def test_steps_of_columns_equal_a_count_one_by_one(
    length: int, thick: int, steps: int, margin: int, beside: tuple[int, int], axis: int
) -> None:
    """A layer runs in a step where the planes that it makes reach the first that is needed."""
    size, patch = turned_back((length, *beside), axis), turned_back((thick, 3, 4), axis)
    columns = Cover(size, patch, axis, steps * thick, margin)
    for ahead in {0, min(1, margin), margin // 2, margin}:
        assert columns.steps(ahead) == steps_of(columns, ahead)
    assert columns.steps(margin) == sum(len(column.steps) for column in columns)
    assert columns.steps(0) == sum(step.write.voxels > 0 for column in columns for step in column.steps)


def test_steps_of_columns_equal_those_by_hand() -> None:
    """5 x 2 columns of 3 steps of 4 planes, the last of each row of 1; 7 planes ahead take 2 steps more."""
    columns = Cover((49, 9, 5), (4, 5, 5), 0, 12, 9)
    assert len(columns) == 5 * 2
    assert columns.steps(0) == (4 * 3 + 1) * 2
    assert columns.steps(4) == (4 * 4 + 2) * 2
    assert columns.steps(7) == columns.steps(8) == (4 * 5 + 3) * 2
    assert columns.steps(9) == (4 * 6 + 4) * 2
    assert Cover((49, 9, 5), (4, 5, 5)).steps(9) == len(cover((49, 9, 5), (4, 5, 5))) == 13 * 2


def test_shorter_columns_are_offered_for_long_runs(tiny_network: Callable[..., Network]) -> None:
    whole = tiling_of(TilingSpace(tiny_network(), (50, 6, 5), streams=True), (4, 6, 5))
    assert whole.column_planes == 52
    assert [whole.shortened(pieces).column_planes for pieces in (1, 2, 3, 4, 13, 99)] == [52, 28, 20, 16, 4, 4]
    for pieces in range(1, 20):
        cut = whole.shortened(pieces)
        assert cut.shapes == whole.shapes
        assert len(cut.cover) == ceil(50 / cut.column_planes) <= pieces
        assert sum(column.voxels for column in cut.cover) == 50 * 6 * 5
