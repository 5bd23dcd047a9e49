"""The layers that `layers.py --device gpu` measures, in sets that can be asked for by name. Precisions come later.

Inputs are far larger than any cache of a card. Outputs of the wide layers are whole numbers of the tiles that FFTs of
16, 24 or 32 voxels leave (T - k + 1), as in the patches that a plan takes: 240 = 16 x 15 for k = 2 and 8 x 30 for
k = 3, 252 = 21 x 12 = 9 x 28, 234 = 13 x 18 = 9 x 26, 240 = 30 x 8 = 15 x 16 = 10 x 24.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from znnpy.shapes import ConvShape, PoolShape, Vec3

WIDE_OUT = {2: 240, 3: 240, 5: 252, 7: 234, 9: 240}  # output voxels along every axis, by the kernel's
FIRST_OUT = 200
LAST_KERNELS = (3, 5, 7, 9)
FIRST_KERNELS = (2, 3, 5, 8)


@dataclass(frozen=True, slots=True)
class GpuCase:
    """One layer. `why` says what the row is there to show."""

    set: str
    shape: ConvShape | PoolShape
    why: str

    @property
    def kernel(self) -> int:
        """Largest extent of kernel or window."""
        return max(self.shape.k if isinstance(self.shape, ConvShape) else self.shape.p)


def layer(fin: int, fout: int, out: int, k: int, batch: int = 1) -> ConvShape:
    n = out + k - 1
    return ConvShape(batch, fin, fout, (n, n, n), (k, k, k), "relu")


MAIN = tuple(
    GpuCase("main", layer(80, 80, out, k), f"80 -> 80 maps, k = {k}: most of a network's work")
    for k, out in WIDE_OUT.items()
)
FIRST = tuple(
    GpuCase("first", layer(1, 80, FIRST_OUT, k), f"a first layer, k = {k}: mostly writing") for k in FIRST_KERNELS
)
LAST = tuple(
    GpuCase("last", layer(80, 3, WIDE_OUT[k], k), f"a last layer, k = {k}: mostly reading") for k in LAST_KERNELS
)
POOLS = (
    GpuCase("pools", PoolShape(1, 80, (199, 199, 199), (2, 2, 2)), "fragments after a first layer"),
    GpuCase("pools", PoolShape(8, 80, (99, 99, 99), (2, 2, 2)), "fragments of 8 fragments"),
)
FRAGMENTS = tuple(
    GpuCase("fragments", layer(80, 80, out, k, 64), f"64 fragments, as after two poolings, k = {k}")
    for k, out in ((3, 60), (5, 56), (9, 48))
)
SMALL = tuple(
    GpuCase("small", layer(80, 80, 28, k), f"an image of a few tiles, k = {k}: what does it cost to begin?")
    for k in (3, 7)
)
POOLED = tuple(
    GpuCase("pooled", replace(layer(80, 80, out - 1, k), pool=(2, 2, 2)), f"a layer and the pooling behind it, k = {k}")
    for k, out in WIDE_OUT.items()
)
SETS = {
    "main": MAIN,
    "first": FIRST,
    "last": LAST,
    "pools": POOLS,
    "pooled": POOLED,
    "fragments": FRAGMENTS,
    "small": SMALL,
}
DEFAULT = ("main", "first", "last", "pools")
QUICK = (
    GpuCase("quick", ConvShape(2, 4, 5, (9, 10, 11), (3, 2, 3), "relu"), "that the script works"),
    GpuCase("quick", ConvShape(2, 4, 5, (9, 10, 11), (3, 2, 3), "relu", (2, 2, 2)), "that it works with a pooling"),
    GpuCase("quick", PoolShape(1, 4, (7, 9, 7), (2, 2, 2)), "that it works for poolings"),
)


def sized(case: GpuCase, n: Vec3) -> GpuCase:
    """The same layer on a volume of another size; a pooling's is rounded up to one that it takes."""
    shape = case.shape
    if isinstance(shape, PoolShape):
        z, y, x = (-(-(size + 1) // p) * p - 1 for size, p in zip(n, shape.p, strict=True))
        return replace(case, shape=replace(shape, n=(z, y, x)))
    return replace(case, shape=replace(shape, n=n))
