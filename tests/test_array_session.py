"""One session for many arrays: planned and prepared once a shape, the same bits as calling the network on each."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import znnpy
from tests.support.emulated_gpus import EmulatedGpus
from tests.support.emulator import needs_compiler
from tests.support.odd_networks import NETWORKS, ODDER, assert_dense, definition, some_volume, trained
from znnpy.errors import PlanFileError, ShapeError, VolumeError, VramError
from znnpy.machine import process_bytes
from znnpy.network import Network
from znnpy.option_values import Border
from znnpy.planner.modes import make_plan
from znnpy.run.session import Session
from znnpy.volume.source import Source


def volumes(network: Network, count: int) -> list[np.ndarray[Any, Any]]:
    return [some_volume(network, seed) for seed in range(count)]


@pytest.mark.parametrize("network", [*NETWORKS[:5], *ODDER[:2]], ids=lambda n: n.name)
@pytest.mark.parametrize("border", ["valid", "reflect"])
def test_session_and_call_give_equal_bits(network: Network, border: Border) -> None:
    net, arrays = trained(network), volumes(network, 3)
    arguments: dict[str, Any] = {"border": border, "threads": 2, "device": "cpu"}
    with net.session(arrays[0].shape, dtype=np.uint8, **arguments) as run:
        found = [run(array) for array in arrays]
        plan = run.plan
    for array, prediction in zip(arrays, found, strict=True):
        np.testing.assert_array_equal(prediction, net(array, border=border, device="cpu", plan=plan))
    if border == "valid":
        assert_dense(found[0], definition(net, arrays[0]))


def test_session_plans_and_prepares_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, entered = [], []
    enter = Session.__enter__

    def counting_plan(*given: Any, **arguments: Any) -> Any:
        made.append(make_plan(*given, **arguments))
        return made[-1]

    def counting_enter(session: Any) -> Any:
        entered.append(session)
        return enter(session)

    monkeypatch.setattr("znnpy.measure.calibrate.make_plan", counting_plan)
    monkeypatch.setattr(Session, "__enter__", counting_enter)
    net, arrays = trained(NETWORKS[0]), volumes(NETWORKS[0], 4)
    with net.session(arrays[0].shape, dtype=np.uint8, threads=1, device="cpu") as run:
        for array in arrays:
            run(array)
    assert (len(made), len(entered)) == (1, 1)


def test_predictions_are_written_into_given_arrays() -> None:
    net, (array, *_) = trained(NETWORKS[0]), volumes(NETWORKS[0], 1)
    with net.session(array.shape, dtype=np.uint8, threads=1, device="cpu") as run:
        wide = np.full((2, *run.output_shape), np.nan, np.float32)
        turned = wide[1].transpose(0, 3, 2, 1).copy().transpose(0, 3, 2, 1)
        assert run(array, out=turned) is turned
        np.testing.assert_array_equal(turned, run(array))
        for bad in (wide[0, :, 1:], wide[0].astype(np.float64)):
            with pytest.raises(ShapeError, match=r"`out` is .*, and the prediction is"):
                run(array, out=bad)
        fixed = np.zeros(run.output_shape, np.float32)
        fixed.flags.writeable = False
        with pytest.raises(ShapeError, match="`out` is read-only; give one that can be written to"):
            run(array, out=fixed)
        one_voxel = np.lib.stride_tricks.as_strided(wide, run.output_shape, (0, 0, 0, 0))
        with pytest.raises(ShapeError, match=r"`out` has elements that share memory .*; give numpy\.empty of"):
            run(array, out=one_voxel)
        own = np.zeros(run.output_shape, np.float32)
        assert run.output_shape == own.shape
    flat = np.zeros((8, 8, 8), np.float32)
    one = znnpy.TrainedNetwork(Network("one", 1, (znnpy.MaxFilter((1, 1, 1)),)), ())
    with one.session(flat.shape, device="cpu") as run, pytest.raises(ShapeError, match="shares memory"):
        run(flat, out=flat[np.newaxis])


def test_open_session_is_not_entered_again() -> None:
    net, (array, *_) = trained(NETWORKS[0]), volumes(NETWORKS[0], 1)
    with net.session(array.shape, dtype=np.uint8, threads=1, device="cpu") as run:
        expected = run(array)
        with pytest.raises(ValueError, match="the session is open already; leave its `with` block first"):
            run.__enter__()
        np.testing.assert_array_equal(run(array), expected)
    with run:
        np.testing.assert_array_equal(run(array), expected)


def test_threads_share_a_session_and_get_their_own_predictions() -> None:
    net, arrays = trained(NETWORKS[0]), volumes(NETWORKS[0], 8)
    with net.session(arrays[0].shape, dtype=np.uint8, threads=2, device="cpu") as run:
        expected = [run(array) for array in arrays]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(run, arrays))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_session_works_after_a_failed_call() -> None:
    net, (array, *_) = trained(NETWORKS[0]), volumes(NETWORKS[0], 1)
    floats = array.astype(np.float32)
    holed = floats.copy()
    holed[0, 3, 3, 3] = np.nan
    with net.session(array.shape, threads=2, device="cpu") as run:
        expected = run(floats)
        with pytest.raises(VolumeError, match="NaN or infinite"):
            run(holed)
        np.testing.assert_array_equal(run(floats), expected)

        def interrupt(event: znnpy.Event) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(floats, progress=interrupt)
        np.testing.assert_array_equal(run(floats), expected)


def test_array_that_does_not_fit_is_refused_with_advice() -> None:
    net, (array, *_) = trained(NETWORKS[0]), volumes(NETWORKS[0], 1)
    with net.session(array.shape, dtype=np.uint8, threads=1, device="cpu") as run:
        with pytest.raises(ShapeError, match=r"the session is for arrays of \(c, z, y, x\) = "):
            run(array[:, 1:])
        with pytest.raises(VolumeError, match=r"the array is float64; give dtype='float64' to the session"):
            run(array.astype(np.float64))
        run(array.astype(np.int8))
    with pytest.raises(ValueError, match="the session is not open; use it in a `with` block"):
        run(array)


def test_impossible_shape_or_type_is_refused_by_name() -> None:
    net = trained(NETWORKS[0])
    for shape in (5, "64", (64, 64.0, 64), (64, -1, 64), (0, 64, 64)):
        with pytest.raises(ValueError, match=r"^shape is \(z, y, x\) or \(c, z, y, x\), positive integers, not "):
            net.session(shape)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^dtype is a type that numpy knows, such as 'uint8', not 'uint7'$"):
        net.session((64, 64, 64), dtype="uint7")
    with (
        pytest.raises(ValueError, match=r"^threads is a whole number, not '2'$"),
        net.session((64, 64, 64), threads="2", device="cpu"),  # type: ignore[arg-type]
    ):
        raise AssertionError("it opened")


def test_given_plan_is_used() -> None:
    net, (array, *_) = trained(NETWORKS[0]), volumes(NETWORKS[0], 1)
    arguments: dict[str, Any] = {"dtype": np.uint8, "device": "cpu"}
    with net.session(array.shape, threads=1, patch=(4, 4, 4), **arguments) as run:
        plan, expected = run.plan, run(array)
    with net.session(array.shape, plan=plan, **arguments) as run:
        assert run.plan.patch_out == plan.patch_out
        np.testing.assert_array_equal(run(array), expected)
    np.testing.assert_array_equal(net(array, plan=plan, device="cpu"), expected)
    with pytest.raises(PlanFileError, match="the plan is of another network"):
        trained(NETWORKS[1])(some_volume(NETWORKS[1], 1), plan=plan)


def test_prediction_counts_toward_the_limit_of_a_plan(tmp_path: Path) -> None:
    net, ram = trained(NETWORKS[0]), process_bytes() + 2**28
    with net.session((40, 40, 40), dtype=np.uint8, threads=1, device="cpu", ram=ram) as run:
        (tmp_path / "plan.json").write_text(run.plan.to_json())
    with (
        pytest.raises(PlanFileError, match="bytes"),
        net.session((40, 4000, 4000), dtype=np.uint8, device="cpu", plan=tmp_path / "plan.json"),
    ):
        pass


def test_progress_is_reported_for_every_array() -> None:
    net, (array, *_) = trained(NETWORKS[0]), volumes(NETWORKS[0], 1)
    events: list[znnpy.Event] = []
    net(array, threads=1, device="cpu", patch=(4, 4, 4), progress=events.append)
    assert (events[0].voxels_done, events[-1].voxels_done) == (0, events[-1].voxels)
    with net.session(array.shape, dtype=np.uint8, threads=1, device="cpu") as run:
        for _ in range(2):
            events.clear()
            run(array, progress=events.append)
            assert events[-1].voxels_done == events[-1].voxels > 0


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Return the sizes of outputs that sessions were prepared for, which grows."""
    sizes: list[tuple[int, int, int]] = []
    enter = Session.__enter__

    def counting(session: Session) -> Session:
        sizes.append(session.plan.output)
        return enter(session)

    monkeypatch.setattr(Session, "__enter__", counting)
    return sizes


