"""Jobs whose outputs, claims and records are objects in buckets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import znnpy
from tests.support.bucket_runs import expected, furnish, read
from tests.support.object_stores import behind_proxy, gcs_store, s3_store
from znnpy.cluster import finish, prepare, run_items, running
from znnpy.cluster.claims import finished_items, record_of
from znnpy.cluster.job import JobRecord
from znnpy.cluster.running import Limits, release
from znnpy.errors import ResumeError, VolumeError
from znnpy.volume import bucket
from znnpy.volume.location import Location

if TYPE_CHECKING:
    from tests.support.object_stores import ObjectStore

pytestmark = pytest.mark.slow

ITEMS = (12, 18, 21)
COUNT = 8


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return furnish(tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="module", params=["s3", "gcs"])
def store(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    with s3_store() if request.param == "s3" else gcs_store() as made:
        yield made


def close(out: str, place: Path) -> bool:
    """Return whether an output is what one process gives, but for rounding."""
    exact = expected(place)
    return bool(np.abs(read(out) - exact).max() <= 1e-5 * np.abs(exact).max())


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    release()


@pytest.mark.parametrize(
    "name",
    ["sharded.zarr", pytest.param("job.zarr", marks=pytest.mark.long), pytest.param("job.n5", marks=pytest.mark.long)],
)
def test_items_are_computed_and_finished(store: ObjectStore, place: Path, name: str) -> None:
    out = store.url(name)
    sharded = name.startswith("sharded")
    job = prepare(place / "v.npy", place / "n.yaml", out=out, items=ITEMS, ram="4G", calibrate=False, sharded=sharded)
    assert JobRecord.load(job).count == COUNT
    for item in (7, 3, 5):
        run_items(job, [item], worker="first")
        release()
    assert finished_items(job.files, COUNT) == [3, 5, 7]
    again = prepare(place / "v.npy", place / "n.yaml", out=out, resume=True, ram="4G", calibrate=False, sharded=sharded)
    assert again == job
    with pytest.raises(VolumeError):
        read(out)
    records = finish(job)
    assert [record.worker for record in records].count("first") == 3
    assert close(out, place)
    left = {key.split("/")[0] for key in bucket.check_bucket(Location.of(store.url(""))).every()}
    assert not any(key.startswith(f"{name}.") for key in left)
    with pytest.raises(ResumeError, match="so the job is finished or was removed"):
        run_items(job, [0])


def test_voxels_of_late_writes_are_computed_again(store: ObjectStore, place: Path) -> None:
    job = prepare(place / "v.npy", place / "n.yaml", out=store.url("late.zarr"), items=ITEMS, ram="4G", calibrate=False)
    run_items(job, range(COUNT), attempt="winner")
    before = record_of(job.files, 4)
    job.files.write("begun/000000004/late", b"")
    process = running._process_of(job, Limits())
    box = process.boxes(4)[0]
    process._opened().write(box, np.full((2, *box.size), 0.25, np.float32), 0)
    process._opened().flush()
    process._opened().sync()
    records = finish(job)
    assert records[4] != before
    assert close(store.url("late.zarr"), place)


def test_a_bucket_whose_requests_fail_now_and_then(place: Path) -> None:
    with ExitStack() as stack:
        store = stack.enter_context(s3_store())
        proxied, _ = stack.enter_context(behind_proxy(store))
        out = proxied.url("faulty.zarr")
        job = prepare(place / "v.npy", place / "n.yaml", out=out, items=ITEMS, ram="4G", calibrate=False)
        run_items(job, range(0, COUNT, 2))
        finish(job)
        assert close(out, place)


def test_one_call_does_it_all(store: ObjectStore, place: Path) -> None:
    out = store.url("called.zarr")
    report = znnpy.infer(place / "v.npy", place / "n.yaml", out=out, part="1/1", ram="4G", calibrate=False)
    assert not report.computed < report.voxels
    znnpy.infer(place / "v.npy", place / "n.yaml", out=out, finish=True, ram="4G", calibrate=False)
    assert close(out, place)
