"""The main job on a real volume, as a user runs it: time, voxels/s, peak memory, exactness, agreement with the labels.

    python benchmarks/volume.py VOLUME.h5 [--labels LABELS.h5] [--ram 2G --ram 600M] [--out RESULT.json]

Each limit is one process of `znnpy infer` with the shipped network; its peak memory is what the system counted for
that process. The prediction of every limit is compared with the first one; the first is verified by `znnpy verify`
and, with labels (one number a body), scored against "has a 6-neighbour of another body, or is 0".
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
from header import machine_header, without_forced_blas_kernels

from znnpy.demo import roc_auc

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Run:
    """One process of `znnpy infer`."""

    ram: str
    wall_seconds: float
    voxels_per_second: float  # output voxels over the wall time of the whole process
    peak_mib: float  # VmHWM of the process
    predicted_peak_mib: float
    patch_out: tuple[int, int, int]
    primitives: tuple[str, ...]
    largest_difference: float  # to the prediction of the first limit


def infer(volume: Path, out: Path, ram: str) -> Run:
    """Run one process and count it."""
    command = [sys.executable, "-m", "znnpy", "infer", str(volume), "--ram", ram, "--out", str(out), "--json"]
    begin = time.perf_counter()
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    seconds = time.perf_counter() - begin
    with h5py.File(out) as file:
        voxels = int(np.prod(file["prediction"].shape))
        plan = json.loads(file["prediction"].attrs["plan"])
    return Run(
        ram=ram,
        wall_seconds=seconds,
        voxels_per_second=voxels / seconds,
        peak_mib=report["peak_bytes"] / MIB,
        predicted_peak_mib=report["predicted"]["peak_bytes"] / MIB,
        patch_out=tuple(plan["patch_out"]),
        primitives=tuple(choice["primitive"] for choice in plan["choices"]),
        largest_difference=0.0,
    )


def prediction(path: Path) -> npt.NDArray[np.float32]:
    with h5py.File(path) as file:
        return np.asarray(file["prediction"][()], np.float32)


def boundaries(labels: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """Voxels with a 6-neighbour of another body, and unlabelled ones."""
    truth: npt.NDArray[np.bool_] = labels == 0
    for axis in range(3):
        a, b = np.moveaxis(labels, axis, 0)[:-1], np.moveaxis(labels, axis, 0)[1:]
        differ = a != b
        np.moveaxis(truth, axis, 0)[:-1] |= differ
        np.moveaxis(truth, axis, 0)[1:] |= differ
    return truth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("volume", type=Path)
    parser.add_argument("--labels", type=Path)
    parser.add_argument("--ram", action="append", help="limit of one run; the first is the one verified and scored")
    parser.add_argument("--samples", type=int, default=1000, help="voxels recomputed in float64")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{i}.h5" for i in range(len(options.ram or ["2G"]))]
        for ram, path in zip(options.ram or ["2G"], paths, strict=True):
            runs.append(infer(options.volume, path, ram))
            print(runs[-1])
        first = prediction(paths[0])
        differences = [float(np.abs(prediction(path) - first).max()) for path in paths]
        verify = [sys.executable, "-m", "znnpy", "verify", str(paths[0]), str(options.volume), "--json"]
        verified = subprocess.run([*verify, "--samples", str(options.samples)], stdout=subprocess.PIPE, check=True)
        with h5py.File(paths[0]) as file:
            offset = tuple(int(o) for o in file["prediction"].attrs["offset"])
    result = {
        "header": machine_header(),
        "volume": options.volume.name,
        "runs": [asdict(run) | {"largest_difference": d} for run, d in zip(runs, differences, strict=True)],
        "verify": {key: value for key, value in json.loads(verified.stdout).items() if key != "output"},
    }
    if options.labels:
        with h5py.File(options.labels) as file:
            labels = next(data[()] for data in file.values() if data.ndim == 3)
        truth = boundaries(labels)[tuple(slice(o, o + n) for o, n in zip(offset, first.shape, strict=True))]
        result["roc_auc"] = roc_auc(truth, first)
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    without_forced_blas_kernels()
    main()
