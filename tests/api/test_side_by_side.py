"""A GPU, here an emulator, and the CPU side by side: cells from one queue, each computed by its own plan."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import h5py
import numpy as np
import pytest

from tests.support.cli import Place
from tests.support.emulated_gpus import EmulatedGpus, assumed_gpu_rates
from tests.support.emulator import EMULATED_GPU, EmulatedDevice, needs_compiler
from tests.support.fake_plans import changed, sharing_of
from tests.support.tiers import one_in
from znnpy import computation
from znnpy.costs.model import Rates, assumed_rates
from znnpy.errors import DeviceError, NoPlanError, PlanFileError, ResumeError, VramError
from znnpy.inference import infer
from znnpy.machine import Limits, Machine, this_machine
from znnpy.network_files import read_network
from znnpy.planner import modes
from znnpy.planner.request import CostModel, PlanRequest, Target
from znnpy.planner.run_plan import RunPlan
from znnpy.planner.side_by_side import CpuPlanner
from znnpy.planning import plan
from znnpy.report.plan_text import explain
from znnpy.report.run_report import Report
from znnpy.run import choice, pipeline
from znnpy.run.session import Session
from znnpy.verify import TOLERANCES

pytestmark = [pytest.mark.slow, needs_compiler]


def nearly_as_slow_as_the_cpu(device: Any, machine: Machine, *asked: object, **arguments: object) -> Rates:
    """Return rates with which both have cells to compute."""
    return assumed_rates(machine, 1, "gpu").scaled(1e-4, 1e-4)


@pytest.fixture(autouse=True)
def _emulated(emulated_gpus: EmulatedGpus) -> None:
    emulated_gpus.use(count=2, rates=nearly_as_slow_as_the_cpu)


def go(place: Place, **arguments: Any) -> Report:
    given = {
        "out": place.out,
        "threads": 2,
        "precision": "fp32",
        "overwrite": True,
        "mode": "side-by-side",
        **arguments,
    }
    return infer(place.volume, place.folder / "net.yaml", **given)


def expected(place: Place) -> np.ndarray[Any, Any]:
    out = place.folder / "cpu.h5"
    go(place, out=out, mode="cpu", precision=None, patch=(4, 4, 6))
    with h5py.File(out) as file:
        return np.array(file["prediction"])


@pytest.mark.parametrize(
    "arguments",
    one_in(
        2,
        [{}, {"cover": "columns"}, {"cover": "patches", "gpus": 2}, {"patch": (2, 4, 4)}, {"output_dtype": "float16"}],
    ),
)
def test_both_devices_compute_and_the_output_equals_the_cpus(place: Place, arguments: dict[str, Any]) -> None:
    report = go(place, **arguments)
    made = report.plan
    assert made.mode == "side-by-side"
    assert 0 < made.cpu_items < len(sharing_of(made).cells)
    assert made.memory.peak <= made.limits.ram_bytes
    assert [lane.name for lane in report.workers] == (
        ["GPU 0", "GPU 1", "CPU"] if "gpus" in arguments else ["GPU", "CPU"]
    )
    assert sum(lane.voxels for lane in report.workers) == report.computed == report.voxels
    (line,) = (line for line in report.lines() if line.startswith("devices"))
    assert "CPU" in line
    (methods,) = (line for line in report.lines() if line.startswith("methods"))
    assert all(choice.primitive in methods for choice in made.choices)
    together = place.prediction().astype(np.float32)
    most = 1e-3 if "output_dtype" in arguments else TOLERANCES["fp32"]
    assert np.abs(together - expected(place)).max() <= most


def test_plan_names_the_part_of_each_device(place: Place) -> None:
    made = go(place, threads=3).plan
    assert made.workers[1].plan.limits.threads == made.workers[1].plan.compute_threads == 2  # one feeds the GPU
    text = " ".join(explain(made).split())
    assert f"take cells of {'x'.join(map(str, sharing_of(made).cells.patch))} output voxels, " in text
    assert f"{len(sharing_of(made).cells)} in all, of which the CPU is to compute {made.cpu_items}, " in text
    assert "without the CPU, which computes" in text
    assert RunPlan.from_json(made.to_json()) == made


def test_given_plan_is_run_unchanged(place: Place) -> None:
    made = go(place).plan
    file = place.folder / "plan.json"
    file.write_text(made.to_json())
    again = go(place, plan=file, mode="auto", threads=None, precision=None)
    assert sharing_of(again.plan).cells == sharing_of(made).cells
    assert len(again.workers) == 2
    with pytest.raises(PlanFileError, match="leave out `mode`"):
        go(place, plan=file, mode="gpu", threads=None, precision=None)
    for change, said in (({"workers": []}, "at least 1 item"), ({"workers": [{"plan": None}]}, "workers.0.plan")):
        file.write_text(json.dumps({**json.loads(made.to_json()), **change}))
        with pytest.raises(PlanFileError, match=said):
            go(place, plan=file, mode="auto", threads=None, precision=None)
    gpu, cpu = made.workers
    for workers in ((cpu, gpu), (gpu, gpu), (cpu, cpu)):
        with pytest.raises(ValueError, match=r"its workers run in modes .*: side by side are gpu and cpu"):
            replace(made, workers=workers)


class Broken(EmulatedDevice):
    """Refuses every copy after some."""

    copies = 0

    def copy_async(self, target: Any, source: Any, stream: Any) -> None:
        if stream is self.uploads:
            Broken.copies += 1
            if Broken.copies > 3:
                raise DeviceError("cudaErrorECCUncorrectable: uncorrectable ECC error encountered")
        super().copy_async(target, source, stream)


def test_cpu_finishes_the_run_if_the_gpu_fails(
    place: Place, monkeypatch: pytest.MonkeyPatch, emulated_gpus: EmulatedGpus
) -> None:
    emulated_gpus.open_as(Broken)
    monkeypatch.setattr(Broken, "copies", 0)
    report = go(place, patch=(2, 4, 4))
    assert any("GPU was lost, and the others went on" in sentence for sentence in report.warnings)
    assert np.abs(place.prediction() - expected(place)).max() <= TOLERANCES["fp32"]


def test_gpu_takes_over_late_items_of_the_cpu(place: Place) -> None:
    """The CPU gives up in the midst of a step."""
    submit, begun = Session.submit, list[str]()

    def late(self: Session, *arguments: Any, **more: Any) -> Any:
        found = submit(self, *arguments, **more)
        if self.plan.device == "cpu":
            begun.append("CPU")
            while True:
                self.pool.check()
                time.sleep(0.001)
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Session, "submit", late)
        report = go(place)
    assert begun == ["CPU"]
    (sentence,) = (sentence for sentence in report.warnings if "CPU was late" in sentence)
    assert "CPU was late at the end: a GPU computed " in sentence
    assert [lane.voxels for lane in report.workers if lane.name == "CPU"] == [0]
    assert np.abs(place.prediction() - expected(place)).max() <= TOLERANCES["fp32"]


def test_stopped_run_resumes_where_it_stopped(place: Place) -> None:
    seen: list[pipeline.Event] = []

    def stop(event: pipeline.Event) -> None:
        seen.append(event)
        if event.columns_done >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(place, patch=(2, 4, 4), progress=stop)
    report = go(place, overwrite=False, resume=True, mode="auto", threads=None, precision=None)
    assert 0 < report.computed < report.voxels
    assert report.plan.mode == "side-by-side"
    assert np.abs(place.prediction() - expected(place)).max() <= TOLERANCES["fp32"]


def test_resume_with_contradicting_options_is_refused(place: Place) -> None:
    with pytest.raises(KeyboardInterrupt):
        go(place, patch=(2, 4, 4), progress=_stop_at_two)
    with pytest.raises(ResumeError, match="the run began with mode='side-by-side', and now it is mode='gpu'"):
        go(place, overwrite=False, resume=True, mode="gpu", threads=None, precision=None)


def _stop_at_two(event: pipeline.Event) -> None:
    if event.columns_done >= 2:
        raise KeyboardInterrupt


def test_side_by_side_is_refused_if_the_cpu_would_only_wait(place: Place, emulated_gpus: EmulatedGpus) -> None:
    emulated_gpus.measure_as(assumed_gpu_rates)
    with pytest.raises(NoPlanError, match=r"the GPU is done in .*, and of the parts that suit both the CPU takes"):
        go(place)
    assert go(place, mode="auto").plan.mode == "gpu"


def test_auto_chooses_side_by_side_only_for_enough_gain(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    both = go(place).plan
    assert both.single_device_seconds is not None
    ratio = both.seconds / both.single_device_seconds
    for long, gain, mode in ((0.0, 1.01 * ratio, "side-by-side"), (0.0, 0.99 * ratio, "gpu"), (9e9, 1.0, "gpu")):
        thresholds = modes.Thresholds(long_seconds=long, offloaded=0.0, side_by_side=gain)
        monkeypatch.setattr(modes, "THRESHOLDS", thresholds)
        assert go(place, mode="auto").plan.mode == mode


def test_ram_limit_covers_gpu_and_cpu_plan_together(place: Place) -> None:
    whole = go(place).plan
    least = go(place, mode="gpu").plan.memory.peak
    with pytest.raises(NoPlanError, match=r"the GPU's part takes .* MiB of RAM, and the CPU needs"):
        go(place, ram=least + 2**24)
    within = go(place, ram=whole.memory.peak + 2**26).plan
    assert within.mode == "side-by-side"
    assert within.memory.peak <= whole.memory.peak + 2**26


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"mode": "both"}, "there is no mode 'both'; choose one of auto, cpu, gpu, gpu-host, cpu-to-gpu, side-by-side"),
        ({"device": "cpu"}, "mode='side-by-side' is of the GPU, and device='cpu' was asked for: drop one"),
        ({"mode": "cpu", "device": "gpu"}, "mode='cpu' is of the CPU, and device='gpu' was asked for: drop one"),
        ({"mode": "cpu", "vram": "1G", "precision": None}, "`vram` limits the memory of a GPU, and none is used"),
    ],
)
def test_contradicting_options_are_refused(place: Place, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        go(place, **arguments)


def test_primitives_of_both_devices_may_be_forced(place: Place) -> None:
    made = go(place, only=("gpu.conv.direct", "cpu.conv.direct")).plan
    assert {c.primitive for c in made.main.choices if c.shape.kind == "conv"} == {"gpu.conv.direct"}
    assert {c.primitive for c in made.workers[1].plan.choices if c.shape.kind == "conv"} == {"cpu.conv.direct"}


def test_plan_lists_every_mode(place: Place) -> None:
    arguments: dict[str, Any] = {"volume": place.volume, "precision": "fp32", "threads": 2}
    chosen = plan(place.folder / "net.yaml", mode="side-by-side", **arguments)
    assert chosen.mode == "side-by-side"
    assert any("without the CPU" in kind.reason for kind in chosen.alternatives)
    quick = plan(place.folder / "net.yaml", mode="gpu", **arguments)
    assert quick.mode == "gpu"
    assert not any(kind.scheme == "side by side with the CPU" for kind in quick.alternatives)


def test_plan_runs_on_a_volume_of_another_type(place: Place) -> None:
    """Patches of the CPU are larger there, and so are masks of what is not finite."""
    made = go(place).plan
    file = place.folder / "plan.json"
    file.write_text(made.to_json())
    voxels = np.random.default_rng(7).integers(0, 256, (20, 23, 25)).astype(np.float64)
    voxels[3, 4, 5] = np.nan
    place.write_volume(voxels)
    again = go(place, plan=file, mode="auto", threads=None, precision=None, allow_nan=True).plan
    assert again.workers[1].plan.itemsize_in == 8
    assert again.workers[1].plan.memory.reading > made.workers[1].plan.memory.reading
    assert np.isnan(place.prediction()).any()


@pytest.mark.parametrize("done", [0, 3])
def test_memory_refused_midway_causes_a_new_plan(place: Place, emulated_gpus: EmulatedGpus, done: int) -> None:
    """The CPU does not compute the rest alone: the GPU is planned anew."""

    class Refusing(EmulatedDevice):
        copies = 0

        def copy_async(self, target: Any, source: Any, stream: Any) -> None:
            if stream is self.uploads:
                Refusing.copies += 1
                if Refusing.copies == 1 + done:
                    raise VramError("cudaErrorMemoryAllocation: out of memory")
            super().copy_async(target, source, stream)

    emulated_gpus.open_as(Refusing)
    report = go(place, patch=(2, 4, 4))
    assert any("planned anew" in sentence for sentence in report.warnings)
    assert not any("was lost" in sentence for sentence in report.warnings)
    assert report.plan.mode == "side-by-side"
    assert np.abs(place.prediction() - expected(place)).max() <= TOLERANCES["fp32"]


def test_new_plan_along_another_axis_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch, emulated_gpus: EmulatedGpus
) -> None:
    """The CPU's columns go on along the axis that they began along, over cells that would be the same."""

    class Refusing(EmulatedDevice):
        copies = 0

        def copy_async(self, target: Any, source: Any, stream: Any) -> None:
            if stream is self.uploads:
                Refusing.copies += 1
                if Refusing.copies == 4:
                    raise VramError("cudaErrorMemoryAllocation: out of memory")
            super().copy_async(target, source, stream)

    chosen: list[RunPlan] = []

    right = choice.choose

    def choose(*asked: Any, **arguments: Any) -> RunPlan:
        chosen.append(right(*asked, **arguments))
        return chosen[-1] if len(chosen) == 1 else changed(chosen[-1], axis=(chosen[0].main.axis + 1) % 3)

    emulated_gpus.open_as(Refusing)
    for module in (computation, choice):
        monkeypatch.setattr(module, "choose", choose)
    with pytest.raises(VramError, match="out of memory"):
        go(place, patch=(2, 4, 4))
    assert len(chosen) == 2
    first, smaller = chosen
    assert smaller.limits.ram_bytes == first.limits.ram_bytes - first.workers[1].plan.memory.peak


