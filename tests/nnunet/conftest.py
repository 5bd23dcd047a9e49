"""Models that nnU-Net makes, for the tests that compare with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 300  # until a process that makes a model is given up


def made(kind: str, repository: Path, folder: Path) -> Path:
    """Make a model, and the answers that nnU-Net gives, in a folder."""
    command = [sys.executable, "-m", "tests.nnunet.with_nnunet", kind, str(folder)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="session")
def trained(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a plain U-Net that nnU-Net planned and trained."""
    return made("trained", repository, tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="session")
def assembled(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a residual U-Net with random weights, which predicts regions of turned images."""
    return made("assembled", repository, tmp_path_factory.mktemp("assembled"))
