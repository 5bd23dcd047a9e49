"""The child of planning.py for whole runs on a GPU: a plan comes as a line of JSON, and its figures go back as one.

From the host's memory into the host's memory, through the pipeline that a run goes through. A first run does not count:
in it kernels are compiled and buffers pinned, and a thread looks how much memory is free. Then it is quiet, and the
plan runs so often as is asked for. Seconds are the pipeline's, from the first patch that comes in to the last that is
written: what a plan predicts.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from typing import Any

import numpy as np
from contestants import random_network
from contestants_gpu import Held, Kept, Warm, noise
from gpu_card import Lowest

from znnpy.errors import ZnnpyError
from znnpy.formats.weights import random_weights
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.planner.plan import Plan
from znnpy.run import pipeline
from znnpy.run.devices import site_for
from znnpy.run.session import Session


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each run, and bytes that the process took of the GPU at its peak, with what CUDA took."""
    plan, network = Plan.from_json(request["plan"]), random_network(request["network"])
    with site_for(lambda site: plan, "gpu", request["vram"], plan.precision) as (site, _):
        source = Held(noise(network.patch_in(plan.output), network.input_channels))
        target = Kept(np.full((network.output_channels, *plan.output), np.nan, np.float32))
        columns = plan.cover(network)
        with ThreadPool(plan.limits.threads) as crew, ExitStack() as stack:
            with Lowest(site.gpu) as lowest:
                session = stack.enter_context(Session(plan, network, random_weights(network), crew, device=site.gpu))
                warm = Warm(session)
                first = pipeline.run(warm, crew, source, target, columns).seconds
            not_written = int(np.isnan(target.voxels).sum())
            found = [pipeline.run(warm, crew, source, target, columns).seconds for _ in range(request["times"])]
        taken = site.free_bytes - lowest.free_bytes if site.free_bytes is not None else 0
    return {"seconds": found, "first_seconds": first, "vram_bytes": taken, "not_written": not_written}


def main() -> None:
    for line in sys.stdin:
        try:
            said = answer(json.loads(line))
        except (ZnnpyError, MemoryError) as error:
            said = {"failure": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
