"""Layers of the host's memory in sub-layers: what belongs to a division, how long it takes, and which one is taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf, prod
from typing import Any

import pytest

from tests.support.closeness import MACHINE
from znnpy.costs.model import assumed_rates
from znnpy.kernels.contract import Footprint, Scratch, Variant
from znnpy.kernels.gpu.host_ram import timeline
from znnpy.kernels.gpu.host_ram.bounds import Bounds
from znnpy.kernels.gpu.host_ram.division import Divided, Division, Inner, Order, Parts, Sublayer
from znnpy.kernels.gpu.host_ram.search import Found, by_heuristics, divide, follow, takes_direct, vram
from znnpy.kernels.gpu.host_ram.space import FEW, Space, sizes
from znnpy.kernels.gpu.host_ram.timeline import SUMMED, Speeds, seconds
from znnpy.kernels.table import find
from znnpy.machine import Gpu
from znnpy.shapes import ConvShape

ORDERS: tuple[Order, ...] = ("outputs", "inputs")
SHAPES = [
    ConvShape(1, 5, 6, (9, 5, 4), (3, 1, 2), "relu"),
    ConvShape(3, 4, 3, (5, 4, 6), (2, 3, 1), "tanh"),
    ConvShape(2, 3, 5, (4, 3, 3), (4, 3, 3), "none", precision="fp16"),  # one voxel out
    ConvShape(1, 1, 7, (12, 4, 4), (2, 2, 2), "relu"),
]
SPEEDS = {
    "the link decides": Speeds(upload=2e5, download=3e5, memory=1e8),
    "downloads decide": Speeds(upload=1e7, download=5e4, memory=1e8),
    "computing decides": Speeds(upload=1e8, download=1e8, memory=1e9),
    "all three count": Speeds(upload=1e6, download=1.5e6, memory=1e8),
}
GPU = Gpu("card", (9, 0), 132, 2**34, 2**25, 232448, 233472, 4.8e12, 13000, ())
WITH_GPU = replace(MACHINE, gpu=GPU)
RATES = assumed_rates(WITH_GPU, 1, "gpu")


def made_up(shape: ConvShape) -> Sublayer:
    """Parts take no less than the whole: a fixed cost, maps in fours, borders along z."""
    fin, fout = (4 * Parts(maps, 4).count for maps in (shape.fin, shape.fout))
    voxels = shape.batch * prod(shape.n)
    spent = 2e-4 + 1e-7 * voxels * (fin + fout) + 2e-8 * voxels * fin * fout
    spectra = Scratch("spectra", 4 * voxels * (fin + fout), 0, 1)
    results = Scratch("results", 4 * voxels * fout, 1, 2)
    return Sublayer(
        spent, Footprint(resident=4 * fin * fout * prod(shape.k), host=8, stages=3, scratch=(spectra, results))
    )


def free(shape: ConvShape) -> Sublayer:
    """Nothing is computed, and no kernels are kept."""
    return Sublayer(0.0, Footprint(raises_peak=True))


def all_sizes(shape: ConvShape) -> Space:
    planes = shape.out[0]
    chunks = [(n, planes) for n in range(1, shape.batch + 1)] + [(1, n) for n in range(1, planes)]
    return Space(chunks, range(1, shape.fin + 1), range(1, shape.fout + 1))


def followed(shape: ConvShape, vram_bytes: int, speeds: Speeds, inner: Inner) -> list[Found]:
    """Every size of every part, in both orders, to the end."""
    found = (follow(shape, division, vram_bytes, speeds, inner) for division in all_sizes(shape).divisions())
    return [each for each in found if each is not None]


def limits(shape: ConvShape) -> Iterator[int]:
    """Device memory from what holds everything to what holds nothing."""
    whole = follow(
        shape, Division(shape.batch, shape.out[0], shape.fin, shape.fout), 2**62, SPEEDS["all three count"], made_up
    )
    assert whole is not None
    for part in (1.0, 0.7, 0.45, 0.3, 0.2, 0.1, 0.01):
        yield int(part * vram(shape, whole.footprint))


@pytest.mark.slow
@pytest.mark.parametrize("speeds", SPEEDS.values(), ids=SPEEDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_search_equals_exhaustive_search(shape: ConvShape, speeds: Speeds) -> None:
    several = set()
    for limit in limits(shape):
        every, found = followed(shape, limit, speeds, made_up), divide(shape, limit, speeds, made_up)
        assert (found is None) == (not every)
        if found is not None:
            assert found.seconds == pytest.approx(min(each.seconds for each in every), rel=1e-12)
            assert found in every
            assert vram(shape, found.footprint) <= limit
            several.add(found.division)
            near = divide(shape, limit, speeds, made_up, within=0.1)
            assert near is not None
            assert found.seconds * (1 - 1e-12) <= near.seconds <= found.seconds / 0.9
    assert len(several) > 1, "the limits change nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("gpu.conv.fft_tiled", Variant.of(tile=(8, 16, 16), group=64, spectra="split", kernels="kept")),
        ("gpu.conv.direct", Variant.of(kernel="shared")),
        ("gpu.conv.implicit_gemm", Variant.of(units="tensor", precision="fp32")),
        ("gpu.conv.cudnn", Variant.of(choice=0, precision="fp32", workspace=16)),
    ],
)
def test_search_equals_exhaustive_search_with_real_primitives(name: str, variant: Variant) -> None:
    """The bounds rely on it that parts together never take less than the whole."""
    primitive = find(name)

    def inner(shape: ConvShape) -> Sublayer:
        return Sublayer(RATES.seconds(primitive, shape, variant), primitive.footprint(shape, variant, 1))

    shape, speeds = ConvShape(2, 6, 9, (14, 90, 80), (3, 3, 3), "relu"), Speeds(25e9, 20e9, 2e12)
    for part in (1.0, 0.5, 0.25):
        limit = int(part * 2**25)
        every = followed(shape, limit, speeds, inner)
        found = divide(shape, limit, speeds, inner, space=all_sizes(shape))
        assert (found is None) == (not every)
        assert found is None or found.seconds == pytest.approx(min(each.seconds for each in every), rel=1e-12)


def indices(bounds: Bounds) -> Iterator[tuple[int, ...]]:
    return product(*(range(count) for count in bounds.seconds.shape))


@pytest.mark.parametrize("inner", [made_up, free])
@pytest.mark.parametrize("speeds", SPEEDS.values(), ids=SPEEDS)
@pytest.mark.parametrize("shape", [*SHAPES, ConvShape(3, 5, 5, (6, 3, 3), (3, 2, 2), "relu")], ids=str)
def test_bounds_are_below_the_seconds_of_every_division(shape: ConvShape, speeds: Speeds, inner: Inner) -> None:
    bounds = Bounds(shape, 2**62, speeds, Space.whole(shape), inner)
    nearest = 0.0
    for at in indices(bounds):
        found = follow(shape, bounds.division(at), 2**62, speeds, inner)
        assert found is not None
        of_link = bounds.seconds[at]
        assert bounds.compute(at) == (not at[0] and not at[1])  # once for all chunks and orders
        assert of_link <= bounds.seconds[at] <= found.seconds * (1 + 1e-12)
        nearest = max(nearest, bounds.seconds[at] / found.seconds)
    assert nearest > 0.99


@pytest.mark.parametrize("division", [Division(1, 8, 1, 8, "inputs"), Division(1, 8, 4, 1, "outputs")], ids=str)
def test_bounds_count_transfers_that_cannot_overlap(division: Division) -> None:
    """Much is downloaded before there is room for the next part of the input."""
    shape, speeds = ConvShape(1, 8, 8, (64, 6, 6), (1, 1, 1)), Speeds(1e6, 1e6, 1e8)
    d = division
    space = Space([(d.images, d.planes)], [d.maps_in], [d.maps_out], [d.order])
    bound, taken = Bounds(shape, 2**62, speeds, space, free).seconds.item(), seconds(Divided(shape, d), speeds, free)
    assert bound > 1.5 * shape.in_bytes / speeds.upload
    assert 0.95 * taken < bound <= taken * (1 + 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("inner", [made_up, free])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_buffer_bytes_are_a_lower_bound_of_needed_bytes(shape: ConvShape, inner: Inner) -> None:
    """Every division that fits is still found with a limit of its needed bytes."""
    speeds = SPEEDS["all three count"]
    for found in followed(shape, 2**62, speeds, inner):
        needed = vram(shape, found.footprint)
        d = found.division
        space = Space([(d.images, d.planes)], [d.maps_in], [d.maps_out], [d.order])
        bounds = Bounds(shape, needed, speeds, space, inner)
        bounds.compute((0, 0, 0, 0))
        assert bounds.seconds.item() < inf
        assert follow(shape, d, needed, speeds, inner) == found
        assert divide(shape, needed - 1, speeds, inner, space=space) is None


def test_kernels_that_do_not_fit_end_the_search_early() -> None:
    """Bytes of kernels follow from groups of maps, whatever the images and planes."""
    shape, asked = ConvShape(4, 6, 7, (40, 5, 5), (3, 3, 3)), 0

    def heavy(sub: ConvShape) -> Sublayer:
        nonlocal asked
        asked += 1
        return Sublayer(1.0, Footprint(resident=1000 * sub.fin * sub.fout))

    assert divide(shape, 41_999, SPEEDS["all three count"], heavy) is None
    assert asked == 6 * 7  # of all images and planes; no division was followed


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        ConvShape(1, 27, 20, (30, 8, 9), (3, 3, 3), "relu"),
        ConvShape(5, 12, 33, (9, 10, 9), (2, 3, 3), "relu", precision="fp16"),
        ConvShape(2, 40, 3, (22, 9, 9), (5, 2, 2), "sigmoid"),
    ],
    ids=str,
)
@pytest.mark.parametrize("speeds", [Speeds(2e7, 3e7, 1e9), Speeds(3e6, 2e6, 1e9)], ids=["computing", "the link"])
def test_few_candidate_counts_of_maps_are_nearly_optimal(shape: ConvShape, speeds: Speeds) -> None:
    few = Space.whole(shape)
    every = replace(few, maps_in=range(1, shape.fin + 1), maps_out=range(1, shape.fout + 1))
    for limit in limits(shape):
        best, found = (divide(shape, limit, speeds, made_up, space=space) for space in (every, few))
        assert (best is None) == (found is None)
        if best is not None and found is not None:
            assert best.seconds * (1 - 1e-12) <= found.seconds <= best.seconds * 1.01


@pytest.mark.parametrize(("within", "most"), [(0.01, 30), (0.0, 900)])
def test_large_layer_asks_inner_primitives_few_times(within: float, most: int) -> None:
    """Asking the inner primitive takes most of the time."""
    shape, asked = ConvShape(1, 80, 80, (300, 300, 300), (3, 3, 3), "relu"), 0

    def inner(sub: ConvShape) -> Sublayer:
        nonlocal asked
        asked += 1
        return Sublayer(1e-4 + 1e-13 * sub.batch * sub.fin * sub.fout * prod(sub.n), Footprint())

    found = divide(shape, 2**32, Speeds(25e9, 25e9, 2.8e12), inner, within=within)
    assert found is not None
    assert 0 < asked <= most


@pytest.mark.parametrize("memory", [0.05, 0.3, 1.0, 4.0], ids=lambda gib: f"{gib} GiB")
@pytest.mark.parametrize(
    "shape",
    [
        ConvShape(1, 40, 48, (60, 90, 90), (3, 3, 3), "relu"),
        ConvShape(8, 24, 20, (40, 60, 60), (5, 5, 5), "relu"),
        ConvShape(27, 18, 3, (23, 33, 33), (2, 3, 3), "sigmoid"),
    ],
    ids=str,
)
def test_search_is_never_worse_than_the_heuristics(shape: ConvShape, memory: float) -> None:
    limit, speeds = int(memory * 2**30), Speeds(2e9, 2e9, 1e12)
    found, paper = divide(shape, limit, speeds, made_up), by_heuristics(shape, limit, speeds, made_up)
    assert found is not None
    assert paper is None or (found.seconds <= paper.seconds and paper.division.order == "outputs")
    assert vram(shape, found.footprint) <= limit


def test_heuristics_divide_maps_only_if_no_image_fits() -> None:
    shape, speeds = ConvShape(6, 4, 4, (8, 8, 8), (3, 3, 3)), SPEEDS["all three count"]
    one = follow(shape, Division(1, 6, 4, 4), 2**62, speeds, made_up)
    assert one is not None
    images = by_heuristics(shape, vram(shape, one.footprint), speeds, made_up)
    maps = by_heuristics(shape, vram(shape, one.footprint) - 1, speeds, made_up)
    assert images is not None
    assert maps is not None
    assert (images.division.maps_in, images.division.maps_out) == (4, 4)
    assert (maps.division.images, maps.division.planes) == (1, 6)
    assert (maps.division.maps_in, maps.division.maps_out) != (4, 4)
    assert [takes_direct(replace(shape, k=k)) for k in ((5, 5, 5), (3, 6, 3))] == [True, False]


def naive(divided: Divided, speeds: Speeds) -> tuple[float, int]:
    """Seconds and bytes uploaded: every sub-layer by itself, buffers by what they hold and when they were last used."""
    shape, d = divided.shape, divided.division
    chunks = [
        ((i, min(i + d.images, shape.batch)), (z, min(z + d.planes, shape.out[0])))
        for i in range(0, shape.batch, d.images)
        for z in range(0, shape.out[0], d.planes)
    ]
    ins = [(a, min(a + d.maps_in, shape.fin)) for a in range(0, shape.fin, d.maps_in)]
    outs = [(b, min(b + d.maps_out, shape.fout)) for b in range(0, shape.fout, d.maps_out)]
    up = computing = down = 0.0
    buffers: list[dict[str, object]] = [{"holds": None, "used": -2 + n, "free": 0.0, "there": 0.0} for n in range(2)]
    slots = dict.fromkeys(range(divided.slots), 0.0)
    nbytes, clock, complete = 0, 0, 0
    for chunk in chunks:
        (i, j), (p, q) = chunk
        order = (
            [(a, b, n) for n, a in enumerate(ins) for b in outs]
            if d.order == "inputs"
            else [(a, b, n) for m, b in enumerate(outs) for n, a in enumerate(reversed(ins) if m % 2 else ins)]
        )
        for a, b, added in order:
            clock += 1
            sub = divided.sublayer(j - i, q - p, a[1] - a[0], b[1] - b[0])
            buffer = next((each for each in buffers if each["holds"] == (chunk, a)), None)
            if buffer is None:
                buffer = min(buffers, key=lambda each: float(str(each["used"])))
                up = max(up, float(str(buffer["free"]))) + sub.in_bytes / speeds.upload
                nbytes += sub.in_bytes
                buffer.update(holds=(chunk, a), there=up)
            buffer["used"] = clock
            slot = outs.index(b) if d.order == "inputs" else complete % divided.slots
            begin = max(computing, float(str(buffer["there"])), slots[slot] if added == 0 else 0.0)
            sums = SUMMED * prod(sub.out_shape) / speeds.memory if added else 0.0
            computing = begin + made_up(sub).seconds + sub.out_bytes / speeds.memory + sums
            buffer["free"] = computing
            if added == len(ins) - 1:
                down = slots[slot] = max(down, computing) + sub.out_bytes / speeds.download
                complete += 1
    return down, nbytes


@pytest.mark.slow
@pytest.mark.parametrize("speeds", SPEEDS.values(), ids=SPEEDS)
@pytest.mark.parametrize("shape", [*SHAPES, ConvShape(31, 3, 4, (3, 3, 3), (2, 2, 2))], ids=str)
def test_seconds_equal_a_simulation_of_every_sublayer(shape: ConvShape, speeds: Speeds) -> None:
    for division in Space.whole(shape).divisions():
        divided = Divided(shape, division)
        expected, nbytes = naive(divided, speeds)
        assert seconds(divided, speeds, made_up) == pytest.approx(expected, rel=1e-8)
        assert divided.uploaded_bytes == nbytes


@pytest.mark.slow
@pytest.mark.parametrize("speeds", SPEEDS.values(), ids=SPEEDS)
@pytest.mark.parametrize("order", ORDERS)
def test_seconds_equal_a_simulation_with_repeated_passes(order: Order, speeds: Speeds) -> None:
    """There are sub-layers, passes, chunks and images, with and without smaller last parts."""
    for shape in (ConvShape(4, 13, 14, (16, 3, 3), (2, 2, 2)), ConvShape(1, 12, 9, (14, 2, 3), (3, 1, 2), "relu")):
        for chunk in ((1, 2), (1, 13), (1, shape.out[0]), (shape.batch, shape.out[0])):
            chunk = chunk[0], min(chunk[1], shape.out[0])
            for maps in ((1, 1), (1, 14), (13, 1), (2, 3), (3, 2), (4, 7), (6, 5), (7, 4)):
                maps_in, maps_out = min(maps[0], shape.fin), min(maps[1], shape.fout)
                divided = Divided(shape, Division(*chunk, maps_in, maps_out, order))
                expected, _ = naive(divided, speeds)
                assert seconds(divided, speeds, made_up) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(("order", "most"), [("outputs", 300), ("inputs", 1200)])
def test_repeated_passes_are_not_simulated(order: Order, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    divided, count = Divided(ConvShape(30, 50, 60, (101, 4, 4), (2, 2, 2)), Division(1, 3, 1, 1, order)), 0
    visit = timeline._Clocks._visit

    def counting(*arguments: Any) -> None:
        nonlocal count
        count += 1
        visit(*arguments)

    monkeypatch.setattr(timeline._Clocks, "_visit", counting)
    seconds(divided, SPEEDS["computing decides"], made_up)
    assert divided.count > 3_000_000
    assert count < most


def test_initial_wait_is_counted_once() -> None:
    clocks = timeline._Clocks(Divided(SHAPES[0], Division(1, 7, 5, 6)))
    clocks.upload = 5.0

    def step() -> None:
        clocks.compute = max(clocks.compute, clocks.upload) + 1

    clocks._repeat(step, 10)
    assert clocks.compute == 15


def test_single_sublayer_is_uploaded_computed_and_downloaded() -> None:
    shape, speeds = SHAPES[1], SPEEDS["all three count"]
    divided = Divided(shape, Division(3, 4, 4, 3))
    computing = made_up(shape).seconds + shape.out_bytes / speeds.memory  # its largest value is looked for
    expected = shape.in_bytes / speeds.upload + computing + shape.out_bytes / speeds.download
    assert seconds(divided, speeds, made_up) == pytest.approx(expected)
    assert (divided.x_buffers, divided.slots, divided.download_buffers, divided.count) == (1, 1, 1, 1)


def test_primitives_needing_the_largest_value_wait_for_it() -> None:
    shape, speeds = SHAPES[0], SPEEDS["all three count"]
    divided = Divided(shape, Division(1, 7, 5, 6))

    def looking(sub: ConvShape) -> Sublayer:
        found = made_up(sub)
        return replace(found, footprint=replace(found.footprint, reads_peak=True, raises_peak=True))

    spared = (shape.in_bytes - shape.out_bytes) / speeds.memory
    assert seconds(divided, speeds, looking) - seconds(divided, speeds, made_up) == pytest.approx(spared)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("groups", list(product((1, 2, 3, 4), (1, 2, 3, 5))), ids=str)
def test_every_input_group_meets_every_output_group_once(groups: tuple[int, int], order: Order) -> None:
    shape = ConvShape(1, groups[0], groups[1], (3, 3, 3), (1, 1, 1))
    seen = Divided(shape, Division(1, 3, 1, 1, order)).visits
    assert {(v.group_in, v.group_out) for v in seen} == set(product(range(groups[0]), range(groups[1])))
    assert len(seen) == prod(groups)
    for group in range(groups[1]):
        sums = [v for v in seen if v.group_out == group]
        assert [v.first for v in sums] == [True] + [False] * (len(sums) - 1)
        assert [v.last for v in sums] == [False] * (len(sums) - 1) + [True]
    uploads = [v.group_in for v in seen if v.uploads]
    again = 0 if order == "inputs" or groups[0] <= 2 else (groups[1] - 1) * (groups[0] - 2)
    assert len(uploads) == groups[0] + again


def test_needed_bytes_equal_the_bytes_alive_at_a_time() -> None:
    """Buffers at all times, scratch of the stage that has most, kernels of all groups; no input and no output."""
    shape = ConvShape(3, 5, 6, (9, 5, 4), (3, 1, 2), "relu", precision="fp16")
    divided = Divided(shape, Division(1, 4, 2, 4, "inputs"))
    footprint = divided.footprint(made_up)
    assert footprint is not None
    by_name = {scratch.name.removeprefix("host_ram."): scratch for scratch in footprint.scratch}
    assert (divided.x_bytes, divided.out_bytes) == (512, 512)  # 480 and 480 bytes
    nbytes = {name: by_name[name].nbytes for name in ("x", "out", "part", "totals", "peaks")}
    assert nbytes == {"x": 1024, "out": 1024, "part": 512, "totals": 2048, "peaks": 16}
    kernels = [made_up(divided.sublayer(1, 4, a, b)).footprint.resident for a in (2, 2, 1) for b in (4, 2)]
    assert footprint.resident == sum(kernels) + 4 * 6
    assert footprint.host == 6 * 8 + 2 * 512 + 2 * 512 + 16
    voxels = 6 * 5 * 4
    assert footprint.working(shape) == sum(nbytes.values()) + 4 * voxels * (4 + 4) + 4 * voxels * 4
    whole = Divided(shape, Division(3, 7, 5, 6)).footprint(made_up)
    assert whole is not None
    assert {s.name for s in whole.scratch} == {"host_ram.x", "host_ram.out", "host_ram.peaks", "spectra", "results"}


def test_sizes_of_parts_equal_those_by_hand() -> None:
    assert sizes(FEW) == list(range(1, FEW + 1))
    assert sizes(20) == [1, 2, 3, 4, 5, 7, 10, 20]
    assert sizes(20, 8) == [1, 2, 3, 4, 5, 7, 8, 10, 16, 20]
    assert sizes(8, 8) == list(range(1, 9))
    assert sizes(9, 8) == [1, 2, 3, 5, 8, 9]
    assert sizes(40, 8) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 14, 16, 20, 24, 40]
    assert Parts(20, 7).sizes == ((7, 2), (6, 1))
    assert Parts(20, 5).sizes == ((5, 4),)
    assert [Parts(20, 7).of(n) for n in range(3)] == [(0, 7), (7, 14), (14, 20)]


def test_softmax_keeps_all_maps_of_a_voxel_together() -> None:
    shape = ConvShape(2, 5, 6, (9, 5, 4), (3, 1, 2), "softmax")
    assert {(d.maps_in, d.maps_out) for d in Space.whole(shape).divisions()} == {(5, 6)}
    assert by_heuristics(shape, 2000, SPEEDS["all three count"], made_up) is None


def test_indivisible_layer_gets_a_reason() -> None:
    with pytest.raises(ValueError, match=r"maps_in=6.*parts of \(1, 7, 5, 6\) are at least 1 and at most all of them"):
        Divided(SHAPES[0], Division(1, 7, 6, 6))
    with pytest.raises(ValueError, match="takes 3 of 4 planes of 2 images: take 1 image"):
        Divided(SHAPES[1], Division(2, 3, 4, 3))


def test_unsupported_sublayers_are_not_chosen() -> None:
    shape, speeds = SHAPES[0], SPEEDS["all three count"]

    def picky(sub: ConvShape) -> Sublayer | None:
        return made_up(sub) if sub.fin == 2 or sub.fin == 1 else None

    found = divide(shape, 2**62, speeds, picky)
    assert found is not None
    assert found.division.maps_in in (1, 2)
    assert divide(shape, 2**62, speeds, lambda sub: None) is None
    with pytest.raises(ValueError, match="which its primitive does not compute"):
        seconds(Divided(shape, Division(1, 7, 5, 6)), speeds, picky)
