"""The work of the child processes of `graphs`: whole runs by znnpy, and single windows by PyTorch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import h5py
import numpy as np

from benchmarks.harness.graph_nets import NETS, TorchGraph, graph_file
from benchmarks.harness.inputs import noise, volume_file
from benchmarks.harness.isolate import Answer, Request
from benchmarks.harness.timing import peak_bytes

CORNER = (48, 64, 64)  # output voxels that are compared with PyTorch


def run_znnpy(request: Request) -> Answer:
    """Predict a volume of noise from file to file, and compare a part with PyTorch.

    The request has folder, network, size, ram, threads and precision.
    """
    import znnpy

    folder, net = Path(request["folder"]), NETS[request["network"]]
    path, size = graph_file(folder, net), (request["size"][0], request["size"][1], request["size"][2])
    volume = volume_file(folder, size)
    out = folder / "prediction.h5"
    report = znnpy.infer(
        volume,
        path,
        out=out,
        overwrite=True,
        ram=request["ram"],
        threads=request["threads"],
        device="cpu",
        precision=request["precision"],
    )
    summary = report.as_json()
    with h5py.File(out) as file:
        corner = np.asarray(file["prediction"])[tuple(slice(0, n) for n in CORNER)]
        np.save(folder / "corner.npy", corner)
    stages = summary["stage_seconds"]
    return {
        "voxels": report.voxels,
        "seconds": report.seconds,
        "computing": report.seconds - stages.get("planning", 0.0) - stages.get("preparing", 0.0),
        "stage_seconds": stages,
        "peak_bytes": peak_bytes(),
        "promised_bytes": report.plan.memory.peak,
        "waste": report.plan.main.waste,
        "patch": report.plan.patch_out,
        "columns": report.plan.main.columns,
        "predicted_seconds": report.plan.seconds,
    }


def planned(request: Request) -> Any:
    """Return znnpy's plan of a volume within a limit; the request is that of `run_znnpy`."""
    import znnpy

    folder, net = Path(request["folder"]), NETS[request["network"]]
    size = request["size"][0], request["size"][1], request["size"][2]
    return znnpy.plan(
        graph_file(folder, net),
        shape=size,
        ram=request["ram"],
        threads=request["threads"],
        device="cpu",
        precision=request["precision"],
    )


def plan_znnpy(request: Request) -> Answer:
    """Plan a volume within a limit; the request is that of `run_znnpy`."""
    begin = time.perf_counter()
    plan = planned(request)
    return {
        "seconds": time.perf_counter() - begin,
        "promised_bytes": plan.memory.peak,
        "voxels_per_second": plan.voxels_per_second,
        "waste": plan.main.waste,
    }


def run_torch(request: Request) -> Iterator[Answer]:
    """Run single windows in PyTorch, and yield a line for each side.

    The request has network, precision, sides and threads, and

    rounds   runs of each window that count
    seconds  no window begins later
    """
    import torch

    torch.set_num_threads(request["threads"])
    net, end = NETS[request["network"]], time.perf_counter() + request["seconds"]
    peer = TorchGraph(net, request["precision"])
    for side in request["sides"]:
        size = tuple(min(side, n) for n in net.size)
        raw = noise((size[0], size[1], size[2]))
        seconds: list[float] = []
        peer(raw)
        while len(seconds) < request["rounds"] and (not seconds or time.perf_counter() + seconds[-1] < end):
            begin = time.perf_counter()
            peer(raw)
            seconds.append(time.perf_counter() - begin)
        yield {"size": size, "seconds": seconds, "median": median(seconds), "peak_bytes": peak_bytes()}
        if time.perf_counter() > end:
            return


def compare_with_torch(request: Request) -> Answer:
    """Return the largest difference of a part of znnpy's output from PyTorch; the request has folder and network.

    PyTorch computes the part with enough voxels around it; faces of the volume are those of the part at its beginning.
    """
    net = NETS[request["network"]]
    periods = [
        -(-(n + reach) // period) * period for n, reach, period in zip(CORNER, net.reach, net.period, strict=True)
    ]
    size = tuple(min(n, whole) for n, whole in zip(periods, request["size"], strict=True))
    theirs = TorchGraph(net, "fp32")(noise((size[0], size[1], size[2])))[0]
    ours = np.load(Path(request["folder"]) / "corner.npy")
    part = theirs[tuple(slice(0, n) for n in ours.shape)]
    return {"difference": float(np.abs(ours - part).max()), "largest": float(np.abs(part).max())}
