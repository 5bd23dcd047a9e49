"""A network with its weights in memory is taken wherever a network file is."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

import znnpy
from tests.support import small_unet
from znnpy.formats.weights import random_weights
from znnpy.verify import verify


@pytest.fixture
def net(tmp_path: Path) -> znnpy.TrainedNetwork:
    network = small_unet.network(tmp_path)
    return znnpy.TrainedNetwork(network, random_weights(network))


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "volume.h5", "w") as file:
        file["raw"] = np.random.default_rng(0).integers(0, 256, (19, 22, 25), np.uint8)
    return tmp_path / "volume.h5"


def test_network_in_memory_is_planned_run_resumed_and_verified(net: znnpy.TrainedNetwork, volume: Path) -> None:
    out = volume.with_name("out.h5")
    assert znnpy.plan(net, volume=volume, calibrate=False).output == (19, 22, 25)
    znnpy.infer(volume, net, out=out, ram="4G", calibrate=False)
    with h5py.File(volume) as given, h5py.File(out) as found:
        expected = net(given["raw"][()], calibrate=False)
        assert np.abs(found["prediction"][()] - expected).max() <= 1e-5 * np.abs(expected).max()
    assert verify(out, volume, network=net, samples=3).samples >= 3
    znnpy.infer(volume, net, out=out, resume=True, calibrate=False)  # it is finished
    other = znnpy.TrainedNetwork(net.network, random_weights(net.network, seed=1))
    with pytest.raises(znnpy.ResumeError, match="weights"):
        znnpy.infer(volume, other, out=out, resume=True, calibrate=False)
    with pytest.raises(znnpy.VerifyError, match="weights"):
        verify(out, volume, network=other, samples=3)


def test_meaning_that_a_network_in_memory_lacks_is_refused(net: znnpy.TrainedNetwork, volume: Path) -> None:
    with pytest.raises(znnpy.ShapeError, match="does not slide"):
        znnpy.plan(net, volume=volume, meaning="sliding")
