"""Planning a network of many layers takes about as much work for each layer as planning one of few."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from tests.support.fake_primitives import CARRYING, FILTER, POOL, SLOW, WITH_GPU
from tests.support.flat_requests import make_plan
from znnpy.machine import Limits
from znnpy.network import Conv, Network

pytestmark = pytest.mark.slow


def calls(layers: int) -> int:
    """Count calls of functions while a network of so many layers is planned."""
    network = Network("long", 1, (Conv((1, 1, 1), 1),) * layers)
    count = 0

    def counted(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        del frame, argument
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        plan = make_plan(
            network, (40, 40, 40), WITH_GPU, Limits(2**30, 2), table=(SLOW, POOL, FILTER), rates=CARRYING, baseline=1000
        )
    finally:
        sys.setprofile(before)
    assert len(plan.choices) == layers
    return count


def test_work_grows_with_the_layers_and_not_with_their_square() -> None:
    assert calls(128) < 2.5 * calls(64)
