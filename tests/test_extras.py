"""Advice to install an extra names packages, which pip finds wherever znnpy came from."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

from znnpy.extras import install

EXTRAS = (
    *("gpu", "cudnn", "io", "tiff", "medical", "nnunet", "safetensors", "plugins", "plots"),
    *("torch", "monai", "napari", "gunpowder"),
)


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_package_of_an_extra_is_named(extra: str, repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    named = re.findall(r"'([\w.-]+)", install(extra))
    assert named == [re.match(r"[\w.-]+", line)[0] for line in project["optional-dependencies"][extra]]  # type: ignore[index]
    assert install(extra).startswith("pip install '")
    assert "znnpy" not in install(extra)


def test_advice_for_an_uninstalled_copy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    install.cache_clear()
    assert install("io") == "pip install '.[io]'"
    install.cache_clear()
