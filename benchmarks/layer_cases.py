"""The layers that benchmarks/layers.py measures, in sets that can be asked for by name."""

from __future__ import annotations

from dataclasses import dataclass, replace

from znnpy.shapes import ConvShape, Vec3

LEAST_OUT = 8  # output voxels along an axis of a volume that was made smaller


@dataclass(frozen=True, slots=True)
class Case:
    """One layer. `why` says what the row is there to show."""

    set: str
    shape: ConvShape
    why: str


def layer(maps: tuple[int, int], n: Vec3, k: Vec3, batch: int = 1) -> ConvShape:
    return ConvShape(batch, *maps, n, k, "relu")


WIDE = (80, 80)  # maps of every layer but the first and last in the networks of the ZNNi paper
FIRST = (1, 80)

MAIN = (
    Case("main", layer(WIDE, (100, 100, 100), (3, 3, 3)), "80 -> 80 maps, one image: what does tiling buy at k = 3?"),
    Case("main", layer(WIDE, (100, 100, 100), (5, 5, 5)), "the same with k = 5: tiles overlap more"),
    Case("main", layer(WIDE, (100, 100, 100), (7, 7, 7)), "the same with k = 7"),
    Case("main", layer(WIDE, (100, 100, 100), (9, 9, 9)), "the same with k = 9: where direct has lost"),
)
FIRST_LAYERS = tuple(
    Case("first", layer(maps, (100, 100, 100), (k, k, k)), f"a first layer: {maps[0]} in, k = {k}")
    for maps in (FIRST, (1, 32), (3, 64))
    for k in (2, 3, 5, 7)
)
SMALL = (
    Case("small", layer(WIDE, (16, 16, 16), (3, 3, 3)), "an image of one tile: what does it cost to begin?"),
    Case("small", layer(WIDE, (32, 32, 32), (3, 3, 3)), "an image of a few tiles"),
    Case("small", layer(WIDE, (32, 32, 32), (7, 7, 7)), "an image of a few tiles, k = 7"),
)
FEW_MAPS = tuple(
    Case("few_maps", layer((f, f), (100, 100, 100), (k, k, k)), f"{f} maps, as in small networks, k = {k}")
    for f in (16, 32)
    for k in (3, 5)
)
FRAGMENTS = tuple(
    Case("fragments", layer(WIDE, (20, 20, 20), (k, k, k), 64), f"64 fragments, as after two poolings, k = {k}")
    for k in (3, 5)
)
ANISOTROPIC = (
    Case("anisotropic", layer(WIDE, (40, 150, 150), (1, 5, 5)), "planes: as on serial sections"),
    Case("anisotropic", layer(WIDE, (40, 150, 150), (3, 7, 7)), "flat kernels"),
)

SETS = {
    "main": MAIN,
    "first": FIRST_LAYERS,
    "small": SMALL,
    "few_maps": FEW_MAPS,
    "fragments": FRAGMENTS,
    "anisotropic": ANISOTROPIC,
}
QUICK = Case("quick", layer((4, 5), (12, 13, 14), (3, 2, 3), 2), "that the script works")


def smaller(shape: ConvShape, run_seconds: float, limit: float) -> ConvShape:
    """The shape, or one with a volume that takes about `limit` of the `run_seconds` this one takes."""
    if run_seconds <= limit:
        return shape
    factor = (limit / run_seconds) ** (1 / 3)
    z, y, x = (
        min(n, max(k - 1 + LEAST_OUT, round(k - 1 + factor * (n - k + 1))))
        for n, k in zip(shape.n, shape.k, strict=True)
    )
    spare = [(size - k + 2) % p for size, k, p in zip((z, y, x), shape.k, shape.pool, strict=True)]
    return replace(shape, n=(z - spare[0], y - spare[1], x - spare[2]))
