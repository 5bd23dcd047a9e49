"""Masks where a GPU, here an emulator, computes alone, with offloaded layers, or side by side with the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.api.test_side_by_side import go, nearly_as_slow_as_the_cpu
from tests.cli.test_mask import ball, cut, ends, write_mask
from tests.support.cli import Place
from tests.support.emulated_gpus import EmulatedGpus
from tests.support.emulator import needs_compiler
from znnpy.verify import TOLERANCES

pytestmark = [pytest.mark.slow, needs_compiler]

SIZE = (48, 23, 25)


@pytest.fixture(autouse=True)
def _emulated(emulated_gpus: EmulatedGpus, place: Place) -> None:
    emulated_gpus.use(count=2, rates=nearly_as_slow_as_the_cpu)
    place.write_volume(np.random.default_rng(7).integers(0, 256, SIZE, np.uint8))


@pytest.mark.parametrize(
    "arguments",
    [
        {"mode": "gpu", "cover": "columns", "patch": (2, 8, 10)},
        {"mode": "gpu", "cover": "patches", "patch": (8, 8, 10), "gpus": 2},
        {"mode": "gpu-host", "patch": (4, 8, 10)},
        {"mode": "cpu-to-gpu", "cover": "columns", "patch": (2, 8, 10)},
    ],
    ids=lambda arguments: f"{arguments['mode']}, {arguments.get('cover', 'any')}",
)
def test_output_of_a_gpu_is_the_unmasked_one_inside(place: Place, arguments: dict[str, Any]) -> None:
    mask = ends(SIZE)
    made = go(place, **arguments).plan
    whole = place.prediction()
    again: dict[str, Any] = {"plan": made, "mode": "auto", "threads": None, "precision": None}
    report = go(place, **again, gpus=arguments.get("gpus"), mask=write_mask(place, mask))
    np.testing.assert_array_equal(place.prediction(), np.where(cut(mask, whole), whole, 0))
    assert report.skipped > 0.2 * report.voxels
    assert report.plan.mode == arguments["mode"]
    empty = go(place, **again, gpus=arguments.get("gpus"), mask=write_mask(place, np.zeros(SIZE, np.uint8)))
    assert empty.skipped == empty.voxels
    assert not place.prediction().any()


@pytest.mark.parametrize("mask_of", [ball, ends])
def test_cells_outside_are_left_out_side_by_side(place: Place, mask_of: Any) -> None:
    mask = mask_of(SIZE)
    made = go(place, patch=(2, 4, 4)).plan
    whole = place.prediction()
    again: dict[str, Any] = {"plan": made, "mode": "auto", "threads": None, "precision": None}
    report = go(place, **again, mask=write_mask(place, mask))
    masked, inside = place.prediction(), cut(mask, whole)
    assert report.plan.mode == "side-by-side"
    assert np.abs(masked - np.where(inside, whole, 0)).max() <= TOLERANCES["fp32"]
    assert not masked[:, ~inside].any()
    assert report.skipped > 0
    assert report.plan.inside < 1
    empty = go(place, **again, mask=write_mask(place, np.zeros(SIZE, np.uint8)))
    assert empty.skipped == empty.voxels
