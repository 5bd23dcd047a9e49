"""The devices that tests of kernels run on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device

DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))  # the last: under Windows


def has_driver() -> bool:
    """Whether this machine has an NVIDIA driver: then tests that need a device fail without one, and never skip."""
    return any(path.exists() for path in DRIVERS)


@pytest.fixture(scope="session")
def cuda_device() -> Iterator[Device]:
    """The device of this machine."""
    from znnpy.kernels.gpu.device import Device, find_gpu

    if not has_driver():
        pytest.skip("this machine has no NVIDIA driver")
    with Device(find_gpu()) as device:
        yield device


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A Device; each test that asks for it runs on the emulator and, where there is one, on a CUDA device."""
    if request.param == "cuda":
        yield request.getfixturevalue("cuda_device")
        return
    from emulated import EmulatedDevice, compiler

    if compiler() is None:
        pytest.skip("the emulator needs a C++ compiler")
    with EmulatedDevice() as emulated:
        yield emulated
