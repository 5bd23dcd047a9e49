"""Choice of one option per layer, or per fusion group, for one patch: seconds against bytes.

Seconds and prepared weights add up over the layers. The arena is as large as the layer that needs most of it, and so is
the allowance for what libraries allocate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from operator import attrgetter

from znnpy.kernels.contract import Footprint, Primitive, Variant
from znnpy.layer_shapes import LayerShape

EXACT_GROUPS = 48  # most groups for an exact choice: the work of the knapsack grows faster than their number
MAX_LOG2_PRICE = 32.0  # log2 of the highest price of weights that is tried, relative to the average seconds per byte
PRICE_STEPS = 16  # number of prices of memory that are tried: bounds are then within a few per cent of the best
CAPS = 8  # number of limits on the arena, and on allowances, that are tried


@dataclass(frozen=True, slots=True)
class LayerRun:
    """A primitive that runs one layer, or two fused ones."""

    shape: LayerShape
    primitive: Primitive
    variant: Variant
    footprint: Footprint
    seconds: float  # of one execution
    sub_batches: int = 1  # executions in a step
    executions: int = 1  # executions for the whole output


@dataclass(frozen=True, slots=True)
class LayerOption:
    """One way to run the layers of a group, or of several consecutive groups, and its costs."""

    layer_runs: tuple[LayerRun, ...]
    seconds: float  # for the whole output
    resident: int  # bytes kept between steps: weights and carried planes
    arena_bytes: int  # peak bytes of the arena
    allowance: int  # bytes that libraries allocate while it runs

    @property
    def pinned(self) -> int:
        """Page-locked bytes of the process that layers on a GPU keep between steps."""
        return sum(way.footprint.host for way in self.layer_runs)


ParetoFront = tuple[LayerOption, ...]  # the non-dominated options of one group, fastest first
OptionCosts = tuple[
    float, int, int, int, int
]  # the costs of an option in the order of its fields, and its pinned bytes


def undominated(weighed: Iterable[OptionCosts]) -> list[int]:
    """Return the indices of the non-dominated options, fastest first. Ties keep the first; most are dominated."""
    found: list[int] = []
    kept: list[tuple[int, int, int, int]] = []
    ranked = sorted((s, r, live, a, index, pinned) for index, (s, r, live, a, pinned) in enumerate(weighed))
    for _, resident, live, allowance, index, pinned in ranked:
        for better in kept:
            if better[0] <= resident and better[1] <= live and better[2] <= allowance and better[3] <= pinned:
                break
        else:
            found.append(index)
            kept.append((resident, live, allowance, pinned))
    return found


def pareto_front(options: Iterable[LayerOption]) -> ParetoFront:
    """Return the non-dominated options, fastest first."""
    options = tuple(options)
    best = undominated((o.seconds, o.resident, o.arena_bytes, o.allowance, o.pinned) for o in options)
    return tuple(options[index] for index in best)


def in_sequence(first: ParetoFront, second: ParetoFront) -> ParetoFront:
    """Combine every option of one layer with every option of the next; drop the dominated ones."""
    pairs = [*product([(a, a.pinned) for a in first], [(b, b.pinned) for b in second])]
    weighed = [
        (
            a.seconds + b.seconds,
            a.resident + b.resident,
            max(a.arena_bytes, b.arena_bytes),
            max(a.allowance, b.allowance),
            pinned_a + pinned_b,
        )
        for (a, pinned_a), (b, pinned_b) in pairs
    ]
    return tuple(
        LayerOption(pairs[i][0][0].layer_runs + pairs[i][1][0].layer_runs, *weighed[i][:4])
        for i in undominated(weighed)
    )


def total_seconds(options: Iterable[LayerOption]) -> float:
    """Return the seconds of all groups."""
    return sum(option.seconds for option in options)


def total_bytes(options: Sequence[LayerOption]) -> int:
    """Return the resident bytes of all layers, and the largest arena and allowance of any."""
    return (
        sum(option.resident for option in options)
        + max(option.arena_bytes for option in options)
        + max(option.allowance for option in options)
    )


def fastest(fronts: Sequence[ParetoFront]) -> tuple[LayerOption, ...]:
    """Choose the fastest option of each group, whatever memory they need."""
    return tuple(options[0] for options in fronts)


def fastest_within(
    fronts: Sequence[ParetoFront],
    budget: int,
    below: float = inf,
    price: float = 0.0,
    exact_groups: int = EXACT_GROUPS,
) -> tuple[LayerOption, ...] | None:
    """Choose the fastest option per group within `budget` bytes in all; None unless faster than `below` seconds.

    price  seconds added per byte of weights and of the arena

    The choice is exact for up to `exact_groups` groups: under each limit on the arena that some option sets, the rest
    is a knapsack of weights. With more groups it may be a little slower than the fastest.
    """
    chosen = cheapest(fronts, price)
    if priced_seconds(chosen, price) >= below:
        return None
    if total_bytes(chosen) <= budget:
        return chosen
    if len(fronts) > exact_groups:
        return _nearly_fastest_within(fronts, budget, below, price)
    if price:
        priced = [[(replace(o, seconds=o.seconds + price * o.resident), o) for o in options] for options in fronts]
        unpriced = {id(dear): option for pairs in priced for dear, option in pairs}
        ranked = [tuple(sorted((dear for dear, _ in pairs), key=lambda o: (o.seconds, o.resident))) for pairs in priced]
        found = _fastest_within(ranked, budget, below, price)
        return None if found is None else tuple(unpriced[id(dear)] for dear in found)
    return _fastest_within(fronts, budget, below, 0.0)


def _nearly_fastest_within(
    fronts: Sequence[ParetoFront], budget: int, below: float, price: float
) -> tuple[LayerOption, ...] | None:
    """Approximate `fastest_within` for many groups, with a few limits on allowances and on the arena."""
    best = None
    for allowance in _few_caps(fronts, _ALLOWANCE, budget):
        under_allowance = [tuple(o for o in options if o.allowance <= allowance) for options in fronts]
        if priced_seconds(cheapest(under_allowance, price), price) >= below:
            break  # smaller caps are slower still
        for live in _few_caps(under_allowance, _ARENA, budget - allowance):
            allowed = [tuple(o for o in options if o.arena_bytes <= live) for options in under_allowance]
            found = _choose_by_price(allowed, budget - allowance - live, price)
            if found is not None and priced_seconds(found, price) < below:
                best, below = found, priced_seconds(found, price)
    return best


def _few_caps(fronts: Sequence[ParetoFront], what: Callable[[LayerOption], int], most: int) -> list[int]:
    """Return about CAPS values of `what`, from `most` down, that leave every group an option."""
    floor = max(min(what(option) for option in options) for options in fronts)
    caps = sorted({value for options in fronts for o in options if floor <= (value := what(o)) <= most}, reverse=True)
    return sorted({*caps[:: max(1, len(caps) // CAPS)], *caps[-1:]}, reverse=True)


def _choose_by_price(fronts: Sequence[ParetoFront], budget: int, price: float) -> tuple[LayerOption, ...] | None:
    """Choose options whose weights take at most `budget` bytes; None if there are none.

    Weights get the lowest price at which the cheapest options fit. The rest of `budget` goes to the groups that save
    most time with it.
    """

    def chosen(dear: float) -> tuple[LayerOption, ...]:
        return tuple(min(options, key=lambda o: (o.seconds + dear * o.resident, o.resident)) for options in fronts)

    heavy = chosen(price)
    if _resident_bytes(heavy) <= budget:
        return heavy
    light = tuple(min(options, key=lambda o: (o.resident, o.seconds)) for options in fronts)
    if _resident_bytes(light) > budget:
        return None
    scale, low, high = total_seconds(light) / max(1, budget), -MAX_LOG2_PRICE, MAX_LOG2_PRICE
    for _ in range(PRICE_STEPS):
        middle = (low + high) / 2
        found = chosen(price + scale * 2**middle)
        if _resident_bytes(found) > budget:
            low, heavy = middle, found
        else:
            high, light = middle, found
    return _spend_rest(light, heavy, budget, price)


def _spend_rest(
    light: Sequence[LayerOption], heavy: Sequence[LayerOption], budget: int, price: float
) -> tuple[LayerOption, ...]:
    """Replace options of `light` by those of `heavy` while weights fit, most time saved per byte first."""
    filled, left, gains = list(light), budget - _resident_bytes(light), []
    for group, (slow, fast) in enumerate(zip(light, heavy, strict=True)):
        more = fast.resident - slow.resident
        saved = slow.seconds - fast.seconds - price * more
        if saved > 0:
            gains.append((saved / max(1, more), more, group))
    for _, more, group in sorted(gains, reverse=True):
        if more <= left:
            filled[group], left = heavy[group], left - more
    return tuple(filled)


def _resident_bytes(options: Iterable[LayerOption]) -> int:
    return sum(option.resident for option in options)


def _fastest_within(
    fronts: Sequence[ParetoFront], budget: int, below: float, price: float
) -> tuple[LayerOption, ...] | None:
    """Choose as `fastest_within` does; `price` is what a byte of the arena adds."""
    best = None
    for under_allowance, allowance in _under_caps(fronts, _ALLOWANCE, budget):
        least_live = max(min(option.arena_bytes for option in options) for options in under_allowance)
        cap = budget - allowance
        while cap >= least_live:
            allowed = [tuple(option for option in options if option.arena_bytes <= cap) for options in under_allowance]
            ideal = fastest(allowed)
            if total_seconds(ideal) + price * least_live >= below:
                break  # smaller caps are slower still
            live = max(option.arena_bytes for option in ideal)
            found: tuple[LayerOption, ...] | None = ideal
            if live + sum(option.resident for option in ideal) > budget - allowance:
                live = max(option.arena_bytes for options in allowed for option in options)
                found = _knapsack(allowed, budget - allowance - live, below - price * live)
            if found is not None and total_seconds(found) + price * live < below:
                best, below = found, total_seconds(found) + price * live
            cap = live - 1
    return best


def cheapest(fronts: Sequence[ParetoFront], price: float) -> tuple[LayerOption, ...]:
    """Choose the cheapest option per group, where each byte of weights and of the arena adds `price` seconds.

    Any other choice that is faster needs more weights or a larger arena. Exact; allowances are not priced.
    """
    costs = (
        (o.arena_bytes, group, o.seconds + price * o.resident) for group, options in enumerate(fronts) for o in options
    )
    _, cap = least_cost(costs, len(fronts), price)

    def rank(option: LayerOption) -> tuple[float, float]:
        return option.seconds + price * option.resident, option.seconds

    return tuple(min((o for o in options if o.arena_bytes <= cap), key=rank) for options in fronts)


def priced_seconds(options: Sequence[LayerOption], price: float) -> float:
    """Return the seconds of all groups, plus `price` seconds for each byte of weights and of the arena."""
    held = sum(option.resident for option in options) + max(option.arena_bytes for option in options)
    return total_seconds(options) + price * held


def least_cost(costs: Iterable[tuple[int, int, float]], spans: int, price: float) -> tuple[float, int]:
    """Return the least cost of one option per group, and the size of the arena at which it is reached.

    costs  arena, group and cost of every option; the cost of a choice is the sum of its options' costs, and `price` for
           each byte of the largest of their arenas. Every group has an option.
    """
    seen: dict[int, float] = {}  # the least cost of each group that has an option so far
    total, least, cap = 0.0, inf, 0
    for arena, group, cost_of_one in sorted(costs):
        before = seen.get(group, inf)
        if cost_of_one < before:
            total += cost_of_one - (before if group in seen else 0.0)
            seen[group] = cost_of_one
            if len(seen) == spans and total + price * arena < least:
                least, cap = total + price * arena, arena
    return least, cap


def smallest(fronts: Sequence[ParetoFront]) -> tuple[LayerOption, ...]:
    """Choose one option per group such that they need the fewest bytes together."""
    return min(
        (_least_weights(under_allowance) for under_allowance, _ in _under_caps(fronts, _ALLOWANCE)), key=total_bytes
    )


def _least_weights(fronts: Sequence[ParetoFront]) -> tuple[LayerOption, ...]:
    """Choose the options that need the fewest bytes, without allowances."""
    weights = ((o.arena_bytes, group, o.resident) for group, options in enumerate(fronts) for o in options)
    _, limit = least_cost(weights, len(fronts), 1)
    return tuple(min((o for o in options if o.arena_bytes <= limit), key=lambda o: o.resident) for options in fronts)


def knapsack_bound(layers: Sequence[Sequence[tuple[float, int]]], budget: int, enough: float = inf) -> float:
    """Return a lower bound on the seconds of one (seconds, bytes) pair per layer with at most `budget` bytes in all.

    This is the Lagrangian dual of the knapsack: with a price on bytes the layers separate. Infinite if nothing fits.

    enough  stop at a bound that is no less
    """
    if sum([min([nbytes for _, nbytes in pairs]) for pairs in layers]) > budget:
        return inf
    best, low, high, price = 0.0, 0.0, inf, 0.0
    for _ in range(PRICE_STEPS):
        seconds, nbytes = 0.0, 0
        for pairs in layers:
            spent, held = pairs[0]
            least = spent + price * held
            for slower, lighter in pairs[1:]:
                if slower + price * lighter < least:
                    spent, held, least = slower, lighter, slower + price * lighter
            seconds += spent
            nbytes += held
        best = max(best, seconds + price * (nbytes - budget))
        if best >= enough:
            break
        if nbytes <= budget:
            if price == 0.0:
                break
            high = price
        else:
            low = price
        price = (low + high) / 2 if high < inf else max(2 * low, seconds / (1 + budget))
    return best


_ALLOWANCE: Callable[[LayerOption], int] = attrgetter("allowance")
_ARENA: Callable[[LayerOption], int] = attrgetter("arena_bytes")


def _under_caps(
    fronts: Sequence[ParetoFront], what: Callable[[LayerOption], int], most: float = inf
) -> Iterator[tuple[list[ParetoFront], int]]:
    """Yield each cap on `what`, from `most` down, that leaves every group an option, with the fronts cut to it."""
    for cap in sorted({what(option) for options in fronts for option in options}, reverse=True):
        if cap <= most:
            allowed = [tuple(option for option in options if what(option) <= cap) for options in fronts]
            if not all(allowed):
                break
            yield allowed, cap
            fronts = allowed


def _knapsack(fronts: Sequence[ParetoFront], budget: int, below: float) -> tuple[LayerOption, ...] | None:
    """Find the fastest choice below `below` seconds with weights within `budget`, merging fronts layer by layer."""
    ideal = fastest(fronts)
    if sum(option.resident for option in ideal) <= budget:
        return ideal if total_seconds(ideal) < below else None
    lightest = [min(o.resident for o in options) for options in fronts]
    later_bytes, later_seconds = sum(lightest), total_seconds(ideal)
    states: list[tuple[float, int, tuple[LayerOption, ...]]] = [(0.0, 0, ())]  # seconds, weights, chosen so far
    for options, light in zip(fronts, lightest, strict=True):
        later_bytes -= light
        later_seconds -= options[0].seconds
        merged = [
            (spent + o.seconds, held + o.resident, (*chosen, o))
            for spent, held, chosen in states
            for o in options
            if held + o.resident + later_bytes <= budget and spent + o.seconds + later_seconds < below
        ]
        states = []
        for state in sorted(merged, key=lambda state: state[:2]):
            if not states or state[1] < states[-1][1]:
                states.append(state)
    # The bounds above sum in another order, so compare again with the sum as callers take it.
    return next((chosen for _, _, chosen in states if total_seconds(chosen) < below), None)
