"""Check that a plan, which may have been made elsewhere or edited, runs here; PlanFileError says why it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import lt

from znnpy.errors import PlanFileError, ShapeError
from znnpy.graph_columns import TurnedGraph
from znnpy.kernels.contract import Footprint, Primitive, device_of
from znnpy.kernels.table import IN_HOST_RAM, TABLE, find
from znnpy.layer_shapes import LayerShape
from znnpy.machine import Machine
from znnpy.messages import excerpt
from znnpy.network import Network
from znnpy.planner.co_execution import CoExecution
from znnpy.planner.described_graph import described
from znnpy.planner.graph_tilings import GraphTiling
from znnpy.planner.layout import ALIGNMENT, Tensor, aligned
from znnpy.planner.plan import Plan, patch_in
from znnpy.planner.run_plan import AGAIN, RunPlan
from znnpy.planner.stages import handover_buffers, in_host_ram, stage_needs
from znnpy.planner.window_tilings import PARTS, WindowTiling
from znnpy.shapes import fused, text, turned, turned_back


def check_runs(
    plan: RunPlan,
    network: Network,
    machine: Machine,
    *,
    ram_bytes: int | None = None,
    vram_bytes: int | None = None,
    table: Sequence[Primitive] = (*TABLE, *IN_HOST_RAM),
) -> None:
    """Raise PlanFileError unless a plan, which may have been made elsewhere or edited, runs here as it stands.

    It must be for this network; its primitives must be here, in the same version, and apply; its bytes must fit this
    machine, its GPU, `ram_bytes` and `vram_bytes`; and tensors must have the sizes and lifetimes that the primitives
    ask for, at offsets where none overwrites another. Speed is not checked: fewer cores run it slower.
    """
    if plan.network != network.sha256:
        raise PlanFileError(
            f"the plan is of another network ({excerpt(plan.network_name, 60)}, {plan.network[:12]}) than the one "
            f"given ({excerpt(network.name, 60)}, {network.sha256[:12]}); make a plan of this network with "
            "`znnpy plan`"
        )
    if plan.device == "gpu" and machine.gpu is None:
        raise PlanFileError(
            "the plan's layers run on a GPU, and there is none here; make one for this machine with "
            "`znnpy plan NETWORK --device cpu`"
        )
    for worker in plan.workers:
        check_plan(worker.plan, network, machine, table)
    if plan.sharing is not None:
        _check_sharing(plan.sharing)
    _check_limits(plan, machine, ram_bytes, vram_bytes)


def check_plan(
    plan: Plan, network: Network, machine: Machine, table: Sequence[Primitive] = (*TABLE, *IN_HOST_RAM)
) -> None:
    """Raise PlanFileError unless the plan of one worker runs this network here, whatever its limits are."""
    if (network.meaning != "sliding") != (plan.area is not None) or (network.meaning == "windows") != (
        plan.sums is not None
    ):
        raise PlanFileError(f"the plan is of another kind of network than {excerpt(network.name, 60)}; {AGAIN}")
    if plan.area is not None:
        _check_graph(plan, network, machine, table)
        return
    _check_shapes(plan, network)
    _check_memory(plan, [_footprint_of(index, plan, machine, table) for index in range(len(plan.choices))])


def _check_graph(plan: Plan, network: Network, machine: Machine, table: Sequence[Primitive]) -> None:
    """Raise PlanFileError unless the plan of a graph runs here as it stands."""
    assert plan.area is not None, "plans of graphs have it"
    try:
        windows = _window_tiling(plan, network) if plan.sums is not None else None
        graph = windows.graph if windows else TurnedGraph.of(network, plan.area.volume, plan.axis, plan.precision)
    except ShapeError as error:
        raise PlanFileError(f"the plan does not fit its network: {error}") from None
    voxels, step, outputs = graph.voxels, turned(plan.patch_out, plan.axis), graph.network.outputs
    regions, sizes = plan.area.regions, [turned_back(graph.geometry.size(tensor), plan.axis) for tensor in outputs]
    if windows:
        sizes = [plan.area.volume]
    inside = (
        len(regions) in (1, len(outputs))
        and regions[0].size == plan.output
        and all(
            0 <= lo < hi <= n
            for region, size in zip(regions, sizes, strict=False)
            for lo, hi, n in zip(region.lo, region.hi, size, strict=True)
        )
    )
    whole = all(a % b == 0 for a, b in zip((*step, plan.column_planes), (*voxels, voxels[0]), strict=True))
    if windows and (plan.patch_out != windows.patch_out or plan.column_planes):
        whole = False
    if not inside or not whole or plan.column_planes % step[0] or len(plan.stages) != 1:
        raise PlanFileError(
            f"the plan's steps of {text(plan.patch_out)} voxels, or its output of {text(plan.output)}, are none of "
            f"{excerpt(network.name, 60)} over a volume of {text(plan.area.volume)}; {AGAIN}"
        )
    tiling = windows or GraphTiling(plan.graph_cover(network))
    operations = graph.computing(choice.shape for choice in plan.choices)
    if len(plan.choices) != len(operations):
        raise PlanFileError(
            f"the plan has choices for {len(plan.choices)} layers, and the network has {len(operations)}; {AGAIN}"
        )
    for index, (choice, operation) in enumerate(zip(plan.choices, operations, strict=True)):
        shape = tiling.shape(operation)
        if choice.layers != operation.layers or choice.shape != shape:
            raise PlanFileError(
                f"entry {index} of the plan is {excerpt(choice.shape)}, and the network has "
                f"{graph.network.names[operation.layer]} ({shape}) there; {AGAIN}"
            )
    if plan.patch_in != tiling.patch_in:
        raise PlanFileError(
            f"the plan reads patches of {text(plan.patch_in)}, and {text(plan.patch_out)} voxels out need "
            f"{text(tiling.patch_in)}; {AGAIN}"
        )
    if plan.graph != described(tiling):
        raise PlanFileError(f"the plan describes its nodes otherwise than they are; {AGAIN}")
    for index in range(len(plan.choices)):
        _footprint_of(index, plan, machine, table)
    footprints = [
        tiling.footprint(operation, find(choice.primitive, tuple(table)), choice.variant, plan.compute_threads)
        for choice, operation in zip(plan.choices, operations, strict=True)
    ]
    memory = plan.memory.stages[0]
    _check_tensors(plan.stages[0].tensors, tiling.tensors(operations, footprints), memory.arena, "arena")
    here = tiling.memory(operations, footprints, memory.arena, plan.device)
    for what, promised, needed in (
        ("of weights", memory.weights, here.weights),
        ("for the libraries", memory.allowance, here.allowance),
        ("for planes that stay", memory.carries, here.carries),
    ):
        _check_promise(promised, needed, what)


def _window_tiling(plan: Plan, network: Network) -> WindowTiling:
    """Return the windows of a plan; PlanFileError if its region, its parts or their number are none of a search."""
    assert plan.sums is not None, "plans of windows have it"
    assert plan.area is not None, "plans of windows have it"
    volume, region = plan.area.volume, plan.area.region
    if not all(0 <= lo < hi <= n for lo, hi, n in zip(region.lo, region.hi, volume, strict=True)):
        raise PlanFileError(
            f"the plan predicts voxels {text(region.lo)} to {text(region.hi)} of a volume of {text(volume)}; {AGAIN}"
        )
    windows = plan.window_cover(network)
    if why := windows.why_too_many:
        raise PlanFileError(f"the plan does not fit its network: {why}; {AGAIN}")
    if plan.sums.dtype == "float16" and not windows.windows.suit_half_precision:
        raise PlanFileError(f"the plan keeps sums in float16, which does not hold weights like these; {AGAIN}")
    most = min(windows.most_parts, PARTS[-1])
    if plan.sums.parts > most:
        raise PlanFileError(
            f"the plan divides the output into {plan.sums.parts} parts, and its windows allow {most}; {AGAIN}"
        )
    return WindowTiling(plan.graph_cover(network), windows, plan.sums, plan.device)


def _check_sharing(sharing: CoExecution) -> None:
    """Raise PlanFileError unless cells hold whole steps of a GPU and both workers follow the same axis."""
    gpu, cpu = sharing.gpu, sharing.cpu
    cell, step = cpu.patch_out, gpu.patch_out
    if cell[gpu.axis] % step[gpu.axis] or any(map(lt, cell, step)):
        raise PlanFileError(
            f"the plan's cells of {text(cell)} hold no whole number of its steps of {text(step)} along axis "
            f"{gpu.axis}, or are narrower; {AGAIN}"
        )
    if cpu.streams and cpu.axis != gpu.axis:
        raise PlanFileError(
            f"the CPU's columns are along axis {cpu.axis}, and those of the GPU along axis {gpu.axis}; {AGAIN}"
        )


def _check_limits(plan: RunPlan, machine: Machine, ram_bytes: int | None, vram_bytes: int | None) -> None:
    """Check that the memory the plan needs is there and is allowed."""
    card = None if machine.gpu is None else machine.gpu.memory_bytes
    for limit, what, needed, kind, word in (
        (machine.ram_bytes, "this process may use", plan.memory.peak, "RAM", "ram"),
        (ram_bytes, "the limit allows", plan.memory.peak, "RAM", "ram"),
        (card, "the GPU has", plan.memory.vram, "VRAM", "vram"),
        (vram_bytes, "the limit allows", plan.memory.vram, "VRAM", "vram"),
    ):
        if limit is not None and needed > limit:
            raise PlanFileError(
                f"the plan needs {needed:,} bytes of {kind}, {needed - limit:,} more than {what} ({limit:,}); "
                "make one for this network and volume with "
                f"`znnpy plan NETWORK --volume VOLUME --{word} {limit // 2**20}M`"
            )


def _check_shapes(plan: Plan, network: Network) -> None:
    """Check that every layer of the network has a choice, with the sizes that it has there."""
    try:
        shapes = plan.layer_shapes(network)
        on_cpu = [replace(shape, precision="fp32") for shape in shapes]
    except ShapeError as error:
        raise PlanFileError(f"the plan does not fit its network: {error}") from None
    if plan.column_planes % plan.patch_out[plan.axis]:
        raise PlanFileError(
            f"the plan's columns of {plan.column_planes} planes are no whole number of steps of "
            f"{plan.patch_out[plan.axis]}; {AGAIN}"
        )
    needed = patch_in(network, plan.patch_out, plan.axis, streams=plan.streams)
    if plan.patch_in != needed:
        raise PlanFileError(
            f"the plan reads patches of {text(plan.patch_in)}, and {text(plan.patch_out)} voxels out need "
            f"{text(needed)}; {AGAIN}"
        )
    begun = 0  # number of layers with a choice so far
    for index, choice in enumerate(plan.choices):
        first, last = choice.layers
        known = on_cpu if index < plan.offloaded and choice.device == "cpu" else shapes
        if first != begun or choice.shape != _shape_of(known, first, last):
            there = f"layer {begun} ({shapes[begun]}) there" if begun < len(shapes) else f"{begun} layers"
            raise PlanFileError(
                f"entry {index} of the plan is {choice.where} ({excerpt(choice.shape)}), and the network has {there}; "
                f"{AGAIN}"
            )
        begun = last + 1
    if begun != len(shapes):
        raise PlanFileError(f"the plan has choices for {begun} layers, and the network has {len(shapes)}; {AGAIN}")


def _check_memory(plan: Plan, footprints: Sequence[Footprint]) -> None:
    """Check that each arena holds the tensors that the primitives need, without overlaps between live ones."""
    steps = [(c.shape, f) for c, f in zip(plan.choices, footprints, strict=True)]
    wanted = stage_needs(steps, plan.offloaded, plan.patch_in[plan.axis], plan.device)
    for stage, memory, needs in zip(plan.stages, plan.memory.stages, wanted, strict=True):
        where = "" if stage is plan.stages[-1] else " of the stage in the memory of the host"
        _check_tensors(stage.tensors, needs.tensors, memory.arena, f"arena{where}")
        for what, promised, needed in (
            ("of weights", memory.weights, needs.memory.weights),
            ("of weights in page-locked memory", memory.pinned, needs.memory.pinned),
            ("for the libraries", memory.allowance, needs.memory.allowance),
            ("for carried planes", memory.carries, needs.memory.carries),
        ):
            _check_promise(promised, needed, f"{what}{where}")
    buffers = handover_buffers(overlap=plan.overlap) if plan.offloaded else 0
    _check_promise(plan.memory.handover, buffers * plan.handover_bytes, "for what is handed over")


def _check_promise(promised: int, needed: int, what: str) -> None:
    if promised != needed:
        raise PlanFileError(f"the plan promises {promised:,} bytes {what}, and its steps need {needed:,}; {AGAIN}")


def _check_tensors(tensors: Sequence[Tensor], needed: Sequence[Tensor], nbytes: int, arena: str) -> None:
    """Raise PlanFileError unless these are the needed tensors, placed within an arena of `nbytes` bytes."""
    wanted, found = {t.name: t for t in needed}, {t.name: t for t in tensors}
    if found.keys() != wanted.keys() or len(tensors) != len(found):
        names = excerpt(", ".join(sorted(found.keys() ^ wanted.keys()) or sorted(t.name for t in tensors)))
        raise PlanFileError(f"the plan's {arena} lacks, repeats or invents tensors ({names}); {AGAIN}")
    for name, need in wanted.items():
        got = found[name]
        if (got.nbytes, got.first, got.last) != (need.nbytes, need.first, need.last):
            raise PlanFileError(
                f"the plan gives {name} {got.nbytes:,} bytes in ticks {got.first} to {got.last}, and it needs "
                f"{need.nbytes:,} in {need.first} to {need.last}; {AGAIN}"
            )
        if got.offset % ALIGNMENT or got.end > nbytes:
            raise PlanFileError(
                f"the plan lays {name} at bytes {got.offset:,} to {got.end:,}, not aligned to {ALIGNMENT} or "
                f"outside the {arena} of {nbytes:,}; {AGAIN}"
            )
    alive: list[Tensor] = []
    for b in sorted(tensors, key=lambda tensor: tensor.first):
        alive = [a for a in alive if a.last >= b.first]
        for a in alive:
            if a.meets(b) and a.offset < b.end and b.offset < a.end:
                raise PlanFileError(f"the plan lays {a.name} and {b.name} over each other; {AGAIN}")
        alive.append(b)
    end = aligned(max((t.end for t in tensors), default=0))
    if nbytes != end:
        raise PlanFileError(f"the plan's tensors end at byte {end:,} and the {arena} at {nbytes:,}; {AGAIN}")


def _shape_of(shapes: Sequence[LayerShape], first: int, last: int) -> LayerShape | None:
    """Return the shape of one choice for layers first..last; None if no choice may span them."""
    if last >= len(shapes) or last - first not in (0, 1):
        return None
    return shapes[first] if first == last else fused(shapes[first], shapes[last])


def _footprint_of(index: int, plan: Plan, machine: Machine, table: Sequence[Primitive]) -> Footprint:
    """Return what the chosen primitive needs here; PlanFileError if the plan was made with another one."""
    choice = plan.choices[index]
    primitive = next((p for p in table if p.name == choice.primitive), None)
    where, name = f"{choice.where} of the plan", excerpt(choice.primitive, 60)
    if choice.device != device_of(choice.primitive) or (index >= plan.offloaded and choice.device != plan.device):
        raise PlanFileError(
            f"{where} runs {name} on the {choice.device.upper()}, and all layers of the plan run on the "
            f"{plan.device.upper()}; {AGAIN}"
        )
    if primitive is None:
        raise PlanFileError(f"{where} runs {name}, which is not here; {AGAIN}")
    if primitive.version != choice.version:
        raise PlanFileError(
            f"{where} runs version {choice.version} of {name}, and version {primitive.version} is here; {AGAIN}"
        )
    if primitive.kind != choice.shape.kind:
        raise PlanFileError(f"{where} is a {choice.shape.kind} and runs {name}; {AGAIN}")
    if reason := primitive.why_not(choice.shape, machine):
        raise PlanFileError(f"{where} runs {name}, which does not apply here: {reason}; {AGAIN}")
    with_host = choice.device == "gpu" and index < plan.offloaded
    known = with_host or choice.variant in primitive.variants(choice.shape, machine)
    try:
        footprint = primitive.footprint(choice.shape, choice.variant, plan.compute_threads) if known else None
    except (KeyError, TypeError, ValueError):  # an offloaded layer may have a variant of any kind
        if not with_host:
            raise
        footprint = None
    if footprint is None:
        raise PlanFileError(f"{where}: {name} has no variant {excerpt(choice.variant or '(none)')}; {AGAIN}")
    if in_host_ram(footprint) != with_host:
        raise PlanFileError(
            f"{where} runs {name}, whose tensors live with the "
            f"{'host' if in_host_ram(footprint) else 'GPU'}, and those of the plan do not; {AGAIN}"
        )
    return footprint
