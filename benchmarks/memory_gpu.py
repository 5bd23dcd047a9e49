"""Is memory a promise on a GPU? What the card counts while a primitive runs, beside what its footprint says.

    python benchmarks/memory.py --device gpu [--shapes 30] [--only NAME ...] [--seed N] [--out RESULT.json]
    python benchmarks/memory.py --device gpu --plans 12 [--most-seconds 5] [--out RESULT.json]

For every primitive random shapes that it takes, in a random precision, each with a random variant: input, output and
scratch lie in one allocation, placed as a plan places them. Measured is how far the memory that is free on the card
fell at its lowest from just before the weights are prepared, whoever took it, libraries included; a thread asks while
it runs. What kernels and libraries take when they are loaded is not counted: the same layer ran before, and what a plan
adds for CUDA holds it. Promised is arena + resident + allowance.

Up to OWN_BYTES are how memory is handed out: in steps of 2 MiB. measured - OWN_BYTES <= promised <= 1.15 measured is a
promise that is kept and wastes little. Shapes are those whose promise is at least LEAST_BYTES.

With `--plans`, whole runs of random plans instead, each in a process of its own (contestants_gpu.py): what the process
took of the card at its peak, with what CUDA took, beside `Memory.vram` of its plan.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from gpu_card import Device, Lowest, gpu_header
from memory import Case, prepared, random_shape
from networks_gpu import NETWORKS, lines_of

from znnpy.errors import ShapeError
from znnpy.kernels.gpu import cudnn_plans
from znnpy.kernels.table import TABLE
from znnpy.machine import this_machine
from znnpy.planner.cost_model import assumed_rates
from znnpy.planner.layout import chain, place
from znnpy.planner.plan import device_of
from znnpy.shapes import PRECISIONS, ConvShape, LayerShape, Vec3

if TYPE_CHECKING:
    from znnpy.kernels.primitive import Primitive
    from znnpy.machine import Machine
    from znnpy.network import ConvWeights

MIB = 2**20
LEAST_BYTES = 64 * MIB
OWN_BYTES = 6 * MIB
MOST_RATIO = 1.15
MOST_SECONDS = 0.1  # predicted, of one run
MOST_TRIES = 20_000
PAUSE = 2e-4  # seconds between two looks at the memory that is free
POOLED = 0.3  # of the convolutions that are tried pool what they compute


@dataclass(frozen=True, slots=True)
class Row:
    """One primitive on one shape, or one plan; bytes."""

    primitive: str  # or network
    shape: str  # or what the plan does
    variant: str  # or precision
    promised: int
    measured: int
    allowance: int  # of the promised, what libraries may take
    own: int  # beside what is promised

    @property
    def ratio(self) -> float:
        return self.promised / self.measured if self.measured else 0.0

    @property
    def kept(self) -> bool:
        return self.measured - self.own <= self.promised <= MOST_RATIO * self.measured


def random_gpu_shape(kind: str, rng: np.random.Generator) -> LayerShape:
    """As `random_shape`, in any precision; some convolutions pool."""
    shape = random_shape(kind, rng)
    if isinstance(shape, ConvShape) and rng.random() < POOLED:
        windows: tuple[Vec3, ...] = ((2, 2, 2), (1, 2, 2), (3, 2, 1))
        pool = windows[rng.integers(len(windows))]
        z, y, x = (n - (m + 1) % p for n, m, p in zip(shape.n, shape.out, pool, strict=True))
        shape = replace(shape, n=(z, y, x), pool=pool)
    return replace(shape, precision=PRECISIONS[rng.integers(len(PRECISIONS))])


def random_case(primitive: Primitive, machine: Machine, most_bytes: int, rng: np.random.Generator) -> Case | None:
    """A shape and a variant that the primitive takes, of a size worth measuring; None when none is found."""
    rates = assumed_rates(machine, 1, "gpu")
    for _ in range(MOST_TRIES):
        try:
            shape = random_gpu_shape(primitive.kind, rng)
        except ShapeError:
            continue
        if not LEAST_BYTES / 8 < shape.in_bytes + shape.out_bytes < most_bytes:
            continue
        if primitive.why_not(shape, machine) is not None:
            continue
        variants = primitive.variants(shape, machine)
        case = Case(primitive, shape, variants[int(rng.integers(len(variants)))], 1)
        quick = rates.seconds(primitive, shape, case.variant) <= MOST_SECONDS
        if quick and LEAST_BYTES <= case.promised <= most_bytes:
            return case
    return None


def run(case: Case, weights: ConvWeights | None, device: Device, lowest: Lowest | None = None) -> None:
    """As a session does: weights prepared, the step bound, then the arena; `lowest` looks after each."""
    footprint = case.primitive.footprint(case.shape, case.variant, 1)
    tensors, nbytes = place(chain([(case.shape, footprint)]))
    dtype = np.float16 if case.shape.precision == "fp16" else np.float32

    def looked() -> None:
        if lowest is not None:
            lowest.look()

    resident = case.primitive.prepare(weights, case.variant, device)
    looked()
    step = case.primitive.bind(resident, case.shape, case.variant, device)
    looked()
    arena = device.allocate(nbytes, "the arena")
    device.clear(arena)
    at = {tensor.name: tensor for tensor in tensors}
    x = device.view(arena, case.shape.in_shape, dtype, offset=at["x0"].offset)
    out = device.view(arena, case.shape.out_shape, dtype, offset=at["x1"].offset)
    scratch = {
        buffer.name: device.view(arena, (buffer.nbytes,), np.uint8, offset=at[f"step0.{buffer.name}"].offset)
        for buffer in footprint.scratch
    }
    peaks = device.address(device.put(np.array([1, 0], np.float32), "the largest values"))
    words = {"x_peak": peaks} if footprint.reads_peak else {}
    words |= {"out_peak": peaks + 4} if footprint.raises_peak else {}
    for _ in range(2):
        step.run(x, out, scratch, **words)
    device.synchronize()
    looked()


def measured(case: Case, device: Device) -> Row:
    weights = prepared(case)
    run(case, weights, device)
    cudnn_plans.forget()  # a plan is tried on a small layer where a process meets it first, and that counts
    gc.collect()
    device.synchronize()
    before, held = device.free_bytes(), device.allocated
    with Lowest(device, PAUSE) as lowest:
        run(case, weights, device, lowest)
    gc.collect()
    assert device.allocated == held, f"{case.primitive.name} keeps {device.allocated - held} bytes for itself"
    footprint = case.primitive.footprint(case.shape, case.variant, 1)
    return Row(
        case.primitive.name,
        str(case.shape),
        str(case.variant),
        case.promised,
        before - lowest.free_bytes,
        footprint.allowance,
        OWN_BYTES,
    )


def plans(options: argparse.Namespace) -> Iterator[Row]:
    """Random networks, sizes, precisions and limits, run whole."""
    rng = np.random.default_rng(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.plans):
            name, precision = str(rng.choice(NETWORKS)), str(rng.choice(PRECISIONS))
            side, vram = int(rng.integers(220, 520)), int(np.exp(rng.uniform(np.log(4096), np.log(32768))))
            request = {
                "job": "znnpy_volume",
                "network": name,
                "precisions": [precision],
                "corner": f"{folder}/corner",
                "side": side,
                "vram": f"{vram}M",
            }
            request |= dict.fromkeys(("ram", "threads", "patch")) | {"only": []}
            answers, failure = lines_of(request, options.most_seconds + 60)
            failed = failure or answers[0].get("failure")
            if failed:
                print(f"{name} {precision} of {side}^3 within {vram} MiB: {failed}", flush=True)
                continue
            (answer,) = answers
            said = f"{side}^3 within {vram} MiB, patch {answer['patch_out']}, column {answer['column']}"
            yield Row(name, said, precision, answer["planned_vram_bytes"], answer["vram_bytes"], 0, 0)


def show(rows: Sequence[Row]) -> None:
    ratios = sorted(row.ratio for row in rows)
    print(
        f"{rows[0].primitive:24} promised / measured {ratios[0]:.3f} to {ratios[-1]:.3f}, median {median(ratios):.3f}; "
        f"kept {sum(row.kept for row in rows)} of {len(rows)}",
        flush=True,
    )
    for row in sorted(rows, key=lambda row: row.ratio):
        if not row.kept:
            sizes = f"{row.promised / MIB:8.1f} / {row.measured / MIB:.1f}"
            print(f"    {row.ratio:.3f} {sizes} MiB {row.shape} {row.variant}", flush=True)


def write(out: Path, rows: Sequence[Row], header: dict[str, Any]) -> None:
    found = [asdict(row) | {"ratio": row.ratio, "kept": row.kept} for row in rows]
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"header": header, "rows": found}, indent=1) + "\n")


def primitives(device: Device, machine: Machine, options: argparse.Namespace) -> Iterator[list[Row]]:
    """Of one primitive after the other."""
    most = min(options.most_mib * MIB, device.free_bytes() // 2)
    for primitive in TABLE:
        if device_of(primitive.name) != "gpu" or (options.only and primitive.name not in options.only):
            continue
        rng = np.random.default_rng([options.seed, *primitive.name.encode()])
        cases = [case for _ in range(options.shapes) if (case := random_case(primitive, machine, most, rng))]
        if not cases:
            print(f"{primitive.name:24} takes no shape here")
            continue
        yield [measured(case, device) for case in cases]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=30)
    parser.add_argument("--plans", type=int, default=0, help="so many whole runs instead")
    parser.add_argument("--most-seconds", type=float, default=60, help="of a whole run")
    parser.add_argument("--only", nargs="*", help="these primitives")
    parser.add_argument("--most-mib", type=int, default=6000, help="that a shape may take")
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--out", type=Path, help="default: results/memory-GPU-DATE.json, or memory_plans-..")
    options = parser.parse_args(arguments)
    from znnpy.kernels.gpu.device import Device, find_gpu

    gpu = find_gpu()
    name = "-".join(gpu.name.lower().split())
    what = "memory_plans" if options.plans else "memory"
    out = options.out or Path(__file__).parent / "results" / f"{what}-{name}-{date.today()}.json"
    header = gpu_header(gpu)
    rows: list[Row] = []
    if options.plans:
        for row in plans(options):
            rows.append(row)
            sizes = f"{row.promised / MIB:9.1f} / {row.measured / MIB:9.1f} MiB {row.ratio:.3f}"
            print(f"{row.primitive} {row.variant} {row.shape}: {sizes}{'' if row.kept else '  NOT KEPT'}", flush=True)
            write(out, rows, header)
        return
    with Device(gpu) as device:
        for of_primitive in primitives(device, replace(this_machine(), gpu=gpu), options):
            show(of_primitive)
            rows += of_primitive
            write(out, rows, header)
