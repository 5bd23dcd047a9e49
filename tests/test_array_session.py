"""One session for many arrays: planned and prepared once, the same bits as calling the network on each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import znnpy
from tests.support.odd_networks import NETWORKS, ODDER, assert_dense, definition, some_volume, trained
from znnpy.errors import PlanFileError, ShapeError, VolumeError
from znnpy.machine import process_bytes
from znnpy.network import Network
from znnpy.option_values import Border
from znnpy.planner.modes import make_plan
from znnpy.run.session import Session


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
