"""Names of volumes and outputs: paths and URLs, with a dataset inside."""

from __future__ import annotations

from pathlib import Path

import pytest

from znnpy.volume.location import Location


@pytest.mark.parametrize(
    ("name", "place", "scheme", "dataset", "prefix"),
    [
        ("em.h5", "em.h5", "file", None, None),
        ("em.h5::raw/0", "em.h5", "file", "raw/0", None),
        ("a::b/em.h5", "a", "file", "b/em.h5", None),
        ("file:///data/a%20b.zarr", "/data/a b.zarr", "file", None, None),
        ("s3://bucket/em.zarr/", "s3://bucket/em.zarr", "s3", None, None),
        ("s3://bucket/em.zarr::raw", "s3://bucket/em.zarr", "s3", "raw", None),
        ("gs://bucket/a/em.n5", "gs://bucket/a/em.n5", "gs", None, None),
        ("https://host:8080/em.zarr", "https://host:8080/em.zarr", "https", None, None),
        ("precomputed://gs://bucket/em", "gs://bucket/em", "gs", None, "precomputed"),
        ("zarr2://out.zarr", "out.zarr", "file", None, "zarr2"),
    ],
)
def test_a_name_is_read(name: str, place: str, scheme: str, dataset: str | None, prefix: str | None) -> None:
    assert Location.of(name) == Location(place, scheme, dataset, prefix)


def test_a_file_may_have_colons_in_its_name(tmp_path: Path) -> None:
    file = tmp_path / "a::b.h5"
    file.touch()
    assert Location.of(str(file)) == Location(str(file))
    assert Location.of(file) == Location(str(file))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ftp://host/em.zarr", "only file://, s3://, gs://, http://, https:// are known"),
        ("s3://", "names no bucket"),
        ("https:///em.zarr", "names no host"),
        ("s3://bucket/../em.zarr", "has . or .. between slashes"),
        ("file://host/em.zarr", "names the host 'host'"),
    ],
)
def test_a_name_that_is_wrong_is_refused(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Location.of(name)


def test_a_dataset_is_named_once() -> None:
    assert Location.of("em.h5", "raw").dataset == "raw"
    assert Location.of("em.h5::raw", "raw").dataset == "raw"
    with pytest.raises(ValueError, match="names the dataset raw, and label is given"):
        Location.of("em.h5::raw", "label")


def test_parts_of_a_location() -> None:
    one = Location.of("s3://bucket/a/em.zarr")
    assert (one.bucket, one.key, one.name) == ("bucket", "a/em.zarr", "em.zarr")
    assert str(one.with_name("out.zarr")) == "s3://bucket/a/out.zarr"
    assert str(one.inside("0/c/1")) == "s3://bucket/a/em.zarr/0/c/1"
    assert Location.of("data/em.h5").with_name("x.h5").path == Path("data/x.h5")
