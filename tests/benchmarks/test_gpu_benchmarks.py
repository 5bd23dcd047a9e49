"""The benchmarks for GPUs run, once and tiny, on the emulator, and what they derive from measurements is right."""

from __future__ import annotations

import argparse
import importlib
import json
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from znnpy.formats.weights import random_weights
from znnpy.kernels.gpu import cudnn_plans
from znnpy.kernels.gpu.conv_cudnn import ConvCudnn
from znnpy.kernels.gpu.device import Device
from znnpy.kernels.primitive import Work
from znnpy.kernels.reference import dense_by_fragments
from znnpy.kernels.table import of_kind
from znnpy.machine import this_machine
from znnpy.planner.cost_model import assumed_rates
from znnpy.planner.plan import device_of
from znnpy.run import devices
from znnpy.shapes import ConvShape, PoolShape

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from znnpy.network import Network
    from znnpy.run.pipeline import Event
    from znnpy.shapes import Vec3

TINY = """\
name: tiny
input_channels: 2
layers:
- {type: conv, kernel: [1, 3, 2], out: 6, activation: relu}
- {type: pool, window: [2, 2, 1]}
- {type: conv, kernel: [3, 2, 3], out: 3, activation: tanh}
"""  # patches are multiples of 2x2x1
MIB = 2**20


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


def options(imported: Callable[[str], Any], *words: str | Path | float) -> argparse.Namespace:
    given: argparse.Namespace = imported("layers_gpu").parsed(["--quick", "--rounds", "2", *map(str, words)])
    return given


def test_layers(imported: Callable[[str], Any], device: Any, tmp_path: Path) -> None:
    layers, out = imported("layers_gpu"), tmp_path / "layers.json"
    machine = replace(this_machine(), gpu=device.gpu)
    words = ("--precisions", "fp16")
    layers.benchmark(device, machine, options(imported, "--no-torch", "--variants", 1, *words, "--out", out))
    found = json.loads(out.read_text())
    shapes: tuple[ConvShape | PoolShape, ...] = (
        ConvShape(2, 4, 5, (9, 10, 11), (3, 2, 3), "relu"),
        ConvShape(2, 4, 5, (9, 10, 11), (3, 2, 3), "relu", (2, 2, 2)),
        PoolShape(1, 4, (7, 9, 7), (2, 2, 2)),
    )
    for shape in shapes:
        asked = replace(shape, precision="fp16")
        applicable = {p.name for p in of_kind(shape.kind) if p.why_not(asked, machine) is None}
        rows = {row["name"]: row for row in found["rows"] if row["shape"] == str(asked)}
        assert set(rows) == {name for name in applicable if device_of(name) == "gpu"}
        for row in rows.values():
            assert len(row["seconds"]) == 2
            assert row["error"] < 5e-3
            read = shape.in_shape if isinstance(shape, PoolShape) else shape.out_shape
            assert row["ns"] == pytest.approx(1e9 * np.median(row["seconds"]) / prod(read[:4]))
            assert row["shares"]["of_memory"] > 0
    assert found["void"] == found["left_out"] == []
    assert {"gpu", "processor", "command"} <= found["header"].keys()
    with Image.open(out.with_suffix(".png")) as image:
        assert np.asarray(image.convert("L")).min() < 60


@pytest.mark.torch
def test_layers_beside_pytorch(imported: Callable[[str], Any], device: Any, tmp_path: Path) -> None:
    """What takes too long runs on a smaller volume, and says so; the best of each side is compared."""
    layers, out = imported("layers_gpu"), tmp_path / "layers.json"
    words = ("--only", "gpu.conv.fft", "--precisions", "fp32", "fp16", "--slow-seconds", 1e-12, "--out", out)
    layers.benchmark(device, replace(this_machine(), gpu=device.gpu), options(imported, *words))
    found = json.loads(out.read_text())
    for pooled in (False, True):
        rows = [row for row in found["rows"] if row["shape"].startswith("conv") and (" p2" in row["shape"]) == pooled]
        peers = [row for row in rows if row["name"].startswith("PyTorch")]
        assert [row["precision"] for row in peers] == ["fp32", "fp32", "fp16", "bf16"]
        assert all(row["is_smaller"] and row["measured"] == ("9x8x9" if pooled else "9x9x10") for row in rows)
        if not pooled:
            exact, half = (case for case in found["summary"] if case["shape"] in {row["shape"] for row in rows})
            assert exact["times_cudnn"] == pytest.approx(min(row["ns"] for row in peers[:2]) / exact["own_ns"])
            assert half["is_slower_than_torch"] == (half["own_ns"] > min(row["ns"] for row in peers[2:]))


