"""What `znnpy plan` prints: every figure of the plan, and how far to trust it."""

from __future__ import annotations

import io
from dataclasses import replace
from math import prod

import pytest
from fakes import FAKES, MACHINE, RATES, limits
from rich.console import Console

from znnpy.machine import Machine
from znnpy.network import Conv, Network, Pool
from znnpy.planner.explain import border_waste, explain, human_bytes, human_seconds
from znnpy.planner.memory import READER_BYTES, WRITER_BYTES
from znnpy.planner.plan import Plan, RunnerUp
from znnpy.planner.search import make_plan
from znnpy.shapes import text

LIMIT = READER_BYTES + WRITER_BYTES + 2 * 2**20
NETWORK = Network("cat", 1, (Conv((2, 3, 4), 8, "relu"), Pool((2, 2, 2)), Conv((3, 3, 3), 2)))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(NETWORK, (60, 50, 40), MACHINE, limits(LIMIT), table=FAKES, rates=RATES, baseline=0)


def printed(plan: Plan, machine: Machine = MACHINE, width: int = 100) -> str:
    stream = io.StringIO()
    Console(width=width, file=stream).print(explain(plan, NETWORK, machine))
    return stream.getvalue()


def words(plan: Plan, machine: Machine = MACHINE) -> str:
    """With line breaks and columns gone."""
    return " ".join(printed(plan, machine).split())


def test_every_figure_is_there(plan: Plan) -> None:
    said = words(plan)
    assert f"60x50x40 output voxels in {plan.patches} patches, each {text(plan.patch_in)} in" in said
    assert f"{text(plan.patch_out)} out (field of view 7x8x9, period 2x2x2)" in said
    for choice in plan.choices:
        assert choice.primitive in said
        assert text(choice.shape.in_shape) in said
        assert human_seconds(choice.seconds) in said
        assert f"{choice.seconds / plan.seconds_per_patch:.0%}" in said
        assert human_bytes(choice.working_bytes) in said
    for nbytes in (plan.memory.arena, plan.memory.residents, plan.memory.reading, plan.memory.writing):
        assert human_bytes(nbytes) in said
    assert f"peak, of the limit of {human_bytes(LIMIT)} {human_bytes(plan.memory.peak)}" in said
    assert f"predicted: {plan.voxels_per_second:,.0f} output voxels/s" in said
    assert f"{human_seconds(plan.seconds)} in all, with 2 threads" in said
    assert "the time of 3 of 3 layers is estimated from assumed rates, not measured on this machine" in said
    assert "another machine" not in said


@pytest.mark.parametrize("width", [80, 100, 200])
def test_names_stay_whole_on_narrow_terminals(plan: Plan, width: int) -> None:
    said = printed(plan, width=width)
    assert "…" not in said
    assert all(len(line) <= width for line in said.splitlines())


def test_two_layers_in_one_are_told() -> None:
    table = tuple(replace(p, flops=1.0) if p.name == "cpu.conv.both" else p for p in FAKES)
    plan = make_plan(NETWORK, (60, 50, 40), MACHINE, limits(LIMIT), table=table, rates=RATES, baseline=0)
    assert [c.layers for c in plan.choices] == [(0, 1), (2, 2)]
    lines = [line.strip().split("  ")[0] for line in printed(plan).splitlines()]
    at = lines.index("0 conv 2x3x4 -> 8 relu")
    assert lines[at + 1] == "1 pool 2x2x2, in one"
    assert lines[at + 2] == "2 conv 3x3x3 -> 2 none"
    assert "the time of 3 of 3 layers is estimated" in words(plan)


def test_measured_times_are_called_measured(plan: Plan) -> None:
    measured = replace(plan, choices=tuple(replace(c, measured=True) for c in plan.choices))
    said = words(measured)
    assert "the time of every layer was measured on the machine the plan was made on" in said
    assert "assumed" not in said


