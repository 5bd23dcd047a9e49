"""A session of a graph: a plan with its arena, prepared weights and kept planes, which turns input into output.

A step runs the operations in the order of the network's layers, each for the planes between the frontiers before and
after it. A tensor that keeps planes lies in the arena with a copy of these planes beside it, or wholly beside the
arena, where its planes are moved to the front when there is no room behind them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from znnpy.column_planes import ColumnPlanes, StepPlanes
from znnpy.errors import ValuesOverflowError
from znnpy.geometry import Interval
from znnpy.graph_columns import GraphStep
from znnpy.graph_operations import Operation, Region, box_of, input_region, voxels_of
from znnpy.kernels.aligned import aligned_bytes, touch
from znnpy.kernels.contract import ConvWeights, Primitive
from znnpy.kernels.dtypes import kept_dtype
from znnpy.kernels.table import TABLE, find
from znnpy.kernels.thread_pool import ThreadPool, min_chunk
from znnpy.layer_shapes import LayerShape
from znnpy.network import Network
from znnpy.patches import Box
from znnpy.planner.graph_tilings import COPIED, GraphTiling
from znnpy.planner.memory import BUFFERS
from znnpy.planner.plan import Choice, Plan
from znnpy.run.arena import Arena, host_arena
from znnpy.run.backend import UNTRACED, Voxels
from znnpy.run.voxels import load_voxels, store_voxels
from znnpy.shapes import turn, turned_back

if TYPE_CHECKING:
    from znnpy.run.trace import Spans

Array = npt.NDArray[Any]  # float32, or bfloat16 in bf16

KEPT_STEPS = 32  # shapes of an operation whose steps are kept: columns away from the faces have few


class _Tensor:
    """The planes of one tensor that are in memory, (planes, y, x, maps)."""

    def __init__(self, tiling: GraphTiling, tensor: int, maps: int) -> None:
        self.storage = tiling.storage(tensor)
        self.maps = maps
        self.nbytes = tiling.beside(tensor) * tiling.plane_bytes(tensor)
        self.dtype = kept_dtype(tiling.graph.precision)
        self.beside: Array = np.empty(0, self.dtype)  # what stays from step to step
        self.block: Array = np.empty(0, self.dtype)  # where the planes of a step lie
        self.held = Interval(0, 0)
        self.planes: Array = np.empty((0, 0, 0, maps), self.dtype)  # those of `held`
        self._size = (0, 0)  # y, x
        self._first = 0  # plane at the front of a resident block

    def begin(self, size: tuple[int, int], first: int, lacking: int) -> None:
        """Prepare for a column in which the tensor has `size` voxels across, and begins with plane `first`.

        lacking  planes that the first step needs and does not compute, since the column begins in its midst: zeros
        """
        self._size, self._first = size, first
        self.held = Interval(first, first)
        kept = self.beside if self.storage == "carried" else self.block
        kept[: lacking * size[0] * size[1] * self.maps] = 0

    def advance(self, held: Interval, new: Interval, pool: ThreadPool) -> None:
        """Make room for the planes of a step; those that were kept are in front of the new ones."""
        plane = self._size[0] * self._size[1] * self.maps
        kept = max(0, new.lo - held.lo)
        if self.storage == "resident":
            if (held.hi - self._first) * plane > self.block.size:
                start = held.lo - self._first
                _move(self.block[: kept * plane], self.block[start * plane : (start + kept) * plane], pool)
                self._first = held.lo
            offset = held.lo - self._first
        else:
            offset = 0
            if kept:
                _move(self.block[: kept * plane], self.beside[: kept * plane], pool)
        self.held = held
        part = self.block[offset * plane : (offset + held.size) * plane]
        self.planes = part.reshape(held.size, *self._size, self.maps)

    def keep(self, first: int, pool: ThreadPool) -> None:
        """Save the planes from `first` on for the next step, if they would be lost."""
        if self.storage == "carried" and first < self.held.hi:
            kept = self.planes[max(0, first - self.held.lo) :]
            _move(self.beside[: kept.size], kept.reshape(-1), pool)


def _move(target: Array, source: Array, pool: ThreadPool) -> None:
    """Copy with all threads; where the two overlap, `target` begins before `source`."""
    overlap = np.may_share_memory(target, source)
    if overlap:
        distance = (source.ctypes.data - target.ctypes.data) // source.itemsize
        for first in range(0, target.size, distance) if distance else ():  # parts that do not overlap their sources
            end = min(first + distance, target.size)
            _move(target[first:end], source[first:end], pool)
        return

    def piece(lo: int, hi: int, worker: int) -> None:
        del worker
        target[lo:hi] = source[lo:hi]

    pool.each(piece, target.size, least=min_chunk(target.nbytes, max(1, target.size)))


@dataclass(slots=True)
class _Bound:
    """One operation with its prepared weights."""

    operation: Operation
    choice: Choice
    primitive: Primitive
    resident: Any
    scratch: Mapping[str, Any]
    steps: OrderedDict[LayerShape, tuple[Any, Mapping[str, Any]]]  # the latest and their scratch, by shape
    name: str  # in traces


class GraphSession:
    """Runs the steps of one plan of a graph on a processor; see `Session`."""

    max_in_flight = 0

    def __init__(
        self,
        plan: Plan,
        network: Network,
        weights: Sequence[ConvWeights],
        pool: ThreadPool,
        table: tuple[Primitive, ...] = TABLE,
        *,
        trace: Spans | None = None,
        lane: str | None = None,
        prepared: Callable[[int], None] | None = None,
    ) -> None:
        self.plan, self.network, self.pool = plan, network, pool
        self.written = [0] * len(plan.choices)
        self.idle_seconds: dict[str, float] = {}
        self._weights, self._table, self._trace, self._lane, self._prepared = weights, table, trace, lane, prepared
        self._tiling = GraphTiling(plan.graph_cover(network))
        self._graph = self._tiling.graph
        self._operations = self._graph.computing(choice.shape for choice in plan.choices)
        self._members: tuple[tuple[_Bound, ...], ...] = ()  # the operations with the weights of each member
        self._bound: tuple[_Bound, ...] = ()  # those of the member that is computed
        self._tensors: dict[int, _Tensor] = {}
        self._across: tuple[tuple[Interval, ...], tuple[Interval, ...]] = ((), ())
        self._steps = 0

    def __enter__(self) -> Self:
        each = len(self.network.weighted)
        prepared = [
            self._with_weights(self._weights[member * each : (member + 1) * each])
            for member in range(self.network.members)
        ]
        arena = host_arena(self._block(self.plan.memory.last.arena), self.plan.stages[0].tensors)
        self._members = tuple(
            tuple(replace(bound, scratch=arena.scratch(index)) for index, bound in enumerate(some)) for some in prepared
        )
        self._bound = self._members[0]
        for tensor in self._tiling.stored:
            self._tensors[tensor] = self._allocated(tensor, arena)
        return self

    def _with_weights(self, weights: Sequence[ConvWeights]) -> list[_Bound]:
        """Return the operations with their weights prepared, and no scratch yet."""
        graph, prepared = self._graph, []
        for operation, choice in zip(self._operations, self.plan.choices, strict=True):
            primitive = find(choice.primitive, self._table)
            own = graph.lowered.weights(operation.layer, weights, graph.axis)
            resident = primitive.prepare(own, choice.variant, self.pool)
            del own  # of one layer at a time
            name = _name(choice, graph.network)
            prepared.append(_Bound(operation, choice, primitive, resident, {}, OrderedDict(), name))
        return prepared

    def _allocated(self, tensor: int, arena: Arena) -> _Tensor:
        found = _Tensor(self._tiling, tensor, self._graph.network.maps[tensor])
        beside = self._block(found.nbytes).view(found.dtype)
        if found.storage == "resident":
            found.block = beside
        else:
            nbytes = self._tiling.held(tensor) * self._tiling.plane_bytes(tensor)
            found.block, found.beside = (
                arena.tensor(f"x{tensor}", (nbytes // found.dtype.itemsize,), found.dtype),
                beside,
            )
        return found

    def _block(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Allocate memory and touch it, so that a run neither waits for memory nor fails for lack of it later."""
        block = aligned_bytes(nbytes)
        touch(block, self.pool, self._prepared)
        return block

    def __exit__(self, *cause: Any) -> None:
        self._members, self._bound, self._tensors = (), (), {}

    def buffers(
        self, raw: np.dtype[Any], out: np.dtype[Any], *, reads: int, writes: int
    ) -> tuple[Iterable[Voxels], Iterable[Voxels]]:
        """Return arrays for `submit` of these dtypes; steps use their first voxels."""
        del reads, writes  # pages that are never written to cost nothing
        network, plan = self.network, self.plan
        raws = [np.empty((network.input_channels, *plan.patch_in), raw) for _ in range(BUFFERS)]
        return raws, [np.empty(self._tiling.cover.values, out) for _ in range(BUFFERS)]

    def submit(self, raw: Voxels, out: Voxels | None, *, begins: bool = True, step: object | None = None) -> None:
        """Compute one step of a column, or one patch.

        raw     (c, z, y, x) of any real dtype, what the step reads; read only.
        out     float32, float16 or uint8 (`round(255 * clip(x, 0, 1))`), C order; its first values are overwritten with
                what the step gives, one output after the other, each (maps, z, y, x). None in the first steps of a
                column, which give no output.
        begins  the first step of a column; every patch is one.
        step    `Patch.step` of the plan's cover, a GraphStep.

        ValuesOverflowError names the node whose result is not finite.
        """
        assert isinstance(step, GraphStep), "patches of a graph say what is computed"
        column = self._graph.planes(step.begin[0], step.end[0], step.thick)

        def load(new: Array) -> None:
            load_voxels(raw.transpose(self._axes), new, self.network.normalise, self.pool)

        self._computed(step, load, begins=begins)
        if out is not None:
            with self.span("store"):
                self._store(column.outputs(step.number), step, out.reshape(-1))
        self._steps += 1

    def image(self, load: Callable[[Array], None], member: int = 0) -> Array:
        """Compute a plan of one patch, and return its output (z, y, x, maps), turned, which the next call overwrites.

        load    writes the input (z, y, x, c), turned
        member  of an ensemble, whose weights are taken
        """
        self._bound = self._members[member]
        (column,) = self._tiling.cover
        (patch,) = column.steps
        step = patch.step
        assert isinstance(step, GraphStep), "patches of a graph say what is computed"
        planes = self._computed(step, load, begins=True)
        self._steps += 1
        tensor = self._graph.network.outputs[0]
        z, y, x = self._region(tensor, planes)
        return self._view(tensor, box_of((z, y, x)))

    def _computed(self, step: GraphStep, load: Callable[[Array], None], *, begins: bool) -> StepPlanes:
        """Run the operations of a step, and return the planes of its tensors; `load` writes the new ones of the input.

        They are there until the next step.
        """
        column = self._graph.planes(step.begin[0], step.end[0], step.thick)
        if begins:
            self._begin(step, column)
        planes = column.step(step.number)
        later = column.step(step.number + 1).held if step.number + 1 < column.steps else None
        self._advance(0, planes)
        if planes.new[0].size:
            with self.span("load"):
                load(self._tensors[0].planes[planes.new[0].lo - planes.held[0].lo :])
        last_reads = self._last_reads
        for index, bound in enumerate(self._bound):
            for tensor in bound.operation.tensors:
                self._advance(tensor, planes)
            region = self._region(bound.operation.tensor, planes)
            if all(interval.size for interval in region):  # a column may need none of it, but other columns do
                self._run(index, bound, planes, region)
            if later is not None:
                for tensor in last_reads[index]:
                    self._tensors[tensor].keep(later[tensor].lo, self.pool)
        return planes

    @cached_property
    def _last_reads(self) -> list[list[int]]:
        """The tensors that no later operation of a step reads; outputs come with the last."""
        found: list[list[int]] = [[] for _ in self._operations]
        for tensor, (_, last) in self._graph.spans_of(self._operations).items():
            found[min(max(0, last - 1), len(found) - 1)].append(tensor)
        return found

    @property
    def _axes(self) -> tuple[int, ...]:
        """The order of the axes of an array (maps, z, y, x) that puts the axis of columns first."""
        return (0, *(1 + axis for axis in turn(self._graph.axis)))

    def _begin(self, step: GraphStep, column: ColumnPlanes) -> None:
        """Prepare for the first step of a column, or of a part of it."""
        planes = column.step(step.number)
        y, x = (self._graph.regions(along, step.begin[along], step.end[along]) for along in (1, 2))
        self._across = y, x
        for tensor, held in self._tensors.items():
            size, first = (y[tensor].size, x[tensor].size), planes.held[tensor].lo
            if step.number == 0:
                held.begin(size, column.region[tensor].lo, 0)
            else:
                held.begin(size, first, planes.new[tensor].lo - first)

    def _advance(self, tensor: int, planes: StepPlanes) -> None:
        self._tensors[tensor].advance(planes.held[tensor], planes.new[tensor], self.pool)

    def _region(self, tensor: int, planes: StepPlanes) -> Region:
        """Return the voxels of a tensor that a step computes."""
        return planes.new[tensor], self._across[0][tensor], self._across[1][tensor]

    def _run(self, index: int, bound: _Bound, planes: StepPlanes, region: Region) -> None:
        """Compute the new planes of one operation."""
        operation, tensor = bound.operation, bound.operation.tensor
        windows = None if operation.pool is None else self._region(operation.tensors[1], planes)
        shape = self._graph.shape_of(operation, region, windows)
        bind = bound.steps.pop(shape, None) or self._step(bound, shape)
        bound.steps[shape] = bind
        if len(bound.steps) > KEPT_STEPS:
            bound.steps.popitem(last=False)
        there = input_region(self._graph.geometry, operation, region)
        inputs = [self._view(read.tensor, voxels_of(read, there)) for read in operation.reads]
        if (addend := operation.addend) is not None:
            inputs.append(self._view(addend.tensor, voxels_of(addend, region)))
        out, *more = (
            self._tensors[one].planes[planes.new[one].lo - planes.held[one].lo :] for one in operation.tensors
        )
        with self.span(bound.name, layer=operation.layer):
            try:
                primitive_step, scratch = bind
                if shape.kind == "maxout":
                    primitive_step.run(_contiguous(inputs[0], bound.scratch)[None], out[None], scratch)
                else:
                    primitive_step.run(inputs, out, scratch, *more)
            except ValuesOverflowError as error:
                raise error.with_context(f"node {self._graph.network.names[tensor - 1]}") from None
        self.written[index] += prod(out.shape[:3])  # of two outputs, that which is not pooled

    def _step(self, bound: _Bound, shape: LayerShape) -> tuple[Any, Mapping[str, Any]]:
        """Return a step of an operation for one shape, with as much of its scratch as this shape needs."""
        variant = bound.choice.variant
        step = bound.primitive.bind(bound.resident, shape, variant, self.pool)
        footprint = bound.primitive.footprint(shape, variant, self.plan.compute_threads)
        needs = {one.name: one.nbytes for one in footprint.scratch}
        for name, nbytes in needs.items():
            if nbytes > len(bound.scratch[name]):
                raise RuntimeError(f"{bound.name} needs {nbytes} bytes of {name} for {shape}, more than the plan holds")
        return step, {name: bound.scratch[name][:nbytes] for name, nbytes in needs.items()}

    def _view(self, tensor: int, box: Box) -> Array:
        """Return some voxels of a tensor."""
        held = self._tensors[tensor]
        begin = (held.held.lo, self._across[0][tensor].lo, self._across[1][tensor].lo)
        z, y, x = (slice(lo - at, hi - at) for lo, hi, at in zip(box.lo, box.hi, begin, strict=True))
        return held.planes[z, y, x]

    def _store(self, given: Sequence[Interval], step: GraphStep, out: Voxels) -> None:
        """Write the outputs of a step, one after the other."""
        first = 0
        wanted = [self._graph.wanted(along, step.begin[along], step.end[along]) for along in (1, 2)]
        for number, tensor in enumerate(self._graph.network.outputs):
            region: Region = (given[number], wanted[0][number], wanted[1][number])
            z, y, x = (interval.size for interval in region)
            maps = self._graph.network.maps[tensor]
            count = maps * z * y * x
            if count:
                target = out[first : first + count].reshape(maps, *turned_back((z, y, x), self._graph.axis))
                store_voxels(self._view(tensor, box_of(region)), target.transpose(self._axes), self.pool)
            first += count

    def span(self, name: str, **facts: int) -> Any:
        if self._trace is None:
            return UNTRACED
        return self._trace.span(self._lane or "CPU", name, step=self._steps, **facts)

    def run(self, raw: Voxels, out: Voxels | None, *, begins: bool = True, step: object | None = None) -> None:
        """Compute one step: `submit` it and `wait`."""
        self.submit(raw, out, begins=begins, step=step)

    def abandon(self) -> None:
        """Do nothing: a processor does not fail alone."""

    def done(self, ticket: Any) -> bool:
        """Return True: a step is done when it was submitted."""
        del ticket
        return True

    def wait(self, ticket: Any) -> None:
        """Do nothing: a step is done when it was submitted."""
        del ticket


def _contiguous(x: Array, scratch: Mapping[str, Any]) -> Array:
    """Return an array in C order: itself, or a copy in the scratch that the plan holds for it."""
    if x.flags.c_contiguous:
        return x
    copy: Array = scratch[COPIED][: x.nbytes].view(x.dtype).reshape(x.shape)
    np.copyto(copy, x)
    return copy


def _name(choice: Choice, network: Network) -> str:
    return f"{' and '.join(network.names[one] for one in sorted(set(choice.layers)))} {choice.primitive}"
