"""Runs on several GPUs of one machine, here emulators: one queue, the same bytes, and on without one that fails."""

from __future__ import annotations

from typing import Any, ClassVar

import h5py
import numpy as np
import pytest

from tests.support.cli import Place
from tests.support.emulated_gpus import EmulatedGpus
from tests.support.emulator import EmulatedDevice, needs_compiler
from tests.support.messages import assert_holds
from znnpy.errors import DeviceError, ResumeError, VramError
from znnpy.inference import infer
from znnpy.planner.run_plan import RunPlan
from znnpy.planning import plan
from znnpy.report.run_report import Report
from znnpy.verify import TOLERANCES

pytestmark = [pytest.mark.slow, needs_compiler]

CARDS = 3


@pytest.fixture(autouse=True)
def _emulated(emulated_gpus: EmulatedGpus) -> None:
    emulated_gpus.use(count=CARDS)


def go(place: Place, **arguments: Any) -> Report:
    given = {"out": place.out, "device": "gpu", "threads": 2, "precision": "fp32", "overwrite": True, **arguments}
    return infer(place.volume, place.folder / "net.yaml", **given)


def expected(place: Place) -> np.ndarray[Any, Any]:
    out = place.folder / "cpu.h5"
    go(place, out=out, device="cpu", precision=None, patch=(4, 4, 6))
    with h5py.File(out) as file:
        return np.array(file["prediction"])


@pytest.mark.parametrize(
    "arguments", [{"gpus": 2}, {"gpus": "all", "cover": "columns"}, {"gpus": 3, "patch": (4, 4, 6)}]
)
def test_several_gpus_give_the_bytes_of_one(place: Place, arguments: dict[str, Any]) -> None:
    report = go(place, **arguments)
    assert report.plan.devices == (CARDS if arguments["gpus"] == "all" else arguments["gpus"])
    assert report.plan.main.columns >= 2
    assert report.plan.memory.peak <= report.plan.limits.ram_bytes
    together = place.prediction()
    assert np.abs(together - expected(place)).max() <= TOLERANCES["fp32"]
    chosen = place.folder / "plan.json"
    chosen.write_text(report.plan.to_json())
    alone = go(place, plan=chosen, device="auto", threads=None)
    assert alone.plan.devices == 1
    np.testing.assert_array_equal(place.prediction(), together)


class Failing(EmulatedDevice):
    """One of the machine refuses a copy, and from then on whatever it is asked, as CUDA does."""

    copies = 0
    faulty = 1

    def refuse(self) -> None:
        if self.number == Failing.faulty and Failing.copies >= 5:
            raise DeviceError("cudaErrorECCUncorrectable: uncorrectable ECC error encountered")

    def copy_async(self, target: Any, source: Any, stream: Any) -> None:
        if self.number == Failing.faulty and stream is self.uploads:
            Failing.copies += 1
        self.refuse()
        super().copy_async(target, source, stream)

    def synchronize(self, stream: Any = None) -> None:
        self.refuse()
        super().synchronize(stream)

    def event(self, *, timing: bool = False) -> Any:
        self.refuse()
        return super().event(timing=timing)

    def allocate(self, nbytes: int, what: str) -> Any:
        self.refuse()
        return super().allocate(nbytes, what)

    def free_bytes(self) -> int:
        self.refuse()
        return super().free_bytes()


@pytest.mark.parametrize("faulty", [0, 1])
def test_failed_gpu_returns_its_patch_to_the_queue(
    place: Place, monkeypatch: pytest.MonkeyPatch, emulated_gpus: EmulatedGpus, faulty: int
) -> None:
    emulated_gpus.open_as(Failing)
    monkeypatch.setattr(Failing, "copies", 0)
    monkeypatch.setattr(Failing, "faulty", faulty)
    report = go(place, gpus=2, patch=(2, 4, 4))
    assert Failing.copies >= 5
    (lost,) = (sentence for sentence in report.warnings if "was lost" in sentence)
    assert lost.startswith(f"GPU {faulty} was lost, and the others went on: output voxels (z, y, x) = ")
    assert lost.endswith(": cudaErrorECCUncorrectable: uncorrectable ECC error encountered")
    assert np.abs(place.prediction() - expected(place)).max() <= TOLERANCES["fp32"]


def test_failure_of_the_only_gpu_is_the_error_of_the_run(
    place: Place, monkeypatch: pytest.MonkeyPatch, emulated_gpus: EmulatedGpus
) -> None:
    """The error is the failure itself, not that the GPU could not be closed."""
    emulated_gpus.open_as(Failing)
    monkeypatch.setattr(Failing, "copies", 0)
    monkeypatch.setattr(Failing, "faulty", 0)
    with pytest.raises(DeviceError, match=r"^output voxels .*, step 0 of column \d+: cudaErrorECCUncorrectable"):
        go(place, patch=(2, 4, 4))


class Full(EmulatedDevice):
    """Refuses memory once, when some of the run is done."""

    copies = 0
    held: ClassVar[list[int]] = []  # bytes, when each arena was asked for

    def copy_async(self, target: Any, source: Any, stream: Any) -> None:
        if stream is self.uploads:
            type(self).copies += 1
            if self.copies == 9:
                raise VramError("cudaMalloc of 9 bytes was refused: cudaErrorMemoryAllocation")
        super().copy_async(target, source, stream)

    def allocate(self, nbytes: int, what: str) -> Any:
        if what == "the arena":
            self.held.append(self.allocated)
        return super().allocate(nbytes, what)


