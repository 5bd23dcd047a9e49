"""Run a benchmark: `python -m benchmarks PROGRAM`, with a name of PROGRAMS."""

from __future__ import annotations

import os
import sys
from importlib import import_module

import click

PROGRAMS = {
    "layers": "How fast is one layer, by every method and in PyTorch?",
    "networks": "How fast is a whole network, in every mode and in PyTorch? How exact?",
    "graphs": "How fast are U-Nets over a volume, within memory, and in PyTorch?",
    "gpu_graphs": "How fast are U-Nets on a GPU, over a volume and in windows, and in PyTorch?",
    "windows": "How fast are U-Nets in windows with half overlap, beside MONAI with PyTorch and OpenVINO?",
    "gpu_convs": "How fast are convolutions of graphs on a GPU, beside cuDNN through PyTorch?",
    "planner": "Are predictions and choices of the planner right, and how long does planning take?",
    "units": "How fast are convolutions on AMX and AVX512-BF16, and in PyTorch?",
    "tiled_products": "How fast are products of spectra on AMX and AVX512-BF16, beside float32?",
    "io": "How fast are volumes read and written?",
    "masks": "How much time does a mask save?",
    "sessions": "What does a session cost beside computing, and how much memory does a stream take?",
    "clusters": "What do many processes cost?",
    "assignment": "How close to the bound does a job on many machines end, simulated?",
    "cells": "How good are the cells that the examples make?",
    "papers": "What did the papers measure, and how fast is it here?",
    "tables": "Fill the tables in README.md and docs/ from results/current.",
}


class Programs(click.Group):
    """A group of commands that loads the module of a program when the program is called."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the names of all programs."""
        return list(PROGRAMS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Return the `command` of the module of that name."""
        if name not in PROGRAMS:
            return None
        command = import_module(f"benchmarks.{name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write names and questions, without loading any program."""
        with formatter.section("Programs"):
            formatter.write_dl(list(PROGRAMS.items()))


@click.command(cls=Programs, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measure znnpy, and fill the tables of the documentation."""


def without_forced_blas_kernels() -> None:
    """Restart the process without OPENBLAS_CORETYPE: forced kernels can halve the speed of all products.

    The variable is read when numpy is loaded, so the process has to begin without it.
    """
    forced = [name for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE") if name in os.environ]
    if forced:
        environment = {name: value for name, value in os.environ.items() if name not in forced}
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]], environment)


if __name__ == "__main__":
    without_forced_blas_kernels()
    main(prog_name="python -m benchmarks")
