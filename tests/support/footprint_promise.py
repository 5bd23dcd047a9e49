"""Measures whether primitives of the CPU keep to their footprints: what the system counts while one runs.

    python -m tests.support.footprint_promise --only NAME [--precision bf16] [--shapes 3] [--threads 1 3]
        [--most-mib 80] [--out RESULT.json]

For every primitive of the table, random shapes that it takes, each with a random variant, in a process of its own:
input, output and scratch lie in an arena as in a run, placed as a plan places them. Measured is how far the resident
memory of that process rose, at its peak (Linux's VmHWM, set back before), from just before the weights are prepared and
the input is written: pages that were touched, whoever asked for them, FFTW and BLAS included. Code and tables that the
libraries load on first use are not counted: the same primitive ran on a few voxels before. Promised is arena + resident
+ allowance.

Up to OWN_BYTES are the process's own: objects, stacks of threads. A plan's margin (8 MiB) holds them, so a footprint
does not: measured - OWN_BYTES <= promised <= 1.15 measured is a promise that is kept and wastes little.

Shapes are those whose promise is at least LEAST_BYTES and as much a thread as THREAD_BYTES: below, constants of the
libraries decide, and what a plan adds for the process holds them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from tests.support.graph_footprints import SMALLEST, random_graph_shape
from znnpy.costs.model import assumed_rates, seconds
from znnpy.errors import ShapeError
from znnpy.graph_shapes import GraphConvShape, GraphShape
from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.contract import ConvWeights, device_of
from znnpy.kernels.dtypes import kept_dtype
from znnpy.kernels.table import TABLE
from znnpy.kernels.thread_pool import CHUNKS_PER_THREAD, ThreadPool, chunks
from znnpy.layer_shapes import LayerShape
from znnpy.machine import this_machine
from znnpy.measure.layer_bench import Values, inputs_of
from znnpy.planner.layout import chain, place
from znnpy.run.arena import host_arena
from znnpy.shapes import (
    ACTIVATIONS,
    CPU_PRECISIONS,
    ConvShape,
    FilterShape,
    MaxoutShape,
    PoolShape,
    Precision,
)

if TYPE_CHECKING:
    from znnpy.kernels.contract import Primitive, Variant
    from znnpy.shapes import Vec3

MIB = 2**20
LEAST_BYTES = 24 * MIB
THREAD_BYTES = 6 * MIB
OWN_BYTES = 3 * MIB // 4
MOST_RATIO = 1.15
LOOSE = {  # of small layers on three threads, whose temporaries of numpy and BLAS do not peak at the same time
    "cpu.graph_conv.taps": 1.25,
    "cpu.graph_conv.fft_data_gathered": 1.25,
}
MOST_SECONDS = 0.4  # predicted, of one run
MOST_TRIES = 20_000
SERVE = "serve"  # the word with which the program answers requests


class EvenPool(ThreadPool):
    """Every worker has its part of every stage, all of them at once, as on a machine with as many idle cores.

    A pool leaves to chance who takes which share: with more threads than cores some may never get one, and what they
    would have touched would not be counted.
    """

    def each(self, piece: Callable[[int, int, int], None], count: int, *, least: int = 1) -> None:
        todo = chunks(count, min(CHUNKS_PER_THREAD * self.threads, count // least))
        workers = min(self.threads, len(todo))
        together = threading.Barrier(workers)

        def work(lo: int, hi: int, worker: int) -> None:
            del hi
            together.wait()  # nobody takes a second part
            for share in todo[lo::workers]:
                piece(*share, worker)

        super().each(work, workers)


@dataclass(frozen=True, slots=True)
class Row:
    """One primitive on one shape; bytes."""

    primitive: str
    shape: str
    variant: str
    threads: int
    promised: int
    measured: int

    @property
    def ratio(self) -> float:
        return self.promised / self.measured

    @property
    def kept(self) -> bool:
        most = LOOSE.get(self.primitive, MOST_RATIO)
        return self.measured - OWN_BYTES <= self.promised <= most * self.measured


@dataclass(frozen=True, slots=True)
class Case:
    primitive: Primitive
    shape: LayerShape
    variant: Variant
    threads: int

    @property
    def promised(self) -> int:
        """Arena, what is kept between patches, what libraries allocate."""
        footprint = self.primitive.footprint(self.shape, self.variant, self.threads)
        return place(chain([(self.shape, footprint)]))[1] + footprint.resident + footprint.allowance


def random_shape(kind: str, rng: np.random.Generator) -> LayerShape:
    """Any layer of this kind; ShapeError for sizes that do not go together."""

    def size(low: int, high: int) -> Vec3:
        z, y, x = np.exp(rng.uniform(np.log(low), np.log(high + 1), 3)).astype(int).tolist()
        return z, y, x

    maps = [1, 2, 3, 4, 8, 10, 16, 24, 31, 48, 64, 80, 100]
    batch, f, other = int(rng.choice([1, 1, 1, 2, 5, 8])), int(rng.choice(maps)), int(rng.choice(maps))
    n = size(8, 200)
    match kind:
        case "conv":
            side = int(rng.integers(2, 10))
            k = (side, side, side) if rng.random() < 0.6 else size(1, 9)
            return ConvShape(batch, f, other, n, k, ACTIVATIONS[rng.integers(len(ACTIVATIONS))])
        case "pool":
            p, fragments = size(1, 4), bool(rng.random() < 0.5)
            n = n[0] // p[0] * p[0], n[1] // p[1] * p[1], n[2] // p[2] * p[2]
            if fragments:
                n = n[0] + p[0] - 1, n[1] + p[1] - 1, n[2] + p[2] - 1
            return PoolShape(batch, f, n, p, fragments=fragments)
        case "maxfilter":
            return FilterShape(batch, f, n, size(1, 5))
        case "maxout":
            of = int(rng.integers(2, 5))
            return MaxoutShape(batch, f * of, n, of)
    return random_graph_shape(kind, rng, n)


def _is_not_gathered(primitive: Primitive, shape: LayerShape) -> bool:
    """Return whether a primitive would copy a view of this input, but not the input itself, as it is measured here."""
    if not (primitive.name.endswith("_gathered") and isinstance(shape, GraphConvShape)):
        return False
    return len(shape.fins) == 1 and shape.padded == shape.n and not shape.upsampled


def random_case(
    primitive: Primitive, threads: int, most_bytes: int, rng: np.random.Generator, precision: Precision
) -> Case | None:
    """Return a shape and a variant that the primitive takes and that are worth measuring, or None."""
    machine = this_machine()
    rates = assumed_rates(machine, threads)
    for _ in range(MOST_TRIES):
        try:
            shape = replace(random_shape(primitive.kind, rng), precision=precision)
        except ShapeError:
            continue
        if not LEAST_BYTES / 8 < shape.in_bytes + shape.out_bytes < most_bytes:
            continue
        if primitive.why_not(shape, machine) is not None or _is_not_gathered(primitive, shape):
            continue
        variants = primitive.variants(shape, machine)
        case = Case(primitive, shape, variants[int(rng.integers(len(variants)))], threads)
        large_enough = max(LEAST_BYTES, threads * THREAD_BYTES) <= case.promised <= most_bytes
        if large_enough and seconds(primitive.work(shape, case.variant), rates) <= MOST_SECONDS:
            return case
    return None


def prepared(case: Case) -> ConvWeights | None:
    if isinstance(case.shape, GraphShape):
        return Values(case.shape).weights
    if not isinstance(case.shape, ConvShape):
        return None
    weight = np.full((case.shape.fout, case.shape.fin, *case.shape.k), 0.01, np.float32)
    return ConvWeights(weight, np.zeros(case.shape.fout, np.float32))


def run(case: Case, weights: ConvWeights | None) -> None:
    """Run as a session does: prepare weights, bind the step, then allocate the arena."""
    footprint = case.primitive.footprint(case.shape, case.variant, case.threads)
    tensors, nbytes = place(chain([(case.shape, footprint)]))
    with EvenPool(case.threads) as pool:
        resident = case.primitive.prepare(weights, case.variant, pool)
        step = case.primitive.bind(resident, case.shape, case.variant, pool)
        arena = host_arena(aligned_bytes(nbytes), tensors)
        kept = kept_dtype(case.shape.precision)
        x = arena.tensor("x0", (case.shape.in_bytes // kept.itemsize,), kept)
        out = arena.tensor("x1", case.shape.out_shape, kept)
        x[...] = 0.5
        if isinstance(case.shape, GraphShape):
            step.run(inputs_of(case.shape, x), out[0], arena.scratch(0))
        else:
            step.run(x.reshape(case.shape.in_shape), out, arena.scratch(0))


def smallest(primitive: Primitive, precision: Precision) -> Case | None:
    """Return a case of a few voxels; None if the primitive takes none in this precision."""
    machine = this_machine()
    shapes: tuple[LayerShape, ...] = (
        ConvShape(1, 2, 2, (9, 9, 9), (2, 2, 2), "tanh"),
        ConvShape(1, 32, 32, (12, 12, 12), (3, 3, 3), "tanh"),
        PoolShape(1, 2, (5, 5, 5), (2, 2, 2)),
        PoolShape(1, 2, (4, 4, 4), (2, 2, 2), fragments=False),
        FilterShape(1, 2, (5, 5, 5), (2, 2, 2)),
        MaxoutShape(1, 4, (5, 5, 5), 2),
        *SMALLEST,
    )
    for one in shapes:
        shape = replace(one, precision=precision)
        if shape.kind == primitive.kind and primitive.why_not(shape, machine) is None:
            return Case(primitive, shape, primitive.variants(shape, machine)[0], 1)
    return None


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, f"no {field} in /proc/self/status: this needs Linux"
    return 1024 * int(found[1])


def measure_here(case: Case, pipe: Connection) -> None:
    """Send from a child the bytes that the run took, or what went wrong."""
    try:
        first = smallest(case.primitive, case.shape.precision)
        assert first is not None, f"{case.primitive.name} takes no small shape"
        run(first, prepared(first))
        weights = prepared(case)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
        before = status("VmRSS")
        run(case, weights)
        pipe.send(status("VmHWM") - before)
    except BaseException:  # the child ends here, whatever it is, and the parent raises it
        pipe.send(traceback.format_exc())
    pipe.close()
    os._exit(0)  # nothing of the parent's is to be flushed or torn down twice


def measure(case: Case) -> Row:
    """RuntimeError tells what happened in the child."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=measure_here, args=[case, there])
    child.start()
    there.close()
    try:
        measured = here.recv()
    except EOFError:
        measured = "it ended without a word"
    child.join()
    if isinstance(measured, str):
        raise RuntimeError(f"{case.primitive.name} on {case.shape} {case.variant}, {case.threads} threads: {measured}")
    return Row(case.primitive.name, str(case.shape), str(case.variant), case.threads, case.promised, measured)


