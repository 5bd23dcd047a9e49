"""The program that makes the pictures of the documentation makes all of them, small enough to be kept."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.browser import needs_browser

pytestmark = pytest.mark.long

MOST_BYTES = 300_000


@needs_browser
def test_pictures_of_viewing_are_made(tmp_path: Path, repository: Path) -> None:
    pytest.importorskip("neuroglancer", reason="the viewer is not installed")
    pytest.importorskip("scipy", reason="cells are found with scipy")
    words = [sys.executable, "docs/screenshots.py", str(tmp_path), "--size", "48"]
    subprocess.run(words, cwd=repository, check=True, timeout=300)
    named = set(re.findall(r"images/(\w+\.png)", (repository / "docs" / "viewing.md").read_text()))
    assert {path.name for path in tmp_path.iterdir()} == named
    for name in named:
        for path in (tmp_path / name, repository / "docs" / "images" / name):
            assert path.stat().st_size < MOST_BYTES
            with Image.open(path) as opened:
                assert np.asarray(opened.convert("L")).std() > 20
