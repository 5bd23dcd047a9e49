"""Poolings and max-filters, every way to compute them, in GB/s beside a plain copy of as many bytes.

    python benchmarks/pools.py [--rounds 6] [--threads 2] [--only NAME ...] [--quick] [--out RESULT.json]

Bytes are those of the input and of the output, each once. The copy (numpy, as many threads) reads one half of them and
writes the other. Rounds are interleaved, in an order that alternates, after one warm run. Networks in PyTorch pool with
max_pool3d, once for every offset of the window: what that takes is measured too.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from header import machine_header, without_forced_blas_kernels

from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.crew import Crew
from znnpy.kernels.table import TABLE
from znnpy.machine import this_machine
from znnpy.planner.cost_model import assumed_rates, seconds
from znnpy.shapes import FilterShape, PoolShape

if TYPE_CHECKING:
    from znnpy.kernels.primitive import Array, Primitive

COPY = "copy"
PAUSE = 0.01  # seconds before a run


@dataclass(frozen=True, slots=True)
class Case:
    """One layer. `why` says what the row is there to show."""

    shape: PoolShape | FilterShape
    why: str


CASES = (
    Case(PoolShape(1, 80, (99, 99, 99), (2, 2, 2)), "after a first layer of 80 maps"),
    Case(PoolShape(8, 80, (49, 49, 49), (2, 2, 2)), "after a second: 8 fragments"),
    Case(PoolShape(64, 80, (23, 23, 23), (2, 2, 2)), "64 fragments: small images"),
    Case(PoolShape(1, 32, (143, 143, 143), (2, 2, 2)), "32 maps"),
    Case(PoolShape(1, 24, (143, 143, 143), (2, 2, 2)), "maps that fill no cache line"),
    Case(PoolShape(1, 5, (199, 199, 199), (2, 2, 2)), "few maps"),
    Case(PoolShape(1, 80, (98, 98, 98), (3, 3, 3)), "a larger window"),
    Case(PoolShape(1, 80, (99, 99, 99), (5, 5, 5)), "a window of 125"),
    Case(PoolShape(1, 80, (60, 119, 119), (1, 2, 2)), "planes: as on serial sections"),
    Case(PoolShape(1, 80, (100, 100, 100), (2, 2, 2), fragments=False), "plain pooling: an eighth is written"),
    Case(FilterShape(1, 80, (99, 99, 99), (2, 2, 2)), "the maximum at every position"),
    Case(FilterShape(1, 80, (99, 99, 99), (5, 5, 5)), "the same, a window of 125"),
)
QUICK = (Case(PoolShape(1, 16, (15, 15, 15), (2, 2, 2)), "that the script works"),)


def memory(shape: Sequence[int]) -> Array:
    return aligned_bytes(4 * int(np.prod(shape))).view(np.float32).reshape(tuple(shape))


def copying(nbytes: int, crew: Crew) -> Callable[[], None]:
    """A copy that moves `nbytes`, half of them read."""
    source, target = (memory((nbytes // 8,)) for _ in range(2))
    source[...] = target[...] = 1

    def piece(lo: int, hi: int, worker: int) -> None:
        del worker
        target[lo:hi] = source[lo:hi]

    return lambda: crew.each(piece, len(source))


def running(primitive: Primitive, case: Case, x: Array, out: Array, crew: Crew) -> Callable[[], None]:
    (variant,) = primitive.variants(case.shape, this_machine())
    step = primitive.bind(primitive.prepare(None, variant, crew), case.shape, variant, crew)
    buffers = primitive.footprint(case.shape, variant, crew.threads).scratch
    scratch = {buffer.name: aligned_bytes(buffer.nbytes) for buffer in buffers}
    return lambda: step.run(x, out, scratch)


def pooling_with_torch(shape: PoolShape | FilterShape, x: Array) -> Callable[[], Any]:
    """max_pool3d on channels-last data: at every offset, or with a stride of 1."""
    import torch
    from torch.nn.functional import max_pool3d

    image = torch.from_numpy(x).permute(0, 4, 1, 2, 3)  # channels last in memory
    if isinstance(shape, FilterShape):
        return lambda: max_pool3d(image, shape.p, 1)
    offsets = list(product(*map(range, shape.p))) if shape.fragments else [(0, 0, 0)]
    mz, my, mx = (m * p for m, p in zip(shape.out, shape.p, strict=True))
    return lambda: [max_pool3d(image[:, :, z : z + mz, y : y + my, a : a + mx], shape.p) for z, y, a in offsets]


def measure(case: Case, crew: Crew, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every round, the copy first."""
    shape, machine = case.shape, this_machine()
    x = memory(shape.in_shape)
    x[...] = np.random.default_rng(20261120).standard_normal(shape.in_shape, np.float32)
    nbytes = shape.in_bytes + shape.out_bytes
    runs: dict[str, Callable[[], Any]] = {COPY: copying(nbytes, crew)}
    predicted: dict[str, float] = {}
    expected: Array | None = None
    for primitive in TABLE:
        if primitive.why_not(shape, machine) or (options.only and primitive.name not in options.only):
            continue
        out = memory(shape.out_shape)
        out[...] = np.nan
        runs[primitive.name] = running(primitive, case, x, out, crew)
        runs[primitive.name]()
        if expected is None:
            expected = out
        elif not np.array_equal(out, expected):
            raise SystemExit(f"{primitive.name} differs from the other primitives on {shape}")
        (variant,) = primitive.variants(shape, machine)
        predicted[primitive.name] = seconds(primitive.work(shape, variant), assumed_rates(machine, crew.threads))
    if options.torch:
        runs["torch max_pool3d"] = pooling_with_torch(shape, x)
        runs["torch max_pool3d"]()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(options.rounds):
        for name in list(runs) if index % 2 == 0 else reversed(list(runs)):
            time.sleep(PAUSE)
            begin = time.perf_counter()
            runs[name]()
            times[name].append(time.perf_counter() - begin)
    rates = {name: nbytes / median(each) / 1e9 for name, each in times.items()}
    return {
        "shape": str(shape),
        "why": case.why,
        "threads": crew.threads,
        "bytes": nbytes,
        "gb_per_second": rates,
        "of_copy": {name: rate / rates[COPY] for name, rate in rates.items() if name != COPY},
        "measured_over_predicted": {name: median(times[name]) / predicted[name] for name in predicted},
        "seconds": times,
    }


