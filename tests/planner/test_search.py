"""The search as a whole: the best of everything there is, within the promise, and clear words when nothing fits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf, prod
from typing import Any

import pytest
from fakes import BOTH, FAKES, FAST, FILTER, MACHINE, OVER, POOL, RATES, SLOW, Fake, limits

from znnpy.errors import NoPlanError, ShapeError
from znnpy.kernels.primitive import Variant
from znnpy.machine import Limits
from znnpy.network import Conv, Layer, MaxFilter, Maxout, Network, Pool
from znnpy.patches import cover
from znnpy.planner.candidates import all_sizes, candidates
from znnpy.planner.cost import seconds
from znnpy.planner.layout import Tensor, chain, live_peak, place
from znnpy.planner.memory import READER_BYTES, WRITER_BYTES, reading_bytes, writing_bytes
from znnpy.planner.plan import Plan
from znnpy.planner.search import make_plan
from znnpy.shapes import ConvShape, LayerShape, PoolShape, Vec3

MakeNetwork = Callable[..., Network]
SMALL: Vec3 = (4, 4, 3)
AROUND = READER_BYTES + WRITER_BYTES  # of every plan


def planned(network: Network, output: Vec3, ram_bytes: int, **words: Any) -> Plan:
    settings: dict[str, Any] = {"table": FAKES, "rates": RATES, "baseline": 1000} | words
    return make_plan(network, output, MACHINE, limits(ram_bytes), **settings)


Step = tuple[LayerShape, Fake, Variant]


def alone(layer: LayerShape) -> list[Step]:
    """Every way to run one layer, or two in one."""
    applying = (p for p in FAKES if p.kind == layer.kind and p.why_not(layer, MACHINE) is None)
    return [(layer, p, v) for p in applying for v in p.variants(layer, MACHINE)]


def ways(layers: Sequence[LayerShape]) -> Iterator[tuple[Step, ...]]:
    """Every way to run layers, one by one or a convolution and the pooling behind it in one."""
    if not layers:
        yield ()
        return
    for step, rest in product(alone(layers[0]), list(ways(layers[1:]))):
        yield (step, *rest)
    if len(layers) > 1 and isinstance(layers[0], ConvShape) and isinstance(layers[1], PoolShape):
        both = replace(layers[0], pool=layers[1].p)
        for step, rest in product(alone(both), list(ways(layers[2:]))):
            yield (step, *rest)


def everything(network: Network, output: Vec3) -> list[tuple[int, float, int]]:
    """Bytes, seconds and number of steps of every patch shape with every choice for every layer."""
    found = []
    for shape in candidates(network, output, all_sizes(network, output)):
        patch_in = network.patch_in(shape.patch)
        around = 1000 + reading_bytes(network.input_channels, patch_in, 1)
        around += writing_bytes(network.output_channels, shape.patch, 4)
        for chosen in ways(network.layer_shapes(shape.patch)):
            footprints = [p.footprint(layer, v, 2) for layer, p, v in chosen]
            arena = place(chain([(layer, f) for (layer, _, _), f in zip(chosen, footprints, strict=True)]))[1]
            nbytes = around + arena + sum(f.resident for f in footprints) + max(f.allowance for f in footprints)
            spent = sum(seconds(p.work(layer, v), RATES) for layer, p, v in chosen)
            found.append((nbytes, shape.patches * spent, len(chosen)))
    return found


def test_equals_brute_force_at_every_limit(tiny_network: MakeNetwork) -> None:
    network = tiny_network()
    space = everything(network, SMALL)
    sizes = sorted({nbytes for nbytes, _, _ in space})
    assert len(sizes) > 300
    with pytest.raises(NoPlanError):
        planned(network, SMALL, sizes[0] - 1)
    lengths = set()
    for ram_bytes in [sizes[0], *sizes[1 : len(sizes) : len(sizes) // 40], sizes[-1]]:
        plan = planned(network, SMALL, ram_bytes)
        assert plan.memory.peak <= ram_bytes
        best, steps = min((spent, steps) for nbytes, spent, steps in space if nbytes <= ram_bytes)
        assert plan.seconds == pytest.approx(best, rel=1e-12), f"at {ram_bytes} bytes"
        lengths.add((len(plan.choices), steps))
        plan.check_runs(network, MACHINE, table=FAKES)
    assert lengths == {(3, 3), (4, 4)}, "some plans pool within the convolution, and some do not"


def test_what_the_layout_loses_counts(tiny_network: MakeNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    """An arena larger than its live bytes makes the search look again, and still the promise holds."""
    network = tiny_network()
    before = planned(network, SMALL, 2**40)
    limit = before.memory.peak
    lossy = 640

    def wasteful(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], int]:
        placed, size = place(tensors)
        return placed, size + lossy

    monkeypatch.setattr("znnpy.planner.search.place", wasteful)
    after = planned(network, SMALL, limit)
    assert after.memory.peak <= limit
    space = everything(network, SMALL)
    assert before.seconds < after.seconds
    assert after.seconds == pytest.approx(
        min(spent for nbytes, spent, _ in space if nbytes + lossy <= limit), rel=1e-12
    )
    assert planned(network, SMALL, limit + lossy).seconds == before.seconds
    least = min(nbytes for nbytes, _, _ in space) + lossy
    assert planned(network, SMALL, least).memory.peak == least


def test_more_memory_is_never_slower(tiny_network: MakeNetwork) -> None:
    network = tiny_network()
    last = inf
    for extra in (100_000, 200_000, 500_000, 1_000_000, 2_000_000, 2**40):
        now = planned(network, (30, 21, 17), AROUND + extra).seconds
        assert now <= last
        last = now


def test_the_plan_adds_up(tiny_network: MakeNetwork) -> None:
    """Each figure of a plan, from the parts it is made of."""
    network = tiny_network(input_channels=2)
    plan = planned(network, (31, 20, 9), AROUND + 400_000, itemsize_in=2, itemsize_out=1)
    shapes = network.layer_shapes(plan.patch_out)
    by_name = {p.name: p for p in FAKES}
    footprints = [by_name[c.primitive].footprint(c.shape, c.variant, 2) for c in plan.choices]
    assert tuple(c.shape for c in plan.choices) == shapes
    assert [c.layers for c in plan.choices] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert {c.device for c in plan.choices} == {"cpu"}
    assert [c.working_bytes for c in plan.choices] == [f.working(s) for f, s in zip(footprints, shapes, strict=True)]
    tensors, arena = place(chain(list(zip(shapes, footprints, strict=True))))
    assert plan.tensors == tensors
    memory = plan.memory
    assert memory.arena == arena >= live_peak(tensors)
    assert memory.residents == sum(f.resident for f in footprints)
    assert memory.allowance == max(f.allowance for f in footprints)
    assert memory.reading == 2 * 2 * prod(plan.patch_in) * 2 + READER_BYTES
    assert memory.writing == 2 * 2 * prod(plan.patch_out) * 1 + WRITER_BYTES
    assert memory.baseline == 1000
    assert plan.patches == len(cover((31, 20, 9), plan.patch_out))
    assert plan.seconds == plan.patches * sum(c.seconds for c in plan.choices)
    assert plan.voxels_per_second == 31 * 20 * 9 / plan.seconds
    assert plan.patch_in == network.patch_in(plan.patch_out)
    plan.check_runs(network, MACHINE, table=FAKES)


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
def test_every_kind_of_network(tiny_network: MakeNetwork, layers: tuple[Layer, ...], output: Vec3) -> None:
    network = tiny_network(*layers)
    plan = planned(network, output, 2**28)
    assert all(p % q == 0 for p, q in zip(plan.patch_out, network.period, strict=True))
    plan.check_runs(network, MACHINE, table=FAKES)


def test_only_where_it_applies(tiny_network: MakeNetwork) -> None:
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


def test_both_in_one_unless_one_of_them_is_asked_of_another(tiny_network: MakeNetwork) -> None:
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


def test_forced_patch(tiny_network: MakeNetwork) -> None:
    network = tiny_network()
    plan = planned(network, (30, 30, 30), 2**30, patch=(6, 10, 7))
    assert plan.patch_out == (6, 10, 7)
    assert plan.patches == 5 * 3 * 5
    assert plan.runners_up == ()
    with pytest.raises(ShapeError, match="multiple of the pooling period 2x2x1, not 5x10x7; the next larger one is 6x"):
        planned(network, (30, 30, 30), 2**30, patch=(5, 10, 7))


def test_nearest_miss_is_the_least_that_runs(tiny_network: MakeNetwork) -> None:
    """The limit the message asks for is enough, and a byte less than the smallest need is not."""
    network = tiny_network()
    output = (30, 21, 17)
    with pytest.raises(NoPlanError) as caught:
        planned(network, output, AROUND)
    found = re.search(r"the smallest need is ([\d,]+), ", str(caught.value))
    assert found is not None
    least = int(found[1].replace(",", ""))
    assert planned(network, output, least).memory.peak == least
    with pytest.raises(NoPlanError):
        planned(network, output, least - 1)


def test_nearest_miss_in_words(tiny_network: MakeNetwork) -> None:
    network = tiny_network(Conv((3, 3, 3), 2, "relu"), Conv((2, 2, 2), 1))
    with pytest.raises(NoPlanError) as caught:
        planned(network, (2, 2, 2), AROUND - 5, table=(SLOW,))
    # 2 patches of 4x4x4 uint8 in, 2 of 1x1x1 float32 out, 2x2x2 x 2 maps and 4x4x4 or 1x1x1 alive together
    needed = AROUND + 1000 + 2 * 64 + 2 * 4 + 256 + 64
    assert str(caught.value) == (
        f"nothing fits in {AROUND - 5:,} bytes of RAM: the smallest need is {needed:,}, {needed - AROUND + 5:,} more, "
        "with output patches of 1x1x1; the process itself takes 1,000, and layer 0 (conv 3x3x3 -> 2 relu) the most of "
        f"what is left, 320 with cpu.conv.slow; allow at least --ram {AROUND // 2**20 + 1}M"
    )
    with pytest.raises(NoPlanError, match=r"allow at least --ram \d+M, or drop --patch, or drop --only$"):
        planned(network, (2, 2, 2), AROUND, table=(SLOW,), only=[SLOW.name], patch=(2, 1, 1))


def test_no_primitive_for_a_layer(tiny_network: MakeNetwork) -> None:
    network = tiny_network()
    refusing = (Fake("cpu.conv.a", "conv", refuse="no compiler"), Fake("cpu.conv.b", "conv", refuse="too wide"), POOL)
    with pytest.raises(
        NoPlanError,
        match=r"no primitive runs layer 0 \(conv 1x5x2 -> 3 relu\) here: cpu.conv.a: no compiler; cpu.conv.b: too wide",
    ):
        planned(network, SMALL, 2**30, table=refusing)
    with pytest.raises(NoPlanError, match=r"layer 1 \(pool 2x2x1\) here: there is none for a pool"):
        planned(network, SMALL, 2**30, table=(SLOW,))


@pytest.mark.parametrize(("ram_bytes", "threads"), [(0, 1), (-5, 1), (2**30, 0)])
def test_no_limits_no_plan(tiny_network: MakeNetwork, ram_bytes: int, threads: int) -> None:
    with pytest.raises(NoPlanError, match=f"not {ram_bytes} bytes and {threads} threads"):
        make_plan(tiny_network(), SMALL, MACHINE, Limits(ram_bytes, threads), table=FAKES)


def test_nothing_to_compute(tiny_network: MakeNetwork) -> None:
    with pytest.raises(ShapeError, match="the output is 4x0x3"):
        planned(tiny_network(), (4, 0, 3), 2**30)


def test_a_limit_above_the_machine_is_planned_all_the_same(tiny_network: MakeNetwork) -> None:
    small = replace(MACHINE, ram_bytes=2**20)
    plan = make_plan(tiny_network(), SMALL, small, limits(2**30), table=FAKES, baseline=0)
    assert plan.memory.peak > small.ram_bytes


def test_runners_up_say_why_they_lost(tiny_network: MakeNetwork) -> None:
    network = tiny_network()
    ram_bytes = AROUND + 200_000
    plan = planned(network, (30, 21, 17), ram_bytes)
    assert len(plan.runners_up) == 3
    assert len({tuple(sorted(r.patch_out)) for r in plan.runners_up} | {tuple(sorted(plan.patch_out))}) == 4
    larger, *slower = plan.runners_up
    assert larger.over_bytes > 0
    assert larger.voxels_per_second > plan.voxels_per_second
    assert planned(network, (30, 21, 17), ram_bytes + larger.over_bytes).voxels_per_second >= larger.voxels_per_second
    for runner_up in slower:
        assert runner_up.over_bytes == 0
        assert runner_up.voxels_per_second <= plan.voxels_per_second
        forced = planned(network, (30, 21, 17), ram_bytes, patch=runner_up.patch_out)
        assert forced.voxels_per_second == runner_up.voxels_per_second


def test_masks_are_counted(tiny_network: MakeNetwork) -> None:
    plan = planned(tiny_network(input_channels=2), SMALL, 2**30, masks=True)
    assert plan.memory.reading == (2 * 2 + 4) * prod(plan.patch_in) + READER_BYTES


def test_baseline_is_measured_when_not_given(tiny_network: MakeNetwork) -> None:
    plan = make_plan(tiny_network(), SMALL, MACHINE, limits(2**33), table=FAKES)
    assert 2**25 < plan.memory.baseline < 2**32
