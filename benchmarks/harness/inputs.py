"""Make networks with random weights and volumes of noise: the same on every machine and for every version of znnpy.

Networks are files in the format for users, so that children that run another version can read them too. The network
centres the grey values; otherwise their mean would hide the differences between voxels.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Vec3 = tuple[int, int, int]

SEED = 20261121
VALUES = 2**24 - 3  # number of random values of a layer; a prime, so that their repetition coincides with no axis
NOISE_SIDE = 251  # side of the cube of random bytes that a volume of noise repeats along every axis
GREY = 127.5, 73.9  # mean and standard deviation of uniform bytes
# Layers of the networks in ZNNi (SC16), Table III, and of the one that ships: kernel or window, then output maps.
LAYERS = {
    "n337": ["c2 80", "p2", "c3 80", "p2", "c3 80", "p2", *["c3 80"] * 3, "c3 3"],
    "n537": ["c4 80", "p2", "c5 80", "p2", "c5 80", "p2", *["c5 80"] * 3, "c5 3"],
    "n726": ["c6 80", "p2", "c7 80", "p2", *["c7 80"] * 3, "c7 3"],
    "n926": ["c8 80", "p2", "c9 80", "p2", *["c9 80"] * 3, "c9 3"],
    "fib25": ["c4 16", "p2", "c3 24", "p2", "c3 24", "c3 24", "c1 1"],
    **{f"layer{k}": [f"c{k} 80"] for k in (2, 3, 5, 7, 9)},  # one layer alone
    "tiny": ["c2 3", "p2", "c3 2"],  # small network for trials of the benchmarks themselves
}
CHANNELS = {f"layer{k}": 80 for k in (2, 3, 5, 7, 9)}  # input channels of networks that have more than one
NETWORKS = ("n337", "n537", "n726", "n926", "fib25")


@dataclass(frozen=True, slots=True)
class Layer:
    """A cubic convolution, or a max-pooling.

    maps     maps of the output; 0 for a pooling.
    is_last  whether it is the last of its network, which has no ReLU: few maps might otherwise be all zeros.
    """

    size: int
    maps: int = 0
    is_last: bool = False


def layers_of(name: str) -> list[Layer]:
    """Return the layers of a network in LAYERS."""
    found = []
    for place, layer in enumerate(LAYERS[name], 1):
        kind, *maps = layer.split()
        found.append(Layer(int(kind[1:]), sum(map(int, maps)), place == len(LAYERS[name])))
    return found


def field_of_view(name: str) -> int:
    """Return the input voxels along an axis that an output voxel depends on."""
    field, step = 1, 1
    for layer in layers_of(name):
        field += (layer.size - 1) * step
        step *= 1 if layer.maps else layer.size
    return field


def period(name: str) -> int:
    """Return the product of all pooling windows: sizes of outputs of whole fragments are multiples of it."""
    return prod(layer.size for layer in layers_of(name) if not layer.maps)


def network_file(folder: Path, name: str) -> Path:
    """Write the network and its random weights into a folder, once, and return the path of NAME.yaml.

    Weights are He initialised, so that activations neither vanish nor grow; biases are small and not zero.
    """
    path = folder / f"{name}.yaml"
    if path.exists():
        return path
    arrays: dict[str, npt.NDArray[np.float32]] = {}
    rng, lines = np.random.default_rng(SEED), []
    channels = fin = CHANNELS.get(name, 1)
    for layer in layers_of(name):
        size = [layer.size] * 3
        if not layer.maps:
            lines.append(f"- {{type: pool, window: {size}}}")
            continue
        scale = np.float32(sqrt(2 / (fin * layer.size**3)))
        index = len(arrays) // 2
        arrays[f"conv{index}_weight"] = scale * rng.standard_normal((layer.maps, fin, *size), np.float32)
        arrays[f"conv{index}_bias"] = np.float32(0.05) * rng.standard_normal(layer.maps, np.float32)
        activation = "none" if layer.is_last else "relu"
        lines.append(f"- {{type: conv, kernel: {size}, out: {layer.maps}, activation: {activation}}}")
        fin = layer.maps
    np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]  # numpy's stub takes the names for options
    head = [f"name: {name}", f"input_channels: {channels}"]
    head.append(f"normalise: {{mean: {[GREY[0]] * channels}, std: {[GREY[1]] * channels}}}")
    path.write_text("\n".join([*head, f"weights: {name}.npz", "layers:", *lines]) + "\n")
    return path


def noise(size: Vec3, channels: int = 1) -> npt.NDArray[np.uint8]:
    """Return random grey values, (z, y, x), or (c, z, y, x) of several channels.

    They are the same in every process, and depend on the position only: a small volume is the corner of a large one.
    """
    some = np.random.default_rng(SEED).integers(0, 256, (NOISE_SIDE,) * 3, np.uint8)
    nz, ny, nx = (np.arange(n) % NOISE_SIDE for n in size)
    if channels == 1:
        return some[np.ix_(nz, ny, nx)]
    return np.stack([some[np.ix_((nz + 83 * c) % NOISE_SIDE, ny, nx)] for c in range(channels)])


def volume_file(folder: Path, size: Vec3) -> Path:
    """Write `noise` of a size into an HDF5 file, once, and return its path."""
    import h5py

    path = folder / f"{'x'.join(map(str, size))}.h5"
    if not path.exists():
        with h5py.File(path, "w") as file:
            file.create_dataset("raw", data=noise(size))
    return path


def relu_of_noise(shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Return ReLUs of normal numbers, as after a layer, of any shape; long arrays repeat them."""
    some = np.maximum(np.random.default_rng(SEED).standard_normal(min(VALUES, prod(shape)), np.float32), 0)
    return np.resize(some, shape)


def random_kernels(fin: int, fout: int, k: Vec3) -> Any:
    """Return `znnpy.ConvWeights` of a convolution, He initialised."""
    import znnpy

    rng = np.random.default_rng(SEED + 1)
    weight = rng.standard_normal((fout, fin, *k), np.float32) * np.float32(sqrt(2 / (fin * prod(k))))
    return znnpy.ConvWeights(weight, np.float32(0.05) * rng.standard_normal(fout, np.float32))
