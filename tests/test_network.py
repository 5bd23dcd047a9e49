"""Field of view, fragment period and layer shapes, against networks that are followed voxel by voxel."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise, product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.messages import assert_holds
from znnpy.errors import ShapeError
from znnpy.network import MOST_LAYERS, Conv, Layer, MaxFilter, Maxout, Network, Normalise, Pool
from znnpy.shapes import Vec3, turn

NETWORKS = {
    "one voxel": (Conv((1, 1, 1), 3),),
    "pool first": (Pool((2, 3, 1)), Conv((2, 1, 3), 2)),
    "pool last": (Conv((2, 1, 3), 2), Pool((3, 1, 5))),
    "pool only": (Pool((5, 3, 2)),),
    "pool after pool": (Conv((2, 3, 1), 2), Pool((2, 1, 3)), Pool((3, 2, 1)), Conv((2, 2, 2), 2)),
    "max filter": (Conv((1, 3, 2), 4), Pool((1, 2, 2)), MaxFilter((2, 2, 3)), Maxout(2), Conv((2, 3, 1), 1)),
    "three pools": (Pool((2, 2, 1)), Conv((3, 2, 2), 2), Pool((2, 1, 2)), MaxFilter((1, 1, 2)), Pool((1, 3, 2))),
}


def window(layer: Layer) -> tuple[Vec3, Vec3]:
    """Extent and stride."""
    match layer:
        case Conv(kernel=size) | MaxFilter(window=size):
            return size, (1, 1, 1)
        case Pool(window=size):
            return size, size
        case _:
            return (1, 1, 1), (1, 1, 1)


def needed_by(layers: tuple[Layer, ...], position: Vec3) -> set[Vec3]:
    """Input voxels that the plain (strided) network's output at `position` depends on, one by one."""
    positions = {position}
    for layer in reversed(layers):
        extent, stride = window(layer)
        positions = {
            (z * stride[0] + dz, y * stride[1] + dy, x * stride[2] + dx)
            for z, y, x in positions
            for dz, dy, dx in product(*map(range, extent))
        }
    return positions


@pytest.mark.parametrize("layers", NETWORKS.values(), ids=NETWORKS)
def test_field_of_view_and_period_equal_those_by_hand(layers: tuple[Layer, ...]) -> None:
    network = Network("a", 2, layers)
    view = network.field_of_view
    first = needed_by(layers, (0, 0, 0))
    assert first == set(product(*map(range, view)))
    for axis in range(3):
        one_on = (int(axis == 0), int(axis == 1), int(axis == 2))
        moved = min(needed_by(layers, one_on))
        assert moved == tuple(network.period[axis] * step for step in one_on)


