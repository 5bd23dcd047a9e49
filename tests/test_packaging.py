"""The installation has every folder of code, under the right name."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

import znnpy
from tests.support.emulator import needs_compiler
from znnpy.formats.yaml12 import read_yaml

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


NO_COMPILER = {"CC": "false", "CXX": "false"}


def built(repository: Path, folder: Path, **environment: str) -> Path:
    """Build a wheel as `python -m build` does, and return its path."""
    source = folder / "source"  # a copy: building leaves files behind, and takes in what an older build left
    source.mkdir()
    left_out = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("znnpy", "kernels", "planner"):
        shutil.copytree(repository / name, source / name, symlinks=True, ignore=left_out)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / name, source)
    isolation = ["--no-isolation"] if _setuptools_is_new_enough() else []
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", *isolation, "--outdir", str(folder), str(source)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_wheel_holds_every_package_and_network(repository: Path, tmp_path: Path) -> None:
    wheel = built(repository, tmp_path, **NO_COMPILER)  # as the kernels may be left out
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


def project(repository: Path) -> dict[str, Any]:
    return tomllib.loads((repository / "pyproject.toml").read_text())


def test_classifiers_and_wheels_are_of_the_same_interpreters(repository: Path) -> None:
    """Only interpreters on which the tests ran are named."""
    settings = project(repository)
    named = {
        line.rpartition(" ")[2]
        for line in settings["project"]["classifiers"]
        if line.startswith("Programming Language :: Python :: 3.")
    }
    built_for = {f"3.{word[3:].partition('-')[0]}" for word in settings["tool"]["cibuildwheel"]["build"]}
    assert named == built_for == {"3.11", "3.12", "3.13"}
    assert settings["project"]["requires-python"] == f">={min(named, key=lambda word: int(word[2:]))}"


def test_settings_of_cibuildwheel_are_valid(repository: Path) -> None:
    schema: Any = pytest.importorskip("jsonschema")
    resources = pytest.importorskip("cibuildwheel").__path__[0]
    document = json.loads((Path(resources) / "resources" / "cibuildwheel.schema.json").read_text())
    schema.validate(project(repository)["tool"]["cibuildwheel"], document)
    command = [sys.executable, "-m", "cibuildwheel", "--platform", "linux", "--print-build-identifiers"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"cp3{minor}-manylinux_x86_64" for minor in (11, 12, 13)]


def test_citation_names_the_version_and_the_licence(repository: Path) -> None:
    content: Any = read_yaml((repository / "CITATION.cff").read_text())
    settings = project(repository)["project"]
    assert content["version"] == znnpy.__version__ == settings["version"]
    assert (content["title"], content["license"]) == (settings["name"], settings["license"])
    assert {"cff-version", "message", "authors"} <= set(content)


@pytest.mark.long
@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="kernels are of x86-64")
@needs_compiler
def test_compiled_wheel_runs_where_there_is_no_compiler(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("auditwheel")
    wheel = built(repository, tmp_path)
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    shown = " ".join(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    tag = re.search(r'is consistent with the following platform tag: "manylinux_2_(\d+)_x86_64"', shown)
    assert tag is not None, shown
    assert int(tag[1]) <= 28, shown  # what cibuildwheel builds in
    target, nothing = tmp_path / "installed", tmp_path / "bin"
    nothing.mkdir()
    alone = {"PATH": str(nothing), "HOME": str(tmp_path), **NO_COMPILER}
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)],
        check=True,
        capture_output=True,
        env=alone,
    )
    checks = project(repository)["tool"]["cibuildwheel"]["test-command"]
    code = checks[0].partition('"')[2].rpartition('"')[0]
    said = []
    for words in (["-c", code], ["-m", *checks[1].split()], ["-c", "import znnpy; print(znnpy.__file__)"]):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            env={**alone, "PYTHONPATH": str(target)},
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert (tmp_path / "demo" / "demo.png").exists()
    assert said[-1].startswith(str(target))
