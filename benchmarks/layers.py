"""One convolution layer, every way to compute it, and PyTorch's conv3d (oneDNN) beside them.

    python benchmarks/layers.py [--sets main first ...] [--kernels 3 5] [--threads 2] [--quick] [--out RESULT.json]

Rounds are interleaved: each runs every competitor once, in an order that alternates, after one warm run; bias and ReLU
count on both sides. PyTorch runs in float32 and bfloat16, contiguous and channels last: the best of each precision is
what ratios are against. Variants of a primitive (tile and group of the tiled FFT) are measured, not predicted: the
fastest takes part. Kernel spectra and weights in PyTorch's formats are made before, as in a run over many patches.

What would take longer than `--slow-seconds` a run, as the cost model has it, runs on a smaller volume; `measured` says
which, and a star in the table. Per voxel a direct convolution costs the same there; a whole-image FFT, which transforms
its kernels for every image, costs more.

With `--device gpu` everything is another: see layers_gpu.py, and `--device gpu --help` for its words.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from importlib.util import find_spec
from math import prod
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import bars
import numpy as np
from header import machine_header, taken_device, without_forced_blas_kernels
from layer_cases import QUICK, SETS, Case, smaller

from znnpy.errors import MissingExtraError
from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.contract import ConvWeights
from znnpy.kernels.table import of_kind
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.machine import this_machine
from znnpy.pen import Colour
from znnpy.planner.cost import assumed_rates, seconds
from znnpy.shapes import ConvShape, Vec3, text

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array, Primitive, Variant

MAX_ERROR = {"fp32": 1e-4, "bf16": 3e-2}  # of the largest output, between any two competitors: else a figure is void
SLOW = 4.0  # seconds: what takes longer runs in `--slow-rounds` of the rounds
HOPELESS = 1.5  # times the best variant's time: no second try
TORCH_FLOPS = {"fp32": 200e9, "bf16": 400e9}  # per second and thread, to tell beforehand what is slow
PAUSE = 0.02  # seconds before a run: OpenMP's threads spin for a while when their work is done


@dataclass(slots=True)
class Entry:
    """A competitor with buffers of its own. `run` computes the layer, `dense` gives what it computed.

    dense  (S, z, y, x, f) float32.
    """

    name: str
    precision: str
    variant: str
    measured: ConvShape
    run: Callable[[], Any]
    dense: Callable[[Any], Array]
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Row:
    """One competitor in one case."""

    set: str
    shape: str
    why: str
    threads: int
    name: str
    precision: str
    variant: str
    measured: str  # volume it ran on: that of `shape`, or a smaller one
    is_smaller: bool
    seconds: tuple[float, ...]  # every run
    voxels: int  # of output, of the measured volume
    cores_used: float  # processor time over time
    error: float  # largest difference from the first competitor, of its largest output

    @property
    def ns(self) -> tuple[float, ...]:
        """Nanoseconds per output voxel of every run."""
        return tuple(1e9 * s / self.voxels for s in self.seconds)


def part(x: Array, size: Vec3) -> Array:
    """The corner of a batch: an array of its own."""
    return np.ascontiguousarray(x[:, : size[0], : size[1], : size[2]])


def entry(
    primitive: Primitive, variant: Variant, shape: ConvShape, x: Array, weights: ConvWeights, crew: ThreadPool
) -> Entry:
    """A primitive, prepared and bound."""
    step = primitive.bind(primitive.prepare(weights, variant, crew), shape, variant, crew)
    scratch = {s.name: aligned_bytes(s.nbytes) for s in primitive.footprint(shape, variant, crew.threads).scratch}
    out = aligned_bytes(shape.out_bytes).view(np.float32).reshape(shape.out_shape)  # as in the arena of a run
    out.fill(np.nan)

    def run() -> Array:
        step.run(x, out, scratch)
        return out

    return Entry(primitive.name, "fp32", str(variant), shape, run, lambda out: out)


def fastest(
    primitive: Primitive,
    shape: ConvShape,
    x: Array,
    weights: ConvWeights,
    crew: ThreadPool,
    options: argparse.Namespace,
) -> Entry:
    """The primitive with the variant that ran fastest, of those that the cost model likes best."""
    rates = assumed_rates(this_machine(), crew.threads)

    def predicted(variant: Variant) -> float:
        return seconds(primitive.work(shape, variant), rates)

    variants = sorted(primitive.variants(shape, this_machine()), key=predicted)[: options.variants]
    measured = smaller(shape, predicted(variants[0]), options.slow_seconds)
    x = part(x, measured.n)
    times: dict[Variant, float] = {}
    for variant in variants if len(variants) > 1 else ():
        run = entry(primitive, variant, measured, x, weights, crew).run
        times[variant] = timed(run)[0]
        if times[variant] <= HOPELESS * min(times.values()):
            times[variant] = min(times[variant], timed(run)[0])
    return entry(primitive, min(times, key=times.__getitem__, default=variants[0]), measured, x, weights, crew)


def timed(run: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds, processor seconds, and what came out."""
    begin, used = time.perf_counter(), time.process_time()
    out = run()
    return time.perf_counter() - begin, time.process_time() - used, out


