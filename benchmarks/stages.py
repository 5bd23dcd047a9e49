"""The stages of cpu.conv.fft_lanes against what this machine can do: transforms, products, copies, and their sum.

    python benchmarks/stages.py [--rounds 8] [--threads 2] [--only transforms products layers] [--quick] [--out FILE]

transforms  whole 3D transforms of a tile of 16 channels in cache, the convolution's own code, against FFTW's batched
            real transforms (channels innermost, or outermost: the faster one), planned with MEASURE, one plan a worker.
products    the product of one frequency in cache, as the library computes it, against batched complex products of BLAS
            (numpy, PyTorch), complex or as real ones of twice the size, and against multiply-adds in registers.
layers      80 -> 80 maps of 100^3: the whole layer against the sum of its three stages called alone; the product's rate
            within its stage; and what `forward` and `inverse` move, by themselves and without the transforms, against
            a copy past the caches, which reads and writes each byte once; numpy's copy is beside it.
Rates of copies count bytes that are asked for: inputs where tiles overlap are read again. Rounds are interleaved, in an
order that alternates, after one warm run; figures are medians.
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from header import machine_header, without_forced_blas_kernels
from stages_layers import LAYERS, layer
from stages_limits import PRODUCT, SIDES, multiplication, transform

from znnpy.kernels.cpu.native.library import why_not
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.machine import this_machine
from znnpy.shapes import ConvShape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PARTS = ("transforms", "products", "layers")
QUICK_SIDES = (4, 6)
QUICK_PRODUCT = (20, 17)
QUICK_LAYERS = (
    ConvShape(1, 20, 17, (9, 8, 10), (3, 3, 3), "relu"),
    ConvShape(1, 16, 16, (9, 8, 10), (3, 1, 2), "relu"),
)


def measure(options: argparse.Namespace, crew: ThreadPool) -> Iterator[tuple[str, dict[str, Any]]]:
    """(part, row), one after another."""
    sides, maps, layers = (QUICK_SIDES, QUICK_PRODUCT, QUICK_LAYERS) if options.quick else (SIDES, PRODUCT, LAYERS)
    if "transforms" in options.only:
        for side in sides:
            yield "transforms", transform(side, crew, options)
    if "products" in options.only:
        yield "products", multiplication(*maps, crew, options)
    if "layers" in options.only:
        for shape in layers:
            yield "layers", layer(shape, crew, options)


def show(part: str, row: dict[str, Any]) -> None:
    if part == "transforms":
        said = "  ".join(
            f"{way} {row[way]['own']:.3f} against {row[way]['fftw']:.3f} ({row[way]['times']:.1f}x)"
            for way in ("forward", "inverse")
        )
        print(f"transform {row['side']}^3, ns a voxel and channel, FFTW's behind: {said}", flush=True)
    elif part == "products":
        others = ", ".join(f"{name} {rate:.0f}" for name, rate in row["gflops"].items())
        print(f"product {row['fin']} -> {row['fout']}, GFLOP/s: {others}")
        print(f"  {row['of_registers']:.2f} of the registers' peak, {row['of_best']:.2f} of the best other", flush=True)
    else:
        ns, rate = row["ns_per_voxel"], row["gb_per_second"]
        print(f"\n{row['shape']}, {row['variant']}")
        stages = " + ".join(f"{name} {ns[name]:.1f}" for name in ("forward", "multiply", "inverse"))
        print(f"  ns a voxel: layer {ns['layer']:.1f} = {row['of_sum']:.2f} x ({stages})")
        print(f"  multiply: {row['multiply_gflops']:.0f} GFLOP/s of products")
        moved = ", ".join(f"{name} {rate[name]:.1f}" for name in ("forward", "gather", "inverse", "scatter"))
        parts = ", ".join(f"{part:.2f}" for part in row["of_copy"].values())
        print(
            f"  GB/s: copy {rate['copy']:.1f}, numpy's {rate['numpy copy']:.1f}; {moved} ({parts} of the copy)",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=this_machine().cores)
    parser.add_argument("--rounds", type=int, default=8, help="an even number, as their order alternates")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--no-torch", dest="torch", action="store_false")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything works")
    parser.add_argument("--out", type=Path, help="default: results/stages-MACHINE-DATE.json; none with --quick")
    options = parser.parse_args(arguments)
    if missing := why_not(this_machine()):
        raise SystemExit(f"the stages cannot be measured: {missing}")
    options.torch = options.torch and find_spec("torch") is not None
    name = "-".join(this_machine().processor.lower().split()[:3])
    out = options.out or Path(__file__).parent / "results" / f"stages-{name}-{date.today()}.json"
    rows: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    with ThreadPool(options.threads) as crew:
        for part, row in measure(options, crew):
            rows[part].append(row)
            show(part, row)
            if options.out or not options.quick:
                out.parent.mkdir(exist_ok=True)
                out.write_text(json.dumps({"header": machine_header(), **rows}, indent=1) + "\n")


if __name__ == "__main__":
    without_forced_blas_kernels()
    main()
