"""The error of a search that found no plan: it names the smallest need, and what to allow."""

from __future__ import annotations

from collections.abc import Sequence

from znnpy.errors import NoPlanError
from znnpy.messages import option
from znnpy.planner.layer_search import Solution
from znnpy.planner.layout import scratch_peaks
from znnpy.planner.tiling_search import TilingSearch, smallest_need
from znnpy.planner.tilings import tiling_of
from znnpy.shapes import text
from znnpy.units import mebibytes


def no_plan(searches: Sequence[TilingSearch], advice: str) -> NoPlanError:
    """Return an error that says why nothing fits: the smallest need of all tilings, or a layer that no primitive runs.

    advice  more of it, added at the end
    """
    if (found := smallest_need(searches)) is None:
        search = searches[0]
        layer = search.least()
        assert isinstance(layer, int)
        refused = tiling_of(search.space, search.space.network.period).shapes[layer]
        return NoPlanError(
            f"no primitive runs layer {layer} ({search.request.network.layers[layer]}) here: "
            f"{search.options.why_none(refused)}; `znnpy primitives` lists them all"
        )
    memory = found[1].memory
    error = NoPlanError(_nearest_miss(*found) + advice)
    error.needed_bytes, error.needs = memory.device_bytes, (memory.peak, memory.vram)
    return error


def _nearest_miss(search: TilingSearch, least: Solution) -> str:
    """Say how far `least`, which needs the least memory, is above the limits, and which limit is enough."""
    network, memory, limits, shape = search.request.network, least.memory, search.limits, least.tiling
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
        for what, limit, need in (
            ("RAM", limits.ram_bytes, memory.peak),
            ("VRAM", limits.vram_bytes or 0, memory.vram),
        )
        if need > limit
    ]
    inside = " and in ".join(f"{mebibytes(limit)} of {what}" for what, limit, _, _ in lacking)
    needs = " and ".join(
        f"{mebibytes(need)}{f' of {what}' if len(lacking) > 1 else ''}, {mebibytes(need - limit)} more"
        for what, limit, need, _ in lacking
    )
    taken = f"the process itself takes {mebibytes(search.request.baseline)}"
    if search.device == "gpu":
        taken += f" of RAM, CUDA {mebibytes(memory.context)} of VRAM, patches on their way {mebibytes(memory.staging)}"
    return (
        f"nothing fits in {inside}: the smallest need is {needs}, with {kind} {text(shape.patch_out)}; {taken}, "
        f"and layer {layer} ({network.layers[layer]}) the most of what is left, "
        f"{mebibytes(most)} with {name}; allow at least {' and '.join(word for _, _, _, word in lacking)}"
    )
