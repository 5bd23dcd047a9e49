"""On which devices layers run, and how: GPUs, the processor, one after the other on both, or both side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from znnpy.errors import NoPlanError
from znnpy.machine import Limits, Machine
from znnpy.messages import option
from znnpy.network import Network
from znnpy.planner.beside import Makes, idle, plan_beside
from znnpy.planner.cost_model import Rates
from znnpy.planner.explain import offloaded_layers
from znnpy.planner.memory import DeviceKind
from znnpy.planner.plan import Plan, device_of
from znnpy.planner.search import make_plan
from znnpy.planner.several import plan_for
from znnpy.run.devices import Site
from znnpy.run.learning import Known
from znnpy.run.shelf import Shelf
from znnpy.shapes import Vec3

HOSTED = ("gpu-host", "cpu-to-gpu")  # of one GPU: the first layers have their tensors in the memory of the host
MODES = ("auto", "cpu", "gpu", *HOSTED, "side-by-side")
LONG_SECONDS = 60.0  # of a run, from which on it pays to look at what the processor may do of it
# Of a GPU's time alone, predicted, in which a run has to end that nobody asked to be on two devices. With hosted layers
# runs took up to 1.5 times as long as predicted, where these had not been timed, and the GPU alone down to 0.35 times;
# up to 2.8 times where the processor's rates were assumed; side by side 0.99 to 1.16 times (`modes_alone-`,
# `modes_timed-`, `modes_passed_over-`, `side_by_side-` and `side_by_side_again-nvidia-h200-2026-11-22.json`).
GAIN, ASSUMED_GAIN, BESIDE_GAIN = 0.5, 0.3, 0.8


def device_meant(mode: str, device: str) -> str:
    """The device of a mode, or `device` where it does not matter; ValueError for words that contradict each other."""
    if mode not in MODES:
        raise ValueError(f"there is no mode {mode!r}; choose one of {', '.join(MODES)}")
    if mode == "auto":
        return device
    meant = "cpu" if mode == "cpu" else "gpu"
    if device not in ("auto", meant):
        raise ValueError(
            f"{option('mode', mode)} is of the {meant.upper()}, and {option('device', device)} was asked for: drop one"
        )
    return meant


def check_hosted(mode: str, gpus: int | None) -> None:
    """ValueError for words that do not go with a mode in which layers run on two devices."""
    if mode in HOSTED and gpus != 1:
        raise ValueError(
            f"{option('mode', mode)} runs on one GPU: leave out {option('gpus')}, or choose {option('mode', 'gpu')}"
        )


def rates_of(site: Site, network: Network, limits: Limits, mode: str) -> Known:
    """What is known of the devices that a mode may take, before layers are measured for a plan."""
    known: dict[DeviceKind, Rates] = {}
    if (rates := site.rates(network, limits)) is not None:
        known[site.device] = rates
    if site.device == "gpu" and mode != "gpu" and (rates := processor_rates(site.machine, limits)) is not None:
        known["cpu"] = rates
    return known


def processor_rates(machine: Machine, limits: Limits) -> Rates | None:
    """As `znnpy measure` stored them, of the processor of a machine with a GPU; None: assumed."""
    costs = Shelf().of(replace(machine, gpu=None), "cpu", limits.threads)
    return None if costs is None else costs.rates(Shelf().table)


def names_on(device: str, only: Sequence[str], mode: str) -> tuple[str, ...]:
    """Of primitives that alone are to be taken, those for a device; all of them where only one may be meant."""
    return tuple(name for name in only if mode != "side-by-side" or device_of(name) == device)


def names_of_gpu(only: Sequence[str], mode: str) -> tuple[str, ...]:
    """The same that say which device is meant: in modes of two devices those of the GPU."""
    two = mode in (*HOSTED, "side-by-side")
    return tuple(name for name in only if not two or device_of(name) == "gpu")


def processor_plans(
    site: Site, network: Network, only: Sequence[str], rates: Rates | None = None, **words: Any
) -> Makes:
    """Plans for the processor beside a GPU of `site`, as `plan_beside` asks for them; `words` are `make_plan`'s.

    rates  of all threads that the process may have; None: as `znnpy measure` stored them, else assumed
    """
    machine = replace(site.machine, gpu=None)
    names = names_on("cpu", only, "side-by-side")

    def make(output: Vec3, limits: Limits, *, patch: Vec3 | None = None) -> Plan:
        known, here = rates or processor_rates(machine, limits), limits.without_feed_threads(site.devices)
        known = None if known is None else known.slowed(limits.threads / here.threads)
        return make_plan(network, output, machine, here, patch=patch, only=names, rates=known, baseline=0, **words)

    return make


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be planned.

    limits      of the whole process, and of each GPU
    held        bytes of the process without the run
    only        names of primitives that alone are to be taken
    masks       are counted, of the input voxels that are not finite
    make        the best plan for one of the site's devices, of an output and within limits; more words of `make_plan`
    processor   such as the processor has beside GPUs
    host_rates  of the processor where it computes first layers; None: as `znnpy measure` stored them, else assumed
    """

    mode: str
    site: Site
    network: Network
    output: Vec3
    limits: Limits
    held: int
    only: Sequence[str]
    masks: bool
    make: Callable[..., Plan]
    processor: Makes
    host_rates: Rates | None = None

    def best(self, *, show: bool = False) -> tuple[Plan, list[Plan]]:
        """The best plan of the mode, or of all modes where none is forced, and those of others that lost.

        show  work these out for short runs too, which do not take them, and where they are known to be slower

        NoPlanError where nothing fits, or the mode gains nothing.
        """
        if self.mode in HOSTED:
            return self._hosted(self.mode), []
        try:
            alone = plan_for(
                self.site.devices, self.make, self.network, self.output, self.limits, self.held, masks=self.masks
            )
        except NoPlanError:
            if self.mode != "auto" or not (found := list(self._hosted_instead())):
                raise
            return _fastest(found), []
        if alone.device == "cpu" or self.mode == "gpu":
            return alone, []
        if self.mode == "side-by-side":
            both = self._beside(alone)
            if not both.cpu_items:
                raise NoPlanError(f"{idle(both)}: choose {option('mode', 'gpu')}, or a larger volume")
            return both, [alone]
        is_long = alone.seconds >= LONG_SECONDS
        if not (is_long or show):
            return alone, []
        others = [*self._beside_if_any(alone), *self._hosted_beside(alone, show=show)]
        best = _fastest([alone, *(plan for plan in others if is_long and _gains(plan, alone))])
        return best, [plan for plan in (alone, *others) if plan is not best]

    def _beside(self, alone: Plan) -> Plan:
        return plan_beside(alone, self.make, self.processor, self.network, masks=self.masks)

    def _beside_if_any(self, alone: Plan) -> Iterator[Plan]:
        """None where the memory of the process does not suffice for two."""
        if not self.only or names_on("cpu", self.only, "side-by-side"):
            with suppress(NoPlanError):
                yield self._beside(alone)

    def _hosted(self, mode: str, **words: Any) -> Plan:
        rates = self.host_rates or processor_rates(self.site.machine, self.limits)
        return self.make(self.output, self.limits, mode=mode, host_rates=rates, baselines=False, **words)

    @property
    def _may_be_hosted(self) -> bool:
        site, free = self.site, not self.only
        one_gpu = site.device == "gpu" and site.devices == 1
        return free and one_gpu and site.precision != "fp16" and len(self.network.layers) > 1

    def _hosted_instead(self) -> Iterator[Plan]:
        """Plans that fit where none does of the GPU alone."""
        for mode in HOSTED if self._may_be_hosted else ():
            with suppress(NoPlanError):
                yield self._hosted(mode, kinds=False)

    def _hosted_beside(self, alone: Plan, *, show: bool) -> Iterator[Plan]:
        """Those that are faster than `alone`; of modes where none is, to be shown, the best with its patches."""
        for mode in HOSTED if self._may_be_hosted else ():
            try:
                yield self._hosted(mode, than=alone, kinds=False)
            except NoPlanError:
                if show:
                    with suppress(NoPlanError):
                        yield self._hosted(mode, patch=alone.patch_out, columns=alone.streams, kinds=False)


def scheme_of(plan: Plan) -> str:
    """Words on a plan that is not of one device alone; empty where it is."""
    if plan.cpu_plan is not None:
        return "with the processor beside it"
    return f"{plan.mode} with {offloaded_layers(plan)}" if plan.offloaded else ""


def _gains(plan: Plan, alone: Plan) -> bool:
    """Enough to be taken where nobody asked for it: predictions for two devices are not as good as for one."""
    if plan.cpu_plan is None:
        known = all(choice.measured or choice.fitted for choice in plan.choices[: plan.offloaded])
        return plan.seconds < (GAIN if known else ASSUMED_GAIN) * alone.seconds
    return plan.seconds < BESIDE_GAIN * alone.seconds and plan.cpu_items > 0


def _fastest(plans: Sequence[Plan]) -> Plan:
    return min(plans, key=lambda plan: plan.seconds)
