"""The journal: whole or torn, damaged, or a file that no run wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Iterator, Set
from dataclasses import replace
from pathlib import Path

import pytest

from znnpy.errors import OutputError, ResumeError
from znnpy.volume.journal import Journal, JournalHeader, default_output, journal_path, read_header
from znnpy.volume.location import Location

HEADER = JournalHeader(job={"network": "abc", "volume": {"bytes": 5}}, settings={}, plan="{}", blas="b", columns=9)


RUN = "0123456789abcdef"


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(journal_path(tmp_path / "out.h5"))
    journal.create(RUN, HEADER)
    yield journal
    journal.close()


def opened(path: Path) -> Journal:
    journal = Journal(path)
    assert journal.open()
    return journal


def read(path: Path) -> tuple[JournalHeader, Set[int]] | None:
    journal = opened(path)
    try:
        return journal.read()
    finally:
        journal.close()


def record(columns: bytes) -> bytes:
    return b"[%s] %08x\n" % (columns, zlib.crc32(columns))


def test_written_journal_is_read_back(journal: Journal, tmp_path: Path) -> None:
    journal.append([3, 1])
    journal.append({8})
    assert read(journal.path) == (HEADER, frozenset({1, 3, 8}))
    assert read_header(tmp_path / "out.h5") == HEADER
    journal.remove()
    journal.remove()
    assert read_header(tmp_path / "out.h5") is None
    assert not Journal(journal.path).open()


@pytest.mark.parametrize("replaces", [True, False])
def test_first_line_names_the_run(tmp_path: Path, replaces: bool) -> None:
    journal = Journal(tmp_path / "out.h5.journal")
    journal.create(RUN, HEADER, replaces=replaces)
    journal.close()
    again = opened(journal.path)
    assert (again.run, again.replaces) == (RUN, replaces)
    again.close()
    with pytest.raises(FileExistsError):
        journal.create(RUN, HEADER)


@pytest.mark.parametrize(
    "torn",
    [b"[4", b"[4]", b"[4, 5, 6, 7, 8, 0, 2", b"\0\0\0\0\n", b"[4] 00000000\n", record(b"4, 9"), record(b"4")[:-1]],
    ids=repr,
)
def test_torn_last_line_is_ignored_and_overwritten(journal: Journal, torn: bytes) -> None:
    journal.append([3, 1])
    with journal.path.open("ab") as file:
        file.write(torn)
    again = opened(journal.path)
    assert again.read() == (HEADER, frozenset({1, 3}))
    again.append([5])
    again.close()
    assert read(journal.path) == (HEADER, frozenset({1, 3, 5}))
    assert journal.path.read_bytes().endswith(b"\n" + record(b"1, 3") + record(b"5"))


@pytest.mark.parametrize("kept", range(0, 250, 7))
def test_journal_killed_during_its_creation_counts_as_not_begun(journal: Journal, kept: int) -> None:
    """A journal cut within its first two lines counts as our own, of a run that had not begun."""
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole[: min(kept, len(whole) - 1)])
    assert read(journal.path) is None
    assert read_header(journal.path.with_suffix("")) is None


@pytest.mark.parametrize(
    ("damage", "shown"),
    [
        (b"[4, x]", r"\[4, x\]"),
        (b"[" * 100_000, r"\[{17,18} \.\.\. \[+"),
        (b"[4] 00000000", r"\[4\] 00000000"),
        (b"\x1b]0;title\x07", r"\\x1b\]0;title\\x07"),
        (b"9" * 5000, r"9+ \.\.\. 9+"),
    ],
    ids=["no number", "brackets", "checksum", "control characters", "long"],
)
def test_damage_before_the_last_line_is_refused(journal: Journal, damage: bytes, shown: str) -> None:
    journal.append([3])
    with journal.path.open("ab") as file:
        file.write(damage + b"\n" + record(b"5"))
    message = (
        rf"damaged in line 4 \('{shown}' is not a record of columns 0 to 8\), so .*; start again with overwrite=True$"
    )
    with pytest.raises(ResumeError, match=message) as caught:
        read(journal.path)
    assert len(str(caught.value)) < 400


def test_line_of_any_length_takes_bounded_memory(journal: Journal) -> None:
    with journal.path.open("r+b") as file:
        file.seek(0, 2)
        file.truncate(2**31)  # a line of zeros
    tracemalloc.start()
    try:
        with pytest.raises(ResumeError, match="damaged in line 3"):
            read(journal.path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100 * 2**20


@pytest.mark.parametrize("content", [b"notes of mine\n", b"znnpy journal 1 0123456789abcdef new\n", b"{}", b"\0" * 99])
def test_foreign_file_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out.h5.journal"
    path.write_bytes(content)
    for look in (Journal(path).open, lambda: read_header(tmp_path / "out.h5")):
        with pytest.raises(OutputError, match=r"journal is not the journal of a run .* and is left as it is; "):
            look()
    with pytest.raises(FileExistsError):
        Journal(path).create(RUN, HEADER)
    assert path.read_bytes() == content


@pytest.mark.parametrize("kind", ["symbolic", "hard", "folder", "pipe"])
def test_link_as_journal_is_not_followed(journal: Journal, tmp_path: Path, kind: str) -> None:
    """A link is not followed: what it names is not ours, even where it looks like a journal."""
    path = tmp_path / "other.h5.journal"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "hard":
        path.hardlink_to(journal.path)
    else:
        path.symlink_to(journal.path)
    before = journal.path.read_bytes()
    with pytest.raises(OutputError, match=r"is not the journal of a run .* and is left as it is; "):
        Journal(path).open()
    assert os.path.lexists(path)
    assert journal.path.read_bytes() == before


def test_only_the_open_file_is_removed(journal: Journal) -> None:
    assert journal.is_still_there()
    journal.path.rename(journal.path.with_name("moved"))
    journal.path.write_text("of another run")
    assert not journal.is_still_there()
    journal.remove()
    assert journal.path.read_text() == "of another run"


GOOD: dict[str, object] = {"job": {}, "settings": {}, "plan": "", "blas": "", "columns": 9}


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (GOOD | {"columns": -2}, "columns: -2"),
        (GOOD | {"columns": 10**13}, "columns: 10000000000000"),
        (GOOD | {"columns": "9"}, "columns: Input should be a valid integer"),
        (GOOD | {"settings": {"only": 3}}, "settings.only: Input should be a valid array"),
        (GOOD | {"settings": {"odd": 3}}, "settings.odd: Extra inputs are not permitted"),
        (GOOD | {"job": 1}, "job: Input should be an object"),
        ({"job": {}, "settings": {}, "plan": "", "blas": ""}, "columns: Field required"),
        (b'{"job": ' + b"[" * 100_000, "the header: Invalid JSON: recursion limit .*"),
        (b"garbage", "the header: Invalid JSON.*"),
    ],
    ids=["negative", "many columns", "text", "settings", "odd", "job", "incomplete", "brackets", "garbage"],
)
def test_damaged_header_is_refused(journal: Journal, damage: bytes | dict[str, object], why: str) -> None:
    first = journal.path.read_bytes().splitlines(keepends=True)[0]
    line = damage if isinstance(damage, bytes) else json.dumps(damage).encode()
    journal.path.write_bytes(first + line + b"\n")
    message = rf"out\.h5\.journal is damaged in line 2 \({why}\), so it is not known what is finished; start again with"
    with pytest.raises(ResumeError, match=message) as caught:
        read(journal.path)
    assert len(str(caught.value)) < 400


def test_many_columns_take_one_byte_each(journal: Journal) -> None:
    count = 300_000
    journal.remove()
    journal.create(RUN, replace(HEADER, columns=count))
    for first in range(0, count, 1000):
        journal.append(range(first, first + 1000, 2))
    tracemalloc.start()
    try:
        found = read(journal.path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found is not None
    done = found[1]
    assert done == frozenset(range(0, count, 2))
    assert (0 in done, 1 in done, -1 in done, count in done) == (True, False, False, False)
    assert len(done) == count // 2
    assert peak < count + 2**17


def test_journal_module_loads_no_numpy() -> None:
    program = "import sys, znnpy.volume.journal; print(sorted({'numpy', 'h5py'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("network", "name"), [("n337", "em_n337.h5"), ("lab/net 2", "em_lab_net_2.h5"), ("v1.5-β", "em_v1.5-β.h5")]
)
def test_default_output_lies_beside_the_volume(tmp_path: Path, network: str, name: str) -> None:
    assert default_output(Location(str(tmp_path / "em.h5")), network) == tmp_path / name


def test_default_output_of_a_zarr_volume_is_zarr(tmp_path: Path) -> None:
    assert default_output(Location(str(tmp_path / "em.zarr")), "n337") == tmp_path / "em_n337.zarr"
    assert default_output(Location(str(tmp_path / "em.npy")), "n337") == tmp_path / "em_n337.h5"
