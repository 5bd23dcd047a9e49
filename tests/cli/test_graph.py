"""`znnpy graph`: the tasks of a task-parallel convolution, drawn."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from znnpy.plots.task_graph import COLOURS, MEANINGS

if TYPE_CHECKING:
    from tests.support.cli import Place

SVG = "{http://www.w3.org/2000/svg}"


def test_picture_shows_every_task_and_its_predecessors(place: Place) -> None:
    out = place.folder / "graph.svg"
    result = place.run("graph", "--maps", 3, 5, "--batch", 2, "--out", out)
    assert (result.exit_code, result.output) == (0, "")
    root = ElementTree.fromstring(out.read_text())
    circles = [circle for circle in root.iter(f"{SVG}circle") if circle.find(f"{SVG}title") is not None]
    kinds = Counter(circle.get("fill") for circle in circles)
    counts = {"sync": 4, "input": 3 * 2, "kernel": 3 * 5, "multiply": 3 * 5 * 2, "output": 5 * 2}
    assert kinds == {COLOURS[kind]: count for kind, count in counts.items()}  # type: ignore[index]
    places = {(circle.get("cx"), circle.get("cy")) for circle in circles}
    assert len(places) == len(circles), "tasks lie on each other"
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    assert all(0 < float(x or 0) < width and 0 < float(y or 0) < height for x, y in places)
    # To and from the synchronisations, from kernels to products, along chains, from their ends to the next stage
    assert len(list(root.iter(f"{SVG}line"))) == 2 * 6 + 15 + 30 + 2 * 10 + 10 + 2 * 10
    for line in root.iter(f"{SVG}line"):
        assert float(line.get("y1", 0)) < float(line.get("y2", 0)), "an edge points upwards"
    text = [element.text for element in root.iter(f"{SVG}text")]
    assert text == list(MEANINGS.values())


def test_drawn_graph_is_checked_first(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(tasks: object, whole: object) -> None:
        raise ValueError("a cycle")

    monkeypatch.setattr("znnpy.plots.task_graph.check", damaged)
    with pytest.raises(ValueError, match="a cycle"):
        place.run("graph", "--out", place.folder / "graph.svg")


def test_dot_file_is_written_for_graphviz(place: Place) -> None:
    out = place.folder / "graph.dot"
    assert place.run("graph", "--maps", 1, 2, "--batch", 1, "--out", out).exit_code == 0
    text = out.read_text()
    assert text.startswith("digraph tasks {\n")
    assert '"kernel 0 1 slab 0" -> "multiply 0 1 slab 0, images 0";' in text
    assert text.count("->") == 1 + 1 + 2 + 2 + 2 + 2 + 2


def test_arguments_without_a_picture_are_refused(place: Place) -> None:
    out = place.folder / "graph.svg"
    too_many = place.refusal("graph", "--maps", 80, 80, "--batch", 512, "--out", out)
    assert "make 3,365,124 tasks, but a plot can show 1,000; give fewer --maps" in too_many
    huge = place.refusal("graph", "--maps", 10**7, 10**7, "--batch", 10**7, "--out", out)
    assert "give fewer --maps" in huge
    assert "ends in none of .svg and .dot" in place.refusal("graph", "--out", place.folder / "graph.png")
    assert "is not a folder; give another --out" in place.refusal(
        "graph", "--out", place.folder / "nowhere" / "graph.svg"
    )
    out.write_text("mine")
    assert "exists already; give another --out, or --overwrite" in place.refusal("graph", "--out", out)
    assert place.run("graph", "--maps", 1, 1, "--out", out, "--overwrite").exit_code == 0
    assert out.read_text().startswith("<svg")


@pytest.mark.parametrize("arguments", [("--maps", 0, 5), ("--maps", 3), ("--batch", 0), ("--batch", "x"), ()])
def test_wrong_arguments_are_usage_errors(place: Place, arguments: tuple[object, ...]) -> None:
    result = place.run("graph", *arguments, *(("--out", place.folder / "graph.svg") if arguments else ()))
    assert result.exit_code == 2
    assert not (place.folder / "graph.svg").exists()
