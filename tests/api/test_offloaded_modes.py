"""Modes in which the first layers have their tensors in the memory of the host, on a GPU that is emulated here."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import h5py
import numpy as np
import pytest

from tests.support.cli import Place
from tests.support.emulated_gpus import EmulatedGpus
from tests.support.emulator import EmulatedDevice, needs_compiler
from znnpy.costs.model import Rates, assumed_rates
from znnpy.errors import NoPlanError, PlanFileError, ResumeError, VerifyError, VramError
from znnpy.inference import infer
from znnpy.machine import Machine, this_machine
from znnpy.measure.layer_bench import HostRamLayer, Position
from znnpy.option_values import OFFLOAD_MODES, AskedMode, OffloadMode
from znnpy.planner import modes
from znnpy.planner.memory import staging_bytes
from znnpy.planner.run_plan import RunPlan
from znnpy.planning import plan
from znnpy.report.plan_text import explain
from znnpy.report.run_report import Report
from znnpy.run import pipeline, target
from znnpy.trained import load_network
from znnpy.verify import TOLERANCES

pytestmark = [pytest.mark.slow, needs_compiler]

MODES = OFFLOAD_MODES


@pytest.fixture(autouse=True)
def _emulated(emulated_gpus: EmulatedGpus) -> None:
    emulated_gpus.use(count=2)


def go(place: Place, mode: str, **arguments: Any) -> Report:
    given = {"out": place.out, "threads": 2, "precision": "fp32", "overwrite": True, "mode": mode, **arguments}
    return infer(place.volume, place.folder / "net.yaml", **given)


def expected(place: Place) -> np.ndarray[Any, Any]:
    out = place.folder / "cpu.h5"
    go(place, "cpu", out=out, precision=None, patch=(4, 4, 6))
    with h5py.File(out) as file:
        return np.array(file["prediction"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cover", ["columns", "patches"])
def test_output_equals_that_of_the_cpu(place: Place, mode: str, cover: str) -> None:
    report = go(place, mode, cover=cover, trace=place.folder / "trace.json")
    made = report.plan
    assert made.mode == mode
    assert 0 < made.main.offloaded < len(made.choices)
    assert made.main.streams == (cover == "columns")
    assert made.memory.peak <= made.limits.ram_bytes
    assert np.abs(place.prediction() - expected(place)).max() <= TOLERANCES["fp32"]
    (line,) = (line for line in report.lines() if line.startswith("mode "))
    assert mode in line
    assert ("idle: CPU" in line) == (mode == "cpu-to-gpu")
    assert set(report.as_json()["idle_seconds"]) == ({"CPU", "GPU"} if mode == "cpu-to-gpu" else set())
    assert "gpu" in {choice.device for choice in made.choices[made.main.offloaded :]}
    assert RunPlan.from_json(made.to_json()) == made


@pytest.mark.parametrize("mode", MODES)
def test_stopped_run_resumes_where_it_stopped(place: Place, mode: str) -> None:
    def stop(event: pipeline.Event) -> None:
        if event.columns_done >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(place, mode, patch=(4, 8, 4), cover="patches", progress=stop)
    arguments = {"overwrite": False, "resume": True, "threads": None, "precision": None}
    with pytest.raises(ResumeError, match=f"the run began with mode='{mode}', and now it is mode='gpu'"):
        go(place, "gpu", **arguments)
    with pytest.raises(ResumeError, match=f"the run began with mode='{mode}', which runs on one GPU; leave out `gpus`"):
        go(place, "auto", gpus=2, **arguments)
    report = go(place, "auto", **arguments)
    assert 0 < report.computed < report.voxels
    assert report.plan.mode == mode
    assert np.abs(place.prediction() - expected(place)).max() <= TOLERANCES["fp32"]


@pytest.mark.parametrize("mode", MODES)
def test_several_gpus_and_fp16_are_refused_with_host_modes(place: Place, mode: str) -> None:
    with pytest.raises(ValueError, match=f"mode='{mode}' runs on one GPU: leave out `gpus`"):
        go(place, mode, gpus=2)
    with pytest.raises(NoPlanError, match="choose precision='tf32' or precision='fp32'"):
        go(place, mode, precision="fp16")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("output_dtype", ["float16", "uint8"])
def test_output_in_float16_and_uint8_equals_that_of_the_cpu(place: Place, mode: str, output_dtype: str) -> None:
    made = go(place, mode, output_dtype=output_dtype).plan
    assert made.main.itemsize_out == np.dtype(output_dtype).itemsize
    found = place.prediction()
    out = place.folder / "cpu.h5"
    go(place, "cpu", out=out, precision=None, output_dtype=output_dtype)
    with h5py.File(out) as file:
        exact = np.array(file["prediction"])
    assert found.dtype == exact.dtype == output_dtype
    assert np.abs(found.astype(np.float32) - exact.astype(np.float32)).max() <= (1 if output_dtype == "uint8" else 1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_plan_runs_on_a_volume_of_another_type(place: Place, mode: str) -> None:
    """Tensors between the devices stay; output buffers are larger, and NaN is masked."""
    made = go(place, mode, output_dtype="uint8").plan
    file = place.folder / "plan.json"
    file.write_text(made.to_json())
    voxels = np.random.default_rng(7).integers(0, 256, (20, 23, 25)).astype(np.float64)
    voxels[3, 4, 5] = np.nan
    place.write_volume(voxels)
    arguments = {"threads": None, "precision": None, "allow_nan": True}
    again = go(place, "auto", plan=file, **arguments).plan
    assert again.mode == mode
    part = made.main.handover_bytes // made.main.sub_batches[made.main.offloaded]
    writes = made.main.cover(place.network).steps(0)
    out_bytes = 4 * place.network.output_channels * prod(made.patch_out)
    assert again.main.memory.staging == staging_bytes(part, out_bytes, writes=writes)
    assert again.main.memory.reading > made.main.memory.reading
    found = place.prediction()
    assert np.isnan(found).any()
    out = place.folder / "cpu.h5"
    go(place, "cpu", out=out, precision=None, allow_nan=True)
    with h5py.File(out) as exact:
        np.testing.assert_allclose(found, exact["prediction"], atol=TOLERANCES["fp32"])
    with pytest.raises(PlanFileError, match=f"the plan is of mode='{mode}', which runs on one GPU: leave out `gpus`"):
        go(place, "auto", plan=file, gpus=2, **arguments)


@pytest.mark.parametrize("mode", MODES)
def test_primitives_of_either_device_may_be_forced(place: Place, mode: str) -> None:
    """The command line accepts them too, and `gpu.conv.host_ram` is one like others."""
    place.write_small_volume()
    made = go(place, mode, only=("cpu.conv.direct",)).plan
    of_host = [choice for choice in made.choices[: made.main.offloaded] if choice.shape.kind == "conv"]
    assert {choice.primitive for choice in of_host} == {"cpu.conv.direct"}
    result = place.infer("--mode", mode, "--only", "gpu.conv.host_ram", "--overwrite", "--threads", 2)
    if mode == "cpu-to-gpu":
        assert result.exit_code == 1
        assert "runs in mode gpu-host alone" in result.stderr
    else:
        assert result.exit_code == 0, result.stderr
        assert "gpu.conv.host_ram" in result.stdout


@pytest.mark.parametrize("mode", MODES)
def test_memory_refused_during_a_run_causes_a_new_plan_in_the_same_mode(
    place: Place, emulated_gpus: EmulatedGpus, mode: str
) -> None:
    """It is planned anew in the same mode, and what was finished stays."""

    class Refusing(EmulatedDevice):
        copies = 0

        def copy_async(self, target: Any, source: Any, stream: Any) -> None:
            Refusing.copies += 1
            if Refusing.copies == 6:
                raise VramError("cudaErrorMemoryAllocation: out of memory")
            super().copy_async(target, source, stream)

    emulated_gpus.open_as(Refusing)
    report = go(place, mode, patch=(4, 8, 4), cover="patches")
    assert any("planned anew" in sentence for sentence in report.warnings)
    assert report.plan.mode == mode
    assert np.abs(place.prediction() - expected(place)).max() <= TOLERANCES["fp32"]


@pytest.mark.parametrize("mode", [*MODES, "side-by-side"])
def test_called_network_runs_in_every_mode(place: Place, emulated_gpus: EmulatedGpus, mode: AskedMode) -> None:
    """A session goes on with the next array; where the GPU refuses memory, it is planned anew."""

    class Refusing(EmulatedDevice):
        copies = -(10**9)

        def copy_async(self, target: Any, source: Any, stream: Any) -> None:
            Refusing.copies += 1
            if Refusing.copies == 4:
                raise VramError("cudaErrorMemoryAllocation: out of memory")
            super().copy_async(target, source, stream)

    emulated_gpus.open_as(Refusing)
    net = load_network(place.folder / "net.yaml")
    array = np.random.default_rng(5).integers(0, 256, (14, 16, 18), np.uint8)
    expected = net(array, device="cpu", threads=2)
    with net.session(array.shape, dtype=np.uint8, mode=mode, precision="fp32", threads=2, patch=(2, 4, 4)) as run:
        assert run.plan.mode == mode
        first = run.plan
        for copies in (-(10**9), -(10**9), 0):
            Refusing.copies = copies
            assert np.abs(run(array) - expected).max() <= TOLERANCES["fp32"]
            assert run.plan.mode == mode
        assert run.plan.limits != first.limits


@pytest.mark.parametrize("mode", MODES)
def test_plan_names_the_device_of_each_layer(place: Place, mode: OffloadMode) -> None:
    told: list[str] = []
    why: list[Any] = []
    made = plan(place.folder / "net.yaml", volume=place.volume, mode=mode, tell=told.append, tell_why=why.extend)
    assert made.mode == mode
    assert not why
    assert any("not of mode" in sentence for sentence in told)
    assert "runs on" in explain(made)


def slow(device: Any, machine: Machine, *asked: object, **arguments: object) -> Rates:
    """Make a GPU that is slower than the CPU, with a link as fast as ever."""
    rates = assumed_rates(machine, 1, "gpu")
    return rates.scaled(1e-6, 1e-6).replaced(gpu_upload=rates.of("gpu_upload"), gpu_link=rates.of("gpu_link"))


def test_auto_chooses_the_fastest_mode(
    place: Place, monkeypatch: pytest.MonkeyPatch, emulated_gpus: EmulatedGpus
) -> None:
    place.write_small_volume()
    emulated_gpus.measure_as(slow)
    monkeypatch.setattr(modes, "plan_side_by_side", _none_fits)
    assert go(place, "auto").plan.mode == "gpu", "so short a run is not looked at"
    thresholds = replace(modes.THRESHOLDS, long_seconds=0.0)
    monkeypatch.setattr(modes, "THRESHOLDS", thresholds)
    made = {mode: go(place, mode).plan for mode in ("gpu", *MODES)}
    taken = go(place, "auto").plan
    assert taken.mode in MODES
    assert taken.seconds <= 1.01 * min(plan.seconds for plan in made.values())
    assert taken.seconds < thresholds.offloaded_assumed * made["gpu"].seconds
    assert np.abs(place.prediction() - expected(place)).max() <= TOLERANCES["fp32"]
    tight = replace(thresholds, offloaded_assumed=0.99 * taken.seconds / made["gpu"].seconds)
    monkeypatch.setattr(modes, "THRESHOLDS", tight)
    assert go(place, "auto").plan.mode == "gpu", "it gains too little, by rates of the processor that are assumed"
    units = frozenset(assumed_rates(this_machine(), 2).units)
    measured = replace(assumed_rates(this_machine(), 2), fitted=units)
    monkeypatch.setattr(target, "stored_cpu_rates", lambda *_: measured)
    assert go(place, "auto").plan.mode in MODES, "and enough by measured ones"
    monkeypatch.setattr(modes, "THRESHOLDS", replace(tight, offloaded=tight.offloaded_assumed))
    assert go(place, "auto").plan.mode == "gpu"


def _none_fits(*asked: object, **arguments: object) -> RunPlan:
    raise NoPlanError("not now")


def test_auto_chooses_another_mode_if_the_gpu_has_too_little_memory(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write_small_volume()

    def refused(*asked: Any) -> RunPlan:
        raise NoPlanError("not so little")

    monkeypatch.setattr(modes, "plan_on_devices", refused)
    assert go(place, "auto", vram="900M").plan.mode in MODES
    with pytest.raises(NoPlanError, match="not so little"):
        go(place, "gpu", vram="900M")
    with pytest.raises(NoPlanError, match="not so little"):
        go(place, "auto", vram="900M", precision="fp16")
    with pytest.raises(NoPlanError, match="not so little"):
        go(place, "auto", vram="900M", only="gpu.conv.direct")


def test_plan_lists_both_modes(place: Place) -> None:
    place.write_small_volume()
    made = plan(place.folder / "net.yaml", volume=place.volume, device="gpu")
    assert made.mode == "gpu"
    told = {kind.scheme: kind for kind in made.alternatives}
    for mode in MODES:
        (kind,) = (kind for scheme, kind in told.items() if scheme.startswith(f"{mode} with"))
        assert kind.best.voxels_per_second <= made.voxels_per_second
        assert kind.best.patch_out == made.patch_out
        assert "times as long" in kind.reason
        assert f"{mode} with" in explain(made)


@pytest.mark.parametrize("mode", [*MODES, "side-by-side"])
def test_layers_are_timed_and_checked_on_their_own_device(place: Place, emulated_gpus: EmulatedGpus, mode: str) -> None:
    emulated_gpus.measure_as(slow)  # about as an emulator is: few other ways are tried
    told: list[str] = []
    arguments: dict[str, Any] = {"mode": mode, "precision": "fp32", "threads": 2, "volume": place.volume}
    arguments |= {"patch": (4, 8, 4)} | ({"only": "gpu.conv.host_ram"} if mode == "gpu-host" else {})
    arguments |= {"rigor": "measure", "time_limit": 1000.0, "paranoid": True}
    made = plan(place.folder / "net.yaml", tell_progress=lambda progress: told.append(progress.doing), **arguments)
    assert (made.mode, made.rigor) == (mode, "measure")
    assert all(chosen.measured for chosen in made.choices)
    checked = [doing for doing in told if doing.startswith("checking ")]
    assert {doing.split()[1] for doing in checked} == {chosen.primitive for chosen in made.choices}
    timed = {doing.split()[0] for doing in told if doing.startswith(("cpu.", "gpu."))}
    assert "gpu.conv.host_ram" in timed if mode == "gpu-host" else {name[:3] for name in timed} == {"cpu", "gpu"}


def test_wrong_layer_of_host_memory_is_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    right = HostRamLayer.at

    def at(self: HostRamLayer, position: Position) -> Any:
        return right(self, position) + 1e-3

    monkeypatch.setattr(HostRamLayer, "at", at)
    arguments: dict[str, Any] = {"mode": "gpu-host", "precision": "fp32", "only": "gpu.conv.host_ram"}
    with pytest.raises(VerifyError, match=r"^layer 0 \(conv .*\) run by gpu\.conv\.host_ram images=1 .* gives "):
        plan(place.folder / "net.yaml", volume=place.volume, paranoid=True, **arguments)
