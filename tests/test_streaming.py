"""Streams of finished blocks: the bits of a whole run, in the plan's order, few at a time, and ended in every way."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import znnpy
from tests.cli.test_graph_infer import UNET, graph
from tests.cli.test_several_outputs import deep
from tests.support.cli import Place
from tests.support.emulated_gpus import EmulatedGpus
from tests.support.emulator import needs_compiler
from tests.support.infer_process import thin
from tests.support.odd_networks import NETWORKS, some_volume, trained
from znnpy.errors import NetworkFileError, PlanFileError, ShapeError, VolumeError, VramError
from znnpy.planner.run_plan import PlannedWorker
from znnpy.run.session import Session

Array = npt.NDArray[Any]


def assembled(blocks: znnpy.BlockStream) -> tuple[Array, list[znnpy.Box]]:
    """Return the whole prediction; fail if blocks overlap or leave something out."""
    whole = np.zeros(blocks.shape, blocks.dtype)
    written = np.zeros(blocks.shape[1:], np.uint8)
    boxes = []
    for box, block in blocks:
        assert block.shape == (blocks.shape[0], *box.size)
        assert block.flags.owndata
        whole[:, *box.slices] = block
        written[box.slices] += 1
        boxes.append(box)
    assert (written == 1).all()
    return whole, boxes


@pytest.mark.parametrize("network", NETWORKS[:3], ids=lambda n: n.name)
@pytest.mark.parametrize("options", [{"cover": "columns"}, {"cover": "patches"}, {"border": "reflect"}], ids=str)
def test_blocks_are_the_prediction_in_the_order_of_the_plan(network: znnpy.Network, options: dict[str, Any]) -> None:
    net, volume = trained(network), some_volume(network, 1)
    blocks = znnpy.stream(volume, net, patch=network.round_up((2, 3, 4)), threads=2, device="cpu", **options)
    assert blocks.plan is None
    found, boxes = assembled(blocks)
    plan = blocks.plan
    assert plan is not None
    border = options.get("border", "valid")
    np.testing.assert_array_equal(found, net(volume, plan=plan, border=border, device="cpu"))
    columns = plan.work_items(network)
    assert boxes == [step.write for column in columns for step in column.steps if step.write.voxels]
    assert list(blocks) == []


def test_stream_of_a_file_has_the_options_of_infer(place: Place) -> None:
    options: dict[str, Any] = {"roi": "2:18,1:22,3:25", "output_dtype": "float16", "device": "cpu"}
    znnpy.infer(place.volume, place.folder / "net.yaml", out=place.out, **options)
    blocks = znnpy.stream(place.volume, place.folder / "net.yaml", patch=(4, 6, 7), **options)
    found, _ = assembled(blocks)
    np.testing.assert_allclose(found, place.prediction(), atol=2e-3)
    assert found.dtype == np.float16
    assert blocks.places[0].offset == (4, 4, 6)


def test_outputs_of_the_same_voxels_are_the_maps_of_one_block(place: Place) -> None:
    side = {"name": "side", "type": "conv", "kernel": 1, "out": 3, "from": "joined"}
    graph(place, [*UNET, side], output=["side", "last"])
    net, volume = znnpy.load_network(place.folder / "net.yaml"), np.ones((20, 24, 26), np.uint8)
    found, boxes = assembled(znnpy.stream(volume, net, patch=(4, 8, 8), threads=1))
    np.testing.assert_allclose(found, net(volume), atol=1e-5)
    assert len(found) == 5
    assert len(boxes) > 1


def test_outputs_of_different_voxels_are_refused(place: Place) -> None:
    deep(place)
    with pytest.raises(ShapeError, match="gives last and half at different voxels, which one block cannot hold"):
        znnpy.stream(place.volume, place.folder / "net.yaml")


def test_windows_and_labels_are_streamed(place: Place) -> None:
    graph(place)
    net, volume = znnpy.load_network(place.folder / "net.yaml"), np.random.default_rng(1).random((20, 22, 24))
    options: dict[str, Any] = {"window": (8, 8, 8), "output": "labels", "threads": 1}
    found, boxes = assembled(znnpy.stream(volume, net, **options))
    np.testing.assert_array_equal(found, net(volume, **options))
    assert found.dtype == np.uint8
    assert len(boxes) > 1


def test_blocks_outside_a_mask_are_zero(place: Place) -> None:
    mask = np.zeros((20, 23, 25), np.uint8)
    mask[:9, :12] = 1
    options: dict[str, Any] = {"mask": mask, "device": "cpu"}
    znnpy.infer(place.volume, place.folder / "net.yaml", out=place.out, **options)
    found, _ = assembled(znnpy.stream(place.volume, place.folder / "net.yaml", patch=(2, 4, 5), **options))
    np.testing.assert_allclose(found, place.prediction(), atol=1e-6)
    assert not found[:, 9:].any()
    assert found[:, :5, :5].all()


class Counted:
    """A volume that counts the voxels read from it."""

    def __init__(self) -> None:
        self.shape, self.dtype, self.read = (200, 23, 25), np.dtype(np.uint8), 0

    def __getitem__(self, box: Any) -> Array:
        found: Array = np.zeros(self.shape, np.uint8)[box]
        self.read += found.size
        return found


def test_run_waits_for_the_caller(place: Place) -> None:
    volume = Counted()
    options: dict[str, Any] = {"patch": (4, 16, 19), "cover": "patches", "device": "cpu", "threads": 1}
    with znnpy.stream(volume, place.folder / "net.yaml", **options) as blocks:
        before = volume.read
        next(blocks)
        time.sleep(0.5)
        patches = (volume.read - before) / (9 * 23 * 25)
        assert patches <= 1 + 4  # two that are computed, and two that are read
        rest = list(blocks)
    assert len(rest) == 49 - 1
    assert volume.read - before == 49 * 9 * 23 * 25


def stream_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("znnpy-")]


def test_run_ends_with_the_loop(place: Place) -> None:
    def begun() -> znnpy.BlockStream:
        blocks = znnpy.stream(place.volume, place.folder / "net.yaml", patch=(2, 4, 4), device="cpu", threads=2)
        next(blocks)
        assert stream_threads()
        return blocks

    for _ in begun():
        break
    gc.collect()
    assert stream_threads() == []
    blocks = begun()
    blocks.close()
    assert stream_threads() == []
    assert list(blocks) == []
    blocks.close()
    with pytest.raises(KeyError), begun():
        raise KeyError
    assert stream_threads() == []


def test_thread_of_a_run_may_collect_a_stream(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a thread must not wait for its own end."""
    streams = [znnpy.stream(place.volume, place.folder / "net.yaml", threads=1, device="cpu")]
    monkeypatch.setattr("znnpy.streaming.computed", lambda *given, **more: streams.pop().close())
    thread = streams[0]._thread
    thread.start()
    assert thread.wait(10)
    assert not streams


