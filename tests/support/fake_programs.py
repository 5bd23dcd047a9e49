"""Programs of Slurm, dask and znnpy that note how they are called, for the scripts in `deploy/`."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"

# A program that notes its name and arguments. The scheduler writes its file and stays, as the worker does, until it is
# ended. `znnpy` waits for both, and sbatch prints the number of a job.
FAKE = """#!/usr/bin/env bash
name=$(basename "$0")
printf '%s\\0' "$name" "$@" >> "$CALLS/$(date +%s%N)-$name-$$"
case "$name $1" in
  sbatch*) echo "$((100 + $(ls "$CALLS" | grep -c sbatch)));cluster" ;;
  srun*) while [[ $1 == --* ]]; do shift; done; exec "$@" ;;
  "dask scheduler") echo '{}' > "$3"; exec sleep 60 ;;
  "dask worker") exec sleep 60 ;;
  znnpy*)
    if [[ $* == *--cluster* ]]; then
      for _ in {1..100}; do (($(ls "$CALLS" | grep -c -- -dask-) >= 2)) && break; sleep 0.1; done
    fi
    exit "${ZNNPY_CODE:-0}" ;;
esac
"""


class Fakes:
    """A folder of fake programs, and what was called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._programs, self._calls = folder / "bin", folder / "calls"
        self._programs.mkdir()
        self._calls.mkdir()
        for name in ("sbatch", "srun", "dask", "znnpy", "pip"):
            (self._programs / name).write_text(FAKE)
            (self._programs / name).chmod(0o755)

    def run(self, name: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a script of `deploy/`."""
        return self.call(["bash", str(DEPLOY / name), *arguments], **variables)

    def call(self, command: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command that finds the fake programs."""
        path = f"{self._programs}:{os.environ['PATH']}"
        kept = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
        environment = {**kept, "PATH": path, "CALLS": str(self._calls), **variables}
        return subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=50,
        )

    @property
    def calls(self) -> list[list[str]]:
        """Names and arguments of the programs that were called, in this order."""
        return [path.read_text().split("\0")[:-1] for path in sorted(self._calls.iterdir())]


def option(call: Sequence[str], name: str) -> str:
    """Return the value of an option, `--name value` or `--name=value`."""
    (found,) = (at for at, word in enumerate(call) if word == name or word.startswith(f"{name}="))
    return call[found + 1] if call[found] == name else call[found].partition("=")[2]


def in_bytes(size: str) -> int:
    """Return the bytes of 60GiB, as dask writes it, or 64Gi, as Kubernetes does."""
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)B?", size).groups()  # type: ignore[union-attr]
    return int(number) * {"Mi": 2**20, "Gi": 2**30}[unit]
