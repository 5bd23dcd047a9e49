"""Measure convolutions on AMX and AVX512-BF16, beside float32 methods and PyTorch, with the share of the unit's peak.

All subjects of a case run in interleaved rounds, and each round measures the peak of the unit too: products in
registers alone, and products of factors that lie in L1. On a virtual machine other guests may use the same cores:
before each layer those that are the fastest then are chosen, and the peaks of each round are kept.

PyTorch computes by oneDNN, channels last. With `--unit avx512_bf16` oneDNN is kept from AMX too.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from benchmarks.harness import options
from benchmarks.harness.machine import header, machine_name
from benchmarks.harness.results import Result, Row
from benchmarks.harness.timing import Budget, Entry, WallClock, interleave
from benchmarks.unit_tables import PROGRAM as PROGRAM
from znnpy.costs.model import assumed_rates
from znnpy.graph_shapes import GraphConvShape, TransposeShape
from znnpy.kernels import definition
from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.contract import ConvWeights, Primitive, Variant
from znnpy.kernels.cpu.native.library import unit_library
from znnpy.kernels.dtypes import kept_dtype
from znnpy.kernels.table import TABLE
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.machine import AMX, AVX512_BF16, this_machine
from znnpy.shapes import CPU_PRECISIONS, Precision

ROUNDS = 7
PEERS: tuple[Precision, ...] = ("bf16", "fp32")
PEAK_TIMES = 100_000  # blocks: some milliseconds
OTHERS = 3  # cores that are tried together with the fastest ones
MEMORY = 40 * 2**10  # bytes that the peaks are measured with
FACTS = ("gflops", "share_of_peak", "share_of_products")
LIMITS = {"peak": "peak of {}", "products": "products of {} in L1"}
FAR = 2.0  # methods that look so many times slower than the fastest are left out
FP32_VARIANTS = 4  # of a float32 method, those that look the fastest
Layer = GraphConvShape | TransposeShape


def _conv(maps: int, fout: int, side: int, k: tuple[int, int, int], stride: int = 1) -> GraphConvShape:
    pad = (k[0] // 2, k[1] // 2, k[2] // 2) if stride == 1 else (0, 0, 0)
    return GraphConvShape((maps,), fout, (side,) * 3, k, pad, pad, (stride,) * 3)


LAYERS: tuple[Layer, ...] = (
    *(_conv(maps, maps, side, (3, 3, 3)) for maps, side in ((32, 96), (64, 64), (128, 48), (256, 32), (320, 16))),
    _conv(80, 80, 56, (3, 3, 3)),
    _conv(1, 32, 128, (3, 3, 3)),
    _conv(32, 1, 96, (3, 3, 3)),
    *(_conv(maps, maps, side, (1, 3, 3)) for maps, side in ((32, 96), (64, 64))),
    *(_conv(maps, 2 * maps, side, (2, 2, 2), 2) for maps, side in ((32, 96), (64, 64))),
    *(
        TransposeShape(2 * maps, maps, (side,) * 3, (2 * side,) * 3, (2, 2, 2), (0, 0, 0), (2, 2, 2))
        for maps, side in ((32, 48), (64, 32))
    ),
    *(_conv(80, 80, 40, (k, k, k)) for k in (5, 7, 9)),
)
QUICK: tuple[Layer, ...] = (
    _conv(8, 8, 6, (3, 3, 3)),
    TransposeShape(4, 3, (3, 3, 3), (6, 6, 6), (2, 2, 2), (0, 0, 0), (2, 2, 2)),
)


_VALUES = threading.local()


@dataclass
class Bench:
    """Measures layers on one unit with some threads."""

    unit: str
    pool: ThreadPool
    peers: bool
    rounds: int
    _flops: dict[str, float] = field(default_factory=dict)

    def rows(self, shape: Layer) -> Iterator[Row]:
        """Yield the rows of one layer, all subjects interleaved."""
        entries, precisions = (
            [Entry(name, partial(self._limit, name), WallClock()) for name in LIMITS],
            dict[str, Precision](),
        )
        for name, precision, run in self._runs(shape):
            run()
            entries.append(Entry(name, run, WallClock()))
            precisions[name] = precision
        interleave(entries, self.rounds, Budget(10))
        limits, others = entries[: len(LIMITS)], entries[len(LIMITS) :]
        voxels, flops = prod(shape.out_shape[1:4]), _flops(shape)
        found = {entry.name: [self._flops[entry.name] / spent for spent in entry.seconds] for entry in limits}
        for name, speeds in found.items():
            subject = LIMITS[name].format(self.unit)
            on = {"cores": sorted(os.sched_getaffinity(0))}
            yield Row("layers", str(shape), subject, "GFLOP/s", tuple(speed / 1e9 for speed in speeds), facts=on)
        for entry in others:
            facts = {
                "gflops": flops / median(entry.seconds) / 1e9,
                "share_of_peak": flops / median(entry.seconds) / median(found["peak"]),
                "share_of_products": flops / median(entry.seconds) / median(found["products"]),
                "bytes": replace(shape, precision=precisions[entry.name]).in_bytes
                + replace(shape, precision=precisions[entry.name]).out_bytes,
            }
            spent = tuple(1e9 * one / voxels for one in entry.seconds)
            yield Row("layers", str(shape), entry.name, "ns/voxel", spent, facts=facts)

    def _runs(self, shape: Layer) -> Iterator[tuple[str, Precision, Callable[[], Any]]]:
        rng = np.random.default_rng(5)
        maps = (shape.fin, shape.fout) if isinstance(shape, TransposeShape) else (shape.fout, shape.fin)
        weight = rng.standard_normal((*maps, *shape.k), np.float32) / np.float32(np.sqrt(shape.fin * prod(shape.k)))
        weights = ConvWeights(weight, rng.standard_normal(shape.fout, np.float32))
        x = rng.standard_normal((*shape.n, shape.fin), np.float32)
        for precision in CPU_PRECISIONS:
            of = replace(shape, precision=precision)
            yield f"{self.unit} {precision}", precision, self._bound(self._primitive(of, self.unit), of, weights, x)
        for primitive in self._float_methods(shape):
            yield primitive.name, "fp32", self._fastest(primitive, shape, weights, x)
        if self.peers:
            for precision in PEERS:
                yield f"PyTorch {precision}", precision, _torch(shape, weights, x, precision)

    def _primitive(self, shape: Layer, unit: str) -> Primitive:
        (found,) = (p for p in TABLE if p.kind == shape.kind and p.name.endswith(f".{unit}"))
        return found

    def _float_methods(self, shape: Layer) -> list[Primitive]:
        """Return the compiled float32 methods, without those that look far slower than the fastest."""
        names = ("fft_lanes", "direct_lanes", "strided", "lanes")
        found = [
            p
            for p in TABLE
            if p.kind == shape.kind and p.name.split(".")[-1] in names and p.why_not(shape, this_machine()) is None
        ]
        spent = [min(self._seconds(p, shape, variant) for variant in p.variants(shape, this_machine())) for p in found]
        return [p for p, seconds in zip(found, spent, strict=True) if seconds <= FAR * min(spent)]

    def _seconds(self, primitive: Primitive, shape: Layer, variant: Variant) -> float:
        """Return the seconds that a machine like this is assumed to take."""
        return assumed_rates(this_machine(), self.pool.threads).seconds(primitive, shape, variant)

    def _fastest(self, primitive: Primitive, shape: Layer, weights: ConvWeights, x: Any) -> Callable[[], Any]:
        """Return the fastest of the variants that look the fastest."""
        offered = primitive.variants(shape, this_machine())
        variants = sorted(offered, key=lambda variant: self._seconds(primitive, shape, variant))
        runs = [self._bound(primitive, shape, weights, x, variant) for variant in variants[:FP32_VARIANTS]]
        for run in runs:
            run()
        return min(runs, key=lambda run: WallClock().seconds(run))

    def _bound(
        self, primitive: Primitive, shape: Layer, weights: ConvWeights, x: Any, variant: Variant | None = None
    ) -> Callable[[], Any]:
        variant = variant or primitive.variants(shape, this_machine())[0]
        dtype = kept_dtype(shape.precision)
        step = primitive.bind(primitive.prepare(weights, variant, self.pool), shape, variant, self.pool)
        source = aligned_bytes(x.size * dtype.itemsize).view(dtype).reshape(x.shape)
        source[...] = x
        out = aligned_bytes(shape.out_bytes).view(dtype).reshape(shape.out_shape[1:])
        footprint = primitive.footprint(shape, variant, self.pool.threads)
        scratch = {one.name: aligned_bytes(one.nbytes) for one in footprint.scratch}
        return lambda: step.run([source], out, scratch) or out

    def _limit(self, name: str) -> None:
        """Run one of the limits on all threads, and keep its operations."""
        compute = getattr(unit_library(self.unit), f"znnpy_bf16_{name}")
        operations = [0] * self.pool.threads

        def piece(lo: int, hi: int, worker: int) -> None:
            del lo, hi
            operations[worker] = compute(_finite_values(), ctypes.c_int64(PEAK_TIMES))

        self.pool.each(piece, self.pool.threads)
        self._flops[name] = float(sum(operations))


def _finite_values() -> ctypes.c_void_p:
    """Return the memory of a limit."""
    memory = _VALUES.__dict__.setdefault("memory", aligned_bytes(MEMORY))
    memory.view(np.uint16)[...] = 0x3F80
    return ctypes.c_void_p(memory.ctypes.data)


def _flops(shape: Layer) -> float:
    """Return the operations of the definition, padding included."""
    taps = prod(shape.k) / (prod(shape.stride) if isinstance(shape, TransposeShape) else 1)
    return 2.0 * prod(shape.out_shape) * shape.fin * taps


def _torch(shape: Layer, weights: ConvWeights, x: Any, precision: str) -> Callable[[], Any]:
    """Return the layer in PyTorch, channels last."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]

    def tensor(values: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(values)).to(dtype).to(memory_format=torch.channels_last_3d)

    weight, bias = tensor(weights.weight), torch.from_numpy(weights.bias).to(dtype)
    source = tensor(np.moveaxis(x, 3, 0)[np.newaxis])
    if isinstance(shape, TransposeShape):
        call = partial(torch.nn.functional.conv_transpose3d, source, weight, bias, shape.stride)
    else:
        call = partial(torch.nn.functional.conv3d, source, weight, bias, shape.stride, shape.before)

    def run() -> Any:
        with torch.inference_mode():
            return call()

    return run


