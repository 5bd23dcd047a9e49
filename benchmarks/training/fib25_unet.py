"""Train the 3D U-Net `fib25_unet`, which finds cell boundaries in FIB-SEM, and compare it with `fib25_boundary`.

    python -m benchmarks.training.fib25_unet train --data FOLDER --out fib25_unet.npz [--steps 2000] [--seed 0]
    python -m benchmarks.training.fib25_unet score --data FOLDER --network fib25_unet.npz

The folder holds `fib25_train.h5` (grey values) and `fib25_train_labels.h5` (neurons), both 250^3 voxels of 10 nm.

train  Trains twice, on patches in random orientation, brightness, contrast and noise. The first network reads
       z < 160, and the steps after which it does best on z = 160 .. 194 are kept. The second one trains for as many
       steps in the same way, reads z < 195, and is written. Nothing here reads z >= 195.
score  Computes the areas under the ROC curves of both networks over the voxels with z >= 195 where both have an output.

A GPU takes minutes; the processor alone takes days, so give it fewer steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

Tensor = Any  # torch.Tensor: PyTorch is an extra, and its types are not read
Nodes = Any  # torch.nn.ModuleDict: nodes of the network by name

VALIDATION, HELD_OUT = 160, 195  # planes z at which validation begins, and at which the voxels that are scored begin
GREY = 131.2, 33.7  # mean and standard deviation of grey values with z < HELD_OUT
MAPS = 16, 32, 48, 96  # of each level; a level has half the resolution of the one before
MULTIPLE = 2 ** (len(MAPS) - 1)  # sizes of inputs are multiples of it
PATCH = 96  # side of a patch in training
MARGIN = 8  # voxels along the faces of a patch that are not learnt from: there the zeros around a patch are seen
BATCH = 4
RATE, DECAY = 2e-3, 0.1  # largest learning rate, and decay of weights
MEMORY = 0.995  # of the moving average over steps that the network is
CHECKS = 16  # times that a network is validated

# Largest changes of grey values in training: of the logarithm of the contrast, and in standard deviations.
CONTRAST, BRIGHTNESS, NOISE = 0.25, 0.3, 0.2

SIDES = slice(None, -1), slice(1, None)  # the voxels along an axis that have one after them, and one before


def nodes() -> Nodes:
    """Return the nodes that have weights, by name, with random weights."""
    import torch
    from torch import nn

    found: dict[str, Any] = {}

    def twice(name: str, maps_in: int, maps: int) -> None:
        for place, channels in enumerate((maps_in, maps), 1):
            conv = nn.Conv3d(channels, maps, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
            found[f"{name}_conv{place}"] = conv
            found[f"{name}_norm{place}"] = nn.BatchNorm3d(maps, eps=1e-5)

    for level, (above, maps) in enumerate(zip((1, *MAPS), MAPS, strict=False), 1):
        twice(f"down{level}", above, maps)
    for level in range(len(MAPS) - 1, 0, -1):
        twice(f"up{level}", MAPS[level - 1] + MAPS[level], MAPS[level - 1])
    found["boundary"] = nn.Conv3d(MAPS[0], 1, 1)
    torch.nn.init.constant_(found["boundary"].bias, -2.0)  # about one voxel in eight is a boundary
    return nn.ModuleDict(found)


def logits(nodes: Nodes, x: Tensor) -> Tensor:
    """Return the output before the sigmoid, (S, 1, z, y, x), for normalised grey values of that shape."""
    import torch
    from torch.nn import functional

    def twice(name: str, x: Tensor) -> Tensor:
        for place in (1, 2):
            x = functional.relu(nodes[f"{name}_norm{place}"](nodes[f"{name}_conv{place}"](x)), inplace=True)
        return x

    skips: list[Tensor] = []
    for level in range(1, len(MAPS) + 1):
        if skips:
            x = functional.max_pool3d(x, 2)
        x = twice(f"down{level}", x)
        skips.append(x)
    x = skips.pop()
    for level in range(len(MAPS) - 1, 0, -1):
        x = functional.interpolate(x, scale_factor=2, mode="nearest")
        x = twice(f"up{level}", torch.cat([skips.pop(), x], 1))
    return nodes["boundary"](x)


def normalised(grey: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return grey values as the network takes them."""
    return (grey.astype(np.float32) - np.float32(GREY[0])) / np.float32(GREY[1])


def predicted(nodes: Nodes, grey: npt.NDArray[np.uint8], device: str) -> npt.NDArray[np.float32]:
    """Return the probability of a boundary at every voxel of a volume, computed at once in float32.

    The volume is reflected at its far faces up to multiples of MULTIPLE.
    """
    import torch

    padded = np.pad(grey, [(0, -n % MULTIPLE) for n in grey.shape], "reflect")
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    nodes.eval()
    with torch.inference_mode():
        x = torch.from_numpy(normalised(padded)).to(device)[None, None]
        out = torch.sigmoid(logits(nodes, x))[0, 0].cpu().numpy()
    return np.ascontiguousarray(out[tuple(slice(n) for n in grey.shape)])