def test_memory_refused_during_a_run_causes_a_new_plan_with_the_cpu(place: Place, emulated_gpus: EmulatedGpus) -> None:
    """It is planned anew, side by side with the CPU again."""

    class Full(EmulatedDevice):
        refusals = 0

        def allocate(self, nbytes: int, what: str) -> Any:
            if what == "the arena" and not Full.refusals:
                Full.refusals += 1
                raise VramError(f"{nbytes} bytes are not free")
            return super().allocate(nbytes, what)

    emulated_gpus.open_as(Full)
    report = go(place)
    assert any("planned anew" in sentence for sentence in report.warnings)
    assert report.plan.mode == "side-by-side"
    assert np.abs(place.prediction() - expected(place)).max() <= TOLERANCES["fp32"]


def test_cpu_rates_are_for_the_threads_left_by_the_gpu(place: Place) -> None:
    network, machine, output = read_network(str(place.folder / "net.yaml")).network, this_machine(), (4, 4, 6)
    rates = assumed_rates(machine, 3)
    gpu = Target(replace(machine, gpu=EMULATED_GPU), "gpu", mode="side-by-side")
    request = PlanRequest(network, output, Limits(2**40, 3, 2**40), gpu)
    made = CpuPlanner.of(request, CostModel({"cpu": rates}), 2**33).plan(output)
    alone = PlanRequest(network, output, Limits(2**33, 2), Target(machine), baseline=0)
    assert made == modes.make_plan(alone, CostModel({"cpu": rates.slowed(1.5)})).main
