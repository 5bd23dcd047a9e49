"""Reading and writing are predicted from what a plan reads, and from rates that are measured."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import znnpy
from tests.volume.test_chunk_layers import Counted
from znnpy.measure import transfers
from znnpy.measure.transfers import Transfers, read_bytes, reading_rate, writing_rate
from znnpy.network import Conv, Network
from znnpy.option_values import Cover
from znnpy.patches import Box
from znnpy.planner.run_plan import RunPlan
from znnpy.shapes import Vec3
from znnpy.volume.chunk_layers import MOST_BYTES
from znnpy.volume.source import Source


def network() -> Network:
    return Network("probe", 2, (Conv((3, 5, 2), 1),))


def planned(folder: Path, patch: Vec3, cover: Cover) -> RunPlan:
    path = folder / "probe.yaml"
    path.write_text(
        "name: probe\ninput_channels: 2\nlayers:\n- {type: conv, kernel: [3, 5, 2], out: 1, activation: none}\n"
    )
    made = znnpy.plan(path, shape=(37, 29, 41), patch=patch, cover=cover, ram="2G", device="cpu", calibrate=False)
    assert isinstance(made, RunPlan)
    return made


def test_bytes_are_those_of_whole_chunks_across_each_column(tmp_path: Path) -> None:
    plan, volume = planned(tmp_path, (5, 10, 20), "columns"), Counted()
    source = Source(volume, roi=None, border="valid", network=network(), allow_nan=False)
    source.keep_chunks(MOST_BYTES)
    chunks: set[tuple[int, Box]] = set()
    out = np.empty((2, *plan.main.patch_in), "u2")
    for number, column in enumerate(plan.work_items(network())):
        for step in column.steps:
            volume.boxes.clear()
            source.read(step.read, out)
            chunks |= {(number, one) for box in volume.boxes for one in _chunks(box, volume)}
    read = sum(one.clipped(Box((0, 0, 0), volume.size)).voxels for _, one in chunks)
    assert read_bytes(plan, network(), source) == read * 2 * 2


def _chunks(box: Box, volume: Counted) -> list[Box]:
    spans = [range(lo // c, -(-hi // c)) for lo, hi, c in zip(box.lo, box.hi, volume.chunk_size, strict=True)]
    sizes = volume.chunk_size
    return [
        Box((z * sizes[0], y * sizes[1], x * sizes[2]), ((z + 1) * sizes[0], (y + 1) * sizes[1], (x + 1) * sizes[2]))
        for z in spans[0]
        for y in spans[1]
        for x in spans[2]
    ]


def test_many_columns_are_counted_by_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(tmp_path, (2, 2, 2), "patches")
    source = Source(Counted(), roi=None, border="valid", network=network(), allow_nan=False)
    exact = read_bytes(plan, network(), source)
    monkeypatch.setattr(transfers, "COLUMNS", 10**6)
    assert read_bytes(plan, network(), source) == pytest.approx(exact, rel=0.1)


class Slow(Counted):
    """A volume of which a megabyte takes a second."""

    def read(self, box: Box, out: npt.NDArray[Any]) -> None:
        super().read(box, out)
        time.sleep(out.nbytes / 2**20)


def test_a_slow_volume_is_measured_as_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "SECONDS", 0.05)
    monkeypatch.setattr(transfers, "PIECE_BYTES", 2**15)
    volume = Slow()
    assert 0.5 * 2**20 < reading_rate(volume, Box((3, 2, 1), volume.size)) < 1.05 * 2**20
    for box in volume.boxes:
        assert all(3 * (axis == 0) <= lo for axis, lo in enumerate(box.lo))
        assert all(hi <= n for hi, n in zip(box.hi, volume.size, strict=True))


def test_a_chunk_that_is_too_large_is_read_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "MOST_BYTES", 1000)
    volume = Counted()
    reading_rate(volume, Box((0, 0, 0), volume.size))
    assert max(box.voxels for box in volume.boxes) * 4 <= 1000


def test_a_disk_is_measured_without_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "SECONDS", 0.01)
    rate = writing_rate(tmp_path)
    assert rate is None or rate > 0
    assert not list(tmp_path.iterdir())

    def refused(path: object, flags: int, mode: int = 0) -> int:
        raise OSError(95, "not supported")

    monkeypatch.setattr(os, "open", refused)
    assert writing_rate(tmp_path) is None


def test_the_slower_of_both_is_told() -> None:
    both = Transfers(2**30, 2**29, 2**32, 2**30)
    assert (both.reading, both.writing, both.seconds) == (2, 4, 4)
    assert str(both) == (
        "reading 1.00 GiB takes 2 s at 512 MiB/s, and writing 4.00 GiB takes 4 s at 1.00 GiB/s, measured"
    )
    assert str(Transfers(2**30, 2**29, 0, None)) == "reading 1.00 GiB takes 2 s at 512 MiB/s, measured"
