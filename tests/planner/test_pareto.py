"""Seconds against bytes for one patch: equal to trying everything, and near to it for many spans."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from znnpy.network import Conv, Network
from znnpy.planner.bounds import FASTER, Bounds, least_priced, least_seconds
from znnpy.planner.pareto import (
    LayerOption,
    ParetoFront,
    cheapest,
    fastest_within,
    in_sequence,
    knapsack_bound,
    pareto_front,
    priced_seconds,
    smallest,
    total_bytes,
    total_seconds,
)
from znnpy.planner.tilings import TilingSpace, tiling_of


def needs_of(options: ParetoFront) -> list[tuple[float, int, int]]:
    """Return seconds, resident bytes and arena bytes of each option."""
    return [(o.seconds, o.resident, o.arena_bytes) for o in options]


def option(seconds: int, resident: int, live: int, allowance: int) -> LayerOption:
    return LayerOption((), float(seconds), resident, live, allowance)


def replace_all(options: ParetoFront, factor: float) -> ParetoFront:
    """Options whose seconds are multiplied."""
    return tuple(replace(o, seconds=factor * o.seconds) for o in options)


SMALL = st.integers(0, 6)
OPTIONS = st.lists(st.builds(option, SMALL, SMALL, SMALL, SMALL), min_size=1, max_size=5)
LAYERS = st.lists(OPTIONS, min_size=1, max_size=4)


def beats(a: LayerOption, b: LayerOption) -> bool:
    """Worse in nothing."""
    return all(getattr(a, f) <= getattr(b, f) for f in ("seconds", "resident", "arena_bytes", "allowance"))


@given(LAYERS, st.integers(0, 40), st.sampled_from([inf, 4.0, 9.0]))
def test_fastest_choice_within_a_limit_equals_brute_force(
    layers: list[list[LayerOption]], room: int, below: float
) -> None:
    found = fastest_within([pareto_front(options) for options in layers], room, below)
    fitting = [total_seconds(c) for c in product(*layers) if total_bytes(c) <= room and total_seconds(c) < below]
    if not fitting:
        assert found is None
    else:
        assert found is not None
        assert total_bytes(found) <= room
        assert total_seconds(found) == min(fitting)
        assert all(o in options for o, options in zip(found, layers, strict=True))


@given(LAYERS, st.sampled_from([0.0, 0.02, 0.5, 3.0]))
def test_cheapest_choice_equals_brute_force(layers: list[list[LayerOption]], price: float) -> None:
    found = cheapest([pareto_front(options) for options in layers], price)
    assert priced_seconds(found, price) == pytest.approx(
        min(priced_seconds(chosen, price) for chosen in product(*layers))
    )
    assert all(o in options for o, options in zip(found, layers, strict=True))


def for_many(
    fronts: list[ParetoFront], room: int, below: float = inf, price: float = 0.0
) -> tuple[LayerOption, ...] | None:
    """Return the choice of `fastest_within` as if there were many groups."""
    return fastest_within(fronts, room, below, price, exact_groups=0)


@given(LAYERS, st.integers(0, 40), st.sampled_from([0.0, 0.02]))
def test_existing_choice_for_many_groups_is_found(layers: list[list[LayerOption]], room: int, price: float) -> None:
    fronts = [pareto_front(options) for options in layers]
    found, exact = for_many(fronts, room, inf, price), fastest_within(fronts, room, inf, price)
    assert (found is None) == (exact is None)
    if found is not None and exact is not None:
        assert total_bytes(found) <= room
        assert priced_seconds(exact, price) <= priced_seconds(found, price) * (1 + 1e-9)
        assert for_many(fronts, room, priced_seconds(found, price), price) is None
        assert priced_seconds(found, price) <= priced_seconds(smallest(fronts), price) * (1 + 1e-9)


PLAIN = pareto_front([option(1, 10, 5, 0), option(3, 0, 5, 0)])


@pytest.mark.parametrize(
    ("fronts", "room"),
    [
        ([pareto_front([option(1, 10 + i % 3, 5, 0), option(3 + i % 7, 0, 5, 0)]) for i in range(60)], 305),
        ([PLAIN] * 60, 595),  # equal layers: no one price of weights takes half of them
        ([replace_all(PLAIN, 1 + i / 1e4) for i in range(60)], 595),
        ([pareto_front([option(1, 0, 10, 200), option(2, 1, 10, 0), option(100, 0, 10, 0)])] * 49, 100),  # allowances
        (
            [PLAIN] * 48 + [pareto_front([option(1, 0, 1000, 0), option(3, 0, 999, 0), option(1000, 0, 10, 0)])],
            999,
        ),  # arenas
    ],
)
def test_choice_for_many_groups_is_nearly_the_fastest(fronts: list[ParetoFront], room: int) -> None:
    found = for_many(fronts, room)
    exact = fastest_within(fronts, room, exact_groups=len(fronts))
    assert found is not None
    assert exact is not None
    assert total_bytes(found) <= room
    assert total_seconds(exact) <= total_seconds(found) <= 1.05 * total_seconds(exact)


@given(LAYERS)
def test_smallest_choice_equals_brute_force(layers: list[list[LayerOption]]) -> None:
    found = smallest([pareto_front(options) for options in layers])
    assert total_bytes(found) == min(map(total_bytes, product(*layers)))


@given(OPTIONS)
def test_front_loses_no_useful_option(options: list[LayerOption]) -> None:
    kept: ParetoFront = pareto_front(options)
    assert all(any(beats(k, o) for k in kept) for o in options)
    assert not any(beats(a, b) for a in kept for b in kept if a is not b)
    assert list(kept) == sorted(kept, key=lambda o: o.seconds)


@given(LAYERS, st.integers(0, 25))
def test_relaxation_is_a_lower_bound(layers: list[list[LayerOption]], room: int) -> None:
    found = knapsack_bound([[(o.seconds, o.resident) for o in options] for options in layers], room)
    fitting = [total_seconds(c) for c in product(*layers) if sum(o.resident for o in c) <= room]
    assert found <= min(fitting, default=inf) + 1e-9
    assert bool(fitting) == (found < inf)


@given(LAYERS, st.integers(0, 25), st.integers(0, 25))
def test_early_stopped_bound_is_below_the_full_bound(layers: list[list[LayerOption]], room: int, enough: int) -> None:
    """The bound stops trying prices when it is good enough."""
    pairs = [[(o.seconds, o.resident) for o in options] for options in layers]
    whole, found = knapsack_bound(pairs, room), knapsack_bound(pairs, room, enough)
    assert found <= whole
    assert (found >= enough) == (whole >= enough)


def test_relaxation_is_close_to_the_optimum() -> None:
    """Ten equal layers stand for many small choices: the bound keeps the weights of 3.5 of them, the optimum of 3."""
    pairs = [(10.0, 0), (2.0, 100)]
    assert knapsack_bound([pairs] * 10, budget=10_000) == 20.0
    assert knapsack_bound([pairs] * 10, budget=350) == pytest.approx(100 - 8 * 3.5, rel=0.02)


@pytest.mark.slow
@given(OPTIONS, OPTIONS, OPTIONS, st.integers(0, 40))
def test_front_of_two_layers_loses_no_useful_option(
    first: list[LayerOption], second: list[LayerOption], both: list[LayerOption], room: int
) -> None:
    """The two layers run one after the other or as one."""
    ways = [[a, b] for a in first for b in second] + [[c] for c in both]
    found = fastest_within([pareto_front([*in_sequence(pareto_front(first), pareto_front(second)), *both])], room)
    fitting = [total_seconds(way) for way in ways if total_bytes(way) <= room]
    assert (None if found is None else total_seconds(found)) == min(fitting, default=None)


def test_memory_for_weights_goes_to_the_layer_that_gains_most() -> None:
    """There is room for one of two sets of transformed weights."""
    gains_little = pareto_front([option(10, 0, 5, 0), option(8, 100, 5, 0)])
    gains_much = pareto_front([option(10, 0, 5, 0), option(2, 100, 5, 0)])
    chosen = fastest_within([gains_little, gains_much], budget=110)
    assert chosen is not None
    assert [o.seconds for o in chosen] == [10.0, 2.0]


def test_missing_option_gives_no_choice() -> None:
    assert fastest_within([pareto_front([option(1, 50, 0, 0)])], budget=49) is None
    with pytest.raises(ValueError, match="empty"):
        smallest([()])


def test_options_without_room_do_not_lower_the_bound() -> None:
    """A bound on a shape's seconds leaves out options whose arena and weights are too much beside the least weights."""
    full, heavy = option(1, 0, 901, 0), option(2, 300, 601, 0)
    spans = [
        needs_of(pareto_front([full, heavy, option(9, 0, 600, 0)])),
        needs_of(pareto_front([option(4, 100, 500, 0)])),
    ]
    assert least_seconds(spans, 1001) == 5.0
    assert least_seconds(spans, 1000) >= 9.0
    assert least_seconds(spans, 700) == 13.0
    assert least_seconds(spans, 699) == inf