@pytest.mark.parametrize("layers", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("periods", [(1, 1, 1), (2, 1, 3)], ids=str)
def test_layer_shapes_follow_from_each_other(layers: tuple[Layer, ...], periods: Vec3) -> None:
    network = Network("a", 2, layers)
    out = (
        periods[0] * network.period[0],
        periods[1] * network.period[1],
        periods[2] * network.period[2],
    )
    shapes = network.layer_shapes(out)
    assert len(shapes) == len(layers)
    assert shapes[0].in_shape == (1, *network.patch_in(out), 2)
    for before, after in pairwise(shapes):
        assert before.out_shape == after.in_shape
    batch, *size, maps = shapes[-1].out_shape
    assert tuple(size) == periods  # each fragment holds every period-th voxel of the patch
    assert batch == prod(network.period)
    assert maps == network.output_channels == network.maps[-1]


def stride_before(layers: tuple[Layer, ...], axis: int) -> int:
    """Dense voxels from one plane of a fragment to the next, behind all of `layers`."""
    return prod(window(layer)[1][axis] for layer in layers)


@pytest.mark.parametrize("layers", NETWORKS.values(), ids=NETWORKS)
def test_margins_reach_as_far_as_the_output_sees(layers: tuple[Layer, ...]) -> None:
    """They reach the farthest voxel that the first output voxel depends on."""
    network = Network("a", 2, layers)
    assert len(network.margins) == len(layers) + 1
    for index, margin in enumerate(network.margins):
        farthest = max(needed_by(layers[index:], (0, 0, 0)))
        assert margin == tuple(stride_before(layers[:index], axis) * farthest[axis] for axis in range(3))
    assert network.margins[0] == tuple(view - 1 for view in network.field_of_view)
    assert network.margins[-1] == (0, 0, 0)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("layers", NETWORKS.values(), ids=NETWORKS)
def test_transposed_network_has_the_same_sizes_along_other_axes(layers: tuple[Layer, ...], axis: int) -> None:
    network = Network("a", 2, layers, Normalise((1.0, 2.0), (3.0, 4.0)))
    along = network.turned(axis)
    order = turn(axis)
    assert order[0] == axis
    assert along.maps == network.maps
    assert (along.name, along.normalise) == (network.name, network.normalise)
    assert along.field_of_view == tuple(network.field_of_view[i] for i in order)
    assert along.period == tuple(network.period[i] for i in order)
    assert along.margins == tuple(tuple(margin[i] for i in order) for margin in network.margins)
    z, y, x = (2 * network.period[i] for i in order)
    for here, there in zip(along.layer_shapes((z, y, x)), network.layer_shapes(_doubled(network.period)), strict=True):
        assert here.out == tuple(there.out[i] for i in order)
        assert type(here) is type(there)
    assert network.turned(0) == network


def _doubled(v: Vec3) -> Vec3:
    return 2 * v[0], 2 * v[1], 2 * v[2]


sizes = st.tuples(*[st.integers(1, 5)] * 3)
chains = st.lists(
    st.one_of(st.builds(Conv, sizes, st.integers(1, 3)), st.builds(Pool, sizes), st.builds(MaxFilter, sizes)),
    min_size=1,
    max_size=6,
)


@given(chains, st.tuples(*[st.integers(1, 3)] * 3))
def test_every_chain_has_shapes_for_multiples_of_its_period(chain: list[Layer], times: Vec3) -> None:
    network = Network("a", 1, tuple(chain))
    period = network.period
    out = (times[0] * period[0], times[1] * period[1], times[2] * period[2])
    last = network.layer_shapes(out)[-1]
    assert last.out == times
    assert prod(last.out_shape[:4]) == prod(out)
    assert network.round_up(out) == out
    assert network.round_up((out[0] - period[0] + 1, out[1], max(1, out[2] - period[2] + 1))) == out
    assert network.dense_size(network.patch_in(out)) == out


def walked(network: Network, thick: int, steps: int) -> list[list[tuple[int, list[int]]]]:
    """Per step and layer: planes of an input image, and the planes that all its outputs stand for, in dense voxels.

    A plane stands where the first input plane that it depends on does, as a column reads them: in steps of `thick`, so
    that the first output of a step would be complete in step 0 if there were no field of view.
    """
    carried: dict[tuple[int, int], list[int]] = {}
    story = []
    for step in range(steps):
        images = [list(range(step * thick, (step + 1) * thick))]
        told = []
        for index, layer in enumerate(network.layers):
            (extent, _, _), (stride, _, _) = window(layer)
            made = []
            apart = stride_before(network.layers[:index], 0)
            for number, new in enumerate(images):
                before = [new[0] - apart * (extent - 1 - i) for i in range(extent - 1)]  # zeros in the first step
                planes = carried.get((index, number), before) + new
                assert [b - a for a, b in pairwise(planes)] == [apart] * (len(planes) - 1)
                carried[index, number] = planes[len(planes) - (extent - 1) :]
                for offset in range(stride):
                    windows = range(offset, len(planes) - extent + 1, stride)
                    made.append([planes[start] for start in windows])
            told.append((len(carried[index, 0]) + len(images[0]), sorted(plane for image in made for plane in image)))
            images = made
        story.append(told)
    return story


@pytest.mark.slow
@given(chains, st.integers(1, 3), st.tuples(st.integers(1, 2), st.integers(1, 2)))
def test_planes_of_a_column_are_each_computed_once(chain: list[Layer], times: int, cross: tuple[int, int]) -> None:
    """Every plane of every layer is computed once, and a layer is ahead of the output by its margin.

    Patches agree: of a whole column in one piece, a layer's input has the planes of its steps and its margin.
    """
    network = Network("a", 1, tuple(chain))
    thick = times * network.period[0]
    out = (thick, cross[0] * network.period[1], cross[1] * network.period[2])
    shapes = network.layer_shapes(out, streams=True)
    view = network.margins[0][0]
    steps = 4
    for step, layers in enumerate(walked(network, thick, steps)):
        output_until = (step + 1) * thick - view
        for index, (planes, computed) in enumerate(layers):
            until = output_until + network.margins[index + 1][0]
            assert computed == list(range(until - thick, until))
            assert shapes[index].in_shape[1] == planes
    alone = network.layer_shapes(out)
    whole = network.layer_shapes((steps * thick, *out[1:]))
    for index, (shape, patch, column) in enumerate(zip(shapes, alone, whole, strict=True)):
        new = thick // stride_before(network.layers[:index], 0)
        assert shape.in_shape[1] - new == window(network.layers[index])[0][0] - 1
        assert shape.in_shape[2:] == patch.in_shape[2:]
        assert shape.out_shape[0] == patch.out_shape[0]
        assert (
            column.in_shape[1] * stride_before(network.layers[:index], 0) == steps * thick + network.margins[index][0]
        )
    assert shapes[-1].out_shape == alone[-1].out_shape


def test_planes_of_a_column_equal_those_by_hand() -> None:
    network = Network("a", 1, (Conv((3, 2, 1), 5), Pool((2, 1, 3)), MaxFilter((2, 2, 2)), Maxout(5)))
    assert network.margins == ((5, 2, 5), (3, 1, 5), (2, 1, 3), (0, 0, 0), (0, 0, 0))
    shapes = network.layer_shapes((4, 7, 6), streams=True)
    assert [shape.in_shape for shape in shapes] == [
        (1, 4 + 2, 9, 11, 1),
        (1, 4 + 1, 8, 11, 5),
        (6, 2 + 1, 8, 3, 5),
        (6, 2, 7, 2, 5),
    ]
    assert network.layer_shapes((4, 7, 6))[0].in_shape == (1, 4 + 5, 9, 11, 1)


def test_images_in_parts_give_shapes_with_smaller_batches() -> None:
    """A layer takes some of the images that the one before makes, and makes as many more."""
    network = Network(
        "a", 1, (Conv((1, 2, 2), 4), Pool((2, 1, 3)), Conv((2, 2, 2), 2), Pool((1, 2, 1)), MaxFilter((2, 1, 1)))
    )
    out: Vec3 = (4, 2, 3)
    parts = network.layer_shapes(out, batches=(1, 1, 3, 3, 2))
    assert [shape.in_shape[0] for shape in parts] == [1, 1, 3, 3, 2]
    assert [shape.out_shape[0] for shape in parts] == [1, 6, 3, 6, 2]
    whole = network.layer_shapes(out)
    assert [shape.in_shape[0] for shape in whole] == [1, 1, 6, 6, 12]
    for part, all_images in zip(parts, whole, strict=True):
        assert part.in_shape[1:] == all_images.in_shape[1:]
    for walks in (False, True):
        assert network.layer_shapes(out, streams=walks, batches=(1, 1, 6, 6, 12)) == network.layer_shapes(
            out, streams=walks
        )


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ((1, 1, 4, 4), r"layer 2 \(conv 2x2x2 -> 2 none\) gets 6 images, which are not a multiple of 4"),
        ((1, 1, 3, 2), r"layer 3 \(pool 1x2x1\) gets 3 images, which are not a multiple of 2"),
        ((1, 1, 12, 12), r"layer 2 .* gets 6 images, which are not a multiple of 12"),
        ((2, 1, 6, 6), r"layer 0 .* gets 1 images, which are not a multiple of 2"),
        ((1, 0, 6, 6), r"layer 1 .* gets 1 images, which are not a multiple of 0"),
        ((1, 1, -3, 6), r"layer 2 .* gets 6 images, which are not a multiple of -3"),
    ],
)
def test_indivisible_parts_are_refused(batches: tuple[int, ...], said: str) -> None:
    network = Network("a", 1, (Conv((1, 2, 2), 4), Pool((2, 1, 3)), Conv((2, 2, 2), 2), Pool((1, 2, 1))))
    with pytest.raises(ShapeError, match=f"^{said}$"):
        network.layer_shapes((4, 2, 3), batches=batches)


