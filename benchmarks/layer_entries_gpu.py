"""Who competes in `layers.py --device gpu`: znnpy's primitives, and PyTorch's conv3d, on one input on the device."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from gpu_card import Clock, Device, TorchClock, WallClock
from layer_cases import smaller

from znnpy.kernels.primitive import ConvWeights
from znnpy.kernels.table import of_kind
from znnpy.planner.cost_model import assumed_rates
from znnpy.shapes import ConvShape, LayerShape, PoolShape, Precision, Vec3, add, multiply, subtract

if TYPE_CHECKING:
    from dense_torch import Layout
    from dense_torch import Precision as PeerPrecision

    from znnpy.kernels.primitive import Array, Primitive, Variant, Work
    from znnpy.machine import Machine

SEED = 20261121
VALUES = 2**26 - 5  # random ones; longer inputs repeat them, and a prime number of them meets no axis
ALIGNMENT = 256  # of scratch, bytes
HOPELESS = 1.6  # times the best variant's time: no second try
FAR = 3.0  # times the best primitive's time: no other variants
ROOM = 1 / 64  # of the card's memory, left to what libraries allocate
PEERS: dict[Precision, tuple[PeerPrecision, ...]] = {"fp32": ("fp32",), "tf32": ("tf32",), "fp16": ("fp16", "bf16")}
LAYOUTS: dict[str, tuple[Layout, ...]] = {"fp32": ("contiguous", "channels_last_3d")}
LAYOUT_OF_OTHERS: tuple[Layout, ...] = ("channels_last_3d",)  # contiguous, cuDNN transposes for tensor cores
TORCH_FLOPS = {"fp32": 15e12, "tf32": 100e12, "fp16": 150e12, "bf16": 150e12}  # per second, to tell what is slow
CORNER = 5  # output voxels along an axis of the boxes that are compared with the definition


class Times(Protocol):
    def seconds(self, run: Callable[[], Any], repeats: int = 1) -> float: ...


@dataclass(slots=True)
class Input:
    """The input of a case on the device, weights, and what is known of both.

    some    float32: ReLUs of normal numbers, as after a layer; the input holds them again and again
    device  (S, z, y, x, f), in the precision's type
    """

    shape: LayerShape
    some: Array
    device: Any
    weights: ConvWeights | None
    known: dict[tuple[LayerShape, Vec3], npt.NDArray[np.float64]] = field(
        default_factory=dict
    )  # boxes of the definition's output

    @property
    def largest(self) -> float:
        """No value is larger, rounded to float16 or not."""
        return float(self.some.max()) * (1 + 2**-10)

    def box(self, lo: Vec3, hi: Vec3) -> npt.NDArray[np.float64]:
        """Voxels lo <= (z, y, x) < hi of the first and the last image, before they were rounded: (1 or 2, .., f)."""
        images, *size, maps = self.shape.in_shape
        axes = [sorted({0, images - 1}), *(range(a, b) for a, b in zip(lo, hi, strict=True)), range(maps)]
        places = np.ravel_multi_index(np.ix_(*axes), (images, *size, maps))
        return self.some[places % self.some.size].astype(np.float64)


@dataclass(slots=True)
class Entry:
    """A competitor. `run` queues the layer, `crop` gives a box of what it computed, (S, z, y, x, f) float32."""

    name: str
    precision: str
    variant: str
    measured: LayerShape
    given: Input  # whose first voxels it takes, as many as `measured` says
    run: Callable[[], Any]
    crop: Callable[[Vec3], Array]  # of CORNER voxels or less from this corner on
    clock: Times
    poison: Callable[[], None] | None = None  # so that what is not written is seen
    work: Sequence[Work] = ()  # of a primitive
    predicted: float = 0.0  # seconds
    scratch_bytes: int = 0
    resident_bytes: int = 0
    seconds: list[float] = field(default_factory=list)


def random_input(shape: LayerShape, device: Device) -> Input:
    some = random_values(min(VALUES, prod(shape.in_shape)))
    block = device.put(some.astype(np.float16 if shape.itemsize == 2 else np.float32), "random numbers")
    x = device.view(device.allocate(shape.in_bytes, "the input"), shape.in_shape, block.dtype)
    flat = x.reshape(-1)
    for start in range(0, flat.size, block.size):
        part = flat[start : start + block.size]
        device.copy_async(part, block[: part.size], device.stream)
    device.synchronize()
    weights = None
    if isinstance(shape, ConvShape):
        rng = np.random.default_rng(SEED + 1)
        scale = np.float32(np.sqrt(2 / (shape.fin * prod(shape.k))))
        weight = rng.standard_normal((shape.fout, shape.fin, *shape.k), np.float32) * scale
        weights = ConvWeights(weight, rng.standard_normal(shape.fout, np.float32))
    return Input(shape, some, x, weights)


@cache
def random_values(count: int) -> Array:
    return np.maximum(np.random.default_rng(SEED).standard_normal(count, np.float32), 0)


class Ours:
    """znnpy's primitives, with one output and one room for scratch that all of them share."""

    def __init__(
        self,
        given: Input,
        device: Device,
        machine: Machine,
        options: argparse.Namespace,
        best: float = float("inf"),
        clock: Times | None = None,  # None: one by events of the device
    ) -> None:
        self._best = best  # seconds an output voxel, of the fastest so far
        self._given, self._device, self._machine, self._options = given, device, machine, options
        self._rates = assumed_rates(machine, machine.cores, "gpu")
        shape = given.shape
        out = device.allocate(shape.out_bytes, "the output")
        self._out = device.view(out, shape.out_shape, np.float16 if shape.itemsize == 2 else np.float32)
        self._peaks = device.put(np.array([given.largest, 0], np.float32), "the largest values")
        self._scratch: Any = np.empty(0, np.uint8)  # as much as the greediest needs
        self._views: dict[str, dict[str, Any]] = {}  # of it, by primitive and variant
        self._clock = clock or Clock(device)

    @property
    def out(self) -> Any:
        """The output on the device, of whichever entry ran last: (S, z, y, x, f)."""
        return self._out

    def entries(self, void: list[str]) -> Iterator[Entry]:
        """Each primitive that applies, with the variant that ran fastest; variants that failed are added to `void`.

        On a smaller volume where the cost model has it that a run would take longer than `--slow-seconds`.
        """
        shape = self._given.shape
        for primitive in of_kind(shape.kind):
            if not primitive.name.startswith("gpu.") or (
                self._options.only and primitive.name not in self._options.only
            ):
                continue
            if reason := primitive.why_not(shape, self._machine):
                print(f"  {primitive.name} does not apply to {shape}: {reason}")
                continue
            where = self
            if isinstance(shape, ConvShape):
                spent = min(
                    self._rates.seconds(primitive, shape, variant)
                    for variant in primitive.variants(shape, self._machine)
                )
                less = smaller(shape, spent, self._options.slow_seconds)
                if less != shape:
                    there = random_input(less, self._device)
                    where = Ours(there, self._device, self._machine, self._options, self._best, self._clock)
            if entry := where._fastest(primitive, void):
                self._best = where._best
                yield entry

    def _fastest(self, primitive: Primitive, void: list[str]) -> Entry | None:
        """The variant the cost model likes best of each size of tile, then all others of the size that ran fastest."""
        shape = self._given.shape
        fitting = [v for v in primitive.variants(shape, self._machine) if self._fits(primitive, v)]
        fitting.sort(key=lambda variant: self._rates.seconds(primitive, shape, variant))
        firsts = list({_tile(variant): variant for variant in reversed(fitting)}.values())[::-1]
        spent = self._spent(primitive, firsts[: self._options.variants], void)
        voxels = prod(shape.out_shape[:4])
        if spent and min(spent.values()) / voxels < FAR * self._best:
            tile = _tile(min(spent, key=spent.__getitem__))
            others = [variant for variant in fitting if variant not in spent and _tile(variant) == tile]
            spent |= self._spent(primitive, others[: self._options.variants], void)
        if not spent:
            print(f"  {primitive.name}: no variant ran, of {len(fitting)} that fit into the memory that is free")
            return None
        if len(spent) > 1:
            figures = "; ".join(f"{variant or 'plain'} {1e3 * seconds:.2f}" for variant, seconds in spent.items())
            print(f"  {primitive.name}, ms: {figures}")
        self._best = min(self._best, min(spent.values()) / voxels)
        return self.entry(primitive, min(spent, key=spent.__getitem__))

    def _spent(self, primitive: Primitive, variants: Sequence[Variant], void: list[str]) -> dict[Variant, float]:
        """Seconds of each that runs."""
        found: dict[Variant, float] = {}
        for variant in variants:
            try:
                run = self.entry(primitive, variant).run
                self._clock.seconds(run)
            except RuntimeError as error:  # a DeviceError, or cuDNN's own: told, and the others are measured
                void.append(f"{primitive.name} {variant} on {self._given.shape}: {str(error)[:300]}")
                print(f"  VOID {void[-1]}", flush=True)
                continue
            found[variant] = self._clock.seconds(run)
            if found[variant] <= HOPELESS * min(found.values()):
                found[variant] = min(found[variant], self._clock.seconds(run, 2))
        return found

    def _fits(self, primitive: Primitive, variant: Variant) -> bool:
        footprint = primitive.footprint(self._given.shape, variant, 1)
        more = max(0, _scratch_bytes(footprint.scratch) - self._scratch.nbytes)
        needed = more + 2 * footprint.resident + footprint.allowance
        return bool(needed + ROOM * self._device.gpu.memory_bytes <= self._device.free_bytes())

    def entry(self, primitive: Primitive, variant: Variant) -> Entry:
        """The primitive in this variant, prepared and bound."""
        shape, device = self._given.shape, self._device
        footprint = primitive.footprint(shape, variant, 1)
        step = primitive.bind(primitive.prepare(self._given.weights, variant, device), shape, variant, device)
        nbytes = _scratch_bytes(footprint.scratch)
        if self._scratch.nbytes < nbytes:
            self._views.clear()
            self._scratch = np.empty(0, np.uint8)  # the smaller one goes before the larger one comes
            self._scratch = device.allocate(nbytes, "scratch")
        names = [buffer.name for buffer in footprint.scratch]
        sizes = [buffer.nbytes for buffer in footprint.scratch]
        starts = np.cumsum([0, *(_rounded(size) for size in sizes)]).tolist()
        peak = device.address(self._peaks)
        words: dict[str, int] = {}
        if footprint.reads_peak:
            words["x_peak"] = peak
        if footprint.raises_peak:
            words["out_peak"] = peak + 4

        key = f"{primitive.name} {variant}"

        def run() -> None:
            if key not in self._views:
                self._views[key] = {
                    name: device.view(self._scratch, (size,), np.uint8, offset=start)
                    for name, start, size in zip(names, starts, sizes, strict=False)
                }
            step.run(self._given.device, self._out, self._views[key], **words)

        return Entry(
            primitive.name,
            shape.precision,
            str(variant),
            shape,
            self._given,
            run,
            self._crop,
            self._clock,
            self.poison,
            primitive.work(shape, variant),
            self._rates.seconds(primitive, shape, variant),
            nbytes,
            footprint.resident,
        )

    def poison(self) -> None:
        """What is not written is seen."""
        self._device.synchronize()
        self._out.fill(np.nan)
        self._device.synchronize()

    def _crop(self, corner: Vec3) -> Array:
        return np.asarray(self._device.get(self._out[_box(corner)]), np.float32)


