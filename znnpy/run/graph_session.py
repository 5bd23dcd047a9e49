"""A session of a graph: a plan with its arena, prepared weights and kept planes, which turns input into output.

A step runs the operations in the order of the network's layers, each for the planes between the frontiers before and
after it (`KeptTensor`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from znnpy.column_planes import ColumnPlanes, StepPlanes
from znnpy.errors import ValuesOverflowError, VramError
from znnpy.geometry import Interval
from znnpy.graph_columns import GraphStep
from znnpy.graph_operations import Operation, Region, box_of, input_region, voxels_of
from znnpy.kernels.contract import ConvWeights, Primitive
from znnpy.kernels.table import TABLE, find
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.layer_shapes import LayerShape
from znnpy.network import Network
from znnpy.patches import Box
from znnpy.planner.graph_tilings import COPIED, GraphTiling
from znnpy.planner.plan import Choice, Plan
from znnpy.run.arena import Arena
from znnpy.run.backend import Voxels
from znnpy.run.graph_backend import Arrays, GraphBackend, GraphOnCpu
from znnpy.run.kept_tensor import Array, KeptTensor
from znnpy.shapes import turn, turned_back

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device
    from znnpy.run.trace import Spans

KEPT_STEPS = 32  # shapes of an operation whose steps are kept: columns away from the faces have few


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
    """Runs the steps of one plan of a graph on a processor or a GPU; see `Session`.

    values  that a step writes at most, where others turn the result of the network into what is written
    """

    def __init__(
        self,
        plan: Plan,
        network: Network,
        weights: Sequence[ConvWeights],
        pool: ThreadPool,
        table: tuple[Primitive, ...] = TABLE,
        *,
        device: Device | None = None,
        trace: Spans | None = None,
        lane: str | None = None,
        prepared: Callable[[int], None] | None = None,
        values: int | None = None,
    ) -> None:
        self.plan, self.network, self.pool = plan, network, pool
        self.written = [0] * len(plan.choices)
        self.idle_seconds: dict[str, float] = {}
        self._weights, self._table = weights, table
        self._tiling = GraphTiling(plan.graph_cover(network))
        self._graph = self._tiling.graph
        self._most = self._tiling.cover.values if values is None else values
        self._operations = self._graph.computing(choice.shape for choice in plan.choices)
        self._members: tuple[tuple[_Bound, ...], ...] = ()  # the operations with the weights of each member
        self._bound: tuple[_Bound, ...] = ()  # those of the member that is computed
        self._tensors: dict[int, KeptTensor] = {}
        self._across: tuple[tuple[Interval, ...], tuple[Interval, ...]] = ((), ())
        self._image: StepPlanes | None = None  # of `image`, which always computes the same
        self._image_voxels: list[int] = []  # that it writes, by choice
        self._imaged: set[int] = set()  # members whose operations have run there once, and can be recorded
        self.backend = self._backend_of(device, trace, lane, prepared)

    def _backend_of(
        self,
        device: Device | None,
        trace: Spans | None,
        lane: str | None,
        prepared: Callable[[int], None] | None,
    ) -> GraphBackend:
        plan, network = self.plan, self.network
        if plan.device == "cpu":
            return GraphOnCpu(self.pool, network.normalise, trace, lane, prepared)
        from znnpy.run.graph_gpu import GraphOnGpu  # here, since runs on the CPU need none of it

        subjects = [self._subject(operation) for operation in self._operations]
        return GraphOnGpu(plan, network, subjects, self._most, self.pool, device, trace, lane)

    def _subject(self, operation: Operation) -> str:
        """Name an operation in errors."""
        names = self._graph.network.names
        norm = "" if operation.norm is None else f" with {names[operation.norm]}"
        return f"node {names[operation.result - 1]}{norm}"

    @property
    def max_in_flight(self) -> int:
        """Steps that may be submitted and not waited for when the next is; 0: `submit` computes."""
        return self.backend.max_in_flight

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self._forget)
            stack.enter_context(self.backend)
            try:
                self._prepare()
            except VramError as error:
                clear_frames(error.__traceback__)  # who plans again with less needs what they refer to
                raise
            self._open = stack.pop_all()
        return self

    def _prepare(self) -> None:
        """Prepare the weights, and allocate everything."""
        each = len(self.network.weighted)
        prepared = [
            self._with_weights(self._weights[member * each : (member + 1) * each])
            for member in range(self.network.members)
        ]
        footprints = [
            self._tiling.footprint(bound.operation, bound.primitive, bound.choice.variant, self.plan.compute_threads)
            for bound in prepared[0]
        ]
        arena = self.backend.allocate_arena(self.plan.memory.last.arena, self.plan.stages[0].tensors, footprints)
        self._members = tuple(
            tuple(replace(bound, scratch=arena.scratch(index)) for index, bound in enumerate(some)) for some in prepared
        )
        self._bound = self._members[0]
        for tensor in (0, *(tensor for operation in self._operations for tensor in operation.tensors)):
            self._tensors[tensor] = self._allocated(tensor, arena)
        if self.plan.device == "gpu":  # kernels are compiled, and libraries plan, before the first step
            for bound in (bound for some in self._members for bound in some):
                for shape in (bound.choice.shape, *self._tiling.shapes(bound.operation))[:KEPT_STEPS]:
                    bound.steps[shape] = self._step(bound, shape)

    def _with_weights(self, weights: Sequence[ConvWeights]) -> list[_Bound]:
        """Return the operations with their weights prepared, and no scratch yet."""
        graph, prepared = self._graph, []
        for operation, choice in zip(self._operations, self.plan.choices, strict=True):
            primitive = find(choice.primitive, self._table)
            own = graph.lowered.weights(operation.layer, weights, graph.axis)
            if own is not None and operation.norm is not None:
                own = replace(own, norm=graph.lowered.weights(operation.norm, weights))
            resident = primitive.prepare(own, choice.variant, self.backend.executor)
            del own  # of one layer at a time
            name = _name(choice, graph.network)
            prepared.append(_Bound(operation, choice, primitive, resident, {}, OrderedDict(), name))
        return prepared

    def _allocated(self, tensor: int, arena: Arena) -> KeptTensor:
        found = KeptTensor(self._tiling, tensor, self._graph.network.maps[tensor])
        beside = self.backend.block(found.nbytes // found.dtype.itemsize, found.dtype)
        if found.storage == "resident":
            found.block = beside
        else:
            nbytes = self._tiling.held(tensor) * self._tiling.plane_bytes(tensor)
            found.block, found.beside = (
                arena.tensor(f"x{tensor}", (nbytes // found.dtype.itemsize,), found.dtype),
                beside,
            )
        return found

    def __exit__(self, *cause: Any) -> None:
        self._open.__exit__(*cause)

    def _forget(self) -> None:
        """Let go of all arrays."""
        self._members, self._bound, self._tensors = (), (), {}

    def buffers(
        self, raw: np.dtype[Any], out: np.dtype[Any], *, reads: int, writes: int
    ) -> tuple[Iterable[Voxels], Iterable[Voxels]]:
        """Return arrays for `submit` of these dtypes; steps use their first voxels."""
        raws = Arrays((self.network.input_channels, *self.plan.patch_in), raw)
        return self.backend.buffers(raws, Arrays((self._most,), out), reads=reads, writes=writes)

    def submit(self, raw: Voxels, out: Voxels | None, *, begins: bool = True, step: object | None = None) -> Any:
        """Begin to compute one step of a column, or one patch; return a ticket for `wait`, in the order of submission.

        raw     (c, z, y, x) of any real dtype, what the step reads; read only.
        out     float32, float16 or uint8 (`round(255 * clip(x, 0, 1))`), C order; its first values are overwritten with
                what the step gives, one output after the other, each (maps, z, y, x). None in the first steps of a
                column, which give no output.
        begins  the first step of a column; every patch is one.
        step    `Patch.step` of the plan's cover, a GraphStep.

        ValuesOverflowError, here or in `wait`, names the node whose result is not finite.
        """
        assert isinstance(step, GraphStep), "patches of a graph say what is computed"
        column = self._graph.planes(step.begin[0], step.end[0], step.thick)
        given = column.outputs(step.number)
        target = None if out is None else out.reshape(-1)[: self._values(given, step)]
        source, there = self.backend.begin_step(raw, target, begins=True)  # peaks of one step are enough

        def load(new: Array) -> None:
            self.backend.load(source.transpose(self._axes), new)

        self._computed(step, load, begins=begins)
        if there is not None:
            with self.span("store"):
                self._store(given, step, there)
        return self.backend.end_step()

    def image(self, load: Callable[[Array], None], member: int = 0) -> Array:
        """Compute a plan of one patch, and return its output (z, y, x, maps), turned, which the next call overwrites.

        load    writes the input (z, y, x, c), turned
        member  of an ensemble, whose weights are taken
        """
        self._bound = self._members[member]
        if self._image is None:
            (column,) = self._tiling.cover
            (patch,) = column.steps
            step = patch.step
            assert isinstance(step, GraphStep), "patches of a graph say what is computed"
            before = list(self.written)
            self._image = self._computed(step, load, begins=True)
            self._image_voxels = [after - now for now, after in zip(before, self.written, strict=True)]
        else:
            planes = self._image
            with self.span("load"):
                load(self._tensors[0].planes)
            if member not in self._imaged:
                self._run_all(planes)
            elif not self.backend.repeated(member, lambda: self._run_all(planes)):
                self.written = [sum(both) for both in zip(self.written, self._image_voxels, strict=True)]
        self._imaged.add(member)
        tensor = self._graph.network.outputs[0]
        z, y, x = self._region(tensor, self._image)
        return self._view(tensor, box_of((z, y, x)))

    def _computed(self, step: GraphStep, load: Callable[[Array], None], *, begins: bool) -> StepPlanes:
        """Run the operations of a step, and return the planes of its tensors; `load` writes the new ones of the input.

        They are there until the next step.
        """
        column = self._graph.planes(step.begin[0], step.end[0], step.thick)
        if begins:
            self._begin(step, column)
        planes = column.step(step.number)
        self._advance(0, planes)
        if planes.new[0].size:
            with self.span("load"):
                load(self._tensors[0].planes[planes.new[0].lo - planes.held[0].lo :])
        self._run_all(planes, column.step(step.number + 1).held if step.number + 1 < column.steps else None)
        return planes

    def _run_all(self, planes: StepPlanes, later: Sequence[Interval] | None = None) -> None:
        """Run all operations; `later`: planes of the tensors in the next step, if there is one."""
        last_reads = self._last_reads
        for index, bound in enumerate(self._bound):
            for tensor in bound.operation.tensors:
                self._advance(tensor, planes)
            region = self._region(bound.operation.tensor, planes)
            if all(interval.size for interval in region):  # a column may need none of it, but other columns do
                self._run(index, bound, planes, region)
            if later is not None:
                for tensor in last_reads[index]:
                    self._tensors[tensor].keep(later[tensor].lo, self.backend)

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
                held.begin(size, column.region[tensor].lo, 0, self.backend)
            else:
                held.begin(size, first, planes.new[tensor].lo - first, self.backend)

    def _advance(self, tensor: int, planes: StepPlanes) -> None:
        self._tensors[tensor].advance(planes.held[tensor], planes.new[tensor], self.backend)

    def _region(self, tensor: int, planes: StepPlanes) -> Region:
        """Return the voxels of a tensor that a step computes."""
        return planes.new[tensor], self._across[0][tensor], self._across[1][tensor]

    def _run(self, index: int, bound: _Bound, planes: StepPlanes, region: Region) -> None:
        """Compute the new planes of one operation."""
        operation = bound.operation
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
                    primitive_step.run(self._contiguous(inputs[0], bound.scratch)[None], out[None], scratch)
                else:
                    self.backend.run(index, primitive_step, inputs, out, scratch, more)
            except ValuesOverflowError as error:
                raise error.with_context(self._subject(operation)) from None
        self.written[index] += prod(out.shape[:3])  # of two outputs, that which is not pooled

    def _step(self, bound: _Bound, shape: LayerShape) -> tuple[Any, Mapping[str, Any]]:
        """Return a step of an operation for one shape, with as much of its scratch as this shape needs."""
        variant = bound.choice.variant
        step = bound.primitive.bind(bound.resident, shape, variant, self.backend.executor)
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

    def _values(self, given: Sequence[Interval], step: GraphStep) -> int:
        """Return how many values a step gives."""
        wanted, maps = self._wanted(step), self._graph.network.maps
        return sum(
            maps[tensor] * given[number].size * wanted[0][number].size * wanted[1][number].size
            for number, tensor in enumerate(self._graph.network.outputs)
        )

    def _wanted(self, step: GraphStep) -> list[Sequence[Interval]]:
        """Return what is wanted of each output along the second and the third axis."""
        return [self._graph.wanted(along, step.begin[along], step.end[along]) for along in (1, 2)]

    def _store(self, given: Sequence[Interval], step: GraphStep, out: Array) -> None:
        """Write the outputs of a step, one after the other."""
        first = 0
        wanted = self._wanted(step)
        for number, tensor in enumerate(self._graph.network.outputs):
            region: Region = (given[number], wanted[0][number], wanted[1][number])
            z, y, x = (interval.size for interval in region)
            maps = self._graph.network.maps[tensor]
            count = maps * z * y * x
            if count:
                target = out[first : first + count].reshape(maps, *turned_back((z, y, x), self._graph.axis))
                self.backend.store(self._view(tensor, box_of(region)), target.transpose(self._axes))
            first += count

    def span(self, name: str, **facts: int) -> Any:
        return self.backend.span(name, **facts)

    def run(self, raw: Voxels, out: Voxels | None, *, begins: bool = True, step: object | None = None) -> None:
        """Compute one step: `submit` it and `wait`."""
        self.wait(self.submit(raw, out, begins=begins, step=step))

    def abandon(self) -> None:
        """Ask nothing of a device that failed any more; leaving then waits for nothing."""
        self.backend.abandon()

    def done(self, ticket: Any) -> bool:
        """Return whether `wait` would return at once."""
        return self.backend.done(ticket)

    def wait(self, ticket: Any) -> None:
        """Wait until the output of a step is there."""
        self.backend.wait(ticket)

    def _contiguous(self, x: Array, scratch: Mapping[str, Any]) -> Array:
        """Return an array in C order: itself, or a copy in the scratch that the plan holds for it."""
        return x if x.flags.c_contiguous else self.backend.copied(x, scratch[COPIED])


def _name(choice: Choice, network: Network) -> str:
    return f"{' and '.join(network.names[one] for one in sorted(set(choice.layers)))} {choice.primitive}"
