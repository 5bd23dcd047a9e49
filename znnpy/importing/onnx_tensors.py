"""Read the arrays of an ONNX model, in the model's file or in files beside it, within bounds.

A size that a tensor states is compared with the bytes that it holds before an array is made. A file of external data is
opened only inside the folder of the model, without following symbolic links, and each byte of it is read once at most.
"""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import NetworkFileError
from znnpy.messages import excerpt

Array = npt.NDArray[Any]
MOST_DIMENSIONS = 32

FLOAT, BOOL, FLOAT16, BFLOAT16 = 1, 9, 10, 16  # numbers of data types in TensorProto
_NAMES = (
    "UNDEFINED", "FLOAT", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "STRING", "BOOL", "FLOAT16", "DOUBLE",
    "UINT32", "UINT64", "COMPLEX64", "COMPLEX128", "BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2",
    "FLOAT8E5M2FNUZ", "UINT4", "INT4", "FLOAT4E2M1",
)  # fmt: skip
_STORED = {  # how the values of a data type are stored in raw_data, and in which field otherwise
    "FLOAT": ("<f4", "float_data"),
    "DOUBLE": ("<f8", "double_data"),
    "FLOAT16": ("<f2", "int32_data"),
    "BFLOAT16": ("<u2", "int32_data"),
    "BOOL": ("?", "int32_data"),
    "INT8": ("i1", "int32_data"),
    "UINT8": ("u1", "int32_data"),
    "INT16": ("<i2", "int32_data"),
    "UINT16": ("<u2", "int32_data"),
    "INT32": ("<i4", "int32_data"),
    "INT64": ("<i8", "int64_data"),
    "UINT32": ("<u4", "uint64_data"),
    "UINT64": ("<u8", "uint64_data"),
}


def type_name(number: int) -> str:
    """Return the name of a data type of TensorProto."""
    return _NAMES[number] if 0 <= number < len(_NAMES) else f"number {number}"


def word(value: str | bytes) -> str:
    """Return a name in a model; NetworkFileError if it is no text, for which the package gives bytes."""
    if isinstance(value, bytes):
        raise NetworkFileError(f"the model has the name {excerpt(value, 60)}, which is no text; save or copy it again")
    return value


@dataclass
class Arrays:
    """Reads tensors of a model whose file is in `folder`. It is a context manager, since it opens files there."""

    folder: Path
    _stack: ExitStack = field(default_factory=ExitStack)
    _files: dict[str, _External] = field(default_factory=dict)

    def __enter__(self) -> Arrays:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, tensor: Any, what: str) -> Array:
        """Return a TensorProto as an array that cannot be written; float16 and bfloat16 become float32.

        what  names the tensor in errors
        """
        shape = tuple(int(size) for size in tensor.dims)
        if len(shape) > MOST_DIMENSIONS or min(shape, default=0) < 0:
            raise NetworkFileError(
                f"{what} has the shape {excerpt(shape, 60)}, and up to {MOST_DIMENSIONS} sizes of 0 or more are "
                "possible; save the model again"
            )
        kind = type_name(tensor.data_type)
        if kind not in _STORED or tensor.HasField("segment"):
            part = "is one part of an array" if tensor.HasField("segment") else f"has values of type {kind}"
            raise NetworkFileError(
                f"{what} {part}, which is not read; save the model with float32 weights, in one part"
            )
        dtype, name = np.dtype(_STORED[kind][0]), _STORED[kind][1]
        count = prod(shape)
        if tensor.data_location == 1:
            values = self._external(tensor, what, count, dtype)
        elif tensor.HasField("raw_data"):
            raw = tensor.raw_data
            _check_bytes(what, shape, count * dtype.itemsize, len(raw))
            values = np.frombuffer(raw, dtype)
        else:
            values = _listed(getattr(tensor, name), what, shape, dtype)
        if kind == "FLOAT16":
            values = values.astype(np.float32)
        if kind == "BFLOAT16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        values = values.reshape(shape)
        values.setflags(write=False)
        return values

    def _external(self, tensor: Any, what: str, count: int, dtype: np.dtype[Any]) -> Array:
        entries = {word(entry.key): word(entry.value) for entry in tensor.external_data}
        location = entries.get("location", "")
        if location not in self._files:
            self._files[location] = self._opened(location, what)
        file = self._files[location]
        offset = _number(entries.get("offset", "0"), what, "offset")
        length = _number(entries.get("length", str(max(0, file.size - offset))), what, "length")
        if offset + length > file.size:
            raise NetworkFileError(
                f"{what} is in bytes {offset} to {offset + length} of {excerpt(location, 60)}, which has {file.size} "
                "bytes; copy the file again"
            )
        _check_bytes(what, tuple(tensor.dims), count * dtype.itemsize, length)
        return np.frombuffer(file.read(offset, length, what), dtype)

    def _opened(self, location: str, what: str) -> _External:
        """Open a file by its plain path in the folder, step by step, each without following a symbolic link."""
        parts = location.split("/")
        unsafe = {"", ".", ".."} & set(parts) or any(sign in location for sign in "\\:\0")
        if unsafe:
            raise NetworkFileError(
                f"{what} is in the file {excerpt(location, 60)!r}, and only a file inside the model's folder is read: "
                "a relative path without `..`; save the model again with its weights beside it"
            )
        where = excerpt(self.folder / location, 120)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            at = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._stack.callback(os.close, at)
            for part in parts[:-1]:
                at = os.open(part, flags | os.O_DIRECTORY, dir_fd=at)
                self._stack.callback(os.close, at)
            descriptor = os.open(parts[-1], flags, dir_fd=at)
        except OSError as error:
            raise NetworkFileError(
                f"{what} is in the file {where}, which cannot be opened ({error.strerror}); put the file itself there, "
                "and no symbolic link"
            ) from error
        self._stack.callback(os.close, descriptor)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise NetworkFileError(f"{what} is in {where}, which is no regular file; put the file of weights there")
        return _External(descriptor, found.st_size)


