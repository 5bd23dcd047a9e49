"""Damage to files from fixed seeds: to bytes, to JSON documents and to texts, and how a reader has to end."""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from znnpy.errors import ZnnpyError
from znnpy.messages import one_line

MOST_SECONDS = 5.0  # of the processor for one case; most take a millisecond
MOST_CHARACTERS = 1000  # of a message, paths left out

VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 7, 255, 2**31, 2**53 + 1, 2**60, 2**63, 10**20, 10**400, -(10**400)),
    *(0.0, -0.5, 0.5, 1e-320, 1e300, float("nan"), float("inf"), True, False, None),
    *("", "x", "3", "\x1b[2J", "\u202e\ud800", "n" * 5000, [], {}, [[]], {"": {}}, [0] * 50, ["a", 1, None]),
    *("cpu", "gpu", "cpu.conv.fft_data", "conv", "pool", [["tile", [4, 4, 4]]], [3, 3, 3], [0, 0, 0], [1, 1, 1]),
)


def ended(act: Callable[[], object], path: str = "") -> bool:
    """Run `act`, and say whether it ended without an error. AssertionError unless it ended as promised.

    It has to end within MOST_SECONDS, in a value or in a ZnnpyError of bounded length that steers no terminal. Any
    other exception goes through.
    """
    start = time.process_time()
    message = ""
    try:
        act()
    except ZnnpyError as error:
        message = str(error).replace(path, "FILE") if path else str(error)
        assert message
        assert len(message) <= MOST_CHARACTERS, message
        assert one_line(message) == message, ascii(message)
    spent = time.process_time() - start
    assert spent < MOST_SECONDS, f"{spent:.1f} s: {message}"
    return not message


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """`content` with some bytes changed, left out, moved in, repeated, or all that follows cut off."""
    damaged = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(damaged) + 1)
        length = rng.choice((1, 2, 4, 30))
        match rng.randrange(6):
            case 0:
                damaged[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del damaged[at : at + length]
            case 2:
                damaged[at:at] = rng.randbytes(length)
            case 3:
                damaged[at:at] = damaged[at : at + length]
            case 4:
                damaged[at : at + length] = rng.choice((b"\0", b"\xff")) * length
            case _:
                del damaged[at:]
    return bytes(damaged)


def damaged_text(content: str, words: Sequence[str], rng: random.Random) -> str:
    """`content` with some of `words` between its characters or in place of some, or a line repeated or lost."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(content) + 1)
        lines = content.splitlines(keepends=True)
        match rng.randrange(4):
            case 0:
                content = content[:at] + rng.choice(words) + content[at:]
            case 1:
                content = content[:at] + rng.choice(words) + content[at + rng.randrange(1, 8) :]
            case 2 if lines:
                lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
                content = "".join(lines)
            case _ if lines:
                del lines[rng.randrange(len(lines))]
                content = "".join(lines)
    return content


def damaged_json(content: Any, rng: random.Random) -> str:
    """Return a document as JSON, with some values replaced, left out, added, repeated or exchanged."""
    whole = {"": copy.deepcopy(content)}
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        holder, key = rng.choice(list(_places(whole)))
        match rng.randrange(6):
            case 0 if key != "":
                del holder[key]
            case 1 if isinstance(holder[key], int):
                holder[key] += rng.choice((-1, 1, 64, 2**40))
            case 2 if isinstance(holder[key], list) and holder[key]:
                holder[key] *= rng.choice((2, 50))
            case 3:
                other, there = rng.choice(list(_places(whole)))
                holder[key] = copy.deepcopy(other[there])
            case 4 if isinstance(holder[key], dict):
                holder[key][rng.choice(("x", "\x1b[2J", "k" * 3000, "format"))] = rng.choice(VALUES)
            case _:
                holder[key] = copy.deepcopy(rng.choice(VALUES))
    return json.dumps(whole.get("", {}))


def _places(content: Any) -> list[tuple[Any, Any]]:
    """Every value of a document, as what holds it and its key there."""
    found: list[tuple[Any, Any]] = []
    waiting = [content]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        found += [(holder, key) for key in keys]
        waiting += [holder[key] for key in keys if isinstance(holder[key], (dict, list))]
    return found
