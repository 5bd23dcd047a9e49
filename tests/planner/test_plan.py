"""Plans as files: what is written is read, what is damaged or foreign is refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FAKES, FAST, MACHINE, RATES, limits
from hypothesis import given
from hypothesis import strategies as st

from znnpy.errors import PlanFileError
from znnpy.kernels.primitive import Variant
from znnpy.machine import Limits
from znnpy.network import Conv, MaxFilter, Maxout, Network, Pool
from znnpy.planner.layout import Tensor
from znnpy.planner.memory import READER_BYTES, WRITER_BYTES
from znnpy.planner.plan import FORMAT, Choice, Memory, Plan, RunnerUp
from znnpy.planner.search import make_plan
from znnpy.shapes import ConvShape, FilterShape, MaxoutShape, PoolShape, add, multiply, subtract

COUNT = st.integers(1, 9)
BYTES = st.integers(0, 2**45)
SIZE = st.tuples(COUNT, COUNT, COUNT)
LARGE = st.tuples(*[st.integers(9, 99)] * 3)
SHAPES = st.one_of(
    st.builds(ConvShape, COUNT, COUNT, COUNT, LARGE, SIZE, st.sampled_from(["none", "relu", "softmax"])),
    st.builds(lambda s, f, m, p: PoolShape(s, f, tuple(a * b + b - 1 for a, b in zip(m, p, strict=True)), p),
              COUNT, COUNT, SIZE, SIZE),
    st.builds(lambda s, f, k, m, p: ConvShape(s, f, f, add(multiply(add(m, (1, 1, 1)), p), subtract(k, (2, 2, 2))), k,
              "relu", p), COUNT, COUNT, SIZE, SIZE, SIZE),
    st.builds(FilterShape, COUNT, COUNT, LARGE, SIZE),
    st.builds(lambda s, g, of, n: MaxoutShape(s, g * of, n, of), COUNT, COUNT, COUNT, SIZE),
)  # fmt: skip
VARIANTS = st.dictionaries(st.text(min_size=1, max_size=5), st.one_of(COUNT, SIZE), max_size=3).map(
    lambda parameters: Variant(tuple(sorted(parameters.items())))
)
SECONDS = st.floats(1e-9, 1e9)
SPANS = st.tuples(COUNT, COUNT)
CHOICES = st.builds(
    Choice, SPANS, SHAPES, st.text(), COUNT, st.just("cpu"), VARIANTS, SECONDS, st.booleans(), BYTES, BYTES
)
PLANS = st.builds(
    Plan,
    format=st.just(FORMAT),
    znnpy_version=st.just("0.1.0"),
    network=st.text(),
    network_name=st.text(),
    machine=st.text(),
    limits=st.builds(Limits, st.integers(1, 2**50), COUNT),
    output=LARGE,
    patch_out=SIZE,
    patch_in=SIZE,
    batch=COUNT,
    choices=st.lists(CHOICES, min_size=1, max_size=4).map(tuple),
    tensors=st.lists(st.builds(Tensor, st.text(), BYTES, COUNT, COUNT, BYTES), max_size=4).map(tuple),
    memory=st.builds(Memory, *[BYTES] * 6),
    itemsize_in=COUNT,
    itemsize_out=COUNT,
    patches=COUNT,
    rigor=st.just("estimate"),
    runners_up=st.lists(st.builds(RunnerUp, SIZE, SECONDS, BYTES), max_size=3).map(tuple),
)


@given(PLANS)
def test_what_is_written_is_read(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


@pytest.fixture(scope="module")
def network() -> Network:
    """One layer of every kind."""
    layers = (Conv((3, 2, 2), 6, "relu"), Pool((2, 1, 2)), Maxout(2), MaxFilter((1, 2, 1)), Conv((1, 2, 2), 2))
    return Network("mixed", 1, layers)


@pytest.fixture(scope="module")
def plan(network: Network) -> Plan:
    return make_plan(
        network,
        (20, 11, 8),
        MACHINE,
        limits(READER_BYTES + WRITER_BYTES + 2**19),
        table=FAKES,
        rates=RATES,
        baseline=5000,
    )


def edited(plan: Plan, *path: str | int, to: Any) -> str:
    """The plan's JSON with one value changed, or left out where `to` is ..."""
    content = json.loads(plan.to_json())
    part = content
    for key in path[:-1]:
        part = part[key]
    if to is ...:
        del part[path[-1]]
    else:
        part[path[-1]] = to
    return json.dumps(content)


