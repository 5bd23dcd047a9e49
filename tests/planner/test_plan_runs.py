"""Plans that were made elsewhere or edited: what would not run as it stands is refused in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from typing import Any

import pytest

from tests.support.fake_plans import CHOICES_AT, MEMORY_AT, TENSORS_AT, changed, edited
from tests.support.fake_primitives import FAKES, FAST, MACHINE, RATES, limits
from tests.support.flat_requests import make_plan
from znnpy.errors import PlanFileError
from znnpy.layer_shapes import with_batch
from znnpy.network import Network
from znnpy.planner.run_plan import RunPlan
from znnpy.planner.validate import check_runs


def refused(plan: RunPlan, network: Network, said: str, **words: Any) -> None:
    settings: dict[str, Any] = {"machine": MACHINE, "table": FAKES} | words
    with pytest.raises(PlanFileError, match=said):
        check_runs(plan, network, **settings)


def test_plan_of_another_network_is_refused(plan: RunPlan, network: Network) -> None:
    other = replace(network, name="other", layers=network.layers[:-1])
    said = f"another network \\(mixed, {network.sha256[:12]}\\) than the one given \\(other, {other.sha256[:12]}\\)"
    refused(plan, other, said)


def test_missing_primitive_is_refused(plan: RunPlan, network: Network) -> None:
    lacking = [p for p in FAKES if p.name != FAST.name]
    refused(plan, network, "layer 0 of the plan runs cpu.conv.fast, which is not here", table=lacking)
    newer = [*lacking, replace(FAST, version=2)]
    refused(plan, network, "layer 0 of the plan runs version 1 of cpu.conv.fast, and version 2 is here", table=newer)
    sulking = [*lacking, replace(FAST, refuse="no AVX-512")]
    refused(plan, network, "which does not apply here: no AVX-512", table=sulking)
    fewer = [*lacking, replace(FAST, scale=(7,))]
    refused(plan, network, r"cpu.conv.fast has no variant scale=\d", table=fewer)


def test_plan_beyond_the_memory_is_refused(plan: RunPlan, network: Network) -> None:
    peak = plan.memory.peak
    small = replace(MACHINE, ram_bytes=peak - 10)
    refused(plan, network, f"needs {peak:,} bytes of RAM, 10 more than this process may use", machine=small)
    refused(plan, network, "70 more than the limit allows", ram_bytes=peak - 70)


EDITED: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
    "offset outside": ((*TENSORS_AT, 0, "offset"), 2**40, "lays x0 at bytes 1,099,511,627,776 to .* outside the arena"),
    "offset not aligned": ((*TENSORS_AT, 0, "offset"), 32, "not aligned to 256"),
    "smaller tensor": ((*TENSORS_AT, 0, "nbytes"), 64, "gives x0 64 bytes in ticks 0 to 0, and it needs"),
    "shorter life": ((*TENSORS_AT, 3, "last"), 0, "bytes in ticks 0 to 0, and it needs"),
    "no such tensor": ((*TENSORS_AT, 0, "name"), "x99", r"lacks, repeats or invents tensors \(x0, x99\)"),
    "a tensor less": ((*TENSORS_AT, 0), ..., r"lacks, repeats or invents tensors \(x0\)"),
    "a tensor twice": ((*TENSORS_AT, 0, "name"), "x1", "lacks, repeats or invents tensors"),
    "smaller arena": ((*MEMORY_AT, "arena"), 64, "outside the arena of 64"),
    "larger arena": ((*MEMORY_AT, "arena"), 2**25, r"tensors end at byte [\d,]+ and the arena at 33,554,432"),
    "fewer weights": ((*MEMORY_AT, "weights"), 3, "promises 3 bytes of weights"),
    "another patch": (("patch_out", 0), 2, "entry 0 of the plan is layer 0|reads patches"),
    "patch off the period": (("patch_out", 0), 3, "multiple of the pooling period"),
    "another input": (("patch_in", 2), 77, "reads patches of .*x77"),
    "another shape": ((*CHOICES_AT, 0, "shape", "fout"), 7, "entry 0 of the plan is layer 0"),
    "another order": ((*CHOICES_AT, 1, "layers"), [2, 2], "entry 1 .* is layer 2"),
    "a layer less": ((*CHOICES_AT, 4), ..., "has choices for 4 layers, and the network has 5"),
    "another kind": ((*CHOICES_AT, 0, "primitive"), "cpu.pool.fragments", "layer 0.* is a conv and runs"),
    "another variant": ((*CHOICES_AT, 0, "variant", "parameters"), [["scale", 3]], "has no variant scale=3"),
    "more images than there are": ((*CHOICES_AT, 0, "shape", "batch"), 2, "gets 1 images, .*not a multiple of 2"),
    "images that do not divide": ((*CHOICES_AT, 2, "shape", "batch"), 3, "gets 4 images, .*not a multiple of 3"),
    "fewer images for one layer": ((*CHOICES_AT, 2, "shape", "batch"), 2, "gets 2 images, .*not a multiple of 4"),
    "fewer images for the last": ((*CHOICES_AT, 4, "shape", "batch"), 2, "gives x4 [0-9,]+ bytes in ticks"),
    "carried planes": ((*MEMORY_AT, "carries"), 64, "promises 64 bytes for carried planes, .* need 0"),
    "less for libraries": ((*MEMORY_AT, "allowance"), 3, "promises 3 bytes for the libraries"),
    "columns of a patch": (("column_planes",), 20, "entry 0 of the plan is layer 0|reads patches"),
    "columns of half a step": (("column_planes",), 7, "columns of 7 planes are no whole number of steps|reads patches"),
}  # fmt: skip


@pytest.mark.parametrize("what", EDITED)
def test_hand_edited_plan_is_refused(plan: RunPlan, network: Network, what: str) -> None:
    path, to, said = EDITED[what]
    refused(RunPlan.from_json(edited(plan, *path, to=to)), network, said)


WALKS: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
    "no carried planes": ((*MEMORY_AT, "carries"), 0, r"promises 0 bytes for carried planes, and its steps need"),
    "a patch": (("column_planes",), 0, "reads patches of .*, and 10x1x8 voxels out need 13x4x12"),
    "another axis": (("axis",), 0, "columns of 31 planes are no whole number of steps of 10;"),
    "reads all that a step depends on": (("patch_in",), [13, 4, 12], "reads patches of 13x4x12, and 10x1x8 .* 13x1x12"),
    "reads less than a step": (("patch_in", 0), 12, "reads patches of 12x1x12"),
    "a thicker step": (("patch_out", 1), 2, "columns of 31 planes are no whole number of steps of 2;"),
    "a step that fits": (("patch_out", 1), 31, "reads patches of 13x1x12, and 10x31x8 voxels out need 13x31x12"),
    "patch off the period": (("patch_out", 0), 9, "multiple of the pooling period 1x2x2, not 1x9x8"),
    "fewer planes": ((*CHOICES_AT, 0, "shape", "n", 0), 3, "entry 0 of the plan is layer 0"),
    "axes not turned": ((*CHOICES_AT, 0, "shape", "k"), [3, 2, 2], "damaged|entry 0 of the plan is layer 0"),
    "images that do not divide": ((*CHOICES_AT, 3, "shape", "batch"), 3, "gets 4 images, .* not a multiple of 3"),
    "smaller input": ((*TENSORS_AT, 0, "nbytes"), 64, "gives x0 64 bytes in ticks 0 to 0, and it needs"),
}  # fmt: skip


@pytest.mark.parametrize("what", WALKS)
def test_hand_edited_plan_of_columns_is_refused(column: RunPlan, network: Network, what: str) -> None:
    path, to, said = WALKS[what]
    with pytest.raises(PlanFileError, match=said):
        check_runs(RunPlan.from_json(edited(column, *path, to=to)), network, MACHINE, table=FAKES)


def test_column_of_any_whole_number_of_steps_runs(column: RunPlan, network: Network) -> None:
    """Steps stay as they are: any whole number of them runs."""
    for planes in (1, 7, 62):
        other = RunPlan.from_json(edited(column, "column_planes", to=planes))
        check_runs(other, network, MACHINE, table=FAKES)
        assert other.main.for_output(column.output, network).columns == 2 * ceil(31 / planes)


def test_plan_without_most_layers_is_refused(column: RunPlan, network: Network) -> None:
    for choices in (1, 2, 3):
        fewer = changed(column, stages=(replace(column.main.stages[0], choices=column.choices[:choices]),))
        refused(fewer, network, f"has choices for {choices} layers, and the network has 5|gets 4 images")


def taking(plan: RunPlan, *images: int) -> RunPlan:
    choices = (replace(c, shape=with_batch(c.shape, n)) for c, n in zip(plan.choices, images, strict=True))
    return changed(plan, stages=(replace(plan.main.stages[0], choices=tuple(choices)),))


@pytest.mark.parametrize(
    ("images", "said"),
    [
        ((1, 1, 3, 3, 3), "layer 2 .* gets 4 images.* not a multiple of 3"),
        ((1, 1, 2, 1, 4), "layer 4 .* gets 1 images.* not a multiple of 4"),
        ((1, 1, 8, 8, 8), "layer 2 .* gets 4 images.* not a multiple of 8"),
        ((1, 1, 4, 4, 4), r"gives x2 [\d,]+ bytes in ticks \d to \d, and it needs"),
        ((1, 1, 2, 2, 2), r"gives step2.s0 [\d,]+ bytes in ticks \d to \d, and it needs"),
        ((1, 1, 4, 4, 1), r"gives x2 [\d,]+ bytes in ticks \d to \d, and it needs"),
    ],
)
def test_hand_edited_batches_are_refused(split: RunPlan, wide: Network, images: tuple[int, ...], said: str) -> None:
    """A number of fragments at a time does not divide 4, or the arena was not made for it."""
    assert taking(split, 1, 1, 1, 1, 1) == split
    refused(taking(split, *images), wide, said)


FUSED: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
    "one layer of the two": (
        (*CHOICES_AT, 0, "layers"),
        [0, 0],
        "fit its network: layer 1 .* 1 images.* not a multiple of 4",
    ),
    "three layers": ((*CHOICES_AT, 0, "layers"), [0, 2], "entry 0 of the plan is layers 0 and 2"),
    "layers twice": ((*CHOICES_AT, 1, "layers"), [1, 2], "entry 1 of the plan is layers 1 and 2"),
    "backwards": ((*CHOICES_AT, 0, "layers"), [0, -1], "damaged: .*stages.0.choices.0.layers.1"),
    "beyond the end": ((*CHOICES_AT, 3, "layers"), [4, 5], "entry 3 of the plan is layers 4 and 5"),
    "another window": (
        (*CHOICES_AT, 0, "shape", "pool"),
        [1, 1, 1],
        "entry 0 .* is layers 0 and 1",
    ),
    "window that does not fit": (
        (*CHOICES_AT, 0, "shape", "pool"),
        [5, 4, 3],
        "damaged: .*stages.0.choices.0.shape.*window",
    ),
    "a primitive that cannot": (
        (*CHOICES_AT, 0, "primitive"),
        "cpu.conv.slow",
        "0 and 1 .*does not fuse pooling into fragments",
    ),
    "the last left out": ((*CHOICES_AT, 3), ..., "has choices for 4 layers, and the network has 5"),
}


@pytest.mark.parametrize("what", FUSED)
def test_hand_edited_fused_layer_is_refused(network: Network, what: str) -> None:
    table = tuple(replace(p, flops=1.0) if p.name == "cpu.conv.both" else p for p in FAKES)
    plan = make_plan(
        network, (20, 11, 8), MACHINE, limits(2**30), table=table, rates=RATES, baseline=5000, columns=False
    )
    check_runs(plan, network, MACHINE, table=table)
    path, to, said = FUSED[what]
    with pytest.raises(PlanFileError, match=said):
        check_runs(RunPlan.from_json(edited(plan, *path, to=to)), network, MACHINE, table=table)


def overlaps(plan: RunPlan) -> Iterator[tuple[int, int]]:
    for i, a in enumerate(plan.main.stages[-1].tensors):
        for j, b in enumerate(plan.main.stages[-1].tensors):
            if i != j and a.meets(b) and min(a.nbytes, b.nbytes) and b.offset + a.nbytes <= plan.main.memory.last.arena:
                yield i, b.offset


def test_overlapping_tensors_are_refused(plan: RunPlan, network: Network) -> None:
    moves = list(overlaps(plan))
    assert len(moves) > 5
    for index, offset in moves:
        moved = RunPlan.from_json(edited(plan, "stages", 0, "tensors", index, "offset", to=offset))
        refused(moved, network, "over each other|the arena")


def test_default_table_is_the_real_one(plan: RunPlan, network: Network) -> None:
    with pytest.raises(PlanFileError, match="which is not here"):
        check_runs(plan, network, MACHINE)