SHAPES = ((12, 13, 14), (20, 11, 16), (9, 9, 31))


def of_shapes(seed: int = 0) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, shape, np.uint8) for shape in SHAPES]


def test_session_for_any_shape_prepares_each_shape_once(prepared: list[tuple[int, int, int]]) -> None:
    net = trained(NETWORKS[0])
    with net.session(dtype=np.uint8, threads=2, device="cpu") as run:
        assert prepared == []
        plans = []
        for seed in range(2):
            for array in of_shapes(seed):
                found = run(array)
                plans.append(run.plan)
                assert found.shape == run.output_shape_of(array.shape)
                assert run.places_of(array.shape)[0].size == found.shape[1:]
                assert_dense(found, definition(net, array[None]))
    assert prepared == [net.network.dense_size(shape) for shape in SHAPES]
    assert plans[:3] == plans[3:]
    with pytest.raises(ValueError, match="the session is not open"):
        run(of_shapes()[0])
    with run:
        np.testing.assert_array_equal(run(of_shapes()[0]), net(of_shapes()[0], plan=plans[0], device="cpu"))


def test_what_is_read_is_found_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """For graphs this takes as long as a tenth of the computing."""
    found = []
    make = Source.__init__

    def counting(source: Source, volume: Any, **given: Any) -> None:
        found.append(volume.shape[1:])
        make(source, volume, **given)

    monkeypatch.setattr(Source, "__init__", counting)
    monkeypatch.setattr("znnpy.array_session.MOST_SOURCES", 2)
    net, (a, b, c) = trained(NETWORKS[0]), of_shapes()
    floats = a.astype(np.float32) + np.float32(0.25)
    with net.session(threads=1, device="cpu") as run:
        for array in (a, b, floats, b, a.astype(np.int8)):
            np.testing.assert_allclose(run(array), definition(net, array[None]), atol=1e-5)
        assert found == [a.shape, b.shape]
        for array in (c, b, a):
            run.output_shape_of(array.shape)
    assert found == [a.shape, b.shape, c.shape, a.shape]


