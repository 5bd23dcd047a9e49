"""Read the metadata of precomputed volumes, the file `info`, and check them before tensorstore uses them.

The axes are (x, y, z, channel), and the first voxel has the coordinates `voxel_offset`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite, prod
from typing import Any

import numpy as np

from znnpy.messages import excerpt
from znnpy.volume.space import Space
from znnpy.volume.stored_array import InvalidError, Node, object_in, sizes

INFO = "info"
NAMES = ("x", "y", "z", "c")
ENCODINGS = ("raw", "jpeg", "png", "compressed_segmentation")
DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float32")
MOST_RESOLUTIONS = 100
MOST_CHANNELS = 10_000
MOST_BITS = 60  # of the numbers of chunks, minishards and shards
MINISHARD_ENTRY = 24  # bytes of the index of a minishard for each of its chunks
SHARD_ENTRY = 16  # bytes of the index of a shard for each of its minishards
FARTHEST = 2**40  # voxels from the origin


def resolutions(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the resolutions of a volume, as they are stated, the finest first; InvalidError if there are none."""
    found = document.get("scales")
    is_list = isinstance(found, list) and 0 < len(found) <= MOST_RESOLUTIONS
    if not isinstance(found, list) or not is_list or not all(isinstance(one, dict) for one in found):
        raise InvalidError(f"scales is {excerpt(found, 60)}, and must be 1 to {MOST_RESOLUTIONS} objects")
    return found


def node_of(document: dict[str, Any], scale: dict[str, Any]) -> tuple[Node, Space | None]:
    """Return the array of one resolution, and where its voxels lie; InvalidError if the metadata are wrong."""
    kind, channels = document.get("data_type"), document.get("num_channels", 1)
    if not isinstance(kind, str) or kind.lower() not in DTYPES:
        raise InvalidError(f"data_type is {excerpt(kind, 60)}, and must be one of {', '.join(DTYPES)}")
    if type(channels) is not int or not 1 <= channels <= MOST_CHANNELS:
        raise InvalidError(f"num_channels is {excerpt(channels, 60)}, and must be from 1 to {MOST_CHANNELS:,}")
    dtype = np.dtype(kind.lower())
    size = sizes(scale, "size", 1, 3)
    chunks = scale.get("chunk_sizes")
    chunk = sizes({"chunk_sizes": chunks[0] if isinstance(chunks, list) and chunks else chunks}, "chunk_sizes", 1, 3)
    offset = _offset(scale)
    key = scale.get("key")
    if not isinstance(key, str) or not key or {"", ".", ".."} & set(key.split("/")):
        raise InvalidError(f"key is {excerpt(key, 60)}, and must be the name of a folder below")
    encoding = scale.get("encoding")
    metadata: dict[str, Any] = {
        "key": key,
        "size": list(size),
        "chunk_size": list(chunk),
        "voxel_offset": list(offset),
        "resolution": [1, 1, 1],
        "encoding": encoding,
    }
    refused = None
    if encoding not in ENCODINGS:
        refused = (
            f"is encoded as {excerpt(encoding, 60)}, and only {', '.join(ENCODINGS)} are read; write it as one of these"
        )
    if encoding == "compressed_segmentation":
        metadata["compressed_segmentation_block_size"] = list(sizes(scale, "compressed_segmentation_block_size", 1, 3))
    sharding, index_bytes = None, 0
    if scale.get("sharding") is not None:
        grid = [-(-n // step) for n, step in zip(size, chunk, strict=True)]
        sharding, index_bytes = _sharding(object_in(scale, "sharding"), grid)
        metadata["sharding"] = sharding
    spec = {
        "driver": "neuroglancer_precomputed",
        "multiscale_metadata": {"data_type": dtype.name, "num_channels": channels, "type": "image"},
        "scale_metadata": metadata,
    }
    whole = (*chunk, channels)
    node = Node(
        {},
        (*size, channels),
        dtype,
        whole,
        whole,
        NAMES,
        spec,
        None if sharding else _keys(key, size, chunk, offset),
        "zero",
        is_sharded=sharding is not None,
        refused=refused,
        more_index_bytes=index_bytes,
    )
    return node, _space(scale, offset)


def _offset(scale: dict[str, Any]) -> tuple[int, ...]:
    found = scale.get("voxel_offset", [0, 0, 0])
    is_whole = isinstance(found, list) and all(type(n) is int and abs(n) <= FARTHEST for n in found)
    if not is_whole or len(found) != 3:
        raise InvalidError(f"voxel_offset is {excerpt(found, 60)}, and must be 3 whole numbers")
    return tuple(found)


def _keys(key: str, size: Sequence[int], chunk: Sequence[int], offset: Sequence[int]) -> Callable[[Sequence[int]], str]:
    """Return the function that names the file of a chunk by its index; chunks at the end are smaller."""

    def named(index: Sequence[int]) -> str:
        spans = []
        for at, whole, step, first in zip(index, size, chunk, offset, strict=False):
            spans.append(f"{first + at * step}-{first + min(whole, (at + 1) * step)}")
        return f"{key}/{'_'.join(spans)}"

    return named


def _sharding(found: dict[str, Any], grid: Sequence[int]) -> tuple[dict[str, Any], int]:
    """Return how chunks lie in shards, and the bytes of the indexes that are read for one chunk."""
    checked: dict[str, Any] = {"@type": found.get("@type"), "hash": found.get("hash")}
    if checked["@type"] != "neuroglancer_uint64_sharded_v1":
        raise InvalidError(f"sharding is {excerpt(checked['@type'], 60)}, and must be neuroglancer_uint64_sharded_v1")
    if checked["hash"] not in ("identity", "murmurhash3_x86_128"):
        raise InvalidError(f"the hash of sharding is {excerpt(checked['hash'], 60)}")
    for name in ("preshift_bits", "minishard_bits", "shard_bits"):
        bits = found.get(name)
        if type(bits) is not int or not 0 <= bits <= MOST_BITS:
            raise InvalidError(f"{name} is {excerpt(bits, 60)}, and must be from 0 to {MOST_BITS}")
        checked[name] = bits
    for name in ("minishard_index_encoding", "data_encoding"):
        checked[name] = found.get(name, "raw")
        if checked[name] not in ("raw", "gzip"):
            raise InvalidError(f"{name} is {excerpt(checked[name], 60)}, and must be raw or gzip")
    if checked["minishard_bits"] > 24:
        raise InvalidError(f"minishard_bits is {checked['minishard_bits']}, and shards of up to 24 are read")
    bits = sum((count - 1).bit_length() for count in grid)
    inside = max(checked["preshift_bits"], bits - checked["minishard_bits"] - checked["shard_bits"])
    chunks = min(prod(grid), 1 << min(inside, MOST_BITS))
    return checked, MINISHARD_ENTRY * chunks + SHARD_ENTRY * (1 << checked["minishard_bits"])


def _space(scale: dict[str, Any], offset: Sequence[int]) -> Space | None:
    """Return where the voxels lie; `resolution` is in nanometres."""
    found = scale.get("resolution")
    is_number = isinstance(found, list) and all(type(n) in (int, float) and isfinite(n) and n > 0 for n in found)
    if not isinstance(found, list) or not is_number or len(found) != 3:
        return None
    x, y, z = map(float, found)
    return Space((z, y, x), (z * offset[2], y * offset[1], x * offset[0]), ("nanometer",) * 3, NAMES)
