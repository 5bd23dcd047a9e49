"""Tensorstore alone, where an object store errs: what it tries again, what it says, and what it does not notice."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

from tests.support.faulty_proxy import IN_TURN, Fault, Vanished
from tests.support.object_stores import ObjectStore, behind_proxy, gcs_address, http_store
from tests.support.tensorstore_arrays import (
    FIRST,
    FIRST_CHUNK,
    METADATA,
    VOXELS,
    keys_at,
    opened,
    retries,
    schema,
    voxels,
    written,
)

TRIED_AGAIN: tuple[Fault, ...] = ("busy", "reset", "truncated")
WHAT_THEY_SAY = {
    "busy": "ABORTED: .*All 3 retry attempts failed: .*503",
    "reset": "ABORTED: .*All 3 retry attempts failed: CURL error .*Recv failure",
    "truncated": "ABORTED: .*All 3 retry attempts failed: CURL error Transferred a partial file: .* bytes missing",
}
CHUNKS = "c(/|%2F)[0-9]"  # paths of chunks of zarr 3


@pytest.fixture(params=["s3", "gcs", "http"])
def readable(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Return each store, with an array of zarr 3 at `tmp_path.name` in it."""
    if request.param == "http":
        written("zarr3", {"driver": "file", "path": f"{tmp_path}/{tmp_path.name}/"})
        with http_store(tmp_path) as store:
            yield store
    else:
        store = request.getfixturevalue(request.param)
        written("zarr3", store.kvstore(f"{tmp_path.name}/"))
        yield store