def test_session_for_any_shape_has_no_shape_of_its_own() -> None:
    with trained(NETWORKS[0]).session(threads=1, device="cpu") as run:
        for ask in (lambda: run.output_shape, lambda: run.places):
            with pytest.raises(ValueError, match=r"any shape; give one to `output_shape_of` or `places_of`"):
                ask()
        with pytest.raises(ValueError, match="none has come yet: call it first"):
            _ = run.plan
        with pytest.raises(ValueError, match=r"^shape is \(z, y, x\)"):
            run.output_shape_of((3, -1, 4))
        with pytest.raises(ShapeError, match="field of view"):
            run(np.zeros((3, 30, 30), np.float32))


def test_shape_that_was_not_used_for_longest_is_released_first(
    monkeypatch: pytest.MonkeyPatch, prepared: list[tuple[int, int, int]]
) -> None:
    monkeypatch.setattr("znnpy.array_session.MOST_SHAPES", 2)
    net, (a, b, c) = trained(NETWORKS[0]), of_shapes()
    with net.session(dtype=np.uint8, threads=1, device="cpu") as run:
        for array in (a, b, a, c, a, b):
            run(array)
    assert prepared == [net.network.dense_size(one.shape) for one in (a, b, c, b)]


def test_shapes_that_do_not_fit_together_are_released(
    monkeypatch: pytest.MonkeyPatch, prepared: list[tuple[int, int, int]]
) -> None:
    monkeypatch.setattr("znnpy.array_session._comes", lambda plan, held: plan.limits.ram_bytes)
    net, (a, b, _) = trained(NETWORKS[0]), of_shapes()
    with net.session(dtype=np.uint8, threads=1, device="cpu") as run:
        for array in (a, a, b, b, a):
            run(array)
    assert prepared == [net.network.dense_size(one.shape) for one in (a, b, a)]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of one process is known on Linux only")