def test_errors_of_the_run_are_raised_by_the_loop(place: Place) -> None:
    volume = np.zeros((1, 40, 23, 25), np.float32)
    volume[0, 30, 5, 5] = np.nan
    blocks = znnpy.stream(volume, place.folder / "net.yaml", patch=(4, 16, 19), device="cpu", cover="patches")
    next(blocks)
    with pytest.raises(VolumeError, match="NaN or infinite"):
        list(blocks)
    assert list(blocks) == []
    assert stream_threads() == []


def test_wrong_arguments_are_refused_before_the_loop(place: Place) -> None:
    network = place.folder / "net.yaml"
    with pytest.raises(VolumeError, match="there is no file"):
        znnpy.stream(place.folder / "none.h5", network)
    with pytest.raises(ValueError, match=r"gpus=2 compute blocks in no order, and a stream gives them in one: leave"):
        znnpy.stream(place.volume, network, gpus=2)
    with pytest.raises(ValueError, match=r"mode='side-by-side' computes blocks in no order"):
        znnpy.stream(place.volume, network, mode="side-by-side")
    plan = znnpy.plan(network, volume=place.volume, device="cpu")
    both = replace(plan, workers=(PlannedWorker(emulated_main(plan)), *plan.workers))
    with pytest.raises(PlanFileError, match="side by side, which compute blocks in no order"):
        znnpy.stream(place.volume, network, plan=both)
    with pytest.raises(NetworkFileError, match=r"a model of nnU-Net, .*; give it to znnpy\.infer"):
        znnpy.stream(place.volume, "nnunet:model")
    assert stream_threads() == []


def emulated_main(plan: znnpy.RunPlan) -> znnpy.Plan:
    """Return the plan of a processor as if its one stage ran on a GPU."""
    (stage,) = plan.main.stages
    memory = replace(plan.main.memory, stages=(replace(plan.main.memory.last, device="gpu"),))
    limits = replace(plan.limits, vram_bytes=2**30)
    return replace(plan.main, stages=(replace(stage, device="gpu"),), memory=memory, limits=limits)


