"""Sessions on an emulated GPU whose primitives compute the definition: what is moved, carried, kept and found there."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.emulator import EMULATED_GPU, EmulatedDevice, needs_compiler
from tests.support.odd_networks import (
    MACHINE,
    NETWORKS,
    ODDER,
    Ways,
    assert_dense,
    definition,
    planned,
    poisoned_session,
    ran,
    small,
    some_volume,
    trained,
)
from tests.support.reference_primitives import STAND_INS
from znnpy.errors import DeviceError, Stopped, ValuesOverflowError, VramError
from znnpy.network import Conv, Network, Normalise, Pool
from znnpy.planner.plan import Plan
from znnpy.planner.tilings import splits
from znnpy.run import gpu_backend, gpu_steps, worker
from znnpy.shapes import Precision, Vec3, turned, turned_back
from znnpy.trained import TrainedNetwork
from znnpy.volume.array import ArrayVolume
from znnpy.volume.source import Source

pytestmark = [pytest.mark.slow, needs_compiler]

WITH_GPU = replace(MACHINE, gpu=EMULATED_GPU)
ALL = NETWORKS + ODDER


def ids(value: object) -> str:
    return value.name if isinstance(value, Network) else "zyx"[value] if isinstance(value, int) else str(value)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
    """All its memory is given back when a test is over. As much is queued as a session may queue."""
    monkeypatch.setattr(gpu_steps, "QUEUED_SECONDS", np.inf)
    monkeypatch.setattr(gpu_steps, "LOOK_SECONDS", 0)
    monkeypatch.setattr(worker, "LOOK_SECONDS", 0)
    with EmulatedDevice() as device:
        yield device
        assert device.allocated == 0


def ways(seed: int = 0, only: tuple[str, ...] = (), *, in_one: bool = True) -> Ways:
    return Ways(seed, only, in_one, WITH_GPU, STAND_INS)


def on_gpu(
    network: Network, volume: Any, patch: Vec3, *, seed: int = 0, only: tuple[str, ...] = (), **words: Any
) -> Plan:
    chosen = ways(seed, only, in_one=words.pop("in_one", True))
    return planned(network, network.dense_size(volume.shape[1:]), patch, ways=chosen, **words)


@pytest.mark.parametrize("network", ALL, ids=ids)
def test_patches_equal_the_definition(device: EmulatedDevice, network: Network) -> None:
    net, volume = trained(network), some_volume(network, seed=41)
    period, output = network.period, network.dense_size(volume.shape[1:])
    patch = (period[0], 2 * period[1], network.round_up(output)[2])
    plan = on_gpu(network, volume, patch, seed=1)
    assert plan.columns > 1
    assert_dense(ran(plan, net, volume, table=STAND_INS, device=device), definition(net, volume))


@pytest.mark.parametrize(
    ("network", "axis"), [(network, index % 3) for index, network in enumerate((*ALL, ALL[0], ALL[0]))], ids=ids
)
def test_columns_in_parts_equal_the_definition(device: EmulatedDevice, network: Network, axis: int) -> None:
    """Columns of two steps run along each axis in the smallest parts."""
    net, volume = trained(network), some_volume(network, seed=42)
    thick, *across = turned(network.period, axis)
    patch = turned_back((thick, 2 * across[0], 3 * across[1]), axis)
    at_once = splits(network.turned(axis))[-1]
    plan = on_gpu(network, volume, patch, seed=axis, axis=axis, column=2 * thick, at_once=at_once)
    assert_dense(ran(plan, net, volume, table=STAND_INS, device=device), definition(net, volume))


@pytest.mark.parametrize("precision", ["tf32", "fp16"])
@pytest.mark.parametrize("axis", [0, 2], ids=ids)
def test_activations_have_the_width_of_the_precision(device: EmulatedDevice, precision: Precision, axis: int) -> None:
    network = NETWORKS[0]
    net, volume = trained(network), some_volume(network, seed=43, more=(6, 7, 8))
    exact = definition(net, volume)
    patch = turned_back((2, 4, 6), axis)
    for seed, column in enumerate((0, 4)):
        words: dict[str, Any] = {"axis": axis, "column": column, "precision": precision, "seed": seed}
        plan = on_gpu(network, volume, patch, **words)
        wide = on_gpu(network, volume, patch, **(words | {"precision": "fp32"}))
        got = ran(plan, net, volume, table=STAND_INS, device=device)
        assert np.isfinite(got).all()
        assert np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2)) <= (5e-3 if precision == "fp16" else 1e-6)
        assert (sum(t.nbytes for t in plan.stages[0].tensors) < sum(t.nbytes for t in wide.stages[0].tensors)) == (
            precision == "fp16"
        )


@pytest.mark.parametrize("dtype", ["u1", ">u2", "<i4", "f2", ">f4", "f8"])
def test_every_real_dtype_is_normalised_alike(device: EmulatedDevice, dtype: str) -> None:
    network = Network("n", 2, (Conv((2, 2, 2), 2, "none"),), Normalise((130.0, 7.0), (33.5, 70.0)))
    net, volume = trained(network), some_volume(network, seed=44)
    plan = on_gpu(network, volume, (3, 4, 5))
    got = ran(plan, net, volume.astype(dtype), table=STAND_INS, device=device)
    assert_dense(got, definition(net, volume))


@pytest.mark.parametrize("dtype", ["uint8", "float16"])
def test_other_output_types_of_columns_equal_the_definition(device: EmulatedDevice, dtype: str) -> None:
    """The output's type is not known in the first steps of a column."""
    network = NETWORKS[4]  # ends with a sigmoid
    net, volume = trained(network), some_volume(network, seed=45)
    plan = on_gpu(network, volume, (3, 4, 5), column=6, at_once=(1,))
    exact = ran(plan, net, volume, table=STAND_INS, device=device)
    wanted = np.rint(np.clip(exact, 0, 1) * np.float32(255)) if dtype == "uint8" else exact
    got = ran(plan, net, volume, dtype=dtype, table=STAND_INS, device=device)
    np.testing.assert_array_equal(got, wanted.astype(dtype))


