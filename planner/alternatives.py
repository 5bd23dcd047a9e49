"""Why the best plan of one kind is not taken: what it needs, its borders, or the layer that takes longest with it."""

from __future__ import annotations

from math import sqrt

from znnpy.network import Network
from znnpy.planner.plan import Choice, Plan
from znnpy.planner.run_plan import Alternative, RunnerUp, RunPlan
from znnpy.planner.tilings import fusion_groups
from znnpy.units import human_bytes, human_seconds

ALIKE = 1.005  # times the seconds, below which two plans are as fast
MORE_WASTE = 1.05  # times the waste, from which on borders may be the reason


def kind_of(network: Network, best: RunPlan, other: RunPlan, scheme: str = "") -> Alternative:
    """Return `other`, the best plan of its kind or of a scheme that no session runs, compared with the best of all."""
    over, over_vram = other.memory.excess(other.limits)
    runner_up = RunnerUp(
        patch_out=other.patch_out,
        axis=other.main.axis,
        column_planes=other.main.column_planes,
        sub_batches=other.main.sub_batches,
        voxels_per_second=other.voxels_per_second,
        waste=other.main.waste,
        over_bytes=over,
        over_vram_bytes=over_vram,
    )
    return Alternative(
        other.device, runner_up, other.memory.peak, other.memory.vram, why_lost(network, best, other), scheme
    )


def why_lost(network: Network, best: RunPlan, other: RunPlan) -> str:
    """Return a sentence that says why `other` is not taken: it does not fit, or is not faster than `best`."""
    over, over_vram = other.memory.excess(other.limits)
    if over or over_vram:
        parts = [human_bytes(over)] * (over > 0) + [f"{human_bytes(over_vram)} of VRAM"] * (over_vram > 0)
        return f"does not fit: {' and '.join(parts)} more, at the least"
    ratio = other.seconds / best.seconds
    if other.sharing is not None:
        if not other.cpu_items:
            return idle(other)
        fast = f"{_times(1 / ratio)} times as fast" if ratio < 1 else f"{_times(ratio)} times as long"
        return f"{fast}, which is not worth an output whose last bits depend on who computed what"
    if other.main.offloaded and ratio < 1 / ALIKE:
        return f"{_times(1 / ratio)} times as fast: too little, or too short a run, to be taken unasked"
    if other.main.offloaded and ratio >= ALIKE:
        return f"{_times(ratio)} times as long: {_two_memories(other.main)}"
    if best.main.offloaded and ratio >= ALIKE:
        return f"{_times(ratio)} times as long, with all layers on the {other.device.upper()}"
    if best.sharing is not None and other.device == "gpu":
        return f"{_times(ratio)} times as long, without the CPU"
    more = other.memory.device_bytes - best.memory.device_bytes
    if ratio < ALIKE and other.device == best.device and more > 0:
        fast = "as fast" if ratio >= 1 / ALIKE else f"{_times(1 / ratio)} times as fast"
        return f"{fast}, and needs {human_bytes(more)} more"
    if ratio < 1 / ALIKE:
        return f"{_times(1 / ratio)} times as fast, but where both may be taken the GPU is"
    if ratio < ALIKE:
        return "as fast"
    waste = other.main.waste / best.main.waste
    if waste >= MORE_WASTE and waste >= sqrt(ratio):
        return f"{_times(ratio)} times as long: {_times(waste)} times the waste"
    return f"{_times(ratio)} times as long: {_slowest(network, best.main, other.main)}"


def _two_memories(plan: Plan) -> str:
    """Say what each of two stages takes of a step."""
    front, back = plan.stage_seconds
    handed = plan.stages[1].wait_seconds
    return (
        f"of a step its first layers take {human_seconds(front)}, handing over {human_seconds(handed)}, and all others "
        f"{human_seconds(back - handed)}"
    )


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 1.2 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:,.0f}"


def _slowest(network: Network, best: Plan, other: Plan) -> str:
    """Name the layer that takes the most time more than in `best`, and what is different there."""
    before, after = _by_group(network, best), _by_group(network, other)
    spent, theirs_spent = (
        [sum(choice.total_seconds for choice in group) for group in some] for some in (before, after)
    )
    more = [theirs - ours for ours, theirs in zip(spent, theirs_spent, strict=True)]
    index = max(range(len(more)), key=more.__getitem__)
    idle = other.seconds - best.seconds - sum(more)
    prepared = other.preparing_seconds - best.preparing_seconds
    if prepared > max(more[index], idle - prepared):
        return f"preparing its memory takes {human_seconds(prepared)} more"
    if more[index] < idle:
        return "nothing is computed while its first patch comes in and its last one goes out"
    ours, theirs = (max(some[index], key=lambda choice: choice.total_seconds) for some in (before, after))
    layer = f"layer {theirs.layers[0]} ({network.layers[theirs.layers[0]]})"
    longer = f"{layer} takes {human_seconds(more[index])} more"
    if theirs.primitive != ours.primitive:
        return f"{longer} with {theirs.primitive}"
    if theirs.resident_bytes < ours.resident_bytes:
        return f"{longer}, as it needs its kernels again in each of {theirs.executions:,} runs"
    parts = other.sub_batches[other.choices.index(theirs)]
    return f"{longer}, in {parts} parts" if parts > 1 and theirs.executions > ours.executions else longer


def idle(both: RunPlan) -> str:
    """Say why the CPU computes nothing while GPUs run."""
    cpu = both.workers[1].plan
    first = cpu.seconds_to_begin + cpu.seconds_per_step
    return (
        f"the GPU is done in {human_seconds(both.seconds)}, and of the parts that suit both the CPU takes "
        f"{human_seconds(first)} for one"
    )


def _by_group(network: Network, plan: Plan) -> list[list[Choice]]:
    """Return the choices of each convolution with the pooling behind it, and of every other layer."""
    return [[c for c in plan.choices if first <= c.layers[0] <= last] for first, last in fusion_groups(network)]


def offloaded_layers(plan: Plan) -> str:
    """Say how many layers have their tensors in the memory of the host."""
    count = 1 + plan.stages[0].choices[-1].layers[1]
    return f"{count} layer{'s' if count > 1 else ''} in the memory of the host"
