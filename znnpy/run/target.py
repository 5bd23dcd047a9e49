"""The devices that a run may compute on: found, opened, and what is known of their memory and speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from znnpy.costs.cost_file import Costs
from znnpy.costs.model import Rates
from znnpy.costs.store import CostStore
from znnpy.errors import DeviceError, NoPlanError, PlanFileError
from znnpy.kernels.cpu.native.library import why_not_bf16
from znnpy.kernels.gpu.device import Device, find_gpu, find_gpus
from znnpy.machine import Gpu, Limits, Machine, limits_of, process_bytes, this_machine
from znnpy.measure.gpu_layers import MOST_SECONDS, measured_rates
from znnpy.messages import option
from znnpy.network import Network
from znnpy.option_values import AskedMode, DeviceKind
from znnpy.planner.memory import CONTEXT_BYTES, context_bytes
from znnpy.planner.request import KnownRates, Target
from znnpy.planner.run_plan import RunPlan
from znnpy.run.asked import AskedDevices
from znnpy.shapes import CPU_PRECISIONS, GPU_PRECISIONS, Precision, cpu_precision
from znnpy.units import human_bytes

DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))  # the last: under Windows
LESS = 0.9  # of a limit that did not hold
MOST_CONTEXT_BYTES = 640 * 2**20  # that CUDA takes of a GPU as it is opened: what is more is others'
# CUDA's compiler and libraries take so much memory of the process once they are used: 570 MiB if every kernel of a
# network is compiled first, 200 MiB if all are there already (H200, CUDA 13).
LATER_BYTES = 768 * 2**20
IDLE_SHARE = 0.9  # of a card's memory that is free where nobody else uses it


@dataclass
class Driver:
    """How GPUs are found, opened and timed; tests give another one.

    find      the first GPU; DeviceError where there is none to use
    find_all  all GPUs of the first one's kind, by number
    open      a device to work with
    rates     what is measured of a network's layers on an open device
    """

    find: Callable[[], Gpu] = find_gpu
    find_all: Callable[[], Mapping[int, Gpu]] = find_gpus
    open: Callable[[Gpu, int], AbstractContextManager[Device]] = Device
    rates: Callable[..., Rates] = measured_rates


DRIVER = Driver()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTarget:
    """The processors of a machine, or its GPUs, which are open if the machine is here.

    machine        its `gpu` is set where the layers run there
    sentences      they tell what is not as asked for
    others         GPUs of the same kind that compute too
    planned_gpus   devices that a plan is for on a machine that is not here
    free_bytes     the GPU's memory when it was opened, with what CUDA took then: the least of all GPUs
    context_bytes  what CUDA took then
    costs          what was measured of the machine
    """

    machine: Machine
    precision: Precision = "fp32"
    sentences: tuple[str, ...] = ()
    gpu: Device | None = None
    others: tuple[Device, ...] = ()
    planned_gpus: int = 1
    free_bytes: int | None = None
    context_bytes: int = 0
    costs: CostStore = field(default_factory=CostStore)

    @property
    def device(self) -> DeviceKind:
        return "cpu" if self.machine.gpu is None else "gpu"

    @property
    def gpus(self) -> tuple[Device, ...]:
        """The open GPUs, without those that failed."""
        return tuple(gpu for gpu in (self.gpu, *self.others) if gpu is not None and not gpu.abandoned)

    @property
    def devices(self) -> int:
        """Number of devices that compute; a CPU counts as one."""
        return len(self.gpus) or self.planned_gpus

    def named_devices(self, kind: DeviceKind) -> dict[str, Device | None]:
        """Return the devices of one kind that compute, by name; None stands for the CPU."""
        if kind == "cpu":
            return {"CPU": None}
        return {f"GPU {gpu.number}": gpu for gpu in self.gpus} if self.others else {"GPU": self.gpu}

    @property
    def later_bytes(self) -> int:
        """Bytes that libraries will take in the process later, and that no plan counts."""
        return 0 if self.device == "cpu" else LATER_BYTES

    def limits(
        self, ram: int | str | None, threads: int | None, vram: int | str | None, *, beyond: bool = False
    ) -> Limits:
        """Return the limits of a run here; DeviceError if less of a GPU is free, unless `beyond` allows it."""
        return limits_of(self.machine, ram, threads, vram, free_bytes=self.free_bytes, beyond=beyond)

    def beyond(self, limits: Limits) -> list[str]:
        """Return a sentence on limits that are more than what is free on the GPU."""
        gpu, free, vram = self.machine.gpu, self.free_bytes, limits.vram_bytes
        if gpu is None or free is None or vram is None or vram <= free:
            return []
        return [
            f"{option('vram')} allows {human_bytes(vram)}, and of the {human_bytes(gpu.memory_bytes)} of the "
            f"{gpu.name} "
            f"{human_bytes(free)} are free: what needs more does not run there now"
        ]

    def above_memory(self, limits: Limits) -> tuple[str, ...]:
        """Return a sentence on a limit that is more than the memory of the machine; none if it is not."""
        ram = self.machine.ram_bytes
        if limits.ram_bytes <= ram:
            return ()
        allowed = option("ram", human_bytes(limits.ram_bytes))
        return (f"{allowed} is above the {human_bytes(ram)} of this machine, which ends a process that needs more",)

    def rates(self, network: Network, limits: Limits) -> Rates | None:
        """Return the measured rates; on a GPU that is here, the layers are measured too. None: rates are assumed."""
        if self.gpu is None or limits.vram_bytes is None:
            known = self.costs.of(self.machine, self.device, limits.threads)
            return None if known is None else known.rates(self.costs.primitives, limits.threads)
        return DRIVER.rates(
            self.gpus[0],
            self.machine,
            network,
            self.precision,
            vram_bytes=self.free_bytes_within(limits),
            threads=limits.threads,
            store=self.costs,
            seconds=MOST_SECONDS if self.costs.calibrate else 0.0,
        )

    def free_bytes_within(self, limits: Limits) -> int:
        """Return the bytes of the device that a layer may use while it is timed: within the limits, and free."""
        if self.device == "cpu":
            return min(limits.ram_bytes, limits_of(self.machine).ram_bytes) - process_bytes()
        return min(limits.vram_bytes or 0, self.free_bytes or 0) - context_bytes(self.context_bytes)

    def free_bytes_by_device(self, limits: Limits) -> dict[DeviceKind, int]:
        """Return the bytes that a layer which runs by itself may take of the process, and of a GPU."""
        host = replace(self, machine=replace(self.machine, gpu=None))
        return {"cpu": host.free_bytes_within(limits), self.device: self.free_bytes_within(limits)}

    def planned(self, mode: AskedMode) -> Target:
        """Return these devices as the planner sees them."""
        if self.device == "cpu":
            return Target(self.machine, precision=self.precision, mode=mode)
        return Target(self.machine, "gpu", self.devices, self.precision, self.context_bytes, mode)

    def known_rates(self, network: Network, limits: Limits, mode: AskedMode) -> KnownRates:
        """Return what is known of the devices that a mode may take, before layers are measured for a plan."""
        known: dict[DeviceKind, Rates] = {}
        if (rates := self.rates(network, limits)) is not None:
            known[self.device] = rates
        if self.device == "gpu" and mode != "gpu":
            rates = stored_cpu_rates(self.costs, self.machine, limits)
            if rates is not None:
                known["cpu"] = rates
        return known

    def taken_bytes(self) -> int | None:
        """Return the bytes that this process has of a GPU now, CUDA included; None on the CPU."""
        if self.free_bytes is None or not self.gpus:
            return None
        return self.free_bytes - min(gpu.free_bytes() for gpu in self.gpus)

    def less_than(self, plan: RunPlan) -> int:
        """Return a limit for another plan after the GPU refused what `plan` needs and got back what it gave."""
        free = self.context_bytes + min((gpu.free_bytes() for gpu in self.gpus), default=0)
        return int(LESS * min(free, plan.limits.vram_bytes or free))

    def check_free(self, plan: RunPlan) -> None:
        """Raise PlanFileError if other programs hold so much of the GPU that a plan made earlier does not fit."""
        if self.machine.gpu is None or self.free_bytes is None or plan.memory.vram <= self.free_bytes:
            return
        raise PlanFileError(
            f"the plan needs {plan.memory.vram:,} bytes of VRAM, and of the {self.machine.gpu.memory_bytes:,} bytes of "
            f"the {self.machine.gpu.name} only {self.free_bytes:,} are free; end the programs that hold the rest, or "
            f"make a plan with `znnpy plan NETWORK --volume VOLUME --vram {self.free_bytes // 2**20}M`"
        )


def stored_cpu_rates(store: CostStore, machine: Machine, limits: Limits) -> Rates | None:
    """Return the stored rates of the CPU of a machine with a GPU; None: nothing is stored, so they are assumed."""
    costs = store.stored(replace(machine, gpu=None), "cpu", limits.threads)
    return None if costs is None else costs.rates(store.primitives)


class Targets:
    """The targets that a caller may mean, opened one after the other until one has a plan. A context manager.

        with Targets(asked, store) as targets:
            for target in targets:
                with targets.attempt():
                    plan = make_plan(...)
                    break

    With device "auto" the first is the GPU where there is one that works, and the CPU follows where the GPU has no
    plan; then sentences of the CPU's target say why. A target stays open until the next one or until the block ends.

    Iteration raises DeviceError when the GPU is meant and there is none to use, or there are not so many.
    """

    def __init__(self, asked: AskedDevices, costs: CostStore | None = None) -> None:
        self._asked, self._costs = asked, costs or CostStore()
        self._open = ExitStack()
        self._on: OpenTarget | None = None  # the GPU's target, while it is tried
        self._gpu: Gpu | None = None
        self._why: list[str] = []  # the GPU is not used

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._open.__exit__(kind, error, at)

    def __iter__(self) -> Iterator[OpenTarget]:
        asked = self._asked
        if asked.device == "cpu" and asked.gpus != 1:
            raise DeviceError(f"GPUs were asked for, and the run is on the CPU: leave {option('gpus')} out")
        on_cpu = asked.precision in CPU_PRECISIONS and asked.precision not in GPU_PRECISIONS
        if on_cpu and (asked.device == "gpu" or asked.gpus != 1):
            raise DeviceError(
                f"{option('precision', asked.precision)} is for the CPU; a GPU computes in {_listed(GPU_PRECISIONS)}"
            )
        self._gpu = None if asked.device == "cpu" or on_cpu else self._found()
        if self._gpu is not None:
            with self.attempt():
                opened = self._open.enter_context(_opened(self._gpu, asked.precision or "fp32", asked.gpus))
                self._on = replace(opened, costs=self._costs)
                yield self._on
        self._gpu = self._on = None
        yield OpenTarget(
            machine=this_machine(),
            precision=_on_cpu(asked.precision, this_machine()),
            sentences=(*self._why, *_unused(asked.vram, asked.precision)),
            costs=self._costs,
        )

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Inside, a GPU that has no plan or fails leaves the run to the next target; other errors pass.

        NoPlanError names what is free on the GPU where other programs hold a part of it.
        """
        try:
            yield
        except (DeviceError, NoPlanError) as error:
            found = self._explained(error)
            if self._gpu is None or self._asked.needs_gpu:
                if found is error:
                    raise
                raise found from None
            self._why.append(f"{self._gpu.name} is not used: {found}")
            self._open.close()

    def first(self) -> OpenTarget:
        """Return the first target that can be opened, whatever will run there."""
        return next(iter(self))

    def _found(self) -> Gpu | None:
        """Return the GPU; None, and the reason is kept, where there is none to use and none has to be."""
        try:
            return DRIVER.find()
        except DeviceError as error:
            if self._asked.device == "gpu" or self._asked.gpus != 1:
                raise
            half_there = find_spec("cupy") is not None or any(path.exists() for path in DRIVERS)
            self._why.append(str(error) if half_there else "no GPU for CUDA here")
            return None

    def _explained(self, error: DeviceError | NoPlanError) -> DeviceError | NoPlanError:
        """Return an error that names what is free on the GPU, if it is for want of memory that others hold."""
        if self._on is None or not isinstance(error, NoPlanError):
            return error
        gpu, free = self._on.machine.gpu, self._on.free_bytes
        assert gpu is not None
        assert free is not None
        if free > IDLE_SHARE * gpu.memory_bytes:
            return error
        return NoPlanError(
            f"{error}; of the {gpu.memory_bytes:,} bytes of the {gpu.name} {free:,} were free when the run began"
        )