def test_progress_is_told_in_the_thread_that_waits(place: Place) -> None:
    events: list[tuple[znnpy.Event, bool]] = []

    def told(event: znnpy.Event) -> None:
        events.append((event, threading.current_thread() is threading.main_thread()))

    options: dict[str, Any] = {"patch": (2, 4, 4), "device": "cpu", "threads": 2}
    list(znnpy.stream(place.volume, place.folder / "net.yaml", progress=told, **options))
    assert all(here for _, here in events)
    last = events[-1][0]
    assert last.voxels_done == last.voxels > 0

    def stop(event: znnpy.Event) -> None:
        raise KeyboardInterrupt

    blocks = znnpy.stream(place.volume, place.folder / "net.yaml", progress=stop, **options)
    with pytest.raises(KeyboardInterrupt):
        next(blocks)
    assert stream_threads() == []


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["raise SystemExit('left')", "pass"])
def test_process_ends_although_a_stream_is_open(place: Place, ending: str) -> None:
    program = (
        "import sys, znnpy\n"
        "blocks = znnpy.stream(sys.argv[1], sys.argv[2], patch=(2, 4, 4), device='cpu')\n"
        f"next(blocks)\n{ending}\n"
    )
    command = [sys.executable, "-c", program, str(place.volume), str(place.folder / "net.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == ((1, "left\n") if "raise" in ending else (0, ""))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of one process is known on Linux only")
def test_process_takes_what_the_plan_says_and_two_blocks(tmp_path: Path) -> None:
    """The volume has 860 MB and the prediction too; a block has 13 MB."""
    program = (
        "import sys, numpy, znnpy\n"
        "from znnpy.machine import peak_bytes\n"
        "class Zeros:\n"
        "    shape, dtype = (600, 600, 600), numpy.dtype(numpy.float32)\n"
        "    def __getitem__(self, box):\n"
        "        return numpy.zeros([at.stop - at.start for at in box], numpy.float32)\n"
        "blocks = znnpy.stream(Zeros(), sys.argv[1], ram='400M', threads=2, patch=(8, 599, 599))\n"
        "largest = 0\n"
        "for box, block in blocks:\n"
        "    largest = max(largest, block.nbytes)\n"
        "print(blocks.plan.memory.peak, largest, peak_bytes())\n"
    )
    command = [sys.executable, "-c", program, str(thin(tmp_path))]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    promise, block, peak = map(int, said.split())
    assert block == 4 * 8 * 599 * 599
    assert peak <= promise + 2 * block
    assert promise <= 400 * 2**20


@pytest.fixture
def gpu(emulated_gpus: EmulatedGpus) -> EmulatedGpus:
    emulated_gpus.use()
    return emulated_gpus


@pytest.mark.slow
@needs_compiler
def test_blocks_of_a_gpu_come_in_order(place: Place, gpu: EmulatedGpus) -> None:
    place.write_small_volume()
    options: dict[str, Any] = {"patch": (2, 2, 2), "threads": 2}
    blocks = znnpy.stream(place.volume, place.folder / "net.yaml", **options)
    found, boxes = assembled(blocks)
    plan = blocks.plan
    assert plan is not None
    assert plan.mode == "gpu"
    columns = plan.work_items(place.network)
    assert boxes == [step.write for column in columns for step in column.steps if step.write.voxels]
    options["device"] = "cpu"
    expected, _ = assembled(znnpy.stream(place.volume, place.folder / "net.yaml", **options))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.slow
@needs_compiler
def test_memory_refused_after_a_block_ends_the_stream(
    place: Place, gpu: EmulatedGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write_small_volume()
    submit, steps = Session.submit, list[object]()

    def refusing(*given: Any, **arguments: Any) -> Any:
        steps.append(None)
        if len(steps) > 3:
            raise VramError("memory was refused")
        return submit(*given, **arguments)

    monkeypatch.setattr(Session, "submit", refusing)
    options: dict[str, Any] = {"patch": (2, 2, 2), "threads": 2, "cover": "patches"}
    blocks = znnpy.stream(place.volume, place.folder / "net.yaml", **options)
    next(blocks)
    with pytest.raises(VramError, match=r"refused memory after \d blocks were given, .*; stream again with a smaller"):
        list(blocks)
