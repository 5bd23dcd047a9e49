"""Work items cover an output, each voxel once, and are regions of the volume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.test_graph_infer import COARSE, FINE, graph
from tests.cli.test_several_outputs import DEEP, deep
from tests.support import normed_unet
from tests.support.cli import Place
from znnpy.cluster import preparing
from znnpy.cluster.items import ItemGrid, divided, unit_of
from znnpy.cluster.job import JobRecord
from znnpy.errors import NoPlanError, ShapeError
from znnpy.opened_run import OpenedRun, named_run, opened_run
from znnpy.options import InferOptions
from znnpy.shapes import Vec3
from znnpy.volume import store


@pytest.fixture(autouse=True)
def _chunks_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "CHUNK", 4)


def check(asked: InferOptions, size: Vec3, *, is_fixed: bool = False) -> int:
    """Check that items are the outputs of their regions, and cover all outputs once; return their number."""
    named = named_run(asked)
    with opened_run(named) as whole:
        grid = ItemGrid.of(whole, size)
        grid.check(is_fixed=is_fixed)
        covered = [np.zeros(one.size, np.uint8) for one in whole.source.outputs]
        for index in range(len(grid)):
            region = grid.region_of(index)
            roi = ",".join(f"{lo}:{hi}" for lo, hi in zip(region.lo, region.hi, strict=True))
            with opened_run(replace(named, asked=replace(asked, roi=roi), inputs={})) as part:
                pieces = grid[index].steps[0].pieces
                for piece, one, all_of, seen in zip(
                    pieces, part.source.outputs, whole.source.outputs, covered, strict=True
                ):
                    assert piece.write.size == one.size
                    at = [
                        (here - first) / step
                        for here, first, step in zip(one.position, all_of.position, all_of.step, strict=True)
                    ]
                    assert tuple(at) == piece.write.lo or not piece.write.voxels
                    seen[piece.write.slices] += 1
        assert all((seen == 1).all() for seen in covered)
        return len(grid)


def asked_for(place: Place, **more: Any) -> InferOptions:
    return InferOptions(str(place.volume), str(place.folder / "net.yaml"), out=str(place.folder / "out.zarr"), **more)


@pytest.mark.parametrize("border", ["valid", "reflect"])
@pytest.mark.parametrize("roi", [None, "2:19,3:23,4:21"])
def test_a_network_that_slides(place: Place, border: Any, roi: str | None) -> None:
    assert check(asked_for(place, border=border, roi=roi), (5, 7, 6)) > 8


@pytest.mark.parametrize("roi", [None, "3:19,2:20,5:25"])
@pytest.mark.parametrize("layers", [None, COARSE, FINE], ids=["same", "coarse", "fine"])
def test_a_network_that_is_computed_whole(place: Place, layers: Any, roi: str | None) -> None:
    graph(place, *(() if layers is None else (layers,)))
    assert check(asked_for(place, roi=roi), (4, 6, 8)) > 3


def test_outputs_of_several_sizes(place: Place) -> None:
    deep(place)
    assert check(asked_for(place), (8, 8, 13)) == 18


def test_windows(tmp_path: Path) -> None:
    normed_unet.written(tmp_path)
    asked = InferOptions(
        str(tmp_path / "volume.npy"), str(tmp_path / "net.yaml"), out=str(tmp_path / "out.h5"), window=(8, 8, 12)
    )
    assert check(asked, (8, 12, 16), is_fixed=True) == 12


def test_items_that_cut_chunks_are_refused(place: Place) -> None:
    with pytest.raises(ShapeError, match=r"work items of 5x4x4 voxels would cut chunks of the output, which are 4x"):
        check(asked_for(place), (5, 4, 4), is_fixed=True)


def test_chunks_of_items_are_not_tiny(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "CHUNK", 8)
    with pytest.raises(ShapeError, match=r"work items of 17 voxels along an axis can only have chunks of 1, which"):
        check(asked_for(place, border="reflect"), (17, 8, 8))
    with pytest.raises(ShapeError, match=r"work items of 0x8x8 voxels hold nothing"):
        check(asked_for(place, border="reflect"), (0, 8, 8))


def test_voxels_finer_than_the_volume_are_not_parted(place: Place) -> None:
    graph(place, FINE)
    with pytest.raises(ShapeError, match="work items of 4x5x8 voxels are no regions of the volume"):
        check(asked_for(place), (4, 5, 8))


def test_chunks_of_further_outputs_are_not_cut(place: Place) -> None:
    deep(place)
    with pytest.raises(ShapeError, match="would cut chunks of another output of the network, of 4 voxels"):
        check(asked_for(place), (4, 4, 4), is_fixed=True)


def test_items_are_as_large_as_their_number_allows(place: Place) -> None:
    with opened_run(named_run(asked_for(place, border="reflect"))) as run:
        output, unit = run.source.output, unit_of(run, is_fixed=False)
    assert (output, unit) == ((20, 23, 25), (4, 4, 4))
    assert divided(output, unit, 1) == (20, 24, 28)
    assert divided(output, unit, 2) == (20, 24, 16)
    assert divided(output, unit, 8) == (12, 12, 16)
    assert divided(output, unit, 10**6) == (4, 4, 4)
    assert divided((384, 384, 384), (64, 64, 64), 8) == (192, 192, 192)
    assert divided((10, 10**6, 10), (64, 64, 64), 1000) == (64, 960, 64)


@dataclass
class Timed:
    """A plan of an item that takes so long."""

    seconds: float
    inside: float = 1.0


@pytest.mark.parametrize(
    ("workers", "seconds", "count"),
    [
        (2, lambda n: 1000 / n, 18),  # without borders, until they are short
        (2, lambda n: 20000 / n + 2.0 * n, 60),  # larger ones take too long, smaller ones compute more of their borders
        (2, lambda n: 4000 / n + 10.0 * n, 8),
        (4, lambda n: 1e9, 210),  # one chunk each is the least there is
        (1, lambda n: 100 / n, 4),
    ],
)
def test_items_let_the_job_end_soonest(
    place: Place, monkeypatch: pytest.MonkeyPatch, workers: int, seconds: Callable[[int], float], count: int
) -> None:
    asked = []

    def planned(run: OpenedRun, grid: ItemGrid, index: int) -> Any:
        assert index == len(grid) // 2
        asked.append(len(grid))
        return Timed(seconds(len(grid)))

    monkeypatch.setattr(preparing, "_plan_of_item", planned)
    with opened_run(named_run(asked_for(place, border="reflect"))) as run:
        grid, plan = preparing._divided(run, workers, is_fixed=False)
    assert len(grid) == count
    assert plan.seconds == seconds(count)
    assert len(asked) <= preparing.MOST_SIZES


def test_items_hold_whole_chunks_of_all_outputs(place: Place) -> None:
    """In a format whose chunks are as they are; the second output has half the resolution."""
    graph(place, DEEP[:-1], output=["last", "half"])
    asked = replace(asked_for(place), out=str(place.folder / "several.h5"))
    with opened_run(named_run(asked)) as run:
        assert unit_of(run, is_fixed=False) == (4, 4, 4)
        assert unit_of(run, is_fixed=True) == (8, 8, 8)
        for least in range(1, 40):
            ItemGrid.of(run, divided(run.source.output, (8, 8, 8), least)).check(is_fixed=True)
    job = preparing.prepare(asked)
    assert all(size % 8 == 0 for size in JobRecord.load(job).size)


def test_a_mask_changes_neither_items_nor_what_borders_cost(place: Place) -> None:
    """The middle item may lie outside of it, and would take no time."""
    mask = np.zeros((20, 23, 25), np.uint8)
    mask[:4, :4, :4] = 1
    np.save(place.folder / "mask.npy", mask)
    asked = replace(asked_for(place, border="reflect"), items=(8, 8, 8), patch=(4, 4, 4))
    plain = JobRecord.load(preparing.prepare(asked))
    masked = replace(asked, mask=str(place.folder / "mask.npy"), overwrite=True)
    with opened_run(named_run(masked)) as run:
        grid, plan = preparing._divided(run, 2, is_fixed=False)
        assert plan.seconds < preparing._unmasked(plan)
        assert plain.lost is not None
        assert preparing._lost(run, grid, plan) == pytest.approx(plain.lost, rel=0.01)


def test_a_job_whose_whole_output_has_no_plan_is_prepared(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    found = preparing._plan_of_item

    def planned(run: OpenedRun, grid: ItemGrid, index: int) -> Any:
        if len(grid) == 1:
            raise NoPlanError("there are too many patches")
        return found(run, grid, index)

    monkeypatch.setattr(preparing, "_plan_of_item", planned)
    assert JobRecord.load(preparing.prepare(asked_for(place, border="reflect"))).lost is None


def test_a_smaller_size_that_is_refused_is_left_out(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(run: OpenedRun, grid: ItemGrid, index: int) -> Any:
        if len(grid) > 8:
            raise NoPlanError("it has no plan")
        return Timed(500.0)

    monkeypatch.setattr(preparing, "_plan_of_item", planned)
    with opened_run(named_run(asked_for(place, border="reflect"))) as run:
        assert len(preparing._divided(run, 2, is_fixed=False)[0]) == 8
        with pytest.raises(NoPlanError, match="it has no plan"):
            preparing._divided(run, 3, is_fixed=False)
