"""Seconds of steps that go through two devices, against steps that are taken one by one."""

from __future__ import annotations

import random

import pytest

from znnpy.costs.two_stages import two_stage_seconds


def taken(front: list[float], back: list[float]) -> float:
    """Simulate the GPU stage of each step during the host stage of the next; each waits for the other."""
    beside = sum(max(one, other) for one, other in zip(front[1:], back, strict=False))
    return front[0] + beside + back[-1]


@pytest.mark.parametrize("seed", range(100))
def test_pipeline_seconds_equal_a_simulation_of_steps(seed: int) -> None:
    """Columns have several lengths, and layers begin in any of their first steps."""
    rng = random.Random(seed)
    outputs = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
    ahead = sorted((rng.randint(0, rng.choice([0, 3, 9])) for _ in range(5)), reverse=True)
    ahead[-1] = 0
    spent = [rng.uniform(0.1, 2.0) for _ in ahead]
    handover, theta, columns = rng.uniform(0.0, 1.0), rng.randint(1, 4), len(outputs)
    front, back = [], []
    for output in outputs:
        for step in range(ahead[0] + output):
            runs = [seconds * (step >= ahead[0] - before) for seconds, before in zip(spent, ahead, strict=True)]
            handed = handover * (step >= ahead[0] - ahead[theta - 1])
            front.append(sum(runs[:theta]))
            back.append(handed + sum(runs[theta:]))
    ran = [(columns * before + sum(outputs), seconds) for before, seconds in zip(ahead, spent, strict=True)]
    beside = two_stage_seconds(ran[:theta], ran[theta:], handover, columns, overlap=True)
    assert beside == pytest.approx(taken(front, back))
    in_turn = two_stage_seconds(ran[:theta], ran[theta:], handover, columns, overlap=False)
    beside = two_stage_seconds(ran[:theta], ran[theta:], handover, columns, overlap=True)
    in_turn = two_stage_seconds(ran[:theta], ran[theta:], handover, columns, overlap=False)
    assert in_turn == pytest.approx(sum(front) + sum(back))
    assert max(sum(front), sum(back)) <= beside <= in_turn
