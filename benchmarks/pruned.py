"""What does pruning buy? Transforms of zero-padded kernels and images, pruned against plain (ZNNi III-A, III-B).

    python benchmarks/pruned.py [--rounds N] [--quick] [--out RESULT.json]

Kernels  of 3 to 9 a side, padded to 32 to 128, one at a time, one thread, as `cpu.conv.fft_data` transforms them:
         plain   the padded kernel through FFTW's real 3D transform (MEASURE), after it was padded;
         lines   FFTW along x, y, z, each only where lines are not zero: what the paper calls pruned (MEASURE);
         matrix  products with twiddles (`kernels/cpu/pruned.py`): what runs.
Images   padded from n - k + 1 + k - 1 = n0 to n for a layer with 16 maps: lines along x of padding are not transformed,
         nor planes along y, against the plain transform of the padded image.
Rounds are interleaved in an order that alternates; figures are medians. The paper claims a factor of 5 on average.
With `--device gpu` everything is another: see pruned_gpu.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyfftw
from header import machine_header, taken_device, without_forced_blas_kernels

from znnpy.kernels.aligned import aligned_bytes, odd_lines
from znnpy.kernels.cpu.pruned import twiddles
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.machine import this_machine

KERNELS = (3, 5, 7, 9)
SIZES = (32, 48, 64, 96, 128)
IMAGES = ((28, 32), (50, 64), (60, 64), (100, 128), (120, 128))  # voxels of an image, and of its transform
ROUND_SECONDS = 0.01  # each contestant repeats that long in a round
PLAN_SECONDS = 2.0
MAX_ERROR = 1e-5  # of the largest frequency


@dataclass(frozen=True, slots=True)
class Row:
    what: str  # kernel or image
    size: int  # that is not zero
    padded: int
    seconds: dict[str, tuple[float, ...]]  # of one transform, every round

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, name: str) -> float:
        """Plain against this one."""
        return self.median("plain") / self.median(name)


def array(shape: tuple[int, ...], dtype: type[Any]) -> Any:
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    zeros = aligned_bytes(nbytes).view(dtype).reshape(shape)
    zeros[...] = 0
    return zeros


def planned(source: Any, target: Any, axes: tuple[int, ...]) -> Callable[[], Any]:
    """FFTW's measured plan; planning destroys both arrays."""
    plan = pyfftw.FFTW(
        source,
        target,
        axes=axes,
        flags=("FFTW_MEASURE", "FFTW_DESTROY_INPUT"),
        planning_timelimit=PLAN_SECONDS,
    )
    source[...] = 0
    target[...] = 0
    return plan.execute  # type: ignore[no-any-return]


def lines(voxels: Any, n: int) -> tuple[Callable[[], None], Any]:
    """Transforms lines that are not zero: m^2 along x, m * half along y, n * half along z. Padding stays zero."""
    m = len(voxels)
    half = n // 2 + 1
    pitch = odd_lines(half)
    rows = array((m, m, n), np.float32)
    planes = array((n, odd_lines(n * pitch)), np.complex64)
    spectrum = planes[:, : n * pitch].reshape(n, n, pitch, copy=False)[..., :half]
    along_x = planned(rows, spectrum[:m, :m], (2,))
    along_y = [planned(plane, plane, (0,)) for plane in spectrum[:m]]
    along_z = planned(spectrum, spectrum, (0,))

    def run() -> None:
        rows[..., :m] = voxels
        rows[..., m:] = 0
        spectrum[m:] = 0
        spectrum[:m, m:] = 0
        along_x()
        for transform in along_y:
            transform()
        along_z()

    return run, spectrum


