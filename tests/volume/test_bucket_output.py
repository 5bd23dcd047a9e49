"""Outputs in buckets: complete, resumed and replaced, through faults, and each chunk is written once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.bucket_runs import expected, furnish, infer, read
from tests.support.object_stores import behind_proxy
from znnpy.errors import OutputError, ResumeError
from znnpy.verify import verify
from znnpy.volume import bucket as bucket_module
from znnpy.volume import bucket_journal, column_record, object_store
from znnpy.volume import store as store_module
from znnpy.volume.bucket import Bucket
from znnpy.volume.location import Location

if TYPE_CHECKING:
    from tests.support.object_stores import ObjectStore

FORMATS = ("{}.zarr", "{}.n5", "{}.precomputed", "zarr2://{}-2.zarr")


@pytest.fixture(params=["s3", "gcs"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setattr(object_store, "RETRIES", {"max_retries": 4, "initial_delay": "10ms", "max_delay": "50ms"})
    monkeypatch.setattr(bucket_module, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(bucket_journal, "HANDOVER_SECONDS", 0.0)
    monkeypatch.setattr(store_module, "CHUNK", 20)  # so that a chunk lies in one column
    found: ObjectStore = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a volume, a network, and what it predicts."""
    return furnish(tmp_path_factory.mktemp("bucket"))


def named(store: ObjectStore, form: str, name: str) -> str:
    scheme, mark, rest = form.partition("://")
    return f"{scheme}://{store.url(rest.format(name))}" if mark else store.url(form.format(name))


@pytest.mark.parametrize("form", FORMATS)
def test_an_output_is_complete_and_verified(store: ObjectStore, place: Path, form: str) -> None:
    out = named(store, form, "whole")
    with behind_proxy(store, every=20) as (near, proxy):
        infer(place, named(near, form, "whole"), multiscale=1)
        assert np.array_equal(read(out), expected(place))
        assert proxy.faults_met
        spoiled = proxy.spoiled_uploads  # each of them is repeated, though the store may have taken it
        assert not proxy.uploads - spoiled - Counter(dict.fromkeys(proxy.uploads, 1))
    report = verify(out, place / "v.npy", network=place / "n.yaml", samples=50)
    assert report.worst <= report.allowed
    assert not Bucket(Location.of(out).with_name(Location.of(out).name + ".journal")).holds("run")


def test_each_chunk_is_written_once(store: ObjectStore, place: Path) -> None:
    with behind_proxy(store, every=0) as (near, proxy):
        infer(place, named(near, "{}.zarr", "once"))
        written = {key: count for key, count in proxy.uploads.items() if "/c/" in key}
        assert written
        assert set(written.values()) == {1}


class Stop(Exception):
    """An error that stops a run in a test."""


@pytest.mark.parametrize("form", FORMATS)
def test_a_run_that_ended_is_continued(
    store: ObjectStore, place: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_record, "SYNC_SECONDS", 0.0)
    out = named(store, form, "resumed")

    def stop(event: Any) -> None:
        if event.columns_done >= 2:
            raise Stop

    with pytest.raises(Stop):
        infer(place, out, stop)
    with pytest.raises(Exception, match=r"is not|holds no|there is no|cannot be"):
        read(out)
    with pytest.raises(OutputError, match="an unfinished run left"):
        infer(place, out)
    with pytest.raises(ResumeError, match="belongs to another job"):
        infer(place, out, resume=True, border="reflect")
    report = infer(place, out, resume=True)
    assert 0 < report.computed < report.voxels
    assert np.array_equal(read(out), expected(place))
    assert infer(place, out, resume=True).computed == 0


def test_an_output_is_replaced_only_if_asked(store: ObjectStore, place: Path) -> None:
    out = named(store, "{}.zarr", "replaced")
    infer(place, out, border="reflect")
    with pytest.raises(OutputError, match="exists; give overwrite=True"):
        infer(place, out)
    infer(place, out, overwrite=True)
    assert np.array_equal(read(out), expected(place))
    Bucket(Location.of(out)).write("zarr.json", b'{"zarr_format": 3, "node_type": "group", "attributes": {"a": 1}}')
    with pytest.raises(OutputError, match="was not written by znnpy"):
        infer(place, out, overwrite=True)


def test_a_bucket_that_vanishes_stops_the_run_resumably(
    store: ObjectStore, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_record, "SYNC_SECONDS", 0.0)
    monkeypatch.setattr(bucket_module, "SECONDS_IN_ALL", 0.5)
    out = named(store, "{}.zarr", "vanished")
    with behind_proxy(store, every=0) as (near, proxy):
        name = named(near, "{}.zarr", "vanished")

        def vanish(event: Any) -> None:
            if event.columns_done >= 3:
                proxy.vanish("closed")

        with pytest.raises(OutputError, match=r"continue with resume=True"):
            infer(place, name, vanish)
        proxy.come_back()
    report = infer(place, out, resume=True)
    assert 0 < report.computed < report.voxels
    assert np.array_equal(read(out), expected(place))


def test_formats_of_files_are_refused(store: ObjectStore, place: Path) -> None:
    with pytest.raises(OutputError, match=r"not of a format that is written to buckets \(.zarr, .n5, .precomputed\)"):
        infer(place, store.url("out.h5"))
    with pytest.raises(OutputError, match="a web server, which takes no files"):
        infer(place, "https://127.0.0.1/out.zarr")
