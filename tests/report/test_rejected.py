"""Every primitive for every layer of a plan: its seconds there, or its reason; and what taking it would need."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from tests.support.brute_force import AROUND, planned
from tests.support.fake_plans import MIXED, WIDE, changed, in_parts, patches, walking
from tests.support.fake_primitives import CARRYING, FAKES, WITH_GPU, Fake, on_gpu
from znnpy.network import Network
from znnpy.planner.run_plan import RunPlan
from znnpy.report.rejected import Considered, considered, why_table

REFUSING = Fake("cpu.conv.refusing", "conv", refuse="runs on Tuesdays")
HUNGRY = Fake("cpu.conv.hungry", "conv", flops=0.1, scratch=(90.0,))
TABLE = (*FAKES, REFUSING, HUNGRY, *on_gpu(*FAKES))


def rows_of(plan: RunPlan, network: Network, *only: str) -> list[Considered]:
    return considered(plan.main, network, WITH_GPU, CARRYING, TABLE, only)


@pytest.mark.parametrize(("plan", "network"), [(patches(), MIXED), (walking(), MIXED), (in_parts(), WIDE)])
def test_every_primitive_is_listed_once_for_every_layer(plan: RunPlan, network: Network) -> None:
    rows = rows_of(plan, network)
    for index, layer in enumerate(network.layers):
        names = sorted(p.name for p in TABLE if p.kind == layer.type and p.name.startswith("cpu."))
        assert sorted(row.primitive for row in rows if row.layers == (index, index)) == names
    taken = [(row.layers, row.primitive, row.seconds) for row in rows if row.taken]
    assert taken == [(c.layers, c.primitive, c.executions * c.seconds) for c in plan.choices]
    for row in rows:
        assert (row.why == "") == row.taken
        if row.primitive == REFUSING.name:
            assert (row.seconds, row.why) == (None, "runs on Tuesdays")
    assert json.loads(json.dumps([row.as_json() for row in rows]))[0]["layers"] == [0, 0]


@pytest.mark.parametrize(("plan", "network"), [(patches(), MIXED), (walking(), MIXED), (in_parts(), WIDE)])
def test_chosen_primitive_is_listed_with_the_plans_seconds(plan: RunPlan, network: Network) -> None:
    """A primitive in another layer's place has the seconds of a plan with nothing but it."""
    asked = ("cpu.conv.slow", "cpu.conv.over")
    for name in asked:
        whole = planned(
            network,
            plan.output,
            AROUND + 2**24,
            patch=plan.patch_out,
            only=[name],
            columns=plan.main.streams,
            depth_first=max(plan.main.sub_batches) > 1,
        )
        if (whole.main.sub_batches, whole.main.axis, whole.main.column_planes) != (
            plan.main.sub_batches,
            plan.main.axis,
            plan.main.column_planes,
        ):
            continue
        seconds = {c.layers: c.executions * c.seconds for c in whole.choices if c.primitive == name}
        rows = [row for row in rows_of(plan, network) if row.primitive == name and row.layers in seconds]
        assert rows
        for row in rows:
            assert row.seconds == pytest.approx(seconds[row.layers], rel=1e-12)


def test_primitive_without_room_names_the_missing_bytes() -> None:
    """It fits with that many bytes more, and not with half of them."""
    plan = planned(WIDE, (30, 30, 30), AROUND + 2**21, columns=False, depth_first=False)
    least = plan.memory.peak
    lost = [row for row in rows_of_within(plan, least) if "does not fit" in row.why]
    assert {(2, 2), (3, 3)} <= {row.layers for row in lost if row.primitive == HUNGRY.name}
    for row in lost:
        match = re.fullmatch(r"\S+ times as long, and does not fit: (\S+) (B|KiB|MiB) more", row.why)
        assert match is not None
        more = float(match[1]) * {"B": 1, "KiB": 2**10, "MiB": 2**20}[match[2]]
        for share, fits in ((0.5, False), (1.02, True)):
            (now,) = [r for r in rows_of_within(plan, least + int(share * more)) if same(r, row)]
            assert ("does not fit" not in now.why) == fits


def rows_of_within(plan: RunPlan, ram_bytes: int) -> list[Considered]:
    return rows_of(changed(plan, limits=replace(plan.limits, ram_bytes=ram_bytes)), WIDE)


def same(one: Considered, other: Considered) -> bool:
    return (one.layers, one.primitive) == (other.layers, other.primitive)


def test_constraints_of_the_request_are_given_as_reason() -> None:
    plan = planned(MIXED, (20, 11, 8), AROUND + 2**19, columns=False, only=["cpu.conv.slow"])
    why = {row.primitive: row.why for row in rows_of(plan, MIXED, "cpu.conv.slow") if row.layers == (4, 4)}
    assert why["cpu.conv.fast"] == "another one is asked for"


def printed(rows: list[Considered], network: Network, width: int) -> list[str]:
    stream = io.StringIO()
    Console(width=width, file=stream).print(why_table(rows, network), crop=False)
    return [line.rstrip() for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 120, 200])
def test_names_and_reasons_are_printed_whole_at_any_width(width: int) -> None:
    reason = "takes up to 4 input maps and kernels of at most 64 taps, not 1000: see cpu.conv.slow, which takes all"
    rows = [replace(row, why=row.why and reason) for row in rows_of(walking(), MIXED)]
    rows = [replace(row, primitive=f"{row.primitive}_of_a_longer_name") for row in rows]
    lines = printed(rows, MIXED, width)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    found = [word for line in lines for word in line.split()]
    assert [word for word in found if word.endswith("_of_a_longer_name")] == [row.primitive for row in rows]
    broken = set(found) - set(" ".join((reason, *map(str, MIXED.layers))).split())
    assert not {word for word in broken if word.startswith(("kern", "tap", "maps", "inp"))}
    if width < 120:
        at = next(i for i, row in enumerate(rows) if row.why)
        start = next(i for i, line in enumerate(lines) if line.split()[:1] == [rows[at].primitive])
        assert " ".join(" ".join(lines[start + 1 : start + 3]).split()) == reason
