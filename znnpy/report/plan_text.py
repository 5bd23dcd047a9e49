"""A plan in words and tables: what runs where, what it costs, what it needs, and what lost."""

from __future__ import annotations

import io
from math import ceil
from textwrap import wrap

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from znnpy.machine import Machine
from znnpy.messages import option
from znnpy.network import Conv, Layer, MaxFilter, Maxout, Network, Pool
from znnpy.patches import Cover
from znnpy.planner.plan import Choice, Plan
from znnpy.planner.run_plan import RunnerUp, RunPlan
from znnpy.report.graph_text import cover_text, operations_table
from znnpy.report.wide_table import WideOrNarrow
from znnpy.shapes import ConvShape, FilterShape, MaxoutShape, PoolShape, text, turned_back
from znnpy.units import human_bytes, human_seconds

WIDTH = 120  # columns of text that goes to no terminal
AXES = "zyx"
MUCH_WASTE = 20.0  # times the work without borders, from which on more memory is the better advice


def plan_renderable(run: RunPlan, network: Network | None, machine: Machine | None) -> RenderableType:
    """Return everything that `znnpy plan` prints: cover, layers, memory, prediction and runners-up.

    network  None: that of the plan, as far as the plan tells
    """
    told = (*_prediction(run, machine), _gain(run), *_kinds(run), *_warning(run), *_runners_up(run))
    return Group(*_covered(run, network), _memory(run), *(Text(line) for line in told))


def _covered(run: RunPlan, network: Network | None) -> list[RenderableType]:
    """Describe how the output is covered, and the layers of every worker."""
    plan, graph = run.main, run.main.graph
    if graph is not None:
        return [Text(cover_text(plan, graph, run.network_name)), Padding(operations_table(plan, graph), (1, 0))]
    network = network or network_of(run)
    return [Text(_cover(plan, network)), Padding(_layers(plan, network), (1, 0)), *_side_by_side(run, network)]


def explain(plan: RunPlan, machine: Machine | None = None) -> str:
    """Return what `znnpy plan` prints as text of WIDTH columns, with how the plan suits `machine` if one is given.

    plan     a RunPlan
    machine  a Machine; None: nothing is said of it
    """
    stream = io.StringIO()
    Console(width=WIDTH, file=stream).print(plan_renderable(plan, None, machine))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def network_of(run: RunPlan) -> Network:
    """Return the chain of a plan as far as its choices tell: the normalisation of grey values is not known."""
    plan, layers = run.main, list[Layer]()
    for choice in plan.choices:
        match choice.shape:
            case ConvShape(k=k, fout=fout, activation=activation, pool=pool) as shape:
                layers.append(Conv(turned_back(k, plan.axis), fout, activation))
                if shape.pools:
                    layers.append(Pool(turned_back(pool, plan.axis)))
            case PoolShape(p=p):
                layers.append(Pool(turned_back(p, plan.axis)))
            case FilterShape(p=p):
                layers.append(MaxFilter(turned_back(p, plan.axis)))
            case MaxoutShape(of=of):
                layers.append(Maxout(of))
    return Network(run.network_name, plan.choices[0].shape.in_shape[4], tuple(layers))


def _cover(plan: Plan, network: Network) -> str:
    """Say what is computed at a time, and how the output is covered with it."""
    seen = f"field of view {text(network.field_of_view)}, period {text(network.period)}"
    output = f"{network.name}: {text(plan.output)} output voxels in"
    beyond = (
        f"; what is computed at a time is a multiple of the period, so it reaches beyond the {text(plan.output)} "
        "voxels of the output, where nothing is written"
        if reaches_beyond(plan)
        else ""
    )
    if not plan.streams:
        patches = f"{plan.columns:,} patch{'es' if plan.columns != 1 else ''}"
        return f"{output} {patches}, each {text(plan.patch_in)} in and {text(plan.patch_out)} out ({seen}){beyond}"
    axis, planes, cover = plan.axis, network.field_of_view[plan.axis] - 1, plan.cover(network)
    assert isinstance(cover, Cover), "plans of chains have it"
    columns = f"{plan.columns:,} column{'s' if plan.columns != 1 else ''} along {AXES[axis]}"
    if plan.column_planes < plan.output[axis]:
        columns += f", each at most {plan.column_planes:,} planes of output,"
    return (
        f"{output} {columns} in steps of {plan.patch_out[axis]:,} planes, each {text(plan.patch_in)} in and "
        f"{text(plan.patch_out)} out ({seen}); a column reads {planes:,} planes before its output begins, in "
        f"{cover.ahead:,} of its steps, and every layer keeps the last planes of its input for the next "
        f"step, {human_bytes(plan.memory.last.carries)} in all{beyond}"
    )


