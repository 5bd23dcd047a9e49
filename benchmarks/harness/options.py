"""Declare options of the command line that all benchmarks share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

DEVICE = click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True)
MINUTES = click.option(
    "--minutes", type=float, default=6.0, show_default=True, help="Time after which nothing new begins."
)
QUICK = click.option("--quick", is_flag=True, help="Run tiny cases, to see that everything works; write only to --out.")
OUT = click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="Result file, instead of the one in results/current."
)
AGAINST = click.option(
    "--against",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Source tree of another version: run the cases in both trees alternately, and print the ratios.",
)


def shared(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --device, --minutes, --quick and --out."""
    for option in (OUT, QUICK, MINUTES, DEVICE):
        command = option(command)
    return command
