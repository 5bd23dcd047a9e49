"""The work of the child processes of `gpu_graphs`: volumes by znnpy on a GPU, and single windows by PyTorch there.

Every request has folder, network and precision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import graph_nets, window_nets
from benchmarks.harness.inputs import Vec3, noise
from benchmarks.harness.isolate import Answer, Request
from benchmarks.harness.timing import peak_bytes

CORNER = (64, 64, 64)  # output voxels that are compared


def run_znnpy(request: Request) -> Iterator[Answer]:
    """Predict a volume from an array to an array, and yield a line for each run; the first is of a part of the volume.

    In the first, layers are timed and kernels compiled. The request has also size, vram, output and, for windows,
    window and overlap.
    """
    import znnpy

    folder, size = Path(request["folder"]), _vec3(request["size"])
    asked: dict[str, Any] = {"device": "gpu", "precision": request["precision"], "vram": request["vram"]}
    if request["network"] in window_nets.NETS:
        net = window_nets.NETS[request["network"]]
        path = window_nets.window_file(folder, net)
        raw: Any = window_nets.grey_noise(size)
        asked |= {"window": net.window, "overlap": window_nets.OVERLAP, "blend": "gaussian"}
        dtype, maps, part = "float32", net.classes, net.window
    else:
        plain = graph_nets.NETS[request["network"]]
        path, raw = graph_nets.graph_file(folder, plain), noise(size)
        dtype, maps, part = "uint8", 1, _vec3([min(n, 128) for n in size])
        asked["output_dtype"] = dtype
    if request["output"] == "labels":
        asked["output"], dtype, maps = "labels", "uint8", 1
    out = np.zeros((maps, *size), dtype)  # written to once before, so that no run waits for memory
    first = True
    for lines in [part, *[size] * request["rounds"]]:
        box = tuple(slice(0, n) for n in lines)
        target = np.ascontiguousarray(out[(slice(None), *box)]) if first else out
        begin = time.perf_counter()
        report = znnpy.infer(np.ascontiguousarray(raw[box]) if first else raw, path, out=target, **asked)
        seconds, stages = time.perf_counter() - begin, dict(report.stage_seconds)
        if not first:
            yield {
                "seconds": seconds,
                "voxels": int(np.prod(lines)),
                "stage_seconds": stages,
                "computing": stages["computing"],
                "predicted_seconds": report.plan.seconds,
                "promised_vram": report.plan.memory.vram,
                "patch": report.plan.patch_out,
                "waste": report.plan.main.waste,
                "peak_bytes": peak_bytes(),
                "promised_bytes": report.plan.memory.peak,
                "layers": [
                    (str(c.shape), c.primitive, c.seconds, c.executions, c.measured) for c in report.plan.main.choices
                ],
            }
        first = False
    np.save(folder / f"corner_{request['network']}_{request['precision']}.npy", out[(slice(None), *map(slice, CORNER))])


def run_torch(request: Request) -> Iterator[Answer]:
    """Run single windows in PyTorch, and yield a line for each; the request has also sides, compiled and rounds."""
    import torch

    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = request["precision"] == "tf32"
    compute = _peer(request["network"], request["precision"])
    if request["compiled"]:
        compute = torch.compile(compute)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(request["precision"], torch.float32)
    for side in request["sides"]:
        try:
            x = torch.randn(1, 1, side, side, side, device="cuda", dtype=dtype)
            x = x.contiguous(memory_format=torch.channels_last_3d)
            with torch.inference_mode():
                seconds = _timed(partial(compute, x), request["rounds"])
        except torch.OutOfMemoryError:
            return
        yield {
            "size": (side,) * 3,
            "seconds": seconds,
            "peak_vram": torch.cuda.max_memory_allocated(),
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
        }


def _peer(network: str, precision: str) -> Callable[[Any], Any]:
    import torch

    if network in window_nets.NETS:
        module = window_nets.torch_module(window_nets.NETS[network]).cuda()
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
        found: Callable[[Any], Any] = module
        if dtype is not None:
            found = module.to(dtype=dtype, memory_format=torch.channels_last_3d)
        return found
    peer = graph_nets.TorchGraph(graph_nets.NETS[network], precision, "cuda")
    return peer.compute


def _timed(run: Callable[[], Any], rounds: int) -> list[float]:
    """Return the seconds of each of some runs by events, after three that do not count."""
    import torch

    for _ in range(3):
        run()
    found = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return found


def compare(request: Request) -> Answer:
    """Return the largest difference of a corner of two runs, in `precision` and in fp32, beside the largest value."""
    folder, name = Path(request["folder"]), request["network"]
    files = (folder / f"corner_{name}_{one}.npy" for one in (request["precision"], "fp32"))
    ours, exact = (np.load(file).astype(np.float64) for file in files)
    scale = 255.0 if ours.max() > 1.5 and name not in window_nets.NETS else 1.0
    return {
        "difference": float(abs(ours - exact).max() / scale),
        "rms": float(np.sqrt(((ours - exact) ** 2).mean()) / scale),
        "largest": float(abs(exact).max() / scale),
    }


def _vec3(size: Any) -> Vec3:
    z, y, x = size
    return z, y, x
