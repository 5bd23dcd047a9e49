"""Cost files: whom they are for, what a plan takes of them, and what is said of those that are damaged."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_primitives import FAST, GPU, MACHINE, SLOW, WITH_GPU, on_gpu
from znnpy.costs.cost_file import AGAIN, FORMAT, Costs, Measurement, UnitSpeed
from znnpy.costs.model import CPU_FIRST_TOUCH, CPU_RATES, Rate, assumed_rates
from znnpy.errors import PlanFileError
from znnpy.kernels.contract import Variant
from znnpy.machine import Machine
from znnpy.shapes import ConvShape

TABLE = (SLOW, FAST)
SHAPE = ConvShape(1, 2, 3, (9, 9, 9), (2, 2, 2))
LAYER = Measurement(SLOW.name, SLOW.version, Variant.of(scale=1), SHAPE, 0.25)


def costs(**changes: Any) -> Costs:
    """Return the costs of MACHINE with two threads: one unit and one layer."""
    words: dict[str, Any] = {
        "format": FORMAT,
        "znnpy_version": "1",
        "device": "cpu",
        "threads": 2,
        "machine": MACHINE,
        "primitives": {SLOW.name: 1, FAST.name: 1},
        "units": {"product": UnitSpeed(3e11, 2e10, 7)},
        "by_size": {f"{SLOW.name} fp32": (2.0, 1.5, 1.25, 1.0, 1.0, 1.0, 1.0)},
        "stage_seconds": 3e-5,
        "layers": (LAYER,),
    }
    return Costs(**{**words, **changes})


def test_a_file_holds_what_was_measured() -> None:
    assert Costs.from_json(costs().to_json()) == costs()
    rates = costs().rates(TABLE)
    assert rates.of("product") == Rate(3e11, 2e10)
    assert rates.fitted == {"product"}
    assert rates.was_measured(SLOW, SHAPE, Variant.of(scale=1))
    assert rates.stage_seconds == 3e-5
    assert rates.seconds(SLOW, SHAPE, Variant.of(scale=1)) == pytest.approx(0.25 + rates.stage_seconds)
    fast, variant = ConvShape(1, 2, 3, (9, 9, 9), (3, 2, 2)), Variant.of(scale=1)
    plain = replace(rates, by_size={}, measured={})
    assert rates.seconds(FAST, fast, variant) == plain.seconds(FAST, fast, variant), "no size of it was measured"
    assert rates.seconds(SLOW, fast, variant) > 1.9 * plain.seconds(SLOW, fast, variant)


def test_the_rate_of_new_memory_is_as_measured_or_assumed() -> None:
    measured = Costs.from_json(costs(first_touch=3e9).to_json()).rates(TABLE)
    assert (measured.first_touch, measured.first_touch_measured) == (3e9, True)
    content = json.loads(costs().to_json())
    content.pop("first_touch")
    before = Costs.from_json(json.dumps(content)).rates(TABLE)  # a file that was written before it was measured
    assert (before.first_touch, before.first_touch_measured) == (CPU_FIRST_TOUCH, False)


def test_units_that_were_not_measured_are_as_much_slower_as_the_others() -> None:
    assumed = assumed_rates(MACHINE, 2)
    assert assumed.units == CPU_RATES
    speeds = {
        "product": UnitSpeed(0.5 * CPU_RATES["product"].flops, CPU_RATES["product"].nbytes, 7),
        "copy": UnitSpeed(CPU_RATES["copy"].flops, 0.25 * CPU_RATES["copy"].nbytes, 7),
        "fft": UnitSpeed(0.8 * CPU_RATES["fft"].flops, 0.9 * CPU_RATES["fft"].nbytes, 7),
    }
    rates = costs(units=speeds).rates(TABLE)
    assert rates.of("pool") == CPU_RATES["pool"].times(0.5, 0.5), "the median of 0.5, 0.25 and 0.8"
    assert rates.of("product") == Rate(speeds["product"].flops, speeds["product"].nbytes)
    pooled, shape, variant = replace(SLOW, unit="pool"), ConvShape(1, 2, 3, (9, 9, 9), (2, 2, 2)), Variant.of(scale=1)
    assert rates.all_fitted(SLOW, shape, variant)
    assert not rates.all_fitted(pooled, shape, variant)


def test_layers_of_primitives_that_are_gone_tell_nothing() -> None:
    assert costs().rates((FAST,)).measured == {}
    assert costs().rates((replace(SLOW, version=2),)).measured == {}


@pytest.mark.parametrize(
    ("machine", "threads", "table", "said"),
    [
        (replace(MACHINE, processor="another"), 2, TABLE, "the processor was fake and is another here"),
        (replace(MACHINE, simd="avx2"), 2, TABLE, "the width of vectors was avx512 and is avx2 here"),
        (replace(MACHINE, cores=4), 2, TABLE, "the number of cores was 2 and is 4 here"),
        (MACHINE, 1, TABLE, "the number of threads was 2 and is 1 here"),
        (replace(MACHINE, blas="mkl"), 2, TABLE, "BLAS was openblas SkylakeX and is mkl here"),
        (replace(MACHINE, versions=(("numpy", "3"),)), 2, TABLE, "numpy was 2 and is 3 here"),
        (replace(MACHINE, versions=()), 2, TABLE, "numpy was 2 and is not there here"),
        (MACHINE, 2, (SLOW, replace(FAST, version=2)), f"the version of {FAST.name} was 1 and is 2 here"),
        (MACHINE, 2, (SLOW,), f"the version of {FAST.name} was 1 and is not there here"),
    ],
)
def test_the_field_that_differs_is_named(machine: Machine, threads: int, table: tuple[Any, ...], said: str) -> None:
    assert costs().why_not(MACHINE, 2, TABLE) is None
    assert costs().why_not(replace(MACHINE, ram_bytes=1), 2, TABLE) is None, "memory is no speed"
    assert costs().why_not(machine, threads, table) == said


def test_costs_of_a_gpu_are_of_the_card_and_its_libraries() -> None:
    table = on_gpu(SLOW)
    card = costs(
        device="gpu",
        threads=1,
        machine=WITH_GPU,
        primitives={"gpu.conv.slow": 1},
        layers=(),
        units={"gpu_stream": UnitSpeed(1e12, 1e12, 1)},
        by_size={},
    )
    assert card.why_not(replace(WITH_GPU, processor="another"), 9, table) is None
    for gpu, said in (
        (replace(GPU, name="other"), "the GPU was made up and is other here"),
        (replace(GPU, driver=13010), "the driver of the GPU was 13000 and is 13010 here"),
        (replace(GPU, versions=(("cupy", "15"),)), "cupy was 14 and is 15 here"),
    ):
        assert card.why_not(replace(WITH_GPU, gpu=gpu), 1, table) == said
    assert card.name == "made up beside fake"


def edited(*path: str | int, to: Any) -> str:
    content = json.loads(costs().to_json())
    part = content
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = to
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the costs are damaged or cut off"),
        (costs().to_json()[:-9], "the costs are damaged or cut off"),
        ("[" * 100_000, "the costs are damaged: nested too deeply"),
        ("[]", f"this is no cost file, and this version reads format {FORMAT}"),
        (edited("format", to=99), f"this is a cost file of format 99, and this version reads format {FORMAT}"),
        (edited("units", "product", "flops", to=0), "the costs are damaged: units.product.flops: "),
        (edited("units", "warp", to={"flops": 1.0, "nbytes": 1.0, "runs": 1}), "the costs are damaged: units.warp"),
        (edited("first_touch", to=0.5), "the costs are damaged: first_touch: "),
        (edited("machine", "cores", to=0), "the costs are damaged: machine: "),
        (edited("machine", "simd", to="mmx"), "the costs are damaged: machine: "),
        (edited("device", to="gpu"), "the costs are damaged: the file: "),
        (edited("by_size", f"{SLOW.name} fp32", to=[1.0]), f"the costs are damaged: by_size.{SLOW.name} fp32: "),
        (edited("by_size", f"{SLOW.name} fp32", 0, to=0.0), f"the costs are damaged: by_size.{SLOW.name} fp32.0: "),
        (edited("stage_seconds", to=0.0), "the costs are damaged: stage_seconds: "),
        (edited("more", to=1), "the costs are damaged: more: "),
        (edited("layers", 0, "seconds", to=-1.0), "the costs are damaged: layers.0.seconds: "),
        (edited("layers", 0, "shape", "batch", to=10**400), "the costs are damaged: a number is 10000"),
        (
            edited("machine", "processor", to="\x1b[2J"),
            r"the costs are damaged: a text contains control characters: \x1b[2J",
        ),
        (edited("layers", to=[1] * 10**6), "the costs are damaged: it holds more than 200,000 values"),
    ],
)
def test_damage_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(PlanFileError) as caught:
        Costs.load(path)
    assert str(caught.value).startswith(f"{path}: {said}")
    assert str(caught.value).endswith(AGAIN)
    assert "\n" not in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match=r"no cost file .*; write one with `znnpy measure --out"):
        Costs.load(tmp_path / "none.json")
    with pytest.raises(PlanFileError, match=r"cannot read the cost file .*: Is a directory"):
        Costs.load(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PlanFileError, match=r"cannot read the cost file .*: it is a pipe, a socket or a device"):
        Costs.load(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanFileError, match="is no cost file: it is not text"):
        Costs.load(tmp_path / "binary")


@pytest.mark.parametrize("scale", [-1, 2**20 + 1, (4, 2**40, 4)])
def test_numbers_of_a_variant_are_bounded(scale: int | tuple[int, int, int]) -> None:
    """A primitive may go through all smaller tiles, so one of 2^40 voxels would keep it busy for hours."""
    assert Costs.from_json(costs().to_json()) == costs()
    layer = json.loads(costs().to_json())
    layer["layers"][0]["variant"]["parameters"] = [["scale", scale]]
    with pytest.raises(PlanFileError, match=r"scale of a variant is from 0 to 1,048,576"):
        Costs.from_json(json.dumps(layer))
