"""The plan of a run: its workers, what they take together, and the plans that lost; it prints and saves itself.

A worker is one or several equal devices that run one plan. A run has one worker, or two: GPUs, and the CPU side by
side with them. One worker takes columns of its plan; two share cells of the output (`co_execution`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter

import znnpy
from znnpy.graph_columns import GraphCover
from znnpy.json_file import JsonFile
from znnpy.machine import Limits, Machine
from znnpy.messages import excerpt
from znnpy.option_values import DeviceKind, Mode, RigorLevel
from znnpy.patches import Cover
from znnpy.planner.co_execution import CoExecution
from znnpy.planner.layout import Count, Positive
from znnpy.planner.memory import Memory, run_memory
from znnpy.planner.plan import Axis, Choice, Plan, Seconds, Size
from znnpy.shapes import Precision, Vec3, text
from znnpy.window_cover import WindowCover

if TYPE_CHECKING:
    from znnpy.network import Network

FORMAT = 13  # version of plan.json
AGAIN = "make it again with `znnpy plan NETWORK --out plan.json`"


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """The best plan with another patch shape, or with another way to cover the output."""

    patch_out: Size
    axis: Axis
    column_planes: Count
    sub_batches: Annotated[tuple[Positive, ...], Field(min_length=1)]  # as `Plan.sub_batches`
    voxels_per_second: Seconds
    waste: Annotated[float, Field(gt=0, allow_inf_nan=False)]  # work done, relative to the work without borders
    over_bytes: Count  # of the process above its limit; if both are 0, it fits and is slower
    over_vram_bytes: Count  # of the GPU above its limit


@dataclass(frozen=True, slots=True)
class Alternative:
    """The best plan of another kind: columns or patches, depth first or not, or on another device."""

    device: DeviceKind
    best: RunnerUp
    ram_bytes: Count  # of the process; above its limit if `best` does not fit
    vram_bytes: Count
    reason: str  # why it was not taken
    scheme: str = ""  # description of patches that no session runs (`baselines`)


@dataclass(frozen=True, slots=True)
class PlannedWorker:
    """One or several equal devices that run one plan."""

    plan: Plan
    devices: Annotated[int, Field(ge=1, le=1024)] = 1

    def __post_init__(self) -> None:
        if self.devices > 1 and (self.plan.device == "cpu" or self.plan.offloaded):
            raise ValueError(f"{self.devices} devices run a plan of mode {self.plan.mode}, which runs on one")


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything a run needs to know besides network, weights and volume."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)  # of its parts too

    format: int
    znnpy_version: str
    network: str  # Network.sha256
    network_name: str
    machine: str  # Machine.fingerprint of where it runs
    workers: Annotated[tuple[PlannedWorker, ...], Field(min_length=1, max_length=2)]  # GPUs before the CPU
    rigor: RigorLevel
    other: RunnerUp | None  # the best columns where patches are planned, and the best patches where columns are
    runners_up: tuple[RunnerUp, ...]
    alternatives: tuple[Alternative, ...] = ()  # if they were asked for
    made_for: str | None = None  # name of the machine it is for, if made on another
    single_device_seconds: Seconds | None = None  # of one GPU instead of several, or of all GPUs without the CPU
    inside: Annotated[float, Field(gt=0, le=1)] = 1.0  # share of the work that a mask leaves

    def __post_init__(self) -> None:
        modes = [worker.plan.mode for worker in self.workers]
        if len(modes) > 1 and modes != ["gpu", "cpu"]:
            raise ValueError(f"its workers run in modes {' and '.join(modes)}: side by side are gpu and cpu")

    def __repr__(self) -> str:
        """Return one line; `znnpy.explain` gives the whole plan as text."""
        main = self.main
        how = f"columns in steps of {text(main.patch_out)}" if main.streams else f"patches of {text(main.patch_out)}"
        if main.sums is not None:
            how = f"rows of windows of {text(main.patch_out)}"
        return (
            f"<RunPlan of {excerpt(self.network_name, 60)} for {text(self.output)} voxels: {main.columns} {how}, "
            f"{self.seconds:,.3g} s, {self.memory.peak / 2**20:,.0f} MiB, mode {self.mode}>"
        )

    @classmethod
    def of(cls, network: Network, machine: Machine, plan: Plan) -> RunPlan:
        """Return the plan of a run with one worker of one device."""
        return cls(
            format=FORMAT,
            znnpy_version=znnpy.__version__,
            network=network.sha256,
            network_name=excerpt(network.name),
            machine=machine.fingerprint,
            workers=(PlannedWorker(plan),),
            rigor="estimate",
            other=None,
            runners_up=(),
        )

    @property
    def main(self) -> Plan:
        """The plan of the first worker: of the GPUs if there are any, else of the CPU."""
        return self.workers[0].plan

    @property
    def devices(self) -> int:
        """Number of equal devices that run `main`."""
        return self.workers[0].devices

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The choices of all workers."""
        return tuple(choice for worker in self.workers for choice in worker.plan.choices)

    @property
    def fitted(self) -> bool:
        """Return whether no layer's seconds come from assumed rates."""
        return all(choice.measured or choice.fitted for choice in self.choices)

    @property
    def output(self) -> Vec3:
        """The dense output that the plan was made for."""
        return self.main.output

    @property
    def patch_out(self) -> Vec3:
        """The dense output of one step of `main`."""
        return self.main.patch_out

    @property
    def limits(self) -> Limits:
        """The limits of the whole run."""
        return self.main.limits

    @property
    def device(self) -> DeviceKind:
        """The device of `main`."""
        return self.main.device

    @property
    def precision(self) -> Precision:
        """The precision of `main`."""
        return self.main.precision

    @property
    def mode(self) -> Mode:
        """On which devices layers run, and how."""
        return self.main.mode if len(self.workers) == 1 else "side-by-side"

    @property
    def sharing(self) -> CoExecution | None:
        """How two workers share the output; None if there is one worker."""
        if len(self.workers) == 1:
            return None
        gpus, cpu = self.workers
        return CoExecution(gpus.plan, gpus.devices, cpu.plan)

    @property
    def cpu_items(self) -> int:
        """Number of cells that the CPU computes, if it is as fast as predicted; GPUs compute the others."""
        return 0 if self.sharing is None else self.sharing.cpu_items()

    @property
    def memory(self) -> Memory:
        """The promised bytes of all workers together."""
        return run_memory(self.main.memory, self.devices, [worker.plan.memory for worker in self.workers[1:]])

    @property
    def seconds(self) -> float:
        """Predicted seconds for the whole output, or what a mask leaves of it, until the last device is done."""
        whole = self.main.seconds_on(self.devices) if self.sharing is None else self.sharing.seconds()
        preparing = min(whole, self.main.preparing_seconds)
        return preparing + self.inside * (whole - preparing)

    @property
    def voxels_per_second(self) -> float:
        """Predicted output voxels written per second, last partial patches included."""
        return float(prod(self.output)) / self.seconds

    def work_items(self, network: Network) -> Cover | GraphCover | WindowCover:
        """Return the work items of a run, recorded when written: columns of one worker, or cells shared by two."""
        return self.main.work_items(network) if self.sharing is None else self.sharing.cells

    def on_devices(self, devices: int) -> RunPlan:
        """Return this run with so many equal devices that run `main`; what one device took is forgotten."""
        first, *others = self.workers
        return replace(self, workers=(replace(first, devices=devices), *others), single_device_seconds=None)

    def shared_with(self, cpu: PlannedWorker, alone: float | None) -> RunPlan:
        """Return this run of GPUs with the CPU side by side.

        alone  predicted seconds of the fastest plan without the CPU; None: they are not known
        """
        workers = (self.workers[0], cpu)
        return replace(self, workers=workers, single_device_seconds=alone, other=None, runners_up=(), alternatives=())

    def with_main(self, plan: Plan) -> RunPlan:
        """Return this run with another plan of the first worker."""
        first, *others = self.workers
        return replace(self, workers=(replace(first, plan=plan), *others))

    def with_plans(self, change: Callable[[Plan], Plan]) -> RunPlan:
        """Return the same run with the plan of every worker changed."""
        return replace(self, workers=tuple(replace(worker, plan=change(worker.plan)) for worker in self.workers))

    def to_json(self) -> str:
        return _adapter().dump_json(self, indent=1).decode() + "\n"

    @staticmethod
    def from_json(text: str) -> RunPlan:
        """Read a plan that `to_json` wrote; PlanFileError if it is damaged or of another format."""
        return _document().parsed(text)

    @staticmethod
    def load(path: Path) -> RunPlan:
        """Read the plan in a file; PlanFileError names the file."""
        return _document().load(path)


@cache
def _adapter() -> TypeAdapter[RunPlan]:
    return TypeAdapter(RunPlan)


@cache
def _document() -> JsonFile[RunPlan]:
    return JsonFile("plan file", "the plan is", FORMAT, AGAIN, "znnpy plan NETWORK --out", _adapter)
