"""A module never imports itself through others, even inside functions or for annotations alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = {  # the folders of each package, by the names they are imported as
    "znnpy": {"znnpy": "znnpy", "znnpy.kernels": "kernels", "znnpy.planner": "planner"},
    "benchmarks": {"benchmarks": "benchmarks"},
    "tests": {"tests": "tests"},
}


def modules_in(package: str) -> dict[str, Path]:
    """Return the files of all modules of a package, by their dotted names."""
    found = {}
    for name, folder in PACKAGES[package].items():
        for path in (REPOSITORY / folder).rglob("*.py"):
            parts = (name, *path.relative_to(REPOSITORY / folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_by(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Yield the modules that a file imports anywhere: at the top, in functions, or for annotations."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in known:
                    yield name
                elif node.module in known:
                    yield node.module


def circles_in(known: dict[str, Path]) -> list[list[str]]:
    """Return every set of modules that import each other. The names that a package exports do not count."""
    graph = networkx.DiGraph()
    for name, path in known.items():
        if name != "znnpy":
            graph.add_edges_from((name, other) for other in imported_by(path, known) if other not in (name, "znnpy"))
    return sorted(sorted(found) for found in networkx.strongly_connected_components(graph) if len(found) > 1)


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_modules_of_a_package_have_no_import_cycle(package: str) -> None:
    assert circles_in(modules_in(package)) == []


def test_cycle_through_a_lazy_import_and_an_annotation_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("def f() -> None:\n    from pack.two import g\n    g()\n")
    (tmp_path / "two.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pack import one\n")
    (tmp_path / "three.py").write_text("import pack.one\n")
    known = {f"pack.{path.stem}": path for path in tmp_path.glob("*.py")}
    assert circles_in(known) == [["pack.one", "pack.two"]]
