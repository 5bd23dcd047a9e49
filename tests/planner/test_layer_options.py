"""What a place in a step adds to a primitive's own time and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.fake_primitives import MACHINE, POOL, SLOW, Fake
from znnpy.planner import layer_options
from znnpy.planner.cost_model import Rate, Rates
from znnpy.planner.layer_options import JOINING, KEEPING, Options, Place
from znnpy.planner.pareto import Option
from znnpy.shapes import ConvShape, LayerShape, PoolShape

READS = replace(SLOW, name="cpu.conv.reads", reads_carried=True)
RATES = Rates(stage_seconds=0.0).replaced(copy=Rate(flops=1.0, nbytes=1e6))
CONV = ConvShape(2, 3, 4, (6, 5, 7), (3, 2, 2))
KEPT = 4 * 2 * 2 * 5 * 7 * 3  # bytes of two planes of two images
WALKING = Place(under=1000, x=192, out=128, parts=5, steps=(7,), walks=True, joined=5 * KEPT)


def only_option(fake: Fake, place: Place, *layers: LayerShape) -> Option:
    (option,) = Options((fake, POOL), MACHINE, 2, RATES, frozenset()).of(layers, place)
    return option


@pytest.mark.parametrize(("fake", "moved"), [(SLOW, KEEPING + JOINING), (READS, KEEPING)], ids=["joins", "reads"])
def test_carried_planes_cost_time_and_memory(fake: Fake, moved: float) -> None:
    """Of all images, however many parts they run in; only who needs them in front of the new planes joins them."""
    still = only_option(fake, replace(WALKING, walks=False, joined=0), CONV)
    option = only_option(fake, WALKING, CONV)
    assert option.resident == still.resident + 5 * KEPT
    assert option.live == still.live + (0 if fake.reads_carried else 5 * KEPT)
    assert option.seconds - still.seconds == pytest.approx(7 * 5 * moved * KEPT / 1e6)
    (way,) = option.ways
    assert (way.parts, way.runs) == (5, 7 * 5)
    assert option.seconds == pytest.approx(way.seconds * way.runs)


def test_as_many_fronts_are_remembered_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_options, "REMEMBERED", 2)
    known = Options((SLOW, POOL), MACHINE, 2, RATES, frozenset())
    for place in (replace(WALKING, under=under) for under in (0, 1, 2, 3, 0)):
        assert known.of((CONV,), place) == (only_option(SLOW, place, CONV),)
        assert known.of((CONV,), place) is known.of((CONV,), place)
        assert len(known._fronts) <= 2


def test_what_is_joined_in_front_of_a_convolution_is_not_in_front_of_the_pooling_behind_it() -> None:
    pool = PoolShape(2, 4, (5, 4, 6), (2, 1, 1))
    conv = replace(CONV, n=(7, 5, 7))
    place = replace(WALKING, x=0, out=0, steps=(7, 6))
    far = only_option(SLOW, replace(place, joined=10**6), conv, pool)
    assert far.live == only_option(SLOW, replace(place, joined=0), conv, pool).live + 10**6
    tall = replace(place, x=64, joined=64)  # the pooling is what needs the most
    wide = only_option(SLOW, replace(tall, out=10**6), conv, pool)
    assert wide.live == only_option(SLOW, replace(tall, joined=0, out=10**6), conv, pool).live
    assert [way.runs for way in wide.ways] == [7 * 5, 6 * 5], "each from where it has something to give"
