"""Recognise model descriptions of bioimage.io among other network files. This module imports nothing that takes time.

Every run of a network file asks, and a run that has another one must not pay for the reader in memory and time.
"""

from __future__ import annotations

import re
from pathlib import Path

from znnpy.errors import NetworkFileError
from znnpy.files import read_regular
from znnpy.messages import excerpt

LARGEST_DESCRIPTION = 2**20  # bytes
_NAMES = ("rdf.yaml", "bioimageio.yaml", "rdf.yml", "bioimageio.yml")
_ENDINGS = (".bioimageio.yaml", ".rdf.yaml")
_VERSION_LINE = re.compile(rb"""^(\{\s*["']?|["']?|\s+["'])format_version["']?\s*:""", re.MULTILINE)  # YAML, or JSON


def is_description(path: Path, content: bytes) -> bool:
    """Return whether a YAML file is a description, by its name or by a key that no other network file has."""
    return path.name in _NAMES or path.name.endswith(_ENDINGS) or _VERSION_LINE.search(content) is not None


def description_in(folder: Path) -> Path | None:
    """Return the description in a folder; None if there is none. NetworkFileError if there are several."""
    names = sorted(path.name for path in folder.iterdir() if path.name in _NAMES or path.name.endswith(_ENDINGS))
    if len(names) > 1:
        raise NetworkFileError(
            f"{folder} holds {len(names)} descriptions ({excerpt(', '.join(names))}); give the path of one"
        )
    return folder / names[0] if names else None


def is_described(path: Path) -> bool:
    """Return whether a path is that of a description, or of a folder with one; OSError if it cannot be read."""
    if path.is_dir():
        return description_in(path) is not None
    if path.suffix.lower() not in (".yaml", ".yml") or not path.is_file():
        return False
    return is_description(path, read_regular(path, LARGEST_DESCRIPTION))
