"""Divisions of layers that live in the memory of the host: the exact search against the ZNNi paper's two heuristics.

    python benchmarks/host_ram_divisions.py [--link 25] [--cases N ..] [--quick] [--out RESULT.json]

For each layer and each limit of device memory: seconds as the model predicts them (uploads, computing and downloads
side by side; rates as assumed for an H200, nothing is run) and what the search took, of five searches.

exact                   the best of all: images, planes, input and output maps, both orders, each way to compute
                        sub-layers
within 1 %              the same, content with what none is faster than by more
no planes               the same, images never cut along z
heuristics              the paper's: cuDNN for kernels of 5^3 and smaller, else the FFT of whole images; all maps of
                        some images, or, where that does not fit, some maps of one
second heuristic alone  the same divisions, each way to compute sub-layers

Ways to compute are few, so that all see the same: the tiled FFT, the implicit matrix product, cuDNN, the FFT of whole
images. No device is needed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from math import inf
from pathlib import Path
from typing import Any

from header import machine_header, without_forced_blas_kernels

from znnpy.kernels.gpu.host_ram.division import Inner, Sublayer
from znnpy.kernels.gpu.host_ram.search import Found, by_heuristics, divide, takes_direct
from znnpy.kernels.gpu.host_ram.space import Space
from znnpy.kernels.gpu.host_ram.timeline import Speeds
from znnpy.kernels.primitive import Primitive, Variant
from znnpy.kernels.table import find
from znnpy.machine import Gpu, this_machine
from znnpy.planner.cost_model import assumed_rates
from znnpy.shapes import ConvShape

GIB = 2**30
CARD = Gpu(
    "an H200, by its data sheet",
    (9, 0),
    132,
    141 * GIB,
    50 << 20,
    227 << 10,
    228 << 10,
    4.8e12,
    13000,
    (("cudnn-frontend", "1.22"), ("cudnn-cu13", "9.16")),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One layer. `why` says what the row is there to show."""

    shape: ConvShape
    why: str


CASES = (
    Case(ConvShape(1, 80, 80, (300, 300, 300), (3, 3, 3), "relu", precision="tf32"), "a large image, a small kernel"),
    Case(ConvShape(1, 80, 80, (200, 300, 300), (5, 5, 5), "relu", precision="tf32"), "the same, k = 5"),
    Case(ConvShape(1, 80, 80, (200, 300, 300), (7, 7, 7), "relu", precision="tf32"), "the same, k = 7: the FFT's"),
    Case(ConvShape(8, 80, 80, (150, 150, 150), (3, 3, 3), "relu", precision="tf32"), "fragments of one pooling"),
    Case(ConvShape(64, 80, 80, (75, 75, 75), (5, 5, 5), "relu", precision="tf32"), "fragments of two"),
    Case(ConvShape(1, 8, 80, (400, 400, 400), (3, 3, 3), "relu", precision="tf32"), "few maps in: downloads decide"),
    Case(ConvShape(8, 80, 3, (150, 150, 150), (3, 3, 3), "sigmoid"), "few maps out, fp32: uploads decide"),
)
LIMITS = (16.0, 4.0, 1.0)  # GiB
QUICK = (Case(ConvShape(2, 4, 5, (20, 40, 40), (3, 3, 3), "relu", precision="tf32"), "that the script works"),)
QUICK_LIMITS = (0.05, 0.002)


def ways(shape: ConvShape) -> Iterator[tuple[Primitive, Variant]]:
    """Primitives and variants that may compute sub-layers."""
    spectra = {"fp32": "split", "tf32": "half", "fp16": "quick"}[shape.precision]
    for side in (16, 32):
        tile = side, side, side
        yield (
            find("gpu.conv.fft_tiled"),
            Variant.of(tile=tile, group=256, spectra=spectra, kernels="kept"),
        )
    yield find("gpu.conv.implicit_gemm"), Variant.of(units="tensor", precision=shape.precision)
    yield find("gpu.conv.cudnn"), Variant.of(choice=0, precision=shape.precision, workspace=32)
    yield find("gpu.conv.fft"), Variant.of(maps=8)


def inner_of(primitive: Primitive, variant: Variant) -> Inner:
    machine = replace(this_machine(), gpu=CARD)
    rates = assumed_rates(machine, 1, "gpu")
    known: dict[ConvShape, Sublayer | None] = {}

    def of(shape: ConvShape) -> Sublayer | None:
        if shape not in known:
            applies = primitive.why_not(shape, machine) is None
            known[shape] = (
                Sublayer(rates.seconds(primitive, shape, variant), primitive.footprint(shape, variant, 1))
                if applies
                else None
            )
        return known[shape]

    return of


