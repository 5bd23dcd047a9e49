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

from znnpy.errors import ShapeError
from znnpy.network import Conv, Layer, MaxFilter, Maxout, Network, Normalise, Pool
from znnpy.shapes import Vec3

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
        case Maxout():
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
def test_field_of_view_and_period(layers: tuple[Layer, ...]) -> None:
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
    shapes = network.layer_shapes(out, batch=3)
    assert len(shapes) == len(layers)
    assert shapes[0].in_shape == (3, *network.patch_in(out), 2)
    for before, after in pairwise(shapes):
        assert before.out_shape == after.in_shape
    batch, *size, maps = shapes[-1].out_shape
    assert tuple(size) == periods  # each fragment holds every period-th voxel of the patch
    assert batch == 3 * prod(network.period)
    assert maps == network.output_channels == network.maps[-1]


sizes = st.tuples(*[st.integers(1, 5)] * 3)
chains = st.lists(
    st.one_of(st.builds(Conv, sizes, st.integers(1, 3)), st.builds(Pool, sizes), st.builds(MaxFilter, sizes)),
    min_size=1,
    max_size=6,
)


@given(chains, st.tuples(*[st.integers(1, 3)] * 3))
def test_any_chain_has_shapes_for_multiples_of_its_period(chain: list[Layer], times: Vec3) -> None:
    network = Network("a", 1, tuple(chain))
    period = network.period
    out = (times[0] * period[0], times[1] * period[1], times[2] * period[2])
    last = network.layer_shapes(out)[-1]
    assert last.out == times
    assert prod(last.out_shape[:4]) == prod(out)
    assert network.round_up(out) == out
    assert network.round_up((out[0] - period[0] + 1, out[1], max(1, out[2] - period[2] + 1))) == out
    assert network.dense_size(network.patch_in(out)) == out


def test_a_patch_that_is_no_multiple_of_the_period() -> None:
    network = Network("a", 1, (Pool((2, 3, 1)), Conv((2, 2, 2), 1)))
    with pytest.raises(ShapeError) as caught:
        network.layer_shapes((4, 4, 4))
    assert str(caught.value) == (
        "an output patch must be a multiple of the pooling period 2x3x1, not 4x4x4; the next larger one is 4x6x4"
    )
    with pytest.raises(ShapeError, match=r"not 0x3x1; the next larger one is 2x3x1$"):
        network.layer_shapes((0, 3, 1))


def test_a_volume_smaller_than_the_field_of_view() -> None:
    network = Network("a", 1, (Conv((2, 5, 3), 1),))
    assert network.dense_size((2, 5, 4)) == (1, 1, 2)
    with pytest.raises(ShapeError) as caught:
        network.dense_size((9, 3, 9))
    assert str(caught.value) == (
        "the volume is smaller than the field of view along y: 9x3x9 against 2x5x3; "
        "give at least 2 more voxels there, or use --border reflect"
    )


def test_networks_that_cannot_be() -> None:
    with pytest.raises(ShapeError, match="a network needs at least 1 input channel, not 0"):
        Network("a", 0, (Pool((2, 2, 2)),))
    with pytest.raises(ShapeError, match="a network needs at least one layer"):
        Network("a", 1, ())
    with pytest.raises(ShapeError, match=r"layer 1 \(maxout of 2\) does not divide the 5 maps it gets"):
        Network("a", 1, (Conv((1, 1, 1), 5), Maxout(2)))


def test_maps_convolutions_and_parameters() -> None:
    network = Network(
        "a", 3, (Pool((1, 2, 2)), Conv((2, 3, 4), 6), Maxout(3), MaxFilter((2, 2, 2)), Conv((1, 1, 2), 5))
    )
    assert network.maps == (3, 3, 6, 2, 2, 5)
    assert network.convolutions == (1, 4)
    assert network.parameters == (6 * 3 * 24 + 6) + (5 * 2 * 2 + 5)
    assert network.output_channels == 5


def test_sha256_is_of_what_is_computed_not_of_its_name() -> None:
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


def test_the_vocabulary_loads_no_numpy() -> None:
    code = (
        "import json, sys, znnpy.network, znnpy.patches, znnpy.planner.plan; "
        "print(json.dumps([name for name in ('numpy', 'pyfftw', 'h5py') if name in sys.modules]))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert json.loads(loaded) == []
