"""Where a run computes: the caller's words in, a machine with or without its GPU out, and what there is to say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from znnpy.errors import DeviceError, NoPlanError, PlanFileError
from znnpy.kernels.gpu.device import Device, find_gpu, find_gpus
from znnpy.machine import Gpu, Limits, Machine, limits_of, process_bytes, this_machine
from znnpy.messages import option
from znnpy.planner.costs import Costs
from znnpy.planner.memory import CONTEXT_BYTES, context_bytes
from znnpy.run.calibration import measured_rates
from znnpy.run.shelf import Shelf
from znnpy.shapes import PRECISIONS, Precision
from znnpy.units import human_bytes

if TYPE_CHECKING:
    from znnpy.network import Network
    from znnpy.planner.cost_model import Rates
    from znnpy.planner.memory import DeviceKind
    from znnpy.planner.plan import Plan

DEVICES = ("auto", "cpu", "gpu")
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))  # the last: under Windows
LESS = 0.9  # of a limit that did not hold
MOST_CONTEXT_BYTES = 640 * 2**20  # that CUDA takes of a GPU as it is opened: what is more is others'
# Of the process, that CUDA's compiler and libraries take once they are used: 570 MiB where every kernel of a network is
# compiled first, 200 where they are there already (H200, CUDA 13).
LATER_BYTES = 768 * 2**20
IDLE_SHARE = 0.9  # of a card's memory that is free where nobody else uses it


@dataclass(frozen=True, slots=True)
class Site:
    """Where a run computes: on the processors of a machine, or on its GPU, which is open if the machine is here."""

    machine: Machine  # its `gpu` is set where the layers run there
    precision: Precision = "fp32"
    sentences: tuple[str, ...] = ()  # what is not as asked for, to be told once
    gpu: Device | None = None
    others: tuple[Device, ...] = ()  # GPUs of the same kind that compute too
    planned: int = 1  # devices that a plan is for on a machine that is not here
    free_bytes: int | None = None  # of the GPU's memory when it was opened, with what CUDA took then: the least of all
    context_bytes: int = 0  # that CUDA took then
    costs: Shelf = field(default_factory=Shelf)  # what was measured of the machine

    @property
    def device(self) -> DeviceKind:
        return "cpu" if self.machine.gpu is None else "gpu"

    @property
    def gpus(self) -> tuple[Device, ...]:
        """All that are open, but for those that failed."""
        return tuple(gpu for gpu in (self.gpu, *self.others) if gpu is not None and not gpu.abandoned)

    @property
    def devices(self) -> int:
        """How many compute, the processors as one."""
        return len(self.gpus) or self.planned

    @property
    def later_bytes(self) -> int:
        """What the process will hold beside what it does now and what is counted for its plan."""
        return 0 if self.device == "cpu" else LATER_BYTES

    def limits(
        self, ram: int | str | None, threads: int | None, vram: int | str | None, *, beyond: bool = False
    ) -> Limits:
        """What a run may use here; DeviceError where as much of the GPU's memory is not free, unless `beyond` it."""
        return limits_of(self.machine, ram, threads, vram, free_bytes=self.free_bytes, beyond=beyond)

    def beyond(self, limits: Limits) -> list[str]:
        """A sentence on limits that are more than what is free on the GPU."""
        gpu, free, vram = self.machine.gpu, self.free_bytes, limits.vram_bytes
        if gpu is None or free is None or vram is None or vram <= free:
            return []
        return [
            f"{option('vram')} allows {human_bytes(vram)}, and of the {human_bytes(gpu.memory_bytes)} of the "
            f"{gpu.name} "
            f"{human_bytes(free)} are free: what needs more does not run there now"
        ]

    def above_memory(self, limits: Limits) -> tuple[str, ...]:
        """A sentence on a limit that is more than the memory of the machine; none where it is not."""
        ram = self.machine.ram_bytes
        if limits.ram_bytes <= ram:
            return ()
        allowed = option("ram", human_bytes(limits.ram_bytes))
        return (f"{allowed} is above the {human_bytes(ram)} of this machine, which ends a process that needs more",)

    def rates(self, network: Network, limits: Limits) -> Rates | None:
        """As `znnpy measure` found them; of a GPU that is here, the network's layers too. None: assumed."""
        stored = self.costs.of(self.machine, self.device, limits.threads)
        if self.gpu is None or limits.vram_bytes is None:
            return None if stored is None else stored.rates(self.costs.table)
        room = self.room(limits)
        return measured_rates(self.gpus[0], self.machine, network, self.precision, vram_bytes=room, stored=stored)

    def room(self, limits: Limits) -> int:
        """Bytes of the device's memory that a layer which is timed may take: within the limits and what is there."""
        if self.device == "cpu":
            return min(limits.ram_bytes, limits_of(self.machine).ram_bytes) - process_bytes()
        return min(limits.vram_bytes or 0, self.free_bytes or 0) - context_bytes(self.context_bytes)

    def words(self) -> dict[str, Any]:
        """What `make_plan` is told of it beside the machine."""
        if self.device == "cpu":
            return {}
        return {"device": "gpu", "precision": self.precision, "context": self.context_bytes}

    def taken_bytes(self) -> int | None:
        """What this process takes of a GPU now, with what CUDA does, of several the most; None on the CPU."""
        if self.free_bytes is None or not self.gpus:
            return None
        return self.free_bytes - min(gpu.free_bytes() for gpu in self.gpus)

    def less_than(self, plan: Plan) -> int:
        """A limit for another plan where the GPU refused what `plan` needs, and all that it gave was given back."""
        free = self.context_bytes + min((gpu.free_bytes() for gpu in self.gpus), default=0)
        return int(LESS * min(free, plan.limits.vram_bytes or free))

    def check_free(self, plan: Plan) -> None:
        """PlanFileError when other programs hold so much of the GPU's memory that a plan made earlier does not fit."""
        if self.machine.gpu is None or self.free_bytes is None or plan.memory.vram <= self.free_bytes:
            return
        raise PlanFileError(
            f"the plan needs {plan.memory.vram:,} bytes of VRAM, and of the {self.machine.gpu.memory_bytes:,} bytes of "
            f"the {self.machine.gpu.name} only {self.free_bytes:,} are free; end the programs that hold the rest, or "
            f"make a plan with `znnpy plan NETWORK --volume VOLUME --vram {self.free_bytes // 2**20}M`"
        )


