"""Options of the command line, made from their declarations in `znnpy.options`.

This module loads no numpy, as the command line does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, Field
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from znnpy.machine import parse_bytes
from znnpy.option_declarations import Option, about, options_of
from znnpy.options import part_of
from znnpy.shapes import Vec3
from znnpy.shared_options import NO_AXES
from znnpy.volume.lengths import LENGTH
from znnpy.volume.location import Location

MOST_VOXELS = 10**7  # along an axis; more is a slip of the keyboard
MOST_GPUS = 1024

Asked = TypeVar("Asked")

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # older releases take no type parameter at run time


class _Read(ParamType):
    """A type of values that a function reads; the function raises ValueError with a message for the user."""

    def __init__(self, name: str, read: Callable[[str], object]) -> None:
        self.name, self._read = name, read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value  # the default
        try:
            return self._read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _gpu_count(value: str) -> int | str:
    """Read a number of GPUs, or "all"."""
    if value == "all":
        return value
    if not value.isdecimal() or not 1 <= int(value) <= MOST_GPUS:
        raise ValueError(f"{value!r} is neither a number of GPUs from 1 to {MOST_GPUS} nor all")
    return int(value)


def _size(value: str) -> int:
    """Read `2G` or `600M`: bytes in powers of 1024."""
    size = parse_bytes(value)
    if size < 1:
        raise ValueError(f"{value!r} is {size} bytes: give a positive size such as 2G")
    return size


def _number(value: str) -> int | float:
    """Read a number, also NaN or infinity; whole numbers are exact."""
    try:
        return int(value) if re.fullmatch(r"\s*[+-]?\d{1,20}\s*", value) else float(value)
    except ValueError:
        raise ValueError(f"{_shortened(value)} is not a number such as 0 or 127.5") from None


def _positive(value: str) -> float:
    """Read a finite number above 0: the range of click lets NaN pass."""
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a valid float.") from None
    if not 0 < number < inf:
        raise ValueError(f"{number} is not a positive number such as 1e-5")
    return number


def _voxels(value: str) -> Vec3:
    """Read `Z,Y,X`: three positive counts."""
    match = re.fullmatch(r"\s*0*(\d+)\s*,\s*0*(\d+)\s*,\s*0*(\d+)\s*", value)
    counts = [min(int(part[:9]), MOST_VOXELS + 1) for part in match.groups()] if match else []
    if not counts or not min(counts):
        raise ValueError(f"{_shortened(value)} is not three positive counts of voxels Z,Y,X such as 64,128,128")
    if max(counts) > MOST_VOXELS:
        raise ValueError(f"{_shortened(value)} is too large: axes of up to {MOST_VOXELS:,} voxels are planned")
    return counts[0], counts[1], counts[2]


def _shares(value: str) -> tuple[float, ...]:
    """Read one share of a window for all axes, or one for each."""
    shares = _numbers(value)
    if len(shares) not in (1, 3) or not all(0 <= share < 1 for share in shares):
        raise ValueError(f"{_shortened(value)} is neither a share such as 0.5, nor three for Z,Y,X, each below 1")
    return shares


def _axes(value: str) -> str:
    """Read different axes, `z,y,x` or some of them, or `none`."""
    axes = re.sub(r"\s", "", value).split(",")
    if axes == [NO_AXES]:
        return NO_AXES
    if not set(axes) <= set("zyx") or len(set(axes)) < len(axes):
        raise ValueError(f"{_shortened(value)} is not one or several of the axes z,y,x, nor none")
    return ",".join(axes)


def _numbers(value: str) -> tuple[float, ...]:
    """Read finite numbers with commas between them."""
    try:
        numbers = tuple(map(float, value.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or not all(map(isfinite, numbers)):
        raise ValueError(f"{_shortened(value)} is not a number such as 0.5, or several with commas between them")
    return numbers


def _part(value: str) -> str:
    """Check the form of `K/N`."""
    part_of(value)
    return value


def _region(value: str) -> str:
    """Check the form of `z0:z1,y0:y1,x0:x1`; whether it fits is checked when the volume is open."""
    end = rf"(?:\d{{0,18}}|{LENGTH.pattern})"
    form = ",".join([f"{end}:{end}"] * 3)
    if not re.fullmatch(form, re.sub(r"\s", "", value)):
        raise ValueError(f"{_shortened(value)} is not of the form z0:z1,y0:y1,x0:x1 such as 0:64,10um:20um,:")
    return value


def _shortened(value: str) -> str:
    return repr(value if len(value) <= 60 else f"{value[:40]}...{value[-10:]}")


def _place(value: str) -> str:
    """Check the name of a volume or an output: a path or a URL."""
    Location.of(value)
    return value


def _new_place(value: str) -> str:
    """Check the name of an output, which must end in one."""
    if Location.of(value).name in ("", ".", ".."):
        raise ValueError(f"{value!r} is a folder: give the name of a file")
    return value


class _NewPath(click.Path):
    """A path that ends in a name, as that of a new file must."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(value)
        if path.name in ("", ".."):
            self.fail(f"{str(path)!r} is a folder: give the name of a file", param, ctx)
        return path


