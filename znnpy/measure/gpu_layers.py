"""How fast the layers of a network run on this GPU: measured before a plan is made, and kept between runs.

For every layer that a network has, in the precision asked for, whatever looks the fastest is run on a large volume and
on a small one, until what looks the fastest is something that was measured; then the best of every other kind of units
that looks nearly as fast, for they are off by factors of their own. The planner takes the layer's own speed from there
(`znnpy.costs.model.Rates.measured`), and takes nothing that the GPU refused to run (`Rates.refused` there).
Rates of units are fitted to these layers once more, on top of what `znnpy measure` found: what was not measured is told
by what is most like it, at another size.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from znnpy.costs.cost_file import Costs, Measurement
from znnpy.costs.fit import Run, fitted
from znnpy.costs.model import Rate, Rates, assumed_rates, layer_key, method
from znnpy.errors import DeviceError, VramError
from znnpy.files import read_regular, replace_file
from znnpy.kernels.contract import Primitive, Unit, Variant, device_of
from znnpy.kernels.table import TABLE
from znnpy.machine import Machine
from znnpy.measure.fftw_wisdom import cache_folder
from znnpy.measure.layer_timer import LONG_SECONDS, REPEATS, measure
from znnpy.messages import excerpt
from znnpy.network import Conv, Layer, Network, Pool, extent, layer_shape
from znnpy.shapes import ConvShape, LayerShape, Precision, Vec3, fused

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device

_log = logging.getLogger(__name__)

MOST_SECONDS = 5.0  # of measuring, kernels that are compiled and weights that are prepared not counted
MOST_TRIED = 8  # per layer
NEARLY = 1.6  # times the least: what looks slower is not worth a run
# Images, sides of one image out in voxels, and seconds: the largest that looks quicker and fits. One large volume, and
# many small ones, as the fragments of a small step are: where tiles cover an image they reach beyond it, which is
# quicker than what lies within, and few tiles do not fill a GPU. What is much quicker than 0.5 ms is mostly its start.
SIDES = (192, 128, 96, 64, 48, 32, 24, 16, 8, 4, 2, 1)
VOLUMES = ((1, SIDES, LONG_SECONDS), (8, SIDES, 5e-4))
MOST_BYTES = 6 * 2**30  # of input and output of a layer that is measured
FORMAT = 2  # version of the file
MOST_FILE_BYTES = 2**20
MOST_WORDS = 500  # characters of a refusal that are kept
LINK_BYTES = 2**24  # of the copy that tells the speed of the link


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Refusal:
    """What the GPU said when it was to run one layer, and would not."""

    primitive: str
    version: int
    shape: Annotated[LayerShape, Field(discriminator="kind")]
    reason: Annotated[str, Field(min_length=1, max_length=MOST_WORDS)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class _Remembered:
    """The file. Facts say what GPU and libraries it is of.

    settled  networks of which all was measured that should be, by what was known of the GPU beside this file, and the
             bytes of the GPU that might be taken
    links    bytes per second that go up, by the names of hosts
    """

    facts: dict[str, str]
    measurements: tuple[Measurement, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    settled: dict[str, int] = Field(default_factory=dict)
    links: dict[str, Annotated[float, Field(gt=0, lt=inf)]] = Field(default_factory=dict)


def measured_rates(
    device: Device,
    machine: Machine,
    network: Network,
    precision: Precision,
    *,
    vram_bytes: int,
    table: Sequence[Primitive] = TABLE,
    seconds: float = MOST_SECONDS,
    stored: Costs | None = None,
) -> Rates:
    """Rates of the GPU of `machine`, with what was measured of the layers of `network`, now or in an earlier run.

    vram_bytes  of the GPU that may be taken meanwhile
    seconds     after which nothing more is measured; the next run goes on
    stored      what `znnpy measure` found; None: nothing

    What the GPU refuses to run is remembered with its words, and not tried again; where it had too little memory, it is
    not tried again in this run. A file that is damaged, of another GPU or of other libraries is not used but written
    anew; where none can be written the next run measures again. DeviceError when the GPU runs nothing at all any more.
    """
    facts = _facts(machine)
    path = cache_folder() / f"gpu-{_digest(facts)[:12]}.json"
    known = {p.name: p for p in table if device_of(p.name) == "gpu"}
    kept = _of_these(_read(path, facts), known)
    assumed = assumed_rates(machine, 1, "gpu") if stored is None else replace(stored, layers=()).rates(table)
    for no in kept.refusals:
        assumed = assumed.with_refusal(known[no.primitive], no.shape, no.reason)
    before = () if stored is None else tuple(old for old in stored.layers if old.primitive in known)
    rates = _learnt(assumed, (*before, *kept.measurements), known)
    layers = tuple(_layers(network, precision))
    name = _digest(
        {
            "layers": str(layers),
            "primitives": str(sorted((p.name, p.version) for p in known.values())),
            "stored": "" if stored is None else stored.to_json(),
        }
    )
    host = platform.node()
    link = kept.links.get(host) or _link_speed(device, max(1, min(LINK_BYTES, vram_bytes)))
    links = {**kept.links, host: link} if vram_bytes >= LINK_BYTES else kept.links  # less is too short to tell
    if links == kept.links and kept.settled.get(name, -1) >= vram_bytes:
        return _linked(_fitted(assumed, (*before, *kept.measurements), known), link)
    found: list[Measurement] = []
    refusals: list[Refusal] = []
    short: list[Refusal] = []  # for want of memory, of which others may leave more the next time
    spent = 0.0
    for samples, long in layers:
        for _ in range(MOST_TRIED):
            wanted = _wanted(samples, long, tuple(known.values()), machine, assumed, rates, vram_bytes)
            if wanted is None or spent > seconds:
                break
            primitive, shape, variant = wanted
            try:
                took = measure(device, primitive, shape, variant)
            except DeviceError as error:
                device.synchronize()  # refused too where a kernel failed: that is the end, and nobody's fault to keep
                _log.info("%s does not run %s here: %s", primitive.name, shape, error)
                refused = Refusal(primitive.name, primitive.version, shape, str(error)[:MOST_WORDS])
                assumed, rates = (by.with_refusal(primitive, shape, refused.reason) for by in (assumed, rates))
                (short if isinstance(error, VramError) else refusals).append(refused)
                continue
            spent += (1 + REPEATS) * took
            found.append(Measurement(primitive.name, primitive.version, variant, shape, took))
            rates = rates.with_measurement(primitive, shape, variant, took)
    settled = kept.settled if short or spent > seconds else {**kept.settled, name: vram_bytes}
    now = _Remembered(facts, (*kept.measurements, *found), (*kept.refusals, *refusals), settled, links)
    if now != kept:
        _write(path, now)
    return _linked(_fitted(assumed, (*before, *now.measurements), known), link)


def _linked(rates: Rates, speed: float) -> Rates:
    """With the link as it is, bytes per second."""
    link = Rate(rates.of("gpu_link").flops, speed)
    return replace(rates.replaced(gpu_link=link), fitted=rates.fitted | {"gpu_link"})


def _link_speed(device: Device, nbytes: int) -> float:
    """Bytes per second that go up from pinned memory of the host."""
    host = device.pinned((nbytes,), np.uint8)
    there = device.view(device.allocate(nbytes, "the link's speed"), (nbytes,), np.uint8)
    host[:] = 0

    def copy() -> None:
        device.copy_async(there, host, device.stream)

    copy()
    device.synchronize()
    return nbytes / min(device.elapsed(copy, REPEATS))


def _fitted(assumed: Rates, measurements: Sequence[Measurement], known: Mapping[str, Primitive]) -> Rates:
    """Rates of units by what was measured of layers, and then these layers themselves."""
    runs = [
        Run(tuple(primitive.work(old.shape, old.variant)), old.seconds, method(primitive, old.shape))
        for old in measurements
        for primitive in (known[old.primitive],)
    ]
    return _learnt(fitted(assumed, runs, begins=False), measurements, known)


def _learnt(rates: Rates, measurements: Sequence[Measurement], known: Mapping[str, Primitive]) -> Rates:
    for old in measurements:
        if not rates.was_measured_near(known[old.primitive], old.shape, old.variant):
            rates = rates.with_measurement(known[old.primitive], old.shape, old.variant, old.seconds)
    return rates


def _of_these(kept: _Remembered, known: Mapping[str, Primitive]) -> _Remembered:
    """What still holds of the primitives that there are; where some does not, no network is settled."""

    def holds(old: Measurement | Refusal) -> bool:
        return old.primitive in known and known[old.primitive].version == old.version

    measurements = tuple(old for old in kept.measurements if holds(old))
    refusals = tuple(old for old in kept.refusals if holds(old))
    whole = (measurements, refusals) == (kept.measurements, kept.refusals)
    return replace(kept, measurements=measurements, refusals=refusals, settled=kept.settled if whole else {})


def _layers(network: Network, precision: Precision) -> Iterator[tuple[tuple[LayerShape, ...], float]]:
    """Every layer that differs from those before, and every convolution in one with the pooling behind it.

    Each on volumes of several sizes, the largest first, and the seconds that are long; convolutions once more on slabs,
    as steps of columns are: other tiles may suit them.
    """
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


def _cube(side: int) -> Vec3:
    return side, side, side


def _slab(side: int) -> Vec3:
    """As many voxels as a cube has, a quarter as thick."""
    return max(1, side // 4), 2 * side, 2 * side


def _sized(layer: Layer, out: Vec3) -> Vec3:
    """Of an input that gives about `out` voxels of each image; fragments need whole windows and one voxel less."""
    z, y, x = (
        (-(-size // window) + 1) * window - 1 if isinstance(layer, Pool) else size + window - 1
        for size, window in zip(out, extent(layer), strict=True)
    )
    return z, y, x


def _both(conv: Conv, pool: Pool, images: int, maps: int, out: Vec3, precision: Precision) -> ConvShape:
    """Two layers in one, on a volume that gives the pooling about `out` voxels."""
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
    """What is to be measured next of a layer; None where nothing runs it, or all is known that may be the fastest.

    On the largest volume that fits and that something runs within `long` seconds. What can be told from no measurement
    counts as assumed, whatever was measured of its like: it may be better.
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
    """The kind of a way: who runs the layer, and with what."""
    return primitive.name, frozenset(work.unit for work in primitive.work(shape, variant))