@pytest.fixture(params=["s3", "gcs"])
def writable(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


class TestReads:
    @pytest.mark.parametrize("fault", TRIED_AGAIN)
    def test_are_tried_again_until_they_succeed(self, fault: Fault, readable: ObjectStore, tmp_path: Path) -> None:
        with behind_proxy(readable, every=0) as (store, proxy):
            array = opened("zarr3", store.kvstore(f"{tmp_path.name}/"))
            proxy.spoil(fault, every=2, only=CHUNKS)
            assert np.array_equal(array[FIRST].read().result(), VOXELS[FIRST])
            assert proxy.faults_met == {fault: 1}

    @pytest.mark.parametrize("fault", TRIED_AGAIN)
    def test_fail_after_so_many_retries(self, fault: Fault, readable: ObjectStore, tmp_path: Path) -> None:
        with behind_proxy(readable, every=0) as (store, proxy):
            array = opened("zarr3", store.kvstore(f"{tmp_path.name}/"))
            proxy.spoil(fault, only=CHUNKS)
            with pytest.raises(ValueError, match=WHAT_THEY_SAY[fault]):
                array[FIRST].read().result()
            assert proxy.faults_met[fault] in (4, 5)  # a reset of a connection that was kept open is tried once more

    def test_are_not_tried_again_where_access_is_denied(self, readable: ObjectStore, tmp_path: Path) -> None:
        with behind_proxy(readable, every=0) as (store, proxy):
            array = opened("zarr3", store.kvstore(f"{tmp_path.name}/"))
            proxy.spoil("denied", only=CHUNKS)
            with pytest.raises(ValueError, match=r"PERMISSION_DENIED: Error reading .*403"):
                array[FIRST].read().result()
            assert proxy.faults_met == {"denied": 1}

    def test_believe_a_404_at_once_and_give_zeros(self, readable: ObjectStore, tmp_path: Path) -> None:
        with behind_proxy(readable, every=0) as (store, proxy):
            array = opened("zarr3", store.kvstore(f"{tmp_path.name}/"))
            proxy.spoil("missing", only=CHUNKS)
            assert not array[FIRST].read().result().any()
            assert proxy.faults_met == {"missing": 1}

    def test_fail_for_a_404_if_missing_chunks_are_refused(self, readable: ObjectStore, tmp_path: Path) -> None:
        with behind_proxy(readable, every=0) as (store, proxy):
            array = opened("zarr3", store.kvstore(f"{tmp_path.name}/"), fill_missing_data_reads=False)
            proxy.spoil("missing", every=2, only=CHUNKS)
            with pytest.raises(ValueError, match=r"NOT_FOUND: chunk \{0, 0, 0\} stored at .* is missing"):
                array[FIRST].read().result()
            assert np.array_equal(array[FIRST].read().result(), VOXELS[FIRST])  # and nothing keeps the 404 in mind

    def test_of_half_a_chunk_that_seems_whole_fail_for_its_length(self, readable: ObjectStore, tmp_path: Path) -> None:
        with behind_proxy(readable, every=0) as (store, proxy):
            array = opened("zarr3", store.kvstore(f"{tmp_path.name}/"))
            proxy.spoil("shortened", only=CHUNKS)
            with pytest.raises(
                ValueError, match=r"FAILED_PRECONDITION: Error reading .*(Not enough data|[Tt]runcated)"
            ):
                array[FIRST].read().result()
            assert proxy.faults_met == {"shortened": 1}

    @pytest.mark.parametrize("how", ["closed", "no bucket", "denied"])
    def test_of_a_vanished_store(self, how: Vanished, readable: ObjectStore, tmp_path: Path) -> None:
        with behind_proxy(readable, every=0) as (store, proxy):
            array = opened("zarr3", store.kvstore(f"{tmp_path.name}/"))
            proxy.vanish(how)
            if how == "no bucket":  # every chunk of a bucket that is gone reads as zeros
                assert not array[FIRST].read().result().any()
            else:
                with pytest.raises(ValueError, match=r"ABORTED|PERMISSION_DENIED"):
                    array[FIRST].read().result()
            proxy.come_back()
            assert np.array_equal(array[FIRST].read().result(), VOXELS[FIRST])

    def test_with_faults_in_turn_are_right_but_for_each_404(self, readable: ObjectStore, tmp_path: Path) -> None:
        with behind_proxy(readable, every=0) as (store, proxy):
            array = opened("zarr3", store.kvstore(f"{tmp_path.name}/"))
            proxy.spoil(*IN_TURN, every=2, only=CHUNKS)
            read = array.read().result()
            assert {"missing", "busy", "reset", "truncated"} == set(proxy.faults_met)
            assert np.count_nonzero(read == 0) == 64 * proxy.faults_met["missing"]
            assert np.array_equal(read[read > 0], VOXELS[read > 0])


class TestDamagedChunks:
    """Chunks that the store gives as they are; the cases are of S3, since no store looks into values."""

    @pytest.mark.parametrize("driver", METADATA)
    @pytest.mark.parametrize("part", [slice(0, 64), slice(0, 0)])
    def test_of_another_length_are_refused_without_compression(self, driver: str, part: slice, s3: ObjectStore) -> None:
        raw: dict[str, Any] = {
            "zarr": {"compressor": None},
            "n5": {"compression": {"type": "raw"}},
            "zarr3": {"codecs": [{"name": "bytes", "configuration": {"endian": "little"}}]},
        }
        place = s3.kvstore(f"damaged {driver} {part.stop}/")
        written(driver, place, **({"metadata": raw[driver]} if driver in raw else {}))
        keys = keys_at(place)
        keys[FIRST_CHUNK[driver]] = keys[FIRST_CHUNK[driver]][part]
        with pytest.raises(ValueError, match="FAILED_PRECONDITION: Error reading"):
            opened(driver, place)[FIRST].read().result()

    @pytest.mark.parametrize("codec", ["gzip", "zstd", "crc32c"])
    @pytest.mark.parametrize("damage", ["half", "bit"])
    def test_are_refused_with_a_codec_that_notices(self, codec: str, damage: str, s3: ObjectStore) -> None:
        settings = {"gzip": {"level": 5}, "zstd": {"level": 5, "checksum": True}, "crc32c": {}}
        little = {"name": "bytes", "configuration": {"endian": "little"}}
        codecs = [little, {"name": codec, "configuration": settings[codec]}]
        place = s3.kvstore(f"damaged {codec} {damage}/")
        written("zarr3", place, metadata={"codecs": codecs})
        keys = keys_at(place)
        good = keys["c/0/0/0"]
        keys["c/0/0/0"] = good[: len(good) // 2] if damage == "half" else good[:40] + bytes([good[40] ^ 1]) + good[41:]
        with pytest.raises(ValueError, match=r"(FAILED_PRECONDITION|DATA_LOSS): Error reading"):
            opened("zarr3", place)[FIRST].read().result()

    def test_with_another_bit_are_believed_without_a_checksum(self, s3: ObjectStore) -> None:
        place = s3.kvstore("damaged bit/")
        written("neuroglancer_precomputed", place)
        keys = keys_at(place)
        good = keys[FIRST_CHUNK["neuroglancer_precomputed"]]
        keys[FIRST_CHUNK["neuroglancer_precomputed"]] = bytes([good[0] ^ 1]) + good[1:]
        read = opened("neuroglancer_precomputed", place).read().result()
        assert np.count_nonzero(read != voxels("neuroglancer_precomputed")) == 1


class TestWrites:
    @pytest.mark.parametrize("fault", ["busy", "reset", "truncated", "lost"])
    def test_are_tried_again_until_they_succeed(self, fault: Fault, writable: ObjectStore) -> None:
        with behind_proxy(writable, every=0) as (store, proxy):
            keys = keys_at(store.kvstore(f"{fault}/"))
            proxy.spoil(fault, every=2)
            keys.write("one", b"value").result()
            assert keys["one"] == b"value"
            twice = fault == "lost" or (fault == "truncated" and writable.kind == "gcs")  # S3's answer has no body
            assert proxy.uploads == {f"{writable.bucket}/{fault}/one": 2 if twice else 1}

    @pytest.mark.parametrize("fault", ["busy", "reset", "lost"])
    def test_fail_after_so_many_retries(self, fault: Fault, writable: ObjectStore) -> None:
        with behind_proxy(writable, every=0) as (store, proxy):
            keys = keys_at(store.kvstore(f"{fault}/"))
            proxy.spoil(fault)
            with pytest.raises(ValueError, match="ABORTED: All 3 retry attempts failed"):
                keys.write("one", b"value").result()

    @pytest.mark.parametrize(("how", "words"), [("no bucket", "NOT_FOUND"), ("denied", "PERMISSION_DENIED")])
    def test_of_a_vanished_store_fail_at_once(self, how: Vanished, words: str, writable: ObjectStore) -> None:
        with behind_proxy(writable, every=0) as (store, proxy):
            array = written("zarr3", store.kvstore(f"vanished {how}/"))
            proxy.vanish(how)
            with pytest.raises(ValueError, match=f"{words}: .*Error writing"):
                array[FIRST].write(1).result()
            assert proxy.faults_met == {"vanished": 1}

    def test_with_a_condition_fail_for_their_own_earlier_write(self, writable: ObjectStore) -> None:
        with behind_proxy(writable, every=0) as (store, proxy):
            keys = keys_at(store.kvstore("condition/"))
            absent = keys.read("one").result().stamp.generation
            proxy.spoil("lost", every=2, methods=("PUT", "POST"))
            assert keys.write("one", b"value", if_equal=absent).result().generation == b""
            assert keys["one"] == b"value"

    def test_with_a_condition_into_no_bucket_look_like_a_mismatch_on_s3(self, writable: ObjectStore) -> None:
        with behind_proxy(writable, every=0) as (store, proxy):
            keys = keys_at(store.kvstore("condition/"))
            absent = keys.read("absent").result().stamp.generation
            proxy.vanish("no bucket")
            write = keys.write("absent", b"value", if_equal=absent)
            if writable.kind == "s3":
                assert write.result().generation == b""
            else:
                with pytest.raises(ValueError, match="NOT_FOUND"):
                    write.result()

    def test_that_create_an_array_in_no_bucket_of_s3_go_on_for_ever(self, writable: ObjectStore) -> None:
        with behind_proxy(writable, every=0) as (store, proxy):
            proxy.vanish("no bucket")
            spec = {"driver": "zarr3", "kvstore": store.kvstore("created/")}
            creation = ts.open(spec, create=True, context=retries(), **schema("zarr3"))
            if writable.kind == "s3":
                with pytest.raises(TimeoutError):
                    creation.result(timeout=0.4)
                assert proxy.requests > 8  # far more than retries allow
                proxy.vanish("denied")  # ends it
            with pytest.raises(ValueError, match=r"PERMISSION_DENIED|NOT_FOUND: .*Error writing"):
                creation.result(timeout=30)

    def test_of_parts_of_a_chunk_keep_the_rest_where_its_read_met_a_404(self, writable: ObjectStore) -> None:
        with behind_proxy(writable, every=0) as (store, proxy):
            array = written("zarr3", store.kvstore("parts/"))
            proxy.spoil("missing", every=1000, only=CHUNKS, methods=("GET",))
            array[0, 0, 0].write(7).result()
            assert proxy.faults_met == {"missing": 1}
            expected = VOXELS[FIRST].copy()
            expected[0, 0, 0] = 7
            assert np.array_equal(array[FIRST].read().result(), expected)


class TestLists:
    def test_of_a_vanished_store_fail(self, writable: ObjectStore) -> None:
        with behind_proxy(writable, every=0) as (store, proxy):
            keys = keys_at(store.kvstore("lists/"))
            words: dict[Vanished, str] = {"no bucket": "NOT_FOUND", "denied": "PERMISSION_DENIED", "closed": "ABORTED"}
            for how, word in words.items():
                proxy.vanish(how)
                with pytest.raises(ValueError, match=word if store.kind == "s3" or how == "closed" else "INTERNAL"):
                    keys.list().result()

    def test_name_a_chunk_whose_read_met_a_404(self, writable: ObjectStore) -> None:
        with behind_proxy(writable, every=0) as (store, proxy):
            place = store.kvstore("named/")
            written("zarr3", place)
            keys = keys_at(place)
            proxy.spoil("missing", only=CHUNKS)
            assert keys.read("c/0/0/0").result().state == "missing"
            proxy.every = 0
            assert keys.list(ts.KvStore.KeyRange("c/0/0/0", "c/0/0/0\0")).result() == [b"c/0/0/0"]


class TestConnections:
    @pytest.mark.parametrize("times", [0, 2])
    @pytest.mark.parametrize(
        ("host", "words"), [("127.0.0.1:9", "connect to server"), ("host.invalid", "resolve host")]
    )
    def test_that_cannot_be_made_fail_after_so_many_retries(self, times: int, host: str, words: str) -> None:
        bucket = {"bucket": "bucket", "aws_region": "us-east-1", "aws_credentials": {"type": "anonymous"}}
        address = f"http://{host}"
        with gcs_address(address):
            for place in (
                {"driver": "s3", "endpoint": address, **bucket},
                {"driver": "gcs", "bucket": "bucket"},
                {"driver": "http", "base_url": f"{address}/"},
            ):
                with pytest.raises(ValueError, match=f"(ABORTED|UNAVAILABLE): .*CURL error Could not {words}"):
                    keys_at(place, times).read("one").result(timeout=30)

    def test_are_tried_again_after_a_second_by_default(self, readable: ObjectStore, tmp_path: Path) -> None:
        # 32 times: after 1, 2, 4, 8 and 16 seconds, and 27 times after 32, a quarter of an hour in all.
        with behind_proxy(readable, every=1, faults=["busy"]) as (store, proxy):
            keys = ts.KvStore.open(store.kvstore(f"{tmp_path.name}/"), context=ts.Context()).result()
            read = keys.read("zarr.json")
            with pytest.raises(TimeoutError):
                read.result(timeout=0.3)
            assert proxy.faults_met == {"busy": 1}
            read.cancel()

    def test_without_credentials_in_the_environment_say_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name, raising=False)
        place = ObjectStore("s3", "http://127.0.0.1:9", "bucket").kvstore()
        with pytest.raises(ValueError, match=r"INTERNAL: Failed to get credentials .*INVALID_ENVIRONMENT"):
            keys_at(place).read("one").result(timeout=30)

    def test_that_stay_silent_are_waited_for(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            place = {"driver": "http", "base_url": f"http://127.0.0.1:{silent.getsockname()[1]}/"}
            read = keys_at(place).read("one")
            with pytest.raises(TimeoutError):
                read.result(timeout=0.3)
            read.cancel()
