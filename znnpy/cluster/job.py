"""A job: one output, divided into work items that any number of processes compute."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from znnpy.cluster.job_files import JOB, JobFiles, job_files
from znnpy.errors import ResumeError
from znnpy.formats.network_writer import network_text, weights_bytes
from znnpy.json_file import MOST_TEXT
from znnpy.messages import excerpt, option
from znnpy.options import InferOptions
from znnpy.planner.run_plan import RunPlan
from znnpy.trained import TrainedNetwork
from znnpy.volume.location import Location

FORMAT = 1
PLAN, NETWORK, WEIGHTS = "plan.json", "network.yaml", "network.npz"
# Options that belong to the process that prepares a job, or finishes it.
OWN = ("progress", "trace", "overwrite", "resume", "client", "cluster", "part", "finish", "items")


@dataclass(frozen=True, slots=True)
class Job:
    """The name of a job, small enough to be sent with every work item.

    out  path or URL of the output
    run  id of the run that writes it
    """

    out: str
    run: str

    @property
    def files(self) -> JobFiles:
        """The files of the job."""
        return job_files(Location.of(self.out))


@dataclass(frozen=True, slots=True)
class JobRecord:
    """What processes must know of a job, as it is kept in its files.

    asked       options of `znnpy.infer`, those that differ from the usual ones
    size        voxels (z, y, x) of a work item
    count       number of work items
    identity    of the run: its network, its weights, its volume; a process that reads others is refused
    statistics  of the volume, where the network asks for them
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    format: int
    run: str
    asked: dict[str, Any]
    size: tuple[int, int, int]
    count: int
    identity: dict[str, Any]
    statistics: Any

    def to_json(self) -> bytes:
        """Return the record as JSON."""
        return _adapter().dump_json(self)

    @staticmethod
    def load(job: Job) -> JobRecord:
        """Read the record of a job; ResumeError if there is none, or another one."""
        content = job.files.read(JOB)
        if content is None:
            raise ResumeError(
                f"{job.out}.{JOB} is not there, so the job is finished or was removed, or this machine does not see "
                "its folder; check that all machines name it alike"
            )
        try:
            record = _adapter().validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = excerpt(".".join(map(str, first["loc"])) or JOB, MOST_TEXT)
            raise ResumeError(
                f"{job.out}.{JOB}/{JOB} is damaged ({where}: {excerpt(first['msg'])}); start again with "
                f"{option('overwrite', True)}"
            ) from None
        if record.format != FORMAT or record.run != job.run:
            raise ResumeError(
                f"{job.out}.{JOB} belongs to another job now; this process has nothing left to do for the one that it "
                "was started for"
            )
        return record

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


def stated(asked: InferOptions, trained: TrainedNetwork, files: JobFiles) -> dict[str, Any]:
    """Return the options of a job as JSON values; objects among them are written to its files.

    trained  network and weights that the options name
    """
    found: dict[str, Any] = {}
    for of in fields(InferOptions):
        value = getattr(asked, of.name)
        if of.name in OWN or value == of.default:
            continue
        found[of.name] = _plain(value)
    network = asked.network
    one = network[0] if isinstance(network, list | tuple) and len(network) == 1 else network
    if isinstance(one, TrainedNetwork):
        files.write(NETWORK, network_text(trained.network, WEIGHTS).encode())
        files.write(WEIGHTS, weights_bytes(trained.network, trained.weights))
        found["network"] = NETWORK
    if isinstance(asked.plan, RunPlan | Path | str):
        plan = asked.plan if isinstance(asked.plan, RunPlan) else RunPlan.load(Path(asked.plan))
        files.write(PLAN, plan.to_json().encode())
        found["plan"] = PLAN
    return found


def _plain(value: object) -> object:
    """Return a value of an option as JSON has it."""
    if isinstance(value, Path):
        return os.path.abspath(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    return value
