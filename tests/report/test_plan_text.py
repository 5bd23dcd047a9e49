"""`znnpy plan` prints every figure of the plan, and how far to trust it."""

from __future__ import annotations

import io
from dataclasses import replace
from math import prod
from typing import Any

import pytest
from rich.console import Console

from tests.support.fake_plans import changed
from tests.support.fake_primitives import FAKES, MACHINE, RATES, WITH_GPU, limits, on_gpu
from tests.support.flat_requests import make_plan
from znnpy.layer_shapes import with_batch
from znnpy.machine import Limits, Machine
from znnpy.network import Conv, Network, Pool
from znnpy.network_files import read_network
from znnpy.planner.memory import READER_BYTES, WRITER_BYTES
from znnpy.planner.run_plan import RunnerUp, RunPlan
from znnpy.report.plan_text import plan_renderable
from znnpy.shapes import Vec3, text, turned_back
from znnpy.units import human_bytes, human_seconds

LIMIT = READER_BYTES + WRITER_BYTES + 2 * 2**20
AVX512 = Machine("made up", "avx512", 2, 2**40, "openblas SkylakeX", (("numpy", "2"),))
NETWORK = Network("cat", 1, (Conv((2, 3, 4), 8, "relu"), Pool((2, 2, 2)), Conv((3, 3, 3), 2)))


@pytest.fixture(scope="module")
def plan() -> RunPlan:
    return planned((60, 50, 40), limits(LIMIT), columns=False)


@pytest.fixture(scope="module")
def columns() -> RunPlan:
    """Along y, the axis in the middle."""
    return planned((60, 50, 40), limits(LIMIT), columns=True, patch=(6, 10, 8))


def planned(output: Vec3, within: Limits, network: Network = NETWORK, **words: Any) -> RunPlan:
    return make_plan(network, output, MACHINE, within, **{"table": FAKES, "rates": RATES, "baseline": 0, **words})


def runner_up(patch: Vec3, speed: float, over: int = 0, **words: Any) -> RunnerUp:
    """Return an alternative that covers with patches, unless `words` say more."""
    return RunnerUp(
        patch,
        **{"axis": 0, "column_planes": 0, "sub_batches": (1, 1, 1), "waste": 2.0, "over_vram_bytes": 0, **words},
        voxels_per_second=speed,
        over_bytes=over,
    )


def printed(plan: RunPlan, machine: Machine = MACHINE, width: int = 100) -> str:
    stream = io.StringIO()
    Console(width=width, file=stream).print(plan_renderable(plan, NETWORK, machine))
    return stream.getvalue()


def words(plan: RunPlan, machine: Machine = MACHINE) -> str:
    """Return the text without line breaks and column spacing."""
    return " ".join(printed(plan, machine).split())


def test_every_figure_of_the_plan_is_printed(plan: RunPlan) -> None:
    said = words(plan)
    assert f"60x50x40 output voxels in {plan.main.columns} patches, each {text(plan.main.patch_in)} in" in said
    assert f"{text(plan.patch_out)} out (field of view 7x8x9, period 2x2x2)" in said
    for choice in plan.choices:
        assert choice.primitive in said
        assert text(choice.shape.in_shape) in said
        assert human_seconds(choice.seconds) in said
        assert f"{choice.seconds / plan.main.seconds_per_step:.0%}" in said
        assert human_bytes(choice.working_bytes) in said
    for nbytes in (
        plan.main.memory.last.arena,
        plan.main.memory.last.weights,
        plan.main.memory.reading,
        plan.main.memory.writing,
    ):
        assert human_bytes(nbytes) in said
    assert f"peak, of the limit of {human_bytes(LIMIT)} {human_bytes(plan.memory.peak)}" in said
    assert f"predicted: {plan.voxels_per_second:,.0f} output voxels/s" in said
    assert f"{human_seconds(plan.main.seconds_per_step)} a patch, " in said
    assert "kept from step to step" not in said
    assert "parts" not in said
    assert f"{human_seconds(plan.seconds)} in all, with 2 threads" in said
    assert "the time of 3 of 3 layers is estimated from assumed rates, not measured on this machine" in said
    assert "another machine" not in said