def test_a_real_plan_survives_and_runs(plan: Plan, network: Network, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    read = Plan.load(file)
    assert read == plan
    read.check_runs(network, MACHINE, ram_bytes=plan.memory.peak, table=FAKES)


DAMAGED: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
    "negative bytes": (("tensors", 0, "nbytes"), -4, "tensors.0.nbytes: .*greater than or equal to 0"),
    "negative offset": (("tensors", 1, "offset"), -64, "tensors.1.offset: .*greater than or equal to 0"),
    "negative arena": (("memory", "arena"), -1, "memory.arena"),
    "empty patch": (("patch_out", 1), 0, "patch_out.1: .*greater than or equal to 1"),
    "2D patch": (("patch_out",), [4, 4], "patch_out.2"),
    "size in words": (("patches",), "three", "patches: .*valid integer"),
    "size in quotes": (("patches",), "3", "patches: .*valid integer"),
    "half a patch": (("patches",), 1.5, "patches: .*valid integer"),
    "no seconds": (("choices", 0, "seconds"), None, "choices.0.seconds"),
    "zero seconds": (("choices", 0, "seconds"), 0.0, "choices.0.seconds"),
    "seconds without end": (("choices", 0, "seconds"), 1e308, "choices.0.seconds"),
    "missing field": (("memory", "residents"), ..., "memory.residents: .*required"),
    "missing runners-up": (("runners_up",), ..., "runners_up: .*required"),
    "unknown field": (("split",), 3, "split: .*nexpected"),
    "unknown field within": (("limits", "vram"), 3, "limits.vram: .*nexpected"),
    "unknown kind of layer": (("choices", 0, "shape", "kind"), "deconv", "choices.0.shape: .*deconv"),
    "no kind": (("choices", 0, "shape", "kind"), ..., "choices.0.shape: .*kind"),
    "kernel larger than its input": (("choices", 0, "shape", "k"), [99, 1, 1], "smaller than the kernel along z"),
    "no layers": (("choices",), [], "choices: .*at least 1 item"),
    "no limits": (("limits",), None, "limits"),
    "no threads": (("limits", "threads"), 0, "limits: .*0 threads are no limits"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged(plan: Plan, what: str) -> None:
    path, to, said = DAMAGED[what]
    with pytest.raises(PlanFileError, match=f"^the plan is damaged: .*{said}.*; make it again with `znnpy plan NET"):
        Plan.from_json(edited(plan, *path, to=to))


def test_several_faults_are_counted(plan: Plan) -> None:
    content = json.loads(plan.to_json())
    del content["patches"], content["rigor"]
    with pytest.raises(PlanFileError, match=r"\(and 1 more such\)"):
        Plan.from_json(json.dumps(content))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_cut_off(plan: Plan, share: float) -> None:
    whole = plan.to_json()
    with pytest.raises(PlanFileError, match=r"the plan is damaged or cut off: line \d+, column \d+"):
        Plan.from_json(whole[: int(share * len(whole)) - 2 if share else 0])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "this is no plan, and this version reads format 2"),
        ("{}", "this is no plan"),
        ('{"format": 3}', "this is a plan of format 3, and this version reads format 2"),
        ("[" * 100_000, "nested too deeply"),
    ],
    ids=["a list", "empty", "from the future", "deep"],
)
def test_not_a_plan(text: str, said: str) -> None:
    with pytest.raises(PlanFileError, match=said):
        Plan.from_json(text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match=r"no plan file .*gone.json; write one with `znnpy plan NETWORK --out "):
        Plan.load(tmp_path / "gone.json")
    with pytest.raises(PlanFileError, match="cannot read the plan"):
        Plan.load(tmp_path)
    binary = tmp_path / "plan.json"
    binary.write_bytes(b"\x89HDF\r\n\x1a\n\xff\xfe")
    with pytest.raises(PlanFileError, match="is not a plan: it is not text"):
        Plan.load(binary)
    binary.write_text("{")
    with pytest.raises(PlanFileError, match=r"plan.json: the plan is damaged or cut off: line 1"):
        Plan.load(binary)


