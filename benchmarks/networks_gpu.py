"""Whole networks on one GPU, from a volume in the host's memory to its dense prediction there: znnpy, and PyTorch.

    python benchmarks/networks.py --device gpu [--networks n337 ...] [--precisions tf32 fp16 fp32] [--no-torch]
                                  [--side 1024] [--vram 60G] [--minutes 8] [--out RESULT.json]

The volume is noise, uint8, `--side` voxels along every axis; the output is float32, valid, and every part of it is
written. Weights are random. znnpy runs the whole volume by its own plan: `voxels_per_second` is the whole run with the
filling and draining of its pipeline, `steady` the share of all work that is done per second in between; either counts
borders and transfers. What is prepared once for all patches (plan, kernels compiled, their spectra, pinned buffers) is
told apart: the second of two runs counts, as PyTorch's patches after the first do.

PyTorch, as fragments in bf16, tf32 and fp32 and dilated in bf16, runs single patches of the same volume, each from
voxels in the host's memory to a prediction there; the median, times the patches that cover the output, is its time for
the whole volume. For each convolution the fastest of the first `--algorithms` that cuDNN names is taken. From the
largest patch whose tensors have no more than 2^31 values (beyond, PyTorch's kernels fail) the volume is halved where it
does not fit or would take too long, and once more, until a smaller one is slower. The best counts.

Outputs are compared: znnpy's of every precision with PyTorch's in float32, on the first voxels.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.util import find_spec
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import bars
import numpy as np
from gpu_card import gpu_header
from networks import border_waste, require_torch

from znnpy.formats.networks import read_network
from znnpy.machine import this_machine
from znnpy.patches import cover
from znnpy.shapes import PRECISIONS, Vec3, text

CHILD = Path(__file__).with_name("contestants_gpu.py")
NETWORKS = ("n337", "n537", "n726", "n926")
PEERS = ("bf16", "tf32", "fp32")
LAYOUT = {"fp32": "contiguous"}  # channels last for the others
HALF: float = 0.5 ** (1 / 3)  # of a side: half the volume
MOST_VALUES = 2**31 - 1  # of a tensor in PyTorch
LARGEST_DIFFERENCE = {"fp32": 1e-4, "tf32": 2e-2, "fp16": 5e-2}  # rms over the output's: else a figure is void
ORIGINAL = {"n337": 1.06e6, "n537": 0.33e6, "n726": 0.47e6, "n926": 0.375e6}
ORIGINAL_SOURCE = "ZNNi (SC16), Table V: a Titan X and 72 cores together, voxels/s"


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant with one network."""

    network: str
    name: str
    precision: str
    patch_out: Vec3
    voxels_per_second: float  # of output, of the whole volume; 0 when it failed
    steady_voxels_per_second: float  # PyTorch: the same, it prepares nothing and fills no pipeline
    border_waste: float  # arithmetic over that of the same output inside an endless patch; 0 if unknown
    vram_gib: float
    difference: float | None  # rms from PyTorch's float32 output, over that output's rms
    failure: str | None
    details: dict[str, Any]
    header: int = 0  # of those that were joined, the one it was measured under


def lines_of(request: dict[str, Any], seconds: float) -> tuple[list[dict[str, Any]], str | None]:
    """What a child says line by line, and why it ended early, if it did."""
    failure = None
    try:
        done = subprocess.run(
            [sys.executable, str(CHILD)], input=json.dumps(request), capture_output=True, text=True, timeout=seconds
        )
        said = done.stdout
        if done.returncode:
            failure = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:400]
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        failure = f"not done after {seconds:.0f} s"
    return [json.loads(line) for line in said.splitlines() if line.startswith("{") and line.endswith("}")], failure


def sides(name: str, smallest: int = 24) -> list[int]:
    """Output sides for PyTorch: the largest within MOST_VALUES, then half the volume each time."""
    network = read_network(name).network
    period, found = max(network.period), []
    side = smallest
    while max(prod(shape.out_shape) for shape in network.layer_shapes((side + period,) * 3)) <= MOST_VALUES:
        side += period
    side = side // period * period
    while side >= smallest:
        found.append(side)
        side = int(side * HALF) // period * period
    return found or [period]


