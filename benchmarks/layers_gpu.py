"""One layer on a GPU, every way to compute it, and PyTorch's conv3d (cuDNN) beside them.

    python benchmarks/layers.py --device gpu [--sets main first last pools] [--kernels 3 5] [--precisions tf32 fp16]
                                [--only NAME ...] [--no-torch] [--minutes 6] [--out RESULT.json]

Rounds are interleaved: each runs every competitor once, in an order that alternates, after a warm run, timed by events
of the device; work of less than 4 ms is queued several times. Bias and ReLU count on all sides. Of a primitive the
variant that ran fastest takes part: of each size of tile the one that the cost model likes best is tried, then the
others of the fastest size. cuDNN's algorithm is what PyTorch's benchmark mode finds fastest; channels last, in float32
contiguous too. What would take longer than `--slow-seconds` runs on a smaller volume; `measured` says which, and a star
in the table. Kernel spectra and weights in PyTorch's formats are made before, as in a run over many patches.

Errors are rms over the rms of the float64 definition, of boxes at the beginning, in the middle and at the end of the
output; inputs are ReLUs of normal numbers, and what rounding them to float16 costs counts. A competitor beyond the
limit of its precision is void, and so is one in tf32 that is as exact as float32: they are listed, and the exit code is
1. Shares of limits: what bytes and operations of the primitive's own account take at the speed of a copy and of a
matrix product, measured in the same run. Of the fastest primitive and of PyTorch's fastest, what PyTorch's profiler
sees of one run is kept: kernels and their times, which are the times of the stages.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from math import prod
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import bars
from gpu_card import (
    Device,
    copy_rate,
    gpu_header,
    kernels_of,
    often,
    product_rates,
    shares,
    torch_on_the_card,
)
from layer_cases_gpu import DEFAULT, QUICK, SETS, GpuCase, sized
from layer_entries_gpu import Entry, Input, Ours, random_input, rms_error, torch_entries
from pen import Colour

from znnpy.shapes import PRECISIONS, Precision, text

if TYPE_CHECKING:
    from znnpy.machine import Machine

MAX_ERROR = {"fp32": 1e-5, "tf32": 2e-3, "fp16": 5e-3, "bf16": 2e-2}  # beyond, a figure is void
LEAST_ERROR = {"tf32": 1e-5}  # below, it was not computed in this precision by PyTorch


@dataclass(frozen=True, slots=True)
class Row:
    """One competitor in one case."""

    set: str
    why: str
    kernel: int  # or window
    shape: str
    asked: str  # precision of the case
    name: str
    precision: str  # that it computes in
    variant: str
    measured: str  # volume it ran on: that of `shape`, or a smaller one
    is_smaller: bool
    seconds: tuple[float, ...]  # of every round
    voxels: int  # of output, of the measured volume; for a pooling of input
    error: float
    bytes_per_second: float  # input and output, each once
    shares: dict[str, float]  # of the card's limits, for a primitive; of_copy for everybody
    predicted_seconds: float
    scratch_bytes: int
    resident_bytes: int
    kernels: tuple[dict[str, Any], ...]

    @property
    def ns(self) -> float:
        """Nanoseconds per voxel."""
        return 1e9 * median(self.seconds) / self.voxels

    @property
    def is_ours(self) -> bool:
        return not self.name.startswith("PyTorch")


class Bench:
    """A device, what it can do at most, and what was measured on it."""

    def __init__(self, device: Device, machine: Machine, options: argparse.Namespace) -> None:
        self._device, self._machine, self._options = device, machine, options
        self._end = time.monotonic() + 60 * options.minutes
        self._cuda = torch_on_the_card()
        self._nbytes = 2**30 if self._cuda else 2**16
        self.copied = copy_rate(device, self._nbytes)
        self.products = product_rates() if self._cuda else {}
        self.rows: list[list[Row]] = []
        self.left_out: list[str] = []  # cases that were not measured, or not yet
        self.void: list[str] = []

    def run(self, cases: Sequence[tuple[GpuCase, Precision]]) -> Iterator[list[Row]]:
        """Case after case, until the time is up."""
        shapes = [replace(case.shape, precision=precision) for case, precision in cases]
        self.left_out = list(map(str, shapes))
        for (case, _), shape in zip(cases, shapes, strict=True):
            if time.monotonic() > self._end:
                break
            rows = self._measure(case, random_input(shape, self._device))
            self.left_out.pop(0)
            if self._cuda:
                import torch

                torch.cuda.empty_cache()
            if rows:
                self.rows.append(rows)
                yield rows
        self.copied = (self.copied + copy_rate(self._device, self._nbytes)) / 2

    def _measure(self, case: GpuCase, given: Input) -> list[Row]:
        options = self._options
        print(f"\n{given.shape}: {case.why}", flush=True)
        ours = Ours(given, self._device, self._machine, options)
        found = [(entry, self._error(entry)) for entry in ours.entries(self.void)]
        if options.torch:
            where = "cuda" if self._cuda else "cpu"
            peers = torch_entries(given, options.slow_seconds, where)
            found += [(entry, self._error(entry)) for entry in peers]
        right = [(entry, error) for entry, error in found if error is not None]
        self._compete([entry for entry, _ in right])
        return [self._row(case, given, entry, error, self._kernels(entry, right)) for entry, error in right]

    def _kernels(self, entry: Entry, all_of_them: Sequence[tuple[Entry, float]]) -> tuple[dict[str, Any], ...]:
        """Those that one run starts, of the fastest primitive and PyTorch's fastest: to look is slow."""
        alike = [other for other, _ in all_of_them if bool(other.work) == bool(entry.work)]
        if not self._cuda or entry is not min(alike, key=_ns):
            return ()
        return tuple(kernels_of(lambda: entry.clock.seconds(entry.run)))

    def _error(self, entry: Entry) -> float | None:
        """Of a run on an output that held no numbers; None where its figure would be void."""
        if entry.poison is not None:
            entry.poison()
        try:
            entry.clock.seconds(entry.run)
        except RuntimeError as failure:  # PyTorch's and cuDNN's own, and a DeviceError: told, and the rest is measured
            self.void.append(
                f"{entry.name} {entry.precision} {entry.variant} on {entry.measured}: {str(failure)[:300]}"
            )
            print(f"  VOID {self.void[-1]}", flush=True)
            return None
        error = rms_error(entry)
        too_exact = self._cuda and entry.poison is None and error < LEAST_ERROR.get(entry.precision, 0)
        if error <= MAX_ERROR[entry.precision] and not too_exact:
            return error
        self.void.append(f"{entry.name} {entry.precision} {entry.variant} on {entry.measured}: rms error {error:.1e}")
        print(f"  VOID {self.void[-1]}", flush=True)
        return None

    def _compete(self, entries: Sequence[Entry]) -> None:
        repeats = [often(entry.clock.seconds(entry.run)) for entry in entries]
        turns = list(zip(entries, repeats, strict=True))
        for index in range(self._options.rounds):
            for entry, times in turns if index % 2 == 0 else reversed(turns):
                entry.seconds.append(entry.clock.seconds(entry.run, times))

    def _row(self, case: GpuCase, given: Input, entry: Entry, error: float, kernels: tuple[dict[str, Any], ...]) -> Row:
        spent, shape = median(entry.seconds), entry.measured
        per_second = (shape.in_bytes + shape.out_bytes) / spent
        found = {"of_copy": per_second / self.copied}
        if entry.work:
            found |= shares(entry.work, spent, self.copied, self.products)
        return Row(
            set=case.set,
            why=case.why,
            kernel=case.kernel,
            shape=str(given.shape),
            asked=given.shape.precision,
            name=entry.name,
            precision=entry.precision,
            variant=entry.variant,
            measured=text(shape.in_shape[1:4]),
            is_smaller=shape != given.shape,
            seconds=tuple(entry.seconds),
            voxels=prod((shape.in_shape if shape.kind == "pool" else shape.out_shape)[:4]),
            error=error,
            bytes_per_second=per_second,
            shares=found,
            predicted_seconds=entry.predicted,
            scratch_bytes=entry.scratch_bytes,
            resident_bytes=entry.resident_bytes,
            kernels=kernels,
        )


