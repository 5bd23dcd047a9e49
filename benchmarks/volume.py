"""The main job on a real volume, as a user runs it: time, voxels/s, peak memory, exactness; and PyTorch doing the same.

    python benchmarks/volume.py [VOLUME.h5] [--labels LABELS.h5] [--ram 2G --ram 600M] [--out RESULT.json]

Each limit is one process of `znnpy infer` with the shipped network; its peak memory is what the system counted for
that process. The prediction of every limit is compared with the first one; the first is verified by `znnpy verify`
and, with labels (one number a body), scored against "has a 6-neighbour of another body, or is 0".

PyTorch predicts the same volume with the same weights, patch by patch: as fragments and dilated, in float32 and
bfloat16, contiguous and channels last, with every patch of `--sides`, one process each. Then znnpy and PyTorch's best
of each precision run `--rounds` - 1 more times in turn, and medians are compared. Seconds of both sides count from
opening the volume to closing the prediction, znnpy's planning and preparing included; imports are in the wall time
alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
from apart import run_apart
from header import machine_header, without_forced_blas_kernels

from znnpy.demo import roc_auc
from znnpy.formats.networks import DEFAULT
from znnpy.machine import parse_bytes, this_machine

MIB = 2**20
CHILD = Path(__file__).with_name("contestants.py")
FIB25 = Path(__file__).parents[2] / "shared" / "data" / "fib25_train.h5"  # beside the repository, where it is at hand
LARGEST_DIFFERENCE = {"fp32": 1e-4, "bf16": 0.3}  # of a probability, from znnpy's: else a figure is void

Floats = npt.NDArray[np.float32]


@dataclass(slots=True)
class Run:
    """Processes of `znnpy infer` within one limit; figures but seconds are of the first."""

    ram: str
    wall_seconds: list[float]  # of whole processes
    seconds: list[float]  # from opening the volume to renaming the output
    voxels_per_second: float  # output voxels over `seconds`
    peak_mib: float  # VmHWM of the process
    predicted_peak_mib: float
    patch_out: tuple[int, int, int]
    primitives: tuple[str, ...]
    largest_difference: float = 0.0  # to the prediction of the first limit


@dataclass(slots=True)
class Peer:
    """Processes of PyTorch that run the network one way."""

    method: str
    precision: str
    layout: str
    side: int  # of output patches, where the output is as large
    wall_seconds: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # from opening the volume to closing the prediction
    voxels_per_second: float = 0.0
    peak_mib: float = 0.0
    cores_used: float = 0.0
    largest_difference: float | None = None  # to znnpy's first prediction
    failure: str | None = None

    def __str__(self) -> str:
        return f"PyTorch {self.precision} {self.method} {self.layout} {self.side}^3"


def infer(volume: Path, out: Path, ram: str, threads: int) -> Run:
    """Run one process and count it."""
    command = [sys.executable, "-m", "znnpy", "infer", str(volume), "--ram", ram, "--threads", str(threads)]
    begin = time.perf_counter()
    done = subprocess.run([*command, "--out", str(out), "--json", "--overwrite"], stdout=subprocess.PIPE, check=True)
    wall = time.perf_counter() - begin
    report = json.loads(done.stdout)
    with h5py.File(out) as file:
        plan = json.loads(file["prediction"].attrs["plan"])
    return Run(
        ram=ram,
        wall_seconds=[wall],
        seconds=[report["seconds"]],
        voxels_per_second=report["voxels"] / report["seconds"],
        peak_mib=report["peak_bytes"] / MIB,
        predicted_peak_mib=report["predicted"]["peak_bytes"] / MIB,
        patch_out=tuple(plan["patch_out"]),
        primitives=tuple(choice["primitive"] for choice in plan["choices"]),
    )


def run_peer(peer: Peer, volume: Path, first: Floats, folder: Path, options: argparse.Namespace) -> None:
    """Run it once more, add its times, and compare what it predicts with znnpy's prediction."""
    out = folder / "peer.h5"
    request = {
        "job": "torch_volume",
        "network": DEFAULT,
        "volume": str(volume),
        "out": str(out),
        "threads": options.threads,
        "method": peer.method,
        "precision": peer.precision,
        "layout": peer.layout,
        "patch": [peer.side] * 3,
    }
    ram_bytes = parse_bytes(options.peer_ram)
    outcome = run_apart(CHILD, request, ram_bytes=ram_bytes, seconds=options.run_seconds)
    if outcome.failure:
        peer.failure = outcome.failure
        return
    answer = outcome.answer
    peer.wall_seconds.append(outcome.wall_seconds)
    peer.seconds.append(answer["seconds"])
    peer.voxels_per_second = answer["voxels"] / median(peer.seconds)
    peer.peak_mib, peer.cores_used = answer["peak_bytes"] / MIB, answer["cores_used"]
    peer.largest_difference = float(np.abs(prediction(out) - first).max())
    if not peer.largest_difference <= LARGEST_DIFFERENCE[peer.precision]:
        raise SystemExit(f"{peer} is {peer.largest_difference:.1e} away from znnpy's prediction")