class Match:
    """Runs contestants network by network and keeps what they gave."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._end = time.monotonic() + 60 * options.minutes
        self.rows: list[Row] = []

    def _left(self) -> float:
        return max(1.0, float(self._end - time.monotonic()))

    def peers(self, name: str) -> None:
        """PyTorch's ways, within `--torch-seconds`."""
        options = self._options
        ways = [(p, "fragments", LAYOUT.get(p, "channels_last_3d")) for p in options.fragments]
        ways += [(p, "dilated", LAYOUT.get(p, "channels_last_3d")) for p in options.dilated]
        best: dict[int, Row] = {}
        request = {
            "job": "torch_patches",
            "network": name,
            "side": options.side,
            "on": options.torch_on,
            "run_seconds": options.run_seconds,
            "repeat_seconds": options.repeat_seconds,
            "algorithms": options.algorithms,
            "corner": str(self._folder / f"{Path(name).stem}-reference.npy"),
        }
        end = time.monotonic() + min(options.torch_seconds, self._left())
        least = min(read_network(name).network.dense_size((options.side,) * 3))
        todo = [(*way, [side for side in options.patches or sides(name) if side <= least]) for way in ways]
        while todo and end - time.monotonic() > 1:
            left = end - time.monotonic()
            answers, failure = lines_of(request | {"ways": todo, "seconds": 0.7 * left}, left + 20)
            for way, row in self._of_ways(name, answers):
                number = ways.index(way)
                if number not in best or row.voxels_per_second > best[number].voxels_per_second:
                    best[number] = row
            if failure is None:
                break
            print(f"{name:6} PyTorch's process: {failure}", flush=True)
            reached, patch = max(
                ((a["way"], -a["patch_out"][0]) for a in answers if "way" in a), default=(len(todo), 0)
            )
            todo = todo[reached:]
            if todo:  # what killed it is not tried again, smaller patches are
                *way_of_it, those = todo[0]
                todo[0] = (*way_of_it, [side for side in those if side < -patch])
        for number, way in enumerate(ways):
            self._add(best.get(number) or _failed(name, f"PyTorch {way[1]}", way[0], "not run: no time left"))

    def _of_ways(self, name: str, answers: Sequence[dict[str, Any]]) -> Iterator[tuple[tuple[str, str, str], Row]]:
        """A row for every patch that was tried; the last word on each patch counts."""
        last = {(a["precision"], a["method"], a["layout"], tuple(a["patch_out"])): a for a in answers if "way" in a}
        output = read_network(name).network.dense_size((self._options.side,) * 3)
        for (precision, method, layout, patch), answer in last.items():
            count = len(cover(output, patch))
            speed = prod(output) / (count * median(answer["seconds"])) if answer["failure"] is None else 0.0
            yield (
                (precision, method, layout),
                Row(
                    network=name,
                    name=f"PyTorch {method}",
                    precision=precision,
                    patch_out=patch,
                    voxels_per_second=speed,
                    steady_voxels_per_second=speed,
                    border_waste=border_waste(name, patch) * count * prod(patch) / prod(output),
                    vram_gib=answer.get("vram_bytes", 0) / 2**30,
                    difference=None,
                    failure=answer["failure"],
                    details={"layout": layout, "seconds": answer.get("seconds", []), "patches": count},
                ),
            )

    def ours(self, name: str) -> None:
        """znnpy in every precision."""
        options = self._options
        corner = str(self._folder / Path(name).stem)
        request = {
            "job": "znnpy_volume",
            "network": name,
            "precisions": options.precisions,
            "corner": corner,
            **{word: getattr(options, word) for word in ("side", "ram", "vram", "threads", "patch", "only")},
        }
        answers, failure = lines_of(request, min(options.our_seconds, self._left() + 60))
        for answer in answers:
            precision = answer["precision"]
            if answer.get("failure"):
                self._add(_failed(name, "znnpy", precision, answer["failure"]))
                continue
            difference = self._difference(name, f"{corner}-{precision}.npy")
            void = answer["not_written"] or (difference is not None and not difference <= LARGEST_DIFFERENCE[precision])
            self._add(
                Row(
                    network=name,
                    name="znnpy",
                    precision=precision,
                    patch_out=tuple(answer.pop("patch_out")),
                    voxels_per_second=answer.pop("voxels_per_second"),
                    steady_voxels_per_second=answer.pop("steady_voxels_per_second"),
                    border_waste=answer.pop("border_waste"),
                    vram_gib=answer["vram_bytes"] / 2**30,
                    difference=difference,
                    failure=f"void: {answer['not_written']} voxels not written, {difference} off" if void else None,
                    details=answer,
                )
            )
        for precision in options.precisions[len(answers) :]:
            self._add(_failed(name, "znnpy", precision, failure or "no answer"))

    def _difference(self, name: str, corner: str) -> float | None:
        reference = self._folder / f"{Path(name).stem}-reference.npy"
        if not reference.exists():
            return None
        a, b = np.load(reference), np.load(corner)
        z, y, x = np.minimum(a.shape[1:], b.shape[1:])
        a, b = a[:, :z, :y, :x].astype(np.float64), b[:, :z, :y, :x]
        rms = float(np.sqrt(np.mean(np.square(a))))
        if not rms > 0:
            raise SystemExit(f"{name}: PyTorch's output is 0 in all of {a.shape}: nothing can be compared")
        return float(np.sqrt(np.mean(np.square(a - b)))) / rms

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        what = f"{row.network:6} {row.name:18} {row.precision:5} {text(row.patch_out):>12}"
        if row.failure:
            print(f"{what}  {row.failure}", flush=True)
            return
        apart = "" if row.difference is None else f"   {row.difference:.1e} apart"
        speeds = f"{row.voxels_per_second / 1e6:8.2f} M voxels/s, steady {row.steady_voxels_per_second / 1e6:8.2f}"
        print(f"{what} {speeds} {row.vram_gib:6.1f} GiB x{row.border_waste:.2f} borders{apart}", flush=True)


