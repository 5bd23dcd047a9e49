"""The single layers that `python -m benchmarks layers` measures, in groups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import znnpy
from benchmarks.harness.layer_runner import Shape

GROUPS = ("layers", "first", "few-maps", "pools", "pooled", "preparing", "threads")
KERNELS = (2, 3, 5, 7, 9)
GPU_OUT = {2: 160, 3: 160, 5: 168, 7: 156, 9: 160}  # output voxels along an axis: whole tiles of FFTs of 16 and 32


@dataclass(frozen=True)
class Case:
    """One layer. `why` says why it is measured."""

    group: str
    name: str
    shape: Shape
    why: str
    threads: int | None = None  # None: all


def convolution(fin: int, fout: int, out: int, k: int, batch: int = 1, **more: Any) -> Any:
    """Return a cubic convolution with ReLU."""
    return znnpy.ConvShape(batch, fin, fout, (out + k - 1,) * 3, (k, k, k), "relu", **more)


def cases(device: str, precision: Any, cores: int, *, quick: bool = False) -> list[Case]:
    """Return all cases for a device, those of the main question first."""
    if quick:
        conv = replace(convolution(4, 5, 8, 3), precision=precision)
        pool = znnpy.PoolShape(1, 4, (7, 7, 7), (2, 2, 2), precision=precision)
        return [Case("layers", "4 -> 5 maps, k = 3", conv, "trial"), Case("pools", "4 maps, fragments", pool, "trial")]
    found = []
    for k in KERNELS:
        out = GPU_OUT[k] if device == "gpu" else 48
        found.append(Case("layers", f"80 -> 80 maps, k = {k}", convolution(80, 80, out, k), "most of a network's work"))
    for k in KERNELS[:-1]:
        out = 160 if device == "gpu" else 48
        found.append(
            Case("first", f"1 -> 80 maps, k = {k}", convolution(1, 80, out, k), "a first layer: mostly writing")
        )
    for f, k in ((16, 3), (24, 3), (16, 5)):
        out = GPU_OUT[k] if device == "gpu" else 48
        found.append(Case("few-maps", f"{f} -> {f} maps, k = {k}", convolution(f, f, out, k), "as in small networks"))
    n = 159 if device == "gpu" else 79
    pools = {"fragments": znnpy.PoolShape(1, 80, (n,) * 3, (2, 2, 2)),
             "of 8 fragments": znnpy.PoolShape(8, 80, (n // 2,) * 3, (2, 2, 2)),
             "max-filter": znnpy.FilterShape(1, 80, (n,) * 3, (2, 2, 2))}  # fmt: skip
    found += [Case("pools", f"80 maps, {name}", shape, "bound by memory") for name, shape in pools.items()]
    if device == "gpu":
        for k in (3, 5):
            shape = convolution(80, 80, GPU_OUT[k] - 1, k, pool=(2, 2, 2))
            found.append(Case("pooled", f"80 -> 80 maps, k = {k}, pool 2", shape, "a layer and the pooling behind it"))
    found = [replace(case, shape=replace(case.shape, precision=precision)) for case in found]
    if device == "cpu":
        shape = convolution(80, 80, 32, 5)
        found += [Case("preparing", f"80 -> 80 maps, k = {k}", convolution(80, 80, 8, k), "done once, for all patches")
                  for k in (3, 5, 9)]  # fmt: skip
        found += [Case("threads", f"80 -> 80 maps, k = 5, {t} threads", shape, "how methods share the work", t)
                  for t in sorted({1, 2, 4, 8, 16, cores}) if t <= cores]  # fmt: skip
    return found