@pytest.mark.parametrize("wrong", [1.01, float("nan")])
def test_a_wrong_layer_is_void(imported: Callable[[str], Any], device: Any, wrong: float) -> None:
    entries, layers = imported("layer_entries_gpu"), imported("layers_gpu")
    case = imported("layer_cases_gpu").QUICK[0]
    given = entries.random_input(case.shape, device)
    exact = {at: entries.exact(given, at, case.shape.out) for at in entries.corners(case.shape.out)}
    assert len(exact) == 3
    clock = imported("gpu_card").WallClock()

    def crop(corner: Any, factor: float = 1.0) -> Any:
        return np.asarray(exact[corner] * factor, np.float32)

    right = entries.Entry("right", "fp32", "", case.shape, given, lambda: None, crop, clock)
    bad = replace(right, name="bad", crop=lambda corner: crop(corner, wrong if corner != (0, 0, 0) else 1.0))
    bench = layers.Bench(device, replace(this_machine(), gpu=device.gpu), options(imported, "--no-torch"))
    assert bench._error(right) < 1e-6
    assert bench._error(bad) is None
    assert len(bench.void) == 1
    assert bench.void[0].startswith("bad fp32")


def test_time_is_up(
    imported: Callable[[str], Any], device: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "layers.json"
    given = options(imported, "--no-torch", "--minutes", 0, "--precisions", "fp32", "--out", out)
    imported("layers_gpu").benchmark(device, replace(this_machine(), gpu=device.gpu), given)
    assert "no time left for conv 2x4->5" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert found["rows"] == []
    assert found["left_out"] == [str(case.shape) for case in imported("layer_cases_gpu").QUICK]


def test_what_a_killed_run_leaves_names_the_cases_that_are_missing(
    imported: Callable[[str], Any], device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, out = imported("layers_gpu"), tmp_path / "layers.json"
    given = options(imported, "--no-torch", "--only", "gpu.conv.fft", "--precisions", "fp16", "fp32", "--out", out)
    measure, asked = layers.Bench._measure, list[str]()

    def killed(bench: Any, case: Any, of: Any) -> Any:
        asked.append(str(of.shape))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return measure(bench, case, of)

    monkeypatch.setattr(layers.Bench, "_measure", killed)
    with pytest.raises(KeyboardInterrupt):
        layers.benchmark(device, replace(this_machine(), gpu=device.gpu), given)
    found = json.loads(out.read_text())
    every = [str(replace(case.shape, precision=how)) for case, how in layers.chosen(given)]
    assert {row["shape"] for row in found["rows"]} == set(every[:2])
    assert found["left_out"] == every[2:]


def test_shares_of_limits(imported: Callable[[str], Any]) -> None:
    """By hand: 2 s of bytes and 1 s of operations, then 1 s and 3 s, in 10 s."""
    work = [Work("gpu_fft16", 50.0, 200.0), Work("gpu_half_product", 600.0, 100.0)]
    found = imported("gpu_card").shares(work, 10.0, 100.0, {"fp32": 50.0, "fp16": 200.0})
    assert found == {"of_memory": 0.3, "of_arithmetic": 0.4, "of_both": 0.5}
    assert imported("gpu_card").shares(work, 10.0, 100.0, {}) == {"of_memory": 0.3}


def test_every_unit_of_a_gpu_has_a_limit(imported: Callable[[str], Any]) -> None:
    from znnpy.planner.cost_model import GPU_RATES

    assert set(imported("gpu_card").ARITHMETIC) == set(GPU_RATES)


def test_steady_rate(imported: Callable[[str], Any]) -> None:
    """The first steps and the end do not count: half of 1000 voxels' work between seconds 10 and 12."""
    from znnpy.run.pipeline import Event

    def event(steps: int, work: float, seconds: float) -> Event:
        return Event(0, 1, 0, 1000, seconds, {}, 0, steps, 5, work)

    marks = [(0, 0.0, 0.0), (1, 0.1, 9.0), (2, 0.3, 10.0), (3, 0.6, 11.0), (4, 0.8, 12.0), (5, 1.0, 19.0)]
    assert imported("contestants_gpu").steady_rate([event(*mark) for mark in marks]) == pytest.approx(250)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 4, 5), (12, 2, 20)])
