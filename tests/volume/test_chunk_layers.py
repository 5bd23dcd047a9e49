"""Layers of chunks are kept for the next step: the voxels are those of the volume, and each chunk is read once."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from znnpy.errors import VolumeError
from znnpy.patches import Box, with_size
from znnpy.shapes import Vec3
from znnpy.volume.base import Volume
from znnpy.volume.chunk_layers import MOST_BYTES, ChunkLayers, check_unpacking, layer_bytes

SIZE: Vec3 = (37, 29, 41)
CHUNK: Vec3 = (16, 8, 12)


class Counted(Volume):
    """A volume in memory that claims to have chunks, and notes the boxes that are read."""

    def __init__(self, channels: int = 2, chunk: Vec3 = CHUNK) -> None:
        super().__init__(Path("counted"), "", (channels, *SIZE), np.dtype("u2"))
        self.voxels = np.random.default_rng(3).integers(0, 60000, self.shape).astype("u2")
        self.boxes: list[Box] = []
        self._chunk = chunk

    @property
    def chunk_size(self) -> Vec3:
        return self._chunk

    def close(self) -> None:
        """Do nothing."""

    def read(self, box: Box, out: npt.NDArray[Any]) -> None:
        self.boxes.append(box)
        out[...] = self.voxels[(slice(None), *box.slices)]

    def stored(self) -> tuple[int, int]:
        return 0, 0


def read(layers: ChunkLayers, volume: Counted, box: Box) -> None:
    out = np.full((volume.channels, *box.size), 7, "u2")
    layers.read(box, out)
    assert np.array_equal(out, volume.voxels[(slice(None), *box.slices)])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_column_reads_each_layer_of_chunks_once(axis: int) -> None:
    volume = Counted()
    layers = ChunkLayers(volume, 10**6)
    for lo in range(0, SIZE[axis], 5):
        hi = min(lo + 5, SIZE[axis])
        read(layers, volume, Box(with_size((3, 2, 1), axis, lo), with_size((36, 27, 40), axis, hi)))
    thick = CHUNK[axis]
    assert [(box.lo[axis], box.hi[axis]) for box in volume.boxes] == [
        (lo, min(lo + thick, SIZE[axis])) for lo in range(0, SIZE[axis], thick)
    ]


def test_random_boxes_are_right_with_little_room_and_without() -> None:
    rng = np.random.default_rng(5)
    for most in (0, 3000, 20_000, 10**6):
        volume = Counted()
        layers = ChunkLayers(volume, most)
        for _ in range(60):
            lo = [int(rng.integers(0, n)) for n in SIZE]
            hi = [int(rng.integers(a + 1, n + 1)) for a, n in zip(lo, SIZE, strict=True)]
            read(layers, volume, Box((lo[0], lo[1], lo[2]), (hi[0], hi[1], hi[2])))


def test_layers_take_no_more_than_their_room() -> None:
    volume = Counted(channels=1)
    most = 16 * 20 * 20 * 2
    layers = ChunkLayers(volume, most)
    read(layers, volume, Box((0, 0, 0), (4, 20, 20)))
    assert volume.boxes.pop() == Box((0, 0, 0), (16, 20, 20))
    read(layers, volume, Box((0, 0, 0), (4, 20, 21)))  # a layer of it has no room
    assert volume.boxes.pop() == Box((0, 0, 0), (4, 20, 21))


def test_threads_share_the_room() -> None:
    volume = Counted(channels=1)
    layers = ChunkLayers(volume, 16 * 20 * 20 * 2)
    read(layers, volume, Box((0, 0, 0), (4, 20, 20)))
    other = threading.Thread(target=read, args=(layers, volume, Box((4, 0, 0), (8, 20, 20))))
    other.start()
    other.join()
    assert volume.boxes == [Box((0, 0, 0), (16, 20, 20)), Box((4, 0, 0), (8, 20, 20))]


def test_a_layer_that_could_not_be_read_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    volume = Counted()
    layers = ChunkLayers(volume, 10**6)
    with monkeypatch.context() as patch:
        patch.setattr(volume, "read", lambda box, out: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            layers.read(Box((0, 0, 0), (4, 20, 20)), np.empty((2, 4, 20, 20), "u2"))
    read(layers, volume, Box((0, 0, 0), (4, 20, 20)))
    read(layers, volume, Box((4, 0, 0), (8, 20, 20)))


def test_chunks_beyond_the_memory_limit_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "extra_bytes", 2**31)
    with pytest.raises(VolumeError, match=r"takes 2.00 GiB of memory to unpack .* the limit is 1.00 GiB"):
        check_unpacking(Counted(), 2**30)
    check_unpacking(Counted(), 2**31)


def test_room_is_a_part_of_the_memory_limit() -> None:
    assert layer_bytes(Counted(), 2**30) == 2**25
    assert layer_bytes(Counted(), 2**40) == MOST_BYTES
    assert layer_bytes(Counted(chunk=(1, 1, 1)), 2**40) == 0
