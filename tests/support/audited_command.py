"""List the paths that a command creates, writes, renames or removes, from audit events of Python and from strace.

`touched_by` is the side of the test. Run as a program, `audited_command.py LOG KILL_AT WORDS...`, this file runs the
command line and writes a line of JSON for each change that Python tells of. It is killed before change number KILL_AT,
if that is not 0.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVENTS = {  # of Python: how many of the first arguments are paths that change
    "os.rename": 2,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.mkdir": 1,
    "os.link": 2,
    "os.symlink": 2,
    "os.truncate": 1,
    "os.chmod": 1,
    "os.chown": 1,
    "os.utime": 1,
    "os.setxattr": 1,
}
FOLDERS_AT = {"os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.mkdir": 2, "os.link": 2, "os.symlink": 2}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CALLS = re.compile(
    r"(?:open|openat|openat2|creat|unlink|unlinkat|rename|renameat|renameat2|mkdir|mkdirat|rmdir|link|linkat|symlink|"
    r"symlinkat|truncate|chmod|fchmodat|chown|lchown|fchownat|mknod|mknodat|utimensat|setxattr|lsetxattr)\("
)
OPENS = ("open(", "openat(", "openat2(")
PATH = re.compile(r'(?:(?:AT_FDCWD|\d+)<(?P<folder>[^>]*)>, )?"(?P<name>(?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Touched:
    """The changes that a command made to files."""

    code: int  # exit code; -9 where it was killed
    stderr: str
    told: frozenset[Path]  # by Python
    asked: frozenset[Path] | None  # of the system, by any library; None where strace does not run


def strace_runs() -> bool:
    """Return whether system calls can be listed here."""
    command = ["strace", "-o", os.devnull, "true"]
    return shutil.which("strace") is not None and subprocess.run(command, check=False).returncode == 0


def touched_by(folder: Path, logs: Path, *arguments: object, kill_at: int = 0) -> Touched:
    """Run `znnpy WORDS` in `folder`, with its logs in the new folder `logs`."""
    logs.mkdir()
    command = [sys.executable, __file__, str(logs / "told"), str(kill_at), *map(str, arguments)]
    traced = strace_runs()
    if traced:
        command = ["strace", "-ff", "-y", "-qq", "-s", "4096", "-e", "trace=%file", "-o", str(logs / "asked"), *command]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    told = frozenset(folder / json.loads(line) for line in (logs / "told").read_text().splitlines())
    lines = [line for path in logs.glob("asked.*") for line in path.read_text(errors="replace").splitlines()]
    asked = frozenset(folder / path for line in lines for path in _changed(line)) if traced else None
    return Touched(done.returncode, done.stderr, _real(told), None if asked is None else _real(asked - {logs / "told"}))


def _real(paths: frozenset[Path]) -> frozenset[Path]:
    """Absolute, without `..`, and without devices."""
    plain = (Path(os.path.normpath(path)) for path in paths)
    return frozenset(path for path in plain if not path.is_relative_to("/dev"))


def _changed(line: str) -> Iterator[str]:
    """Return the paths that a line of strace shows as changed."""
    if CALLS.match(line) is None or " = -1 " in line:
        return
    if line.startswith(OPENS) and not re.search(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC", line):
        return
    for path in PATH.finditer(line.rpartition(" = ")[0]):
        yield os.path.join(path["folder"] or "", path["name"])


class Audit:
    """Hears of every change in this process, and writes it to an open file."""

    def __init__(self, log: int, kill_at: int) -> None:
        self._log, self._kill_at, self._count = log, kill_at, 0

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        paths = [path for path in self._paths(event, arguments) if isinstance(path, str)]
        if not paths:
            return
        self._count += 1
        if self._count == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        for path in paths:
            os.write(self._log, (json.dumps(path) + "\n").encode())

    def _paths(self, event: str, arguments: tuple[Any, ...]) -> list[Any]:
        if event == "open":
            path, _, flags = arguments
            return [os.fsdecode(path)] if flags & WRITES and isinstance(path, str | bytes | os.PathLike) else []
        count = EVENTS.get(event, 0)
        if event == "os.mkdir" and os.path.isdir(arguments[0]):  # Python tells of it before it is refused
            return []
        return [self._placed(event, arguments, os.fspath(path)) for path in arguments[:count]]

    def _placed(self, event: str, arguments: tuple[Any, ...], path: Any) -> Any:
        """Put the folder of an open descriptor in front of a path."""
        at = FOLDERS_AT.get(event)
        folder = arguments[at] if at is not None and len(arguments) > at else -1
        return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path) if folder != -1 else path


def main() -> None:
    """Run the command line on the arguments behind LOG and KILL_AT."""
    from znnpy.__main__ import main as run

    log, kill_at = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), int(sys.argv[2])
    sys.argv = ["znnpy", *sys.argv[3:]]
    sys.addaudithook(Audit(log, kill_at).hear)
    run()


if __name__ == "__main__":
    main()
