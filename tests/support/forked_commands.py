"""Commands that are killed: a process that has imported znnpy forks a child for each, so that one takes milliseconds.

`ForkedRuns` is the test's side. Run as a program, this file is the other side: it reads one order a line, as JSON, and
answers each with one line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
LONGEST = 60.0  # seconds that a command may take


@dataclass(frozen=True)
class Order:
    """A command, and when to kill it: after so many seconds, or just before so many changes of files."""

    arguments: list[str]
    seconds: float | None = None
    changes: int | None = None


@dataclass(frozen=True)
class Answer:
    """The end of a command: exit code, duration, changes of files and stderr."""

    code: int  # exit code; -9 where it was killed
    seconds: float
    changes: int  # of files, by a command that was not killed
    stderr: str


class ForkedRuns:
    """A context manager: the process that forks."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.communicate()  # its standard input ends, and so does it

    def run(self, *arguments: object, seconds: float | None = None, changes: int | None = None) -> Answer:
        """Run `znnpy WORDS`, killed where that is asked for; returns when it has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = Order([str(argument) for argument in arguments], seconds, changes)
        self._process.stdin.write(json.dumps(asdict(order)) + "\n")
        self._process.stdin.flush()
        return Answer(**json.loads(self._process.stdout.readline()))


class Changes:
    """Counts changes of files that this process makes through Python, and kills it before a certain one."""

    def __init__(self, kill_before: int | None) -> None:
        self.count, self._kill_before = 0, kill_before
        for name in ("fsync", "pwrite"):
            setattr(os, name, self._counted(getattr(os, name)))
        sys.addaudithook(self._hear)

    def _counted(self, call: Any) -> Any:
        def counting(*given: Any) -> Any:
            self._next()
            return call(*given)

        return counting

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            self._next()

    def _next(self) -> None:
        self.count += 1
        if self.count == self._kill_before:
            os.kill(os.getpid(), signal.SIGKILL)


def child(order: Order, log: Path) -> None:
    """Run the command in this process, which ends here."""
    from znnpy.cli import main
    from znnpy.volume import column_record

    column_record.SYNC_SECONDS = 0.0  # else a short run records its columns all at once
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    changes, code = Changes(order.changes), 70
    try:
        main(order.arguments, prog_name="znnpy")
    except SystemExit as end:
        code = int(end.code or 0)
    finally:  # whatever happens, this copy of the parent ends here
        sys.stdout.flush()
        sys.stderr.flush()
        log.with_suffix(".count").write_text(str(changes.count))
        os._exit(code)


def answer(order: Order, log: Path) -> Answer:
    """Fork, wait, kill."""
    began = time.monotonic()
    process = os.fork()
    if process == 0:
        child(order, log)
    deadline = began + (LONGEST if order.seconds is None else order.seconds)
    while not (ended := os.waitpid(process, os.WNOHANG))[0]:
        if time.monotonic() >= deadline:
            os.kill(process, signal.SIGKILL)
            ended = os.waitpid(process, 0)
            break
        time.sleep(0.0005)
    count = log.with_suffix(".count")
    changes = int(count.read_text()) if count.exists() else 0
    count.unlink(missing_ok=True)
    return Answer(
        os.waitstatus_to_exitcode(ended[1]), time.monotonic() - began, changes, log.read_text() if log.exists() else ""
    )


def serve() -> None:
    """Answer orders until there are no more."""
    import tempfile

    import zarr  # noqa: F401 - each child would import it

    from znnpy.machine import this_machine

    this_machine()
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            print(json.dumps(asdict(answer(Order(**json.loads(line)), Path(folder) / "log.txt"))), flush=True)


if __name__ == "__main__":
    serve()
