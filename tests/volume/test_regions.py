"""Regions against a mask of the elements they stand for."""

from __future__ import annotations

import numpy as np
import pytest

from znnpy.volume.regions import Region, pieces, run_of


def mask(shape: tuple[int, ...], regions: list[Region]) -> np.ndarray:
    counts = np.zeros(shape, int)
    for region in regions:
        assert region.elements == counts[region.slices].size > 0
        counts[region.slices] += 1
    return counts


def test_difference_holds_every_other_element_once() -> None:
    rng = np.random.default_rng(3)
    shape = (5, 6, 7)
    for _ in range(100):
        ends = np.sort(rng.integers(0, np.array([[6], [7], [8]]), (4, 3, 2)), axis=2)
        holes = [Region(tuple(map(int, end[:, 0])), tuple(map(int, end[:, 1]))) for end in ends]
        box = Region((1, 0, 2), (5, 6, 6))
        expected = np.zeros(shape, int)
        expected[box.slices] = 1
        for hole in holes:
            expected[hole.slices] = 0
        np.testing.assert_array_equal(mask(shape, list(box.without(holes))), expected)


@pytest.mark.parametrize("shape", [(11,), (4, 5), (2, 3, 4), (2, 3, 2, 3)], ids=str)
def test_range_of_elements_is_a_few_regions(shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))
    for first in range(count + 1):
        for end in range(count + 1):
            expected = np.zeros(count, int)
            expected[first:end] = 1
            regions = list(run_of(shape, first, end))
            np.testing.assert_array_equal(mask(shape, regions), expected.reshape(shape))
            assert len(regions) <= 2 * len(shape) - 1


def test_regions_are_clipped_and_shifted() -> None:
    region = Region((1, 2), (4, 6))
    assert region.shape == (3, 4)
    assert region.clipped(Region((2, 0), (9, 3))) == Region((2, 2), (4, 3))
    assert region.clipped(Region((7, 0), (9, 3))).elements == 0
    assert region.shifted((-1, 5)) == Region((0, 7), (3, 11))


@pytest.mark.parametrize(("elements", "chunks"), [(1, 1), (40, 99), (10_000, 3), (10_000, 99), (150, 99)])
def test_pieces_cut_no_chunk(elements: int, chunks: int) -> None:
    shape, chunk, region = (2, 9, 11, 10), (1, 3, 4, 2), Region((0, 2, 1, 3), (2, 9, 10, 10))
    found = list(pieces(region, chunk, elements=elements, chunks=chunks))
    expected = np.zeros(shape, int)
    expected[region.slices] = 1
    np.testing.assert_array_equal(mask(shape, found), expected)
    seen: dict[tuple[int, ...], Region] = {}
    for piece in found:
        held = {
            tuple(int(at) // size for at, size in zip(where, chunk, strict=True))
            for where in np.argwhere(mask(shape, [piece]))
        }
        assert not held & seen.keys()
        seen.update(dict.fromkeys(held, piece))
        assert len(held) == 1 or (len(held) <= chunks and 24 * len(held) <= elements)
    assert len(found) == 1 or len(found) > 1 >= min(chunks, elements // 24) / len(seen)


def test_thousands_of_holes_are_cut_out() -> None:
    holes = [Region((0, at, 0, 0), (1, at + 1, 6, 6)) for at in range(1, 10_000, 2)]
    parts = sorted(part.lo[1] for part in Region((0, 0, 0, 0), (1, 10_000, 6, 6)).without(holes))
    assert parts == list(range(0, 10_000, 2))
    assert list(Region((0, 40, 0, 0), (1, 41, 6, 6)).without(holes)) == [Region((0, 40, 0, 0), (1, 41, 6, 6))]
