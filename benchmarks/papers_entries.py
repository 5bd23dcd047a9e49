"""Who competes in `papers.py`: znnpy's primitives, every plan of cuDNN, PyTorch's conv2d, and processors.

All convolve one input on the device whose zeros at the edges are there beforehand, without bias and activation: ours
add a bias of zeros. Plans of cuDNN are those of `kernels.gpu.libraries`, which sees images of depth 1; PyTorch, in its
benchmark mode without a limit, finds those that cuDNN has for two dimensions alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil, prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gpu_card import Clock, Device, TorchClock, WallClock
from layer_entries_gpu import CORNER, SEED, Entry, Input, Ours, Times, random_values
from papers_cases import MOST_WORKSPACE_BYTES

from znnpy.kernels.gpu.conv_cudnn import NAIVE
from znnpy.kernels.gpu.libraries import Convolution
from znnpy.kernels.primitive import ConvWeights
from znnpy.kernels.table import TABLE
from znnpy.machine import this_machine
from znnpy.shapes import ConvShape, Vec3

if TYPE_CHECKING:
    from znnpy.kernels.crew import Crew
    from znnpy.kernels.primitive import Array
    from znnpy.machine import Machine

VALUES = 2**22 - 3  # random ones, again and again; a prime number of them meets no axis
IMAGES = 7  # different ones; a batch repeats them
HOLD_BYTES = 2**27  # of the copy that holds work back, a tenth of a millisecond long
MOST_HOLDS = 300
SPARE = 1.5  # times as long is the device held as the host needs
NEVER = float("inf")  # seconds: no case runs on a smaller image


class HeldClock:
    """Seconds of work by events of the device, without the host: a launch takes it longer than a small layer runs.

    Work waits on the device behind copies until the host has queued all of it. A run before it, which tells how long
    the host needs, leaves caches as a series of runs finds them.
    """

    def __init__(self, device: Device, nbytes: int = HOLD_BYTES) -> None:
        self._device = device
        self._source, self._target = (device.allocate(nbytes, "what holds work back") for _ in range(2))
        self._copy_seconds = self._warm(Clock(device))

    def seconds(self, run: Callable[[], Any], repeats: int = 1) -> float:
        """Of one run, when `repeats` are queued one behind the other."""
        self._device.synchronize()
        begin = time.perf_counter()
        run()
        spent = time.perf_counter() - begin
        self._device.synchronize()
        for _ in range(holds(repeats * spent, self._copy_seconds)):
            self._copy()

        def series() -> None:
            for _ in range(repeats):
                run()

        return self._elapsed(series) / repeats

    def _warm(self, clock: Times) -> float:
        """Seconds of a copy, not of the first."""
        clock.seconds(self._copy)
        return clock.seconds(self._copy, 4)

    def _copy(self) -> None:
        self._device.copy_async(self._target, self._source, self._device.stream)

    def _elapsed(self, work: Callable[[], None]) -> float:
        return float(sum(self._device.elapsed(work)))


class HeldTorchClock(HeldClock):
    """The same for work that PyTorch queues."""

    def __init__(self, device: Device, nbytes: int = HOLD_BYTES) -> None:
        import torch

        self._tensors = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self._device = device
        self._copy_seconds = self._warm(TorchClock())

    def _copy(self) -> None:
        self._tensors[0].copy_(self._tensors[1])

    def _elapsed(self, work: Callable[[], None]) -> float:
        import torch

        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def holds(host_seconds: float, copy_seconds: float) -> int:
    """Copies that take longer than the host takes."""
    return min(MOST_HOLDS, ceil(SPARE * host_seconds / copy_seconds))


@dataclass(slots=True)
class Images(Input):
    """An input of a few padded images, again and again: image i is `some[i % len(some)]`.

    some  (up to IMAGES, z, y, x, f) float32
    """

    def box(self, lo: Vec3, hi: Vec3) -> npt.NDArray[np.float64]:
        """Voxels lo <= (z, y, x) < hi of the first and the last image, before they were rounded: (1 or 2, .., f)."""
        ends = [image % len(self.some) for image in sorted({0, self.shape.in_shape[0] - 1})]
        part = self.some[ends, lo[0] : hi[0], lo[1] : hi[1], lo[2] : hi[2]]
        return np.asarray(part, np.float64)


def padded_input(shape: ConvShape, padding: int, device: Device) -> Images:
    """ReLUs of normal numbers, with `padding` zeros around every image, which `shape` counts; no bias."""
    rows, columns = (slice(padding, size - padding) for size in shape.n[1:])
    few = min(IMAGES, shape.batch)
    some = np.zeros((few, *shape.n, shape.fin), np.float32)
    room = some[:, :, rows, columns]
    room[...] = np.resize(random_values(VALUES), room.shape)
    block = device.put(some.astype(np.float16 if shape.itemsize == 2 else np.float32), "images")
    values = device.view(device.allocate(shape.in_bytes, "the input"), shape.in_shape, block.dtype)
    for first in range(0, shape.batch, few):
        part = values[first : first + few]
        device.copy_async(part, block[: len(part)], device.stream)
    device.synchronize()
    scale = np.float32(np.sqrt(2 / (shape.fin * prod(shape.k))))
    weight = np.random.default_rng(SEED + 1).standard_normal((shape.fout, shape.fin, *shape.k), np.float32) * scale
    return Images(shape, some, values, ConvWeights(weight, np.zeros(shape.fout, np.float32)))


def our_entries(
    given: Input, device: Device, machine: Machine, clock: Times, words: argparse.Namespace, void: list[str]
) -> list[Entry]:
    """Of each method that there is and that applies, the variant that runs fastest.

    words  of the command: `methods`, `variants`; with `every_variant` each of those has an entry, and the fastest one
           more, with copies.
    """
    known = [primitive for primitive in TABLE if primitive.name in words.methods]
    if not known:
        return []
    options = argparse.Namespace(only=words.methods, variants=words.variants, slow_seconds=NEVER)
    ours = Ours(given, device, machine, options, clock=clock)
    if not words.every_variant:
        return list(ours.entries(void))
    found = [
        ours.entry(primitive, variant)
        for primitive in known
        if primitive.why_not(given.shape, machine) is None
        for variant in primitive.variants(given.shape, machine)[: words.variants]
    ]
    if not found:
        return []
    fastest = min(found, key=lambda entry: clock.seconds(entry.run))
    return [*found, copied_entry(given, fastest, ours.out, device)]


def cudnn_entries(
    given: Input, device: Device, clock: Times, most_plans: int | None, left_out: list[str]
) -> Iterator[Entry]:
    """Every plan that cuDNN proposes, or the first; its naive one only where it is alone."""
    shape, weights = given.shape, given.weights
    assert isinstance(shape, ConvShape)
    assert weights is not None
    dtype = np.float16 if shape.itemsize == 2 else np.float32
    steps = prod(shape.in_shape[1:]), prod(shape.out_shape[1:])
    problem = Convolution(shape.batch, shape.fin, shape.fout, shape.n, shape.k, shape.precision, *steps, None)
    kernels = device.put(np.ascontiguousarray(weights.weight.transpose(0, 2, 3, 4, 1), dtype), "weights for cuDNN")
    bias = device.put(weights.bias, "biases for cuDNN")
    out = device.view(device.allocate(shape.out_bytes, "the output of cuDNN"), shape.out_shape, dtype)
    plans = list(islice(device.libraries.convolutions(problem), most_plans))
    quick = [plan for plan in plans if plan.name.split("_")[0] != NAIVE] or plans
    fitting = [plan for plan in quick if plan.workspace_bytes <= MOST_WORKSPACE_BYTES]
    greedy = [plan for plan in quick if plan not in fitting]
    left_out += [f"cuDNN {plan.name} on {shape}: {plan.workspace_bytes:,} bytes" for plan in greedy]
    most = max((plan.workspace_bytes for plan in fitting), default=0)
    workspace = device.allocate(most, "the workspace of cuDNN") if most else None

    def poison() -> None:
        device.synchronize()
        out.fill(np.nan)
        device.synchronize()

    def crop(corner: Vec3) -> Array:
        return np.asarray(device.get(out[_box(corner)]), np.float32)

    for plan in fitting:

        def run(plan: Any = plan) -> None:
            plan.run(given.device, kernels, bias, out, workspace)

        yield Entry(
            f"cuDNN {plan.name}", shape.precision, "", shape, given, run, crop, clock, poison,
            scratch_bytes=plan.workspace_bytes,
        )  # fmt: skip


def torch_entries(given: Input, clock: Times, where: str) -> Iterator[Entry]:
    """conv2d, channels first and last, by the fastest algorithm that cuDNN has.

    where  "cuda", or "cpu" to see that it works
    """
    import torch
    from dense_torch import DTYPES, compute_in

    shape, weights = given.shape, given.weights
    assert weights is not None
    precision = shape.precision
    there = torch.from_dlpack(given.device)[:, 0].permute(0, 3, 1, 2)  # the input itself, maps first
    for layout in ("contiguous", "channels_last"):
        form = getattr(torch, f"{layout}_format" if layout == "contiguous" else layout)
        image = there.to(where).contiguous(memory_format=form)
        weight = torch.from_numpy(weights.weight[:, :, 0]).to(where, DTYPES[precision], memory_format=form)
        found: list[Any] = [None]

        def run(image: Any = image, weight: Any = weight, found: list[Any] = found) -> None:
            compute_in(precision, 0)  # as many algorithms as there are
            with torch.inference_mode():
                found[0] = None  # the memory of the run before is free for this one
                found[0] = torch.nn.functional.conv2d(image, weight)

        def crop(corner: Vec3, found: list[Any] = found) -> Array:
            box = found[0].permute(0, 2, 3, 1)[:, None][_box(corner)]
            return np.asarray(box.float().cpu().numpy())

        yield Entry(f"PyTorch conv2d, {layout}", precision, "", shape, given, run, crop, clock)


def copied_entry(given: Input, entry: Entry, out: Any, device: Device) -> Entry:
    """The same from an array of the host to an array of the host, by the host's clock, as who calls it once sees it."""
    x = np.ascontiguousarray(device.get(given.device))
    found: list[Any] = [None]

    def run() -> None:
        device.copy_async(given.device, x, device.stream)
        entry.run()
        found[0] = device.get(out)

    def crop(corner: Vec3) -> Array:
        return np.asarray(found[0][_box(corner)], np.float32)

    variant = f"{entry.variant}, with copies".removeprefix(", ")
    return replace(entry, variant=variant, run=run, crop=crop, clock=WallClock(), work=(), seconds=[])


def processor_entries(given: Input, crews: Sequence[Crew], variants: int) -> Iterator[Entry]:
    """Every primitive of the processor, by the threads of each crew."""
    import layers

    shape, weights = given.shape, given.weights
    assert isinstance(shape, ConvShape)
    assert weights is not None
    machine = this_machine()
    options = argparse.Namespace(variants=variants, slow_seconds=NEVER)
    for crew in crews:
        for primitive in TABLE:
            if primitive.name.startswith("cpu.conv.") and primitive.why_not(shape, machine) is None:
                entry = layers.fastest(primitive, shape, given.some, weights, crew, options)
                yield _on_the_processor(given, entry, crew.threads)


def _on_the_processor(given: Input, entry: Any, threads: int) -> Entry:
    found: list[Any] = [None]

    def run() -> None:
        found[0] = entry.run()

    def crop(corner: Vec3) -> Array:
        return np.asarray(found[0][_box(corner)])

    variant = f"{entry.variant} threads={threads}".strip()
    return Entry(entry.name, "fp32", variant, given.shape, given, run, crop, WallClock())


def _box(corner: Vec3) -> tuple[slice, ...]:
    return (slice(None), *(slice(at, at + CORNER) for at in corner))
