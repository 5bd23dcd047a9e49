"""The doors of the command line: how a command starts, stops, prints, and turns expected errors into exit codes.

Exit codes: 0 done · 1 an expected error, one sentence on stderr · 2 usage · 130 Ctrl-C · 143 SIGTERM.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import click
from rich.console import Console, RenderableType

from znnpy.errors import OutputError, ZnnpyError

INTERRUPTED, TERMINATED = 130, 143  # 128 + the signal's number, as shells report it
PIPED_WIDTH = 120  # columns of a table that goes to a file


class Terminated(KeyboardInterrupt):
    """SIGTERM, unwinding like Ctrl-C so that finished work is kept."""


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Inside, SIGTERM raises Terminated in the main thread."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Printed(click.Command):
    """A command whose help page on a full disk is a sentence too."""

    def make_context(self, *args: Any, **settings: Any) -> click.Context:
        try:
            return super().make_context(*args, **settings)
        except OSError as error:  # while words are read, only help and version are printed, and no file is opened
            if error.errno == errno.EPIPE:
                raise  # click ends the process quietly
            raise click.ClickException(f"cannot print on stdout: {error.strerror}") from error


class Doors(Printed, click.Group):
    """The commands. Ctrl-C at any moment is exit code 130, and closed standard streams lead nowhere."""

    def main(self, *args: Any, **settings: Any) -> Any:
        _open_closed_streams()
        return super().main(*args, **settings)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # outside of a command: while words are read, or once more while one stops
            ctx.exit(INTERRUPTED)


def _open_closed_streams() -> None:
    """Open the null device for standard streams that the caller closed (`2>&-`).

    Each takes the lowest free descriptor, its own: else the next file that is opened gets it, and a library that
    writes to standard error writes into that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for as long as the process lives


class Door(Printed):
    """A command whose expected errors are one sentence on stderr and an exit code; `--debug` adds the traceback."""

    hint = ""  # what to do after an interruption

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params.append(click.Option(["--debug"], is_flag=True, help="Show the traceback of an error."))

    def invoke(self, ctx: click.Context) -> None:
        debug = ctx.params.pop("debug")
        try:
            with _sigterm_raises():
                super().invoke(ctx)
                return
        except (ZnnpyError, MemoryError, KeyboardInterrupt) as error:
            if debug:
                traceback.print_exc()
            message, code = self._explain(error)
        with suppress(OSError):  # nobody can be told; the exit code tells
            click.echo(message, err=True)
        ctx.exit(code)

    def _explain(self, error: BaseException) -> tuple[str, int]:
        """The sentence for stderr, and the exit code."""
        match error:
            case Terminated():
                return f"stopped by SIGTERM; {self.hint}".rstrip("; "), TERMINATED
            case KeyboardInterrupt():
                return f"interrupted; {self.hint}".rstrip("; "), INTERRUPTED
            case ZnnpyError():
                return f"Error: {error}", 1
            case _:
                return f"Error: out of memory: {error or 'the system refused more'}; give a smaller --ram or --patch", 1


class Resumable(Door):
    hint = "what was finished is kept: the same command with --resume (and without --overwrite) goes on from there"


@contextmanager
def _printing() -> Iterator[None]:
    """Around all that goes to stdout: OutputError when it cannot be written, unless the reader of a pipe left."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # click ends the process quietly
        raise OutputError(
            f"cannot print on stdout: {error.strerror}; files that the command writes are complete"
        ) from error


def print_table(renderable: RenderableType) -> None:
    """Print on stdout, as wide as the terminal; piped, as wide as a table needs."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH)
    with _printing():
        console.print(renderable)


def print_lines(lines: list[str]) -> None:
    with _printing():
        click.echo("\n".join(lines))


def print_json(document: Any) -> None:
    print_lines([json.dumps(document, indent=1)])
