"""The weights of a network's layers, read from .npz and .safetensors, or random for trials.

A file of a chain without names holds `conv<i>_weight` (out, in, kz, ky, kx) and `conv<i>_bias` (out,) of convolution
`i`, counted from 0 along the network, as float32 for cross-correlation. A file of any other network holds
`<name>.weight` and `<name>.bias` of each node that has weights, and running_mean and running_var of batch norms, as
PyTorch's `state_dict` does. Nothing is ever unpickled.
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
from znnpy.layers import Conv, ConvTranspose, Layer, Norm, Scale
from znnpy.messages import excerpt
from znnpy.network import ConvWeights, Network

SUFFIXES = (".npz", ".safetensors")
NO_BIAS = np.zeros(0, np.float32)
_Real = npt.NDArray[np.float64]


def read_weights(path: Path, network: Network) -> tuple[ConvWeights, ...]:
    """Read the weights of every layer that has some, in order: C-contiguous float32, all finite.

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
    for index in network.weighted:
        layer, maps = network.layers[index], network.maps[network.sources[index][0]]
        match layer:
            case Conv():
                shape: tuple[int, ...] = (layer.out, maps // layer.groups, *layer.kernel)
                spread = np.float32(sqrt(2 / prod(shape[1:])))
                weight, outputs = spread * rng.standard_normal(shape, np.float32), layer.out
            case ConvTranspose():
                shape = (maps, layer.out // layer.groups, *layer.kernel)
                each = maps // layer.groups * max(1.0, prod(layer.kernel) / prod(layer.stride))  # inputs of an output
                weight, outputs = np.float32(sqrt(2 / each)) * rng.standard_normal(shape, np.float32), layer.out
            case Scale() | Norm():
                weight, outputs = 1 + np.float32(0.1) * rng.standard_normal(maps, np.float32), maps
            case _:
                weights.append(ConvWeights(np.full(1, 0.25, np.float32), NO_BIAS))
                continue
        bias = np.float32(0.05) * rng.standard_normal(outputs, np.float32)
        weights.append(ConvWeights(weight, bias))
    return tuple(weights)


def check_weights(network: Network, weights: Sequence[ConvWeights]) -> None:
    """Raise NetworkFileError unless weights are float32 arrays of the shapes that the layers of a network take.

    Those of an ensemble's members follow each other.
    """
    if len(weights) != network.members * len(network.weighted):
        raise NetworkFileError(
            f"{len(weights)} weights are given, and {network.name} has {len(network.weighted)} layers that take some"
            f"{f' in each of {network.members} members' if network.members > 1 else ''}; give those of each in the "
            "order of the layers"
        )
    for index, given in zip(network.weighted * network.members, weights, strict=True):
        layer = network.layers[index]
        where = f"layer {index} ({layer})" if network.wiring is None else _node(network, index)
        maps = network.maps[network.sources[index][0]]
        for part, array in (("weight", given.weight), ("bias", given.bias)):
            what = _arrays_of(layer, maps, where, optional_bias=False).get(part, _NOTHING)
            if array.shape not in what.shapes or array.dtype != np.float32:
                raise NetworkFileError(
                    f"{where}: the {part} is {array.dtype} of shape {array.shape}, but must be float32 of shape "
                    f"{_either(what.shapes)}; give it so, or the weights of this network"
                )


def _node(network: Network, index: int) -> str:
    return f"node {excerpt(network.names[index], 60)} ({network.layers[index]})"


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
    shapes: tuple[tuple[int, ...], ...]  # one of them
    axes: str
    optional: bool = False  # zeros where the file has none


_NOTHING = _Needed("", ((0,),), "")  # a bias that a layer does not have


@dataclass(frozen=True, slots=True)
class _LayerArrays:
    """The names of the arrays of one layer."""

    index: int
    names: tuple[str, ...]


def _arrays(network: Network) -> tuple[dict[str, _Needed], list[_LayerArrays]]:
    """List the arrays that the network needs, by name, in order, and which layer needs which."""
    needed: dict[str, _Needed] = {}
    of_layers = []
    for count, index in enumerate(network.weighted):
        layer, name = network.layers[index], network.names[index]
        chained = network.wiring is None
        where = f"layer {index} ({layer})" if chained else _node(network, index)
        own = _arrays_of(layer, network.maps[network.sources[index][0]], where, optional_bias=not chained)
        prefix = f"conv{count}_" if chained else f"{name}."
        names = tuple(prefix + part for part in own)
        needed |= dict(zip(names, own.values(), strict=True))
        of_layers.append(_LayerArrays(index, names))
    return needed, of_layers


def _arrays_of(layer: Layer, maps: int, where: str, *, optional_bias: bool) -> dict[str, _Needed]:
    """List the arrays of one layer by the ends of their names."""
    per_map = _Needed(where, ((maps,),), "(maps,)")
    match layer:
        case Conv():
            shape: tuple[int, ...] = (layer.out, maps // layer.groups, *layer.kernel)
            axes = "(out, in, kz, ky, kx)" if layer.groups == 1 else "(out, in / groups, kz, ky, kx)"
        case ConvTranspose():
            shape = (maps, layer.out // layer.groups, *layer.kernel)
            axes = "(in, out, kz, ky, kx)" if layer.groups == 1 else "(in, out / groups, kz, ky, kx)"
        case Scale() if layer.epsilon is not None:
            return dict.fromkeys(("weight", "bias", "running_mean", "running_var"), per_map)
        case Scale() | Norm():
            return dict.fromkeys(("weight", "bias"), per_map)
        case _:  # prelu
            one_or_all = tuple(dict.fromkeys(((1,), (maps,))))
            return {"weight": _Needed(where, one_or_all, "(1,) or (maps,)")}
    return {"weight": _Needed(where, (shape,), axes), "bias": _Needed(where, ((layer.out,),), "(out,)", optional_bias)}


def _unread(network: Network) -> set[str]:
    """Return the arrays that a file may hold although nothing reads them: counters of batch norms."""
    if network.wiring is None:
        return set()
    return {
        f"{name}.num_batches_tracked"
        for name, layer in zip(network.names, network.layers, strict=True)
        if isinstance(layer, Scale) and layer.epsilon is not None
    }


def _collect(archive: Archive, network: Network) -> tuple[ConvWeights, ...]:
    """Read all arrays. Names and headers are checked first, so that no array of a wrong size is ever read."""
    needed, of_layers = _arrays(network)
    with undamaged():
        held = archive.names()
    for name, what in needed.items():
        if name not in held and not what.optional:
            raise NetworkFileError(
                f"{what.layer}: {name} is missing, expected {_either(what.shapes)} {what.axes} float32; "
                f"the file holds {_listed(held)}; save the array by that name"
            )
    unread = _unread(network)
    if unknown := [name for name in held if name not in needed and name not in unread]:
        what_takes = "layer" if network.wiring is None else "node"
        raise NetworkFileError(
            f"no {what_takes} takes {_listed(unknown)}: the network {network.name} needs {_listed(list(needed))}; "
            "remove what is too much, or give the weights of this network"
        )
    headers = {}
    for name, what in needed.items():
        if name in held:
            with undamaged(name):
                headers[name] = archive.header(name)
            _check_header(name, what, headers[name])
    arrays = {}
    for name, what in needed.items():
        if name not in held:
            arrays[name] = np.zeros(what.shapes[0], np.float32)
            continue
        with undamaged(name):
            arrays[name] = _read(archive, name, what, headers[name])
    return tuple(_weights_of(network, one, arrays) for one in of_layers)


def _weights_of(network: Network, of: _LayerArrays, arrays: dict[str, npt.NDArray[np.float32]]) -> ConvWeights:
    """Return the weights of a layer from its arrays; a batch norm becomes a factor and an offset for each map."""
    layer = network.layers[of.index]
    own = [arrays[name] for name in of.names]
    if isinstance(layer, Scale) and layer.epsilon is not None:
        where = _node(network, of.index)
        weight, bias, mean, variance = (one.astype(np.float64) for one in own)
        return _folded(where, weight, bias, mean, variance, layer.epsilon)
    return ConvWeights(own[0], own[1] if len(own) > 1 else NO_BIAS)


def _folded(where: str, weight: _Real, bias: _Real, mean: _Real, variance: _Real, epsilon: float) -> ConvWeights:
    """Return a batch norm as a scale, computed in float64; NetworkFileError if that is not finite in float32."""
    if variance.min() < 0:
        first = int(variance.argmin())
        raise NetworkFileError(
            f"{where}: running_var is {variance[first]:g} at ({first},), and a variance is never negative; "
            "train or save the network again"
        )
    scale = weight / np.sqrt(variance + epsilon)
    shift = bias - mean * scale
    with np.errstate(over="ignore"):
        made = ConvWeights(scale.astype(np.float32), shift.astype(np.float32))
    for array, what in ((made.weight, "factor"), (made.bias, "offset")):
        if not np.isfinite(array).all():
            first = int(np.isfinite(array).argmin())
            raise NetworkFileError(
                f"{where}: the {what} of map {first} is not finite in float32: weight {weight[first]:g}, running_mean "
                f"{mean[first]:g}, running_var {variance[first]:g}; train or save the network again"
            )
    return made


def _either(shapes: tuple[tuple[int, ...], ...]) -> str:
    return " or ".join(map(str, shapes))


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
    if stored.shape not in what.shapes:
        raise NetworkFileError(
            f"{what.layer}: {name} has shape {shown(stored.shape)}, but must be {_either(what.shapes)} {what.axes}; "
            "save it so, or give the weights of this network"
        )


def _read(archive: Archive, name: str, what: _Needed, stored: Stored) -> npt.NDArray[np.float32]:
    """Read the array in C order; NetworkFileError if values are not finite in float32."""
    parts = archive.parts(name)
    values = np.empty(prod(stored.shape), np.float32)
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
                place = np.unravel_index(filled + at, stored.shape, "F" if stored.by_columns else "C")
                first = f"{part[at]} at {tuple(int(i) for i in place)}"
            wrong += int(np.count_nonzero(~finite))
        filled += part.size
    if wrong:
        raise NetworkFileError(
            f"{what.layer}: {name} holds {wrong} of {values.size} values that are not finite in float32, the first is "
            f"{first}; train or save the network again"
        )
    return np.ascontiguousarray(values.reshape(stored.shape, order="F" if stored.by_columns else "C"))
