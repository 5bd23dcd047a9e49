"""The command line: words in, exit codes out. Everything else is a function of another room.

Exit codes: 0 done · 1 an expected error, one sentence on stderr · 2 usage · 130 Ctrl-C · 143 SIGTERM.
Loads no numpy: a resumed run first asks BLAS for the kernels it began with, and BLAS chooses them when numpy is loaded.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import click

import znnpy
from znnpy.doors import Door, Doors, Resumable, print_json, print_lines, print_table
from znnpy.errors import OutputError, ResumeError
from znnpy.formats.networks import DEFAULT, read_network
from znnpy.machine import parse_bytes, processor
from znnpy.shapes import PRECISIONS, Vec3
from znnpy.volume.journal import default_output, journal_path, read_header

MOST_VOXELS = 10**7  # along an axis; more is a slip of the keyboard
MOST_THREADS = 2**12
_X86 = (
    "Atom Barcelona Bobcat Bulldozer Cooperlake Core2 Dunnington Excavator Haswell Nano Nehalem Opteron Opteron_SSE3 "
    "Penryn Piledriver Prescott Sandybridge SapphireRapids SkylakeX Steamroller Zen"
)
_ARM = (
    "a64fx armv8 armv8sve armv9sme cortexa53 cortexa55 cortexa57 cortexa72 cortexa73 emag8180 falkor neoversen1 "
    "neoversen2 neoversev1 thunderx thunderx2t99 thunderx3t110 tsv110 vortex vortexm4"
)
OPENBLAS_KERNELS = frozenset(_X86.split() + _ARM.split())  # what OPENBLAS_CORETYPE may name

Command = TypeVar("Command", bound=Callable[..., None])


def _size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
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


def _positive(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """A number above 0 that is one: click's own range lets NaN pass."""
    if value is not None and not 0 < value < inf:
        raise click.BadParameter(f"{value} is not a positive number such as 1e-5")
    return value


def _voxels(ctx: click.Context, param: click.Parameter, value: str | None) -> Vec3 | None:
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


