"""Jobs: their items give what one process gives, whoever computes them, however often, and in whatever order."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import znnpy
from tests.cli.test_graph_infer import COARSE, graph
from tests.cli.test_several_outputs import assert_close, deep
from tests.cli.test_several_outputs import stored as stored_arrays
from tests.support import normed_unet
from tests.support.cli import Place
from tests.support.stored_outputs import stored
from tests.support.tiers import one_in
from znnpy.cluster import running
from znnpy.cluster.claims import AttemptLostError, Claim, contested_items, finished_items, record_of
from znnpy.cluster.finishing import finish
from znnpy.cluster.item_output import ItemOutput
from znnpy.cluster.job import Job, JobRecord
from znnpy.cluster.job_files import job_files
from znnpy.cluster.preparing import join, prepare
from znnpy.cluster.running import Limits, release, run_items
from znnpy.errors import OutputError, ResumeError, VolumeError
from znnpy.options import InferOptions
from znnpy.run.pipeline import Event
from znnpy.volume import store
from znnpy.volume.location import Location

ITEM = (8, 8, 12)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(store, "CHUNK", 4)
    yield
    release()


def options(place: Place, name: str = "out.zarr", **more: Any) -> InferOptions:
    more = {"items": ITEM, "calibrate": False, "threads": 1, "ram": "2G", **more}
    return InferOptions(str(place.volume), str(place.folder / "net.yaml"), out=str(place.folder / name), **more)


def alone(place: Place, name: str, **more: Any) -> Path:
    """Compute the output in one process; return its path."""
    out = place.folder / f"alone.{name.rpartition('.')[2]}"
    more = {"calibrate": False, "threads": 1, "ram": "2G", **more}
    znnpy.infer(str(place.volume), str(place.folder / "net.yaml"), out=out, **more)
    return out


def count(job: Job) -> int:
    return JobRecord.load(job).count


def close(found: npt.NDArray[Any], exact: npt.NDArray[Any]) -> bool:
    return found.shape == exact.shape and bool(np.abs(found - exact).max() <= 1e-5 * np.abs(exact).max())


@pytest.mark.parametrize(
    ("name", "more"),
    one_in(
        2,
        [
            ("out.h5", {"border": "reflect", "items": (8, 8, 8)}),
            ("out.zarr", {"border": "reflect", "sharded": True}),
            ("out.zarr", {"roi": "1:19,2:22,3:24", "multiscale": 1}),
            ("out.n5", {}),
            ("out.precomputed", {"border": "reflect", "output_dtype": "uint8"}),
            ("out.tif", {"output_dtype": "float32", "items": (8, 8, 8)}),
        ],
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_items_give_what_one_process_gives(place: Place, name: str, more: dict[str, Any]) -> None:
    asked = options(place, name, **more)
    job = prepare(asked)
    assert job.count == count(job)
    order = np.random.default_rng(2).permutation(job.count)
    for item in order[: len(order) * 2 // 3]:
        (record,) = run_items(job, [int(item)], worker="first")
        assert record.item == item
    assert not (place.folder / name).exists()
    assert finished_items(job.files, 10**6) == sorted(order[: len(order) * 2 // 3].tolist())
    records = finish(job)
    assert prepare(replace(asked, resume=True)).count == 0
    assert [record.item for record in records] == list(range(len(order)))
    assert {record.worker for record in records} == {"first", ""}
    whole = alone(place, name, **{key: value for key, value in more.items() if key != "items"})
    assert close(stored(place.folder / name).astype(float), stored(whole).astype(float))
    left = {path.name for path in place.folder.iterdir() if path.name.startswith(name)}
    assert left == {name}
    if "multiscale" in more:
        assert close(stored(place.folder / name, level=1), stored(whole, level=1))


def test_a_network_that_is_computed_whole(place: Place) -> None:
    graph(place, COARSE)
    job = prepare(options(place, items=(4, 6, 8)))
    assert count(job) > 3
    finish(job)
    assert close(stored(place.folder / "out.zarr"), stored(alone(place, "out.zarr")))


def test_several_outputs(place: Place) -> None:
    deep(place)
    finish(prepare(options(place, items=(8, 8, 13))))
    assert_close(stored_arrays(place.folder / "out.zarr"), stored_arrays(alone(place, "out.zarr")))


def test_windows(tmp_path: Path) -> None:
    normed_unet.written(tmp_path)
    names = str(tmp_path / "volume.npy"), str(tmp_path / "net.yaml")
    more: dict[str, Any] = {"window": (8, 8, 12), "calibrate": False, "threads": 1}
    finish(prepare(InferOptions(*names, out=str(tmp_path / "out.h5"), items=(8, 12, 16), **more)))
    znnpy.infer(*names, out=tmp_path / "alone.h5", **more)
    assert close(stored(tmp_path / "out.h5"), stored(tmp_path / "alone.h5"))


def test_networks_masks_and_plans_that_are_objects_or_files(place: Place) -> None:
    trained = znnpy.load_network(place.folder / "net.yaml")
    mask = np.zeros((20, 23, 25), np.uint8)
    mask[5:14, 6:20, :9] = 1
    np.save(place.folder / "mask.npy", mask)
    plan = znnpy.plan(trained, shape=(16, 16, 18), threads=1, ram="2G", device="cpu")
    more: dict[str, Any] = {"mask": str(place.folder / "mask.npy"), "ram": None, "threads": None, "plan": plan}
    job = prepare(InferOptions(str(place.volume), trained, out=str(place.folder / "out.zarr"), items=ITEM, plan=plan,
                               mask=more["mask"]))  # fmt: skip
    finish(job)
    whole = alone(place, "out.zarr", mask=more["mask"])
    assert close(stored(place.folder / "out.zarr"), stored(whole))
    assert (stored(whole) == 0).mean() > 0.5


def test_bytes_do_not_depend_on_who_computes_an_item(place: Place) -> None:
    first = prepare(options(place, "first.zarr"))
    for item in range(count(first)):
        run_items(first, [item], worker=f"{item}")
        release()
    finish(first)
    finish(prepare(options(place, "second.zarr")))
    assert (stored(place.folder / "first.zarr") == stored(place.folder / "second.zarr")).all()


def test_one_plan_serves_all_processes_of_a_kind(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    job = prepare(options(place))
    run_items(job, [0])
    made = job.files.every("plans")
    assert len(made) == 1
    release()
    monkeypatch.setattr("znnpy.run.choice._counted_plan", None)  # a second search would fail
    run_items(job, [2])
    with pytest.raises(TypeError):
        run_items(job, [1])  # of another size
    assert job.files.every("plans") == made


def test_finished_items_are_not_computed_again(place: Place) -> None:
    job = prepare(options(place))
    (record,) = run_items(job, [3], worker="first")
    told: list[int] = []
    assert run_items(job, [3], worker="second", progress=lambda item, event: told.append(item)) == (record,)
    assert told == []


class Overtaken:
    """Writes of an item after so many of which another attempt claims it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, job: Job, after: int, act: Callable[[int], None]) -> None:
        self.writes = 0
        write = ItemOutput.write

        def overtaken(output: ItemOutput, *arguments: Any) -> None:
            write(output, *arguments)
            self.writes += 1
            if self.writes == after:
                act(0)

        monkeypatch.setattr(ItemOutput, "write", overtaken)


