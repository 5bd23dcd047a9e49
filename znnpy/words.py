"""Words of the command line that several commands take: how each is read.

Loads no numpy, as the command line does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import TypeVar

import click

from znnpy.machine import parse_bytes
from znnpy.shapes import PRECISIONS, Vec3

MOST_VOXELS = 10**7  # along an axis; more is a slip of the keyboard
MOST_GPUS = 1024
MOST_THREADS = 2**12

Command = TypeVar("Command", bound=Callable[..., None])


def gpu_count(context: click.Context, parameter: click.Parameter, value: str | None) -> int | str | None:
    """A number of GPUs, or all."""
    del context, parameter
    if value is None or value == "all":
        return value
    if not value.isdecimal() or not 1 <= int(value) <= MOST_GPUS:
        raise click.BadParameter(f"{value!r} is no number of GPUs from 1 to {MOST_GPUS}, nor all")
    return int(value)


def size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """`2G`, `600M`: bytes in powers of 1024."""
    if value is None:
        return None
    try:
        size = parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if size < 1:
        raise click.BadParameter(f"{value!r} is {size} bytes: give a positive size such as 2G")
    return size


def number(ctx: click.Context, param: click.Parameter, value: str | None) -> int | float | None:
    """A number, whole ones exactly; NaN and infinity too."""
    if value is None:
        return None
    try:
        return int(value) if re.fullmatch(r"\s*[+-]?\d{1,20}\s*", value) else float(value)
    except ValueError:
        raise click.BadParameter(f"{_shortened(value)} is not a number such as 0 or 127.5") from None


def positive(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """A number above 0 that is one: click's own range lets NaN pass."""
    if value is not None and not 0 < value < inf:
        raise click.BadParameter(f"{value} is not a positive number such as 1e-5")
    return value


def voxels(ctx: click.Context, param: click.Parameter, value: str | None) -> Vec3 | None:
    """`Z,Y,X`: three positive counts."""
    if value is None:
        return None
    match = re.fullmatch(r"\s*0*(\d+)\s*,\s*0*(\d+)\s*,\s*0*(\d+)\s*", value)
    counts = [min(int(part[:9]), MOST_VOXELS + 1) for part in match.groups()] if match else []
    if not counts or not min(counts):
        raise click.BadParameter(f"{_shortened(value)} is not three positive counts of voxels Z,Y,X such as 64,128,128")
    if max(counts) > MOST_VOXELS:
        raise click.BadParameter(f"{_shortened(value)} is too large: axes of up to {MOST_VOXELS:,} voxels are planned")
    return counts[0], counts[1], counts[2]


def region_form(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """`z0:z1,y0:y1,x0:x1`; only the form is checked here, the fit when the volume is open."""
    end = r"\d{0,18}"
    form = ",".join([f"{end}:{end}"] * 3)
    if value is not None and not re.fullmatch(form, re.sub(r"\s", "", value)):
        raise click.BadParameter(f"{_shortened(value)} is not of the form z0:z1,y0:y1,x0:x1 such as 0:64,100:200,:")
    return value


def named(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """A path that ends in a name, as a new file's must."""
    if value is not None and value.name in ("", ".."):
        raise click.BadParameter(f"{str(value)!r} is a folder: give the name of a file")
    return value


def _shortened(value: str) -> str:
    return repr(value if len(value) <= 60 else f"{value[:40]}...{value[-10:]}")


FILE = click.Path(path_type=Path)


def _together(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator, in the order of the help page."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


ram_word = click.option(
    "--ram",
    metavar="SIZE",
    callback=size,
    help="Memory for the whole process, e.g. 16G [default: 3/4 of the machine's].",
)
threads_word = click.option(
    "--threads", type=click.IntRange(1, MOST_THREADS), metavar="N", help="Threads [default: every core it may use]."
)
device_word = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "gpu"]),
    default="auto",
    show_default=True,
    help="Where layers run; auto: on the GPU if one works, else on the CPU.",
)
precision_word = click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    help="On the GPU: fp32; tf32, a thousandth; fp16, half the memory and less exact [default: fp32].",
)
limits_words = _together(
    ram_word,
    threads_word,
    click.option(
        "--cover",
        type=click.Choice(["columns", "patches"]),
        help="columns: each keeps what its next step needs; patches: each computed for itself [default: the faster].",
    ),
    click.option(
        "--patch",
        metavar="Z,Y,X",
        callback=voxels,
        help="Output of a patch, or of one step of a column, instead of the best one, Z,Y,X.",
    ),
    click.option(
        "--no-depth-first",
        "depth_first",
        flag_value=False,
        default=True,
        help="Run each layer on all fragments before the next layer runs on any; needs more memory.",
    ),
    click.option("--only", multiple=True, metavar="PRIMITIVE", help="Primitive for the layers it fits; repeatable."),
    device_word,
    click.option(
        "--vram",
        metavar="SIZE",
        callback=size,
        help="Memory of the GPU, everything counted, e.g. 12G [default: 90 % of what is free].",
    ),
    precision_word,
)
devices_words = _together(
    click.option(
        "--mode",
        type=click.Choice(["auto", "cpu", "gpu", "gpu-host", "cpu-to-gpu", "side-by-side"]),
        default="auto",
        show_default=True,
        help="gpu: GPUs alone; gpu-host, cpu-to-gpu: the first layers in the memory of the host; side-by-side: the "
        "processor computes beside GPUs; auto: cpu, gpu, or both where that is faster in a long run.",
    ),
    click.option(
        "--gpus",
        metavar="N",
        callback=gpu_count,
        help="GPUs of the kind of the first that compute together, a number or all [default: 1].",
    ),
)
fill_missing_word = click.option(
    "--fill-missing",
    metavar="VALUE",
    callback=number,
    help="Value of voxels whose file is missing, of HDF5 volumes made of several [default: an error].",
)
region_words = _together(
    click.option("--dataset", help="Array inside the file [default: the only 3D or 4D one]."),
    fill_missing_word,
    click.option("--roi", metavar="Z0:Z1,Y0:Y1,X0:X1", callback=region_form, help="Part of the volume, in voxels."),
    click.option(
        "--border",
        type=click.Choice(["valid", "reflect"]),
        default="valid",
        show_default=True,
        help="valid: no prediction nearer to a face than half the field of view; reflect: mirror there.",
    ),
    click.option(
        "--output-dtype",
        type=click.Choice(["float32", "float16", "uint8"]),
        default="float32",
        show_default=True,
        help="uint8: 255 times the value, clipped to 0..1.",
    ),
)
costs_word = click.option(
    "--costs",
    type=FILE,
    metavar="FILE",
    help="What `znnpy measure --out` wrote here [default: what it stored of this machine, if that still fits].",
)
rigor_words = _together(
    click.option(
        "--rigor",
        type=click.Choice(["estimate", "measure", "exhaustive"]),
        default="estimate",
        show_default=True,
        help="measure: time the layers of the best plans, each where it runs; exhaustive: all that may be in the best "
        "one.",
    ),
    click.option(
        "--time-limit",
        type=float,
        callback=positive,
        metavar="SECONDS",
        help="After which no further layer is timed [default: 60 to measure, none where exhaustive].",
    ),
    click.option("--paranoid", is_flag=True, help="Run each chosen layer and hold it against the definition."),
)
json_word = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
loudness_words = _together(
    click.option("--quiet", is_flag=True, help="Print errors only: no progress, no report; --json still prints."),
    click.option("--verbose", is_flag=True, help="Log each phase of the work on stderr."),
)
