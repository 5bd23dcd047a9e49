"""benchmarks/several_gpus.py runs, once and tiny, on emulated devices."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.benchmark_networks import TINY
from tests.support.emulator import EMULATED_GPU, EmulatedDevice, compiler
from znnpy.kernels.gpu import device
from znnpy.planner.cost_model import assumed_rates
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
    benchmark.main([*words, "--gpus", "2", "--writers", "3", "--out", str(out)])
    (row,) = json.loads(out.read_text())["rows"]
    assert row["gpus"] == [made["memory"]["devices"] for made in row["plans"]] == [1, 2]
    assert [len(found) for found in row["seconds"]] == [1, 1]
    for (lanes,), names in zip(row["lanes"], ({"GPU 0"}, {"GPU 0", "GPU 1"}), strict=True):
        assert sum(lane["voxels"] for lane in lanes.values()) == row["output"][0] * row["output"][1] * row["output"][2]
        assert set(lanes) == names
    assert (row["precision"], row["side"]) == ("fp32", 20)
    assert row["apart"][0] == row["apart_rms"][0] == 0
    assert row["apart_rms"][1] <= row["apart"][1] <= row["allowed"] == 2e-5
    assert row["gain"][0] == row["bound"][0] == 1
    assert 0.5 < row["bound"][1] <= 2
    said = capsys.readouterr().out
    assert (
        f"of it; apart by {row['apart'][1]:.1e} of the values, rms {row['apart_rms'][1]:.1e}, 2e-05 allowed\n" in said
    )
    far = row | {"apart": [0.0, 3e-5]}
    monkeypatch.setattr(benchmark, "compared", lambda name, options: far if name == "far" else row)
    with pytest.raises(SystemExit, match="do not write what one does"):
        benchmark.main(["--networks", "far", "near", "--out", str(out)])
    assert json.loads(out.read_text())["rows"] == [far, row]
    assert capsys.readouterr().out.count(f"rms {row['apart_rms'][1]:.1e}, 2e-05 allowed: TOO FAR\n") == 1
    assert benchmark.too_far(far | {"precision": "tf32"}) == []
    assert benchmark.too_far(row | {"precision": "tf32", "apart_rms": [0.0, 3e-5]}) == [2]


def test_differences_are_shares_of_the_values(imported: Callable[[str], Any]) -> None:
    """By hand: of 1 where values are small, of the rms of the map, and of the value itself where that is larger."""
    apart = imported("several_gpus").apart
    one = np.zeros((2, 3, 4, 5), np.float32)
    one[1] = 10
    for at, value, other, expected in (
        ((0, 1, 2, 3), 0.5, 0.25, 0.25),
        ((1, 2, 3, 4), 10.0, 12.0, 0.2),
        ((1, 2, 3, 4), 1.0, 2.0, 1 / np.sqrt((59 * 100 + 1) / 60)),
        ((1, 0, 0, 0), -1000.0, -1100.0, 0.1),
    ):
        first = one.copy()
        first[at] = value
        second = first.copy()
        second[at] = other
        for threads in (1, 3):
            assert apart(first, second, threads) == pytest.approx((expected, expected / np.sqrt(120)))
    second[0, 0, 0, 0] = np.nan
    assert np.isnan(apart(first, second)).all()
    facts = {"precision": "fp32", "gpus": [1, 2], "apart": [0.0, np.nan], "apart_rms": [0.0, 0.0], "allowed": 1.0}
    assert imported("several_gpus").too_far(facts) == [2]
    assert imported("several_gpus").too_far(facts | {"apart": [0.0, 4.0]}) == [2]
    assert imported("several_gpus").too_far(facts | {"apart": [0.0, 4.0], "precision": "tf32"}) == []
    assert imported("several_gpus").too_far(facts | {"apart": [0.0, 6.0], "precision": "tf32"}) == [2]
    assert imported("several_gpus").too_far(
        facts | {"apart": [0.0, 4.0], "apart_rms": [0.0, 1.1], "precision": "tf32"}
    ) == [2]
