"""A mask: the output is the unmasked one where the mask is not zero, byte for byte, and zero elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest

from tests.cli.test_graph_infer import UNET, graph
from tests.cli.test_several_outputs import OUTPUTS, deep, stored
from tests.support.cli import Place
from znnpy.errors import OutputError, ResumeError, VerifyError, VolumeError
from znnpy.inference import infer
from znnpy.layers import Conv
from znnpy.network import Network
from znnpy.planner.run_plan import RunPlan
from znnpy.planning import plan
from znnpy.report.run_report import Report
from znnpy.run import pipeline
from znnpy.verify import verify

SIZE = (96, 23, 25)
Array = npt.NDArray[Any]
COVERS = [("columns", (2, 8, 10)), ("columns", (6, 8, 10)), ("patches", (8, 8, 10))]


@pytest.fixture(autouse=True)
def _long(place: Place) -> None:
    place.write_volume(np.random.default_rng(7).integers(0, 256, SIZE, np.uint8))


def ball(size: tuple[int, ...], radius: float = 0.4) -> Array:
    axes = np.meshgrid(*((np.arange(n) + 0.5) / n - 0.5 for n in size), indexing="ij")
    return np.asarray(sum(axis**2 for axis in axes) <= radius**2, np.uint8)


def ends(size: tuple[int, ...]) -> Array:
    """Return a mask of a few planes at both ends, one of them in a corner alone."""
    mask = np.zeros(size, np.int16)
    mask[8:14, 9:12] = -1
    mask[-12:-9, 8:10, 8:10] = 300
    return mask


def single(size: tuple[int, ...]) -> Array:
    mask = np.zeros(size, np.float32)
    mask[size[0] // 2, size[1] // 2, size[2] // 2] = 1e-9
    return mask


MASKS: list[Callable[[tuple[int, ...]], Array]] = [ball, ends, single]


def write_mask(place: Place, mask: Array, **attributes: Any) -> Path:
    path = place.folder / "mask.h5"
    with h5py.File(path, "w") as file:
        file["mask"] = mask
        file["mask"].attrs.update(attributes)
    return path


def planned(place: Place, cover: Any = "columns", patch: tuple[int, int, int] = (2, 8, 10), **more: Any) -> RunPlan:
    return plan(
        place.folder / "net.yaml", volume=place.volume, cover=cover, patch=patch, threads=2, calibrate=False, **more
    )


def run(place: Place, made: RunPlan, name: str = "out.h5", **more: Any) -> tuple[Report, Array]:
    out = place.folder / name
    report = infer(place.volume, place.folder / "net.yaml", out=out, plan=made, overwrite=True, **more)
    return report, read(out)


def read(path: Path) -> Array:
    with h5py.File(path) as file:
        return np.array(file["prediction"])


def cut(mask: Array, like: Array) -> Array:
    """Return the middle of a mask, which an output of border valid covers."""
    sizes = zip(mask.shape, like.shape[-3:], strict=True)
    z, y, x = (slice((n - m) // 2, (n - m) // 2 + m) for n, m in sizes)
    return np.asarray(mask[z, y, x] != 0)


@pytest.mark.parametrize("mask_of", MASKS)
@pytest.mark.parametrize(("cover", "patch"), COVERS)
@pytest.mark.parametrize("border", ["valid", "reflect"])
def test_output_is_the_unmasked_one_inside_and_zero_outside(
    place: Place, mask_of: Callable[..., Array], cover: str, patch: tuple[int, int, int], border: Any
) -> None:
    mask = mask_of(SIZE)
    made = planned(place, cover, patch, border=border)
    _, whole = run(place, made, border=border)
    report, masked = run(place, made, "masked.h5", border=border, mask=write_mask(place, mask))
    inside = cut(mask, whole)
    assert 0 < inside.sum() < inside.size
    assert (masked.view(np.uint32) == np.where(inside, whole, 0).astype(np.float32).view(np.uint32)).all()
    assert report.skipped > 0
    assert report.computed == report.voxels


@pytest.mark.parametrize("patch", [(4, 16, 16), (12, 16, 16)])
def test_rounding_in_transforms_is_that_of_the_whole_column(
    tmp_path: Path, tiny_network: Callable[..., Network], patch: tuple[int, int, int]
) -> None:
    """Planes that are computed together round together: parts of columns begin early enough to have the same ones."""
    place = Place.furnish(tmp_path, tiny_network(*[Conv((5, 3, 3), 4, "none")] * 3))
    place.write_volume(np.random.default_rng(7).integers(0, 256, (200, 23, 25), np.uint8))
    mask = np.zeros((200, 23, 25), np.uint8)
    mask[[8, *range(102, 117), 190]] = 1  # from the first output of a step on
    made = planned(place, patch=patch, only="cpu.conv.fft_data")
    assert {choice.primitive for choice in made.choices} == {"cpu.conv.fft_data"}
    _, whole = run(place, made)
    report, masked = run(place, made, "masked.h5", mask=write_mask(place, mask))
    np.testing.assert_array_equal(masked, np.where(cut(mask, whole), whole, 0))
    assert report.skipped > 0.1 * report.voxels


@pytest.mark.parametrize("output_dtype", ["float16", "uint8"])
def test_other_types_are_zero_outside_too(place: Place, output_dtype: Any) -> None:
    mask = ball(SIZE)
    made = planned(place, output_dtype=output_dtype)
    _, whole = run(place, made, output_dtype=output_dtype)
    _, masked = run(place, made, "masked.h5", output_dtype=output_dtype, mask=write_mask(place, mask))
    np.testing.assert_array_equal(masked, np.where(cut(mask, whole), whole, 0))


def test_region_takes_its_part_of_the_mask(place: Place) -> None:
    mask, roi = ends(SIZE), "5:60,2:,:24"
    made = planned(place, roi=roi)
    _, whole = run(place, made, roi=roi)
    _, masked = run(place, made, "masked.h5", roi=roi, mask=write_mask(place, mask))
    inside = cut(mask[5:60, 2:, :24], whole)
    assert inside.any()
    np.testing.assert_array_equal(masked, np.where(inside, whole, 0))


@pytest.mark.parametrize("factor", [(2, 1, 1), (4, 23, 5)])
def test_mask_of_lower_resolution(place: Place, factor: tuple[int, int, int]) -> None:
    small = tuple(-(-n // f) for n, f in zip(SIZE, factor, strict=True))
    mask = np.random.default_rng(1).random(small) < 0.1
    full = mask.repeat(factor[0], 0).repeat(factor[1], 1).repeat(factor[2], 2)[: SIZE[0], : SIZE[1], : SIZE[2]]
    made = planned(place)
    _, whole = run(place, made)
    report, masked = run(place, made, "masked.h5", mask=write_mask(place, mask.astype(np.uint8)))
    np.testing.assert_array_equal(masked, np.where(cut(full, whole), whole, 0))
    assert "voxels for 96x23x25" in report.mask


def test_mask_of_higher_resolution_counts_the_voxel_in_the_middle(place: Place) -> None:
    mask = np.random.default_rng(1).random([2 * n for n in SIZE]) < 0.4
    made = planned(place)
    _, whole = run(place, made)
    _, masked = run(place, made, "masked.h5", mask=write_mask(place, mask.astype(np.uint8)))
    np.testing.assert_array_equal(masked, np.where(cut(mask[1::2, 1::2, 1::2], whole), whole, 0))


def test_positions_of_volume_and_mask_are_compared_in_their_units(place: Place) -> None:
    """The mask begins 0.05 um behind the volume, has voxels twice as large, and ends before it."""
    with h5py.File(place.volume, "r+") as file:
        file["raw"].attrs.update(resolution=[10.0, 10.0, 10.0], translation=[100.0, 0.0, 0.0], units="nm,nm,nm")
    small = np.ones((20, 12, 13), np.uint8)
    small[3:6] = 0
    path = write_mask(
        place, small, resolution=[0.02] * 3, translation=[0.15, 0.0, 0.0], units="micrometer,micrometer,micrometer"
    )
    nearest = np.floor((np.arange(SIZE[0]) - 5) / 2 + 0.5).astype(int)  # of two that are as near, the later one
    along = np.array([0 <= at < 20 and not 3 <= at < 6 for at in nearest])
    rows, columns = (np.floor(np.arange(n) / 2 + 0.5) < m for n, m in ((23, 12), (25, 13)))
    full = along[:, None, None] & rows[:, None] & columns
    made = planned(place)
    _, whole = run(place, made)
    report, masked = run(place, made, "masked.h5", mask=path)
    np.testing.assert_array_equal(masked, np.where(cut(full, whole), whole, 0))
    assert "by physical position" in report.mask


def test_several_outputs_are_masked_by_their_own_lattices(place: Place) -> None:
    place.write_volume(np.random.default_rng(7).integers(0, 256, (20, 23, 25), np.uint8))
    deep(place)
    mask = np.zeros((20, 23, 25), np.uint8)
    mask[6:9, 4:, 3:20] = 1
    made = planned(place, patch=(2, 24, 26))
    results = {}
    for name, given_mask in (("whole.h5", None), ("masked.h5", write_mask(place, mask))):
        out = place.folder / name
        infer(place.volume, place.folder / "net.yaml", out=out, plan=made, mask=given_mask)
        results[name] = stored(out)
    whole, masked = results["whole.h5"], results["masked.h5"]
    with h5py.File(place.folder / "masked.h5") as file:
        for name in whole:
            given = file["outputs"][name].attrs
            places = []
            for axis in range(3):
                at = given["voxel_position"][axis] + given["voxel_step"][axis] * np.arange(whole[name].shape[1 + axis])
                places.append(np.floor(at + 0.5 + 1e-6).astype(int).clip(0, mask.shape[axis] - 1))
            inside = mask[np.ix_(*places)] != 0
            assert 0 < inside.sum() < inside.size
            np.testing.assert_array_equal(masked[name], np.where(inside, whole[name], 0), err_msg=name)
    assert len(whole) == len(OUTPUTS)


def test_columns_of_a_graph_begin_in_their_midst(place: Place) -> None:
    graph(place, UNET)
    mask = np.zeros(SIZE, np.uint8)
    mask[70:73, 3:] = 1
    mask[4] = 1
    made = planned(place, patch=(2, 24, 26))
    _, whole = run(place, made)
    report, masked = run(place, made, "masked.h5", mask=write_mask(place, mask))
    np.testing.assert_array_equal(masked, np.where(mask != 0, whole, 0))
    assert report.skipped > 0.7 * report.voxels


def test_nan_outside_the_mask_is_zero(place: Place) -> None:
    voxels = np.random.default_rng(7).random(SIZE, np.float32) * 255
    voxels[::7, ::5, ::5] = np.nan
    place.write_volume(voxels)
    mask = ball(SIZE)
    made = planned(place)
    _, whole = run(place, made, allow_nan=True)
    _, masked = run(place, made, "masked.h5", allow_nan=True, mask=write_mask(place, mask))
    inside = cut(mask, whole)
    assert np.isnan(whole).any()
    np.testing.assert_array_equal(masked, np.where(inside, whole, 0))


@pytest.mark.parametrize(("cover", "patch"), COVERS)
def test_nothing_is_computed_for_an_empty_mask(place: Place, cover: str, patch: tuple[int, int, int]) -> None:
    empty = write_mask(place, np.zeros(SIZE, np.uint8))
    report, masked = run(place, planned(place, cover, patch), mask=empty)
    assert not masked.any()
    assert report.skipped == report.voxels
    assert any("selects nothing of the output" in warning for warning in report.warnings)


def test_report_says_what_was_left_out(place: Place) -> None:
    path = write_mask(place, ends(SIZE))
    result = place.infer("--mask", path, "--patch", "2,8,10", "--cover", "columns")
    assert result.exit_code == 0
    line = next(line for line in result.stdout.splitlines() if line.startswith("mask "))
    assert "% of the output lies outside the mask and was not computed" in line
    assert str(path) in line
    as_json = json.loads(place.infer("--mask", path, "--patch", "2,8,10", "--overwrite", "--json").stdout)
    assert 0 < as_json["skipped"] < as_json["voxels"]


def test_plan_predicts_what_a_mask_leaves(place: Place) -> None:
    path = write_mask(place, ends(SIZE))
    whole, masked = planned(place, "patches", (8, 8, 10)), planned(place, "patches", (8, 8, 10), mask=path)
    assert masked.inside == pytest.approx(1 - run(place, whole, mask=path)[0].skipped / np.prod(whole.output), abs=0.2)
    preparing = whole.main.preparing_seconds
    assert masked.seconds == pytest.approx(preparing + masked.inside * (whole.seconds - preparing))
    text = place.run(
        "plan", place.folder / "net.yaml", "--volume", place.volume, "--mask", path, "--patch", "8,8,10"
    ).stdout
    assert "the mask leaves out" in text
    assert RunPlan.from_json(masked.to_json()).inside == masked.inside


def test_interrupted_run_goes_on_to_the_same_bytes(place: Place) -> None:
    """Left-out steps of unfinished columns are written again, and those of finished ones are not."""
    path = write_mask(place, ball(SIZE))
    made = planned(place, patch=(2, 4, 4))
    _, whole = run(place, made, "whole.h5", mask=path)

    class Interrupted(Exception):
        pass

    def stop(event: pipeline.Event) -> None:
        if event.columns_done >= event.columns // 2:
            raise Interrupted

    again: dict[str, Any] = {"out": place.out, "plan": made}
    with pytest.raises(Interrupted):
        infer(place.volume, place.folder / "net.yaml", mask=path, progress=stop, **again)
    with pytest.raises(ResumeError, match=r"mask.blocks_sha256 was .* and is not given now"):
        infer(place.volume, place.folder / "net.yaml", resume=True, **again)
    report = infer(place.volume, place.folder / "net.yaml", mask=path, resume=True, **again)
    assert 0 < report.computed < report.voxels
    np.testing.assert_array_equal(read(place.out), whole)
    write_mask(place, ends(SIZE))
    with pytest.raises(ResumeError, match="belongs to another job: mask"):
        infer(place.volume, place.folder / "net.yaml", mask=path, resume=True, **again)


def test_verify_needs_the_mask_and_checks_both_sides(place: Place) -> None:
    path, network = write_mask(place, ball(SIZE)), place.folder / "net.yaml"
    run(place, planned(place), mask=path)
    report = verify(place.out, place.volume, network=network, mask=path)
    assert report.samples == 1000
    with pytest.raises(VerifyError, match=r"was predicted with a mask of 96x23x25 voxels, .* give it as `mask`"):
        verify(place.out, place.volume, network=network)
    with h5py.File(place.out, "r+") as file:
        kept = file["prediction"][:]
        file["prediction"][:, :20] = 1e-9
    with pytest.raises(VerifyError, match=r"0.00000000 by definition"):
        verify(place.out, place.volume, network=network, mask=path, samples=200)
    with h5py.File(place.out, "r+") as file:
        file["prediction"][...] = kept
        file["prediction"][:, 40:50] = 0
    with pytest.raises(VerifyError, match="voxels are wrong"):
        verify(place.out, place.volume, network=network, mask=path, samples=200)
    other = write_mask(place, ends(SIZE))
    with pytest.raises(VerifyError, match=r"is not the mask .* was predicted with"):
        verify(place.out, place.volume, network=network, mask=other)
    run(place, planned(place))
    with pytest.raises(VerifyError, match="was predicted without a mask; leave out `mask`"):
        verify(place.out, place.volume, network=network, mask=other)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (np.ones((96, 23, 24), np.uint8), "has 24 voxels along x and the volume 25"),
        (np.ones((2, 96, 23, 25), np.uint8), "has 2 channels, and a mask has one"),
        (np.ones((7, 9), np.uint8), "2 axes"),
    ],
)
def test_masks_that_do_not_fit_are_errors(place: Place, mask: Array, said: str) -> None:
    path = write_mask(place, mask)
    with pytest.raises(VolumeError, match=said):
        infer(place.volume, place.folder / "net.yaml", mask=path)
    assert said in place.refusal(*place.arguments, "--mask", path)


def test_mask_without_a_volume_is_an_error(place: Place) -> None:
    with pytest.raises(ValueError, match="a mask lies on a volume: give `volume` too"):
        plan(place.folder / "net.yaml", shape=SIZE, mask=ball(SIZE))


def test_mask_is_never_replaced_by_the_output(place: Place) -> None:
    path = write_mask(place, ball(SIZE))
    with pytest.raises(OutputError, match="mask"):
        infer(place.volume, place.folder / "net.yaml", mask=path, out=path, overwrite=True)


def test_mask_may_be_an_array(place: Place) -> None:
    mask, made = ball(SIZE), planned(place)
    _, given = run(place, made, mask=mask)
    _, stored_one = run(place, made, "masked.h5", mask=write_mask(place, mask))
    np.testing.assert_array_equal(given, stored_one)


def test_paranoid_run_checks_what_is_computed(place: Place) -> None:
    report, _ = run(place, planned(place), mask=write_mask(place, ball(SIZE)), paranoid=True)
    assert report.skipped
