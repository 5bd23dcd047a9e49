"""What benchmarks/planning*.py are tested with: a network, a small one in a file, makers of plans of made-up costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.fake_primitives import FAKES, MACHINE, RATES, limits
from znnpy.network import Conv, MaxFilter, Network, Pool

if TYPE_CHECKING:
    from collections.abc import Callable

TINY = """\
name: tiny
input_channels: 1
layers:
- {type: conv, kernel: [3, 2, 3], out: 6, activation: relu}
- {type: pool, window: [2, 2, 1]}
- {type: conv, kernel: [2, 3, 3], out: 2, activation: relu}
"""
NET = Network(
    "net",
    1,
    (
        Conv((3, 2, 4), 4, "relu"),
        Pool((2, 2, 2)),
        MaxFilter((1, 2, 2)),
        Conv((3, 3, 3), 60, "relu"),
        Pool((2, 1, 2)),
        Conv((2, 3, 1), 3, "tanh"),
    ),
)
OUTPUT = (40, 36, 44)
MIB = 2**20


def maker_with(imported: Callable[[str], Any], ram_bytes: int = 2**40, **wishes: Any) -> Any:
    """A `planning_plans.Maker` with made-up primitives, of the planner's pick."""
    plans = imported("planning_plans")
    ground = plans.Ground(MACHINE, limits(ram_bytes), RATES, baseline=1000, table=FAKES)
    return plans.Maker(ground, NET, ground.plan(NET, OUTPUT, **wishes))
