"""The base classes of the commands: how a command starts, stops, prints, and turns expected errors into exit codes.

Exit codes: 0 done · 1 an expected error, one sentence on stderr · 2 usage · 130 Ctrl-C · 143 SIGTERM.
"""

from __future__ import annotations

import codecs
import errno
import io
import json
import logging
import os
import re
import shlex
import signal
import sys
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import click
from rich.console import Console, RenderableType
from rich.segment import Segment, Segments

import znnpy
from znnpy.config_file import read_config
from znnpy.errors import OutputError, ThreadError, ZnnpyError
from znnpy.log_file import LogFile, is_progress
from znnpy.messages import excerpt, one_line, speaking_to_command_line
from znnpy.stopping import INTERRUPTED, SENTENCES, TERMINATED, Terminated

PIPED_WIDTH = 120  # columns of a table that goes to a file
QUIET = "znnpy.quiet"  # key in the context of a command: whether it prints errors only
WORDS = "znnpy.words"  # the words that it was called with
PLAIN = "znnpy.plain"  # how standard streams treat a character that their encoding lacks
SECTIONS = {  # of a long help page: the parameters in each; all others come last
    "Input": (
        *("network", "weights", "volume", "shape", "dataset", "scale", "time", "roi", "mask", "border", "meaning"),
        *("missing_chunks", "fill_missing", "allow_nan"),
    ),
    "Output": ("out", "output_dtype", "overwrite", "resume", "record", "plot", "report"),
    "Limits": ("ram", "vram", "threads"),
    "Devices": ("device", "gpus", "precision", "mode"),
    "Plan": ("plan", "cover", "patch", "depth_first", "only", "why", "dry_run"),
    "Measured speeds": ("calibrate", "costs", "machine", "rigor", "time_limit"),
}
SIMILAR = {"µ": "u", "×": "x", "…": "...", "–": "-", "·": ".", "²": "2", "³": "3", "θ": "theta"}


class PrintingCommand(click.Command):
    """A command that reports in one sentence, not with a traceback, that its help page cannot be printed."""

    def make_context(self, *args: Any, **settings: Any) -> click.Context:
        try:
            return super().make_context(*args, **settings)
        except OSError as error:  # parsing arguments prints only help and version, and opens no file
            if error.errno == errno.EPIPE:
                raise  # click ends the process quietly
            raise click.ClickException(f"cannot print on stdout: {error.strerror}") from error


class CommandGroup(PrintingCommand, click.Group):
    """The group of all commands. Ctrl-C always gives exit code 130; closed standard streams are replaced."""

    def main(self, *args: Any, **settings: Any) -> Any:
        _open_closed_streams()
        _print_any_character()
        with speaking_to_command_line():
            return super().main(*args, **settings)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # outside of a command: while arguments are parsed, or again while one stops
            ctx.exit(INTERRUPTED)


def _open_closed_streams() -> None:
    """Open the null device for standard streams that the caller closed (`2>&-`).

    Each takes the lowest free descriptor, which is its own. Otherwise the next file to be opened would get it, and a
    library that writes to standard error would write into that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for as long as the process lives


def _print_any_character() -> None:
    """Make standard streams replace characters that their encoding lacks, so that no UnicodeEncodeError is raised."""
    codecs.register_error(PLAIN, _plain)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=PLAIN)


def _plain(error: UnicodeError) -> tuple[str, int]:
    r"""Replace characters by similar ASCII characters if there are any, and all others by escapes such as `\xe9`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    return "".join(SIMILAR.get(sign) or sign.encode("unicode_escape").decode() for sign in signs), error.end


class Command(PrintingCommand):
    """A command whose expected errors are one sentence on stderr and an exit code; `--debug` adds the traceback."""

    resumes = False  # whether it has --resume: then its message says what an interrupted run has kept

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params += [
            click.Option(
                ["--config"],
                type=click.Path(path_type=Path),
                metavar="FILE",
                is_eager=True,
                expose_value=False,
                callback=read_config,
                help="Read options from a YAML file, a line `ram: 16G` for each; those that are given here win.",
            ),
            click.Option(
                ["--log"],
                type=click.Path(path_type=Path),
                metavar="FILE",
                help="Append what --verbose tells, and the progress once a minute, to a file.",
            ),
            click.Option(["--debug"], is_flag=True, help="Show the traceback of an error."),
        ]

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **settings: Any) -> click.Context:
        as_json, words = "--json" in args, shlex.join([str(info_name), *args])
        try:
            context = super().make_context(info_name, args, *rest, **settings)
            context.meta[WORDS] = words
            return context
        except click.UsageError as error:
            _print_error(error.format_message(), as_json)
            raise

    def invoke(self, ctx: click.Context) -> None:
        debug, as_json = ctx.params.pop("debug"), bool(ctx.params.get("as_json"))
        ctx.meta[QUIET], verbose = ctx.params.pop("quiet", False), ctx.params.pop("verbose", False)
        path: Path | None = ctx.params.pop("log")
        log: LogFile | None = None
        try:
            if path is not None:
                log = ctx.with_resource(closing(LogFile(path, f"znnpy {znnpy.__version__}: {ctx.meta[WORDS]}")))
            if quiet() and verbose:
                raise click.UsageError("--quiet prints less and --verbose more: give one of them")
            with _logging(verbose, log):
                super().invoke(ctx)
            return
        except click.UsageError as error:
            if log is not None:
                log.say(f"Error: {error.format_message()}")
            _print_error(error.format_message(), as_json)
            raise
        except (ZnnpyError, MemoryError, KeyboardInterrupt) as error:
            expected: BaseException = error
        except (click.exceptions.Exit, click.Abort):  # which are no errors
            raise
        except Exception as error:
            refused = _refused(error)
            if refused is None:
                if log is not None:
                    log.say(f"Error: {type(error).__name__}: {error}".removesuffix(": "))
                raise
            refused.__cause__ = error
            expected = refused
        if debug:
            traceback.print_exception(expected)
        message, code = self._explain(expected)
        if log is not None:
            log.say(message)
        with suppress(OSError):  # if this fails too, the exit code alone reports the error
            click.echo(wrapped(message, sys.stderr), file=sys.stderr)
        _print_error(message.removeprefix("Error: "), as_json)
        ctx.exit(code)

    def _explain(self, error: BaseException) -> tuple[str, int]:
        """Return the sentence for stderr, and the exit code."""
        kept = getattr(error, "__notes__", []) if self.resumes else []
        match error:
            case Terminated():
                return "; ".join((SENTENCES[signal.SIGTERM], *kept)), TERMINATED
            case KeyboardInterrupt():
                return "; ".join((SENTENCES[signal.SIGINT], *kept)), INTERRUPTED
            case ZnnpyError():
                return f"Error: {one_line(str(error))}", 1
            case _:
                return f"Error: out of memory: {error or 'the system refused more'}; give a smaller --ram or --patch", 1


