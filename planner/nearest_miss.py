"""Words for a search that found no plan: the smallest need there is, and what to allow."""

from __future__ import annotations

from collections.abc import Sequence

from znnpy.errors import NoPlanError
from znnpy.messages import option
from znnpy.network import Network
from znnpy.planner.layer_search import Solution
from znnpy.planner.layout import scratch_peaks
from znnpy.planner.memory import mebibytes
from znnpy.planner.tiling_search import TilingSearch
from znnpy.planner.tilings import tiling_of
from znnpy.shapes import text


def no_plan(network: Network, searches: Sequence[TilingSearch], words: str) -> NoPlanError:
    """An error that says why nothing fits: the smallest need of all shapes, or a layer that no primitive runs.

    words  advice that is added at the end
    """
    found = [(search, least) for search in searches if (least := search.least()) is not None]
    needs = [(least, search) for search, least in found if not isinstance(least, int)]
    if not needs:
        search, layer = found[0]
        assert isinstance(layer, int)
        refused = tiling_of(search.space, search.space.network.period).shapes[layer]
        return NoPlanError(
            f"no primitive runs layer {layer} ({network.layers[layer]}) here: "
            f"{search.options.why_none(refused)}; `znnpy primitives` lists them all"
        )
    least, search = min(
        needs, key=lambda need: (sum(need[0].memory.excess(need[1].limits)), need[0].memory.device_bytes)
    )
    error = NoPlanError(_nearest_miss(network, search, least) + words)
    error.needed_bytes, error.needs = least.memory.device_bytes, (least.memory.peak, least.memory.vram)
    return error


def _nearest_miss(network: Network, search: TilingSearch, least: Solution) -> str:
    """Say how far `least`, which needs the least memory, is above the limits, and which limit is enough."""
    memory, limits, shape = least.memory, search.limits, least.tiling
    most, layer, name = max(
        (
            scratch_peaks(way.footprint).arena_bytes(way.shape.in_bytes, way.shape.out_bytes) + way.footprint.resident,
            first,
            way.primitive.name,
        )
        for (first, _), way in least.layer_runs
    )
    kind = f"columns along {'zyx'[search.space.axis]} in steps of" if search.space.streams else "output patches of"
    lacking = [
        (what, limit, need, option(what.lower(), f"{-(-need // 2**20)}M"))
        for what, limit, need, over in zip(
            ("RAM", "VRAM"),
            (limits.ram_bytes, limits.vram_bytes or 0),
            (memory.peak, memory.vram),
            memory.excess(limits),
            strict=True,
        )
        if over
    ]
    inside = " and in ".join(f"{mebibytes(limit)} of {what}" for what, limit, _, _ in lacking)
    needs = " and ".join(
        f"{mebibytes(need)}{f' of {what}' if len(lacking) > 1 else ''}, {mebibytes(need - limit)} more"
        for what, limit, need, _ in lacking
    )
    taken = f"the process itself takes {mebibytes(search.baseline)}"
    if search.device == "gpu":
        taken += f" of RAM, CUDA {mebibytes(memory.context)} of VRAM, patches on their way {mebibytes(memory.staging)}"
    return (
        f"nothing fits in {inside}: the smallest need is {needs}, with {kind} {text(shape.patch_out)}; {taken}, "
        f"and layer {layer} ({network.layers[layer]}) the most of what is left, "
        f"{mebibytes(most)} with {name}; allow at least {' and '.join(word for _, _, _, word in lacking)}"
    )