def grey_and_labels(folder: Path, until: int | None = None) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint16]]:
    """Read grey values and labels of the planes z < until, and no others."""
    with h5py.File(folder / "fib25_train.h5") as grey, h5py.File(folder / "fib25_train_labels.h5") as labels:
        return grey["main"][:until], labels["main"][:until]


def boundary(labels: npt.NDArray[np.uint16]) -> npt.NDArray[np.bool_]:
    """Return the voxels without a label, or with one of their 6 neighbours in another body."""
    found: npt.NDArray[np.bool_] = labels == 0
    for axis in range(labels.ndim):
        before, after = [tuple(cut if i == axis else slice(None) for i in range(labels.ndim)) for cut in SIDES]
        differs = labels[before] != labels[after]
        found[before] |= differs
        found[after] |= differs
    return found


def area_under_roc(scores: npt.NDArray[Any], truth: npt.NDArray[np.bool_]) -> float:
    """Return the probability that a boundary's score is above that of another voxel; equal scores count half."""
    _, places, counts = np.unique(scores.ravel(), return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts, dtype=np.float64) - (counts - 1) / 2  # mean rank of each score, from 1
    truth = truth.ravel()
    positive = float(np.count_nonzero(truth))
    negative = truth.size - positive
    return float((ranks[places[truth]].sum() - positive * (positive + 1) / 2) / (positive * negative))


@dataclass(frozen=True, slots=True)
class Batches:
    """Random patches of a volume, as tensors (S, 1, z, y, x): grey values, boundaries, and the weight of each voxel.

    Patches have random orientation (the voxels are cubes, so all 48 are alike), brightness, contrast and noise.
    """

    grey: Tensor
    target: Tensor
    random: np.random.Generator
    strength: float = 1.0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        import torch

        while True:
            batch = torch.stack([self._patch() for _ in range(BATCH)])
            x, target, weight = batch.unbind(1)
            yield self._altered(x)[:, None], target[:, None], weight[:, None]

    def _patch(self) -> Tensor:
        """Return grey values, boundaries and weights of a patch; patches at the faces of the volume are frequent."""
        import torch

        patch, learnt = [], []
        for size in self.grey.shape:
            start = int(np.clip(self.random.integers(-MARGIN, size - PATCH + MARGIN + 1), 0, size - PATCH))
            patch.append(slice(start, start + PATCH))
            learnt.append(slice(MARGIN if start else 0, None if start + PATCH == size else -MARGIN))
        cut = tuple(patch)
        weight = torch.zeros((PATCH,) * 3, device=self.grey.device)
        weight[tuple(learnt)] = 1
        both = torch.stack([self.grey[cut], self.target[cut].float(), weight])
        axes = [1 + int(axis) for axis in self.random.permutation(3)]
        flipped = [axis for axis in (1, 2, 3) if self.random.random() < 0.5]
        return both.permute(0, *axes).flip(flipped)

    def _altered(self, x: Tensor) -> Tensor:
        import torch

        for patch in x:
            contrast, brightness = self.random.uniform(-self.strength, self.strength, 2)
            noise = self.random.uniform(0, self.strength) * NOISE
            patch.mul_(exp(contrast * CONTRAST)).add_(brightness * BRIGHTNESS)
            patch.add_(torch.randn_like(patch), alpha=noise)
        return x


