"""The folder for what was measured, as the environment says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from znnpy.cache_folder import cache_folder


def test_the_cache_folder_is_the_one_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache" / "znnpy"
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative/is/ignored"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        if sys.platform == "linux":
            assert cache_folder() == tmp_path / ".cache" / "znnpy"
