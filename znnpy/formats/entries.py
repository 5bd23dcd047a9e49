"""Check the mappings of a network file, with messages that say what to write.

Each mapping is an entry: a pydantic model with descriptions of what is accepted and examples of what to write. Messages
are made from these; users never see those of pydantic.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from znnpy.errors import NetworkFileError
from znnpy.formats.files import COUNT, LARGEST, shown, suggestion

FLOAT32_MAX = 3.4028234e38
FLOAT32_TINY = 1.1754944e-38
LONGEST_LINE = 200  # characters


def _triple(value: object) -> object:
    """Return a size as a tuple; a single number stands for a cube."""
    return tuple(value) if isinstance(value, list) else (value,) * 3


Count = Annotated[int, Field(ge=1, le=LARGEST)]
CountOrZero = Annotated[int, Field(ge=0, le=LARGEST)]
Size = Annotated[tuple[Count, Count, Count], BeforeValidator(_triple)]
SizeOrZero = Annotated[tuple[CountOrZero, CountOrZero, CountOrZero], BeforeValidator(_triple)]
Finite = Annotated[float, Field(ge=-FLOAT32_MAX, le=FLOAT32_MAX, allow_inf_nan=False)]
Positive = Annotated[float, Field(ge=FLOAT32_TINY, le=FLOAT32_MAX, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Percentile = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
# These become attributes of the output and are printed, so they hold no characters that control a terminal.
Words = Annotated[str, Field(min_length=1, max_length=LONGEST_LINE, pattern=r"^[^\p{C}\p{Zl}\p{Zp}]+$")]
# Names of nodes stand in lists of names, so they hold no spaces either.
NodeName = Annotated[str, Field(min_length=1, max_length=LONGEST_LINE, pattern=r"^[^\p{C}\p{Z}]+$")]

SIZE = f"{COUNT} or three of them, [z, y, x]"
SIZE_OR_ZERO = f"a whole number from 0 to {LARGEST} or three of them, [z, y, x]"
ONE_LINE = f"text on one line of at most {LONGEST_LINE} characters"
NODE_NAME = f"the name of a node, {ONE_LINE} without spaces"


class Entry(BaseModel):
    """A mapping in the file. The description of a field says what is accepted, its example what to write."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @classmethod
    def keys(cls) -> dict[str, FieldInfo]:
        """Return the fields by the keys that the file has for them."""
        return {field.alias or name: field for name, field in cls.model_fields.items()}

    @classmethod
    def example(cls, *keys: str) -> str:
        """Show how to write these keys, or all that are required."""
        fields = cls.keys()
        chosen = keys or tuple(key for key, field in fields.items() if field.is_required())
        return ", ".join(f"{key}: {(fields[key].examples or ['...'])[0]}" for key in chosen)


AnyEntry = TypeVar("AnyEntry", bound=Entry)


def check(entry: type[AnyEntry], raw: object, where: str) -> AnyEntry:
    """Check `raw` as an entry; NetworkFileError, which begins with `where`, for the first mistake in it."""
    if not isinstance(raw, dict):
        raise NetworkFileError(f"{where}expected a mapping, not {shown(raw)}; write {entry.example()}")
    fields = entry.keys()
    for key in raw:
        if key not in fields:
            raise NetworkFileError(f"{where}unknown key {shown(key)}; {suggestion(key, fields)}")
    for key, field in fields.items():
        if field.is_required() and key not in raw:
            raise NetworkFileError(f"{where}{key} is missing; add for example {entry.example(key)}")
    try:
        return entry.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, NetworkFileError):  # a validator that knows more than the description of its field
            raise NetworkFileError(f"{where}{cause}") from None
        key = str(first["loc"][0])
        raise NetworkFileError(
            f"{where}{key} is {shown(raw[key])}, but must be {fields[key].description}; "
            f"write for example {entry.example(key)}"
        ) from None