def test_columns_are_described(columns: RunPlan) -> None:
    said = words(columns)
    assert (columns.main.axis, columns.main.column_planes) == (1, 50)
    assert "60x50x40 output voxels in 50 columns along y in steps of 10 planes, each 12x10x16 in and 6x10x8 out" in said
    assert "a column reads 7 planes before its output begins, in 1 of its steps" in said
    assert (
        f"the last planes of its input for the next step, {human_bytes(columns.main.memory.last.carries)} in all"
        in said
    )
    assert f"planes kept from step to step {human_bytes(columns.main.memory.last.carries)} prepared weights" in said
    assert "steps on their way in " in said
    assert "steps on their way out " in said
    assert "patches on their way" not in said
    step, column, run = columns.main.seconds_per_step, columns.seconds / 50, columns.seconds
    assert f"{human_seconds(step)} a step, {human_seconds(column)} a column, {human_seconds(run)} in all" in said
    assert step < column < run
    for choice in columns.choices:
        images, *n, maps = choice.shape.in_shape
        assert text((images, *turned_back((n[0], n[1], n[2]), 1), maps)) in said  # z, y, x
        assert f"{choice.executions * choice.seconds / columns.seconds:.0%}" in said


def test_columns_shorter_than_the_output_are_described(columns: RunPlan) -> None:
    longer = columns.main.for_output((60, 120, 40), NETWORK)
    assert "in 150 columns along y, each at most 50 planes of output, in steps of 10 planes, each" in words(
        columns.with_main(longer)
    )
    one = columns.main.for_output((6, 9, 8), NETWORK)
    assert "in 1 column along y in steps of 10 planes, each" in words(columns.with_main(one))


def test_depth_first_is_described(plan: RunPlan) -> None:
    parts = (1, 1, 4)
    last = plan.choices[2]
    split = replace(last, shape=with_batch(last.shape, 2), executions=4 * last.executions)
    deep = changed(plan, stages=(replace(plan.main.stages[0], choices=(*plan.choices[:2], split)),))
    assert deep.main.sub_batches == parts
    (header,) = [line for line in printed(deep).splitlines() if "layer and input" in line]
    assert header.split() == ["layer", "and", "input", "primitive", "parts", "time", "share", "working", "kept"]
    rows = [line.split() for line in printed(deep).splitlines() if "cpu." in line]
    at = [row.index(choice.primitive) for row, choice in zip(rows, deep.choices, strict=True)]
    assert [int(row[i + 1]) for row, i in zip(rows, at, strict=True)] == list(parts)
    assert " ".join(rows[2][at[2] + 2 : at[2] + 4]) == human_seconds(4 * last.seconds)
    assert f"patches of {text(plan.patch_out)} depth first: " in words(deep)


@pytest.mark.parametrize("width", [80, 100, 200])
def test_names_stay_whole_on_narrow_terminals(plan: RunPlan, columns: RunPlan, width: int) -> None:
    for some in (plan, columns):
        said = printed(some, width=width)
        assert "…" not in said
        assert all(len(line.rstrip()) <= width for line in said.splitlines())
        assert all(choice.primitive in said.split() for choice in some.choices)


@pytest.mark.parametrize("cover", [True, False])
def test_real_plan_is_printed_whole_at_any_width(cover: bool) -> None:
    """Names, variants and sizes are printed whole at any width."""
    network = read_network("n337").network
    made = make_plan(
        network, (320, 320, 320), AVX512, Limits(6 * 2**30, 2), baseline=2**28, patch=(64, 64, 128), columns=cover
    )
    for width in (80, 120, 200):
        stream = io.StringIO()
        Console(width=width, file=stream).print(plan_renderable(made, network, AVX512))
        said = stream.getvalue()
        assert max(len(line.rstrip()) for line in said.splitlines()) <= width
        assert "…" not in said
        words = said.split()
        for choice in made.choices:
            assert choice.primitive in words
            assert text(choice.shape.in_shape) in words
            assert human_bytes(choice.resident_bytes) in " ".join(words)
            assert set(str(choice.variant).split()) <= set(words)


