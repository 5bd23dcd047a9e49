"""Every example of the README runs as it stands there, one after the other, in a folder with a small volume."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

pytestmark = pytest.mark.slow

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
BLOCKS = [(match[1], match[2]) for match in BLOCK.finditer(README)]
SMALL = {  # the same commands on less
    "znnpy demo": "znnpy demo --size 48",
    "znnpy plan --shape 120,120,120 --rigor measure --time-limit 30 --paranoid --out timed.json": (
        "znnpy plan --shape 40,41,42 --rigor measure --time-limit 3 --paranoid --out timed.json"
    ),
    "znnpy plan --shape 150,150,150 --plot curves.png": "znnpy plan --shape 50,51,52 --plot curves.png",
}


@pytest.fixture(scope="module", params=["weights at hand", pytest.param("torch", marks=pytest.mark.torch)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a volume and the weights of the network shown: as .npz, or as PyTorch saves them ."""
    folder = tmp_path_factory.mktemp("reader")
    with h5py.File(folder / "volume.h5", "w") as file:
        file["raw"] = np.random.default_rng(0).integers(0, 256, (40, 41, 42), np.uint8)
    rng = np.random.default_rng(1)
    kernels = [(8, 1, 3, 3, 3), (8, 8, 1, 5, 5), (1, 8, 1, 1, 1)]
    weights = [rng.uniform(-0.2, 0.2, kernel).astype(np.float32) for kernel in kernels]
    arrays: dict[str, np.ndarray] = {}
    for index, weight in enumerate(weights):
        arrays |= {f"conv{index}_weight": weight, f"conv{index}_bias": np.zeros(len(weight), np.float32)}
    with (folder / "my_network.npz").open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    if request.param == "torch":
        import torch

        layers = {0: 0, 1: 3, 2: 5}  # conv, relu, pool, conv, relu, conv, sigmoid
        state = {
            f"{layers[int(name[4])]}.{name.partition('_')[2]}": torch.from_numpy(array)
            for name, array in arrays.items()
        }
        torch.save(state, folder / "my_network.pt")
        (folder / "my_network.npz").unlink()  # the README's lines make it
    return folder


def test_readme_has_every_kind_of_example() -> None:
    assert {kind for kind, _ in BLOCKS} == {"bash", "yaml", "python"}
    assert {"pip install . && znnpy demo\n", "pip install -e '.[test]' && pytest -n auto\n"} <= {
        code for _, code in BLOCKS
    }


def test_examples_run_one_after_the_other(folder: Path) -> None:
    """One reads what another wrote."""
    assert set(SMALL) <= {command for _, code in BLOCKS for command in _commands(code)}
    for kind, code in BLOCKS:
        if kind == "yaml":
            name = code.partition("\n")[0].removeprefix("# ")
            (folder / name).write_text(code)
            assert name == "my_network.yaml"
        elif kind == "python":
            if "import torch" not in code or (folder / "my_network.pt").exists():
                _succeeds([sys.executable, "-W", "error", "-c", code], folder)
        else:
            for command in _commands(code):
                words = shlex.split(SMALL.get(command, command))
                _succeeds([str(Path(sys.executable).with_name(words[0])), *words[1:]], folder)


def _commands(code: str) -> list[str]:
    """znnpy's commands in a shell block; what installs is .ci/run's to run."""
    parts = [part.strip() for line in code.splitlines() for part in line.split("&&")]
    return [shlex.join(shlex.split(part, comments=True)) for part in parts if part.startswith("znnpy ")]


def _succeeds(words: list[str], folder: Path) -> None:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr}"


def test_picture_is_small_and_there(repository: Path) -> None:
    (path,) = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README)
    assert 10_000 < (repository / path).stat().st_size < 300_000


@pytest.mark.torch
def test_lines_for_pytorch_take_no_batch_norm_for_a_convolution(tmp_path: Path) -> None:
    """Its weight is an array too, of one axis: the reader is told to fold it, and no wrong file is written."""
    import torch

    (code,) = (code for _, code in BLOCKS if "import torch" in code)
    layers = [torch.nn.Conv3d(1, 8, 3), torch.nn.BatchNorm3d(8), torch.nn.ReLU(), torch.nn.Conv3d(8, 1, 1)]
    torch.save(torch.nn.Sequential(*layers).state_dict(), tmp_path / "my_network.pt")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "AssertionError: only convolutions with bias have parameters; fold batch-norm" in done.stderr
    assert not (tmp_path / "my_network.npz").exists()
    fused = torch.nn.utils.fusion.fuse_conv_bn_eval(layers[0].eval(), layers[1].eval())
    torch.save(torch.nn.Sequential(fused, *layers[2:]).state_dict(), tmp_path / "my_network.pt")
    _succeeds([sys.executable, "-c", code], tmp_path)
    with np.load(tmp_path / "my_network.npz") as arrays:
        shapes = {name: arrays[name].shape for name in arrays}
    assert shapes == {
        "conv0_weight": (8, 1, 3, 3, 3),
        "conv0_bias": (8,),
        "conv1_weight": (1, 8, 1, 1, 1),
        "conv1_bias": (1,),
    }


def test_wrong_words_are_value_errors() -> None:
    """As the README says, and no ZnnpyError."""
    import znnpy

    for words in ({"threads": 0}, {"ram": "12Q"}, {"border": "x"}):
        for word, value in words.items():
            assert f"{word}={value!r}".replace("'", '"') in README
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - any sentence
            znnpy.plan("fib25_boundary", shape=(60, 60, 60), **words)
        assert not isinstance(caught.value, znnpy.ZnnpyError)