def elsewhere(costs: CostStore, asked: AskedDevices) -> OpenTarget:
    """Return the machine that a file of costs is of, as if nobody used its GPUs.

    PlanFileError where another device than the file's is asked for.
    """
    named = costs.named
    assert named is not None, "a machine that is not here is known by its costs"
    if asked.device not in ("auto", named.device):
        raise PlanFileError(
            f"{costs.file} is of the {named.device.upper()} of {named.name}, "
            f"and {option('device', asked.device)} was asked for; "
            f"leave {option('device')} out, or measure with `znnpy measure --device {asked.device}` there"
        )
    gpu = named.machine.gpu
    if gpu is None and asked.gpus != 1:
        raise PlanFileError(f"{costs.file} is of the CPU of {named.name}: leave {option('gpus')} out")
    if gpu is None:
        precision = _on_cpu(asked.precision, named.machine)
        sentences = tuple(_unused(None, asked.precision))
        return OpenTarget(machine=named.machine, precision=precision, sentences=sentences, costs=costs)
    if asked.gpus is None:
        raise PlanFileError(f"{costs.file} does not say how many GPUs {named.name} has: give {option('gpus')} a number")
    return OpenTarget(
        machine=named.machine,
        precision=asked.precision or "fp32",
        planned_gpus=asked.gpus,
        free_bytes=gpu.memory_bytes,
        context_bytes=CONTEXT_BYTES,
        costs=costs,
    )