def reaches_beyond(plan: Plan) -> bool:
    """Return whether a patch, or a step across its column, is larger than the whole output."""
    along = (plan.axis,) if plan.streams else ()
    sizes = zip(plan.patch_out, plan.output, strict=True)
    return any(patch > output for axis, (patch, output) in enumerate(sizes) if axis not in along)


def _side_by_side(run: RunPlan, network: Network) -> list[RenderableType]:
    """Describe what the CPU computes side by side with GPUs."""
    if (sharing := run.sharing) is None:
        return []
    its, cells = sharing.cpu, sharing.cells
    threads = f"{its.limits.threads} thread{'s' if its.limits.threads != 1 else ''}"
    later = cells.later
    narrower = f"behind the first ones of {text(later)}, " if later and later != cells.patch else ""
    words = (
        f"side by side: the GPU and the CPU take cells of {text(cells.patch)} output voxels, {narrower}"
        f"{len(cells):,} in all, of which the CPU is to compute {sharing.cpu_items():,}, "
        f"{human_seconds(its.seconds_per_step)} each, in {_kind(its)} with {threads}"
    )
    return [Text(words), Padding(_layers(its, network), (1, 0))]


def _layers(plan: Plan, network: Network) -> RenderableType:
    """Lay out the layers with their seconds in a full step and their shares of the whole output."""
    return WideOrNarrow(_layers_table(plan, network), _layers_table(plan, network, stacked=True))


def _layers_table(plan: Plan, network: Network, *, stacked: bool = False) -> Table:
    """Return a table with a row for each choice; `stacked` puts the primitive below the layer, in fewer columns."""
    in_parts = max(plan.sub_batches) > 1
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 0 if in_parts else 1, 0, 0))  # to fit into 80 columns
    table.add_column("layer and input", no_wrap=True)
    if not stacked:
        table.add_column("primitive", no_wrap=True)
    if plan.offloaded:
        table.add_column("runs on", no_wrap=True)
    for column in (*(("parts",) if in_parts else ()), "time", "share", "working", "kept"):
        table.add_column(column, justify="right", no_wrap=True)
    widest = max(len(choice.primitive) for choice in plan.choices)
    total = sum(choice.executions * choice.seconds for choice in plan.choices)
    for index, (choice, parts) in enumerate(zip(plan.choices, plan.sub_batches, strict=True)):
        first, last = choice.layers
        fused = f"\n{last} {network.layers[last]}, in one" if last > first else ""
        layer = f"{first} {network.layers[first]}{fused}\n{_input(plan, choice)}"
        primitive = (choice.primitive, *wrap(str(choice.variant), widest))
        table.add_row(
            *(("\n ".join((layer, *primitive)),) if stacked else (layer, "\n".join(primitive))),
            *((_where(plan, index),) if plan.offloaded else ()),
            *((f"{parts}",) if in_parts else ()),
            human_seconds(parts * choice.seconds),
            f"{choice.executions * choice.seconds / total:.0%}" if total else "",
            human_bytes(choice.working_bytes),
            human_bytes(choice.resident_bytes),
        )
    return table


def _where(plan: Plan, index: int) -> str:
    """Name the device of a choice, and the memory of its tensors if that is elsewhere."""
    device = plan.choices[index].device
    return "GPU, from RAM" if device == "gpu" and index < plan.offloaded else device.upper()


def _input(plan: Plan, choice: Choice) -> str:
    """Write images, size (z, y, x) and maps of the input."""
    images, *n, maps = choice.shape.in_shape
    return f" {text((images, *turned_back((n[0], n[1], n[2]), plan.axis), maps))}"


