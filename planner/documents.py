"""Files of JSON that hold a plan or costs: read whole, of one format, or refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import ValidationError

from znnpy.errors import PlanFileError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

MOST_CHARACTERS = 2**22

Content = TypeVar("Content")


@dataclass(frozen=True, slots=True)
class Document(Generic[Content]):
    """One kind of file, in words, and what its content is checked by."""

    name: str  # "plan": there is no ..
    content: str  # "the plan is": .. damaged
    format: int  # that is read
    again: str  # what to do about one that cannot be read
    written_by: str  # the command, its file left out
    adapter: Callable[[], TypeAdapter[Content]]

    def parsed(self, text: str) -> Content:
        """PlanFileError when it is damaged or of another format."""
        self._check_format(text)
        try:
            return self.adapter().validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the file"
            more = f" (and {error.error_count() - 1} more such)" if error.error_count() > 1 else ""
            raise self._refused(f"{self.content} damaged: {where}: {first['msg']}{more}") from None

    def load(self, path: Path) -> Content:
        """Of a file; PlanFileError names it."""
        try:
            with path.open(encoding="utf-8") as file:
                text = file.read(MOST_CHARACTERS + 1)
            if len(text) > MOST_CHARACTERS:
                raise self._refused(f"it is longer than {MOST_CHARACTERS:,} characters, as no {self.name} is")
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
        """A clear word for files of another version, before their fields are compared one by one."""
        content: Any
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            where = f"line {error.lineno}, column {error.colno}: {error.msg}"
            raise self._refused(f"{self.content} damaged or cut off: {where}") from None
        except ValueError:  # of integers too long to read
            raise self._refused(f"{self.content} damaged: a number has thousands of digits") from None
        except RecursionError:
            raise self._refused(f"{self.content} damaged: nested too deeply") from None
        version = content.get("format") if isinstance(content, dict) else None
        if version != self.format:
            named = f"a {self.name} of format {version}" if version is not None else f"no {self.name}"
            raise self._refused(f"this is {named}, and this version reads format {self.format}")

    def _refused(self, why: str) -> PlanFileError:
        return PlanFileError(f"{why}; {self.again}")
