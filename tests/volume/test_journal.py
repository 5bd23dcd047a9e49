"""The journal: whole or torn, damaged or foreign."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from znnpy.errors import ResumeError
from znnpy.volume.journal import Journal, JournalHeader, default_output, journal_path, read_header

HEADER = JournalHeader(job={"network": "abc", "volume": {"bytes": 5}}, settings={}, plan="{}", blas="b", columns=9)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal(journal_path(tmp_path / "out.h5"))
    journal.create(HEADER)
    return journal


def test_round_trip(journal: Journal, tmp_path: Path) -> None:
    journal.append([3, 1])
    journal.append({8})
    assert Journal(journal.path).read() == (HEADER, frozenset({1, 3, 8}))
    assert read_header(tmp_path / "out.h5") == HEADER
    journal.remove()
    journal.remove()
    assert read_header(tmp_path / "out.h5") is None


@pytest.mark.parametrize("torn", [b"[4", b"[4]", b"[4, 5, 6, 7, 8, 0, 2", b"\0\0\0\0\n", b"[4, 9]\n"], ids=repr)
def test_a_torn_last_line_is_ignored_and_overwritten(journal: Journal, torn: bytes) -> None:
    journal.append([3, 1])
    with journal.path.open("ab") as file:
        file.write(torn)
    again = Journal(journal.path)
    assert again.read() == (HEADER, frozenset({1, 3}))
    again.append([5])
    assert Journal(journal.path).read() == (HEADER, frozenset({1, 3, 5}))
    assert journal.path.read_bytes().endswith(b"\n[1, 3]\n[5]\n")


def test_damage_before_the_last_line(journal: Journal) -> None:
    journal.append([3])
    with journal.path.open("ab") as file:
        file.write(b"[4, x]\n[5]\n")
    with pytest.raises(ResumeError, match=r"damaged in line 3 \(b'\[4, x\]' is no list of columns 0 to 8\).*--overwri"):
        Journal(journal.path).read()


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (b"", "0 bytes without an end of line"),
        (b'{"job": {}', "10 bytes without an end of line"),
        (b'{"job": {}, "settings": {}, "plan": "", "blas": "", "columns": -2}\n', "columns: -2"),
        (b"garbage\n", "the header: Invalid JSON.*"),
        (b'{"job": {}, "settings": {}, "plan": "", "blas": ""}\n', "columns: Field required"),
        (
            b'{"job": {}, "settings": {}, "plan": "", "blas": "", "columns": 1, "format": 7}\n',
            "format 7 instead of 1",
        ),
    ],
    ids=["empty", "torn", "no columns", "garbage", "incomplete", "other format"],
)
def test_a_damaged_header(journal: Journal, damage: bytes, why: str) -> None:
    journal.path.write_bytes(damage)
    message = rf"out\.h5\.journal is damaged in line 1 \({why}\), so what was finished is not known; start again with"
    with pytest.raises(ResumeError, match=message):
        Journal(journal.path).read()


def test_many_columns_take_a_byte_each(journal: Journal) -> None:
    count = 300_000
    journal.create(replace(HEADER, columns=count))
    for first in range(0, count, 1000):
        with journal.path.open("ab") as file:
            file.write(f"{list(range(first, first + 1000, 2))}\n".encode())
    tracemalloc.start()
    try:
        _, done = Journal(journal.path).read()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert done == frozenset(range(0, count, 2))
    assert (0 in done, 1 in done, -1 in done, count in done) == (True, False, False, False)
    assert len(done) == count // 2
    assert peak < count + 2**17


def test_loads_no_numpy() -> None:
    program = "import sys, znnpy.volume.journal; print(sorted({'numpy', 'h5py'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("network", "name"), [("n337", "em_n337.h5"), ("lab/net 2", "em_lab_net_2.h5"), ("v1.5-β", "em_v1.5-β.h5")]
)
def test_default_output_is_a_file_beside_the_volume(tmp_path: Path, network: str, name: str) -> None:
    assert default_output(tmp_path / "em.h5", network) == tmp_path / name
