"""The one store of measured costs: files in the cache folder, or one file that the user names.

There is one file for each device, and for a processor for each number of threads. What a calibration found has a file
of its own and never replaces what `znnpy measure` found. Costs that do not fit this machine, its libraries and its
primitives are not used at all, and a sentence says which field differs. A file is replaced in one step, after what it
holds by then was merged with what was measured now: it is never damaged, and another process loses at most what both
wrote at the same moment.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from znnpy.costs.cost_file import Costs
from znnpy.errors import PlanFileError
from znnpy.files import cache_folder, replace_file, write_asked
from znnpy.kernels.contract import Primitive
from znnpy.kernels.table import IN_HOST_RAM, TABLE
from znnpy.machine import Machine
from znnpy.messages import option
from znnpy.option_values import Device, DeviceKind

NO_CALIBRATION = "ZNNPY_NO_CALIBRATE"  # environment variable; if it is set to anything, nothing is calibrated
MOST_BYTES = 2**20  # of a file in the cache folder; the oldest layers are left out of a longer one


class CostStore:
    """Reads and keeps what was measured, for one plan or run."""

    def __init__(
        self,
        file: str | Path | None = None,
        table: Sequence[Primitive] = TABLE,
        *,
        machine: str | Path | None = None,
        calibrate: bool = False,
    ) -> None:
        """Read the file that the user named, if any; PlanFileError if it cannot be read.

        file       cost file of this machine, used in place of what is stored; it has to fit
        machine    cost file of a machine that is not here
        calibrate  whether devices without costs may be measured for a few seconds
        """
        named = file if machine is None else machine
        self.file, self.table = None if named is None else Path(named), table
        self.calibrate = calibrate and machine is None and not os.environ.get(NO_CALIBRATION)
        self.named = None if self.file is None else Costs.load(self.file)
        self.sentences: list[str] = []  # about costs that were not used or not kept, and about calibrations
        self._word = "costs" if machine is None else "machine"
        self._found: dict[Path, Costs] = {}  # by file, whether or not it could be written

    @property
    def primitives(self) -> tuple[Primitive, ...]:
        """All primitives that measured layers may be of, with those for tensors in host memory."""
        return (*self.table, *IN_HOST_RAM)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the costs are those of a machine that is not here."""
        return self._word == "machine" and self.named is not None

    def meant(self, device: Device) -> Device:
        """Return the device that is meant by "auto": that of the named file, if there is one."""
        return self.named.device if self.named is not None and device == "auto" else device

    def threads(self, threads: int | None) -> int | None:
        """Return the threads that another machine was measured with, if the caller gave none."""
        there = self.named if self.is_elsewhere else None
        return there.threads if threads is None and there and there.device == "cpu" else threads

    def of(self, machine: Machine, device: DeviceKind, threads: int) -> Costs | None:
        """Return the costs of a device of `machine`; None if nothing that fits is stored.

        PlanFileError if a file was named and does not fit.
        """
        if self.named is not None:
            if reason := self._why_not(self.named, machine, device, threads):
                advice = self._advice(self.named, device, threads)
                raise PlanFileError(f"the costs in {self.file} do not fit: {reason}; {advice}")
            return self.named
        return self.stored(machine, device, threads)

    def stored(self, machine: Machine, device: DeviceKind, threads: int) -> Costs | None:
        """Return what the cache folder holds of a device; None if there is nothing that fits, and a sentence says so.

        A calibration counts where no rates of units were measured. The named file is not read.
        """
        measured = self._read(stored_path(machine, device, threads), machine, device, threads)
        if device == "gpu" or (measured is not None and measured.units):
            return measured
        path = stored_path(machine, device, threads, calibrated=True)
        calibrated = self._found.get(path) or read_stored(machine, device, threads, self.table, calibrated=True)
        if calibrated is None or measured is None:
            return calibrated or measured
        return calibrated.with_newer(measured)

    def _read(self, path: Path, machine: Machine, device: DeviceKind, threads: int) -> Costs | None:
        """Return the costs in a file of the cache folder; None if they do not fit, and a sentence says why."""
        if (found := self._found.get(path)) is not None:
            return found
        if not os.path.exists(path):  # a Path's raises where the folder may not be entered
            return None
        try:
            costs = Costs.load(path)
            reason = self._why_not(costs, machine, device, threads)
            if reason is None:
                return costs
            reason = f"{reason}; measure again with `znnpy measure --device {device}`"
        except PlanFileError as error:
            reason = str(error)
        self._say(f"stored costs of the {device.upper()} are not used: {reason}")
        return None

    def keep(self, found: Costs, *, in_a_file: bool = True) -> Costs:
        """Add what was measured to what is known of its device, and return all of it; a sentence says if that fails.

        in_a_file  whether later processes may know it, too
        """
        machine, device, threads, calibrated = found.machine, found.device, found.threads, found.calibrated
        path = stored_path(machine, device, threads, calibrated=calibrated)
        old = read_stored(machine, device, threads, self.table, calibrated=calibrated)
        costs = self._found[path] = found if old is None else old.with_newer(found)
        if not in_a_file:
            return costs
        while len(text := costs.to_json().encode()) > MOST_BYTES and (costs.layers or costs.samples or costs.refusals):
            costs = costs.shortened()
        try:
            replace_file(path, text)
        except OSError as error:
            self._say(f"what was measured is not kept, and will be measured again: {error}")
        return costs

    def _say(self, sentence: str) -> None:
        if sentence not in self.sentences:
            self.sentences.append(sentence)

    def _why_not(self, costs: Costs, machine: Machine, device: DeviceKind, threads: int) -> str | None:
        """Return why costs do not apply; None if they do."""
        if costs.device != device:
            return f"they are of the {costs.device.upper()}, and the plan is for the {device.upper()}"
        return costs.why_not(machine, threads, self.table)

    def _advice(self, costs: Costs, device: DeviceKind, threads: int) -> str:
        """Return what to do about a named file that does not fit."""
        others = device == "cpu" and costs.device == "cpu" and costs.threads != threads
        if self._word == "costs":
            measure = f"`znnpy measure --threads {threads}`" if others else "`znnpy measure`"
            leave = f"leave {option('costs')} out, or measure again with {measure}"
            return f"give {option('threads', costs.threads)}, {leave}" if others else leave
        if others:
            measure = f"`znnpy measure --threads {threads} --export FILE`"
            return f"leave {option('threads')} out, or measure there with {measure}"
        return "measure there with `znnpy measure --export FILE`, by a znnpy of the same version"