@pytest.mark.parametrize("axis", [0, 1, 2], ids=ids)
def test_nan_is_written_exactly_if_the_field_of_view_holds_one(device: EmulatedDevice, axis: int) -> None:
    network = NETWORKS[0]
    net, volume = trained(network), some_volume(network, seed=46, more=(9, 7, 8))
    exact = definition(net, volume)
    holes = volume.astype(np.float32)
    holes[0][np.random.default_rng(27).random(volume.shape[1:]) < 0.004] = np.nan
    windows = np.lib.stride_tricks.sliding_window_view(np.isnan(holes[0]), network.field_of_view)
    unknown = windows.any(axis=(3, 4, 5))
    assert 0.1 < unknown.mean() < 0.7
    patch = turned_back((2, 4, 6), axis)
    for column in (0, 2, 1000):
        plan = on_gpu(network, volume, patch, axis=axis, column=column, seed=column)
        got = ran(plan, net, holes, allow_nan=True, table=STAND_INS, device=device)
        assert (np.isnan(got) == unknown).all()
        assert_dense(got[:, ~unknown], exact[:, ~unknown])


def test_arrays_of_any_strides_are_read_and_written(device: EmulatedDevice) -> None:
    """It holds without the session's own buffers, too."""
    network = NETWORKS[0]
    net, volume = trained(network), some_volume(network, seed=47)
    size = network.round_up(network.dense_size(volume.shape[1:]))
    raw = np.random.default_rng(48).integers(0, 256, network.patch_in(size)[::-1], np.uint8).T[None]
    out = np.full((network.output_channels, *size[::-1]), np.nan, np.float32).transpose(0, 3, 2, 1)
    plan = planned(network, size, size, ways=ways())
    with poisoned_session(plan, net, STAND_INS, device) as session:
        session.run(raw, out)
        assert_dense(out, definition(net, raw))
        out[:] = np.nan
        session.run(raw.astype(">u2"), out)  # kernels for another type, and bytes in another order
        assert_dense(out, definition(net, raw))


def steps_of(plan: Plan, volume: Any, network: Network) -> Iterator[tuple[Any, Any, bool]]:
    """Raw patch, array for the output and `begins` of every step."""
    source = Source(ArrayVolume(volume), roi=None, border="valid", network=network, allow_nan=False)
    for column in plan.cover(network):
        for number, step in enumerate(column.steps):
            raw = np.empty((network.input_channels, *plan.patch_in), source.dtype)
            source.read(step.read, raw)
            out = np.full((network.output_channels, *plan.patch_out), np.nan, np.float32)
            yield raw, out if step.write.voxels else None, number == 0


