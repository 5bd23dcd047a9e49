"""Turn finished sums of windows into what is written: their mean, a function of it, or labels."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.kernels.cpu.activations import activate_rows
from znnpy.kernels.cpu.blend import write_mean
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.network import Network
from znnpy.network_result import NetworkResult
from znnpy.run.backend import Voxels
from znnpy.run.voxels import BLOCK_BYTES, store_image
from znnpy.shapes import FLOAT32

Array = npt.NDArray[Any]


def store_result(sums: Array, totals: npt.NDArray[np.float32], out: Voxels, network: Network, pool: ThreadPool) -> None:
    """Write the result of some voxels.

    sums    (z, y, x, maps) float32, where members of an ensemble are blended apart those of each; may be overwritten
    totals  (z, y, x) float32, the sums of the weights
    out     (maps of the result, z, y, x); float32, float16 or uint8 as `store_voxels` converts them; labels and what is
            above a threshold are whole numbers of its dtype
    """
    rows = max(1, BLOCK_BYTES // max(1, FLOAT32 * prod(sums.shape[2:])))

    at_once = network.result.kind == "maps" and out.dtype == np.float32

    def piece(lo: int, hi: int, worker: int) -> None:
        del worker
        for z in range(lo, hi):
            if at_once:
                write_mean(sums[z], totals[z], out[:, z])
                continue
            for first in range(0, sums.shape[1], rows):
                part = slice(first, first + rows)
                mean = sums[z : z + 1, part]
                np.divide(mean, totals[z : z + 1, part, :, None], out=mean)
                _write(_probabilities(mean, network), out[:, z : z + 1, part], network.result)

    pool.each(piece, sums.shape[0], least=max(1, -(-sums.shape[0] // pool.threads)))


def _probabilities(mean: Array, network: Network) -> Array:
    """Return the function of blended maps that the result is made of, averaged over members that are blended apart."""
    function, members = network.result.function, network.members if network.result.apart else 1
    if function == "none":
        return mean
    values = np.ascontiguousarray(mean)
    activate_rows(function, (), values.reshape(-1, values.shape[3] // members))
    if members == 1:
        return values
    return np.asarray(values.reshape(*values.shape[:3], members, -1).mean(axis=3))


def _write(mean: Array, out: Voxels, result: NetworkResult) -> None:
    match result.kind:
        case "maps" | "softmax" | "sigmoid":
            store_image(mean, out)
        case "labels":
            out[0] = mean.argmax(axis=3)
        case "above":
            thresholds = np.array(result.above, np.float32)
            out[...] = np.moveaxis(mean > thresholds, 3, 0)
