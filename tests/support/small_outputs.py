"""A small output of random voxels: written whole or in part, and read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from znnpy.patches import cover
from znnpy.shapes import Vec3
from znnpy.volume.journal import JournalHeader
from znnpy.volume.output import Mode, Output
from znnpy.volume.store import OutputArray

SIZE: Vec3 = (11, 14, 9)
PATCH: Vec3 = (4, 7, 5)
COLUMNS = cover(SIZE, PATCH)
JOB: dict[str, Any] = {
    "network": "abc",
    "weights": "def",
    "volume": {"bytes": 100, "mtime_ns": 5, "dtype": "uint8"},
    "roi": "",
    "border": "valid",
    "output_dtype": "float32",
    "allow_nan": False,
}
HEADER = JournalHeader(job=JOB, settings={}, plan='{"plan": 1}', blas="b", columns=len(COLUMNS))


def furnished(folder: Path) -> Path:
    """Make a place for the output, beside a file that stands for the volume."""
    (folder / "volume.h5").write_bytes(b"the volume")
    return folder / "out.h5"


def output(path: Path, mode: Mode = "new", maps: int = 1, dtype: str = "f4", **job: Any) -> Output:
    return Output(
        path,
        inputs={"volume": path.with_name("volume.h5")},
        arrays=(OutputArray((maps, *SIZE)),),
        dtype=np.dtype(dtype),
        mode=mode,
        job={**JOB, **job},
    )


def expected(maps: int = 1, dtype: str = "f4") -> npt.NDArray[Any]:
    return np.random.default_rng(5).integers(0, 200, (maps, *SIZE)).astype(dtype)


def write(opened: Output, columns: range, voxels: npt.NDArray[Any]) -> None:
    for index in columns:
        for step in COLUMNS[index].steps:
            opened.write(step.write, voxels[(slice(None), *step.write.slices)])
        opened.finish_column(index)


def finish(path: Path, mode: Mode = "new", maps: int = 1, dtype: str = "f4") -> None:
    with output(path, mode, maps, dtype) as opened:
        opened.begin(HEADER, {"offset": np.array([1, 2, 3]), "plan": "p" * 100_000})
        write(opened, range(len(COLUMNS)), expected(maps, dtype))
        opened.complete()


def interrupt(path: Path, columns: int, mode: Mode = "new") -> None:
    with output(path, mode) as opened:
        opened.begin(HEADER, {})
        write(opened, range(columns), expected())


def stored(path: Path) -> npt.NDArray[Any]:
    with h5py.File(path) as file:
        return np.asarray(file["prediction"])


def names(path: Path) -> set[str]:
    return {item.name for item in path.parent.iterdir()}