def check_device_words(device: str, vram: int | str | None, precision: str | None, only: Sequence[str] = ()) -> str:
    """Which device is meant: `device`, or the one that all names of `only` are of.

    ValueError for words on the device that there are not, or that contradict each other.
    """
    if device not in DEVICES:
        raise ValueError(f"there is no device {device!r}; choose one of {', '.join(DEVICES)}")
    word_of(precision)
    kinds = {name.partition(".")[0] for name in only}
    meant = kinds.pop() if len(kinds) == 1 else device
    if device not in ("auto", meant):
        raise ValueError(
            f"{option('only')} {' and '.join(only)} is of the {meant.upper()}, "
            f"and {option('device', device)} was asked for: drop one"
        )
    if meant == "cpu" and vram is not None:
        raise ValueError(f"{option('vram')} limits the memory of a GPU, and none is used: drop it")
    return meant


def gpus_of(gpus: int | str | None, meant: str) -> int | None:
    """How many GPUs compute, None for "all"; ValueError for words that there are not."""
    if gpus is None:
        return 1
    if meant == "cpu":
        raise ValueError(
            f"{option('gpus')} are for runs on GPUs, and {option('device', 'cpu')} was asked for: drop one"
        )
    if gpus == "all":
        return None
    count = int(gpus) if isinstance(gpus, int) or gpus.isdecimal() else 0
    if count < 1:
        raise ValueError(f"{gpus!r} is no number of GPUs: give 1 or more, or all")
    return count


