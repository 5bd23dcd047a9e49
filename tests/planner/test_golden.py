"""Plans of the shipped networks on one made-up machine, as short text: a refactor leaves them as they are.

Where they are meant to change: `python -m tests.planner.test_golden > tests/golden/plans.txt`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from znnpy.kernels.cpu.native import library as native
from znnpy.machine import AMX, AVX512_BF16, Gpu, Limits, Machine
from znnpy.network_files import read_network
from znnpy.planner.modes import make_plan
from znnpy.planner.request import PlanRequest, Target
from znnpy.planner.run_plan import RunPlan
from znnpy.planner.validate import check_runs
from znnpy.shapes import GPU_PRECISIONS, Precision, text

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "plans.txt"
MACHINE = Machine("made up", "avx512", 2, 2**40, "openblas SkylakeX", ())
WITH_UNITS = replace(MACHINE, bf16=(AMX, AVX512_BF16))
H200 = Gpu("made up", (9, 0), 132, 140 * 2**30, 60 * 2**20, 227 * 2**10, 228 * 2**10, 4.8e12, 13000, ())
CASES = [
    *((name, 512, ram) for name in ("n337", "n537", "n726", "n926") for ram in ("8G", "64G", "256G")),
    ("fib25_boundary", 224, "600M"),
    ("fib25_boundary", 224, "2G"),
]
GPU_CASES: list[tuple[str, int, str, Precision]] = [
    *((name, 512, "120G", "tf32") for name in ("n337", "n537", "n726", "n926")),
    *(("n537", 512, "120G", precision) for precision in GPU_PRECISIONS if precision != "tf32"),
    ("n926", 512, "10G", "fp32"),
    ("fib25_boundary", 224, "2G", "fp16"),
]
BF16_CASES: list[tuple[str, int, str, Precision]] = [
    ("n337", 512, "16G", "bf16"),
    ("n726", 512, "16G", "bf16x2"),
    ("n537", 512, "16G", "fp32"),
]
COMPILED = native.why_not(MACHINE) is None
UNITS = {"M": 2**20, "G": 2**30}


def planned(name: str, side: int, ram: str) -> RunPlan:
    limits = Limits(int(ram[:-1]) * UNITS[ram[-1]], 2)
    network, baseline = read_network(name).network, 150 * 2**20
    return make_plan(PlanRequest(network, (side, side, side), limits, Target(MACHINE), baseline=baseline))


def planned_with_units(name: str, side: int, ram: str, precision: Precision) -> RunPlan:
    """On a processor with both units for bfloat16."""
    limits = Limits(int(ram[:-1]) * UNITS[ram[-1]], 2)
    target = Target(WITH_UNITS, precision=precision)
    network, baseline = read_network(name).network, 150 * 2**20
    return make_plan(PlanRequest(network, (side, side, side), limits, target, baseline=baseline))


def planned_on_gpu(name: str, side: int, vram: str, precision: Precision) -> RunPlan:
    """On a card without cuDNN."""
    limits = Limits(64 * 2**30, 2, int(vram[:-1]) * UNITS[vram[-1]])
    target = Target(replace(MACHINE, gpu=H200), "gpu", precision=precision, mode="gpu")
    network, baseline = read_network(name).network, 500 * 2**20
    return make_plan(PlanRequest(network, (side, side, side), limits, target, baseline=baseline))


def line(name: str, side: int, ram: str, plan: RunPlan) -> str:
    """Network, output, limit: patches, or columns and their steps: primitives of the layers without device and kind.

    What runs in several parts in a step has their number behind it.
    """
    methods = " ".join(
        choice.primitive.rpartition(".")[2] + (f"/{parts}" if parts > 1 else "")
        for choice, parts in zip(plan.choices, plan.main.sub_batches, strict=True)
    )
    column = f"columns of {plan.main.column_planes} along {'zyx'[plan.main.axis]} by " if plan.main.streams else ""
    return f"{name} {side}^3 {ram}: {column}{text(plan.patch_out)}: {methods}"


@pytest.mark.slow
@pytest.mark.skipif(not COMPILED, reason="the plans are for where the kernels are compiled")
@pytest.mark.parametrize(("name", "side", "ram"), CASES)
def test_cpu_plans_equal_the_golden_file(name: str, side: int, ram: str) -> None:
    plan = planned(name, side, ram)
    expected = next(kept for kept in GOLDEN.read_text().splitlines() if kept.startswith(f"{name} {side}^3 {ram}:"))
    assert line(name, side, ram, plan) == expected
    assert plan.memory.peak <= plan.limits.ram_bytes
    check_runs(plan, read_network(name).network, MACHINE)


@pytest.mark.slow
@pytest.mark.skipif(native.why_not_bf16(WITH_UNITS, AMX) is not None, reason="the plans are for compiled kernels")
@pytest.mark.parametrize(("name", "side", "ram", "precision"), BF16_CASES)
def test_plans_with_units_for_bfloat16_equal_the_golden_file(
    name: str, side: int, ram: str, precision: Precision
) -> None:
    plan = planned_with_units(name, side, ram, precision)
    label = f"{ram} {precision} with AMX"
    expected = next(kept for kept in GOLDEN.read_text().splitlines() if kept.startswith(f"{name} {side}^3 {label}:"))
    assert line(name, side, label, plan) == expected
    assert plan.precision == precision
    assert plan.memory.peak <= plan.limits.ram_bytes
    check_runs(plan, read_network(name).network, WITH_UNITS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "side", "vram", "precision"),
    [pytest.param(*case, marks=[pytest.mark.long] if case[2] == "10G" else []) for case in GPU_CASES],
)
def test_gpu_plans_equal_the_golden_file(name: str, side: int, vram: str, precision: Precision) -> None:
    plan = planned_on_gpu(name, side, vram, precision)
    label = f"{vram} {precision} on a GPU"
    expected = next(kept for kept in GOLDEN.read_text().splitlines() if kept.startswith(f"{name} {side}^3 {label}:"))
    assert line(name, side, label, plan) == expected
    assert plan.memory.excess(plan.limits) == (0, 0)
    check_runs(plan, read_network(name).network, replace(MACHINE, gpu=H200))


def lines() -> Iterator[str]:
    for case in CASES:
        yield line(*case, planned(*case))
    for name, side, ram, precision in BF16_CASES:
        yield line(name, side, f"{ram} {precision} with AMX", planned_with_units(name, side, ram, precision))
    for name, side, vram, precision in GPU_CASES:
        yield line(name, side, f"{vram} {precision} on a GPU", planned_on_gpu(name, side, vram, precision))


if __name__ == "__main__":
    print("\n".join(lines()))
