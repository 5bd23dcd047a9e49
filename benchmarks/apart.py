"""One measurement in a process of its own, within memory and time: what fails, fails alone and is recorded."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LACKS_MEMORY = ("can't allocate memory", "MemoryError", "bad_alloc", "Cannot allocate memory")
KILLED = -9  # by the system, which ran out
NEVER_TOUCHED = 2**29  # bytes: stacks of threads and buffers of libraries that are reserved, and never become memory


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a child answered, or why it did not."""

    answer: dict[str, Any]  # empty after a failure
    failure: str | None
    wall_seconds: float  # of the whole process, interpreter and imports included


def run_apart(script: Path, request: dict[str, Any], *, ram_bytes: int, seconds: float) -> Outcome:
    """Run `python script` with the request on stdin; its last line on stdout is its answer. Both JSON objects.

    The child sets its own limit: see `limit_memory`.
    """
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, str(script)],
            input=json.dumps(request | {"ram_bytes": ram_bytes}),
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return Outcome({}, f"not done after {seconds:.0f} s", time.perf_counter() - begin)
    wall = time.perf_counter() - begin
    if done.returncode == 0:
        return Outcome(json.loads(done.stdout.splitlines()[-1]), None, wall)
    if done.returncode == KILLED or any(words in done.stderr for words in LACKS_MEMORY):
        return Outcome({}, f"out of memory within {ram_bytes / 2**30:.1f} GiB", wall)
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return Outcome({}, said[-1][:300], wall)


def limit_memory(ram_bytes: int) -> None:
    """From now on an allocation that takes this process beyond `ram_bytes` fails, as it would on a smaller machine."""
    limit = ram_bytes + NEVER_TOUCHED
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
