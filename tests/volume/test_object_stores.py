"""Tensorstore alone with object stores: formats, conditional writes, ranges, and metadata that are not there yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

from tests.support.object_stores import ObjectStore, behind_proxy, http_store
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

DRIVERS = tuple(METADATA)
STORES = ("s3", "gcs", "file")


@pytest.fixture(params=STORES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Return a prefix of each store, and a folder."""
    if request.param == "file":
        return {"driver": "file", "path": f"{tmp_path}/"}
    store: ObjectStore = request.getfixturevalue(request.param)
    return store.kvstore(f"{tmp_path.name}/")


@pytest.mark.parametrize("driver", DRIVERS)
def test_arrays_are_written_and_read(driver: str, place: dict[str, Any]) -> None:
    written(driver, place)
    assert np.array_equal(opened(driver, place).read().result(), voxels(driver))
    names = {name.decode() for name in keys_at(place).list().result()}
    assert len(names) == 9
    assert {METADATA[driver], FIRST_CHUNK[driver]} < names


@pytest.mark.parametrize("driver", DRIVERS)
def test_arrays_are_read_over_http(driver: str, tmp_path: Path) -> None:
    written(driver, {"driver": "file", "path": f"{tmp_path}/of files/"})
    with http_store(tmp_path) as web:
        array = opened(driver, web.kvstore("of files/"))
        assert np.array_equal(array.read().result(), voxels(driver))
        with pytest.raises(NotImplementedError, match="does not support"):
            array.write(0).result()
        with pytest.raises(NotImplementedError, match="does not support"):
            keys_at(web.kvstore()).list().result()


INNER = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
IN_ONE_SHARD = {
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [8, 8, 8]}},
    "codecs": [{"name": "sharding_indexed", "configuration": {"chunk_shape": [4, 4, 4], "codecs": INNER}}],
}


@pytest.mark.parametrize("kind", ["s3", "gcs"])
def test_zarr_in_shards_is_read_in_ranges(kind: str, request: pytest.FixtureRequest) -> None:
    store: ObjectStore = request.getfixturevalue(kind)
    with behind_proxy(store, every=0) as (seen_through, proxy):
        spec = {"driver": "zarr3", "kvstore": seen_through.kvstore("shards/"), "metadata": IN_ONE_SHARD}
        array = ts.open(spec, create=True, context=retries(), dtype=ts.uint16, shape=[8, 8, 8]).result()
        array.write(VOXELS).result()
        assert proxy.uploads == {f"{store.bucket}/shards/{name}": 1 for name in ("zarr.json", "c/0/0/0")}
        seen = proxy.requests
        assert np.array_equal(array[FIRST].read().result(), VOXELS[FIRST])
        ranges = [
            one.headers.get("range", "") for one in proxy.seen[seen:] if "c%2F0" in one.path or "/c/0" in one.path
        ]
        assert ranges == ["bytes=-132", "bytes=0-131"]  # the index of 8 chunks, and one chunk with its checksum


def test_s3_and_gcs_take_one_upload_for_each_chunk(s3: ObjectStore, gcs: ObjectStore) -> None:
    for store in (s3, gcs):
        with behind_proxy(store, every=0) as (seen_through, proxy):
            written("zarr3", seen_through.kvstore("once/"))
            assert len(proxy.uploads) == 9
            assert set(proxy.uploads.values()) == {1}


