"""What does pruning buy on a GPU? Transforms of zero-padded kernels and images, pruned against plain (ZNNi III-C).

    python benchmarks/pruned.py --device gpu [--rounds N] [--quick] [--out RESULT.json]

Kernels  of 3 to 9 a side, padded to 32 to 128, MAPS at a time:
         plain   padded in three dimensions, through cuFFT's real 3D transform;
         lines   cuFFT along x, y, z, only where they are not zero, padded and turned over in between: the paper's;
         pruned  the lines along z by Horner's rule from what is not zero: as `gpu.conv.fft` transforms kernels.
Images   of MAPS maps, channels last, padded to the next good size: what makes them planar counts on both sides.
Rounds are interleaved in an order that alternates; figures are medians, timed by events of the device. The paper claims
a factor of 10 on average for kernels.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np
from gpu_card import gpu_header
from pruned import KERNELS, MAX_ERROR, SIZES, Row, show

from znnpy.kernels.contract import ConvWeights, Variant
from znnpy.kernels.gpu import conv_fft
from znnpy.kernels.gpu.conv_fft import ConvFft
from znnpy.shapes import ConvShape, Vec3

if TYPE_CHECKING:
    from znnpy.kernels.gpu.conv_fft import FftStep
    from znnpy.kernels.gpu.device import Device

IMAGES = ((29, 30), (53, 54), (95, 96), (127, 128))  # voxels of an image, and the next good size: little to prune
MAPS = 80
ROUND_SECONDS = 0.005  # each contestant repeats that long in a round


class Contestants:
    """All ways to transform `maps` images, or kernels, of `size` voxels a side, padded to `n`."""

    def __init__(self, device: Device, what: str, size: int, n: int, maps: int) -> None:
        import cupy

        self._cupy, self._device, self._what, self._size, self._n, self._maps = cupy, device, what, size, n, maps
        rng = np.random.default_rng(20261121)
        self._voxels = rng.standard_normal((maps, size, size, size), np.float32)
        side: Vec3 = (n, n, n)
        shape = ConvShape(
            1, maps, 1, (size,) * 3 if what == "image" else side, (size,) * 3 if what == "kernel" else (1, 1, 2)
        )
        variant = Variant.of(maps=maps)
        primitive = ConvFft()
        weights = ConvWeights(
            self._voxels[None] if what == "kernel" else np.zeros((1, maps, 1, 1, 2), np.float32),
            np.zeros(1, np.float32),
        )
        resident = primitive.prepare(weights, variant, device)
        self._pruned = primitive.bind(resident, shape, variant, device)
        expanded, conv_fft.EXPANDED = conv_fft.EXPANDED, 0
        self._lines = primitive.bind(resident, shape, variant, device)
        conv_fft.EXPANDED = expanded
        names = {"kernel": ("kernels", "lines_kernels"), "image": ("spectra", "lines_in")}[what]
        self._scratch = {
            s.name: device.allocate(s.nbytes, s.name)
            for s in primitive.footprint(shape, variant, 1).scratch
            if s.name in names
        }
        self._store = self._scratch[names[0]]
        self._last = device.put(np.ascontiguousarray(self._voxels.transpose(1, 2, 3, 0)), "an image")
        self._planar = device.put(self._voxels, "kernels")
        half = n // 2 + 1
        self._padded = device.view(
            device.allocate(8 * maps * n * n * half, "padded"), (maps, n, n, 2 * half), np.float32
        )
        with device.stream:
            self._plan = cupy.cuda.cufft.PlanNd(
                side, (n, n, 2 * half), 1, n * n * 2 * half, (n, n, half), 1, n * n * half, cupy.cuda.cufft.CUFFT_R2C,
                maps, "C", 2, n,
            )  # fmt: skip

    @property
    def field(self) -> dict[str, Callable[[], None]]:
        if self._what == "image":
            return {"plain": self.plain, "lines": self.image}
        return {
            "plain": self.plain,
            "lines": lambda: self.kernels(self._lines),
            "pruned": lambda: self.kernels(self._pruned),
        }

    def kernels(self, step: FftStep) -> None:
        step.transform_kernels(0, self._maps, self._scratch)

    def image(self) -> None:
        self._lines.transform_maps(self._last[None], None, 0, self._maps, self._scratch)

    def plain(self) -> None:
        m = self._size
        with self._device.stream:
            self._padded.fill(0)
            voxels = self._planar if self._what == "kernel" else self._last.transpose(3, 0, 1, 2)
            self._padded[:, :m, :m, :m] = voxels
            self._plan.fft(self._padded, self._padded, self._cupy.cuda.cufft.CUFFT_FORWARD)

    def check(self) -> None:
        """SystemExit if one of them computes something else than numpy in float64, of the last map."""
        n, half = self._n, self._n // 2 + 1
        exact = np.fft.rfftn(self._voxels[-1].astype(np.float64), (n, n, n), axes=(0, 1, 2))
        spectra = self._device.view(self._store, (self._maps, half, n, n), np.complex64)  # [x][y][z]
        for name, run in self.field.items():
            self._device.clear(self._store)
            run()
            padded = self._device.get(self._padded[-1]).view(np.complex64)
            spectrum = padded if name == "plain" else self._device.get(spectra[-1]).transpose(2, 1, 0)
            error = float(np.abs(spectrum - exact).max() / np.abs(exact).max())
            if not error <= MAX_ERROR:
                raise SystemExit(f"{name} of {self._size}^3 in {n}^3 is wrong by {error:.1e}")


def measure(device: Device, what: str, size: int, n: int, maps: int, rounds: int) -> Row:
    """Seconds of one map's transform."""
    contestants = Contestants(device, what, size, n, maps)
    contestants.check()
    field = contestants.field
    times = {name: max(1, int(ROUND_SECONDS / min(device.elapsed(run, 3)))) for name, run in field.items()}
    seconds: dict[str, list[float]] = {name: [] for name in field}
    for number in range(rounds):
        for name in field if number % 2 == 0 else reversed(field):
            seconds[name].append(mean(device.elapsed(field[name], times[name])) / maps)
    return Row(what, size, n, {name: tuple(values) for name, values in seconds.items()})


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one tiny kernel, to see that everything works")
    parser.add_argument("--out", type=Path, help="default: results/pruned-CARD-DATE.json; none with --quick")
    options = parser.parse_args(words)
    from znnpy.kernels.gpu.device import Device, find_gpu

    cases = [("kernel", k, n) for n in SIZES for k in KERNELS] + [("image", m, n) for m, n in IMAGES]
    gpu = find_gpu()
    header = gpu_header(gpu)
    rows = []
    for what, size, n in [("kernel", 3, 16), ("image", 13, 14)] if options.quick else cases:
        with Device(gpu) as device:  # a new one frees what the last case took
            rows.append(measure(device, what, size, n, 3 if options.quick else MAPS, options.rounds))
        show(rows[-1], digits=2)
    result: dict[str, Any] = {"header": header, "maps": MAPS, "rows": []}
    for row in rows:
        medians = {name: row.median(name) for name in row.seconds}
        result["rows"].append(asdict(row) | {"medians": medians, "ratios": {name: row.ratio(name) for name in medians}})
    for what, name in (("kernel", "lines"), ("kernel", "pruned"), ("image", "lines")):
        ratios = [row.ratio(name) for row in rows if row.what == what]
        print(f"{what}s, {name}: {min(ratios):.1f} to {max(ratios):.1f}, mean {mean(ratios):.1f} times plain")
    out = options.out
    if out is None and not options.quick:
        out = Path(__file__).parent / "results" / f"pruned-{'-'.join(gpu.name.lower().split())}-{date.today()}.json"
    if out is not None:
        out.parent.mkdir(exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
        print(out)
