"""A whole layer of cpu.conv.fft_lanes, its stages called alone, and what they move: for stages.py."""

from __future__ import annotations

import ctypes
from math import prod
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from stages_limits import address, floats, interleaved

from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.cpu.conv_fft_lanes import BLOCK, ConvFftLanes, _Sizes, _Step, _Tiling
from znnpy.kernels.cpu.native.library import LANES, blocks, library
from znnpy.kernels.primitive import ConvWeights
from znnpy.machine import this_machine
from znnpy.planner.cost_model import assumed_rates, seconds
from znnpy.shapes import FLOAT32, ConvShape

if TYPE_CHECKING:
    import argparse

    from znnpy.kernels.crew import Crew
    from znnpy.kernels.primitive import Array, Bytes, Variant

LAYERS = tuple(ConvShape(1, 80, 80, (100, 100, 100), (k, k, k), "relu") for k in (3, 5, 7, 9))
STAGES = ("forward", "multiply", "inverse")


class Stages:
    """The stages of one step, each for all groups of tiles, after one another as in `step.run`."""

    def __init__(self, step: _Step, x: Array, out: Array, scratch: dict[str, Bytes]) -> None:
        self._step, self._library = step, library(this_machine().simd)
        for name in ("gather", "scatter", "copy"):
            getattr(self._library, f"znnpy_limits_{name}").restype = None
        self._rooms = scratch["blocks"].reshape(step._crew.threads, -1)
        self._tiling = t = _Tiling.from_buffer_copy(step._tiling)
        t.x, t.out, t.spectra = x.ctypes.data, out.ctypes.data, scratch["spectra"].ctypes.data
        t.x_image, t.out_image = x.strides[0] // FLOAT32, out.strides[0] // FLOAT32

    def run(self, name: str) -> None:
        step, s, t = self._step, self._step._sizes, self._tiling
        stage = getattr(self._library, f"znnpy_{'tiled' if name in STAGES else 'limits'}_{name}")
        for t.first, t.tiles in step._groups:
            if name == "multiply":
                self._each(stage, s.columns)
            else:
                planes = s.tile[0] if name in ("forward", "gather") else s.step[0]
                self._each(stage, t.tiles * planes)

    def _each(self, stage: Any, count: int) -> None:
        """All units of one stage of one group."""
        tiling = ctypes.byref(self._tiling)

        def piece(lo: int, hi: int, worker: int) -> None:
            stage(tiling, address(self._rooms[worker]), ctypes.c_int64(lo), ctypes.c_int64(hi))

        self._step._crew.each(piece, count)

    def copy(self, x: Array, out: Array) -> None:
        """As much of x as out holds."""

        def piece(lo: int, hi: int, worker: int) -> None:
            del worker
            self._library.znnpy_limits_copy(address(x), address(out), ctypes.c_int64(lo), ctypes.c_int64(hi))

        self._step._crew.each(piece, min(x.size, out.size) // LANES)


def plain_copy(x: Array, out: Array, crew: Crew) -> None:
    """numpy's, of as much of x as out holds."""
    source, target = x.reshape(-1), out.reshape(-1)

    def piece(lo: int, hi: int, worker: int) -> None:
        del worker
        target[lo:hi] = source[lo:hi]

    crew.each(piece, min(source.size, target.size))


def moved(shape: ConvShape, s: _Sizes) -> dict[str, float]:
    """Bytes that each stage asks for or writes: inputs where tiles overlap are read again."""
    read = prod(
        sum(min(tile, n - step * i) for i in range(count))
        for tile, n, step, count in zip(s.tile, shape.n, s.step, s.counts, strict=True)
    )
    spectra_in = s.tiles * s.tile[0] * s.columns * blocks(shape.fin) * BLOCK
    spectra_out = shape.batch * s.counts[1] * s.counts[2] * shape.out[0] * s.columns * blocks(shape.fout) * BLOCK
    forward = shape.batch * read * shape.fin * FLOAT32 + spectra_in
    inverse = spectra_out + shape.out_bytes
    copied = 2.0 * min(shape.in_bytes, shape.out_bytes)
    return {
        "copy": copied,
        "numpy copy": copied,
        "forward": float(forward),
        "gather": float(forward),
        "inverse": float(inverse),
        "scatter": float(inverse),
    }


def chosen(shape: ConvShape, crew: Crew) -> Variant:
    """The variant that the planner would choose without having measured."""
    machine, primitive = this_machine(), ConvFftLanes()
    rates = assumed_rates(machine, crew.threads)
    return min(primitive.variants(shape, machine), key=lambda variant: seconds(primitive.work(shape, variant), rates))


def layer(shape: ConvShape, crew: Crew, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds, ns an output voxel, GB/s and GFLOP/s of the layer, its stages and what they move."""
    primitive, variant = ConvFftLanes(), chosen(shape, crew)
    random = np.random.default_rng(20261121)
    x, out = floats(*shape.in_shape), floats(*shape.out_shape)
    x[...] = random.standard_normal(shape.in_shape, np.float32)
    weight = random.standard_normal((shape.fout, shape.fin, *shape.k), np.float32) / (shape.fin * prod(shape.k)) ** 0.5
    weights = ConvWeights(weight.astype(np.float32), np.zeros(shape.fout, np.float32))
    step = primitive.bind(primitive.prepare(weights, variant, crew), shape, variant, crew)
    buffers = primitive.footprint(shape, variant, crew.threads).scratch
    scratch = {buffer.name: aligned_bytes(buffer.nbytes) for buffer in buffers}
    stages = Stages(step, x, out, scratch)
    runs = {"layer": lambda: step.run(x, out, scratch)}
    for name in (*STAGES, "gather", "scatter"):
        runs[name] = lambda name=name: stages.run(name)  # type: ignore[misc]
    runs["copy"] = lambda: stages.copy(x, out)
    runs["numpy copy"] = lambda: plain_copy(x, out, crew)
    times = interleaved(runs, options.rounds)
    middle = {name: median(each) for name, each in times.items()}
    sizes, ns = step._sizes, 1e9 / (shape.batch * prod(shape.out))
    rates = {name: nbytes / middle[name] / 1e9 for name, nbytes in moved(shape, sizes).items()}
    products = 8.0 * shape.fin * shape.fout * sizes.columns * sizes.tile[0] * sizes.tiles
    return {
        "shape": str(shape),
        "variant": str(variant),
        "threads": crew.threads,
        "ns_per_voxel": {name: each * ns for name, each in middle.items()},
        "of_sum": middle["layer"] / sum(middle[name] for name in STAGES),
        "multiply_gflops": products / middle["multiply"] / 1e9,
        "gb_per_second": rates,
        "of_copy": {name: rate / rates["copy"] for name, rate in rates.items() if "copy" not in name},
        "seconds": times,
    }
