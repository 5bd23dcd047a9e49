"""Name arguments in messages, and show the content of files. The module imports no numpy, as the command line needs."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_EXCERPT = 200  # characters of the content of a file in one message

_NEGATED = {"depth_first": "no-depth-first", "calibrate": "no-calibrate"}  # arguments with an option to disable them
_OTHERWISE = {"begin": "from", "end": "to"}  # arguments whose option has another name; `from` is reserved in Python
_COMMAND_LINE = [False]  # whether a command of the command line runs in this process


@contextmanager
def speaking_to_command_line() -> Iterator[None]:
    """Make `option` write options of the command line inside the context, in every thread of the process."""
    before = _COMMAND_LINE[0]
    _COMMAND_LINE[0] = True
    try:
        yield
    finally:
        _COMMAND_LINE[0] = before


def option(name: str, value: object = None) -> str:
    """Name the argument `name` as the caller of this process writes it, with a value if one is given.

    name   the name of the Python argument, for example "output_dtype".
    value  value to write; True and False stand for a flag, a tuple for numbers joined by commas.

    Returns `--ram 2G`, `--overwrite`, `--patch 8,16,16` while a command of the command line runs, and otherwise
    `ram='2G'`, `overwrite=True`, `patch=(8, 16, 16)`.
    """
    if not _COMMAND_LINE[0]:
        return f"`{name}`" if value is None else f"{name}={value!r}"
    if value is False:
        return f"--{_NEGATED[name]}"
    word = f"--{_OTHERWISE.get(name, name).replace('_', '-')}"
    if value is None or value is True:
        return word
    return f"{word} {','.join(map(str, value)) if isinstance(value, tuple) else value}"


def excerpt(content: object, longest: int = LONGEST_EXCERPT) -> str:
    r"""Return `content` on one line of at most `longest` characters, none of which controls a terminal.

    Control characters, line ends, surrogates and marks of writing direction become escapes such as `\x1b`.
    """
    text = str(content)
    if len(text) > longest:
        kept = max(1, (longest - len(" ... ")) // 2)
        text = f"{text[:kept]} ... {text[-kept:]}"
    shown = "".join(_escaped(sign) for sign in text)
    return shown if len(shown) <= longest else f"{shown[: longest - len(' ...')]} ..."


def one_line(message: str) -> str:
    """Return a message with every character escaped that controls a terminal; it is not shortened."""
    return "".join(_escaped(sign) for sign in message)


def _escaped(sign: str) -> str:
    steers = unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return sign.encode("unicode_escape").decode() if steers else sign
