"""Section VI-A of the paper again: is one image at a time the best, and are all poolings best as fragments?

A scheme says how many patches a step takes together (the paper's S), and which poolings give fragments. One that does
not is plain max-pooling: all layers are computed again for every offset of its window, which is how all subsamplings
are computed where nobody knows fragments. Patches of every scheme are searched in the same way: all fragments go
through a layer before any goes through the next, as in the paper.

Source  Zlateski, Lee, Seung, ZNNi (SC16), section VI.A, Fig. 4, and Table I for `theory`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, inf, log2, prod
from typing import Any

from planning_plans import Ground

from znnpy.kernels.primitive import Primitive, Variant
from znnpy.network import Conv, Network, Pool, extent
from znnpy.patches import cover
from znnpy.planner.candidates import Span, axis_sizes, spans, thinned
from znnpy.planner.layout import chain, fullest, place
from znnpy.planner.memory import Memory, context_bytes, reading_bytes, staging_bytes, writing_bytes
from znnpy.planner.plan import Choice, Plan
from znnpy.planner.schemes import Scheme, repeats, shapes_of
from znnpy.planner.space_search import FEW
from znnpy.planner.trade import Front, Option, Way, fastest_within, front, in_turn, total_seconds
from znnpy.shapes import ConvShape, LayerShape, Vec3, fused

BATCHES = (1, 2, 4, 8)
TRIES = 6  # to lay out an arena within the room that is left
FFT_OPERATIONS = 2.5  # of a real transform of n values, over n log2 n
THEORY_SIDES = (1, 2, 4, 8, 16, 32, 64, 128)  # of each fragment's output


@dataclass(frozen=True, slots=True)
class Best:
    """Of one scheme, as predicted."""

    scheme: Scheme
    plan: Plan | None  # its choices and counts; it does not run. None: nothing fits
    seconds: float = inf  # for the whole output


def schemes(network: Network) -> Iterator[Scheme]:
    """One and more images with all poolings as fragments; one image with every mixture of poolings."""
    pools = sum(isinstance(layer, Pool) for layer in network.layers)
    for images in BATCHES:
        yield Scheme(images, (True,) * pools)
    for fragments in product((True, False), repeat=pools):
        if not all(fragments):
            yield Scheme(1, fragments)


def best(ground: Ground, network: Network, pick: Plan, scheme: Scheme) -> Best:
    """The fastest patch of one scheme that fits, over a few sizes per axis."""
    found, least = Best(scheme, None), inf
    axes = [
        thinned(axis_sizes(length, period), FEW) for length, period in zip(pick.output, network.period, strict=True)
    ]
    alike = all(len(set(extent(layer))) == 1 for layer in network.layers) and len(set(pick.output)) == 1
    for z, y, x in product(*axes):
        if alike and not z >= y >= x:
            continue
        one = _of_size(ground, network, pick, scheme, (z, y, x), least)
        if one is not None:
            found, least = one, one.seconds
    return found


def _of_size(ground: Ground, network: Network, pick: Plan, scheme: Scheme, dense: Vec3, below: float) -> Best | None:
    """The fastest primitives for one patch; None unless below `below` seconds."""
    z, y, x = (size // period for size, period in zip(dense, network.period, strict=True))
    shapes = shapes_of(network, (z, y, x), scheme, ground.precision)
    count = len(cover(pick.output, dense))
    runs = ceil(count / scheme.images) * repeats(network, scheme)
    around = _around(ground, network, scheme, shapes, dense, count)
    limits = ground.limits
    if around.over(limits) != (0, 0):
        return None
    room = (limits.ram_bytes if ground.device == "cpu" else limits.vram_bytes or 0) - around.held
    fronts = [_front(ground, shapes, span, runs) for span in spans(network)]
    if not all(fronts):
        return None
    for _ in range(TRIES):
        options = fastest_within(fronts, room, below)
        if options is None:
            return None
        ways = [way for option in options for way in option.ways]
        _, arena = place(chain([(way.shape, way.footprint) for way in ways]))
        memory = replace(
            around,
            arena=arena,
            residents=sum(way.footprint.resident for way in ways),
            pinned=sum(way.footprint.host for way in ways),
            allowance=max(way.footprint.allowance for way in ways),
        )
        if memory.over(limits) == (0, 0):
            plan = _plan(pick, network, shapes, ways, dense, memory, count)
            return Best(scheme, plan, total_seconds(options))
        room -= sum(memory.over(limits))
    return None


def _around(
    ground: Ground, network: Network, scheme: Scheme, shapes: Sequence[LayerShape], dense: Vec3, count: int
) -> Memory:
    """What a run needs whatever the primitives are; of plain poolings, for one offset at a time."""
    n, steps = shapes[0].in_shape[1:4], ceil(count / scheme.images)
    n = n[0], n[1], n[2]
    maps_in, maps_out = scheme.images * network.input_channels, scheme.images * network.output_channels
    gpu = ground.device == "gpu"
    return Memory(
        device=ground.device,
        baseline=ground.baseline,
        arena=0,
        carries=0,
        residents=0,
        reading=reading_bytes(maps_in, n, 1, steps=steps, device=ground.device),
        writing=writing_bytes(maps_out, dense, 4, steps=steps, device=ground.device),
        allowance=0,
        staging=staging_bytes(maps_in * prod(n), 4 * maps_out * prod(dense), reads=steps, writes=steps) if gpu else 0,
        context=context_bytes(ground.context) if gpu else 0,
    )


def _front(ground: Ground, shapes: Sequence[LayerShape], span: Span, runs: int) -> Front:
    """Every way to run a span, layer by layer and in one."""
    first, last = span
    if first == last:
        return front(_options(ground, shapes[first], runs))
    turns = in_turn(
        front(_options(ground, shapes[first], runs)),
        front(_options(ground, shapes[last], runs)),
    )
    both = fused(shapes[first], shapes[last])
    return front((*turns, *(_options(ground, both, runs) if both else ())))


def _options(ground: Ground, shape: LayerShape, runs: int) -> Iterator[Option]:
    for primitive, variant in ground.ways(shape):
        yield _option(ground, shape, primitive, variant, runs)


def _option(ground: Ground, shape: LayerShape, primitive: Primitive, variant: Variant, runs: int) -> Option:
    footprint = primitive.footprint(shape, variant, ground.limits.threads)
    spent = ground.rates.seconds(primitive, shape, variant)
    return Option(
        ways=(Way(shape, primitive, variant, footprint, spent, 1, runs),),
        seconds=spent * runs,
        resident=footprint.resident,
        live=fullest(footprint).live(shape.in_bytes, shape.out_bytes),
        allowance=footprint.allowance,
    )


def _plan(
    pick: Plan,
    network: Network,
    shapes: Sequence[LayerShape],
    ways: Sequence[Way],
    dense: Vec3,
    memory: Memory,
    count: int,
) -> Plan:
    """As far as its layers can be timed."""
    choices, at = [], 0
    for way in ways:
        last = at + (isinstance(way.shape, ConvShape) and way.shape.pools)
        choices.append(
            Choice(
                layers=(at, last),
                shape=way.shape,
                primitive=way.primitive.name,
                version=way.primitive.version,
                device=pick.device,
                variant=way.variant,
                seconds=way.seconds,
                runs=way.runs,
                measured=False,
                fitted=False,
                resident_bytes=way.footprint.resident,
                working_bytes=way.footprint.working(way.shape),
            )
        )
        at = last + 1
    assert at == len(network.layers)
    n = shapes[0].in_shape[1:4]
    return replace(
        pick,
        patch_out=dense,
        patch_in=(n[0], n[1], n[2]),
        axis=0,
        column=0,
        choices=tuple(choices),
        memory=memory,
        columns=count,
        other=None,
        runners_up=(),
        kinds=(),
    )


def theory_network(poolings: int) -> Network:
    """Like the paper's: convolutions of 5x5x5, a pooling of 2x2x2 behind each of the first, 80 maps."""
    conv, pool = Conv((5, 5, 5), 80, "relu"), Pool((2, 2, 2))
    return Network(f"{poolings} poolings", 1, (*(conv, pool) * poolings, conv, conv, conv, Conv((5, 5, 5), 3, "relu")))


