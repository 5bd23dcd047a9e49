"""The networks that benchmarks compute in windows: their files for znnpy, and the same networks in PyTorch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness.inputs import GREY, SEED, Vec3, noise

Entry = dict[str, Any]  # a layer of a network file
Arrays = dict[str, npt.NDArray[np.float32]]
OVERLAP = 0.5
SLOPE = 0.01  # of LeakyReLU below zero


@dataclass(frozen=True)
class WindowNet:
    """A U-Net with two convolutions a level, each with an instance norm and a function behind it.

    widths    maps of each level; a level begins with a convolution of stride 2, except the first
    classes   maps of the output
    function  "relu" or "leaky_relu"
    size      voxels of the volume that it runs over
    window    voxels of a window
    """

    name: str
    widths: tuple[int, ...]
    classes: int
    function: str
    size: Vec3
    window: Vec3

    def blocks(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield name, maps in, maps out and stride of every convolution of 3^3, in the order of the run."""
        before = 1
        for level, maps in enumerate(self.widths):
            yield f"down{level}a", before, maps, 2 if level else 1
            yield f"down{level}b", maps, maps, 1
            before = maps
        for level in self.ups:
            yield f"up{level}a", 2 * self.widths[level], self.widths[level], 1
            yield f"up{level}b", self.widths[level], self.widths[level], 1

    @property
    def ups(self) -> range:
        """The levels that the way up comes through."""
        return range(len(self.widths) - 2, -1, -1)

    @property
    def entries(self) -> list[Entry]:
        """The layers of the network file."""
        found: list[Entry] = []
        function = {"function": self.function} | ({"slope": SLOPE} if self.function == "leaky_relu" else {})
        for name, _, maps, stride in self.blocks():
            if name.startswith("up") and name.endswith("a"):
                level = int(name[2:-1])
                found += [
                    {"name": f"step{level}", "type": "conv_transpose", "kernel": 2, "stride": 2, "out": maps},
                    {"name": f"join{level}", "type": "concat", "from": [f"step{level}", f"down{level}b_bent"]},
                ]
            found += [
                {"name": name, "type": "conv", "kernel": 3, "padding": 1, "stride": stride, "out": maps},
                {"name": f"{name}_norm", "type": "instance_norm", "affine": True},
                {"name": f"{name}_bent", "type": "activation", **function},
            ]
        return [*found, {"name": "classes", "type": "conv", "kernel": 1, "out": self.classes}]

    def weights(self) -> Arrays:
        """Return random weights with which values neither grow nor shrink much."""
        rng = np.random.default_rng(SEED)
        found: Arrays = {}

        def drawn(name: str, shape: tuple[int, ...], taps: int, bias: int) -> None:
            found[f"{name}.weight"] = np.float32(np.sqrt(2 / taps)) * rng.standard_normal(shape, np.float32)
            found[f"{name}.bias"] = np.float32(0.1) * rng.standard_normal(bias, np.float32)

        for name, fin, fout, _ in self.blocks():
            drawn(name, (fout, fin, 3, 3, 3), 27 * fin, fout)
            found[f"{name}.bias"][...] = 0  # a convolution in front of a norm has none
            found[f"{name}_norm.weight"] = rng.uniform(0.5, 1.0, fout).astype(np.float32)
            found[f"{name}_norm.bias"] = np.float32(0.1) * rng.standard_normal(fout, np.float32)
        for level in self.ups:
            fin, fout = self.widths[level + 1], self.widths[level]
            drawn(f"step{level}", (fin, fout, 2, 2, 2), fin, fout)
        drawn("classes", (self.classes, self.widths[0], 1, 1, 1), self.widths[0], self.classes)
        return found


NETS: Mapping[str, WindowNet] = {
    net.name: net
    for net in (
        WindowNet("mlperf_unet", (32, 64, 128, 256, 320, 320), 3, "relu", (192, 256, 256), (128, 128, 128)),
        WindowNet("nnunet_unet", (32, 64, 128, 256, 320, 320), 105, "leaky_relu", (400, 512, 512), (128, 128, 128)),
        WindowNet("tiny_unet", (4, 8, 8), 3, "leaky_relu", (24, 24, 32), (16, 16, 16)),
    )
}


def window_file(folder: Path, net: WindowNet) -> Path:
    """Write a network and its weights as NAME.yaml and NAME.npz, once, and return the first."""
    path = folder / f"{net.name}.yaml"
    if not path.exists():
        np.savez(folder / f"{net.name}.npz", **net.weights())  # type: ignore[arg-type]  # numpy's stub
        what = {"name": net.name, "input_channels": 1, "weights": f"{net.name}.npz", "layers": net.entries}
        path.write_text(json.dumps(what, indent=1))
    return path


def grey_noise(size: Vec3) -> npt.NDArray[np.float32]:
    """Return `noise` as float32 with mean 0 and standard deviation 1."""
    return (noise(size).astype(np.float32) - np.float32(GREY[0])) / np.float32(GREY[1])


def windows_of(size: Sequence[int], window: Sequence[int]) -> int:
    """Return how many windows with half overlap MONAI's SlidingWindowInferer takes."""
    return prod(ceil(max(0, n - w) / max(1, w // 2)) + 1 for n, w in zip(size, window, strict=True))


def within(size: Vec3, window: Vec3, most: int) -> Vec3:
    """Return a volume of at most so many windows: the longest axes are shortened by half a window at a time."""
    shorter = list(size)
    while windows_of(shorter, window) > max(1, most):
        axis = max(range(3), key=lambda one: shorter[one] / window[one])
        half = max(1, window[axis] // 2)
        shorter[axis] = window[axis] + (ceil((shorter[axis] - window[axis]) / half) - 1) * half
    z, y, x = shorter
    return z, y, x


def torch_module(net: WindowNet) -> Any:
    """Return the network as a PyTorch module in evaluation mode, channels last."""
    import torch
    from torch import nn

    def block(name: str, fin: int, fout: int, stride: int) -> Any:
        norm = nn.InstanceNorm3d(fout, affine=True)
        bend = nn.ReLU(inplace=True) if net.function == "relu" else nn.LeakyReLU(SLOPE, inplace=True)
        parts = {name: nn.Conv3d(fin, fout, 3, stride, 1, bias=False), f"{name}_norm": norm, "bend": bend}
        return nn.ModuleDict(parts)

    class UNet(nn.Module):  # type: ignore[misc]  # torch's types are not read
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleDict({name: block(name, *of) for name, *of in net.blocks()})
            steps = {f"step{level}": (net.widths[level + 1], net.widths[level]) for level in net.ups}
            self.steps = nn.ModuleDict({name: nn.ConvTranspose3d(*of, 2, 2) for name, of in steps.items()})
            self.classes = nn.Conv3d(net.widths[0], net.classes, 1)

        def forward(self, x: Any) -> Any:
            skips = []
            for level in range(len(net.widths)):
                x = self.block(f"down{level}b", self.block(f"down{level}a", x))
                skips.append(x)
            for level in net.ups:
                x = torch.cat([self.steps[f"step{level}"](x), skips[level]], 1)
                x = self.block(f"up{level}b", self.block(f"up{level}a", x))
            return self.classes(x)

        def block(self, name: str, x: Any) -> Any:
            for part in self.blocks[name].values():
                x = part(x)
            return x

    module = UNet().eval()
    arrays = net.weights()
    state = {}
    for key in module.state_dict():
        words = key.split(".")  # such as blocks.down0a.down0a_norm.weight
        state[key] = torch.from_numpy(arrays[".".join(words[-2:])])
    module.load_state_dict(state)
    return module.to(memory_format=torch.channels_last_3d)
