"""`--log FILE` keeps what happened: calls, phases, progress, warnings and errors, one after the other."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from types import SimpleNamespace

import click
import numpy as np
import pytest

import znnpy
from tests.support.cli import Place
from znnpy import progress
from znnpy.command_runtime import _logging
from znnpy.errors import OutputError
from znnpy.log_file import LogFile
from znnpy.run.pipeline import Event

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (.*)")
PHASES = ["opened", "planned", "preparing", "running", "finished"]


def said(log: Path) -> list[str]:
    """Return the lines of a log without their times."""
    found = [LINE.fullmatch(line) for line in log.read_text().splitlines()]
    return [line[1] for line in found if line is not None]


def test_a_run_is_logged_from_call_to_end(place: Place) -> None:
    log = place.folder / "run.log"
    result = place.infer("--log", log, "--patch", "4,8,8")
    assert result.exit_code == 0
    first, *lines = said(log)
    assert first.startswith(f"znnpy {znnpy.__version__}: infer {place.volume} --network ")
    assert first.endswith(f"--log {log} --patch 4,8,8")
    assert [line.split()[0] for line in lines if line.split()[0] in PHASES] == PHASES
    (done,) = (line for line in lines if line.startswith("100%  "))
    assert "voxels/s, 35.6 KiB written (" in done
    assert "opened" not in result.stderr
    assert not logging.getLogger("znnpy").handlers


def test_errors_and_warnings_are_logged_behind_the_lines_that_are_there(place: Place) -> None:
    log = place.folder / "run.log"
    place.write_volume(np.random.default_rng(7).random((20, 23, 25), np.float32))  # the network expects a mean of 120
    assert place.infer("--log", log).exit_code == 0
    before = said(log)
    assert any(line.startswith("warning: ") and "120" in line for line in before)
    assert place.infer("--log", log, "--quiet").exit_code == 1
    lines = said(log)
    assert lines[: len(before)] == before
    assert lines[len(before)].endswith("--quiet")
    assert lines[-1].startswith(f"Error: the output {place.out} exists")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("an odd\nthing"), "Error: ValueError: an odd\\nthing"),
        (RuntimeError("odd"), "Error: RuntimeError: odd"),
        (AssertionError(), "Error: AssertionError"),
    ],
)
def test_errors_that_nobody_expected_are_logged(
    place: Place, monkeypatch: pytest.MonkeyPatch, error: Exception, line: str
) -> None:
    log = place.folder / "run.log"

    def fail(asked: object) -> None:
        raise error

    monkeypatch.setattr("znnpy.inference.infer_as_asked", fail)
    with pytest.raises(type(error)):
        place.infer("--log", log)
    assert said(log)[1:] == [line]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--overwrite", "--resume"), "--overwrite starts again and --resume continues: give one of them"),
        (("--quiet", "--verbose"), "--quiet prints less and --verbose more: give one of them"),
    ],
)
def test_options_that_a_command_refuses_are_logged(place: Place, words: tuple[str, ...], sentence: str) -> None:
    log = place.folder / "run.log"
    assert place.infer("--log", log, *words).exit_code == 2
    assert said(log)[1:] == [f"Error: {sentence}"]


def test_the_end_of_a_command_is_no_error(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    log = place.folder / "run.log"

    def end(asked: object) -> None:
        click.get_current_context().exit(3)

    monkeypatch.setattr("znnpy.inference.infer_as_asked", end)
    assert place.infer("--log", log).exit_code == 3
    assert len(said(log)) == 1


def event(done: int) -> Event:
    return Event(done, 9, done, 9, 1.0, {}, done, done, 9, done / 9)


@pytest.mark.parametrize("quiet", [False, True])
def test_progress_comes_once_a_minute_without_a_terminal(
    quiet: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    log = LogFile(tmp_path / "run.log", "znnpy called")
    with _logging(False, log), progress.show(quiet) as tell:
        for seconds, done in ((0, 0), (59, 1), (61, 2), (100, 3), (120, 4), (121, 5), (122, 9)):
            now[0] = float(seconds)
            tell(event(done))
    log.close()
    shown = [line.split()[1] for line in capsys.readouterr().err.splitlines()]
    assert shown == ([] if quiet else ["2/9", "5/9", "9/9"])
    assert [line.split()[1] for line in said(tmp_path / "run.log")[1:]] == ["2/9", "5/9", "9/9"]


@pytest.mark.parametrize(
    "content", [b"\x89HDF\r\n\x1a\n" + bytes(100), b"a text\n", b"x", b"2026-01-01 00:00:00 other "]
)
def test_a_file_that_is_no_log_is_kept(place: Place, content: bytes) -> None:
    path = place.folder / "other"
    path.write_bytes(content)
    assert f"{path} exists and is no log of znnpy; give another --log" in place.refusal(*place.arguments, "--log", path)


def test_places_that_cannot_be_written_are_refused(place: Place) -> None:
    (place.folder / "link").symlink_to(place.volume)
    for path, why in (
        (place.folder / "none" / "run.log", "No such file or directory"),
        (place.folder, "Is a directory"),
        (place.folder / "link", "it is a symbolic link"),
        (Path(os.devnull), "not a regular file"),
    ):
        result = place.infer("--log", path)
        assert result.exit_code == 1
        assert f"cannot write the log {path}: " in result.stderr
        assert why in result.stderr
        assert not place.out.exists()


def test_a_full_disk_ends_the_log_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LogFile(tmp_path / "run.log", "znnpy called")

    class Full:
        def write(self, line: bytes) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise OSError(28, "No space left on device")

    log._file.close()
    monkeypatch.setattr(log, "_file", Full())
    log.say("more")
    log.close()
    assert said(tmp_path / "run.log") == ["znnpy called"]
    with pytest.raises(OutputError, match="Is a directory"):
        LogFile(tmp_path, "znnpy")


def test_names_are_escaped_in_lines(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "run.log", "znnpy called")
    log.say("a\x1b[31mred\nline \udcff")
    log.close()
    assert said(tmp_path / "run.log")[1] == "a\\x1b[31mred\\nline \\udcff"
