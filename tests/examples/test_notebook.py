"""The notebook is the tutorial, and runs from top to bottom."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

nbformat: Any = pytest.importorskip("nbformat", reason="nbformat is not installed; `pip install '.[test]'`")
nbclient: Any = pytest.importorskip("nbclient", reason="nbclient is not installed; `pip install '.[test]'`")

REPOSITORY = Path(__file__).resolve().parents[2]
NOTEBOOK = REPOSITORY / "examples" / "tutorial.ipynb"
TUTORIAL = (REPOSITORY / "docs" / "tutorial.md").read_text()
DEMO, SMALLER = "znnpy demo", "znnpy demo --size 48"  # the same on a smaller volume


@pytest.fixture
def maker() -> dict[str, Any]:
    """Return the functions of the script that makes the notebook."""
    return runpy.run_path(str(NOTEBOOK.with_name("make_notebook.py")))


def test_notebook_is_made_of_the_tutorial(maker: dict[str, Any]) -> None:
    """Run `python examples/make_notebook.py` where this fails."""
    assert nbformat.read(NOTEBOOK, as_version=4) == maker["notebook"](TUTORIAL)


def test_notebook_has_all_of_the_tutorial_and_its_links_lead_to_pages(maker: dict[str, Any]) -> None:
    made = maker["notebook"](TUTORIAL)
    nbformat.validate(made)
    text = "\n".join(cell.source for cell in made.cells)
    for line in TUTORIAL.splitlines():
        assert line.startswith("```") or "](" in line or line in text
    links = maker["PAGE"].findall(TUTORIAL)
    assert links
    assert all(f"](../docs/{page}" in text and (REPOSITORY / "docs" / page).exists() for page in links)


def test_block_that_no_cell_can_hold_is_refused(maker: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="'text'"):
        maker["notebook"]("# A page\n\n```text\nwords\n```\n")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Jupyter
def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (demo,) = [cell for cell in notebook.cells if cell.cell_type == "code" and DEMO in cell.source]
    demo.source = demo.source.replace(DEMO, SMALLER)
    folder = tmp_path / "run"
    folder.mkdir()
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert {path.name for path in folder.iterdir()} >= {"demo", "boundaries.h5", "planned.h5", "mine.h5"}