def _memory(run: RunPlan) -> Table:
    """List the bytes of the process, and below them those of a GPU if the layers run there."""
    plan, every = run.main, run.devices
    memory, limits, what = plan.memory, plan.limits, "steps" if plan.streams else "patches"
    around = [
        (f"the process itself, {'with CUDA in it' if plan.device == 'gpu' else 'measured'}", memory.baseline),
        (f"{what} on their way in", every * memory.reading),
        (f"{what} on their way out", every * memory.writing),
        *((("prepared weights that the GPU has no room for", every * memory.pinned),) if memory.pinned else ()),
        *(
            ("everything for computing on the CPU at the same time", other.plan.memory.peak)
            for other in run.workers[1:]
        ),
        *(_offloaded_memory(plan) if plan.offloaded else ()),
    ]
    last = memory.last
    layers = [
        ("arena: activations and scratch", last.arena),
        *((("planes kept from step to step", last.carries),) if last.carries else ()),
        ("prepared weights", last.weights),
        ("allowance for libraries", last.allowance),
    ]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("memory")
    table.add_column("bytes", justify="right")
    for row, nbytes in around if plan.device == "gpu" else (around[0], *layers[:-1], *around[1:], layers[-1]):
        table.add_row(row, human_bytes(nbytes))
    table.add_section()
    table.add_row(f"peak, of the limit of {human_bytes(limits.ram_bytes)}", human_bytes(run.memory.peak))
    if plan.device == "gpu":
        table.add_section()
        rows = (
            *layers[:-1],
            (f"{what} on their way in and out", memory.staging),
            ("CUDA and its libraries", memory.context + last.allowance),
        )
        for row, nbytes in rows:
            table.add_row(f"GPU: {row}", human_bytes(nbytes))
        table.add_section()
        table.add_row(
            f"{'each ' if every > 1 else ''}GPU: all, of the limit of {human_bytes(limits.vram_bytes or 0)}",
            human_bytes(memory.vram),
        )
    return table


def _offloaded_memory(plan: Plan) -> list[tuple[str, int]]:
    """Return what offloaded layers take of the process."""
    stage = plan.memory.stages[0]
    rows = [
        ("offloaded layers: arena, activations and scratch", stage.arena),
        ("offloaded layers: planes kept from step to step", stage.carries),
        ("offloaded layers: prepared weights", stage.weights),
        ("offloaded layers: allowance for libraries", stage.allowance),
        (f"what is handed over{', twice' if plan.overlap else ''}", plan.memory.handover),
    ]
    return [(row, nbytes) for row, nbytes in rows if nbytes]


def predicted(run: RunPlan) -> str:
    """Write a plan as one line of a log: its patch or column, and its predicted time and memory."""
    plan = run.main
    covers = f"{plan.columns:,} {'row of windows' if plan.sums else 'column' if plan.streams else 'patch'}"
    plural = "" if plan.columns == 1 else "s" if plan.streams else "es"
    if plan.sums and plan.columns != 1:
        covers, plural = f"{plan.columns:,} rows of windows", ""
    where = f"{human_bytes(run.memory.peak)}" + (
        f" and {human_bytes(plan.memory.vram)} of VRAM" * (plan.device == "gpu")
    )
    return f"{covers}{plural} of {run.network_name}: {human_seconds(run.seconds)} and {where} predicted"


def _two_stages(plan: Plan) -> str:
    """Say what each of two stages takes, and which of them waits."""
    front, back = plan.stage_seconds
    last = plan.stages[0].choices[-1].layers[1]
    layers = f"layers 0 to {last} run" if last else "layer 0 runs"
    waits = human_seconds(plan.stages[1].wait_seconds)
    handed = f"{human_bytes(plan.handover_bytes)} are handed over, for which it waits {waits}"
    times = f"{human_seconds(front)} and {human_seconds(back)}; {handed}"
    if not plan.overlap:
        return f"{layers} with tensors in RAM before the GPU runs the others: {times}"
    waiting, idle = ("CPU", back - front) if front < back else ("GPU", front - back)
    share = idle / max(front, back)
    threads = f"{plan.compute_threads} thread{'s' if plan.compute_threads != 1 else ''}"
    return (
        f"{layers} with {threads} for the next patch or step while the GPU runs the others: {times}; the {waiting} "
        f"waits {share:.0%} of the time"
    )


