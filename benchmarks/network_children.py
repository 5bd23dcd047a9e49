"""The work of the child processes of `networks`: runs of a network by znnpy, by PyTorch, or by definition."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import peers
from benchmarks.harness.inputs import field_of_view, network_file, noise, period, volume_file
from benchmarks.harness.isolate import Answer, Request
from benchmarks.harness.timing import peak_bytes

CORNER = 24  # output voxels along an axis that are compared between peers
WARM_STEPS = 2  # steps that do not count in a steady state: buffers are pinned, the pipeline fills
WARM_SECONDS = 20.0  # a first run that takes longer counts: memory that it touches weighs little
SMALLER_IS_SLOWER = 0.97  # no smaller patch is tried below this share of the best speed
KEPT_OF_SUMMARY = (
    "stage_seconds", "vram_bytes", "predicted", "patch", "column", "primitives",
    "mode", "idle_seconds", "devices", "precision",
)  # fmt: skip
TORCH_FLOPS = {  # operations per second, to predict which patches take too long
    "cpu": {"fp32": 4e10, "bf16": 4e10},  # rate of each thread
    "cuda": {"fp32": 1.2e13, "tf32": 8e13, "fp16": 1.2e14, "bf16": 1.2e14},
}


def speed_of_plan(request: Request) -> Answer:
    """Return the planned speed of a long run in voxels/s; the request has "network", "side" and "options"."""
    import znnpy

    begin = time.perf_counter()
    plan = znnpy.plan(request["network"], shape=(request["side"],) * 3, **request["options"])
    return {"voxels_per_second": plan.voxels_per_second, "seconds": time.perf_counter() - begin}


def run_znnpy(request: Request) -> Iterator[Answer]:
    """Predict a cube of noise from memory into memory, or from file to file, and yield a line for each run.

    network  network file.
    side     voxels of the volume along an axis.
    options  options of `znnpy.infer`.
    rounds   number of runs after the first.
    folder   folder for the files; None: in memory.
    corner   file for the first voxels of the output; None: none.
    """
    import znnpy

    size = (request["side"],) * 3
    folder = Path(request["folder"]) if request["folder"] else None
    volume: Any = volume_file(folder, size) if folder else noise(size)
    options, plan, counts = request["options"], None, 0
    out: Any = folder / "prediction.h5" if folder else None
    while counts < request["rounds"]:
        if folder is None:
            maps = znnpy.load_network(request["network"]).network.output_channels
            inner = request["side"] - field_of_view(Path(request["network"]).stem) + 1
            shape = (inner,) * 3 if maps == 1 else (maps, inner, inner, inner)
            out = np.full(shape, np.nan, np.float32) if out is None else out
        events: list[Any] = []
        more = {"plan": plan, "overwrite": True} if folder else {"plan": plan}
        report = znnpy.infer(
            volume, request["network"], out=out, progress=events.append, **options_with(options, plan), **more
        )
        first, plan = plan is None, report.plan
        summary = report.as_json()
        stages = summary["stage_seconds"]
        spent = report.seconds - stages.get("planning", 0.0) - stages.get("preparing", 0.0)
        is_warm = first and spent < WARM_SECONDS
        counts += not is_warm
        yield {
            "is_warm_up": is_warm,
            "voxels": report.voxels,
            "voxels_per_second": report.voxels / spent,
            "steady": steady_rate(events),
            "not_written": 0 if folder else sum(int(np.isnan(part).sum()) for part in out),
            "peak_bytes": peak_bytes(),
            **{key: summary[key] for key in KEPT_OF_SUMMARY},
        }
    if request["corner"] and folder is None:
        kept = out if out.ndim == 4 else out[None]
        np.save(request["corner"], kept[:, :CORNER, :CORNER, :CORNER])


def options_with(options: Request, plan: Any) -> Request:
    """Return the options of a run; with a plan, only those that do not contradict it."""
    return options if plan is None else {key: options[key] for key in ("device",) if key in options}


def steady_rate(events: list[Any]) -> float:
    """Return output voxels per second while the pipeline is full, from the share of the work between two events."""
    done = [event for event in events if event.steps_done >= WARM_STEPS and event.work_done < 1]
    if len(done) < 2:
        done = events
    work, spent = done[-1].work_done - done[0].work_done, done[-1].seconds - done[0].seconds
    return float(done[-1].voxels * work / spent) if spent > 0 else 0.0


def run_torch(request: Request) -> Iterator[Answer]:
    """Run a network in PyTorch on single patches, the largest first, until a smaller one is slower.

    The request has folder, network, method, precision, layout, device and threads, as for `DenseTorch`, and

    sides        sides of output patches, the largest first.
    run_seconds  patches that would take longer are not tried.
    seconds      time for all patches.
    corner       file, as for `run_znnpy`.
    """
    import torch

    name, method, device = request["network"], request["method"], request["device"]
    torch.set_num_threads(request["threads"])
    network_file(Path(request["folder"]), name)
    net = peers.DenseTorch(
        Path(request["folder"]), name, method, request["precision"], request["layout"], device, request["algorithms"]
    )
    rate = TORCH_FLOPS[device][request["precision"]] * (request["threads"] if device == "cpu" else 1)
    rate *= {"plain": 1.0, "fragments": 1.0, "dilated": 0.2}[method]
    end, best, out = time.perf_counter() + request["seconds"], 0.0, None
    for side in request["sides"]:
        if peers.operations(name, side) / rate > min(request["run_seconds"], end - time.perf_counter()):
            continue
        raw = noise((side + field_of_view(name) - 1,) * 3)
        yield {"side": side, "failure": "it ended the process"}  # counts unless another line on this side follows
        try:
            out = net(raw)  # libraries choose their algorithms
            seconds: list[float] = []
            while not seconds or (len(seconds) < 3 and time.perf_counter() + seconds[-1] < end):
                begin = time.perf_counter()
                out = net(raw)
                seconds.append(time.perf_counter() - begin)
        except (RuntimeError, MemoryError) as error:
            if device == "cuda":
                torch.cuda.empty_cache()
            yield {"side": side, "failure": str(error)[:200]}
            continue
        voxels = prod(out.shape[1:])
        yield {"side": side, "failure": None, "seconds": seconds, "voxels": voxels, "peak_bytes": peak_bytes()}
        speed = voxels / min(seconds)
        if speed < SMALLER_IS_SLOWER * best:
            break
        best = max(best, speed)
    if out is not None and request["corner"] and method != "plain":
        np.save(request["corner"], out[:, :CORNER, :CORNER, :CORNER])


def exactness(request: Request) -> Iterator[Answer]:
    """Compare znnpy and PyTorch with the float64 definition on a small patch; yield a line for each.

    The request has folder, network and side, and `devices`, the devices and precisions of znnpy: [["cpu", "fp32"], ..].
    """
    import znnpy

    folder, name = Path(request["folder"]), request["network"]
    path = network_file(folder, name)
    side = -(-request["side"] // period(name)) * period(name)
    raw = noise((side + field_of_view(name) - 1,) * 3)
    exact = peers.definition(folder, name, raw)
    net = znnpy.load_network(path)
    for device, precision in request["devices"]:
        more = {"precision": precision} if device == "gpu" else {}
        most, rms = peers.difference(exact, net(raw, device=device, **more))
        yield {"subject": f"znnpy on the {device.upper()}, {precision}", "most": most, "rms": rms, "side": side}
    with suppress(ImportError):
        import torch

        for device in ("cpu", *(("cuda",) if torch.cuda.is_available() else ())):
            theirs = peers.DenseTorch(folder, name, "fragments", "fp32", "contiguous", device)(raw)
            most, rms = peers.difference(exact, theirs)
            where = "GPU" if device == "cuda" else "CPU"
            yield {"subject": f"PyTorch on the {where}, fp32", "most": most, "rms": rms, "side": side}
