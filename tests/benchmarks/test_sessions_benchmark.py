"""The benchmark of sessions measures what it says, and its tables show it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import sessions
from benchmarks.harness.machine import machine_name
from benchmarks.harness.results import Result, Row, read


def test_quick_run_writes_all_rows(tmp_path: Path) -> None:
    out = tmp_path / f"sessions-{machine_name()}.json"
    done = CliRunner().invoke(sessions.command, ["--quick", "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0
    result = read(out)
    ways = [sessions.COMPUTING, sessions.SESSION, sessions.ANY_SHAPE, sessions.CALL]
    rows = result.of_group(sessions.NETWORKS[0])
    assert [row.subject for row in rows] == ways
    assert all(row.unit == "ms/array" and row.median > 0 for row in rows)
    (stream,) = result.of_group("stream")
    assert stream.median <= stream.facts["promised"] + 2 * stream.facts["block"]
    assert "times the computing" in done.stdout


def row(subject: str, *values: float) -> Row:
    return Row("fib25_boundary", "2 of 40^3", subject, "ms/array", values, None, {"core_ms": [2 * v for v in values]})


def test_tables_compare_with_the_computing() -> None:
    stream = Row(
        "stream", "fib25_boundary 48^3", "peak", "bytes", (2.0**27,), None, {"promised": 2**26, "block": 2**25}
    )
    failed = Row("stream", "fib25_unet 48^3", "peak", "bytes", (), "killed")
    rows = [row("computing", 10.0, 12.0), row("session", 11.0, 12.0), row("call", 110.0, 110.0), stream, failed]
    result = Result("sessions", "here", {}, rows)
    told = sessions._sessions(result)
    assert "| fib25_boundary | 2 of 40^3 | session | 11.5 | 1.05 (1.00 to 1.10) | 23.0 | 1.05 |" in told
    assert "| computing | 11.0 |  | 22.0 |  |" in told
    told = sessions._streams(result)
    assert "| fib25_boundary 48^3 | 64.0 | 32.0 | 128.0 | 128.0 |" in told
    assert "| fib25_unet 48^3 | killed |  |  |  |" in told
    assert sessions.headline(result) == "fib25_boundary, 2 of 40^3: 1.05 times the computing"


def test_computing_runs_every_step_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    import znnpy
    from znnpy.run.session import Session

    steps: list[bool] = []
    submit: Callable[..., Any] = Session.submit

    def counting(session: Session, raw: Any, out: Any, **more: Any) -> Any:
        steps.append(more["begins"])
        return submit(session, raw, out, **more)

    monkeypatch.setattr(Session, "submit", counting)
    net = znnpy.load_network("fib25_boundary")
    plan = znnpy.plan(net, shape=(48, 48, 48), patch=(4, 12, 12), cover="columns", threads=1)
    with ExitStack() as stack:
        sessions.steps_of(net, plan, 2, stack)()
    columns = plan.work_items(net.network)
    assert len(steps) == 2 * sum(len(column.steps) for column in columns)
    assert sum(steps) == 2 * len(columns)
