"""Log a run: one line for each phase, at level INFO of the logger `znnpy`."""

from __future__ import annotations

import logging
from typing import Literal

from znnpy.messages import excerpt

Phase = Literal["opened", "planned", "preparing", "running", "finished"]

PROGRESS = "znnpy.progress"  # the logger that the command line tells its progress to

_log = logging.getLogger("znnpy")
_LOGGED = set[str]()


def log_phase(phase: Phase, details: str) -> None:
    """Log the beginning or the end of a phase: `planned 12 patches, 3 s predicted`."""
    _log.info("%s %s", phase, excerpt(details))


def log_once(sentence: str) -> None:
    """Log a fact that does not change in this process, such as that there is no GPU, at the first call only."""
    if sentence not in _LOGGED:
        _LOGGED.add(sentence)
        _log.info("%s", sentence)