def _refused(error: Exception) -> ThreadError | MemoryError | None:
    """Return the error behind a library's error if the system refused a thread or address space; else None."""
    if not isinstance(error, RuntimeError | ImportError):
        return None
    if str(error) == ThreadError.REFUSED:
        return ThreadError.refused()
    if "failed to map segment" in str(error):
        return MemoryError(
            f"a library cannot be loaded ({excerpt(error)}): raise the limit on address space (`ulimit -v`)"
        )
    return None


class SectionedCommand(Command):
    """A command with so many options that its help page shows them in sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each option once, in its section."""
        options = (of for of in self.get_params(ctx) if isinstance(of, click.Option))
        records = {of.name: record for of in options if (record := of.get_help_record(ctx))}
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([records.pop(name) for name in names if name in records])
        with formatter.section("Other"):
            formatter.write_dl(list(records.values()))


class ResumableCommand(SectionedCommand):
    """A command that can continue where an earlier run stopped."""

    resumes = True


@contextmanager
def _printing() -> Iterator[None]:
    """Raise OutputError if stdout cannot be written in this block, unless the reader of a pipe left."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # click ends the process quietly
        raise OutputError(
            f"cannot print on stdout: {error.strerror}; files that the command writes are complete"
        ) from error


def print_table(renderable: RenderableType) -> None:
    """Print on stdout, as wide as the terminal or, if piped, as wide as a table needs; print nothing when quiet.

    Control characters in names from files are escaped.
    """
    if quiet():
        return
    console = Console(markup=False, emoji=False)
    if not console.is_terminal:
        console = Console(markup=False, emoji=False, width=PIPED_WIDTH)
    safe = [
        Segment("\n".join(map(one_line, segment.text.split("\n"))), segment.style)
        for segment in console.render(renderable)
        if not segment.control
    ]
    with _printing():
        console.print(Segments(safe), end="")


def print_lines(lines: list[str]) -> None:
    """Print lines on stdout, wrapped on a terminal; print nothing when quiet. Control characters are escaped."""
    if quiet():
        return
    with _printing():
        click.echo("\n".join(wrapped(one_line(line), sys.stdout) for line in lines), file=sys.stdout)


def quiet() -> bool:
    """Return whether the command that runs was asked to print errors only."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(QUIET))


class _OnStderr(logging.Handler):
    """Writes log lines to the current standard error: a progress bar replaces that stream while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        line = one_line(self.format(record))
        with suppress(OSError):  # a full disk, or a reader that left: the run matters more than its log
            click.echo(
                wrapped(f"warning: {line}" if record.levelno == logging.WARNING else line, sys.stderr), file=sys.stderr
            )


@contextmanager
def _logging(verbose: bool, file: LogFile | None) -> Iterator[None]:
    """Send znnpy's log to stderr in this block: each phase of the work if `verbose`, only errors when quiet.

    file  also gets every phase, and the progress; None: there is none
    """
    log = logging.getLogger("znnpy")
    handler, level = _OnStderr(), log.level
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s" if verbose else "%(message)s", "%H:%M:%S"))
    handler.setLevel(logging.INFO if verbose else logging.ERROR if quiet() else logging.WARNING)
    handler.addFilter(lambda record: not is_progress(record))
    handlers: list[logging.Handler] = [handler] if file is None else [handler, file]
    for one in handlers:
        log.addHandler(one)
    log.setLevel(min(one.level for one in handlers))
    try:
        yield
    finally:
        for one in handlers:
            log.removeHandler(one)
        log.setLevel(level)


def _print_error(sentence: str, as_json: bool) -> None:
    """Print `{"error": sentence}` on stdout if the command was asked for JSON."""
    if as_json:
        with suppress(OSError):  # standard error and the exit code report it as well
            click.echo(json.dumps({"error": sentence}, indent=1), file=sys.stdout)


def print_json(document: Any) -> None:
    """Print one JSON document, in ASCII, on stdout."""
    with _printing():
        click.echo(json.dumps(document, indent=1), file=sys.stdout)


def wrapped(line: str, stream: TextIO) -> str:
    """Wrap a line if `stream` is a terminal, with a hanging indent below the text after a label; else return it.

    A word that is longer than a line, such as a path, stays whole, so that it can be copied.
    """
    if not stream.isatty():
        return line
    label = re.match(r"\S{1,10} {2,}", line)
    return "\n".join(
        textwrap.wrap(
            line,
            Console(file=stream).width,
            subsequent_indent=" " * label.end() if label else "",
            break_long_words=False,
            break_on_hyphens=False,
        )
    )
