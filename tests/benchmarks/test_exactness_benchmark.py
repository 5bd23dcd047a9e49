"""benchmarks/exactness.py: its definition is that of the tests, and it tells outputs apart."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

NETWORK = """\
name: tiny
input_channels: 2
layers:
- {type: conv, kernel: [3, 2, 3], out: 5, activation: tanh}
- {type: pool, window: [2, 3, 1]}
- {type: conv, kernel: [2, 3, 3], out: 4, activation: relu}
- {type: maxout, of: 2}
- {type: conv, kernel: [1, 2, 2], out: 3, activation: none}
"""


@pytest.fixture
def network(tmp_path: Path) -> Path:
    """Its file. What is tested loads PyTorch, which tests of memory would find in this process: others run it."""
    if find_spec("torch") is None:
        pytest.skip("the definition needs PyTorch; pip install 'znnpy[bench]'")
    path = tmp_path / "tiny.yaml"
    path.write_text(NETWORK)
    return path


def test_its_definition(repository: Path, network: Path) -> None:
    """As that of the tests, to the rounding of float64; of a corner as modes.py asks for it too."""
    ask = """
import sys; sys.path.insert(0, sys.argv[1])
import modes
import numpy as np
from contestants import random_network
from contestants_gpu import noise
from exactness import corner_by_definition, errors
from znnpy.formats.weights import random_weights
from znnpy.kernels.reference import dense_by_fragments
name = sys.argv[2]
network = random_network(name)
z, y, x = network.patch_in((14, 6, 15))
raw = noise((20,) * 3, 2)[:, :z, :y, :x]
dense = dense_by_fragments(network, random_weights(network), (np.moveaxis(raw, 0, -1)[None] - 127.5) / 73.9)
dense = np.moveaxis(dense[0], -1, 0)
small = 4, 3, 5
for size, output in ((small, corner_by_definition((name, 20, small))), ((14, 6, 15), modes.defined((name, 20)))):
    assert output.shape == (3, *size) and output.dtype == np.float64
    assert np.abs(output - dense[:, : size[0], : size[1], : size[2]]).max() < 1e-13
made = np.zeros((2, 4, 5, 6), np.float32)
exact = made.astype(np.float64)
made[1, 2, 3, 4], made[0, 0, 0, 0] = 3e-5, -1e-6
found = errors(exact, made)
assert np.isclose(found["most"], 3e-5) and np.isclose(found["mean"], 2.9e-5 / 240)
assert np.isclose(found["rms"], 3.0017e-5 / 240**0.5, rtol=1e-3) and found["not_allowed"] == 1 / 240
made[:], exact[:] = 101, 100
assert np.isclose(errors(exact, made)["most"], 0.01)
"""
    command = [sys.executable, "-c", ask, str(repository / "benchmarks"), str(network)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_whole_benchmark(repository: Path, network: Path, tmp_path: Path) -> None:
    out = tmp_path / "exactness.json"
    words = ["--networks", str(network), "--side", "6", "--ram", "2G", "--threads", "1", "--out", str(out)]
    command = [sys.executable, str(repository / "benchmarks" / "exactness.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ours, theirs = json.loads(out.read_text())["rows"]
    assert ours["name"] == "znnpy on the processor"
    assert ours["methods"]
    assert theirs["name"] == "PyTorch on cpu"
    for row in (ours, theirs):
        assert 0 < row["rms"] < row["most"] < 1e-5
        assert row["not_allowed"] == 0
    assert "0.00% of 6^3 voxels not allowed" in done.stdout