@given(fronts=st.lists(OPTIONS, min_size=1, max_size=4), price=st.sampled_from([0.001, 0.02, 0.5]))
def test_bound_with_a_price_for_memory_equals_the_fastest_choice(fronts: list[list[LayerOption]], price: float) -> None:
    """Options that may win with room for all are kept, and others are dropped."""
    spans = [pareto_front([replace(o, allowance=0) for o in options]) for options in fronts]
    chosen = fastest_within(spans, 10**9, inf, price)
    assert chosen is not None
    spent = total_seconds(chosen) + price * (sum(o.resident for o in chosen) + max(o.arena_bytes for o in chosen))
    assert least_priced([needs_of(options) for options in spans], price) == pytest.approx(spent)


@given(seen=st.lists(OPTIONS, min_size=1, max_size=6))
def test_learnt_bound_is_below_every_choice(seen: list[list[LayerOption]]) -> None:
    """Options of the same layer in earlier shapes bound its time in the memory that they take."""
    space = TilingSpace(Network("one", 1, (Conv((2, 2, 2), 2),)), (4, 4, 3))
    bounds, shape = Bounds(space), tiling_of(space, (4, 4, 3))
    for options in seen:
        bounds.learn(shape, 0, pareto_front(options))
    known = [o for options in seen for o in options]
    for o in known:
        assert least_seconds(bounds.needs(shape), o.resident + o.arena_bytes) <= o.seconds
    least = FASTER * min(o.seconds for o in known)
    assert least_seconds(bounds.needs(shape), 2**40) == pytest.approx(least)
    assert bounds.lower_bound(4, shape.voxels) == pytest.approx(least)
