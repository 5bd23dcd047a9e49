"""Stores of objects that tests of volumes share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.object_stores import ObjectStore


@pytest.fixture(scope="module")
def s3() -> Iterator[ObjectStore]:
    """Return S3 with an empty bucket, which the environment names."""
    from tests.support.object_stores import s3_store

    with s3_store() as store:
        yield store


@pytest.fixture(scope="module")
def gcs() -> Iterator[ObjectStore]:
    """Return Google Cloud Storage with an empty bucket, which the environment names."""
    from tests.support.object_stores import gcs_store

    with gcs_store() as store:
        yield store
