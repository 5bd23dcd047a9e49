"""`znnpy demo`: predict a synthetic volume like those of electron microscopy, and save a picture of the result.

The volume stands in for a real one, which cannot be shipped: winding cells of different greys, dark membranes a few
voxels thick, mottled cytoplasm, some dark organelles, blur and noise, with the grey statistics of 10 nm FIB-SEM
(mean 130, standard deviation 33). Every voxel is a function of its position and the seed, so the volume is written slab
by slab in bounded memory, and the first planes of a large volume equal those of a small one.

The picture is three images side by side, made with Pillow, so that a plain installation can save it.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import OutputError, ShapeError
from znnpy.files import draft_name, give_name, remove, write_asked
from znnpy.messages import option
from znnpy.shapes import Vec3, text

if TYPE_CHECKING:
    from PIL import Image

    from znnpy.report.run_report import Report
    from znnpy.run.pipeline import Event

Floats = npt.NDArray[np.float32]
Greys = npt.NDArray[np.uint8]

SLAB = 16  # planes that are made and written at a time
TILE = 16  # voxels along y and x computed at a time, so that arrays stay in cache
SPACING = 24.0  # voxels between cell centres, on average
MARGIN = 3  # cubes of SPACING around the volume that also hold centres
JOIN = 0.6  # share of centres that continue a neighbouring cell, which makes winding processes
WAVES, WOBBLE = 5, 2.6  # sine waves per axis that bend straight walls; amplitude of each in voxels
MEMBRANE_GREY, MEMBRANE_WIDTH = 76.0, 2.0  # grey in its middle; distance in voxels at which it has faded to 1/e
ORGANELLE_GREY, ORGANELLE_RADIUS = 98.0, 8.0  # voxels
MOTTLE, MOTTLE_STEP = 11.0, 3.0  # grain of the cytoplasm: amplitude in greys, size in voxels
NOISE = 5.5  # standard deviation in greys, of each voxel
PICTURE_WIDTH, PICTURE_GAP = 1200, 8  # pixels
SALT_TISSUE, SALT_MOTTLE, SALT_NOISE = 0, 1, 2  # keep the random streams of one seed apart


@dataclass(frozen=True, slots=True)
class Slab:
    """Some planes of the synthetic volume. Both arrays are (planes, y, x)."""

    z: int  # z of its first plane
    raw: Greys  # grey values
    truth: Greys  # 1 where a 6-neighbour belongs to another cell, else 0: what the shipped network was trained on


@dataclass(frozen=True, slots=True)
class Demo:
    """The files and results of `run`."""

    volume: Path
    truth: Path
    prediction: Path
    picture: Path
    roc_auc: float  # ROC area of the prediction, against the generator's membranes
    report: Report

    def lines(self) -> list[str]:
        """Return the results as lines of text, with commands to try next."""
        return [
            *self.report.lines(),
            f"membranes  a voxel on one scores higher than a voxel off one in {self.roc_auc:.1%} of all pairs "
            f"(ROC AUC {self.roc_auc:.3f}, against {self.truth})",
            f"picture    {self.picture}: raw | prediction | truth",
            "next       check it: "
            f"znnpy verify {self.prediction} {self.volume}    your own: znnpy infer VOLUME.h5 --network NETWORK.yaml",
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the results as plain dictionaries, numbers and text."""
        paths = {name: str(getattr(self, name)) for name in ("volume", "truth", "prediction", "picture")}
        return {**paths, "roc_auc": self.roc_auc, "report": self.report.as_json()}