def show(row: dict[str, Any]) -> None:
    print(f"\n{row['shape']}: {row['why']}; copy {row['gb_per_second'][COPY]:.1f} GB/s")
    for name, part in row["of_copy"].items():
        off = row["measured_over_predicted"].get(name)
        beside = f", {off:.2f} of the predicted time" if off else ""
        print(f"  {name:28}{row['gb_per_second'][name]:8.1f} GB/s {part:6.2f} of the copy{beside}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=this_machine().cores)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--cases", type=int, nargs="*", help="only these, by number from 0")
    parser.add_argument("--only", nargs="*", help="only these primitives")
    parser.add_argument("--no-torch", dest="torch", action="store_false")
    parser.add_argument("--quick", action="store_true", help="a tiny case, to see that everything works")
    parser.add_argument("--out", type=Path, help="default: results/pools-MACHINE-DATE.json; none with --quick")
    options = parser.parse_args(arguments)
    options.torch = options.torch and find_spec("torch") is not None
    if options.torch:
        import torch

        torch.set_num_threads(options.threads)
    cases = QUICK if options.quick else CASES
    name = "-".join(this_machine().processor.lower().split()[:3])
    out = options.out or Path(__file__).parent / "results" / f"pools-{name}-{date.today()}.json"
    rows: list[dict[str, Any]] = []
    with Crew(options.threads) as crew:
        for index, case in enumerate(cases):
            if options.cases and index not in options.cases:
                continue
            rows.append(measure(case, crew, options))
            show(rows[-1])
            if options.out or not options.quick:
                out.parent.mkdir(exist_ok=True)
                out.write_text(json.dumps({"header": machine_header(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    without_forced_blas_kernels()
    main()
