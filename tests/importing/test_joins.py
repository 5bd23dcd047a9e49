"""Layers that stand for maxima, stacks, sums over maps and constant maps give what numpy gives."""

from __future__ import annotations

import numpy as np
import pytest

from tests.importing.test_builder import Array, Make, assert_gives, built, kinds
from znnpy.errors import NetworkFileError
from znnpy.importing.builder import Builder
from znnpy.importing.tensors import Tensor
from znnpy.layers import Conv, Maxout


def halves(builder: Builder, x: Tensor) -> tuple[Tensor, Tensor]:
    n = x.shape[1] // 2
    return builder.cut(x, 1, 0, n), builder.cut(x, 1, n, 2 * n)


@pytest.mark.parametrize("order", ["nczyx", "ncyx"])
@pytest.mark.parametrize("maps", [2, 6])
def test_maximum_is_over_pairs_of_maps(maps: int, order: str) -> None:
    size = (4, 6, 8) if "z" in order else (1, 6, 8)
    builder = assert_gives(
        lambda builder, x: builder.maximum(*halves(builder, x)),
        lambda image: np.maximum(image[:, : maps // 2], image[:, maps // 2 :]),
        maps,
        size,
        order,
    )
    assert Maxout in kinds(builder)


@pytest.mark.parametrize("dimension", [1, 2])
@pytest.mark.parametrize("maps", [2, 6])
def test_stacked_arrays_are_seen_one_by_one(dimension: int, maps: int) -> None:
    def make(builder: Builder, x: Tensor) -> Tensor:
        return builder.stacked(halves(builder, x), dimension).reshaped([1, maps, *x.shape[2:]])

    def expected(image: Array) -> Array:
        stacked = np.stack([image[:, : maps // 2], image[:, maps // 2 :]], dimension)
        return stacked.reshape(image.shape)

    assert_gives(make, expected, maps)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dimension", [1, 2])
def test_mean_over_a_part_of_the_maps_is_a_convolution(dimension: int, keep: bool) -> None:
    def make(builder: Builder, x: Tensor) -> Tensor:
        parts = x.reshaped([1, 2, 3, *x.shape[2:]])
        found = builder.over_maps(parts, dimension, 1 / parts.shape[dimension], keep=keep)
        return found.reshaped([1, 6 // parts.shape[dimension], *x.shape[2:]])

    def expected(image: Array) -> Array:
        found: Array = image.reshape(1, 2, 3, *image.shape[2:]).mean(dimension)
        return found

    assert kinds(assert_gives(make, expected, 6)) == [Conv]


def test_mean_of_maps_after_a_transpose_keeps_the_order() -> None:
    def make(builder: Builder, x: Tensor) -> Tensor:
        last = x.transposed([0, 2, 3, 4, 1])
        return builder.multiply(x, builder.over_maps(last, 4, 0.25, keep=True).transposed([0, 4, 1, 2, 3]))

    assert_gives(make, lambda image: image * image.mean(1, keepdims=True))


@pytest.mark.parametrize("maps", [1, 4])
def test_largest_map_is_a_maxout(maps: int) -> None:
    assert_gives(
        lambda builder, x: builder.add(builder.largest_map(x, 1, keep=True), x),
        lambda image: image.max(1, keepdims=True) + image,
        maps,
    )


def test_maps_of_known_values_are_joined() -> None:
    values = np.broadcast_to(np.array([2, -3], np.float32)[:, None, None, None], (1, 2, 4, 6, 8))
    for first in (True, False):
        assert_gives(
            lambda builder, x, first=first: builder.joined((values, x) if first else (x, values), 1),  # type: ignore[misc]
            lambda image, first=first: np.concatenate((values, image) if first else (image, values), 1),  # type: ignore[misc]
        )


NUMBERS = np.arange(4 * 6 * 8, dtype=np.float32).reshape(1, 1, 4, 6, 8)
REFUSED: list[tuple[Make, tuple[str, ...]]] = [
    (lambda builder, x: builder.joined((x, NUMBERS), 1), ("(1, 4, 4, 6, 8)", "(1, 1, 4, 6, 8)", "same at every voxel")),
    (lambda builder, x: builder.joined((x, NUMBERS[0]), 1), ("(1, 4, 6, 8)",)),
    (lambda builder, x: builder.maximum(x, builder.cut(x, 1, 0, 1)), ("(1, 4, 4, 6, 8)", "(1, 1, 4, 6, 8)")),
    (lambda builder, x: builder.over_maps(x, 2, 1.0, keep=False), ("dimension 2", "(1, 4, 4, 6, 8)")),
    (lambda builder, x: builder.largest_map(x, 3, keep=False), ("dimension 3",)),
]


@pytest.mark.parametrize(("make", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_depends_on_the_place_is_refused(make: Make, words: tuple[str, ...]) -> None:
    with pytest.raises(NetworkFileError) as caught:
        built(make, 4)
    assert str(caught.value).startswith("node node (test)")
    assert all(word in str(caught.value) for word in words)
