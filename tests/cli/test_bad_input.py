"""Bad input: exit 1, one sentence with the numbers and what to do, and no file in the folder changes."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from itertools import count
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from filelock import FileLock
from place import Place

from znnpy.patches import Box
from znnpy.volume.store import Hdf5Store

GREY = np.zeros((20, 23, 25), np.uint8)


# --- the volume ---


def test_missing_file(place: Place) -> None:
    assert (
        place.refusal("infer", place.folder / "gone.h5")
        == f"there is no file {place.folder / 'gone.h5'}; check the path"
    )


def test_not_hdf5(place: Place) -> None:
    other = place.folder / "picture.h5"
    other.write_bytes(b"GIF89a, surely")
    assert "picture.h5 is not an HDF5 file (14 bytes without its signature)" in place.refusal("infer", other)


def test_folder_for_a_volume(place: Place) -> None:
    assert "is a folder, not an HDF5 file" in place.refusal("infer", place.folder)


def test_several_datasets_and_none_named(place: Place) -> None:
    place.write_volume(GREY, second=GREY)
    sentence = place.refusal(*place.words)
    assert "holds 2 datasets that could be the volume: raw (20x23x25 uint8), second (20x23x25 uint8)" in sentence
    assert "name one with --dataset" in sentence
    assert "has no dataset 'third'; it holds raw (20x23x25 uint8), second" in place.refusal(
        *place.words, "--dataset", "third"
    )
    assert place.infer("--dataset", "second").exit_code == 0


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((20, 23), np.uint8), "2 axes (20, 23)"),
        (np.zeros((1, 1, 20, 23, 25), np.uint8), "5 axes (1, 1, 20, 23, 25)"),
        (np.zeros((20, 23, 25), np.bool_), "holds bool voxels"),
        (np.zeros((20, 23, 25), np.complex64), "holds complex (complex64) voxels"),
    ],
    ids=["2D", "5D", "bool", "complex"],
)
def test_dataset_that_is_no_volume(place: Place, array: np.ndarray[Any, Any], said: str) -> None:
    place.write_volume(array)
    assert said in place.refusal(*place.words, "--dataset", "raw")


def test_big_endian_works(place: Place) -> None:
    assert place.infer().exit_code == 0
    expected = place.prediction()
    with h5py.File(place.volume) as file:
        grey = file["raw"][()]
    place.write_volume(grey.astype(">u2"))
    assert place.infer("--overwrite").exit_code == 0
    np.testing.assert_array_equal(place.prediction(), expected)


def test_volume_smaller_than_the_field_of_view(place: Place) -> None:
    place.write_volume(GREY[:5])
    sentence = place.refusal(*place.words)
    assert "smaller than the field of view along z: 5x23x25 against 6x8x7; give at least 1 more" in sentence


def test_other_number_of_channels(place: Place) -> None:
    place.write_volume(np.zeros((2, 20, 23, 25), np.uint8))
    assert "2 channels" in place.refusal(*place.words)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_not_finite(place: Place, bad: float) -> None:
    grey = GREY.astype(np.float32)
    grey[9, 11, 13] = grey[9, 11, 14] = bad
    place.write_volume(grey)
    result = place.infer()
    assert result.exit_code == 1
    assert "2 voxels are NaN or infinite" in result.stderr
    assert "the first at (9, 11, 13)" in result.stderr
    assert "--allow-nan" in result.stderr
    assert not place.out.exists()
    assert place.infer("--allow-nan", "--overwrite").exit_code == 0
    seen = np.isnan(place.prediction()).all(axis=0)
    assert seen.sum() == 6 * 8 * 8  # the field of view, and one more along x
    assert seen[9 - 5 : 9 + 1, 11 - 7 : 11 + 1, 13 - 6 : 14 + 1].all()


def test_nan_has_no_place_in_uint8(place: Place) -> None:
    assert "uint8 has no NaN" in place.refusal(*place.words, "--allow-nan", "--output-dtype", "uint8")


def test_locked_by_another_program(place: Place) -> None:
    code = f"import h5py; file = h5py.File({str(place.volume)!r}, 'r+'); print('open', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        sentence = place.refusal(*place.words)
        other.communicate("\n")
    assert "is locked: another program has it open for writing" in sentence


def test_missing_filter_plugin(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(place.volume, "w") as file:
        file.create_dataset("raw", data=GREY, chunks=True, compression="lzf")
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda code: False)
    sentence = place.refusal(*place.words)
    assert "HDF5 filter 32000 (lzf), which is not installed here" in sentence
    assert "hdf5plugin" in sentence


def test_roi_outside_the_volume(place: Place) -> None:
    sentence = place.refusal(*place.words, "--roi", "0:20,0:23,0:26")
    assert "outside the volume along x: 0:26 of 0:25" in sentence


def test_roi_smaller_than_the_field_of_view(place: Place) -> None:
    sentence = place.refusal(*place.words, "--roi", "0:5,0:23,0:25")
    assert "--roi is smaller than the field of view along z: 5x23x25 against 6x8x7" in sentence


# --- network and weights ---


def test_missing_network(place: Place) -> None:
    assert "there is no network file" in place.refusal("infer", place.volume, "--network", place.folder / "met.yaml")
    assert "n337" in place.refusal("plan", "n377")


def test_missing_weights(place: Place) -> None:
    place.write_network(weights="gone.npz")
    sentence = place.refusal(*place.words)
    assert "gone.npz" in sentence
    place.write_network(weights=None)
    assert "names no weights, and none were given" in place.refusal(*place.words)


def test_weights_of_a_wrong_shape(place: Place) -> None:
    place.write_weights(conv0_weight=np.zeros((3, 1, 1, 5, 3), np.float32))
    sentence = place.refusal(*place.words)
    assert "conv0_weight" in sentence
    assert "3, 1, 1, 5, 3" in sentence
    assert "3, 1, 1, 5, 2" in sentence


def test_weights_that_are_not_numbers(place: Place) -> None:
    place.write_weights(conv1_bias=np.array([0, np.nan, 0, 0], np.float32))
    assert "conv1_bias" in place.refusal(*place.words)


def test_pickled_weights(place: Place) -> None:
    place.write_weights(conv0_bias=np.array([{"a": 1}, None, None], dtype=object))
    assert "conv0_bias" in place.refusal(*place.words)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        ({"type": "deconv", "kernel": 3, "out": 1}, "deconv"),
        ({"type": "conv", "kernel": [3, -3, 3], "out": 1}, "-3"),
        ({"type": "conv", "kernel": 3, "out": 1, "strid": 2}, "strid"),
    ],
    ids=["unknown type", "negative kernel", "unknown key"],
)
def test_layer_that_is_none(place: Place, layer: dict[str, Any], said: str) -> None:
    place.write_network(layers=[layer])
    sentence = place.refusal(*place.words)
    assert said in sentence
    assert "layer 0" in sentence or "layers[0]" in sentence


def test_values_that_overflow(place: Place) -> None:
    weights = np.full((4, 3, 3, 2, 3), 3e38, np.float32)
    place.write_weights(conv1_weight=weights)
    result = place.infer()
    assert result.exit_code == 1
    assert "layer 2" in result.stderr
    assert not place.out.exists()


# --- limits and plans ---


def test_too_little_ram(place: Place) -> None:
    place.write_small_volume()
    sentence = place.refusal(*place.words, "--ram", "1M")
    assert "bytes" in sentence or "MiB" in sentence
    assert "--ram" in sentence


def test_plan_of_another_network(place: Place) -> None:
    other = place.folder / "plan.json"
    assert place.run("plan", "--shape", "40,40,40", "--out", other).exit_code == 0
    assert "fib25_boundary" in place.refusal(*place.words, "--plan", other)


def test_plan_whose_needs_are_not_met(place: Place) -> None:
    plan = place.folder / "plan.json"
    assert place.run("plan", place.folder / "net.yaml", "--volume", place.volume, "--out", plan).exit_code == 0
    content = plan.read_text()
    plan.write_text(re.sub(r'"version": \d+', '"version": 99', content, count=1))
    assert "99" in place.refusal(*place.words, "--plan", plan)
    plan.write_text(content[:200])
    assert "plan.json: the plan is damaged or cut off: line 8" in place.refusal(*place.words, "--plan", plan)
    assert "no plan file" in place.refusal(*place.words, "--plan", place.folder / "gone.json")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("axis", 3, "the plan is damaged: axis: Input should be less than or equal to 2"),
        ("axis", "z", "the plan is damaged: axis: Input should be a valid integer"),
        ("column", -4, "the plan is damaged: column: Input should be greater than or equal to 0"),
        ("column", 5, "the plan's columns of 5 planes are no whole number of steps of 4"),
        ("column", 0, "; make it again with `znnpy plan NETWORK --out plan.json`"),
        ("axis", 1, "; make it again with `znnpy plan NETWORK --out plan.json`"),
        ("patch_in", [8, 8, 8], "the plan reads patches of 8x8x8, and 4x6x4 voxels out need 4x13x10"),
    ],
)
def test_plan_of_columns_that_was_edited(place: Place, field: str, value: object, said: str) -> None:
    path = place.folder / "plan.json"
    words = ("plan", place.folder / "net.yaml", "--shape", "60,20,20", "--cover", "columns", "--patch", "4,6,4")
    assert place.run(*words, "--out", path).exit_code == 0
    plan = json.loads(path.read_text())
    assert (plan["axis"], plan["column"]) == (0, 56)
    path.write_text(json.dumps({**plan, field: value}))
    assert said in place.refusal(*place.words, "--plan", path)


def test_columns_where_nothing_could_be_kept(place: Place) -> None:
    place.write_network(layers=[{"type": "conv", "kernel": 1, "out": 2}], weights=None)
    sentence = place.refusal("plan", place.folder / "net.yaml", "--shape", "20,20,20", "--cover", "columns")
    assert sentence == ("tiny sees one voxel along every axis, so that columns have nothing to carry; drop --cover")


def test_patch_that_is_no_step_of_a_column(place: Place) -> None:
    sentence = place.refusal(*place.words, "--cover", "columns", "--patch", "4,5,5")
    assert "an output patch must be a multiple of the pooling period 2x2x1, not 4x5x5" in sentence


def test_words_that_the_run_did_not_begin_with(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = ("--patch", "4,4,4", "--cover", "columns")
    with monkeypatch.context() as patch:
        write, calls = Hdf5Store.write, count()

        def fill_up(store: Hdf5Store, box: Box, voxels: Any) -> None:
            if next(calls) == 9:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(store, box, voxels)

        patch.setattr(Hdf5Store, "write", fill_up)
        assert place.infer(*begun).exit_code == 1
    assert place.refusal(*place.words, "--resume", "--cover", "patches") == (
        "the run began with --cover columns, and now it is patches; leave it out, or start again with --overwrite"
    )
    assert place.infer("--resume").exit_code == 0
    resumed = place.prediction()
    assert place.infer(*begun, "--overwrite").exit_code == 0
    np.testing.assert_array_equal(resumed, place.prediction())


def test_plan_that_needs_more_memory_than_there_is(place: Place) -> None:
    plan = place.folder / "plan.json"
    huge = ("--shape", "9000,9000,9000", "--patch", "8000,8000,8000", "--ram", "900T", "--out", plan)
    assert place.run("plan", place.folder / "net.yaml", *huge).exit_code == 0
    sentence = place.refusal(*place.words, "--plan", plan)
    assert sentence.startswith("the plan needs ")
    assert "bytes of RAM" in sentence
    assert "more than this process may use" in sentence


# --- the output ---


def test_output_exists(place: Place) -> None:
    place.out.write_text("precious")
    assert "exists; give --overwrite to replace it, or another --out" in place.refusal(*place.words)
    assert "was not written by znnpy" in place.refusal(*place.words, "--resume")
    assert place.infer("--overwrite").exit_code == 0


def test_output_is_the_volume(place: Place) -> None:
    words = ("infer", place.volume, "--network", place.folder / "net.yaml", "--out", place.volume)
    assert "itself" in place.refusal(*words, "--overwrite")


def test_output_folder_is_missing(place: Place) -> None:
    assert "there is no folder" in place.refusal(*place.words[:-1], place.folder / "gone" / "out.h5")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_output_folder_is_read_only(place: Place) -> None:
    folder = place.folder / "readonly"
    folder.mkdir(mode=0o555)
    assert "may not be written to" in place.refusal(*place.words[:-1], folder / "out.h5")


def test_two_runs_writing_one_output(place: Place) -> None:
    with FileLock(place.out.with_name("out.h5.lock")):
        assert "another run is writing" in place.refusal(*place.words)


def test_too_little_room_is_known_before_the_start(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", ("total", "used", "free"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1234, 1234))
    sentence = place.refusal(*place.words)
    assert "1234 free" in sentence
    assert "needs 36480 bytes" in sentence  # 2 maps of 15x16x19 float32


def test_disk_full_in_mid_run(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place.infer("--patch", "4,4,4").exit_code == 0
    expected = place.prediction()
    place.out.unlink()
    with monkeypatch.context() as patch:
        write, calls = Hdf5Store.write, count()

        def fill_up(store: Hdf5Store, box: Box, voxels: Any) -> None:
            if next(calls) == 9:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(store, box, voxels)

        patch.setattr(Hdf5Store, "write", fill_up)
        result = place.infer("--patch", "4,4,4")
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Error: the disk is full: ")
    assert "needs 36480 bytes in all" in last
    assert "make room and give --resume" in last
    assert not place.out.exists()
    assert place.infer("--patch", "4,4,4", "--resume").exit_code == 0
    np.testing.assert_array_equal(place.prediction(), expected)


@pytest.mark.parametrize("field", ["network", "volume", "output_dtype", "roi"])
def test_resume_of_another_job(place: Place, field: str) -> None:
    assert place.infer().exit_code == 0
    more: tuple[object, ...] = ()
    if field == "network":
        place.write_network(normalise={"mean": 1.0, "std": 1.0})
    elif field == "volume":
        place.write_volume(GREY)
    elif field == "roi":
        more = ("--roi", "0:19,:,:")
    else:
        more = ("--output-dtype", "float16")
    sentence = place.refusal(*place.words, "--resume", *more)
    assert "belongs to another job" in sentence
    assert field in sentence


def test_resume_of_a_finished_run_does_nothing(place: Place) -> None:
    assert place.infer().exit_code == 0
    before = place.state()
    result = place.infer("--resume")
    assert result.exit_code == 0
    assert result.stdout == f"{place.out}: 15x16x19, 4,560 voxels, complete already: nothing to do\n"
    assert place.state() == before


def test_debug_shows_the_traceback(place: Place) -> None:
    result = place.run("infer", place.folder / "gone.h5", "--debug")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("Error: there is no file")


def test_plan_file_is_not_replaced_unasked(place: Place) -> None:
    plan = Path(place.folder / "plan.json")
    plan.write_text("precious")
    words = ("plan", place.folder / "net.yaml", "--shape", "30,30,30", "--out", plan)
    assert "plan.json exists already" in place.refusal(*words)
    assert place.run(*words, "--overwrite").exit_code == 0
    assert place.infer("--plan", plan).exit_code == 0


def plan_words(place: Place, out: Path) -> tuple[object, ...]:
    return ("plan", place.folder / "net.yaml", "--shape", "30,30,30", "--out", out, "--overwrite")


def test_plan_replaces_files_only(place: Place) -> None:
    folder, pipe = place.folder / "folder", place.folder / "pipe"
    folder.mkdir()
    os.mkfifo(pipe)
    assert "folder is a folder; give another --out" in place.refusal(*plan_words(place, folder))
    assert "/dev/null is a special file; give another --out" in place.refusal(*plan_words(place, Path("/dev/null")))
    assert "pipe is a special file" in place.refusal(*plan_words(place, pipe))
    assert pipe.is_fifo()
    assert "cannot write" in place.refusal(*plan_words(place, place.folder / ("9" * 300)))


def test_plan_is_written_behind_links(place: Place) -> None:
    target, link, loop = (place.folder / name for name in ("target.json", "link.json", "loop.json"))
    link.symlink_to("target.json")
    loop.symlink_to("loop.json")
    assert place.run(*plan_words(place, link)).exit_code == 0  # a link to nothing
    assert link.is_symlink()
    target.write_text("old")
    assert "link.json exists already" in place.refusal(*plan_words(place, link)[:-1])
    assert place.run(*plan_words(place, link)).exit_code == 0
    assert link.is_symlink()
    assert target.read_text().startswith("{")
    assert "loop.json is a special file" in place.refusal(*plan_words(place, loop))
    assert loop.is_symlink()


def test_draft_of_a_plan_follows_no_link(place: Place) -> None:
    precious = place.folder / "precious"
    precious.write_text("precious")
    (place.folder / "plan.json.partial").symlink_to("precious")
    assert place.run(*plan_words(place, place.folder / "plan.json")).exit_code == 0
    assert precious.read_text() == "precious"


def test_journal_that_is_a_folder(place: Place) -> None:
    place.out.with_name("out.h5.journal").mkdir()
    assert "cannot read the journal" in (said := place.refusal(*place.words, "--resume"))
    assert "out.h5.journal: Is a directory, so what was finished is not known" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everywhere")
def test_journal_that_may_not_be_read(place: Place) -> None:
    journal = place.out.with_name("out.h5.journal")
    journal.write_text("{}")
    journal.chmod(0)
    sentence = "Permission denied, so what was finished is not known"
    result = place.infer("--resume")
    assert result.exit_code == 1
    assert sentence in result.stderr