def show(rows: list[Row]) -> None:
    ratios = sorted(row.ratio for row in rows)
    print(
        f"{rows[0].primitive:24}{rows[0].threads:3} threads  promised / measured {ratios[0]:.3f} to {ratios[-1]:.3f}, "
        f"median {statistics.median(ratios):.3f}; kept {sum(row.kept for row in rows)} of {len(rows)}"
    )
    for row in sorted(rows, key=lambda row: row.ratio):
        if not row.kept:
            sizes = f"{row.promised / MIB:7.1f} / {row.measured / MIB:.1f}"
            print(f"    {row.ratio:.3f} {sizes} MiB {row.shape} {row.variant}")


def options_of(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=30)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2, 16])
    parser.add_argument("--only", nargs="*", help="these primitives")
    parser.add_argument("--precision", choices=CPU_PRECISIONS, default="fp32")
    parser.add_argument("--most-mib", type=int, default=400, help="that a shape may take")
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--out", type=Path, help="where the results go; without it, nowhere")
    return parser.parse_args(words)


def measured(options: argparse.Namespace) -> list[Row]:
    """Measure what the options ask for, and print it."""
    rows: list[Row] = []
    most = options.most_mib * MIB
    for primitive in TABLE:
        if device_of(primitive.name) != "cpu" or (options.only and primitive.name not in options.only):
            continue
        for threads in options.threads:
            rng = np.random.default_rng([options.seed, threads, *primitive.name.encode()])
            cases = (random_case(primitive, threads, most, rng, options.precision) for _ in range(options.shapes))
            found = [case for case in cases if case is not None]
            if not found:
                print(f"{primitive.name:24}{threads:3} threads  takes no shape here")
                continue
            of_primitive = [measure(case) for case in found]
            show(of_primitive)
            rows += of_primitive
    return rows