def _can_be_told(primitive: Primitive, shape: LayerShape, variant: Variant, machine: Machine, rates: Rates) -> bool:
    """It was measured, or one that differs from it in counts only, and in work: in how much is done at a time."""
    return rates.was_measured(primitive, shape, variant) or any(
        rates.was_measured(primitive, shape, other)
        and layer_key(primitive, shape, other).method == layer_key(primitive, shape, variant).method
        and primitive.work(shape, other) != primitive.work(shape, variant)
        for other in primitive.variants(shape, machine)
    )


def _fits(primitive: Primitive, shape: LayerShape, variant: Variant, vram_bytes: int) -> bool:
    """Within the memory of the GPU, and taking none of the host's: no plan has promised that yet."""
    footprint = primitive.footprint(shape, variant, 1)
    scratch = sum(s.nbytes for s in footprint.scratch)
    needed = shape.in_bytes + shape.out_bytes + scratch + footprint.resident + footprint.allowance
    return needed <= vram_bytes and footprint.host == 0


def _facts(machine: Machine) -> dict[str, str]:
    """What decides how fast a kernel runs."""
    gpu = machine.gpu
    assert gpu is not None
    return {
        "format": str(FORMAT),
        "gpu": f"{gpu.name} {gpu.capability} {gpu.multiprocessors} {gpu.memory_bytes}",
        "driver": str(gpu.driver),
        "versions": str(gpu.versions),
    }


