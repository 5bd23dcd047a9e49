"""Parallel efficiency: convolution layers with 1, 2, 4, .. threads, beside what the machine itself gives to as many.

    python benchmarks/threads.py [--threads 1 2 4 8 16] [--only NAME ...] [--cases N ...] [--rounds N] [--quick]
                                 [--out RESULT.json]

Efficiency is t1 / (N tN), of medians. Rounds are interleaved: each runs every number of threads once, in an order that
alternates, after one warm run. With each number of threads the fastest of the variants takes part that the cost model
likes best, so that one thread is not handicapped by what suits sixteen.

Two limits, measured in the same rounds, each thread for itself, so that nobody waits for anybody:
    products  of matrices in a core's own cache, in FLOP/s: what is left of the cores' arithmetic when all of them run
              (clocks fall, cores may be halves of one core, others may use the machine);
    copy      of arrays too large for the caches, bytes read and written: what the memory gives.
No program of any kind is more efficient than both of them say.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import date
from math import prod
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import bars
import numpy as np
from header import machine_header, without_forced_blas_kernels

from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.crew import Crew
from znnpy.kernels.primitive import ConvWeights
from znnpy.kernels.table import of_kind
from znnpy.machine import this_machine
from znnpy.planner.cost_model import assumed_rates, seconds
from znnpy.shapes import ConvShape

if TYPE_CHECKING:
    from znnpy.kernels.primitive import Array, Bytes, Primitive, Variant

MAX_ERROR = 1e-4  # of the largest output, between any two runs: else a figure is void
PAUSE = 0.01  # seconds before a run
SIDE = 384  # of the matrices of the limit: three of them fit a cache of 2 MiB, and products are cut to fit smaller ones
COPIED = 2**27  # bytes a thread reads, and as many it writes, of the other limit


@dataclass(frozen=True, slots=True)
class Case:
    """One layer. `why` says what the row is there to show."""

    shape: ConvShape
    why: str


def layer(k: int, n: int, batch: int = 1) -> ConvShape:
    return ConvShape(batch, 80, 80, (n, n, n), (k, k, k), "relu")


CASES = (
    Case(layer(3, 100), "one image, k = 3: the most memory traffic for its arithmetic"),
    Case(layer(5, 100), "one image, k = 5"),
    Case(layer(9, 100), "one image, k = 9: large tiles, few of them"),
    Case(layer(3, 40, 64), "64 fragments, as after two poolings, k = 3"),
    Case(layer(5, 40, 64), "64 fragments, k = 5"),
    Case(layer(9, 40, 64), "64 fragments, k = 9"),
)
QUICK = (Case(ConvShape(2, 16, 17, (11, 9, 10), (3, 2, 3), "relu"), "that the script works"),)


@dataclass(slots=True)
class Entry:
    """One primitive with one number of threads, bound; or a limit. `run` returns what is recorded."""

    name: str
    threads: int
    variant: str
    run: Callable[[], float]
    found: list[float] = field(default_factory=list)  # seconds, or a rate of a limit, of every round


@dataclass(frozen=True, slots=True)
class Row:
    """One primitive, or limit, in one case with one number of threads."""

    shape: str
    why: str
    name: str
    threads: int
    variant: str
    found: tuple[float, ...]  # of every round: seconds; FLOP/s of "products", bytes per second of "copy"
    efficiency: float  # against the fewest threads, of medians


def each_for_itself(crew: Crew, work: Callable[[int], float], least_seconds: float) -> float:
    """Sum of the workers' rates: each repeats its `work`, which says how much it was, for `least_seconds` at least."""
    rates = [0.0] * crew.threads

    def piece(lo: int, hi: int, worker: int) -> None:
        del worker
        for index in range(lo, hi):
            begin, done = time.perf_counter(), 0.0
            while (spent := time.perf_counter() - begin) < least_seconds:
                done += work(index)
            rates[index] = done / spent

    crew.each(piece, crew.threads)
    return sum(rates)


def products(crew: Crew, least_seconds: float) -> Callable[[], float]:
    """FLOP/s of all threads, in caches of their own."""
    rng = np.random.default_rng(20261121)
    left, right = (rng.standard_normal((crew.threads, SIDE, SIDE), np.float32) for _ in range(2))
    out = np.zeros_like(left)

    def work(index: int) -> float:
        np.matmul(left[index], right[index], out=out[index])
        return 2.0 * SIDE**3

    return lambda: each_for_itself(crew, work, least_seconds)