def _failed(name: str, who: str, precision: str, why: str) -> Row:
    return Row(name, who, precision, (0, 0, 0), 0.0, 0.0, 0.0, 0.0, None, why, {})


def summary(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Per network and precision: our figures, what the plan said, and how many times PyTorch's best they are."""
    for row in rows:
        if row.name != "znnpy" or row.failure:
            continue
        found: dict[str, Any] = {"network": row.network, "precision": row.precision}
        found["voxels_per_second"], found["steady"] = row.voxels_per_second, row.steady_voxels_per_second
        found["of_the_planned"] = row.steady_voxels_per_second / row.details["planned_voxels_per_second"]
        for precision in PEERS:
            if peer := best(rows, row.network, precision):
                found[f"times_torch_{precision}"] = row.voxels_per_second / peer.voxels_per_second
                found[f"torch_{precision}"] = f"{peer.name} {text(peer.patch_out)}"
        if row.network in ORIGINAL:
            found["times_original"] = row.voxels_per_second / ORIGINAL[row.network]
        yield found


def best(rows: Sequence[Row], network: str, precision: str) -> Row | None:
    """PyTorch's fastest."""
    ran = [r for r in rows if r.network == network and r.precision == precision and r.name != "znnpy" and not r.failure]
    return max(ran, key=lambda row: row.voxels_per_second, default=None)


def write(options: argparse.Namespace, rows: Sequence[Row], header: dict[str, Any]) -> None:
    """Everything so far, as JSON and as a picture."""
    result = {
        "header": {"side": options.side, "vram": options.vram, "monai": _monai()} | header,
        "summary": list(summary(rows)),
        "original": {"voxels_per_second": ORIGINAL, "source": ORIGINAL_SOURCE},
        "rows": [asdict(row) for row in rows],
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    groups = []
    for name in dict.fromkeys(row.network for row in rows):
        shown = [row for row in rows if row.network == name and row.name == "znnpy" and not row.failure]
        shown += [row for precision in PEERS if (row := best(rows, name, precision))]
        group = [
            bars.Bar(
                f"{row.name} {row.precision}, {text(row.patch_out)}",
                row.voxels_per_second,
                f"{row.voxels_per_second / 1e6:,.2f} M voxels/s",
                bars.OURS if row.name == "znnpy" else bars.PEER_LESS_EXACT if row.precision == "bf16" else bars.PEER,
            )
            for row in shown
        ]
        if name in ORIGINAL:
            speed = ORIGINAL[name]
            group.append(bars.Bar("ZNNi, 2016: Titan X + 72 cores", speed, f"{speed / 1e6:.2f} M", bars.ORIGINAL))
        groups.append(bars.Group(Path(name).stem, group))
    volume = f"volume of {options.side}^3 from the host's memory into the host's memory, borders and transfers counted"
    notes = [
        f"{header['gpu']['name']}, {header['date'][:10]}; {volume}",
        "PyTorch: its best patch, as many as cover it",
    ]
    bars.draw(options.out.with_suffix(".png"), "Dense inference on one GPU, output voxels per second", notes, groups)


def join(options: argparse.Namespace) -> None:
    """All rows of several results in one, failures too; each says under which of their headers it was measured."""
    headers: list[dict[str, Any]] = []
    rows = []
    for path in options.join:
        one = json.loads(path.read_text())
        for row in one["rows"]:
            header = len(headers) + (row["header"] if "joined" in one["header"] else 0)
            rows.append(Row(**row | {"patch_out": tuple(row["patch_out"]), "header": header}))
        headers += one["header"].get("joined", [one["header"]])
    (options.side,) = {header["side"] for header in headers}
    write(options, rows, headers[0] | {"joined": headers})


def _monai() -> str:
    return "there, not run" if find_spec("monai") else "not installed"


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), help="names of those that ship, or files")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["tf32", "fp16", "fp32"], help="znnpy's")
    parser.add_argument("--fragments", nargs="*", choices=PEERS, default=list(PEERS), help="PyTorch's precisions")
    parser.add_argument("--dilated", nargs="*", choices=PEERS, default=["bf16"], help="and with gaps in its kernels")
    parser.add_argument("--side", type=int, default=1024, help="of the volume")
    parser.add_argument("--vram", help="of the GPU for znnpy; default: nine tenths of what is free")
    parser.add_argument("--ram")
    parser.add_argument("--threads", type=int, default=this_machine().cores)
    parser.add_argument("--patch", type=int, nargs=3, help="znnpy's output of a step, instead of the plan's")
    parser.add_argument("--only", nargs="*", default=[], help="primitives znnpy may use, where they apply")
    parser.add_argument("--patches", type=int, nargs="*", default=[], help="PyTorch: these output sides, largest first")
    parser.add_argument("--run-seconds", type=float, default=6, help="PyTorch: patches that take longer are not tried")
    parser.add_argument("--repeat-seconds", type=float, default=3, help="PyTorch: shorter runs are repeated")
    parser.add_argument("--algorithms", type=int, default=4, help="of cuDNN, tried for each convolution in PyTorch")
    parser.add_argument("--torch-on", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--torch-seconds", type=float, default=50, help="for all ways of PyTorch, of a network")
    parser.add_argument("--our-seconds", type=float, default=200, help="limit of znnpy's process of a network")
    parser.add_argument("--minutes", type=float, default=8.0, help="limit of all runs")
    parser.add_argument("--no-torch", dest="torch", action="store_false")
    parser.add_argument("--join", type=Path, nargs="+", help="measure nothing: make one result of these, in --out")
    parser.add_argument(
        "--out", type=Path, help="default: results/networks-GPU-DATE.json; the picture stands beside it"
    )
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    from znnpy.kernels.gpu.device import find_gpu

    options = arguments(given)
    if options.join:
        join(options)
        return
    if options.torch:
        require_torch()
    gpu = find_gpu()
    header = gpu_header(gpu)
    name = "-".join(gpu.name.lower().split())
    options.out = options.out or Path(__file__).parent / "results" / f"networks-{name}-{date.today()}.json"
    print(f"{gpu.name}; MONAI's sliding window: {_monai()}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        match = Match(options, Path(folder))
        for network in options.networks:
            for measure in (match.peers, match.ours) if options.torch else (match.ours,):
                measure(network)
                write(options, match.rows, header)  # a run may be killed before it ends
    for found in summary(match.rows):
        print(json.dumps(found))
    print(options.out)
    failed = [
        f"{row.network} {row.precision}: {row.failure}" for row in match.rows if row.name == "znnpy" and row.failure
    ]
    if failed:
        raise SystemExit("znnpy failed:\n" + "\n".join(failed))