def _region_form(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """`z0:z1,y0:y1,x0:x1`; only the form is checked here, the fit when the volume is open."""
    end = r"\d{0,18}"
    form = ",".join([f"{end}:{end}"] * 3)
    if value is not None and not re.fullmatch(form, re.sub(r"\s", "", value)):
        raise click.BadParameter(f"{_shortened(value)} is not of the form z0:z1,y0:y1,x0:x1 such as 0:64,100:200,:")
    return value


def _named(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
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


_limits = _together(
    click.option(
        "--ram",
        metavar="SIZE",
        callback=_size,
        help="Memory for the whole process, e.g. 16G [default: 3/4 of the machine's].",
    ),
    click.option(
        "--threads", type=click.IntRange(1, MOST_THREADS), metavar="N", help="Threads [default: every core it may use]."
    ),
    click.option(
        "--cover",
        type=click.Choice(["columns", "patches"]),
        help="columns: each keeps what its next step needs; patches: each computed for itself [default: the faster].",
    ),
    click.option(
        "--patch",
        metavar="Z,Y,X",
        callback=_voxels,
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
    click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "gpu"]),
        default="auto",
        show_default=True,
        help="Where layers run; auto: on the GPU if one works, else on the CPU.",
    ),
    click.option(
        "--vram",
        metavar="SIZE",
        callback=_size,
        help="Memory of the GPU, everything counted, e.g. 12G [default: 90 % of what is free].",
    ),
    click.option(
        "--precision",
        type=click.Choice(PRECISIONS),
        help="On the GPU: fp32; tf32, a thousandth; fp16, half the memory and less exact [default: fp32].",
    ),
)
_region = _together(
    click.option("--dataset", help="Array inside the file [default: the only 3D or 4D one]."),
    click.option("--roi", metavar="Z0:Z1,Y0:Y1,X0:X1", callback=_region_form, help="Part of the volume, in voxels."),
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
_json = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


@click.group(cls=Doors, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(znnpy.__version__, package_name="znnpy")
def main() -> None:
    """Run a trained 3D convolutional network over every position of a volume: exact, within memory, fast."""


@main.command(cls=Door)
@click.argument("network", default=DEFAULT)
@click.option("--volume", type=FILE, help="Plan for this volume.")
@click.option("--shape", metavar="Z,Y,X", callback=_voxels, help="Plan for a volume of this size, Z,Y,X.")
@_region
@_limits
@click.option("--out", type=FILE, callback=_named, help="Write the plan here, for `znnpy infer --plan`.")
@click.option("--overwrite", is_flag=True, help="Replace the file given as --out.")
@_json
def plan(network: str, out: Path | None, overwrite: bool, as_json: bool, **words: Any) -> None:
    """Choose columns or patches, their size and primitives for NETWORK, and say why.

    NETWORK is a file, or the name of one that ships. Without --volume or --shape, a volume of 1024^3 is assumed.
    """
    if words["volume"] is not None and words["shape"] is not None:
        raise click.UsageError("--volume and --shape both give a size: give one of them")
    for needs_volume in ("dataset", "roi"):
        if words[needs_volume] is not None and words["volume"] is None:
            raise click.UsageError(f"--{needs_volume} is a part of a volume: give --volume too")
    if overwrite and out is None:
        raise click.UsageError("--overwrite replaces the file given as --out: give --out too")
    _check_primitives(words)
    import znnpy.inference
    from znnpy.kernels.cpu.native.library import why_not
    from znnpy.planner.explain import explain
    from znnpy.run.devices import machine_of

    target = None if out is None else _regular_file(out, overwrite)
    notes: list[str] = []
    chosen = znnpy.inference.plan(network, **words, tell=notes.append)
    if target is not None:
        _write_text(target, chosen.to_json())
    if as_json:
        predicted = {"seconds": chosen.seconds, "voxels_per_second": chosen.voxels_per_second}
        promised = {"peak_bytes": chosen.memory.peak, "vram_bytes": chosen.memory.vram}
        print_json({**predicted, **promised, "notes": notes, "plan": json.loads(chosen.to_json())})
    else:
        machine = machine_of(chosen)
        print_table(explain(chosen, read_network(network).network, machine))
        if chosen.device == "cpu" and (lacking := why_not(machine)):
            notes.append(f"the fastest methods do not run here: {lacking}")
        if notes:
            print_lines(notes)


@main.command(cls=Resumable)
@click.argument("volume", type=FILE)
@click.option("--network", default=DEFAULT, show_default=True, help="Network file, or the name of one that ships.")
@click.option("--weights", type=FILE, help="Weights file [default: the one that the network file names].")
@click.option("--plan", "plan_file", type=FILE, help="Plan that `znnpy plan --out` wrote [default: made now].")
@click.option("--out", type=FILE, callback=_named, help="Output file [default: beside VOLUME].")
@_region
@click.option("--allow-nan", is_flag=True, help="Go on where the volume holds NaN or inf; NaN comes out there.")
@click.option("--overwrite", is_flag=True, help="Replace the output, and whatever an unfinished run left of it.")
@click.option("--resume", is_flag=True, help="Go on where a run stopped.")
@_limits
@_json
def infer(volume: Path, network: str, plan_file: Path | None, out: Path | None, as_json: bool, **words: Any) -> None:
    """Predict every position of VOLUME."""
    if words["overwrite"] and words["resume"]:
        raise click.UsageError("--overwrite starts again and --resume goes on: give one of them")
    fixed = {word: bool(words[word]) for word in ("ram", "threads", "patch", "only", "cover", "vram", "precision")}
    others = {"no-depth-first": not words["depth_first"], "device": words["device"] != "auto"}
    for word, is_given in {**fixed, **others}.items():
        if plan_file is not None and is_given:
            raise click.UsageError(f"--{word} is fixed by the plan: leave it out, or leave --plan out")
    if out is None and not volume.name:
        raise click.UsageError(f"{str(volume)!r} has no name to make the output's of: give --out")
    if words["resume"]:
        _ask_for_same_kernels(out or default_output(volume, read_network(network).network.name))
    _check_primitives(words)
    import znnpy.inference
    from znnpy.progress import show

    with show() as progress:
        report = znnpy.inference.infer(volume, network, plan=plan_file, out=out, progress=progress, **words)
    if as_json:
        print_json(report.as_json())
    else:
        print_lines(report.lines())


@main.command(cls=Door)
@click.argument("output", type=FILE)
@click.argument("volume", type=FILE)
@click.option("--network", help="Network file [default: the one that ships under the output's network name].")
@click.option("--weights", type=FILE, help="Weights file [default: the one that the network file names].")
@click.option("--samples", type=click.IntRange(min=1), default=1000, show_default=True, help="Voxels to recompute.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Chooses the voxels.")
@click.option(
    "--tolerance",
    type=float,
    callback=_positive,
    help="Largest difference allowed; larger in proportion where values are larger than 1 "
    "[default: 1e-5; 1e-2 where predicted in tf32, 5e-2 in fp16].",
)
@_json
def verify(output: Path, volume: Path, as_json: bool, **words: Any) -> None:
    """Check OUTPUT, predicted from VOLUME, against the definition.

    Recomputes sampled voxels by literally sliding the window, in float64, and prints the worst error.
    """
    from znnpy.verify import verify as check

    report = check(output, volume, **words)
    if as_json:
        print_json(report.as_json())
    else:
        print_lines(report.lines())


@main.command(cls=Door)
@click.option("--folder", type=FILE, default=Path("demo"), show_default=True, help="Where to write.")
@click.option(
    "--size",
    type=click.IntRange(27, 2**15),
    default=160,
    show_default=True,
    help="Voxels along each axis of the volume.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Chooses the volume.")
@click.option("--overwrite", is_flag=True, help="Replace what an earlier demo wrote.")
@_json
def demo(folder: Path, size: int, seed: int, overwrite: bool, as_json: bool) -> None:
    """Predict a synthetic volume and save a picture.

    Writes the volume, its true membranes, and what the network that ships makes of it.
    """
    from znnpy.demo import run
    from znnpy.progress import show

    with show() as progress:
        done = run(folder, (size, size, size), seed=seed, overwrite=overwrite, progress=progress)
    if as_json:
        print_json(done.as_json())
    else:
        print_lines(done.lines())


@main.command(cls=Door)
@_json
def primitives(as_json: bool) -> None:
    """List the ways to compute a layer.

    Says of each when it is the one to take and where it comes from.
    """
    from rich.table import Table

    from znnpy.availability import why_not_here
    from znnpy.kernels.table import TABLE

    lacking = why_not_here()
    if as_json:
        keys = ("name", "kind", "version", "summary", "source")
        rows = [{key: getattr(primitive, key) for key in keys} for primitive in TABLE]
        print_json([{**row, "why_not": lacking.get(row["name"])} for row in rows])
        return
    table = Table("primitive", "layer", "when", "source")
    for primitive in TABLE:
        table.add_row(primitive.name, primitive.kind, primitive.summary, primitive.source)
    print_table(table)
    for reason in dict.fromkeys(lacking.values()):
        names = [name for name, why in lacking.items() if why == reason]
        print_lines([f"{', '.join(names)} cannot run here: {reason}"])


@main.command(cls=Door)
@click.option(
    "--maps",
    nargs=2,
    type=click.IntRange(1, MOST_VOXELS),
    metavar="IN OUT",
    default=(4, 5),
    show_default=True,
    help="Maps of the layer.",
)
@click.option("--batch", type=click.IntRange(1, MOST_VOXELS), default=4, show_default=True, help="Images.")
@click.option("--out", type=FILE, callback=_named, required=True, help="Write here: NAME.svg, or .dot for Graphviz.")
@click.option("--overwrite", is_flag=True, help="Replace the file given as --out.")
def graph(maps: tuple[int, int], batch: int, out: Path, overwrite: bool) -> None:
    """Draw the tasks of a task-parallel convolution.

    What cpu.conv.fft_tasks runs, a task for each map and image, and what each waits for; for small layers.
    """
    from znnpy.graph import FORMATS, picture

    if out.suffix.lower() not in FORMATS:
        raise OutputError(f"{out} ends in none of {' and '.join(FORMATS)}: give an --out that does")
    target = _regular_file(out, overwrite)
    _write_text(target, picture(maps, batch, out.suffix.lower()))


def _check_primitives(words: dict[str, Any]) -> None:
    """A name that is no primitive's is a usage error, and so are names and limits of a device that is not wanted."""
    from znnpy.kernels.table import find
    from znnpy.run.devices import check_device_words

    for name in words["only"]:
        try:
            find(name)
        except KeyError as error:
            raise click.BadParameter(f"{error.args[0]} (`znnpy primitives` lists them)", param_hint="--only") from None
    try:
        check_device_words(words["device"], words["vram"], words["precision"], words["only"])
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _ask_for_same_kernels(out: Path) -> None:
    """Make BLAS run the kernels that the run to be resumed began with: they decide the last bits of its output.

    On another processor nothing is asked for, as kernels it cannot run would kill the process: the run refuses instead.
    """
    try:
        header = read_header(out)
    except OSError as error:
        raise ResumeError(
            f"cannot read the journal {journal_path(out)}: {error.strerror}, so what was finished is not known; "
            "make it readable, or start again with --overwrite"
        ) from error
    if header is None or header.settings.get("processor") != processor():
        return
    library, _, kernels = header.blas.partition(" ")
    if library == "openblas" and kernels in OPENBLAS_KERNELS:
        os.environ["OPENBLAS_CORETYPE"] = kernels


def _regular_file(path: Path, overwrite: bool) -> Path:
    """Where to write for `path`: behind all links. OutputError when what is there may not be replaced."""
    target = Path(os.path.realpath(path))
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return target
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; give another --out") from error
    if not stat.S_ISREG(mode):
        raise OutputError(f"{path} is a {'folder' if stat.S_ISDIR(mode) else 'special file'}; give another --out")
    if not overwrite:
        raise OutputError(f"{path} exists already; give another --out, or --overwrite to replace it")
    return target


def _write_text(path: Path, content: str) -> None:
    """Write a file; it appears whole or not at all."""
    draft = path.with_name(f"{path.name}.partial")
    try:
        draft.unlink(missing_ok=True)
        with draft.open("x") as file:
            file.write(content)
        draft.replace(path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; give another --out") from error
