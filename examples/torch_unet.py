"""Run a U-Net of PyTorch over a Zarr volume that may be larger than memory.

    python examples/torch_unet.py volume.zarr prediction.zarr --weights znnpy/networks/fib25_unet.npz

The module is that of the shipped network fib25_unet and takes its weights: your own module and its weights go here.
"""

import argparse

import numpy as np
import torch
from torch import nn

import znnpy

MAPS = 1, 16, 32, 48, 96  # of the volume, and of each level


class UNet(nn.Module):
    """On each level two convolutions with batch norm and ReLU; max-pooling on the way down, nearest voxels up."""

    def __init__(self):
        super().__init__()
        for level in 1, 2, 3, 4:
            self.add_two(f"down{level}", MAPS[level - 1], MAPS[level])
        for level in 3, 2, 1:
            self.add_two(f"up{level}", MAPS[level] + MAPS[level + 1], MAPS[level])
        self.boundary = nn.Conv3d(MAPS[1], 1, 1)

    def add_two(self, name, maps_in, maps):
        for place, channels in (1, maps_in), (2, maps):
            self.add_module(f"{name}_conv{place}", nn.Conv3d(channels, maps, 3, padding=1, bias=False))
            self.add_module(f"{name}_norm{place}", nn.BatchNorm3d(maps))

    def two(self, name, x):
        for place in 1, 2:
            x = self.get_submodule(f"{name}_norm{place}")(self.get_submodule(f"{name}_conv{place}")(x)).relu()
        return x

    def forward(self, x):
        skips, x = [], self.two("down1", x)
        for level in 2, 3, 4:
            skips.append(x)
            x = self.two(f"down{level}", nn.functional.max_pool3d(x, 2))
        for level in 3, 2, 1:
            x = self.two(f"up{level}", torch.cat([skips.pop(), nn.functional.interpolate(x, scale_factor=2)], 1))
        return self.boundary(x).sigmoid()


words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
words.add_argument("volume")
words.add_argument("out")
words.add_argument("--weights", required=True, help="file .npz with the arrays of the state_dict")
asked = words.parse_args()
module = UNet().eval()
arrays = {name: torch.from_numpy(array) for name, array in np.load(asked.weights).items()}
module.load_state_dict(module.state_dict() | arrays)
net = znnpy.from_torch(module, normalise=znnpy.Normalise((131.2,), (33.7,)))  # as in training
report = znnpy.infer(asked.volume, net, out=asked.out, ram="4G")
print(f"{report.voxels} voxels, {report.voxels_per_second:,.0f} a second, at most {report.peak_bytes / 2**30:.1f} GiB")