def test_process_keeps_to_its_limit_with_arrays_of_many_shapes() -> None:
    program = (
        "import numpy, znnpy\n"
        "from znnpy.machine import peak_bytes, process_bytes\n"
        "net = znnpy.load_network('fib25_boundary')\n"
        "sizes = [(40, 44, 48), (64, 40, 40), (36, 70, 50), (50, 50, 50), (33, 80, 41), (60, 60, 36)]\n"
        "arrays = [numpy.ones(size, numpy.uint8) for size in sizes]\n"
        "ram = process_bytes() + 80 * 2**20\n"
        "with net.session(dtype='uint8', ram=ram, threads=2, device='cpu') as run:\n"
        "    for array in arrays + arrays[::-1]:\n"
        "        run(array)\n"
        "    kept = len(run._kept)\n"
        "print(ram, peak_bytes(), kept)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    ram, peak, kept = map(int, done.stdout.split())
    assert peak <= ram
    assert 1 < kept < 6


@pytest.mark.slow
@needs_compiler
def test_gpu_keeps_the_latest_shape(emulated_gpus: EmulatedGpus, prepared: list[tuple[int, int, int]]) -> None:
    emulated_gpus.use()
    net, (a, b, _) = trained(NETWORKS[0]), of_shapes()
    with net.session(dtype=np.uint8, threads=1) as run:
        found = [run(array) for array in (a, a, b, a)]
        assert run.plan.device == "gpu"
    assert len(prepared) == 3
    np.testing.assert_array_equal(found[0], found[3])
    np.testing.assert_allclose(found[2], net(b, device="cpu"), atol=1e-5)


@pytest.mark.slow
@needs_compiler
def test_session_plans_anew_where_the_gpu_refuses_memory(
    emulated_gpus: EmulatedGpus, prepared: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated_gpus.use()
    net, (a, _, _) = trained(NETWORKS[0]), of_shapes()
    submit, refused = Session.submit, list[object]()

    def refusing(*given: Any, **arguments: Any) -> Any:
        if not refused:
            refused.append(None)
            raise VramError("memory was refused")
        return submit(*given, **arguments)

    with net.session(a.shape, dtype=np.uint8, threads=1) as run:
        before = run.plan.limits.vram_bytes
        monkeypatch.setattr(Session, "submit", refusing)
        found = run(a)
        after = run.plan.limits.vram_bytes
        np.testing.assert_array_equal(found, run(a))
    assert before is not None
    assert after is not None
    assert after < before
    assert len(prepared) == 2
    np.testing.assert_allclose(found, net(a, device="cpu"), atol=1e-5)
