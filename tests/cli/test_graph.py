"""`znnpy graph`: the layers of a network, listed and drawn, and the tasks of a task-parallel convolution."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest
from matplotlib.text import Annotation

from znnpy.network_files import read_network
from znnpy.plots.network_graph import network_figure
from znnpy.plots.task_graph import COLOURS, MEANINGS
from znnpy.report.network_table import rows_of

if TYPE_CHECKING:
    from tests.support.cli import Place

NETWORK = """
name: unet
input_channels: 1
weights: net.npz
layers:
- {name: enc, type: conv, kernel: 3, out: 4, padding: 1}
- {name: enc_norm, type: batch_norm, activation: relu}
- {type: pool, window: [1, 2, 2]}
- {name: mid, type: conv, kernel: 3, out: 8, padding: 1}
- {name: up, type: conv_transpose, kernel: [1, 2, 2], stride: [1, 2, 2], out: 4}
- {name: skip, type: concat, from: [enc_norm, up]}
- {name: head, type: conv, kernel: 1, out: 1, activation: sigmoid}
"""
SVG = "{http://www.w3.org/2000/svg}"


def test_picture_shows_every_task_and_its_predecessors(place: Place) -> None:
    out = place.folder / "graph.svg"
    result = place.run("graph", "--tasks", "--maps", 3, 5, "--batch", 2, "--out", out)
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
        place.run("graph", "--tasks", "--out", place.folder / "graph.svg")


def test_dot_file_is_written_for_graphviz(place: Place) -> None:
    out = place.folder / "graph.dot"
    assert place.run("graph", "--tasks", "--maps", 1, 2, "--batch", 1, "--out", out).exit_code == 0
    text = out.read_text()
    assert text.startswith("digraph tasks {\n")
    assert '"kernel 0 1 slab 0" -> "multiply 0 1 slab 0, images 0";' in text
    assert text.count("->") == 1 + 1 + 2 + 2 + 2 + 2 + 2


def test_arguments_without_a_picture_are_refused(place: Place) -> None:
    out = place.folder / "graph.svg"
    too_many = place.refusal("graph", "--tasks", "--maps", 80, 80, "--batch", 512, "--out", out)
    assert "make 3,365,124 tasks, but a plot can show 1,000; give fewer --maps" in too_many
    huge = place.refusal("graph", "--tasks", "--maps", 10**7, 10**7, "--batch", 10**7, "--out", out)
    assert "give fewer --maps" in huge
    assert "ends in none of .svg and .dot" in place.refusal("graph", "--tasks", "--out", place.folder / "graph.png")
    assert "is not a folder; give another --out" in place.refusal(
        "graph", "--tasks", "--out", place.folder / "nowhere" / "graph.svg"
    )
    out.write_text("mine")
    assert "exists already; give another --out, or --overwrite" in place.refusal("graph", "--tasks", "--out", out)
    assert place.run("graph", "--tasks", "--maps", 1, 1, "--out", out, "--overwrite").exit_code == 0
    assert out.read_text().startswith("<svg")


@pytest.mark.parametrize("arguments", [("--maps", 0, 5), ("--maps", 3), ("--batch", 0), ("--batch", "x"), ()])
def test_wrong_arguments_are_usage_errors(place: Place, arguments: tuple[object, ...]) -> None:
    result = place.run("graph", "--tasks", *arguments, *(("--out", place.folder / "graph.svg") if arguments else ()))
    assert result.exit_code == 2
    assert not (place.folder / "graph.svg").exists()


@pytest.fixture
def unet(place: Place) -> Path:
    path = place.folder / "unet.yaml"
    path.write_text(NETWORK)
    return path


def test_nodes_are_listed_with_maps_lattices_and_reach(place: Place, unet: Path) -> None:
    result = place.run("graph", unet)
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["input", "1", "1x1x1", "0", "1x1x1"] in rows
    assert ["pool2", "pool", "1x2x2", "enc_norm", "4", "1x2x2", "0", "3x4x4"] in rows
    assert [
        "mid",
        *["conv", "3x3x3", "->", "8", "none", "padding", "1x1x1"],
        "pool2",
        "8",
        "1x2x2",
        "872",
        "5x8x8",
    ] in rows
    assert ["skip", "concat", "enc_norm,", "up", "8", "1x1x1", "0", "5x8x8"] in rows
    assert ["network", "unet:", "7", "nodes,", "1,133", "parameters"] in rows
    for line in (
        "output      head",
        "period      1x2x2 voxels",
        "meaning     whole: the output is what the network gives on the whole volume",
        "padding     reflect, beyond the far faces, for a volume whose size does not suit",
    ):
        assert line in result.stdout.splitlines()


def test_sizes_for_a_volume_are_listed(place: Place, unet: Path) -> None:
    rows = [line.split() for line in place.run("graph", unet, "--size", "5,7,8").stdout.splitlines()]
    assert ["input", "1", "1x1x1", "5x8x8", "0", "1x1x1"] in rows
    assert ["pool2", "pool", "1x2x2", "enc_norm", "4", "1x2x2", "5x4x4", "0", "3x4x4"] in rows
    assert "smaller than one period of unet, 1x2x2 voxels, along y" in place.refusal("graph", unet, "--size", "5,1,8")
    chain = place.run("graph", "fib25_boundary", "--size", "30,30,31").stdout
    assert ["period", "4x4x4", "voxels"] in map(str.split, chain.splitlines())
    assert "meaning     sliding: each output voxel is what the network gives on the field of view around it" in chain
    assert [line.split()[-3:] for line in chain.splitlines() if "conv6  " in line] == [["4x4x5", "25", "27x27x27"]]
    assert "smaller than the field of view along z" in place.refusal("graph", "fib25_boundary", "--size", "9,30,31")


def test_network_is_printed_as_json(place: Place, unet: Path) -> None:
    document = json.loads(place.run("graph", unet, "--json").stdout)
    assert (document["name"], document["meaning"], document["period"]) == ("unet", "whole", [1, 2, 2])
    assert (document["output"], document["pad_to_period"]) == (["head"], "reflect")
    assert [node["name"] for node in document["nodes"]][:3] == ["input", "enc", "enc_norm"]
    assert document["nodes"][6] == {
        "name": "skip",
        "layer": "concat",
        "reads": ["enc_norm", "up"],
        "maps": 8,
        "lattice": ["1", "1", "1"],
        "parameters": 0,
        "reach": [5, 8, 8],
        "size": None,
    }


@pytest.mark.slow
@pytest.mark.parametrize(("name", "begins"), [("n.svg", b"<?xml"), ("n.png", b"\x89PNG"), ("n.PDF", b"%PDF")])
def test_network_is_drawn(name: str, begins: bytes, place: Place, unet: Path) -> None:
    out = place.folder / name
    result = place.run("graph", unet, "--out", out, "--size", "4,6,8")
    assert (result.exit_code, result.output) == (0, "")
    drawn = out.read_bytes()
    assert drawn.startswith(begins)
    assert "exists already" in place.refusal("graph", unet, "--out", out)
    assert place.run("graph", unet, "--out", out, "--overwrite", "--size", "4,6,8").exit_code == 0
    assert out.read_bytes() == drawn, "a figure is the same each time"


@pytest.mark.slow
def test_figure_has_a_box_for_each_node_and_an_arrow_for_each_edge(unet: Path) -> None:
    network = read_network(unet).network
    (axes,) = network_figure(network, rows_of(network)).axes
    boxes = [text for text in axes.texts if text.get_text()]
    assert [box.get_text().splitlines()[0] for box in boxes] == ["input", *network.names]
    assert len(axes.texts) - len(boxes) == sum(map(len, network.sources)) == 8
    places = [box.xy for box in boxes if isinstance(box, Annotation)]
    assert [x for x, _ in places] == list(range(8))
    levels = dict(zip(("input", *network.names), (y for _, y in places), strict=True))
    assert levels["pool2"] == levels["mid"] < levels["enc"] == levels["up"] == levels["head"]


def test_network_options_that_do_not_fit_are_usage_errors(place: Place, unet: Path) -> None:
    svg = place.folder / "n.svg"
    for arguments, message in [
        ((), "no network is given: give NETWORK, or --tasks"),
        ((unet, "--tasks", "--out", svg), "--tasks draws no network: omit NETWORK"),
        (("--tasks",), "--tasks draws to a file: give --out"),
        ((unet, "--maps", 1, 2), "--maps and --batch belong to --tasks"),
        ((unet, "--json", "--out", svg), "--json prints and --out draws: give one of them"),
        ((unet, "--overwrite"), "--overwrite replaces the file given as --out: give --out too"),
        ((unet, "--size", "4,4"), "is not three positive counts of voxels Z,Y,X"),
    ]:
        result = place.run("graph", *arguments)
        assert result.exit_code == 2
        assert message in result.stderr
    assert not svg.exists()
    assert "ends in none of .svg, .png, .pdf: give --out a name that does" in place.refusal(
        "graph", unet, "--out", place.folder / "n.dot"
    )


def test_mistakes_in_a_graph_are_one_sentence(place: Place, unet: Path) -> None:
    unet.write_text(NETWORK.replace("from: [enc_norm, up]", "from: [enc_nrm, up]"))
    assert place.refusal("graph", unet) == (
        f"{unet}: node skip (concat) reads enc_nrm, which is not a node; did you mean enc_norm or enc?"
    )