def test_fused_layers_are_described() -> None:
    table = tuple(replace(p, flops=1.0) if p.name == "cpu.conv.both" else p for p in FAKES)
    plan = planned((60, 50, 40), limits(LIMIT), table=table, columns=False)
    assert [c.layers for c in plan.choices] == [(0, 1), (2, 2)]
    lines = [line.strip().split("  ")[0] for line in printed(plan).splitlines()]
    at = lines.index("0 conv 2x3x4 -> 8 relu")
    assert lines[at + 1] == "1 pool 2x2x2, in one"
    assert lines[at + 2] == text(plan.choices[0].shape.in_shape)
    assert lines[at + 3] == "2 conv 3x3x3 -> 2 none"
    assert "the time of 3 of 3 layers is estimated" in words(plan)


def test_measured_times_are_marked(plan: RunPlan) -> None:
    measured = plan.with_main(plan.main.with_choices(lambda c: replace(c, measured=True)))
    said = words(measured)
    assert "every layer was measured on the machine the plan was made on, at this size or at others" in said
    assert "assumed" not in said


def test_plan_for_another_machine_names_it(plan: RunPlan) -> None:
    small = replace(MACHINE, ram_bytes=2**20, cores=1)
    said = words(plan, small)
    assert f"the plan was made on another machine ({MACHINE.fingerprint}; this one is {small.fingerprint})" in said
    assert (
        f"the limit of {human_bytes(LIMIT)} is above the 1.00 MiB of this machine; the plan does not run here" in said
    )
    assert "2 threads are planned and this machine has 1 cores for them" in said


def test_alternatives_are_printed_with_a_reason(plan: RunPlan) -> None:
    speed = plan.voxels_per_second
    others = (
        runner_up((60, 50, 40), 1.5 * speed, 3 * 2**20),
        runner_up((30, 50, 40), 0.75 * speed, axis=2, column_planes=40),
        runner_up((20, 50, 40), speed, sub_batches=(1, 1, 4)),
    )
    said = words(replace(plan, runners_up=others))
    assert f"runner-up: patches of 60x50x40, {1.5 * speed:,.0f} voxels/s: 1.50 times as fast, 3.00 MiB over" in said
    assert f"columns along x in steps of 30x50x40, {0.75 * speed:,.0f} voxels/s: 25% slower" in said
    assert f"patches of 20x50x40 depth first, {speed:,.0f} voxels/s: as fast" in said


@pytest.mark.parametrize(
    ("ratio", "said"), [(1.3, "are 1.30 times as fast"), (1.004, "as fast"), (1.006, "are 1.01 times as fast")]
)
def test_gain_of_columns_over_patches_is_printed(plan: RunPlan, columns: RunPlan, ratio: float, said: str) -> None:
    speed = columns.voxels_per_second
    other = runner_up((30, 50, 40), speed / ratio, waste=3.804)
    assert words(replace(columns, other=other)).count(
        f"columns along y in steps of 6x10x8: {speed:,.0f} voxels/s, work {columns.main.waste:.2f} times what the "
        f"output needs; patches of 30x50x40: {speed / ratio:,.0f} voxels/s, "
        f"3.80 times: {'columns ' * (ratio > 1.005)}{said}"
    )
    speed = plan.voxels_per_second
    other = runner_up((30, 50, 40), speed / ratio, waste=3.804, axis=1, column_planes=50, sub_batches=(1, 4, 4))
    assert words(replace(plan, other=other)).count(
        f"patches of {text(plan.patch_out)}: {speed:,.0f} voxels/s, work {plan.main.waste:.2f} times what the output "
        f"needs; columns along y in steps of 30x50x40 depth first: {speed / ratio:,.0f} voxels/s, 3.80 times: "
        f"{'patches ' * (ratio > 1.005)}{said}"
    )


