"""Small arrays that tensorstore alone writes and reads, in the formats of volumes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import tensorstore as ts

METADATA = {"zarr": ".zarray", "zarr3": "zarr.json", "n5": "attributes.json", "neuroglancer_precomputed": "info"}
"""Formats by the names of their drivers, and the file that says what the chunks are."""

FIRST_CHUNK = {"zarr": "0.0.0", "zarr3": "c/0/0/0", "n5": "0/0/0", "neuroglancer_precomputed": "1_1_1/0-4_0-4_0-4"}
FIRST = (slice(0, 4),) * 3  # its voxels
VOXELS: npt.NDArray[np.uint16] = np.arange(1, 513, dtype=np.uint16).reshape(8, 8, 8)  # none is 0, what missing reads as


def voxels(driver: str) -> npt.NDArray[np.uint16]:
    """Return the voxels of the arrays here; precomputed has an axis of channels besides."""
    return VOXELS[..., None] if driver == "neuroglancer_precomputed" else VOXELS


def schema(driver: str) -> dict[str, Any]:
    """Return what `ts.open` needs to create the array: eight chunks of 4 × 4 × 4."""
    whole = voxels(driver)
    chunks = ts.ChunkLayout(chunk_shape=(4, 4, 4, 1)[: whole.ndim])
    return {"dtype": ts.uint16, "shape": whole.shape, "chunk_layout": chunks}


def retries(times: int = 3) -> Any:
    """Return a context of its own, where a request is tried again so often, without long waits."""
    bound = {"max_retries": times, "initial_delay": "5ms", "max_delay": "20ms"}
    return ts.Context({f"{store}_request_retries": bound for store in ("s3", "gcs", "http")})


def opened(driver: str, kvstore: dict[str, Any], times: int = 3, **more: Any) -> Any:
    """Open an array that is there."""
    spec = {"driver": driver, "kvstore": kvstore, **more}
    return ts.open(spec, open=True, context=retries(times)).result(timeout=30)


def written(driver: str, kvstore: dict[str, Any], **more: Any) -> Any:
    """Create the array and write all its chunks."""
    spec = {"driver": driver, "kvstore": kvstore, **more}
    array = ts.open(spec, create=True, context=retries(), **schema(driver)).result(timeout=30)
    array.write(voxels(driver)).result(timeout=30)
    return array


def keys_at(kvstore: dict[str, Any], times: int = 3) -> Any:
    """Open the keys and values themselves."""
    return ts.KvStore.open(kvstore, context=retries(times)).result(timeout=30)