def torch_entries(given: Input, slow_seconds: float, where: str) -> Iterator[Entry]:
    """conv3d with bias, and ReLU in place; in float16 bfloat16 too. What would take longer gets a smaller volume.

    A pooling behind it is maxima along one axis after the other, then a copy of every offset.

    where  "cuda", or "cpu" to see that it works
    """
    import torch
    from dense_torch import DTYPES, activated, as_tensor, compute_in, fragments, in_layout, largest, placed

    shape = given.shape
    if not isinstance(shape, ConvShape) or given.weights is None:
        return
    there = torch.from_dlpack(given.device).permute(0, 4, 1, 2, 3)  # the input itself, maps first
    for precision in PEERS[shape.precision]:
        flops = 2 * prod(shape.out_shape) * shape.fin * prod(shape.k)
        measured = smaller(shape, flops / TORCH_FLOPS[precision], slow_seconds)
        z, y, x = measured.n
        part = there[:, :, :z, :y, :x].to(where, DTYPES[precision])
        bias = as_tensor(given.weights.bias, precision, where)
        for layout in LAYOUTS.get(precision, LAYOUT_OF_OTHERS):
            image = in_layout(part, layout)
            weight = placed(given.weights.weight, precision, layout, where)
            found: list[Any] = [None]

            def run(
                image: Any = image,
                weight: Any = weight,
                bias: Any = bias,
                found: list[Any] = found,
                how: PeerPrecision = precision,
            ) -> None:
                compute_in(how)
                with torch.inference_mode():
                    found[0] = None  # the memory of the run before is free for this one
                    out = activated(torch.nn.functional.conv3d(image, weight, bias), shape.activation)
                    for axis, extent in enumerate(shape.pool if shape.pools else (), start=2):
                        out = largest(out, axis, extent, 1)
                    found[0] = fragments(out, shape.pool) if shape.pools else out

            def crop(corner: Vec3, found: list[Any] = found) -> Array:
                box = found[0].permute(0, 2, 3, 4, 1)[_box(corner)]
                return np.asarray(box.float().cpu().numpy())

            clock: Times = TorchClock() if where == "cuda" else WallClock()
            yield Entry(f"PyTorch conv3d, {layout}", precision, "", measured, given, run, crop, clock)