def _on_cpu(asked: Precision | None, machine: Machine) -> Precision:
    """Return the precision in which a CPU computes; DeviceError where it lacks what multiplies bfloat16."""
    found = cpu_precision(asked)
    if found != "fp32" and (reason := why_not_bf16(machine)):
        raise DeviceError(f"{option('precision', found)} {reason}; choose {option('precision', 'fp32')}")
    return found


def _listed(precisions: tuple[Precision, ...]) -> str:
    return " and ".join((", ".join(precisions[:-1]), precisions[-1]))


def check_here(plan: RunPlan) -> None:
    """Raise PlanFileError if `plan` was made for another machine, by what was measured there, and this is not it."""
    if plan.made_for is not None and not _is_here(plan.machine, plan.device):
        raise PlanFileError(
            f"the plan was made for another machine ({plan.made_for}) and runs only there; make one for this machine "
            f"with `znnpy plan`, without {option('machine')}"
        )


def for_elsewhere(plan: RunPlan, costs: CostStore) -> RunPlan:
    """Return `plan` marked with the name of the machine of a cost file, unless that is this machine."""
    named = costs.named
    assert named is not None, "a machine that is not here is known by its costs"
    return plan if _is_here(plan.machine, plan.device) else replace(plan, made_for=named.name)


def _is_here(fingerprint: str, device: DeviceKind) -> bool:
    """Return whether a fingerprint is that of this machine, with its GPU if that is the device."""
    if device == "cpu":
        return fingerprint == this_machine().fingerprint
    try:
        return fingerprint == replace(this_machine(), gpu=DRIVER.find()).fingerprint
    except DeviceError:
        return False


