"""A plan: patch, a choice per layer, memory layout, prediction. Pure data that prints and saves itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from znnpy.errors import PlanFileError
from znnpy.kernels.primitive import Variant
from znnpy.machine import Limits
from znnpy.shapes import LayerShape, Vec3

FORMAT = 1  # version of plan.json


@dataclass(frozen=True, slots=True)
class Choice:
    """How one layer runs."""

    layer: int  # index in the network
    shape: LayerShape
    primitive: str
    version: int  # of the primitive
    device: str
    variant: Variant
    seconds: float  # per patch
    measured: bool  # else estimated from work and rates
    resident_bytes: int
    working_bytes: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """One array of the arena: alive from tick `first` to tick `last` of a patch, both included."""

    name: str
    nbytes: int
    first: int
    last: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the whole process, as promised. Their sum is the peak."""

    baseline: int  # interpreter and libraries, measured
    arena: int
    residents: int  # prepared weights
    reading: int  # patches on their way in: queue and reader
    writing: int  # patches on their way out
    allowance: int  # what the libraries allocate themselves while a layer runs or its weights are prepared

    @property
    def peak(self) -> int:
        return self.baseline + self.arena + self.residents + self.reading + self.writing + self.allowance


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a run needs to know beside network, weights and volume. Owns nothing."""

    network: str  # Network.sha256
    network_name: str
    machine: str  # Machine.fingerprint of where it was made
    limits: Limits
    output: Vec3  # dense output it was made for
    patch_out: Vec3
    patch_in: Vec3
    batch: int
    choices: tuple[Choice, ...]
    tensors: tuple[Tensor, ...]
    memory: Memory
    itemsize_in: int  # bytes per voxel of the volume as stored
    itemsize_out: int
    patches: int
    rigor: str
    znnpy_version: str
    format: int = FORMAT

    @property
    def seconds_per_patch(self) -> float:
        return sum(choice.seconds for choice in self.choices)

    @property
    def seconds(self) -> float:
        """Predicted for the whole output, reading and writing hidden behind the computation."""
        return self.patches * self.seconds_per_patch

    @property
    def voxels_per_second(self) -> float:
        """Predicted output voxels written per second, last partial patches counted."""
        return float(prod(self.output)) / self.seconds

    def to_json(self) -> str:
        return _adapter().dump_json(self, indent=1).decode() + "\n"

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote; PlanFileError when it is damaged or of another format."""
        try:
            return _adapter().validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            raise PlanFileError(
                f"not a plan of format {FORMAT}: {where}: {first['msg']} ({error.error_count()} such); "
                "make it again with `znnpy plan NETWORK --out plan.json`"
            ) from None

    @staticmethod
    def load(path: Path) -> Plan:
        try:
            return Plan.from_json(path.read_text())
        except FileNotFoundError:
            raise PlanFileError(f"no plan file {path}; write one with `znnpy plan NETWORK --out {path}`") from None
        except PlanFileError as error:
            raise error.with_context(str(path)) from None


@cache
def _adapter() -> TypeAdapter[Plan]:
    return TypeAdapter(Plan, config=ConfigDict(extra="forbid"))
