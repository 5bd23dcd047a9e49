"""The work of the child processes of `windows`: volumes by znnpy, and by MONAI with PyTorch or OpenVINO.

Every request has folder, network, size, threads and precision. A child keeps its volume and its network between
requests, so that a run begins with the voxels in memory, and ends when the whole prediction is there.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from benchmarks.harness.inputs import Vec3
from benchmarks.harness.isolate import Answer, Request
from benchmarks.harness.peers import in_layout
from benchmarks.harness.timing import peak_bytes
from benchmarks.harness.window_nets import NETS, OVERLAP, grey_noise, torch_module, window_file, windows_of

KINDS = {"graph_conv": "conv", "conv_transpose": "transpose"}  # words for kinds of primitives that have shorter ones
PREPARING = "prepare"  # the span of what is done once before the first window

volume = cache(grey_noise)


def size_of(request: Request) -> Vec3:
    """Return the voxels of the volume."""
    z, y, x = request["size"]
    return z, y, x


def options_of(request: Request) -> dict[str, Any]:
    """Return the options of `znnpy.infer` that all runs share; the request has also ram."""
    return {
        "window": NETS[request["network"]].window,
        "overlap": OVERLAP,
        "blend": "gaussian",
        "ram": request["ram"],
        "threads": request["threads"],
        "device": "cpu",
        "precision": request["precision"],
    }


def run_znnpy(request: Request) -> Answer:
    """Predict a volume from an array to an array; everything is counted, also planning.

    The request has also ram, and

    keep  file for the prediction; None: it is not kept
    """
    import znnpy

    net, raw = NETS[request["network"]], volume(size_of(request))
    path, out = window_file(Path(request["folder"]), net), np.full((net.classes, *raw.shape), np.nan, np.float32)
    begin = time.perf_counter()
    report = znnpy.infer(raw, path, out=out, **options_of(request))
    seconds = time.perf_counter() - begin
    return {
        **_ended(request, seconds, out),
        "stage_seconds": dict(report.stage_seconds),
        "promised_bytes": report.plan.memory.peak,
        "predicted_seconds": report.plan.seconds,
    }


def run_monai(request: Request) -> Answer:
    """Predict a volume by MONAI's SlidingWindowInferer.

    The request has also keep, as that of `run_znnpy`, and

    library  "PyTorch" or "OpenVINO"
    """
    raw = volume(size_of(request))
    infer = _inferer(request["network"], request["library"], request["precision"], request["threads"])
    begin = time.perf_counter()
    out = infer(raw)
    return _ended(request, time.perf_counter() - begin, out)


def _ended(request: Request, seconds: float, out: npt.NDArray[np.float32]) -> Answer:
    if request["keep"] is not None:
        np.save(request["keep"], out)
    return {"seconds": seconds, "peak_bytes": peak_bytes(), "not_written": int(np.isnan(out).sum())}


@cache
def _inferer(network: str, library: str, precision: str, threads: int) -> Callable[[Any], npt.NDArray[np.float32]]:
    """Return a function from a volume (z, y, x) to its maps (maps, z, y, x)."""
    import torch
    from monai.inferers import SlidingWindowInferer

    torch.set_num_threads(threads)
    net = NETS[network]
    sliding = SlidingWindowInferer(roi_size=net.window, sw_batch_size=1, overlap=OVERLAP, mode="gaussian")
    module = torch_module(net)
    if library == "OpenVINO":
        compiled = _compiled(module, net.window, precision, threads)

        def predict(x: Any) -> Any:
            return torch.from_numpy(compiled(x.contiguous().numpy())[0])
    else:

        def predict(x: Any) -> Any:
            return module(in_layout(x, "channels_last_3d"))

    def infer(raw: Any) -> npt.NDArray[np.float32]:
        halved = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16" and library == "PyTorch")
        with torch.inference_mode(), halved:
            found = sliding(torch.from_numpy(raw)[None, None], predict)
            return np.asarray(found[0].float().contiguous().numpy())

    return infer


def _compiled(module: Any, window: Vec3, precision: str, threads: int) -> Any:
    """Return a module that OpenVINO computes for one window."""
    import openvino
    import torch

    model = openvino.convert_model(module, example_input=torch.zeros(1, 1, *window), input=[1, 1, *window])
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": {"fp32": "f32", "bf16": "bf16"}[precision],
    }
    return openvino.Core().compile_model(model, "CPU", settings)


def why_not(library: str) -> str | None:
    """Return why a peer cannot run here; None if it can."""
    needed = {"torch": "PyTorch", "monai": "MONAI"} | ({"openvino": "OpenVINO"} if library == "OpenVINO" else {})
    missing = [name for package, name in needed.items() if find_spec(package) is None]
    return f"{' and '.join(missing)} cannot be imported" if missing else None


def compare(request: Request) -> Answer:
    """Return the largest difference of two predictions, `ours` and `theirs`, beside the largest value of `theirs`."""
    ours, theirs = (np.load(request[name], mmap_mode="r") for name in ("ours", "theirs"))
    difference = max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))
    largest = max(float(np.abs(one).max()) for one in theirs)
    return {"difference": difference, "largest": largest}


def operations(request: Request) -> Answer:
    """Return the seconds of every kind of operation, of a run that is traced; the request has also ram."""
    import znnpy
    from znnpy.report.trace_reader import Span, read_spans

    net, raw, folder = NETS[request["network"]], volume(size_of(request)), Path(request["folder"])
    path, trace = window_file(folder, net), folder / f"trace-{os.getpid()}.json"
    out = np.zeros((net.classes, *raw.shape), np.float32)
    report = znnpy.infer(raw, path, out=out, trace=trace, **options_of(request))
    seconds: dict[str, float] = {}
    counts: Counter[str] = Counter()
    for span in read_spans(trace):
        if isinstance(span, Span) and span.track == "CPU" and span.name != PREPARING:
            kind = kind_of(span.name)
            seconds[kind] = seconds.get(kind, 0.0) + span.end - span.begin
            counts[kind] += 1
    trace.unlink()
    windows = windows_of(raw.shape, net.window)
    kinds = {kind: {"seconds": seconds[kind], "operations": counts[kind]} for kind in seconds}
    return {"kinds": kinds, "windows": windows, "computing": report.stage_seconds["computing"]}


def kind_of(name: str) -> str:
    """Return the kind of a span: that of the primitive of an operation, "NODE cpu.KIND.METHOD", or the name itself."""
    primitive = name.split()[-1]
    kind = primitive.split(".")[1] if primitive.startswith("cpu.") else name
    return KINDS.get(kind, kind)


def write_volume(request: Request) -> Answer:
    """Write the volume as an HDF5 file, in a process of its own, so that the memory for it counts for no other."""
    with h5py.File(Path(request["folder"]) / "volume.h5", "w") as file:
        file.create_dataset("raw", data=grey_noise(size_of(request)))
    return {}


def run_labels(request: Request) -> Answer:
    """Predict the labels of a volume from file to file within a limit of memory; the request has also ram."""
    import znnpy

    folder, net = Path(request["folder"]), NETS[request["network"]]
    source, path, out = folder / "volume.h5", window_file(folder, net), folder / "labels.h5"
    report = znnpy.infer(source, path, out=out, overwrite=True, output="labels", **options_of(request))
    return {
        "seconds": report.seconds,
        "stage_seconds": dict(report.stage_seconds),
        "peak_bytes": peak_bytes(),
        "promised_bytes": report.plan.memory.peak,
        "predicted_seconds": report.plan.seconds,
    }