def refused(plan: Plan, network: Network, said: str, **words: Any) -> None:
    settings: dict[str, Any] = {"machine": MACHINE, "table": FAKES} | words
    with pytest.raises(PlanFileError, match=said):
        plan.check_runs(network, **settings)


def test_another_network(plan: Plan, network: Network) -> None:
    other = replace(network, name="other", layers=network.layers[:-1])
    said = f"another network \\(mixed, {network.sha256[:12]}\\) than the one given \\(other, {other.sha256[:12]}\\)"
    refused(plan, other, said)


def test_primitives_that_are_not_here(plan: Plan, network: Network) -> None:
    lacking = [p for p in FAKES if p.name != FAST.name]
    refused(plan, network, "layer 0 of the plan runs cpu.conv.fast, which is not here", table=lacking)
    newer = [*lacking, replace(FAST, version=2)]
    refused(plan, network, "layer 0 of the plan runs version 1 of cpu.conv.fast, and version 2 is here", table=newer)
    sulking = [*lacking, replace(FAST, refuse="no AVX-512")]
    refused(plan, network, "which does not apply here: no AVX-512", table=sulking)
    fewer = [*lacking, replace(FAST, scale=(7,))]
    refused(plan, network, r"cpu.conv.fast has no variant scale=\d", table=fewer)


def test_memory_that_is_not_here(plan: Plan, network: Network) -> None:
    peak = plan.memory.peak
    small = replace(MACHINE, ram_bytes=peak - 10)
    refused(plan, network, f"needs {peak:,} bytes of RAM, 10 more than this process may use", machine=small)
    refused(plan, network, "70 more than the limit allows", ram_bytes=peak - 70)


EDITED: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
    "offset outside": (("tensors", 0, "offset"), 2**40, "lays x0 at bytes 1,099,511,627,776 to .* outside the arena"),
    "offset not aligned": (("tensors", 0, "offset"), 32, "not aligned to 64"),
    "smaller tensor": (("tensors", 0, "nbytes"), 64, "gives x0 64 bytes in ticks 0 to 0, and it needs"),
    "shorter life": (("tensors", 3, "last"), 0, "bytes in ticks 0 to 0, and it needs"),
    "no such tensor": (("tensors", 0, "name"), "x99", r"lacks, repeats or invents tensors \(x0, x99\)"),
    "a tensor less": (("tensors", 0), ..., r"lacks, repeats or invents tensors \(x0\)"),
    "a tensor twice": (("tensors", 0, "name"), "x1", "lacks, repeats or invents tensors"),
    "smaller arena": (("memory", "arena"), 64, "outside the arena of 64"),
    "larger arena": (("memory", "arena"), 2**25, r"tensors end at byte [\d,]+ and the arena at 33,554,432"),
    "fewer weights": (("memory", "residents"), 3, "promises 3 bytes of weights"),
    "another patch": (("patch_out", 0), 2, "entry 0 of the plan is layer 0|reads patches"),
    "patch off the period": (("patch_out", 0), 3, "multiple of the pooling period"),
    "another input": (("patch_in", 2), 77, "reads patches of .*x77"),
    "another shape": (("choices", 0, "shape", "fout"), 7, "entry 0 of the plan is layer 0"),
    "another order": (("choices", 1, "layers"), [2, 2], "entry 1 of the plan is layer 2"),
    "a layer less": (("choices", 4), ..., "chooses for 4 layers, and the network has 5"),
    "another kind": (("choices", 0, "primitive"), "cpu.pool.fragments", "layer 0 of the plan is a conv and runs"),
    "another variant": (("choices", 0, "variant", "parameters"), [["scale", 3]], "has no variant scale=3"),
    "another batch": (("batch",), 2, "runs 2 patches at once"),
}  # fmt: skip


