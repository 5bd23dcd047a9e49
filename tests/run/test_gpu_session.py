"""Whole networks on a GPU, emulated and real, by all primitives: against the float64 sliding window."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tests.support.odd_networks import (
    MACHINE,
    NETWORKS,
    ODDER,
    Ways,
    definition,
    planned,
    poisoned_session,
    ran,
    small,
    some_volume,
    trained,
)
from znnpy.errors import ValuesOverflowError
from znnpy.kernels.contract import Primitive
from znnpy.kernels.gpu.device import Device
from znnpy.kernels.table import TABLE
from znnpy.network import Conv, Network, Pool
from znnpy.planner.tilings import splits
from znnpy.run.pipeline import Event
from znnpy.shapes import Precision, turned, turned_back

pytestmark = pytest.mark.slow

SURE = ("gpu.conv.direct", "gpu.pool.fragments", "gpu.maxfilter.direct", "gpu.maxout.direct")
RMS = {"fp32": 1e-6, "tf32": 1e-3, "fp16": 5e-3}  # of a layer, of its rms answer
SOME = (NETWORKS[0], NETWORKS[3], NETWORKS[5], NETWORKS[6], ODDER[5])
CONVS = [p.name for p in TABLE if p.name.startswith("gpu.conv")]


def ids(value: object) -> str:
    return value.name if isinstance(value, Network) else "zyx"[value] if isinstance(value, int) else str(value)


def ways(device: Any, seed: int = 0, only: tuple[str, ...] = SURE) -> Ways:
    """Return both ways for a convolution and a pooling: as one, if the named primitive can, or as two."""
    in_one = only[0] == "gpu.conv.fft_tiled"
    return Ways(seed, only, in_one, replace(MACHINE, gpu=device.gpu), cheap=is_emulated(device))


def is_emulated(device: Any) -> bool:
    return not isinstance(device, Device)


def error_of(got: Any, exact: Any) -> float:
    """RMS error of the rms answer."""
    assert np.isfinite(got).all()
    return float(np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2)))


@pytest.mark.parametrize("network", SOME, ids=ids)
def test_patches_and_columns_equal_the_definition(device: Any, network: Network) -> None:
    """Columns run along each axis in the smallest parts."""
    net, volume = trained(network), some_volume(network, seed=61)
    exact, output = definition(net, volume), network.dense_size(volume.shape[1:])
    whole = network.round_up(output)
    plan = planned(network, output, (whole[0], network.period[1], whole[2]), ways=ways(device))
    assert error_of(ran(plan, net, volume, device=device), exact) <= RMS["fp32"]
    for axis in range(3):
        thick, *across = turned(network.period, axis)
        patch = turned_back((thick, 3 * across[0], 2 * across[1]), axis)
        at_once = splits(network.turned(axis))[-1] if axis else ()
        plan = planned(network, output, patch, axis=axis, column=2 * thick, at_once=at_once, ways=ways(device))
        assert error_of(ran(plan, net, volume, device=device), exact) <= RMS["fp32"]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
@pytest.mark.parametrize("primitive", CONVS)
def test_every_primitive_in_columns_equals_the_definition(device: Any, primitive: str, precision: Precision) -> None:
    """Maps that fill no vector, from carried planes of one map and of many, and a pooling between.

    On the emulator in columns along one axis alone where many threads take long.
    """
    slow = is_emulated(device) and primitive in ("gpu.conv.fft_tiled", "gpu.conv.first")
    network = small("n", 2, Conv((2, 3, 2), 5, "relu"), Pool((2, 2, 2)), Conv((3, 2, 2), 6, "relu"))
    net, volume = trained(network), some_volume(network, seed=62, more=(5, 3, 4))
    exact, output = definition(net, volume), network.dense_size(volume.shape[1:])
    for axis, patch, column in ((0, (2, 4, 6), 1000), (2, (6, 4, 2), 4), (0, (4, 4, 6), 0))[: 1 if slow else 3]:
        way = ways(device, axis, (primitive, *SURE[1:]))
        plan = planned(network, output, patch, axis=axis, column=column, ways=way, precision=precision)
        if primitive not in {choice.primitive for choice in plan.choices}:
            pytest.skip(f"{primitive} does not apply here")
        assert error_of(ran(plan, net, volume, device=device), exact) <= 2 * RMS[precision]


@dataclass(frozen=True)
class Told:
    """A primitive that notes when it prepares weights."""

    primitive: Primitive
    order: list[str]

    def __getattr__(self, of: str) -> Any:
        return getattr(self.primitive, of)

    def prepare(self, *given: Any) -> Any:
        self.order.append("weights")
        resident = self.primitive.prepare(*given)
        self.order.append("prepared")
        return resident


def test_weights_are_prepared_before_the_arena_is_allocated(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that preparing takes is promised in the arena's place."""
    network, order, allocate = NETWORKS[0], list[str](), device.allocate
    net, layers = trained(network), len(network.layers)
    plan = planned(network, (8, 9, 10), network.round_up((8, 9, 10)), ways=ways(device))

    def noted(nbytes: int, what: str) -> Any:
        if what == "the arena":
            order.append(what)
        return allocate(nbytes, what)

    monkeypatch.setattr(device, "allocate", noted)
    table = tuple(Told(primitive, order) for primitive in TABLE)
    with poisoned_session(plan, net, table, device):
        assert order == ["weights", "prepared"] * layers + ["the arena"]