def test_patch_off_the_period_is_refused() -> None:
    network = Network("a", 1, (Pool((2, 3, 1)), Conv((2, 2, 2), 1)))
    with pytest.raises(ShapeError) as caught:
        network.layer_shapes((4, 4, 4))
    assert_holds(caught.value, "2x3x1, not 4x4x4", "next larger one is 4x6x4")
    with pytest.raises(ShapeError, match=r"not 0x3x1; the next larger one is 2x3x1$"):
        network.layer_shapes((0, 3, 1))


def test_volume_smaller_than_the_field_of_view_is_refused() -> None:
    network = Network("a", 1, (Conv((2, 5, 3), 1),))
    assert network.dense_size((2, 5, 4)) == (1, 1, 2)
    with pytest.raises(ShapeError) as caught:
        network.dense_size((9, 3, 9))
    assert_holds(caught.value, "along y: 9x3x9 against 2x5x3", "2 more voxels", "border='reflect'")


def test_impossible_network_is_refused() -> None:
    with pytest.raises(ShapeError, match="a network needs at least 1 input channel, not 0"):
        Network("a", 0, (Pool((2, 2, 2)),))
    with pytest.raises(ShapeError, match="a network needs at least one layer"):
        Network("a", 1, ())
    with pytest.raises(ShapeError, match=r"layer 1 \(maxout of 2\) does not divide the 5 maps it gets"):
        Network("a", 1, (Conv((1, 1, 1), 5), Maxout(2)))


