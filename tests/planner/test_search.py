"""The search as a whole: plans that add up, within the promise, and clear words when nothing fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, inf, prod

import pytest

from tests.support.brute_force import AROUND, BASELINE, SMALL, planned, steps_of
from tests.support.fake_primitives import BOTH, CARRYING, FAKES, FAST, FILTER, MACHINE, OVER, POOL, SLOW, Fake, limits
from tests.support.flat_requests import make_plan
from tests.support.tiers import one_in
from znnpy.costs.model import seconds
from znnpy.errors import NoPlanError, ShapeError
from znnpy.kernels.contract import Footprint, Variant
from znnpy.layer_shapes import LayerShape
from znnpy.machine import Limits
from znnpy.network import Conv, Layer, MaxFilter, Maxout, Network, Pool
from znnpy.planner.layer_search import MAX_COLUMN_SECONDS
from znnpy.planner.layout import chain, live_peak, place
from znnpy.planner.memory import READER_BYTES, WRITER_BYTES
from znnpy.planner.run_plan import RunnerUp, RunPlan
from znnpy.planner.tiling_search import SIZES_AT_ONCE
from znnpy.planner.tilings import axis_sizes, log_spaced, sizes_between
from znnpy.planner.validate import check_runs
from znnpy.shapes import Vec3, turned, turned_back
from znnpy.units import mebibytes

MakeNetwork = Callable[..., Network]


@pytest.mark.slow
def test_more_memory_is_never_slower(tiny_network: MakeNetwork) -> None:
    network = tiny_network()
    last = inf
    for extra in (100_000, 200_000, 500_000, 1_000_000, 2_000_000, 2**40):
        now = planned(network, (30, 21, 17), AROUND + extra).seconds
        assert now <= last
        last = now


WIDE_BEHIND = (Conv((2, 3, 2), 2), Pool((2, 1, 2)), Conv((2, 1, 3), 12), Conv((1, 2, 2), 12), Conv((1, 1, 1), 1))
ADDING_UP = [
    pytest.param((), (31, 20, 9), 400_000, False, False, id="patches"),
    pytest.param(WIDE_BEHIND, (31, 20, 9), 360_000, False, True, id="patches, split"),
    pytest.param((), (60, 12, 9), 400_000, True, False, id="columns along z"),
    pytest.param((), (9, 90, 9), 400_000, True, False, id="columns along y"),
    pytest.param((), (9, 12, 70), 400_000, True, False, id="columns along x"),
    pytest.param(WIDE_BEHIND, (31, 20, 9), 720_000, True, True, id="columns, split"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "output", "room", "walks", "split"), ADDING_UP)
def test_figures_of_the_plan_add_up(
    tiny_network: MakeNetwork, layers: tuple[Layer, ...], output: Vec3, room: int, walks: bool, split: bool
) -> None:
    """Each figure of a plan follows from the parts that it is made of."""
    network = tiny_network(*layers, input_channels=2)
    plan = planned(network, output, AROUND + room, itemsize_in=2, itemsize_out=1, columns=walks)
    by_name = {p.name: p for p in FAKES}
    footprints = [by_name[c.primitive].footprint(c.shape, c.variant, 2) for c in plan.choices]
    shapes = [c.shape for c in plan.choices]
    assert {c.device for c in plan.choices} == {"cpu"}
    assert [c.working_bytes for c in plan.choices] == [f.working(s) for f, s in zip(footprints, shapes, strict=True)]
    assert (max(plan.main.sub_batches) > 1) == split

    memory = plan.main.memory
    tensors, arena = place(chain(list(zip(shapes, footprints, strict=True))))
    assert plan.main.stages[-1].tensors == tensors
    assert memory.last.arena == arena >= live_peak(tensors)
    assert memory.last.weights == sum(f.resident for f in footprints)
    assert memory.last.allowance == max(f.allowance for f in footprints)
    assert memory.reading == 2 * 2 * prod(plan.main.patch_in) * 2 + READER_BYTES
    assert memory.writing == 2 * network.output_channels * prod(plan.patch_out) * 1 + WRITER_BYTES
    assert memory.baseline == BASELINE

    columns = plan.main.cover(network)
    assert plan.main.columns == len(columns)
    assert plan.main.streams == walks
    # Each choice computes what is new in a step along the axis; the rest of its input is carried.
    periods = [1]
    for layer in network.turned(plan.main.axis).layers:
        periods.append(periods[-1] * (layer.window[0] if isinstance(layer, Pool) else 1))
    carries, spent = 0, 0.0
    for choice, parts in zip(plan.choices, plan.main.sub_batches, strict=True):
        ahead = network.margins[choice.layers[1] + 1][plan.main.axis]
        kept = 0
        if plan.main.streams:
            kept = choice.shape.in_shape[1] - plan.patch_out[plan.main.axis] // periods[choice.layers[0]]
        moved = choice.shape.in_bytes // choice.shape.in_shape[1] * kept
        once = (
            seconds(by_name[choice.primitive].work(choice.shape, choice.variant), CARRYING)
            + 4 * moved / CARRYING.copy_bandwidth
        )
        assert choice.seconds == pytest.approx(once, rel=1e-12)
        assert choice.executions == parts * steps_of(columns, ahead)
        carries += parts * moved
        spent += choice.executions * choice.seconds
    assert memory.last.carries == carries
    assert plan.seconds == pytest.approx(spent, rel=1e-12)
    assert plan.voxels_per_second == prod(output) / plan.seconds
    whole = network.patch_in(plan.patch_out)
    walked = [plan.main.streams and axis == plan.main.axis for axis in range(3)]
    assert plan.main.patch_in == tuple(p if w else n for p, n, w in zip(plan.patch_out, whole, walked, strict=True))
    check_runs(plan, network, MACHINE, table=FAKES)


@pytest.mark.slow
def test_columns_run_along_the_long_axis(tiny_network: MakeNetwork) -> None:
    """A network and an output rotated to another axis give the rotated plan."""
    network = tiny_network()
    found = []
    for axis in range(3):
        output = turned_back((90, 9, 8), axis)
        aligned = Network("turned", 1, tuple(_turned_back(layer, axis) for layer in network.layers))
        plan = planned(aligned, output, AROUND + 150_000, columns=True)
        assert plan.main.axis == axis
        assert plan.output == output
        found.append(
            (
                plan.seconds,
                plan.memory,
                turned(plan.patch_out, axis),
                plan.main.column_planes,
                plan.choices,
                plan.main.stages[-1].tensors,
            )
        )
    assert found[0] == found[1] == found[2]


def _turned_back(layer: Layer, axis: int) -> Layer:
    match layer:
        case Conv():
            return replace(layer, kernel=turned_back(layer.kernel, axis))
        case Pool() | MaxFilter():
            return replace(layer, window=turned_back(layer.window, axis))
        case _:
            return layer


@pytest.mark.slow
@pytest.mark.parametrize(
    "layers",
    [
        (Pool((2, 2, 2)),),
        (Pool((3, 1, 2)), Pool((1, 5, 2)), Conv((2, 2, 2), 3)),
        (Conv((3, 3, 3), 6), Maxout(3), MaxFilter((2, 3, 1)), Pool((1, 2, 2))),
        (Conv((1, 1, 1), 1),),
    ],
    ids=["pool alone", "pool after pool", "maxout, maxfilter, pool last", "one voxel"],
)
@pytest.mark.parametrize("output", [(1, 1, 1), (7, 11, 13), (300, 2, 45)], ids=str)
def test_every_kind_of_network_gets_a_valid_plan(
    tiny_network: MakeNetwork, layers: tuple[Layer, ...], output: Vec3
) -> None:
    network = tiny_network(*layers)
    plan = planned(network, output, 2**28)
    assert all(p % q == 0 for p, q in zip(plan.patch_out, network.period, strict=True))
    check_runs(plan, network, MACHINE, table=FAKES)


@pytest.mark.slow
def test_forced_primitive_is_used_for_layers_it_supports(tiny_network: MakeNetwork) -> None:
    network = tiny_network()
    picky = replace(FAST, name="cpu.conv.picky", flops=1.0, refuse="it is Friday")
    plan = planned(network, SMALL, 2**30, only=["cpu.conv.slow"])
    assert [c.primitive for c in plan.choices] == [SLOW.name, POOL.name, SLOW.name, SLOW.name]
    plan = planned(network, SMALL, 2**30, only=[picky.name], table=(*FAKES, picky))
    assert [c.primitive for c in plan.choices] == [FAST.name, POOL.name, FAST.name, FAST.name]
    plan = planned(network, SMALL, 2**30, only=[SLOW.name, OVER.name])
    assert {c.primitive for c in plan.choices} == {POOL.name, OVER.name}
    with pytest.raises(NoPlanError, match=r"no primitive 'cpu.conv.fasst'; did you mean cpu.conv.fast"):
        planned(network, SMALL, 2**30, only=["cpu.conv.fasst"])


@pytest.mark.slow
def test_fused_primitive_is_dropped_if_another_is_forced(tiny_network: MakeNetwork) -> None:
    """A primitive for two layers is left out where it would take a layer from one that was asked for."""
    network = tiny_network(Conv((2, 2, 2), 3), Pool((2, 2, 2)))
    best = replace(BOTH, flops=1.0)
    table = tuple(best if p == BOTH else p for p in FAKES)

    def chosen(*only: str) -> list[str]:
        return [c.primitive for c in planned(network, SMALL, 2**30, only=only, table=table).choices]

    assert chosen() == chosen(BOTH.name) == chosen(BOTH.name, SLOW.name) == [BOTH.name]
    assert chosen(FILTER.name) == [BOTH.name]
    assert chosen(SLOW.name) == [SLOW.name, POOL.name]
    assert chosen(POOL.name) == chosen(POOL.name, BOTH.name) == [BOTH.name, POOL.name]


@pytest.mark.slow
def test_forced_patch_is_used(tiny_network: MakeNetwork) -> None:
    network = tiny_network()
    plan = planned(network, (30, 30, 30), 2**30, patch=(6, 10, 7), columns=False)
    assert plan.patch_out == (6, 10, 7)
    assert plan.main.columns == 5 * 3 * 5
    assert plan.runners_up == ()
    assert plan.other is None
    along = {0: 3 * 5, 1: 5 * 5, 2: 5 * 3}
    plan = planned(network, (30, 30, 30), 2**30, patch=(6, 10, 7), columns=True)
    assert plan.patch_out == (6, 10, 7)
    assert plan.main.column_planes == (30, 30, 35)[plan.main.axis]
    assert plan.main.columns == along[plan.main.axis]
    with pytest.raises(ShapeError, match="multiple of the pooling period 2x2x1, not 5x10x7; the next larger one is 6x"):
        planned(network, (30, 30, 30), 2**30, patch=(5, 10, 7))


@pytest.mark.slow
def test_nearest_miss_names_the_smallest_sufficient_limit(tiny_network: MakeNetwork) -> None:
    """The limit the message asks for is enough, and a byte less than the smallest need is not."""
    network = tiny_network()
    output = (30, 21, 17)
    with pytest.raises(NoPlanError) as caught:
        planned(network, output, AROUND)
    assert caught.value.needs is not None
    least, _ = caught.value.needs
    assert f"the smallest need is {mebibytes(least)}, " in str(caught.value)
    assert planned(network, output, least).memory.peak == least
    with pytest.raises(NoPlanError):
        planned(network, output, least - 1)


@pytest.mark.slow
def test_nearest_miss_is_explained(tiny_network: MakeNetwork) -> None:
    network = tiny_network(Conv((3, 3, 3), 2, "relu"), Conv((2, 2, 2), 1))
    with pytest.raises(NoPlanError) as caught:
        planned(network, (2, 2, 2), AROUND - 5, table=(SLOW,))
    # 2 patches of 4x4x4 uint8 in, 2 of 1x1x1 float32 out, 2x2x2 x 2 maps and 4x4x4 or 1x1x1 alive together, aligned
    needed = AROUND + 1000 + 2 * 64 + 2 * 4 + 256 + 256
    assert caught.value.needs == (needed, 0)
    assert str(caught.value) == (
        f"nothing fits in {mebibytes(AROUND - 5)} of RAM: the smallest need is {mebibytes(needed)}, 0.1 MiB more, "
        "with output patches of 1x1x1; the process itself takes 0.1 MiB, and layer 1 (conv 2x2x2 -> 1 none) the most "
        f"of what is left, 0.1 MiB with cpu.conv.slow; allow at least ram='{AROUND // 2**20 + 1}M'"
    )
    with pytest.raises(NoPlanError, match=r"allow at least ram='\d+M', or drop `patch`, or drop `only`$"):
        planned(network, (2, 2, 2), AROUND, table=(SLOW,), only=[SLOW.name], patch=(2, 1, 1))


@pytest.mark.slow
def test_layer_without_primitive_is_refused(tiny_network: MakeNetwork) -> None:
    network = tiny_network()
    refusing = (Fake("cpu.conv.a", "conv", refuse="no compiler"), Fake("cpu.conv.b", "conv", refuse="too wide"), POOL)
    with pytest.raises(
        NoPlanError,
        match=r"no primitive runs layer 0 \(conv 1x5x2 -> 3 relu\) here: cpu.conv.a: no compiler; cpu.conv.b: too wide",
    ):
        planned(network, SMALL, 2**30, table=refusing)
    with pytest.raises(NoPlanError, match=r"layer 1 \(pool 2x2x1\) here: there is none for a pool"):
        planned(network, SMALL, 2**30, table=(SLOW,))


@pytest.mark.slow
@pytest.mark.parametrize(("ram_bytes", "threads"), [(0, 1), (-5, 1), (2**30, 0)])
def test_nonpositive_limits_are_refused(tiny_network: MakeNetwork, ram_bytes: int, threads: int) -> None:
    with pytest.raises(NoPlanError, match=f"not {ram_bytes} bytes and {threads} threads"):
        make_plan(tiny_network(), SMALL, MACHINE, Limits(ram_bytes, threads), table=FAKES)


def test_empty_output_is_refused(tiny_network: MakeNetwork) -> None:
    with pytest.raises(ShapeError, match="the output is 4x0x3"):
        planned(tiny_network(), (4, 0, 3), 2**30)


@pytest.mark.slow
def test_limit_above_the_machine_is_planned(tiny_network: MakeNetwork) -> None:
    small = replace(MACHINE, ram_bytes=2**20)
    plan = make_plan(tiny_network(), SMALL, small, limits(2**30), table=FAKES, baseline=0)
    assert plan.memory.peak > small.ram_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "room"), [(False, 200_000), (True, 100_000)])
def test_alternatives_carry_the_reason_why_they_lost(tiny_network: MakeNetwork, columns: bool, room: int) -> None:
    network = tiny_network()
    ram_bytes = AROUND + room
    plan = planned(network, (30, 21, 17), ram_bytes, columns=columns)
    assert len(plan.runners_up) == 3
    assert len({r.patch_out for r in plan.runners_up} | {plan.patch_out}) == 4
    larger, *slower = plan.runners_up
    assert larger.over_bytes > 0
    assert larger.voxels_per_second > plan.voxels_per_second
    allowed = planned(network, (30, 21, 17), ram_bytes + larger.over_bytes, columns=columns)
    assert allowed.voxels_per_second >= larger.voxels_per_second
    for runner_up in slower:
        assert runner_up.over_bytes == 0
        assert runner_up.voxels_per_second <= plan.voxels_per_second
        forced = planned(network, (30, 21, 17), ram_bytes, patch=runner_up.patch_out, columns=columns)
        assert forced.voxels_per_second >= runner_up.voxels_per_second
        if forced.main.axis == runner_up.axis:
            assert forced.voxels_per_second == runner_up.voxels_per_second
            assert (forced.main.column_planes, forced.main.sub_batches) == (
                runner_up.column_planes,
                runner_up.sub_batches,
            )
            assert forced.main.waste == pytest.approx(runner_up.waste, rel=1e-12)


@pytest.mark.slow
@pytest.mark.long
def test_best_plan_of_the_other_cover_is_an_alternative(tiny_network: MakeNetwork) -> None:
    """Patches that lose to columns, or columns that lose to patches, are listed with their waste."""
    tiny, wide = tiny_network(), tiny_network(*WIDE_BEHIND)
    kinds, parts = set(), 0
    for network, output, room in (
        (tiny, (200, 12, 9), 150_000),
        (tiny, (9, 12, 70), 100_000),
        (tiny, (4, 4, 3), 10**9),
        (wide, (31, 20, 9), 360_000),
    ):
        plan = planned(network, output, AROUND + room)
        losing = planned(network, output, AROUND + room, columns=not plan.main.streams)
        kinds.add(plan.main.streams)
        parts = max(parts, *losing.main.sub_batches)
        assert plan.other == RunnerUp(
            patch_out=losing.patch_out,
            axis=losing.main.axis,
            column_planes=losing.main.column_planes,
            sub_batches=losing.main.sub_batches,
            voxels_per_second=losing.voxels_per_second,
            waste=plan.other.waste if plan.other else 0.0,
            over_bytes=0,
            over_vram_bytes=0,
        )
        assert plan.other.waste == pytest.approx(losing.main.waste, rel=1e-12)
        assert plan.seconds <= losing.seconds
        only = planned(network, output, AROUND + room, columns=plan.main.streams)
        assert (only.other, only.patch_out, only.choices) == (None, plan.patch_out, plan.choices)
    assert kinds == {True, False}
    assert parts > 1


@pytest.mark.slow
def test_columns_along_an_axis_without_border_are_not_planned(tiny_network: MakeNetwork) -> None:
    """The network sees one voxel along that axis."""
    network = tiny_network(Conv((1, 4, 1), 2), Pool((1, 1, 2)))
    assert planned(network, (50, 9, 9), 2**30, columns=True).main.axis in (1, 2)
    blind = tiny_network(Conv((1, 1, 1), 2))
    assert not planned(blind, (50, 9, 9), 2**30).main.streams
    with pytest.raises(NoPlanError, match="along every axis, so that columns have nothing to carry; drop `cover`"):
        planned(blind, (50, 9, 9), 2**30, columns=True)


def column_seconds(plan: RunPlan, network: Network) -> float:
    """Predicted for the longest column."""
    longest = max(plan.main.cover(network), key=lambda column: len(column.steps))
    alone = replace(plan.main.cover(network), size=plan.patch_out)
    size = list(alone.size)
    size[plan.main.axis] = min(plan.main.column_planes, len(longest.steps) * plan.patch_out[plan.main.axis])
    return plan.main.for_output((size[0], size[1], size[2]), network).seconds


SLOWER = [
    *(((2000, 30, 20), slow) for slow in (1e-7, 1e-8)),
    *(((31, 900, 9), slow) for slow in (3e-8, 1e-8)),
    ((60, 30, 20), 1e-8),
]


@pytest.mark.slow
@pytest.mark.parametrize(("output", "slow"), one_in(3, SLOWER), ids=str)
def test_column_takes_at_most_the_seconds_that_may_be_lost(
    tiny_network: MakeNetwork, output: Vec3, slow: float
) -> None:
    """A killed run repeats at most LOST_SECONDS, unless a column has one step."""
    network = tiny_network()
    for room in (150_000, 600_000):
        plan = planned(network, output, AROUND + room, columns=True, rates=CARRYING.scaled(slow, slow))
        steps = ceil(min(plan.main.column_planes, plan.output[plan.main.axis]) / plan.patch_out[plan.main.axis])
        assert steps == 1 or column_seconds(plan, network) <= MAX_COLUMN_SECONDS
        check_runs(plan, network, MACHINE, table=FAKES)


@pytest.mark.slow
def test_columns_are_no_shorter_than_necessary(tiny_network: MakeNetwork) -> None:
    """Slow machines cut columns, and planes computed twice are counted."""
    network = tiny_network()
    output = (2000, 30, 20)
    whole = planned(network, output, AROUND + 600_000, columns=True)
    assert whole.main.column_planes >= 2000 > whole.main.column_planes - whole.patch_out[0]
    assert whole.main.columns == ceil(30 / whole.patch_out[1]) * ceil(20 / whole.patch_out[2])
    slow = planned(network, output, AROUND + 600_000, columns=True, rates=CARRYING.scaled(1e-7, 1e-7))
    pieces = ceil(2000 / slow.main.column_planes)
    assert pieces > 1
    assert slow.main.columns == pieces * ceil(30 / slow.patch_out[1]) * ceil(20 / slow.patch_out[2])
    assert column_seconds(slow, network) > MAX_COLUMN_SECONDS / 2
    assert slow.main.waste > 1


@dataclass(frozen=True, slots=True)
class Choosy(Fake):
    """Needs more memory than there is, but for outputs of one size along z."""

    size: int = 1

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        lean = shape.out_shape[1] == self.size
        return replace(Fake.footprint(self, shape, variant, threads), allowance=0 if lean else 2**20)


@pytest.mark.slow
@pytest.mark.parametrize("walks", [False, True], ids=["patches", "columns"])
def test_best_size_is_found_far_from_the_first_candidates(tiny_network: MakeNetwork, walks: bool) -> None:
    """All sizes of one axis are looked at, not only those beside the best of the few that are combined at first."""
    network = tiny_network(Conv((2, 1, 1), 1))
    sizes = axis_sizes(120, 1)
    few = log_spaced(sizes, SIZES_AT_ONCE)
    assert 4 in few
    assert 24 not in (*few, *sizes_between(sizes, few, 4)[1])
    fair = Choosy("cpu.conv.fair", "conv", flops=20.0, size=4)
    quick = Choosy("cpu.conv.quick", "conv", flops=1.0, size=24)
    plan = planned(network, (120, 1, 1), AROUND + 2**19, table=(SLOW, fair, quick), columns=walks)
    assert plan.patch_out == (24, 1, 1)


@pytest.mark.slow
def test_nan_masks_are_counted(tiny_network: MakeNetwork) -> None:
    network = tiny_network(input_channels=2)
    for columns in (False, True):
        plan = planned(network, (30, 4, 3), AROUND + 60_000, masks=True, columns=columns)
        seen = prod(network.patch_in(plan.patch_out))  # all that a step depends on, new or carried
        masks = 2 * prod(plan.main.patch_in) + (3 if columns else 2) * seen  # in, out, and one that a column keeps
        assert plan.main.streams == columns == (seen > prod(plan.main.patch_in))
        assert plan.main.memory.reading == 2 * 2 * prod(plan.main.patch_in) + masks + READER_BYTES


@pytest.mark.slow
def test_baseline_is_measured_when_not_given(tiny_network: MakeNetwork) -> None:
    plan = make_plan(tiny_network(), SMALL, MACHINE, limits(2**33), table=FAKES)
    assert 2**25 < plan.memory.baseline < 2**32