@contextmanager
def site_for(
    make: Callable[[Site], Plan],
    meant: str,
    vram: int | str | None = None,
    precision: str | None = None,
    costs: Shelf | None = None,
    *,
    gpus: int | None = 1,
) -> Iterator[tuple[Site, Plan]]:
    """Inside, what the plan that `make` gives runs on is open.

    meant      "auto": the GPU where there is one that works and `make` finds a plan for it, else the CPU, and a
               sentence of the site says why. Who limits its memory wants it: then there has to be a plan.
    precision  None: fp32. The CPU computes in fp32 whatever is asked for, and a sentence says so.
    costs      None: those that are stored of this machine
    gpus       how many compute, where it runs on GPUs; None: all that are as the first

    DeviceError when the GPU is meant and there is none to use, or there are not so many.
    """
    why: list[str] = []
    costs = costs or Shelf()
    if meant == "cpu" and gpus != 1:
        raise DeviceError(f"GPUs were asked for, and the run is on the processor: leave {option('gpus')} out")
    wanted = "gpu" if vram is not None or gpus != 1 else meant  # who says how many, or how much of it, wants one
    if meant != "cpu":
        with ExitStack() as stack:
            found = _found("gpu" if gpus != 1 else meant, why)
            if found is not None:
                try:
                    site = replace(stack.enter_context(_opened(found, word_of(precision), gpus)), costs=costs)
                    plan = _explained(make, site)
                except (DeviceError, NoPlanError) as error:
                    if wanted == "gpu":
                        raise
                    why.append(f"{found.name} is not used: {error}")
                else:
                    yield site, plan
                    return
    here = Site(this_machine(), sentences=(*why, *_unused(vram, precision)), costs=costs)
    yield here, make(here)


@contextmanager
def opened(meant: str, precision: str | None = None) -> Iterator[Site]:
    """Inside, the device that is meant is open, whatever will run there; "auto": the GPU where one works, else the CPU.

    DeviceError when the GPU is meant and there is none to use.
    """
    why: list[str] = []
    found = None if meant == "cpu" else _found(meant, why)
    with ExitStack() as stack:
        if found is not None:
            try:
                site = stack.enter_context(_opened(found, word_of(precision)))
            except DeviceError as error:
                if meant == "gpu":
                    raise
                why.append(f"{found.name} is not used: {error}")
            else:
                yield site
                return
        yield Site(this_machine(), sentences=(*why, *_unused(None, precision)))


def elsewhere(costs: Shelf, device: str, precision: str | None, gpus: int | None = 1) -> Site:
    """The machine that a file of costs is of, as if nobody used its GPUs. PlanFileError where `device` is another."""
    named = costs.named
    assert named is not None, "a machine that is not here is known by its costs"
    if device not in ("auto", named.device):
        raise PlanFileError(
            f"{costs.file} is of the {named.device.upper()} of {named.name}, "
            f"and {option('device', device)} was asked for; "
            f"leave {option('device')} out, or measure with `znnpy measure --device {device}` there"
        )
    gpu = named.machine.gpu
    if gpu is None and gpus != 1:
        raise PlanFileError(f"{costs.file} is of the processor of {named.name}: leave {option('gpus')} out")
    if gpu is None:
        return Site(named.machine, sentences=tuple(_unused(None, precision)), costs=costs)
    if gpus is None:
        raise PlanFileError(f"{costs.file} does not say how many GPUs {named.name} has: give {option('gpus')} a number")
    return Site(named.machine, word_of(precision), (), None, (), gpus, gpu.memory_bytes, CONTEXT_BYTES, costs)