def test_at_most_two_steps_are_under_way(device: EmulatedDevice) -> None:
    """Results come with the wait, and a column begins while another one ends."""
    network = NETWORKS[0]
    net, volume = trained(network), some_volume(network, seed=49, more=(7, 8, 9))
    plan = on_gpu(network, volume, (2, 4, 6), column=4)
    with poisoned_session(plan, net, STAND_INS, device) as session:
        every = list(steps_of(plan, volume, network))
        alone = [None if out is None else out.copy() for _, out, _ in every]
        for (raw, _, begins), out in zip(every, alone, strict=True):
            session.run(raw, out, begins=begins)
        assert session.max_in_flight == 1
        tickets = []
        for raw, out, begins in every:
            tickets.append((session.submit(raw, out, begins=begins), out))
            if len(tickets) == 2:
                assert out is None or np.isnan(out).all()
                with pytest.raises(RuntimeError, match="2 steps are under way"):
                    session.submit(raw, out, begins=begins)
                session.wait(tickets.pop(0)[0])
        session.wait(tickets[0][0])
        assert session.done(tickets[0][0])
        for (_, out, _), wanted in zip(every, alone, strict=True):
            assert (out is None) == (wanted is None)
            if out is not None:
                np.testing.assert_array_equal(out, wanted)


def hot(layer: int, *layers: Any) -> TrainedNetwork:
    """Return a network of which layer `layer` makes large numbers."""
    network = small("hot", 1, *layers)
    net = trained(network)
    where = network.weighted.index(layer)
    net.weights[where].weight[:] = 1e38
    net.weights[where].bias[:] = 0
    return net


