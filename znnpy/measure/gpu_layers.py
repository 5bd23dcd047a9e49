"""Times the layers of a network on a GPU before the first plan for it is made, and keeps what was found.

For every layer of the network, in the precision asked for, the method that looks the fastest is timed on a large volume
and on small ones, until the method that looks the fastest was timed. Then the best of every other kind of units that
looks nearly as fast is timed, because rates of different units are wrong by different factors. The planner takes the
layer's own speed from there (`znnpy.costs.model.Rates.measured`), and no method that the GPU refused to run
(`Rates.refused`). Rates of units are fitted to these layers once more (`Costs.rates`): a layer that was not timed is
predicted from those that are most like it.

`znnpy.measure.refine` times layers as plans run them; here there is no plan yet, and sizes are samples.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from znnpy.costs.cost_file import MOST_REASON, Costs, Measurement, Refusal
from znnpy.costs.model import Rate, Rates, layer_key
from znnpy.costs.store import CostStore
from znnpy.errors import DeviceError, ShapeError, VramError
from znnpy.graph_columns import GraphCover, TurnedGraph
from znnpy.kernels.contract import Primitive, Unit, Variant, device_of
from znnpy.layer_shapes import LayerShape
from znnpy.machine import Machine
from znnpy.measure.layer_timer import LONG_SECONDS, REPEATS, measure
from znnpy.messages import one_line, option
from znnpy.network import Conv, Layer, Network, Pool
from znnpy.patches import Box
from znnpy.planner.graph_tilings import GraphTiling
from znnpy.shapes import ConvShape, Precision, Vec3, fused
from znnpy.sliding_layers import extent, layer_shape
from znnpy.units import human_seconds

if TYPE_CHECKING:
    from znnpy.graph_operations import Operation
    from znnpy.kernels.gpu.device import Device

_log = logging.getLogger(__name__)

MOST_SECONDS = 5.0  # of timing; the compilation of kernels and the preparation of weights are not counted
MOST_TRIED = 8  # methods per layer
NEARLY = 1.6  # a method that looks slower than the fastest by more than this factor is not timed
# Images, sides of one output image in voxels, and seconds: the largest side that looks quicker and fits is taken. There
# is one large volume, and there are many small images, like the fragments of a small step: tiles that reach beyond an
# image are quicker there, and few tiles do not fill a GPU. A layer much quicker than 0.5 ms mostly waits for its start.
SIDES = (192, 128, 96, 64, 48, 32, 24, 16, 8, 4, 2, 1)
VOLUMES = ((1, SIDES, LONG_SECONDS), (8, SIDES, 5e-4))
GRAPH_SIDES = (256, 128, 64)  # of patches of graphs
MOST_BYTES = 6 * 2**30  # of input and output of a layer that is timed
LINK_BYTES = 2**24  # of the copy that is timed to find the speed of the link


def measured_rates(
    device: Device,
    machine: Machine,
    network: Network,
    precision: Precision,
    *,
    vram_bytes: int,
    threads: int,
    store: CostStore,
    seconds: float = MOST_SECONDS,
) -> Rates:
    """Return the rates of the GPU of `machine`, with what was timed of the layers of `network`, now or earlier.

    vram_bytes  bytes of the GPU that may be taken meanwhile
    threads     threads of the processor that copy for the GPU in a run
    seconds     nothing more is timed after so many seconds, and the next run goes on; 0: nothing is timed

    A refusal is kept with its reason, and the layer is not tried again. A layer for which there was too little memory
    is not tried again in this run. DeviceError when the GPU runs nothing at all any more.
    """
    known = {p.name: p for p in store.table if device_of(p.name) == "gpu"}
    table = tuple(known.values())
    empty = Costs.empty(machine, "gpu", 1, store.table)
    kept = store.stored(machine, "gpu", 1) or empty
    costs = kept if store.named is None else kept.with_newer(store.of(machine, "gpu", 1) or empty)
    host = platform.node()
    if seconds == 0:
        return _with_link(costs.rates(store.primitives, threads), costs.links.get(host))
    layers = tuple(_layers(network, precision))
    name = _digest(layers, table, costs)
    link = costs.links.get(host) or _link_speed(device, max(1, min(LINK_BYTES, vram_bytes)))
    links = {host: link} if vram_bytes >= LINK_BYTES else {}  # the copy of less is too short to tell
    if links.items() <= costs.links.items() and costs.settled.get(name, -1) >= vram_bytes:
        return _with_link(costs.rates(store.primitives, threads), link)
    assumed = costs.unit_rates(table)
    rates = replace(costs, layers=(*costs.layers, *costs.samples), samples=()).rates(table)
    samples: list[Measurement] = []
    refusals: list[Refusal] = []
    short = False  # whether memory was too small for a layer: others may leave more of it the next time
    spent, begun = 0.0, time.monotonic()
    for shapes, long in layers:
        for _ in range(MOST_TRIED):
            wanted = _wanted(shapes, long, table, machine, assumed, rates, vram_bytes)
            if wanted is None or spent > seconds:
                break
            primitive, shape, variant = wanted
            try:
                took = measure(device, primitive, shape, variant)
            except DeviceError as error:
                device.synchronize()  # raises if a kernel broke the device; then no layer is to blame
                _log.info("%s does not run %s here: %s", primitive.name, shape, error)
                refused = Refusal(primitive.name, primitive.version, shape, one_line(str(error))[:MOST_REASON])
                assumed, rates = (by.with_refusal(primitive, shape, refused.reason) for by in (assumed, rates))
                if isinstance(error, VramError):
                    short = True
                    costs = replace(costs, refusals=(*costs.refusals, refused))  # in this run
                else:
                    refusals.append(refused)
                continue
            spent += (1 + REPEATS) * took
            samples.append(Measurement(primitive.name, primitive.version, variant, shape, took))
            rates = rates.with_measurement(primitive, shape, variant, took)
    settled = {} if short or spent > seconds else {name: vram_bytes}
    found = replace(empty, samples=tuple(samples), refusals=tuple(refusals), settled=settled, links=links)
    if found != empty:
        store.keep(found)
    if samples:
        took = time.monotonic() - begun
        store.sentences.append(
            f"measured {len(samples)} layers of {network.name} on {machine.gpu.name if machine.gpu else 'a GPU'} for "
            f"{human_seconds(took)}; {option('calibrate', False)} leaves this out"
        )
    return _with_link(costs.with_newer(found).rates(store.primitives, threads), link)


def _with_link(rates: Rates, speed: float | None) -> Rates:
    """Return rates with the measured speed of the link in bytes per second, if there is one."""
    if speed is None:
        return rates
    link = Rate(rates.of("gpu_link").flops, speed)
    return replace(rates.replaced(gpu_link=link), fitted=rates.fitted | {"gpu_link"})


def _link_speed(device: Device, nbytes: int) -> float:
    """Return the bytes per second that go from page-locked memory of the host to the GPU."""
    host = device.pinned((nbytes,), np.uint8)
    there = device.view(device.allocate(nbytes, "the link's speed"), (nbytes,), np.uint8)
    host[:] = 0

    def copy() -> None:
        device.copy_async(there, host, device.stream)

    copy()
    device.synchronize()
    return nbytes / min(device.elapsed(copy, REPEATS))


def _digest(layers: Sequence[object], table: Sequence[Primitive], costs: Costs) -> str:
    """Return a name for layers, primitives and rates of units: what is timed depends on no more."""
    of = [str(layers), str(sorted((p.name, p.version) for p in table)), str(costs.units), str(costs.by_size)]
    return hashlib.sha256(json.dumps(of).encode()).hexdigest()[:16]


def _layers(network: Network, precision: Precision) -> Iterator[tuple[tuple[LayerShape, ...], float]]:
    """Yield every layer that differs from those before, and every convolution fused with the pooling behind it.

    Each comes on volumes of several sizes, the largest first, with the seconds that are long. Convolutions come on
    slabs too, like the steps of columns, because other tiles may suit them. Layers of graphs come as they are in
    windows, or in patches of some sizes.
    """
    if network.meaning != "sliding":
        yield from _layers_of_graph(network, precision)
        return
    seen = set()
    for index, (layer, maps) in enumerate(zip(network.layers, network.maps, strict=False)):
        behind = network.layers[index + 1] if index + 1 < len(network.layers) else None
        forms = (_cube, _slab) if isinstance(layer, Conv) else (_cube,)
        for form, (images, sides, long) in product(forms, VOLUMES):
            outs = [form(side) for side in sides]
            spans = [tuple(layer_shape(layer, images, maps, _sized(layer, out), precision) for out in outs)]
            if isinstance(layer, Conv) and isinstance(behind, Pool):
                spans.append(tuple(_both(layer, behind, images, maps, out, precision) for out in outs))
            for span in spans:
                if (span, long) not in seen:
                    seen.add((span, long))
                    yield span, long


def _layers_of_graph(network: Network, precision: Precision) -> Iterator[tuple[tuple[LayerShape, ...], float]]:
    """Yield every operation of a graph that differs from those before, and those of convolutions with norms in one."""
    volumes = [network.windows.size] if network.windows is not None else [_cube(side) for side in GRAPH_SIDES]
    tilings = []
    for volume in volumes:
        with suppress(ShapeError):  # a network takes no volumes that are too small for it, or that it refuses to pad
            tilings.append(_whole_tiling(network, volume, precision))
    each = ([one.shape(operation) for operation in _timed(one.graph)] for one in tilings)
    yield from ((span, LONG_SECONDS) for span in dict.fromkeys(zip(*each, strict=True)))


def _timed(graph: TurnedGraph) -> tuple[Operation, ...]:
    """Return the operations of a graph, and those that some primitive of a GPU computes in pairs."""
    return (*graph.operations, *(pair for pair in graph.pairs.values() if pair.norm is not None))


def _whole_tiling(network: Network, volume: Vec3, precision: Precision) -> GraphTiling:
    """Return the one patch of a whole volume."""
    graph = TurnedGraph.of(network, volume, 0, precision)
    sizes = [graph.geometry.size(tensor) for tensor in graph.network.outputs]
    region, *others = (Box((0, 0, 0), size) for size in sizes)
    whole = GraphCover(graph, (1, 1, 1), 0, region, tuple(others))
    z, y, x = (end - begin for begin, end in zip(*whole.periods, strict=True))
    return GraphTiling(replace(whole, patch=(z, y, x)))


def _cube(side: int) -> Vec3:
    return side, side, side


def _slab(side: int) -> Vec3:
    """Return a quarter of the thickness of a cube, with as many voxels."""
    return max(1, side // 4), 2 * side, 2 * side


def _sized(layer: Layer, out: Vec3) -> Vec3:
    """Return the size of an input that gives about `out` voxels of each image.

    Fragments need whole windows less one voxel.
    """
    z, y, x = (
        (-(-size // window) + 1) * window - 1 if isinstance(layer, Pool) else size + window - 1
        for size, window in zip(out, extent(layer), strict=True)
    )
    return z, y, x


def _both(conv: Conv, pool: Pool, images: int, maps: int, out: Vec3, precision: Precision) -> ConvShape:
    """Return two layers fused into one, on a volume that gives the pooling about `out` voxels."""
    first = layer_shape(conv, images, maps, _sized(conv, _sized(pool, out)), precision)
    both = fused(first, layer_shape(pool, images, conv.out, first.out, precision))
    assert both is not None, f"{conv} and {pool} are not two layers that run in one"
    return both


def _wanted(
    samples: Sequence[LayerShape],
    long: float,
    table: Sequence[Primitive],
    machine: Machine,
    assumed: Rates,
    rates: Rates,
    vram_bytes: int,
) -> tuple[Primitive, LayerShape, Variant] | None:
    """Return how a layer is to be timed next; None if nothing runs it, or if all is known that may be the fastest.

    It is timed on the largest volume that fits and that some primitive runs within `long` seconds. A primitive of which
    no measurement tells counts as assumed, whatever was measured of similar ones, because it may be better.
    """
    for shape in samples:
        if shape.in_bytes + shape.out_bytes > MOST_BYTES:
            continue
        ways = [
            (primitive, shape, variant)
            for primitive in table
            if primitive.kind == shape.kind
            and (primitive.why_not(shape, machine) or rates.why_not(primitive, shape)) is None
            for variant in primitive.variants(shape, machine)
            if _fits(primitive, shape, variant, vram_bytes)
        ]
        told = [(rates if _can_be_told(*way, machine, rates) else assumed).seconds(*way) for way in ways]
        least = min(told, default=inf)
        if not ways or (least > long and shape is not samples[-1]):
            continue
        best = ways[told.index(least)]
        if not rates.was_measured_near(*best):
            return best
        met = {_units(*way) for way in ways if rates.was_measured_near(*way)}
        others = [(rates.seconds(*way), order) for order, way in enumerate(ways) if _units(*way) not in met]
        spent, order = min(others, default=(inf, 0))
        return ways[order] if spent <= NEARLY * least else None
    return None


def _units(primitive: Primitive, shape: LayerShape, variant: Variant) -> tuple[str, frozenset[Unit]]:
    """Return which primitive runs a layer, and with which units."""
    return primitive.name, frozenset(work.unit for work in primitive.work(shape, variant))


def _can_be_told(primitive: Primitive, shape: LayerShape, variant: Variant, machine: Machine, rates: Rates) -> bool:
    """Return whether the layer was timed with this variant, or with one that only does more or less at a time.

    Such a variant differs in its counts and in its work alone.
    """
    return rates.was_measured(primitive, shape, variant) or any(
        rates.was_measured(primitive, shape, other)
        and layer_key(primitive, shape, other).method == layer_key(primitive, shape, variant).method
        and primitive.work(shape, other) != primitive.work(shape, variant)
        for other in primitive.variants(shape, machine)
    )


def _fits(primitive: Primitive, shape: LayerShape, variant: Variant, vram_bytes: int) -> bool:
    """Return whether a layer fits into the GPU and takes no memory of the host, which no plan has promised yet."""
    footprint = primitive.footprint(shape, variant, 1)
    scratch = sum(s.nbytes for s in footprint.scratch)
    needed = shape.in_bytes + shape.out_bytes + scratch + footprint.resident + footprint.allowance
    return needed <= vram_bytes and footprint.host == 0
