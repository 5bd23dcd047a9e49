"""A plan in words and tables: what runs where, what it costs, what it needs, and what lost."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from znnpy.machine import Machine
from znnpy.network import Network
from znnpy.planner.plan import Memory, Plan
from znnpy.shapes import text

LONGEST = 1e9  # seconds that are told from each other: a plan edited by hand may say any number
MUCH_WASTE = 20.0  # times the work without borders, from which on more memory is the better advice


def explain(plan: Plan, network: Network, machine: Machine) -> RenderableType:
    """Everything `znnpy plan` prints: patches, layers, memory, prediction, runners-up; `machine` is where it prints."""
    return Group(
        Text(_patches(plan, network)),
        _layers(plan, network),
        _memory(plan.memory, plan.limits.ram_bytes),
        *(Text(line) for line in (*_prediction(plan, machine), *_waste(plan), *_runners_up(plan))),
    )


def human_bytes(nbytes: int) -> str:
    """Three digits in the unit that suits: `1610612736` as `1.50 GiB`."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            amount = nbytes / 1024**power
            return f"{amount:.{2 if amount < 10 else 1 if amount < 100 else 0}f} {unit}"
    return f"{nbytes} B"


def human_seconds(seconds: float) -> str:
    """Two or three digits in the unit that suits."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if not seconds < LONGEST:
        return "over 30 years"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


def _patches(plan: Plan, network: Network) -> str:
    patches = f"{plan.columns:,} patch{'es' if plan.columns != 1 else ''}"
    return (
        f"{network.name}: {text(plan.output)} output voxels in {patches}, each {text(plan.patch_in)} in and "
        f"{text(plan.patch_out)} out (field of view {text(network.field_of_view)}, "
        f"period {text(network.period)}); borders make the work {plan.waste:.2f} times what the output needs"
    )


def _layers(plan: Plan, network: Network) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("layer")
    table.add_column("input", no_wrap=True)
    table.add_column("primitive", no_wrap=True)
    for column in ("time", "share", "working", "kept"):
        table.add_column(column, justify="right", no_wrap=True)
    total = plan.seconds_per_step
    for choice in plan.choices:
        first, last = choice.layers
        table.add_row(
            f"{first} {network.layers[first]}" + (f"\n{last} {network.layers[last]}, in one" if last > first else ""),
            text(choice.shape.in_shape),
            f"{choice.primitive}\n{choice.variant}".rstrip(),
            human_seconds(choice.seconds),
            f"{choice.seconds / total:.0%}" if total else "",
            human_bytes(choice.working_bytes),
            human_bytes(choice.resident_bytes),
        )
    return table


def _memory(memory: Memory, limit: int) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("memory")
    table.add_column("bytes", justify="right")
    for what, nbytes in (
        ("the process itself, measured", memory.baseline),
        ("arena: activations and scratch", memory.arena),
        ("prepared weights", memory.residents),
        ("patches on their way in", memory.reading),
        ("patches on their way out", memory.writing),
        ("allowance for libraries", memory.allowance),
    ):
        table.add_row(what, human_bytes(nbytes))
    table.add_section()
    table.add_row(f"peak, of the limit of {human_bytes(limit)}", f"{human_bytes(memory.peak)}")
    return table


def _prediction(plan: Plan, machine: Machine) -> list[str]:
    """The figures, and how far to trust them."""
    lines = [
        f"predicted: {plan.voxels_per_second:,.0f} output voxels/s, {human_seconds(plan.seconds_per_step)} a patch, "
        f"{human_seconds(plan.seconds)} in all, with {plan.limits.threads} thread"
        f"{'s' if plan.limits.threads != 1 else ''}"
    ]
    layers = sum(1 + choice.layers[1] - choice.layers[0] for choice in plan.choices)
    measured = sum(1 + choice.layers[1] - choice.layers[0] for choice in plan.choices if choice.measured)
    if measured == layers:
        lines.append("the time of every layer was measured on the machine the plan was made on")
    else:
        lines.append(
            f"the time of {layers - measured} of {layers} layers is estimated from assumed "
            "rates, not measured on this machine; the bytes are promised"
        )
    if plan.machine != machine.fingerprint:
        lines.append(f"the plan was made on another machine ({plan.machine}; this one is {machine.fingerprint})")
    if plan.limits.ram_bytes > machine.ram_bytes:
        lines.append(
            f"the limit of {human_bytes(plan.limits.ram_bytes)} is above the {human_bytes(machine.ram_bytes)} of this "
            "machine" + ("; the plan does not run here" if plan.memory.peak > machine.ram_bytes else "")
        )
    if plan.limits.threads > machine.cores:
        lines.append(f"{plan.limits.threads} threads are planned and this machine has {machine.cores} cores for them")
    return lines


def _waste(plan: Plan) -> list[str]:
    """A warning when nearly all the work is spent on borders, with what more memory would buy."""
    waste = plan.waste
    if waste < MUCH_WASTE:
        return []
    more = max((r for r in plan.runners_up if r.over_bytes), key=lambda r: r.voxels_per_second, default=None)
    advice = "give larger patches (--patch) or more memory (--ram)"
    if more is not None:
        ratio = more.voxels_per_second / plan.voxels_per_second
        megabytes = -(-(plan.limits.ram_bytes + more.over_bytes) // 2**20)
        advice = f"already with --ram {megabytes}M patches of {text(more.patch_out)} would be {ratio:.1f} times as fast"
    return [f"warning: patches this small do {waste:.0f} times the work that the output needs; {advice}"]


def _runners_up(plan: Plan) -> list[str]:
    lines = []
    for runner_up in plan.runners_up:
        ratio = runner_up.voxels_per_second / plan.voxels_per_second
        why = (
            f"{ratio:.2f} times as fast, {human_bytes(runner_up.over_bytes)} over the limit"
            if runner_up.over_bytes
            else f"{1 - ratio:.0%} slower"
            if ratio < 0.995
            else "as fast"
        )
        lines.append(
            f"runner-up: patches of {text(runner_up.patch_out)}, {runner_up.voxels_per_second:,.0f} voxels/s: {why}"
        )
    return lines
