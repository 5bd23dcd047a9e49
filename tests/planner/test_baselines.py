"""Patches that no session runs, several at a time or by plain max-pooling: the best of all there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from math import ceil, inf, prod

import pytest

from tests.support.brute_force import AROUND, BASELINE, planned, ways
from tests.support.fake_primitives import CARRYING, FAKES
from znnpy.costs.model import seconds
from znnpy.layer_shapes import LayerShape
from znnpy.network import Conv, MaxFilter, Maxout, Network, Pool
from znnpy.patches import cover
from znnpy.planner.layout import chain, place
from znnpy.planner.memory import reading_bytes, writing_bytes
from znnpy.planner.tilings import axis_sizes
from znnpy.report.plan_text import explain
from znnpy.shapes import ConvShape, PoolShape, Vec3
from znnpy.sliding_layers import sliding_activation

NET = Network(
    "pooled twice", 1, (Conv((2, 1, 2), 3), Pool((2, 1, 2)), Conv((1, 2, 2), 3), Pool((1, 2, 1)), Conv((2, 2, 1), 2))
)
OUTPUT: Vec3 = (4, 6, 5)
OFFSETS = 8  # of both windows


def plain_shapes(dense: Vec3) -> list[LayerShape]:
    """Return the shape that each layer needs for one offset of every pooling."""
    z, y, x = (size // period for size, period in zip(dense, NET.period, strict=True))
    found: list[LayerShape] = []
    for index in reversed(range(len(NET.layers))):
        layer, maps = NET.layers[index], NET.maps[index]
        match layer:
            case Pool():
                z, y, x = z * layer.window[0], y * layer.window[1], x * layer.window[2]
                found.insert(0, PoolShape(1, maps, (z, y, x), layer.window, fragments=False))
            case Conv():
                z, y, x = z + layer.kernel[0] - 1, y + layer.kernel[1] - 1, x + layer.kernel[2] - 1
                found.insert(0, ConvShape(1, maps, layer.out, (z, y, x), layer.kernel, sliding_activation(layer)))
            case MaxFilter() | Maxout():
                raise AssertionError("there is none here")
    return found


def every_plan(images: int, plain: bool) -> Iterator[tuple[int, float]]:
    """Bytes of the process and seconds for the whole output, of every patch and every choice of primitives."""
    sizes = [axis_sizes(length, period) for length, period in zip(OUTPUT, NET.period, strict=True)]
    for z, y, x in product(*sizes):
        dense = (z, y, x)
        layers = plain_shapes(dense) if plain else [replace(s, batch=s.batch * images) for s in NET.layer_shapes(dense)]
        n = layers[0].in_shape[1:4]
        times = ceil(len(cover(OUTPUT, dense)) / images) * (OFFSETS if plain else 1)
        around = BASELINE + reading_bytes(images, (n[0], n[1], n[2]), 1, steps=times)
        around += writing_bytes(images * NET.output_channels, dense, 4, steps=times)
        for runs in ways(layers, [times] * len(layers), FAKES):
            _, arena = place(chain([(run.shape, run.footprint) for run in runs]))
            kept = sum(run.footprint.resident for run in runs) + max(run.footprint.allowance for run in runs)
            spent = sum(run.steps * seconds(run.primitive.work(run.shape, run.variant), CARRYING) for run in runs)
            yield around + arena + kept, spent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("images", "plain", "words"),
    [(2, False, "2 at a time"), (4, False, "4 at a time"), (1, True, "by plain max-pooling, every offset again")],
)
def test_baselines_equal_brute_force(images: int, plain: bool, words: str) -> None:
    every = list(every_plan(images, plain))
    peaks = sorted({peak for peak, _ in every})
    fitting = 0
    for ram_bytes in (*peaks[:: max(1, len(peaks) // 12)], peaks[-1], peaks[-1] + 2**20):
        kinds = planned(NET, OUTPUT, max(ram_bytes, AROUND + 30_000), baselines=True).alternatives
        (kind,) = [kind for kind in kinds if kind.scheme == words]
        least = min((s for peak, s in every if peak <= max(ram_bytes, AROUND + 30_000)), default=inf)
        assert prod(OUTPUT) / kind.best.voxels_per_second == pytest.approx(least, rel=1e-12)
        assert kind.best.over_bytes == 0
        assert kind.reason
        fitting += 1
    assert fitting > 10


@pytest.mark.slow
def test_baseline_beyond_a_limit_names_the_missing_bytes() -> None:
    least = min(peak for peak, _ in every_plan(4, False))
    limit = least - 1
    (kind,) = [kind for kind in planned(NET, OUTPUT, limit, baselines=True).alternatives if kind.best.over_bytes]
    assert kind.scheme == "4 at a time"
    assert kind.best.over_bytes == 1
    assert kind.reason.startswith("does not fit")


def test_networks_without_poolings_or_patches_have_fewer_baselines(tiny_network: Callable[..., Network]) -> None:
    flat = tiny_network(Conv((2, 2, 2), 3), Conv((2, 1, 2), 2))
    schemes = [kind.scheme for kind in planned(flat, (4, 4, 3), 2**30, baselines=True).alternatives]
    assert schemes == ["2 at a time", "4 at a time"]
    assert planned(flat, (4, 4, 3), 2**30, baselines=True, columns=True).alternatives == ()
    assert ", 2 at a time, " not in " ".join(explain(planned(flat, (4, 4, 3), 2**30, kinds=True)).split())
    assert ", 2 at a time, " in " ".join(explain(planned(flat, (4, 4, 3), 2**30, baselines=True)).split())
