"""Try all networks, and write the table of docs/zoo.md: `python -m tests.importing.zoo --write`."""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path

import click

from tests.importing.zoo.nets import NETS, PYPI
from tests.importing.zoo.table import committed, written
from tests.importing.zoo.trial import tried


@click.command()
@click.option("--write", is_flag=True, help="Write the table; without it the rows that differ are listed.")
def main(write: bool) -> None:
    """Try the networks that znnpy reads."""
    entries = []
    for net in NETS:
        with tempfile.TemporaryDirectory() as folder:
            entries.append(tried(net, Path(folder)))
        click.echo(entries[-1].row)
    if write:
        written(entries, {name: version(name) for name in ("torch", *PYPI)})
        return
    known = set(committed().values())
    other = [entry.row for entry in entries if entry.row not in known]
    if other:
        raise click.ClickException(f"{len(other)} rows differ; run `python -m tests.importing.zoo --write`")


if __name__ == "__main__":
    main(prog_name="python -m tests.importing.zoo")