def machine_of(plan: RunPlan, file: Path | None = None) -> Machine:
    """Return the machine of a cost file, else this one: with its GPU if `plan` is for one, or DeviceError."""
    if file is not None:
        return Costs.load(file).machine
    return this_machine() if plan.device == "cpu" else replace(this_machine(), gpu=DRIVER.find())


@contextmanager
def _opened(gpu: Gpu, precision: Precision, gpus: int | None) -> Iterator[OpenTarget]:
    """Open the GPUs. CUDA does not say what it took itself: if others use the card too, it counts with the most."""
    there = [0] if gpus == 1 else list(DRIVER.find_all())
    if gpus is not None and gpus > len(there):
        raise DeviceError(
            f"{gpus} GPUs were asked for, and this process sees {len(there)} of the kind of the first, {gpu.name}: "
            f"lower {option('gpus')}, or check CUDA_VISIBLE_DEVICES"
        )
    with ExitStack() as stack:
        devices = [stack.enter_context(DRIVER.open(gpu, number)) for number in there[:gpus]]
        free = min(device.free_bytes() for device in devices)
        taken = min(gpu.memory_bytes - free, MOST_CONTEXT_BYTES)
        others = tuple(devices[1:])
        machine = replace(this_machine(), gpu=gpu)
        yield OpenTarget(
            machine=machine,
            precision=precision,
            gpu=devices[0],
            others=others,
            free_bytes=free + taken,
            context_bytes=taken,
        )


def _unused(vram: int | str | None, precision: Precision | None) -> list[str]:
    """Return sentences on options that mean nothing on a CPU."""
    sentences = []
    if vram is not None:
        sentences.append(f"{option('vram')} limits nothing on the CPU")
    if precision is not None and precision not in CPU_PRECISIONS:
        sentences.append(f"the CPU computes in fp32, more exactly than the {precision} that is asked for")
    return sentences
