"""The search for the fastest plan of one device within the limits: patches against columns along every axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from znnpy.errors import NoPlanError, ShapeError
from znnpy.kernels.contract import Primitive, device_of
from znnpy.kernels.table import find
from znnpy.messages import option
from znnpy.planner.alternatives import kind_of
from znnpy.planner.baselines import Scheme, SchemeSearch, schemes
from znnpy.planner.found_plan import choice_of, plan_of
from znnpy.planner.layer_options import OptionTable
from znnpy.planner.layer_search import Solution
from znnpy.planner.nearest_miss import no_plan
from znnpy.planner.plan import Stage
from znnpy.planner.request import Constraints, CostModel, PlanRequest
from znnpy.planner.run_plan import RunPlan
from znnpy.planner.tiling_search import RUNNERS_UP, TilingSearch, smallest_need
from znnpy.planner.tilings import TilingSpace, all_spaces, splits
from znnpy.shapes import text, turned

ALIKE = 1.03  # times the seconds of the fastest plan: of those that take no longer, the smallest is taken


def plan_on_device(
    request: PlanRequest, costs: CostModel, options: OptionTable | None = None, *, scheme: Scheme | None = None
) -> RunPlan:
    """Return the fastest plan for one device of a target, whatever the target's mode and number of devices.

    options  what `costs.options` gave for a request that differs in output, limits of memory, patch or cover alone
    scheme   plan patches by this scheme alone

    NoPlanError names the nearest miss in bytes when nothing fits.
    """
    check_request(request, costs.table)
    check_device(request)
    searches = _searches(request, options or costs.options(request))
    if scheme is not None:
        searches = [SchemeSearch.like(patches, scheme) for patches in searches if not patches.space.streams]
    if not (ranked := _ranked(searches)):
        raise no_plan(searches, _narrowing(request.constraints))
    ranked = _smallest_first(ranked)
    plan = _plan(ranked)
    others = _kinds(plan, searches, ranked) if request.kinds else ()
    unrun = _baselines(searches) if request.baselines else ()
    kinds = (kind_of(request.network, plan, _plan_of(*pair), scheme) for pair, scheme in (*others, *unrun))
    return replace(plan, alternatives=tuple(kinds))


def _searches(request: PlanRequest, options: OptionTable) -> Sequence[TilingSearch]:
    """Return a search of every space that is allowed."""
    wanted = request.constraints
    return [
        TilingSearch(
            request=request,
            space=space,
            options=options,
            splits=splits(space.stage_network) if wanted.depth_first else splits(space.stage_network)[:1],
            patch=None if wanted.patch is None else turned(wanted.patch, space.axis),
        )
        for space in allowed_spaces(request)
    ]


def allowed_spaces(request: PlanRequest) -> list[TilingSpace]:
    """Return the spaces of columns, of patches, or of both; NoPlanError where there is none of those asked for."""
    wanted, target = request.constraints, request.target
    precision = target.device_precision
    spaces = all_spaces(request.network, request.output, precision, wanted.patch)
    allowed = [space for space in spaces if wanted.cover in (None, "columns" if space.streams else "patches")]
    if not allowed:
        raise NoPlanError(
            f"{spaces[0].network.name} sees one voxel along every axis, so that columns have nothing to carry; drop "
            f"{option('cover')}"
        )
    return allowed


Found = tuple[TilingSearch, Solution]
Ranked = Sequence[Found]  # searches that found something, the fastest first


def _ranked(searches: Sequence[TilingSearch]) -> Ranked:
    return sorted(((search, found) for search in searches if (found := search.run())), key=lambda pair: pair[1].seconds)


def _smallest_first(ranked: Ranked) -> Ranked:
    """Put the plan first that needs the least memory of those that take at most ALIKE times the least seconds.

    If memory costs no time, the fastest plan stays first.
    """
    (search, fastest), *_ = ranked
    if not search.price:
        return ranked
    most = ALIKE * fastest.seconds
    near = [(search, search.smaller(found, most)) for search, found in ranked if found.seconds <= most]
    best = min(near, key=lambda pair: (pair[1].memory.device_bytes, pair[1].seconds))
    return [best, *(pair for pair in ranked if pair[0] is not best[0])]


def _kinds(plan: RunPlan, searches: Sequence[TilingSearch], ranked: Ranked) -> Iterator[tuple[Found, str]]:
    """Yield the best of columns, of patches and of each without depth first; not the plan itself."""
    for streams in (True, False):
        of_kind = [search for search in searches if search.space.streams == streams]
        best = next((pair for pair in ranked if pair[0].space.streams == streams), None) or smallest_need(of_kind)
        if best is None:
            continue
        if plan.main.streams != streams or best[1].memory != plan.main.memory:
            yield best, ""
        if any(way.sub_batches > 1 for _, way in best[1].layer_runs):
            whole = [search.undivided() for search in of_kind]
            if (best := next(iter(_ranked(whole)), None) or smallest_need(whole)) is not None:
                yield best, ""


def _baselines(searches: Sequence[TilingSearch]) -> Iterator[tuple[Found, str]]:
    """Yield the best patches of every scheme that no session runs, with its description, where patches are allowed."""
    for patches in searches:
        for scheme in () if patches.space.streams else schemes(patches.request.network):
            searched = [SchemeSearch.like(patches, scheme)]
            if (best := next(iter(_ranked(searched)), None) or smallest_need(searched)) is not None:
                yield best, scheme.words


def check_request(request: PlanRequest, table: tuple[Primitive, ...]) -> None:
    """Raise NoPlanError or ShapeError for a request that no plan can meet, whatever the costs are."""
    limits, wanted = request.limits, request.constraints
    if limits.ram_bytes < 1 or limits.threads < 1:
        raise NoPlanError(
            f"a run needs memory and at least one thread, not {limits.ram_bytes} bytes and {limits.threads} threads; "
            f"raise {option('ram')} or {option('threads')}"
        )
    if min(request.output) < 1:
        raise ShapeError(
            f"there is nothing to compute: the output is {text(request.output)}; give a larger volume or region"
        )
    if wanted.patch is not None and len(wanted.patch) != 3:
        raise ShapeError(f"an output patch has three sizes (z, y, x), not {wanted.patch}")
    for name in wanted.only:
        try:
            find(name, table)
        except KeyError as error:
            raise NoPlanError(f"{error.args[0]}; `znnpy primitives` lists them all") from None
    if wanted.patch is not None:
        request.network.layer_shapes(wanted.patch)  # ShapeError when it is none


def check_device(request: PlanRequest) -> None:
    """Raise NoPlanError where the device is missing or has no limit, and for primitives of another device."""
    device = request.target.device
    if device == "gpu" and request.target.machine.gpu is None:
        raise NoPlanError(
            f"layers are to run on a GPU, and there is none; drop {option('device')}, "
            f"or choose {option('device', 'cpu')}"
        )
    if device == "gpu" and request.limits.vram_bytes is None:
        raise NoPlanError(f"a run on a GPU needs memory there, and has no limit for it; give {option('vram')}")
    for name in request.constraints.only:
        if device_of(name) != device:
            raise NoPlanError(
                f"{name} does not run on the {device.upper()}; drop {option('only', name)}, "
                f"or choose another {option('device')}"
            )


def _narrowing(wanted: Constraints) -> str:
    """Return advice to drop those constraints that were given and leave plans out; empty where none was."""
    words = (
        (option("patch"), wanted.patch is not None),
        (option("only"), bool(wanted.only)),
        (option("cover"), wanted.cover is not None),
        (option("depth_first", False), not wanted.depth_first),
    )
    return "".join(f", or drop {word}" for word, given in words if given)


def _plan(ranked: Ranked) -> RunPlan:
    """Return the best of all spaces as a plan, with the best of the others and the next best as runners-up."""
    search, found = ranked[0]
    others = (other.runner_up(best) for other, best in ranked if other.space.streams != search.space.streams)
    larger = search.next_larger(found.seconds)
    return replace(
        _plan_of(search, found),
        other=next(others, None),
        runners_up=(*larger, *search.slower(found, RUNNERS_UP - len(larger))),
    )


def _plan_of(search: TilingSearch, best: Solution) -> RunPlan:
    """Return what was found as a plan without runners-up."""
    rates, request = search.options.rates, search.request
    choices = tuple(choice_of(layers, way, rates) for layers, way in best.layer_runs)
    plan = plan_of(
        request,
        best.tiling,
        (Stage(search.device, choices, best.tensors),),
        best.memory,
        preparing_seconds=best.preparing,
        preparing_measured=best.preparing > 0 and rates.first_touch_measured,
    )
    return RunPlan.of(request.network, request.target.machine, plan)
