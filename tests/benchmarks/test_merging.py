"""A run of some groups of a benchmark keeps what the result file holds of the others."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.merging import merge
from benchmarks.harness.results import Result, Row


def result_of(date: str, *rows: Row) -> Result:
    return Result("io", "m", {"date": date, "commit": "c"}, list(rows))


def test_groups_that_are_not_measured_again_stay(tmp_path: Path) -> None:
    path = tmp_path / "io-m.json"
    read, write = Row("read", "c", "s", "GB/s", (1.0,)), Row("write", "c", "s", "GB/s", (2.0,))
    for date in ("first", "second"):
        before = result_of(date, read, write)
        merge(before, path, ["read", "write"])
        before.left_out += ["read: no time", "write: no time"]
        before.write(path)
    now = result_of("third")
    merge(now, path, ["read"])
    assert now.rows == [write]
    assert now.left_out == ["write: no time"]
    assert now.header["date"] == "third"
    assert [one["date"] for one in now.header["joined"]] == ["first", "second"]


def test_without_a_file_nothing_is_joined(tmp_path: Path) -> None:
    now = result_of("now")
    merge(now, tmp_path / "io-m.json", ["read"])
    assert now.rows == []
    assert "joined" not in now.header