def errors(unit: str, pool: ThreadPool) -> Iterator[Row]:
    """Yield the rms error of each precision against float64, relative to the rms result."""
    bench = Bench(unit, pool, peers=False, rounds=1)
    for shape in (_conv(32, 32, 12, (3, 3, 3)), _conv(80, 80, 12, (5, 5, 5)), _conv(256, 256, 8, (3, 3, 3))):
        rng = np.random.default_rng(6)
        weight = rng.standard_normal((shape.fout, shape.fin, *shape.k), np.float32)
        weights = ConvWeights(weight / np.float32(np.sqrt(shape.fin * prod(shape.k))), np.zeros(shape.fout, np.float32))
        x = rng.standard_normal((*shape.n, shape.fin), np.float32)
        exact = definition.layer(shape, weights, [x])
        for precision in CPU_PRECISIONS:
            of = replace(shape, precision=precision)
            out = bench._bound(bench._primitive(of, unit), of, weights, x)()
            error = np.sqrt(np.mean((out.astype(np.float64) - exact) ** 2) / np.mean(exact**2))
            yield Row("errors", str(shape), f"{unit} {precision}", "relative error", (float(error),))


def quiet_cores(unit: str, count: int, allowed: Sequence[int]) -> None:
    """Keep this process on the cores among `allowed` where the unit is the fastest now, all of them at once.

    Cores that are fast alone can be threads of the same core: the fastest ones are tried together.
    """
    alone = {core: _speed(unit, (core,)) for core in allowed}
    fastest = sorted(allowed, key=lambda core: -alone[core])[: count + OTHERS]
    chosen = max(combinations(fastest, count), key=partial(_speed, unit))
    for task in os.listdir("/proc/self/task"):  # PyTorch's threads too
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task), chosen)


