"""Plans whose first layers are hosted: equal to brute force, within both memories, told layer by layer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import inf, prod
from types import SimpleNamespace
from typing import Any

import pytest
from brute_force import BASELINE, CONTEXT, EDGE_BYTES, SMALL, THREADS, Run, steps_of, ways
from fakes import BOTH, CARRYING, FAST, FILTER, MAXOUT, OVER, POOL, SLOW, WITH_GPU, Fake, on_gpu
from plans import MIXED, WIDE, edited
from test_brute_force import some

from znnpy.errors import NoPlanError, PlanFileError
from znnpy.kernels.primitive import Footprint, Scratch, Variant
from znnpy.kernels.table import IN_HOST_RAM
from znnpy.machine import Limits, Machine
from znnpy.network import Conv, Network, Pool
from znnpy.planner import with_host
from znnpy.planner.both_sides import both_sides
from znnpy.planner.candidates import Candidate, all_sizes, all_spaces, candidate
from znnpy.planner.cost import Rate, Rates, seconds
from znnpy.planner.layout import ALIGNMENT, carried_planes, loops, place
from znnpy.planner.memory import reading_bytes, staging_bytes, writing_bytes
from znnpy.planner.plan import Plan
from znnpy.planner.search import make_plan
from znnpy.planner.sides import device_side, host_side
from znnpy.planner.with_host import COPIED, WITHIN
from znnpy.shapes import ConvShape, LayerShape, Vec3

PLENTY = 2**40
UPLOAD = 5e12  # bytes per second
ON_CPU = (SLOW, replace(FAST, scale=(1, 4)), BOTH, POOL, FILTER, MAXOUT)
ON_GPU = on_gpu(SLOW, replace(OVER, reads_carried=True), BOTH, POOL, FILTER, MAXOUT)
HOST_RATES = CARRYING
FEWER = replace(HOST_RATES, slower=(THREADS + 1) / THREADS)
LINK = 1 / (1 / UPLOAD + COPIED / HOST_RATES.of("copy").nbytes)  # bytes per second, those that the host copies
GPU_RATES = Rates({**CARRYING.scaled(1.5, 1.0).units, "gpu_link": Rate(flops=1e12, nbytes=UPLOAD)}, stage_seconds=0.0)


@pytest.fixture(autouse=True)
def sublayers_take_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host does for each is longer than all that these primitives do."""
    monkeypatch.setattr(with_host, "SUBLAYER_SECONDS", 0.0)


@dataclass(frozen=True, slots=True)
class InHostRam(Fake):
    """Computed on the GPU, of tensors of the host; slower than its arithmetic where it has less memory."""

    least_bytes: int = 0  # of the GPU

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        scratch = (Scratch("host_ram.x", 300, 0, 1), Scratch("host_ram.out", 500, 1, 1))
        return Footprint(resident=100, host=200, input_until=-1, output_from=2, stages=2, scratch=scratch)

    def fastest(
        self,
        shape: ConvShape,
        machine: Machine,
        vram_bytes: int,
        speeds: Any,
        seconds: Any,
        *,
        within: float,
        few: bool,
    ) -> Any:
        assert (speeds.upload, speeds.memory, within, few) == (LINK, GPU_RATES.carrying, WITHIN, True)
        assert shape.precision == "fp32"
        if vram_bytes < self.least_bytes:
            return None
        variant = Variant.of(scale=1)
        return SimpleNamespace(
            variant=variant, found=SimpleNamespace(seconds=seconds(self, shape, variant) + link(shape))
        )


def link(shape: LayerShape) -> float:
    """Seconds."""
    return max(shape.in_bytes, shape.out_bytes) / LINK


IN_HOST = InHostRam("gpu.conv.in_host", "conv", flops=0.5)


def hosted(network: Network, output: Vec3, ram_bytes: int, vram_bytes: int, **words: Any) -> Plan:
    settings: dict[str, Any] = {
        "table": (*ON_CPU, *ON_GPU),
        "rates": GPU_RATES,
        "host_rates": HOST_RATES,
        "baseline": BASELINE,
        "context": 0,
        "mode": "cpu-to-gpu",
        "in_host_ram": (IN_HOST,),
    } | words
    threads = THREADS + (settings["mode"] == "cpu-to-gpu")  # where one of them feeds the GPU
    return make_plan(network, output, WITH_GPU, Limits(ram_bytes, threads, vram_bytes), **settings)


