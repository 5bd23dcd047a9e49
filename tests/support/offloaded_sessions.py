"""Sessions of offloaded plans on an emulated GPU, and a small plan to run in them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.emulator import EmulatedDevice
from tests.support.odd_networks import _nan_bytes, small, some_volume, trained
from tests.support.offloaded_plans import EVERY, offloaded_plan
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.network import Conv, Pool
from znnpy.planner.plan import Plan
from znnpy.run import cpu_backend, gpu_steps, worker
from znnpy.run.session import Session
from znnpy.trained import TrainedNetwork

SMALL = small("delays", 1, Conv((2, 2, 2), 3, "relu"), Pool((2, 2, 1)), Conv((2, 1, 2), 2, "tanh"), Conv((1, 1, 1), 1))


@contextmanager
def emulated_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
    """All its memory is given back when a test is over."""
    monkeypatch.setattr(gpu_steps, "LOOK_SECONDS", 0)
    monkeypatch.setattr(worker, "LOOK_SECONDS", 0)
    with EmulatedDevice() as device:
        yield device
        assert device.allocated == 0


@contextmanager
def session_for(plan: Plan, net: TrainedNetwork, device: EmulatedDevice) -> Iterator[Session]:
    """Open a session whose arenas hold NaN."""
    with pytest.MonkeyPatch.context() as patch, ThreadPool(plan.compute_threads) as pool:
        patch.setattr(cpu_backend, "aligned_bytes", _nan_bytes)
        with Session(plan, net.network, net.weights, pool, EVERY, device=device) as session:  # type: ignore[arg-type]
            yield session


def a_plan(**arguments: Any) -> tuple[Plan, TrainedNetwork, Any]:
    """One of SMALL, with the weights and the volume that it is for."""
    net, volume = trained(SMALL), some_volume(SMALL, seed=78, more=(9, 7, 5))
    return offloaded_plan(SMALL, SMALL.dense_size(volume.shape[1:]), (2, 4, 3), 2, **arguments), net, volume


def no_feeder_is_left() -> bool:
    return not any(thread.name == "znnpy-feeder" for thread in threading.enumerate())
