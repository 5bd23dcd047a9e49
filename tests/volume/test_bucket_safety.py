"""Outputs in buckets keep what others wrote, and never look finished while a chunk is missing or another run's."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore as ts

from tests.support.bucket_runs import expected, furnish, infer, read, store_volume
from tests.support.gcs_emulator import Bucket as GcsBucket
from tests.support.gcs_emulator import GcsServer
from tests.support.http_servers import served
from tests.support.object_stores import gcs_address
from znnpy.errors import OutputError, ResumeError, VolumeError
from znnpy.patches import Box
from znnpy.volume import bucket as bucket_module
from znnpy.volume import bucket_journal, chunk_writes, column_record, object_store, open_volume
from znnpy.volume import store as store_module
from znnpy.volume.bucket import Bucket
from znnpy.volume.location import Location

if TYPE_CHECKING:
    from tests.support.object_stores import ObjectStore


class Stop(Exception):
    """An error that stops a run in a test."""


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "RETRIES", {"max_retries": 4, "initial_delay": "10ms", "max_delay": "50ms"})
    monkeypatch.setattr(bucket_module, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(bucket_module, "SECONDS_IN_ALL", 2.0)
    monkeypatch.setattr(bucket_journal, "HANDOVER_SECONDS", 0.5)  # for writes that are under way
    monkeypatch.setattr(bucket_journal, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(column_record, "SYNC_SECONDS", 0.0)
    monkeypatch.setattr(store_module, "CHUNK", 20)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a volume, a network, and what it predicts."""
    return furnish(tmp_path_factory.mktemp("safety"))


def bucket_of(out: str, ending: str = "") -> Bucket:
    location = Location.of(out)
    return Bucket(location.with_name(location.name + ending))


def interrupt(place: Path, out: str, columns: int = 2, **more: Any) -> None:
    def stop(event: Any) -> None:
        if event.columns_done >= columns:
            raise Stop

    with pytest.raises(Stop):
        infer(place, out, stop, **more)


class TestOfOthers:
    @pytest.mark.parametrize("mode", [{}, {"resume": True}, {"overwrite": True}], ids=str)
    def test_an_array_without_attributes_is_left_as_it_is(
        self, s3: ObjectStore, place: Path, mode: dict[str, Any]
    ) -> None:
        where = s3.kvstore(f"array{len(str(mode))}.zarr/")
        array = ts.open({"driver": "zarr3", "kvstore": where}, create=True, dtype=ts.uint8, shape=[9, 9, 9]).result()
        array[...] = 7
        with pytest.raises(OutputError, match=r"was not written by znnpy \(zarr.json is there\)"):
            infer(place, s3.url(f"array{len(str(mode))}.zarr"), **mode)
        assert (array.read().result() == 7).all()

    def test_objects_below_an_output_are_not_removed(self, s3: ObjectStore, place: Path) -> None:
        out = s3.url("beside.zarr")
        objects = bucket_of(out)
        objects.write("notes/today.txt", b"a user's")
        modes: list[dict[str, Any]] = [{}, {"overwrite": True}]
        for mode in modes:
            with pytest.raises(OutputError, match=r"was not written by znnpy \(notes/today.txt is there\)"):
                infer(place, out, **mode)
        objects.remove("notes")
        infer(place, out)
        objects.write("notes/today.txt", b"a user's")
        with pytest.raises(OutputError, match=r"was not written by znnpy \(notes/today.txt is there\)"):
            infer(place, out, overwrite=True)
        assert objects.read("notes/today.txt") == b"a user's"

    def test_an_output_with_a_longer_name_is_kept(self, s3: ObjectStore, place: Path) -> None:
        infer(place, s3.url("name.zarr"))
        other = bucket_of(s3.url("name.zarr2"))
        other.write("zarr.json", b"{}")
        infer(place, s3.url("name.zarr"), overwrite=True)
        assert other.read("zarr.json") == b"{}"

    def test_what_a_run_reads_is_not_replaced(self, s3: ObjectStore, place: Path) -> None:
        volume = s3.url("read.zarr")
        store_volume(place, s3.kvstore("read.zarr/0/"), "zarr3")
        for out, why in (("read.zarr/0", "is"), ("read.zarr/0/out.zarr", "is inside"), ("read.zarr", "contains")):
            with pytest.raises(OutputError, match=f"{why} {volume}/0, which is read; give another name"):
                infer(place, f"zarr://{s3.url(out)}", volume=f"zarr://{volume}/0", overwrite=True)
        with pytest.raises(OutputError, match="is a whole bucket; give a name inside it"):
            infer(place, f"zarr://{s3.url()}")
        with pytest.raises(OutputError, match=r"contains .*, which is read; give another name"):
            infer(place, s3.url("read.zarr"), overwrite=True, mask=f"zarr://{volume}/0")
        assert np.array_equal(read(f"zarr://{volume}/0")[0], np.load(place / "v.npy"))


