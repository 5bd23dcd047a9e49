"""The request for a plan: a network, its output, and what may be used to compute it, in one frozen object.

A planner changes a request with `dataclasses.replace` where it asks for something else, such as a part of the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from znnpy.costs.model import Rates, assumed_rates
from znnpy.graph_columns import Area
from znnpy.kernels.contract import Primitive, device_of
from znnpy.kernels.table import IN_HOST_RAM, TABLE, DividedPrimitive
from znnpy.machine import Limits, Machine
from znnpy.network import Network
from znnpy.option_values import AskedMode, Cover, DeviceKind, RigorLevel
from znnpy.planner.layer_options import OptionTable
from znnpy.planner.memory import CONTEXT_BYTES, baseline_bytes, context_bytes
from znnpy.shapes import Precision, Vec3, cpu_precision

KnownRates = Mapping[DeviceKind, Rates]  # the CPU's are for all threads that a run may have


@dataclass(frozen=True, slots=True)
class Target:
    """The devices that a plan is for.

    device         where all layers run, or in modes of two devices the GPU
    devices        how many equal GPUs compute together
    precision      the least precision that will do
    context_bytes  what CUDA took of the GPU when it was opened; the planner adds a margin for CUDA's libraries
    mode           how the devices share the work; "auto": whichever is the fastest in a long run
    """

    machine: Machine
    device: DeviceKind = "cpu"
    devices: int = 1
    precision: Precision = "fp32"
    context_bytes: int = CONTEXT_BYTES
    mode: AskedMode = "auto"

    @property
    def cpu_precision(self) -> Precision:
        """The precision in which a CPU computes: fp32 where that of a GPU is asked for."""
        return cpu_precision(self.precision)

    @property
    def device_precision(self) -> Precision:
        """The precision in which the device computes."""
        return self.precision if self.device == "gpu" else self.cpu_precision

    @property
    def cuda_bytes(self) -> int:
        """Bytes of a GPU that CUDA and its libraries will take; 0 on a CPU."""
        return context_bytes(self.context_bytes) if self.device == "gpu" else 0


@dataclass(frozen=True, slots=True)
class Constraints:
    """The caller's restrictions of the search.

    patch        the output patch, a multiple of the pooling period
    only         names of primitives; where one of them applies to a layer no other is considered
    cover        columns alone or patches alone; None: either
    depth_first  False: all fragments of a pooling go through each layer before any goes through the next
    """

    patch: Vec3 | None = None
    only: tuple[str, ...] = ()
    cover: Cover | None = None
    depth_first: bool = True

    def only_on(self, device: DeviceKind) -> Constraints:
        """Return the same constraints with the primitives of one device alone."""
        return replace(self, only=tuple(name for name in self.only if device_of(name) == device))


@dataclass(frozen=True, slots=True)
class Rigor:
    """How much is measured before a plan is chosen, and within how many seconds."""

    level: RigorLevel = "estimate"
    seconds: float = inf


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The request for a plan.

    output        voxels (z, y, x) of the dense output
    itemsize_in   bytes per voxel of the volume as stored; itemsize_out: bytes per value of the output
    baseline      bytes of the process without the run
    area          part of a volume, for a graph that is computed whole
    masks         count masks of the input voxels that are not finite; needed to run with NaN allowed
    kinds         find the best plan of every other kind too, and why it is not taken; this needs up to twice the time
    baselines     find the best patches by schemes that no session runs too (`schemes`)
    """

    network: Network
    output: Vec3
    limits: Limits
    target: Target
    itemsize_in: int = 1
    itemsize_out: int = 4
    constraints: Constraints = field(default_factory=Constraints)
    baseline: int = field(default_factory=baseline_bytes)
    masks: bool = False
    area: Area | None = None
    rigor: Rigor = field(default_factory=Rigor)
    kinds: bool = False
    baselines: bool = False

    @property
    def itemsizes(self) -> tuple[int, int]:
        """Bytes per voxel of the volume and per value of the output."""
        return self.itemsize_in, self.itemsize_out

    def on(self, device: DeviceKind) -> PlanRequest:
        """Return the request for a plan of one kind of device alone, with the primitives that are meant for it."""
        target, constraints = replace(self.target, device=device), self.constraints.only_on(device)
        return replace(self.without_alternatives(), target=target, constraints=constraints)

    def without_alternatives(self) -> PlanRequest:
        """Return the same request for one plan alone."""
        return replace(self, kinds=False, baselines=False)

    def on_one_device(self) -> PlanRequest:
        """Return the request for one device of the target by itself."""
        return replace(self.on_equal_devices(), target=replace(self.target, devices=1, mode=self.target.device))

    def on_equal_devices(self) -> PlanRequest:
        """Return the request for the target's devices of one kind, with the primitives that are meant for them."""
        target = self.target
        if target.mode != "side-by-side":
            return self
        return replace(self, constraints=self.constraints.only_on(target.device))


@dataclass(frozen=True, slots=True)
class CostModel:
    """The primitives to choose from, and how fast each device runs them.

    rates        by device; a device that is missing is assumed from its machine
    table        all primitives
    in_host_ram  primitives of the GPU for tensors in host memory
    """

    rates: KnownRates = field(default_factory=dict)
    table: tuple[Primitive, ...] = TABLE
    in_host_ram: tuple[DividedPrimitive, ...] = IN_HOST_RAM

    def slowed(self, device: DeviceKind, by: float) -> CostModel:
        """Return the costs where one device takes so many times as long, if its rates are known."""
        rates = self.rates.get(device)
        return self if rates is None else replace(self, rates={**self.rates, device: rates.slowed(by)})

    def options(self, request: PlanRequest) -> OptionTable:
        """Return what may run each layer on the request's device; it depends on no limit but the threads."""
        target, threads = request.target, request.limits.threads
        device = target.device
        rates = self.rates.get(device) or assumed_rates(target.machine, threads, device)
        there = tuple(primitive for primitive in self.table if device_of(primitive.name) == device)
        return OptionTable(there, target.machine, threads, rates, frozenset(request.constraints.only))
