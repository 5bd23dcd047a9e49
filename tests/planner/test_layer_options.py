"""A context within a step adds time and memory to those of the primitive itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.fake_primitives import MACHINE, POOL, SLOW, Fake
from znnpy.costs.model import Rate, Rates
from znnpy.layer_shapes import LayerShape
from znnpy.planner import layer_options
from znnpy.planner.layer_options import CARRY_TRAFFIC, JOIN_TRAFFIC, LayerContext, OptionTable
from znnpy.planner.pareto import LayerOption
from znnpy.shapes import ConvShape, PoolShape

READS = replace(SLOW, name="cpu.conv.reads", reads_carried=True)
RATES = Rates(stage_seconds=0.0).replaced(copy=Rate(flops=1.0, nbytes=1e6))
CONV = ConvShape(2, 3, 4, (6, 5, 7), (3, 2, 2))
KEPT = 4 * 2 * 2 * 5 * 7 * 3  # bytes of two planes of two images
WALKING = LayerContext(
    live_elsewhere=1000, input_bytes=192, output_bytes=128, sub_batches=5, steps=(7,), streams=True, join_bytes=5 * KEPT
)


def only_option(fake: Fake, place: LayerContext, *layers: LayerShape) -> LayerOption:
    (option,) = OptionTable((fake, POOL), MACHINE, 2, RATES, frozenset()).front(layers, place)
    return option


@pytest.mark.parametrize(
    ("fake", "moved"), [(SLOW, CARRY_TRAFFIC + JOIN_TRAFFIC), (READS, CARRY_TRAFFIC)], ids=["joins", "reads"]
)
def test_carried_planes_cost_time_and_memory(fake: Fake, moved: float) -> None:
    """They are of all images, in however many parts; only primitives that need one input join them."""
    still = only_option(fake, replace(WALKING, streams=False, join_bytes=0), CONV)
    option = only_option(fake, WALKING, CONV)
    assert option.resident == still.resident + 5 * KEPT
    assert option.arena_bytes == still.arena_bytes + (0 if fake.reads_carried else 5 * KEPT)
    assert option.seconds - still.seconds == pytest.approx(7 * 5 * moved * KEPT / 1e6)
    (way,) = option.layer_runs
    assert (way.sub_batches, way.executions) == (5, 7 * 5)
    assert option.seconds == pytest.approx(way.seconds * way.executions)


def test_cache_of_fronts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_options, "CACHED_FRONTS", 2)
    known = OptionTable((SLOW, POOL), MACHINE, 2, RATES, frozenset())
    for place in (replace(WALKING, live_elsewhere=under) for under in (0, 1, 2, 3, 0)):
        assert known.front((CONV,), place) == (only_option(SLOW, place, CONV),)
        assert known.front((CONV,), place) is known.front((CONV,), place)
        assert len(known._fronts) <= 2


def test_planes_joined_for_a_convolution_are_not_joined_for_its_pooling() -> None:
    pool = PoolShape(2, 4, (5, 4, 6), (2, 1, 1))
    conv = replace(CONV, n=(7, 5, 7))
    place = replace(WALKING, input_bytes=0, output_bytes=0, steps=(7, 6))
    far = only_option(SLOW, replace(place, join_bytes=10**6), conv, pool)
    assert far.arena_bytes == only_option(SLOW, replace(place, join_bytes=0), conv, pool).arena_bytes + 10**6
    tall = replace(place, input_bytes=64, join_bytes=64)  # the pooling is what needs the most
    wide = only_option(SLOW, replace(tall, output_bytes=10**6), conv, pool)
    assert (
        wide.arena_bytes == only_option(SLOW, replace(tall, join_bytes=0, output_bytes=10**6), conv, pool).arena_bytes
    )
    assert [way.executions for way in wide.layer_runs] == [7 * 5, 6 * 5], "each from where it has something to give"