def plain(voxels: Any, n: int) -> tuple[Callable[[], None], Any]:
    m = len(voxels)
    image, spectrum = array((n, n, n), np.float32), array((n, n, n // 2 + 1), np.complex64)
    transform = planned(image, spectrum, (0, 1, 2))

    def run() -> None:
        image[...] = 0
        image[:m, :m, :m] = voxels
        transform()

    return run, spectrum


def matrix(voxels: Any, n: int) -> tuple[Callable[[], None], Any]:
    k, half = len(voxels), n // 2 + 1
    along = twiddles(n, k)
    along_x = np.ascontiguousarray(twiddles(n, k, half).T)
    x, y = array((k, k, half), np.complex64), array((k, n, half), np.complex64)
    spectrum = array((n, n, half), np.complex64)

    def run() -> None:
        np.matmul(voxels, along_x, out=x)
        np.matmul(along, x, out=y)
        np.matmul(along, y.reshape(k, -1), out=spectrum.reshape(n, -1))

    return run, spectrum


def measure(what: str, size: int, n: int, rounds: int) -> Row:
    voxels = np.random.default_rng(20261121).standard_normal((size, size, size)).astype(np.float32)
    field = {"plain": plain(voxels, n), "lines": lines(voxels, n)}
    if what == "kernel":
        field["matrix"] = matrix(voxels, n)
    for name, (run, spectrum) in field.items():
        run()
        exact = np.fft.rfftn(voxels.astype(np.float64), (n, n, n), axes=(0, 1, 2))
        found = np.conj(spectrum) * n**3 if name == "matrix" else spectrum  # it conjugates and scales
        error = float(np.abs(found - exact).max() / np.abs(exact).max())
        if not error <= MAX_ERROR:
            raise SystemExit(f"{name} of {size}^3 in {n}^3 is wrong by {error:.1e}")
    seconds: dict[str, list[float]] = {name: [] for name in field}
    for number in range(rounds):
        for name in field if number % 2 == 0 else reversed(field):
            seconds[name].append(timed(field[name][0]))
    return Row(what, size, n, {name: tuple(values) for name, values in seconds.items()})


def timed(run: Callable[[], None]) -> float:
    """Seconds of one call, of as many as take ROUND_SECONDS."""
    calls, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < ROUND_SECONDS or calls == 0:
        run()
        calls += 1
    return spent / calls


def show(row: Row, digits: int = 0) -> None:
    figures = "  ".join(
        f"{name} {1e6 * row.median(name):8.{digits}f} us" + (f" ({row.ratio(name):4.1f}x)" if name != "plain" else "")
        for name in row.seconds
    )
    print(f"{row.what} {row.size:3} in {row.padded:3}  {figures}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one tiny kernel, to see that everything works")
    parser.add_argument("--out", type=Path, help="default: results/pruned-MACHINE-DATE.json; none with --quick")
    options = parser.parse_args(arguments)
    cases = [("kernel", k, n) for n in SIZES for k in KERNELS] + [("image", m, n) for m, n in IMAGES]
    rows = []
    with ThreadPool(1):  # BLAS runs one thread
        for what, size, n in [("kernel", 3, 16)] if options.quick else cases:
            rows.append(measure(what, size, n, options.rounds))
            show(rows[-1])
    result: dict[str, Any] = {"header": machine_header(), "rows": []}
    for row in rows:
        medians = {name: row.median(name) for name in row.seconds}
        result["rows"].append(asdict(row) | {"medians": medians, "ratios": {name: row.ratio(name) for name in medians}})
    for name in ("lines", "matrix"):
        ratios = [row.ratio(name) for row in rows if row.what == "kernel"]
        print(
            f"kernels, {name}: {min(ratios):.1f} to {max(ratios):.1f}, mean {statistics.mean(ratios):.1f} times plain"
        )
    out = options.out
    if out is None and not options.quick:
        name = "-".join(this_machine().processor.lower().split()[:3])
        out = Path(__file__).parent / "results" / f"pruned-{name}-{date.today()}.json"
    if out is not None:
        out.parent.mkdir(exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
        print(out)


if __name__ == "__main__":
    without_forced_blas_kernels()
    device, words = taken_device()
    if device == "gpu":
        import pruned_gpu

        pruned_gpu.main(words)
    else:
        main(words)
