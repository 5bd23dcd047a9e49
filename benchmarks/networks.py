"""Whole networks, dense output, one patch after the other: znnpy by its own plan, PyTorch both ways, the original ZNNi.

    python benchmarks/networks.py [--quick | --largest] [--networks n337 ...] [--ram 16G] [--out RESULT.json]

Every run is a process of its own with `--ram` as its limit of memory, so one that fails is recorded as that. znnpy
runs steps of the plan it makes for a long run, through its pipeline: patches, or one column from its beginning on. Its
figure is of steps after the first; the first steps of a column, which give no output, are shared out to as many as a
column of the plan has. PyTorch runs one patch in memory, without reading or writing; its best figure counts. Every
output is compared with znnpy's, on the same random volume with the same random weights.

`--quick` gives PyTorch small patches, and so not its best figure; the full mode gives it the patches it was fastest
with when it was measured before; `--largest` adds the largest that fit into 16 GiB, ten minutes each in the worst case.
What does not fit into `--minutes` is recorded as not run. Results and picture are written after every run.

With `--device gpu` everything is another: see networks_gpu.py, and `--device gpu --help` for its words.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.util import find_spec
from itertools import product, zip_longest
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import bars
import numpy as np
from apart import Outcome, run_apart
from header import machine_header, taken_device, without_forced_blas_kernels

from znnpy.errors import MissingExtraError
from znnpy.formats.networks import read_network
from znnpy.machine import parse_bytes, this_machine
from znnpy.shapes import ConvShape, Vec3, text

CHILD = Path(__file__).with_name("contestants.py")
CL, NC = "channels_last_3d", "contiguous"
FULL_MINUTES = {"quick": 8.0, "full": 25.0, "largest": 75.0}
LARGEST_DIFFERENCE = {"fp32": 1e-3, "bf16": 0.5}  # rms, of the standard deviation of the output: else a figure is void

ORIGINAL = {"n337": 30_804, "n537": 7_908, "n726": 23_883, "n926": 12_497}  # voxels/s, with FFTW, 11 to 12 GB
ORIGINAL_SOURCE = (
    "ZNNi's own code (commit 0c98d73 of 2016-04-07; g++ 12 -O3 -march=native, FFTW 3.3.10, 2 threads), "
    "measured on 2026-11-20 on the same model of machine: 2 cores of a Zen 5 EPYC, 24 GiB"
)


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to run a network in PyTorch."""

    method: str  # fragments | dilated
    precision: str  # fp32 | bf16
    layout: str  # contiguous | channels_last_3d
    side: int  # output voxels per axis

    def __str__(self) -> str:
        return f"PyTorch {self.precision} {self.method} {self.layout}"


