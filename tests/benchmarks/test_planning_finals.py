"""Finals of benchmarks/planning.py: what each contestant runs, how often, and what is taken over from another limit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.support.benchmark_networks import NET, OUTPUT, maker_with

if TYPE_CHECKING:
    from collections.abc import Callable


def test_plans_in_the_steps_of_the_pick_run_its_part(imported: Callable[[str], Any]) -> None:
    """Even one that is predicted to be twice as fast; a plan of other steps runs what fits into the seconds."""
    runs, points, tables = (imported(f"planning_{name}") for name in ("runs", "points", "tables"))
    maker = maker_with(imported, columns=True, patch=(4, 12, 4))
    pick = maker.pick
    z, y, x = (2 * side if axis == pick.axis else side for axis, side in enumerate(pick.patch_out))
    part = z, y, x
    most = pick.for_output(part, NET, pick.memory).seconds
    point = points.Point(tables.Row("net", "1G", point_seconds=most), NET, maker.ground, pick, pick.output)
    faster = replace(pick, choices=tuple(replace(c, seconds=c.seconds / 2) for c in pick.choices))
    assert points.part_of(faster, NET, most) > part
    assert runs.part_for(point, pick) == runs.part_for(point, faster) == part
    wide, thick, patches = (
        maker.ground.plan(NET, OUTPUT, columns=columns, patch=patch)
        for columns, patch in ((True, (8, 12, 4)), (True, (4, 12, 8)), (False, (4, 12, 4)))
    )
    for other in (wide, thick, patches):
        assert runs.part_for(point, other) == points.part_of(other, NET, most) != part


def test_finals_on_a_gpu_are_five_runs_at_least(imported: Callable[[str], Any]) -> None:
    for words, finals in (("--device gpu --rounds 2", 5), ("--device gpu --rounds 7", 7), ("--rounds 2", 2)):
        assert imported("planning").arguments(words.split()).finals == finals


def test_finals_of_the_same_plans_are_taken_over(imported: Callable[[str], Any]) -> None:
    """From a limit with the same pick and the same finalists, where all of them came to their end."""
    planning, points, tables = (imported(name) for name in ("planning", "planning_points", "planning_tables"))
    maker = maker_with(imported, columns=True, patch=(4, 12, 4))
    finalists = [("random 1", maker.ground.plan(NET, OUTPUT, patch=(8, 12, 4)))]
    ran: list[str] = []

    class Runner:
        def of(self, point: Any, contest: Any, times: int) -> list[dict[str, Any]]:
            ran.append(point.row.limit)
            return [{"what": what, "failure": None, "times": times} for what, _ in contest]

    benchmark = object.__new__(planning.Benchmark)
    benchmark._options = planning.arguments(["--rounds", "6"])
    benchmark.runner, benchmark._finalists = Runner(), lambda point: finalists
    plans = [{"limits": limit, "patch_out": patch} for limit, patch in (("1G", 4), ("2G", 4), ("3G", 5), ("4G", 4))]
    rows = [tables.Row("net", str(plan["limits"]), plan=plan) for plan in plans]
    benchmark.rows = {row.limit: row for row in (tables.Row("net", "0G", failure="nothing fits"), *rows)}
    first, second, third, fourth = (points.Point(row, NET, maker.ground, maker.pick, OUTPUT) for row in rows)
    for point in (first, second, third):
        benchmark.finals(point)
    assert ran == ["1G", "3G"]
    assert [(run["what"], run["times"]) for run in rows[0].finals] == [("pick", 6), ("random 1", 6)]
    assert second.row.finals == [run | {"as_within": "1G"} for run in first.row.finals]
    finalists.append(("random 2", maker.ground.plan(NET, OUTPUT, patch=(4, 12, 8))))
    benchmark.finals(fourth)
    assert ran[2:] == ["4G"], "other finalists"
    fourth.row.finals[2]["failure"] = "out of memory"
    benchmark.finals(first)
    assert ran[3:] == ["1G"], "what failed may run within another limit"
