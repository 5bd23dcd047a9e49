"""The plan of one kind of device: the tiling, the stages with a choice per layer, memory and prediction, as data.

A run has one such plan or several (`run_plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from znnpy.costs.model import unhidden_io_seconds
from znnpy.costs.two_stages import two_stage_seconds
from znnpy.graph_columns import Area, GraphCover, TurnedGraph, cover_of_window
from znnpy.kernels.contract import Variant
from znnpy.layer_shapes import LayerShape
from znnpy.machine import Limits
from znnpy.option_values import DeviceKind, Mode
from znnpy.patches import Box, Column, Cover, with_size
from znnpy.planner.described_graph import DescribedGraph
from znnpy.planner.layout import Count, Positive, sub_batch_counts
from znnpy.planner.layout import Tensor as Tensor
from znnpy.planner.memory import PINNED, StepSizes
from znnpy.planner.memory import Memory as Memory
from znnpy.shapes import Precision, Vec3, turned
from znnpy.window_cover import WindowCover

if TYPE_CHECKING:
    from znnpy.network import Network

MOST_THREADS = 2**12  # most threads of a plan: a run starts that many

Size = tuple[Positive, Positive, Positive]  # a Vec3 with no empty axis
Axis = Annotated[int, Field(ge=0, le=2)]
Seconds = Annotated[float, Field(gt=0, lt=1e12, allow_inf_nan=False)]  # 1e12: 30,000 years


def _checked_limits(limits: Limits) -> Limits:
    if limits.ram_bytes < 1 or not 1 <= limits.threads <= MOST_THREADS:
        raise ValueError(f"{limits.ram_bytes} bytes and {limits.threads} threads are no limits to run within")
    if limits.vram_bytes is not None and limits.vram_bytes < 1:
        raise ValueError(f"{limits.vram_bytes} bytes of a GPU are no limit to run within")
    return limits


@dataclass(frozen=True, slots=True)
class Choice:
    """How one layer runs, or two fused ones."""

    layers: tuple[Count, Count]  # first and last index in the network
    shape: Annotated[LayerShape, Field(discriminator="kind")]  # of the images run at a time, with the plan's axis first
    primitive: str
    version: int  # of the primitive
    device: DeviceKind
    variant: Variant
    seconds: Seconds  # of one execution, saving carried planes included
    executions: Positive  # for the whole output
    measured: bool  # seconds are measured; else estimated from work and rates
    fitted: bool  # all rates of its work are measured; else some are assumed
    resident_bytes: Count
    working_bytes: Count

    @property
    def total_seconds(self) -> float:
        """Predicted seconds for the whole output."""
        return self.executions * self.seconds

    @property
    def where(self) -> str:
        """The layers in words."""
        first, last = self.layers
        return f"layer {first}" if first == last else f"layers {first} and {last}"


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers whose tensors lie in one memory: the host's, or a GPU's."""

    device: DeviceKind  # in whose memory the tensors lie
    choices: Annotated[tuple[Choice, ...], Field(min_length=1)]
    tensors: tuple[Tensor, ...]  # in the arena of the stage
    wait_seconds: Annotated[float, Field(ge=0, lt=1e12)] = 0.0  # in each step, for what the stage before hands over