class TestConditions:
    def test_a_key_is_created_only_once(self, place: dict[str, Any]) -> None:
        keys = keys_at(place)
        absent = keys.read("one").result().stamp.generation
        assert keys.write("one", b"first", if_equal=absent).result().generation
        assert keys.write("one", b"second", if_equal=absent).result().generation == b""
        assert keys["one"] == b"first"

    def test_a_key_is_replaced_only_if_it_is_as_it_was(self, place: dict[str, Any]) -> None:
        keys = keys_at(place)
        before = keys.write("one", b"first").result().generation
        assert keys.write("one", b"second", if_equal=before).result().generation
        assert keys.write("one", b"third", if_equal=before).result().generation == b""
        assert keys["one"] == b"second"

    def test_a_key_is_removed_only_if_it_is_as_it_was(self, place: dict[str, Any]) -> None:
        keys = keys_at(place)
        before = keys.write("one", b"first").result().generation
        keys.write("one", b"second").result()
        assert keys.write("one", None, if_equal=before).result().generation == b""
        assert keys["one"] == b"second"

    def test_s3_checks_conditions_itself_after_a_look_by_tensorstore(self, s3: ObjectStore) -> None:
        with behind_proxy(s3, every=0) as (store, proxy):
            keys = keys_at(store.kvstore("conditions/"))
            absent = keys.read("one").result().stamp.generation
            before = keys.write("one", b"first", if_equal=absent).result().generation
            keys.write("one", b"second", if_equal=before).result()
            puts = [one.headers for one in proxy.seen if one.method == "PUT"]
            assert [put.get("if-none-match") for put in puts] == ["*", None]
            assert [put.get("if-match") for put in puts] == [None, before[1:].decode()]
            assert [one.method for one in proxy.seen] == ["GET", "HEAD", "PUT", "HEAD", "PUT"]

    def test_gcs_checks_conditions_itself(self, gcs: ObjectStore) -> None:
        with behind_proxy(gcs, every=0) as (store, proxy):
            keys = keys_at(store.kvstore("conditions/"))
            absent = keys.read("one").result().stamp.generation
            keys.write("one", b"first", if_equal=absent).result()
            assert "&ifGenerationMatch=0" in proxy.seen[-1].path
            assert [one.method for one in proxy.seen] == ["GET", "POST"]

    def test_writes_of_whole_chunks_have_no_condition(self, s3: ObjectStore) -> None:
        with behind_proxy(s3, every=0) as (store, proxy):
            written("zarr3", store.kvstore("whole/"))
            puts = [one for one in proxy.seen if one.method == "PUT" and "/c/" in one.path]
            assert len(puts) == 8
            assert not [one for one in puts if {"if-match", "if-none-match"} & set(one.headers)]

    def test_the_generation_of_s3_is_the_md5_of_the_value(self, s3: ObjectStore) -> None:
        generation = keys_at(s3.kvstore("md5/")).write("one", b"first").result().generation
        assert generation == b'\0"8b04d5e3775d298e78455efc5ca404d5"'


class TestKeys:
    def test_parts_of_a_value_are_read(self, place: dict[str, Any]) -> None:
        keys = keys_at(place)
        keys.write("one", bytes(range(100))).result()
        for part in (slice(2, 5), slice(-3, None), slice(90, None), slice(0, 100)):
            assert keys.read("one", byte_range=part).result().value == bytes(range(100))[part]

    def test_a_range_beyond_the_end_is_refused(self, place: dict[str, Any]) -> None:
        keys = keys_at(place)
        keys.write("one", bytes(100)).result()
        for part in (slice(0, 101), slice(200, 205)):
            with pytest.raises(ValueError, match="OUT_OF_RANGE"):
                keys.read("one", byte_range=part).result()

    def test_an_empty_range_asks_whether_a_key_is_there(self, place: dict[str, Any]) -> None:
        keys = keys_at(place)
        stamp = keys.write("one", b"first").result()
        found = keys.read("one", byte_range=slice(0, 0)).result()
        assert (found.state, found.value, found.stamp.generation) == ("value", b"", stamp.generation)
        assert keys.read("two", byte_range=slice(0, 0)).result().state == "missing"

    def test_lists_hold_names_without_sizes(self, place: dict[str, Any]) -> None:
        keys = keys_at(place)
        for name in ("a/1", "a/2", "b/1"):
            keys.write(name, b"value").result()
        assert sorted(keys.list(ts.KvStore.KeyRange("a/", "a0")).result()) == [b"a/1", b"a/2"]

    def test_files_are_replaced_in_one_step(self, tmp_path: Path) -> None:
        keys = keys_at({"driver": "file", "path": f"{tmp_path}/"})
        keys.write("one", b"first").result()
        with (tmp_path / "one").open("rb") as before:
            keys.write("one", b"the second").result()
            assert before.read() == b"first"
        assert (tmp_path / "one").read_bytes() == b"the second"
        assert [path.name for path in tmp_path.iterdir()] == ["one"]  # the file it was written to is gone


