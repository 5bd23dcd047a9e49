"""One convolution layer, every way to compute it, and PyTorch's conv3d (oneDNN) beside them.

    python benchmarks/layers.py [--rounds N] [--threads N] [--quick] [--out RESULT.json]

Rounds are interleaved: each runs every competitor once, in an order that alternates, after one warm run. A whole-image
FFT takes tens of times as long as the others and runs in `--slow-rounds` of the rounds. Tile and group of the tiled FFT
are measured, not predicted: every variant runs once, the best takes part. Times are of one layer on arrays that are
there already; kernel spectra and PyTorch's reordered weights are made before, as in a run over many patches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from header import machine_header, without_forced_blas_kernels

from znnpy.errors import MissingExtraError
from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.crew import Crew
from znnpy.kernels.primitive import ConvWeights
from znnpy.kernels.table import of_kind
from znnpy.machine import this_machine
from znnpy.shapes import ConvShape

if TYPE_CHECKING:
    from znnpy.kernels.primitive import Array, Primitive, Variant

MAX_ERROR = 1e-4  # of the largest output, between any two competitors: else a figure is worth nothing


@dataclass(frozen=True, slots=True)
class Case:
    """One layer. `why` says what the row is there to show."""

    shape: ConvShape
    why: str


CASES = (
    Case(
        ConvShape(1, 80, 80, (100, 100, 100), (3, 3, 3), "relu"),
        "80 -> 80 maps, one image: what does tiling buy at k = 3?",
    ),
    Case(ConvShape(1, 80, 80, (100, 100, 100), (5, 5, 5), "relu"), "the same with k = 5: tiles overlap more"),
    Case(ConvShape(1, 80, 80, (100, 100, 100), (9, 9, 9), "relu"), "the same with k = 9: where direct has lost"),
)
QUICK = (Case(ConvShape(1, 4, 4, (12, 13, 14), (3, 3, 3), "relu"), "that the script works"),)


@dataclass(frozen=True, slots=True)
class Row:
    """One competitor in one case."""

    shape: str
    why: str
    name: str
    variant: str
    seconds: tuple[float, ...]  # every run
    voxels: int  # of output

    @property
    def median_ns(self) -> float:
        """Nanoseconds per output voxel."""
        return 1e9 * statistics.median(self.seconds) / self.voxels

    @property
    def min_ns(self) -> float:
        return 1e9 * min(self.seconds) / self.voxels


@dataclass(slots=True)
class Entry:
    """A way to compute the layer: `run` returns its output, channels last."""

    name: str
    variant: str
    run: Callable[[], Any]
    rounds: int
    seconds: list[float]


def entry(primitive: Primitive, variant: Variant, case: Case, x: Array, weights: ConvWeights, crew: Crew) -> Entry:
    """A primitive with buffers of its own, ready to run."""
    shape = case.shape
    step = primitive.bind(primitive.prepare(weights, variant, crew), shape, variant, crew)
    scratch = {s.name: aligned_bytes(s.nbytes) for s in primitive.footprint(shape, variant, crew.threads).scratch}
    out = np.full(shape.out_shape, np.nan, np.float32)

    def run() -> Array:
        step.run(x, out, scratch)
        return out

    return Entry(primitive.name, str(variant), run, 0, [])


def best_variant(primitive: Primitive, case: Case, x: Array, weights: ConvWeights, crew: Crew) -> Variant:
    """The variant whose only run was the shortest, of the eight that do least work."""

    def work(variant: Variant) -> float:
        return sum(w.flops for w in primitive.work(case.shape, variant))

    variants = sorted(primitive.variants(case.shape, this_machine()), key=work)[:8]
    if len(variants) == 1:
        return variants[0]
    times = {}
    for variant in variants:
        run = entry(primitive, variant, case, x, weights, crew).run
        times[variant] = min(timed(run)[0] for _ in range(2))
    return min(times, key=times.__getitem__)


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    out = run()
    return time.perf_counter() - start, out


def torch_competitors(case: Case, x: Array, weights: ConvWeights, threads: int) -> list[Entry]:
    """conv3d and ReLU in float32: contiguous, and channels last."""
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError(f"the comparison needs PyTorch ({error}); install znnpy[torch]") from None
    torch.set_num_threads(threads)
    found = []
    for name, layout in (("contiguous", torch.contiguous_format), ("channels last", torch.channels_last_3d)):
        image = torch.from_numpy(x).permute(0, 4, 1, 2, 3).contiguous(memory_format=layout)
        weight = torch.from_numpy(weights.weight).contiguous(memory_format=layout)
        bias = torch.from_numpy(weights.bias)

        def run(image: Any = image, weight: Any = weight, bias: Any = bias) -> Any:
            with torch.inference_mode():
                return torch.relu_(torch.nn.functional.conv3d(image, weight, bias)).permute(0, 2, 3, 4, 1)

        found.append(Entry(f"torch conv3d, {name}", "", run, 0, []))
    return found


def measure(case: Case, rounds: int, slow_rounds: int, threads: int, *, torch: bool) -> list[Row]:
    """All competitors of one case."""
    shape = case.shape
    rng = np.random.default_rng(20261120)
    x = rng.standard_normal(shape.in_shape, np.float32)
    scale = np.float32(np.sqrt(2 / (shape.fin * prod(shape.k))))
    weights = ConvWeights(
        rng.standard_normal((shape.fout, shape.fin, *shape.k), np.float32) * scale,
        rng.standard_normal(shape.fout, np.float32),
    )
    with Crew(threads) as crew:
        field = []
        for primitive in of_kind("conv"):
            if primitive.why_not(shape, this_machine()) is None:
                variant = best_variant(primitive, case, x, weights, crew)
                field.append(entry(primitive, variant, case, x, weights, crew))
        if torch:
            field += torch_competitors(case, x, weights, threads)
        expected = None
        for e in field:
            seconds, out = timed(e.run)  # the warm run
            e.rounds = slow_rounds if seconds > 4 else rounds
            out = np.asarray(out)
            expected = out.copy() if expected is None else expected
            error = float(np.abs(out - expected).max() / np.abs(expected).max())
            if not error <= MAX_ERROR:
                raise SystemExit(f"{e.name} is {error:.1e} of the largest output away from {field[0].name}")
        for index in range(rounds):
            for e in field if index % 2 == 0 else reversed(field):
                if index < e.rounds:
                    e.seconds.append(timed(e.run)[0])
    voxels = prod(shape.out_shape[:4])
    return [Row(str(shape), case.why, e.name, e.variant, tuple(e.seconds), voxels) for e in field]


def show(rows: list[Row]) -> None:
    tiled = next(row for row in rows if row.name == "cpu.conv.fft_tiled")
    print(f"\n{rows[0].shape}\n{'':36}{'ns/voxel':>9}{'min':>9}{'x tiled':>9}  rounds")
    for row in sorted(rows, key=lambda row: row.median_ns):
        name = f"{row.name} {row.variant}"
        ratio = row.median_ns / tiled.median_ns
        print(f"{name:36}{row.median_ns:9.0f}{row.min_ns:9.0f}{ratio:9.2f}  {len(row.seconds)}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--slow-rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=this_machine().cores)
    parser.add_argument("--kernels", type=int, nargs="*", help="only these sizes of kernel")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--quick", action="store_true", help="a tiny case, to see that everything works")
    parser.add_argument("--out", type=Path, help="default: results/layers-MACHINE-DATE.json; none with --quick")
    options = parser.parse_args(arguments)
    cases = [c for c in (QUICK if options.quick else CASES) if not options.kernels or c.shape.k[0] in options.kernels]
    rows: list[Row] = []
    for case in cases:
        of_case = measure(case, options.rounds, options.slow_rounds, options.threads, torch=not options.no_torch)
        show(of_case)
        rows += of_case
    result = {
        "header": machine_header() | {"layer_threads": options.threads},
        "rows": [asdict(row) | {"median_ns": row.median_ns, "min_ns": row.min_ns} for row in rows],
    }
    name = "-".join(this_machine().processor.lower().split()[:3])
    out = options.out or Path(__file__).parent / "results" / f"layers-{name}-{date.today()}.json"
    if options.out or not options.quick:
        out.parent.mkdir(exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\n{out}")


if __name__ == "__main__":
    without_forced_blas_kernels()
    main()
