"""Advise how to install the packages of an extra. This module imports nothing that takes time."""

from __future__ import annotations

import re
from functools import lru_cache

_REQUIREMENT = re.compile(r"""(?P<package>[^;]+?)\s*;.*\bextra\s*==\s*['"](?P<extra>[\w.-]+)['"]""")


@lru_cache
def install(extra: str) -> str:
    """Return the `pip` command for the packages of an extra, such as `pip install 'nibabel>=5.3'`.

    It names the packages and not `znnpy[medical]`, which pip finds only if znnpy itself came from a package index.
    Planning asks for it often, and reading what is required takes milliseconds.
    """
    from importlib.metadata import PackageNotFoundError, requires

    try:
        found = [_REQUIREMENT.fullmatch(line) for line in requires("znnpy") or ()]
    except PackageNotFoundError:  # znnpy runs from its folder, without being installed
        found = []
    packages = [f"'{match['package']}'" for match in found if match and match["extra"] == extra]
    return f"pip install {' '.join(packages) or repr(f'.[{extra}]')}"
