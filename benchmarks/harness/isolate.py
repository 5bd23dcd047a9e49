"""Run functions in child processes, within limits of memory and time.

The parent names a function as "module:function" and sends requests, one JSON object a line, on the child's stdin. For
each the child calls the function with that dictionary; the function returns a dictionary, or yields several. Each
becomes a line {"answer": ..} on stdout, and {"end": true} follows the last one. After an exception the child writes
{"failure": ".."} and ends. Anything that libraries print goes to stderr.

A child may take znnpy from another source tree; `benchmarks` is always that of the parent.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

ROOT = Path(__file__).resolve().parents[2]
LACKS_MEMORY = ("can't allocate memory", "MemoryError", "bad_alloc", "Cannot allocate memory", "out of memory")
KILLED = -9  # exit code after the system ran out of memory
NEVER_TOUCHED = 2**29  # bytes: stacks of threads and buffers of libraries that are reserved and never become memory
MOST_CHARACTERS = 400  # characters of a failure that are kept
BOOT = """
import sys
sys.path.insert(0, sys.argv[1])
import znnpy
sys.path.insert(0, sys.argv[2])
from benchmarks.harness.isolate import serve
serve(*sys.argv[3:])
"""

Request = dict[str, Any]
Answer = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The answers of a child to one request.

    answers  dictionaries that the function returned or yielded, also those before a failure.
    failure  reason why it ended early; None if it did not.
    seconds  time that the parent waited.
    """

    answers: tuple[Answer, ...]
    failure: str | None
    seconds: float

    @property
    def answer(self) -> Answer:
        """Last answer; empty if there is none."""
        return self.answers[-1] if self.answers else {}


class Child:
    """A process that answers requests until it is closed; a context manager.

    function   "module:function" that answers requests.
    ram_bytes  limit of memory, beyond which allocations fail in the child; None: no limit.
    source     source tree that znnpy is imported from; None: the tree of this file.
    """

    def __init__(self, function: str, *, ram_bytes: int | None = None, source: Path | None = None) -> None:
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        # OPENBLAS_CORETYPE forces kernels of BLAS, which can halve the speed of its products
        environment = {k: v for k, v in os.environ.items() if k not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
        arguments = [str(source or ROOT), str(ROOT), function, str(ram_bytes or 0), *sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOT, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=environment,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._ram_bytes = ram_bytes
        self._late: str | None = None  # reason why it was killed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *cause: object) -> None:
        self.close()

    def ask(self, request: Request, seconds: float) -> Outcome:
        """Send a request and wait for all of its answers; the child is killed when it takes longer than `seconds`."""
        begin = time.monotonic()
        answers: list[Answer] = []
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            return Outcome((), self._died(), time.monotonic() - begin)
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, begin + seconds - time.monotonic()))
            except queue.Empty:
                self._process.kill()
                self._late = f"not done after {seconds:.0f} s"
                return Outcome(tuple(answers), self._late, time.monotonic() - begin)
            if line is None:
                return Outcome(tuple(answers), self._died(), time.monotonic() - begin)
            message = json.loads(line)
            if "answer" in message:
                answers.append(message["answer"])
            else:
                failure = None if message.get("end") else self._known(str(message["failure"]))
                return Outcome(tuple(answers), failure, time.monotonic() - begin)

    def close(self) -> None:
        """End the process, which must have answered all requests."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._stderr.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _died(self) -> str:
        code = self._process.wait()
        if self._late:
            return self._late
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        if code == KILLED:
            return self._known("MemoryError: killed by the system")
        return self._known(f"exit code {code}" + (f": {lines[-1]}" if lines else ""))

    def _known(self, failure: str) -> str:
        """Return a failure for lack of memory in one form for all libraries, and other failures unchanged."""
        if self._ram_bytes and any(part in failure for part in LACKS_MEMORY):
            return f"out of memory within {self._ram_bytes / 2**30:.1f} GiB: {failure}"[:MOST_CHARACTERS]
        return failure[:MOST_CHARACTERS]


def run_child(
    function: str, request: Request, *, seconds: float, ram_bytes: int | None = None, source: Path | None = None
) -> Outcome:
    """Answer one request in a separate process."""
    with Child(function, ram_bytes=ram_bytes, source=source) as child:
        return child.ask(request, seconds)


def limit_memory(ram_bytes: int) -> None:
    """Make allocations beyond `ram_bytes` fail from now on in this process, as on a smaller machine."""
    limit = ram_bytes + NEVER_TOUCHED
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def serve(function: str, ram_bytes: str, *path: str) -> None:
    """Answer requests until stdin ends: the main function of a child."""
    sys.path.extend(place for place in path if place not in sys.path)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # text that libraries print on stdout must not mix with answers
    module, name = function.split(":")
    found: Callable[[Request], Answer | Iterable[Answer]] = getattr(importlib.import_module(module), name)
    if int(ram_bytes):
        limit_memory(int(ram_bytes))
    for line in sys.stdin:
        try:
            returned = found(json.loads(line))
            for answer in (returned,) if isinstance(returned, dict) else returned:
                _send(answers, {"answer": answer})
        except Exception as error:  # the parent records every failure
            _send(answers, {"failure": f"{type(error).__name__}: {error}"})
            raise
        _send(answers, {"end": True})


def _send(answers: IO[str], message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()
