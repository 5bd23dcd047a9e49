"""Plans as files and what they foretell: what is written is read, what is damaged is refused in one sentence."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.brute_force import AROUND, planned, steps_of
from tests.support.fake_plans import CHOICES_AT, MIXED, TENSORS_AT, edited
from tests.support.fake_primitives import FAKES, MACHINE
from znnpy.errors import PlanFileError
from znnpy.json_file import MOST_BYTES
from znnpy.kernels.contract import Variant
from znnpy.machine import Limits
from znnpy.network import Conv, Network, Pool
from znnpy.planner.layout import Tensor
from znnpy.planner.memory import StageMemory, reading_bytes, writing_bytes
from znnpy.planner.plan import Choice, Memory, Plan, Stage
from znnpy.planner.run_plan import FORMAT, Alternative, PlannedWorker, RunnerUp, RunPlan
from znnpy.planner.validate import check_plan, check_runs
from znnpy.shapes import ConvShape, FilterShape, MaxoutShape, PoolShape, Vec3, add, multiply, subtract

COUNT = st.integers(1, 9)
LETTERS = 'abz09 .[]/"\\éλ中'
TEXT = st.text(LETTERS)
BYTES = st.integers(0, 2**45)
SIZE = st.tuples(COUNT, COUNT, COUNT)
LARGE = st.tuples(*[st.integers(9, 99)] * 3)
SHAPES = st.one_of(
    st.builds(ConvShape, COUNT, COUNT, COUNT, LARGE, SIZE, st.sampled_from(["none", "relu", "softmax"])),
    st.builds(lambda s, f, m, p: PoolShape(s, f, tuple(a * b + b - 1 for a, b in zip(m, p, strict=True)), p),
              COUNT, COUNT, SIZE, SIZE),
    st.builds(lambda s, f, k, m, p: ConvShape(s, f, f, add(multiply(add(m, (1, 1, 1)), p), subtract(k, (2, 2, 2))), k,
              "relu", p), COUNT, COUNT, SIZE, SIZE, SIZE),
    st.builds(FilterShape, COUNT, COUNT, LARGE, SIZE),
    st.builds(lambda s, g, of, n: MaxoutShape(s, g * of, n, of), COUNT, COUNT, COUNT, SIZE),
)  # fmt: skip
VARIANTS = st.dictionaries(
    st.text(LETTERS, min_size=1, max_size=5),
    st.one_of(COUNT, SIZE),
    max_size=3,
).map(lambda parameters: Variant(tuple(sorted(parameters.items()))))
SECONDS = st.floats(1e-9, 1e9)
SPANS = st.tuples(COUNT, COUNT)
CHOICES = st.builds(
    Choice,
    SPANS,
    SHAPES,
    TEXT,
    COUNT,
    st.sampled_from(["cpu", "gpu"]),
    VARIANTS,
    SECONDS,
    COUNT,
    st.booleans(),
    st.booleans(),
    BYTES,
    BYTES,
)
AXES = st.integers(0, 2)
COLUMNS = st.integers(0, 9999)
PARTS = st.lists(COUNT, min_size=1, max_size=4).map(tuple)
RUNNERS_UP = st.builds(RunnerUp, SIZE, AXES, COLUMNS, PARTS, SECONDS, SECONDS, BYTES, BYTES)
KINDS = st.builds(Alternative, st.sampled_from(["cpu", "gpu"]), RUNNERS_UP, BYTES, BYTES, TEXT)
WORKER_PLANS = st.builds(
    Plan,
    limits=st.builds(Limits, st.integers(1, 2**50), COUNT, st.integers(1, 2**50)),
    output=LARGE,
    patch_out=SIZE,
    patch_in=SIZE,
    axis=AXES,
    column_planes=COLUMNS,
    stages=st.tuples(
        st.builds(
            Stage,
            st.just("gpu"),
            st.lists(CHOICES, min_size=1, max_size=4).map(tuple),
            st.lists(st.builds(Tensor, TEXT, BYTES, COUNT, COUNT, BYTES), max_size=4).map(tuple),
        )
    ),
    memory=st.builds(Memory, st.tuples(st.builds(StageMemory, st.just("gpu"), *[BYTES] * 5)), *[BYTES] * 6),
    itemsize_in=COUNT,
    itemsize_out=COUNT,
    columns=COUNT,
)
PLANS = st.builds(
    RunPlan,
    format=st.just(FORMAT),
    znnpy_version=st.just("0.1.0"),
    network=TEXT,
    network_name=TEXT,
    machine=TEXT,
    workers=st.tuples(st.builds(PlannedWorker, WORKER_PLANS, COUNT)),
    rigor=st.sampled_from(["estimate", "measure", "exhaustive"]),
    other=st.none() | RUNNERS_UP,
    runners_up=st.lists(RUNNERS_UP, max_size=3).map(tuple),
    alternatives=st.lists(KINDS, max_size=3).map(tuple),
)


@given(PLANS)
def test_written_plan_is_read_back(plan: RunPlan) -> None:
    assert RunPlan.from_json(plan.to_json()) == plan


def test_real_plan_is_read_back_and_runs(
    plan: RunPlan, column: RunPlan, network: Network, split: RunPlan, wide: Network, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    for made, of in ((plan, network), (column, network), (split, wide)):
        file.write_text(made.to_json())
        read = RunPlan.load(file)
        assert read == made
        check_runs(read, of, MACHINE, ram_bytes=made.memory.peak, table=FAKES)


DAMAGED: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
    "negative bytes": (
        (*TENSORS_AT, 0, "nbytes"),
        -4,
        "stages.0.tensors.0.nbytes: .*greater than or equal to 0",
    ),
    "negative offset": (
        (*TENSORS_AT, 1, "offset"),
        -64,
        "stages.0.tensors.1.offset: .*greater than or equal to 0",
    ),
    "negative arena": (("memory", "stages", 0, "arena"), -1, "memory.stages.0.arena"),
    "a billion devices": (("workers", 0, "devices"), 10**9, "workers.0.devices: .*less than or equal to 1024"),
    "empty patch": (("patch_out", 1), 0, "patch_out.1: .*greater than or equal to 1"),
    "2D patch": (("patch_out",), [4, 4], "patch_out.2"),
    "size in words": (("columns",), "three", "columns: .*valid integer"),
    "size in quotes": (("columns",), "3", "columns: .*valid integer"),
    "half a column": (("columns",), 1.5, "columns: .*valid integer"),
    "no column": (("columns",), 0, "columns: .*greater than or equal to 1"),
    "column of fewer planes than none": (("column_planes",), -4, "column_planes: .*greater than or equal to 0"),
    "fourth axis": (("axis",), 3, "axis: .*less than or equal to 2"),
    "axis in words": (("axis",), "z", "axis: .*valid integer"),
    "no axis": (("axis",), ..., "axis: .*required"),
    "no runs": ((*CHOICES_AT, 0, "executions"), 0, "stages.0.choices.0.executions: .*greater than or equal to 1"),
    "missing device": (("memory", "stages", 0, "device"), ..., "memory.stages.0.device: .*required"),
    "negative carries": (
        ("memory", "stages", 0, "carries"),
        -1,
        "memory.stages.0.carries: .*greater than or equal to 0",
    ),
    "no waste": (("runners_up", 0, "waste"), 0.0, "runners_up.0.waste: .*greater than 0"),
    "empty part": (("runners_up", 0, "sub_batches", 0), 0, "runners_up.0.sub_batches.0: .*greater than or equal to 1"),
    "no parts": (("runners_up", 0, "sub_batches"), [], "runners_up.0.sub_batches: .*at least 1 item"),
    "something else than columns": (("other",), "columns", "other: "),
    "no seconds": ((*CHOICES_AT, 0, "seconds"), None, "stages.0.choices.0.seconds"),
    "zero seconds": ((*CHOICES_AT, 0, "seconds"), 0.0, "stages.0.choices.0.seconds"),
    "seconds without end": ((*CHOICES_AT, 0, "seconds"), 1e308, "stages.0.choices.0.seconds"),
    "missing field": (("memory", "reading"), ..., "memory.reading: .*required"),
    "more stages than memory": (
        ("memory", "stages"),
        [{"device": "cpu"}] * 2,
        "memory is promised for stages on",
    ),
    "a stage on another device": (("stages", 0, "device"), "gpu", "memory is promised for stages on"),
    "no stages": (("stages",), [], "stages: .*at least 1 item"),
    "missing runners-up": (("runners_up",), ..., "runners_up: .*required"),
    "unknown field": (("split",), 3, "split: .*nexpected"),
    "unknown field within": (("limits", "vram"), 3, "limits.vram: .*nexpected"),
    "unknown kind of layer": (
        (*CHOICES_AT, 0, "shape", "kind"),
        "deconv",
        "stages.0.choices.0.shape: .*deconv",
    ),
    "no kind": ((*CHOICES_AT, 0, "shape", "kind"), ..., "stages.0.choices.0.shape: .*kind"),
    "kernel larger than its input": (
        (*CHOICES_AT, 0, "shape", "k"),
        [99, 1, 1],
        "smaller than the kernel along z",
    ),
    "no layers": (
        (
            "stages",
            0,
            "choices",
        ),
        [],
        "stages.0.choices: .*at least 1 item",
    ),
    "no limits": (("limits",), None, "limits"),
    "no threads": (("limits", "threads"), 0, "limits: .*0 threads are no limits"),
    "threads that no machine has": (("limits", "threads"), 10**6, "limits: .*1000000 threads are no limits"),
    "more bytes than a float holds": (("limits", "ram_bytes"), 10**400, "a number is 10000.* beyond 1,152,921"),
    "more images than a float holds": ((*CHOICES_AT, 0, "shape", "batch"), 10**400, "a number is 10000"),
    "less than a float holds": ((*CHOICES_AT, 0, "version"), -(10**400), "a number is -10000"),
    "a variant beyond all bounds": (
        (*CHOICES_AT, 0, "variant"),
        {"parameters": [["a", 10**30]]},
        "a number is 10000",
    ),
    "a name of control characters": (
        ("network_name",),
        "\x1b]0;title\x07",
        r"a text contains control characters: \\x1b\]0;title\\x07",
    ),
    "a key of control characters": (("\x1b[2J",), 1, r"a text contains control characters: \\x1b\[2J"),
    "a name without end": (("network_name",), "n" * 3000, "a text has 3,000 characters, and none has more than 2,000"),
    "a long key": (("n" * 1000,), 1, "n{20,30} ... n{20,30}: Unexpected"),
    "a list without end": (
        (
            "stages",
            0,
            "tensors",
        ),
        [1] * 10**6,
        "it holds more than 200,000 values",
    ),
    "lists within each other": (("alternatives",), [[[[[[[[[0]]]]]]]]], "alternatives"),
}


def test_plan_of_a_network_of_any_name_is_read_back() -> None:
    """Control characters in the name of a network are escaped in its plan and in all that is printed of it."""
    network = replace(MIXED, name="a\x1b[31m\nb")
    made = planned(network, (20, 11, 8), AROUND + 2**19, columns=False, baseline=5000)
    assert made.network_name == r"a\x1b[31m\nb"
    assert RunPlan.from_json(made.to_json()) == made


def test_pipe_as_plan_is_refused(tmp_path: Path) -> None:
    """Opening a pipe would wait for another process to write to it."""
    os.mkfifo(tmp_path / "plan.json")
    with pytest.raises(PlanFileError, match=r"cannot read the plan file .*: it is a pipe, a socket or a device"):
        RunPlan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_plan_is_refused(plan: RunPlan, what: str) -> None:
    path, to, said = DAMAGED[what]
    with pytest.raises(PlanFileError, match=f"^the plan is damaged: .*{said}.*; make it again with `znnpy plan NET"):
        RunPlan.from_json(edited(plan, *path, to=to))


def test_several_faults_are_counted(plan: RunPlan) -> None:
    content = json.loads(plan.to_json())
    del content["machine"], content["rigor"]
    with pytest.raises(PlanFileError, match=r"\(and 1 more such\)"):
        RunPlan.from_json(json.dumps(content))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_cut_off_plan_is_refused(plan: RunPlan, share: float) -> None:
    whole = plan.to_json()
    with pytest.raises(PlanFileError, match=r"the plan is damaged or cut off: line \d+, column \d+"):
        RunPlan.from_json(whole[: int(share * len(whole)) - 2 if share else 0])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "this is no plan file, and this version reads format 13"),
        ("{}", "this is no plan file"),
        ('{"format": 2}', "this is a plan file of format 2, and this version reads format 13"),
        ('{"format": 14}', "this is a plan file of format 14, and this version reads format 13"),
        ("[" * 100_000, "nested too deeply"),
        (f'{{"format": 6, "column": 1{"0" * 5000}}}', "a number has thousands of digits"),
    ],
    ids=["a list", "empty", "from the past", "from the future", "deep", "long"],
)
def test_file_without_a_plan_is_refused(text: str, said: str) -> None:
    with pytest.raises(PlanFileError, match=said):
        RunPlan.from_json(text)


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match=r"no plan file .*gone.json; write one with `znnpy plan NETWORK --out "):
        RunPlan.load(tmp_path / "gone.json")
    with pytest.raises(PlanFileError, match=r"cannot read the plan file .*: Is a directory"):
        RunPlan.load(tmp_path)
    binary = tmp_path / "plan.json"
    binary.write_bytes(b"\x89HDF\r\n\x1a\n\xff\xfe")
    with pytest.raises(PlanFileError, match="is no plan file: it is not text"):
        RunPlan.load(binary)
    binary.write_text(" " * (MOST_BYTES + 1))
    with pytest.raises(PlanFileError, match=r"plan.json: it is longer than 4,194,304 bytes, as no plan file is"):
        RunPlan.load(binary)
    binary.write_text("{")
    with pytest.raises(PlanFileError, match=r"plan.json: the plan is damaged or cut off: line 1"):
        RunPlan.load(binary)


def test_prediction_sums_the_seconds_of_all_layers(plan: RunPlan, split: RunPlan) -> None:
    twice = plan.main.with_choices(lambda c: replace(c, executions=2 * c.executions))
    assert twice.seconds == 2 * plan.seconds
    assert twice.voxels_per_second == plan.voxels_per_second / 2
    assert twice.waste == 2 * plan.main.waste
    assert plan.main.seconds_per_step == sum(c.seconds for c in plan.choices)
    first, second, *rest = (c.seconds for c in split.choices)
    assert split.main.seconds_per_step == pytest.approx(first + second + 4 * sum(rest), rel=1e-12)


def test_waste_is_the_cost_of_borders(network: Network, plan: RunPlan, column: RunPlan) -> None:
    """Values computed, layer by layer, over those that the whole output would need if it had no border."""
    for made in (plan, column):
        done = 0.0
        needed = 0.0
        for choice in made.choices:
            values = prod(choice.shape.out_shape[:4])
            done += choice.executions * choice.seconds
            needed += choice.seconds / values * prod(made.output)
        assert made.main.waste == pytest.approx(done / needed, rel=1e-12)
        assert made.main.waste > 1
    # one voxel of view: nothing is computed twice
    dot = planned(Network("dot", 1, (Conv((1, 1, 1), 2),)), (6, 5, 4), 2**30)
    assert dot.main.waste == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("output", [(20, 31, 8), (1, 1, 1), (47, 5, 3), (10, 310, 80)], ids=str)
def test_plan_for_another_output_counts_runs_again(
    plan: RunPlan, column: RunPlan, network: Network, split: RunPlan, wide: Network, output: Vec3
) -> None:
    """Runs and columns are counted one by one from patches and steps; the rest stays."""
    for made, of in ((plan, network), (column, network), (split, wide)):
        here = made.main.for_output(output, of)
        columns = here.cover(of)
        assert (columns.size, columns.patch, columns.axis, columns.column) == (
            output, made.patch_out, made.main.axis, made.main.column_planes,
        )  # fmt: skip
        assert columns.margin == of.field_of_view[made.main.axis] - 1
        assert sum(c.voxels for c in columns) == prod(output)
        assert here.columns == len(list(columns))
        for choice, before, parts in zip(here.choices, made.choices, made.main.sub_batches, strict=True):
            ahead = of.margins[choice.layers[1] + 1][made.main.axis]
            assert choice == replace(before, executions=parts * steps_of(columns, ahead))
        stages = (replace(made.main.stages[0], choices=here.choices),)
        assert here == replace(made.main, output=output, stages=stages, columns=here.columns)
        check_plan(here, of, MACHINE, FAKES)
        assert here.for_output(made.output, of) == made.main


def test_fused_layer_first_runs_with_its_second_layer() -> None:
    """A step earlier the convolution alone would run, and what it gives would be pooled into nothing that counts."""
    network = Network("in one", 1, (Conv((2, 1, 1), 2, "relu"), Pool((2, 1, 1)), Conv((1, 1, 1), 2)))
    made = planned(network, (8, 6, 5), 2**30, columns=True, patch=(2, 6, 5), only=["cpu.conv.both"])
    assert [choice.layers for choice in made.choices] == [(0, 1), (2, 2)]
    assert (made.main.axis, [margin[0] for margin in network.margins]) == (0, [2, 1, 0, 0])
    for planes, steps in ((8, 4), (9, 5), (1, 1)):
        here = made.main.for_output((planes, 6, 5), network)
        assert here.cover(network).ahead == 1
        assert [choice.executions for choice in here.choices] == [steps, steps], "none of them ahead of the output"
        check_plan(here, network, MACHINE, FAKES)
    assert made.main.for_output(made.output, network) == made.main


def test_column_reading_twice_and_writing_once_has_fewer_buffers() -> None:
    network = Network("two steps", 3, (Conv((2, 1, 1), 2, "relu"), Pool((2, 1, 1)), Conv((1, 1, 1), 2)))
    made = planned(network, (2, 6, 5), 2**30, columns=True, patch=(2, 6, 5), itemsize_in=2)
    assert (made.main.columns, made.main.cover(network).ahead) == (1, 1)
    assert made.main.memory.reading == reading_bytes(3, (2, 6, 5), 2, steps=2) > reading_bytes(3, (2, 6, 5), 2, steps=1)
    assert made.main.memory.writing == writing_bytes(2, (2, 6, 5), 4, steps=1) < writing_bytes(2, (2, 6, 5), 4, steps=2)


def test_edited_runs_are_counted_again(column: RunPlan, network: Network) -> None:
    """They are predictions, which `check_runs` ignores and covering an output replaces."""
    wrong = replace(column.main.with_choices(lambda c: replace(c, executions=7 * c.executions)), columns=99)
    check_plan(wrong, network, MACHINE, FAKES)
    assert wrong.for_output(column.output, network) == column.main


def test_steps_without_output_count_only_running_layers(column: RunPlan, network: Network, plan: RunPlan) -> None:
    """Layers begin one after the other; from the first step with output on all of them run."""
    assert plan.main.warmup_work(network) == ()
    ahead = column.main.warmup_work(network)
    margins = [margin[1] for margin in network.margins[1:]]
    assert margins == [2, 2, 2, 1, 0]  # planes that each layer is ahead, in steps of one plane
    seconds = [choice.seconds for choice in column.choices]
    whole = sum(seconds)
    assert ahead == pytest.approx([0, sum(seconds[:3]) / whole, sum(seconds[:4]) / whole], rel=1e-12)
    output = len(column.main.cover(network)) * 31
    assert column.seconds == pytest.approx(
        column.main.seconds_per_step * (output + len(column.main.cover(network)) * sum(ahead)), rel=1e-12
    )
