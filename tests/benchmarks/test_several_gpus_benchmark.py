"""benchmarks/several_gpus.py runs, once and tiny, on emulated devices."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from emulated import EMULATED_GPU, EmulatedDevice, compiler
from rivals import TINY

from znnpy.kernels.gpu import device
from znnpy.planner.cost import assumed_rates
from znnpy.run import devices

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.skipif(compiler() is None, reason="the emulator needs a C++ compiler")
def test_one_and_two_in_turn(
    imported: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark, out = imported("several_gpus"), tmp_path / "result.json"
    for room in (devices, device):
        monkeypatch.setattr(room, "find_gpu", lambda: EMULATED_GPU)
    monkeypatch.setattr(devices, "find_gpus", lambda: dict.fromkeys(range(2), EMULATED_GPU))
    monkeypatch.setattr(devices, "Device", EmulatedDevice)
    monkeypatch.setattr(devices, "measured_rates", lambda of, machine, *_, **words: assumed_rates(machine, 1, "gpu"))
    network = tmp_path / "tiny.yaml"
    network.write_text(TINY)
    words = ["--networks", str(network), "--quick", "--side", "20", "--precision", "fp32", "--vram", "900M"]
    benchmark.main([*words, "--out", str(out)])
    (row,) = json.loads(out.read_text())["rows"]
    assert [made["memory"]["devices"] for made in row["plans"]] == [1, 2]
    assert [len(found) for found in row["seconds"]] == [1, 1]
    (lanes,) = row["lanes"]
    assert sum(lane["voxels"] for lane in lanes.values()) == row["output"][0] * row["output"][1] * row["output"][2]
    assert set(lanes) == {"GPU 0", "GPU 1"}
    assert row["apart"] <= row["allowed"]
    assert 0.5 < row["bound"] <= 2
    assert "of it; apart" in capsys.readouterr().out
