"""Options of a command that stand in a YAML file: `znnpy infer --config run.yaml`. Options that are given win."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from znnpy.errors import NetworkFileError
from znnpy.files import read_regular
from znnpy.messages import excerpt

MOST_BYTES = 2**20
NOT_IN_FILES = ("config", "help")


def read_config(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    """Take the defaults of a command from a file; UsageError says what is wrong with it."""
    if path is None:
        return
    try:
        given = _read(path)
        known = _names(context.command)
        found: dict[str, Any] = {}
        for word, value in given.items():
            name = str(word).replace("_", "-")
            if name not in known:
                listed = ", ".join(sorted(known))
                raise ValueError(f"{context.command.name} has no option {excerpt(word, 60)}; it has {listed}")
            of = known[name]
            assert of.name is not None, "every parameter of a command has a name"
            found |= {of.name: entry} if (entry := _entry(of, name, value)) is not None else {}
    except ValueError as error:
        raise click.BadParameter(f"{excerpt(path)}: {error}", context, parameter) from None
    context.default_map = {**(context.default_map or {}), **found}


def _read(path: Path) -> Mapping[object, object]:
    """Return the entries of a file; ValueError if it cannot be read, or is no list of options."""
    from znnpy.formats.yaml12 import read_yaml  # only for those who have such a file

    try:
        content = read_regular(path, MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror}; check the path") from None
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes, as no list of options has; check the path")
    try:
        found = read_yaml(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ValueError("it is not text in UTF-8; check the path") from None
    except NetworkFileError as error:
        raise ValueError(str(error)) from None
    if not isinstance(found, dict):
        raise ValueError("it lists no options; write lines such as `ram: 16G`")
    return found


def _names(command: click.Command) -> dict[str, click.Parameter]:
    """Return the parameters of a command by the words of their options, without the dashes."""
    found: dict[str, click.Parameter] = {}
    for of in command.params:
        for word in of.opts:
            name = word.lstrip("-").replace("_", "-")
            if name not in NOT_IN_FILES and len(name) > 1:
                found[name] = of
    return found


def _entry(of: click.Parameter, name: str, value: object) -> Any:
    """Return a value as the command line would give it; None where the option is not given."""
    if value is None:
        return None
    if isinstance(of, click.Option) and of.is_flag:
        if not isinstance(value, bool):
            raise ValueError(f"{name} is true or false, not {excerpt(value, 60)}")
        return of.default is not True if value else None  # `no-calibrate: true` is False of what is True by default
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(one, str | int | float) and not isinstance(one, bool) for one in values):
        raise ValueError(f"{name} is a word or a number, or a list of them, not {excerpt(value, 60)}")
    words = [str(one) for one in values]
    return words if of.nargs != 1 or of.multiple else ",".join(words)
