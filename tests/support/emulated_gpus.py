"""GPUs of the machine, replaced by emulated ones or taken away.

Only this module knows by which functions znnpy finds, opens and measures GPUs. They are replaced in every module of
znnpy that has imported them, so a test does not name the module that calls them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.emulator import EMULATED_GPU, EmulatedDevice
from znnpy.errors import DeviceError
from znnpy.kernels.gpu.device import Device, find_gpu, find_gpus
from znnpy.machine import Gpu, Machine
from znnpy.planner.cost import Rates, assumed_rates
from znnpy.run import devices
from znnpy.run.calibration import measured_rates

ORIGINALS = {"find one": find_gpu, "find all": find_gpus, "open": Device, "measure": measured_rates}


def assumed_gpu_rates(device: Any, machine: Machine, *asked: object, **words: object) -> Rates:
    """Return assumed rates: measuring an emulator takes long and says nothing."""
    assert device.gpu == machine.gpu
    return assumed_rates(machine, 1, "gpu")


class EmulatedGpus:
    """The GPUs that znnpy sees, until `restore`."""

    def __init__(self) -> None:
        self._in_force: dict[str, Any] = dict(ORIGINALS)

    def use(
        self,
        count: int = 1,
        *,
        gpu: Gpu = EMULATED_GPU,
        device: Callable[..., Any] = EmulatedDevice,
        rates: Callable[..., Rates] = assumed_gpu_rates,
    ) -> None:
        """Let the machine have `count` equal GPUs; `device` opens one, `rates` stands in for measuring it."""
        self._put("find one", lambda: gpu)
        self._put("find all", lambda: dict.fromkeys(range(count), gpu))
        self.open_as(device)
        self.measure_as(rates)

    def open_as(self, device: Callable[..., Any]) -> None:
        """Open each GPU as `device(gpu, number)`."""
        self._put("open", device)

    def measure_as(self, rates: Callable[..., Rates]) -> None:
        """Call `rates` where layers of a network would be measured on a GPU."""
        self._put("measure", rates)

    def remove(self, why: str) -> None:
        """Let the machine have no GPU: looking for one raises DeviceError(why)."""

        def none() -> Any:
            raise DeviceError(why)

        self._put("find one", none)

    def restore(self) -> None:
        """Give every module back what it had imported."""
        for role, original in ORIGINALS.items():
            self._put(role, original)

    def _put(self, role: str, replacement: Any) -> None:
        """Replace what is in force for `role` in all modules of znnpy, those imported meanwhile included."""
        before = self._in_force[role]
        if before is replacement:
            return
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "znnpy":
                for attribute in [each for each, value in vars(module).items() if value is before]:
                    setattr(module, attribute, replacement)
        self._in_force[role] = replacement


def show_traces_of_cuda(monkeypatch: pytest.MonkeyPatch, *, cupy: bool, drivers: tuple[Path, ...] = ()) -> None:
    """Let CuPy be installed or not, and the files that a driver makes be `drivers`, where no GPU is found."""
    monkeypatch.setattr(devices, "DRIVERS", drivers)
    monkeypatch.setattr(devices, "find_spec", lambda name: object() if cupy else None)