def test_another_machine_is_told(plan: Plan) -> None:
    small = replace(MACHINE, ram_bytes=2**20, cores=1)
    said = words(plan, small)
    assert f"the plan was made on another machine ({MACHINE.fingerprint}; this one is {small.fingerprint})" in said
    assert (
        f"the limit of {human_bytes(LIMIT)} is above the 1.00 MiB of this machine; the plan does not run here" in said
    )
    assert "2 threads are planned and this machine has 1 cores for them" in said


def test_runners_up_say_why(plan: Plan) -> None:
    speed = plan.voxels_per_second
    others = (
        RunnerUp((60, 50, 40), 1.5 * speed, 3 * 2**20),
        RunnerUp((30, 50, 40), 0.75 * speed, 0),
        RunnerUp((20, 50, 40), speed, 0),
    )
    said = words(replace(plan, runners_up=others))
    assert f"runner-up: patches of 60x50x40, {1.5 * speed:,.0f} voxels/s: 1.50 times as fast, 3.00 MiB over" in said
    assert f"patches of 30x50x40, {0.75 * speed:,.0f} voxels/s: 25% slower" in said
    assert f"patches of 20x50x40, {speed:,.0f} voxels/s: as fast" in said


def test_border_waste_of_one_patch() -> None:
    """One convolution k=3 of cost 1 per output value, then one k=5: 14^3 and 10^3 values for 10^3 that are needed."""
    network = Network("two", 1, (Conv((3, 3, 3), 1), Conv((5, 5, 5), 1)))
    table = tuple(p for p in FAKES if p.name == "cpu.conv.slow")
    plan = make_plan(network, (10, 10, 10), MACHINE, limits(2**30), table=table, rates=RATES, baseline=0)
    assert plan.patches == 1
    assert border_waste(plan) == pytest.approx((14**3 + 10**3) / (2 * 10**3))
    eighths = replace(plan, output=(9, 10, 10))
    assert border_waste(eighths) == pytest.approx(border_waste(plan) / 0.9)


def test_no_borders_no_waste() -> None:
    network = Network("flat", 1, (Conv((1, 1, 1), 3), Pool((1, 1, 1)), Conv((1, 1, 1), 1)))
    plan = make_plan(network, (8, 8, 8), MACHINE, limits(2**30), table=FAKES, rates=RATES, baseline=0)
    assert border_waste(plan) == pytest.approx(1.0)
    assert prod(plan.output) == 512


def test_human_figures() -> None:
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


def test_patches_of_nearly_nothing_but_border_are_warned_of(plan: Plan) -> None:
    network = Network("wide", 1, (Conv((9, 9, 9), 1), Conv((9, 9, 9), 1)))
    table = tuple(p for p in FAKES if p.name == "cpu.conv.slow")

    def said(patch: int, *others: RunnerUp) -> str:
        forced = make_plan(
            network, (40, 40, 40), MACHINE, limits(2**30), patch=(patch,) * 3, table=table, rates=RATES, baseline=0
        )
        stream = io.StringIO()
        Console(width=100, file=stream).print(explain(replace(forced, runners_up=others), network, MACHINE))
        return " ".join(stream.getvalue().split())

    assert "warning" not in words(plan)
    assert "warning" not in said(8)  # (16^3 + 8^3) / (2 * 8^3) = 4.5
    assert "warning: patches this small do 365 times the work that the output needs; give larger patches" in said(1)
    slower, larger = RunnerUp((2, 2, 2), 1e3, 0), RunnerUp((4, 8, 8), 1e99, 3 * 2**20 + 1)
    assert "; already with --ram 1028M patches of 4x8x8 would be " in said(1, larger, slower)
    assert "more memory (--ram)" in said(1, slower)


@pytest.mark.parametrize("seconds", [1e9, 1e308, float("inf"), float("nan")])
def test_times_beyond_measure_have_a_word(seconds: float) -> None:
    assert human_seconds(seconds) == "over 30 years"
