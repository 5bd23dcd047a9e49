"""Transforms and products of cpu.conv.fft_lanes in cache, beside FFTW's and BLAS's: for stages.py."""

from __future__ import annotations

import ctypes
import time
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyfftw

from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.cpu.conv_fft_lanes import CHUNK, _Tiling
from znnpy.kernels.cpu.native.library import LANES, blocks, library
from znnpy.machine import this_machine
from znnpy.shapes import FLOAT32

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

    from znnpy.kernels.contract import Array
    from znnpy.kernels.thread_pool import ThreadPool

    Run = Callable[[], object]
    Way = Literal["forward", "inverse"]

SIDES = (16, 20, 24, 28, 32)
PRODUCT = (80, 80)  # maps
REGISTERS = "in registers"
PAUSE = 0.005  # seconds before a run
FREQUENCIES, TILES = 32, (64, 256)  # of BLAS's products
BLOCK = 2 * LANES
CHUNK_TILES = CHUNK // 16  # that share one pass over a frequency's kernels, where tiles are 16 high
TRANSFORM_VALUES = 2**22  # that a worker transforms in one run, at least
PRODUCT_FLOPS = 2e9  # of a worker in one run, at least
PEAK_TIMES = 5_000_000  # of 12 multiply-adds


def floats(*shape: int) -> Array:
    """Zeros that begin with a cache line."""
    array = aligned_bytes(FLOAT32 * int(np.prod(shape))).view(np.float32).reshape(shape)
    array[...] = 0
    return array


