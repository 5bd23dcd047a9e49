"""Weights of a network's convolutions: from .npz and .safetensors, or random for trials.

In a file convolution `i`, counted from 0 along the network, has `conv<i>_weight` (out, in, kz, ky, kx) and
`conv<i>_bias` (out,): float32, cross-correlation. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import os
import threading
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from znnpy.errors import MissingExtraError, NetworkFileError
from znnpy.formats.files import cannot_read, require_file
from znnpy.network import Conv, ConvWeights, Network

SUFFIXES = (".npz", ".safetensors")


def read_weights(path: Path, network: Network) -> tuple[ConvWeights, ...]:
    """The weights of every convolution in order: C-contiguous float32, all finite.

    float16 and float64, of any byte order, are converted. NetworkFileError when the file cannot be read, when an array
    is missing, unknown, of another shape or type than the network needs, or holds values that are not finite in
    float32; MissingExtraError for .safetensors without that package.
    """
    path = Path(path)
    try:
        require_file(path, "weights", SUFFIXES)
        path.open("rb").close()
    except OSError as error:
        raise cannot_read(path, error) from error
    try:
        with (_open_npz if path.suffix.lower() == ".npz" else _open_safetensors)(path) as archive:
            return _collect(archive, network)
    except NetworkFileError as error:
        raise error.with_context(str(path)) from error.__cause__


def random_weights(network: Network, seed: int = 0) -> tuple[ConvWeights, ...]:
    """Weights for trials: He initialised, so that activations neither vanish nor grow; biases small and not zero."""
    rng = np.random.default_rng(seed)
    weights = []
    for _, layer, fin in _convolutions(network):
        spread = np.float32(sqrt(2 / (fin * prod(layer.kernel))))
        weight = spread * rng.standard_normal((layer.out, fin, *layer.kernel), np.float32)
        bias = np.float32(0.05) * rng.standard_normal(layer.out, np.float32)
        weights.append(ConvWeights(weight, bias))
    return tuple(weights)


def sha256(weights: Sequence[ConvWeights]) -> str:
    """Digest of shapes and values: equal on every machine, whatever kind of file they came from."""
    digest = hashlib.sha256()
    for one in weights:
        for array in (one.weight, one.bias):
            digest.update(f"{array.shape}".encode())
            floats = np.ascontiguousarray(array, "<f4").reshape(-1)
            digest.update(floats.view(np.uint8).data)  # not `tobytes`: what a copy takes stays with the process
    return digest.hexdigest()


# --- what the network needs against what the file holds ---


@dataclass(frozen=True, slots=True)
class _Needed:
    """An array that the network needs."""

    layer: str  # for messages: "layer 2 (conv 3x3x3 -> 24 relu)"
    shape: tuple[int, ...]
    axes: str


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a file says of an array before it is read."""

    shape: tuple[int, ...]
    dtype: str
    is_real: bool  # a floating point type that numpy has


class _Archive(Protocol):
    """Named arrays in a file. What it raises for a damaged file is caught by `_undamaged`."""

    def names(self) -> list[str]: ...
    def header(self, name: str) -> _Stored: ...
    def read(self, name: str) -> npt.NDArray[Any]: ...


def _convolutions(network: Network) -> Iterator[tuple[int, Conv, int]]:
    """Layer index, layer and input maps of each convolution."""
    for index, (layer, maps) in enumerate(zip(network.layers, network.maps, strict=False)):
        if isinstance(layer, Conv):
            yield index, layer, maps


def _needed(network: Network) -> dict[str, _Needed]:
    """Every array the network needs, by name, in order."""
    needed = {}
    for i, (index, layer, fin) in enumerate(_convolutions(network)):
        where = f"layer {index} ({layer})"
        needed[f"conv{i}_weight"] = _Needed(where, (layer.out, fin, *layer.kernel), "(out, in, kz, ky, kx)")
        needed[f"conv{i}_bias"] = _Needed(where, (layer.out,), "(out,)")
    return needed


def _collect(archive: _Archive, network: Network) -> tuple[ConvWeights, ...]:
    """Everything is checked by name and header first, so that no array of a wrong size is ever read."""
    needed = _needed(network)
    with _undamaged():
        held = archive.names()
    for name, what in needed.items():
        if name not in held:
            raise NetworkFileError(
                f"{what.layer}: {name} is missing, expected {what.shape} {what.axes} float32; "
                f"the file holds {_listed(held)}; save the array by that name"
            )
    if unknown := [name for name in held if name not in needed]:
        raise NetworkFileError(
            f"no layer takes {_listed(unknown)}: the network {network.name} needs {_listed(list(needed))}; "
            "remove what is too much, or give the weights of this network"
        )
    for name, what in needed.items():
        with _undamaged(name):
            stored = archive.header(name)
        _check_header(name, what, stored)
    arrays = []
    for name, what in needed.items():
        with _undamaged(name):
            array = archive.read(name)
        arrays.append(_finite(name, what, array))
    return tuple(ConvWeights(weight, bias) for weight, bias in zip(arrays[::2], arrays[1::2], strict=True))


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(ascii(name)[1:-1][:60] for name in names[:8]) or "no array"
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown


def _check_header(name: str, what: _Needed, stored: _Stored) -> None:
    if not stored.is_real:
        why = ", which is pickled and never loaded" if stored.dtype == "object" else ""
        raise NetworkFileError(
            f"{what.layer}: {name} has dtype {stored.dtype}{why}, but must be float32, float16 or float64; "
            "save it as float32"
        )
    if stored.shape != what.shape:
        raise NetworkFileError(
            f"{what.layer}: {name} has shape {stored.shape}, but must be {what.shape} {what.axes}; "
            "save it so, or give the weights of this network"
        )


def _finite(name: str, what: _Needed, array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):  # too large for float32: reported below
        converted = np.ascontiguousarray(array, np.float32)
    finite = np.isfinite(converted)
    if not finite.all():
        first = tuple(int(i) for i in np.unravel_index(finite.argmin(), finite.shape))
        raise NetworkFileError(
            f"{what.layer}: {name} holds {np.count_nonzero(~finite)} of {finite.size} values that are not finite in "
            f"float32, the first is {array[first]} at {first}; train or save the network again"
        )
    return converted


# --- the two kinds of file ---

# What zipfile and numpy raise for a damaged archive, depending on where the damage is (found by damaging every byte).
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    ValueError,
    RuntimeError,  # encrypted, or a feature of zip that zipfile does not know
    SyntaxError,  # these two: a header that is no Python literal
    tokenize.TokenError,
    OSError,
)


@contextmanager
def _undamaged(name: str = "the file") -> Iterator[None]:
    """Turns what a damaged archive raises into a NetworkFileError."""
    try:
        yield
    except _DAMAGE as error:
        raise NetworkFileError(
            f"{name} is damaged or cut short ({str(error).strip() or type(error).__name__}); save or copy it again"
        ) from error


# numpy reads headers with Python's own parser, which fails now and then where two threads are at it: "AST constructor
# recursion depth mismatch" (python/cpython#106905, in 3.11).
_one_parses = threading.Lock()
READ_BYTES = 2**18  # of an array at a time: more would be in memory twice


def _after_fork() -> None:
    """Whoever held the lock is not in the child."""
    global _one_parses
    _one_parses = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class _Npz:
    """numpy.savez's archive: a zip of .npy files, which are read without numpy.load's way back to pickle."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._members = {member.removesuffix(".npy"): member for member in archive.namelist()}

    def names(self) -> list[str]:
        return list(self._members)

    def header(self, name: str) -> _Stored:
        member = self._archive.getinfo(self._members[name])
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # what numpy writes
            raise ValueError(f"zip compression {member.compress_type}")
        with self._archive.open(member) as stream:
            shape, _, dtype = _npy_header(stream)
        return _Stored(shape, str(dtype), dtype.kind == "f")

    def read(self, name: str) -> npt.NDArray[Any]:
        with self._archive.open(self._members[name]) as stream:
            shape, by_columns, dtype = _npy_header(stream)
            stored = np.empty(prod(shape) * dtype.itemsize, np.uint8)
            filled = 0
            while filled < stored.nbytes:
                part = stream.read(min(READ_BYTES, stored.nbytes - filled))
                if not part:
                    raise ValueError(f"{filled} bytes of an array of {stored.nbytes}")
                stored[filled : filled + len(part)] = np.frombuffer(part, np.uint8)
                filled += len(part)
            if stream.read(1):  # to the end, where the CRC is checked
                raise ValueError("bytes after the array")
        return stored.view(dtype).reshape(shape, order="F" if by_columns else "C")


def _npy_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether the first index runs fastest, and dtype of an array, whose values come next."""
    version = npy.read_magic(stream)
    if version not in ((1, 0), (2, 0)):  # (3, 0) is for names of fields in UTF-8: no plain array
        raise ValueError(f".npy version {version}")
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    with _one_parses:
        shape, by_columns, dtype = read_header(stream)
    return shape, by_columns, dtype


@contextmanager
def _open_npz(path: Path) -> Iterator[_Archive]:
    if not zipfile.is_zipfile(path):
        raise NetworkFileError("this is no .npz archive, or one that is cut short; save it again with numpy.savez")
    with _undamaged():
        archive = zipfile.ZipFile(path)
    with archive:
        yield _Npz(archive)


_SAFETENSORS_REAL = {"F16": "float16", "F32": "float32", "F64": "float64"}


class _Safetensors:
    """The safetensors package's archive; its own errors become ValueErrors."""

    def __init__(self, archive: Any, error: type[Exception]) -> None:
        self._archive = archive
        self._error = error

    def names(self) -> list[str]:
        return list(self._archive.keys())

    def header(self, name: str) -> _Stored:
        view = self._archive.get_slice(name)
        dtype = view.get_dtype()
        return _Stored(tuple(view.get_shape()), _SAFETENSORS_REAL.get(dtype, dtype), dtype in _SAFETENSORS_REAL)

    def read(self, name: str) -> npt.NDArray[Any]:
        try:
            array: npt.NDArray[Any] = self._archive.get_tensor(name)
        except self._error as error:
            raise ValueError(str(error)) from error
        return array


@contextmanager
def _open_safetensors(path: Path) -> Iterator[_Archive]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingExtraError(
            f"{path} needs the package safetensors, which is not installed; pip install 'znnpy[safetensors]'"
        ) from error
    with _undamaged():
        try:
            archive = safe_open(path, framework="numpy")
        except SafetensorError as error:
            raise ValueError(str(error)) from error
    with archive:
        yield _Safetensors(archive, SafetensorError)