@dataclass(frozen=True, slots=True)
class Half:
    """One way to run one side."""

    peak: int  # bytes
    ran: tuple[tuple[int, float], ...]  # steps in which each layer runs, and its seconds in one
    lent: int = 0  # bytes of the GPU's

    @property
    def seconds(self) -> float:
        """For the whole output."""
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
    side = device_side(steps, 0, new) if on_gpu else host_side(steps, new)
    lent = [run.footprint for run in runs if not on_gpu and run.primitive is IN_HOST]
    around += sum(footprint.host for footprint in lent)
    ran = []
    for run, parts, kept in zip(runs, times, carried_planes([run.shape for run in runs], new), strict=True):
        own = GPU_RATES if run.primitive is IN_HOST else rates
        moved = (2 if run.footprint.reads_carried else 4) * kept * run.shape.in_bytes / run.shape.in_shape[1]
        each = own.seconds(run.primitive, run.shape, run.variant) + moved / rates.carrying
        each += link(run.shape) if run.primitive is IN_HOST else 0.0
        ran.append((run.steps, parts * each))
    peak = around + place(side.tensors)[1] + times[0] * side.carries + side.residents + side.allowance
    return Half(peak, tuple(ran), sum(footprint.resident for footprint in lent))


def divided(network: Network, shapes: Sequence[LayerShape], theta: int) -> Iterator[list[LayerShape]]:
    """The layers behind the first `theta` with so many images at a time: all ways that are documented."""
    count = shapes[theta - 1].out_shape[0]
    pools = [i for i in range(theta, len(shapes)) if isinstance(network.layers[i], Pool)]
    for images in (n for n in range(1, count + 1) if count % n == 0):
        for later in product([0, 1], repeat=len(pools)) if images in (1, count) else [(0,) * len(pools)]:
            some, found = images, list[LayerShape]()
            for i in range(theta, len(shapes)):
                found.append(replace(shapes[i], batch=some))
                some = found[-1].out_shape[0]
                if i in pools and later[pools.index(i)]:
                    some = 1
            yield found


@cache
def cuts(network: Network, output: Vec3, overlaps: bool) -> list[Cut]:
    found: list[Cut] = []
    for space in all_spaces(network, output):
        for patch in product(*all_sizes(space)):
            whole = candidate(space, patch)
            for theta in range(1, len(network.layers)):
                ways_behind = divided(space.network, whole.shapes, theta)
                found.extend(cut(whole, theta, behind, overlaps=overlaps) for behind in ways_behind)
    return found


def cut(whole: Candidate, theta: int, behind: Sequence[LayerShape], *, overlaps: bool) -> Cut:
    network, new = whole.space.network, whole.new
    steps = [steps_of(whole.cover, ahead) for ahead in whole.space.ahead]
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
        times = loops([*whole.shapes[:theta], *(run.shape for run in runs)])[theta:]
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
                spent = both_sides(front.ran, back.ran, handed, each.columns, overlaps=overlaps)
                best = min(best, spent + each.edges)
    return best


NETWORKS = (
    Network("pool first", 1, (Pool((2, 1, 1)), Conv((2, 1, 2), 3), Conv((1, 2, 1), 2))),
    Network("two pools", 1, (Conv((2, 1, 1), 2), Pool((1, 2, 1)), Pool((2, 1, 1)), Conv((1, 2, 1), 3))),
)


@pytest.mark.parametrize("mode", ["cpu-to-gpu", "gpu-host"])
@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_equals_brute_force_at_every_limit(network: Network, mode: str) -> None:
    """But for what is estimated of tensors that are smaller than what they are aligned to."""
    overlaps = mode == "cpu-to-gpu"
    table = (*ON_CPU, *ON_GPU, IN_HOST)
    known = cuts(network, SMALL, overlaps)
    rams = some(sorted({half.peak for each in known for half in each.front}), 2)
    vrams = some(sorted({half.peak for each in known for half in each.back}), 2)
    planned, missed, slack = 0, 0, (3 if overlaps else 12) * ALIGNMENT
    for ram_bytes, vram_bytes in product((rams[0] - 1, *rams, PLENTY), (vrams[0] - 1, *vrams, PLENTY)):
        best = least(known, ram_bytes, vram_bytes, overlaps=overlaps)
        try:
            plan = hosted(network, SMALL, ram_bytes, vram_bytes, mode=mode)
        except NoPlanError:
            assert best == inf, f"nothing at {ram_bytes} and {vram_bytes}"
            continue
        plan.check_runs(network, WITH_GPU, ram_bytes=ram_bytes, vram_bytes=vram_bytes, table=table)
        assert plan.memory.over(plan.limits) == (0, 0)
        assert plan.seconds >= best * (1 - 1e-9), (ram_bytes, vram_bytes)
        assert plan.seconds <= (1 + 1e-9) * least(known, ram_bytes - slack, vram_bytes - slack, overlaps=overlaps)
        missed += plan.seconds > best * (1 + 1e-9)
        planned += 1
    assert planned > 8
    assert missed <= 0.3 * planned, f"{missed} of {planned} plans are not the best"


