"""The command `znnpy import`. This module imports no numpy."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from znnpy.command_options import FILE, NEW_FILE, json_option
from znnpy.command_runtime import Command, print_json, print_lines, print_table
from znnpy.errors import NetworkFileError, VerifyError
from znnpy.files import regular_file, write_asked
from znnpy.messages import excerpt
from znnpy.stopping import working
from znnpy.wiring import PAD_TO_PERIOD

if TYPE_CHECKING:
    from znnpy.import_check import Difference
    from znnpy.importing.imported import Imported
    from znnpy.network import Normalise
    from znnpy.shapes import Vec3


@click.command(name="import", cls=Command)
@click.argument("model", type=FILE)
@click.option("--out", type=NEW_FILE, help="Write NAME.yaml, and the weights beside it as NAME.npz.")
@click.option(
    "--check",
    is_flag=True,
    help="Compare with the framework on a random volume: with PyTorch, or onnxruntime for .onnx.",
)
@click.option("--name", help="Name of the network [default: that of the file].")
@click.option(
    "--output", "outputs", multiple=True, metavar="NAME", help="Output, or node, to keep; may be given several times."
)
@click.option(
    "--normalise",
    metavar="MEAN,STD",
    help="Grey values become (grey - MEAN) / STD before the network [default: they stay, unless the file says so].",
)
@click.option(
    "--axes",
    type=click.Choice(("nczyx", "nzyxc", "ncyx", "nyxc")),
    help="Order of the dimensions of the file's input, n being the batch [default: the order in which it can be read].",
)
@click.option(
    "--pad-to-period",
    type=click.Choice(PAD_TO_PERIOD),
    help="What lies beyond the far faces of a volume whose size does not suit [default: reflect].",
)
@click.option("--overwrite", is_flag=True, help="Replace the files given as --out.")
@json_option
def import_model(
    model: Path,
    out: Path | None,
    check: bool,
    name: str | None,
    outputs: tuple[str, ...],
    normalise: str | None,
    axes: str | None,
    pad_to_period: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Read a network of another framework, say what it is, and write it as a network file.

    MODEL is an .onnx file, an exported program of PyTorch (.pt2), or a model description of bioimage.io (rdf.yaml, or
    its folder). Every command takes such a file in place of a network file; this one shows what is in it. To import a
    module in Python, use znnpy.from_torch.
    """
    if overwrite and out is None:
        raise click.UsageError("--overwrite replaces the files given as --out: give --out too")
    if out is not None and out.suffix.lower() not in (".yaml", ".yml"):
        raise click.UsageError(f"--out names a network file, which ends in .yaml, and {out} does not")
    from znnpy.formats.network_writer import network_text, weights_bytes
    from znnpy.importing.finish import Wishes
    from znnpy.network_files import read_model
    from znnpy.report.network_table import graph_json, graph_table, lines_of, rows_of

    wishes = Wishes(outputs or None, _normalise(normalise), pad_to_period, order=axes)  # type: ignore[arg-type]
    with working():
        made = read_model(model, wishes, name)
    targets = (
        []
        if out is None
        else [regular_file(p, overwrite, inputs={"model": model}) for p in (out, out.with_suffix(".npz"))]
    )
    size, differences = (None, []) if not check else _checked(made, model)
    if targets:
        with working():
            write_asked(targets[1], weights_bytes(made.network, made.weights), overwrite=overwrite)
            about = f"Imported from {excerpt(model.name, 100)}: {made.source}."
            write_asked(targets[0], network_text(made.network, targets[1].name, about), overwrite=overwrite)
    rows = rows_of(made.network)
    if as_json:
        print_json(
            {
                **graph_json(made.network, rows),
                "source": made.source,
                "folded": dict(made.folded),
                "check": [{**asdict(one), "size": size} for one in differences],
                "files": [str(path) for path in targets[::-1]],
            }
        )
    else:
        print_table(graph_table(rows))
        print_lines(
            [
                f"source      {made.source}",
                *lines_of(made.network),
                *_fixed(made),
                *_folded(made),
                *_said(size, differences, made.file or model),
            ]
        )
        if targets:
            print_lines([f"written     {targets[0]} and {targets[1].name}"])
    if not all(one.within for one in differences):
        worst = max(differences, key=lambda one: one.largest / max(one.scale, 1e-30))
        raise VerifyError(
            f"output {worst.output} of {model} differs by {worst.largest:.1e} from the framework's, whose values go up "
            f"to {worst.scale:.3g}: do not use the import, and report the network"
        )


def _normalise(given: str | None) -> Normalise | None:
    """Read MEAN,STD."""
    if given is None:
        return None
    from znnpy.network import Normalise

    try:
        mean, std = (float(part) for part in given.split(","))
    except ValueError:
        raise click.UsageError(
            f"--normalise takes two numbers MEAN,STD such as 128,33.5, not {excerpt(given, 60)!r}"
        ) from None
    if not (abs(mean) < float("inf") and 0 < std < float("inf")):
        raise click.UsageError(
            f"--normalise takes a finite mean, and a standard deviation above 0, not {excerpt(given, 60)}"
        )
    return Normalise((mean,), (std,))


def _fixed(made: Imported) -> list[str]:
    """Say that a file is for one size, so that nobody can see what depends on the size of the volume."""
    if made.fixed is None:
        return []
    from znnpy.shapes import text

    return [
        f"size        the file is for {text(made.fixed)} voxels alone: whether something in it depends on the size "
        "cannot be seen; export it with open sizes, or use znnpy.from_torch, to be sure"
    ]


def _folded(made: Imported) -> list[str]:
    return [f"simplified  {count} {what}" for what, count in sorted(made.folded.items())]


def _checked(made: Imported, model: Path) -> tuple[Vec3, list[Difference]]:
    from znnpy.admissible import refuse_non_local
    from znnpy.errors import ShapeError
    from znnpy.import_check import as_one_image, check_model

    try:
        refuse_non_local(as_one_image(made.network))
    except ShapeError as error:
        raise NetworkFileError(f"{model} cannot be checked, since nothing computes it yet: {error}") from None
    with working():
        return check_model(model, made)


def _said(size: Vec3 | None, differences: list[Difference], model: Path) -> list[str]:
    if size is None:
        return []
    from znnpy.import_check import lines_of

    return lines_of(size, differences, "onnxruntime" if model.suffix.lower() == ".onnx" else "PyTorch")
