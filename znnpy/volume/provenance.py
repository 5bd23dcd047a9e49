"""Read the attributes that state how an output was made, with every type, length and range checked.

An output may come from anywhere: its attributes are claims, which `znnpy verify` checks against the given files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from znnpy.errors import VolumeError
from znnpy.messages import excerpt
from znnpy.network import MOST_LAYERS
from znnpy.network_result import MAPS, NetworkResult
from znnpy.option_values import Border, Meaning, OutputDtype
from znnpy.shapes import PRECISIONS, Vec3
from znnpy.volume.location import Location
from znnpy.volume.output_names import OUTPUTS
from znnpy.volume.written import attributes_of
from znnpy.windows.settings import Windows

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Field(gt=0, lt=2**63)]
_NAMES: TypeAdapter[tuple[str, ...]] = TypeAdapter(
    Annotated[
        tuple[Annotated[str, Field(pattern=f"^{OUTPUTS}/[^/]+$", max_length=4096)], ...],
        Field(min_length=2, max_length=MOST_LAYERS),
    ]
)


_OFFSETS = {"voxel_offset", "offset"}


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class VolumeClaim(_Checked):
    """The volume that the output was predicted from, by its content."""

    dataset: Annotated[str, Field(max_length=4096)]
    shape: tuple[Count, Count, Count, Count]  # (c, z, y, x)
    dtype: Annotated[str, Field(max_length=20)]
    samples_sha256: Digest
    time: Annotated[int, Field(ge=0, lt=2**63)] | None = None  # point of time, where one was named
    scale: Annotated[int, Field(ge=0, lt=2**63)] | None = None  # resolution, where the dataset does not name it


class MaskClaim(_Checked):
    """The mask outside of which the output is zero, by its content."""

    shape: tuple[Count, Count, Count, Count]  # (1, z, y, x)
    blocks_sha256: Digest


class JobClaim(_Checked):
    """The job that made the output: digests of network and weights, and the options that decide its voxels."""

    meaning: Meaning | None = None  # early versions did not write it
    network: Digest
    weights: Digest
    volume: VolumeClaim
    roi: Annotated[str, Field(pattern=r"^([0-9]{1,18}:[0-9]{1,18}(,[0-9]{1,18}:[0-9]{1,18}){2})?$")]
    border: Border
    output_dtype: OutputDtype
    mask: MaskClaim | None = None  # where the output has one
    statistics: dict[str, Any] | None = None  # of the volume, where the network normalises by them
    windows: Windows | None = None  # in which the network was computed
    result: NetworkResult = MAPS  # what is written of its maps
    allow_nan: bool = False
    fill_missing: Annotated[str, Field(pattern=r"^[0-9A-Za-z.+-]{1,400}$")] | None = None  # a number, NaN too
    format: Annotated[str, Field(pattern="^[a-z0-9]{1,20}$")] | None = None  # where its name did not tell it
    sharded: bool = False
    multiscale: Annotated[int, Field(ge=0, lt=2**7)] = 0


@dataclass(frozen=True, slots=True)
class Provenance:
    """The statement of an output on how it was made."""

    job: JobClaim
    network: str  # name of the network
    offsets: tuple[Vec3, ...]  # position of the first voxel of each array, volume coordinates
    precision: str  # one of PRECISIONS

    @classmethod
    def of(cls, output: Location, names: Sequence[str] = ("",)) -> Self:
        """Read the provenance that the output at `output` states.

        names  of its arrays, if it has several

        VolumeError if it states none, as files of other programs, or if an attribute has another type or length than
        znnpy writes.
        """
        said, *own = (attributes_of(output, name) for name in ("", *names))
        if not {"job", "network"} <= said.keys() or not all(_OFFSETS & one.keys() for one in own):
            raise VolumeError(f"{output} was not written by znnpy; give the file that `znnpy infer` wrote")
        precision = _text(output, "precision", said.get("precision", "fp32"))  # early versions did not write it
        if precision not in PRECISIONS:
            raise VolumeError(
                f"{output} says it was predicted in {excerpt(precision)!r}, which this version does not know; verify "
                "it with the version that wrote it"
            )
        network = _text(output, "network", said["network"])
        offsets = tuple(_offset(output, one) for one in own)
        return cls(_job(output, said["job"]), network, offsets, precision)


def array_names(output: Location) -> tuple[str, ...]:
    """Return the names of the arrays that an output states; of one with a single array, an empty name.

    VolumeError if the attribute is damaged.
    """
    said = attributes_of(output, "").get("outputs")
    if said is None:
        return ("",)
    try:
        return _NAMES.validate_json(_text(output, "outputs", said).encode("utf-8", "surrogateescape"))
    except ValidationError as error:
        raise _damaged(output, "outputs", error.errors(include_url=False)[0]["msg"]) from None


def _text(output: Location, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _damaged(output, name, f"it is of type {type(value).__name__}, not text")
    return value


def _job(output: Location, value: Any) -> JobClaim:
    text = _text(output, "job", value).encode("utf-8", "surrogateescape")
    try:
        return JobClaim.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise _damaged(output, "job", f"{where}: {first['msg']}") from None


def _offset(output: Location, said: dict[str, Any]) -> Vec3:
    """Return the position of an array in voxels, which early versions wrote as `offset`."""
    name = "voxel_offset" if "voxel_offset" in said else "offset"
    value = said[name]
    numbers = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(numbers, list) or len(numbers) != 3 or not all(type(number) is int for number in numbers):
        raise _damaged(output, name, f"it is {excerpt(repr(value), 60)}, not three whole numbers")
    return numbers[0], numbers[1], numbers[2]


def _damaged(output: Location, name: str, why: str) -> VolumeError:
    return VolumeError(
        f"the attribute {name} of {output} is damaged: {excerpt(why)}; copy the output again, or predict it again"
    )
