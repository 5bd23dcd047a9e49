"""How fast outputs are written: GB/s of the voxels that a run hands over, in the boxes that its steps make.

    python benchmarks/writing.py --folder FOLDER [--only CASE ...] [--rounds 6] [--against CHECKOUT] [--quick]
                                 [--out RESULT.json]

Every round of a case is a process of its own that writes a new HDF5 output into a temporary folder within FOLDER, in
the order of a run, and removes it. Seconds are those in `write`, which ends when the system has the bytes; those that
`sync` takes until they are on disk are apart. One box is written before the clock starts. With `--against`, another
checkout of znnpy writes in turn with this one, which first alternating; its compiled kernels need not be there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from header import machine_header, without_forced_blas_kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from znnpy.shapes import Vec3

HERE = Path(__file__).parents[1]
DTYPES = ("float32", "uint8")
GB = 1e9


@dataclass(frozen=True, slots=True)
class Case:
    """An output and the steps that write it. `why` says what the row is there to show."""

    name: str
    maps: int
    size: Vec3  # of the output
    step: Vec3  # output of one step
    walks: bool  # columns of steps along z; else patches
    why: str


CASES = (
    Case("thin steps", 3, (228, 456, 456), (16, 132, 132), True, "a narrow column: parts of chunks along every axis"),
    Case("wide steps", 3, (176, 600, 600), (88, 436, 436), True, "a wide column: many chunks a box, most whole across"),
    Case("whole patches", 1, (400, 400, 400), (200, 200, 200), False, "patches: most chunks are whole"),
)
QUICK = (Case("thin steps", 3, (40, 70, 70), (16, 30, 30), True, "small"),)


def one_round(case: Case, dtype: str, folder: Path) -> dict[str, Any]:
    """Of this process; what it wrote is read again and compared."""
    import h5py
    import numpy as np

    from znnpy.patches import Cover
    from znnpy.volume.hdf5_store import Hdf5Store

    column = -(-case.size[0] // case.step[0]) * case.step[0] if case.walks else 0
    boxes = [step.write for column in Cover(case.size, case.step, column=column) for step in column.steps]
    voxels = np.random.default_rng(1).integers(0, 200, (case.maps, *case.step), np.uint8).astype(dtype)
    shape = (case.maps, *case.size)
    path = folder / "out.h5"
    Hdf5Store.create(path, shape, voxels.dtype, {})
    store = Hdf5Store(path, shape, voxels.dtype)

    def part(size: Vec3) -> Any:
        return voxels[:, : size[0], : size[1], : size[2]]

    store.write(boxes[0], part(boxes[0].size))
    begin = time.perf_counter()
    for box in boxes:
        store.write(box, part(box.size))
    written = time.perf_counter()
    store.sync()
    synced = time.perf_counter()
    store.close()
    with h5py.File(path) as file:
        for box in (boxes[0], boxes[len(boxes) // 2], boxes[-1]):
            where = (slice(None), *box.slices) if case.maps > 1 else box.slices
            np.testing.assert_array_equal(file["prediction"][where].reshape(-1), part(box.size).reshape(-1))
    nbytes = sum(box.voxels for box in boxes) * case.maps * voxels.itemsize
    return {"bytes": nbytes, "boxes": len(boxes), "write": written - begin, "sync": synced - written}


def one_process(checkout: Path, case: Case, dtype: str, folder: Path, *, quick: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        words = [sys.executable, str(Path(__file__).resolve()), "--one", case.name, dtype, "--folder", place]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        words += ["--quick"] if quick else []
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"writing {case.name} with {checkout} ended with {done.returncode}: {done.stderr.strip()}")
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"least": min(values), "median": median(values), "most": max(values)}


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all rounds."""
    speeds = [run["bytes"] / run["write"] / GB for run in runs]
    return {"gb_per_second": spread(speeds), "sync_seconds": spread([run["sync"] for run in runs])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk that is measured")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], metavar="CASE")
    parser.add_argument("--rounds", type=int, default=6, help="an even number")
    parser.add_argument("--against", type=Path, help="another checkout of znnpy")
    parser.add_argument("--quick", action="store_true", help="one small output")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    words = parser.parse_args()
    cases = QUICK if words.quick else [case for case in CASES if words.only is None or case.name in words.only]
    if words.one:
        name, dtype = words.one
        print(json.dumps(one_round(next(case for case in cases if case.name == name), dtype, words.folder)))
        return
    rounds = 2 if words.quick else words.rounds
    checkouts = {"here": HERE, **({"against": words.against.resolve()} if words.against else {})}
    results = []
    for case in cases:
        for dtype in DTYPES:
            runs: dict[str, list[dict[str, Any]]] = {which: [] for which in checkouts}
            for index in range(rounds):
                for which in sorted(checkouts, reverse=bool(index % 2)):
                    runs[which].append(one_process(checkouts[which], case, dtype, words.folder, quick=words.quick))
            sizes = {"maps": case.maps, "size": case.size, "step": case.step, "boxes": runs["here"][0]["boxes"]}
            row: dict[str, Any] = {"case": case.name, "why": case.why, "dtype": dtype, **sizes}
            row |= {which: summary(found) for which, found in runs.items()}
            said = [f"{which} {row[which]['gb_per_second']['median']:.2f} GB/s" for which in checkouts]
            if words.against:
                pairs = zip(runs["here"], runs["against"], strict=True)
                row["times_as_fast"] = spread([theirs["write"] / ours["write"] for ours, theirs in pairs])
                said.append(
                    "{least:.2f} to {most:.2f}, median {median:.2f} times as fast".format(**row["times_as_fast"])
                )
            results.append(row)
            print(f"{case.name} {dtype}: {'; '.join(said)}", flush=True)
    if words.out:
        content = {"machine": machine_header(), "rounds": rounds, "results": results}
        words.out.parent.mkdir(exist_ok=True)
        words.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    without_forced_blas_kernels()
    main()