class TestAssumedMetadata:
    @pytest.mark.parametrize("driver", DRIVERS)
    def test_chunks_are_written_before_the_metadata(self, driver: str, place: dict[str, Any]) -> None:
        spec = {"driver": driver, "kvstore": place}
        array = ts.open(spec, open=True, assume_metadata=True, context=retries(), **schema(driver)).result()
        array.write(voxels(driver)).result()
        assert np.array_equal(array.read().result(), voxels(driver))
        keys = keys_at(place)
        assert METADATA[driver].encode() not in keys.list().result()
        with pytest.raises(ValueError, match=r"NOT_FOUND: .* does not exist"):
            opened(driver, place)

        kept = ts.open({"driver": driver, "kvstore": {"driver": "memory"}}, create=True, **schema(driver)).result()
        assert kept.kvstore is not None
        keys.write(METADATA[driver], kept.kvstore[METADATA[driver]]).result()
        assert np.array_equal(opened(driver, place).read().result(), voxels(driver))

    def test_the_argument_open_undoes_what_the_description_assumes(self, place: dict[str, Any]) -> None:
        spec = {"driver": "zarr3", "kvstore": place, "assume_metadata": True, "open": True}
        assert ts.open(spec, context=retries(), **schema("zarr3")).result().shape == (8, 8, 8)
        with pytest.raises(ValueError, match=r"NOT_FOUND: .* does not exist"):
            ts.open(spec, open=True, context=retries(), **schema("zarr3")).result()


class TestMissingChunks:
    @pytest.mark.parametrize("driver", DRIVERS)
    def test_a_missing_chunk_reads_as_zeros_unless_that_is_refused(self, driver: str, place: dict[str, Any]) -> None:
        written(driver, place)
        keys_at(place).write(FIRST_CHUNK[driver], None).result()
        assert not opened(driver, place)[FIRST].read().result().any()
        strict = opened(driver, place, fill_missing_data_reads=False)
        with pytest.raises(ValueError, match=r"NOT_FOUND: chunk \{0, 0, 0\} stored at .* is missing"):
            strict[FIRST].read().result()

    def test_a_chunk_that_its_shard_leaves_out_is_refused_too(self, place: dict[str, Any]) -> None:
        spec = {"driver": "zarr3", "kvstore": place, "metadata": IN_ONE_SHARD}
        array = ts.open(spec, create=True, context=retries(), dtype=ts.uint16, shape=[8, 8, 8]).result()
        array.write(np.where(VOXELS > 256, VOXELS, np.uint16(0))).result()  # half of the chunks are zeros
        assert not opened("zarr3", place)[FIRST].read().result().any()
        with pytest.raises(ValueError, match=r"NOT_FOUND: chunk \{0, 0, 0\} stored at shard entry .* is missing"):
            opened("zarr3", place, fill_missing_data_reads=False)[FIRST].read().result()

    @pytest.mark.parametrize("driver", DRIVERS)
    def test_chunks_of_zeros_are_kept_only_on_request(self, driver: str, place: dict[str, Any]) -> None:
        spec: dict[str, Any] = {"driver": driver, "kvstore": place}
        ts.open(spec, create=True, context=retries(), **schema(driver)).result().write(0).result()
        kept = 1 if driver != "zarr" else 9  # without a fill value in its metadata zarr 2 keeps all
        assert len(keys_at(place).list().result()) == kept
        spec["store_data_equal_to_fill_value"] = True
        ts.open(spec, open=True, context=retries()).result().write(0).result()
        assert len(keys_at(place).list().result()) == 9


@pytest.mark.parametrize("kind", STORES)
def test_only_one_of_two_creates_an_array(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    store: ObjectStore | None = None if kind == "file" else request.getfixturevalue(kind)
    place = store.kvstore("race/") if store else {"driver": "file", "path": f"{tmp_path}/"}
    written("zarr3", place)
    with pytest.raises(ValueError, match="ALREADY_EXISTS"):
        written("zarr3", place)