QUICK = {
    "n337": (Peer("dilated", "bf16", CL, 64), Peer("dilated", "fp32", CL, 64)),
    "n537": (Peer("fragments", "bf16", CL, 32),),
    "n726": (Peer("fragments", "bf16", CL, 32),),
    "n926": (Peer("fragments", "bf16", CL, 8),),
}
# Best first. Patches and order come from runs of 2026-11-20 on 2 Zen 5 cores: bf16 with channels last was the fastest
# in each network, dilated in n337 and as fragments in the others, and larger patches were always faster.
FULL = {
    "n337": (
        Peer("dilated", "bf16", CL, 176),
        Peer("fragments", "bf16", CL, 128),
        Peer("dilated", "fp32", CL, 128),
        Peer("fragments", "fp32", CL, 128),
        Peer("dilated", "bf16", NC, 64),
        Peer("fragments", "fp32", NC, 64),
        Peer("dilated", "bf16", CL, 224),
    ),
    "n537": (
        Peer("fragments", "bf16", CL, 104),
        Peer("dilated", "bf16", CL, 104),
        Peer("fragments", "fp32", CL, 32),
        Peer("fragments", "bf16", NC, 32),
    ),
    "n726": (
        Peer("fragments", "bf16", CL, 96),
        Peer("dilated", "bf16", CL, 96),
        Peer("dilated", "fp32", CL, 32),
        Peer("fragments", "bf16", NC, 32),
    ),
    "n926": (
        Peer("fragments", "bf16", CL, 64),
        Peer("dilated", "bf16", CL, 32),
        Peer("fragments", "fp32", CL, 8),
        Peer("fragments", "bf16", NC, 8),
    ),
}
LARGEST = {
    "n337": (Peer("fragments", "bf16", CL, 224),),
    "n537": (Peer("fragments", "bf16", CL, 160), Peer("fragments", "fp32", CL, 104)),
    "n726": (Peer("fragments", "bf16", CL, 144), Peer("fragments", "bf16", CL, 208)),
    "n926": (Peer("fragments", "bf16", CL, 112), Peer("fragments", "bf16", CL, 160)),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant with one network."""

    network: str
    name: str
    precision: str
    patch_out: Vec3
    voxels_per_second: float  # of output; 0 when it failed
    seconds: tuple[float, ...]  # every patch, step that gives output, or run
    border_waste: float  # arithmetic over that of the same output inside an endless patch; 0 if unknown
    peak_mib: float
    cores_used: float  # processor time over time
    difference: float | None  # rms from znnpy's output over its standard deviation
    failure: str | None
    details: dict[str, Any]  # what else the child said


def peers_of(name: str, mode: str, options: argparse.Namespace) -> tuple[Peer, ...]:
    """The runs of a network; with `--sides`, all eight ways at each of them."""
    if options.sides or name not in FULL:
        sides = options.sides or [2 * max(read_network(name).network.period)]
        ways = product(sides, ("bf16", "fp32"), (CL, NC), ("fragments", "dilated"))
        peers = tuple(Peer(method, precision, layout, side) for side, precision, layout, method in ways)
    else:
        peers = {"quick": QUICK[name], "full": FULL[name], "largest": FULL[name] + LARGEST[name]}[mode]
    return tuple(peer for peer in peers if peer.precision in options.precisions and peer.layout in options.layouts)


def border_waste(name: str, patch: Vec3) -> float:
    """Multiply-adds of all convolutions for one patch, over those that as many voxels cost far from any border."""
    network = read_network(name).network
    convolutions = [s for s in network.layer_shapes(patch) if isinstance(s, ConvShape)]
    spent = sum(prod(s.out_shape) * s.fin * prod(s.k) for s in convolutions)
    needed = sum(s.fout * s.fin * prod(s.k) for s in convolutions) * prod(patch)
    return spent / needed


def row_of(name: str, who: str, precision: str, patch: Vec3, outcome: Outcome, difference: float | None) -> Row:
    answer = dict(outcome.answer)
    seconds = tuple(answer.pop("seconds", ()))
    steady = median(seconds[1:] or seconds) if seconds else 0.0  # the first run touches memory for the first time
    steady += sum(answer.get("ahead_seconds", ())) / answer.get("steps_of_a_column", 1)
    waste = answer.pop("border_waste", None) or (border_waste(name, patch) if min(patch) else 0.0)
    return Row(
        network=name,
        name=who,
        precision=precision,
        patch_out=tuple(answer.pop("patch_out", patch)),
        voxels_per_second=prod(patch) / steady if steady else 0.0,
        seconds=seconds,
        border_waste=waste,
        peak_mib=answer.pop("peak_bytes", 0) / 2**20,
        cores_used=answer.pop("cores_used", 0.0),
        difference=difference,
        failure=outcome.failure,
        details=answer | {"wall_seconds": outcome.wall_seconds},
    )


class Match:
    """Runs contestants one by one and keeps what they gave."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._shared = {"threads": options.threads}
        self.rows: list[Row] = []

    def ours(self, name: str) -> Row:
        options = self._options
        wish = {"patch": options.patch, "only": options.only, "steps": options.steps}
        request = self._shared | wish | {"job": "znnpy_steps", "network": name, "corner": self._corner(name)}
        outcome = run_apart(CHILD, request, ram_bytes=parse_bytes(options.ram), seconds=options.run_seconds)
        patch: Vec3 = tuple(outcome.answer.get("patch_out", (0, 0, 0)))
        return self._add(row_of(name, "znnpy", "fp32", patch, outcome, None))

    def peer(self, name: str, peer: Peer, seconds_left: float) -> Row:
        patch = (peer.side, peer.side, peer.side)
        outcome = Outcome({}, "not run: no time left", 0.0)
        corner = str(self._folder / "peer.npy")
        if seconds_left > 0:
            limit = min(self._options.run_seconds, seconds_left)
            request = self._shared | {k: v for k, v in asdict(peer).items() if k != "side"}
            request |= {"job": "torch_patch", "network": name, "patch": patch, "corner": corner}
            request |= {"repeat_seconds": self._options.repeat_seconds}
            outcome = run_apart(CHILD, request, ram_bytes=parse_bytes(self._options.ram), seconds=limit)
        difference = None if outcome.failure else self._difference(name, corner, peer)
        return self._add(row_of(name, str(peer), peer.precision, patch, outcome, difference))

    def _corner(self, name: str) -> str:
        return str(self._folder / f"{Path(name).stem}.npy")

    def _difference(self, name: str, corner: str, peer: Peer) -> float:
        """SystemExit when it is not the same function, or when outputs that are all alike could not tell."""
        a, b = np.load(self._corner(name)), np.load(corner)
        z, y, x = np.minimum(a.shape[1:], b.shape[1:])
        a, b = a[:, :z, :y, :x], b[:, :z, :y, :x]
        spread = float(a.std())
        if not spread > 0:
            raise SystemExit(f"{name}: znnpy's output is {a.flat[0]} in all of {a.shape}: nothing can be compared")
        difference = float(np.sqrt(np.mean(np.square(b - a)))) / spread
        if not difference <= LARGEST_DIFFERENCE[peer.precision]:
            raise SystemExit(f"{name}: {peer} is {difference:.1e} of the output's standard deviation away from znnpy")
        return difference

    def _add(self, row: Row) -> Row:
        self.rows.append(row)
        what = f"{row.network:8} {row.name:44} {text(row.patch_out):>12}"
        if row.failure:
            print(f"{what}  {row.failure}", flush=True)
        else:
            apart = "" if row.difference is None else f"   {row.difference:.1e} apart"
            speed = f"{row.voxels_per_second:11,.0f} voxels/s {row.peak_mib:7,.0f} MiB x{row.border_waste:.2f} borders"
            print(f"{what} {speed}{apart}", flush=True)
        return row


def best(rows: Sequence[Row], precisions: Sequence[str]) -> Row | None:
    """PyTorch's fastest run in one of these precisions."""
    ran = [row for row in rows if row.name.startswith("PyTorch") and row.precision in precisions and not row.failure]
    return max(ran, key=lambda row: row.voxels_per_second, default=None)


def summary(rows: Sequence[Row], mode: str) -> Iterator[dict[str, Any]]:
    """Per network: our figure, what the plan said, and how many times the others it is."""
    for name in dict.fromkeys(row.network for row in rows):
        of_network = [row for row in rows if row.network == name]
        ours = of_network[0].voxels_per_second
        found: dict[str, Any] = {"network": name, "mode": mode, "voxels_per_second": ours}
        if planned := of_network[0].details.get("planned_voxels_per_second"):
            found["of_the_planned"] = ours / planned
        if name in ORIGINAL:
            found["times_original"] = ours / ORIGINAL[name]
        for key, precisions in (("fp32", ("fp32",)), ("bf16", ("bf16",)), ("best", ("fp32", "bf16"))):
            if fastest := best(of_network, precisions):
                found[f"times_torch_{key}"] = ours / fastest.voxels_per_second
                found[f"torch_{key}"] = f"{fastest.name} {text(fastest.patch_out)}"
        yield found


def picture(path: Path, rows: Sequence[Row], header: dict[str, Any], ram: str, mode: str) -> None:
    groups = []
    for name in dict.fromkeys(row.network for row in rows):
        of_network = [row for row in rows if row.network == name and not row.failure]
        shown = [row for row in (*of_network[:1], best(of_network, ["bf16"]), best(of_network, ["fp32"])) if row]
        colours = (bars.OURS, bars.PEER_LESS_EXACT, bars.PEER)
        group = [
            bars.Bar(
                f"{row.name}, {'column by' if row.details.get('column') else 'patch'} {text(row.patch_out)}",
                row.voxels_per_second,
                f"{row.voxels_per_second:,.0f} voxels/s",
                colours[0] if row.name == "znnpy" else colours[1] if row.precision == "bf16" else colours[2],
            )
            for row in shown
        ]
        if name in ORIGINAL:
            speed = ORIGINAL[name]
            group.append(bars.Bar("original ZNNi, measured earlier", speed, f"{speed:,} voxels/s", bars.ORIGINAL))
        groups.append(bars.Group(name, group))
    machine = f"{header['processor']}, {header['layer_threads']} threads, {ram} of memory, {header['date'][:10]}"
    note = "PyTorch: the fastest of all runs in each precision" + (", small patches only" * (mode == "quick"))
    bars.draw(path, "Dense inference, output voxels per second", [machine, note], groups)


def write(options: argparse.Namespace, rows: Sequence[Row], mode: str) -> None:
    """Everything so far, as JSON and as a picture."""
    header = machine_header() | {"layer_threads": options.threads, "ram": options.ram, "mode": mode}
    result = {
        "header": header,
        "summary": list(summary(rows, mode)),
        "original": {"voxels_per_second": ORIGINAL, "source": ORIGINAL_SOURCE},
        "rows": [asdict(row) for row in rows],
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    picture(options.out.with_suffix(".png"), rows, header, options.ram, mode)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--quick", action="store_true", help="under two minutes a network")
    effort.add_argument("--largest", action="store_true", help="PyTorch's largest patches too")
    parser.add_argument("--networks", nargs="+", default=list(FULL), help="names of those that ship, or files")
    parser.add_argument("--ram", default="16G", help="of each process")
    parser.add_argument("--threads", type=int, default=this_machine().cores)
    parser.add_argument("--steps", type=int, default=3, help="with output, that znnpy runs; the first does not count")
    parser.add_argument("--patch", type=int, nargs=3, help="znnpy's output of a step, instead of the plan's")
    parser.add_argument("--only", nargs="*", default=[], help="primitives znnpy may use, where they apply")
    parser.add_argument(
        "--sides", type=int, nargs="*", default=[], help="PyTorch: these output patches, all eight ways"
    )
    parser.add_argument("--precisions", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"])
    parser.add_argument("--layouts", nargs="+", choices=(CL, NC), default=[CL, NC])
    parser.add_argument("--repeat-seconds", type=float, default=20, help="shorter runs of PyTorch are repeated")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--run-seconds", type=float, default=900, help="limit of one run")
    parser.add_argument("--minutes", type=float, help="limit of all runs; 8 quick, 25 full, 75 with --largest")
    name = "-".join(this_machine().processor.lower().split()[:3])
    default = Path(__file__).parent / "results" / f"networks-{name}-{date.today()}.json"
    parser.add_argument("--out", type=Path, default=default, help="the picture stands beside it")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    mode = "quick" if options.quick else "largest" if options.largest else "full"
    if not options.no_torch:
        require_torch()
    end = time.monotonic() + 60 * (options.minutes or FULL_MINUTES[mode])
    with tempfile.TemporaryDirectory() as folder:
        match = Match(options, Path(folder))
        for name in options.networks:
            if reason := match.ours(name).failure:
                raise SystemExit(f"{name}: znnpy did not run, so there is nothing to compare with: {reason}")
            write(options, match.rows, mode)
        peers = [] if options.no_torch else [peers_of(name, mode, options) for name in options.networks]
        for round_of_peers in zip_longest(*peers):  # in turn, so that every network has its best when time is up
            for name, peer in zip(options.networks, round_of_peers, strict=True):
                if peer is not None:
                    match.peer(name, peer, end - time.monotonic())
                    write(options, match.rows, mode)
    for found in summary(match.rows, mode):
        print(json.dumps(found))
    print(options.out)


def require_torch() -> None:
    if find_spec("torch") is None:
        raise MissingExtraError("the comparison needs PyTorch, which is not installed; pip install 'znnpy[bench]'")


if __name__ == "__main__":
    without_forced_blas_kernels()
    device, words = taken_device()
    if device == "gpu":
        import networks_gpu

        networks_gpu.main(words)
    else:
        main(words)
