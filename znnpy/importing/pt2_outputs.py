"""Words for the outputs of an exported network, from the description of how its result is nested."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic_core import from_json

from znnpy.importing.pt2_json import field

VERSION = 1  # of such descriptions

_NUMBERED = ("builtins.tuple", "builtins.list", "collections.deque")


def word(path: Sequence[object]) -> str | None:
    """Return the word of an output: its keys, names of fields and numbers, joined by dots; None if a key has no word.

    A network that returns one array has the path (), and its output the word 0.
    """
    if not all(isinstance(key, str) or type(key) is int for key in path):
        return None
    return ".".join(map(str, path)) or "0"


def output_words(description: str, tuples: object) -> list[str] | None:
    """Return a word for each output; None if the structure has parts that have no words.

    tuples  names of the fields of named tuples, by their types
    """
    content = from_json(description, allow_inf_nan=False)
    if not isinstance(content, list) or len(content) != 2 or content[0] != VERSION:
        return None
    paths = _paths(content[1], tuples)
    words = [] if paths is None else [one for path in paths if (one := word(path)) is not None]
    return words if paths is not None and len(words) == len(paths) else None


def _paths(content: object, tuples: object) -> list[tuple[object, ...]] | None:
    """Return the path of each leaf; None if the keys of a part are not known."""
    children = field(content, "children_spec", list)
    kind, context = (content.get("type"), content.get("context")) if isinstance(content, dict) else (None, None)
    if kind is None:
        return [()]
    keys = _keys(kind, context, len(children), tuples)
    if keys is None or len(keys) != len(children):
        return None
    found: list[tuple[object, ...]] = []
    for key, child in zip(keys, children, strict=True):
        inside = _paths(child, tuples)
        if inside is None:
            return None
        found += [(key, *path) for path in inside]
    return found


def _keys(kind: object, context: object, count: int, tuples: object) -> Sequence[object] | None:
    """Return the keys of the parts of a dictionary, tuple or dataclass; None if they are not known."""
    if kind in _NUMBERED:
        return range(count)
    if kind == "collections.namedtuple":
        names = tuples.get(context) if isinstance(tuples, dict) and isinstance(context, str) else None
        keys = names.get("field_names") if isinstance(names, dict) else None
    elif isinstance(context, str):
        keys = from_json(context, allow_inf_nan=False)
        if kind not in ("builtins.dict", "collections.OrderedDict"):  # a dataclass: fields given, and fields left out
            keys = keys[0] if isinstance(keys, list) and len(keys) == 2 else None
    else:
        keys = context.get("dict_context") if isinstance(context, dict) else None
    return keys if isinstance(keys, list) else None