@dataclass
class _External:
    """An open file of external data."""

    descriptor: int
    size: int
    _read: dict[tuple[int, int], bytearray] = field(default_factory=dict)
    _total: int = 0

    def read(self, offset: int, length: int, what: str) -> bytearray:
        """Return bytes of the file, once for all tensors that share them; NetworkFileError if parts overlap."""
        if (offset, length) not in self._read:
            self._total += length
            if self._total > self.size:
                raise NetworkFileError(
                    f"{what} overlaps with another tensor in its file of {self.size} bytes; save the model again"
                )
            self._read[offset, length] = self._content(offset, length, what)
        return self._read[offset, length]

    def _content(self, offset: int, length: int, what: str) -> bytearray:
        try:
            os.lseek(self.descriptor, offset, os.SEEK_SET)
            with open(self.descriptor, "rb", buffering=0, closefd=False) as file:
                content = bytearray(length)
                left = memoryview(content)
                while left and (count := file.readinto(left)):
                    left = left[count:]
        except OSError as error:
            raise NetworkFileError(f"{what} cannot be read ({error.strerror}); check the disk") from error
        if left:
            raise NetworkFileError(f"{what} lacks {len(left)} of {length} bytes; copy its file again")
        return content


def _listed(values: Any, what: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return values that a tensor holds one by one."""
    if len(values) != prod(shape):
        raise NetworkFileError(
            f"{what} has the shape {excerpt(shape, 60)}, which is {prod(shape)} values, and holds {len(values)}; save "
            "the model again"
        )
    if dtype.kind == "f" and dtype.itemsize > 2:
        return np.fromiter(values, dtype, len(values))
    whole = np.fromiter(values, np.uint64 if dtype == np.uint64 else np.int64, len(values))
    return whole.astype(np.uint16).view(np.float16) if dtype == np.float16 else whole.astype(dtype)


def _check_bytes(what: str, shape: tuple[int, ...], needed: int, held: int) -> None:
    if needed != held:
        raise NetworkFileError(
            f"{what} has the shape {excerpt(tuple(shape), 60)}, which is {needed} bytes, and holds {held}; the file is "
            "damaged: save or copy it again"
        )


def _number(text: str, what: str, key: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise NetworkFileError(
            f"{what} has the {key} {excerpt(text, 40)!r}, which is no number of bytes; save the model again"
        )
    return int(text)