@pytest.mark.slow
def test_winner_is_compared_with_the_best_of_the_other_kind() -> None:
    both = planned((60, 50, 40), limits(LIMIT))
    alone = planned((60, 50, 40), limits(LIMIT), columns=not both.main.streams)
    assert both.other is not None
    assert both.other.voxels_per_second == alone.voxels_per_second <= both.voxels_per_second
    assert both.other.waste == pytest.approx(alone.main.waste)
    assert f"{alone.voxels_per_second:,.0f} voxels/s, {alone.main.waste:.2f} times: " in words(both)
    assert alone.other is None
    assert words(alone).count("times what the output needs runner-up: ") == 1


def test_border_waste_of_one_patch_equals_that_by_hand() -> None:
    """One convolution k=3 of cost 1 per output value, then one k=5: 14^3 and 10^3 values for 10^3 that are needed."""
    network = Network("two", 1, (Conv((3, 3, 3), 1), Conv((5, 5, 5), 1)))
    table = tuple(p for p in FAKES if p.name == "cpu.conv.slow")
    plan = planned((10, 10, 10), limits(2**30), network, table=table, columns=False, patch=(10, 10, 10))
    assert plan.main.columns == 1
    assert plan.main.waste == pytest.approx((14**3 + 10**3) / (2 * 10**3))
    eighths = changed(plan, output=(9, 10, 10))
    assert eighths.main.waste == pytest.approx(plan.main.waste / 0.9)


def test_border_waste_of_one_column_equals_that_by_hand() -> None:
    """Steps of 5 planes give (10 + 5) x 14^2 and 10 x 10^2 values: the first layer begins a step before."""
    network = Network("two", 1, (Conv((3, 3, 3), 1), Conv((5, 5, 5), 1)))
    table = tuple(
        replace(p, flops=1e9) for p in FAKES if p.name == "cpu.conv.slow"
    )  # compared to it moving planes is nothing
    plan = planned((10, 10, 10), limits(2**30), network, table=table, columns=True, patch=(5, 10, 10))
    assert (plan.main.columns, [choice.executions for choice in plan.choices]) == (1, [3, 2])
    assert plan.main.waste == pytest.approx((15 * 14**2 + 10**3) / (2 * 10**3), rel=1e-6)


def test_network_without_borders_has_no_waste() -> None:
    network = Network("flat", 1, (Conv((1, 1, 1), 3), Pool((1, 1, 1)), Conv((1, 1, 1), 1)))
    plan = planned((8, 8, 8), limits(2**30), network)
    assert plan.main.waste == pytest.approx(1.0)
    assert prod(plan.output) == 512


def test_figures_are_rounded_for_people() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 1536 * 2**20, 12636 * 2**20, 256 * 2**30)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.50 GiB",
        "12.3 GiB",
        "256 GiB",
    ]
    assert [human_seconds(s) for s in (5e-5, 0.0123, 1.5, 90, 119.9, 600, 7200, 9000)] == [
        "50 µs",
        "12.3 ms",
        "1.5 s",
        "90 s",
        "120 s",
        "10 min",
        "2 h 00 min",
        "2 h 30 min",
    ]


