"""Fill the marked blocks of README.md, benchmarks/README.md and docs/ from the results in results/current.

A block begins with a line `<!-- begin table: NAME -->` and ends with `<!-- end table: NAME -->`. PROGRAM in a program's
module says which names it fills. Without `--write` the command lists the blocks that differ, and fails if any differs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

import click

from benchmarks.harness.markdown import NOTHING, table
from benchmarks.harness.results import Program, Results, current

ROOT = Path(__file__).resolve().parents[1]
MODULES = (
    "layers", "networks", "graphs", "gpu_graphs", "windows", "units", "gpu_convs", "planner", "io", "masks", "sessions",
    "clusters", "assignment", "cells", "papers",
)  # fmt: skip
INDEX = "benchmarks-index"
COMPOSED = {  # blocks that hold all tables whose names begin so
    "planner-accuracy": ("planner-speed", "planner-regret", "planner-memory"),
    "papers": ("papers-",),
}
BLOCK = re.compile(
    r"(?P<begin>^<!-- begin table: (?P<name>[\w-]+) -->\n)(?P<text>.*?)(?P<end>^<!-- end table: (?P=name) -->$)",
    re.MULTILINE | re.DOTALL,
)
MARK = re.compile(r"^<!-- (?:begin|end) table: .*$", re.MULTILINE)


def programs() -> list[Program]:
    """Return the description that each program's module gives of itself."""
    return [import_module(f"benchmarks.{name}").PROGRAM for name in MODULES]


def blocks(results: Results, known: list[Program]) -> dict[str, str]:
    """Return the text of every block by name."""
    made = {name: make(results).strip() for program in known for name, make in program.tables.items()}
    for name, parts in COMPOSED.items():
        made[name] = "\n\n".join(dict.fromkeys(made[part] for part in made if part.startswith(parts)))
    return made | {INDEX: index(results, known)}


def index(results: Results, known: list[Program]) -> str:
    """Return the table of questions, commands and current figures."""
    rows = []
    for program in known:
        command = f"`python -m benchmarks {program.command}`"
        found = results.get(program.name, ())
        for place, result in enumerate(found):
            link = f"[{result.machine}](results/current/{program.name}-{result.machine}.json)"
            first = (program.question, command) if place == 0 else ("", "")
            rows.append((*first, program.headline(result), link))
        if not found:
            rows.append((program.question, command, NOTHING.format(command=program.command), ""))
    return table(("question", "command", "current figure", "file"), rows, left=4)


def documents(root: Path = ROOT) -> list[Path]:
    """Return the Markdown files that may hold blocks."""
    return [*(path for path in (root / "README.md", root / "benchmarks" / "README.md") if path.exists()),
            *sorted((root / "docs").rglob("*.md"))]  # fmt: skip


def filled(text: str, made: Mapping[str, str], where: Path) -> str:
    """Return a document with all of its blocks filled; ClickException if marks form no pair or have no table."""
    found = [match["name"] for match in BLOCK.finditer(text)]
    if 2 * len(found) != len(MARK.findall(text)):
        raise click.ClickException(f"{where}: begin and end marks of tables form no pairs")
    for name in found:
        if name not in made:
            raise click.ClickException(f"{where}: no program fills the table {name!r}; known are {', '.join(made)}")
    return BLOCK.sub(lambda match: f"{match['begin']}{made[match['name']]}\n{match['end']}", text)


def differing(made: Mapping[str, str], root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """Yield each document that differs from the results, with its correct content."""
    for path in documents(root):
        text = path.read_text()
        if (right := filled(text, made, path)) != text:
            yield path, right


@click.command()
@click.option("--write", is_flag=True, help="Fill the blocks; without it they are only compared.")
@click.option("--plots", type=click.Path(path_type=Path, file_okay=False), help="Folder for pictures of all results.")
def command(write: bool, plots: Path | None) -> None:
    """Fill the tables in README.md and docs/ from results/current."""
    results, known = current(), programs()
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        for program in known:
            for name, draw in program.plots.items():
                draw(results, plots / f"{name}.png")
                click.echo(plots / f"{name}.png")
    found = list(differing(blocks(results, known)))
    for path, right in found:
        click.echo(f"{path.relative_to(ROOT)}: {'written' if write else 'differs from results/current'}")
        if write:
            path.write_text(right)
    if found and not write:
        raise click.ClickException("run `python -m benchmarks tables --write`")
