"""Measure the products of spectra on a unit for bfloat16 against those in float32.

    python -m benchmarks tiled_products [--threads 2] [--maps 80] [--outputs 48] [-k 3 -k 5 ..]

products  GFLOP/s of the products alone, with spectra and kernels as a column of a layer has them, and their share of
          what the unit reaches with factors in L1, measured in the same run.
multiply  Milliseconds of the middle stage of the tiled convolution, transforms along z included.
layer     Nanoseconds for each output voxel of the whole layer, kernels not kept and kept.
error     Rms error against float64 of the outputs, of their rms; of a part of the volume.

All ways alternate within a round; figures are medians of the rounds.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from math import prod
from statistics import median
from time import perf_counter
from typing import Any

import click
import numpy as np

from znnpy.costs.model import assumed_rates, seconds
from znnpy.kernels import reference
from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.contract import ConvWeights, Variant
from znnpy.kernels.cpu import tiled_products
from znnpy.kernels.cpu.native.library import LANES, blocks, library, unit_library
from znnpy.kernels.cpu.tiled_arguments import Channels, Tiling
from znnpy.kernels.cpu.tiled_variants import tiled_variant
from znnpy.kernels.table import find
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.machine import Machine, this_machine
from znnpy.shapes import FLOAT32, ConvShape

PRIMITIVE = find("cpu.conv.fft_lanes")
WAYS = ("", *tiled_products.WORDS)  # "": in float32
PEAK_TIMES, PEAK_BYTES = 50_000, 24 * 2**10  # as benchmarks/units.py measures it
ERROR_OUTPUTS = 12  # outputs a side that are compared with float64


class Products(ctypes.Structure):
    """The arguments of products alone: struct Products in bf16_products.hpp."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("pitch", "tile", "frequencies", "tiles", "words", "in_", "out", "fin")),
        *((name, ctypes.c_void_p) for name in ("channels", "w", "left", "ahead", "end")),
    )


@dataclass(frozen=True)
class Way:
    """A bound variant and its buffers."""

    variant: Variant
    step: Any
    scratch: dict[str, Any]

    @property
    def tiling(self) -> Tiling:
        found: Tiling = self.step._tiles.tiling
        return found


def best_tile(shape: ConvShape, machine: Machine, threads: int) -> Variant:
    """Return the variant in float32 that the planner's assumed rates choose."""
    rates = assumed_rates(machine, threads)
    plain = [v for v in PRIMITIVE.variants(shape, machine) if not tiled_products.words_of(v)]
    return min(plain, key=lambda v: seconds(PRIMITIVE.work(shape, v), rates))


def bound(shape: ConvShape, weights: ConvWeights, variant: Variant, pool: ThreadPool) -> Way:
    """Return a variant, ready to run."""
    step = PRIMITIVE.bind(PRIMITIVE.prepare(weights, variant, pool), shape, variant, pool)
    footprint = PRIMITIVE.footprint(shape, variant, pool.threads)
    return Way(variant, step, {s.name: aligned_bytes(s.nbytes) for s in footprint.scratch})


def peak(unit: ctypes.CDLL, pool: ThreadPool) -> float:
    """Return the flops per second of products whose factors lie in L1, of all threads."""
    memory = [aligned_bytes(PEAK_BYTES) for _ in range(pool.threads)]
    for some in memory:
        some.fill(0)
    done = [0] * pool.threads

    def piece(lo: int, hi: int, worker: int) -> None:
        del worker
        for i in range(lo, hi):
            done[i] = int(unit.znnpy_bf16_peak(ctypes.c_void_p(memory[i].ctypes.data), ctypes.c_int64(PEAK_TIMES)))

    rates = []
    for _ in range(5):
        begin = perf_counter()
        pool.each(piece, pool.threads)
        rates.append(sum(done) / (perf_counter() - begin))
    return max(rates)


def products_rate(unit: ctypes.CDLL, maps: int, words: int, frequencies: int, tiles: int, pool: ThreadPool) -> float:
    """Return the flops per second of products of one column alone, of all threads; each has a column of its own."""
    b = blocks(maps)
    tile, pitch = 2 * LANES * b, tiles * 2 * LANES * b + 2 * LANES
    fields: dict[str, int] = {"pitch": pitch, "tile": tile, "frequencies": frequencies, "tiles": tiles, "words": words}
    channels = (Channels * b)(*(Channels(lanes=min(LANES, maps - LANES * i)) for i in range(b)))
    kept, calls = [], []
    for _ in range(pool.threads):
        x = aligned_bytes(FLOAT32 * frequencies * pitch).view(np.float32)
        x[...] = np.random.default_rng(1).standard_normal(x.size, np.float32)
        w = aligned_bytes(tiled_products.kernel_bytes(maps, maps, frequencies, words)).view(np.uint16)
        # Results are the next inputs, which should neither grow nor vanish.
        size = np.float32(0.9 / np.sqrt(2 * LANES * b * words))
        values = np.random.default_rng(2).standard_normal(w.size, np.float32) * size
        w[...] = values.view(np.uint32) >> 16
        left = aligned_bytes(tiled_products.left_bytes(maps, words))
        kept.append((x, w, left))
        calls.append(Products(x.ctypes.data, **fields, in_=b, out=b, fin=maps, channels=ctypes.addressof(channels),
                              w=w.ctypes.data, left=left.ctypes.data))  # fmt: skip

    def piece(lo: int, hi: int, worker: int) -> None:
        del worker
        for i in range(lo, hi):
            for _ in range(repeats):
                unit.znnpy_spectral_products(ctypes.byref(calls[i]))

    flops = 8.0 * tiled_products.PRODUCTS[words] * frequencies * tiles * (LANES * b) ** 2
    repeats, spent = max(1, int(2e10 / flops)), []
    for _ in range(5):
        begin = perf_counter()
        pool.each(piece, pool.threads)
        spent.append(perf_counter() - begin)
    return pool.threads * repeats * flops / median(spent)


