"""Handle Ctrl-C (SIGINT) and SIGTERM in a process of the command line, from its start to its end.

During the start nothing needs an orderly end: the handlers end the process at once, with one sentence on standard error
and exit code 130 or 143. They raise no exception then, because a library that is being imported may swallow it, or
crash at exit when it is half imported. Once a command works, the handlers raise KeyboardInterrupt or Terminated, so
that finished work is kept.

This module imports nothing that takes time.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from znnpy.errors import ZnnpyError

INTERRUPTED, TERMINATED = 130, 143  # 128 + the signal's number, as shells report it
SENTENCES = {signal.SIGINT: "interrupted", signal.SIGTERM: "stopped by SIGTERM"}
SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it

_LEAVES = [False]  # whether this process belongs to the command line, so that it may be ended
_ASKED: list[int] = []  # signals that asked the work to stop


class Terminated(KeyboardInterrupt):
    """Raised after SIGTERM; it unwinds like Ctrl-C, so that finished work is kept."""


def leave_when_stopped() -> None:
    """Make SIGINT and SIGTERM end this process at once. A signal that the parent had ignored stays ignored."""
    _LEAVES[0] = True
    for number in filter(_heeded, SENTENCES):
        signal.signal(number, _leave)


@contextmanager
def working() -> Iterator[None]:
    """Make SIGINT raise KeyboardInterrupt and SIGTERM raise Terminated in this block, in the calling (main) thread.

    A library in which that happens may turn it into an error of its own: then it is raised again. A second signal ends
    a process of the command line at once.
    """
    _ASKED.clear()
    before = {number: signal.signal(number, _raise) for number in SENTENCES if _heeded(number)}
    try:
        yield
    except (KeyboardInterrupt, ZnnpyError):
        raise
    except BaseException as error:
        if _ASKED:
            raise _error(_ASKED[0]) from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_stopped() -> None:
    """Raise the exception of a signal within `working` again, in case a library has swallowed it."""
    if _ASKED:
        raise _error(_ASKED[0])


def end(code: int | str | None) -> None:
    """Prepare the end of the process with the exit code that SystemExit carries.

    After an error or a stop the process ends here: threads of native libraries may still run, and must not do so while
    the interpreter shuts down. Otherwise it returns, and from then on signals have their default effect.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # there is no one to tell; the exit code says it
            stream.flush()
    for number in filter(_heeded, SENTENCES):
        signal.signal(number, signal.SIG_DFL)
    if isinstance(code, int) and code:
        os._exit(code)


def _heeded(number: signal.Signals) -> bool:
    """Return whether the handler of the signal may be replaced: not if it is ignored, or handled by C code."""
    return signal.getsignal(number) not in (signal.SIG_IGN, None)


def _leave(number: int, frame: FrameType | None) -> None:
    del frame
    sentence = f"{SENTENCES[signal.Signals(number)]}\n".encode()
    with suppress(OSError):  # there is no one to tell; the exit code says it
        os.write(2, SHOW_CURSOR + sentence if os.isatty(2) else sentence)
    os._exit(128 + number)


def _raise(number: int, frame: FrameType | None) -> None:
    if _ASKED and _LEAVES[0]:
        _leave(number, frame)
    _ASKED.append(number)
    raise _error(number)


def _error(number: int) -> KeyboardInterrupt:
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
