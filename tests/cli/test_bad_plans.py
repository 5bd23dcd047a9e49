"""Bad limits and plans: exit 1, one sentence with the numbers and what to do, and no file is replaced unasked."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.support.cli import Place


def test_too_little_ram_is_refused(place: Place) -> None:
    place.write_small_volume()
    sentence = place.refusal(*place.arguments, "--ram", "1M")
    assert "bytes" in sentence or "MiB" in sentence
    assert "--ram" in sentence


def test_plan_of_another_network_is_refused(place: Place) -> None:
    other = place.folder / "plan.json"
    assert place.run("plan", "--shape", "40,40,40", "--out", other).exit_code == 0
    assert "fib25_boundary" in place.refusal(*place.arguments, "--plan", other)


def test_damaged_or_missing_plan_is_refused(place: Place) -> None:
    plan = place.folder / "plan.json"
    assert place.run("plan", place.folder / "net.yaml", "--volume", place.volume, "--out", plan).exit_code == 0
    content = plan.read_text()
    plan.write_text(re.sub(r'"version": \d+', '"version": 99', content, count=1))
    assert "99" in place.refusal(*place.arguments, "--plan", plan)
    plan.write_text(content[:200])
    assert "plan.json: the plan is damaged" in place.refusal(*place.arguments, "--plan", plan)
    assert "gone.json" in place.refusal(*place.arguments, "--plan", place.folder / "gone.json")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("axis", 3, "axis: "),
        ("axis", "z", "axis: "),
        ("column_planes", -4, "column_planes: "),
        ("column_planes", 5, "columns of 5 planes"),
        ("column_planes", 0, "`znnpy plan NETWORK --out plan.json`"),
        ("axis", 1, "`znnpy plan NETWORK --out plan.json`"),
        ("patch_in", [8, 8, 8], "4x13x10"),
    ],
)
def test_edited_plan_of_columns_is_refused(place: Place, field: str, value: object, said: str) -> None:
    path = place.folder / "plan.json"
    arguments = ("plan", place.folder / "net.yaml", "--shape", "60,20,20", "--cover", "columns", "--patch", "4,6,4")
    assert place.run(*arguments, "--out", path).exit_code == 0
    run = json.loads(path.read_text())
    plan = run["workers"][0]["plan"]
    assert (plan["axis"], plan["column_planes"]) == (0, 56)
    plan[field] = value
    path.write_text(json.dumps(run))
    assert said in place.refusal(*place.arguments, "--plan", path)


def test_columns_without_carried_planes_are_refused(place: Place) -> None:
    place.write_network(layers=[{"type": "conv", "kernel": 1, "out": 2}], weights=None)
    sentence = place.refusal("plan", place.folder / "net.yaml", "--shape", "20,20,20", "--cover", "columns")
    assert "--cover" in sentence


def test_patch_unfit_as_step_of_a_column_is_refused(place: Place) -> None:
    sentence = place.refusal(*place.arguments, "--cover", "columns", "--patch", "4,5,5")
    assert "2x2x1" in sentence
    assert "4x5x5" in sentence


def test_plan_beyond_the_machines_memory_is_refused(place: Place) -> None:
    plan = place.folder / "plan.json"
    huge = ("--shape", "9000,9000,9000", "--patch", "8000,8000,8000", "--ram", "900T", "--out", plan)
    assert place.run("plan", place.folder / "net.yaml", *huge).exit_code == 0
    sentence = place.refusal(*place.arguments, "--plan", plan)
    assert "bytes of RAM" in sentence


def test_plan_file_is_replaced_only_with_overwrite(place: Place) -> None:
    plan = Path(place.folder / "plan.json")
    plan.write_text("precious")
    arguments = ("plan", place.folder / "net.yaml", "--shape", "30,30,30", "--out", plan)
    assert "plan.json exists" in place.refusal(*arguments)
    assert place.run(*arguments, "--overwrite").exit_code == 0
    assert place.infer("--plan", plan).exit_code == 0


def plan_words(place: Place, out: Path) -> tuple[object, ...]:
    return ("plan", place.folder / "net.yaml", "--shape", "30,30,30", "--out", out, "--overwrite")


def test_plan_replaces_no_folder(place: Place) -> None:
    folder, pipe = place.folder / "folder", place.folder / "pipe"
    folder.mkdir()
    os.mkfifo(pipe)
    for other in (folder, Path("/dev/null"), pipe):
        assert str(other) in place.refusal(*plan_words(place, other))
    assert pipe.is_fifo()
    assert "9" * 300 in place.refusal(*plan_words(place, place.folder / ("9" * 300)))


def test_plan_is_written_through_links(place: Place) -> None:
    target, link, loop = (place.folder / name for name in ("target.json", "link.json", "loop.json"))
    link.symlink_to("target.json")
    loop.symlink_to("loop.json")
    assert place.run(*plan_words(place, link)).exit_code == 0  # a link to nothing
    assert link.is_symlink()
    target.write_text("old")
    assert "link.json exists" in place.refusal(*plan_words(place, link)[:-1])
    assert place.run(*plan_words(place, link)).exit_code == 0
    assert link.is_symlink()
    assert target.read_text().startswith("{")
    assert "loop.json" in place.refusal(*plan_words(place, loop))
    assert loop.is_symlink()


def test_draft_of_a_plan_follows_no_link(place: Place) -> None:
    precious = place.folder / "precious"
    precious.write_text("precious")
    (place.folder / "plan.json.partial").symlink_to("precious")
    assert place.run(*plan_words(place, place.folder / "plan.json")).exit_code == 0
    assert precious.read_text() == "precious"