FILE = click.Path(path_type=Path)
NEW_FILE = _NewPath()
VOXELS = _Read("voxels", _voxels)
PLACE = _Read("place", _place)
_TYPES: dict[str, ParamType] = {
    "text": click.STRING,
    "names": click.STRING,
    "path": FILE,
    "new path": NEW_FILE,
    "place": PLACE,
    "new place": _Read("place", _new_place),
    "size": _Read("size", _size),
    "voxels": VOXELS,
    "shares": _Read("shares", _shares),
    "axes": _Read("axes", _axes),
    "numbers": _Read("numbers", _numbers),
    "region": _Read("region", _region),
    "part": _Read("part", _part),
    "number": _Read("number", _number),
    "positive": _Read("float", _positive),
    "gpus": _Read("count", _gpu_count),
}
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")


def command_of(
    group: click.Group, kind: type[Asked], command_class: type[click.Command]
) -> Callable[[Callable[[Asked], None]], click.Command]:
    """Turn a function that takes one object of options into a command of `group`."""

    def add(run: Callable[[Asked], None]) -> click.Command:
        found = [of for of in options_of(kind) if about(of).kind is not None]
        ensembles = [of.name for of in found if about(of).kind == "networks"]

        def callback(**values: Any) -> None:
            for name in ensembles:  # one network is given as such
                given = values[name]
                values[name] = None if not given else given[0] if len(given) == 1 else given
            try:
                asked = kind(**values)
            except ValueError as error:
                raise click.UsageError(str(error)) from None
            run(asked)

        parameters = [_parameter(of) for of in found]
        loud = (
            ("quiet", "Print errors only: no progress, no report; --json still prints."),
            ("verbose", "Log each phase of the work on stderr."),
        )
        parameters += [click.Option([f"--{name}"], is_flag=True, help=help) for name, help in loud]
        parameters.append(click.Option(["--json", "as_json"], is_flag=True, help="Print one JSON document on stdout."))
        made = command_class(name=run.__name__, callback=callback, params=parameters, help=run.__doc__)
        group.add_command(made)
        return made

    return add


def _parameter(of: Field[Any]) -> click.Parameter:
    """Return the command line's form of an option."""
    what = about(of)
    if of.default is MISSING:
        return click.Argument([of.name], type=_type(what))
    default = of.default
    if what.argument:
        return click.Argument([of.name], type=_type(what), required=False, default=default)
    flag = f"--{of.name.replace('_', '-')}"
    if what.off:
        return click.Option([f"--no-{flag[2:]}", of.name], flag_value=False, default=True, help=f"{what.off}.")
    if what.kind == "flag":
        return click.Option([flag], is_flag=True, help=_help(what))
    if what.kind == "networks":
        return click.Option(
            [flag], multiple=True, default=[] if default is None else [default], show_default=bool(default),
            metavar=what.metavar, help=_help(what),
        )  # fmt: skip
    if what.kind == "names":
        return click.Option([flag], multiple=True, metavar=what.metavar, help=_help(what))
    return click.Option(
        [flag],
        type=_type(what),
        default=default,
        show_default=default is not None,
        metavar=what.metavar or ("SIZE" if what.kind == "size" else None),
        help=_help(what),
    )


def _type(what: Option) -> ParamType:
    if what.values:
        return click.Choice(what.values)
    if what.kind == "whole":
        return click.IntRange(what.least, what.most)
    return _TYPES[what.kind or "text"]


def _help(what: Option) -> str:
    """Return the help as a sentence, followed by the default in brackets.

    Help that begins with a value and a colon keeps its case.
    """
    unset = f" [default: {what.unset}]" if what.unset else ""
    sentence = what.help if re.match(r"\w+:", what.help) else what.help[0].upper() + what.help[1:]
    return f"{sentence}{unset}." if not sentence.endswith(".") else sentence