def test_an_attempt_that_lost_its_item_stops_before_its_next_write(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = prepare(options(place, patch=(2, 8, 12), cover="columns"))
    seen = Overtaken(monkeypatch, job, 2, lambda item: Claim(job.files, item, "another").take())
    with pytest.raises(AttemptLostError, match="work item 0 is no longer of attempt first: attempt another has it"):
        run_items(job, [0], attempt="first")
    assert seen.writes == 2
    assert record_of(job.files, 0) is None
    finish(job)
    assert close(stored(place.folder / "out.zarr"), stored(alone(place, "out.zarr")))


def test_an_attempt_that_another_one_overtook_takes_its_record(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both compute the item; the second one ends first, and the first one must not be recorded."""
    job = prepare(options(place, patch=(2, 8, 12), cover="columns"))
    done: list[Any] = []

    monkeypatch.setattr(running, "_LOCK", nullcontext())  # the other attempt is in another process

    def act(item: int) -> None:
        kept = list(running._kept)
        running._kept.clear()
        done.extend(run_items(job, [item], attempt="second", worker="second"))
        running._kept[:] = kept

    Overtaken(monkeypatch, job, 1, act)
    (record,) = run_items(job, [0], attempt="first", worker="first")
    assert done == [record]
    assert record.attempt == "second"
    assert contested_items(job.files, count(job)) == [0]


def test_voxels_of_a_late_write_are_found_and_computed_again(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """A lost attempt that was paused between its last look and its write leaves voxels of its own."""
    job = prepare(options(place, "out.h5", items=(8, 8, 8)))
    run_items(job, range(count(job)), attempt="winner")
    (place.folder / "out.h5.job" / job.run / "begun" / "000000001" / "late").touch()
    (place.folder / "out.h5.job" / job.run / "begun" / "000000002" / "harmless").touch()
    process = running._process_of(job, Limits())
    box = process.boxes(1)[0]
    process._opened().write(box, np.full((2, *box.size), 0.25, np.float32), 0)
    before = {item: record_of(job.files, item) for item in (1, 2)}
    records = finish(job)
    assert "work items [1] do not hold the voxels of one attempt" in caplog.text
    assert records[1] != before[1]
    assert records[2] == before[2]
    assert close(stored(place.folder / "out.h5"), stored(alone(place, "out.h5")))


def test_a_failed_item_leaves_nothing_for_the_next_one(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of an item that failed wait in memory, and must not be written after another process computed it."""
    job = prepare(options(place))
    complete = ItemOutput.complete

    def fails(output: ItemOutput) -> None:
        raise OutputError("the disk is full")

    monkeypatch.setattr(ItemOutput, "complete", fails)
    with pytest.raises(OutputError, match="the disk is full"):
        run_items(job, [0])
    monkeypatch.setattr(ItemOutput, "complete", complete)
    finish(job)
    assert close(stored(place.folder / "out.zarr"), stored(alone(place, "out.zarr")))


def test_a_job_goes_on_after_its_coordinator_ended(place: Place) -> None:
    job = prepare(options(place))
    run_items(job, [0, 2])
    again = prepare(options(place, resume=True))
    assert again == job
    assert finished_items(job.files, 100) == [0, 2]
    with pytest.raises(OutputError, match=r"an unfinished run left .* with 0 of .* done"):
        prepare(options(place))
    with pytest.raises(ResumeError, match="began with work items of 8x8x12 voxels, and now they are"):
        prepare(options(place, resume=True, items=(8, 8, 8)))
    with pytest.raises(ResumeError, match="belongs to another job: border was"):
        prepare(options(place, resume=True, border="reflect"))
    with pytest.raises(ResumeError, match="began with threads=1, and now it is threads=2"):
        prepare(options(place, resume=True, threads=2))
    assert prepare(options(place, resume=True, ram="4G")) == job
    with pytest.raises(ValueError, match="the id of an attempt has letters"):
        run_items(job, [1], attempt="../elsewhere")
    replaced = prepare(options(place, overwrite=True))
    assert replaced.run != job.run
    assert finished_items(replaced.files, 100) == []
    with pytest.raises(AttemptLostError, match="the job was finished or removed"):
        run_items(job, [1])
    release()
    with pytest.raises(ResumeError, match="belongs to another job now"):
        run_items(job, [1])
    finish(replaced)


def test_outputs_of_one_process_and_of_jobs_are_not_mixed(place: Place) -> None:
    prepare(options(place))
    with pytest.raises(ResumeError, match="is computed in work items"):
        znnpy.infer(str(place.volume), str(place.folder / "net.yaml"), out=place.folder / "out.zarr", resume=True,
                    ram="2G", threads=1)  # fmt: skip

    def stop(event: Event) -> None:
        if event.columns_done:
            raise KeyboardInterrupt

    more: dict[str, Any] = {"patch": (4, 4, 4), "ram": "2G", "threads": 1}
    with pytest.raises(KeyboardInterrupt):
        znnpy.infer(str(place.volume), str(place.folder / "net.yaml"), out=place.folder / "o.h5", progress=stop, **more)
    with pytest.raises(ResumeError, match="was begun by one process, not in work items"):
        prepare(options(place, "o.h5", resume=True))


def test_a_process_that_reads_something_else_is_refused(place: Place) -> None:
    job = prepare(options(place))
    place.write_volume(np.zeros((20, 23, 25), np.uint8))
    with pytest.raises(ResumeError, match="this process reads another volume than the job of"):
        run_items(job, [0])
    release()
    files = job_files(Location.of(job.out))
    record = json.loads(files.read("job") or b"")
    files.write("job", json.dumps({**record, "format": 7}).encode())
    with pytest.raises(ResumeError, match=r"cannot be read \(format 7, and this version knows 1\)"):
        run_items(job, [0])
    files.write("job", json.dumps({**record, "size": "all"}).encode())
    with pytest.raises(ResumeError, match="job/job cannot be read"):
        run_items(job, [0])
    files.write("job", json.dumps({**record, "size": [0, 8, 12]}).encode())
    with pytest.raises(ResumeError, match="items of"):
        run_items(job, [0])
    files.write("job", json.dumps({**record, "asked": {"volumes": 3}}).encode())
    with pytest.raises(ResumeError, match="the options of the job cannot be read"):
        run_items(job, [0])
    files.remove("")
    with pytest.raises(ResumeError, match="so the job is finished or was removed"):
        run_items(job, [0])


def test_damaged_records_are_named(place: Place) -> None:
    job = prepare(options(place))
    run_items(job, [0, 1])
    job.files.write("done/000000000", job.files.read("done/000000001") or b"")
    with pytest.raises(ResumeError, match=r"record of work item 0 is damaged \(it is the record of item 1\)"):
        finish(job)


def test_voxels_that_are_not_finite_end_an_item(place: Place) -> None:
    volume = np.zeros((20, 23, 25), np.float32)
    volume[3, 4, 5] = np.nan
    place.write_volume(volume)
    job = prepare(options(place))
    with pytest.raises(VolumeError, match="1 voxel is NaN or infinite"):
        run_items(job, [0])
    run_items(job, [count(job) - 1])


def test_arrays_are_refused(place: Place) -> None:
    asked = options(place)
    with pytest.raises(OutputError, match="workers open the volume themselves"):
        prepare(InferOptions(np.zeros((20, 23, 25), np.uint8), asked.network, out=asked.out))
    with pytest.raises(OutputError, match="workers write the output themselves"):
        prepare(InferOptions(asked.volume, asked.network, out=np.zeros((2, 15, 16, 19), np.float32)))


def test_processes_join_the_job_that_the_first_one_prepares(place: Place) -> None:
    job = join(options(place))
    assert join(options(place)) == job
    with pytest.raises(ResumeError, match="began with `border`, and now it is border='reflect'"):
        join(options(place, border="reflect"))
    with pytest.raises(ValueError, match="would remove what other parts have computed"):
        options(place, overwrite=True, part="1/2")
