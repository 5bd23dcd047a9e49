"""Read JSON files that hold a plan or costs: files that are damaged, too large or of another format are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import ValidationError

from znnpy.errors import PlanFileError
from znnpy.files import read_regular
from znnpy.messages import excerpt, one_line

if TYPE_CHECKING:
    from pydantic import TypeAdapter

MOST_BYTES = 2**22
MOST_VALUES = 200_000  # numbers, texts, lists and objects; the largest legal plan has half as many
MOST_NUMBER = 2**60  # largest absolute value; products of ten such numbers still fit into a float
MOST_TEXT = 2000  # characters of one text
MOST_DEPTH = 32  # lists and objects within each other
SHOWN = 60  # characters of one value in a message

Content = TypeVar("Content")


@dataclass(frozen=True, slots=True)
class JsonFile(Generic[Content]):
    """A kind of JSON file: its names in messages, and the adapter that checks its content."""

    name: str  # subject of messages: "plan"
    content: str  # subject and verb of messages: "the plan is"
    format: int  # format that this version reads
    again: str  # advice for a file that cannot be read
    written_by: str  # command that writes such a file, without the file name
    adapter: Callable[[], TypeAdapter[Content]]

    def parsed(self, text: str) -> Content:
        """Parse the content of a file; PlanFileError if it is damaged or of another format."""
        self._check_format(text)
        try:
            return self.adapter().validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = excerpt(".".join(map(str, first["loc"])) or "the file", SHOWN)
            more = f" (and {error.error_count() - 1} more such)" if error.error_count() > 1 else ""
            raise self._refused(f"{self.content} damaged: {where}: {excerpt(first['msg'])}{more}") from None

    def load(self, path: Path) -> Content:
        """Read a file; PlanFileError names it."""
        try:
            content = read_regular(path, MOST_BYTES + 1)
            if len(content) > MOST_BYTES:
                raise self._refused(f"it is longer than {MOST_BYTES:,} bytes, as no {self.name} is")
            text = content.decode()
            return self.parsed(text)
        except FileNotFoundError:
            raise PlanFileError(f"no {self.name} {path}; write one with `{self.written_by} {path}`") from None
        except OSError as error:
            raise self._refused(f"cannot read the {self.name} {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise self._refused(f"{path} is no {self.name}: it is not text") from None
        except PlanFileError as error:
            raise error.with_context(str(path)) from None

    def _check_format(self, text: str) -> None:
        """Refuse files of another version or beyond the bounds, before their fields are checked."""
        content: Any
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            where = f"line {error.lineno}, column {error.colno}: {error.msg}"
            raise self._refused(f"{self.content} damaged or cut off: {where}") from None
        except ValueError:  # an integer is too long to read
            raise self._refused(f"{self.content} damaged: a number has thousands of digits") from None
        except RecursionError:
            raise self._refused(f"{self.content} damaged: nested too deeply") from None
        version = content.get("format") if isinstance(content, dict) else None
        if version != self.format or isinstance(version, bool):
            known = isinstance(version, (int, float, str))
            named = f"a {self.name} of format {excerpt(version, SHOWN)}" if known else f"no {self.name}"
            raise self._refused(f"this is {named}, and this version reads format {self.format}")
        self._check_bounds(content)

    def _check_bounds(self, content: Any) -> None:
        """Raise PlanFileError for more values, larger numbers or longer texts than such a file holds.

        Without a limit on values, a list of a million wrong entries makes a million errors, which take minutes and
        gigabytes.
        """
        level: list[Any] = [content]
        count = depth = 0
        while level:
            count, depth = count + len(level), depth + 1
            if count > MOST_VALUES or depth > MOST_DEPTH:
                most = f"{MOST_VALUES:,} values" if count > MOST_VALUES else f"{MOST_DEPTH} lists within each other"
                raise self._refused(f"{self.content} damaged: it holds more than {most}")
            inside: list[Any] = []
            for value in level:
                if isinstance(value, dict):
                    inside += value
                    inside += value.values()
                elif isinstance(value, list):
                    inside += value
                elif why := _beyond(value):
                    raise self._refused(f"{self.content} damaged: {why}")
            level = inside

    def _refused(self, why: str) -> PlanFileError:
        return PlanFileError(f"{why}; {self.again}")


def _beyond(value: object) -> str | None:
    """Return why a number or a text is not legal in a plan or a cost file; None if it is legal."""
    if isinstance(value, int) and abs(value) > MOST_NUMBER:
        return f"a number is {excerpt(value, SHOWN)}, and none is beyond {MOST_NUMBER:,}"
    if isinstance(value, str):
        if len(value) > MOST_TEXT:
            return f"a text has {len(value):,} characters, and none has more than {MOST_TEXT:,}"
        if not value.isprintable() and one_line(value) != value:
            return f"a text contains control characters: {excerpt(value, SHOWN)}"
    return None