def compete(ours: Run, volume: Path, first: Floats, folder: Path, options: argparse.Namespace) -> list[Peer]:
    """Every way once, then the best of each precision and znnpy in turn."""
    ways = product(options.precisions, options.layouts, ("dilated", "fragments"), options.sides)
    peers = [Peer(method, precision, layout, side) for precision, layout, method, side in ways]
    for peer in peers:
        run_peer(peer, volume, first, folder, options)
        figures = f"{peer.voxels_per_second:,.0f} voxels/s {peer.peak_mib:,.0f} MiB"
        print(f"{peer!s:52} {peer.failure or figures}", flush=True)
    finalists = [found for precision in ("bf16", "fp32") if (found := best(peers, precision))]
    for _ in range(options.rounds - 1):
        for peer in finalists:
            again = infer(volume, folder / "again.h5", ours.ram, options.threads)
            ours.seconds += again.seconds
            ours.wall_seconds += again.wall_seconds
            run_peer(peer, volume, first, folder, options)
    ours.voxels_per_second = first[0].size / median(ours.seconds)
    return peers


def best(peers: Sequence[Peer], precision: str) -> Peer | None:
    ran = [peer for peer in peers if peer.precision == precision and not peer.failure]
    return max(ran, key=lambda peer: peer.voxels_per_second, default=None)


def summary(ours: Run, peers: Sequence[Peer]) -> dict[str, Any]:
    """How many times PyTorch's best the first limit is: of the medians, and of wall times."""
    found: dict[str, Any] = {"voxels_per_second": ours.voxels_per_second, "seconds": median(ours.seconds)}
    for precision in ("fp32", "bf16"):
        if peer := best(peers, precision):
            found[f"torch_{precision}"] = str(peer)
            found[f"times_torch_{precision}"] = median(peer.seconds) / median(ours.seconds)
            found[f"times_torch_{precision}_wall"] = median(peer.wall_seconds) / median(ours.wall_seconds)
            found[f"times_torch_{precision}_least"] = min(peer.seconds) / max(ours.seconds)
    return found


def prediction(path: Path) -> Floats:
    """(maps, z, y, x)"""
    with h5py.File(path) as file:
        found = np.asarray(file["prediction"][()], np.float32)
    return found if found.ndim == 4 else found[None]


def boundaries(labels: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
    """Voxels with a 6-neighbour of another body, and unlabelled ones."""
    truth: npt.NDArray[np.bool_] = labels == 0
    for axis in range(3):
        a, b = np.moveaxis(labels, axis, 0)[:-1], np.moveaxis(labels, axis, 0)[1:]
        differ = a != b
        np.moveaxis(truth, axis, 0)[:-1] |= differ
        np.moveaxis(truth, axis, 0)[1:] |= differ
    return truth


def area_under_roc(labels_path: Path, offset: Sequence[int], predicted: Floats) -> float:
    with h5py.File(labels_path) as file:
        labels = next(data[()] for data in file.values() if data.ndim == 3)
    truth = boundaries(labels)[tuple(slice(o, o + n) for o, n in zip(offset, predicted.shape, strict=True))]
    return roc_auc(truth, predicted)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("volume", type=Path, nargs="?", default=FIB25, help=f"default: {FIB25.name} where it is")
    parser.add_argument("--labels", type=Path)
    parser.add_argument("--ram", action="append", help="limit of one run; the first is the one verified and compared")
    parser.add_argument("--threads", type=int, default=this_machine().cores)
    parser.add_argument("--samples", type=int, default=1000, help="voxels recomputed in float64")
    parser.add_argument("--rounds", type=int, default=3, help="of znnpy and PyTorch's best; 1: every way once")
    parser.add_argument("--sides", type=int, nargs="+", default=[64, 112, 224], help="output patches of PyTorch")
    parser.add_argument("--peer-ram", default="16G", help="limit of every process of PyTorch")
    parser.add_argument("--run-seconds", type=float, default=300, help="limit of every process of PyTorch")
    layouts = ["channels_last_3d", "contiguous"]
    parser.add_argument("--precisions", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"])
    parser.add_argument("--layouts", nargs="+", choices=layouts, default=layouts)
    parser.add_argument("--no-torch", dest="torch", action="store_false")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    limits = options.ram or ["2G"]
    if not options.volume.is_file():
        print(f"nothing measured: there is no volume {options.volume}; give one")
        return
    if options.torch and find_spec("torch") is None:
        print("PyTorch is not installed, so znnpy runs alone; pip install 'znnpy[bench]' to compare")
        options.torch = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = [folder / f"{i}.h5" for i in range(len(limits))]
        runs = []
        for ram, path in zip(limits, paths, strict=True):
            runs.append(infer(options.volume, path, ram, options.threads))
            print(runs[-1])
        first = prediction(paths[0])
        for run, path in zip(runs, paths, strict=True):
            run.largest_difference = float(np.abs(prediction(path) - first).max())
        verify = [sys.executable, "-m", "znnpy", "verify", str(paths[0]), str(options.volume), "--json"]
        verified = subprocess.run([*verify, "--samples", str(options.samples)], stdout=subprocess.PIPE, check=True)
        with h5py.File(paths[0]) as file:
            offset = tuple(int(o) for o in file["prediction"].attrs["offset"])
        peers = compete(runs[0], options.volume, first, folder, options) if options.torch else []
    result = {
        "header": machine_header(),
        "volume": options.volume.name,
        "summary": summary(runs[0], peers),
        "runs": [asdict(run) for run in runs],
        "verify": {key: value for key, value in json.loads(verified.stdout).items() if key != "output"},
        "peers": [asdict(peer) for peer in peers],
    }
    if options.labels:
        result["roc_auc"] = area_under_roc(options.labels, offset, first[0])
    print(json.dumps(result["summary"], indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    without_forced_blas_kernels()
    main()