def address(array: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def interleaved(runs: Mapping[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round of every run, after one that does not count."""
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds):
        for name in list(runs) if index % 2 == 0 else reversed(list(runs)):
            time.sleep(PAUSE)
            begin = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - begin)
    return seconds


def by_worker(crew: ThreadPool, each: Callable[[int], object]) -> Run:
    """`each(worker)`, once for every worker, at the same time."""

    def piece(lo: int, hi: int, worker: int) -> None:
        del worker
        for index in range(lo, hi):
            each(index)

    return lambda: crew.each(piece, crew.threads)


class Cube:
    """The library's transforms of one block of channels of a cubic tile, within one worker's memory.

    image    (side, side, side, LANES) float32
    spectra  (side // 2 + 1, side, side or the next odd number, 2, LANES) float32: x, y, z, re/im, lane
    """

    def __init__(self, side: int) -> None:
        half = side // 2 + 1
        self._tile = (ctypes.c_int64 * 3)(side, side, side)
        self._library = library(this_machine().simd)
        self._room = floats(side, half, BLOCK)
        self.image, self.spectra = floats(side, side, side, LANES), floats(half, side, side | 1, 2, LANES)

    def run(self, way: Way, times: int) -> None:
        call = self._library.znnpy_limits_transform if way == "forward" else self._library.znnpy_limits_restore
        arrays = (address(array) for array in (self.image, self.spectra, self._room))
        call(self._tile, *arrays, ctypes.c_int64(times))


def fftw(side: int, way: Way, innermost: bool) -> Any:
    """A plan for LANES real transforms; its arrays are its own, zeros: those of inverse ones are overwritten."""
    half, axes = side // 2 + 1, (0, 1, 2) if innermost else (1, 2, 3)
    before, behind = ((), (LANES,)) if innermost else ((LANES,), ())
    real = pyfftw.zeros_aligned((*before, side, side, side, *behind), np.float32)
    spectra = pyfftw.zeros_aligned((*before, side, side, half, *behind), np.complex64)
    arrays = (real, spectra) if way == "forward" else (spectra, real)
    direction = "FFTW_FORWARD" if way == "forward" else "FFTW_BACKWARD"
    flags = ("FFTW_MEASURE", "FFTW_DESTROY_INPUT")
    return pyfftw.FFTW(*arrays, axes=axes, direction=direction, flags=flags, threads=1)


def transform(side: int, crew: ThreadPool, options: argparse.Namespace) -> dict[str, Any]:
    """ns a real voxel and channel of all workers together."""
    times = 1 if options.quick else -(-TRANSFORM_VALUES // (LANES * side**3))
    row: dict[str, Any] = {"side": side, "channels": LANES, "threads": crew.threads, "times": times}
    for way in ("forward", "inverse"):
        runs: dict[str, Run] = {}
        cubes = [Cube(side) for _ in range(crew.threads)]
        runs["own"] = by_worker(crew, lambda worker, cubes=cubes, way=way: cubes[worker].run(way, times))  # type: ignore[misc]
        for place in ("innermost", "outermost"):
            plans = [fftw(side, way, place == "innermost") for _ in range(crew.threads)]
            runs[f"fftw, channels {place}"] = by_worker(
                crew,
                lambda worker, plans=plans: [plans[worker].execute() for _ in range(times)],  # type: ignore[misc]
            )
        seconds = interleaved(runs, options.rounds)
        scale = 1e9 / (times * crew.threads * LANES * side**3)
        ns = {name: median(each) * scale for name, each in seconds.items()}
        best = min(value for name, value in ns.items() if name != "own")
        row[way] = {"own": ns["own"], "fftw": best, "times": best / ns["own"], "ns": ns, "seconds": seconds}
    return row


class OwnProduct:
    """The multiply stage of tiles of one voxel that all lie in one place: the product, and what it reads from L2."""

    def __init__(self, fin: int, fout: int, tiles: int) -> None:
        self._tiling = t = _Tiling(fin=fin, fout=fout, tiles=tiles, chunk=CHUNK_TILES, kept=1)
        for axes in (t.n, t.k, t.p, t.tile, t.step, t.counts):
            axes[:] = (1, 1, 1)
        blocks_in, blocks_out = blocks(fin), blocks(fout)
        self._spectra = floats(max(blocks_in, blocks_out), BLOCK)
        self._kernels = floats(fin + 1, blocks_out, BLOCK)
        self._room = floats(CHUNK_TILES * (blocks_in + blocks_out) + 2, BLOCK)
        t.spectra, t.kernels = self._spectra.ctypes.data, self._kernels.ctypes.data
        self._library = library(this_machine().simd)
        self.tiles = tiles

    def run(self) -> None:
        column = ctypes.c_int64(0), ctypes.c_int64(1)
        self._library.znnpy_tiled_multiply(ctypes.byref(self._tiling), address(self._room), *column)


def matmul(fin: int, fout: int, tiles: int, size: int, times: int) -> Run:
    """numpy's product of every frequency: complex, or real of twice the `size`: [a, b] @ [[c, d], [-d, c]]."""
    dtype = np.complex64 if size == 1 else np.float32
    x, w = np.zeros((FREQUENCIES, tiles, size * fin), dtype), np.zeros((FREQUENCIES, size * fin, size * fout), dtype)
    y = np.zeros((FREQUENCIES, tiles, size * fout), dtype)

    def run() -> None:
        for _ in range(times):
            np.matmul(x, w, out=y)

    return run


def bmm(fin: int, fout: int, tiles: int, size: int, times: int) -> Run:
    """The same in PyTorch."""
    import torch

    dtype = torch.complex64 if size == 1 else torch.float32
    x = torch.zeros((FREQUENCIES, tiles, size * fin), dtype=dtype)
    w = torch.zeros((FREQUENCIES, size * fin, size * fout), dtype=dtype)
    y = torch.zeros((FREQUENCIES, tiles, size * fout), dtype=dtype)

    def run() -> None:
        for _ in range(times):
            torch.bmm(x, w, out=y)

    return run


def multiplication(fin: int, fout: int, crew: ThreadPool, options: argparse.Namespace) -> dict[str, Any]:
    """GFLOP/s of all workers together; 8 flops a complex multiply-add."""
    least = 1.0 if options.quick else PRODUCT_FLOPS
    once = 8.0 * fin * fout
    runs: dict[str, Run] = {}
    flops: dict[str, float] = {}
    own = [OwnProduct(fin, fout, -(-int(least / once) // CHUNK_TILES) * CHUNK_TILES) for _ in range(crew.threads)]
    runs["own"], flops["own"] = by_worker(crew, lambda worker: own[worker].run()), crew.threads * own[0].tiles * once
    contestants = {"numpy": matmul} | ({"torch": bmm} if options.torch else {})
    if options.torch:
        import torch

        torch.set_num_threads(1)  # each worker its own products
    for contestant, make in contestants.items():
        for size, kind in ((1, "complex"), (2, "real")):
            for tiles in TILES:
                name, all_at_once = f"{contestant} {kind}, {tiles} tiles", once * FREQUENCIES * tiles
                times = max(1, int(least / all_at_once))
                each = [make(fin, fout, tiles, size, times) for _ in range(crew.threads)]
                runs[name] = by_worker(crew, lambda worker, each=each: each[worker]())  # type: ignore[misc]
                flops[name] = crew.threads * times * all_at_once
    lib, factors = library(this_machine().simd), [floats(2 + 12, LANES) for _ in range(crew.threads)]
    peak = ctypes.c_int64(1 if options.quick else PEAK_TIMES)
    runs[REGISTERS] = by_worker(crew, lambda worker: lib.znnpy_limits_peak(address(factors[worker]), peak))
    flops[REGISTERS] = float(crew.threads * lib.znnpy_limits_peak(address(factors[0]), peak))
    seconds = interleaved(runs, options.rounds)
    rates = {name: flops[name] / median(each) / 1e9 for name, each in seconds.items()}
    best = max(rate for name, rate in rates.items() if name not in ("own", REGISTERS))
    return {
        "fin": fin,
        "fout": fout,
        "threads": crew.threads,
        "gflops": rates,
        "of_best": rates["own"] / best,
        "of_registers": rates["own"] / rates[REGISTERS],
        "seconds": seconds,
    }
