"""Who competes in `papers.py` on the device: znnpy's primitives and cuDNN's plans.

All convolve one input on the device whose zeros at the edges are there beforehand, without bias and activation: ours
add a bias of zeros. Plans of cuDNN are those of `kernels.gpu.libraries`, which sees images of depth 1, channels
last.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from gpu_card import Device, WallClock
from layer_entries_gpu import ROOM, Entry, Input, Ours, Times
from papers_clock import Spent
from papers_inputs import box

from znnpy.errors import VramError
from znnpy.kernels.gpu.cudnn_plans import is_naive
from znnpy.kernels.gpu.libraries import Convolution
from znnpy.kernels.table import TABLE
from znnpy.planner.cost_model import assumed_rates
from znnpy.shapes import ConvShape, Vec3

if TYPE_CHECKING:
    from znnpy.kernels.primitive import Array, Primitive, Variant
    from znnpy.machine import Machine

NEVER = float("inf")  # seconds: no case runs on a smaller image
CLOSE = 1.5  # times the time of the best, by one run behind another: what takes part in rounds


@dataclass(slots=True)
class Terms:
    """What entries of a case are made with, and what is left out on the way.

    most_bytes  of scratch or workspace; None: what the device has
    too_large   what wants more than that, with its bytes
    void        what failed, of ours
    plans       that cuDNN proposed and could build
    """

    device: Device
    machine: Machine
    clock: Times
    spent: Spent
    methods: Sequence[str]
    variants: int  # tried at most, of a primitive
    every_variant: bool
    most_plans: int | None
    most_bytes: int | None
    too_large: list[str] = field(default_factory=list)
    void: list[str] = field(default_factory=list)
    plans: int = 0

    def fits(self, name: str, nbytes: int) -> bool:
        """Whether this much scratch may be had; what may not is written down."""
        room = int(self.device.free_bytes() - ROOM * self.device.gpu.memory_bytes)
        if nbytes <= min(room, room if self.most_bytes is None else self.most_bytes):
            return True
        self.too_large.append(f"{name}: {nbytes:,} bytes")
        return False


def our_entries(given: Input, terms: Terms) -> list[Entry]:
    """Of each method that there is and that applies, the variant that runs fastest.

    With `every_variant` each of those has an entry, and the fastest one more, with copies.
    """
    known = [primitive for primitive in TABLE if primitive.name in terms.methods]
    if not known:
        return []
    options = argparse.Namespace(only=terms.methods, variants=terms.variants, slow_seconds=NEVER)
    ours = Ours(given, terms.device, terms.machine, options, clock=terms.clock)
    found = []
    for primitive in known:
        if reason := primitive.why_not(given.shape, terms.machine):
            print(f"  {primitive.name} does not apply: {reason}")
            continue
        tried = _screened(ours, primitive, given, terms)
        found += [entry for entry, _ in tried] if terms.every_variant else [entry for entry, _ in tried[:1]]
    if terms.every_variant and found:
        fastest = min(found, key=lambda entry: terms.clock.seconds(entry.run))
        found.append(copied_entry(given, fastest, ours.out, terms.device))
    return found


def _screened(ours: Ours, primitive: Primitive, given: Input, terms: Terms) -> list[tuple[Entry, float]]:
    """The variants that the cost model likes best, and seconds of a run of each behind another: the fastest first."""
    shape, device = given.shape, terms.device
    found: list[tuple[Entry, float]] = []
    for variant in _fitting(primitive, given, terms)[: terms.variants]:
        try:
            with terms.spent.on("compiling and weights of ours"):
                entry = ours.entry(primitive, variant)
                entry.run()
                device.synchronize()
            with terms.spent.on("screening of ours"):
                found.append((replace(entry, crop=cropped(ours.out, device)), terms.clock.seconds(entry.run)))
        except VramError as error:
            terms.too_large.append(f"{primitive.name} {variant}: {error}")
        except RuntimeError as error:  # a DeviceError: told, and the others are measured
            terms.void.append(f"{primitive.name} {variant} on {shape}: {str(error)[:300]}")
    best = min((seconds for _, seconds in found), default=0.0)
    with terms.spent.on("screening of ours"):
        found = [
            (entry, min(seconds, terms.clock.seconds(entry.run, 4)) if seconds <= CLOSE * best else seconds)
            for entry, seconds in found
        ]
    if len(found) > 1:
        told = "; ".join(f"{entry.variant} {1e6 * seconds:.1f}" for entry, seconds in found)
        print(f"  {primitive.name}, us: {told}")
    return sorted(found, key=lambda one: one[1])


def _fitting(primitive: Primitive, given: Input, terms: Terms) -> list[Variant]:
    """By the cost model, the fastest first."""
    shape = given.shape
    rates = assumed_rates(terms.machine, terms.machine.cores, "gpu")
    found = []
    for variant in primitive.variants(shape, terms.machine):
        footprint = primitive.footprint(shape, variant, 1)
        if terms.fits(f"{primitive.name} {variant}", sum(buffer.nbytes for buffer in footprint.scratch)):
            found.append(variant)
    return sorted(found, key=lambda variant: rates.seconds(primitive, shape, variant))


def cropped(out: Any, device: Device) -> Callable[[Vec3], Array]:
    """Boxes of what lies on the device."""

    def crop(corner: Vec3) -> Array:
        return np.asarray(device.get(out[box(len(out), corner)]), np.float32)

    return crop


def cudnn_entries(given: Input, terms: Terms) -> Iterator[Entry]:
    """Every plan that cuDNN proposes, or the first; its naive one only where it is alone."""
    shape, weights, device = given.shape, given.weights, terms.device
    assert isinstance(shape, ConvShape)
    assert weights is not None
    dtype = np.float16 if shape.itemsize == 2 else np.float32
    steps = prod(shape.in_shape[1:]), prod(shape.out_shape[1:])
    problem = Convolution(shape.batch, shape.fin, shape.fout, shape.n, shape.k, shape.precision, *steps, None)
    with terms.spent.on("cuDNN's plans"):
        plans = list(islice(device.libraries.convolutions(problem), terms.most_plans))
    terms.plans = len(plans)
    with terms.spent.on("inputs"):
        kernels = device.put(np.ascontiguousarray(weights.weight.transpose(0, 2, 3, 4, 1), dtype), "weights for cuDNN")
        bias = device.put(weights.bias, "biases for cuDNN")
        out = device.view(device.allocate(shape.out_bytes, "the output of cuDNN"), shape.out_shape, dtype)
        quick = [plan for plan in plans if not is_naive(plan)] or plans
        fitting = [plan for plan in quick if terms.fits(f"cuDNN {plan.name}", plan.workspace_bytes)]
        most = max((plan.workspace_bytes for plan in fitting), default=0)
        workspace = device.allocate(most, "the workspace of cuDNN") if most else None

    def poison() -> None:
        device.synchronize()
        out.fill(np.nan)
        device.synchronize()

    for plan in fitting:

        def run(plan: Any = plan) -> None:
            plan.run(given.device, kernels, bias, out, workspace)

        yield Entry(
            f"cuDNN {plan.name}", shape.precision, "", shape, given, run, cropped(out, device), terms.clock, poison,
            scratch_bytes=plan.workspace_bytes,
        )  # fmt: skip


def copied_entry(given: Input, entry: Entry, out: Any, device: Device) -> Entry:
    """The same from an array of the host to an array of the host, by the host's clock, as who calls it once sees it."""
    x = np.ascontiguousarray(device.get(given.device))
    found: list[Any] = [None]

    def run() -> None:
        device.copy_async(given.device, x, device.stream)
        entry.run()
        found[0] = device.get(out)

    def crop(corner: Vec3) -> Array:
        return np.asarray(found[0][box(len(out), corner)], np.float32)

    variant = f"{entry.variant}, with copies".removeprefix(", ")
    return replace(entry, variant=variant, run=run, crop=crop, clock=WallClock(), work=(), seconds=[])
