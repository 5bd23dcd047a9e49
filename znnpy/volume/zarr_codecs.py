"""Replace the codecs of Zarr arrays by codecs that unpack no more bytes than a chunk may have.

Replaced are gzip, zlib, bz2, lzma, zstd, blosc and lz4, in both formats and within shards. Other compressors, such as
pcodec and zfpy, are left unchanged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import zarr
from numcodecs import Zstd
from numcodecs.abc import Codec as Numcodec
from zarr.abc.codec import BytesBytesCodec, Codec
from zarr.codecs import ShardingCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer

from znnpy.volume.decompression import ChunkTooLargeError, blosc_bytes, check_declared, most_bytes, unpacked, zstd_bytes

Unpack = Callable[[memoryview, int], Any]  # takes packed bytes and the largest unpacked size; returns them unpacked


def bounded_array(array: zarr.Array[Any], chunk_bytes: int) -> zarr.Array[Any]:
    """Return the array with codecs that unpack no more than a chunk may hold.

    chunk_bytes  unpacked bytes of one chunk; in shards, of one chunk of a shard
    """
    metadata, most = array.metadata, most_bytes(chunk_bytes)
    if metadata.zarr_format == 3:
        metadata = replace(metadata, codecs=tuple(_bounded(codec, most) for codec in metadata.codecs))
    else:
        compressor, filters = metadata.compressor, metadata.filters or ()
        metadata = replace(
            metadata,
            compressor=None if compressor is None else _bounded_of_format_2(compressor, most),
            filters=tuple(_bounded_of_format_2(one, most) for one in filters) or None,
        )
    return zarr.Array(zarr.AsyncArray(metadata, array.store_path))


def _bounded(codec: Codec, most: int) -> Codec:
    if isinstance(codec, ShardingCodec):
        return replace(codec, codecs=tuple(_bounded(inner, most) for inner in codec.codecs))
    if not isinstance(codec, BytesBytesCodec):
        return codec
    document = codec.to_dict()
    unpack = _unpacking(document["name"].removeprefix("numcodecs."), document.get("configuration", {}))
    return codec if unpack is None else BoundedCodec(codec, unpack, most)


def _bounded_of_format_2(codec: Numcodec, most: int) -> Numcodec:
    config = codec.get_config()
    unpack = _unpacking(config["id"], config)
    return codec if unpack is None else BoundedNumcodec(codec, unpack, most)


@dataclass(frozen=True)
class BoundedCodec(BytesBytesCodec):  # type: ignore[misc]  # mypy does not follow the package
    """A codec of format 3 that unpacks at most `most` bytes; arrays are only read through it."""

    codec: BytesBytesCodec
    unpack: Unpack
    most: int
    is_fixed_size = False

    def to_dict(self) -> dict[str, Any]:
        """Return the document of the wrapped codec."""
        document: dict[str, Any] = self.codec.to_dict()
        return document

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """Return the size that the wrapped codec states."""
        size: int = self.codec.compute_encoded_size(input_byte_length, chunk_spec)
        return size

    async def _decode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        found = await asyncio.to_thread(self.unpack, _bytes(chunk_bytes.as_numpy_array()), self.most)
        return chunk_spec.prototype.buffer.from_bytes(found)


class BoundedNumcodec(Numcodec):  # type: ignore[misc]  # mypy does not follow the package
    """A codec of format 2 that unpacks at most `most` bytes; arrays are only read through it."""

    codec_id = "bounded"

    def __init__(self, codec: Numcodec, unpack: Unpack, most: int) -> None:
        self._codec, self._unpack, self._most = codec, unpack, most

    def get_config(self) -> dict[str, Any]:
        """Return the document of the wrapped codec."""
        config: dict[str, Any] = self._codec.get_config()
        return config

    def encode(self, buf: Any) -> Any:
        """Pack as the wrapped codec does."""
        return self._codec.encode(buf)

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Unpack; ChunkTooLargeError if there is more than there may be. `out` must be None."""
        if out is not None:
            raise TypeError("a bounded codec unpacks into its own memory")
        return self._unpack(_bytes(buf), self._most)


def _bytes(buffer: Any) -> memoryview:
    """Return the bytes of a buffer without copying them."""
    return memoryview(buffer).cast("B")


def _unpacking(name: str, config: dict[str, Any]) -> Unpack | None:
    """Return the bounded unpacking of this codec; None for a codec that is left unchanged."""
    if name in ("gzip", "zlib", "bz2"):
        return lambda data, most: unpacked(name, data, most)
    if name == "lzma" and config.get("format", 1) == 1 and not config.get("filters"):
        return lambda data, most: unpacked(name, data, most)
    if name == "zstd":
        return _zstd
    if name in ("blosc", "lz4"):
        decode = zarr.registry.get_numcodec({"id": name}).decode

        def with_header(data: memoryview, most: int) -> Any:
            check_declared(blosc_bytes(data) if name == "blosc" else int.from_bytes(data[:4], "little"), most)
            return decode(data)

        return with_header
    return None


def _zstd(data: memoryview, most: int) -> Any:
    """Unpack Zstandard data, which may have several frames, and frames that do not state their size."""
    decode, size = Zstd().decode, zstd_bytes(data)
    check_declared(size, most)
    if size:
        try:
            return decode(data, out=np.empty(size, np.uint8))
        except RuntimeError as error:
            if "too small" not in str(error):  # "too small": there are more frames after the first
                raise
    try:
        return decode(data, out=np.empty(most, np.uint8))
    except RuntimeError as error:
        if "too small" in str(error):
            raise ChunkTooLargeError(most + 1, is_all=False) from None
        if "expected to decompress" not in str(error):
            raise
    return decode(data)  # this takes no more than the bound
