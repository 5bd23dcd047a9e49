"""A process beside planning.py that answers lines of JSON with lines of JSON, within limits of time."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

Facts = dict[str, Any]


class NoTimeLeft(Exception):
    """All that was to be measured may take no longer."""


class Child:
    """One script; it is started when it is first asked, and again after it was stopped. A context manager."""

    def __init__(self, script: Path, first: Facts | None = None) -> None:
        """first  the line that it is told before all others, each time that it starts"""
        self._script, self._first = script, first
        self._process: subprocess.Popen[bytes] | None = None
        self._read = b""  # of what it said, and not yet taken

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *cause: object) -> None:
        self.stop()

    def stop(self) -> None:
        """What is asked next is answered by a new process."""
        if self._process is not None:
            self._process.kill()
            _closed(self._process)
            self._process, self._read = None, b""

    def tell(self, request: Facts) -> None:
        """Its answer is the next line; of one that has ended that is its failure."""
        process = self._process or self._started()
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()

    def line(self, seconds: float, end: float) -> Facts | None:
        """The next; None when there is none after so many seconds. NoTimeLeft when `end` comes before."""
        process = self._process
        assert process is not None, "nothing was asked"
        assert process.stdout is not None
        begin = time.monotonic()
        while b"\n" not in self._read:
            now = time.monotonic()
            left, wait = end - now, begin + seconds - now
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, min(left, wait)))
            if not ready:
                if left <= wait:
                    raise NoTimeLeft
                return None
            more = os.read(process.stdout.fileno(), 2**16)
            if not more:
                return self._ended(process)
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        answer: Facts = json.loads(line)
        return answer

    def _ended(self, process: subprocess.Popen[bytes]) -> Facts:
        process.wait()
        self.stop()
        return {"failure": f"the process ended with {process.returncode}"}

    def _started(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, str(self._script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        if self._first is not None:
            process.stdin.write(json.dumps(self._first).encode() + b"\n")
        self._process = process
        return process


def _closed(process: subprocess.Popen[bytes]) -> None:
    """Its pipes, and what is left of it; what it did not read does not matter any more."""
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):
            pipe.close()
    process.wait()
