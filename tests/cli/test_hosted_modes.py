"""Modes in which the first layers have their tensors in the memory of the host, on a GPU that is emulated here."""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np
import pytest
from emulated import EMULATED_GPU, EmulatedDevice, compiler
from place import Place

from znnpy.errors import NoPlanError, ResumeError
from znnpy.inference import infer
from znnpy.machine import Machine
from znnpy.planner.cost import Rates, assumed_rates
from znnpy.planner.plan import Plan
from znnpy.planning import plan
from znnpy.report import Report
from znnpy.run import choice, devices, pipeline
from znnpy.verify import TOLERANCES

pytestmark = pytest.mark.skipif(compiler() is None, reason="the emulator needs a C++ compiler")

MODES = ("gpu-host", "cpu-to-gpu")


def assumed(device: Any, machine: Machine, *asked: object, **words: object) -> Rates:
    return assumed_rates(machine, 1, "gpu")


@pytest.fixture(autouse=True)
def _card(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in (devices, choice):
        monkeypatch.setattr(room, "find_gpu", lambda: EMULATED_GPU)
    monkeypatch.setattr(devices, "Device", EmulatedDevice)
    monkeypatch.setattr(devices, "measured_rates", assumed)


def go(place: Place, mode: str, **words: Any) -> Report:
    given = {"out": place.out, "threads": 2, "precision": "fp32", "overwrite": True, "mode": mode, **words}
    return infer(place.volume, place.folder / "net.yaml", **given)


def expected(place: Place) -> np.ndarray[Any, Any]:
    out = place.folder / "cpu.h5"
    go(place, "cpu", out=out, precision=None)
    with h5py.File(out) as file:
        return np.array(file["prediction"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cover", ["columns", "patches"])
def test_the_output_is_the_processors(place: Place, mode: str, cover: str) -> None:
    report = go(place, mode, cover=cover, trace=place.folder / "trace.json")
    made = report.plan
    assert made.mode == mode
    assert 0 < made.hosted < len(made.choices)
    assert made.walks == (cover == "columns")
    assert made.memory.peak <= made.limits.ram_bytes
    assert np.abs(place.prediction() - expected(place)).max() <= TOLERANCES["fp32"]
    idle = [line for line in report.lines() if line.startswith("idle")]
    assert len(idle) == (mode == "cpu-to-gpu")
    assert set(report.as_json()["idle_seconds"]) == ({"CPU", "GPU"} if idle else set())
    assert "gpu" in {choice.device for choice in made.choices[made.hosted :]}
    assert Plan.from_json(made.to_json()) == made


@pytest.mark.parametrize("mode", MODES)
def test_it_goes_on_where_it_stopped(place: Place, mode: str) -> None:
    def stop(event: pipeline.Event) -> None:
        if event.columns_done >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(place, mode, patch=(4, 8, 4), cover="patches", progress=stop)
    words = {"overwrite": False, "resume": True, "threads": None, "precision": None}
    with pytest.raises(ResumeError, match=f"the run began with --mode {mode}, and now it is gpu"):
        go(place, "gpu", **words)
    report = go(place, "auto", **words)
    assert 0 < report.computed < report.voxels
    assert report.plan.mode == mode
    assert np.abs(place.prediction() - expected(place)).max() <= TOLERANCES["fp32"]


@pytest.mark.parametrize("mode", MODES)
def test_what_it_does_not_go_with(place: Place, mode: str) -> None:
    with pytest.raises(ValueError, match=f"--mode {mode} runs on one GPU: leave out --gpus"):
        go(place, mode, gpus=2)
    with pytest.raises(NoPlanError, match="choose --precision tf32 or fp32"):
        go(place, mode, precision="fp16")
    with pytest.raises(ValueError, match="are not run before there is a plan"):
        plan(place.folder / "net.yaml", mode=mode, rigor="measure")


@pytest.mark.parametrize("mode", MODES)
def test_the_plan_says_where_layers_run(place: Place, mode: str) -> None:
    told: list[str] = []
    why: list[Any] = []
    made = plan(place.folder / "net.yaml", volume=place.volume, mode=mode, tell=told.append, tell_why=why.extend)
    assert made.mode == mode
    assert not why
    assert any("not of mode" in sentence for sentence in told)
    assert "runs on" in made.explain()
