"""The plan of a graph is printed node by node, from its network or from the plan alone."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.graph_runs import CPU, searched
from tests.support.graph_runs import planned as graph_plan
from tests.support.small_unet import SIZE, network, written
from znnpy.errors import PlanFileError
from znnpy.kernels.contract import device_of
from znnpy.kernels.cpu.native import library
from znnpy.kernels.table import TABLE
from znnpy.machine import AMX, this_machine
from znnpy.network import Network
from znnpy.network_files import read_network
from znnpy.option_values import Cover
from znnpy.patches import Box
from znnpy.planner.request import Target
from znnpy.planner.run_plan import RunPlan
from znnpy.planner.validate import check_runs
from znnpy.planning import plan
from znnpy.report.plan_text import explain, plan_renderable
from znnpy.report.rejected import Considered, considered, why_table
from znnpy.shapes import text, turned_back
from znnpy.units import human_bytes, human_seconds

WITH_UNIT = replace(this_machine(), bf16=(AMX,))
UNITS = ("cpu.graph_conv.amx", "cpu.graph_conv.avx512_bf16")


@pytest.fixture(scope="module")
def unet(tmp_path_factory: pytest.TempPathFactory) -> Network:
    return network(tmp_path_factory.mktemp("net"))


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> RunPlan:
    return planned(tmp_path_factory.mktemp("columns"), "columns")


def planned(folder: Path, cover: Cover) -> RunPlan:
    file = written(folder)
    return plan(file, shape=SIZE, cover=cover, patch=(4, 20, 26), ram="4G", calibrate=False, device="cpu")


def printed(made: RunPlan, network: Network | None, width: int = 120) -> str:
    stream = io.StringIO()
    Console(width=width, file=stream).print(plan_renderable(made, network, None))
    return stream.getvalue()


def test_columns_of_a_graph_are_described(columns: RunPlan, unet: Network) -> None:
    said = " ".join(printed(columns, unet).split())
    assert said.startswith(
        "small, computed whole of a volume of 23x20x25, padded at its far faces to 23x20x26 (reflect): 23x20x25 output "
        "voxels in 1 column along z in steps of 4 planes, each at most 4x20x26 in and 4x20x26 out (period 1x2x2); a "
        "column has "
    )
    assert f"keeps planes for later steps, {human_bytes(columns.memory.last.carries)} in all" in said
    assert f"planes kept from step to step {human_bytes(columns.memory.last.carries)}" in said
    assert "predicted: " in said
    assert "work 1.00 times what the output needs" in said


def test_every_operation_has_a_row(columns: RunPlan, unet: Network) -> None:
    lines = printed(columns, unet, 160).splitlines()
    graph, main = columns.main.graph, columns.main
    assert graph is not None
    assert [node.name for node in graph.nodes] == ["input", "enter + batch_norm + relu", "down", "deep", "up", "leave"]
    assert [node.level for node in graph.nodes] == ["1", "1", "1x2x2", "1x2x2", "1", "1"]
    assert sum(node.nbytes for node in graph.nodes) == main.memory.last.carries
    assert graph.nodes[1].planes > graph.nodes[2].planes > 0  # the skip waits for the deeper level
    total = sum(choice.total_seconds for choice in main.choices)
    for node, choice in zip(graph.nodes[1:], main.by_node, strict=True):
        (row,) = [line for line in lines if line.startswith(f"{node.name} ")]
        if choice is None:
            assert " in one with the node above " in row
            continue
        z, y, x, maps = choice.shape.out_shape[1:]
        size = text((*turned_back((z, y, x), main.axis), maps))
        for word in (node.level, size, choice.primitive, human_seconds(choice.seconds)):
            assert f" {word} " in row
        assert f"{choice.total_seconds / total:.0%}" in row
        if node.planes:
            assert row.rstrip().endswith(human_bytes(node.nbytes))
        assert f" {node.layer}" in lines[lines.index(row) + 1]
    assert any(line.startswith(" of enter, up ") for line in lines)


def test_a_convolution_names_what_it_adds(tmp_path: Path) -> None:
    layers = [
        {"name": "enter", "type": "conv", "kernel": 3, "out": 4, "padding": "same", "activation": "elu"},
        {"name": "mid", "type": "conv", "kernel": 3, "out": 4, "padding": "same"},
        {"name": "norm", "type": "batch_norm"},
        {"name": "both", "type": "add", "from": ["norm", "enter"]},
        {"name": "bend", "type": "activation", "function": "elu"},
        {"name": "leave", "type": "conv", "kernel": 1, "out": 2, "from": ["bend"]},
    ]
    file = tmp_path / "net.yaml"
    file.write_text(json.dumps({"name": "small", "input_channels": 1, "layers": layers}))
    made = plan(file, shape=SIZE, ram="4G", calibrate=False, device="cpu")
    graph = made.main.graph
    assert graph is not None
    assert [(node.name, node.layer, node.reads) for node in graph.nodes[1:]] == [
        ("enter", "conv 3x3x3 -> 4 elu padding 1x1x1", ("input",)),
        ("mid + batch_norm + add + elu", "conv 3x3x3 -> 4 elu padding 1x1x1 + enter", ("enter",)),
        ("leave", "conv 1x1x1 -> 2 none", ("mid",)),
    ]
    check_runs(RunPlan.from_json(made.to_json()), read_network(file).network, this_machine())
    assert "conv 3x3x3 -> 4 elu padding 1x1x1 + enter" in printed(made, None, 160)


def test_a_narrow_terminal_cuts_nothing(columns: RunPlan, unet: Network) -> None:
    said = printed(columns, unet, 80)
    assert max(map(len, said.splitlines())) <= 80
    for choice in columns.choices:
        assert choice.primitive in said


def test_the_plan_alone_says_the_same(columns: RunPlan, unet: Network) -> None:
    again = RunPlan.from_json(columns.to_json())
    assert explain(again) == "\n".join(line.rstrip() for line in printed(columns, unet).splitlines()) + "\n"


def test_patches_of_a_graph_keep_nothing(tmp_path: Path, unet: Network) -> None:
    said = " ".join(printed(planned(tmp_path, "patches"), unet).split())
    assert "output voxels in 6 patches, each at most 10x20x26 in and 4x20x26 out (period 1x2x2)" in said
    assert "kept planes" not in said
    assert "for later steps" not in said


def test_a_changed_description_is_refused(columns: RunPlan, unet: Network) -> None:
    check_runs(columns, unet, this_machine())
    graph = columns.main.graph
    assert graph is not None
    other = replace(graph, nodes=(replace(graph.nodes[0], name="output"), *graph.nodes[1:]))
    with pytest.raises(PlanFileError, match="describes its nodes otherwise than they are"):
        check_runs(columns.with_main(replace(columns.main, graph=other)), unet, this_machine())


def test_every_primitive_of_a_node_is_told_of(tmp_path: Path, unet: Network) -> None:
    rows: list[Considered] = []
    file = written(tmp_path)
    made = plan(file, shape=SIZE, ram="4G", calibrate=False, device="cpu", tell_why=rows.extend)
    stream = io.StringIO()
    Console(width=160, file=stream).print(why_table(rows, unet))
    for choice in made.choices:
        mine = [row for row in rows if row.layers == choice.layers]
        assert [row.primitive for row in mine if row.taken] == [choice.primitive]
        if choice.layers[0] == choice.layers[1]:
            of_cpu = {p.name for p in TABLE if p.kind == choice.shape.kind and device_of(p.name) == "cpu"}
            assert {row.primitive for row in mine} == of_cpu
    assert "enter + batch_norm + relu" in stream.getvalue()


@pytest.mark.skipif(library.why_not_bf16(WITH_UNIT, AMX) is not None, reason="its kernels are not compiled here")
@pytest.mark.parametrize("width", [160, 80])
def test_a_pooling_is_in_one_with_its_convolution(width: int, unet: Network) -> None:
    target, whole = Target(WITH_UNIT, precision="bf16", mode="cpu"), Box((0, 0, 0), SIZE)
    table = [p for p in CPU if p.kind != "graph_conv" or p.name in ("cpu.graph_conv.amx", "cpu.graph_conv.taps")]
    search = searched(unet, SIZE, whole, table, target=target)
    made = graph_plan(unet, SIZE, whole, (4, 10, 13), table=table, target=target)
    assert [choice.layers for choice in made.choices][:2] == [(0, 1), (2, 2)]
    assert made.graph is not None
    lines = printed(RunPlan.of(unet, WITH_UNIT, made), unet, width).splitlines()
    assert sum("in one with the node above" in line for line in lines) == 1
    assert max(map(len, lines)) <= width
    rows = considered(made, unet, WITH_UNIT, search.options.rates, table)
    assert [row.primitive for row in rows if row.layers == (0, 1) and row.taken] == ["cpu.graph_conv.amx"]
    alone = [row.why for row in rows if row.layers in ((0, 0), (1, 1)) and row.seconds is not None]
    assert set(alone) == {"runs in one with the layer behind", "runs in one with the layer before"}
    stream = io.StringIO()
    Console(width=160, file=stream).print(why_table(rows, unet))
    assert "enter + batch_norm + relu, down in one" in stream.getvalue()
    apart = graph_plan(unet, SIZE, whole, (4, 10, 13), table=[p for p in CPU if p.name not in UNITS], target=target)
    rows = considered(apart, unet, WITH_UNIT, search.options.rates, CPU)
    (one,) = [row for row in rows if row.layers == (0, 1)]
    assert not one.taken
    assert one.why.endswith("times as long")