def trained(batches: Batches, steps: int, stop: int, check: Callable[[int, Nodes], None]) -> Nodes:
    """Return the network after `stop` steps of a training that is planned for `steps`.

    The network is a moving average over the steps. It is checked CHECKS times, with the steps that were made.
    """
    import torch
    from torch.nn import functional

    device = batches.grey.device
    learning, average = (nodes().to(device, memory_format=torch.channels_last_3d) for _ in range(2))
    average.load_state_dict(learning.state_dict())
    optimizer = torch.optim.AdamW(learning.parameters(), lr=RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    torch.backends.cudnn.benchmark = True
    for step, (x, target, weight) in enumerate(batches, 1):
        learning.train()
        with torch.autocast(device.type, torch.bfloat16):
            out = logits(learning, x)
        loss = functional.binary_cross_entropy_with_logits(out.float(), target, weight, reduction="sum") / weight.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        memory = min(MEMORY, step / (step + 10))
        for old, new in zip(average.state_dict().values(), learning.state_dict().values(), strict=True):
            if new.is_floating_point():
                old.lerp_(new, 1 - memory)
        if step % max(1, steps // CHECKS) == 0 or step == stop:
            check(step, average)
        if step == stop:
            break
    return average


def train(folder: Path, out: Path, steps: int, seed: int, device: str, strength: float = 1.0) -> None:
    """Choose how many steps to train by validation, train for as many on all planes z < HELD_OUT, and write weights."""
    import torch

    grey, labels = grey_and_labels(folder, HELD_OUT)

    def batches(until: int) -> Batches:
        torch.manual_seed(seed)
        x = torch.from_numpy(normalised(grey[:until])).to(device)
        target = torch.from_numpy(boundary(labels[:until])).to(device)
        return Batches(x, target, np.random.default_rng(seed), strength)

    truth = boundary(labels)[VALIDATION:]
    areas: dict[int, float] = {}
    started = time.perf_counter()

    def validate(step: int, nodes: Nodes) -> None:
        areas[step] = area_under_roc(predicted(nodes, grey, device)[VALIDATION:], truth)
        print(f"step {step}: AUC {areas[step]:.5f}, {time.perf_counter() - started:.0f} s", flush=True)

    print(f"Training on z < {VALIDATION}, AUC on z = {VALIDATION} .. {HELD_OUT - 1}")
    network = trained(batches(VALIDATION), steps, steps, validate)
    rounded_area = area_under_roc(predicted(with_weights(rounded(network), device), grey, device)[VALIDATION:], truth)
    print(f"The last one with weights in float16: {rounded_area - areas[steps]:+.1e}")
    best = max(areas, key=areas.__getitem__)
    print(f"Training on z < {HELD_OUT} for {best} steps")
    network = trained(batches(HELD_OUT), steps, best, validate_nothing)
    np.savez_compressed(out, allow_pickle=False, **rounded(network))
    print(f"Wrote {out}, {out.stat().st_size / 1e6:.2f} MB, {time.perf_counter() - started:.0f} s")


def validate_nothing(step: int, nodes: Nodes) -> None:
    """Do nothing: all planes that could validate a network are those that it learns from."""


def rounded(nodes: Nodes) -> dict[str, npt.NDArray[np.float32]]:
    """Return weights as float32 arrays by name; those of convolutions have values of float16, so files compress."""
    arrays = {}
    for name, tensor in nodes.state_dict().items():
        if tensor.is_floating_point():
            array = np.ascontiguousarray(tensor.cpu().numpy(), np.float32)
            arrays[name] = array.astype(np.float16).astype(np.float32) if array.ndim == 5 else array
    return arrays


def with_weights(arrays: dict[str, npt.NDArray[np.float32]], device: str) -> Nodes:
    """Return the network with these weights."""
    import torch

    network = nodes()
    counters = {name for name, tensor in network.state_dict().items() if not tensor.is_floating_point()}
    left = network.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()}, strict=False)
    if left.unexpected_keys or set(left.missing_keys) - counters:
        raise ValueError(f"these are not the weights of this network: {left}")
    return network.to(device)


def score(folder: Path, network: Path, device: str) -> None:
    """Print the areas under the ROC curves of both networks over the same voxels, and the number of voxels."""
    import znnpy

    grey, labels = grey_and_labels(folder)
    truth = boundary(labels)
    with np.load(network) as arrays:
        unet = predicted(with_weights(dict(arrays), device), grey, device)
    chain = znnpy.load_network("fib25_boundary")(grey)[0]
    around = (grey.shape[0] - chain.shape[0]) // 2  # voxels along every face where the chain has no output
    inside = slice(around, -around)
    for first in (HELD_OUT, HELD_OUT + around):  # from the second on, the chain sees no voxel that it was trained on
        part = truth[first:-around, inside, inside]
        ours = area_under_roc(unet[first:-around, inside, inside], part)
        theirs = area_under_roc(chain[first - around :], part)
        print(
            f"z = {first} .. {grey.shape[0] - around - 1}, y and x = {around} .. {grey.shape[1] - around - 1}: "
            f"{part.size} voxels, {part.mean():.4f} boundary, "
            f"AUC {ours:.5f} of {network.stem}, {theirs:.5f} of fib25_boundary"
        )


def main(words: Sequence[str] | None = None) -> None:
    """Read the command line, and train or score."""
    import torch

    parser = argparse.ArgumentParser(description="Train fib25_unet, and compare it with fib25_boundary.")
    parser.add_argument("do", choices=("train", "score"))
    parser.add_argument("--data", type=Path, required=True, help="folder of fib25_train.h5 and fib25_train_labels.h5")
    parser.add_argument("--out", type=Path, default=Path("fib25_unet.npz"), help="train: file of weights to write")
    parser.add_argument("--network", type=Path, default=Path("fib25_unet.npz"), help="score: file of weights")
    parser.add_argument("--steps", type=int, default=2000, help="train: steps of each of the two trainings")
    parser.add_argument("--strength", type=float, default=1.0, help="train: strength of changes of grey values")
    parser.add_argument("--seed", type=int, default=0, help="train: of all random numbers")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    asked = parser.parse_args(words)
    if asked.do == "train":
        train(asked.data, asked.out, asked.steps, asked.seed, asked.device, asked.strength)
    else:
        score(asked.data, asked.network, asked.device)


if __name__ == "__main__":
    main()
