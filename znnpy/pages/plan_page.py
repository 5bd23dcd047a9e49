"""The page of a plan: how the output is cut, where the time goes, what takes memory, and how to run it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from znnpy.given_options import command_line, given_options
from znnpy.machine import Machine
from znnpy.network import Network
from znnpy.options import PlanOptions
from znnpy.pages.page import figure_picture, filled, threads_text
from znnpy.planner.run_plan import RunPlan
from znnpy.plots.plan_figures import cut_figure, memory_figure, time_figure
from znnpy.report.plan_text import AXES, explain
from znnpy.shapes import text
from znnpy.shared_options import RegionOptions
from znnpy.units import human_bytes, human_seconds

NOT_GIVEN_AGAIN = (  # callbacks, and what only prints or writes
    *("tell", "tell_why", "tell_point", "tell_progress"),
    *("out", "plot", "report", "overwrite", "why", "as_json"),
)
VOLUME, PLAN = "VOLUME", "plan.json"  # names in commands, for what was not named


def plan_page(run: RunPlan, network: Network, machine: Machine | None, asked: PlanOptions, notes: Sequence[str]) -> str:
    """Return the page of a plan that was made as asked.

    machine  that it is held against; None: nothing is said of it
    notes    sentences that the planner told
    """
    plan = run.main
    device = "the GPU" if run.devices == 1 else f"{run.devices} GPUs"
    where = "the CPU" if run.device == "cpu" else f"{device}{' and the CPU' if run.sharing else ''}"
    figures = [
        ("predicted time", human_seconds(run.seconds), f"{run.voxels_per_second:,.0f} voxels/s"),
        ("memory", human_bytes(run.memory.peak), f"limit: {human_bytes(run.limits.ram_bytes)}"),
        ("output", text(run.output), f"of {run.network_name}"),
        ("computed on", where, f"{run.precision}, {threads_text(plan.compute_threads)}"),
        ("work", f"{plan.waste:.2f} times", "what the output needs without borders"),
    ]
    if run.device == "gpu":
        limit = human_bytes(run.limits.vram_bytes or 0)
        figures.insert(2, ("memory of each GPU", human_bytes(run.memory.vram), f"limit: {limit}"))
    trusted = (
        "come from rates measured on the machine"
        if run.fitted
        else "come from assumed rates: `znnpy measure` measures them"
    )
    return filled(
        "plan.html",
        title=f"Plan of {run.network_name}",
        under=f"{text(run.output)} output voxels",
        figures=figures,
        warnings=notes,
        cut_words=cut_words(run),
        cut_picture=figure_picture(cut_figure(plan), "the output, cut into parts"),
        time_picture=figure_picture(time_figure(run, network), "predicted seconds of each layer"),
        trust=f"The seconds {trusted}; the bytes are promised.",
        memory_picture=figure_picture(memory_figure(run), "what takes memory"),
        commands=_commands(asked),
        plan=explain(run, machine),
    )


def cut_words(run: RunPlan) -> str:
    """Say how the output is cut, and what the picture shows."""
    plan = run.main
    if plan.sums is not None:
        return f"In windows of {text(plan.patch_out)} voxels that overlap; one is filled."
    if not plan.streams:
        each = "one patch" if plan.columns == 1 else f"{plan.columns:,} patches, of which one is filled,"
        return f"In {each} of {text(plan.patch_out)} voxels, each computed by itself."
    columns = "one column" if plan.columns == 1 else f"{plan.columns:,} columns, of which one is filled,"
    return (
        f"In {columns} along {AXES[plan.axis]}, in steps of {text(plan.patch_out)} voxels; each step keeps what the "
        "next one needs, so that nothing is computed twice along a column."
    )


def _commands(asked: PlanOptions) -> str:
    """Return the commands that make the plan again and run it."""
    given, _ = given_options(asked, NOT_GIVEN_AGAIN)
    network, volume = given.pop("network", None), given.get("volume", VOLUME)
    first = command_line("plan", [] if network is None else [str(network)], {**given, "out": PLAN})
    of_region = {of.name for of in fields(RegionOptions)}
    region = {name: value for name, value in given.items() if name in of_region}
    chosen = {} if network is None else {"network": network}
    return f"{first}\n{command_line('infer', [str(volume)], {**chosen, **region, 'plan': PLAN})}\n"
