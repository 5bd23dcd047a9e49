"""The record of a run: what was asked, planned and measured, as one JSON file that `znnpy report` makes a page of."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter

from znnpy.given_options import Value
from znnpy.json_file import JsonFile

FORMAT = 1  # version of the file
INTERVALS = 512  # of time, at most

Figure = Annotated[float, Field(ge=0, lt=1e18, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, lt=2**60)]
Series = Annotated[tuple[Figure, ...], Field(max_length=INTERVALS)]


@dataclass(frozen=True, slots=True)
class RecordedLayer:
    """A layer, or two fused ones, with the seconds of this run on all its devices of one kind."""

    name: str
    primitive: str
    device: str
    predicted: Figure  # seconds
    measured: Figure


@dataclass(frozen=True, slots=True)
class RecordedReport:
    """The figures of the report, with those of the plan beside them."""

    shape: tuple[Count, Count, Count]  # of the output
    voxels: Count
    computed: Count  # in this run
    seconds: Figure
    predicted_seconds: Figure
    stage_seconds: dict[str, Figure]
    peak_bytes: Count
    promised_bytes: Count
    limit_bytes: Count
    vram_bytes: Count | None
    promised_vram_bytes: Count
    device: str
    mode: str
    precision: str
    threads: Count
    off_by: str | None
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OverTime:
    """Figures for intervals of `seconds` each, from the begin of the run on.

    memory  most bytes of the process in each interval
    voxels  output voxels written until its end
    busy    seconds in which each device or thread worked, or waited, within it
    """

    seconds: Annotated[float, Field(gt=0, lt=1e12)]
    memory: Series = ()
    voxels: Series = ()
    busy: dict[str, Series] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecordedMachine:
    """The machine that the run was computed on."""

    host: str
    system: str
    python: str
    processor: str
    cores: Count
    ram_bytes: Count
    blas: str
    gpu: str | None
    versions: dict[str, str]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Everything that a page on a run shows, besides the voxels.

    arguments  of `infer` that are not the defaults, by name
    in_python  whether one of them cannot be written on a command line; it is described then
    volume     what was predicted; its path if it is a file
    output     path or URL of the prediction
    report     figures of the report, and all its `lines` as they are printed
    plan       lines that explain the plan
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    format: int
    znnpy_version: str
    began: str  # date and time with its zone, ISO 8601
    arguments: dict[str, Value | tuple[Value, ...]]
    in_python: bool
    volume: str
    output: str
    network: str
    network_sha256: str
    weights_sha256: str
    machine: RecordedMachine
    report: RecordedReport
    lines: tuple[str, ...]
    plan: tuple[str, ...]
    layers: tuple[RecordedLayer, ...]
    over_time: OverTime

    def to_json(self) -> str:
        """Return the content of a file."""
        return _adapter().dump_json(self, indent=1).decode() + "\n"

    @classmethod
    def load(cls, path: Path) -> RunRecord:
        """Read a record; PlanFileError if it is damaged or of another version."""
        return _FILE.load(path)


def is_record(path: Path) -> bool:
    """Return whether a file may be a record, by its suffix."""
    return path.suffix.lower() == ".json"


@cache
def _adapter() -> TypeAdapter[RunRecord]:
    return TypeAdapter(RunRecord)


_FILE = JsonFile(
    name="record of a run",
    content="the record is",
    format=FORMAT,
    again="record the run again with `znnpy infer VOLUME --record run.json`",
    written_by="znnpy infer VOLUME --record",
    adapter=_adapter,
)
