"""FFTW's wisdom: measured where a run is long enough, kept, never trusted blindly, and the same when a run goes on."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyfftw
import pytest

from tests.support.cli import Place
from znnpy.errors import ResumeError
from znnpy.inference import infer
from znnpy.kernels.cpu import fft
from znnpy.kernels.cpu.fft import Transform, Wisdom, like
from znnpy.machine import this_machine
from znnpy.measure import fftw_wisdom as kept
from znnpy.measure.fftw_wisdom import learning_seconds, wisdom_kept
from znnpy.network import Conv, Network
from znnpy.report.run_report import Report
from znnpy.run.pipeline import Event

MACHINE = this_machine()
LONG = 3600.0  # seconds: such a run may learn
SIDE = 100  # of lines that FFTW has no single codelet for: measured, their bytes are others than estimated


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "znnpy"


def columns(size: int = SIDE) -> np.ndarray:
    return like((size, 24), (24 * 8, 8), np.complex64)


def transform(size: int = SIDE) -> Transform:
    """In place, along the first axis."""
    return Transform(columns(size), columns(size), (0,))


def only_file(cache: Path) -> Path:
    (path,) = cache.iterdir()
    return path


def learn() -> Wisdom:
    """Keep wisdom during a long run."""
    with wisdom_kept(MACHINE, LONG) as wisdom:
        transform()
    return wisdom


# How long


def test_rigor_follows_from_the_length_of_the_run() -> None:
    assert [learning_seconds(s) for s in (0, 1, 9.9, 50, 1e4, 1e9)] == [0, 0, 0, 1, 3, 3]


def test_a_short_run_measures_nothing_and_leaves_no_file(cache: Path) -> None:
    with wisdom_kept(MACHINE, 1.0) as wisdom:
        transform()
    assert not wisdom.used
    assert not cache.exists()


def test_tiles_are_never_measured(cache: Path) -> None:
    """Every line of theirs is straight-line code already."""
    with wisdom_kept(MACHINE, LONG) as wisdom:
        for side in (8, 12, 16, 20, 32):
            transform(side)
    assert wisdom.seconds == learning_seconds(LONG)
    assert not wisdom.used
    assert not cache.exists()


def test_no_more_seconds_are_spent_than_allowed() -> None:
    """Sixty transforms would take ten."""
    start = time.perf_counter()
    with Wisdom(seconds=0.5) as wisdom:
        for size in range(90, 150):
            transform(size)
    assert time.perf_counter() - start < 1.0
    assert wisdom.used
    assert wisdom.seconds <= 0


def test_workers_have_the_same_transform_when_measuring_was_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def slow(problem: Any, limit: float) -> None:
        calls.append(problem)
        time.sleep(limit)

    monkeypatch.setattr(fft._Problem, "measure", slow)
    monkeypatch.setattr(fft, "TRANSFORM_SECONDS", 0.01)
    with Wisdom(seconds=1.0) as wisdom:
        transform()
        transform()
    assert len(calls) == 1
    assert not wisdom.used


# Kept


def test_a_second_run_knows_what_the_first_has_learned(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = learn()
    assert first.learned == first.used != {}
    assert first.sentences == []
    monkeypatch.setattr(fft._Problem, "measure", None)
    second = learn()
    assert second.used == first.used
    assert not second.learned
    with wisdom_kept(MACHINE, 1.0) as short:
        transform()
    assert short.used == first.used
    assert only_file(cache).name.startswith("fftw-")


def test_what_is_known_of_other_transforms_stays() -> None:
    learn()
    with wisdom_kept(MACHINE, LONG) as wisdom:
        transform(80)
    assert len(wisdom.known) == 1
    with wisdom_kept(MACHINE, LONG) as wisdom:
        pass
    assert len(wisdom.known) == 2


def test_a_full_file_forgets_the_oldest(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learn()
    monkeypatch.setattr(kept, "MOST_BYTES", only_file(cache).stat().st_size + 100)
    with wisdom_kept(MACHINE, LONG) as wisdom:
        transform(80)
    with wisdom_kept(MACHINE, LONG) as after:
        pass
    assert after.known == wisdom.used
    assert after.sentences == []


def flip(text: str) -> str:
    """One digit of a checksum within a transform's text."""
    place = text.rindex("#x") + 2
    return text[:place] + ("0" if text[place] != "0" else "1") + text[place + 1 :]


