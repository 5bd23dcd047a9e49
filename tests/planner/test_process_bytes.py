"""The memory that the process itself needs is measured."""

from __future__ import annotations

import subprocess
import sys

import pytest

from znnpy.planner.memory import MARGIN_BYTES, MIB, reading_bytes, writing_bytes


def printed(code: str) -> list[int]:
    """Return the numbers that a fresh process prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return list(map(int, done.stdout.split()))


def test_reading_and_writing_bytes_equal_those_by_hand() -> None:
    assert reading_bytes(channels=2, patch_in=(3, 4, 5), itemsize=2) == 2 * 2 * 60 * 2 + 16 * MIB
    assert reading_bytes(2, (3, 4, 5), 2, seen=(3, 4, 5)) == 2 * 2 * 60 * 2 + 4 * 60 + 16 * MIB
    assert reading_bytes(2, (3, 4, 5), 2, seen=(7, 4, 5)) == 2 * 2 * 60 * 2 + 2 * 60 + 3 * 140 + 16 * MIB  # a column
    assert writing_bytes(maps=3, patch_out=(3, 4, 5), itemsize=4) == 2 * 3 * 60 * 4 + 6 * MIB


def test_run_of_one_step_has_one_buffer() -> None:
    """The second is there, and nobody touches it."""
    assert reading_bytes(2, (3, 4, 5), 2, steps=1, seen=(3, 4, 5)) == 2 * 60 * 2 + 2 * 60 + 16 * MIB
    assert reading_bytes(2, (3, 4, 5), 2, steps=9) == reading_bytes(2, (3, 4, 5), 2)
    assert writing_bytes(3, (3, 4, 5), 4, steps=1) == 3 * 60 * 4 + 6 * MIB


@pytest.mark.slow
def test_baseline_covers_the_memory_of_the_process() -> None:
    """The process is a fresh one: memory that earlier tests freed would hold a part of the ballast."""
    code = (
        "from znnpy.machine import process_bytes\n"
        "from znnpy.planner.memory import MIB, baseline_bytes\n"
        "held = process_bytes()\n"
        "ballast = bytearray(b'x') * (100 * MIB)\n"
        "print(held, baseline_bytes())\n"
    )
    held, baseline = printed(code)
    assert baseline >= held + MARGIN_BYTES + 90 * MIB
    assert baseline % (4 * MIB) == 0


@pytest.mark.slow
def test_baseline_covers_the_libraries_of_a_run() -> None:
    """Libraries that a fresh process loads after the start of a run stay below the baseline."""
    code = (
        "import znnpy.inference\n"
        "from znnpy.planner.memory import baseline_bytes\n"
        "baseline = baseline_bytes()\n"
        "import h5py, numpy, ruamel.yaml, rich, psutil, znnpy.kernels.cpu.fft\n"
        "from znnpy.machine import process_bytes\n"
        "print(baseline, process_bytes())\n"
    )
    baseline, held = printed(code)
    assert held <= baseline <= held + 40 * MIB