class Measurements:
    """A context manager: a process that measures on request. It starts once, and Python and znnpy with it."""

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "tests.support.footprint_promise", SERVE]
        repository = Path(__file__).parents[2]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=repository
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate()  # its standard input ends, and so does it

    def ask(self, *words: str) -> tuple[list[Row], str]:
        """Return the rows for these options, and what was printed; RuntimeError tells what went wrong."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if answer["failure"]:
            raise RuntimeError(answer["failure"])
        return [Row(**row) for row in answer["rows"]], answer["said"]


def serve() -> None:
    """Answer requests, each a line of options as JSON, until there are no more."""
    for line in sys.stdin:
        rows, failure, said = list[Row](), "", io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                rows = measured(options_of(json.loads(line)))
        except Exception:  # whoever asked raises it
            failure = traceback.format_exc()
        answer = {"rows": [asdict(row) for row in rows], "said": said.getvalue(), "failure": failure}
        print(json.dumps(answer), flush=True)


def main() -> None:
    if sys.argv[1:] == [SERVE]:
        serve()
        return
    options = options_of(sys.argv[1:])
    written = [asdict(row) | {"ratio": row.ratio, "kept": row.kept} for row in measured(options)]
    if options.out:
        options.out.write_text(json.dumps({"rows": written}, indent=1) + "\n")


if __name__ == "__main__":
    main()
