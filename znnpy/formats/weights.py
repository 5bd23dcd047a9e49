"""The weights of a network's convolutions, read from .npz and .safetensors, or random for trials.

A file holds `conv<i>_weight` (out, in, kz, ky, kx) and `conv<i>_bias` (out,) of convolution `i`, counted from 0 along
the network, as float32 for cross-correlation. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path

import numpy as np
import numpy.typing as npt

from znnpy.errors import NetworkFileError
from znnpy.formats.archives import Archive, Stored, open_archive, undamaged
from znnpy.formats.files import cannot_read, require_file, shown
from znnpy.messages import excerpt
from znnpy.network import Conv, ConvWeights, Network

SUFFIXES = (".npz", ".safetensors")


def read_weights(path: Path, network: Network) -> tuple[ConvWeights, ...]:
    """Read the weights of every convolution, in order: C-contiguous float32, all finite.

    float16 and float64, of any byte order, are converted. NetworkFileError if the file cannot be read, or an array is
    missing, unknown, of another shape or type than the network needs, or holds values that are not finite in float32;
    MissingExtraError for .safetensors if that package is missing.
    """
    path = Path(path)
    try:
        require_file(path, "weights", SUFFIXES)
        with _named(path), open_archive(path) as archive:
            return _collect(archive, network)
    except OSError as error:
        raise cannot_read(path, error) from error


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Put `path` in front of errors of the file."""
    try:
        yield
    except NetworkFileError as error:
        raise error.with_context(str(path)) from error.__cause__


def random_weights(network: Network, seed: int = 0) -> tuple[ConvWeights, ...]:
    """Make weights for trials: He initialised, so that activations keep their scale; biases small, not zero."""
    rng = np.random.default_rng(seed)
    weights = []
    for _, layer, fin in _convolutions(network):
        spread = np.float32(sqrt(2 / (fin * prod(layer.kernel))))
        weight = spread * rng.standard_normal((layer.out, fin, *layer.kernel), np.float32)
        bias = np.float32(0.05) * rng.standard_normal(layer.out, np.float32)
        weights.append(ConvWeights(weight, bias))
    return tuple(weights)


def sha256(weights: Sequence[ConvWeights]) -> str:
    """Return a digest of shapes and values, equal on every machine and for every file format."""
    digest = hashlib.sha256()
    for one in weights:
        for array in (one.weight, one.bias):
            digest.update(f"{array.shape}".encode())
            floats = np.ascontiguousarray(array, "<f4").reshape(-1)
            digest.update(
                floats.view(np.uint8).data
            )  # not `tobytes`: the memory of the copy would stay with the process
    return digest.hexdigest()


# --- compare what the network needs with what the file holds ---


@dataclass(frozen=True, slots=True)
class _Needed:
    """An array that the network needs."""

    layer: str  # for messages: "layer 2 (conv 3x3x3 -> 24 relu)"
    shape: tuple[int, ...]
    axes: str


def _convolutions(network: Network) -> Iterator[tuple[int, Conv, int]]:
    """Yield layer index, layer and input maps of each convolution."""
    for index, (layer, maps) in enumerate(zip(network.layers, network.maps, strict=False)):
        if isinstance(layer, Conv):
            yield index, layer, maps


def _needed(network: Network) -> dict[str, _Needed]:
    """List the arrays that the network needs, by name, in order."""
    needed = {}
    for i, (index, layer, fin) in enumerate(_convolutions(network)):
        where = f"layer {index} ({layer})"
        needed[f"conv{i}_weight"] = _Needed(where, (layer.out, fin, *layer.kernel), "(out, in, kz, ky, kx)")
        needed[f"conv{i}_bias"] = _Needed(where, (layer.out,), "(out,)")
    return needed


def _collect(archive: Archive, network: Network) -> tuple[ConvWeights, ...]:
    """Read all arrays. Names and headers are checked first, so that no array of a wrong size is ever read."""
    needed = _needed(network)
    with undamaged():
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
    headers = {}
    for name, what in needed.items():
        with undamaged(name):
            headers[name] = archive.header(name)
        _check_header(name, what, headers[name])
    arrays = []
    for name, what in needed.items():
        with undamaged(name):
            arrays.append(_read(archive, name, what, headers[name]))
    return tuple(ConvWeights(weight, bias) for weight, bias in zip(arrays[::2], arrays[1::2], strict=True))


def _listed(names: Sequence[str]) -> str:
    shown = excerpt(", ".join(excerpt(name, 60) for name in names[:8]) or "no array")
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown


def _check_header(name: str, what: _Needed, stored: Stored) -> None:
    if not stored.is_real:
        why = ", which is pickled and never loaded" if stored.dtype == "object" else ""
        raise NetworkFileError(
            f"{what.layer}: {name} has dtype {excerpt(stored.dtype, 60)}{why}, but must be float32, float16 or "
            "float64; save it as float32"
        )
    if stored.shape != what.shape:
        raise NetworkFileError(
            f"{what.layer}: {name} has shape {shown(stored.shape)}, but must be {what.shape} {what.axes}; "
            "save it so, or give the weights of this network"
        )


def _read(archive: Archive, name: str, what: _Needed, stored: Stored) -> npt.NDArray[np.float32]:
    """Read the array in C order; NetworkFileError if values are not finite in float32."""
    parts = archive.parts(name)
    values = np.empty(prod(what.shape), np.float32)
    filled = wrong = 0
    first = ""
    for part in parts:
        target = values[filled : filled + part.size]
        with np.errstate(over="ignore"):  # too large for float32: reported below
            target[...] = part
        finite = np.isfinite(target)
        if not finite.all():
            if not wrong:
                at = int(finite.argmin())
                place = np.unravel_index(filled + at, what.shape, "F" if stored.by_columns else "C")
                first = f"{part[at]} at {tuple(int(i) for i in place)}"
            wrong += int(np.count_nonzero(~finite))
        filled += part.size
    if wrong:
        raise NetworkFileError(
            f"{what.layer}: {name} holds {wrong} of {values.size} values that are not finite in float32, the first is "
            f"{first}; train or save the network again"
        )
    return np.ascontiguousarray(values.reshape(what.shape, order="F" if stored.by_columns else "C"))