def other(name: str) -> Any:
    def change(text: str) -> str:
        content = json.loads(text)
        content["facts"][name] = "Z80"
        return json.dumps(content)

    return change


def nonsense(text: str) -> str:
    """Return wisdom that FFTW cannot read, under a checksum that is right, as if somebody wrote it on purpose."""
    content = json.loads(text)
    transforms = dict.fromkeys(content["transforms"], "(fftw-9 what)")
    return json.dumps({**content, "transforms": transforms, "sha256": kept._digest(transforms)})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[: len(text) // 2], "is damaged"),
        (lambda text: "", "is damaged"),
        (lambda text: "[1, 2]", "is damaged"),
        (flip, r"is damaged \(its checksum differs\)"),
        (lambda text: text + " " * 2**19, "is longer than"),
        (other("fftw"), "is of another machine .fftw 'Z80', here 'fftw-3"),
        (other("processor"), "is of another machine .processor 'Z80'"),
        (nonsense, "FFTW makes nothing of 1 transforms"),
    ],
    ids=["half", "empty", "list", "digit", "long", "other FFTW", "other processor", "nonsense"],
)
def test_what_cannot_be_trusted_is_said_and_written_anew(cache: Path, damage: Any, said: str) -> None:
    learn()
    path = only_file(cache)
    path.write_text(damage(path.read_text()))
    second = learn()
    (sentence,) = second.sentences
    assert re.search(said, sentence), sentence
    assert sentence.endswith("it was not used and is written anew")
    assert second.learned, "what was damaged was used"
    third = learn()
    assert third.sentences == []
    assert not third.learned


@pytest.mark.parametrize("damage", [flip, nonsense])
def test_a_short_run_puts_a_damaged_file_right(cache: Path, damage: Any) -> None:
    learn()
    path = only_file(cache)
    path.write_text(damage(path.read_text()))
    for expected in (1, 0):
        with wisdom_kept(MACHINE, 1.0) as wisdom:
            transform()
        assert len(wisdom.sentences) == expected


def test_a_pipe_is_no_cache(cache: Path) -> None:
    """Opening a pipe would wait for another process to write to it."""
    learn()
    path = only_file(cache)
    path.unlink()
    os.mkfifo(path)
    with wisdom_kept(MACHINE, 1.0) as wisdom:
        transform()
    assert "cannot be read (it is a pipe, a socket or a device" in wisdom.sentences[0]


def test_a_cache_that_cannot_be_written_is_a_sentence(cache: Path) -> None:
    cache.parent.write_text("a file where the folder should be")
    wisdom = learn()
    assert wisdom.used
    assert "FFTW's wisdom was not kept" in wisdom.sentences[-1]


def test_the_file_appears_whole_or_not_at_all(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learn()
    before = only_file(cache).read_bytes()

    def fails(self: Path, target: Path) -> None:
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fails)
        with wisdom_kept(MACHINE, LONG) as wisdom:
            transform(80)
    assert "no room" in wisdom.sentences[-1]
    assert only_file(cache).read_bytes() == before


# Results are equal to the last byte


def results() -> list[bytes]:
    """Return the results of transforms of several sizes; for one alone the measured plan may be the estimated one."""
    found = []
    for size in (SIDE, 80, 96, 100, 120, 128, 144, 150):
        x = np.random.default_rng(3).standard_normal((size, 48), np.float32)
        store = pyfftw.empty_aligned((size, 24), "complex64", n=64)
        store.view(np.float32)[...] = x
        transform(size)(store, store)
        exact = np.fft.fft(x.view(np.complex64).astype(np.complex128), axis=0)
        assert np.abs(store - exact).max() <= 1e-6 * np.abs(exact).max()
        found.append(bytes(store.tobytes()))
    return found


