"""The definitions themselves, against loops over single voxels, and the two ways to the dense result."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.closeness import fragments, random_input, random_weights
from znnpy.kernels import reference
from znnpy.kernels.contract import ConvWeights
from znnpy.network import Conv, MaxFilter, Maxout, Network, Pool
from znnpy.shapes import ACTIVATIONS, ConvShape, PoolShape

if TYPE_CHECKING:
    from znnpy.network import Layer
    from znnpy.shapes import Activation, Vec3


def test_convolution_is_a_cross_correlation_voxel_by_voxel() -> None:
    shape = ConvShape(2, 2, 3, (4, 3, 5), (2, 1, 3))
    x, w = random_input(shape).astype(np.float64), random_weights(shape)
    weight = w.weight.astype(np.float64)
    out = reference.convolve(x, weight, w.bias)
    assert out.shape == shape.out_shape
    assert out.dtype == np.float64
    for s, z, y, x0, g in product(*map(range, shape.out_shape)):
        value = float(w.bias[g])
        for dz, dy, dx, f in product(range(2), range(1), range(3), range(2)):
            value += x[s, z + dz, y + dy, x0 + dx, f] * weight[g, f, dz, dy, dx]
        assert out[s, z, y, x0, g] == pytest.approx(value, rel=1e-12)


EXPECTED: dict[Activation, Callable[[list[float]], list[float]]] = {
    "none": lambda v: v,
    "relu": lambda v: [max(e, 0.0) for e in v],
    "tanh": lambda v: [float(np.tanh(e)) for e in v],
    "sigmoid": lambda v: [1 / (1 + float(np.exp(-e))) for e in v],
    "softmax": lambda v: [float(np.exp(e)) / sum(float(np.exp(u)) for u in v) for e in v],
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_equal_their_formulas(activation: Activation) -> None:
    values = [-3.0, 0.0, 0.5, 7.0]
    assert reference.activate(np.array([values]), activation)[0] == pytest.approx(EXPECTED[activation](values))


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_activations_do_not_overflow(activation: Activation) -> None:
    assert np.isfinite(reference.activate(np.array([[-1e4, 1e4]]), activation)).all()


def test_fragments_equal_maxima_voxel_by_voxel() -> None:
    shape = PoolShape(2, 2, (5, 8, 3), (2, 3, 1))
    x = random_input(shape)
    out = reference.fragments(x, shape.p)
    assert out.shape == shape.out_shape
    for s, oz, oy in product(range(2), range(2), range(3)):
        for z, y, x0, f in product(*map(range, out.shape[1:])):
            window = x[s, 2 * z + oz : 2 * z + oz + 2, 3 * y + oy : 3 * y + oy + 3, x0, f]
            assert out[(s * 2 + oz) * 3 + oy, z, y, x0, f] == window.max()


@pytest.mark.parametrize(
    "shape", [PoolShape(2, 2, (5, 8, 3), (2, 3, 1)), PoolShape(1, 3, (9, 1, 7), (1, 1, 4))], ids=str
)
def test_fragments_of_selected_windows_equal_all_fragments_there(shape: PoolShape) -> None:
    x = random_input(shape)
    x[0, 2, 0, 1, 1] = np.nan
    found = fragments(x, shape.p)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, reference.fragments(x, shape.p))


def test_plain_pooling_equals_the_fragment_of_offset_zero() -> None:
    x = random_input(PoolShape(1, 2, (5, 8, 5), (2, 3, 2)))
    np.testing.assert_array_equal(
        reference.max_pool(x, (2, 3, 2))[:, :2, :2, :2], reference.fragments(x, (2, 3, 2))[:1]
    )


def test_recombined_fragments_equal_the_max_filter() -> None:
    windows: list[Vec3] = [(2, 1, 3), (1, 2, 2)]
    x = random_input(PoolShape(2, 3, (7, 11, 23), (1, 1, 1)))
    x = x[:, :7, :11, :23]
    first = reference.fragments(x, windows[0])
    np.testing.assert_array_equal(reference.recombine(first, windows[:1]), reference.max_filter(x, windows[0]))
    second = reference.fragments(first, windows[1])
    assert reference.recombine(second, windows).shape == (2, 6, 10, 18, 3)


def test_maxout_takes_the_maximum_of_neighbouring_maps() -> None:
    x = np.arange(12.0).reshape(1, 1, 1, 2, 6)
    np.testing.assert_array_equal(reference.maxout(x, 3), [[[[[2, 5], [8, 11]]]]])


NETWORKS: list[tuple[Layer, ...]] = [
    (Conv((2, 3, 1), 3, "relu"), Pool((2, 2, 1)), Conv((3, 2, 3), 2, "tanh")),
    (Pool((2, 1, 3)), Conv((2, 2, 2), 4, "sigmoid"), Pool((1, 2, 2)), Conv((1, 1, 1), 3, "softmax")),
    (Conv((2, 2, 2), 4), Maxout(2), Pool((2, 2, 2)), Pool((1, 1, 2)), MaxFilter((1, 2, 1)), Conv((1, 2, 1), 1, "relu")),
    (Conv((1, 2, 2), 2, "relu"), Pool((1, 3, 2))),
]


@pytest.mark.parametrize("layers", NETWORKS, ids=lambda layers: " | ".join(map(str, layers)))
def test_two_ways_to_the_dense_result_agree(layers: tuple[Layer, ...]) -> None:
    network = Network("odd", 2, layers)
    weights = [
        random_weights(ConvShape(1, network.maps[i], conv.out, conv.kernel, conv.kernel), seed=i)
        for i in network.weighted
        if isinstance(conv := layers[i], Conv)
    ]
    out: Vec3 = network.period[0] * 2, network.period[1], network.period[2] * 2
    x = np.random.default_rng(3).standard_normal((2, *network.patch_in(out), 2))
    dense = reference.dense_by_fragments(network, weights, x)
    assert dense.shape == (2, *out, network.output_channels)
    np.testing.assert_allclose(dense, reference.dense_by_sliding(network, weights, x), rtol=1e-12, atol=1e-13)
    at: list[Vec3] = [(0, 0, 0), (out[0] - 1, out[1] - 1, out[2] - 1)]
    chosen = reference.dense_by_sliding(network, weights, x, at)
    np.testing.assert_allclose(chosen, np.stack([dense[:, *p] for p in at], axis=1), rtol=1e-12, atol=1e-13)


def test_network_applies_the_weights_of_each_convolution() -> None:
    network = Network("two", 1, (Conv((1, 1, 1), 1), Conv((1, 1, 1), 1)))
    one = ConvWeights(np.full((1, 1, 1, 1, 1), 2, np.float32), np.zeros(1, np.float32))
    two = ConvWeights(np.full((1, 1, 1, 1, 1), 3, np.float32), np.ones(1, np.float32))
    assert reference.dense_by_fragments(network, [one, two], np.ones((1, 1, 1, 1, 1))).item() == 7
    with pytest.raises(ValueError, match="shorter"):
        reference.dense_by_fragments(network, [one], np.ones((1, 1, 1, 1, 1)))
