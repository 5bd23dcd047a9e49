"""A job: one output, divided into work items that any number of processes compute."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from znnpy.cluster.job_files import JOB, JobFiles, job_files
from znnpy.errors import ResumeError
from znnpy.formats.network_writer import network_text, weights_bytes
from znnpy.messages import excerpt, option
from znnpy.options import InferOptions
from znnpy.planner.run_plan import RunPlan
from znnpy.shapes import ceil_divide
from znnpy.trained import TrainedNetwork
from znnpy.volume.location import Location
from znnpy.volume.output_names import Names
from znnpy.volume.output_target import place_of
from znnpy.volume.registry import store_for

FORMAT = 1
PLAN, NETWORK, WEIGHTS = "plan.json", "network.yaml", "network.npz"
# Options that belong to the process that prepares a job, or finishes it.
OWN = ("progress", "trace", "overwrite", "resume", "client", "cluster", "part", "finish", "items")


@dataclass(frozen=True, slots=True)
class Job:
    """The name of a job, small enough to be sent with every work item.

    out  path or URL of the output
    run  id of the run that writes it; empty where the output is complete
    """

    out: str
    run: str

    @property
    def count(self) -> int:
        """Number of work items, which are 0 to `count` - 1; 0 where the output is complete."""
        return JobRecord.load(self).count if self.run else 0

    @property
    def files(self) -> JobFiles:
        """The files of the job, but for its record."""
        return job_files(Location.of(self.out), self.run)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The record of a job, which holds all that processes must know of it.

    asked       options of `znnpy.infer`, those that differ from the usual ones
    output      voxels (z, y, x) of the first output
    size        voxels of a work item in it
    count       number of work items
    lost        share of the work that one plan for the whole output would save, on the machine that prepared the job;
                None: it has no such plan
    plan        of one item, on the machine that prepared the job
    identity    of the run: its network, its weights, its volume; a process that reads others is refused
    statistics  of the volume, where the network asks for them
    is_traced   whether processes keep traces of items
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, ser_json_inf_nan="constants")

    format: int
    run: str
    asked: dict[str, Any]
    output: tuple[int, int, int]
    size: tuple[int, int, int]
    count: int
    lost: float | None
    plan: str
    identity: dict[str, Any]
    statistics: Any
    is_traced: bool

    def save(self, out: str) -> None:
        """Write the record beside an output."""
        job_files(Location.of(out)).write(JOB, _adapter().dump_json(self))

    @staticmethod
    def load(job: Job) -> JobRecord:
        """Read the record of a job; ResumeError if there is none, or another one."""
        record = JobRecord.find(job.out)
        if record is None:
            raise ResumeError(
                f"{job.out}.{JOB} is not there, so the job is finished or was removed, or this machine does not see "
                "its folder; check that all machines name it alike"
            )
        if record.run != job.run:
            raise ResumeError(
                f"{job.out}.{JOB} belongs to another job now; this process has nothing left to do for the one that it "
                "was started for"
            )
        return record

    @staticmethod
    def find(out: str) -> JobRecord | None:
        """Read the record of the job of an unfinished output; None if there is none, ResumeError if it is damaged.

        A record that another run left, whose output was replaced, is none.
        """
        content = job_files(Location.of(out)).read(JOB)
        if content is None:
            return None
        try:
            record = _adapter().validate_json(content)
            if record.format != FORMAT:
                raise ValueError(f"format {record.format}, and this version knows {FORMAT}")
            if min(*record.size, *record.output) < 1 or record.count != prod(ceil_divide(record.output, record.size)):
                raise ValueError(f"{record.count} items of {record.size} voxels in {record.output}")
        except ValueError as error:
            why = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise ResumeError(
                f"{out}.{JOB}/{JOB} cannot be read ({excerpt(why)}); start again with {option('overwrite', True)}"
            ) from None
        return record if record.run == run_of(out) else None

    def options(self, files: JobFiles, kept: ExitStack) -> InferOptions:
        """Return the options of the job.

        kept  holds a folder with the network, where the caller gave it as an object
        """
        asked: dict[str, Any] = {name: _listed(value) for name, value in self.asked.items()}
        if asked.get("network") == NETWORK:
            folder = Path(kept.enter_context(tempfile.TemporaryDirectory(prefix="znnpy-")))
            for name in (NETWORK, WEIGHTS):
                (folder / name).write_bytes(_content(files, name))
            asked["network"] = str(folder / NETWORK)
        if asked.get("plan") == PLAN:
            asked["plan"] = RunPlan.from_json(_content(files, PLAN).decode())
        try:
            return InferOptions(**asked)
        except (TypeError, ValueError) as error:
            raise ResumeError(
                f"the options of the job cannot be read ({excerpt(error)}); start again with "
                f"{option('overwrite', True)}"
            ) from None


def run_of(out: str) -> str | None:
    """Return the id of the run that writes an unfinished output; None if there is no such output."""
    place = place_of(out)
    if place.is_local:
        return store_for(place).run_of(Names(place.path).partial)
    from znnpy.volume.bucket_output import run_in_bucket

    return run_in_bucket(place)


def _listed(value: Any) -> Any:
    """Return a value of an option, with tuples for the lists of JSON."""
    return tuple(value) if isinstance(value, list) else value


def _content(files: JobFiles, name: str) -> bytes:
    """Return a file of a job; ResumeError if it is missing."""
    content = files.read(name)
    if content is None:
        raise ResumeError(f"{name} is missing among the files of the job; start again with {option('overwrite', True)}")
    return content


@cache
def _adapter() -> TypeAdapter[JobRecord]:
    return TypeAdapter(JobRecord)


def stated(asked: InferOptions) -> dict[str, Any]:
    """Return the options of a job that differ from the usual ones, as JSON values."""
    found: dict[str, Any] = {}
    for of in fields(InferOptions):
        value = getattr(asked, of.name)
        if of.name not in OWN and value != of.default:
            found[of.name] = _plain(value)
    return found


def kept(asked: InferOptions, trained: TrainedNetwork, files: JobFiles) -> InferOptions:
    """Return options without objects, which are written to the files of the job.

    trained  network and weights that the options name
    """
    network = asked.network
    one = network[0] if isinstance(network, list | tuple) and len(network) == 1 else network
    if isinstance(one, TrainedNetwork):
        files.write(NETWORK, network_text(trained.network, WEIGHTS).encode())
        files.write(WEIGHTS, weights_bytes(trained.network, trained.weights))
        asked = replace(asked, network=NETWORK)
    if asked.plan is not None:
        files.write(PLAN, plan_of(asked).to_json().encode())
        asked = replace(asked, plan=PLAN)
    return asked


def plan_of(asked: InferOptions) -> RunPlan:
    """Return the plan that options give, read from its file if need be."""
    assert asked.plan is not None, "a plan is given"
    return asked.plan if isinstance(asked.plan, RunPlan) else RunPlan.load(Path(asked.plan))


def _plain(value: object) -> object:
    """Return a value of an option as JSON has it."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    return value
