"""Plans of two devices whose layers are timed first, each where it runs, by clocks that go as they are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.cli import entry_of
from tests.support.emulated_gpus import EmulatedGpus
from tests.support.emulator import EMULATED_GPU
from tests.support.simulated_timing import time_all
from znnpy import planning
from znnpy.costs.model import Rates, assumed_rates
from znnpy.costs.size_trend import SIZES
from znnpy.errors import DeviceError
from znnpy.kernels.contract import Primitive, Variant
from znnpy.kernels.table import IN_HOST_RAM, find
from znnpy.layer_shapes import LayerShape
from znnpy.machine import Machine, this_machine
from znnpy.measure import rigor
from znnpy.measure.budget import ON_GPU, Placement, Progress, bytes_of, lacking, layers_of
from znnpy.measure.rigor import RigorMeasurement
from znnpy.network import Conv
from znnpy.option_values import AskedMode, DeviceKind
from znnpy.planner import modes
from znnpy.planner.layer_options import CARRY_TRAFFIC, JOIN_TRAFFIC
from znnpy.planner.request import KnownRates
from znnpy.planner.run_plan import RunPlan
from znnpy.planner.tilings import carry_bytes
from znnpy.run import target
from znnpy.run.asked import AskedDevices
from znnpy.run.session import ALL
from znnpy.run.target import OpenTarget, Targets
from znnpy.shapes import ConvShape

if TYPE_CHECKING:
    from tests.support.cli import Place

pytestmark = pytest.mark.slow

THREADS = 3  # of which one feeds a GPU where the CPU computes side by side with it
(HOST_RAM,) = IN_HOST_RAM
THREADS_OF_MODE = {"gpu": 3, "gpu-host": 3, "cpu-to-gpu": 2, "side-by-side": 2}
TWO_DEVICES = ["gpu-host", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("cpu-to-gpu", "side-by-side"))]


def gpu_rates(*asked: object, **words: object) -> Rates:
    """Return rates of a GPU that is nearly as slow as the CPU, behind a link as fast as ever."""
    rates = assumed_rates(replace(this_machine(), gpu=EMULATED_GPU), 1, "gpu")
    return rates.scaled(1e-4, 1e-4).replaced(gpu_upload=rates.of("gpu_upload"), gpu_link=rates.of("gpu_link"))


def cpu_rates(*asked: object) -> Rates:
    """Stages begin at once: layers are small here."""
    return replace(assumed_rates(this_machine(), THREADS), stage_seconds=1e-9)


@dataclass
class Clocks:
    """A machine whose primitives take so many times their estimate; so does the wall's clock.

    factors  by name; "": of all others
    """

    factors: dict[str, float]
    refuses: str = ""
    now: float = 100.0
    runs: list[tuple[Placement, str, LayerShape, Variant]] = field(default_factory=list)

    def rates(self, where: Placement) -> Rates:
        """Return the true rates."""
        base = gpu_rates() if where.device == "gpu" else cpu_rates()
        names = {f"{p.name} fp32": self.factors.get(p.name, self.factors.get("", 1.0)) for p in ALL}
        rates = replace(base, by_size={name: (factor,) * len(SIZES) for name, factor in names.items()})
        return rates.slowed(THREADS / where.threads) if where.device == "cpu" else rates

    @contextmanager
    def at(self, where: Placement, device: Any, machine: Machine, seconds: float) -> Iterator[Any]:
        """Stand in for `clock_of`."""
        assert (device is None) == (machine.gpu is None)
        assert seconds > 0
        clocks = self

        class Clock:
            def seconds(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> float:
                clocks.runs.append((where, primitive.name, shape, variant))
                if primitive.name == clocks.refuses:
                    raise DeviceError("not today")
                took = clocks.rates(where).seconds(primitive, shape, variant)
                clocks.now += 4 * took
                begun = len(primitive.work(shape, variant)) * gpu_rates().stage_seconds
                return took - begun if where == ON_GPU else took  # a GPU's clock begins when it does

        yield Clock()

    @property
    def names(self) -> dict[Placement, set[str]]:
        return {where: {name for at, name, *_ in self.runs if at == where} for where, *_ in self.runs}


@pytest.fixture(autouse=True)
def _emulated(emulated_gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated_gpus.use(rates=gpu_rates)
    monkeypatch.setattr(target, "stored_cpu_rates", cpu_rates)


@pytest.fixture
def go(place: Place, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunPlan]:
    """Return the plan of a mode, with layers timed by these clocks; None: as estimated."""

    def planned(mode: AskedMode, clocks: Clocks | None, **words: Any) -> RunPlan:
        if clocks is not None:
            monkeypatch.setattr(rigor, "timer_on", clocks.at)
            words = {"rigor": "measure", "time_limit": 1e9} | words
        given: dict[str, Any] = {"volume": place.volume, "threads": THREADS, "cover": "patches", "precision": "fp32"}
        given |= {"patch": (2, 4, 4)} if mode == "side-by-side" else {}
        return planning.plan(place.folder / "net.yaml", mode=mode, **{**given, **words})

    return planned


def check_as_told(made: RunPlan, clocks: Clocks) -> None:
    """Every layer of a plan takes what the clocks say, and was timed where it runs, or is like one that was."""
    for where, chosen in layers_of(made):
        primitive = find(chosen.primitive, ALL)
        told = clocks.rates(where).seconds(primitive, chosen.shape, chosen.variant)
        assert chosen.seconds == pytest.approx(told, rel=1e-9), f"{chosen.primitive} {where}"
        assert chosen.measured
        assert any(run[0] == where and run[1] == chosen.primitive for run in clocks.runs)


@pytest.mark.parametrize("mode", ["gpu", "gpu-host", "cpu-to-gpu", "side-by-side"])
def test_layers_take_what_the_clock_of_their_device_says(go: Callable[..., RunPlan], mode: str) -> None:
    told: list[Progress] = []
    clocks = Clocks({"": 1.7, "cpu.conv.first": 0.8})
    made = go(mode, clocks, tell_progress=told.append)
    assert (made.mode, made.rigor) == (mode, "measure")
    check_as_told(made, clocks)
    assert {where.threads for where, *_ in clocks.runs if where.device == "cpu"} <= {THREADS_OF_MODE[mode]}
    assert "cpu" in {where.device for where, *_ in clocks.runs} or mode == "gpu"
    assert len(clocks.runs) == len(set(clocks.runs)), "each is timed once"
    doing = " ".join(progress.doing for progress in told)
    assert all(f"{name} on conv" in doing for _, name, shape, _ in clocks.runs if shape.kind == "conv")


@pytest.mark.parametrize("mode", TWO_DEVICES)
def test_cpu_layers_make_way_where_they_are_slower_than_estimated(go: Callable[..., RunPlan], mode: str) -> None:
    estimated = go(mode, None)
    of_cpu = [chosen for where, chosen in layers_of(estimated) if where.device == "cpu" and chosen.shape.kind == "conv"]
    slow = of_cpu[0].primitive
    clocks = Clocks({slow: 40.0})
    made = go(mode, clocks)
    check_as_told(made, clocks)
    assert slow in clocks.names[Placement("cpu", THREADS_OF_MODE[mode])]
    assert slow not in {chosen.primitive for _, chosen in layers_of(made)}


@pytest.mark.parametrize("factor", [0.6, 5.0])
def test_offloaded_layers_of_a_gpu_take_what_they_took_as_a_whole(go: Callable[..., RunPlan], factor: float) -> None:
    """The largest of their sub-layers is timed first."""
    clocks = Clocks({HOST_RAM.name: factor})
    made = go("gpu-host", clocks, only=HOST_RAM.name)
    check_as_told(made, clocks)
    offloaded = [chosen for chosen in made.choices[: made.main.offloaded] if chosen.primitive == HOST_RAM.name]
    assert offloaded
    for chosen in offloaded:
        inner, largest, own = HOST_RAM.largest(chosen.shape, chosen.variant)
        first = clocks.runs.index((ON_GPU, inner.name, largest, own))
        assert first < clocks.runs.index((Placement("gpu", 3), HOST_RAM.name, chosen.shape, chosen.variant))


@pytest.mark.long
def test_what_columns_carry_comes_on_top_of_what_was_measured(place: Place, go: Callable[..., RunPlan]) -> None:
    thick = Conv((3, 3, 3), 4, "relu")
    place.write_network(layers=[entry_of(layer) for layer in (thick, thick, thick)])
    clocks = Clocks({HOST_RAM.name: 2.0})
    made = go("gpu-host", clocks, only=HOST_RAM.name, cover="columns")
    assert made.main.streams
    offloaded = [chosen for chosen in made.choices[: made.main.offloaded] if chosen.primitive == HOST_RAM.name]
    assert offloaded
    for chosen in offloaded:
        told = clocks.rates(Placement("gpu", 3)).seconds(HOST_RAM, chosen.shape, chosen.variant)
        carried = (CARRY_TRAFFIC + JOIN_TRAFFIC) * carry_bytes(chosen.shape) / cpu_rates().copy_bandwidth
        assert chosen.seconds == pytest.approx(told + carried, rel=1e-9)
        assert chosen.seconds > 1.0001 * told


def test_offloaded_layers_that_a_gpu_refuses_go_to_the_cpu(go: Callable[..., RunPlan]) -> None:
    assert HOST_RAM.name in {c.primitive for c in go("gpu-host", None, only=HOST_RAM.name).choices}
    clocks = Clocks({}, refuses=HOST_RAM.name)
    made = go("gpu-host", clocks, only=HOST_RAM.name)
    assert HOST_RAM.name not in {chosen.primitive for chosen in made.choices}
    check_as_told(made, clocks)


@pytest.mark.long
def test_auto_takes_a_mode_by_what_was_measured(
    place: Place, go: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write_small_volume()  # few patches to choose from
    monkeypatch.setattr(modes, "THRESHOLDS", modes.Thresholds(long_seconds=0.0))
    words = {"device": "gpu"}
    assert go("auto", None, **words).mode != "gpu"
    slow = {p.name: 1000.0 for p in ALL if p.name.startswith("cpu.") or p is HOST_RAM}
    clocks = Clocks(slow)
    made = go("auto", clocks, **words)
    assert made.mode == "gpu", "the CPU was much slower than estimated"
    assert any(where.device == "cpu" for where in clocks.names)
    assert all(chosen.measured for chosen in made.choices)


@pytest.mark.parametrize("mode", TWO_DEVICES)
def test_all_devices_share_the_time(go: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    whole, clocks, told = Clocks({}), Clocks({}), list[str]()
    going = [whole]
    monkeypatch.setattr(planning, "RigorMeasurement", partial(RigorMeasurement, now=lambda: going[0].now))
    go(mode, whole)
    going[0], limit = clocks, 0.5 * (whole.now - 100.0)
    go(mode, clocks, time_limit=limit, tell=told.append)
    assert 0 < len(clocks.runs) < len(whole.runs)
    assert clocks.now - 100.0 <= limit
    assert any(f"was up after {len(clocks.runs)} layers were measured" in sentence for sentence in told)


def test_layers_that_do_not_fit_a_memory_are_told(go: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenTarget, "free_bytes_within", lambda self, limits: 1000 if self.device == "cpu" else 2**30)
    clocks, told = Clocks({}), list[str]()
    made = go("gpu-host", clocks, only=HOST_RAM.name, tell=told.append)
    assert set(clocks.names) == {ON_GPU}
    (sentence,) = (sentence for sentence in told if "were not measured" in sentence)
    assert sentence.startswith("layers that one image of needs more than the 1000 B of RAM that are free for them, ")
    assert not all(chosen.measured for chosen in made.choices)


def test_tensors_of_the_host_count_in_its_memory() -> None:
    shape = ConvShape(1, 4, 5, (9, 10, 11), (3, 3, 3), "relu")
    machine = replace(this_machine(), gpu=EMULATED_GPU)
    variant = HOST_RAM.variants(shape, machine)[0]
    footprint = HOST_RAM.footprint(shape, variant, 2)
    host = shape.in_bytes + shape.out_bytes + footprint.host
    device = footprint.resident + sum(scratch.nbytes for scratch in footprint.scratch) + footprint.allowance
    assert host + device == bytes_of(HOST_RAM, shape, variant, 2)
    there = Placement("gpu", 2)
    for missing in (0, 1):
        assert lacking(there, HOST_RAM, shape, variant, {"cpu": host - missing, "gpu": device}) == (
            ("cpu", host) if missing else None
        )
        assert lacking(there, HOST_RAM, shape, variant, {"cpu": host, "gpu": device - missing}) == (
            ("gpu", device) if missing else None
        )


@pytest.mark.parametrize("mode", ["cpu", "gpu", "gpu-host", "cpu-to-gpu", "side-by-side"])
def test_layers_of_a_plan_that_was_made_elsewhere(go: Callable[..., RunPlan], mode: str) -> None:
    """Once they are known nothing is timed."""
    words = {"only": HOST_RAM.name} if mode == "gpu-host" else {"precision": None} if mode == "cpu" else {}
    made, clocks = go(mode, None, **words), Clocks({"": 3.0})
    known: KnownRates = {"gpu": gpu_rates(), "cpu": cpu_rates()}

    measurement = RigorMeasurement(
        clock=lambda target, where, seconds: clocks.at(where, target.gpu, target.machine, seconds)
    )
    with Targets(AskedDevices(made.device)) as targets:
        opened = targets.first()
        learnt = time_all(measurement._refiner(opened, made.limits, inf, known), made)
        runs = len(clocks.runs)
        again = time_all(measurement._refiner(opened, made.limits, inf, learnt), made)
    assert 0 < runs == len(clocks.runs)
    assert again == learnt
    for where, chosen in layers_of(made):
        device: DeviceKind = chosen.device
        rates = learnt[device]
        if device == "cpu":
            rates = rates.slowed(THREADS / where.threads)
        primitive = find(chosen.primitive, ALL)
        told = clocks.rates(where).seconds(primitive, chosen.shape, chosen.variant)
        assert rates.seconds(primitive, chosen.shape, chosen.variant) == pytest.approx(told, rel=1e-9)
