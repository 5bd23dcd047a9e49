"""Layers measured before a plan is made: what looks the fastest is run, and what was measured is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import GPU, WITH_GPU, Fake
from plans import MIXED as NETWORK

from znnpy.errors import DeviceError, NoPlanError, VramError
from znnpy.kernels.primitive import Footprint, Primitive, Scratch, Unit, Variant, Work
from znnpy.machine import Limits
from znnpy.planner.cost import GPU_STAGE_SECONDS, Rate, Rates, assumed_rates
from znnpy.planner.costs import FORMAT as COSTS_FORMAT
from znnpy.planner.costs import Costs, UnitSpeed
from znnpy.planner.search import make_plan
from znnpy.planner.sizes import SIZES
from znnpy.run import calibration
from znnpy.run.calibration import measured_rates
from znnpy.run.clocks import LONG_SECONDS
from znnpy.shapes import ConvShape, LayerShape

REFUSES = "gpu.conv.stubborn"
FACTORS = {"gpu.conv.praised": 9.0, "gpu.conv.plain": 1.5, "gpu.conv.counted": 2.5}  # times the estimate


@dataclass
class Card:
    """A device whose time goes as the layers that it runs say."""

    seconds: float = 0.0
    runs: list[tuple[str, LayerShape, Variant]] = field(default_factory=list)
    held: int = 0
    stream: object = None
    words: DeviceError = field(default_factory=lambda: DeviceError("cuDNN has no plan"))  # of REFUSES
    broken: bool = False  # by what it refused

    def allocate(self, nbytes: int, what: str) -> Any:
        assert what
        self.held += nbytes
        return np.empty(nbytes, np.uint8)

    def view(self, data: Any, shape: Sequence[int], dtype: Any) -> Any:
        return np.ndarray(shape, dtype, data)

    def put(self, host: Any, what: str) -> Any:
        assert what
        return host.copy()

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def copy_async(self, target: Any, source: Any, stream: object) -> None:
        target[...] = source

    def synchronize(self, stream: object = None) -> None:
        assert stream is None
        if self.broken:
            raise DeviceError("cudaDeviceSynchronize was refused: cudaErrorIllegalAddress")

    def elapsed(self, work: Callable[[], object], repeats: int = 1) -> list[float]:
        found = []
        for number in range(repeats):
            self.seconds = 0.0
            work()
            found.append(self.seconds * (1.3 if number == 0 else 1.0))
        return found


@dataclass(frozen=True, slots=True)
class Timed(Fake):
    """Takes FACTORS times what it is assumed to take."""

    tiles: tuple[tuple[int, int, int], ...] = ((1, 1, 1),)
    groups: tuple[int, ...] = (1,)
    same: bool = False  # whatever the group
    host: int = 0  # bytes that it locks in the process

    def variants(self, shape: LayerShape, machine: Any) -> Sequence[Variant]:
        return tuple(Variant.of(tile=tile, group=group) for tile in self.tiles for group in self.groups)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        return Footprint(
            scratch=(Scratch("room", int(self.scratch[0] * shape.out_bytes) if self.scratch else 64),),
            reads_peak=True,
            raises_peak=self.kind == "conv",
            host=self.host,
        )

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        slower = prod(variant.size("tile")) * (1 if self.same else 1 + 0.01 * variant.count("group"))
        return (Work("gpu_gemm_float", self.flops * slower * prod(shape.out_shape), 0.0),)

    def prepare(self, weights: Any, variant: Variant, crew: Any) -> Any:
        assert (weights is None) == (self.kind != "conv")
        return weights

    def bind(self, resident: Any, shape: LayerShape, variant: Variant, crew: Any) -> Any:
        return _Step(self, resident, shape, variant, crew)


@dataclass(frozen=True, slots=True)
class _Step:
    primitive: Timed
    weights: Any
    shape: LayerShape
    variant: Variant
    card: Card

    def run(self, x: Any, out: Any, scratch: Mapping[str, Any], before: Any = None, **peaks: int) -> None:
        if self.primitive.name == REFUSES:
            self.card.runs.append((self.primitive.name, self.shape, self.variant))
            raise self.card.words
        assert x.shape == self.shape.in_shape
        assert out.shape == self.shape.out_shape
        assert x.dtype == out.dtype == (np.float16 if self.shape.precision == "fp16" else np.float32)
        assert 0.5 < x.astype(np.float32).std() < 1.5
        assert len(np.unique(x)) > 0.2 * min(x.size, 1000), "numbers that differ"
        assert scratch["room"].nbytes
        assert peaks["x_peak"]
        assert bool(peaks["out_peak"]) == (self.primitive.kind == "conv")
        if isinstance(self.shape, ConvShape):
            assert self.weights.weight.shape == (self.shape.fout, self.shape.fin, *self.shape.k)
        self.card.seconds += FACTORS.get(self.primitive.name, 1.0) * own(self.primitive, self.shape, self.variant)
        self.card.runs.append((self.primitive.name, self.shape, self.variant))


def own(primitive: Timed, shape: LayerShape, variant: Variant) -> float:
    """Seconds as assumed, without what it takes to start its one stage."""
    return assumed_rates(WITH_GPU, 1, "gpu").seconds(primitive, shape, variant) - GPU_STAGE_SECONDS


PRAISED = Timed("gpu.conv.praised", "conv", flops=1e6, pools=True)
PLAIN = Timed("gpu.conv.plain", "conv", flops=3e6)
LAZY = Timed("gpu.conv.lazy", "conv", flops=9e6)
REST = tuple(Timed(f"gpu.{kind}.all", kind) for kind in ("pool", "maxfilter", "maxout"))
ON_CPU = Fake("cpu.conv.slow", "conv")
TABLE: tuple[Primitive, ...] = (ON_CPU, PRAISED, PLAIN, LAZY, *REST)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(calibration, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(calibration, "VOLUMES", ((1, (10, 8, 6, 4), LONG_SECONDS),))
    return tmp_path / "cache"


def rates_of(card: Card, table: Sequence[Primitive] = TABLE, **words: Any) -> Rates:
    settings: dict[str, Any] = {"vram_bytes": 2**30, **words}
    precision = settings.pop("precision", "tf32")
    return measured_rates(card, settings.pop("machine", WITH_GPU), NETWORK, precision, table=table, **settings)  # type: ignore[arg-type]


def measured(card: Card) -> list[str]:
    """Names of what ran, once each time it was measured."""
    names = [(name, str(shape)) for name, shape, _ in card.runs]
    return [name for i, (name, shape) in enumerate(names) if i == 0 or names[i - 1] != (name, shape)]


def test_what_looks_fastest_is_measured_until_it_is_the_fastest() -> None:
    """PRAISED is assumed three times as fast as PLAIN, and is six times as slow as that; nobody would take LAZY."""
    card = Card()
    rates = rates_of(card)
    names = measured(card)
    assert names.count("gpu.conv.praised") == 3, "two convolutions, and one that pools"
    assert names.count("gpu.conv.plain") == 2
    assert names.count("gpu.conv.lazy") == 0
    assert {name for name in names if "conv" not in name} == {p.name for p in REST}
    variant = PLAIN.variants(card.runs[0][1], WITH_GPU)[0]
    for n in (9, 40):
        shape = ConvShape(3, 1, 6, (n, n, n), (3, 2, 2), "relu", precision="tf32")
        for primitive in (PRAISED, PLAIN):
            assert rates.knows(primitive, shape, variant)
            assert rates.seconds(primitive, shape, variant) == pytest.approx(
                GPU_STAGE_SECONDS + FACTORS[primitive.name] * own(primitive, shape, variant), rel=0.1
            )
        assert not rates.knows(LAZY, shape, variant)


def test_rates_of_units_are_fitted_to_the_layers() -> None:
    """What carries planes, and a layer of another network, is told by them."""
    rates = rates_of(Card(), (PLAIN, *REST))
    assumed = assumed_rates(WITH_GPU, 1, "gpu")
    other = ConvShape(1, 7, 9, (30, 30, 30), (5, 5, 5), "none", precision="tf32")
    (variant,) = PLAIN.variants(other, WITH_GPU)
    assert not rates.knows(PLAIN, other, variant)
    assert rates.seconds(PLAIN, other, variant) == pytest.approx(1.5 * assumed.seconds(PLAIN, other, variant), rel=0.1)
    assert rates.of("gpu_gemm_float").flops < 0.9 * assumed.of("gpu_gemm_float").flops


def test_a_kernel_turned_to_another_axis_is_the_same_layer() -> None:
    rates = rates_of(Card())
    turned = ConvShape(3, 1, 6, (9, 9, 9), (2, 3, 2), "relu", precision="tf32")
    assert rates.knows(PLAIN, turned, Variant.of(tile=(1, 1, 1), group=1))
    for other in (
        replace(turned, precision="fp32"),
        replace(turned, fout=7),
        replace(turned, k=(3, 3, 2)),
        replace(turned, activation="none"),
    ):
        assert not rates.knows(PLAIN, other, Variant.of(tile=(1, 1, 1), group=1))


def test_measured_once_and_kept(folder: Path) -> None:
    first = rates_of(Card())
    card = Card()
    assert rates_of(card) == first
    assert card.runs == []
    assert len(list(folder.iterdir())) == 1
    half = Card()
    rates_of(half, precision="fp16")
    assert half.runs, "another precision is another layer"
    assert rates_of(Card()).measured.keys() > first.measured.keys()


def test_what_does_not_hold_here_is_measured_again(folder: Path) -> None:
    rates_of(Card())
    newer = [replace(PLAIN, version=2) if p is PLAIN else p for p in TABLE]
    card = Card()
    rates_of(card, newer)
    assert set(measured(card)) == {"gpu.conv.plain"}
    other = Card()
    rates_of(other, machine=replace(WITH_GPU, gpu=replace(GPU, driver=13010)))
    assert other.runs
    assert len(list(folder.iterdir())) == 2
    again = Card()
    rates_of(again)
    assert set(measured(again)) == {"gpu.conv.plain"}, "the file holds what the newer version needed"


@pytest.mark.parametrize("damage", ["cut", "zero", "facts", "not text"])
def test_a_damaged_file_is_written_anew(folder: Path, damage: str) -> None:
    first = rates_of(Card())
    (path,) = folder.iterdir()
    content = json.loads(path.read_text())
    if damage == "cut":
        path.write_text(path.read_text()[:-20])
    elif damage == "zero":
        content["measurements"][0]["seconds"] = 0.0
        path.write_text(json.dumps(content))
    elif damage == "facts":
        content["facts"]["gpu"] = "another"
        path.write_text(json.dumps(content))
    else:
        path.write_bytes(b"\x89\xff\x00")
    card = Card()
    assert rates_of(card) == first
    assert card.runs
    silent = Card()
    assert rates_of(silent) == first
    assert silent.runs == []


def test_a_cache_that_cannot_be_written(folder: Path) -> None:
    folder.write_text("no folder")
    first, second = Card(), Card()
    assert rates_of(first) == rates_of(second)
    assert first.runs == second.runs != []


def test_no_longer_than_it_may() -> None:
    few, none = Card(), Card()
    rates_of(few, seconds=1e-9)
    assert len(set(measured(few))) == 1, "the first one tells that there is no time left"
    rates = rates_of(none, vram_bytes=10)
    assert none.runs == []
    assert set(rates.measured) == {calibration_case(few)}


def calibration_case(card: Card) -> Any:
    from znnpy.planner.cost import case

    name, shape, variant = card.runs[0]
    return case(next(p for p in TABLE if p.name == name), shape, variant)


def test_long_layers_on_small_volumes() -> None:
    slow = replace(PLAIN, flops=1e12)
    card = Card()
    rates_of(card, (slow, *REST), seconds=1e9)
    sides = {max(shape.out) for name, shape, _ in card.runs if name == slow.name}
    assert sides == {4}
    others = {max(shape.in_shape[1:4]) for name, shape, _ in card.runs if name == "gpu.maxout.all"}
    assert others == {10}


def test_memory_of_the_process_is_not_locked_before_a_plan_promises_it() -> None:
    card = Card()
    rates_of(card, (replace(PRAISED, host=1), PLAIN, *REST))
    assert PLAIN.name in measured(card)
    assert PRAISED.name not in measured(card)


def test_variants_that_differ_in_how_much_they_do_at_a_time() -> None:
    """One of them tells of the others; where their work is the same, each is measured."""
    tiles = ((1, 1, 1), (1, 2, 1), (5, 5, 5))
    counted = Timed("gpu.conv.counted", "conv", flops=1e6, tiles=tiles, groups=(1, 8, 64))
    card = Card()
    rates = rates_of(card, (counted, *REST))
    one = [variant for name, shape, variant in card.runs if name == counted.name and shape.in_shape[4] == 1]
    assert {str(v) for v in one} == {"group=1 tile=1x1x1", "group=1 tile=1x2x1"}, "the first takes 2.5 times as long"
    shape = ConvShape(1, 1, 6, (99, 9, 9), (3, 2, 2), "relu", precision="tf32")
    for variant in counted.variants(shape, WITH_GPU):
        expected = GPU_STAGE_SECONDS + 2.5 * own(counted, shape, variant)
        assert rates.seconds(counted, shape, variant) == pytest.approx(expected, rel=1e-3)
    blind = Timed("gpu.conv.counted", "conv", version=2, flops=1e6, groups=(1, 8, 64), same=True)
    card = Card()
    rates_of(card, (blind, *REST))
    one = [variant for name, shape, variant in card.runs if name == blind.name and shape.in_shape[4] == 1]
    assert {v.count("group") for v in one} == {1, 8, 64}


def test_slabs_are_measured_where_another_tile_suits_them() -> None:
    """Thin steps of columns want flat tiles: what is measured on cubes alone would not tell of those."""

    @dataclass(frozen=True, slots=True)
    class Tiled(Timed):
        def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
            covered = prod(-(-n // tile) * tile for n, tile in zip(shape.out, variant.size("tile"), strict=True))
            return (Work("gpu_gemm_float", 1e6 * covered, 0.0),)

    tiled = Tiled("gpu.conv.tiled", "conv", tiles=((5, 5, 5), (2, 10, 10)))
    card = Card()
    rates = rates_of(card, (tiled, *REST))
    seen = {(shape.out, str(variant)) for name, shape, variant in card.runs if name == tiled.name}
    assert seen == {((10, 10, 10), "group=1 tile=5x5x5"), ((2, 20, 20), "group=1 tile=2x10x10")}
    shape = ConvShape(1, 1, 6, (9, 9, 9), (3, 2, 2), "relu", precision="tf32")
    assert all(rates.knows(tiled, shape, variant) for variant in tiled.variants(shape, WITH_GPU))


def test_every_kind_of_units_that_looks_nearly_as_fast_is_measured() -> None:
    """Rates of units are off by factors of their own: what looks second best may be the best by far."""

    @dataclass(frozen=True, slots=True)
    class Kinds(Timed):
        def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
            unit: Unit = ("gpu_fft16", "gpu_fft24", "gpu_fft32")[variant.count("group")]
            slower = (1.0, 1.3, 9.0)[variant.count("group")] * prod(variant.size("tile"))
            rate = assumed_rates(WITH_GPU, 1, "gpu").of(unit).flops
            return (Work(unit, 1e-6 * slower * rate * prod(shape.out_shape), 0.0),)

    kinds = Kinds("gpu.conv.plain", "conv", tiles=((1, 1, 1), (1, 1, 2)), groups=(0, 1, 2))
    card = Card()
    rates = rates_of(card, (kinds, *REST))
    cubes = [str(variant) for name, shape, variant in card.runs if name == kinds.name and shape.in_shape[4] == 1]
    assert set(cubes) == {"group=0 tile=1x1x1", "group=1 tile=1x1x1"}, "the best of each kind, none that is far behind"
    before = len(card.runs)
    assert rates_of(card, (kinds, *REST)) == rates
    assert len(card.runs) == before


def test_large_volumes_and_small_ones_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "VOLUMES", ((1, (10, 8), LONG_SECONDS), (8, (4, 2), LONG_SECONDS)))
    card = Card()
    rates = rates_of(card, (PLAIN, *REST), seconds=1e9)
    cubes = {shape.out for name, shape, _ in card.runs if name == PLAIN.name and shape.in_shape[4] == 1}
    assert {(10, 10, 10), (4, 4, 4)} <= cubes
    before = len(card.runs)
    assert rates_of(card, (PLAIN, *REST), seconds=1e9) == rates, "both are kept"
    assert len(card.runs) == before


def test_likeness_of_what_was_not_measured() -> None:
    """The same layer counts before others, equal parameters before unequal ones."""
    shape = ConvShape(1, 4, 4, (20, 20, 20), (3, 3, 3), precision="tf32")
    many = Timed("gpu.conv.many", "conv", flops=1e6, tiles=((1, 1, 1), (2, 2, 2)), groups=(1, 8))
    rates = Rates({"gpu_gemm_float": Rate(1e12, 1e12)}, stage_seconds=0.0)
    small, large = (Variant.of(tile=(n, n, n), group=1) for n in (1, 2))

    def factor(of: Rates, shape: ConvShape, variant: Variant) -> float:
        return of.seconds(many, shape, variant) / rates.seconds(many, shape, variant)

    taught = rates.learnt(many, shape, small, 3 * rates.seconds(many, shape, small))
    taught = taught.learnt(many, shape, large, 12 * rates.seconds(many, shape, large))
    assert factor(taught, shape, small) == pytest.approx(3)
    assert factor(taught, shape, Variant.of(tile=(1, 1, 1), group=8)) == pytest.approx(3, rel=0.05)
    both = factor(taught, shape, Variant.of(tile=(3, 3, 3), group=1))
    assert 6 < both < 12, "of both with group=1, and the larger the slower"
    assert factor(taught, shape, Variant.of(tile=(1, 2, 1), group=8)) < 5, "like the first along two axes"
    assert factor(taught, shape, Variant.of(tile=(2, 2, 1), group=1)) > 9, "like the second along two"
    wide = replace(shape, fin=8)
    assert factor(taught, wide, large) == pytest.approx(12)
    assert factor(taught, replace(wide, precision="fp16"), large) == 1
    taught = taught.learnt(many, wide, large, 50 * rates.seconds(many, wide, large))
    assert factor(taught, wide, small) == pytest.approx(50), (
        "the layer itself, however it was run, before another layer"
    )


@pytest.mark.parametrize("groups", [1, 20])
def test_once_all_was_tried_nothing_is_measured_anew(groups: int) -> None:
    """Though there were more variants than are tried, and what is learnt of a slab tells of a cube too."""
    many = Timed("gpu.conv.counted", "conv", flops=1e6, groups=tuple(range(groups)), same=True)
    table = (PRAISED, PLAIN, many, *REST)
    first, second, third = Card(), Card(), Card()
    rates = rates_of(first, table)
    assert rates_of(second, table) == rates
    assert second.runs == []
    rates_of(third, table, vram_bytes=2**31)
    assert bool(third.runs) == (groups > 1), "more may fit into more memory: it goes on"


def test_what_is_known_beside_the_file_may_make_another_look_the_fastest() -> None:
    """Then it goes on, though all was measured that should be by what was known before."""
    rates_of(Card())
    rate = assumed_rates(WITH_GPU, 1, "gpu").of("gpu_gemm_float")
    stored = Costs(
        format=COSTS_FORMAT,
        znnpy_version="0",
        device="gpu",
        threads=1,
        machine=WITH_GPU,
        primitives={},
        units={"gpu_gemm_float": UnitSpeed(rate.flops, rate.nbytes, 9)},
        by_size={f"{LAZY.name} tf32": (0.01,) * len(SIZES)},
        stage_seconds=GPU_STAGE_SECONDS,
        layers=(),
    )
    again = Card()
    rates_of(again, stored=stored)
    assert "gpu.conv.lazy" in measured(again)
    third = Card()
    rates_of(third, stored=Costs.from_json(stored.to_json()))
    assert third.runs == []


def test_what_no_time_was_left_for_is_measured_the_next_time() -> None:
    first, second = Card(), Card()
    rates = rates_of(first, seconds=1e-9)
    more = rates_of(second)
    assert second.runs
    assert more.measured.keys() > rates.measured.keys()


STUBBORN = Timed(REFUSES, "conv", flops=1e3, groups=(1, 2, 3), pools=True)
FULL = Limits(ram_bytes=2**34, threads=2, vram_bytes=2**34)


def planned(rates: Rates, table: Sequence[Primitive]) -> set[str]:
    """Names of what a plan with these rates takes for convolutions."""
    plan = make_plan(
        NETWORK, (20, 21, 22), WITH_GPU, FULL, table=tuple(table), rates=rates, baseline=0, device="gpu",
        precision="tf32",
    )  # fmt: skip
    return {choice.primitive for choice in plan.choices if isinstance(choice.shape, ConvShape)}


def test_what_the_gpu_refuses_is_never_planned_nor_tried_again(folder: Path) -> None:
    table = (STUBBORN, *TABLE)
    assert planned(assumed_rates(WITH_GPU, 1, "gpu"), table) == {REFUSES}
    card = Card()
    rates = rates_of(card, table)
    assert measured(card).count(REFUSES) == 3, "once for each convolution, and once with a pooling, of all variants"
    assert set(rates.refused.values()) == {"cuDNN has no plan"}
    assert REFUSES not in planned(rates, table)
    assert {"gpu.conv.plain", "gpu.conv.praised"} & set(measured(card)), "the others are measured"
    (path,) = folder.iterdir()
    kept = json.loads(path.read_text())["refusals"]
    assert {(no["primitive"], no["reason"]) for no in kept} == {(REFUSES, "cuDNN has no plan")}
    again = Card()
    assert rates_of(again, table) == rates
    assert again.runs == []
    half = Card()
    rates_of(half, table, precision="fp16")
    assert REFUSES in measured(half), "another precision is another layer"
    newer = Card()
    rates_of(newer, (replace(STUBBORN, version=2), *TABLE))
    assert set(measured(newer)) == {REFUSES}


def test_without_a_way_that_is_not_refused_there_is_no_plan() -> None:
    table = (STUBBORN, *REST)
    with pytest.raises(NoPlanError, match=r"no primitive runs layer 0 .*: gpu\.conv\.stubborn: cuDNN has no plan; "):
        planned(rates_of(Card(), table), table)


def test_memory_that_was_short_once_is_asked_for_again(folder: Path) -> None:
    table = (STUBBORN, *TABLE)
    card = Card(words=VramError("cudaMalloc of 9 bytes was refused"))
    rates = rates_of(card, table)
    assert set(rates.refused.values()) == {"cudaMalloc of 9 bytes was refused"}
    assert REFUSES not in planned(rates, table)
    (path,) = folder.iterdir()
    assert json.loads(path.read_text())["refusals"] == []
    again = Card()
    rates_of(again, table)
    assert set(measured(again)) == {REFUSES}


def test_a_gpu_that_runs_nothing_any_more_is_no_refusal_to_keep(folder: Path) -> None:
    with pytest.raises(DeviceError, match="cudaErrorIllegalAddress"):
        rates_of(Card(broken=True), (STUBBORN, *TABLE))
    assert not folder.exists()


def test_long_words_of_a_refusal_are_kept_in_part() -> None:
    card = Card(words=DeviceError("no " * 1000))
    rates = rates_of(card, (STUBBORN, *TABLE))
    assert rates_of(Card(), (STUBBORN, *TABLE)) == rates
    assert {len(reason) for reason in rates.refused.values()} == {calibration.MOST_WORDS}