def searched(
    shape: ConvShape, names: Sequence[tuple[Primitive, Variant]], one: Callable[[Inner, float], Found | None]
) -> dict[str, Any]:
    """The best of all ways, and the seconds that it took to find it."""
    begin = time.perf_counter()
    best: Found | None = None
    by = ""
    of = [(inner_of(primitive, variant), f"{primitive.name} {variant}") for primitive, variant in names]
    for inner, name in sorted(of, key=lambda way: whole_seconds(way[0], shape)):
        found = one(inner, inf if best is None else best.seconds)
        if found is not None and (best is None or found.seconds < best.seconds):
            best, by = found, name
    spent = time.perf_counter() - begin
    if best is None:
        return {"seconds": None, "search_seconds": spent}
    d = best.division
    division = {"images": d.images, "planes": d.planes, "maps_in": d.maps_in, "maps_out": d.maps_out, "order": d.order}
    return {"seconds": best.seconds, "search_seconds": spent, "inner": by, "division": division}


def whole_seconds(inner: Inner, shape: ConvShape) -> float:
    """Of the layer in one: the fastest way first."""
    whole = inner(shape)
    return inf if whole is None else whole.seconds


def measure(case: Case, gib: float, speeds: Speeds) -> dict[str, Any]:
    shape, limit = case.shape, int(gib * GIB)
    every = list(ways(shape))
    direct = takes_direct(shape)
    papers = [way for way in every if way[0].name == ("gpu.conv.cudnn" if direct else "gpu.conv.fft")]
    whole = Space.whole(shape)
    deep = replace(whole, chunks=[chunk for chunk in whole.chunks if chunk[1] == shape.out[0]])
    found = {
        "exact": searched(shape, every, lambda inner, least: divide(shape, limit, speeds, inner, below=least)),
        "within 1 %": searched(
            shape, every, lambda inner, least: divide(shape, limit, speeds, inner, below=least, within=0.01)
        ),
        "no planes": searched(
            shape,
            every,
            lambda inner, least: divide(shape, limit, speeds, inner, space=deep, below=least, within=0.01),
        ),
        "heuristics": searched(shape, papers, lambda inner, least: by_heuristics(shape, limit, speeds, inner)),
        "second heuristic alone": searched(
            shape, every, lambda inner, least: by_heuristics(shape, limit, speeds, inner)
        ),
    }
    link = max(shape.in_bytes / speeds.upload, shape.out_bytes / speeds.download)
    return {"shape": str(shape), "why": case.why, "vram_gib": gib, "link_seconds": link, "searches": found}


def show(row: dict[str, Any]) -> None:
    print(f"\n{row['shape']} within {row['vram_gib']} GiB: {row['why']}; the link alone {row['link_seconds']:.3f} s")
    for name, found in row["searches"].items():
        took = f"searched {found['search_seconds']:.2f} s"
        if found["seconds"] is None:
            print(f"  {name:24}nothing fits       {took}")
            continue
        words = " ".join(f"{key}={value}" for key, value in found["division"].items())
        print(f"  {name:24}{found['seconds']:9.3f} s predicted, {took}; {words} by {found['inner']}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", type=float, default=25.0, help="GB/s each way, host copies to pinned memory and all")
    parser.add_argument("--cases", type=int, nargs="*", help="only these, by number from 0")
    parser.add_argument("--quick", action="store_true", help="a tiny case, to see that everything works")
    parser.add_argument("--out", type=Path, help="default: results/host_ram_divisions-DATE.json; none with --quick")
    options = parser.parse_args(arguments)
    speeds = Speeds(options.link * 1e9, options.link * 1e9, 2.8e12)
    out = options.out or Path(__file__).parent / "results" / f"host_ram_divisions-{date.today()}.json"
    rows: list[dict[str, Any]] = []
    for index, case in enumerate(QUICK if options.quick else CASES):
        if options.cases and index not in options.cases:
            continue
        for gib in QUICK_LIMITS if options.quick else LIMITS:
            rows.append(measure(case, gib, speeds))
            show(rows[-1])
            if options.out or not options.quick:
                out.parent.mkdir(exist_ok=True)
                header = {**machine_header(), "card": CARD.name, "link_gb_per_second": options.link}
                out.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    without_forced_blas_kernels()
    main()
