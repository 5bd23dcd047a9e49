"""`znnpy infer --record`, `znnpy report` and `znnpy plan --report` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cli import Place
from tests.support.messages import assert_holds
from tests.support.pages import Page, outside

pytestmark = pytest.mark.slow

WORDS = ("--patch", "4,4,4", "--threads", 1, "--device", "cpu", "--no-calibrate")


@pytest.fixture
def record(place: Place) -> Path:
    path = place.folder / "run.json"
    assert place.infer(*WORDS, "--record", path).exit_code == 0
    return path


def test_a_run_becomes_a_page(place: Place, record: Path) -> None:
    page = place.folder / "report.html"
    done = place.run("report", record, "--out", page)
    assert (done.exit_code, done.stdout) == (0, f"page       {page}\n")
    html = page.read_text()
    assert outside(html) == []
    assert "plan-and-run" in Page.of(html).ids
    commands = [line for line in Page.of(html).text.splitlines() if line.startswith("znnpy ")]
    expected = f"znnpy infer {place.volume} --network {place.folder}/net.yaml --out {place.out}"
    assert commands[0].startswith(expected)
    document = json.loads(place.run("report", record, "--out", page, "--overwrite", "--json").stdout)
    assert document == {"page": str(page), "bytes": page.stat().st_size}


def test_what_only_prints_is_not_of_the_job(place: Place) -> None:
    path, page = place.folder / "run.json", place.folder / "report.html"
    words = (*WORDS, "--only", "cpu.conv.direct", "--only", "cpu.pool.fragments")
    assert place.infer(*words, "--record", path, "--json").exit_code == 0
    place.run("report", path, "--out", page)
    infer = next(line for line in Page.of(page.read_text()).text.splitlines() if line.startswith("znnpy infer "))
    assert infer.endswith("--device cpu --patch 4,4,4 --only cpu.conv.direct --only cpu.pool.fragments")


def test_the_printed_commands_give_the_same_output(place: Place, record: Path) -> None:
    page = place.folder / "report.html"
    place.run("report", record, "--out", page)
    infer, verify = (line for line in Page.of(page.read_text()).text.splitlines() if line.startswith("znnpy "))
    expected = place.prediction()
    place.out.unlink()
    assert place.run(*infer.split()[1:]).exit_code == 0
    assert (place.prediction() == expected).all()
    assert place.run(*verify.split()[1:]).exit_code == 0


def test_a_prediction_becomes_a_page(place: Place, record: Path) -> None:
    page = place.folder / "report.html"
    assert place.run("report", place.out, place.volume, "--out", page).exit_code == 0
    assert "there is no record of this run" in page.read_text()


def test_a_plan_becomes_a_page(place: Place) -> None:
    page = place.folder / "plan.html"
    words = ("plan", place.folder / "net.yaml", "--volume", place.volume, *WORDS, "--report", page)
    done = place.run(*words)
    assert done.exit_code == 0
    assert "tiny: 15x16x19 output voxels" in done.stdout
    html = page.read_text()
    assert outside(html) == []
    assert "15x16x19 output voxels" in Page.of(html).text
    assert "exists already; give another --report, or --overwrite" in place.refusal(*words)
    assert place.run(*words, "--overwrite").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("report", "run.json", "--out", "a.txt"), "a.txt does not end in .html: give a --out that does"),
        (("report", "run.json", "--out", "gone/a.html"), "is not a folder; give another --out"),
        (("report", "gone.json", "--out", "a.html"), "no record of a run gone.json; write one with"),
        (("report", "net.npz", "--out", "a.html"), "net.npz is neither a record nor a prediction of znnpy"),
        (("report", "volume.h5", "--out", "a.html"), "volume.h5 is neither a record nor a prediction of znnpy"),
        (("plan", "net.yaml", "--report", "a.pdf"), "a.pdf does not end in .html: give a --report that does"),
        (("infer", "volume.h5", "--record", "run.txt"), "run.txt does not end in .json: give a --record that does"),
        (("infer", "volume.h5", "--record", "run.json"), "run.json exists already; give another --record, or"),
    ],
)
def test_files_that_cannot_be_used_are_refused(
    place: Place, record: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], sentence: str
) -> None:
    monkeypatch.chdir(place.folder)
    assert_holds(place.refusal(*arguments), sentence)


def test_a_page_never_replaces_what_it_is_made_of(place: Place, record: Path) -> None:
    link = place.folder / "run.html"
    link.symlink_to(record)
    assert "is the run " in place.refusal("report", record, "--out", link, "--overwrite")
    below = place.folder / "volume.html"
    below.symlink_to(place.volume)
    assert "is the volume " in place.refusal("report", record, place.volume, "--out", below, "--overwrite")


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_missing_packages_are_named_before_anything_is_done(
    place: Place, record: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setattr("znnpy.pages.page.find_spec", lambda name: None if name == package else object())
    page = place.folder / "a.html"
    for words in (("report", record, "--out", page), ("plan", "--report", page)):
        assert f"pages need the package {package}, which is not installed" in place.refusal(*words)


def test_record_with_other_processes_is_refused(place: Place) -> None:
    done = place.infer("--record", place.folder / "run.json", "--part", "1/2")
    assert done.exit_code == 2
    assert "record is of a run by one process, and part is of several" in done.stderr


def test_refused_run_leaves_no_record(place: Place) -> None:
    sentence = place.refusal(*place.arguments, "--record", place.folder / "run.json", "--roi", "0:3,0:3,0:3")
    assert sentence
    assert not (place.folder / "run.json").exists()
