"""Declare options, and make functions with their signatures and docstrings from the declarations.

This module loads no numpy, as the command line does not.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

OPTIONS = "OPTIONS"  # the line of a docstring that the descriptions of the options replace
LINE = 116  # characters of a line of a docstring

P = ParamSpec("P")
T = TypeVar("T")
Owner = TypeVar("Owner")
Asked = TypeVar("Asked")
Result = TypeVar("Result")

Kind = Literal[
    "text",
    "path",
    "new path",
    "place",
    "new place",
    "size",
    "voxels",
    "shares",
    "axes",
    "numbers",
    "region",
    "part",
    "number",
    "positive",
    "whole",
    "gpus",
    "flag",
    "names",
    "networks",
]


@dataclass(frozen=True, slots=True)
class Option:
    """The description of one option, and how the command line reads it.

    help      meaning, without the default
    unset     meaning of the default None; empty if None is not a legal value
    values    the legal values, if only some are legal
    kind      type of the value on the command line; None: the command line does not have the option
    metavar   placeholder of the value on a help page
    argument  whether the command line takes it by position
    least     smallest legal whole number on the command line, and `most` the largest
    off       meaning of the option that switches a flag off, on the command line
    in_python addition to the description in Python
    """

    help: str
    unset: str = ""
    values: Sequence[str] = ()
    kind: Kind | None = None
    metavar: str | None = None
    argument: bool = False
    least: int | None = None
    most: int | None = None
    off: str = ""
    in_python: str = ""


def option(
    default: T,
    help: str,
    kind: Kind | None = None,
    *,
    unset: str = "",
    values: Sequence[str] = (),
    metavar: str | None = None,
    argument: bool = False,
    least: int | None = None,
    most: int | None = None,
    off: str = "",
    in_python: str = "",
) -> T:
    """Declare an option with a default as a field of a dataclass; the parameters are those of `Option`."""
    about = Option(help, unset, values, kind, metavar, argument, least, most, off, in_python)
    return field(default=default, metadata={"option": about})


def needed(help: str, kind: Kind | None = None) -> Any:
    """Declare an option without a default, which the command line takes by position."""
    return field(metadata={"option": Option(help, kind=kind, argument=True)})


def about(of: Field[Any]) -> Option:
    """Return the description of an option."""
    found: Option = of.metadata["option"]
    return found


def options_of(kind: type) -> Iterator[Field[Any]]:
    """Yield the options of a class, and before them those that it inherits, nearest ancestor first."""
    declared = {of.name: of for of in fields(kind)}
    for owner in (*kind.__mro__[1:], kind):
        for name in getattr(owner, "__annotations__", ()):
            if name in declared:
                yield declared.pop(name)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A set of options that are checked when it is made: ValueError if a value is not legal."""

    def __post_init__(self) -> None:
        for of in fields(self):
            value, values = getattr(self, of.name), about(of).values
            if values and value is not None and value not in values:
                raise ValueError(
                    f"there is no {of.name.replace('_', ' ')} {value!r}; choose one of {', '.join(values)}"
                )


def function_of(options: Callable[P, Asked]) -> Callable[[Callable[[Asked], Result]], Callable[P, Result]]:
    """Turn a function of one object of options into one that takes these options as arguments."""

    def public(run: Callable[[Asked], Result]) -> Callable[P, Result]:
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            return run(options(*args, **kwargs))

        _describe(call, run, options, method=False)
        return call

    return public


def method_of(
    options: Callable[P, Asked],
) -> Callable[[Callable[[Owner, Asked], Result]], Callable[Concatenate[Owner, P], Result]]:
    """Turn a method that takes one object of options into one that takes these options as arguments."""

    def public(run: Callable[[Owner, Asked], Result]) -> Callable[Concatenate[Owner, P], Result]:
        def call(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> Result:
            return run(self, options(*args, **kwargs))

        _describe(call, run, options, method=True)
        return call

    return public


def _describe(
    call: Callable[..., object], run: Callable[..., object], options: Callable[..., object], *, method: bool
) -> None:
    """Give `call` the name of `run`, the signature of `options`, and a docstring that describes the options."""
    for name in ("__module__", "__name__", "__qualname__"):
        setattr(call, name, getattr(run, name))
    assert isinstance(options, type)
    signature = inspect.signature(options)
    parameters = list(signature.parameters.values())
    if method:
        parameters.insert(0, inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY))
    returns = run.__annotations__.get("return", inspect.Signature.empty)
    call.__signature__ = signature.replace(parameters=parameters, return_annotation=returns)  # type: ignore[attr-defined]
    call.__doc__ = inspect.cleandoc(run.__doc__ or "").replace(OPTIONS, described(options))


def described(kind: type) -> str:
    """Return the lines of a docstring that describe the options of a class."""
    found = {of.name: about(of) for of in fields(kind)}
    width = max(map(len, found)) + 2
    lines: list[str] = []
    for name in inspect.signature(kind).parameters:
        of = found[name]
        parts = [of.help, *([of.in_python] if of.in_python else []), *([f"None: {of.unset}"] if of.unset else [])]
        text = name.ljust(width) + "; ".join(parts) + "."
        lines += textwrap.wrap(text, LINE, subsequent_indent=" " * width, break_on_hyphens=False)
    return "\n".join(lines)
