"""`infer --dry-run` tells what the run would do, as the run then does it, and leaves no file."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from typing import Any

import numpy as np
import pytest

from tests.cli.test_several_outputs import deep
from tests.support.cli import Place
from znnpy.run.pipeline import Event

Usage = namedtuple("Usage", "total used free")


def told(place: Place, *arguments: object) -> dict[str, Any]:
    """Return what the command prints as JSON; fail if it changed a file."""
    before = place.state()
    result = place.infer("--dry-run", "--json", *arguments)
    assert result.exit_code == 0, result.stderr
    assert place.state() == before
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_it_tells_the_plan_and_size_of_the_run(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(0, 0, 12345678))
    options = ("--patch", "4,8,8", "--threads", 1, "--ram", "2G", "--output-dtype", "float16")
    found = told(place, *options)
    assert (found["output"], found["arrays"], found["output_dtype"]) == (str(place.out), [[2, 15, 16, 19]], "float16")
    assert (found["output_bytes"], found["free_bytes"]) == (2 * 2 * 15 * 16 * 19, 12345678)
    report = json.loads(place.infer("--json", *options).stdout)
    assert found["plan"]["workers"][0]["plan"]["patch_out"] == report["patch"]
    assert found["seconds"] == pytest.approx(report["predicted"]["seconds"])
    assert (found["left"], found["complete"], found["ram_bytes"]) == (1.0, False, 2**31)
    assert found["peak_bytes"] <= found["ram_bytes"]


def test_lines_follow_the_table_of_the_plan(place: Place) -> None:
    result = place.infer("--dry-run")
    assert result.exit_code == 0
    assert result.stdout.startswith("tiny: 15x16x19 output voxels in ")
    output, memory, time = result.stdout.splitlines()[-3:]
    assert output.startswith(f"output     {place.out}: 2x15x16x19 float32, 35.6 KiB; ")
    assert output.endswith(" are free on its disk")
    assert memory.startswith("memory     ")
    assert time.startswith("time       about ")
    assert time.endswith("; nothing was run")
    assert not place.out.exists()


def test_several_outputs_are_all_told(place: Place) -> None:
    deep(place)
    found = told(place)
    assert found["arrays"] == [[2, 20, 23, 25], [1, 10, 12, 13], [3, 16, 21, 23]]
    assert found["output_bytes"] == 4 * sum(int(np.prod(shape)) for shape in found["arrays"])


def test_a_run_that_would_be_refused_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no file" in place.refusal("infer", place.folder / "none.h5", "--dry-run")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(0, 0, 100))
    assert "more than the 100 B that are free" in place.refusal(*place.arguments, "--dry-run")
    monkeypatch.undo()
    assert place.infer().exit_code == 0
    assert f"the output {place.out} exists" in place.refusal(*place.arguments, "--dry-run", "--json")
    said = place.refusal("infer", "case.nii.gz", "--network", "nnunet:model", "--dry-run")
    assert "nnunet:model is a model of nnU-Net" in said
    for words in (("--part", "1/2"), ("--finish",), ("--cluster", "local:2")):
        said = place.infer("--dry-run", *words).stderr
        assert "--dry-run is of a run by this process: omit --cluster, --part and --finish" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--record", "run.txt"), "run.txt does not end in .json: give a --record that does"),
        (("--record", "there.json"), "there.json exists already; give another --record, or --overwrite to replace it"),
        (("--record", "net.json", "--overwrite"), "net.yaml itself; give another name as --record"),
        (("--trace", "there.json"), "there.json exists already; give another --trace, or --overwrite to replace it"),
        (("--trace", "there.json", "--overwrite"), "there.json is no trace, and nothing else is replaced by one"),
        (("--trace", "gone/trace.json"), "gone is not a folder; give another --trace"),
        (("--trace", "out.h5.journal"), "out.h5.journal is the output or a file that it needs; give another --trace"),
    ],
)
def test_files_that_the_run_could_not_write_are_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(place.folder)
    (place.folder / "there.json").write_text("{}")
    (place.folder / "net.json").symlink_to(place.folder / "net.yaml")
    assert said in place.refusal(*place.arguments, "--dry-run", *words)
    assert said in place.refusal(*place.arguments, *words)


def test_files_of_a_run_are_not_begun(place: Place) -> None:
    before = sorted(place.folder.iterdir())
    told(place, "--record", place.folder / "run.json", "--trace", place.folder / "trace.json")
    assert sorted(place.folder.iterdir()) == before


def test_a_resumed_run_tells_what_is_left(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    import znnpy

    def interrupt(event: Event) -> None:
        if event.columns_done >= 4:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"patch": (4, 8, 8), "cover": "patches", "threads": 1, "progress": interrupt}
    whole = told(place, "--patch", "4,8,8", "--cover", "patches", "--threads", 1)["seconds"]
    with pytest.raises(KeyboardInterrupt):
        znnpy.infer(place.volume, place.folder / "net.yaml", out=place.out, **options)
    found = told(place, "--resume")
    assert 0.3 < found["left"] < 0.9
    assert found["seconds"] == pytest.approx(found["left"] * whole)
    assert "% that are left; nothing was run" in place.infer("--dry-run", "--resume").stdout
    assert place.infer("--resume").exit_code == 0
    found = told(place, "--resume")
    assert (found["complete"], found["plan"], found["left"], found["seconds"]) == (True, None, 0.0, 0.0)
    assert place.infer("--dry-run", "--resume").stdout.splitlines()[-1] == "time       none: the output is complete"
