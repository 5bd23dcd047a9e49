"""Reshapes, transposes and broadcasts that are followed give what numpy gives for arrays."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from znnpy.importing.tensors import Factor, LayoutError, Tensor, combinations, kinds, whole
from znnpy.shapes import Vec3

Array = npt.NDArray[Any]
MAPS, SIZE = 12, (4, 6, 8)


def values(tensor: Tensor, array: Array) -> Array:
    """Return the array that a tensor stands for, where its node gives an array (c, z, y, x)."""
    at = [np.zeros((1,) * len(tensor.dims), np.int64) for _ in "czyx"]
    for dimension, dim in enumerate(tensor.dims):
        shape = [-1 if one == dimension else 1 for one in range(len(tensor.dims))]
        for number, axis in enumerate("czyx"):
            along = [found[axis] for found in combinations(dim, (axis,))]  # type: ignore[arg-type]
            at[number] = at[number] + np.asarray(along).reshape(shape)
    return np.broadcast_to(array[tuple(np.broadcast_arrays(*at))], tensor.shape)


def given(maps: int = MAPS, size: Vec3 = SIZE, order: str = "nczyx") -> tuple[Tensor, Array, Array]:
    """Return a tensor, its node's array (c, z, y, x), and the array in the order."""
    array = np.arange(maps * prod(size)).reshape(maps, *size)
    return whole("node", maps, size, order), array, array.transpose(["czyx".index(one) for one in order[1:]])[None]


def assert_same(tensor: Tensor, node: Array, expected: Array) -> None:
    assert tensor.shape == expected.shape
    np.testing.assert_array_equal(values(tensor, node), expected)


@pytest.mark.parametrize("order", ["nczyx", "nzyxc", "nxyzc"])
def test_whole_array_has_its_axes_in_order(order: str) -> None:
    tensor, node, array = given(order=order)
    assert_same(tensor, node, array)
    assert [kinds(dim) for dim in tensor.dims[1:]] == [[letter] for letter in order[1:]]


def test_axes_of_size_1_have_no_factors() -> None:
    tensor, node, array = given(1, (1, 6, 1))
    assert tensor.dims == ((), (), (), (Factor("y", 6),), ())
    assert_same(tensor, node, array)


def test_channels_last_and_back() -> None:
    tensor, node, array = given()
    last = tensor.transposed([0, 2, 3, 4, 1])
    assert_same(last, node, array.transpose(0, 2, 3, 4, 1))
    assert last.transposed([0, 4, 1, 2, 3]) == tensor


def test_channel_shuffle() -> None:
    tensor, node, array = given()
    shuffled = tensor.reshaped([1, 3, 4, *SIZE]).transposed([0, 2, 1, 3, 4, 5]).reshaped([1, 12, *SIZE])
    assert_same(shuffled, node, array.reshape(1, 3, 4, *SIZE).transpose(0, 2, 1, 3, 4, 5).reshape(1, 12, *SIZE))


def test_pixel_shuffle_and_space_to_depth() -> None:
    tensor, node, array = given(16)
    apart, order, joined = [1, 2, 2, 2, 2, *SIZE], [0, 1, 5, 2, 6, 3, 7, 4], [1, 2, 8, 12, 16]
    assert_same(
        tensor.reshaped(apart).transposed(order).reshaped(joined),
        node,
        array.reshape(apart).transpose(order).reshape(joined),
    )
    apart, order, joined = [1, 16, 2, 2, 3, 2, 4, 2], [0, 3, 5, 7, 1, 2, 4, 6], [1, 128, 2, 3, 4]
    assert_same(
        tensor.reshaped(apart).transposed(order).reshaped(joined),
        node,
        array.reshape(apart).transpose(order).reshape(joined),
    )


def test_repetition_by_a_new_dimension() -> None:
    tensor, node, array = given()
    wide, expected = tensor.reshaped([1, 12, 4, 1, 6, 8]), array.reshape(1, 12, 4, 1, 6, 8)
    assert_same(wide.tiled([1, 1, 1, 2, 1, 1]), node, np.tile(expected, [1, 1, 1, 2, 1, 1]))
    assert_same(wide.expanded([1, 12, 4, 2, 6, 8]), node, np.broadcast_to(expected, [1, 12, 4, 2, 6, 8]))
    assert_same(
        wide.expanded([-1, -1, -1, 2, -1, -1]).reshaped([1, 12, 8, 6, 8]), node, np.repeat(array, 2, axis=2)
    )  # fmt: skip
    assert_same(tensor.tiled([1, 2, 1, 1, 1]), node, np.tile(array, [1, 2, 1, 1, 1]))


def test_what_no_array_has_is_refused() -> None:
    tensor = given()[0]
    for shape in ([1, 5, 3, 6, 8], [1, 12, 4, 6, 7], [-1, -1, 6, 8, 12], [0]):
        with pytest.raises(LayoutError):
            tensor.reshaped(shape)
    with pytest.raises(LayoutError):
        tensor.reshaped([1, 8, 6, 6, 8])  # 8 holds 2 of the 4 planes of some maps only
    with pytest.raises(LayoutError):
        tensor.transposed([0, 1, 2, 3, 3])
    for shape in ([12, 4, 6, 8], [1, 12, 4, 6, 16]):
        with pytest.raises(LayoutError):
            tensor.expanded(shape)


def _factorised(total: int, rng: random.Random) -> list[int]:
    """Return random sizes whose product is `total`."""
    sizes = []
    while total > 1:
        size = rng.choice([n for n in range(1, total + 1) if total % n == 0])
        sizes.append(size)
        total //= size
    return sizes or [1]


def _step(tensor: Tensor, array: Array, rng: random.Random) -> tuple[Tensor, Array]:
    rank = len(tensor.dims)
    match rng.randrange(4):
        case 0:
            order = rng.sample(range(rank), rank)
            return tensor.transposed(order), array.transpose(order)
        case 1:
            shape = _regrouped(tensor.shape, rng)
            return tensor.reshaped(shape), array.reshape(shape)
        case 2:
            shape = _factorised(prod(tensor.shape), rng)
            return tensor.reshaped(shape), array.reshape(shape)
        case _:
            times = [rng.choice((1, 1, 1, 2)) for _ in range(rank)]
            return tensor.tiled(times), np.tile(array, times)


def _regrouped(shape: Sequence[int], rng: random.Random) -> list[int]:
    """Return a shape in which some dimensions are divided, and some neighbours joined."""
    parts = [n for size in shape for n in (_factorised(size, rng) if rng.random() < 0.5 else [size])]
    joined = [parts[0]]
    for n in parts[1:]:
        if rng.random() < 0.4:
            joined[-1] *= n
        else:
            joined.append(n)
    return joined


def test_random_chains_give_what_numpy_gives() -> None:
    done = 0
    for seed in range(400):
        rng = random.Random(seed)
        tensor, node, array = given(rng.choice((1, 4, 6)), (2, rng.choice((1, 3, 4)), 4))
        for _ in range(6):
            if array.size > 4000:
                break
            try:
                tensor, array = _step(tensor, array, rng)
            except LayoutError:
                continue
            done += 1
            assert_same(tensor, node, array)
    assert done > 1000