def test_memory_refused_within_a_run_is_planned_anew_and_keeps_what_was_finished(
    place: Place, monkeypatch: pytest.MonkeyPatch, emulated_gpus: EmulatedGpus
) -> None:
    """Finished patches are kept; the rest follows with a smaller plan, once."""
    emulated_gpus.open_as(Full)
    monkeypatch.setattr(Full, "copies", 0)
    monkeypatch.setattr(Full, "held", [])
    report = go(place, patch=(2, 4, 4))
    assert len(Full.held) == 2
    assert Full.held[1] <= Full.held[0], "nothing of the first arena is held when the second is asked for"
    (said,) = (sentence for sentence in report.warnings if sentence.startswith("planned anew within "))
    assert "cudaMalloc of 9 bytes was refused" in said
    assert said.endswith("; what was finished before may be rounded differently")
    assert report.computed == report.voxels, "by both plans"
    assert np.abs(place.prediction() - expected(place)).max() <= TOLERANCES["fp32"]


def test_memory_refused_before_anything_is_finished_begins_the_run_anew(
    place: Place, monkeypatch: pytest.MonkeyPatch, emulated_gpus: EmulatedGpus
) -> None:
    """The run begins anew, with whatever patches suit."""
    emulated_gpus.open_as(Full)
    monkeypatch.setattr(Full, "copies", 8)
    report = go(place)
    (said,) = (sentence for sentence in report.warnings if sentence.startswith("planned anew within "))
    assert "rounded differently" not in said
    assert report.computed == report.voxels
    assert np.abs(place.prediction() - expected(place)).max() <= TOLERANCES["fp32"]


def test_run_resumes_with_another_number_of_gpus(place: Place) -> None:
    class EnoughError(Exception):
        pass

    def stops(event: Any) -> None:
        if event.columns_done > 3:
            raise EnoughError

    with pytest.raises(EnoughError):
        go(place, gpus=2, patch=(2, 4, 4), progress=stops)
    report = go(place, gpus=3, overwrite=False, resume=True, patch=None)
    assert 0 < report.computed < report.voxels
    assert report.plan.devices == 3
    assert np.abs(place.prediction() - expected(place)).max() <= TOLERANCES["fp32"]


def test_more_gpus_than_exist_are_refused(place: Place) -> None:
    result = place.infer("--device", "gpu", "--gpus", CARDS + 1)
    assert result.exit_code == 1
    last = result.output.splitlines()[-1]
    assert_holds(last, "Error: 4 GPUs were asked for", "sees 3", "lower --gpus", "CUDA_VISIBLE_DEVICES")


def test_run_on_several_gpus_never_falls_back_to_the_cpu(place: Place, emulated_gpus: EmulatedGpus) -> None:
    """A run that asked for several GPUs does not go to the CPU."""
    assert "this process sees 3" in place.refusal(*place.arguments, "--gpus", CARDS + 1)

    emulated_gpus.remove("there is no device")
    assert place.refusal(*place.arguments, "--gpus", 2) == "there is no device"


def test_run_resumed_with_more_gpus_keeps_its_ram_limit(place: Place) -> None:
    class EnoughError(Exception):
        pass

    def stops(event: Any) -> None:
        if event.columns_done > 3:
            raise EnoughError

    alone = plan(place.folder / "net.yaml", volume=place.volume, device="gpu", patch=(2, 4, 4))
    with pytest.raises(EnoughError):
        go(place, patch=(2, 4, 4), progress=stops, ram=alone.memory.peak + 2**22)
    with pytest.raises(ResumeError, match=r"the plan needs .* more than the limit allows"):
        go(place, gpus=3, overwrite=False, resume=True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpus", "0"), "'0' is neither a number of GPUs from 1 to 1024 nor all"),
        (("--gpus", "many"), "'many' is neither a number of GPUs"),
        (("--gpus", "2", "--device", "cpu"), "--gpus are for runs on GPUs, and --device cpu was asked for: drop one"),
    ],
)
def test_invalid_gpus_options_are_usage_errors(place: Place, arguments: tuple[str, ...], said: str) -> None:
    for result in (place.infer(*arguments), place.run("plan", place.folder / "net.yaml", *arguments)):
        assert result.exit_code == 2
        assert said in result.output


@pytest.mark.long
def test_plan_states_the_gain_of_several_gpus(place: Place) -> None:
    made = plan(place.folder / "net.yaml", shape=(40, 41, 42), device="gpu", gpus=2)
    assert (made.devices, made.single_device_seconds is not None) == (2, True)
    result = place.run("plan", place.folder / "net.yaml", "--shape", "40,41,42", "--device", "gpu", "--gpus", "2")
    assert "times as fast as one GPU alone" in result.output
    assert "on 2 GPUs in fp32" in result.output
    out = place.folder / "plan.json"
    place.run(
        "plan", place.folder / "net.yaml", "--volume", place.volume, "--device", "gpu", "--gpus", "2", "--out", out
    )
    assert RunPlan.load(out).devices == 2