def copy(crew: Crew, least_seconds: float, nbytes: int) -> Callable[[], float]:
    """Bytes per second that all threads read and write, each from and to memory of its own."""
    source, target = (np.ones((crew.threads, nbytes), np.uint8) for _ in range(2))

    def work(index: int) -> float:
        target[index] = source[index]
        return 2.0 * nbytes

    return lambda: each_for_itself(crew, work, least_seconds)


class Layer:
    """Input, weights and output of a case, and memory that all bound steps share: they run one at a time."""

    def __init__(self, shape: ConvShape) -> None:
        rng = np.random.default_rng(20261121)
        self.shape = shape
        self.x: Array = aligned_bytes(shape.in_bytes).view(np.float32).reshape(shape.in_shape)
        rng.standard_normal(dtype=np.float32, out=self.x)
        scale = np.float32(np.sqrt(2 / (shape.fin * prod(shape.k))))
        self.weights = ConvWeights(
            rng.standard_normal((shape.fout, shape.fin, *shape.k), np.float32) * scale,
            rng.standard_normal(shape.fout, np.float32),
        )
        self.out: Array = aligned_bytes(shape.out_bytes).view(np.float32).reshape(shape.out_shape)
        self.expected: Array | None = None
        self._memory = aligned_bytes(0)

    def bound(self, primitive: Primitive, variant: Variant, crew: Crew) -> Callable[[], float]:
        """What runs it and returns the seconds."""
        step = primitive.bind(primitive.prepare(self.weights, variant, crew), self.shape, variant, crew)
        buffers = primitive.footprint(self.shape, variant, crew.threads).scratch
        rooms = [-(-buffer.nbytes // 4096) * 4096 for buffer in buffers]
        if sum(rooms) > len(self._memory):
            self._memory = aligned_bytes(sum(rooms))

        def run() -> float:
            scratch: dict[str, Bytes] = {}
            begin = 0
            for buffer, room in zip(buffers, rooms, strict=True):
                scratch[buffer.name] = self._memory[begin : begin + buffer.nbytes]
                begin += room
            start = time.perf_counter()
            step.run(self.x, self.out, scratch)
            return time.perf_counter() - start

        return run

    def entry(self, primitive: Primitive, crew: Crew, variants: int) -> Entry:
        """The primitive with the fastest of the variants that the cost model likes best, checked and warm."""
        machine = this_machine()
        rates = assumed_rates(machine, crew.threads)
        liked = sorted(
            primitive.variants(self.shape, machine), key=lambda v: seconds(primitive.work(self.shape, v), rates)
        )
        times: dict[Variant, float] = {}
        runs: dict[Variant, Callable[[], float]] = {}
        for variant in liked[:variants]:
            run = self.bound(primitive, variant, crew)
            self.out.fill(np.nan)
            times[variant] = run()
            self._check(f"{primitive.name} {variant}")
            times[variant] = min(times[variant], run())
            if times[variant] == min(times.values()):
                runs = {variant: run}
        ((variant, run),) = runs.items()
        return Entry(primitive.name, crew.threads, str(variant), run)

    def _check(self, name: str) -> None:
        if self.expected is None:
            self.expected = self.out.copy()
        error = float(np.abs(self.out - self.expected).max() / np.abs(self.expected).max())
        if not error <= MAX_ERROR:
            raise SystemExit(f"{name} is {error:.1e} of the largest output away from the first that ran")


def measure(case: Case, options: argparse.Namespace) -> list[Row]:
    """All numbers of threads in turns."""
    least_seconds, nbytes = (0.001, 2**16) if options.quick else (0.05, COPIED)
    layer = Layer(case.shape)
    machine = this_machine()
    entries: list[Entry] = []
    with ExitStack() as stack:
        for threads in options.threads:
            crew = stack.enter_context(Crew(threads))
            entries.append(Entry("products", threads, "", products(crew, least_seconds)))
            entries.append(Entry("copy", threads, "", copy(crew, least_seconds, nbytes)))
            for primitive in of_kind("conv"):
                if primitive.name not in options.only:
                    continue
                if reason := primitive.why_not(case.shape, machine):
                    print(f"{primitive.name} does not apply to {case.shape}: {reason}")
                    continue
                entries.append(layer.entry(primitive, crew, options.variants))
        for entry in entries:
            entry.run()
        for index in range(options.rounds):
            for entry in entries[:: 1 if index % 2 == 0 else -1]:
                time.sleep(PAUSE)
                entry.found.append(entry.run())
    return rows(case, entries)


def rows(case: Case, entries: Sequence[Entry]) -> list[Row]:
    fewest: dict[str, Entry] = {}
    for entry in entries:
        if entry.name not in fewest or entry.threads < fewest[entry.name].threads:
            fewest[entry.name] = entry
    found = []
    for entry in entries:
        first = fewest[entry.name]
        faster = median(entry.found) / median(first.found)
        if entry.name not in ("products", "copy"):  # seconds, not a rate
            faster = 1 / faster
        efficiency = faster * first.threads / entry.threads
        found.append(
            Row(
                str(case.shape),
                case.why,
                entry.name,
                entry.threads,
                entry.variant,
                tuple(entry.found),
                efficiency,
            )
        )
    return found


def figure(row: Row) -> str:
    match row.name:
        case "products":
            return f"{median(row.found) / 1e9:8.0f} GFLOP/s"
        case "copy":
            return f"{median(row.found) / 1e9:8.1f} GB/s   "
        case _:
            return f"{1e3 * median(row.found):8.1f} ms     "


def show(found: Sequence[Row]) -> None:
    print(f"\n{found[0].shape}: {found[0].why}")
    for name in dict.fromkeys(row.name for row in found):
        for row in found:
            if row.name == name:
                print(
                    f"  {name:22}{row.threads:3} threads {figure(row)} efficiency {row.efficiency:5.2f}  {row.variant}"
                )


def picture(path: Path, cases: Sequence[Sequence[Row]], header: dict[str, Any]) -> None:
    groups = [
        bars.Group(
            found[0].shape,
            [
                bars.Bar(
                    f"{row.name}, {row.threads} threads",
                    row.efficiency,
                    f"{row.efficiency:.2f} ({figure(row).strip()})",
                    bars.OURS if row.name.startswith("cpu.") else bars.ORIGINAL,
                )
                for name in dict.fromkeys(row.name for row in found)
                for row in found
                if row.name == name
            ],
        )
        for found in cases
    ]
    machine = f"{header['processor']}, {header['cores']} cores, {header['date'][:10]}"
    notes = [machine, "products: arithmetic in each core's own cache; copy: memory. What the machine itself gives."]
    bars.draw(path, "Parallel efficiency of convolution layers: t1 / (N tN)", notes, groups)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    powers = [2**i for i in range(11) if 2**i <= this_machine().cores]
    parser.add_argument("--threads", type=int, nargs="+", default=powers)
    parser.add_argument("--only", nargs="+", default=["cpu.conv.fft_lanes"], help="these primitives")
    parser.add_argument("--cases", type=int, nargs="*", help=f"only these, 1 to {len(CASES)}")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--variants", type=int, default=4, help="of a primitive, that are tried")
    parser.add_argument("--quick", action="store_true", help="a tiny case, to see that everything works")
    parser.add_argument("--out", type=Path, help="default: results/threads-MACHINE-DATE.json; none with --quick")
    options = parser.parse_args(arguments)
    known = [primitive.name for primitive in of_kind("conv")]
    if unknown := [name for name in options.only if name not in known]:
        parser.error(f"no primitive {', '.join(unknown)}; there are {', '.join(known)}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    cases = QUICK if options.quick else [c for i, c in enumerate(CASES, 1) if not options.cases or i in options.cases]
    name = "-".join(this_machine().processor.lower().split()[:3])
    where = f"threads-{name}-{this_machine().cores}cores-{date.today()}.json"
    out = options.out or Path(__file__).parent / "results" / where
    done: list[list[Row]] = []
    for case in cases:
        done.append(measure(case, options))
        show(done[-1])
        if options.out or not options.quick:
            out.parent.mkdir(exist_ok=True)
            header = machine_header()
            result = {"header": header, "rows": [asdict(row) for found in done for row in found]}
            out.write_text(json.dumps(result, indent=1) + "\n")
            picture(out.with_suffix(".png"), done, header)


if __name__ == "__main__":
    without_forced_blas_kernels()
    main()
