"""Tables in the documents are those of the current results."""

from __future__ import annotations

from pathlib import Path

import pytest
from click import ClickException

from benchmarks.harness import markdown
from benchmarks.harness.results import CURRENT, Program, Result, Row, current
from benchmarks.tables import blocks, differing, documents, filled, index, programs

BEGIN, END = "<!-- begin table: speeds -->\n", "<!-- end table: speeds -->"
HEADER = {"processor": "a CPU", "cores": 2, "date": "2026-01-02T00:00", "commit": "abc"}


def test_documents_hold_the_current_results() -> None:
    made = blocks(current(), programs())
    wrong = [str(path) for path, _ in differing(made)]
    assert not wrong, f"run `python -m benchmarks tables --write`: {wrong}"


def test_every_result_that_is_kept_is_of_a_program() -> None:
    assert {path.name.split("-")[0] for path in CURRENT.iterdir()} <= {program.name for program in programs()}


def test_every_agreed_table_has_a_program() -> None:
    agreed = "networks-cpu networks-gpu layers-cpu layers-gpu planner-accuracy planner-time io papers modes exactness"
    assert {*agreed.split(), "benchmarks-index"} <= blocks({}, programs()).keys()


def test_without_results_every_table_says_which_command_makes_it() -> None:
    for name, text in blocks({}, programs()).items():
        assert "python -m benchmarks" in text, name


def test_a_document_that_differs_is_found_and_filled(tmp_path: Path) -> None:
    path = tmp_path / "docs" / "deep" / "performance.md"
    path.parent.mkdir(parents=True)
    path.write_text(f"before\n{BEGIN}old\n{END}\nbehind\n")
    (right,) = differing({"speeds": "new"}, tmp_path)
    assert right == (path, f"before\n{BEGIN}new\n{END}\nbehind\n")
    path.write_text(right[1])
    assert list(differing({"speeds": "new"}, tmp_path)) == []
    assert [*differing({"speeds": "newer"}, tmp_path)] != []


@pytest.mark.parametrize("text", [BEGIN, END, f"{BEGIN}{BEGIN}{END}", f"{BEGIN}<!-- end table: others -->"])
def test_marks_that_are_no_pairs_are_refused(text: str) -> None:
    with pytest.raises(ClickException, match="no pairs"):
        filled(f"{text}\n", {"speeds": "new"}, Path("README.md"))


def test_a_block_without_a_program_is_refused() -> None:
    with pytest.raises(ClickException, match="'speeds'"):
        filled(f"{BEGIN}{END}\n", {"others": ""}, Path("README.md"))


def test_the_index_names_question_command_figure_and_file() -> None:
    program = Program("io", "How fast?", "io", {}, lambda result: f"{result.rows[0].median} GB/s")
    result = Result("io", "here", HEADER, [Row("read", "c", "HDF5", "GB/s", (2.5,))])
    line = index({"io": [result]}, [program]).splitlines()[-1]
    assert line == "| How fast? | `python -m benchmarks io` | 2.5 GB/s | [here](results/current/io-here.json) |"


def test_documents_of_the_project_are_found(repository: Path) -> None:
    assert {repository / "README.md", repository / "benchmarks" / "README.md"} <= set(documents())


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01234, "0.0123"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1,230"), (0, "0"), (float("nan"), "-"),
     (99.96, "100"), (1e6, "1,000,000"), (0.5, "0.5")],
)  # fmt: skip
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert markdown.number(value).rstrip(".") == text


def test_speeds_have_a_unit() -> None:
    assert [markdown.speed(v) for v in (12.3, 4567, 8.9e6, 2e9)] == ["12.3", "4.57 k", "8.90 M", "2.00 G"]
