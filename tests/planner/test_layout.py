"""Offsets: no two tensors that live together share a byte, and the arena is no larger than it must be."""

from __future__ import annotations

import random

from fakes import FAST, MACHINE, OVER, POOL, SLOW
from hypothesis import given
from hypothesis import strategies as st

from znnpy.kernels.primitive import Footprint, Scratch, Variant
from znnpy.planner.layout import ALIGNMENT, Tensor, aligned, chain, live_bytes, live_peak, place
from znnpy.shapes import ConvShape, LayerShape, PoolShape


def tensors_of(spans: list[tuple[int, int, int]]) -> list[Tensor]:
    return [Tensor(f"t{i}", nbytes, first, first + life) for i, (nbytes, first, life) in enumerate(spans)]


TENSORS = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 12), st.integers(0, 6)), min_size=0, max_size=14).map(
    tensors_of
)


def fullest(tensors: list[Tensor]) -> int:
    """Peak of live bytes, tick by tick."""
    ticks = range(max((t.last for t in tensors), default=0) + 1)
    return max(sum(aligned(t.nbytes) for t in tensors if t.first <= tick <= t.last) for tick in ticks)


@given(TENSORS)
def test_nothing_alive_is_overwritten(tensors: list[Tensor]) -> None:
    placed, size = place(tensors)
    assert [(t.name, t.nbytes, t.first, t.last) for t in placed] == [
        (t.name, t.nbytes, t.first, t.last) for t in tensors
    ]
    for tick in range(20):
        owner: dict[int, str] = {}
        for t in placed:
            assert t.offset % ALIGNMENT == 0
            if t.first <= tick <= t.last:
                for block in range(t.offset // ALIGNMENT, aligned(t.end) // ALIGNMENT):
                    assert block not in owner, f"{t.name} and {owner[block]} share bytes in tick {tick}"
                    assert block * ALIGNMENT < size
                    owner[block] = t.name
    assert size >= fullest(tensors) == live_peak(tensors)


def random_chain(rng: random.Random) -> tuple[Tensor, ...]:
    """Up to 10 layers of up to 4 stages and 4 buffers, all sizes within a factor of 1,000."""
    steps = []
    maps = rng.randint(1, 1000)
    for _ in range(rng.randint(1, 10)):
        stages = rng.randint(1, 4)
        scratch = []
        for index in range(rng.randint(0, 4)):
            first = rng.randint(0, stages - 1)
            scratch.append(Scratch(str(index), 64 * rng.randint(1, 1000), first, rng.randint(first, stages - 1)))
        out = rng.randint(1, 1000)
        footprint = Footprint(0, rng.randint(0, stages - 1), rng.randint(0, stages - 1), stages, tuple(scratch))
        steps.append((ConvShape(16, maps, out, (1, 1, 1), (1, 1, 1)), footprint))
        maps = out
    return chain(steps)


def test_close_to_the_lower_bound() -> None:
    rng = random.Random(20261120)
    over = []
    for _ in range(300):
        tensors = random_chain(rng)
        over.append(place(tensors)[1] / live_peak(tensors) - 1)
    reached = sum(excess == 0 for excess in over) / len(over)
    assert reached >= 0.97, f"only {reached:.1%} reach the bound"
    assert max(over) <= 0.15, f"the worst is {max(over):.1%} above it"


def test_ticks_of_a_chain() -> None:
    """Two stages, then three with an output that may lie over the input, then one."""
    first = ConvShape(1, 1, 2, (9, 9, 9), (2, 2, 2))
    second = ConvShape(1, 2, 4, (8, 8, 8), (3, 3, 3))
    third = PoolShape(1, 4, (6, 6, 7), (1, 1, 2))
    variant = Variant.of(scale=1)
    steps: list[tuple[LayerShape, Footprint]] = [
        (first, FAST.footprint(first, variant, 1)),
        (second, OVER.footprint(second, variant, 1)),
        (third, POOL.footprint(third, variant, 1)),
    ]
    got = {t.name: (t.nbytes, t.first, t.last) for t in chain(steps)}
    assert got == {
        "x0": (4 * 9**3, 0, 0),
        "step0.s0": (first.out_bytes // 2, 0, 0),
        "step0.s1": (first.out_bytes // 4, 1, 1),
        "x1": (first.out_bytes, 0, 2),  # written from tick 0, read in the first stage of layer 1
        "step1.s0": (int(0.9 * second.out_bytes), 2, 2),
        "x2": (second.out_bytes, 4, 5),  # written in the last of its three stages
        "x3": (third.out_bytes, 5, 6),  # one tick longer, to be recombined
    }


def test_working_bytes_are_those_of_the_contract() -> None:
    """One layer alone needs what `Footprint.working` says, up to alignment."""
    shape = ConvShape(2, 3, 5, (12, 11, 13), (3, 2, 4))
    for primitive in (SLOW, FAST, OVER):
        for variant in primitive.variants(shape, MACHINE):
            footprint = primitive.footprint(shape, variant, 2)
            assert live_bytes(shape, footprint) == live_peak(chain([(shape, footprint)]))
            excess = live_bytes(shape, footprint) + footprint.allowance - footprint.working(shape)
            assert 0 <= excess < ALIGNMENT * (2 + len(footprint.scratch))