def theory(poolings: int) -> list[dict[str, Any]]:
    """Fig. 4: operations per output voxel of patches of one voxel over those of larger ones, against memory.

    Operations are those of Table I for convolutions by FFT; bytes are those of the largest layer: all transforms of its
    input or of its output, whichever are more.
    """
    network = theory_network(poolings)

    def cost(side: int, scheme: Scheme) -> tuple[float, int]:
        shapes = shapes_of(network, (side, side, side), scheme)
        convs = [shape for shape in shapes if isinstance(shape, ConvShape)]
        outputs = prod(shapes[-1].out_shape[:4])
        return sum(map(_operations, convs)) / outputs, max(4 * s.batch * max(s.fin, s.fout) * prod(s.n) for s in convs)

    naive, _ = cost(1, Scheme(1, (False,) * poolings))
    found = []
    for images in BATCHES:
        scheme = Scheme(images, (True,) * poolings)
        for side in THEORY_SIDES:
            operations, nbytes = cost(side, scheme)
            found.append({"images": images, "side": side, "gib": nbytes / 2**30, "speedup": naive / operations})
    return found


def _operations(shape: ConvShape) -> float:
    """Of one convolution by FFT: transforms of images, products, pruned transforms of kernels."""
    n, k = shape.n[0], shape.k[0]
    transforms = 3 * FFT_OPERATIONS * n**3 * log2(n) * shape.batch * (shape.fin + shape.fout)
    products = 4 * shape.batch * shape.fin * shape.fout * n**3
    return transforms + products + shape.fin * shape.fout * FFT_OPERATIONS * n * log2(n) * (k * k + k * n + n * n)


def theory_verdict(points: Sequence[dict[str, Any]], gib: float) -> dict[str, Any]:
    """The images at a time with the highest speedup within so much memory."""
    within = [point for point in points if point["gib"] <= gib]
    most = max(within, key=lambda point: point["speedup"])
    return {"gib": gib, "images": most["images"], "speedup": most["speedup"]}
