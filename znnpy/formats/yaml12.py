"""Read YAML 1.2 from untrusted files as plain Python values, within limits.

The package ruamel.yaml turns text into events, one at a time; values are built here, so that reading ends at the first
event that is not accepted. Plain scalars follow the core schema of YAML 1.2: `010` is 10, and `1:30`, `yes` and dates
are text. Merge keys, tags and repeated keys are refused. An alias counts as many values as it stands for, and cannot
contain itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.reader import ReaderError

from znnpy.errors import NetworkFileError
from znnpy.messages import excerpt

MOST_VALUES = 20_000  # values of one file, including keys and lists; an alias counts as what it stands for
MOST_DEPTH = 16  # levels of lists and mappings
LONGEST_NUMBER = 30  # digits
SHOWN = 60  # characters of one value in a message

_Read = Callable[[str], object]

# Section 10.3.2 of the specification of YAML 1.2.2: plain scalars that are not text.
_CORE_SCHEMA: tuple[tuple[re.Pattern[str], _Read], ...] = (
    (re.compile(r"null|Null|NULL|~|"), lambda _: None),
    (re.compile(r"true|True|TRUE"), lambda _: True),
    (re.compile(r"false|False|FALSE"), lambda _: False),
    (re.compile(r"[-+]?[0-9]+"), int),
    (re.compile(r"0o[0-7]+"), lambda word: int(word[2:], 8)),
    (re.compile(r"0x[0-9a-fA-F]+"), lambda word: int(word[2:], 16)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), lambda word: float(word.replace(".", ""))),
)


def read_yaml(content: str) -> object:
    """Read the one document in `content`: None, bool, int, float, str, lists and dicts; None if it is empty.

    NetworkFileError with line and column if it is not valid YAML 1.2, or exceeds a limit.
    """
    reader = YAML(typ="safe", pure=True)  # pure: the same messages in every installation
    try:
        return _Builder(reader.parse(content)).document()
    except NetworkFileError:  # from the builder; it is also a ValueError
        raise
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise _refused(f"not valid YAML: {excerpt(problem)}; correct it there", mark) from None
    except ReaderError as error:
        raise _refused(
            f"not valid YAML: character {error.character!r} at position {error.position}; delete it"
        ) from None
    except (YAMLError, ValueError) as error:  # a ValueError: "\U00110000" is not a character
        raise _refused(f"not valid YAML: {excerpt(error)}; correct it") from None


def _refused(why: str, mark: Any = None) -> NetworkFileError:
    at = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return NetworkFileError(f"{at}{why}")


class _Builder:
    """Builds values from events."""

    def __init__(self, events: Iterator[Event]) -> None:
        self._events = events
        self._values = 0
        self._anchors: dict[str, tuple[object, int]] = {}  # named values, each with the number of values in it

    def document(self) -> object:
        content: object = None
        documents = 0
        for event in self._events:
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise _refused("a second document begins; delete it, or what is before it", event.start_mark)
                if event.version not in (None, (1, 2)):
                    raise _refused(
                        "it says that it is YAML of another version than 1.2; delete that line", event.start_mark
                    )
            elif isinstance(event, (ScalarEvent, AliasEvent, SequenceStartEvent, MappingStartEvent)):
                content = self._value(event, 1)
        return content

    def _value(self, event: Any, depth: int) -> object:
        before = self._values
        self._count(1, event)
        if isinstance(event, AliasEvent):
            return self._named(event)
        if event.tag is not None:
            raise _refused(f"the tag {excerpt(event.tag, SHOWN)} is not read; delete it", event.start_mark)
        if depth > MOST_DEPTH:
            raise _refused(
                f"more than {MOST_DEPTH} lists and mappings within each other; flatten them", event.start_mark
            )
        value: object
        if isinstance(event, ScalarEvent):
            value = _scalar(event)
        else:
            value = self._list(depth) if isinstance(event, SequenceStartEvent) else self._mapping(depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = (value, self._values - before)
        return value

    def _count(self, values: int, event: Event) -> None:
        self._values += values
        if self._values > MOST_VALUES:
            raise _refused(f"more than {MOST_VALUES} values, as no network file has; shorten it", event.start_mark)

    def _named(self, event: Any) -> object:
        if event.anchor not in self._anchors:
            name = excerpt(event.anchor, SHOWN)
            raise _refused(f"the alias *{name} stands for nothing that ends before it; correct it", event.start_mark)
        value, values = self._anchors[event.anchor]
        self._count(values - 1, event)
        return value

    def _list(self, depth: int) -> list[object]:
        values = []
        while not isinstance(event := next(self._events), SequenceEndEvent):
            values.append(self._value(event, depth + 1))
        return values

    def _mapping(self, depth: int) -> dict[object, object]:
        values: dict[object, object] = {}
        while not isinstance(event := next(self._events), MappingEndEvent):
            key = self._value(event, depth + 1)
            if isinstance(key, (list, dict)):
                raise _refused("a list or mapping is a key; write a word there", event.start_mark)
            if key == "<<":
                raise _refused("merge keys (<<) are not read; write the keys themselves", event.start_mark)
            if key in values:
                shown = excerpt(repr(key), SHOWN)
                raise _refused(f"not valid YAML: key {shown} is given twice; correct it there", event.start_mark)
            values[key] = self._value(next(self._events), depth + 1)
        return values


def _scalar(event: ScalarEvent) -> object:
    """Read a plain scalar by the core schema; any other scalar is text."""
    text: str = event.value
    if event.style:  # quoted, or a block scalar
        return text
    for pattern, read in _CORE_SCHEMA:
        if pattern.fullmatch(text):
            if len(text) > LONGEST_NUMBER:
                raise _refused(f"a number of {len(text)} digits; correct it there", event.start_mark)
            return read(text)
    return text
