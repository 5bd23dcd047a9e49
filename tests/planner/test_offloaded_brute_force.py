"""The best plans whose first layers are offloaded are equal to those found by trying all ways to run both stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from math import inf, prod
from typing import Any

import pytest

from tests.planner.test_brute_force import some
from tests.support.brute_force import AROUND, BASELINE, CONTEXT, EDGE_BYTES, SMALL, THREADS, Run, steps_of, ways
from tests.support.fake_offloaded_plans import (
    GPU_RATES,
    HOST_RATES,
    IN_HOST,
    ON_CPU,
    ON_GPU,
    PLENTY,
    UPLOAD,
    best_offloaded,
    link,
)
from tests.support.fake_primitives import WITH_GPU, Fake
from tests.support.tiers import one_in
from znnpy.costs.model import Rates
from znnpy.costs.two_stages import two_stage_seconds
from znnpy.errors import NoPlanError
from znnpy.kernels.contract import Variant, Work
from znnpy.layer_shapes import LayerShape, with_batch
from znnpy.network import Conv, Layer, Network, Pool
from znnpy.planner.layout import ALIGNMENT, carried_planes, place, sub_batch_counts
from znnpy.planner.memory import reading_bytes, staging_bytes, writing_bytes
from znnpy.planner.run_plan import RunPlan
from znnpy.planner.stages import host_stage, last_stage
from znnpy.planner.tilings import Tiling, all_sizes, all_spaces, tiling_of
from znnpy.planner.validate import check_runs
from znnpy.shapes import Vec3

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sublayers_take_no_longer")]

FEWER = replace(HOST_RATES, slowdown=(THREADS + 1) / THREADS)


@dataclass(frozen=True, slots=True)
class Half:
    """One way to run one side."""

    peak: int  # bytes
    ran: tuple[tuple[int, float], ...]  # steps in which each layer runs, and its seconds in one
    lent: int = 0  # bytes of the GPU's

    @property
    def seconds(self) -> float:
        """Return the seconds for the whole output."""
        return sum(steps * once for steps, once in self.ran)


@dataclass(frozen=True, slots=True)
class Cut:
    """All ways to run both sides of one shape."""

    front: tuple[Half, ...]
    back: tuple[Half, ...]
    upload: float  # of a part of what is handed over
    parts: int
    columns: int
    edges: float


def half(runs: Sequence[Run], new: int, times: Sequence[int], rates: Rates, around: int, *, on_gpu: bool) -> Half:
    steps = [(run.shape, run.footprint) for run in runs]
    side = last_stage(steps, 0, new, "gpu") if on_gpu else host_stage(steps, new)
    lent = [run.footprint for run in runs if not on_gpu and run.primitive is IN_HOST]
    around += sum(footprint.host for footprint in lent)
    ran = []
    for run, parts, kept in zip(runs, times, carried_planes([run.shape for run in runs], new), strict=True):
        own = GPU_RATES if run.primitive is IN_HOST else rates
        moved = (2 if run.footprint.reads_carried else 4) * kept * run.shape.in_bytes / run.shape.in_shape[1]
        each = own.seconds(run.primitive, run.shape, run.variant) + moved / rates.copy_bandwidth
        each += link(run.shape) if run.primitive is IN_HOST else 0.0
        ran.append((run.steps, parts * each))
    peak = around + place(side.tensors)[1] + times[0] * side.memory.carries
    peak += side.memory.weights + side.memory.allowance
    return Half(peak, tuple(ran), sum(footprint.resident for footprint in lent))


def divided(network: Network, shapes: Sequence[LayerShape], theta: int) -> Iterator[list[LayerShape]]:
    """Return all documented divisions of the layers behind the first `theta` into so many images at a time."""
    count = shapes[theta - 1].out_shape[0]
    pools = [i for i in range(theta, len(shapes)) if isinstance(network.layers[i], Pool)]
    for images in (n for n in range(1, count + 1) if count % n == 0):
        for later in product([0, 1], repeat=len(pools)) if images in (1, count) else [(0,) * len(pools)]:
            some, found = images, list[LayerShape]()
            for i in range(theta, len(shapes)):
                found.append(with_batch(shapes[i], some))
                some = found[-1].out_shape[0]
                if i in pools and later[pools.index(i)]:
                    some = 1
            yield found


@cache
def cuts(network: Network, output: Vec3, overlaps: bool) -> list[Cut]:
    found: list[Cut] = []
    for space in all_spaces(network, output):
        for patch in product(*all_sizes(space)):
            whole = tiling_of(space, patch)
            for theta in range(1, len(network.layers)):
                ways_behind = divided(space.network, whole.shapes, theta)
                found.extend(cut(whole, theta, behind, overlaps=overlaps) for behind in ways_behind)
    return found


def cut(whole: Tiling, theta: int, behind: Sequence[LayerShape], *, overlaps: bool) -> Cut:
    network, new = whole.space.network, whole.step_input
    steps = [steps_of(whole.cover, ahead) for ahead in whole.space.warmup_planes]
    reads, writes = whole.cover.steps(whole.cover.margin), whole.cover.steps(0)
    handed = whole.shapes[theta - 1].out_bytes
    part = behind[0].in_bytes // behind[0].in_shape[1] * whole.shapes[theta - 1].out[0]
    raw_bytes, out_bytes = network.input_channels * prod(new), 4 * network.output_channels * prod(whole.patch)
    ram = BASELINE + reading_bytes(network.input_channels, new, 1, steps=reads, device="gpu")
    ram += writing_bytes(network.output_channels, whole.patch, 4, steps=writes, device="gpu")
    ram += (2 if overlaps else 1) * handed
    vram = CONTEXT + staging_bytes(part, out_bytes, writes=writes)
    parts, upload = whole.shapes[theta - 1].out_shape[0] // behind[0].batch, part / UPLOAD
    back, front = [], tuple(
        half(runs, new[0], [1] * len(runs), FEWER if overlaps else HOST_RATES, ram, on_gpu=False)
        for runs in ways(whole.shapes[:theta], steps[:theta], ON_CPU if overlaps else (*ON_CPU, IN_HOST))
    )  # fmt: skip
    for runs in ways(behind, steps[theta:], ON_GPU):
        times = sub_batch_counts([*whole.shapes[:theta], *(run.shape for run in runs)])[theta:]
        fed = whole.shapes[theta - 1].out[0]
        back.append(half(runs, fed, times, GPU_RATES, vram, on_gpu=True))
    return Cut(front, tuple(back), upload, parts, len(whole.cover), (raw_bytes + out_bytes) / EDGE_BYTES)


def least(found: Sequence[Cut], ram_bytes: int, vram_bytes: int, *, overlaps: bool) -> float:
    """Seconds of the best there is, either side chosen for itself."""
    best = inf
    for each in found:
        fitting = [half for half in each.front if half.peak <= ram_bytes]
        for lent in {half.lent for half in fitting}:
            fronts = [half for half in fitting if half.lent <= lent]
            backs = [half for half in each.back if half.peak + lent <= vram_bytes]
            if fronts and backs:
                front, back = (min(halves, key=lambda half: half.seconds) for halves in (fronts, backs))
                rest = max(0.0, each.upload - sum(seconds for _, seconds in back.ran) / each.parts)
                handed = each.upload + (each.parts - 1) * rest
                spent = two_stage_seconds(front.ran, back.ran, handed, each.columns, overlap=overlaps)
                best = min(best, spent + each.edges)
    return best


NETWORKS = (
    Network("pool first", 1, (Pool((2, 1, 1)), Conv((2, 1, 2), 3), Conv((1, 2, 1), 2))),
    Network("two pools", 1, (Conv((2, 1, 1), 2), Pool((1, 2, 1)), Pool((2, 1, 1)), Conv((1, 2, 1), 3))),
)


@pytest.mark.parametrize(
    ("network", "mode"), one_in(3, product(NETWORKS, ["cpu-to-gpu", "gpu-host"])), ids=lambda v: getattr(v, "name", v)
)
def test_equals_brute_force_at_every_limit(network: Network, mode: str) -> None:
    """Tensors smaller than their alignment are estimated, and so are left out."""
    overlaps = mode == "cpu-to-gpu"
    table = (*ON_CPU, *ON_GPU, IN_HOST)
    known = cuts(network, SMALL, overlaps)
    rams = some(sorted({half.peak for each in known for half in each.front}), 2)
    vrams = some(sorted({half.peak for each in known for half in each.back}), 2)
    planned, missed, slack = 0, 0, (3 if overlaps else 12) * ALIGNMENT
    for ram_bytes, vram_bytes in product((rams[0] - 1, *rams, PLENTY), (vrams[0] - 1, *vrams, PLENTY)):
        best = least(known, ram_bytes, vram_bytes, overlaps=overlaps)
        try:
            plan = best_offloaded(network, SMALL, ram_bytes, vram_bytes, mode=mode)
        except NoPlanError:
            assert best == inf, f"nothing at {ram_bytes} and {vram_bytes}"
            continue
        check_runs(plan, network, WITH_GPU, ram_bytes=ram_bytes, vram_bytes=vram_bytes, table=table)
        assert plan.memory.excess(plan.limits) == (0, 0)
        assert plan.seconds >= best * (1 - 1e-9), (ram_bytes, vram_bytes)
        assert plan.seconds <= (1 + 1e-9) * least(known, ram_bytes - slack, vram_bytes - slack, overlaps=overlaps)
        missed += plan.seconds > best * (1 + 1e-9)
        planned += 1
    assert planned > 8
    assert missed <= 0.3 * planned, f"{missed} of {planned} plans are not the best"


@pytest.mark.parametrize("mode", ["cpu-to-gpu", "gpu-host"])
@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_known_faster_plan_is_found_if_it_exists(network: Network, mode: str) -> None:
    best = best_offloaded(network, SMALL, PLENTY, PLENTY, mode=mode)
    slower = best.with_main(best.main.with_choices(lambda choice: replace(choice, seconds=1.001 * choice.seconds)))
    assert slower.seconds > best.seconds
    found = best_offloaded(network, SMALL, PLENTY, PLENTY, mode=mode, than=slower)
    assert found.seconds == pytest.approx(best.seconds, rel=1e-9)
    with pytest.raises(NoPlanError, match=f"mode {mode}: no plan was found that takes less than"):
        best_offloaded(network, SMALL, PLENTY, PLENTY, mode=mode, than=best)


@dataclass(frozen=True, slots=True)
class Growing(Fake):
    """Faster per value the larger a layer is."""

    grows: float = 1.0

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        (work,) = Fake.work(self, shape, variant)
        return (work._replace(flops=work.flops**self.grows),)


def growing(grows: float, fakes: Sequence[Fake]) -> list[Fake]:
    return [Growing(**{field.name: getattr(fake, field.name) for field in fields(fake)}, grows=grows) for fake in fakes]


SHALLOW = (Conv((3, 3, 3), 4), Pool((2, 2, 2)), Conv((3, 3, 3), 4), Conv((3, 3, 3), 2))
DEEP = (
    Conv((2, 2, 2), 4), Pool((2, 2, 2)), Conv((3, 3, 3), 4), Pool((2, 2, 2)), Conv((3, 3, 3), 4), Conv((3, 3, 3), 1)
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Larger:
    """A case in which the search looks at few of 13824 shapes."""

    layers: tuple[Layer, ...]
    table: tuple[Fake, ...]
    ram_bytes: int
    vram_bytes: int

    @property
    def network(self) -> Network:
        return Network("larger", 1, self.layers)

    def best(self, **words: Any) -> RunPlan:
        memory = self.ram_bytes + AROUND, self.vram_bytes + CONTEXT
        return best_offloaded(self.network, (48, 48, 48), *memory, table=self.table, **words)


LARGER = {
    "patches are best": Larger(DEEP, (*growing(0.7, ON_CPU), *ON_GPU), 10_710_565, 1_075_939),
    "columns are best to begin with": Larger(
        SHALLOW, (*growing(0.8, ON_CPU), *growing(0.8, ON_GPU)), 462_905, 10_007
    ),
}  # fmt: skip


@pytest.mark.parametrize("larger", LARGER.values(), ids=LARGER.keys())
def test_every_cubic_patch_is_considered(larger: Larger) -> None:
    cubes = []
    for size in (size for size in (48, 24, 16, 12, 8, 6, 4) if size % larger.network.period[0] == 0):
        with suppress(NoPlanError):
            cubes.append(larger.best(patch=(size,) * 3).seconds)
    assert len(cubes) > 1, "some fit"
    assert min(cubes) < 0.8 * max(cubes), "and are faster than others"
    assert larger.best().seconds <= min(cubes)


@pytest.mark.parametrize("by", [1.2, 1.5, 3.0])
@pytest.mark.parametrize("larger", LARGER.values(), ids=LARGER.keys())
def test_faster_plan_is_found_among_slower_ones(larger: Larger, by: float) -> None:
    """Small patches, which are slower, say nothing of where to look."""
    best, small = larger.best(), larger.best(patch=(4, 4, 4))
    scale = by * best.seconds / small.seconds
    slower = small.with_main(small.main.with_choices(lambda choice: replace(choice, seconds=scale * choice.seconds)))
    assert larger.best(than=slower).seconds <= best.seconds * (1 + 1e-9)