class TestCutShort:
    def test_a_run_that_was_being_replaced_is_not_continued_with_holes(
        self, s3: ObjectStore, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = s3.url("holes.zarr")
        interrupt(place, out)
        remove = Bucket.remove

        def cut_short(bucket: Bucket, folder: str) -> None:
            remove(bucket, folder)
            if not folder:
                raise Stop  # the chunks are gone, and the process is killed

        with monkeypatch.context() as patch:
            patch.setattr(Bucket, "remove", cut_short)
            with pytest.raises(Stop):
                infer(place, out, overwrite=True)
        infer(place, out, resume=True)
        assert np.array_equal(read(out), expected(place))

    @pytest.mark.parametrize("mode", ["resume", "overwrite"])
    def test_a_journal_whose_removal_was_cut_short_is_in_nobodys_way(
        self, s3: ObjectStore, place: Path, monkeypatch: pytest.MonkeyPatch, mode: str
    ) -> None:
        out = s3.url(f"removal-{mode}.zarr")
        records = list[str]()

        def cut_short(bucket: Bucket, folder: str) -> None:
            records.extend(key for key in bucket.every(folder) if "done/" in key)
            bucket.remove_one(records[0])
            raise Stop

        with monkeypatch.context() as patch:
            patch.setattr(Bucket, "remove", cut_short)
            with pytest.raises(Stop):
                infer(place, out)
        assert len(records) > 1
        assert np.array_equal(read(out), expected(place))
        infer(place, out, resume=mode == "resume", overwrite=mode == "overwrite")
        assert np.array_equal(read(out), expected(place))
        assert bucket_of(out, ".journal").every() == []

    def test_a_damaged_journal_is_replaced_by_a_new_run(self, s3: ObjectStore, place: Path) -> None:
        out = s3.url("damaged.zarr")
        interrupt(place, out)
        journal = bucket_of(out, ".journal")
        record = next(key for key in journal.every() if "done/" in key)
        journal.write(record, b"rubbish")
        with pytest.raises(ResumeError, match="start again with overwrite=True"):
            infer(place, out, resume=True)
        infer(place, out, overwrite=True)
        assert np.array_equal(read(out), expected(place))

    def test_columns_of_a_chunk_that_was_lost_are_not_recorded(
        self, s3: ObjectStore, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = s3.url("lost.zarr")
        start, count = chunk_writes.ChunkFiles.start, [0]

        def lose(files: Any, *arguments: Any) -> None:
            count[0] += 1
            if count[0] == 1:
                raise Stop
            start(files, *arguments)

        monkeypatch.setattr(store_module, "CHUNK", 64)  # so that several columns wait for one chunk
        with monkeypatch.context() as patch:
            patch.setattr(chunk_writes.ChunkFiles, "start", lose)
            with pytest.raises(Stop):
                infer(place, out)
        infer(place, out, resume=True)
        assert np.array_equal(read(out), expected(place))


class TestTwoRuns:
    """A run that is paused, and another one that begins, or goes on, in the meantime."""

    @pytest.mark.parametrize("other", [{"resume": True}, {"overwrite": True}, {"overwrite": True, "border": "reflect"}])
    @pytest.mark.parametrize("columns", [0, 3], ids=["before any record", "after records"])
    def test_the_earlier_stops(
        self, s3: ObjectStore, place: Path, tmp_path: Path, other: dict[str, Any], columns: int
    ) -> None:
        out = s3.url(f"paused-{len(str(other))}-{columns}.zarr")
        paused, goes_on, ended = threading.Event(), threading.Event(), list[BaseException | None]()

        def pause(event: Any) -> None:
            if event.columns_done >= columns and not paused.is_set():
                paused.set()
                assert goes_on.wait(60)

        def first() -> None:
            try:
                infer(place, out, pause)
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=first)
        thread.start()
        assert paused.wait(60)
        infer(place, out, **other)
        goes_on.set()
        thread.join(60)
        assert isinstance(ended[0], OutputError)
        assert "another run writes to" in str(ended[0])
        whole = tmp_path / "whole.h5"
        infer(place, whole, border=other.get("border", "valid"))
        assert np.array_equal(read(out), read(str(whole)))
        assert bucket_of(out, ".journal").read("run") is None

    def test_both_at_the_same_time_end_in_one_output_or_none(self, s3: ObjectStore, place: Path) -> None:
        out, errors = s3.url("both.zarr"), list[BaseException]()
        begin = threading.Barrier(2)

        def run() -> None:
            begin.wait()
            try:
                infer(place, out)
            except OutputError as error:
                errors.append(error)

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        if errors:
            assert all("run" in str(error) or "exists" in str(error) or "written" in str(error) for error in errors)
        if len(errors) == 2:
            infer(place, out, resume=True)
        assert np.array_equal(read(out), expected(place))


class TestListsOfGoogle:
    """A bucket that is gone, or may not be listed, is answered with JSON, which tensorstore reads as an empty list."""

    def test_a_bucket_that_is_gone_is_not_one_whose_chunks_are_missing(
        self, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server = GcsServer()
        server.buckets["there"] = GcsBucket()
        with served(server), gcs_address(server.url):
            infer(place, "gs://there/v.zarr")
            objects = server.buckets["there"].objects
            whole = Box((0, 0, 0), (24, 36, 42))
            with open_volume("gs://there/v.zarr") as volume:
                lost = next(name for name in objects if "/c/" in name)
                del objects[lost]
                out = np.ones(volume.shape, volume.dtype)
                volume.expect(whole)
                volume.read(whole, out)
                assert volume.chunks.missing == 1
                kept = server.buckets.pop("there")
                with pytest.raises(VolumeError, match=r"gs://there/v.zarr is gone: .*zarr.json was read before"):
                    volume.read(whole, out)
            server.buckets["there"] = kept

            def vanish(event: Any) -> None:
                if event.columns_done >= 2:
                    server.buckets.pop("there", None)

            with pytest.raises(OutputError, match=r"continue with resume=True"):
                infer(place, "gs://there/out.zarr", vanish)
            server.buckets["there"] = kept
            infer(place, "gs://there/out.zarr", resume=True)
            assert np.array_equal(read("gs://there/out.zarr"), expected(place))
            with pytest.raises(OutputError, match="there is no such bucket"):
                infer(place, "gs://nowhere/out.zarr")
