"""Files that appear whole or not at all, and where one that was asked for may be written.

Loads no numpy, as the command line does not.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from znnpy.errors import OutputError


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in one step: others see what was there before, or all that is new. OSError, and nothing is left.

    Folders that are not there are made. The content is on disk before it takes its name.
    """
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")  # nobody else writes the same one
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def write_asked(path: Path, content: str | bytes, word: str = "name", what: str = "") -> None:
    """`replace_file` for what a user asked for by `word`; OutputError where that cannot be done.

    what  "the costs ", say: in front of the name
    """
    try:
        replace_file(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise OutputError(f"cannot write {what}{path}: {error.strerror}; give another {word}") from error


def regular_file(path: Path, overwrite: bool, word: str = "--out") -> Path:
    """Where to write for `path`, given as `word`: behind all links. OutputError when it may not be replaced."""
    target = Path(os.path.realpath(path))
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        if not target.parent.is_dir():
            raise OutputError(f"{target.parent} is no folder; give another {word}") from None
        return target
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; give another {word}") from error
    if not stat.S_ISREG(mode):
        raise OutputError(f"{path} is a {'folder' if stat.S_ISDIR(mode) else 'special file'}; give another {word}")
    if not overwrite:
        raise OutputError(f"{path} exists already; give another {word}, or --overwrite to replace it")
    return target
