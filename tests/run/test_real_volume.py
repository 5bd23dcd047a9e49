"""The shipped network on a real volume: the same prediction for every patch shape, primitive and number of threads."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from znnpy.kernels.reference import dense_by_fragments
from znnpy.kernels.table import TABLE
from znnpy.shapes import Vec3, text
from znnpy.trained import TrainedNetwork, load_network

pytestmark = pytest.mark.slow

SIZE = (46, 58, 70)  # input voxels: 20 x 32 x 44 come out
PATCHES = ((20, 32, 44), (4, 4, 4), (8, 16, 12), (12, 32, 4), (20, 4, 24), (4, 20, 44))


@pytest.fixture(scope="module")
def net() -> TrainedNetwork:
    return load_network("fib25_boundary")


@pytest.fixture(scope="module")
def grey(shared_data: Path) -> np.ndarray:
    with h5py.File(shared_data / "fib25_train.h5") as file:
        dataset = next(data for data in file.values() if data.ndim == 3)
        return np.asarray(dataset[: SIZE[0], : SIZE[1], : SIZE[2]])


@pytest.fixture(scope="module")
def exact(net: TrainedNetwork, grey: np.ndarray) -> np.ndarray:
    normalise = net.network.normalise
    assert normalise is not None
    x = (grey.astype(np.float64)[None, ..., None] - normalise.mean[0]) / normalise.std[0]
    return np.moveaxis(dense_by_fragments(net.network, net.weights, x)[0], -1, 0)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("patch", PATCHES, ids=text)
def test_every_patch_shape_gives_the_same_prediction(
    net: TrainedNetwork, grey: np.ndarray, exact: np.ndarray, patch: Vec3, threads: int
) -> None:
    assert np.abs(net(grey, patch=patch, threads=threads) - exact).max() <= 1e-5


@pytest.mark.parametrize("threads", [2, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("primitive", [p.name for p in TABLE if p.kind == "conv" and p.name.startswith("cpu.")])
def test_every_primitive_gives_the_same_prediction(
    net: TrainedNetwork, grey: np.ndarray, exact: np.ndarray, primitive: str, threads: int
) -> None:
    assert np.abs(net(grey, only=[primitive], threads=threads) - exact).max() <= 1e-5