def torch_entries(shape: ConvShape, x: Array, weights: ConvWeights, threads: int, limit: float) -> Iterator[Entry]:
    """conv3d with bias, and ReLU in place: both precisions, both memory formats."""
    import torch
    from dense_torch import LAYOUTS, ON_THE_CPU, activated, as_tensor, placed

    torch.set_num_threads(threads)  # within the crew, which keeps the libraries of znnpy at one thread
    for precision in ON_THE_CPU:
        flops = 2 * prod(shape.out_shape) * shape.fin * prod(shape.k)
        measured = smaller(shape, flops / (threads * TORCH_FLOPS[precision]), limit)
        maps_first = part(x, measured.n).transpose(0, 4, 1, 2, 3)
        bias = as_tensor(weights.bias, precision)
        for layout in LAYOUTS:
            image, weight = (placed(array, precision, layout) for array in (maps_first, weights.weight))

            def run(image: Any = image, weight: Any = weight, bias: Any = bias) -> Any:
                with torch.inference_mode():
                    return activated(torch.nn.functional.conv3d(image, weight, bias), shape.activation)

            def dense(out: Any) -> Array:
                return np.asarray(out.float().permute(0, 2, 3, 4, 1).numpy())

            yield Entry(f"torch conv3d {precision}, {layout}", precision, "", measured, run, dense)


def measure(case: Case, threads: int, options: argparse.Namespace) -> list[Row]:
    """All competitors of one case."""
    shape = case.shape
    rng = np.random.default_rng(20261120)
    x = rng.standard_normal(shape.in_shape, np.float32)
    scale = np.float32(np.sqrt(2 / (shape.fin * prod(shape.k))))
    weights = ConvWeights(
        rng.standard_normal((shape.fout, shape.fin, *shape.k), np.float32) * scale,
        rng.standard_normal(shape.fout, np.float32),
    )
    with ThreadPool(threads) as crew:
        entries = []
        for primitive in of_kind("conv"):
            if options.only and primitive.name not in options.only:
                continue
            if reason := primitive.why_not(shape, this_machine()):
                print(f"{primitive.name} does not apply to {shape}: {reason}")
                continue
            entries.append(fastest(primitive, shape, x, weights, crew, options))
        if options.torch:
            entries += torch_entries(shape, x, weights, threads, options.slow_seconds)
        return compete(case, threads, entries, options)