def run(
    folder: Path,
    size: Vec3,
    *,
    seed: int = 0,
    overwrite: bool = False,
    progress: Callable[[Event], None] | None = None,
) -> Demo:
    """Write `volume.h5` and `truth.h5` into `folder`, predict the volume with the shipped network, save `demo.png`.

    OutputError if the folder already holds one of them and `overwrite` is false.
    """
    import h5py

    from znnpy.inference import infer

    volume, truth, prediction, picture = (
        folder / name for name in ("volume.h5", "truth.h5", "prediction.h5", "demo.png")
    )
    try:
        there = [path for path in (volume, truth, prediction, picture) if os.path.lexists(path)]
        odd = [path for path in there if not stat.S_ISREG(path.lstat().st_mode)]
    except OSError as error:
        raise OutputError(f"cannot look into {folder}: {error.strerror}; give another {option('folder')}") from error
    if there and not overwrite:
        raise OutputError(
            f"{there[0]} exists already; give another {option('folder')}, or {option('overwrite', True)} to replace it"
        )
    if odd:
        raise OutputError(f"{odd[0]} is a folder, a link or a special file; give another {option('folder')}")
    _write(volume, truth, size, seed, overwrite=overwrite)
    report = infer(volume, out=prediction, overwrite=overwrite, progress=progress)
    with h5py.File(volume) as v, h5py.File(truth) as t, h5py.File(prediction) as p:
        raw, membranes, probability = v["raw"], t["truth"], p["prediction"]
        lo = [int(at) for at in probability.attrs["offset"]]
        covered = tuple(slice(at, at + n) for at, n in zip(lo, probability.shape, strict=True))
        auc = roc_auc(membranes[covered] > 0, probability[()])
        z = probability.shape[0] // 2
        drawn = draw(raw[(lo[0] + z, *covered[1:])], probability[z], membranes[(lo[0] + z, *covered[1:])])
    saved = io.BytesIO()
    drawn.save(saved, "PNG")
    write_asked(picture, saved.getvalue(), "folder", overwrite=overwrite)
    return Demo(volume, truth, prediction, picture, auc, report)


def _write(volume: Path, truth: Path, size: Vec3, seed: int, *, overwrite: bool) -> None:
    """Write the grey values as `raw` of `volume` and the membranes as `truth` of `truth`, slab by slab.

    Each file appears whole, and replaces another only with `overwrite`.
    """
    grey, cells = draft_name(volume), draft_name(truth)
    drafts = {grey: volume, cells: truth}
    try:
        volume.parent.mkdir(parents=True, exist_ok=True)
        try:
            _fill(grey, cells, size, seed)
            for draft, path in drafts.items():
                if overwrite:
                    draft.replace(path)
                else:
                    give_name(draft, path)
        finally:
            for draft in drafts:
                remove(draft)
    except OSError as error:
        raise OutputError(
            f"cannot write {volume}: {error.strerror or error}; give another {option('folder')}"
        ) from error


def _fill(volume: Path, truth: Path, size: Vec3, seed: int) -> None:
    """Create two files and fill them slab by slab."""
    import h5py

    with h5py.File(volume, "x") as v, h5py.File(truth, "x") as t:
        raw = v.create_dataset("raw", size, np.uint8, chunks=True)
        membranes = t.create_dataset("truth", size, np.uint8, chunks=True, compression="gzip")
        for slab in synthesise(size, seed):
            planes = slice(slab.z, slab.z + len(slab.raw))
            raw[planes], membranes[planes] = slab.raw, slab.truth


def synthesise(size: Vec3, seed: int = 0) -> Iterator[Slab]:
    """Yield the synthetic volume, `SLAB` planes at a time. ShapeError unless every axis is positive."""
    if min(size) < 1:
        raise ShapeError(f"a volume needs at least one voxel along each axis, not {text(size)}")
    tissue = _Tissue.grow(size, seed)
    for z in range(0, size[0], SLAB):
        planes = min(SLAB, size[0] - z)
        around = (planes + 2, size[1] + 2, size[2] + 2)  # one more voxel on every side, for blur and truth
        grey, cell = np.empty(around, np.float32), np.empty(around, np.int32)
        mottle, cells = _mottle(z - 1, around, seed), tissue.around(z - 1, z + planes + 1)
        for y, x in product(range(0, around[1], TILE), range(0, around[2], TILE)):
            here = (slice(None), slice(y, y + TILE), slice(x, x + TILE))
            grey[here], cell[here] = cells.at((z - 1, y - 1, x - 1), cell[here].shape, mottle[here])
        blurred = _blur(_blur(_blur(grey, 0), 1), 2)
        noise = np.stack([_normal((seed, SALT_NOISE, at), size[1:]) for at in range(z, z + planes)])
        raw = np.clip(np.rint(blurred + NOISE * noise), 0, 255).astype(np.uint8)
        yield Slab(z, raw, _membranes(cell).astype(np.uint8))