def _speed(unit: str, cores: Sequence[int]) -> float:
    """Return the speed of the slowest of some cores that multiply in L1 at once, in blocks per second."""
    compute, ready = unit_library(unit).znnpy_bf16_products, threading.Barrier(len(cores))

    def on(core: int) -> float:
        os.sched_setaffinity(0, {core})
        compute(_finite_values(), ctypes.c_int64(PEAK_TIMES // 10))
        ready.wait()
        begin = time.perf_counter()
        compute(_finite_values(), ctypes.c_int64(PEAK_TIMES))
        return PEAK_TIMES / (time.perf_counter() - begin)

    with ThreadPoolExecutor(len(cores)) as threads:
        return min(threads.map(on, cores))


def copy_rate(pool: ThreadPool) -> float:
    """Measure the bytes per second of a copy by all threads; bytes read and bytes written count."""
    from benchmarks.graph_layers import copy_rate as measured

    return measured(pool)


@click.command()
@options.OUT
@options.QUICK
@click.option("--unit", type=click.Choice([AMX, AVX512_BF16]), help="Unit; default: the fastest of this processor.")
@click.option("--threads", type=int, default=2, show_default=True)
@click.option("--peers/--no-peers", default=True, help="Whether PyTorch runs too.")
@click.option("--only", type=int, multiple=True, help="Numbers of the layers to measure, from 0; default: all.")
def command(out: Path | None, quick: bool, unit: str | None, threads: int, peers: bool, only: Sequence[int]) -> None:
    """Measure convolutions on AMX or AVX512-BF16."""
    units = this_machine().bf16
    unit = unit or next(iter(units), None)
    if unit not in units:
        raise click.UsageError(f"this processor has no {unit or 'unit for bfloat16'}")
    if unit == AVX512_BF16:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
    allowed = sorted(os.sched_getaffinity(0))
    quiet_cores(unit, threads, allowed)
    if peers:
        import torch

        torch.set_num_threads(threads)
    about = header() | {"unit": unit, "threads": threads}
    result = Result("units", f"{machine_name()}-{unit.replace('_', '-')}", about)
    with ThreadPool(threads) as pool:
        bench = Bench(unit, pool, peers, 1 if quick else ROUNDS)
        result.add([Row("limits", "copy", "copy", "GB/s", (copy_rate(pool) / 1e9,))])
        result.add(errors(unit, pool))
        for number, shape in enumerate(QUICK if quick else LAYERS):
            if only and number not in only:
                continue
            quiet_cores(unit, threads, allowed)
            for row in bench.rows(shape):
                result.add([row])
                shares = (f" {row.facts[name]:.2f}" for name in FACTS if name in row.facts)
                click.echo(f"{row.case}  {row.subject:28} {row.median:10.1f} {row.unit}{''.join(shares)}")
            if out is not None or not quick:
                result.write(out)