@dataclass(frozen=True, slots=True)
class Sums:
    """How the results of windows are summed up until no later window adds to them.

    dtype  of what a row of windows keeps for the next one; what is finished in a row is summed up in float32
    parts  of the output, each of which has sums of its own: windows across a boundary are computed for both
    """

    dtype: Literal["float32", "float16"] = "float32"
    parts: Positive = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of one kind of device: how it covers the output, and its layers. It needs network and weights."""

    limits: Annotated[Limits, AfterValidator(_checked_limits)]
    output: Size  # dense output it was made for
    patch_out: Size  # dense output of one step
    patch_in: Size  # what a step reads: in a column only planes that no earlier step has read
    axis: Axis  # along which columns stream; shapes of choices have it first
    column_planes: Count  # output planes of a column along the axis; 0: independent patches
    stages: Annotated[tuple[Stage, ...], Field(min_length=1, max_length=2)]
    memory: Memory  # for one device
    itemsize_in: Positive  # bytes per voxel of the volume as stored
    itemsize_out: Positive
    columns: Positive  # that cover the output; a patch is a column of one step
    overlap: bool = False  # the first stage computes a step while the second is at the step before
    feed_threads: Annotated[int, Field(ge=0)] = 0  # threads within the limit that feed the GPU and compute nothing
    preparing_seconds: Annotated[float, Field(ge=0, lt=1e12)] = 0.0  # before the first step, to touch memory
    preparing_measured: bool = False  # from a rate measured on the machine; else assumed
    area: Area | None = None  # what a graph that is computed whole was planned for
    work_ratio: Annotated[float, Field(gt=0, lt=1e12)] | None = None  # of such a graph: `waste`
    graph: DescribedGraph | None = None  # of such a graph, to print the plan with
    sums: Sums | None = None  # of windows that are blended; `patch_out` and `patch_in` are then those of a window

    def __post_init__(self) -> None:
        if self.device == "gpu" and self.limits.vram_bytes is None:
            raise ValueError("its layers run on a GPU, and it has no limit for the memory there")
        if self.feed_threads >= self.limits.threads:
            raise ValueError(f"{self.feed_threads} of {self.limits.threads} threads feed the GPU, and none computes")
        if (self.area is None) != (self.graph is None):
            raise ValueError("a plan of a graph has both an area and a description of the graph")
        if self.sums is not None and self.area is None:
            raise ValueError("windows are blended in an area, and the plan has none")
        devices, promised = ([stage.device for stage in stages] for stages in (self.stages, self.memory.stages))
        if devices != promised:
            raise ValueError(f"its stages run on {devices}, and memory is promised for stages on {promised}")
        if len(self.stages) > 1 or self.overlap:
            self._check_stages()

    def _check_stages(self) -> None:
        """Raise ValueError for two stages that no session runs."""
        if tuple(stage.device for stage in self.stages) != ("cpu", "gpu"):
            devices = " and ".join(stage.device.upper() for stage in self.stages)
            raise ValueError(
                f"{len(self.stages)} stages are in the memory of {devices}: two stages are one in the memory of the "
                "host and one on a GPU"
            )
        front = self.stages[0].choices
        if self.overlap and any(choice.device != "cpu" for choice in front):
            raise ValueError("the GPU computes layers of the first stage, so it cannot be at the step before meanwhile")
        if any(parts > 1 for parts in self.sub_batches[: len(front)]):
            raise ValueError("layers of the first stage take all images at a time")
        if self.precision == "fp16":
            raise ValueError("what is handed over is in float32, and the plan is in fp16: choose tf32")

    @property
    def device(self) -> DeviceKind:
        """The device of the last stage, which gives the output."""
        return self.memory.device

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The choices of all stages, in the order of the layers."""
        return tuple(choice for stage in self.stages for choice in stage.choices)

    @property
    def by_node(self) -> tuple[Choice | None, ...]:
        """The choice that computes each node of a graph behind its input; None: that of the node before does."""
        each = ((choice,) if choice.layers[0] == choice.layers[1] else (choice, None) for choice in self.choices)
        return tuple(one for some in each for one in some)

    @property
    def offloaded(self) -> int:
        """Number of leading choices that are a stage of their own, with tensors in the memory of the host."""
        return len(self.stages[0].choices) if len(self.stages) > 1 else 0

    @property
    def precision(self) -> Precision:
        """The precision of all layers, except offloaded ones on the CPU, which are in fp32."""
        return self.choices[-1].shape.precision

    @property
    def handover_bytes(self) -> int:
        """Bytes that the first of two stages hands over in a step."""
        return self.stages[0].choices[-1].shape.out_bytes if len(self.stages) > 1 else 0

    @property
    def streams(self) -> bool:
        """Return whether columns stream: every layer keeps the last planes of its input for the next step."""
        return self.column_planes > 0

    @property
    def sub_batches(self) -> tuple[int, ...]:
        """How often each choice runs in a step: more than once if it runs a part of the fragments at a time."""
        return sub_batch_counts([choice.shape for choice in self.choices])

    @property
    def compute_threads(self) -> int:
        """Number of threads that compute on the CPU."""
        return self.limits.threads - self.feed_threads

    @property
    def seconds_per_step(self) -> float:
        """Predicted seconds of one step in which every layer runs: of one patch where nothing is carried."""
        return max(self.stage_seconds) if self.overlap else sum(self.stage_seconds)

    @property
    def stage_seconds(self) -> tuple[float, ...]:
        """Predicted seconds of each stage in such a step, with its wait for what is handed over."""
        parts = iter(self.sub_batches)
        return tuple(
            stage.wait_seconds
            + sum(times * choice.seconds for choice, times in zip(stage.choices, parts, strict=False))
            for stage in self.stages
        )

    def warmup_work(self, network: Network) -> tuple[float, ...]:
        """Return, for each step of a column before its output begins, its share of the seconds of a full step.

        A layer runs from the first step in which it computes a plane that the output depends on.
        """
        margins = [network.margins[choice.layers[1] + 1][self.axis] for choice in self.choices]
        steps = self.cover(network).ahead
        thick = self.patch_out[self.axis]
        whole = sum(times * choice.seconds for times, choice in zip(self.sub_batches, self.choices, strict=True))
        return tuple(
            sum(
                times * choice.seconds
                for times, choice, margin in zip(self.sub_batches, self.choices, margins, strict=True)
                if before * thick < margin + thick
            )
            / whole
            for before in range(steps, 0, -1)
        )

    @property
    def mode(self) -> Mode:
        """On which devices layers run, and how."""
        if len(self.stages) > 1:
            return "cpu-to-gpu" if self.overlap else "gpu-host"
        return self.device

    @property
    def seconds(self) -> float:
        """Predicted seconds of one device for the whole output: `seconds_on` one."""
        return self.seconds_on(1)

    def seconds_on(self, devices: int) -> float:
        """Return the predicted seconds of so many equal devices for the whole output, until the last one ends.

        They include preparing, and the first read and the last write, which nothing hides.
        """
        return self.preparing_seconds + self.seconds_for(ceil(self.columns / devices) / self.columns, devices)

    @property
    def seconds_to_begin(self) -> float:
        """Predicted seconds of a column before its output begins."""
        if not self.streams:
            return 0.0
        whole, rest = divmod(self.output[self.axis], self.column_planes)
        thick, row = self.patch_out[self.axis], whole + (rest > 0)  # columns behind each other
        steps = whole * (self.column_planes // thick) - (-rest // thick)
        spent = sum(choice.total_seconds for choice in self.choices) * row / self.columns
        return max(0.0, spent - steps * self.seconds_per_step) / row

    def seconds_for(self, share: float, devices: int = 1) -> float:
        """Return the predicted seconds of one of so many devices for a share of the output."""
        first, last = self.choices[0].shape, self.choices[-1].shape
        raw_bytes = self.itemsize_in * first.in_shape[4] * prod(self.patch_in)
        out_bytes = self.itemsize_out * last.out_shape[4] * prod(self.patch_out)
        edges = first.batch * (raw_bytes + min(devices, self.columns) * out_bytes)  # one thread writes all last patches
        if len(self.stages) == 1:
            return share * sum(choice.total_seconds for choice in self.choices) + unhidden_io_seconds(
                self.device, edges
            )
        ran = [
            (c.executions // times, times * c.seconds) for times, c in zip(self.sub_batches, self.choices, strict=True)
        ]
        front, back, wait = ran[: self.offloaded], ran[self.offloaded :], self.stages[1].wait_seconds
        spent = two_stage_seconds(front, back, wait, self.columns, overlap=self.overlap)
        return spent + unhidden_io_seconds("gpu", edges)

    @property
    def waste(self) -> float:
        """Work done over the work that no border would need."""
        if self.work_ratio is not None:
            return self.work_ratio
        return waste(self.output, [(choice.shape, choice.seconds, choice.executions) for choice in self.choices])

    def for_output(self, output: Vec3, network: Network) -> Plan:
        """Return this plan for an output of another size."""
        here = replace(self, output=output)
        cover, ahead = here.cover(network), [margin[self.axis] for margin in network.margins]
        parts = iter(self.sub_batches)

        def covering(choice: Choice) -> Choice:
            return replace(choice, executions=next(parts) * cover.steps(ahead[choice.layers[1] + 1]))

        return replace(here.with_choices(covering), columns=len(cover))

    def with_transfers(self, network: Network, *, masks: bool, reads: int = PINNED, writes: int = PINNED) -> Plan:
        """Return this plan with the memory for patches in transfer of a run of so many steps; see `StepSizes`."""
        step = StepSizes(network, self.patch_in, self.patch_out, (self.itemsize_in, self.itemsize_out))
        handed_over = self.handover_bytes // self.sub_batches[self.offloaded] if self.offloaded else 0
        reading, writing, staging = step.transfer_bytes(
            self.device, masks=masks, reads=reads, writes=writes, handed_over=handed_over
        )
        return replace(self, memory=replace(self.memory, reading=reading, writing=writing, staging=staging))

    def covering(self, output: Vec3, network: Network, *, masks: bool) -> Plan:
        """Return this plan for an output of another size, with the memory that its patches in transfer take."""
        if self.area is not None:
            return self
        here = self.for_output(output, network)
        cover = here.cover(network)
        return here.with_transfers(network, masks=masks, reads=cover.steps(cover.margin), writes=cover.steps(0))

    def in_columns_of(self, planes: int) -> Plan:
        """Return this plan with columns of so many output planes, rounded up to whole steps; patches stay patches."""
        step = self.patch_out[self.axis]
        return replace(self, column_planes=ceil(planes / step) * step) if self.streams else self

    def layer_shapes(self, network: Network) -> tuple[LayerShape, ...]:
        """Return the shape of every layer in a step, fused or not, with the plan's axis first; ShapeError: none fit."""
        batches = [c.shape.batch for c in self.choices for _ in c.layers[: 1 + (c.layers[0] < c.layers[1])]]
        batches += [batches[-1]] * len(network.layers)  # a damaged plan may lack choices for the last layers
        return network.turned(self.axis).layer_shapes(
            turned(self.patch_out, self.axis), batches=batches, streams=self.streams, precision=self.precision
        )

    def with_choices(self, change: Callable[[Choice], Choice]) -> Plan:
        """Return the same plan with every choice changed, in order."""
        stages = (replace(stage, choices=tuple(map(change, stage.choices))) for stage in self.stages)
        return replace(self, stages=tuple(stages))

    def work_items(self, network: Network) -> Cover | GraphCover | WindowCover:
        """Return the columns that cover the output, of a chain or of a graph, or the rows of windows."""
        if self.sums is not None:
            return self.window_cover(network)
        return self.cover(network) if self.area is None else self.graph_cover(network)

    def cover(self, network: Network) -> Cover:
        """Return the columns that cover the output of a network that slides over a volume."""
        margin = network.field_of_view[self.axis] - 1
        return Cover(self.output, self.patch_out, self.axis, self.column_planes, margin)

    def window_cover(self, network: Network) -> WindowCover:
        """Return the windows whose results are blended."""
        assert self.area is not None, "plans of windows have it"
        assert self.sums is not None, "plans of windows have them"
        assert network.windows is not None, "networks that are computed in windows have them"
        return WindowCover(network.windows, self.area.volume, self.area.region, self.axis, self.sums.parts)

    def graph_cover(self, network: Network) -> GraphCover:
        """Return the columns that cover the output of a graph that is computed whole, or the patch that is a window."""
        assert self.area is not None, "plans of such graphs have it"
        if self.sums is not None:
            return cover_of_window(network, self.axis, self.precision)
        graph = TurnedGraph.of(network, self.area.volume, self.axis, self.precision)
        voxels = turned(self.patch_out, self.axis)
        patch = tuple(size // each for size, each in zip(voxels, graph.voxels, strict=True))
        column = self.column_planes // graph.voxels[0]
        return GraphCover(graph, (patch[0], patch[1], patch[2]), column, self.area.region, self.area.others)

    def columns_in(self, box: Box, network: Network) -> tuple[Column, ...]:
        """Return the columns that cover a part of the output."""
        columns = replace(self, output=box.size).cover(network)
        return tuple(column.shifted(box.lo) for column in columns)

    @property
    def voxels_per_second(self) -> float:
        """Predicted output voxels written per second, last partial patches included."""
        return float(prod(self.output)) / self.seconds


def waste(output: Vec3, layers: Sequence[tuple[LayerShape, float, int]]) -> float:
    """Return the work done relative to the work without borders: how often an average output value is computed.

    layers  shape, seconds and executions of every layer, weighted by the seconds. Without borders every layer computes
            one value per output voxel and map, spread over its fragments.
    """
    done = sum(seconds * runs for _, seconds, runs in layers)
    needed = sum(seconds * prod(output) / prod(shape.out_shape[:4]) for shape, seconds, _ in layers)
    return done / needed if needed else 1.0


def patch_in(network: Network, out: Vec3, axis: int, *, streams: bool) -> Vec3:
    """Return what a step with the dense output `out` reads; in a column along `axis` only the new planes."""
    grown = network.patch_in(out)
    return with_size(grown, axis, out[axis]) if streams else grown