def _prediction(run: RunPlan, machine: Machine | None) -> list[str]:
    """Return the predicted figures, and how far to trust them."""
    plan = run.main
    each = f"{human_seconds(plan.seconds_per_step)} a patch"
    if plan.streams:
        column = human_seconds((run.seconds - plan.preparing_seconds) / ceil(plan.columns / run.devices))
        each = f"{human_seconds(plan.seconds_per_step)} a step, {column} a column"
    lines = [
        f"predicted: {run.voxels_per_second:,.0f} output voxels/s, {each}, {human_seconds(run.seconds)} in all, "
        + (
            f"on {'the GPU' if run.devices == 1 else f'{run.devices} GPUs'} in {plan.precision}"
            f"{' and on the CPU' if run.sharing else ''}"
            if plan.device == "gpu"
            else f"with {plan.limits.threads} thread{'s' if plan.limits.threads != 1 else ''}"
        )
    ]
    if run.inside < 1:
        lines.append(f"the mask leaves out {1 - run.inside:.0%} of the work")
    if run.single_device_seconds is not None and run.sharing is not None:
        lines.append(
            f"{run.single_device_seconds / run.seconds:.2f} times as fast as without the CPU, "
            f"which computes {run.sharing.cpu_share():.1%}"
        )
    elif run.single_device_seconds is not None:
        lines.append(
            f"{run.single_device_seconds / run.seconds:.2f} times as fast as one GPU alone: "
            f"{plan.columns} columns or patches for {run.devices}, each with borders of its own"
        )
    if plan.offloaded:
        lines.append(_two_stages(plan))
    if plan.preparing_seconds:
        prepared = human_bytes(plan.memory.last.prepared)
        rate = "a rate measured there" if run.made_for else "a measured rate"
        lines.append(
            f"{human_seconds(plan.preparing_seconds)} of that prepare {prepared} of memory, at "
            f"{rate if plan.preparing_measured else 'an assumed rate'}"
        )
    lines += _sources(run)
    return lines if machine is None else lines + _elsewhere(run, machine)


def _sources(run: RunPlan) -> list[str]:
    """Say where the seconds of layers come from."""
    choices = run.choices
    layers, fitted, assumed = (
        sum(1 + choice.layers[1] - choice.layers[0] for choice in some)
        for some in (
            choices,
            [choice for choice in choices if choice.fitted and not choice.measured],
            [choice for choice in choices if not choice.fitted and not choice.measured],
        )
    )
    if not fitted + assumed:
        return ["every layer was measured on the machine the plan was made on, at this size or at others"]
    where = "this machine" if run.made_for is None else "that machine"
    parts = [f"{fitted} of {layers} layers is estimated from rates measured on {where}"] * (fitted > 0)
    parts += [f"{assumed} of {layers} layers is estimated from assumed rates, not measured on {where}"] * (assumed > 0)
    return [f"the time of {', that of '.join(parts)}; the bytes are promised"]


def _elsewhere(run: RunPlan, machine: Machine) -> list[str]:
    """Say in what `machine` differs from the machine of the plan."""
    lines = []
    if run.made_for is not None:
        lines.append(f"this plan is for another machine, {run.made_for}: it runs only there")
    elif run.machine != machine.fingerprint:
        lines.append(f"the plan was made on another machine ({run.machine}; this one is {machine.fingerprint})")
    if run.limits.ram_bytes > machine.ram_bytes:
        lines.append(
            f"the limit of {human_bytes(run.limits.ram_bytes)} is above the {human_bytes(machine.ram_bytes)} of this "
            "machine" + ("; the plan does not run here" if run.memory.peak > machine.ram_bytes else "")
        )
    if run.device == "cpu" and run.limits.threads > machine.cores:
        lines.append(f"{run.limits.threads} threads are planned and this machine has {machine.cores} cores for them")
    return lines


