"""The examples in README.md and docs/: commands and code run as they stand there, one after the other."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import h5py
import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from znnpy.cli import main
from znnpy.network_files import read_network

REPOSITORY = Path(__file__).resolve().parent.parent
DOCS = sorted((REPOSITORY / "docs").rglob("*.md"))
RUN_AS_A_WHOLE = ("README.md", "docs/tutorial.md", "docs/arrays.md")  # in a folder of their own, from top to bottom
OF_OTHER_PACKAGES = "docs/frameworks.md"  # whose Python is compiled here; tests/frameworks runs what it shows
SMALLER = {"znnpy demo": "znnpy demo --size 48"}  # the same command on a smaller volume
FENCE = re.compile(r"^```([\w{}-]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    kind: str
    code: str

    @property
    def commands(self) -> list[str]:
        """The commands of znnpy in a shell block. Installation commands are left to .ci/run."""
        parts = [part.strip() for line in self.code.splitlines() for part in line.split("&&")]
        return [shlex.join(shlex.split(part, comments=True)) for part in parts if part.startswith("znnpy ")]

    @property
    def needs_torch(self) -> bool:
        return self.kind == "python" and "import torch" in self.code


def blocks_of(page: Path) -> list[Block]:
    return [Block(match[1], match[2]) for match in FENCE.finditer(page.read_text())]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder with a small volume, the weights of the network that README.md describes, and an ONNX model."""
    with h5py.File(tmp_path / "volume.h5", "w") as file:
        file["raw"] = np.random.default_rng(0).integers(0, 256, (40, 41, 42), np.uint8)
    rng = np.random.default_rng(1)
    arrays: dict[str, np.ndarray] = {}
    for index, kernel in enumerate([(8, 1, 3, 3, 3), (1, 8, 1, 5, 5)]):
        arrays[f"conv{index}_weight"] = rng.uniform(-0.2, 0.2, kernel).astype(np.float32)
        arrays[f"conv{index}_bias"] = np.zeros(kernel[0], np.float32)
    with (tmp_path / "my_network.npz").open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    onnx.save(_model(), tmp_path / "model.onnx")
    return tmp_path


def _model() -> onnx.ModelProto:
    """Make an ONNX model of one convolution for volumes of any size."""
    volume = onnx.helper.make_tensor_value_info("volume", onnx.TensorProto.FLOAT, [1, 1, "z", "y", "x"])
    output = onnx.helper.make_tensor_value_info("output", onnx.TensorProto.FLOAT, [1, 1, "z", "y", "x"])
    weight = onnx.numpy_helper.from_array(np.full((1, 1, 3, 3, 3), 0.1, np.float32), "weight")
    conv = onnx.helper.make_node("Conv", ["volume", "weight"], ["output"], "conv", pads=[1] * 6)
    graph = onnx.helper.make_graph([conv], "model", [volume], [output], [weight])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)])


def test_readme_is_short_and_holds_both_set_up_commands() -> None:
    readme = REPOSITORY / "README.md"
    assert len(readme.read_text().splitlines()) <= 150
    codes = {block.code for block in blocks_of(readme)}
    assert {"pip install . && znnpy demo\n", "pip install -e '.[test]' && pytest -n auto\n"} <= codes


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN_AS_A_WHOLE)
def test_examples_of_a_page_run_in_order(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run in this process, Python with names of its own for each block."""
    monkeypatch.chdir(folder)
    for block in blocks_of(REPOSITORY / page):
        if block.kind == "yaml":
            name = block.code.partition("\n")[0].removeprefix("# ")
            assert name == "my_network.yaml"
            (folder / name).write_text(block.code)
        elif block.kind == "python":
            exec(compile(block.code, page, "exec"), {"__name__": "__main__"})
        else:
            assert block.kind == "bash", f"{page} has a block of kind {block.kind!r}, which no test runs"
            for command in block.commands:
                arguments = shlex.split(SMALLER.get(command, command))
                done = CliRunner().invoke(main, arguments[1:], prog_name=arguments[0], catch_exceptions=False)
                assert done.exit_code == 0, f"{command}: {done.output}"


@pytest.mark.parametrize("page", [str(page.relative_to(REPOSITORY)) for page in DOCS])
def test_commands_and_networks_of_a_page_are_valid(page: str, tmp_path: Path) -> None:
    """Pages that are not run as a whole: their options exist and have valid values, and their networks can be read."""
    for block in blocks_of(REPOSITORY / page):
        for command in block.commands if block.kind == "bash" else ():
            _parses(shlex.split(command)[1:])
        if block.kind == "yaml":
            (tmp_path / "network.yaml").write_text(block.code)
            read_network(tmp_path / "network.yaml")
        if block.kind == "python" and page == OF_OTHER_PACKAGES:
            compile(block.code, page, "exec")
            continue
        assert block.kind != "python" or block.needs_torch or page in RUN_AS_A_WHOLE, "no test runs this block"


def _parses(arguments: list[str]) -> None:
    """Let click read a command line without running the command; it raises UsageError for what it does not know."""
    command = main.commands[arguments[0]]
    with command.make_context(arguments[0], arguments[1:], parent=click.Context(main)):
        pass


def test_unknown_option_is_detected() -> None:
    with pytest.raises(click.UsageError, match="--rma"):
        _parses(["infer", "volume.h5", "--rma", "2G"])
    with pytest.raises(click.BadParameter, match="12Q"):
        _parses(["infer", "volume.h5", "--ram", "12Q"])


def _succeeds(arguments: list[str], folder: Path) -> None:
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{arguments}: {done.stderr}"


def test_picture_exists_and_is_small() -> None:
    (path,) = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (REPOSITORY / "README.md").read_text())
    assert 10_000 < (REPOSITORY / path).stat().st_size < 300_000


MODULE = """
import h5py
import numpy as np
import torch
import znnpy
from torch import nn

module = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.Conv3d(4, 1, 1), nn.Sigmoid())
volume = np.random.default_rng(0).standard_normal((20, 21, 22), np.float32)
with h5py.File("volume.h5", "w") as file:
    file["raw"] = volume
"""
COMPARED = """
with torch.no_grad():
    expected = module(torch.from_numpy(volume)[None, None])[0].numpy()
assert np.abs(prediction - expected).max() < 1e-6
with h5py.File("prediction.h5") as file:
    assert np.abs(file["prediction"][()] - expected).max() < 1e-6
for file in ("net.pt2", "net.onnx"):
    assert np.abs(znnpy.load_network(file)(volume) - expected).max() < 1e-6
"""


@pytest.mark.torch
def test_examples_with_pytorch_give_what_it_gives(tmp_path: Path) -> None:
    codes = [block.code for block in blocks_of(REPOSITORY / "docs" / "importing.md") if block.kind == "python"]
    assert len(codes) == 3  # compile, export, and an operator of the reader's
    _succeeds([sys.executable, "-c", MODULE + "".join(codes) + COMPARED], tmp_path)


def test_invalid_arguments_are_value_errors() -> None:
    """Arguments that docs/arrays.md calls invalid raise a plain ValueError, which is no ZnnpyError."""
    import znnpy

    page = (REPOSITORY / "docs" / "arrays.md").read_text()
    for arguments in ({"threads": 0}, {"ram": "12Q"}, {"border": "x"}):
        for name, value in arguments.items():
            assert f"{name}={value!r}".replace("'", '"') in page
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - any sentence
            znnpy.plan("fib25_boundary", shape=(60, 60, 60), **arguments)
        assert not isinstance(caught.value, znnpy.ZnnpyError)