@dataclass(frozen=True, slots=True)
class _Tissue:
    """Cells made of the points nearest to their centres, in space bent by sine waves. Positions are (z, y, x)."""

    centres: Floats  # (n, 3)
    cell: npt.NDArray[np.int32]  # (n,) the cell of each centre; a cell may have several centres
    grey: Floats  # (n,) of the cytoplasm, equal within a cell
    organelle: npt.NDArray[np.bool_]  # (n,) whether there is one at the centre
    waves: Floats  # (3 displaced axes, WAVES, 3) wave vectors
    phases: Floats  # (3, WAVES)

    @classmethod
    def grow(cls, size: Vec3, seed: int) -> _Tissue:
        """Place one random centre in each cube of SPACING voxels, in the volume and a margin around it."""
        rng = np.random.default_rng((seed, SALT_TISSUE))
        lattice = tuple(int(n / SPACING) + 1 + 2 * MARGIN for n in size)
        corners = np.indices(lattice).reshape(3, -1).T - MARGIN
        centres = (corners + rng.uniform(0.0, 1.0, corners.shape)) * SPACING
        cell = np.arange(len(centres), dtype=np.int32)
        strides = (lattice[1] * lattice[2], lattice[2], 1)
        for i in np.flatnonzero(rng.uniform(size=len(cell)) < JOIN):
            back = strides[rng.integers(3)]
            if i >= back:
                cell[i] = cell[i - back]
        grey = np.where(rng.uniform(size=len(cell)) < 0.15, 112.0, rng.uniform(148.0, 190.0, len(cell)))[cell]
        organelle = rng.uniform(size=len(cell)) < 0.4
        direction = rng.standard_normal((3, WAVES, 3))
        length = rng.uniform(24.0, 90.0, (3, WAVES, 1))
        waves = 2 * np.pi * direction / np.linalg.norm(direction, axis=2, keepdims=True) / length
        phases = rng.uniform(0.0, 2 * np.pi, (3, WAVES))
        f32 = np.float32
        return cls(centres.astype(f32), cell, grey.astype(f32), organelle, waves.astype(f32), phases.astype(f32))

    def around(self, lo: int, hi: int) -> _Tissue:
        """Keep the centres that planes `lo` to `hi` depend on: within MARGIN cubes, as at the faces of the volume."""
        reach = MARGIN * SPACING + WAVES * WOBBLE
        kept = (self.centres[:, 0] > lo - reach) & (self.centres[:, 0] < hi + reach)
        return replace(
            self,
            centres=self.centres[kept],
            cell=self.cell[kept],
            grey=self.grey[kept],
            organelle=self.organelle[kept],
        )

    def at(self, lo: Vec3, size: Vec3, mottle: Floats) -> tuple[Floats, npt.NDArray[np.int32]]:
        """Return grey before blur and noise, and cell, of the `size` voxels from `lo` on; `mottle` is about N(0, 1)."""
        where = self._bent(lo, size)
        near = self._near(where.min(axis=0), where.max(axis=0))
        centres, cells = self.centres[near], self.cell[near]
        squared = _squared_distances(where, centres)
        nearest = squared.argmin(axis=1)
        own = np.sqrt(squared[np.arange(len(where)), nearest])
        squared[cells[nearest][:, None] == cells] = np.inf
        wall = (np.sqrt(squared.min(axis=1)) - own) / 2  # distance to the next cell, roughly
        wall, own, nearest = wall.reshape(size), own.reshape(size), near[nearest.reshape(size)]
        grey = self.grey[nearest] + MOTTLE * mottle
        dark = self.organelle[nearest] * _ramp(ORGANELLE_RADIUS - own) * _ramp(wall - 4)
        grey += dark * (ORGANELLE_GREY - grey)
        grey += np.exp(-np.square(wall / MEMBRANE_WIDTH)) * (MEMBRANE_GREY - grey)
        return grey, self.cell[nearest]

    def _bent(self, lo: Vec3, size: Vec3) -> Floats:
        """Return the positions (voxels, 3) of the voxels from `lo` on, displaced by the waves."""
        grid = np.indices(size, np.float32).reshape(3, -1).T + np.array(lo, np.float32)
        bent = grid.copy()
        for axis in range(3):
            bent[:, axis] += WOBBLE * np.sin(grid @ self.waves[axis].T + self.phases[axis]).sum(axis=1)
        return bent

    def _near(self, lo: Floats, hi: Floats) -> npt.NDArray[np.intp]:
        """Return the centres that can be nearest, or nearest of another cell, anywhere between `lo` and `hi`."""
        least = np.square(np.maximum(0, np.maximum(lo - self.centres, self.centres - hi))).sum(axis=1)
        most = np.square(np.maximum(np.abs(self.centres - lo), np.abs(self.centres - hi))).sum(axis=1)
        other = self.cell != self.cell[most.argmin()]
        return np.flatnonzero(least <= most[other].min())


