"""What tests of the benchmarks share."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def imported(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A module of the benchmarks."""
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    return importlib.import_module
