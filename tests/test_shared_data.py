"""Tests look for the real volume in a named folder, which must exist, or in one that may be missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TEST = "tests/formats/test_networks.py::test_default_network_is_the_trained_one"


def outcome(repository: Path, named: Path) -> tuple[int, str]:
    """Exit code and output of pytest, run on one test that asks for the real volume."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TEST]
    env = os.environ | {"ZNNPY_TEST_DATA": str(named)}
    done = subprocess.run(command, cwd=repository, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_missing_named_folder_fails(repository: Path, tmp_path: Path) -> None:
    code, printed = outcome(repository, tmp_path / "none")
    assert code == 1
    assert re.search(r"ZNNPY_TEST_DATA names .*none, and there is no such folder", printed)


def test_named_folder_is_used(repository: Path, shared_data: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").symlink_to(shared_data)
    assert outcome(repository, tmp_path / "elsewhere")[0] == 0
    (tmp_path / "empty").mkdir()
    code, printed = outcome(repository, tmp_path / "empty")
    assert code == 1
    assert "FileNotFoundError" in printed
