"""The public door: light to import, and every name behind it opens."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import znnpy
from znnpy import errors

HEAVY = ("numpy", "pyfftw", "h5py", "cupy")


def loaded_by(statement: str) -> set[str]:
    """Return the modules of HEAVY that a fresh process has loaded after a statement."""
    code = f"import sys\n{statement}\nprint(*({HEAVY!r} & sys.modules.keys()))".replace(repr(HEAVY), repr(set(HEAVY)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_loads_nothing_heavy() -> None:
    assert loaded_by("import znnpy") == set()


def test_command_line_loads_no_numpy() -> None:
    """BLAS chooses its kernels when numpy is loaded: a resumed run must have its say before."""
    assert loaded_by("import znnpy.cli") == set()


def test_loaded_heavy_libraries_are_detected() -> None:
    assert "numpy" in loaded_by("import numpy")


@pytest.mark.parametrize("name", znnpy.__all__)
def test_public_name_is_importable(name: str) -> None:
    assert getattr(znnpy, name) is not None
    assert name in dir(znnpy)


def test_all_is_sorted_and_complete() -> None:
    assert list(znnpy.__all__) == sorted(set(znnpy.__all__))
    assert {"infer", "plan", "load_network", "primitive", "ZnnpyError"} <= set(znnpy.__all__)


def test_modules_of_operations_are_attributes_of_znnpy() -> None:
    assert loaded_by("import znnpy; assert znnpy.ops.relu") >= {"numpy"}


def test_type_checkers_see_the_runtime_names() -> None:
    """The imports under TYPE_CHECKING are what `__getattr__` gives: the same names, from the same modules."""
    tree = ast.parse(Path(znnpy.__file__).read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname or alias.name: (node.module, alias.name) for node in imports for alias in node.names}
    assert set(seen) == set(znnpy.__all__)
    for name, (module, there) in seen.items():
        assert module is not None
        assert getattr(znnpy, name) is getattr(importlib.import_module(module), there), name


def test_every_error_is_public() -> None:
    raised = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert raised <= set(znnpy.__all__)


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'znnpy' has no attribute 'infra'"):
        getattr(znnpy, "infra")  # noqa: B009 -- type checkers refuse the plain form, and that is tested elsewhere


def test_version_equals_that_of_the_distribution() -> None:
    from importlib.metadata import version

    assert znnpy.__version__ == version("znnpy")


def test_no_module_has_the_name_of_a_public_function() -> None:
    """Importing `znnpy.infer` as a module would put it in the function's place."""
    import znnpy.inference

    rooms = {path.stem for folder in znnpy.__path__ for path in Path(folder).iterdir()}
    assert rooms & set(znnpy.__all__) == {"ops"}, "only `ops` is a public module"
    assert callable(znnpy.infer)
    assert callable(znnpy.plan)
