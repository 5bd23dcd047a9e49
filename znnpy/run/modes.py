"""On which devices layers run, and how: GPUs, the processor, one after the other on both, or both side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from znnpy.errors import NoPlanError
from znnpy.machine import Limits, Machine
from znnpy.network import Network
from znnpy.planner.beside import idle, plan_beside
from znnpy.planner.cost import Rates
from znnpy.planner.plan import Plan, device_of
from znnpy.planner.search import make_plan
from znnpy.planner.several import Make
from znnpy.run.devices import Site
from znnpy.run.shelf import Shelf
from znnpy.shapes import Vec3

HOSTED = ("gpu-host", "cpu-to-gpu")  # of one GPU: the first layers have their tensors in the memory of the host
MODES = ("auto", "cpu", "gpu", *HOSTED, "side-by-side")
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


def check_hosted(mode: str, gpus: int | None, *, measures: bool = False) -> None:
    """ValueError for words that do not go with a mode in which layers run on two devices.

    measures  layers are to be measured, or checked, before there is a plan
    """
    if mode in HOSTED and gpus != 1:
        raise ValueError(f"--mode {mode} runs on one GPU: leave out --gpus, or choose --mode gpu")
    if mode in HOSTED and measures:
        raise ValueError(
            f"layers of --mode {mode} are not run before there is a plan: leave out --rigor and --paranoid"
        )


def hosted_words(mode: str, site: Site, limits: Limits) -> dict[str, Any]:
    """What `make_plan` is told of a mode in which layers run on two devices; nothing of others."""
    return {"mode": mode, "host_rates": processor_rates(site.machine, limits)} if mode in HOSTED else {}


def processor_rates(machine: Machine, limits: Limits) -> Rates | None:
    """As `znnpy measure` stored them, of the processor of a machine with a GPU; None: assumed."""
    costs = Shelf().of(replace(machine, gpu=None), "cpu", limits.threads)
    return None if costs is None else costs.rates(Shelf().table)


def names_on(device: str, only: Sequence[str], mode: str) -> tuple[str, ...]:
    """Of primitives that alone are to be taken, those for a device; all of them where only one may be meant."""
    return tuple(name for name in only if mode != "side-by-side" or device_of(name) == device)


def processor_plans(site: Site, network: Network, only: Sequence[str], **words: Any) -> Make:
    """Plans for the processor beside a GPU of `site`, as `plan_beside` asks for them; `words` are `make_plan`'s."""
    machine = replace(site.machine, gpu=None)
    names = names_on("cpu", only, "side-by-side")

    def make(output: Vec3, limits: Limits) -> Plan:
        rates = processor_rates(machine, limits)
        return make_plan(network, output, machine, limits, only=names, rates=rates, baseline=0, **words)

    return make


def with_processor(
    made: Plan,
    mode: str,
    make: Make,
    processor: Make,
    network: Network,
    only: Sequence[str],
    *,
    masks: bool,
    show: bool = False,
) -> tuple[Plan, Plan | None]:
    """The plan for a mode, and the one of another mode that lost, if that was worked out.

    made       the best plan of GPUs alone, or of the processor
    make       plans as `made` is for one GPU; processor: such as the processor has beside GPUs
    only       names of primitives that alone are to be taken
    show       work it out for short runs too, which do not take it

    NoPlanError where it cannot, and has to.
    """
    if mode not in ("auto", "side-by-side") or made.device == "cpu":
        return made, None
    if mode == "side-by-side":
        both = plan_beside(made, make, processor, network, masks=masks)
        if not both.dealt:
            raise NoPlanError(f"{idle(both)}: choose --mode gpu, or a larger volume")
        return both, made
    if not (show or made.seconds >= LONG_SECONDS) or (only and not names_on("cpu", only, "side-by-side")):
        return made, None
    try:
        both = plan_beside(made, make, processor, network, masks=masks)
    except NoPlanError:  # the memory of the process does not suffice for two
        return made, None
    gains = both.dealt > 0 and both.seconds < GAIN * made.seconds and made.seconds >= LONG_SECONDS
    return (both, made) if gains else (made, both)
