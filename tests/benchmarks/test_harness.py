"""All benchmarks share the schema of results, statistics, rounds, and child processes with their limits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness import against, inputs, peers
from benchmarks.harness.isolate import Child, run_child
from benchmarks.harness.results import Result, Row, current, ratio_of, read
from benchmarks.harness.timing import Budget, Entry, Rotation, interleave

CHILD = """
import os, time
import numpy as np
from pathlib import Path
import znnpy

calls = 0

def answer(request):
    global calls
    calls += 1
    print("libraries may print")
    time.sleep(request.get("sleep", 0))
    if size := request.get("touch"):
        np.ones(size, np.uint8)
    if request.get("die"):
        os._exit(7)
    yield {"calls": calls, "znnpy": str(Path(znnpy.__file__).parents[1])}
    if request.get("fail"):
        raise RuntimeError("asked to fail")
    yield {"calls": calls, "last": True}
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a function that answers in children."""
    (tmp_path / "child_of_tests.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "child_of_tests:answer"


class ListedClock:
    """Gives listed seconds, and notes who was timed."""

    def __init__(self, seconds: list[float], log: list[str], name: str) -> None:
        self._seconds, self._log, self._name = seconds, log, name

    def seconds(self, run: object, repeats: int = 1) -> float:
        self._log.append(self._name)
        return self._seconds.pop(0)


def result_of(*rows: Row) -> Result:
    return Result(
        "layers", "here", {"processor": "a", "cores": 2, "date": "2026-01-02T00:00", "commit": "abc"}, list(rows)
    )


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    row = Row("layers", "k = 3", "cpu.conv.direct", "ns/voxel", (2.0, 1.0, 4.0), facts={"measured": [1, 2, 3]})
    failed = Row("layers", "k = 3", "cpu.conv.first", "ns/voxel", failure="no memory")
    result = result_of(row, failed)
    path = result.write(tmp_path / "layers-here.json")
    assert read(path) == result
    assert current(tmp_path) == {"layers": [result]}
    assert (row.median, row.spread) == (2.0, 0.75)
    assert list(result.cases("layers")) == [("k = 3", [row, failed])]


def test_a_newer_row_replaces_an_older_one() -> None:
    result = result_of(Row("layers", "k", "a", "s", (1.0,)), Row("layers", "k", "b", "s", (2.0,)))
    result.add([Row("layers", "k", "a", "s", (3.0,))])
    assert [(row.subject, row.values) for row in result.rows] == [("b", (2.0,)), ("a", (3.0,))]


@pytest.mark.parametrize(("values", "failure"), [((), None), ((1.0,), "why")])
def test_a_row_has_values_or_a_failure(values: tuple[float, ...], failure: str | None) -> None:
    with pytest.raises(ValueError, match="values or a failure"):
        Row("layers", "k", "a", "s", values, failure)


@pytest.mark.parametrize(
    "change", [{"schema": 0}, {"rows": [{"group": "layers"}]}, {"machine": "there"}, {"unknown": 1}]
)
def test_a_file_that_does_not_fit_the_schema_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    path = result_of(Row("layers", "k", "a", "s", (1.0,))).write(tmp_path / "layers-here.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=r"layers-here\.json"):
        read(path)


def test_numbers_that_are_none_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        result_of(Row("layers", "k", "a", "s", (float("nan"),))).write(tmp_path / "layers-here.json")
    assert not (tmp_path / "layers-here.json").exists()


def test_a_ratio_is_clear_when_all_rounds_agree() -> None:
    ratio = ratio_of([2.0, 4.0, 6.0], [1.0, 2.0, 2.0])
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 3.0)
    assert ratio.is_clear
    assert not ratio_of([1.0, 3.0], [2.0, 2.0]).is_clear
    with pytest.raises(ValueError, match="both sides"):
        ratio_of([], [1.0])


def test_rounds_alternate_and_end_with_the_budget() -> None:
    log: list[str] = []
    entries = [Entry(name, int, ListedClock([1.0] * 9, log, name)) for name in "ab"]
    interleave(entries, 3, Budget(10))
    assert log == ["a", "b", *"ab", *"ba", *"ab"], "once to calibrate, then rounds"
    assert [len(entry.seconds) for entry in entries] == [3, 3]
    late = [Entry("a", int, ListedClock([1.0] * 9, log, "a"))]
    interleave(late, 3, Budget(0))
    assert len(late[0].seconds) == 1, "one round at least"


def test_short_work_is_repeated() -> None:
    entry = Entry("a", int, ListedClock([1e-3, 1e-3], [], "a"))
    interleave([entry], 1, Budget(1))
    assert entry.repeats == 4


def test_inputs_that_take_turns_are_larger_than_the_cache() -> None:
    assert [Rotation.count(nbytes, 50) for nbytes in (10, 40, 100, 1000)] == [8, 4, 1, 1]
    turn = Rotation("abc")
    assert [turn() for _ in range(4)] == ["b", "c", "a", "b"]


def test_a_child_answers_many_requests(child: str, repository: Path) -> None:
    with Child(child) as asked:
        first, second = asked.ask({}, 60), asked.ask({}, 60)
    assert first.failure is second.failure is None
    assert first.answers[0] == {"calls": 1, "znnpy": str(repository)}
    assert second.answer == {"calls": 2, "last": True}


def test_a_child_takes_znnpy_from_another_tree(child: str, repository: Path, tmp_path: Path) -> None:
    (tmp_path / "tree" / "znnpy").mkdir(parents=True)
    (tmp_path / "tree" / "znnpy" / "__init__.py").touch()
    assert run_child(child, {}, seconds=60, source=tmp_path / "tree").answers[0]["znnpy"] == str(tmp_path / "tree")


def test_answers_before_a_failure_count(child: str) -> None:
    outcome = run_child(child, {"fail": True}, seconds=60)
    assert outcome.failure == "RuntimeError: asked to fail"
    assert len(outcome.answers) == 1


def test_a_child_that_is_late_is_killed(child: str) -> None:
    with Child(child) as asked:
        assert asked.ask({"sleep": 100}, 0.5).failure == "not done after 0 s"
        assert asked.ask({}, 60).failure == "not done after 0 s", "it has gone"


def test_a_child_that_takes_too_much_memory_fails(child: str) -> None:
    outcome = run_child(child, {"touch": 2**31}, seconds=60, ram_bytes=2**30)
    assert outcome.failure is not None
    assert outcome.failure.startswith("out of memory within 1.0 GiB")
    assert run_child(child, {"touch": 2**20}, seconds=60, ram_bytes=2**30).failure is None


def test_a_child_that_dies_is_told(child: str) -> None:
    assert run_child(child, {"die": True}, seconds=60).failure == "exit code 7: libraries may print"


@pytest.mark.parametrize("name", ["n337", "n537", "n726", "n926"])
def test_networks_are_those_that_ship(name: str, tmp_path: Path) -> None:
    from znnpy.network_files import read_network

    ours = read_network(inputs.network_file(tmp_path, name)).network
    shipped = read_network(name).network
    assert [str(layer) for layer in ours.layers[:-1]] == [str(layer) for layer in shipped.layers[:-1]]
    assert str(ours.layers[-1]) == str(shipped.layers[-1]).replace("relu", "none"), "all zeros would be hard to compare"
    assert {inputs.field_of_view(name)} == set(shipped.field_of_view)
    assert {inputs.period(name)} == set(shipped.period)


@pytest.mark.parametrize("channels", [1, 2])
def test_a_small_volume_of_noise_is_the_corner_of_a_large_one(channels: int) -> None:
    small, large = inputs.noise((3, 4, 5), channels), inputs.noise((260, 6, 255), channels)
    assert small.dtype == np.uint8
    np.testing.assert_array_equal(small, large[..., :3, :4, :5])
    assert len(np.unique(small.reshape(-1, 5), axis=0)) == small.size // 5, "rows repeat"


def test_the_definition_is_what_znnpy_computes(tmp_path: Path) -> None:
    import znnpy

    path = inputs.network_file(tmp_path, "tiny")
    raw = inputs.noise((8, 10, 12))
    exact = peers.definition(tmp_path, "tiny", raw)
    most, rms = peers.difference(exact, znnpy.load_network(path)(raw, device="cpu"))
    assert 0 < rms <= most < 1e-5
    assert exact.std() > 0.1
    off = exact.copy()
    off[0, 0, 0, 0] = np.nan
    assert np.isnan(peers.difference(exact, off)).all()


def test_definitions_by_taps_and_by_transforms_agree() -> None:
    rng = np.random.default_rng(0)
    x, w, b = rng.standard_normal((2, 3, 9, 8, 7)), rng.standard_normal((4, 3, 3, 2, 4)), rng.standard_normal(4)
    np.testing.assert_allclose(peers._by_fft(np, x, w, b), peers._by_taps(np, x, w, b), atol=1e-12)


def test_a_slower_tree_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = against._rows("k", [[1.0, 1.0], [1.1, 1.1], [1.01, 1.01], [1.1, 1.1]], None)
    assert rows[0].facts["is_slower"]
    assert "SLOWER" in capsys.readouterr().out
    within = against._rows("k", [[1.0, 1.0], [1.1, 1.1], [1.2, 1.2], [1.1, 1.1]], None)
    assert not within[0].facts["is_slower"], "theirs differs from itself by more"
    with pytest.raises(Exception, match="k is slower"):
        against.report([*rows, *within])


@pytest.mark.parametrize("alone", [pytest.param(False, marks=pytest.mark.long), True])
def test_two_trees_are_compared(alone: bool, repository: Path, tmp_path: Path) -> None:
    cases = [("tiny", against.session_request(tmp_path, "tiny", 12, device="cpu", ram="1G")),
             ("too small", against.session_request(tmp_path, "tiny", 2, device="cpu"))]  # fmt: skip
    if alone:
        cases.insert(1, ("plan", against.plan_request("fib25_boundary", 64, device="cpu", ram="1G")))
    rows = [row for of in against.compare(cases, repository, 1, Budget(5), alone=alone) for row in of]
    assert [(row.case, row.subject, len(row.values)) for row in rows] == [
        ("tiny", "ours", 2),
        ("tiny", "theirs", 2),
        *([("plan", "ours", 2), ("plan", "theirs", 2)] if alone else []),
        ("too small", "ours", 0),
    ]
    assert "ShapeError" in str(rows[-1].failure)