def compete(case: Case, threads: int, entries: Sequence[Entry], options: argparse.Namespace) -> list[Row]:
    """Warm runs, compared with each other; then the rounds."""
    entries = sorted(entries, key=lambda e: (e.precision != "fp32", -prod(e.measured.out)))  # the exact and whole first
    expected, errors, rounds = None, [], []
    for e in entries:
        warm, _, out = timed(e.run)
        rounds.append(options.slow_rounds if warm > SLOW else options.rounds)
        out = e.dense(out)
        expected = out.copy() if expected is None else expected
        both = tuple(slice(min(a, b)) for a, b in zip(out.shape, expected.shape, strict=True))  # volumes begin together
        errors.append(float(np.abs(out[both] - expected[both]).max() / np.abs(expected).max()))
        if not errors[-1] <= MAX_ERROR[e.precision]:
            raise SystemExit(f"{e.name} is {errors[-1]:.1e} of the largest output away from {entries[0].name}")
    for index in range(max(rounds)):
        turn = list(zip(entries, rounds, strict=True))
        for e, its_rounds in turn if index % 2 == 0 else reversed(turn):
            if index < its_rounds:
                time.sleep(PAUSE)
                spent, used, _ = timed(e.run)
                e.seconds.append(spent)
                e.cpu_seconds.append(used)
    return [
        Row(
            set=case.set,
            shape=str(case.shape),
            why=case.why,
            threads=threads,
            name=e.name,
            precision=e.precision,
            variant=e.variant,
            measured=text(e.measured.n),
            is_smaller=e.measured != case.shape,
            seconds=tuple(e.seconds),
            voxels=prod(e.measured.out_shape[:4]),
            cores_used=sum(e.cpu_seconds) / sum(e.seconds),
            error=error,
        )
        for e, error in zip(entries, errors, strict=True)
    ]


def ratio(row: Row, other: Row) -> tuple[float, float, float]:
    """How many times faster `row` is than `other`: of the medians, and the least and most of single rounds."""
    single = [b / a for a, b in zip(row.ns, other.ns, strict=False)]
    return median(other.ns) / median(row.ns), min(single), max(single)


def best(rows: Sequence[Row], precision: str, *, torch: bool) -> Row | None:
    """The fastest of PyTorch, or of the primitives."""
    of_kind = [row for row in rows if row.precision == precision and row.name.startswith("torch") == torch]
    return min(of_kind, key=lambda row: median(row.ns), default=None)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Of one case: the fastest primitive, and how many times PyTorch's best it is."""
    ours = best(rows, "fp32", torch=False)
    found: dict[str, Any] = {"set": rows[0].set, "shape": rows[0].shape, "threads": rows[0].threads}
    if ours is None:
        return found
    found |= {"fastest": f"{ours.name} {ours.variant}".strip(), "ns_per_voxel": median(ours.ns)}
    for precision in ("fp32", "bf16"):
        if peer := best(rows, precision, torch=True):
            times, least, most = ratio(ours, peer)
            found[f"torch_{precision}"] = {"name": peer.name, "ns_per_voxel": median(peer.ns)}
            found[f"times_torch_{precision}"] = {"median": times, "least": least, "most": most}
    return found


def show(rows: Sequence[Row]) -> None:
    """A table of one case on stdout."""
    peers = [best(rows, precision, torch=True) for precision in ("fp32", "bf16")]
    print(f"\n{rows[0].shape}, {rows[0].threads} threads: {rows[0].why}")
    print(f"{'':60}{'ns/voxel':>10}{'min':>9}{'cores':>7}{'x fp32':>8}{'x bf16':>8}  runs")
    for row in sorted(rows, key=lambda row: median(row.ns)):
        star = f" * {row.measured}" if row.is_smaller else ""
        times = "".join(f"{ratio(row, peer)[0]:8.2f}" if peer else f"{'':8}" for peer in peers)
        figures = f"{median(row.ns):10.0f}{min(row.ns):9.0f}{row.cores_used:7.2f}"
        print(f"{f'{row.name} {row.variant}{star}':60}{figures}{times}  {len(row.seconds)}", flush=True)


