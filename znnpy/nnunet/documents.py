"""Read the JSON documents of a model folder, with bounds, and check what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json, to_json

from znnpy.errors import NetworkFileError
from znnpy.files import read_regular
from znnpy.messages import excerpt

MOST_BYTES = 2**24  # of a document; dataset.json may list thousands of cases
MOST_ITEMS = 1000  # of a list
MOST_COUNT = 10**5  # largest count of voxels, maps or layers
MOST_NUMBER = 1e30
SHOWN = 60  # characters of a value in a message

Count = Annotated[int, Field(ge=1, le=MOST_COUNT)]
Positive = Annotated[float, Field(gt=0, le=MOST_NUMBER, allow_inf_nan=False)]
Finite = Annotated[float, Field(ge=-MOST_NUMBER, le=MOST_NUMBER, allow_inf_nan=False)]
Word = Annotated[str, Field(min_length=1, max_length=500)]


class Document(BaseModel):
    """An object of a document; nnU-Net adds keys with time, which are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


AnyDocument = TypeVar("AnyDocument", bound=Document)


def read_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; NetworkFileError if there is none, or it is damaged."""
    try:
        content = read_regular(path, MOST_BYTES + 1)
    except FileNotFoundError:
        raise NetworkFileError(
            f"{path.parent} has no {path.name}, which every model folder of nnU-Net v2 holds; give the folder whose "
            "name is like nnUNetTrainer__nnUNetPlans__3d_fullres"
        ) from None
    except OSError as error:
        raise NetworkFileError(f"{path} cannot be read: {error.strerror}; check the file") from None
    if len(content) > MOST_BYTES:
        raise NetworkFileError(f"{path} is longer than {MOST_BYTES:,} bytes, as no such file is; copy it again")
    try:
        found = from_json(content)
    except ValueError as error:
        raise NetworkFileError(f"{path} is damaged or cut off ({excerpt(error, SHOWN)}); copy it again") from None
    if not isinstance(found, dict):
        raise NetworkFileError(f"{path} holds {excerpt(found, SHOWN)}, and not an object with keys; copy it again")
    return found


def checked(kind: type[AnyDocument], content: object, where: str) -> AnyDocument:
    """Return what an object of a document says; NetworkFileError, which begins with `where`, for what cannot be."""
    try:
        return kind.model_validate_json(to_json(content, inf_nan_mode="constants"))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        key = excerpt(".".join(map(str, first["loc"])) or "the whole", SHOWN)
        if first["type"] == "missing":
            raise NetworkFileError(f"{where} has no {key}; copy the folder again") from None
        raise NetworkFileError(
            f"{where} has {key} = {excerpt(first['input'], SHOWN)}, which cannot be: {excerpt(first['msg'])}; copy the "
            "folder again, or plan and train again"
        ) from None
