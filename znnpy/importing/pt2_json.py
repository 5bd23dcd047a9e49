"""Fields of a JSON document that PyTorch wrote, with their types checked. ValueError names the field that is wrong."""

from __future__ import annotations

from typing import Any, TypeVar

from znnpy.messages import excerpt

MOST_INT = 2**63 - 1  # largest absolute value: PyTorch stores 64 bits
SHOWN = 60  # characters of a name in a message

Kind = TypeVar("Kind")


class SymbolicError(ValueError):
    """A size or a number is an expression, known only while the network runs."""


def field(content: object, key: str, kind: type[Kind]) -> Kind:
    """Return a field of an object; ValueError if it is missing or of another type."""
    if not isinstance(content, dict):
        raise ValueError(f"it has {excerpt(content, SHOWN)} in place of an object with {key!r}")
    return typed(content.get(key), kind, key)


def typed(value: object, kind: type[Kind], what: str) -> Kind:
    """Return a value of the type; ValueError with `what` if it is of another. A truth value is no whole number."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        name = excerpt(what, SHOWN)
        raise ValueError(f"{name!r} is {excerpt(value, SHOWN)}, which is no {kind.__name__}")
    if isinstance(value, int) and abs(value) > MOST_INT:
        raise ValueError(f"{excerpt(what, SHOWN)!r} is a number beyond {MOST_INT}")
    return value


def union(content: object, what: str) -> tuple[str, Any]:
    """Return the only key of an object, which says what its value is, and the value."""
    found = list(typed(content, dict, what).items())
    if len(found) != 1:
        raise ValueError(f"{excerpt(what, SHOWN)!r} is {excerpt(content, SHOWN)}, and not one value with its kind")
    kind, value = found[0]
    return kind, value


def number(value: object, what: str) -> float:
    """Return a number; JSON has none that is infinite or not a number, so PyTorch writes a word for these."""
    if value in ("Infinity", "-Infinity", "NaN"):
        return float(str(value))
    if isinstance(value, int):
        return float(typed(value, int, what))
    return typed(value, float, what)


def static_int(content: object, what: str) -> int:
    """Return a whole number that is stored as a number or as an expression; SymbolicError for the latter."""
    kind, value = union(content, what)
    if kind == "as_expr":
        raise SymbolicError(f"{excerpt(what, SHOWN)} is not known before the network runs")
    if kind != "as_int":
        raise ValueError(f"{excerpt(what, SHOWN)!r} is stored as {excerpt(kind, SHOWN)}")
    return typed(value, int, what)


def static_sizes(content: object, key: str, what: str) -> tuple[int, ...]:
    """Return a list of whole numbers that are not negative; SymbolicError if one is an expression."""
    found = tuple(static_int(one, f"{key} of {what}") for one in field(content, key, list))
    if min(found, default=0) < 0:
        raise ValueError(f"the {key} of {excerpt(what, SHOWN)} are {excerpt(list(found), SHOWN)}, one of them negative")
    return found