@pytest.mark.parametrize("only", ["gpu.conv.plain", "gpu.conv.peaks"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_overflow_names_its_layer_and_position(device: EmulatedDevice, only: str, precision: Precision) -> None:
    """The first of two overflowing layers is named, although the next step is under way."""
    net = hot(2, Conv((2, 2, 2), 3, "relu"), Pool((2, 2, 2)), Conv((2, 2, 2), 2), Conv((1, 1, 1), 2))
    network = net.network
    volume = some_volume(network, seed=50, more=(15, 8, 8))
    volume[:, :10] = 127  # about 0 once normalised
    net.weights[0].weight[:], net.weights[0].bias[:] = 1, -0.25
    plan = on_gpu(network, volume, (2, 8, 8), column=16, only=(only,), in_one=False, precision=precision)
    wider = "choose precision='tf32'" if precision == "fp16" else ""
    step = r"output voxels \(z, y, x\) = \(6, 0, 0\) to \(8, 8, 8\), step \d+ of column 0"
    said = rf"^{step}: layer 2 \(conv 2x2x2 -> 2 none\): .*{wider}"
    with pytest.raises(ValuesOverflowError, match=said):  # output voxel 6 is the first that sees plane 10
        ran(plan, net, volume, table=STAND_INS, device=device)


def test_overflow_in_the_first_steps_of_a_column_is_found(device: EmulatedDevice) -> None:
    net = hot(0, Conv((3, 1, 1), 2), Conv((5, 2, 2), 2))
    network = net.network
    volume = some_volume(network, seed=51)
    plan = on_gpu(network, volume, (2, 4, 4), column=4)
    first, _, _ = plan.cover(network)[0].steps[:3]
    assert not first.write.voxels
    with pytest.raises(ValuesOverflowError, match=r"^output voxels \(z, y, x\) = \(0, 0, 0\) to .*: layer 0 \(conv"):
        ran(plan, net, volume, table=STAND_INS, device=device)


@pytest.mark.parametrize(
    ("dtype", "value", "precision", "said"),
    [
        ("f8", 1e300, "fp32", r"values up to 1e\+300, .* float32's largest number 3\.40282e\+38; rescale"),
        (
            "f4",
            1e5,
            "fp16",
            r"values up to 100000, .* float16's largest number 65504; choose precision='tf32', rescale",
        ),
    ],
)
def test_input_beyond_the_range_of_activations_is_refused(
    device: EmulatedDevice, dtype: str, value: float, precision: Precision, said: str
) -> None:
    network = Network("n", 1, (Pool((2, 1, 1)),))
    volume = np.zeros((1, 3, 3, 3), dtype)
    volume[0, 1, 1, 1] = value
    plan = on_gpu(network, volume, (2, 3, 3), precision=precision)
    with pytest.raises(ValuesOverflowError, match=said):
        ran(plan, trained(network), volume, table=STAND_INS, device=device)


def test_output_beyond_float16_is_refused(device: EmulatedDevice) -> None:
    network = Network("n", 1, (Pool((2, 1, 1)),))
    volume = np.full((1, 3, 3, 3), 65519.0, np.float32)
    plan = on_gpu(network, volume, (2, 3, 3))
    fits = ran(plan, trained(network), volume, dtype=np.float16, table=STAND_INS, device=device)
    assert (fits == 65504).all()
    volume[0, 2, 2, 2] = 65520.0
    with pytest.raises(ValuesOverflowError, match=r"^output .*: the output holds 65520, beyond float16's .*output_d"):
        ran(plan, trained(network), volume, dtype=np.float16, table=STAND_INS, device=device)


def test_peaks_belong_to_one_column(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """They grow from step to step, and the next column begins with its own; poolings have none."""
    network = Network("n", 1, (Conv((2, 1, 1), 1), Pool((1, 2, 1)), Conv((1, 1, 1), 1)))
    net = trained(network)
    for weights, scale in zip(net.weights, (1.0, 10.0), strict=True):
        weights.weight[:], weights.bias[:] = scale, 0
    volume = np.zeros((1, 9, 3, 2), np.float32)
    volume[0, :, 1, 0] = [1, 5, 2, 1, 0, 0, 3, 0, 0]
    plan = on_gpu(network, volume, (2, 2, 2), column=4, in_one=False)
    seen: list[tuple[float, ...]] = []
    monkeypatch.setattr(gpu_backend.GpuBackend, "_check", lambda self, ticket, peaks: seen.append(tuple(peaks)))
    ran(plan, net, volume, table=STAND_INS, device=device)
    assert [peaks[:3] for peaks in seen] == [
        (1, 0, 0),  # a step before the output: plane 0 comes in, and no layer runs
        (5, 7, 70),
        (5, 7, 70),
        (1, 0, 0),
        (3, 3, 30),
        (3, 3, 30),
    ]


def test_memory_is_freed_if_the_device_refuses_more() -> None:
    """It is freed while the error is still handled, so that a new plan has room."""
    network = NETWORKS[0]
    net, volume = trained(network), some_volume(network, seed=52)
    plan = on_gpu(network, volume, (4, 6, 8), column=8)
    held = plan.memory.last.arena + plan.memory.last.carries
    with EmulatedDevice(replace(EMULATED_GPU, memory_bytes=held)) as device:  # no room for the patches
        with pytest.raises(VramError, match=r"of \d+ bytes was refused: .*; \d+ bytes are free") as caught:
            ran(plan, net, volume, table=STAND_INS, device=device)
        assert device.allocated == 0, caught.value


def test_session_holds_the_planned_bytes(device: EmulatedDevice) -> None:
    network = NETWORKS[3]
    net, volume = trained(network), some_volume(network, seed=53)
    for column in (0, 4):
        plan = on_gpu(network, volume, (4, 6, 2), column=column)
        with poisoned_session(plan, net, STAND_INS, device) as session:
            held = device.allocated  # all that depends on the size of a patch
            raws, outs = map(list, session.buffers(np.dtype(np.uint8), np.dtype(np.float32), reads=9, writes=2))
            assert (len(raws), len(outs)) == (3, 2)
            staging = 2 * raws[0].nbytes + 2 * outs[0].nbytes
            peaks = 2 * 4 * (2 + len(net.weights))
            assert held == plan.memory.last.arena + plan.memory.last.carries + staging + peaks
            session.run(raws[0], outs[0])
            tables = device.allocated - held
            assert 0 < tables <= 2**10  # places of fragments, and what normalises
        assert device.allocated == 0


def test_second_session_in_the_same_process_works(device: EmulatedDevice) -> None:
    """One session ended with an error before, and another one is still open."""
    network = NETWORKS[0]
    net, volume = trained(network), some_volume(network, seed=54)
    plan = on_gpu(network, volume, (4, 6, 8), column=4)
    with poisoned_session(plan, net, STAND_INS, device) as session:
        raw, out, begins = next(steps_of(plan, volume, network))
        session.submit(raw, out, begins=begins)
        with suppress(ZeroDivisionError), poisoned_session(plan, net, STAND_INS, device) as other:
            other.submit(raw, out, begins=begins)
            raise ZeroDivisionError
        assert_dense(ran(plan, net, volume, table=STAND_INS, device=device), definition(net, volume))


class _Endless:
    """An event that does not happen before it is told to."""

    def __init__(self, event: Any, gone: threading.Event) -> None:
        self._event, self._gone = event, gone

    @property
    def done(self) -> bool:
        return self._gone.is_set() and self._event.done


def test_ctrl_c_is_noticed_while_the_device_computes(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    network = NETWORKS[0]
    net, volume = trained(network), some_volume(network, seed=55)
    plan = on_gpu(network, volume, (4, 6, 8))
    gone, mark = threading.Event(), gpu_backend.GpuBackend._mark
    monkeypatch.setattr(gpu_steps, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(gpu_steps, "QUEUED_SECONDS", 0.2)
    monkeypatch.setattr(gpu_backend.GpuBackend, "_mark", lambda shop, stream: _Endless(mark(shop, stream), gone))
    monkeypatch.setattr(type(device.stream), "wait_event", lambda stream, event: None)

    def interrupt() -> None:
        time.sleep(0.1)
        sent.append(time.perf_counter())
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.3)
        gone.set()

    sent: list[float] = []
    presser = threading.Thread(target=interrupt)
    presser.start()
    with poisoned_session(plan, net, STAND_INS, device) as session:
        raw, out, begins = next(steps_of(plan, volume, network))
        with pytest.raises(KeyboardInterrupt):
            session.submit(raw, out, begins=begins)
        assert time.perf_counter() - sent[0] < 0.25
    presser.join()


def test_stopped_thread_pool_neither_submits_nor_waits(device: EmulatedDevice) -> None:
    network = NETWORKS[0]
    net, volume = trained(network), some_volume(network, seed=56)
    plan = on_gpu(network, volume, (4, 6, 8))
    with poisoned_session(plan, net, STAND_INS, device) as session:
        raw, out, begins = next(steps_of(plan, volume, network))
        ticket = session.submit(raw, out, begins=begins)
        session.pool.stop()
        with pytest.raises(Stopped):
            session.submit(raw, out, begins=begins)
        with pytest.raises(Stopped):
            session.wait(ticket)


def test_queue_is_no_longer_than_ctrl_c_may_wait(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer, and those before it that are done in no more than so many seconds: predicted are two each."""
    network = ODDER[5]
    net, volume = trained(network), some_volume(network, seed=57)
    plan = on_gpu(network, volume, (4, 8, 4), in_one=False)
    plan = plan.with_choices(lambda choice: replace(choice, seconds=2.0))
    queued: list[int] = []
    run = gpu_backend.GpuBackend.run

    def counting(shop: gpu_backend.GpuBackend, *layer: Any) -> None:
        run(shop, *layer)
        queued.append(sum(not event.mark[0].finished >= event.mark[1] for event, _ in shop._queued))

    monkeypatch.setattr(gpu_backend.GpuBackend, "run", counting)
    most = {}
    for seconds in (np.inf, 5.0, 0.1):
        monkeypatch.setattr(gpu_steps, "QUEUED_SECONDS", seconds)
        queued.clear()
        assert_dense(ran(plan, net, volume, table=STAND_INS, device=device), definition(net, volume))
        most[seconds] = max(queued)
    assert most[np.inf] >= len(plan.choices)
    assert (most[5.0], most[0.1]) == (3, 1)


def test_fault_of_the_device_is_reported_once(device: EmulatedDevice) -> None:
    """Closing the session on a dead device raises nothing further."""
    network = NETWORKS[0]
    net, volume = trained(network), some_volume(network, seed=58)
    plan = on_gpu(network, volume, (4, 6, 8))
    asked: list[int] = []

    def refused(event: Any) -> bool:
        asked.append(len(asked))
        raise DeviceError(f"cudaEventQuery was refused {len(asked)} times: cudaErrorIllegalAddress")

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(type(device.event()), "done", property(refused))
        with pytest.raises(DeviceError, match="refused 1 times"):
            ran(plan, net, volume, table=STAND_INS, device=device)
    assert len(asked) > 1
    device.synchronize()
    assert_dense(ran(plan, net, volume, table=STAND_INS, device=device), definition(net, volume))
