"""Plans of the shipped networks on one made-up machine, as short text: a refactor leaves them as they are.

Where they are meant to change: `python tests/planner/test_golden.py > tests/golden/plans.txt`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from znnpy.formats.networks import read_network
from znnpy.kernels.cpu.native import library as native
from znnpy.machine import Limits, Machine
from znnpy.planner.plan import Plan
from znnpy.planner.search import make_plan

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "plans.txt"
MACHINE = Machine("made up", "avx512", 2, 2**40, "openblas SkylakeX", ())
CASES = [
    *((name, 512, ram) for name in ("n337", "n537", "n726", "n926") for ram in ("8G", "64G", "256G")),
    ("fib25_boundary", 224, "600M"),
    ("fib25_boundary", 224, "2G"),
]
COMPILED = native.why_not(MACHINE) is None
UNITS = {"M": 2**20, "G": 2**30}


def planned(name: str, side: int, ram: str) -> Plan:
    limits = Limits(int(ram[:-1]) * UNITS[ram[-1]], 2)
    return make_plan(read_network(name).network, (side, side, side), MACHINE, limits, baseline=150 * 2**20)


def line(name: str, side: int, ram: str, plan: Plan) -> str:
    """Network, output, limit: patch, primitives of the layers without device and kind."""
    methods = " ".join(choice.primitive.rpartition(".")[2] for choice in plan.choices)
    return f"{name} {side}^3 {ram}: {'x'.join(map(str, plan.patch_out))}: {methods}"


@pytest.mark.skipif(not COMPILED, reason="the plans are for where the kernels are compiled")
@pytest.mark.parametrize(("name", "side", "ram"), CASES)
def test_plans_are_as_they_were(name: str, side: int, ram: str) -> None:
    start = time.process_time()
    plan = planned(name, side, ram)
    spent = time.process_time() - start
    expected = next(text for text in GOLDEN.read_text().splitlines() if text.startswith(f"{name} {side}^3 {ram}:"))
    assert line(name, side, ram, plan) == expected
    assert plan.memory.peak <= plan.limits.ram_bytes
    plan.check_runs(read_network(name).network, MACHINE)
    assert spent < 5, f"planning took {spent:.1f} s"


def lines() -> Iterator[str]:
    for case in CASES:
        yield line(*case, planned(*case))


if __name__ == "__main__":
    print("\n".join(lines()))