@pytest.mark.slow
def test_wisdom_is_used_and_the_same_in_another_process() -> None:
    with Wisdom(seconds=10.0) as wisdom:
        here = results()
    assert here != results(), "every measured transform is the estimated one"
    with Wisdom(wisdom.used):
        assert results() == here
    program = (
        "import sys, json, hashlib\n"
        "from tests.measure import test_fftw_wisdom as t\n"
        "with t.Wisdom(json.loads(sys.argv[1])):\n"
        "    print(hashlib.sha256(b''.join(t.results())).hexdigest())\n"
    )
    command = [sys.executable, "-c", program, json.dumps(wisdom.used)]
    repository = Path(__file__).parents[2]
    there = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True).stdout.strip()
    assert there == hashlib.sha256(b"".join(here)).hexdigest()


def test_a_process_keeps_its_own_wisdom() -> None:
    store = pyfftw.empty_aligned((40, 5), "complex64", n=64)
    pyfftw.FFTW(store, store, axes=(0,), flags=("FFTW_MEASURE",))
    before = sorted(b"".join(pyfftw.export_wisdom()).split(b"\n"))
    with Wisdom(seconds=1.0) as wisdom:
        transform()
    assert wisdom.used
    assert sorted(b"".join(pyfftw.export_wisdom()).split(b"\n")) == before


@pytest.fixture
def wide(tmp_path: Path) -> Place:
    """Patches of 100 voxels along y and x, transformed whole."""
    (tmp_path / "run").mkdir()
    place = Place.furnish(tmp_path / "run", Network("wide", 1, (Conv((3, 3, 3), 2, "relu"),), None))
    place.write_volume(np.random.default_rng(2).integers(0, 256, (20, 100, 590), np.uint8))
    return place


def go(place: Place, **words: Any) -> Report:
    fixed: dict[str, Any] = {"patch": (18, 98, 98), "threads": 2, "only": "cpu.conv.fft_data"}
    return infer(place.volume, place.folder / "net.yaml", out=place.out, **fixed, **words)


def stop_half_way(event: Event) -> None:
    if 0 < event.columns_done < event.columns:
        raise KeyboardInterrupt


@pytest.mark.slow
def test_a_run_that_goes_on_has_the_transforms_it_began_with(
    wide: Place, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(wide)
    estimated = wide.prediction()
    monkeypatch.setattr(kept, "SHORT_SECONDS", 0.0)
    monkeypatch.setattr(kept, "LEARNING_PART", 1e9)
    go(wide, overwrite=True)
    measured = wide.prediction()
    assert (estimated != measured).any(), "the measured transforms are the estimated ones"
    with pytest.raises(KeyboardInterrupt):
        go(wide, overwrite=True, progress=stop_half_way)
    only_file(cache).unlink()
    monkeypatch.setattr(fft._Problem, "measure", None)
    report = go(wide, resume=True)
    assert 0 < report.computed < report.voxels
    np.testing.assert_array_equal(wide.prediction(), measured)


def test_damaged_wisdom_in_a_journal_ends_the_run(wide: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "SHORT_SECONDS", 0.0)
    monkeypatch.setattr(kept, "LEARNING_PART", 1e9)
    with pytest.raises(KeyboardInterrupt):
        go(wide, progress=stop_half_way)

    def rename(before: str, after: str) -> None:
        wide.edit_journal(
            lambda head: head.update(wisdom=json.loads(json.dumps(head["wisdom"]).replace(before, after)))
        )

    rename("fftwf_wisdom", "fftwq_wisdom")
    with pytest.raises(ResumeError, match=r"FFTW wisdom of \d+ transforms is damaged.*start again with overwrite=True"):
        go(wide, resume=True)
    rename("fftwq_wisdom", "fftwf_wisdom")
    go(wide, resume=True)


def test_the_report_says_what_became_of_a_damaged_file(wide: Place, cache: Path) -> None:
    cache.mkdir(parents=True)
    go(wide)
    assert not list(cache.iterdir())
    path = cache / f"fftw-{kept._digest(kept._facts(MACHINE))[:12]}.json"
    path.write_text("{")
    report = go(wide, overwrite=True)
    assert any("is damaged" in warning for warning in report.warnings)
    assert not any("is damaged" in warning for warning in go(wide, overwrite=True).warnings)
    assert os.listdir(cache) == [path.name]
