"""The installation has every folder of code, under the right name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def packages_on_disk(repository: Path) -> set[str]:
    """Dotted names of all folders with an __init__.py, `kernels` and `planner` under znnpy."""
    rooms = {"znnpy": repository / "znnpy", **{f"znnpy.{name}": repository / name for name in ("kernels", "planner")}}
    found = set()
    for name, folder in rooms.items():
        for init in folder.rglob("__init__.py"):
            inner = init.parent.relative_to(folder).parts
            if folder.name == "znnpy" and inner[:1] in (("kernels",), ("planner",)):
                continue  # the links for tools
            found.add(".".join((name, *inner)))
    return found


def cuda_sources(repository: Path) -> list[Path]:
    """Kernels for CUDA devices: compiled where they run, so they are installed as they are."""
    return [path for ending in ("cu", "cuh") for path in (repository / "kernels").rglob(f"*.{ending}")]


def test_listed_packages_equal_the_folders_on_disk(repository: Path) -> None:
    """A sub-package that is forgotten in pyproject.toml vanishes from the wheel without a word."""
    settings = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(settings["packages"]) == packages_on_disk(repository)


@pytest.mark.parametrize("name", ["kernels", "planner"])
def test_package_folder_is_a_link(repository: Path, name: str) -> None:
    link = repository / "znnpy" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name


@pytest.mark.parametrize("name", ["kernels", "planner"])
def test_bare_import_fails_and_names_the_right_module(repository: Path, name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=repository, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"ImportError: this folder is znnpy.{name}, not {name}; import znnpy.{name}" in done.stderr


def _setuptools_is_new_enough() -> bool:
    try:
        return int(version("setuptools").partition(".")[0]) >= 77
    except PackageNotFoundError:
        return False


def test_wheel_holds_every_package_and_network(repository: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy: building leaves files behind, and takes in what an older build left
    source.mkdir()
    for name in ("znnpy", "kernels", "planner"):
        shutil.copytree(repository / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / name, source)
    isolation = ["--no-isolation"] if _setuptools_is_new_enough() else []
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", *isolation, "--outdir", str(tmp_path), str(source)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "CC": "false", "CXX": "false"},  # without a compiler, as the kernels may be left out
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    folders = {str(Path(name).parent).replace("/", ".") for name in names if name.endswith("__init__.py")}
    assert folders == packages_on_disk(repository)
    shipped = {path.name for path in (repository / "znnpy" / "networks").iterdir()}
    assert {Path(name).name for name in names if name.startswith("znnpy/networks/")} == shipped
    assert {"fib25_boundary.npz", "fib25_boundary.yaml", "n337.yaml"} <= shipped
    kernels = {f"znnpy/kernels/{path.relative_to(repository / 'kernels')}" for path in cuda_sources(repository)}
    assert {name for name in names if name.endswith((".cu", ".cuh"))} == kernels
    assert "znnpy/kernels/gpu/device_ops.cuh" in kernels
    assert {"znnpy/py.typed", "znnpy/napari.yaml"} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("kernels", "planner", "tests"))]
