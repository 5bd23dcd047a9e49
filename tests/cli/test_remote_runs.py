"""`infer` from and to buckets and web servers that fail now and then: equal voxels, and SIGKILL at any moment."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.bucket_runs import FORMS, SUFFIXES, expected, furnish, infer, read, refusal, start, store_volume
from tests.support.object_stores import behind_proxy, gcs_store, http_store, s3_store
from tests.support.tiers import one_in
from znnpy.errors import VolumeError
from znnpy.volume import object_store, open_volume
from znnpy.volume.bucket import Bucket
from znnpy.volume.location import Location

if TYPE_CHECKING:
    from tests.support.faulty_proxy import FaultyProxy, Vanished
    from tests.support.object_stores import ObjectStore

pytestmark = pytest.mark.slow

MARKS = ("zarr.json", ".zgroup", "attributes.json", "info")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a volume, a network, and what it predicts."""
    return furnish(tmp_path_factory.mktemp("remote"))


@pytest.fixture(scope="module")
def stores(place: Path) -> Iterator[dict[str, ObjectStore]]:
    """Return each store, with the volume in each form below `v-FORM`."""
    with s3_store() as s3, gcs_store() as gcs, http_store(place) as http:
        for form in FORMS:
            key = f"v-{form}{SUFFIXES[form]}/"
            for kvstore in (s3.kvstore(key), gcs.kvstore(key), {"driver": "file", "path": f"{place}/{key}"}):
                store_volume(place, kvstore, form)
        yield {"s3": s3, "gcs": gcs, "http": http}


def volume_of(store: ObjectStore, form: str) -> str:
    return store.url(f"v-{form}{SUFFIXES[form]}")


@contextmanager
def after(proxy: FaultyProxy, requests: int, seconds: float = 60) -> Iterator[bool]:
    """Wait for so many more requests; the value is whether they came."""
    until, wanted = time.monotonic() + seconds, proxy.requests + requests
    while proxy.requests < wanted and time.monotonic() < until:
        time.sleep(0.002)
    yield proxy.requests >= wanted


class TestReading:
    @pytest.mark.parametrize(("form", "kind"), one_in(2, product(FORMS, ["s3", "gcs", "http"])))
    def test_volumes_give_the_same_prediction_whatever_fails(
        self,
        stores: dict[str, ObjectStore],
        place: Path,
        tmp_path: Path,
        kind: str,
        form: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(object_store, "RETRIES", {"max_retries": 4, "initial_delay": "10ms", "max_delay": "50ms"})
        with behind_proxy(stores[kind], every=20) as (near, proxy):
            report = infer(place, tmp_path / "out.h5", volume=volume_of(near, form))
            assert len(proxy.faults_met) == 4 or form == "sharded"
        assert report.chunks.missing == 0
        assert np.array_equal(read(str(tmp_path / "out.h5")), expected(place))

    @pytest.mark.parametrize("kind", ["s3", "gcs", "http"])
    def test_chunks_that_are_missing_are_zeros_and_counted(
        self, place: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(object_store, "RETRIES", {"max_retries": 4, "initial_delay": "10ms", "max_delay": "50ms"})
        voxels = np.load(place / "v.npy")
        voxels[8:16, 16:24, 0:8] = 0
        np.save(tmp_path / "zeros.npy", voxels)
        infer(place, tmp_path / "expected.h5", volume=tmp_path / "zeros.npy")
        with s3_store() if kind == "s3" else gcs_store() if kind == "gcs" else http_store(tmp_path) as store:
            local = {"driver": "file", "path": f"{tmp_path}/v.zarr/"}
            kvstore = local if kind == "http" else store.kvstore("v.zarr/")
            store_volume(place, kvstore, "zarr3")
            if kind == "http":
                (tmp_path / "v.zarr/c/1/2/0").unlink()
            else:
                Bucket(Location.of(store.url("v.zarr"))).remove_one("c/1/2/0")
            with behind_proxy(store, every=20) as (near, _):
                report = infer(place, tmp_path / "out.h5", volume=near.url("v.zarr"))
        assert report.chunks.missing == 1
        assert np.array_equal(read(str(tmp_path / "out.h5")), read(str(tmp_path / "expected.h5")))

    @pytest.mark.parametrize(
        ("kind", "how", "said"),
        [
            ("s3", "closed", "cannot be read"),
            ("s3", "no bucket", "there is no such bucket"),
            ("gcs", "denied", "access is denied"),
            ("http", "no bucket", "is gone"),
        ],
    )
    def test_a_volume_that_vanishes_ends_the_run_resumably(
        self, stores: dict[str, ObjectStore], place: Path, tmp_path: Path, kind: str, how: Vanished, said: str
    ) -> None:
        out = str(tmp_path / "out.h5")
        with behind_proxy(stores[kind], every=0) as (near, proxy):
            process = start(place, volume_of(near, "zarr3"), out)
            with after(proxy, 80) as came:
                assert came
                proxy.vanish(how)
            sentence = refusal(process)
            assert said in sentence
            assert not Path(out).exists()
            proxy.come_back()
            again = start(place, volume_of(near, "zarr3"), out, "--resume")
            _, errors = again.communicate(timeout=60)
            assert again.returncode == 0, errors
        assert np.array_equal(read(out), expected(place))


def looks_finished(store: ObjectStore, name: str) -> bool:
    """Return whether an output can be opened; check that it cannot where its last file is not there."""
    bucket = Bucket(Location.of(store.url(name)))
    found = any(bucket.read(mark) is not None for mark in MARKS)
    try:
        with open_volume(store.url(name)):
            return True
    except VolumeError:
        assert not name.endswith(".zarr") or not found
        return False


class TestKills:
    @pytest.mark.parametrize("kills", [4, pytest.param(12, marks=pytest.mark.long)])
    @pytest.mark.parametrize(
        ("kind", "form", "suffix"),
        [
            ("s3", "zarr3", ".zarr"),
            pytest.param("gcs", "n5", ".n5", marks=pytest.mark.long),
            ("gcs", "precomputed", ".precomputed"),
            pytest.param("s3", "zarr2", ".n5", marks=pytest.mark.long),
            pytest.param("s3", "sharded", ".precomputed", marks=pytest.mark.long),
            pytest.param("gcs", "zarr3", ".zarr", marks=pytest.mark.long),
        ],
    )
    def test_outputs_are_equal_after_kills_at_random_moments(
        self, stores: dict[str, ObjectStore], place: Path, kind: str, form: str, suffix: str, kills: int
    ) -> None:
        rng, store = random.Random(f"{kind} {form} {suffix} {kills}"), stores[kind]
        name, killed = f"killed-{form}-{kills}{suffix}", 0
        with behind_proxy(store, every=20) as (near, proxy):
            for number in range(4 * kills):
                process = start(place, volume_of(near, form), near.url(name), "--resume")
                # Most kills come early, so that much is left for the next run.
                wanted = proxy.requests + rng.randint(1, 25 if number % 3 else 200)
                while process.poll() is None and (killed >= kills or proxy.requests < wanted):
                    time.sleep(0.002)
                process.kill()
                _, errors = process.communicate(timeout=60)
                if process.returncode == 0:
                    break
                assert process.returncode == -9, errors
                killed += 1
                if looks_finished(store, name):
                    assert np.array_equal(read(store.url(name)), expected(place))
            assert process.returncode == 0
            assert killed >= min(kills, 3)
            assert proxy.faults_met
        assert np.array_equal(read(store.url(name)), expected(place))
        assert Bucket(Location.of(store.url(f"{name}.journal"))).every() == []