def check_here(plan: Plan) -> None:
    """PlanFileError when `plan` was made for another machine, by what was measured there, and this is not it."""
    if plan.made_for is not None and not _is_here(plan.machine, plan.device):
        raise PlanFileError(
            f"the plan was made for another machine ({plan.made_for}) and runs only there; make one for this machine "
            f"with `znnpy plan`, without {option('machine')}"
        )


def for_elsewhere(plan: Plan, costs: Shelf) -> Plan:
    """`plan`, marked as of the machine that a file of costs is of, unless that is this one."""
    named = costs.named
    assert named is not None, "a machine that is not here is known by its costs"
    return plan if _is_here(plan.machine, plan.device) else replace(plan, made_for=named.name)


def _is_here(fingerprint: str, device: DeviceKind) -> bool:
    """It is this machine's, with its GPU where that is the device."""
    if device == "cpu":
        return fingerprint == this_machine().fingerprint
    try:
        return fingerprint == replace(this_machine(), gpu=find_gpu()).fingerprint
    except DeviceError:
        return False


def machine_of(plan: Plan, file: Path | None = None) -> Machine:
    """That of a file of costs; else this one, with its GPU where `plan` is for one. DeviceError where there is none."""
    if file is not None:
        return Costs.load(file).machine
    return this_machine() if plan.device == "cpu" else replace(this_machine(), gpu=find_gpu())


def word_of(precision: str | None) -> Precision:
    """As a Precision, fp32 where there is no word; ValueError when it is none."""
    for word in PRECISIONS:
        if word == (precision or "fp32"):
            return word
    raise ValueError(f"there is no precision {precision!r}; choose one of {', '.join(PRECISIONS)}")


def _found(meant: str, why: list[str]) -> Gpu | None:
    """The GPU; None, and the reason added to `why`, where there is none to use and none has to be."""
    try:
        return find_gpu()
    except DeviceError as error:
        if meant == "gpu":
            raise
        half_there = find_spec("cupy") is not None or any(path.exists() for path in DRIVERS)
        why.append(str(error) if half_there else "no GPU for CUDA here")
        return None


@contextmanager
def _opened(gpu: Gpu, precision: Precision, gpus: int | None = 1) -> Iterator[Site]:
    """CUDA does not say what it took itself: where others use the card too, it is counted with the most."""
    there = [0] if gpus == 1 else list(find_gpus())
    if gpus is not None and gpus > len(there):
        raise DeviceError(
            f"{gpus} GPUs were asked for, and this process sees {len(there)} of the kind of the first, {gpu.name}: "
            f"lower {option('gpus')}, or check CUDA_VISIBLE_DEVICES"
        )
    with ExitStack() as stack:
        devices = [stack.enter_context(Device(gpu, number)) for number in there[:gpus]]
        free = min(device.free_bytes() for device in devices)
        taken = min(gpu.memory_bytes - free, MOST_CONTEXT_BYTES)
        others = tuple(devices[1:])
        machine = replace(this_machine(), gpu=gpu)
        yield Site(machine, precision, (), devices[0], others, 1, free + taken, taken)


def _explained(make: Callable[[Site], Plan], site: Site) -> Plan:
    """The plan that `make` gives; NoPlanError names what is free on the GPU where others hold a part of it."""
    gpu, free = site.machine.gpu, site.free_bytes
    assert gpu is not None
    assert free is not None
    try:
        return make(site)
    except NoPlanError as error:
        if free > IDLE_SHARE * gpu.memory_bytes:
            raise
        raise NoPlanError(
            f"{error}; of the {gpu.memory_bytes:,} bytes of the {gpu.name} {free:,} were free when the run began"
        ) from None


def _unused(vram: int | str | None, precision: str | None) -> list[str]:
    """What was asked for and does not hold on a CPU."""
    sentences = []
    if vram is not None:
        sentences.append(f"{option('vram')} limits nothing on the CPU")
    if word_of(precision) != "fp32":
        sentences.append(f"the CPU computes in fp32, more exactly than the {precision} that is asked for")
    return sentences