def test_too_many_layers_are_refused() -> None:
    layer = Conv((1, 1, 1), 1)
    assert len(Network("a", 1, (layer,) * MOST_LAYERS).layers) == MOST_LAYERS
    with pytest.raises(ShapeError) as caught:
        Network("a", 1, (layer,) * (MOST_LAYERS + 1))
    assert str(caught.value) == "a network has at most 500 layers, and this one has 501; split it"


def test_maps_convolutions_and_parameters_are_counted() -> None:
    network = Network(
        "a", 3, (Pool((1, 2, 2)), Conv((2, 3, 4), 6), Maxout(3), MaxFilter((2, 2, 2)), Conv((1, 1, 2), 5))
    )
    assert network.maps == (3, 3, 6, 2, 2, 5)
    assert network.weighted == (1, 4)
    assert network.parameters == (6 * 3 * 24 + 6) + (5 * 2 * 2 + 5)
    assert network.output_channels == 5


def test_sha256_depends_on_the_layers_and_not_on_the_name() -> None:
    layers = (Conv((2, 3, 4), 6, "relu"), Pool((1, 2, 2)))
    network = Network("a", 1, layers)
    assert network.sha256 == Network("b", 1, layers).sha256
    others = [
        Network("a", 2, layers),
        Network("a", 1, layers[:1]),
        Network("a", 1, (Conv((2, 3, 4), 6, "none"), layers[1])),
        Network("a", 1, (layers[0], MaxFilter((1, 2, 2)))),
        Network("a", 1, layers, Normalise((0.0,), (1.0,))),
    ]
    assert len({network.sha256, *(other.sha256 for other in others)}) == 6


def test_network_module_loads_no_numpy() -> None:
    code = (
        "import json, sys, znnpy.network, znnpy.patches, znnpy.planner.plan; "
        "print(json.dumps([name for name in ('numpy', 'pyfftw', 'h5py') if name in sys.modules]))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert json.loads(loaded) == []
