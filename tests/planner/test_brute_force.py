"""The best of everything there is: plans for small networks and outputs equal those found by trying all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from math import inf

import pytest

from tests.support.brute_force import SMALL, Known, everything, planned
from tests.support.fake_primitives import BOTH, FAST, FILTER, OVER, POOL, SLOW, WITH_GPU, Fake
from tests.support.tiers import one_in
from znnpy.errors import NoPlanError
from znnpy.network import Conv, Layer, MaxFilter, Network, Pool
from znnpy.planner.layout import Tensor, place
from znnpy.planner.validate import check_runs
from znnpy.shapes import Vec3

MakeNetwork = Callable[..., Network]
FEWER: tuple[Fake, ...] = (SLOW, replace(FAST, scale=(1, 4)), OVER, BOTH, POOL, FILTER)
READING: tuple[Fake, ...] = (SLOW, *(replace(p, reads_carried=True) for p in (OVER, BOTH)), POOL, FILTER)
TWO_POOLS = (Conv((2, 2, 2), 3), Pool((2, 2, 1)), Pool((1, 1, 3)), MaxFilter((1, 2, 1)), Conv((2, 1, 2), 2))
SPACES: dict[str, tuple[tuple[Layer, ...], Vec3, tuple[Fake, ...]]] = {  # of which every plan is known
    "tiny": ((), SMALL, FEWER),
    "alike along all axes": ((Conv((2, 2, 2), 3), Pool((2, 2, 2)), Conv((2, 2, 2), 2)), (3, 4, 7), FEWER),
    "two pools": (TWO_POOLS, (4, 2, 5), FEWER),
    "pool last": ((Conv((2, 2, 2), 3), Conv((2, 1, 2), 3), Pool((2, 2, 2))), (5, 3, 4), FEWER),
    "carried planes read where they are kept": ((), SMALL, READING),
}
ASKED = list(product((None, True, False), (True, False)))


def some(values: Sequence[int], count: int) -> list[int]:
    """`count` of them, and both ends."""
    return [values[0], *values[1 : len(values) : max(1, len(values) // count)], values[-1]]


def wanted(space: Iterable[Known], columns: bool | None, depth_first: bool) -> list[Known]:
    """Return what `make_plan` may choose from."""
    return [known for known in space if columns in (None, known.walks) and not (known.split and not depth_first)]


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(3, SPACES))
def test_equals_brute_force_at_every_limit(tiny_network: MakeNetwork, name: str) -> None:
    """Patches, columns along every axis and every split.

    Of a convolution that a pooling follows the search takes the input to be as large as both in one need it: in columns
    that is a plane or more above what they need one by one, so that close above a plan's peak it may be missed. Where
    nothing would fit then, any plan that does will do.
    """
    layers, output, table = SPACES[name]
    network = tiny_network(*layers)
    every = everything(network, output, table)
    assert {known.walks for known in every} == {True, False}
    assert {known.split for known in every} == ({False} if name == "pool last" else {True, False})
    planned_at, missed = 0, 0
    for columns, depth_first in ASKED:
        space = wanted(every, columns, depth_first)
        for ram_bytes in some(sorted({known.peak for known in space}), 16):
            words = {"table": table, "columns": columns, "depth_first": depth_first}
            least = min((known.seconds for known in space if known.peak <= ram_bytes), default=inf)
            sure = min((known.seconds for known in space if known.assumed <= ram_bytes), default=inf)
            try:
                plan = planned(network, output, ram_bytes, **words)
            except NoPlanError:
                assert sure == inf, f"nothing at {ram_bytes} bytes, columns={columns}, depth_first={depth_first}"
            else:
                assert plan.memory.peak <= ram_bytes
                assert least * (1 - 1e-12) <= plan.seconds <= sure * (1 + 1e-12), (ram_bytes, columns, depth_first)
                assert columns is not False or plan.seconds == pytest.approx(least, rel=1e-12)
                check_runs(plan, network, WITH_GPU, table=table)
                missed += plan.seconds > least * (1 + 1e-12) and sure < inf
                planned_at += 1
    assert planned_at > 90
    assert missed <= 0.05 * planned_at, f"{missed} of {planned_at} plans are not the best"


@pytest.mark.slow
def test_each_byte_of_the_limit_counts(tiny_network: MakeNetwork) -> None:
    """At each peak that buys time the best plan is found, and one byte below it the next best."""
    network = tiny_network()
    every = sorted(wanted(everything(network, SMALL, FEWER), False, True), key=lambda k: (k.peak, k.seconds))
    with pytest.raises(NoPlanError):
        planned(network, SMALL, every[0].peak - 1, table=FEWER, columns=False)
    best, lengths, limits_tried = inf, set(), 0
    for known in every:
        if known.seconds < best * (1 - 1e-12):
            if best < inf:
                before = planned(network, SMALL, known.peak - 1, table=FEWER, columns=False)
                assert before.seconds == pytest.approx(best, rel=1e-12)
            best = known.seconds
            plan = planned(network, SMALL, known.peak, table=FEWER, columns=False)
            assert plan.seconds == pytest.approx(best, rel=1e-12)
            assert plan.memory.peak == known.peak
            lengths.add(len(plan.choices))
            limits_tried += 1
    assert limits_tried > 20
    assert lengths == {3, 4}, "some plans pool within the convolution, and some do not"


@pytest.mark.slow
def test_bytes_lost_to_the_layout_count(tiny_network: MakeNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    """An arena larger than its live bytes makes the search look again, and still the promise holds."""
    network = tiny_network()
    words = {"table": FEWER, "columns": False}
    before = planned(network, SMALL, 2**40, **words)
    limit = before.memory.peak
    lossy = 640

    def wasteful(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], int]:
        placed, size = place(tensors)
        return placed, size + lossy

    monkeypatch.setattr("znnpy.planner.layer_search.place", wasteful)
    after = planned(network, SMALL, limit, **words)
    assert after.memory.peak <= limit
    space = wanted(everything(network, SMALL, FEWER), False, True)
    assert before.seconds < after.seconds
    assert after.seconds == pytest.approx(min(k.seconds for k in space if k.peak + lossy <= limit), rel=1e-12)
    assert planned(network, SMALL, limit + lossy, **words).seconds == pytest.approx(before.seconds, rel=1e-12)
    least = min(known.peak for known in space) + lossy
    assert planned(network, SMALL, least, **words).memory.peak == least


def test_another_choice_is_tried_if_the_layout_loses_bytes(
    tiny_network: MakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next choice needs nearly as many bytes."""
    network = tiny_network(Conv((2, 2, 2), 3))
    quick = replace(SLOW, name="cpu.conv.quick", flops=1.0, resident=4096, scratch=(0.5,))
    fair = replace(SLOW, name="cpu.conv.fair", flops=2.0, resident=4000)
    words = {"table": (SLOW, fair, quick), "columns": False, "patch": SMALL}
    before = planned(network, SMALL, 2**40, **words)

    def wasteful(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], int]:
        placed, size = place(tensors)
        return placed, size + 2**15 * any(tensor.name == "step0.s0" for tensor in tensors)

    monkeypatch.setattr("znnpy.planner.layer_search.place", wasteful)
    after = planned(network, SMALL, before.memory.peak, **words)
    assert [plan.choices[0].primitive for plan in (before, after)] == [quick.name, fair.name]
    assert before.memory.peak - 2**15 < after.memory.peak < before.memory.peak
    monkeypatch.setattr("znnpy.planner.layer_search.MAX_LAYOUTS", 1)
    assert planned(network, SMALL, before.memory.peak, **words).choices[0].primitive == SLOW.name
