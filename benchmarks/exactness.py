"""How far are outputs in float32 from the definition: znnpy's, and PyTorch's? Every voxel of a corner of a volume.

    python benchmarks/exactness.py [--networks n337 n537 n726 n926] [--side 24] [--ram 8G] [--threads 2]
                                   [--out RESULT.json]

The definition is the network in float64, its convolutions by FFT in PyTorch: as exact for this, and a matrix product
would need hundreds of gigabytes; so it takes up to 15 GB. Against it are held znnpy on the processor, by the plan for
that corner within `--ram`, and PyTorch in float32, on the processor and on a GPU where it finds one. modes.py
`--definition` holds what modes of a GPU give against it too.

Each row has the largest error of all values and their rms, as shares of the size of the values as `znnpy verify` counts
it. Where one of znnpy's is not a number, or further off than `znnpy verify` allows, the command fails.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from contestants import random_network
from contestants_gpu import Held, noise, reference_side
from dense_torch import DenseTorch, Tensor
from header import machine_header, without_forced_blas_kernels
from modes_runs import on_the_processor
from several_gpus import NETWORKS, apart

from znnpy.formats.weights import random_weights
from znnpy.kernels.cpu.fft import good_size
from znnpy.machine import Limits, limits_of, parse_bytes, this_machine
from znnpy.network import Network
from znnpy.shapes import Vec3, text
from znnpy.verify import TOLERANCES

OURS = "znnpy on the processor"

Facts = dict[str, Any]
Real = npt.NDArray[np.float64]


class Definition(DenseTorch):
    """A network in float64, by fragments, its convolutions by FFT."""

    def __init__(self, network: Network, device: str = "cpu") -> None:
        super().__init__(network, random_weights(network), "fragments", "fp64", "contiguous", device)

    def convolved(self, x: Tensor, weight: Tensor, bias: Tensor, dilation: Vec3) -> Tensor:
        del dilation  # fragments need none
        valid = [n - k + 1 for n, k in zip(x.shape[2:], weight.shape[2:], strict=True)]
        kept = tuple(slice(size) for size in valid)
        lengths, axes = [good_size(n) for n in x.shape[2:]], (1, 2, 3)
        spectra = [torch.fft.rfftn(image, lengths, axes) for image in x]
        out = torch.empty((len(x), len(weight), *valid), dtype=x.dtype, device=x.device)
        for its, kernels, b in zip(out.unbind(1), weight, bias, strict=True):
            kernel = torch.fft.rfftn(kernels, lengths, axes).conj()  # correlation, not convolution
            for image, spectrum in zip(its, spectra, strict=True):
                image.copy_(torch.fft.irfftn((spectrum * kernel).sum(0), lengths)[kept] + b)
        return out


def by_definition(network: Network, source: Held, output: Vec3) -> Real:
    """The first corner of a network's output for a volume: (maps, z, y, x) float64. On a GPU where there is one.

    Computed for whole fragments: beyond the volume what `source` has there, none of which reaches the corner.
    """
    whole_z, whole_y, whole_x = (-(-a // b) * b for a, b in zip(output, network.period, strict=True))
    raw = np.empty((network.input_channels, *network.patch_in((whole_z, whole_y, whole_x))), source.dtype)
    source.read((0, 0, 0), raw)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    z, y, x = output
    return np.asarray(Definition(network, device)(raw), np.float64)[:, :z, :y, :x]


def measured(name: str, side: int, limits: Limits) -> Iterator[Facts]:
    """Rows of one network."""
    network = random_network(name)
    side = side or reference_side(network)
    if any(side % period for period in network.period):
        raise SystemExit(
            f"{side} voxels are not a multiple of {text(network.period)}, the period of {name}: another --side"
        )
    output: Vec3 = (side,) * 3
    volume = Held(noise(network.patch_in(output), network.input_channels))
    begin = time.perf_counter()
    exact = by_definition(network, volume, output)
    about = {"network": Path(name).stem, "side": side, "definition_seconds": time.perf_counter() - begin}
    plan, ours = on_the_processor(network, volume, output, limits)
    methods = [choice.primitive for choice in plan.choices]
    yield about | {"name": OURS, "methods": methods} | apart(exact, ours)._asdict()
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        net = DenseTorch(network, random_weights(network), "fragments", "fp32", "contiguous", device)
        theirs = {"name": f"PyTorch on {device}", "methods": []}
        yield about | theirs | apart(exact, net(volume.voxels))._asdict()


def said_of(row: Facts) -> str:
    return (
        f"{row['network']:5} {row['name']:22} {row['side']}^3 voxels are off by at most {row['most']:.1e}, "
        f"rms {row['rms']:.1e}"
    )


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--side", type=int, default=0, help="of the corner, a multiple of the period; 0: about 24")
    parser.add_argument("--ram", type=parse_bytes, default=limits_of(this_machine()).ram_bytes, help="of znnpy's plan")
    parser.add_argument("--threads", type=int, default=limits_of(this_machine()).threads)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "exactness.json")
    options = parser.parse_args(given)
    torch.set_num_threads(options.threads)
    rows: list[Facts] = []
    for name in options.networks:
        for row in measured(name, options.side, Limits(options.ram, options.threads)):
            rows.append(row)
            print(said_of(row), flush=True)
            options.out.write_text(json.dumps({"header": machine_header(), "rows": rows}) + "\n")
    print(options.out)
    if not all(row["most"] <= TOLERANCES["fp32"] for row in rows if row["name"] == OURS):
        raise SystemExit(f"znnpy is further off than the {TOLERANCES['fp32']} that `znnpy verify` allows")


if __name__ == "__main__":
    without_forced_blas_kernels()
    main()