def picture(path: Path, cases: Sequence[Sequence[Row]], header: dict[str, Any]) -> None:
    groups = []
    for rows in cases:
        ours = best(rows, "fp32", torch=False)
        group = [
            bars.Bar(
                f"{row.name} {row.variant}{' *' * row.is_smaller}",
                median(row.ns),
                f"{median(row.ns):,.0f} ns" + (f" ({ratio(ours, row)[0]:.1f}x)" if ours and ours is not row else ""),
                colour_of(row, ours),
            )
            for row in sorted(rows, key=lambda row: median(row.ns))
        ]
        groups.append(bars.Group(f"{rows[0].shape}, {rows[0].threads} threads", group))
    machine = f"{header['processor']}, {header['cores']} cores, BLAS {header['blas']}, {header['date'][:10]}"
    notes = [machine, "less is better; in brackets: how many times the fastest primitive's time"]
    if any(row.is_smaller for rows in cases for row in rows):
        notes.append("* per voxel of a smaller volume")
    bars.draw(path, "Nanoseconds per output voxel of one convolution layer", notes, groups)


def write(out: Path, cases: Sequence[Sequence[Row]]) -> None:
    """Everything so far, as JSON and as a picture."""
    header = machine_header()
    figures = [asdict(r) | {"median_ns": median(r.ns), "min_ns": min(r.ns)} for rows in cases for r in rows]
    result = {"header": header, "summary": [summary(rows) for rows in cases], "rows": figures}
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    picture(out.with_suffix(".png"), cases, header)


def colour_of(row: Row, ours: Row | None) -> Colour:
    if row.name.startswith("torch"):
        return bars.PEER if row.precision == "fp32" else bars.PEER_LESS_EXACT
    return bars.OURS if row is ours else bars.OURS_TOO


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=[*SETS, "all"], default=["main"])
    parser.add_argument("--kernels", type=int, nargs="*", help="only cases whose largest kernel axis is one of these")
    parser.add_argument("--size", type=int, help="volumes of this many voxels along every axis, instead of the set's")
    parser.add_argument("--only", nargs="*", help="only these primitives")
    parser.add_argument("--threads", type=int, nargs="+", default=[this_machine().cores])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--slow-rounds", type=int, default=2, help=f"of what takes longer than {SLOW:.0f} s")
    parser.add_argument("--slow-seconds", type=float, default=40, help="of one run; longer ones get a smaller volume")
    parser.add_argument("--variants", type=int, default=8, help="of a primitive, that are measured")
    parser.add_argument("--no-torch", dest="torch", action="store_false")
    parser.add_argument("--quick", action="store_true", help="a tiny case, to see that everything works")
    parser.add_argument("--out", type=Path, help="default: results/layers-MACHINE-DATE.json; none with --quick")
    options = parser.parse_args(arguments)
    if options.torch:
        require_torch()
    return options


def require_torch() -> None:
    if find_spec("torch") is None:
        raise MissingExtraError("the comparison needs PyTorch; pip install 'znnpy[bench]', or give --no-torch")


def chosen(options: argparse.Namespace) -> list[Case]:
    """The cases of the words that were given."""
    sets = list(SETS) if "all" in options.sets else options.sets
    cases = [QUICK] if options.quick else [case for name in sets for case in SETS[name]]
    if options.kernels:
        cases = [case for case in cases if max(case.shape.k) in options.kernels]
    if options.size:
        size = (options.size,) * 3
        cases = [replace(case, shape=replace(case.shape, n=size)) for case in cases]
    return cases


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    name = "-".join(this_machine().processor.lower().split()[:3])
    out = options.out or Path(__file__).parent / "results" / f"layers-{name}-{date.today()}.json"
    done: list[list[Row]] = []
    for case in chosen(options):
        for threads in options.threads:
            done.append(measure(case, threads, options))
            show(done[-1])
            if options.quick and not options.out:
                continue
            write(out, done)
    print()
    for rows in done:
        print(json.dumps(summary(rows)))


if __name__ == "__main__":
    without_forced_blas_kernels()
    device, words = taken_device()
    if device == "gpu":
        import layers_gpu

        layers_gpu.main(words)
    else:
        main(words)
