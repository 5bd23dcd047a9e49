"""Layers of a GPU whose tensors are in the memory of the host, timed by themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.closeness import MACHINE
from tests.support.emulator import EMULATED_GPU, EmulatedDevice, needs_compiler
from znnpy.errors import DeviceError, DeviceLostError
from znnpy.files import cache_folder
from znnpy.kernels.contract import Variant
from znnpy.kernels.reference import convolve
from znnpy.kernels.table import IN_HOST_RAM
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.measure.budget import ON_GPU, Placement
from znnpy.measure.fftw_wisdom import _digest, _facts
from znnpy.measure.layer_bench import HostRamLayer
from znnpy.measure.layer_timer import CpuTimer, GpuTimer, HostRamTimer, timer_on
from znnpy.shapes import ConvShape

pytestmark = pytest.mark.slow

(HOST_RAM,) = IN_HOST_RAM
SHAPE = ConvShape(2, 3, 4, (6, 7, 8), (3, 2, 3), "relu")
DIRECT = Variant.of(
    images=1, planes=2, maps_in=2, maps_out=3, order="outputs", inner="gpu.conv.direct", inner_kernel="shared"
)


def test_it_computes_the_layer_between_arrays_of_the_host(device: Any) -> None:
    with ThreadPool(2) as pool:
        layer = HostRamLayer(device, pool, HOST_RAM, SHAPE, DIRECT)
        layer.run()
    values = layer.values
    assert values.weights is not None
    x = np.resize(values.block, SHAPE.in_shape).astype(np.float64)
    exact = convolve(x, values.weights.weight, values.weights.bias, SHAPE.activation)
    found = np.stack([layer.at((image, 1, 2, 3)) for image in range(2)])
    np.testing.assert_allclose(found, exact[:, 1, 2, 3], rtol=0, atol=1e-5)


def test_all_of_a_run_counts(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock on the wall, whose readings are of begin and end of some runs; the first does not count."""
    seen: list[str] = []
    monkeypatch.setattr(HostRamLayer, "run", lambda self: seen.append("run"))

    def now() -> float:
        seen.append("look")
        return float(seen.count("run") ** 2)  # each run takes longer than those before

    with ThreadPool(1) as pool:
        spent = HostRamTimer(device, pool, now).seconds(HOST_RAM, SHAPE, DIRECT)
    assert seen == ["look", "run", "look"] * 3, "one is long, and repeated once"
    assert spent == (3.0 + 5.0) / 2


@needs_compiler
def test_where_layers_run_says_who_times_them() -> None:
    device: Any = EmulatedDevice()
    for where, kind in ((Placement("cpu", 2), CpuTimer), (ON_GPU, GpuTimer), (Placement("gpu", 2), HostRamTimer)):
        with timer_on(where, device, MACHINE, 1.0) as clock:
            assert isinstance(clock, kind)
            if not isinstance(clock, GpuTimer):
                assert clock.pool.threads == 2


@pytest.mark.parametrize("of", [GpuTimer, lambda device: HostRamTimer(device, ThreadPool(1))], ids=["gpu", "host_ram"])
def test_a_device_that_refuses_a_layer_goes_on_or_is_lost(of: Callable[[Any], Any]) -> None:
    class Refusing:
        gpu = EMULATED_GPU
        lost = False

        def __getattr__(self, name: str) -> Any:
            raise DeviceError("not here")

        def synchronize(self) -> None:
            if self.lost:
                raise DeviceError("an illegal address")

    device = Refusing()
    with pytest.raises(DeviceError, match=r"^not here$"):
        of(device).seconds(HOST_RAM, SHAPE, DIRECT)
    device.lost = True
    with pytest.raises(DeviceLostError, match="emulated runs nothing any more: not here"):
        of(device).seconds(HOST_RAM, SHAPE, DIRECT)


def test_damaged_wisdom_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with timer_on(Placement("cpu", 1), None, MACHINE, 0.0):
        pass
    assert caplog.messages == []
    cache_folder().mkdir(exist_ok=True)
    name = f"fftw-{_digest(_facts(MACHINE))[:12]}.json"
    (cache_folder() / name).write_text("{")
    with timer_on(Placement("cpu", 1), None, MACHINE, 0.0):
        pass
    (message,) = caplog.messages
    assert f"{name} is damaged" in message
