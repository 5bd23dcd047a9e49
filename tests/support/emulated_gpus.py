"""GPUs of the machine, replaced by emulated ones or taken away: only this module changes what finds and opens them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.support.emulator import EMULATED_GPU, EmulatedDevice
from znnpy.costs.model import Rates, assumed_rates
from znnpy.errors import DeviceError
from znnpy.kernels import apply
from znnpy.kernels.gpu.device import Device, find_gpu
from znnpy.machine import Gpu, Machine
from znnpy.run import target
from znnpy.run.target import DRIVER, Driver


def assumed_gpu_rates(device: Any, machine: Machine, *asked: object, **arguments: object) -> Rates:
    """Return assumed rates: measuring an emulator takes long and says nothing."""
    assert device.gpu == machine.gpu
    return assumed_rates(machine, 1, "gpu")


class EmulatedGpus:
    """The GPUs that znnpy sees, until `restore`."""

    def use(
        self,
        count: int = 1,
        *,
        gpu: Gpu = EMULATED_GPU,
        device: Callable[..., Any] = EmulatedDevice,
        rates: Callable[..., Rates] = assumed_gpu_rates,
    ) -> None:
        """Let the machine have `count` equal GPUs; `device` opens one, `rates` stands in for measuring it."""
        DRIVER.find = lambda: gpu
        vars(apply)["find_gpu"] = DRIVER.find
        DRIVER.find_all = lambda: dict.fromkeys(range(count), gpu)
        self.open_as(device)
        self.measure_as(rates)

    def open_as(self, device: Callable[..., Any]) -> None:
        """Open each GPU as `device(gpu, number)`."""
        DRIVER.open = device
        vars(apply)["Device"] = device

    def measure_as(self, rates: Callable[..., Rates]) -> None:
        """Call `rates` where layers of a network would be measured on a GPU."""
        DRIVER.rates = rates

    def remove(self, why: str) -> None:
        """Let the machine have no GPU: looking for one raises DeviceError(why)."""

        def none() -> Any:
            raise DeviceError(why)

        DRIVER.find = none
        vars(apply)["find_gpu"] = none

    def restore(self) -> None:
        """Let znnpy find, open and measure the GPUs of the machine again."""
        for field in fields(Driver):
            setattr(DRIVER, field.name, field.default)
        vars(apply).update(find_gpu=find_gpu, Device=Device)


def show_traces_of_cuda(monkeypatch: pytest.MonkeyPatch, *, cupy: bool, drivers: tuple[Path, ...] = ()) -> None:
    """Let CuPy be installed or not, and the files that a driver makes be `drivers`, where no GPU is found."""
    monkeypatch.setattr(target, "DRIVERS", drivers)
    monkeypatch.setattr(target, "find_spec", lambda name: object() if cupy else None)