def multiply_seconds(way: Way, pool: ThreadPool) -> float:
    """Return the seconds of the middle stage of the first group."""
    t, lib = Tiling.from_buffer_copy(way.tiling), library(this_machine().simd)
    spectra = way.scratch["spectra"].view(np.float32)
    spectra[...] = 1e-3  # not the last results: they would grow or vanish
    channels = (Channels * t.in_)(*(Channels(lanes=min(LANES, t.fin - LANES * i), slot=i) for i in range(t.in_)))
    t.channels, t.spectra, t.first = ctypes.addressof(channels), spectra.ctypes.data, 0
    t.tiles = way.step._tiles._groups[0][1]
    buffers = way.scratch["blocks"].reshape(pool.threads, -1)
    columns = t.tile[1] * (t.tile[2] // 2 + 1)

    def piece(lo: int, hi: int, worker: int) -> None:
        at = ctypes.c_void_p(buffers[worker].ctypes.data)
        lib.znnpy_tiled_multiply(ctypes.byref(t), at, ctypes.c_int64(lo), ctypes.c_int64(hi))

    begin = perf_counter()
    pool.each(piece, columns)
    return perf_counter() - begin


def error(out: Any, x: Any, weights: ConvWeights, shape: ConvShape) -> float:
    """Return the rms error of some outputs, of their rms."""
    some = min(ERROR_OUTPUTS, *shape.out)
    part = x[:, : some + shape.k[0] - 1, : some + shape.k[1] - 1, : some + shape.k[2] - 1]
    exact = reference.convolve(part, weights.weight, weights.bias, shape.activation)
    difference = out[:, :some, :some, :some] - exact
    return float(np.sqrt(np.mean(difference**2) / np.mean(exact**2)))


@click.command()
@click.option("--threads", default=2, show_default=True)
@click.option("--maps", default=80, show_default=True, help="Maps of input and output.")
@click.option("--outputs", default=48, show_default=True, help="Outputs along each axis.")
@click.option("-k", "kernels", multiple=True, default=(3, 5, 7, 9), show_default=True)
@click.option("--rounds", default=7, show_default=True)
def command(threads: int, maps: int, outputs: int, kernels: tuple[int, ...], rounds: int) -> None:
    """Compare the ways to multiply spectra on this processor's fastest unit."""
    machine = this_machine()
    if not machine.bf16:
        raise click.UsageError("this processor has no unit for bfloat16")
    unit = unit_library(machine.bf16[0])
    with ThreadPool(threads) as pool:
        most = peak(unit, pool)
        click.echo(f"{machine.processor}, {machine.bf16}, {threads} threads; {most / 1e9:.0f} GFLOP/s from L1")
        for name, words in tiled_products.WORDS.items():
            for frequencies, tiles in ((16, 32), (32, 16)):
                rate = products_rate(unit, maps, words, frequencies, tiles, pool)
                click.echo(
                    f"products of {name}, {frequencies} frequencies of {tiles} tiles: {rate / 1e9:.0f} GFLOP/s, "
                    f"{rate / most:.0%} of the peak; as of float32 {rate / tiled_products.PRODUCTS[words] / 1e9:.0f}"
                )
        for k in kernels:
            _layer(ConvShape(1, maps, maps, (outputs + k - 1,) * 3, (k,) * 3, "relu"), rounds, machine, pool)


def _layer(shape: ConvShape, rounds: int, machine: Machine, pool: ThreadPool) -> None:
    rng, best = np.random.default_rng(1), best_tile(shape, machine, pool.threads)
    x = rng.standard_normal(shape.in_shape, np.float32)
    scale = np.float32(np.sqrt(2 / (shape.fin * prod(shape.k))))
    weight = rng.standard_normal((shape.fout, shape.fin, *shape.k), np.float32) * scale
    weights = ConvWeights(weight, rng.standard_normal(shape.fout, np.float32))
    out = aligned_bytes(shape.out_bytes).view(np.float32).reshape(shape.out_shape)
    ways, layers, stages = {}, {}, {}
    errors: dict[str, float] = {}
    for name in WAYS:
        for kept in (0, 1):
            variant = tiled_variant(
                best.size("tile"),
                best.count("group"),
                kept,
                products=tiled_products.Products(name, machine.bf16[0] if name else ""),
            )
            ways[name, kept] = bound(shape, weights, variant, pool)
            layers[name, kept], stages[name, kept] = list[float](), list[float]()
    for _ in range(rounds):
        for key, way in ways.items():
            begin = perf_counter()
            way.step.run(x, out, way.scratch)
            layers[key].append(perf_counter() - begin)
            errors[key[0]] = error(out, x, weights, shape) if key[0] not in errors else errors[key[0]]
            stages[key].append(multiply_seconds(way, pool))
    click.echo(f"{shape}, {best}")
    for (name, kept), times in layers.items():
        click.echo(
            f"  {name or 'float32':8s} kept={kept}  multiply {1e3 * median(stages[name, kept]):7.2f} ms"
            f"  layer {1e9 * median(times) / prod(shape.out):7.1f} ns a voxel  rms error {errors[name]:.1e}"
        )
