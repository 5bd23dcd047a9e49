"""The child of planning.py for Table V in today's form: patches in PyTorch, one way, within a limit of memory.

plain      convolutions and max-poolings as everybody calls them (oneDNN, cuDNN): a patch gives one subsampling of the
           output, and is computed again for every offset. Timed is one of them.
dilated    strided kernels: nothing is subsampled, kernels have gaps instead
fragments  shift and pool, the fragments as a batch

Lines of JSON on stdin and on stdout: the first says what way, every other is a patch. Seconds are of one dense patch,
the peak is of all patches so far.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from apart import limit_memory
from contestants import Noise, random_network

from znnpy.formats.weights import random_weights
from znnpy.inference import peak_bytes
from znnpy.network import Conv, MaxFilter, Maxout, Network, Pool, extent
from znnpy.shapes import Vec3, add, multiply, subtract

METHODS = ("plain", "dilated", "fragments")


def plain_in(network: Network, out: Vec3) -> Vec3:
    """Input of a network that subsamples to `out` voxels."""
    for layer in reversed(network.layers):
        window = extent(layer)
        out = multiply(out, window) if isinstance(layer, Pool) else subtract(add(out, window), (1, 1, 1))
    return out


def plain(network: Network, precision: Any, layout: Any, device: str) -> Callable[[npt.NDArray[Any]], Any]:
    """raw (c, z, y, x) -> one subsampling (maps, z, y, x)."""
    import torch
    from dense_torch import DTYPES, activated, as_tensor, compute_in, in_layout, largest, placed

    if device != "cpu":
        compute_in(precision, 4)
    weights = [
        (placed(one.weight, precision, layout, device), as_tensor(one.bias, precision, device))
        for one in random_weights(network)
    ]
    assert network.normalise is not None
    mean, std = (
        torch.tensor(v, device=device)[:, None, None, None] for v in (network.normalise.mean, network.normalise.std)
    )

    def net(raw: npt.NDArray[Any]) -> Any:
        with torch.inference_mode():
            x = (torch.from_numpy(np.ascontiguousarray(raw)).to(device).float() - mean) / std
            x = in_layout(x[None].to(DTYPES[precision]), layout)
            todo = iter(weights)
            for layer in network.layers:
                match layer:
                    case Conv(activation=activation):
                        x = activated(torch.nn.functional.conv3d(x, *next(todo)), activation)
                    case Pool(window=window):
                        x = torch.nn.functional.max_pool3d(x, window)
                    case MaxFilter(window=window):
                        for axis, size in enumerate(window, start=2):
                            x = largest(x, axis, size, 1)
                    case Maxout(of=of):
                        x = x.unflatten(1, (-1, of)).amax(2)
            return x[0].float().cpu().numpy()

    return net


def prepared(request: dict[str, Any]) -> Callable[[Vec3], dict[str, Any]]:
    """Answers for patches, one way: seconds of every run after one that does not count."""
    import torch

    network, device = random_network(request["network"]), request["device"]
    precision, layout, method = request["precision"], request["layout"], request["method"]
    if method == "plain":
        net: Callable[[npt.NDArray[Any]], Any] = plain(network, precision, layout, device)
    else:
        from dense_torch import DenseTorch

        net = DenseTorch(
            network, random_weights(network), method, precision, layout, device, tried=request["algorithms"]
        )

    def answer(patch: Vec3) -> dict[str, Any]:
        size, times = network.patch_in(patch), 1
        if method == "plain":
            z, y, x = (side // period for side, period in zip(patch, network.period, strict=True))
            size, times = plain_in(network, (z, y, x)), prod(network.period)
        raw = np.empty((network.input_channels, *size), np.uint8)
        Noise(network.input_channels).read((0, 0, 0), raw)
        net(raw)
        seconds: list[float] = []
        while not seconds or sum(seconds) + seconds[-1] < request["repeat_seconds"]:
            begin = time.perf_counter()
            net(raw)
            seconds.append(time.perf_counter() - begin)
        peak = peak_bytes() if device == "cpu" else torch.cuda.max_memory_reserved()
        return {"seconds": [times * spent for spent in seconds], "peak_bytes": peak}

    return answer


def main() -> None:
    import torch

    request = json.loads(sys.stdin.readline())
    torch.set_num_threads(request["threads"])
    if request["device"] == "cpu":
        limit_memory(request["ram_bytes"])
    else:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, request["ram_bytes"] / total))
    answer = prepared(request)
    for line in sys.stdin:
        z, y, x = json.loads(line)["patch"]
        try:
            said = answer((z, y, x))
        except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is one; DefaultCPUAllocator says no more
            said = {"failure": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
