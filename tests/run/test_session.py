"""Sessions against the float64 sliding window: odd networks, several patch shapes, every primitive, 1 and 2 threads."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.flat_requests import make_plan
from tests.support.odd_networks import NETWORKS, ODDER, assert_dense, definition, small, some_volume
from tests.support.tiers import one_in
from znnpy.errors import ShapeError, ValuesOverflowError, VolumeError
from znnpy.formats.weights import random_weights
from znnpy.kernels.contract import ConvWeights, Primitive
from znnpy.kernels.cpu.native import library as native
from znnpy.kernels.table import TABLE, find
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.machine import Limits, this_machine
from znnpy.network import Conv, Network, Normalise, Pool
from znnpy.planner.validate import check_runs
from znnpy.run.session import Session
from znnpy.trained import TrainedNetwork, load_network


@pytest.mark.slow
@pytest.mark.parametrize("network", one_in(2, NETWORKS + ODDER), ids=lambda n: n.name)
def test_equals_the_sliding_window_for_any_patch(network: Network) -> None:
    trained = TrainedNetwork(network, random_weights(network, seed=3))
    volume = some_volume(network, seed=11)
    exact = definition(trained, volume)
    period, whole = network.period, network.round_up(exact.shape[1:])
    patches = {
        None,  # what the planner likes best
        period,  # the smallest there is
        whole,  # the volume in one piece, reaching beyond it
        (whole[0], period[1], 2 * period[2]),
        (2 * period[0], whole[1], period[2]),
    }
    for patch in patches:
        assert_dense(trained(volume, patch=patch, threads=2), exact)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("primitive", [p.name for p in TABLE if p.kind == "conv" and p.name.startswith("cpu.")])
def test_every_primitive_gives_the_same_prediction(primitive: str, threads: int) -> None:
    network = NETWORKS[0]
    trained = TrainedNetwork(network, random_weights(network, seed=5))
    volume = some_volume(network, seed=12)
    assert_dense(trained(volume, only=[primitive], threads=threads), definition(trained, volume))


IN_ONE = pytest.mark.skipif(native.why_not(this_machine()) is not None, reason="the kernels were not compiled")


def run_one_patch(trained: TrainedNetwork, table: tuple[Primitive, ...], raw: np.ndarray, threads: int) -> np.ndarray:
    """Run the plan that `table` allows for the whole of `raw` as one patch: (maps, z, y, x)."""
    network = trained.network
    size = network.dense_size(raw.shape[1:])
    plan = make_plan(network, size, this_machine(), Limits(2**32, threads), table=table, patch=size, columns=False)
    check_runs(plan, network, this_machine())
    pooled = sum(isinstance(layer, Pool) for layer in network.layers)
    alone = any(primitive.kind == "pool" for primitive in table)
    assert len(plan.choices) == len(network.layers) - (0 if alone else pooled)
    out = np.full((network.output_channels, *size), np.nan, np.float32)
    with ThreadPool(threads) as pool, Session(plan.main, network, trained.weights, pool) as session:
        session.run(raw, out)
    return out


@pytest.mark.slow
@IN_ONE
@pytest.mark.parametrize("threads", [1, 2])
def test_pooling_within_the_convolution_changes_rounding_alone(threads: int) -> None:
    """The shipped network runs with and without fused primitives."""
    trained = load_network("fib25_boundary")
    z, y, x = trained.network.patch_in((4, 8, 12))
    cells = np.random.default_rng(15).integers(60, 200, (8, 8, 8), np.uint8)  # blobs: to noise it says 0
    raw = np.kron(cells, np.ones((8, 8, 8), np.uint8))[None, :z, :y, :x]
    convs = tuple(p for p in TABLE if p.name in ("cpu.conv.fft_lanes", "cpu.conv.direct"))
    apart = run_one_patch(trained, (find("cpu.conv.direct"), find("cpu.pool.fragments")), raw, threads)
    in_one = run_one_patch(trained, convs, raw, threads)
    assert_dense(in_one, definition(trained, raw))
    assert apart.max() > 0.1
    assert np.abs(apart - in_one).max() <= 1e-5  # a product of shifts against a transform


@pytest.mark.slow
@IN_ONE
def test_overflow_in_a_fused_layer_is_named() -> None:
    network = small("hot", 1, Conv((2, 2, 2), 3, "relu"), Pool((2, 2, 2)))
    weights = (ConvWeights(np.full((3, 1, 2, 2, 2), 3e38, np.float32), np.zeros(3, np.float32)),)
    raw = np.full((1, *network.patch_in((4, 4, 4))), 255, np.uint8)
    with pytest.raises(ValuesOverflowError, match=r"layer 0 \(conv 2x2x2 -> 3 relu\): \d+ of \d+ values"):
        run_one_patch(TrainedNetwork(network, weights), (find("cpu.conv.fft_lanes"),), raw, 1)


@pytest.mark.slow
def test_reflected_output_is_as_large_as_the_input() -> None:
    network = NETWORKS[3]  # an even field of view along z: 5, 8, 5
    trained = TrainedNetwork(network, random_weights(network, seed=6))
    volume = some_volume(network, seed=13)
    before = [(fov - 1) // 2 for fov in network.field_of_view]
    after = [fov - 1 - b for fov, b in zip(network.field_of_view, before, strict=True)]
    padded = np.pad(volume, [(0, 0), *zip(before, after, strict=True)], mode="reflect")
    assert_dense(trained(volume, border="reflect"), definition(trained, padded))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["u1", ">u2", "<i4", "f2", ">f4", "f8"])
def test_every_real_dtype_is_normalised_alike(dtype: str) -> None:
    network = Network("n", 1, (Conv((2, 2, 2), 2, "none"),), Normalise((130.0,), (33.5,)))
    trained = TrainedNetwork(network, random_weights(network, seed=7))
    volume = some_volume(network, seed=14)
    assert_dense(trained(volume.astype(dtype)), definition(trained, volume))


def test_large_offsets_lose_no_digits() -> None:
    """Grey values near 2^30 with a spread of 100: float32 alone would leave one digit."""
    network = Network("n", 1, (Conv((2, 2, 2), 2, "none"),), Normalise((2.0**30,), (33.5,)))
    trained = TrainedNetwork(network, random_weights(network, seed=8))
    volume = some_volume(network, seed=15).astype(np.int32) + 2**30
    assert_dense(trained(volume), definition(trained, volume))


@pytest.mark.slow
@pytest.mark.parametrize("normalise", [None, Normalise((0.0,), (1e-30,))], ids=["as stored", "normalised"])
def test_values_beyond_float32_are_refused(normalise: Normalise | None) -> None:
    network = Network("n", 1, (Pool((2, 1, 1)),), normalise)
    volume = np.ones((3, 3, 3))
    volume[1, 1, 1] = 1e300 if normalise is None else 1e10
    with pytest.raises(ValuesOverflowError, match=r"values up to 1e\+(300|10), .* largest number 3\.40282e\+38"):
        TrainedNetwork(network, ())(volume)


@pytest.mark.slow
def test_overflow_names_its_layer() -> None:
    network = Network("n", 1, (Conv((2, 2, 2), 2, "relu"), Conv((1, 1, 1), 2, "relu"), Conv((2, 2, 2), 1, "sigmoid")))
    weights = random_weights(network, seed=9)
    weights[1].weight[:] = 3e38
    volume = some_volume(network, seed=16)
    with pytest.raises(ValuesOverflowError, match=r"^output voxels .*: layer 1 \(conv 1x1x1 -> 2 relu\): "):
        TrainedNetwork(network, weights)(volume)


@pytest.mark.slow
def test_nan_in_the_array_is_counted_and_located() -> None:
    network = NETWORKS[0]
    volume = some_volume(network, seed=17).astype(np.float32)
    volume[0, 2, 3, 4] = np.nan
    volume[0, 3, 3, 4] = np.inf
    with pytest.raises(VolumeError, match=r"2 .*\(2, 3, 4\)"):
        TrainedNetwork(network, random_weights(network, seed=1))(volume)


@pytest.mark.slow
def test_volume_smaller_than_the_field_of_view_is_refused_with_numbers() -> None:
    network = NETWORKS[0]
    fov = network.field_of_view
    volume = np.zeros((fov[0], fov[1] - 2, fov[2]), np.uint8)
    with pytest.raises(ShapeError, match="at least 2 more voxels"):
        TrainedNetwork(network, random_weights(network, seed=1))(volume)