def _squared_distances(where: Floats, centres: Floats) -> Floats:
    """Return (voxels, centres) for float32 positions; their middle is subtracted, so that little cancels."""
    middle = centres.mean(axis=0)
    a, b = where - middle, centres - middle
    squared: Floats = np.square(a).sum(axis=1)[:, None] + np.square(b).sum(axis=1) - 2 * (a @ b.T)
    return np.maximum(squared, 0, out=squared)


def _ramp(x: Floats) -> Floats:
    """Return 0 below -1, 1 above 1, and a straight line between."""
    ramp: Floats = np.clip((x + 1) / 2, 0, 1)
    return ramp


def _mottle(z: int, size: Vec3, seed: int) -> Floats:
    """Return smooth noise for the planes from `z` on: normal values on a lattice of MOTTLE_STEP, interpolated."""
    lattice = [int(n / MOTTLE_STEP) + 2 for n in size[1:]]
    planes: list[Floats] = []
    for at in range(z, z + size[0]):
        low, share = divmod(at / MOTTLE_STEP, 1.0)
        before, after = (_normal((seed, SALT_MOTTLE, int(low) + i + 1), lattice) for i in (0, 1))
        plane = np.float32(1 - share) * before + np.float32(share) * after
        planes.append(_between(_between(plane, size[1], 0), size[2], 1))
    return np.stack(planes)


def _between(values: Floats, size: int, axis: int) -> Floats:
    """Interpolate lattice values linearly to `size` voxels along one axis."""
    at = np.arange(size, dtype=np.float32) / np.float32(MOTTLE_STEP)
    low = at.astype(np.intp)
    share = np.expand_dims(at - low, 1 - axis)
    between: Floats = values.take(low, axis) * (1 - share) + values.take(low + 1, axis) * share
    return between


def _normal(key: tuple[int, ...], size: Sequence[int]) -> Floats:
    """Return normal noise that depends on `key` alone."""
    return np.random.default_rng(key).standard_normal(tuple(size), np.float32)


def _blur(x: Floats, axis: int) -> Floats:
    """Blur with weights 1/4, 1/2, 1/4 along one axis; one voxel is lost on each side."""
    middle, before, after = (_along(axis, *ends) for ends in ((1, -1), (0, -2), (2, None)))
    blurred: Floats = 0.5 * x[middle] + 0.25 * (x[before] + x[after])
    return blurred


def _along(axis: int, lo: int, hi: int | None) -> tuple[slice, ...]:
    """Return an index that cuts one axis of three."""
    return tuple(slice(lo, hi) if a == axis else slice(None) for a in range(3))


def _membranes(cell: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Mark voxels with a 6-neighbour in another cell; one voxel is lost on each side."""
    inner = cell[1:-1, 1:-1, 1:-1]
    found = np.zeros(inner.shape, np.bool_)
    for axis in range(3):
        for lo, hi in ((0, -2), (2, None)):
            moved = tuple(slice(lo, hi) if a == axis else slice(1, -1) for a in range(3))
            found |= cell[moved] != inner
    return found


def roc_auc(truth: npt.NDArray[np.bool_], score: npt.NDArray[np.float32]) -> float:
    """Return the area under the ROC curve: the chance that a random true voxel outscores a false one, ties half.

    Both have one shape. The result is 0.5 if there is only one class. Scores are binned to 1/65536 of their range.
    """
    low, high = float(score.min()), float(score.max())
    bins = ((score - low) * (65535 / (high - low) if high > low else 0)).astype(np.int64)
    true = np.bincount(bins[truth], minlength=65536).astype(np.float64)
    false = np.bincount(bins[~truth], minlength=65536).astype(np.float64)
    pairs = true.sum() * false.sum()
    if not pairs:
        return 0.5
    below = np.cumsum(false) - false / 2
    return float((true * below).sum() / pairs)


def draw(raw: Greys, prediction: Floats, truth: Greys) -> Image.Image:
    """Draw one slice, raw | prediction | truth: (y, x) arrays of one shape, uint8, 0..1, and 0 or 1."""
    from PIL import Image

    scale = max(1, PICTURE_WIDTH // (3 * raw.shape[1]))
    panels = (raw, np.rint(255 * np.clip(prediction, 0, 1)).astype(np.uint8), 255 * truth)
    gap = np.full((raw.shape[0] * scale, PICTURE_GAP), 255, np.uint8)
    row: list[Greys] = []
    for panel in panels:
        row += [panel.repeat(scale, axis=0).repeat(scale, axis=1), gap]
    return Image.fromarray(np.concatenate(row[:-1], axis=1))
