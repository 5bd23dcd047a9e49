"""Speeds of layers, measured on a real device."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_primitives import WITH_GPU
from znnpy.costs.store import CostStore
from znnpy.measure import gpu_layers
from znnpy.measure.gpu_layers import measured_rates
from znnpy.measure.layer_timer import LONG_SECONDS
from znnpy.network import Conv, Network, Pool
from znnpy.shapes import GPU_PRECISIONS, Precision


@pytest.mark.gpu
@pytest.mark.parametrize("precision", GPU_PRECISIONS)
def test_layers_on_a_real_device(
    cuda_device: Any, precision: Precision, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Measured rates are plausible and the same the second time, and nothing of them stays on the device."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gpu_layers, "VOLUMES", ((1, (48, 32), LONG_SECONDS),))
    machine = replace(WITH_GPU, gpu=cuda_device.gpu)
    network = Network("real", 1, (Conv((3, 2, 3), 16, "relu"), Pool((2, 2, 2)), Conv((3, 3, 3), 16, "tanh")))
    words: dict[str, Any] = {"vram_bytes": 2**31, "threads": 2, "store": CostStore(), "seconds": 60}
    before = cuda_device.allocated
    rates = measured_rates(cuda_device, machine, network, precision, **words)
    gc.collect()
    assert cuda_device.allocated == before
    monkeypatch.setattr(gpu_layers, "measure", lambda *_: pytest.fail("measured anew"))
    again = measured_rates(cuda_device, machine, network, precision, **words)
    assert again == rates
    assert {case.kind for case in rates.measured} == {"conv", "pool"}
    assert {case.precision for case in rates.measured} == {precision}
    assert len({case.maps for case in rates.measured if case.kind == "conv"}) == 2
    assert all(1e-3 < factor < 1e3 for sizes in rates.measured.values() for _, factor in sizes)
