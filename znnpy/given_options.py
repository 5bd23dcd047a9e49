"""Write down the options that a caller gave, so that they can be given again."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from math import isfinite
from pathlib import Path
from typing import Any

from znnpy.messages import one_line, option, speaking_to_command_line
from znnpy.volume.location import volume_location

Value = str | int | float | bool | None
Given = Mapping[str, Value | tuple[Value, ...]]

REPEATED = ("network", "only")  # options that a command takes once for each of several values
PLACES = ("volume", "network", "weights", "mask", "plan", "costs", "machine", "out")  # options that may be paths


def given_options(asked: Any, without: Collection[str] = ()) -> tuple[dict[str, Value | tuple[Value, ...]], bool]:
    """Return the options that are not the defaults, and whether an object of the caller's, described, is among them.

    Those that may be paths come first.

    asked    an instance of a class of options
    without  names of options that are left out
    """
    found: dict[str, Value | tuple[Value, ...]] = {}
    has_objects = False
    for of in fields(asked):
        value = getattr(asked, of.name)
        if of.name in without or value is None or value is of.default:
            continue
        several = value if isinstance(value, list | tuple) else (value,)
        if not all(isinstance(one, str | Path | int | float) for one in several):
            has_objects = True
            found[of.name] = f"<{type(value).__name__}>"
            continue
        if of.default is not MISSING and value == of.default:
            continue
        kept = tuple(held_place(one) if of.name in PLACES else _plain(one) for one in several)
        found[of.name] = kept if isinstance(value, list | tuple) else kept[0]
    first = {name: found[name] for name in PLACES if name in found}
    return {**first, **found}, has_objects


def held_place(place: object) -> str:
    """Return a place so that it is found from any folder, if something on this machine has this name."""
    words = str(place)
    location = volume_location(words)
    if not location.is_local or not os.path.lexists(location.place):
        return one_line(words)
    prefix = "" if location.prefix is None else f"{location.prefix}://"
    inside = "" if location.dataset is None else f"::{location.dataset}"
    return one_line(f"{prefix}{os.path.abspath(location.place)}{inside}")


def _plain(value: str | Path | float) -> Value:
    """Return a value as JSON holds it: NaN and infinity are text, as the command line reads them."""
    if isinstance(value, str | Path):
        return one_line(str(value))
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def command_line(command: str, places: Sequence[str], given: Given) -> str:
    """Return a command of the shell: its places, and then its options."""
    words = ["znnpy", command, *places]
    with speaking_to_command_line():
        for name, value in given.items():
            if isinstance(value, bool):
                words.append(option(name, value))
            elif isinstance(value, tuple) and name in REPEATED:
                words += [word for one in value for word in (option(name), str(one))]
            else:
                words += [option(name), ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return shlex.join(words)


def python_call(function: str, given: Given) -> str:
    """Return a call of a function of znnpy; objects of the caller's are described in angle brackets."""
    return f"znnpy.{function}({', '.join(f'{name}={_in_python(name, value)}' for name, value in given.items())})"


def _in_python(name: str, value: Value | tuple[Value, ...]) -> str:
    if isinstance(value, str) and value.startswith("<"):
        return value
    return f"float({value!r})" if isinstance(value, str) and name == "fill_missing" else repr(value)
