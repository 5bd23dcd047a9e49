"""The folder in which znnpy keeps what it measured and can measure again."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder `znnpy` in the system's place for caches; it may not exist yet."""
    home = Path(os.path.expanduser("~"))
    if not home.is_absolute():  # some containers run as a user without one
        home = Path(tempfile.gettempdir())
    if sys.platform == "win32":
        base, default = os.environ.get("LOCALAPPDATA", ""), home / "AppData" / "Local"
    elif sys.platform == "darwin":
        base, default = os.environ.get("XDG_CACHE_HOME", ""), home / "Library" / "Caches"
    else:
        base, default = os.environ.get("XDG_CACHE_HOME", ""), home / ".cache"
    return (Path(base) if Path(base).is_absolute() else default) / "znnpy"  # XDG: a relative path is to be ignored
