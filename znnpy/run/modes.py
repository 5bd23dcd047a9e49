"""On which devices layers run, and how: a GPU, the processor, or both side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from znnpy.errors import NoPlanError
from znnpy.machine import Limits
from znnpy.network import Network
from znnpy.planner.beside import idle, plan_beside
from znnpy.planner.plan import Plan, device_of
from znnpy.planner.search import make_plan
from znnpy.planner.several import Make
from znnpy.run.devices import Site
from znnpy.run.shelf import Shelf
from znnpy.shapes import Vec3

MODES = ("auto", "cpu", "gpu", "side-by-side")
LONG_SECONDS = 60.0  # of a run, from which on the processor is asked for help where nobody said so
GAIN = 0.97  # of a GPU's time alone: what takes longer is not worth an output that differs in its last bits


def device_meant(mode: str, device: str) -> str:
    """The device of a mode, or `device` where it does not matter; ValueError for words that contradict each other."""
    if mode not in MODES:
        raise ValueError(f"there is no mode {mode!r}; choose one of {', '.join(MODES)}")
    if mode == "auto":
        return device
    meant = "cpu" if mode == "cpu" else "gpu"
    if device not in ("auto", meant):
        raise ValueError(f"--mode {mode} is of the {meant.upper()}, and --device {device} was asked for: drop one")
    return meant


def names_on(device: str, only: Sequence[str], mode: str) -> tuple[str, ...]:
    """Of primitives that alone are to be taken, those for a device; all of them where only one may be meant."""
    return tuple(name for name in only if mode != "side-by-side" or device_of(name) == device)


def processor_plans(site: Site, network: Network, only: Sequence[str], **words: Any) -> Make:
    """Plans for the processor beside a GPU of `site`, as `plan_beside` asks for them; `words` are `make_plan`'s."""
    machine = replace(site.machine, gpu=None)
    names = names_on("cpu", only, "side-by-side")

    def make(output: Vec3, limits: Limits) -> Plan:
        costs = Shelf().of(machine, "cpu", limits.threads)
        rates = None if costs is None else costs.rates(Shelf().table)
        return make_plan(network, output, machine, limits, only=names, rates=rates, baseline=0, **words)

    return make


def with_processor(
    made: Plan,
    mode: str,
    make: Make,
    processor: Make,
    network: Network,
    *,
    masks: bool,
    long: float = LONG_SECONDS,
) -> tuple[Plan, Plan | None]:
    """The plan for a mode, and the one of another mode that lost, if that was worked out.

    made       the best plan of GPUs alone, or of the processor
    make       plans as `made` is for one GPU; processor: such as the processor has beside GPUs
    long       seconds of `made`, from which on it is tried whether the processor helps

    NoPlanError where it cannot, and has to.
    """
    if mode not in ("auto", "side-by-side") or made.device == "cpu":
        return made, None
    if mode == "side-by-side":
        both = plan_beside(made, make, processor, network, masks=masks)
        if not both.dealt:
            raise NoPlanError(f"{idle(both)}: choose --mode gpu, or a larger volume")
        return both, made
    if made.seconds < long:
        return made, None
    try:
        both = plan_beside(made, make, processor, network, masks=masks)
    except NoPlanError:  # the memory of the process does not suffice for two
        return made, None
    return (both, made) if both.dealt and both.seconds < GAIN * made.seconds else (made, both)
