"""Say why an output cannot be written, or cannot be continued by a run of another job."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from znnpy.errors import ResumeError
from znnpy.messages import excerpt, option
from znnpy.units import human_bytes


def check_same_job(theirs: Mapping[str, Any], ours: Mapping[str, Any], what: str, else_do: str) -> None:
    """Raise ResumeError that names the first setting in which two jobs differ.

    what     output that `theirs` belongs to
    else_do  advice, besides starting again
    """
    before, now = dict(_flat(theirs)), dict(_flat(ours))
    for field in sorted(before.keys() | now.keys()):
        old, new = before.get(field), now.get(field)
        if old != new:
            raise ResumeError(
                f"{what} belongs to another job: {excerpt(field)} was {_shown(old)} and is {_shown(new)} now; "
                f"{else_do}, or start again with {option('overwrite', True)}"
            )


def unwritable(error: OSError, path: Path, partial: Path, needed: int, kept: str) -> str:
    """Return a sentence on an error of the system, with advice.

    partial  unfinished output of `path`, which needs so many bytes in all
    kept     columns that are on record, of how many
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = shutil.disk_usage(path.parent).free
        cause = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}.get(
            error.errno, "the file may not grow that large"
        )
        return (
            f"{cause}: {partial} needs {human_bytes(needed)} in all, and {path.parent} has {human_bytes(free)} free; "
            f"{kept} are kept: make room and give {option('resume', True)}"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            f"{path.parent} may not be written to ({os.strerror(error.errno)}); "
            f"change its permissions or give another {option('out')}"
        )
    return f"{path} cannot be written: {error}; give another {option('out')}"


def _flat(job: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested settings as `volume.dtype` -> value."""
    for key, value in job.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    return "not given" if value is None else excerpt(json.dumps(value))
