"""Names beside an output: what no run made stays as it is, and what is read is never replaced."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.small_outputs import (
    COLUMNS,
    HEADER,
    JOB,
    SIZE,
    expected,
    finish,
    interrupt,
    names,
    output,
    stored,
    write,
)
from tests.support.stored_outputs import stored as stored_by_library
from znnpy.errors import OutputError, ResumeError
from znnpy.volume.journal import Journal
from znnpy.volume.output import Mode, Output
from znnpy.volume.store import OutputArray

MODES: tuple[Mode, ...] = ("new", "overwrite", "resume")


@pytest.fixture(params=["out.h5", "out.zarr"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "out.zarr":
        pytest.importorskip("zarr")
    return tmp_path / str(request.param)


def everything(folder: Path) -> dict[str, str]:
    """List a folder at any depth: links with their targets, files with their contents."""
    found = {}
    for item in sorted(folder.rglob("*")):
        kind = f"link to {os.readlink(item)}" if item.is_symlink() else "folder"
        found[str(item.relative_to(folder))] = (
            hashlib.sha256(item.read_bytes()).hexdigest() if item.is_file() and not item.is_symlink() else kind
        )
    return found


def place(at: Path, kind: str, target: Path) -> None:
    """Something that no run made, of one of KINDS."""
    if kind == "file":
        at.write_text("notes")
    elif kind == "folder":
        at.mkdir()
        (at / "notes").write_text("notes")
    elif kind == "symlink":
        at.symlink_to(target)
    elif kind == "dangling":
        at.symlink_to(target.with_name("nothing"))
    else:
        at.hardlink_to(target)


KINDS = ("file", "folder", "symlink", "dangling", "hard link")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ending", ["old", "journal.new", "draft", "partial.old"])
@pytest.mark.parametrize("kind", KINDS)
def test_foreign_files_are_left_alone(path: Path, tmp_path: Path, kind: str, ending: str, mode: Mode) -> None:
    volume = tmp_path / "data.bin"
    volume.write_bytes(b"the volume")
    if mode == "overwrite":
        finish(path)
    place(path.with_name(f"{path.name}.{ending}"), kind, volume)
    before = everything(tmp_path)
    finish(path, mode)
    after = everything(tmp_path)
    assert {name: after[name] for name in before if not name.startswith(path.name + "/") and name != path.name} == {
        name: found for name, found in before.items() if not name.startswith(path.name + "/") and name != path.name
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ending", ["partial", "journal", "lock"])
@pytest.mark.parametrize("kind", KINDS)
def test_taken_names_are_refused(path: Path, tmp_path: Path, kind: str, ending: str, mode: Mode) -> None:
    """Nothing is written or removed through a link, also with overwrite."""
    volume = tmp_path / "data.bin"
    volume.write_bytes(b"the volume")
    place(path.with_name(f"{path.name}.{ending}"), kind, volume)
    before = everything(tmp_path)
    with pytest.raises(OutputError, match=rf"{path.name}\.{ending} is (no|not) .* left as it is; move it away"):
        output(path, mode).__enter__()
    assert everything(tmp_path) == before


def test_foreign_partial_output_beside_our_journal_is_refused(path: Path) -> None:
    interrupt(path, 3)
    partial = path.with_name(f"{path.name}.partial")
    partial.rename(path.with_name("kept"))
    partial.mkdir()
    (partial / "thesis.tex").write_text("precious")
    for mode in MODES:
        with pytest.raises((OutputError, ResumeError)):
            output(path, mode).__enter__()
        assert (partial / "thesis.tex").read_text() == "precious"


def test_file_created_under_the_outputs_name_during_the_run_is_not_replaced(path: Path) -> None:
    def run() -> None:
        with output(path) as opened:
            opened.begin(HEADER, {})
            write(opened, range(len(COLUMNS)), expected())
            path.write_text("of the user")
            opened.complete()

    with pytest.raises(
        OutputError, match=r"exists, but the run that wrote .*partial was not allowed to replace it; move it"
    ):
        run()
    assert path.read_text() == "of the user"
    with pytest.raises(OutputError):
        output(path, "resume").__enter__()
    assert path.read_text() == "of the user"
    path.unlink()
    with output(path, "resume") as opened:
        assert len(opened.done) == len(COLUMNS)
        opened.complete()
    assert names(path) == {path.name}


def test_dangling_link_is_replaced_only_on_request(path: Path) -> None:
    path.symlink_to("nowhere")
    with pytest.raises(OutputError, match=r"exists as a link to a missing file; give overwrite=True to replace"):
        output(path).__enter__()
    with pytest.raises((OutputError, ResumeError)):
        output(path, "resume").__enter__()
    assert path.is_symlink()
    finish(path, "overwrite")
    assert not path.is_symlink()
    assert names(path) == {path.name}


def test_link_is_replaced_and_its_target_kept(path: Path, tmp_path: Path) -> None:
    real = tmp_path / "elsewhere" / path.name
    real.parent.mkdir()
    finish(real)
    before = everything(real.parent)
    path.symlink_to(real)
    finish(path, "overwrite")
    assert not path.is_symlink()
    assert everything(real.parent) == before


@pytest.mark.parametrize("mode", MODES)
def test_file_and_folder_do_not_replace_each_other(path: Path, tmp_path: Path, mode: Mode) -> None:
    """It is known before anything is computed."""
    place(path, "file" if path.suffix == ".zarr" else "folder", path)
    before = everything(tmp_path)
    with pytest.raises(
        OutputError, match=r"is a (file, and the output is to be a folder; remove|folder; give the nam)"
    ):
        output(path, mode).__enter__()
    assert everything(tmp_path) == before


def test_folder_holding_more_than_an_output_is_not_replaced(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    path = tmp_path / "data.zarr"
    zarr.open_group(path, mode="w").create_array("raw", shape=(4, 4, 4), dtype="u1")
    other = tmp_path / "photos.zarr"
    place(other, "folder", other)
    before = everything(tmp_path)
    for out in (path, other):
        with pytest.raises(
            OutputError, match="is a folder that is not an output or a Zarr array, and replacing it would remove all"
        ):
            output(out, "overwrite").__enter__()
    assert everything(tmp_path) == before


def into(path: Path, mode: Mode, **inputs: Path) -> Output:
    return Output(path, inputs=inputs, arrays=(OutputArray((1, *SIZE)),), dtype=np.dtype("f4"), mode=mode, job=JOB)


@pytest.mark.parametrize("mode", MODES)
def test_input_is_never_replaced(tmp_path: Path, mode: Mode) -> None:
    zarr = pytest.importorskip("zarr")
    data = tmp_path / "data.zarr"
    raw = zarr.open_group(data, mode="w").create_array("raw", shape=(4, 4, 4), dtype="u1")
    raw[...] = 7
    weights = tmp_path / "net.npz"
    weights.write_bytes(b"weights")
    (tmp_path / "hard.h5").hardlink_to(weights)
    (tmp_path / "soft.h5").symlink_to(weights)
    (tmp_path / "soft.zarr").symlink_to(data)
    (tmp_path / "around.zarr").mkdir()
    (tmp_path / "around.zarr" / "plan.json").write_text("{}")
    (tmp_path / "side.h5.lock").symlink_to(weights)
    inputs = {"volume": data / "raw", "weights": weights, "plan": tmp_path / "around.zarr" / "plan.json"}
    before = everything(tmp_path)
    for out, said in (
        (data, "would replace the folder that holds the volume"),
        (tmp_path / "soft.zarr", "would replace the folder that holds the volume"),
        (tmp_path / "around.zarr", "would replace the folder that holds the plan"),
        (data / "raw" / "prediction.zarr", "would lie inside an array of the volume"),
        (tmp_path / "hard.h5", "is the weights .* itself"),
        (tmp_path / "soft.h5", "is the weights .* itself"),
        (tmp_path / "side.h5", "is the weights .* itself"),
    ):
        with pytest.raises(OutputError, match=said):
            into(out, mode, **inputs).__enter__()
        assert everything(tmp_path) == before


def test_new_array_in_the_group_of_the_volume_is_written(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    data = tmp_path / "data.zarr"
    zarr.open_group(data, mode="w").create_array("raw", shape=(4, 4, 4), dtype="u1")
    for mode in ("new", "overwrite"):
        with into(data / "prediction.zarr", mode, volume=data) as opened:
            opened.begin(HEADER, {})
            write(opened, range(len(COLUMNS)), expected())
            opened.complete()
    np.testing.assert_array_equal(stored_by_library(data / "prediction.zarr"), expected()[0])
    assert {item.name for item in data.iterdir()} == {"zarr.json", "raw", "prediction.zarr"}


def test_journal_of_another_run_is_refused(tmp_path: Path) -> None:
    """The journal lists columns that are not on disk; trusting it would give wrong voxels without an error."""
    ours, theirs = tmp_path / "out.h5", tmp_path / "other.h5"
    interrupt(ours, 3)
    interrupt(theirs, 9)
    Path(f"{theirs}.journal").replace(f"{ours}.journal")
    before = everything(tmp_path)
    message = r"journal is the journal of run [0-9a-f]{16}, and .*partial was made by run [0-9a-f]{16}; put back the"
    with pytest.raises(ResumeError, match=message):
        output(ours, "resume").__enter__()
    assert everything(tmp_path) == before
    finish(ours, "overwrite")
    np.testing.assert_array_equal(stored(ours), expected()[0])


def test_changed_journal_is_refused(path: Path) -> None:
    interrupt(path, 3)
    journal = path.with_name(f"{path.name}.journal")
    text = journal.read_bytes()
    journal.write_bytes(text.replace(b'"columns":12', b'"columns":13'))
    with pytest.raises(ResumeError, match=r"the journal .* was changed after the run began, so it is not known"):
        output(path, "resume").__enter__()
    journal.write_bytes(text)
    with output(path, "resume") as opened:
        assert len(opened.done) == 3


@pytest.mark.parametrize("damage", ["cut", "overwritten", "empty"])
def test_damaged_partial_output_is_refused(path: Path, damage: str) -> None:
    interrupt(path, 3)
    partial = path.with_name(f"{path.name}.partial")
    file = partial / "zarr.json" if partial.is_dir() else partial
    content = file.read_bytes()
    file.write_bytes({"cut": content[: len(content) // 2], "overwritten": b"x" * len(content), "empty": b""}[damage])
    with pytest.raises(ResumeError, match=rf"the unfinished .*{path.name}\.partial is damaged \(.*; remove it and"):
        output(path, "resume").__enter__()
    with pytest.raises(OutputError, match=r"partial is not the unfinished output of a run, or is damaged, and is left"):
        output(path, "overwrite").__enter__()
    file.write_bytes(content)
    with output(path, "resume") as opened:
        assert len(opened.done) == 3


def test_links_inside_a_partial_folder_are_not_written_through(tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    path, elsewhere = tmp_path / "out.zarr", tmp_path / "elsewhere"
    interrupt(path, 3)
    (tmp_path / "out.zarr.partial" / "0" / "c").rename(elsewhere)
    (tmp_path / "out.zarr.partial" / "0" / "c").symlink_to(elsewhere)
    before = everything(elsewhere)
    with pytest.raises(ResumeError, match=r"is damaged \(c is a symbolic link\)"):
        output(path, "resume").__enter__()
    assert everything(elsewhere) == before


@pytest.mark.parametrize("job", ['"text"', "[1]", "[" * 100_000, "{}"])
def test_finished_output_with_an_odd_job_is_refused(tmp_path: Path, job: str) -> None:
    import h5py

    path = tmp_path / "out.h5"
    finish(path)
    with h5py.File(path, "r+") as file:
        file["prediction"].attrs["job"] = job
    with pytest.raises(ResumeError):
        output(path, "resume").__enter__()


def test_run_without_its_lock_yields_to_a_second_run(path: Path) -> None:
    """A second run overwrites what the first one is writing: the first gives no output, and hurts nothing."""

    def first() -> None:
        with output(path, "overwrite") as one:
            one.begin(HEADER, {})
            write(one, range(len(COLUMNS)), expected())
            one._opened().sync()  # a file that is still being written would make its folder anew
            path.with_name(f"{path.name}.lock").unlink()
            two = output(path, "overwrite").__enter__()
            two.begin(HEADER, {})
            write(two, range(4), expected())
            runs.append(two)
            one.complete()

    runs: list[Output] = []
    with pytest.raises(OutputError, match="was removed or replaced while this run wrote it, perhaps by another run"):
        first()
    assert not path.exists()
    write(runs[0], range(4, len(COLUMNS)), expected())
    runs[0].complete()
    runs[0].__exit__(None, None, None)
    assert names(path) == {path.name}


def test_run_without_its_lock_keeps_the_output_of_an_ended_second_run(path: Path) -> None:
    def first() -> None:
        with output(path, "overwrite") as one:
            one.begin(HEADER, {})
            write(one, range(4), expected())
            path.with_name(f"{path.name}.lock").unlink()
            finish(path, "overwrite")
            write(one, range(4, len(COLUMNS)), expected())
            one.complete()

    with pytest.raises(OutputError, match="was removed or replaced while this run wrote it"):
        first()
    assert names(path) == {path.name}


def test_run_without_its_lock_finishes_if_no_other_run_came(path: Path) -> None:
    with output(path) as opened:
        opened.begin(HEADER, {})
        write(opened, range(len(COLUMNS)), expected())
        path.with_name(f"{path.name}.lock").unlink()
        opened.complete()
    assert names(path) == {path.name}


def test_folder_replaced_halfway_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run restores the earlier output after a kill between the two renames."""
    pytest.importorskip("zarr")
    path = tmp_path / "out.zarr"
    finish(path)
    earlier = everything(path)
    for mode in MODES:
        interrupt(path, 3, "overwrite")
        journal = Journal(path.with_name("out.zarr.journal"))
        assert journal.open()
        path.rename(path.with_name(f"out.zarr.{journal.run}.old"))
        journal.close()
        if mode == "new":
            with pytest.raises(OutputError, match="an unfinished run left"):
                output(path, mode).__enter__()
        else:
            output(path, mode).__enter__().__exit__(None, None, None)
        assert everything(path) == earlier
        finish(path, "overwrite")
        assert names(path) == {"out.zarr"}
        earlier = everything(path)
