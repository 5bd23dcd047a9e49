"""`logging`, `--quiet` and `--verbose`: a line for each phase of the work, or errors only."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

import znnpy
from tests.support.cli import Place
from znnpy import run_log

pytestmark = pytest.mark.slow

PHASES = ["opened", "planned", "preparing", "running", "finished"]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]


def test_run_logs_one_line_for_each_phase(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "znnpy"):
        znnpy.infer(place.volume, place.folder / "net.yaml", threads=1, patch=(8, 8, 8), cover="patches")
    said = [line for line in lines(caplog) if line.split()[0] in PHASES]
    assert [line.split()[0] for line in said] == PHASES
    assert said[0] == f"opened {place.volume}: raw: 20x23x25 voxels of uint8, network tiny"
    assert said[1].startswith("planned 12 patches of tiny: ")
    assert said[4].startswith(f"finished {place.folder / 'volume_tiny.h5'}: 4,560 voxels in ")
    assert {record.name for record in caplog.records} == {"znnpy"}


def test_unchanged_settings_are_logged_once(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "_LOGGED", set())
    net = znnpy.load_network(place.folder / "net.yaml")
    array = np.random.default_rng(3).integers(0, 256, (9, 12, 11), np.uint8)
    with caplog.at_level(logging.INFO, "znnpy"):
        for _ in range(3):
            net(array, ram="1G", threads=1)
            znnpy.plan(place.folder / "net.yaml", shape=(20, 20, 20), threads=1)
    assert len([line for line in lines(caplog) if "no GPU" in line]) == 1
    assert len([line for line in lines(caplog) if line.startswith("planned ")]) == 6


def test_verbose_run_logs_on_stderr(place: Place) -> None:
    result = place.infer("--verbose")
    assert result.exit_code == 0
    told = [line.split() for line in result.stderr.splitlines()]
    assert [fields[1] for fields in told if len(fields) > 1 and fields[1] in PHASES] == PHASES
    assert all(fields[0].count(":") == 2 for fields in told if len(fields) > 1 and fields[1] in PHASES)
    assert "speed      " in result.stdout
    assert not logging.getLogger("znnpy").handlers


def test_warning_is_printed_at_once_unless_quiet(place: Place) -> None:
    """Grey values of 0..1, where the network expects a mean of 120."""
    place.write_volume(np.random.default_rng(7).random((20, 23, 25), np.float32))
    said = place.infer().stderr.splitlines()
    assert said[0].startswith("warning: ")
    assert "120" in said[0]
    assert place.infer("--quiet", "--overwrite").output == ""


def test_quiet_run_prints_errors_only(place: Place) -> None:
    result = place.infer("--quiet")
    assert (result.exit_code, result.output) == (0, "")
    assert place.refusal(*place.arguments, "--quiet").startswith(f"the output {place.out} exists")
    result = place.infer("--quiet", "--json", "--overwrite")
    assert json.loads(result.stdout)["output"] == str(place.out)
    assert result.stderr == ""
    checking = place.run("verify", place.out, place.volume, "--network", place.folder / "net.yaml", "--verbose")
    assert [line.split()[1] for line in checking.stderr.splitlines()] == ["opened", "running", "finished"]
    checked = place.run("verify", place.out, place.volume, "--network", place.folder / "net.yaml", "--quiet")
    assert checked.output == ""
    planned = place.run("plan", place.folder / "net.yaml", "--shape", "30,30,30", "--quiet", "--why")
    assert (planned.exit_code, planned.output) == (0, "")


@pytest.mark.parametrize(
    "arguments", [("infer", "v.h5"), ("plan",), ("measure",), ("verify", "o.h5", "v.h5"), ("demo",)], ids=lambda w: w[0]
)
def test_quiet_and_verbose_contradict_each_other(place: Place, arguments: tuple[str, ...]) -> None:
    result = place.run(*arguments, "--quiet", "--verbose")
    assert result.exit_code == 2
    assert "--quiet prints less and --verbose more: give one of them" in result.stderr
