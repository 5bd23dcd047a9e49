"""Measure single convolutions of graphs on a GPU, beside cuDNN through PyTorch, with the share of the card's limits.

Each runs some times in a CUDA graph, so that only the device's time counts; rounds of all methods of a layer alternate.
PyTorch has channels last and `cudnn.benchmark`, which measures cuDNN's algorithms first. All have a bias.

The limits are those of the vendor for products, and a measured copy for memory. A layer's least time is that of its
multiply-adds or of its bytes, read and written once, whichever is longer; its share is that time in the measured one.
Where a norm follows, it is measured with the convolution: in one primitive, and by one of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

import znnpy
from benchmarks.gpu_conv_tables import PROGRAM as PROGRAM
from benchmarks.harness import options
from benchmarks.harness.machine import copy_rate, header, machine_name, torch_sees_a_gpu
from benchmarks.harness.results import Result, Row
from benchmarks.harness.timing import Budget, DeviceClock, Entry, TorchClock, interleave
from znnpy.graph_shapes import GraphConvShape, Normed
from znnpy.kernels.contract import ConvWeights
from znnpy.kernels.gpu.graph.norm import NormPasses
from znnpy.kernels.table import of_kind
from znnpy.machine import this_machine

ROUNDS = 7
SECONDS = 2e-3  # of the runs in a graph
MOST_RUNS = 100
MAPS, SIDES = (32, 64, 128, 256, 320), (128, 64, 32, 16, 8)
# Vendors' peaks of products of float16 with sums in float32, without sparsity: TFLOP/s.
PEAKS = {"H100": 989.4, "H200": 989.4, "A100": 312.0, "L40S": 362.0, "L4": 121.0, "RTX 4090": 165.2}
BLOCK = 2**20 + 3  # random values, which are repeated
COMPARED = 2  # planes of results that are compared


def _conv(fins: tuple[int, ...], fout: int, side: int, k: int = 3, stride: int = 1) -> GraphConvShape:
    pad = (k // 2,) * 3
    return GraphConvShape(fins, fout, (side,) * 3, (k,) * 3, pad, pad, (stride,) * 3, precision="fp16")


LAYERS = (
    *(_conv((maps,), maps, side) for side in SIDES for maps in MAPS),
    _conv((1,), 32, 128),
    _conv((4,), 32, 128),
    _conv((32,), 1, 128),
    _conv((32,), 3, 128, 1),
    _conv((32, 64), 32, 128),
    _conv((128, 256), 128, 32),
    _conv((32,), 64, 128, 3, 2),
    _conv((64,), 128, 64, 3, 2),
    _conv((256,), 320, 16, 3, 2),
    _conv((32,), 32, 64, 5),
    replace(_conv((32,), 32, 128), addend=True, activation="leaky_relu"),
    replace(_conv((64,), 32, 128), factors=((2, 2, 2),)),
    *(  # decoders of a U-Net, by phases and not
        replace(_conv((maps, 2 * maps), maps, side), factors=((1, 1, 1), (2, 2, 2)))
        for maps, side in ((32, 128), (64, 64), (128, 32))
    ),
    *(  # encoders with instance norm
        replace(_conv((maps_in,), maps, side), normed=Normed(maps, 1e-5, True, "leaky_relu", (0.01,)))
        for maps_in, maps, side in ((1, 32, 128), (32, 32, 128), (64, 64, 64), (128, 128, 32))
    ),
)
QUICK = (_conv((8,), 8, 4), replace(_conv((8,), 8, 4), normed=Normed(8, 1e-5, True)))


def flops_of(shape: GraphConvShape) -> float:
    """Return the operations of the definition, padding included."""
    return 2.0 * prod(shape.out_shape) * shape.fin * prod(shape.k)


def bytes_of(shape: GraphConvShape) -> int:
    """Return the bytes of inputs, output and kernels."""
    return shape.in_bytes + shape.out_bytes + shape.itemsize * shape.fout * shape.fin * prod(shape.k)


class Bench:
    """Measures layers on one device, which `peers` lets PyTorch use too."""

    def __init__(self, device: Any, *, peers: bool, rounds: int, graphs: bool = True) -> None:
        self._device, self._peers, self._rounds, self._graphs = device, peers, rounds, graphs
        self._machine = replace(this_machine(), gpu=device.gpu)
        self.peak = next((1e12 * peak for name, peak in PEAKS.items() if name in device.gpu.name), None)
        self.copied = copy_rate(device) if graphs else None

    def rows(self, shape: GraphConvShape) -> Iterator[Row]:
        """Yield the rows of one layer."""
        block = np.random.default_rng(5).standard_normal(BLOCK, np.float32).astype(np.float16)
        scale = np.float32(1 / np.sqrt(shape.fin * prod(shape.k)))
        weight = scale * np.resize(block[::-1], (shape.fout, shape.fin, *shape.k)).astype(np.float32)
        ones, zeros = np.ones(shape.fout, np.float32), np.zeros(shape.fout, np.float32)
        norm = ConvWeights(ones, zeros) if shape.normed is not None else None
        weights = ConvWeights(weight.astype(np.float16).astype(np.float32), zeros, norm)
        sizes = [(*shape.size_of(index), maps) for index, maps in enumerate(shape.fins)]
        sizes += [shape.out_shape[1:]] if shape.addend else []
        arrays = [np.resize(block, size) for size in sizes]
        entries, runs, facts, results = [], {}, {}, {}
        for name, clock, run, many, result, about in self._methods(shape, weights, arrays):
            entries.append(Entry(name, run, clock, repeats=1))
            runs[name], facts[name], results[name] = many, about, result
            run()
        interleave(entries, self._rounds, Budget(10))
        voxels, own = prod(shape.out_shape[1:4]), None
        for entry in entries:
            spent = [one / runs[entry.name] for one in entry.seconds]
            yield Row("layers", str(shape), entry.name, "ns/voxel", tuple(1e9 * one / voxels for one in spent),
                      facts=facts[entry.name] | self._shares(shape, sorted(spent)[len(spent) // 2]))  # fmt: skip
            found = results[entry.name]()
            own = found if own is None else own
            error = float(np.sqrt(np.mean((found - own) ** 2) / np.mean(own**2)))
            yield Row("errors", str(shape), entry.name, "relative difference", (error,))

    def _shares(self, shape: GraphConvShape, seconds: float) -> dict[str, Any]:
        flops, nbytes = flops_of(shape), bytes_of(shape)
        facts: dict[str, Any] = {"us": 1e6 * seconds, "tflops": flops / seconds / 1e12, "bytes": nbytes}
        if self.peak is not None and self.copied is not None:
            arithmetic, memory = flops / self.peak, nbytes / self.copied
            facts |= {
                "share": max(arithmetic, memory) / seconds,
                "bound": "tensor" if arithmetic > memory else "memory",
            }
        return facts

    def _methods(self, shape: GraphConvShape, weights: ConvWeights, arrays: list[npt.NDArray[Any]]) -> Iterator[Any]:
        """Yield name, clock, run, how many runs it is, result and facts of each method; ours come first."""
        for primitive in self._applying(shape):
            yield self._own([(primitive, shape, weights)], arrays)
        if (norm := shape.norm_shape) is not None:
            alone = replace(shape, normed=None)
            for primitive in self._applying(alone):
                yield self._own([(primitive, alone, weights), (NormPasses(), norm, weights.norm)], arrays)
        if self._peers and not shape.upsampled:
            yield self._torch(shape, weights, arrays)

    def _applying(self, shape: GraphConvShape) -> list[Any]:
        """Return the primitives of GPUs that compute a layer here."""
        known = [primitive for primitive in of_kind("graph_conv") if primitive.name.startswith("gpu.")]
        return [primitive for primitive in known if primitive.why_not(shape, self._machine) is None]

    def _own(self, layers: list[tuple[Any, Any, ConvWeights | None]], arrays: list[npt.NDArray[Any]]) -> Any:
        """Return a method of ours: primitives, each of which reads what the one before it gave."""
        device, steps, variants = self._device, [], []
        inputs = [device.put(array, "an input") for array in arrays]
        peak = device.put(np.zeros(1, np.float32), "a peak")
        for primitive, shape, weights in layers:
            variant = primitive.variants(shape, self._machine)[0]
            out = device.put(np.full(shape.out_shape[1:], np.nan, np.float16), "an output")
            asked = primitive.footprint(shape, variant, 1).scratch
            scratch = {one.name: device.allocate(one.nbytes, one.name) for one in asked}
            step = primitive.bind(primitive.prepare(weights, variant, device), shape, variant, device)
            steps.append((step, inputs, out, scratch))
            variants.append(str(variant))
            inputs = [out]

        def run() -> None:
            for step, given, to, scratch in steps:
                step.run(given, to, scratch, out_peak=device.address(peak))

        clock = DeviceClock(device)
        run()
        many, launch = 1, run
        if self._graphs:
            many = runs_in(clock.seconds(run, 3))
            device.stream.begin_capture()
            for _ in range(many):
                run()
            graph = device.stream.end_capture()

            def launch() -> None:
                graph.launch(device.stream)

        return (
            " and ".join(primitive.name for primitive, _, _ in layers),
            clock,
            launch,
            many,
            lambda: device.get(inputs[0][:COMPARED]).astype(np.float32),
            {"variant": " and ".join(variants)},
        )

    def _torch(self, shape: GraphConvShape, weights: ConvWeights, arrays: list[npt.NDArray[Any]]) -> Any:
        import torch

        torch.backends.cudnn.benchmark = True
        addend = torch.from_numpy(arrays[-1]).cuda().permute(3, 0, 1, 2)[None] if shape.addend else None
        whole = arrays[0] if len(shape.fins) == 1 else np.concatenate(arrays[: len(shape.fins)], axis=3)
        x = torch.from_numpy(whole).cuda().permute(3, 0, 1, 2)[None]
        weight = torch.from_numpy(weights.weight).cuda().half().to(memory_format=torch.channels_last_3d)
        bias = torch.from_numpy(weights.bias).cuda().half()
        scales = torch.ones_like(bias)
        kept: list[Any] = []

        def run() -> None:
            with torch.inference_mode():
                out = torch.nn.functional.conv3d(x, weight, bias, shape.stride, shape.before)
                if addend is not None:
                    out += addend
                if shape.normed is not None:
                    out = torch.nn.functional.instance_norm(out, weight=scales, bias=bias, eps=shape.normed.epsilon)
                if "leaky_relu" in (shape.activation, shape.normed and shape.normed.activation):
                    out = torch.nn.functional.leaky_relu_(out)
                kept[:] = [out]

        clock = TorchClock()
        run()
        many = runs_in(clock.seconds(run, 3))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(many):
                run()
        name = f"PyTorch fp16, cuDNN {torch.backends.cudnn.version()}"
        return (
            name,
            clock,
            graph.replay,
            many,
            lambda: kept[0][0, :, :COMPARED].permute(1, 2, 3, 0).float().cpu().numpy(),
            {},
        )


def runs_in(seconds: float) -> int:
    """Return how many runs of this length are measured together."""
    return max(1, min(MOST_RUNS, int(SECONDS / max(seconds, 1e-7))))


def command_on(device: Any, out: Path | None, *, quick: bool, peers: bool, graphs: bool = True) -> None:
    """Measure on a device, and write after each layer."""
    about = header(device.gpu)
    result = Result("gpu_convs", machine_name(device.gpu), about)
    bench = Bench(device, peers=peers, rounds=1 if quick else ROUNDS, graphs=graphs)
    about |= {"peak_flops": bench.peak, "copy_bytes_per_second": bench.copied}
    for shape in QUICK if quick else LAYERS:
        rows = list(bench.rows(shape))
        result.add(rows)
        for row in rows:
            if row.group == "layers":
                figures = (
                    f"{row.facts['us']:10.1f} us {row.facts['tflops']:7.1f} TFLOP/s {row.facts.get('share', 0):.2f}"
                )
                click.echo(f"{row.case}  {row.subject:28}{figures}")
        if out is not None or not quick:
            result.write(out)


@click.command()
@options.OUT
@options.QUICK
@click.option("--peers/--no-peers", default=True, help="Whether PyTorch runs too, if it sees the GPU.")
def command(out: Path | None, quick: bool, peers: bool) -> None:
    """Measure convolutions of graphs on a GPU."""
    with znnpy.Device(znnpy.find_gpu()) as device:
        command_on(device, out, quick=quick, peers=peers and torch_sees_a_gpu())