@pytest.mark.parametrize("lo", [(0, 0, 0), (1, 2, 3), (-9, -3, 2), (-2, 5, 6), (9, -9, 3)])
def test_outside_of_the_volume_its_nearest_voxels_go_on(imported: Callable[[str], Any], lo: Vec3, shape: Vec3) -> None:
    voxels = np.arange(5 * 6 * 7, dtype=np.uint8).reshape(1, 5, 6, 7)
    out = np.full((1, *shape), 255, np.uint8)
    imported("contestants_gpu").Held(voxels).read(lo, out)
    z, y, x = (np.clip(np.arange(at, at + n), 0, size - 1) for at, n, size in zip(lo, shape, (5, 6, 7), strict=True))
    assert np.array_equal(out, voxels[:, z[:, None, None], y[:, None], x])


@pytest.mark.parametrize("name", ["n337", "n537", "n726", "n926"])
def test_patches_of_pytorch(imported: Callable[[str], Any], name: str) -> None:
    """The largest whose tensors have no more than 2^31 values, then half the volume each time."""
    network: Network = imported("contestants_gpu").random_network(name)
    sides, period = imported("networks_gpu").sides(name), max(network.period)

    def most(side: int) -> int:
        return max(prod(shape.out_shape) for shape in network.layer_shapes((side,) * 3))

    assert most(sides[0]) < 2**31 <= most(sides[0] + period)
    assert all(side % period == 0 for side in sides)
    assert all(0.5 * b**3 - 3 * b**2 * period < a**3 <= 0.5 * b**3 for b, a in pairwise(sides))


@pytest.mark.torch
def test_pytorch_on_patches(imported: Callable[[str], Any], tiny: Path, tmp_path: Path) -> None:
    """Every way has a row for the whole volume, of its best patch; what a patch may be compared with is kept."""
    networks = imported("networks_gpu")
    words = ["--networks", tiny, "--side", 40, "--torch-on", "cpu", "--patches", 99, 12, 8, "--repeat-seconds", 0]
    given = networks.arguments([*map(str, words), "--fragments", "fp32", "bf16", "--dilated", "fp32"])
    match = networks.Match(given, tmp_path)
    match.peers(str(tiny))
    assert [(row.name, row.precision) for row in match.rows] == [
        ("PyTorch fragments", "fp32"),
        ("PyTorch fragments", "bf16"),
        ("PyTorch dilated", "fp32"),
    ]
    for row in match.rows:
        assert row.failure is None
        (side, *_) = row.patch_out
        count = {12: 3 * 3 * 4, 8: 5 * 5 * 5}[side]  # of the output, 35x35x37; 99 is larger than that
        assert row.details["patches"] == count
        spent = count * float(np.median(row.details["seconds"]))
        assert row.voxels_per_second == pytest.approx(35 * 35 * 37 / spent)
    reference = np.load(tmp_path / "tiny-reference.npy")
    assert reference.shape[0] == 3
    np.save(tmp_path / "ours.npy", reference * 1.5)
    assert match._difference(str(tiny), str(tmp_path / "ours.npy")) == pytest.approx(0.5)