@pytest.mark.parametrize("what", EDITED)
def test_a_hand_edited_plan_corrupts_nothing(plan: Plan, network: Network, what: str) -> None:
    path, to, said = EDITED[what]
    refused(Plan.from_json(edited(plan, *path, to=to)), network, said)


FUSED: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
    "one layer of the two": (("choices", 0, "layers"), [0, 0], r"entry 0 of the plan is layer 0 \(conv .*p2x1x2\)"),
    "three layers": (("choices", 0, "layers"), [0, 2], "entry 0 of the plan is layers 0 and 2"),
    "layers twice": (("choices", 1, "layers"), [1, 2], "entry 1 of the plan is layers 1 and 2"),
    "backwards": (("choices", 0, "layers"), [0, -1], "damaged: choices.0.layers.1"),
    "beyond the end": (("choices", 3, "layers"), [4, 5], "entry 3 of the plan is layers 4 and 5"),
    "another window": (("choices", 0, "shape", "pool"), [1, 1, 1], "entry 0 of the plan is layers 0 and 1"),
    "window that does not fit": (("choices", 0, "shape", "pool"), [5, 4, 3], "damaged: choices.0.shape.*window"),
    "a primitive that cannot": (("choices", 0, "primitive"), "cpu.conv.slow", "0 and 1 .*does not pool into fragments"),
    "the last left out": (("choices", 3), ..., "chooses for 4 layers, and the network has 5"),
}


@pytest.mark.parametrize("what", FUSED)
def test_a_hand_edited_plan_of_two_layers_in_one(network: Network, what: str) -> None:
    table = tuple(replace(p, flops=1.0) if p.name == "cpu.conv.both" else p for p in FAKES)
    plan = make_plan(network, (20, 11, 8), MACHINE, limits(2**30), table=table, rates=RATES, baseline=5000)
    plan.check_runs(network, MACHINE, table=table)
    path, to, said = FUSED[what]
    with pytest.raises(PlanFileError, match=said):
        Plan.from_json(edited(plan, *path, to=to)).check_runs(network, MACHINE, table=table)


def overlaps(plan: Plan) -> Iterator[tuple[int, int]]:
    for i, a in enumerate(plan.tensors):
        for j, b in enumerate(plan.tensors):
            if i != j and a.meets(b) and min(a.nbytes, b.nbytes) and b.offset + a.nbytes <= plan.memory.arena:
                yield i, b.offset


def test_no_tensor_may_move_onto_another(plan: Plan, network: Network) -> None:
    moves = list(overlaps(plan))
    assert len(moves) > 5
    for index, offset in moves:
        moved = Plan.from_json(edited(plan, "tensors", index, "offset", to=offset))
        refused(moved, network, "over each other|the arena")


def test_the_table_is_the_real_one_unless_told(plan: Plan, network: Network) -> None:
    with pytest.raises(PlanFileError, match="which is not here"):
        plan.check_runs(network, MACHINE)


def test_prediction(plan: Plan) -> None:
    twice = replace(plan, patches=2 * plan.patches)
    assert twice.seconds == 2 * plan.seconds
    assert twice.voxels_per_second == plan.voxels_per_second / 2
    assert plan.seconds_per_patch == sum(c.seconds for c in plan.choices)
