"""Make tutorial.ipynb of docs/tutorial.md: its text, commands and Python in the same order.

    python examples/make_notebook.py

The notebook runs where znnpy is installed, so that the commands that install it stay text. Others run in bash, and the
first that fails stops the notebook. The picture of the demo is shown behind the commands that draw it.
"""

import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

HERE = Path(__file__).resolve().parent
FENCE = re.compile(r"^```(\w+)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
PAGE = re.compile(r"\]\((\w+\.md)")  # of docs/, in a link
PICTURE = 'from IPython.display import Image\n\nImage("demo/demo.png")'


def code_of(kind, code):
    """Return the code of the cells of one fenced block."""
    if kind == "yaml":
        return [f"%%writefile {code.partition(chr(10))[0].removeprefix('# ')}\n{code}"]
    if kind == "bash":
        return [f"%%bash\nset -e\n{code}", *([PICTURE] if "znnpy demo" in code else [])]
    if kind != "python":
        raise ValueError(f"docs/tutorial.md has a block of kind {kind!r}, which no cell of a notebook is made of")
    return [code]


def notebook(page):
    """Return the notebook of a page in Markdown."""
    cells, text, end = [], "", 0
    for block in FENCE.finditer(page):
        text += page[end : block.start()]
        end = block.end()
        if "pip install" in block[2]:
            text += block[0]
            continue
        cells += [new_markdown_cell(text), *map(new_code_cell, code_of(block[1], block[2]))]
        text = ""
    cells.append(new_markdown_cell(page[end:]))
    for number, cell in enumerate(cells):
        cell.id = str(number)
        cell.source = PAGE.sub(r"](../docs/\1", cell.source.strip())
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return new_notebook(cells=cells, metadata=kernel)


if __name__ == "__main__":
    page = (HERE.parent / "docs" / "tutorial.md").read_text()
    nbformat.write(notebook(page), HERE / "tutorial.ipynb")
