"""A run of some groups of a benchmark keeps what the result file holds of the others."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.markdown import source_of
from benchmarks.harness.merging import merge
from benchmarks.harness.results import Result, Row


def result_of(date: str, *rows: Row) -> Result:
    header = {"processor": "p", "cores": 2, "date": date, "commit": "c", "load": 3.0 if date == "second" else 0.0}
    return Result("io", "m", header, list(rows))


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
    assert now.header["earlier"] == {"write": {"date": "second", "commit": "c", "load": 3.0}}
    now.add([read])
    assert source_of(now, ["read"]).startswith("*p, 2 cores; third, commit c; ")
    assert source_of(now, ["write"]).startswith("*p, 2 cores; second, commit c, while other programs ran (load 3.0); ")
    assert {"third", "second"} <= set(source_of(now).replace(",", "").split())
    now.write(path)
    last = result_of("last")
    merge(last, path, ["read"])
    assert last.header["earlier"]["write"]["date"] == "second", "not that of the file"


def test_without_a_file_nothing_is_kept(tmp_path: Path) -> None:
    now = result_of("now")
    merge(now, tmp_path / "io-m.json", ["read"])
    assert now.rows == []
    assert "earlier" not in now.header