def corners(out: Vec3) -> list[Vec3]:
    """Of boxes at the beginning, in the middle and at the end of an output."""
    size: Vec3 = min(CORNER, out[0]), min(CORNER, out[1]), min(CORNER, out[2])
    last = subtract(out, size)
    middle: Vec3 = last[0] // 2, last[1] // 3, 2 * last[2] // 3
    return list(dict.fromkeys([(0, 0, 0), middle, last]))


def exact(given: Input, corner: Vec3, out: Vec3) -> npt.NDArray[np.float64]:
    """The box of the layer's definition in float64 that begins at `corner`, of the first and last image."""
    from znnpy.kernels.reference import convolve, fragments

    shape = given.shape
    pool = shape.p if isinstance(shape, PoolShape) else shape.pool if isinstance(shape, ConvShape) else (1, 1, 1)
    kernel = shape.k if isinstance(shape, ConvShape) else (1, 1, 1)
    lo = multiply(corner, pool)
    size: Vec3 = min(CORNER, out[0]), min(CORNER, out[1]), min(CORNER, out[2])
    # fragments of size m are of (m + 1) p - 1 voxels; without a pooling p is 1
    part = given.box(lo, subtract(add(add(lo, multiply(add(size, (1, 1, 1)), pool)), kernel), (2, 2, 2)))
    if isinstance(shape, ConvShape):
        assert given.weights is not None
        part = convolve(part, given.weights.weight, given.weights.bias, shape.activation)
    return fragments(part, pool) if pool != (1, 1, 1) else part


def rms_error(entry: Entry) -> float:
    """Of boxes of the output, over the rms of the exact values; of the input as it was before it was rounded."""
    wrong = right = 0.0
    shape, given = entry.measured, entry.given
    images = shape.in_shape[0]
    for corner in corners(shape.out):
        if (shape, corner) not in given.known:
            given.known[shape, corner] = exact(given, corner, shape.out)
        expected = given.known[shape, corner]
        found = entry.crop(corner)
        parts = found.shape[0] // images
        picked = np.concatenate([found[i * parts : (i + 1) * parts] for i in sorted({0, images - 1})])
        wrong += float(np.square(picked.astype(np.float64) - expected).sum())
        right += float(np.square(expected).sum())
    return float(np.sqrt(wrong / right))


def _tile(variant: Variant) -> str:
    return str(dict(variant.parameters).get("tile"))


def _box(corner: Vec3) -> tuple[slice, ...]:
    return (slice(None), *(slice(at, at + CORNER) for at in corner))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _scratch_bytes(scratch: Sequence[Any]) -> int:
    return sum(_rounded(buffer.nbytes) for buffer in scratch)