def test_a_volume_on_a_gpu(
    imported: Callable[[str], Any], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From memory to memory through plan, session and pipeline, in every precision, against the definition."""
    emulated, child = imported("tests.support.emulator"), imported("contestants_gpu")
    gpu = emulated.EMULATED_GPU
    monkeypatch.setattr(devices, "find_gpu", lambda: gpu)
    monkeypatch.setattr(devices, "Device", emulated.EmulatedDevice)
    monkeypatch.setattr(
        devices, "measured_rates", lambda device, machine, *given, **words: assumed_rates(machine, 1, "gpu")
    )
    network = child.random_network(str(tiny))
    request = {"network": str(tiny), "side": 17, "corner": str(tmp_path / "corner"), "patch": [6, 8, 9], "only": []}
    request |= {"precisions": ["fp32", "tf32", "fp16"], "ram": None, "threads": 1, "vram": None}
    answers = list(child.znnpy_volume(request))
    x = (np.moveaxis(child.noise((17, 17, 17), 2), 0, -1)[None] - 127.5) / 73.9
    exact = np.moveaxis(dense_by_fragments(network, random_weights(network), x)[0], -1, 0)
    assert [answer["precision"] for answer in answers] == ["fp32", "tf32", "fp16"]
    for answer, most in zip(answers, (1e-6, 1e-3, 5e-3), strict=True):
        assert answer["not_written"] == 0
        assert answer["output"] == (12, 12, 14)
        out = np.load(tmp_path / f"corner-{answer['precision']}.npy")
        assert out.shape == (3, 12, 12, 14)
        assert np.sqrt(np.mean((out - exact) ** 2) / np.mean(exact**2)) < most
        assert answer["voxels_per_second"] == pytest.approx(12 * 12 * 14 / answer["seconds"])
        assert 0 < answer["vram_bytes"] <= answer["planned_vram_bytes"]
        assert all(choice.startswith("gpu.") for choice in answer["choices"])


def test_results_are_joined(imported: Callable[[str], Any], tmp_path: Path) -> None:
    """With what failed; of results that were joined before too each row keeps its header."""
    networks, emulated = imported("networks_gpu"), imported("tests.support.emulator")
    header = imported("gpu_card").gpu_header(emulated.EMULATED_GPU)
    speeds = {"n337": 5e6, "n926": 1e6, "n537": 2e6}

    def path(name: str) -> str:
        return str(tmp_path / f"{name}.json")

    for name, speed in speeds.items():
        row = networks.Row(name, "znnpy", "tf32", (8, 8, 8), speed, speed, 1.0, 0.1, None, None, {})
        row.details["planned_voxels_per_second"] = speed
        failed = networks._failed(name, "PyTorch fragments", "tf32", "not run")
        given = networks.arguments(["--side", "99", "--out", path(name)])
        networks.write(given, [failed, row], header | {"command": name})
    networks.main(["--join", path("n337"), path("n926"), "--out", path("two")])
    networks.main(["--join", path("n537"), path("two"), "--out", path("all")])
    found = json.loads((tmp_path / "all.json").read_text())
    commands = [one["command"] for one in found["header"]["joined"]]
    assert commands == ["n537", "n337", "n926"]
    assert found["header"]["side"] == 99
    for row in found["rows"]:
        assert commands[row["header"]] == row["network"]
        assert row["voxels_per_second"] == (0 if row["failure"] else speeds[row["network"]])
    assert [row["failure"] for row in found["rows"]] == ["not run", None] * 3
    ratios = [2e6 / 0.33e6, 5e6 / 1.06e6, 1e6 / 0.375e6]
    assert [one["times_original"] for one in found["summary"]] == pytest.approx(ratios)


@pytest.mark.parametrize(("repeat", "end", "times"), [(3.5, 99.0, 3), (0.0, 99.0, 1), (9.0, 12.5, 2), (9.0, 1.0, 1)])
def test_a_warm_patch_does_not_count(
    imported: Callable[[str], Any], tiny: Path, monkeypatch: pytest.MonkeyPatch, repeat: float, end: float, times: int
) -> None:
    """It took ten seconds, and a second each of those behind it."""
    child, now, calls = imported("contestants_gpu"), 0.0, list[Any]()

    def net(voxels: Any) -> Any:
        nonlocal now
        now += 1.0 if calls else 10.0
        calls.append(voxels)
        return voxels

    monkeypatch.setattr(child.time, "perf_counter", lambda: now)
    network = child.random_network(str(tiny))
    volume = child.noise((20, 20, 20), 2)
    assert list(child.patches(net, network, volume, (4, 4, 4), repeat, end)) == [1.0] * times
    assert len(calls) == 1 + times


def test_pytorch_is_kept_before_znnpy_runs(
    imported: Callable[[str], Any], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed in between leaves what it measured."""
    networks, emulated = imported("networks_gpu"), imported("tests.support.emulator")
    device = importlib.import_module("znnpy.kernels.gpu.device")
    monkeypatch.setattr(device, "find_gpu", lambda: emulated.EMULATED_GPU)
    monkeypatch.setattr(networks, "require_torch", lambda: None)
    row = networks.Row(str(tiny), "PyTorch fragments", "tf32", (8, 8, 8), 7.0, 7.0, 1.0, 0.1, None, None, {})
    monkeypatch.setattr(networks.Match, "peers", lambda match, name: match.rows.append(row))

    def killed(match: Any, name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(networks.Match, "ours", killed)
    out = tmp_path / "networks.json"
    with pytest.raises(KeyboardInterrupt):
        networks.main(["--networks", str(tiny), "--out", str(out)])
    assert [one["voxels_per_second"] for one in json.loads(out.read_text())["rows"]] == [7.0]


def test_what_kills_pytorch_is_not_tried_again(
    imported: Callable[[str], Any], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Smaller patches are, and the ways behind it; what was measured before is kept."""
    networks, asked = imported("networks_gpu"), []

    def line(way: int, method: str, side: int, failure: str | None) -> dict[str, Any]:
        what = {"way": way, "precision": "bf16", "method": method, "layout": "channels_last_3d"}
        return what | {"patch_out": [side] * 3, "failure": failure} | ({} if failure else {"seconds": [0.5]})

    def lines_of(request: dict[str, Any], seconds: float) -> tuple[list[dict[str, Any]], str | None]:
        asked.append([(way[1], way[3]) for way in request["ways"]])
        if len(asked) == 1:
            return [line(0, "fragments", 12, None), line(1, "dilated", 12, "it killed the process")], "died"
        return [line(0, "dilated", 8, "it killed the process"), line(0, "dilated", 8, None)], None

    monkeypatch.setattr(networks, "lines_of", lines_of)
    words = ["--networks", str(tiny), "--side", "40", "--patches", "12", "8", "--fragments", "bf16"]
    match = networks.Match(networks.arguments(words), tmp_path)
    match.peers(str(tiny))
    assert asked == [[("fragments", [12, 8]), ("dilated", [12, 8])], [("dilated", [8])]]
    assert [(row.patch_out, row.failure) for row in match.rows] == [((12,) * 3, None), ((8,) * 3, None)]


def test_memory(imported: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, device: Any) -> None:
    """What a primitive takes is what it promises; one that takes more is told from it."""
    memory = imported("memory_gpu")
    least = 2**24 if isinstance(device, Device) else 2**17  # a card hands out 2 MiB at a time
    monkeypatch.setattr(memory, "LEAST_BYTES", least)
    machine = replace(this_machine(), gpu=device.gpu)
    words = argparse.Namespace(shapes=2, only=["gpu.pool.fragments"], most_mib=8 * least / MIB, seed=3)
    (rows,) = memory.primitives(device, machine, words)
    assert len(rows) == 2
    assert all(row.kept and row.promised >= least for row in rows)
    case = memory.random_case(
        memory.TABLE[[p.name for p in memory.TABLE].index("gpu.pool.max")], machine, 8 * least, np.random.default_rng(1)
    )

    class Greedy:
        name = "greedy"

        def __getattr__(self, of: str) -> Any:
            return getattr(case.primitive, of)

        def bind(self, *given: Any) -> Any:
            step, more = case.primitive.bind(*given), device.allocate(8 * MIB, "more")
            assert more.nbytes == 8 * MIB

            class Step:
                held = more

                def run(self, *given: Any, **words: Any) -> None:
                    step.run(*given, **words)

            return Step()

    row = memory.measured(replace(case, primitive=Greedy()), device)
    assert row.measured >= row.promised + 8 * MIB
    assert not row.kept


def test_memory_counts_what_checks_of_plans_take(
    imported: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN's plans are tried on a small layer once in a process: in the run that is measured too."""
    memory, primitive, tried = imported("memory_gpu"), ConvCudnn(), list[str]()
    shape = ConvShape(1, 8, 8, (6, 7, 9), (3, 2, 4), "relu")
    cudnn_plans.forget()
    with imported("tests.support.emulator").EmulatedDevice() as device:
        put = device.put

        def noted(host: Any, what: str) -> Any:
            tried.extend([what] if what == "a small layer" else [])
            return put(host, what)

        monkeypatch.setattr(device, "put", noted)
        machine = replace(this_machine(), gpu=device.gpu)
        row = memory.measured(memory.Case(primitive, shape, primitive.variants(shape, machine)[0], 1), device)
    assert len(tried) == 2
    assert row.measured <= row.promised
