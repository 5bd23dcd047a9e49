"""The synthetic volume looks like what the shipped network was trained on, and `znnpy demo` shows it."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from tests.support.cli import Place
from znnpy import demo
from znnpy.errors import ShapeError
from znnpy.shapes import Vec3

pytestmark = pytest.mark.slow

SIZE: Vec3 = (37, 61, 50)  # more than two slabs, no tile whole


def volume(size: Vec3, seed: int = 0) -> tuple[demo.Greys, demo.Greys]:
    slabs = list(demo.synthesise(size, seed))
    assert [slab.z for slab in slabs] == list(range(0, size[0], demo.SLAB))
    return np.concatenate([slab.raw for slab in slabs]), np.concatenate([slab.truth for slab in slabs])


def test_volume_repeats_with_its_seed() -> None:
    raw, truth = volume(SIZE)
    assert raw.shape == truth.shape == SIZE
    assert raw.dtype == truth.dtype == np.uint8
    again, truth_again = volume(SIZE)
    np.testing.assert_array_equal(raw, again)
    np.testing.assert_array_equal(truth, truth_again)
    assert (raw != volume(SIZE, seed=1)[0]).mean() > 0.9


def test_greys_are_those_of_the_microscope() -> None:
    raw, truth = volume((64, 64, 64))
    assert 110 < raw.mean() < 140
    assert 25 < raw.std() < 40
    assert set(np.unique(truth)) == {0, 1}
    assert 0.1 < truth.mean() < 0.25
    assert raw[truth == 1].mean() < 95 < 120 < raw[truth == 0].mean()


def test_tissue_is_independent_of_slabs_and_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut in other places, the tissue is the same; tiles only round differently."""
    raw, truth = volume(SIZE)
    monkeypatch.setattr(demo, "SLAB", 7)
    monkeypatch.setattr(demo, "TILE", 23)
    other, other_truth = volume(SIZE)
    assert (truth != other_truth).mean() < 1e-3
    assert (np.abs(raw.astype(int) - other) > 1).mean() < 1e-3


def test_membranes_are_where_cells_meet() -> None:
    """The definition the network was trained on, by brute force over the six neighbours."""
    rng = np.random.default_rng(3)
    cell = rng.integers(0, 2, (5, 6, 7)).astype(np.int32)
    found = demo._membranes(cell)
    for z, y, x in np.ndindex(3, 4, 5):
        at = np.array([z + 1, y + 1, x + 1])
        steps = np.concatenate([np.eye(3, dtype=int), -np.eye(3, dtype=int)])
        assert found[z, y, x] == any(cell[tuple(at + step)] != cell[tuple(at)] for step in steps)


def test_memory_is_a_slab_not_the_volume() -> None:
    def peak(planes: int) -> int:
        tracemalloc.start()
        for _ in demo.synthesise((planes, 48, 48)):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak(320) < 1.5 * peak(64)


def test_volume_without_voxels_is_refused() -> None:
    with pytest.raises(ShapeError, match="at least one voxel along each axis, not 4x0x4"):
        next(demo.synthesise((4, 0, 4)))


def test_roc_auc_is_the_chance_to_rank_a_pair_rightly() -> None:
    rng = np.random.default_rng(4)
    truth = rng.random(60) < 0.4
    score = np.round(rng.random(60) + 0.3 * truth, 1).astype(np.float32)  # with ties
    pairs = [(t > f) + 0.5 * (t == f) for t in score[truth] for f in score[~truth]]
    assert demo.roc_auc(truth, score) == pytest.approx(np.mean(pairs), abs=1e-4)
    assert demo.roc_auc(np.ones(3, np.bool_), np.zeros(3, np.float32)) == 0.5


def test_picture_shows_raw_prediction_and_truth() -> None:
    raw = np.full((20, 30), 100, np.uint8)
    prediction = np.full((20, 30), 0.5, np.float32)
    truth = np.ones((20, 30), np.uint8)
    pixels = np.asarray(demo.draw(raw, prediction, truth))
    assert pixels.dtype == np.uint8
    width = (pixels.shape[1] - 2 * demo.PICTURE_GAP) // 3
    assert pixels.shape[0] * 30 == width * 20
    assert [int(pixels[5, at]) for at in (3, width + demo.PICTURE_GAP + 3, pixels.shape[1] - 3)] == [100, 128, 255]


def test_demo_finds_the_membranes(place: Place) -> None:
    folder = place.folder / "new" / "demo"
    result = place.run("demo", "--folder", folder, "--size", "72", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["roc_auc"] > 0.9
    assert report["report"]["shape"] == [46, 46, 46]
    for name in ("volume.h5", "truth.h5", "prediction.h5"):
        with h5py.File(folder / name) as file:
            assert len(file) == 1  # so that the default dataset is clear
    with Image.open(folder / "demo.png") as picture:
        assert picture.width > 800
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert "exists already; give another --folder, or --overwrite" in place.refusal("demo", "--folder", folder)
    assert before == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = place.run("demo", "--folder", folder, "--size", "40", "--overwrite")
    assert again.exit_code == 0
    assert f"znnpy verify {folder / 'prediction.h5'} {folder / 'volume.h5'}" in again.stdout
    assert place.run("verify", folder / "prediction.h5", folder / "volume.h5", "--samples", "5").exit_code == 0


def test_unwritable_folder_is_refused(place: Place) -> None:
    taken = Path(place.folder / "taken")
    taken.write_text("a file")
    assert "give another --folder" in place.refusal("demo", "--folder", taken)
    assert "name too long; give another --folder" in place.refusal("demo", "--folder", "9" * 300)


def test_unwritable_picture_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, rename = place.folder / "demo", Path.replace

    def full(self: Path, target: Path) -> Path:
        if target.name == "demo.png":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", full)
    result = place.run("demo", "--folder", folder, "--size", "30", "--overwrite")
    assert result.exit_code == 1
    said = f"Error: cannot write {folder / 'demo.png'}: No space left on device; give another --folder"
    assert " ".join(result.stderr.split()).endswith(said)
    assert {item.name for item in folder.iterdir()} == {"volume.h5", "truth.h5", "prediction.h5"}


@pytest.mark.parametrize("kind", ["symlink", "dangling", "hard link", "folder"])
@pytest.mark.parametrize("name", ["volume.h5", "truth.h5", "demo.png"])
def test_demo_writes_through_no_link(place: Place, name: str, kind: str) -> None:
    folder, mine = place.folder / "demo", place.folder / "mine.h5"
    folder.mkdir()
    mine.write_text("precious")
    at = folder / name
    if kind == "hard link":
        at.hardlink_to(mine)
    elif kind == "folder":
        at.mkdir()
    else:
        at.symlink_to(mine if kind == "symlink" else folder / "nothing")
    assert "exists already; give another --folder" in place.refusal("demo", "--folder", folder, "--size", "40")
    if kind == "hard link":
        assert place.run("demo", "--folder", folder, "--size", "40", "--overwrite").exit_code == 0
    else:
        said = place.refusal("demo", "--folder", folder, "--size", "40", "--overwrite")
        assert f"{name} is a folder, a link or a special file; give another --folder" in said
        assert {item.name for item in folder.iterdir()} == {name}
    assert mine.read_text() == "precious"