@pytest.mark.parametrize("mode", ["cpu-to-gpu", "gpu-host"])
@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_one_that_is_faster_is_found_or_there_is_none(network: Network, mode: str) -> None:
    best = hosted(network, SMALL, PLENTY, PLENTY, mode=mode)
    slower = replace(best, choices=tuple(replace(choice, seconds=1.001 * choice.seconds) for choice in best.choices))
    assert slower.seconds > best.seconds
    found = hosted(network, SMALL, PLENTY, PLENTY, mode=mode, than=slower)
    assert found.seconds == pytest.approx(best.seconds, rel=1e-9)
    with pytest.raises(NoPlanError, match=f"mode {mode}: no plan was found that takes less than"):
        hosted(network, SMALL, PLENTY, PLENTY, mode=mode, than=best)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return hosted(MIXED, (20, 11, 8), PLENTY, PLENTY)


def test_than_is_a_word_of_modes(plan: Plan) -> None:
    with pytest.raises(TypeError, match="give a mode"):
        hosted(MIXED, (20, 11, 8), PLENTY, PLENTY, mode=None, device="gpu", host_rates=None, than=plan)


def test_what_is_promised_where(plan: Plan) -> None:
    """All of the process: patches on their way, what is handed over twice, and what hosted layers take."""
    memory = plan.memory
    front = plan.choices[: plan.hosted]
    assert (plan.device, plan.overlaps, memory.baseline, memory.context) == ("gpu", True, BASELINE, CONTEXT)
    assert memory.handover == 2 * front[-1].shape.out_bytes == 2 * plan.handover_bytes
    assert memory.host_residents == sum(choice.resident_bytes for choice in front)
    assert memory.host_arena == max(tensor.offset + -(-tensor.nbytes // 256) * 256 for tensor in plan.host_tensors)
    around = memory.baseline + memory.reading + memory.writing + memory.pinned
    hosted_bytes = memory.host_arena + memory.host_carries + memory.host_residents + memory.host_allowance
    assert memory.peak == around + hosted_bytes + memory.handover
    assert memory.vram == CONTEXT + memory.staging + memory.arena + memory.residents + memory.carries + memory.allowance
    assert memory.over(Limits(memory.peak - 3, 1, memory.vram - 7)) == (3, 7)


def test_seconds_of_both_sides(plan: Plan) -> None:
    front, back = plan.seconds_of_sides
    assert plan.seconds_per_step == max(front, back)
    in_turn = replace(plan, overlaps=False)
    assert in_turn.seconds_per_step == pytest.approx(front + back)
    assert plan.seconds < in_turn.seconds
    parts = plan.parts[plan.hosted]
    upload, once = plan.handover_bytes / parts / UPLOAD, back - plan.handover_seconds
    assert plan.handover_seconds == pytest.approx(upload + (parts - 1) * max(0.0, upload - once / parts))


def test_a_plan_is_read_as_it_was_written(plan: Plan) -> None:
    table = (*ON_CPU, *ON_GPU)
    read = Plan.from_json(plan.to_json())
    assert read == plan
    read.check_runs(MIXED, WITH_GPU, ram_bytes=plan.memory.peak, vram_bytes=plan.memory.vram, table=table)
    with pytest.raises(PlanFileError, match="bytes of RAM, 70 more than the limit allows"):
        plan.check_runs(MIXED, WITH_GPU, ram_bytes=plan.memory.peak - 70, table=table)
    edits: list[tuple[tuple[str | int, ...], Any, str]] = [
        (("hosted",), len(plan.choices), "damaged: .*choices are hosted"),
        (("hosted",), 0, "damaged: .*0 of"),
        (("hosted",), plan.hosted - 1, "on the CPU, and all layers of the plan run on the GPU"),
        (("overlaps",), False, "for what is handed over"),
        (("memory", "host_arena"), 0, "arena in the memory of the host"),
        (("memory", "host_residents"), 1, "of weights of hosted layers"),
        (("host_tensors", 0, "offset"), 64, "not aligned to 256"),
        (("handover_seconds",), -1.0, "damaged: handover_seconds"),
    ]
    for path, to, said in edits:
        with pytest.raises(PlanFileError, match=said):
            Plan.from_json(edited(plan, *path, to=to)).check_runs(MIXED, WITH_GPU, table=table)


def test_what_is_asked_for_is_kept() -> None:
    some_patch: Vec3 = (2, 2, 4)
    plan = hosted(WIDE, (20, 12, 9), PLENTY, PLENTY, patch=some_patch, columns=True, depth_first=False)
    assert (plan.patch_out, plan.walks, max(plan.parts)) == (some_patch, True, 1)
    only = ("cpu.conv.slow", "gpu.conv.over")
    plan = hosted(WIDE, (20, 12, 9), PLENTY, PLENTY, only=only)
    names = {choice.primitive for choice in plan.choices if choice.shape.kind == "conv"}
    assert names <= set(only)
    plan = hosted(WIDE, (20, 12, 9), PLENTY, PLENTY, kinds=True, precision="tf32")
    assert {kind.device for kind in plan.kinds} == {"cpu", "gpu"}
    assert plan.precision == "tf32"
    assert {choice.shape.precision for choice in plan.choices[: plan.hosted]} == {"fp32"}


def test_what_no_plan_does() -> None:
    with pytest.raises(NoPlanError, match=r"hands float32 from the host to the GPU: choose --precision tf32 or fp32"):
        hosted(MIXED, (20, 11, 8), PLENTY, PLENTY, precision="fp16")
    with pytest.raises(NoPlanError, match="has one layer, and mode cpu-to-gpu needs one for each device"):
        hosted(Network("one", 1, (Conv((2, 2, 2), 1),)), (20, 11, 8), PLENTY, PLENTY)
    with pytest.raises(TypeError, match="knows no baselines"):
        hosted(MIXED, (20, 11, 8), PLENTY, PLENTY, baselines=True)
    with pytest.raises(TypeError, match="give a mode"):
        hosted(MIXED, (20, 11, 8), PLENTY, PLENTY, mode=None)
    with pytest.raises(NoPlanError, match="run the first layers of mixed with the host"):
        hosted(MIXED, (20, 11, 8), PLENTY, PLENTY, table=ON_GPU)
    with pytest.raises(NoPlanError, match="are to run on a GPU, and there is none"):
        make_plan(MIXED, (20, 11, 8), replace(WITH_GPU, gpu=None), Limits(PLENTY, 2, PLENTY), mode="cpu-to-gpu")


def test_the_nearest_miss(plan: Plan) -> None:
    """The limits that the message asks for are enough."""
    with pytest.raises(NoPlanError) as caught:
        hosted(MIXED, (20, 11, 8), BASELINE, CONTEXT)
    said = r"the smallest need is ([\d,]+) and ([\d,]+), with .* allow at least --ram \d+M and --vram \d+M$"
    found = re.search(said, str(caught.value))
    assert found is not None, str(caught.value)
    ram_bytes, vram_bytes = (int(number.replace(",", "")) for number in found.groups())
    assert hosted(MIXED, (20, 11, 8), ram_bytes, vram_bytes).memory.over(Limits(ram_bytes, 2, vram_bytes)) == (0, 0)
    with pytest.raises(NoPlanError):
        hosted(MIXED, (20, 11, 8), ram_bytes - 1, vram_bytes - 1)


def test_layers_of_the_host_that_a_gpu_computes() -> None:
    """Where that is faster; what it takes on both sides is promised, and the arena of the GPU is shared."""
    limits = PLENTY, PLENTY
    alone = hosted(WIDE, (20, 12, 9), *limits, mode="gpu-host", in_host_ram=())
    plan = hosted(WIDE, (20, 12, 9), *limits, mode="gpu-host", in_host_ram=(IN_HOST,))
    assert plan.seconds < alone.seconds
    lent = [choice for choice in plan.choices[: plan.hosted] if choice.device == "gpu"]
    assert {choice.primitive for choice in lent} == {IN_HOST.name}
    assert not plan.overlaps
    assert plan.memory.pinned == 200 * len(lent)
    rest = sum(choice.resident_bytes for choice in plan.choices[plan.hosted :])
    assert plan.memory.residents == 100 * len(lent) + rest
    names = [tensor.name for tensor in plan.tensors if "host_ram" in tensor.name]
    assert len(names) == 2 * len(lent)
    assert plan.memory.handover == plan.handover_bytes
    plan.check_runs(WIDE, WITH_GPU, table=(*ON_CPU, *ON_GPU, IN_HOST))
    assert Plan.from_json(plan.to_json()) == plan


def test_the_host_takes_its_time_for_every_sub_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as nothing makes up for it."""
    monkeypatch.setattr(with_host, "SUBLAYER_SECONDS", 1e-3)
    plan = hosted(WIDE, (20, 12, 9), PLENTY, PLENTY, mode="gpu-host", in_host_ram=(IN_HOST,))
    assert {choice.device for choice in plan.choices[: plan.hosted]} == {"cpu"}
    named = {"only": (IN_HOST.name,), "mode": "gpu-host", "in_host_ram": (IN_HOST,)}
    plan = hosted(WIDE, (20, 12, 9), PLENTY, PLENTY, **named)
    lent = [choice for choice in plan.choices[: plan.hosted] if choice.primitive == IN_HOST.name]
    assert lent
    assert all(choice.seconds > 1e-3 for choice in lent)


@pytest.mark.parametrize("mode", ["gpu-host", "cpu-to-gpu"])
def test_who_feeds_the_gpu_while_others_compute_has_a_core(mode: str) -> None:
    limits = Limits(PLENTY, THREADS + 1, PLENTY)
    words: dict[str, Any] = {"table": (*ON_CPU, *ON_GPU), "in_host_ram": (), "baseline": BASELINE, "context": 0}
    words |= {"mode": mode, "rates": GPU_RATES, "host_rates": HOST_RATES, "kinds": True}
    plan = make_plan(WIDE, (20, 12, 9), WITH_GPU, limits, **words)
    assert plan.limits == limits
    assert plan.crew == THREADS + (mode == "gpu-host")
    slower = limits.threads / plan.crew
    table = {primitive.name: primitive for primitive in ON_CPU}
    for choice in plan.choices[: plan.hosted]:
        work = table[choice.primitive].work(choice.shape, choice.variant)
        assert choice.seconds >= (1 - 1e-9) * slower * seconds(work, HOST_RATES)
    plan.check_runs(WIDE, WITH_GPU, table=(*ON_CPU, *ON_GPU))
    (alone,) = (kind.best for kind in plan.kinds if kind.device == "cpu")
    words |= {"mode": None, "rates": HOST_RATES, "host_rates": None}
    of_all = make_plan(WIDE, (20, 12, 9), WITH_GPU, limits, device="cpu", **words)
    assert alone.voxels_per_second == of_all.voxels_per_second
    said = json.loads(plan.to_json())
    assert said.pop("feeders") == limits.threads - plan.crew
    assert Plan.from_json(json.dumps(said)).crew == limits.threads, "as plans were before"
    wrong = said | {"feeders": limits.threads}
    with pytest.raises(PlanFileError, match="threads"):
        Plan.from_json(json.dumps(wrong))


def test_layers_of_the_host_that_nothing_computes_in_so_little_memory() -> None:
    greedy = replace(IN_HOST, least_bytes=PLENTY)
    plan = hosted(WIDE, (20, 12, 9), PLENTY, PLENTY, mode="gpu-host", in_host_ram=(greedy,))
    assert {choice.device for choice in plan.choices[: plan.hosted]} == {"cpu"}


def test_layers_of_the_host_by_name() -> None:
    """Slower than what the processor offers, and taken all the same; not where both are at work at a time."""
    slow = replace(IN_HOST, flops=1e4)
    words: dict[str, Any] = {"in_host_ram": (slow,), "mode": "gpu-host"}
    free = hosted(WIDE, (20, 12, 9), PLENTY, PLENTY, **words)
    assert slow.name not in {choice.primitive for choice in free.choices}
    asked = hosted(WIDE, (20, 12, 9), PLENTY, PLENTY, only=slow.name, **words)
    front = [choice for choice in asked.choices[: asked.hosted] if choice.shape.kind == "conv"]
    assert {choice.primitive for choice in front} == {slow.name}
    with pytest.raises(NoPlanError, match=r"gpu.conv.in_host runs in mode gpu-host alone; drop --only or choose"):
        hosted(WIDE, (20, 12, 9), PLENTY, PLENTY, only=slow.name, **(words | {"mode": "cpu-to-gpu"}))


def test_a_real_plan_of_layers_of_the_host() -> None:
    """gpu.conv.host_ram itself, in fewer bytes than its tensors have."""
    network = Network("real", 1, (Conv((3, 3, 3), 16, "relu"), Conv((3, 3, 3), 16, "relu"), Conv((1, 1, 1), 2)))
    limits = Limits(2**34, 2, 2**30)
    plan = make_plan(
        network, (60, 60, 60), WITH_GPU, limits, mode="gpu-host", baseline=BASELINE, patch=(60, 60, 60), columns=False,
        only=IN_HOST_RAM[0].name,
    )  # fmt: skip
    lent = [choice for choice in plan.choices[: plan.hosted] if choice.shape.kind == "conv"]
    assert {choice.primitive for choice in lent} == {"gpu.conv.host_ram"}
    plan.check_runs(network, WITH_GPU)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("mode", ["cpu-to-gpu", "gpu-host"])
def test_a_plan_tells_where_its_layers_run(mode: str) -> None:
    """Layer by layer, in both memories, and which side waits for the other."""
    plan = hosted(WIDE, (20, 12, 9), PLENTY, PLENTY, mode=mode)
    told = plan.explain()
    assert max(map(len, told.splitlines())) <= 120
    for choice in plan.choices[: plan.hosted]:
        where = "GPU, from RAM" if choice.device == "gpu" else "CPU"
        assert re.search(rf"{re.escape(choice.primitive)} +{where} ", told), told
    assert re.search(rf"{re.escape(plan.choices[-1].primitive)} +GPU ", told), told
    last = plan.choices[plan.hosted - 1].layers[1]
    beside = (
        rf"layers 0 to {last} run with {plan.crew} threads for the next patch or step while the GPU runs the others: "
        r".* waits \d+% of the time"
    )
    in_turn = rf"layers 0 to {last} run with tensors in RAM before the GPU runs the others: .* and .*"
    layers = (beside if plan.overlaps else in_turn).replace("layers 0 to 0 run", "layer 0 runs")
    assert re.search(layers, told.replace("\n", " ")), told
    for row in ("hosted layers: arena", "handed over", "GPU: arena"):
        assert row in told


def test_the_side_that_waits_is_told() -> None:
    plan = hosted(WIDE, (20, 12, 9), PLENTY, PLENTY)
    assert "the CPU waits 100% of the time" in " ".join(replace(plan, handover_seconds=9.0).explain().split())


def test_images_go_up_while_others_are_computed() -> None:
    """So one at a time is faster than all at once, where that takes no longer otherwise."""
    words: dict[str, Any] = {"patch": (20, 12, 10), "columns": False, "table": (*ON_CPU, *on_gpu(SLOW, POOL))}
    plan = hosted(WIDE, (20, 12, 9), PLENTY, PLENTY, **words)
    assert plan.choices[plan.hosted].shape.batch == 1
    assert plan.parts[plan.hosted] == 4
    assert plan.handover_seconds == pytest.approx(plan.handover_bytes / 4 / UPLOAD)


def test_the_gpu_takes_fewer_images_where_it_has_less_memory() -> None:
    """Down to one at a time, each by itself on the GPU; over a link for which nobody waits."""
    words: dict[str, Any] = {"patch": (20, 12, 10), "columns": False, "table": (*ON_CPU, *on_gpu(SLOW, POOL))}
    words["rates"] = GPU_RATES.replaced(gpu_link=Rate(flops=1e12, nbytes=1e300))
    most = hosted(WIDE, (20, 12, 9), PLENTY, PLENTY, **words)
    parts = {1}
    for share in (0.9, 0.6, 0.4, 0.3):
        room = CONTEXT + int(share * (most.memory.vram - CONTEXT))
        try:
            plan = hosted(WIDE, (20, 12, 9), PLENTY, room, **words)
        except NoPlanError:
            break
        assert plan.memory.vram <= room
        parts.add(plan.parts[plan.hosted])
    assert len(parts) > 1, parts
