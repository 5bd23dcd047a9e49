"""The scripts of examples/ run on a small part of the real volume, and give what they promise."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
import pytest
from skimage import measure

import znnpy
from znnpy import Box

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
LONGEST = 60  # lines
PART = slice(165, 225), slice(170, 230), slice(20, 80)  # of the volume: it holds many cells
SPLIT = 30  # plane of the part at which the voxels begin that no network was trained on
BIT = r"\d\.\d{3}"


@pytest.fixture(scope="session")
def part(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a part of the real volume, volume.h5, and its labels, labels.h5."""
    folder = tmp_path_factory.mktemp("part")
    for name, source in ("volume.h5", "fib25_train.h5"), ("labels.h5", "fib25_train_labels.h5"):
        with h5py.File(shared_data / source) as whole, h5py.File(folder / name, "w") as file:
            file["main"] = whole["main"][PART]
    return folder


def run(folder: Path, script: str, *words: object) -> str:
    """Run a script in a folder, in which its outputs appear; return the last line that it prints."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / script), *map(str, words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def figures(line: str) -> dict[str, float]:
    """Return the figures in a line, by name."""
    return {name: float(value) for name, value in re.findall(rf"(\w+) ({BIT})", line)}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_short_and_says_how_it_is_called(script: Path) -> None:
    text = script.read_text()
    assert len(text.splitlines()) <= LONGEST
    assert f"\n    python examples/{script.name}" in (ast.get_docstring(ast.parse(text), clean=False) or "")


@pytest.mark.slow
@pytest.mark.parametrize(("network", "vi", "rand"), [("fib25_unet", 1.6, 0.3), ("fib25_boundary", 1.6, 0.3)])
def test_grey_values_become_cells(network: str, vi: float, rand: float, part: Path, tmp_path: Path) -> None:
    words = (part / "volume.h5", part / "labels.h5", "--network", network, "--split", SPLIT)
    found = figures(run(tmp_path, "cells.py", *words))
    assert found["vi_split"] + found["vi_merge"] < vi
    assert found["adapted_rand"] < rand
    with h5py.File(tmp_path / "cells.h5") as file, h5py.File(tmp_path / "boundaries.h5") as boundaries:
        cells = file["cells"]
        assert cells.shape == boundaries["prediction"].shape == (60, 60, 60)
        assert {name: round(float(cells.attrs[name]), 3) for name in found} == found
        assert 10 < len(np.unique(cells[()])) < 100


@pytest.mark.slow
def test_thresholds_are_picked_on_the_planes_before_the_split(part: Path, tmp_path: Path) -> None:
    """Labels behind the split change the figures, and not the thresholds."""
    with h5py.File(part / "labels.h5") as file, h5py.File(tmp_path / "labels.h5", "w") as other:
        labels = file["main"][()]
        labels[SPLIT:] = 1
        other["main"] = labels
    found = [
        figures(run(tmp_path, "cells.py", part / "volume.h5", file, "--split", SPLIT))
        for file in (part / "labels.h5", tmp_path / "labels.h5")
    ]
    assert found[0]["inside"] == found[1]["inside"]
    assert found[0]["merge"] == found[1]["merge"]
    assert found[1]["vi_merge"] == 0 < found[0]["vi_merge"]


@pytest.mark.slow
def test_affinities_become_cells_that_are_compared_with_labels(part: Path, tmp_path: Path) -> None:
    last = run(tmp_path, "affinities.py", part / "volume.h5", "--roi", f"{SPLIT}:60,:,:")
    found = figures(run(tmp_path, "scores.py", "cells.h5", part / "labels.h5"))
    assert found["vi_split"] + found["vi_merge"] < 1.8
    assert found["adapted_rand"] < 0.35
    with h5py.File(tmp_path / "cells.h5") as file:
        assert file["cells"].shape == (30, 60, 60)
        assert list(file["cells"].attrs["voxel_offset"]) == [SPLIT, 0, 0]
        assert last == f"{len(np.unique(file['cells']))} cells"


@pytest.mark.slow
def test_scores_of_pieces_of_the_labels_are_perfect_and_those_of_one_cell_are_not(part: Path, tmp_path: Path) -> None:
    with h5py.File(part / "labels.h5") as file:
        labels = file["main"][:20, 10:, 5:]
    pieces = measure.label(labels.astype(np.int32), connectivity=1)
    for name, cells in ("pieces.h5", pieces), ("one.h5", np.ones_like(pieces)):
        with h5py.File(tmp_path / name, "w") as file:
            file.create_dataset("cells", data=cells).attrs["voxel_offset"] = (0, 10, 5)
    same = figures(run(tmp_path, "scores.py", "pieces.h5", part / "labels.h5"))
    assert same == {"vi_split": 0, "vi_merge": 0, "adapted_rand": 0}
    one = figures(run(tmp_path, "scores.py", "one.h5", part / "labels.h5"))
    assert one["vi_split"] == 0
    assert one["vi_merge"] > 2 > one["adapted_rand"] > 0.3


@pytest.mark.slow
def test_blocks_of_a_stream_become_a_coarse_map(part: Path, tmp_path: Path) -> None:
    last = run(tmp_path, "stream.py", part / "volume.h5", "--out", "coarse.npy")
    with h5py.File(part / "volume.h5") as file:
        boundary = znnpy.load_network("fib25_unet")(file["main"][()])[0]
    coarse = boundary.reshape(15, 4, 15, 4, 15, 4).mean((1, 3, 5))
    assert np.abs(np.load(tmp_path / "coarse.npy") - coarse).max() < 1e-5
    assert last == f"100% of the volume: {np.mean(boundary >= 0.5):.1%} boundaries so far"


def test_a_block_thinner_than_a_voxel_of_the_map_counts_in_the_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Blocks(ExitStack):
        shape = (1, 10, 8, 8)

        def __iter__(self) -> Iterator[tuple[Box, npt.NDArray[np.float32]]]:
            for low, high in ((0, 8), (8, 10)):
                yield Box((low, 0, 0), (high, 8, 8)), np.ones((1, high - low, 8, 8), np.float32)

    monkeypatch.setattr(znnpy, "stream", lambda *given, **options: Blocks())
    monkeypatch.setattr(sys, "argv", ["stream.py", "volume.h5", "--out", str(tmp_path / "coarse.npy")])
    runpy.run_path(str(EXAMPLES / "stream.py"))
    np.testing.assert_array_equal(np.load(tmp_path / "coarse.npy"), np.ones((2, 2, 2)))


@pytest.mark.torch
def test_module_of_pytorch_gives_what_the_shipped_network_gives(part: Path, tmp_path: Path) -> None:
    import zarr

    with h5py.File(part / "volume.h5") as file:
        grey = file["main"][:32, :40, :48]
    zarr.create_array(tmp_path / "volume.zarr", data=grey, chunks=(16, 16, 16))
    weights = Path(znnpy.__file__).parent / "networks" / "fib25_unet.npz"
    run(tmp_path, "torch_unet.py", "volume.zarr", "prediction.zarr", "--weights", weights)
    found = np.asarray(zarr.open_group(tmp_path / "prediction.zarr", mode="r")["0"])
    assert np.abs(found - znnpy.load_network("fib25_unet")(grey)).max() < 1e-5
