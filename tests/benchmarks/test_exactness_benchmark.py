"""benchmarks/exactness.py: its definition is that of the tests, and it tells outputs apart."""

from __future__ import annotations

import json
import subprocess
import sys
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


pytestmark = pytest.mark.torch


@pytest.fixture
def network(tmp_path: Path) -> Path:
    """Its file. What is tested loads PyTorch, which tests of memory would find in this process: others run it."""
    path = tmp_path / "tiny.yaml"
    path.write_text(NETWORK)
    return path


def asked(repository: Path, network: Path, what: str) -> subprocess.CompletedProcess[str]:
    """Of a process with the benchmarks, the network's file as `name`, and what definitions are made of."""
    known = """
import sys; sys.path.insert(0, sys.argv[1])
from dataclasses import replace
import modes
import numpy as np
from contestants import random_network
from contestants_gpu import Held, noise
from exactness import by_definition
from znnpy.formats.weights import random_weights
from znnpy.kernels.reference import dense_by_fragments
from znnpy.network import Normalise
name = sys.argv[2]
"""
    command = [sys.executable, "-c", known + what, str(repository / "benchmarks"), str(network)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_its_definition(repository: Path, network: Path) -> None:
    """As that of the tests, to the rounding of float64: fragments that come out whole, and some that do not."""
    done = asked(
        repository,
        network,
        """
mean, std = (127.5, 100.0), (73.9, 50.0)
network = replace(random_network(name), normalise=Normalise(mean, std))
z, y, x = network.patch_in((14, 6, 15))
raw = noise((z, y, x), 2)
dense = dense_by_fragments(network, random_weights(network), (np.moveaxis(raw, 0, -1)[None] - mean) / std)
dense = np.moveaxis(dense[0], -1, 0)
for size in ((14, 6, 15), (4, 3, 5), (13, 5, 1), (1, 1, 1)):
    output = by_definition(network, Held(raw), size)
    assert output.shape == (3, *size) and output.dtype == np.float64
    assert np.abs(output - dense[:, : size[0], : size[1], : size[2]]).max() < 1e-13
""",
    )
    assert done.returncode == 0, done.stderr


def test_corners_of_volumes(repository: Path, network: Path) -> None:
    """As modes.py asks for them: all of an output that is small, be it smaller than the period."""
    done = asked(
        repository,
        network,
        """
network = random_network(name)
for side, size in ((20, (15, 8, 15)), (14, (9, 2, 9)), (40, (24, 24, 24))):
    corner = modes.defined((name, side))
    assert corner.shape == (3, *size)
    larger = network.patch_in((24, 24, 24))
    whole = np.pad(noise((side,) * 3, 2), [(0, 0), *((0, max(0, n - side)) for n in larger)], "edge")
    exact = by_definition(network, Held(whole), (24, 24, 24))
    assert np.abs(corner - exact[:, : size[0], : size[1], : size[2]]).max() < 1e-13
""",
    )
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
    assert "6^3 voxels are off by at most" in done.stdout


def test_what_ends_it(repository: Path, network: Path, tmp_path: Path) -> None:
    """Sides that fragments do not come out of, and an output that `znnpy verify` would not allow."""
    words = f"['--networks', name, '--ram', '2G', '--threads', '1', '--out', {str(tmp_path / 'found.json')!r}"
    for change, side, said in (
        ("", 4, "4 voxels are not a multiple of 2x3x1, the period of"),
        ("exactness.TOLERANCES = {'fp32': 1e-9}", 6, "znnpy is further off than the 1e-09 that `znnpy verify` allows"),
        ("exactness.apart = lambda *_: exactness_apart(np.nan, 0.0)", 6, "znnpy is further off than the 1e-05"),
    ):
        what = f"import exactness\nfrom several_gpus import Apart as exactness_apart\n{change}\n"
        done = asked(repository, network, f"{what}exactness.main({words}, '--side', '{side}'])")
        assert done.returncode == 1
        assert done.stderr.strip().splitlines()[-1].startswith(said)
