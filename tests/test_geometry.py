"""Regions and frontiers of graphs, against networks that are followed voxel by voxel."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from time import process_time

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from tests.support.dependence import edges_of, needed_by
from tests.support.random_graphs import SLOW, Draw, graphs, sizes
from znnpy.admissible import admissible, geometry_of, period_of, seen_by_one
from znnpy.errors import ShapeError
from znnpy.formats.wiring import Given, network_of
from znnpy.geometry import Geometry, Interval
from znnpy.lattices import reaches_of
from znnpy.layers import (
    NO_PADDING,
    ONE,
    ZERO,
    Concat,
    Conv,
    ConvTranspose,
    Layer,
    MaxFilter,
    Pad,
    Pool,
    Upsample,
)
from znnpy.lowering import lowered
from znnpy.many_intervals import Intervals, Pooling, frontiers, regions_of_each
from znnpy.network import Network
from znnpy.shapes import Vec3


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """Return a random graph, as it is or lowered, over a volume that it admits."""
    network = draw(graphs())
    if draw(st.booleans()):
        network = lowered(network).network
    try:
        return admissible(network, draw(sizes(1, 20)))
    except ShapeError:
        reject()


def some(draw: Draw, size: int) -> range:
    lo = draw(st.integers(0, size - 1))
    return range(lo, draw(st.integers(lo + 1, size)))


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=SLOW)
@given(geometries())
def test_sizes_are_those_of_the_definition(geometry: Geometry) -> None:
    for axis, along in enumerate(geometry.axes):
        assert along.sizes[1:] == tuple(map(len, edges_of(geometry, axis)))


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=SLOW)
@given(geometries(), st.data(), st.integers(0, 2))
def test_regions_hold_what_outputs_depend_on(geometry: Geometry, data: st.DataObject, axis: int) -> None:
    along = geometry.axes[axis]
    wanted = [some(data.draw, along.sizes[tensor]) for tensor in along.outputs]
    regions = along.regions([Interval(own.start, own.stop) for own in wanted])
    tight = all(_is_tight(one.layer) for one in along.layers)
    for tensor, (needed, region) in enumerate(zip(needed_by(geometry, axis, wanted), regions, strict=True)):
        assert needed <= set(range(*region)), (tensor, needed, region)
        assert 0 <= region.lo <= region.hi <= along.sizes[tensor]
        if tight and needed:
            assert region == (min(needed), max(needed) + 1), (tensor, needed, region)


@pytest.mark.slow
@settings(max_examples=100, suppress_health_check=SLOW)
@given(geometries(), st.data(), st.integers(0, 2))
def test_regions_of_many_intervals_are_those_of_each(geometry: Geometry, data: st.DataObject, axis: int) -> None:
    along, count = geometry.axes[axis], 5
    wanted = [[some(data.draw, along.sizes[tensor]) for tensor in along.outputs] for _ in range(count)]
    ends = np.array([[(own.start, own.stop) for own in one] for one in wanted])  # (count, outputs, 2)
    found = regions_of_each(along, [Intervals(*ends[:, number].T) for number in range(len(along.outputs))])
    for number, one in enumerate(wanted):
        each = along.regions([Interval(own.start, own.stop) for own in one])
        assert each == tuple(zip(found.lo[:, number].tolist(), found.hi[:, number].tolist(), strict=True))


def _is_tight(layer: Layer) -> bool:
    """Return whether an interval of outputs always depends on both ends of the interval that it needs."""
    match layer:
        case Upsample(how="linear") | Pad() | Conv(padding_mode="reflect") | Conv(padding_mode="replicate"):
            return False
        case Conv():
            return layer.dilation == ONE or layer.padding == NO_PADDING
        case ConvTranspose():
            return layer == replace(layer, kernel=layer.stride, dilation=ONE, output_padding=ZERO, padding=NO_PADDING)
        case _:
            return True


@settings(max_examples=100, derandomize=True, deadline=None, suppress_health_check=SLOW)
@given(geometries(), st.data(), st.integers(0, 2))
def test_a_pooling_and_what_it_pools_advance_together(geometry: Geometry, data: st.DataObject, axis: int) -> None:
    """Each step computes the windows that it computes the voxels of, whatever else reads these."""
    along = geometry.axes[axis]
    wanted = [some(data.draw, along.sizes[tensor]) for tensor in along.outputs]
    regions = along.regions([Interval(own.start, own.stop) for own in wanted])
    step = data.draw(st.integers(1, 3))
    known = [
        [min(own.start + step * i * along.voxels(t), own.stop) for i in range(30)]
        for t, own in zip(along.outputs, wanted, strict=True)
    ]
    poolings = {
        along.sources[index][0]: Pooling(along.sources[index][0], index + 1, layer.window[axis])
        for index, layer in enumerate(geometry.network.layers)
        if isinstance(layer, Pool) and layer.slides
    }
    found = frontiers(along, np.array(known), regions, tuple(poolings.values()))
    assert (found >= frontiers(along, np.array(known), regions)).all()
    assert (np.diff(found) >= 0).all()
    for source, tensor, window in poolings.values():
        begin, end = found[tensor][:-1], found[tensor][1:]
        some_windows = end > begin
        assert (window * begin >= found[source][:-1])[some_windows].all()
        assert (window * end <= found[source][1:])[some_windows].all()


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=SLOW)
@given(geometries(), st.data(), st.integers(0, 2))
def test_frontiers_divide_regions_into_steps(geometry: Geometry, data: st.DataObject, axis: int) -> None:
    """Each step computes what is needed up to its end, of what steps before it computed or it computes itself."""
    along, edges = geometry.axes[axis], edges_of(geometry, axis)
    wanted = [some(data.draw, along.sizes[tensor]) for tensor in along.outputs]
    regions = along.regions([Interval(own.start, own.stop) for own in wanted])
    step = data.draw(st.integers(1, 3))
    ends = [
        [own.start + step * i * along.voxels(t) for t, own in zip(along.outputs, wanted, strict=True)]
        for i in range(30)
    ]
    ends = [[min(end, own.stop) for end, own in zip(known, wanted, strict=True)] for known in ends]
    found = [tuple(map(int, column)) for column in frontiers(along, np.array(ends).T, regions).T]
    for before, after in pairwise(found):
        assert all(a <= b for a, b in zip(before, after, strict=True))
    for known, frontier in zip(ends, found, strict=True):
        for tensor, end in zip(along.outputs, known, strict=True):
            assert frontier[tensor] >= end
        for index, sources in enumerate(along.sources):
            for voxel in range(regions[index + 1].lo, frontier[index + 1]):
                for source in sources:
                    assert all(needed < frontier[source] for needed in edges[index][voxel]), (index, voxel, known)
    if all(end == own.stop for end, own in zip(ends[-1], wanted, strict=True)):
        assert found[-1] == tuple(region.hi for region in regions)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=SLOW)
@given(geometries(), st.integers(0, 2))
def test_reach_is_the_largest_span_that_a_voxel_depends_on(geometry: Geometry, axis: int) -> None:
    """Along an axis that is long enough, some voxel has the whole of it before it, and none has more."""
    network = geometry.network
    reaches = [reach[axis] for reach in reaches_of(network)]
    for tensor, reach in enumerate(reaches):
        along = replace(geometry.axes[axis], outputs=(tensor,))
        for voxel in range(along.sizes[tensor]):
            region = along.regions([Interval(voxel, voxel + 1)])[0]
            assert region.size <= reach or _repeats(network)


def _repeats(network: Network) -> bool:
    """Return whether a face may be farther than what a layer needs away from the faces."""
    return any(isinstance(layer, Pad) or getattr(layer, "padding_mode", "zeros") != "zeros" for layer in network.layers)


def same(kernel: int, out: int = 2) -> Conv:
    side = (kernel // 2,) * 3
    return Conv((kernel,) * 3, out, padding=(side, side))


UNET = network_of(
    "unet",
    1,
    [
        Given(same(3), "enc"),
        Given(Pool((1, 2, 2)), "down"),
        Given(same(5), "mid"),
        Given(ConvTranspose((1, 2, 2), 2, (1, 2, 2)), "up"),
        Given(Concat(), "cat", ("enc", "up")),
        Given(Conv((1, 1, 1), 1), "head"),
    ],
)


def test_unet_reaches_as_counted_by_hand() -> None:
    assert period_of(UNET) == (1, 2, 2)
    by_name = dict(zip(("input", *UNET.names), reaches_of(UNET), strict=True))
    assert by_name["enc"] == (3, 3, 3)
    assert by_name["down"] == (3, 4, 4)
    assert by_name["mid"] == by_name["up"] == (7, 12, 12)
    assert by_name["cat"] == by_name["head"] == (7, 12, 12)
    geometry = admissible(UNET, (5, 9, 12))
    assert geometry.volume == (5, 10, 12)
    assert [str(step) for step in geometry.step(2)] == ["1", "2", "2"]
    assert geometry.axes[1].regions([Interval(4, 6)]) == ((0, 10), (0, 10), (0, 5), (2, 3), (4, 6), (4, 6), (4, 6))


@st.composite
def chains(draw: st.DrawFn) -> Network:
    ones = st.one_of(
        st.builds(Conv, sizes(1, 3), st.just(1)), st.builds(Pool, sizes(1, 3)), st.builds(MaxFilter, sizes(1, 3))
    )
    return Network("chain", 1, tuple(draw(st.lists(ones, min_size=1, max_size=5))))


@given(chains(), st.integers(0, 2))
def test_chains_have_the_same_field_of_view_and_margins(network: Network, axis: int) -> None:
    """One voxel of the plain network depends on its field of view, and behind a layer on a part of it."""
    fov, period = network.field_of_view, network.period
    twice: Vec3 = (fov[0] + period[0], fov[1] + period[1], fov[2] + period[2])
    along = geometry_of(network, twice).axes[axis]
    assert along.sizes[-1] == 2
    assert along.period == period[axis] == period_of(network)[axis]
    regions = along.regions([Interval(1, 2)])
    assert regions[0] == (period[axis], period[axis] + fov[axis])
    assert reaches_of(network)[-1] == fov
    for tensor, (margin, step) in enumerate(zip(network.margins, along.steps, strict=True)):
        # A margin counts voxels of the dense output, of which a strided tensor has one in `step`.
        assert regions[tensor].size == margin[axis] // step + 1


REFUSED = [
    (
        Given(Pad((3, 0, 0), (0, 0, 0), "reflect"), "pad"),
        (3, 4, 5),
        "node pad (pad 3x0x0 0x0x0 reflect) pads 3 voxels along z by reflection and gets 3, of which it can reflect 2; "
        "give a larger volume",
    ),
    (
        Given(Conv((1, 3, 1), 1, padding=((0, 1, 0), (0, 0, 0)), padding_mode="reflect"), "conv"),
        (3, 1, 5),
        "node conv (conv 1x3x1 -> 1 none padding 0x1x0 before, 0x0x0 behind reflect) pads 1 voxels along y by "
        "reflection and gets 1, of which it can reflect 0; give a larger volume",
    ),
    (
        Given(Conv((1, 3, 1), 1), "conv"),
        (3, 2, 5),
        "node conv (conv 1x3x1 -> 1 none) gets 3x2x5 voxels of a volume of 3x2x5, which is too few for one output; "
        "give a larger volume",
    ),
]


@pytest.mark.parametrize(("layer", "volume", "message"), REFUSED)
def test_volume_too_small_for_a_layer_is_refused(layer: Given, volume: Vec3, message: str) -> None:
    with pytest.raises(ShapeError) as caught:
        geometry_of(network_of("net", 1, [layer]), volume)
    assert str(caught.value) == message


def test_window_larger_than_the_image_counts_in_ceil_mode() -> None:
    """PyTorch pools one voxel by a window of two to one voxel, if it rounds up."""
    pool = network_of("net", 1, [Given(Pool((2, 2, 2), ceil=True), "pool")])
    assert geometry_of(pool, (1, 2, 3)).size(1) == (1, 1, 2)


def test_volume_that_does_not_divide_grows_or_is_refused() -> None:
    assert admissible(UNET, (1, 3, 4)).volume == (1, 4, 4)
    refusing = replace(UNET, wiring=replace(UNET.wiring, pad_to_period="refuse"))  # type: ignore[type-var]
    with pytest.raises(ShapeError, match=r"unet takes no volume of 1x3x4 voxels, and refuses to pad it to 1x4x4; crop"):
        admissible(refusing, (1, 3, 4))
    with pytest.raises(ShapeError, match="of 1x1x4 voxels is smaller than one period of unet, 1x2x2 voxels, along y"):
        admissible(UNET, (1, 1, 4))


def test_what_a_voxel_sees_is_found_in_bounded_time_where_voxels_are_upsampled_by_thousands() -> None:
    """Voxels of a period are taken together: one by one, four thousand of them took seconds."""
    layers = [Given(same(3, 1), "first"), Given(Upsample((1, 1, 4000)), "up")]
    layers += [Given(same(3, 1), f"after{number}") for number in range(40)]
    network = network_of("upsampled", 1, layers)
    began = process_time()
    assert seen_by_one(network) == (83, 83, 4)
    assert process_time() - began < 3