def _ns(entry: Entry) -> float:
    """Seconds a voxel, but for a factor: some ran on smaller volumes."""
    return median(entry.seconds) / prod(entry.measured.out_shape[:4])


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Of one case: our fastest method, cuDNN by our primitives, PyTorch's best; how many times cuDNN's best ours is."""
    own = [row for row in rows if row.is_ours and "cudnn" not in row.name]
    cudnn = [row for row in rows if row.is_ours and "cudnn" in row.name]
    peers = [row for row in rows if not row.is_ours]
    found: dict[str, Any] = {key: getattr(rows[0], key) for key in ("set", "kernel", "shape")}
    found["precision"] = rows[0].asked
    for key, some in (("own", own), ("cudnn", cudnn), ("torch", peers)):
        if some:
            row = min(some, key=lambda row: row.ns)
            found[key] = f"{row.name} {row.variant}".strip()
            found[f"{key}_precision"] = row.precision
            found[f"{key}_ns"] = row.ns
            found[f"{key}_error"] = row.error
    others = [found[f"{key}_ns"] for key in ("cudnn", "torch") if f"{key}_ns" in found]
    if own and others:
        found["times_cudnn"] = min(others) / found["own_ns"]
        chosen = min(found.get(f"{key}_ns", float("inf")) for key in ("own", "cudnn"))
        found["is_slower_than_torch"] = bool(peers) and chosen > found["torch_ns"]
    return found


def show(rows: Sequence[Row]) -> None:
    """A table of one case on stdout."""
    head = f"{'ns/voxel':>10}{'min':>8}{'error':>9}{'GB/s':>7}{'memory':>8}{'arithm.':>8}{'both':>6}{'predicted':>10}"
    print(f"  {'':56}{head}")
    for row in sorted(rows, key=lambda row: row.ns):
        star = f" * {row.measured}" if row.is_smaller else ""
        part = {key: f"{value:.2f}" for key, value in row.shares.items()}
        limits = f"{part.get('of_memory', ''):>8}{part.get('of_arithmetic', ''):>8}{part.get('of_both', ''):>6}"
        predicted = f"{row.predicted_seconds / median(row.seconds):10.2f}" if row.predicted_seconds else ""
        least = 1e9 * min(row.seconds) / row.voxels
        figures = f"{row.ns:10.3f}{least:8.3f}{row.error:9.1e}{row.bytes_per_second / 1e9:7.0f}{limits}{predicted}"
        print(f"  {f'{row.name} {row.precision} {row.variant}{star}'[:56]:56}{figures}", flush=True)


def show_all(found: Sequence[dict[str, Any]]) -> None:
    """Every case in one line: is cuDNN ever faster?"""
    print(f"\n{'':8}{'k':>3} {'':6}{'own':>8}{'cuDNN':>9}{'PyTorch':>9}{'times':>7}  fastest of our own")
    for case in found:
        columns = "".join(
            f"{case[f'{key}_ns']:{width}.3f}" if f"{key}_ns" in case else f"{'':{width}}"
            for key, width in (("own", 8), ("cudnn", 9), ("torch", 9))
        )
        times = f"{case['times_cudnn']:7.2f}" if "times_cudnn" in case else f"{'':7}"
        slower = "  SLOWER than PyTorch whatever is chosen" if case.get("is_slower_than_torch") else ""
        line = f"{case['set']:8}{case['kernel']:3} {case['precision']:6}{columns}{times}  {case.get('own', '')}{slower}"
        print(line, flush=True)


def write(bench: Bench, out: Path, header: dict[str, Any]) -> None:
    """Everything so far, as JSON, and the wide layers as a picture."""
    result = {
        "header": header,
        "limits": {"copied_bytes_per_second": bench.copied, "product_flops": bench.products},
        "left_out": bench.left_out,
        "void": bench.void,
        "summary": [summary(rows) for rows in bench.rows],
        "rows": [asdict(row) | {"ns": row.ns} for rows in bench.rows for row in rows],
    }
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    groups = []
    pictured = [rows for rows in bench.rows if rows[0].set == "main"] or bench.rows
    for rows in pictured:
        ordered = shown(rows)
        best = next((row for row in ordered if row.is_ours), None)
        group = [
            bars.Bar(
                f"{row.name} {row.precision} {row.variant}{' *' * row.is_smaller}"[:58],
                row.ns,
                f"{row.ns:.2f} ns" + (f" ({row.ns / best.ns:.1f}x)" if best and row is not best else ""),
                _colour(row, best),
            )
            for row in ordered
        ]
        groups.append(bars.Group(rows[0].shape, group))
    notes = [f"{header['gpu']['name']}, {header['date'][:10]}; less is better"]
    if any(row.is_smaller for rows in pictured for row in shown(rows)):
        notes.append("* per voxel of a smaller volume")
    bars.draw(out.with_suffix(".png"), "Nanoseconds per output voxel of one layer (poolings: of input)", notes, groups)


def shown(rows: Sequence[Row]) -> list[Row]:
    """Of one case, the fastest of our own methods, of cuDNN by our primitives, and of PyTorch in each precision."""
    fastest: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: row.ns):
        who = ("cudnn" if "cudnn" in row.name else "own") if row.is_ours else f"torch {row.precision}"
        fastest.setdefault(who, row)
    return list(fastest.values())


def _colour(row: Row, best: Row | None) -> Colour:
    if row.is_ours:
        return bars.OURS if row is best else bars.OURS_TOO
    return bars.PEER_LESS_EXACT if row.precision == "bf16" else bars.PEER


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=[*SETS, "all"], default=list(DEFAULT))
    parser.add_argument("--kernels", type=int, nargs="*", help="only cases whose kernel or window is one of these")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["tf32", "fp16", "fp32"])
    parser.add_argument("--size", type=int, help="volumes of this many voxels along every axis, instead of the set's")
    parser.add_argument("--only", nargs="*", help="only these primitives")
    parser.add_argument("--variants", type=int, default=12, help="that are tried at most, twice, of a primitive")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--slow-seconds", type=float, default=0.1, help="of one run; longer ones get a smaller volume")
    parser.add_argument("--minutes", type=float, default=6.0, help="no case begins later")
    parser.add_argument("--no-torch", dest="torch", action="store_false")
    parser.add_argument("--quick", action="store_true", help="tiny cases, to see that everything works")
    parser.add_argument("--out", type=Path, help="default: results/layers-GPU-DATE.json; none with --quick")
    return parser.parse_args(arguments)


def chosen(options: argparse.Namespace) -> list[tuple[GpuCase, Precision]]:
    """The cases of the words that were given, each in every precision."""
    sets = list(SETS) if "all" in options.sets else options.sets
    cases = list(QUICK) if options.quick else [case for name in sets for case in SETS[name]]
    if options.kernels:
        cases = [case for case in cases if case.kernel in options.kernels]
    if options.size:
        cases = [sized(case, (options.size,) * 3) for case in cases]
    return [(case, precision) for case in cases for precision in options.precisions]


def benchmark(device: Device, machine: Machine, options: argparse.Namespace) -> None:
    """All cases on this device."""
    header = gpu_header(device.gpu)
    name = "-".join(device.gpu.name.lower().split())
    out = options.out or Path(__file__).parent / "results" / f"layers-{name}-{date.today()}.json"
    bench = Bench(device, machine, options)
    rates = {precision: f"{rate / 1e12:.0f} TFLOP/s" for precision, rate in bench.products.items()}
    print(f"{device.gpu.name}: copy {bench.copied / 1e12:.2f} TB/s, products {rates or 'not measured'}", flush=True)
    for rows in bench.run(chosen(options)):
        show(rows)
        if options.out or not options.quick:
            write(bench, out, header)
    if options.out or not options.quick:
        write(bench, out, header)  # what was left out, or void, after the last that has rows
    show_all([summary(rows) for rows in bench.rows])
    if bench.left_out:
        print(f"no time left for {', '.join(bench.left_out)}")
    if bench.void:
        raise SystemExit("void:\n" + "\n".join(bench.void))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    if options.torch:
        from layers import require_torch

        require_torch()
    from znnpy.kernels.gpu.device import Device, find_gpu
    from znnpy.machine import this_machine

    gpu = find_gpu()
    with Device(gpu) as device:
        benchmark(device, replace(this_machine(), gpu=gpu), options)
