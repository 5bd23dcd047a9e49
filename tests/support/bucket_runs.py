"""Runs of `infer` in buckets: a folder with what they need, and how to store the volume and read the output."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

import znnpy
from znnpy.patches import Box
from znnpy.volume import open_volume

SIZE = (26, 38, 44)
PATCH = (8, 12, 14)
SUFFIXES = {"zarr2": ".zarr", "zarr3": ".zarr", "sharded": ".zarr", "n5": ".n5", "precomputed": ".precomputed"}
FORMS = tuple(SUFFIXES)

# The command line with pauses as short as a test wants them, columns that are recorded at once, and small chunks.
PROGRAM = """
from znnpy.volume import bucket, bucket_journal, column_record, object_store, output, store

object_store.RETRIES = {"max_retries": 4, "initial_delay": "10ms", "max_delay": "50ms"}
object_store.SECONDS = 10
object_store.pause = lambda attempt: None
bucket.SECONDS_IN_ALL, bucket.SECONDS, bucket.FIRST_PAUSE = 3.0, 10, 0.01
bucket_journal.HANDOVER_SECONDS = 0.2
column_record.SYNC_SECONDS = output.SYNC_SECONDS = 0.0
store.CHUNK = 20
from znnpy.__main__ import main
main()
"""


def furnish(folder: Path) -> Path:
    """Write a volume, a network, and what it predicts, to a folder; return it."""
    rng = np.random.default_rng(4)
    np.save(folder / "v.npy", rng.integers(0, 255, SIZE, np.uint8))
    np.savez(
        folder / "n.npz",
        conv0_weight=rng.standard_normal((2, 1, 3, 3, 3), np.float32),
        conv0_bias=np.zeros(2, np.float32),
    )
    (folder / "n.yaml").write_text(
        "name: n\ninput_channels: 1\nweights: n.npz\nlayers:\n"
        "- {type: conv, kernel: [3, 3, 3], out: 2, activation: relu}\n"
    )
    infer(folder, folder / "expected.h5")
    return folder


def infer(place: Path, out: Any, progress: Callable[[Any], None] | None = None, **more: Any) -> Any:
    """Run the network at every voxel of the volume `volume`, which is that of the folder if none is given."""
    return znnpy.infer(
        more.pop("volume", place / "v.npy"),
        place / "n.yaml",
        out=out,
        ram="4G",
        device="cpu",
        calibrate=False,
        cover="columns",
        patch=PATCH,
        progress=progress,
        **more,
    )


def read(name: str) -> np.ndarray[Any, Any]:
    """Return all voxels of a volume."""
    with open_volume(name) as volume:
        out = np.full(volume.shape, 77, volume.dtype)
        volume.read(Box((0, 0, 0), volume.size), out)
        return out


def expected(place: Path) -> np.ndarray[Any, Any]:
    """Return what the network predicts."""
    return read(str(place / "expected.h5"))


def start(place: Path, volume: str, out: str, *more: str, environment: Mapping[str, str] | None = None) -> Any:
    """Start `znnpy infer` in a process of its own."""
    options = [
        "--ram",
        "4G",
        "--device",
        "cpu",
        "--no-calibrate",
        "--cover",
        "columns",
        "--patch",
        "8,12,14",
        "--threads",
        "1",
    ]
    words = ["infer", volume, "--network", str(place / "n.yaml"), "--out", out, *options, *more]
    command = [sys.executable, "-c", PROGRAM, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def refusal(process: Any, seconds: float = 60) -> str:
    """Return the one sentence with which a command ends that is refused."""
    _, said = process.communicate(timeout=seconds)
    assert process.returncode == 1, said
    lines = [line for line in said.splitlines() if not re.match(r"warning: |[IWE]\d{4} ", line)]
    assert len(lines) == 1, said
    assert lines[0].startswith("Error: ")
    return str(lines[0])


def store_volume(place: Path, kvstore: Mapping[str, Any], form: str) -> None:
    """Store the volume of a folder in chunks of 8 voxels, in one of FORMS."""
    voxels = np.load(place / "v.npy")
    more: dict[str, Any]
    if form == "n5":
        driver, voxels = "n5", voxels.T
        more = {
            "metadata": {
                "dimensions": voxels.shape,
                "blockSize": [8, 8, 8],
                "dataType": "uint8",
                "compression": {"type": "gzip"},
            }
        }
    elif form == "precomputed":
        driver, voxels = "neuroglancer_precomputed", voxels.T[..., None]
        more = {
            "multiscale_metadata": {"data_type": "uint8", "num_channels": 1, "type": "image"},
            "scale_metadata": {
                "size": voxels.shape[:3],
                "chunk_size": [8, 8, 8],
                "encoding": "raw",
                "resolution": [4, 4, 40],
            },
        }
    else:
        driver = "zarr" if form == "zarr2" else "zarr3"
        write = 24 if form == "sharded" else 8
        layout = {"read_chunk": {"shape": [8, 8, 8]}, "write_chunk": {"shape": [write] * 3}}
        more = {"schema": {"dtype": "uint8", "domain": {"shape": voxels.shape}, "chunk_layout": layout}}
    ts.open({"driver": driver, "kvstore": dict(kvstore), **more}, create=True).result()[...] = voxels