def read_stored(
    machine: Machine,
    device: DeviceKind,
    threads: int,
    table: Sequence[Primitive] = TABLE,
    *,
    calibrated: bool = False,
) -> Costs | None:
    """Return the costs that are stored and fit; None, without a word, if there are none."""
    try:
        costs = Costs.load(stored_path(machine, device, threads, calibrated=calibrated))
    except PlanFileError:
        return None
    return costs if costs.device == device and costs.why_not(machine, threads, table) is None else None


def stored_path(machine: Machine, device: DeviceKind, threads: int, *, calibrated: bool = False) -> Path:
    """Return the file of a device in the cache folder.

    Machines that share a home folder have different files if their processors or GPUs differ.
    """
    gpu = machine.gpu
    of = machine.processor if device == "cpu" or gpu is None else gpu.name
    digest = hashlib.sha256(of.encode()).hexdigest()[:12]
    by = f"-{threads}-threads" if device == "cpu" else ""
    how = "-calibrated" if calibrated else ""
    return cache_folder() / f"costs-{device}{by}-{digest}{how}.json"


def write_costs(path: Path, costs: Costs, *, overwrite: bool) -> None:
    """Write a file that the user asked for in one step; OutputError if that cannot be done, and nothing is left."""
    write_asked(path, costs.to_json(), "out", "the costs ", overwrite=overwrite)