def test_patches_of_mostly_border_give_a_warning(plan: RunPlan) -> None:
    network = Network("wide", 1, (Conv((9, 9, 9), 1), Conv((9, 9, 9), 1)))
    table = tuple(
        replace(p, flops=1e9) for p in FAKES if p.name == "cpu.conv.slow"
    )  # compared to it moving planes is nothing

    def said(patch: int, *others: RunnerUp, columns: bool = False) -> str:
        forced = planned((40, 40, 40), limits(2**30), network, patch=(patch,) * 3, table=table, columns=columns)
        stream = io.StringIO()
        Console(width=100, file=stream).print(plan_renderable(replace(forced, runners_up=others), network, MACHINE))
        return " ".join(stream.getvalue().split())

    assert "warning" not in words(plan)
    assert "warning" not in said(8)  # (16^3 + 8^3) / (2 * 8^3) = 4.5
    assert "warning: patches this small do 365 times the work that the output needs; give larger patches" in said(1)
    slower, larger = runner_up((2, 2, 2), 1e3), runner_up((4, 8, 8), 1e11, 3 * 2**20 + 1)
    assert "; already with ram='1028M' patches of 4x8x8 would be " in said(1, larger, slower)
    wide = replace(larger, column_planes=40)
    assert "warning: columns this narrow do " in said(1, columns=True)
    assert "give larger steps (`patch`) or more memory (`ram`)" in said(1, columns=True)
    assert "ram='1028M' columns along z in steps of 4x8x8 would be " in said(1, wide, columns=True)
    assert "more memory (`ram`)" in said(1, slower)


@pytest.mark.parametrize("seconds", [1e9, 1e308, float("inf"), float("nan")])
def test_endless_times_are_printed_as_words(seconds: float) -> None:
    assert human_seconds(seconds) == "over 30 years"


@pytest.mark.parametrize("cover", [True, False])
def test_gpu_plan_prints_memory_of_process_and_gpu(cover: bool) -> None:
    within = Limits(2**31, 2, 2**30)
    network = Network("cat", 1, (Conv((2, 3, 4), 8, "relu"), Pool((2, 2, 2)), Conv((3, 3, 3), 2)))
    plan = make_plan(
        network,
        (60, 50, 40),
        WITH_GPU,
        within,
        table=on_gpu(*FAKES),
        rates=RATES,
        baseline=2**20,
        device="gpu",
        precision="tf32",
        context=2**28,
        columns=cover,
        patch=(6, 10, 8),
    )
    stream = io.StringIO()
    Console(width=100, file=stream).print(plan_renderable(plan, network, WITH_GPU))
    said, memory = " ".join(stream.getvalue().split()), plan.main.memory
    what = "steps" if cover else "patches"
    for row, nbytes in (
        ("the process itself, with CUDA in it", memory.baseline),
        (f"{what} on their way in", memory.reading),
        (f"{what} on their way out", memory.writing),
        ("peak, of the limit of 2.00 GiB", memory.peak),
        ("GPU: arena: activations and scratch", memory.last.arena),
        ("GPU: prepared weights", memory.last.weights),
        (f"GPU: {what} on their way in and out", memory.staging),
        ("GPU: CUDA and its libraries", memory.context + memory.last.allowance),
        ("GPU: all, of the limit of 1.00 GiB", memory.vram),
    ):
        assert f"{row} {human_bytes(nbytes)}" in said
    assert ("GPU: planes kept from step to step" in said) == cover
    assert f"{human_seconds(plan.seconds)} in all, on the GPU in tf32" in said
    assert "threads" not in said
    assert memory.vram == sum(
        (
            memory.last.arena,
            memory.last.carries,
            memory.last.weights,
            memory.staging,
            memory.context,
            memory.last.allowance,
        )
    )


def test_plan_beyond_the_gpus_limit_names_that_limit(plan: RunPlan) -> None:
    more = replace(runner_up((60, 50, 40), 1.5 * plan.voxels_per_second), over_vram_bytes=3 * 2**20)
    both = replace(more, over_bytes=2**20)
    assert "1.50 times as fast, 3.00 MiB of VRAM over the limit" in words(replace(plan, runners_up=(more,)))
    assert "1.00 MiB and 3.00 MiB of VRAM over the limit" in words(replace(plan, runners_up=(both,)))