def _gain(run: RunPlan) -> str:
    """Say how much more work than needed columns and patches do, and how much faster the better of them is."""
    plan = run.main
    line = f"{_kind(plan)}: {run.voxels_per_second:,.0f} voxels/s, work {plan.waste:.2f} times what the output needs"
    other = run.other
    if other is None or run.alternatives:
        return line
    ratio = run.voxels_per_second / other.voxels_per_second
    gain = f"{'columns' if plan.streams else 'patches'} are {ratio:.2f} times as fast" if ratio >= 1.005 else "as fast"
    return f"{line}; {_kind(other)}: {other.voxels_per_second:,.0f} voxels/s, {other.waste:.2f} times: {gain}"


def _kinds(run: RunPlan) -> list[str]:
    """List the best plan of every other kind, its needs, and why it lost."""
    lines = []
    for kind in run.alternatives:
        where = f"on the {kind.device.upper()}: " if kind.device != run.device else ""
        whole = "" if max(kind.best.sub_batches) > 1 or max(run.main.sub_batches) == 1 else " without depth first"
        whole = f", {kind.scheme}" if kind.scheme else whole
        taken = f"{human_bytes(kind.ram_bytes)} of RAM"
        if kind.device == "gpu":
            taken += f" and {human_bytes(kind.vram_bytes)} of VRAM"
        lines.append(
            f"instead: {where}{_kind(kind.best)}{whole}, {kind.best.voxels_per_second:,.0f} voxels/s, work "
            f"{kind.best.waste:.2f} times, {taken}: {kind.reason}"
        )
    return lines


def _kind(what: Plan | RunnerUp) -> str:
    """Say in words whether the output is divided into patches or columns, and their size."""
    depth_first = " depth first" if max(what.sub_batches) > 1 else ""
    if isinstance(what, Plan) and what.sums is not None:
        return f"windows of {text(what.patch_out)}"
    if what.column_planes:
        return f"columns along {AXES[what.axis]} in steps of {text(what.patch_out)}{depth_first}"
    return f"patches of {text(what.patch_out)}{depth_first}"


def _warning(run: RunPlan) -> list[str]:
    """Warn if nearly all the work is spent on borders, and say what more memory would gain."""
    plan = run.main
    waste = plan.waste
    if waste < MUCH_WASTE or plan.sums is not None:
        return []
    more = max((r for r in run.runners_up if _over(r)), key=lambda r: r.voxels_per_second, default=None)
    these = "columns this narrow" if plan.streams else "patches this small"
    word = "vram" if plan.device == "gpu" else "ram"
    advice = f"give larger {'steps' if plan.streams else 'patches'} ({option('patch')}) or more memory ({option(word)})"
    if more is not None:
        ratio = more.voxels_per_second / run.voxels_per_second
        limits = (
            ("ram", plan.limits.ram_bytes, more.over_bytes),
            ("vram", plan.limits.vram_bytes or 0, more.over_vram_bytes),
        )
        needed = " ".join(option(name, f"{-(-(limit + over) // 2**20)}M") for name, limit, over in limits if over)
        advice = f"already with {needed} {_kind(more)} would be {ratio:.1f} times as fast"
    return [f"warning: {these} do {waste:.0f} times the work that the output needs; {advice}"]


def _runners_up(run: RunPlan) -> list[str]:
    lines = []
    for runner_up in run.runners_up:
        ratio = runner_up.voxels_per_second / run.voxels_per_second
        why = (
            f"{ratio:.2f} times as fast, {_over(runner_up)} over the limit"
            if _over(runner_up)
            else f"{1 - ratio:.0%} slower"
            if ratio < 0.995
            else "as fast"
            if ratio < 1.005
            else f"{ratio - 1:.0%} faster, but it needs more memory"
        )
        lines.append(f"runner-up: {_kind(runner_up)}, {runner_up.voxels_per_second:,.0f} voxels/s: {why}")
    return lines


def _over(runner_up: RunnerUp) -> str:
    """Say how far it is above the limits; empty if it fits."""
    parts = [human_bytes(runner_up.over_bytes)] * (runner_up.over_bytes > 0)
    parts += [f"{human_bytes(runner_up.over_vram_bytes)} of VRAM"] * (runner_up.over_vram_bytes > 0)
    return " and ".join(parts)