def _digest(of: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()


def _read(path: Path, facts: dict[str, str]) -> _Remembered:
    """The file; an empty one where there is none, or one that does not say what it should: it will be written anew."""
    nothing = _Remembered(facts)
    try:
        remembered = _adapter().validate_json(read_regular(path, MOST_FILE_BYTES + 1))
    except FileNotFoundError:
        return nothing
    except (OSError, ValidationError) as error:
        _log.info("%s is not used: %s", path, excerpt(error))
        return nothing
    return remembered if remembered.facts == facts else nothing


def _write(path: Path, remembered: _Remembered) -> None:
    """Replace the file in one step; the oldest are left out when there are too many, and no network is settled then.

    Where that cannot be done the next run measures again.
    """
    while len(text := _adapter().dump_json(remembered, indent=1)) > MOST_FILE_BYTES:
        measurements, refusals = remembered.measurements, remembered.refusals
        remembered = replace(
            remembered,
            measurements=measurements[1 + len(measurements) // 8 :],
            refusals=refusals[1 + len(refusals) // 8 :],
            settled={},
        )
    try:
        replace_file(path, text)
    except OSError as error:
        _log.info("what was measured is not kept: %s", error)


@cache
def _adapter() -> TypeAdapter[_Remembered]:
    return TypeAdapter(_Remembered)
