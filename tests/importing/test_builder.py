"""Layers that stand for rearranged arrays give what numpy gives, by the definition of the layers."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from znnpy.errors import NetworkFileError
from znnpy.formats.wiring import Given, network_of
from znnpy.importing.builder import Builder
from znnpy.importing.simplify import read_by_outputs
from znnpy.importing.tensors import LayoutError, Tensor
from znnpy.kernels.whole import whole
from znnpy.layers import Conv, ConvTranspose, Crop, Scale, Upsample, has_weights
from znnpy.shapes import Vec3

Array = npt.NDArray[Any]
SIZE: Vec3 = (4, 6, 8)
Make = Callable[[Builder, Tensor], Tensor]


def built(make: Make, maps: int, size: Vec3 = SIZE, order: str = "nczyx") -> tuple[Builder, Tensor]:
    builder = Builder()
    x = builder.input(maps, size, order)
    builder.at("node", "test")
    return builder, make(builder, x)


def assert_gives(
    make: Make, expected: Callable[[Array], Array], maps: int = 4, size: Vec3 = SIZE, order: str = "nczyx"
) -> Builder:
    """Fail unless layers, after those that put their result in the usual order, give what numpy gives."""
    builder, found = built(make, maps, size, order)
    back = found if "z" in order else found.reshaped([*found.shape[:2], 1, *found.shape[2:]])
    found = builder.canonical(back)
    image = np.random.default_rng(3).standard_normal((maps, *size))
    given = image.transpose(["czyx".index(one) for one in order[1:]] if "z" in order else [0, 1, 2, 3])[None]
    given = given if "z" in order else given[:, :, 0]
    wanted = expected(given)
    wanted = wanted if "z" in order else wanted[:, :, None]
    drafts = read_by_outputs(builder.drafts, [found.node])
    network = network_of(
        "net", maps, [Given(draft.layer, draft.name, draft.reads) for draft in drafts], None, [found.node]
    )
    by_name = {draft.name: draft.weights for draft in drafts}
    weights = [by_name[name] for name, layer in zip(network.names, network.layers, strict=True) if has_weights(layer)]
    (result,) = whole(network, [one for one in weights if one is not None], image.transpose(1, 2, 3, 0))
    assert found.shape == wanted.shape
    np.testing.assert_allclose(result.transpose(3, 0, 1, 2), wanted[0], rtol=0, atol=1e-6)
    return builder


def kinds(builder: Builder) -> list[type]:
    return [type(draft.layer) for draft in builder.drafts]


def test_channel_shuffle_is_one_convolution() -> None:
    apart, order, back = [1, 2, 3, *SIZE], [0, 2, 1, 3, 4, 5], [1, 6, *SIZE]
    builder = assert_gives(
        lambda b, x: x.reshaped(apart).transposed(order).reshaped(back),
        lambda a: a.reshape(apart).transpose(order).reshape(back),
        6,
    )
    assert kinds(builder) == [Conv]


@pytest.mark.parametrize("block", [(2, 2, 2), (1, 2, 3), (1, 1, 2)])
def test_pixel_shuffle_is_one_transposed_convolution(block: Vec3) -> None:
    maps = 2 * prod(block)
    apart, order = [1, 2, *block, *SIZE], [0, 1, 5, 2, 6, 3, 7, 4]
    back = [1, 2, *(n * b for n, b in zip(SIZE, block, strict=True))]
    builder = assert_gives(
        lambda b, x: x.reshaped(apart).transposed(order).reshaped(back),
        lambda a: a.reshape(apart).transpose(order).reshape(back),
        maps,
    )
    assert kinds(builder) == [ConvTranspose]


def test_space_to_depth_is_one_convolution_with_a_stride() -> None:
    apart, order, back = [1, 3, 2, 2, 3, 2, 4, 2], [0, 3, 5, 7, 1, 2, 4, 6], [1, 24, 2, 3, 4]
    builder = assert_gives(
        lambda b, x: x.reshaped(apart).transposed(order).reshaped(back),
        lambda a: a.reshape(apart).transpose(order).reshape(back),
        3,
    )
    assert kinds(builder) == [Conv]
    assert builder.drafts[0].layer == Conv((2, 2, 2), 24, stride=(2, 2, 2))


@pytest.mark.parametrize("how", ["tiled", "expanded"])
def test_repetition_along_new_dimensions_is_an_upsampling(how: str) -> None:
    wide, times, back = [1, 4, 4, 1, 6, 1, 8, 1], [1, 1, 1, 2, 1, 3, 1, 1], [1, 4, 8, 18, 8]

    def repeated(builder: Builder, x: Tensor) -> Tensor:
        x = x.reshaped(wide)
        return (x.tiled(times) if how == "tiled" else x.expanded([1, 4, 4, 2, 6, 3, 8, 1])).reshaped(back)

    builder = assert_gives(repeated, lambda a: a.repeat(2, axis=2).repeat(3, axis=3))
    assert [draft.layer for draft in builder.drafts] == [Upsample((2, 3, 1))]


@pytest.mark.parametrize("order", ["nczyx", "nzyxc"])
def test_repeated_voxels_join_with_others_in_any_order_of_dimensions(order: str) -> None:
    """Keras upsamples arrays with channels last so, one axis after the other, and joins them with the skip."""
    at, maps = order.index("y"), order.index("c")

    def make(builder: Builder, x: Tensor) -> Tensor:
        shape = x.shape
        times = [2 if dimension == at + 1 else 1 for dimension in range(6)]
        twice = x.reshaped([*shape[: at + 1], 1, *shape[at + 1 :]]).tiled(times)
        twice = twice.reshaped([2 * n if dimension == at else n for dimension, n in enumerate(shape)])
        return _first(builder.concat([twice, twice], maps), order)

    def expected(array: Array) -> Array:
        twice = array.repeat(2, axis=at)
        both = np.concatenate([twice, twice], axis=maps)
        return both.transpose(0, 4, 1, 2, 3) if order.endswith("c") else both

    assert_gives(make, expected, order=order)


def _first(x: Tensor, order: str) -> Tensor:
    return x.transposed([0, 4, 1, 2, 3]) if order.endswith("c") else x


def test_repeated_maps_are_a_convolution() -> None:
    assert kinds(assert_gives(lambda b, x: x.tiled([1, 3, 1, 1, 1]), lambda a: np.tile(a, [1, 3, 1, 1, 1]))) == [Conv]


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("dimension", [2, 3, 4])
def test_cut_of_an_axis(dimension: int, step: int) -> None:
    index = (slice(None),) * dimension + (slice(1, 4, step),)
    builder = assert_gives(lambda b, x: b.cut(x, dimension, 1, 4, step), lambda a: a[index])
    assert kinds(builder) == [Crop] + [Conv] * (step - 1)


def test_cuts_of_several_axes_are_one_crop_if_nothing_reads_those_between() -> None:
    def cut(builder: Builder, x: Tensor) -> Tensor:
        for dimension in (2, 3, 4):
            x = builder.cut(x, dimension, 1, 3)
        return x

    builder = assert_gives(cut, lambda a: a[:, :, 1:3, 1:3, 1:3])
    assert len(read_by_outputs(builder.drafts, [builder.drafts[-1].name])) == 1


@pytest.mark.parametrize("step", [1, 2])
def test_cut_of_maps_is_a_convolution(step: int) -> None:
    builder = assert_gives(lambda b, x: b.cut(x, 1, 1, 4, step), lambda a: a[:, 1:4:step], 5)
    assert kinds(builder) == [Conv]
    assert_gives(lambda b, x: b.cut(x, 1, 1, 2), lambda a: a[:, 1:2], 5)


def test_cut_of_maps_that_were_shuffled_takes_the_shuffled_ones() -> None:
    apart, order, back = [1, 2, 3, *SIZE], [0, 2, 1, 3, 4, 5], [1, 6, *SIZE]
    assert_gives(
        lambda b, x: b.cut(x.reshaped(apart).transposed(order).reshaped(back), 1, 1, 4),
        lambda a: a.reshape(apart).transpose(order).reshape(back)[:, 1:4],
        6,
    )


@pytest.mark.parametrize("order", ["nczyx", "nzyxc"])
def test_cut_of_an_axis_keeps_the_order_of_dimensions(order: str) -> None:
    last = order.endswith("c")

    def make(builder: Builder, x: Tensor) -> Tensor:
        made = builder.cut(x, order.index("y"), 2, 5)
        return made.transposed([0, 4, 1, 2, 3]) if last else made

    def expected(array: Array) -> Array:
        cut = array.take(range(2, 5), order.index("y"))
        return cut.transpose(0, 4, 1, 2, 3) if last else cut

    assert_gives(make, expected, order=order)


@pytest.mark.parametrize("sides", [(2, 3), (0, 1), (1, 0)])
def test_maps_of_zeros_are_added(sides: tuple[int, int]) -> None:
    builder = assert_gives(
        lambda b, x: b.pad_maps(x, *sides), lambda a: np.pad(a, [(0, 0), sides, (0, 0), (0, 0), (0, 0)])
    )
    assert kinds(builder) == [Conv]


def test_pad_with_negative_sizes_cuts() -> None:
    assert_gives(
        lambda b, x: b.pad(x, (1, -1, 0), (-1, 2, 0), "replicate"),
        lambda a: np.pad(a[:, :, :-1, 1:], [(0, 0), (0, 0), (1, 0), (0, 2), (0, 0)], mode="edge"),
    )


def test_images_are_planes_of_depth_1() -> None:
    size: Vec3 = (1, 6, 8)
    weight = np.random.default_rng(0).standard_normal((2, 3, 3, 3)).astype(np.float32)
    builder, made = built(lambda b, x: b.conv(x, weight, None, padding=(1, 1)), 3, size, "ncyx")
    assert made.shape == (1, 2, 6, 8)
    assert builder.drafts[0].layer == Conv((1, 3, 3), 2, padding=((0, 1, 1), (0, 1, 1)))
    apart, order, back = [1, 1, 2, 2, 6, 8], [0, 1, 4, 2, 5, 3], [1, 1, 12, 16]
    assert_gives(
        lambda b, x: x.reshaped(apart).transposed(order).reshaped(back),
        lambda a: a.reshape(apart).transpose(order).reshape(back),
        4,
        size,
        "ncyx",
    )


def test_linear_over_the_last_dimension_is_a_convolution() -> None:
    weight = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    bias = np.asarray([1, 2, 3], np.float32)
    builder = assert_gives(
        lambda b, x: b.linear(x.transposed([0, 2, 3, 4, 1]), weight, bias).transposed([0, 4, 1, 2, 3]),
        lambda a: (a.transpose(0, 2, 3, 4, 1) @ weight.T + bias).transpose(0, 4, 1, 2, 3),
    )
    assert kinds(builder) == [Conv]


def test_sums_of_shuffled_arrays_are_of_what_stands_at_one_place() -> None:
    apart, order, back = [1, 2, 2, *SIZE], [0, 2, 1, 3, 4, 5], [1, 4, *SIZE]
    with_shuffled = assert_gives(
        lambda b, x: b.concat([x, x.reshaped(apart).transposed(order).reshaped(back)], 1),
        lambda a: np.concatenate([a, a.reshape(apart).transpose(order).reshape(back)], axis=1),
    )
    assert len(with_shuffled.drafts) == 2
    assert_gives(
        lambda b, x: b.add(x.transposed([0, 2, 3, 4, 1]), x.transposed([0, 2, 3, 4, 1])).transposed([0, 4, 1, 2, 3]),
        lambda a: a + a,
    )


def test_concat_of_arrays_in_another_order_has_that_order() -> None:
    def make(builder: Builder, x: Tensor) -> Tensor:
        last = x.transposed([0, 2, 3, 4, 1])
        made = builder.concat([last, builder.activation(last, "relu")], 4)
        assert made.shape == (1, *SIZE, 8)
        return made.transposed([0, 4, 1, 2, 3])

    assert_gives(make, lambda a: np.concatenate([a, np.maximum(a, 0)], axis=1))


def test_batch_norm_is_a_scale_computed_in_float64() -> None:
    rng = np.random.default_rng(2)
    weight, bias, mean = (rng.standard_normal(4).astype(np.float32) for _ in range(3))
    variance = rng.uniform(1e-4, 2, 4).astype(np.float32)

    def norm(array: Array) -> Array:
        w, b, m, v = (one.astype(np.float64).reshape(1, 4, 1, 1, 1) for one in (weight, bias, mean, variance))
        return (array - m) / np.sqrt(v + 1e-5) * w + b

    builder, made = built(lambda b, x: b.batch_norm(x, weight, bias, mean, variance, 1e-5), 4)
    assert made.node == "node"
    assert kinds(builder) == [Scale]
    image = np.random.default_rng(4).standard_normal((1, 4, *SIZE))
    weights = builder.drafts[0].weights
    assert weights is not None
    scale, shift = (one.reshape(1, 4, 1, 1, 1) for one in (weights.weight, weights.bias))
    np.testing.assert_allclose(image * scale + shift, norm(image), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda b, x: b.conv(x, np.ones((2, 3, 1, 1, 1), np.float32), None), ("3", "4")),
        (lambda b, x: b.conv(x, np.ones((2, 4, 1, 1, 1)), None), ("float64",)),
        (lambda b, x: b.conv(x, np.full((2, 4, 1, 1, 1), np.nan, np.float32), None), ("not finite", "8 of 8")),
        (lambda b, x: b.conv(x, np.ones((2, 4, 7, 1, 1), np.float32), None), ("4x6x8",)),
        (lambda b, x: b.prelu(x, np.ones(3, np.float32)), ("3 slopes",)),
        (lambda b, x: b.softmax(x, 2), ("softmax",)),
        (lambda b, x: b.cut(x, 2, 3, 3), ("3 to 3",)),
        (lambda b, x: b.canonical(x.reshaped([1, 16, 6, 8])), ("maps",)),
        (lambda b, x: b.concat([x, b.pool(x, "max", (2, 2, 2))], 1), ("4x6x8", "2x3x4")),
        (lambda b, x: b.upsample(x, "nearest", (5, 6, 8)), ("4x6x8", "5x6x8")),
    ],
)
def test_what_no_layer_does_is_refused_by_the_node(make: Make, words: tuple[str, ...]) -> None:
    with pytest.raises((LayoutError, NetworkFileError)) as caught:
        built(make, 4)
    assert all(word in str(caught.value) for word in ("node node (test)", *words))
