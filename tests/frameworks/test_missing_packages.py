"""Adapters say which packages they lack, and `import znnpy` loads none of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["torch", "monai", "gunpowder", "napari"])
def test_a_missing_package_is_named(name: str, repository: Path) -> None:
    code = (
        f"import sys\nsys.modules[{name!r}] = None\n"
        f"import znnpy, znnpy.chunkflow\nassert 'znnpy.{name}' not in sys.modules\n"
        f"try:\n    import znnpy.{name}\nexcept znnpy.errors.MissingExtraError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True)
    assert f"znnpy.{name} needs" in done.stdout
    assert "pip install" in done.stdout
    assert done.stdout.count("\n") == 1
