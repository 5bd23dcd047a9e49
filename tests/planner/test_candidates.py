"""Patch shapes worth a look."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from znnpy.network import Conv, MaxFilter, Network, Pool
from znnpy.patches import cover
from znnpy.planner.candidates import all_sizes, axis_sizes, between, candidates, spans, thinned


@given(st.integers(1, 3000), st.integers(1, 30))
def test_axis_sizes_are_the_even_cuts(length: int, period: int) -> None:
    """ceil(length / i), rounded up to the period, for every i: none forgotten, none twice."""
    cuts = {ceil(ceil(length / i) / period) * period for i in range(1, length + 1)}
    fewest = {ceil(length / size): size for size in sorted(cuts, reverse=True)}  # the smallest for a count of patches
    assert axis_sizes(length, period) == tuple(sorted(fewest.values(), reverse=True))


def test_axis_sizes_of_a_paper_network() -> None:
    assert axis_sizes(512, 8) == (
        512, 256, 176, 128, 104, 88, 80, 64, 56, 48, 40, 32, 24, 16, 8,
    )  # fmt: skip
    assert axis_sizes(1, 4) == (4,)
    assert axis_sizes(5, 1) == (5, 3, 2, 1)


def test_thinned_keeps_both_ends() -> None:
    sizes = tuple(range(1000, 0, -1))
    kept = thinned(sizes, 4)
    assert kept == (1000, 100, 10, 1)
    assert thinned(sizes[:3], 4) == sizes[:3]


def test_between_neighbours_seen() -> None:
    sizes = (512, 256, 176, 128, 104, 88, 80)
    seen = (512, 128, 80)
    assert between(sizes, seen, 128) == ((512, 128, 80), [256, 176, 104, 88])
    assert between(sizes, seen, 512) == ((512, 128), [256, 176])
    assert between(sizes, seen, 80) == ((128, 80), [104, 88])
    assert between(sizes, sizes, 128) == ((176, 128, 104), [])


def test_a_candidate_counts_what_the_network_says(tiny_network: Callable[..., Network]) -> None:
    network = tiny_network()
    output = (9, 7, 5)
    found = list(candidates(network, output, all_sizes(network, output)))
    assert len({c.patch for c in found}) == len(found) > 20
    for c in found:
        shapes = network.layer_shapes(c.patch)
        assert c.voxels == (prod(shapes[0].in_shape[:4]), *(prod(s.out_shape[:4]) for s in shapes))
        # conv, pool, conv, conv: what the first gives need not be written if it is pooled at once
        assert c.largest_bytes == max(s.in_bytes for s in (shapes[0], *shapes[2:]))
        assert c.patches == len(cover(output, c.patch))


def test_a_convolution_and_the_pooling_behind_it_are_one_span(tiny_network: Callable[..., Network]) -> None:
    conv, pool = Conv((1, 1, 1), 2), Pool((2, 2, 2))
    network = tiny_network(pool, conv, pool, pool, conv, conv, pool, MaxFilter((2, 1, 1)))
    assert spans(network) == ((0, 0), (1, 2), (3, 3), (4, 4), (5, 6), (7, 7))


@pytest.mark.parametrize("room", [10_000, 40_000])
def test_room_leaves_out_what_cannot_fit(tiny_network: Callable[..., Network], room: int) -> None:
    network = tiny_network()
    output = (40, 30, 50)
    everything = list(candidates(network, output, all_sizes(network, output)))
    fitting = list(candidates(network, output, all_sizes(network, output, room), room))
    assert {c.patch for c in fitting} == {c.patch for c in everything if c.largest_bytes <= room}
    assert 0 < len(fitting) < len(everything)
