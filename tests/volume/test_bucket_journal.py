"""The journal of an output in a bucket: what is recorded is read back, and two runs do not both record."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.object_stores import behind_proxy
from znnpy.errors import OutputError, ResumeError
from znnpy.volume import bucket as bucket_module
from znnpy.volume import bucket_journal as journal_module
from znnpy.volume import object_store
from znnpy.volume.bucket import Bucket, check_bucket, check_place
from znnpy.volume.bucket_journal import BucketJournal, print_kernels
from znnpy.volume.journal import JournalHeader
from znnpy.volume.location import Location

if TYPE_CHECKING:
    from tests.support.faulty_proxy import Vanished
    from tests.support.object_stores import ObjectStore

RUN = "0123456789abcdef"
HEADER = JournalHeader(
    {"network": "n"}, {"only": [], "processor": "p", "versions": {}, "gpu": None}, "{}", "openblas X", 3000
)
FILES = {"zarr.json": b"{}", "0/zarr.json": b'{"a": 1}'}


@pytest.fixture(autouse=True)
def _short_handover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "HANDOVER_SECONDS", 0.0)


@pytest.fixture(params=["s3", "gcs"])
def store(request: pytest.FixtureRequest) -> ObjectStore:
    found: ObjectStore = request.getfixturevalue(request.param)
    return found


def place(store: ObjectStore, name: str) -> Location:
    return Location.of(store.url(f"folder/{name}.zarr"))


def test_a_run_is_read_back(store: ObjectStore) -> None:
    out = place(store, "back")
    journal = BucketJournal(out)
    assert journal.read() is None
    journal.create(RUN, HEADER, FILES)
    journal.append([5, 3])
    journal.append(range(100, 2000))
    again = BucketJournal(out)
    found = again.read()
    assert found is not None
    assert found[0] == HEADER
    assert sorted(found[1]) == [3, 5, *range(100, 2000)]
    assert again.run == RUN
    assert again.files() == FILES
    with pytest.raises(OutputError, match="another run writes to"):
        again.append([7])
    again.take_over()
    assert again.is_ours(RUN)
    assert not again.is_ours("f" * 16)
    again.append([7])
    with pytest.raises(OutputError, match="another run writes to"):
        journal.check()
    again.remove()
    assert BucketJournal(out).read() is None
    assert Bucket(out.with_name("back.zarr.journal")).every() == []


def test_kernels_are_printed_for_the_command_line(store: ObjectStore, capsys: pytest.CaptureFixture[str]) -> None:
    out = place(store, "printed")
    print_kernels(str(out))
    assert capsys.readouterr().out == ""
    BucketJournal(out).create(RUN, HEADER, {})
    print_kernels(str(out))
    assert capsys.readouterr().out == "p\nopenblas X\n"


def test_of_two_runs_one_records(store: ObjectStore) -> None:
    out = place(store, "two")
    one, other = BucketJournal(out), BucketJournal(out)
    one.create(RUN, HEADER, {})
    with pytest.raises(OutputError, match="another run writes to"):
        other.create("f" * 16, HEADER, {})
    assert other.read() is not None  # as a run that resumes does
    other.take_over()
    other.append([1])
    with pytest.raises(OutputError, match="another run writes to"):
        one.append([2])
    third = BucketJournal(out)
    assert third.read() is not None
    other.append([2])
    with pytest.raises(OutputError, match="another run writes to"):
        third.take_over()  # the run has gone on since it was read
    other.append([3])


def test_records_are_those_of_one_run(store: ObjectStore) -> None:
    out = place(store, "runs")
    one, other = BucketJournal(out), BucketJournal(out)
    one.create(RUN, HEADER, {"old": b"{}"})
    one.append([1])
    objects = Bucket(out.with_name("runs.zarr.journal"))
    objects.remove_one("run")  # as a run that is replaced, or was cut short when it removed its journal
    other.create("f" * 16, HEADER, FILES)
    assert all(key == "run" or key.startswith("f" * 16) for key in objects.every())
    objects.write(f"{RUN}/done/0000000002", b"[2] 00000000\n")  # a late record of the old one
    again = BucketJournal(out)
    found = again.read()
    assert found is not None
    assert not found[1]
    assert again.files() == FILES


def test_damaged_journals_are_refused(store: ObjectStore) -> None:
    out = place(store, "damaged")
    journal, objects = BucketJournal(out), Bucket(out.with_name("damaged.zarr.journal"))
    journal.create(RUN, HEADER, {})
    journal.append([1])
    objects.write(f"{RUN}/done/0000000003", b"[2] 00000000\n")
    with pytest.raises(ResumeError, match="it is not record 2"):
        journal.read()
    objects.remove_one(f"{RUN}/done/0000000003")
    objects.write(f"{RUN}/done/0000000001", b"[2] 00000000\n")
    with pytest.raises(ResumeError, match="not a record of columns 0 to 2999"):
        journal.read()
    objects.write("run", RUN.encode() + b"\n{}")
    with pytest.raises(ResumeError, match="is damaged"):
        journal.read()
    objects.write("run", b"a user's")
    with pytest.raises(OutputError, match="is not the journal of a run"):
        journal.read()


def test_faults_pass(store: ObjectStore) -> None:
    with behind_proxy(store, every=3) as (near, proxy):
        out = place(near, "faults")
        journal = BucketJournal(out)
        journal.create(RUN, HEADER, FILES)
        for column in range(6):
            journal.append([column])
        again = BucketJournal(out)
        found = again.read()
        assert found is not None
        assert sorted(found[1]) == list(range(6))
        assert again.files() == FILES
        assert len(proxy.faults_met) == 4


def test_an_object_is_removed_though_the_bucket_says_that_it_is_not_there(store: ObjectStore) -> None:
    with behind_proxy(store, every=0) as (near, proxy):
        objects = Bucket(place(near, "removed"))
        for remove in (objects.remove_one, lambda key: objects.remove(key.partition("/")[0])):
            objects.write("a/b", b"content")
            proxy.spoil("missing", every=10**6, methods=("DELETE", "POST"))
            remove("a/b")
            assert not objects.every()
        assert proxy.faults_met["missing"] == 2


def test_a_lost_answer_is_no_other_run(store: ObjectStore) -> None:
    with behind_proxy(store, every=0) as (near, proxy):
        journal = BucketJournal(place(near, "lost"))
        proxy.spoil("lost", every=10**6, methods=("PUT", "POST"))
        journal.create(RUN, HEADER, {})
        proxy.spoil("lost", every=10**6, methods=("PUT", "POST"))
        journal.append([1])
        assert proxy.faults_met["lost"] == 2


@pytest.mark.parametrize("how", ["closed", "no bucket", "denied"])
def test_a_bucket_that_vanishes_ends_the_run(
    store: ObjectStore, how: Vanished, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "SECONDS_IN_ALL", 0.5)
    monkeypatch.setattr(object_store, "RETRIES", {"max_retries": 2, "initial_delay": "10ms", "max_delay": "20ms"})
    with behind_proxy(store, every=0) as (near, proxy):
        journal = BucketJournal(place(near, f"gone-{how.replace(' ', '-')}"))
        journal.create(RUN, HEADER, {})
        proxy.vanish(how)
        with pytest.raises(OutputError, match=r"cannot be written: .*continue with resume=True"):
            journal.append([1])
        proxy.come_back()
        journal.append([1])


def test_a_bucket_that_is_not_there_is_named(s3: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "SECONDS_IN_ALL", 0.5)
    with pytest.raises(OutputError, match="there is no such bucket"):
        check_bucket(Location.of("s3://nowhere/out.zarr"))
    with pytest.raises(OutputError, match="a web server, which takes no files"):
        check_place(Location.of("https://host/out.zarr"), ())
    with pytest.raises(OutputError, match="s3://bucket is a whole bucket; give a name inside it"):
        check_place(Location.of("zarr://s3://bucket/"), ())
    for volume, why in (
        ("s3://bucket/a/out.zarr", "is"),
        ("s3://bucket/a/out.zarr.journal/v.zarr", "contains"),
        ("s3://bucket/a/out.zarr/v.zarr", "contains"),
        ("s3://bucket/a", "is inside"),
    ):
        with pytest.raises(OutputError, match=rf", {why} {volume}, which is read"):
            check_place(Location.of("s3://bucket/a/out.zarr"), [Location.of(volume)])
    for volume in ("s3://bucket/a/out.zarr2", "gs://bucket/a/out.zarr", "s3://other/a/out.zarr", "/a/out.zarr"):
        check_place(Location.of("s3://bucket/a/out.zarr"), [Location.of(volume)])
