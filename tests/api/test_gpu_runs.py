"""Whole runs on an emulated GPU: output like the CPU's, report, stopped runs, a new plan if memory is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import prod
from typing import Any

import h5py
import numpy as np
import pytest

from tests.support.cli import Place
from tests.support.emulated_gpus import EmulatedGpus
from tests.support.emulator import EMULATED_GPU, EmulatedDevice, needs_compiler
from znnpy import inference
from znnpy.costs.model import Rates, assumed_rates
from znnpy.errors import DeviceError, PlanFileError, ResumeError, VramError
from znnpy.inference import infer
from znnpy.machine import Machine
from znnpy.network import Network
from znnpy.planner.run_plan import RunPlan
from znnpy.planning import plan
from znnpy.report.run_report import Report
from znnpy.run import target
from znnpy.run.pipeline import Event
from znnpy.shapes import Precision
from znnpy.trained import load_network
from znnpy.verify import TOLERANCES, verify

pytestmark = [pytest.mark.slow, needs_compiler]


@pytest.fixture(autouse=True)
def _emulated(emulated_gpus: EmulatedGpus) -> None:
    emulated_gpus.use()


def go(place: Place, **arguments: Any) -> Report:
    return infer(
        place.volume, place.folder / "net.yaml", **{"out": place.out, "device": "gpu", "threads": 2, **arguments}
    )


def on_the_cpu(place: Place, **arguments: Any) -> np.ndarray[Any, Any]:
    out = place.folder / "cpu.h5"
    go(place, **{"out": out, "device": "cpu", "overwrite": True, "patch": (4, 4, 6), **arguments})
    with h5py.File(out) as file:
        return np.array(file["prediction"])


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
@pytest.mark.parametrize("arguments", [{}, {"cover": "columns", "patch": (4, 4, 6)}, {"border": "reflect"}], ids=str)
def test_gpu_output_equals_that_of_the_cpu(place: Place, precision: Precision, arguments: dict[str, Any]) -> None:
    report = go(place, precision=precision, **arguments)
    assert report.plan.device == "gpu"
    assert {c.primitive.partition(".")[0] for c in report.plan.choices} == {"gpu"}
    expected = on_the_cpu(place, **arguments)
    assert np.abs(place.prediction() - expected).max() <= TOLERANCES[precision]
    with h5py.File(place.out) as file:
        assert file["prediction"].attrs["precision"] == precision
    checked = verify(place.out, place.volume, network=place.folder / "net.yaml", samples=100, precision=precision)
    assert (checked.predicted_in, checked.tolerance) == (precision, TOLERANCES[precision])
    assert checked.worst <= checked.allowed


def test_auto_device_chooses_the_gpu(place: Place) -> None:
    place.write_small_volume()
    assert go(place, device="auto").gpu == "emulated"
    assert plan(place.folder / "net.yaml", shape=(20, 23, 25)).device == "gpu"
    assert go(place, device="auto", only="cpu.conv.direct", overwrite=True).gpu is None


def test_arrays_are_predicted_on_the_gpu(place: Place, emulated_gpus: EmulatedGpus) -> None:
    net = load_network(place.folder / "net.yaml")
    array = np.random.default_rng(2).integers(0, 256, (14, 23, 25), np.uint8)
    opened: list[EmulatedDevice] = []

    class Noted(EmulatedDevice):
        def __enter__(self) -> Noted:
            opened.append(self)
            return self

    emulated_gpus.open_as(Noted)
    found = net(array, device="gpu", precision="tf32")
    assert len(opened) == 1
    np.testing.assert_allclose(found, net(array, device="cpu"), atol=TOLERANCES["tf32"])
    assert len(opened) == 1


def test_memory_of_cudas_libraries_is_promised(place: Place) -> None:
    place.write_small_volume()
    # the CPU's first: what this process holds is measured for each plan, and grows with the first
    on_cpu, on_gpu = (plan(place.folder / "net.yaml", volume=place.volume, device=device) for device in ("cpu", "gpu"))
    assert on_gpu.memory.baseline >= on_cpu.memory.baseline + target.LATER_BYTES


def test_plans_use_measured_rates(place: Place, emulated_gpus: EmulatedGpus) -> None:
    """Layers are measured unless a plan is given, within what CUDA and its libraries leave of the limit."""
    place.write_small_volume()
    asked: list[Any] = []

    def measured(
        device: Any, machine: Machine, network: Network, precision: str, *, vram_bytes: int, **others: object
    ) -> Rates:
        asked.append((type(device), network.name, precision, vram_bytes))
        rates = assumed_rates(machine, 1, "gpu")
        return replace(rates, stage_seconds=1.0)

    whole = plan(place.folder / "net.yaml", volume=place.volume, device="gpu", vram="800M")
    emulated_gpus.measure_as(measured)
    made = plan(place.folder / "net.yaml", volume=place.volume, device="gpu", vram="800M", precision="tf32")
    assert made.seconds > 1 > whole.seconds
    load_network(place.folder / "net.yaml")(np.zeros((9, 10, 11), np.uint8), device="gpu", vram="800M")
    room = 800 * 2**20 - made.main.memory.context
    assert 0 < room <= 600 * 2**20
    assert asked == [(EmulatedDevice, "tiny", p, room) for p in ("tf32", "fp32")]
    go(place, plan=made, threads=None)
    assert len(asked) == 2


def test_report_names_device_and_primitives(place: Place) -> None:
    report = go(place, precision="tf32", vram="800M")
    lines, memory = report.lines(), report.plan.main.memory
    assert "device     emulated" in lines
    assert "precision  tf32, 32-bit floating point rounded to 11 significant bits in products" in lines
    (methods,) = (line for line in lines if line.startswith("methods    "))
    for choice_ in report.plan.choices:
        assert choice_.primitive in methods
    assert sum(map(int, re.findall(r"\((\d+) layers?\)", methods))) == len(place.network.layers)
    (vram,) = (line for line in lines if line.startswith("VRAM       "))
    assert vram.endswith(", limit: 800 MiB)")
    assert report.vram_bytes is not None
    assert memory.last.arena + memory.last.weights <= report.vram_bytes <= memory.vram
    said = report.as_json()
    assert (said["device"], said["gpu"], said["precision"]) == ("gpu", "emulated", "tf32")
    assert (said["vram_bytes"], said["predicted"]["vram_bytes"]) == (report.vram_bytes, memory.vram)
    assert not any("fastest methods" in line for line in lines)


def test_gpu_plan_runs_on_another_volume(place: Place) -> None:
    place.write_small_volume()
    made = plan(place.folder / "net.yaml", shape=(20, 23, 25), precision="tf32", threads=2)
    place.write_volume(np.random.default_rng(5).standard_normal((17, 31, 22)).astype(np.float32))
    report = go(place, device="auto", threads=None, plan=made)
    assert (report.plan.device, report.precision) == ("gpu", "tf32")
    assert report.plan.main.memory.staging > made.main.memory.staging  # float32 voxels instead of uint8
    assert (made.main.itemsize_in, report.plan.main.itemsize_in) == (1, 4)
    assert np.abs(place.prediction() - on_the_cpu(place)).max() <= TOLERANCES["tf32"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"device": "cpu"}, "leave out `device`, or leave out `plan`"),
        ({"precision": "fp16"}, "leave out `precision`, or leave out `plan`"),
        ({"vram": "1M"}, r"the plan needs [\d,]+ bytes of VRAM, [\d,]+ more than the limit allows \(1,048,576\)"),
    ],
)
def test_given_plan_refuses_another_device(place: Place, arguments: dict[str, Any], said: str) -> None:
    place.write_small_volume()
    made = plan(place.folder / "net.yaml", volume=place.volume, precision="tf32")
    with pytest.raises(PlanFileError, match=said):
        go(place, **{"plan": made, "threads": None, "device": "auto", **arguments})


def test_plan_beyond_free_vram_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch, emulated_gpus: EmulatedGpus
) -> None:
    place.write_small_volume()
    made = plan(place.folder / "net.yaml", volume=place.volume)

    class Full(EmulatedDevice):
        def free_bytes(self) -> int:
            return made.memory.vram - made.main.memory.context

    emulated_gpus.open_as(Full)
    monkeypatch.setattr(target, "MOST_CONTEXT_BYTES", 0)
    with pytest.raises(
        PlanFileError, match=r"bytes of VRAM, and of the 1,073,741,824 bytes of the emulated only [\d,]+ "
    ):
        go(place, plan=made, threads=None, device="auto")


@pytest.fixture
def stopped(place: Place) -> Place:
    """Interrupt a run on the GPU after some of its patches."""

    def interrupt(event: Event) -> None:
        if event.columns_done > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(place, patch=(4, 8, 8), precision="tf32", ram="2.5G", progress=interrupt)
    return place


def test_stopped_run_resumes_byte_for_byte(stopped: Place) -> None:
    report = go(stopped, resume=True, device="auto")
    assert 0 < report.computed < report.voxels
    assert (report.gpu, report.precision) == ("emulated", "tf32")
    resumed = stopped.prediction()
    go(stopped, patch=(4, 8, 8), precision="tf32", overwrite=True)
    np.testing.assert_array_equal(resumed.view(np.uint32), stopped.prediction().view(np.uint32))


def test_resume_of_a_finished_run_does_not_warn_of_the_cpu(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "slower_here", lambda machine: ("no compiled kernels",))
    go(place)
    report = go(place, resume=True, device="auto")
    assert (report.computed, report.plan.device, report.warnings) == (0, "gpu", ())
    go(place, device="cpu", overwrite=True)
    assert any("no compiled kernels" in warning for warning in go(place, resume=True, device="cpu").warnings)


def test_failed_gpu_loses_only_unfinished_columns(place: Place, emulated_gpus: EmulatedGpus) -> None:
    copies = 0

    class Failing(EmulatedDevice):
        def copy_async(self, target: Any, source: Any, stream: Any) -> None:
            nonlocal copies
            copies += 1
            if copies > 20:
                raise DeviceError("cudaMemcpyAsync was refused: cudaErrorIllegalAddress")
            super().copy_async(target, source, stream)

    emulated_gpus.open_as(Failing)
    arguments: dict[str, Any] = {"patch": (4, 8, 8), "cover": "patches"}
    with pytest.raises(DeviceError, match="cudaErrorIllegalAddress"):
        go(place, **arguments)
    assert not place.out.exists()
    emulated_gpus.open_as(EmulatedDevice)
    report = go(place, resume=True, **arguments)
    assert 0 < report.computed < report.voxels
    resumed = place.prediction()
    go(place, overwrite=True, **arguments)
    np.testing.assert_array_equal(resumed.view(np.uint32), place.prediction().view(np.uint32))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"device": "cpu"}, "the run began with device='gpu', and now it is device='cpu'"),
        ({"precision": "fp32"}, "the run began with precision='tf32', and now it is precision='fp32'"),
        ({"vram": "1M"}, r"needs [\d,]+\.\d MiB, and vram='1M' allows 1\.0 MiB"),
    ],
)
def test_stopped_run_resumes_with_its_settings(stopped: Place, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ResumeError, match=said):
        go(stopped, resume=True, **arguments)


@pytest.mark.parametrize(
    "change", [{"name": "another card"}, {"driver": 13010}, {"versions": (("cupy", "15.0"),)}], ids=str
)
def test_resume_with_another_gpu_driver_or_library_is_refused(
    stopped: Place, emulated_gpus: EmulatedGpus, change: dict[str, Any]
) -> None:
    emulated_gpus.use(gpu=replace(EMULATED_GPU, **change))
    with pytest.raises(ResumeError) as caught:
        go(stopped, resume=True)
    assert str(caught.value).startswith("the run began with gpu {")
    (new,) = change.values()
    assert json.dumps(new if not isinstance(new, tuple) else new[0][1]) in str(caught.value)


def test_resume_without_the_gpu_is_refused(stopped: Place, emulated_gpus: EmulatedGpus) -> None:
    emulated_gpus.remove("there is no device any more")
    with pytest.raises(
        ResumeError, match=r"the run began on a GPU \(.*emulated.*\): there is no device any more; resume"
    ):
        go(stopped, resume=True)


def test_run_begun_on_the_cpu_resumes_there(place: Place, emulated_gpus: EmulatedGpus) -> None:
    """The run stays on the CPU even if a GPU has come since, and with the options that it began with."""

    def interrupt(event: Event) -> None:
        if event.columns_done > 3:
            raise KeyboardInterrupt

    arguments: dict[str, Any] = {"device": "auto", "precision": "tf32", "vram": "600M", "patch": (4, 8, 8)}
    emulated_gpus.remove("there is no device any more")
    with pytest.raises(KeyboardInterrupt):
        go(place, progress=interrupt, **arguments)
    emulated_gpus.use()
    report = go(place, resume=True, **arguments)
    assert (report.gpu, report.precision) == (None, "fp32")
    assert report.notes[-2:] == (
        "`vram` limits nothing on the CPU",
        "the CPU computes in fp32, more exactly than the tf32 that is asked for",
    )


def refusing(times: int) -> type[EmulatedDevice]:
    """Make a device that refuses its arena that often."""
    left = times

    class Refusing(EmulatedDevice):
        def allocate(self, nbytes: int, what: str) -> Any:
            nonlocal left
            if what == "the arena" and left:
                left -= 1
                raise VramError(f"cudaMalloc for {what} of {nbytes} bytes was refused")
            return super().allocate(nbytes, what)

    return Refusing


def test_refused_memory_causes_one_new_plan(place: Place, emulated_gpus: EmulatedGpus) -> None:
    whole = go(place).plan
    emulated_gpus.open_as(refusing(1))
    report = go(place, overwrite=True)
    limit, before = report.plan.limits.vram_bytes, whole.limits.vram_bytes
    assert limit is not None
    assert before is not None
    assert limit == int(0.9 * before)
    assert report.plan.memory.vram <= limit
    (warning,) = (w for w in report.warnings if "planned anew" in w)
    assert "cudaMalloc for the arena of " in warning
    assert "rounded" not in warning
    with h5py.File(place.out) as file:
        assert RunPlan.from_json(file["prediction"].attrs["plan"]) == report.plan
    np.testing.assert_allclose(place.prediction(), on_the_cpu(place), atol=1e-5)
    emulated_gpus.open_as(refusing(2))
    with pytest.raises(VramError, match="cudaMalloc for the arena"):
        go(place, overwrite=True)


@pytest.mark.parametrize(("ram", "limit"), [(None, 5 * 2**29), ("2G", 2**31)])
def test_refused_memory_keeps_finished_patches(
    stopped: Place, emulated_gpus: EmulatedGpus, ram: str | None, limit: int
) -> None:
    emulated_gpus.open_as(refusing(1))
    report = go(stopped, resume=True, ram=ram)
    assert 0 < report.computed < report.voxels
    assert report.plan.patch_out == (4, 8, 8)
    assert report.plan.limits.ram_bytes == limit
    (warning,) = (w for w in report.warnings if "planned anew" in w)
    assert warning.endswith("; what was finished before may be rounded differently")
    assert np.abs(stopped.prediction() - on_the_cpu(stopped)).max() <= TOLERANCES["tf32"]
    assert prod(stopped.prediction().shape[1:]) == report.voxels


def test_given_plan_is_not_replaced_if_memory_is_refused(place: Place, emulated_gpus: EmulatedGpus) -> None:
    place.write_small_volume()
    made = plan(place.folder / "net.yaml", volume=place.volume)
    emulated_gpus.open_as(refusing(1))
    with pytest.raises(VramError, match="cudaMalloc for the arena"):
        go(place, plan=made, threads=None)