@pytest.mark.parametrize("dtype", ["uint8", "float16"])
def test_other_output_types_equal_the_definition(device: Any, dtype: str) -> None:
    network = NETWORKS[4]  # ends with a sigmoid
    net, volume = trained(network), some_volume(network, seed=63)
    plan = planned(network, network.dense_size(volume.shape[1:]), (3, 4, 5), column=6, ways=ways(device))
    exact = ran(plan, net, volume, device=device)
    wanted = np.rint(np.clip(exact, 0, 1) * np.float32(255)) if dtype == "uint8" else exact
    np.testing.assert_array_equal(ran(plan, net, volume, dtype=dtype, device=device), wanted.astype(dtype))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("primitive", CONVS)
def test_overflow_names_its_layer(device: Any, primitive: str, precision: Precision) -> None:
    """It is found although the layers behind it hide it."""
    network = Network("hot", 1, (Conv((2, 2, 2), 9, "relu"), Conv((2, 2, 2), 16), Conv((1, 1, 1), 2, "sigmoid")))
    net = trained(network)
    net.weights[0].weight[:] *= 1e20 if precision == "fp32" else 1
    net.weights[1].weight[:] = 1e20 if precision == "fp32" else 1e3
    volume = some_volume(network, seed=64)
    way = ways(device, 0, (primitive,))
    plan = planned(network, network.dense_size(volume.shape[1:]), (2, 8, 10), column=4, ways=way, precision=precision)
    if plan.choices[1].primitive != primitive:
        pytest.skip(f"{primitive} does not apply here")
    said = r"^output voxels \(z, y, x\) = \(0, 0, 0\) to .*: layer 1 \(conv 2x2x2 -> 16 none\): .*"
    said += "choose precision='tf32'" if precision == "fp16" else "check the weights"
    with np.errstate(all="ignore"), pytest.raises(ValuesOverflowError, match=said):  # an emulator's libraries are numpy
        ran(plan, net, volume, device=device)


def test_nan_is_written_exactly_if_the_field_of_view_holds_one(device: Any) -> None:
    network = NETWORKS[0]
    net, volume = trained(network), some_volume(network, seed=65, more=(9, 7, 8))
    exact = definition(net, volume)
    holes = volume.astype(np.float32)
    holes[0, 5, 4, 3] = np.nan
    unknown = np.lib.stride_tricks.sliding_window_view(np.isnan(holes[0]), network.field_of_view).any(axis=(3, 4, 5))
    plan = planned(network, network.dense_size(volume.shape[1:]), (2, 4, 6), column=4, ways=ways(device))
    got = ran(plan, net, holes, allow_nan=True, device=device)
    assert (np.isnan(got) == unknown).all()
    assert error_of(got[:, ~unknown], exact[:, ~unknown]) <= RMS["fp32"]


@pytest.mark.gpu
def test_ctrl_c_ends_a_run_within_half_a_second(cuda_device: Device) -> None:
    """Layers take a tenth of a second each; memory is freed, and the device remains usable."""
    network = Network("slow", 1, (Conv((5, 5, 5), 48, "relu"), Conv((5, 5, 5), 48, "relu"), Conv((5, 5, 5), 2)))
    net, volume = trained(network), np.zeros((1, 2500, 132, 132), np.uint8)
    plan = planned(network, network.dense_size(volume.shape[1:]), (80, 120, 120), ways=ways(cuda_device))
    held, sent = cuda_device.allocated, list[float]()

    def press() -> None:
        sent.append(time.perf_counter())
        signal.raise_signal(signal.SIGINT)

    presser = threading.Timer(0.03, press)

    def begun(event: Event) -> None:
        if event.steps_done >= 3 and presser.ident is None:  # once, though a step is told twice or not at all
            presser.start()

    with pytest.raises(KeyboardInterrupt):
        ran(plan, net, volume, device=cuda_device, progress=begun)
    took = time.perf_counter() - sent[0]
    presser.join()
    assert took < 0.5
    assert cuda_device.allocated == held
    little = planned(network, (8, 9, 10), (8, 9, 10), ways=ways(cuda_device))
    assert np.isfinite(ran(little, net, volume[:, :20, :21, :22], device=cuda_device)).all()
