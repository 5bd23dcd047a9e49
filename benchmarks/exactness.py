"""How far are outputs in float32 from the definition: znnpy's, and PyTorch's? Every voxel of a corner of a volume.

    python benchmarks/exactness.py [--networks n337 n537 n726 n926] [--side 24] [--ram 12G] [--threads 2]
                                   [--out RESULT.json]

The definition is the network in float64, its convolutions by FFT in PyTorch: as exact for this, and a matrix product
would need hundreds of gigabytes. Against it are held znnpy on the processor, by the plan for that corner, and PyTorch
in float32, on the processor and on a GPU where it finds one. modes.py `--definition` holds what modes of a GPU give
against it too.

Each row has the largest and the rms error, as shares of the size of the values as `znnpy verify` counts it, the mean of
the signed ones, and the share of values that are off by more than 1e-5, which is what `znnpy verify` allows.
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

from znnpy.formats.weights import random_weights
from znnpy.machine import Limits, limits_of, parse_bytes, this_machine
from znnpy.network import Network
from znnpy.shapes import Vec3
from znnpy.verify import TOLERANCES, magnitude_of

NETWORKS = ("n337", "n537", "n726", "n926")
PRIMES = (2, 3, 5, 7)  # of lengths that FFTs are fast for

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
        lengths, axes = [fast_length(n) for n in x.shape[2:]], (1, 2, 3)
        spectra = [torch.fft.rfftn(image, lengths, axes) for image in x]
        out = torch.empty((len(x), len(weight), *valid), dtype=x.dtype, device=x.device)
        for its, kernels, b in zip(out.unbind(1), weight, bias, strict=True):
            kernel = torch.fft.rfftn(kernels, lengths, axes).conj()  # correlation, not convolution
            for image, spectrum in zip(its, spectra, strict=True):
                image.copy_(torch.fft.irfftn((spectrum * kernel).sum(0), lengths)[kept] + b)
        return out


def fast_length(least: int) -> int:
    """The smallest one from `least` on without other primes than PRIMES."""
    length = least
    while True:
        rest = length
        for prime in PRIMES:
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return length
        length += 1


def corner_by_definition(asked: tuple[str, int, Vec3]) -> Real:
    """asked: network, side of a volume of noise, size of the corner of its output -> (maps, z, y, x) float64.

    The size is a multiple of the network's period.
    """
    name, side, output = asked
    network = random_network(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return np.asarray(Definition(network, device)(_under(network, side, output)), np.float64)


def _under(network: Network, side: int, output: Vec3) -> npt.NDArray[np.uint8]:
    """What a corner of the output is computed from."""
    z, y, x = network.patch_in(output)
    return noise((side,) * 3, network.input_channels)[:, :z, :y, :x]


def errors(exact: Real, output: npt.NDArray[np.float32]) -> Facts:
    """Of an output (maps, z, y, x)."""
    maps = len(exact)
    off = (output.astype(np.float64) - exact).reshape(maps, -1).T
    shares = off / magnitude_of(exact.reshape(maps, -1).T)
    return {
        "most": float(np.abs(shares).max()),
        "rms": float(np.sqrt(np.square(shares).mean())),
        "mean": float(shares.mean()),
        "not_allowed": float((np.abs(shares) > TOLERANCES["fp32"]).mean()),
    }


def measured(name: str, side: int, limits: Limits) -> Iterator[Facts]:
    """Rows of one network."""
    network = random_network(name)
    output: Vec3 = (side or reference_side(network),) * 3
    volume = max(network.patch_in(output))
    begin = time.perf_counter()
    exact = corner_by_definition((name, volume, output))
    about = {"network": Path(name).stem, "side": output[0], "definition_seconds": time.perf_counter() - begin}
    raw = _under(network, volume, output)
    plan, ours = on_the_processor(network, Held(raw), output, limits)
    methods = [choice.primitive for choice in plan.choices]
    yield about | {"name": "znnpy on the processor", "methods": methods} | errors(exact, ours)
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        net = DenseTorch(network, random_weights(network), "fragments", "fp32", "contiguous", device)
        yield about | {"name": f"PyTorch on {device}", "methods": []} | errors(exact, net(raw))


def said_of(row: Facts) -> str:
    return (
        f"{row['network']:5} {row['name']:22} most {row['most']:.1e}, rms {row['rms']:.1e}, mean {row['mean']:+.1e}, "
        f"{row['not_allowed']:.2%} of {row['side']}^3 voxels not allowed"
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


if __name__ == "__main__":
    without_forced_blas_kernels()
    main()
