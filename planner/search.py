"""The plan with the most output voxels per second within the limits: patches against columns along every axis.

A convolution and the pooling behind it are chosen for together: layer by layer, or one primitive for both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any

from znnpy.errors import NoPlanError, ShapeError
from znnpy.kernels.primitive import Primitive
from znnpy.kernels.table import IN_HOST_RAM, TABLE, find
from znnpy.machine import Limits, Machine
from znnpy.messages import option
from znnpy.network import Network
from znnpy.planner.cost_model import Rates, assumed_rates
from znnpy.planner.found_plan import choice_of, plan_of
from znnpy.planner.kinds import kind_of
from znnpy.planner.layer_options import OptionTable
from znnpy.planner.layer_search import Solution
from znnpy.planner.memory import CONTEXT_BYTES, DeviceKind, baseline_bytes, context_bytes
from znnpy.planner.nearest_miss import no_plan
from znnpy.planner.offload import OffloadMode, OffloadSearch
from znnpy.planner.plan import Alternative, Plan, Stage, device_of
from znnpy.planner.schemes import Scheme, SchemeSearch
from znnpy.planner.schemes import baselines as baselines_of
from znnpy.planner.sublayers import DividedPrimitive
from znnpy.planner.tiling_search import RUNNERS_UP, TilingSearch
from znnpy.planner.tilings import TilingSpace, all_spaces, splits
from znnpy.shapes import Precision, Vec3, text, turned

ALIKE = 1.03  # times the seconds of the fastest plan: of those that take no longer, the leanest is taken


def make_plan(
    network: Network,
    output: Vec3,
    machine: Machine,
    limits: Limits,
    *,
    itemsize_in: int = 1,
    itemsize_out: int = 4,
    patch: Vec3 | None = None,
    only: str | Sequence[str] = (),
    table: tuple[Primitive, ...] = TABLE,
    rates: Rates | None = None,
    baseline: int | None = None,
    device: DeviceKind = "cpu",
    precision: Precision = "fp32",
    context: int = CONTEXT_BYTES,
    masks: bool = False,
    columns: bool | None = None,
    depth_first: bool = True,
    kinds: bool = False,
    baselines: bool = False,
    scheme: Scheme | None = None,
    options: OptionTable | None = None,
    mode: OffloadMode | None = None,
    host_rates: Rates | None = None,
    than: Plan | None = None,
    in_host_ram: tuple[DividedPrimitive, ...] = IN_HOST_RAM,
) -> Plan:
    """The fastest plan for a dense output of (z, y, x) voxels that keeps the whole process within the limits.

    itemsize_in   bytes per voxel of the volume as stored; itemsize_out: per value of the output
    patch         this output patch only; a multiple of the pooling period, else ShapeError
    only          name or names of primitives; where one of them applies to a layer no other is considered
    rates         speeds of the machine; assumed from `machine` when not given
    baseline      bytes of the process without the run; measured now when not given
    device        where all layers run; "gpu" needs a machine with one, and limits for its memory
    precision     the least that will do: on a CPU everything is computed in fp32, which is more than enough
    context       bytes of the GPU that CUDA took when it was opened; a margin for its libraries is added
    masks         count masks of the input voxels that are not finite; needed to run with NaN allowed
    columns       True: columns only, False: patches only
    depth_first   False: all fragments of a pooling go through each layer before any goes through the next
    kinds         find the best plan of every other kind too, and why it is not taken; takes up to twice as long
    baselines     and of patches that no session runs (`schemes`); scheme: plan patches of this one only
    options       what was worked out for other limits, of the same words but for limits, patch, columns, depth_first;
                  TypeError where rates are given too
    mode          the first layers with tensors in RAM, the others on the GPU (`offload`), whatever
                  `device` says; TypeError with baselines, scheme or options. Kinds are then those of one device alone
    host_rates    speeds of the processor, where `rates` are the GPU's
    than          with a mode: the plan of the GPU alone, and one that is faster is wanted, else NoPlanError
    in_host_ram   primitives of the GPU for offloaded convolutions, in mode gpu-host

    NoPlanError names the nearest miss in bytes when nothing fits.
    """
    only = (only,) if isinstance(only, str) else tuple(only)
    _check_wishes(network, output, limits, patch, only, table if mode is None else (*table, *in_host_ram))
    if mode is not None:
        if baselines or scheme is not None or options is not None:
            raise TypeError(f"mode {mode} knows no baselines, no scheme and no options")
        words = {
            "itemsize_in": itemsize_in,
            "itemsize_out": itemsize_out,
            "patch": patch,
            "baseline": baseline_bytes() if baseline is None else baseline,
            "masks": masks,
            "columns": columns,
            "depth_first": depth_first,
        }
        return _offloaded(
            network, output, machine, limits, mode,
            only=only, table=table, in_host_ram=in_host_ram, rates=rates, host_rates=host_rates, precision=precision,
            context=context, kinds=kinds, than=than, words=words,
        )  # fmt: skip
    if host_rates is not None or than is not None:
        raise TypeError("host_rates and than are for modes in which layers run on two devices: give a mode")
    _check_device(machine, limits, device, only)
    if options is not None and rates is not None:
        raise TypeError("options were worked out for rates of their own: give options or rates")
    searches = _searches(
        all_spaces(network, output, precision if device == "gpu" else "fp32", patch),
        patch,
        columns=columns,
        depth_first=depth_first,
        scheme=scheme,
        limits=limits,
        itemsize_in=itemsize_in,
        itemsize_out=itemsize_out,
        options=options or options_for(machine, limits, only=only, table=table, rates=rates, device=device),
        device=device,
        baseline=baseline_bytes() if baseline is None else baseline,
        context=context_bytes(context) if device == "gpu" else 0,
        masks=masks,
    )
    if not (ranked := _ranked(searches)):
        raise no_plan(network, searches, _narrowing(patch, only, columns, depth_first))
    ranked = _leanest_first(ranked)
    plan = _plan(network, machine, ranked)
    others = [*_kinds(network, machine, plan, searches, ranked)] if kinds else []
    return replace(plan, alternatives=(*others, *(_baselines(network, machine, plan, searches) if baselines else ())))


def _offloaded(
    network: Network,
    output: Vec3,
    machine: Machine,
    limits: Limits,
    mode: OffloadMode,
    *,
    only: Sequence[str],
    table: tuple[Primitive, ...],
    in_host_ram: tuple[DividedPrimitive, ...],
    rates: Rates | None,
    host_rates: Rates | None,
    precision: Precision,
    context: int,
    kinds: bool,
    than: Plan | None,
    words: dict[str, Any],
) -> Plan:
    """The fastest plan of two devices; `words` are those of `make_plan` that it shares with plans of one."""
    asked = {primitive.name for primitive in in_host_ram} & set(only)
    if asked and mode == "cpu-to-gpu":
        raise NoPlanError(
            f"{' and '.join(asked)} runs in mode gpu-host alone; drop {option('only')} or choose "
            f"{option('mode', 'gpu-host')}"
        )
    own = {
        device: tuple(name for name in only if device_of(name) == device and name not in asked)
        for device in ("cpu", "gpu")
    }
    _check_device(machine, limits, "gpu", own["gpu"])
    if precision == "fp16":
        raise NoPlanError(
            f"mode {mode} hands float32 from the host to the GPU: choose {option('precision', 'tf32')} or "
            f"{option('precision', 'fp32')}"
        )
    if len(network.layers) < 2:
        raise NoPlanError(
            f"{network.name} has one layer, and mode {mode} needs one for each device; drop {option('mode')}"
        )
    alone = [] if than is None else [than]
    cpu = options_for(machine, limits, only=own["cpu"], table=table, rates=host_rates, device="cpu")
    gpu = options_for(machine, limits, only=own["gpu"], table=table, rates=rates, device="gpu")
    for options, device in ((cpu, "cpu"), (gpu, "gpu")) if than is None and (kinds or words["patch"] is None) else ():
        more: dict[str, Any] = {"device": device, "only": own[device], "precision": precision, "context": context}
        with suppress(NoPlanError):
            alone.append(make_plan(network, output, machine, limits, table=table, options=options, **more, **words))
    if mode == "cpu-to-gpu":
        host = limits.without_feed_threads(1)
        host_rates = None if host_rates is None else host_rates.slowed(limits.threads / host.threads)
        cpu = options_for(machine, host, only=own["cpu"], table=table, rates=host_rates, device="cpu")
    spaces = _allowed(all_spaces(network, output, precision, words["patch"]), words["columns"])
    search = OffloadSearch(
        network=network,
        output=output,
        machine=machine,
        limits=limits,
        mode=mode,
        cpu=cpu,
        gpu=gpu,
        itemsize_in=words["itemsize_in"],
        itemsize_out=words["itemsize_out"],
        baseline=words["baseline"],
        context=context_bytes(context),
        masks=words["masks"],
        precision=precision,
        divided=[primitive for primitive in in_host_ram if primitive.name in only or not asked],
        asked=bool(asked),
        depth_first=words["depth_first"],
        below=inf if than is None else than.seconds,
    )
    plan = search.run(spaces, words["patch"], alone)
    return replace(plan, alternatives=tuple(kind_of(network, plan, other) for other in alone)) if kinds else plan


def _searches(
    spaces: Sequence[TilingSpace],
    patch: Vec3 | None,
    *,
    columns: bool | None,
    depth_first: bool,
    scheme: Scheme | None,
    **asked: Any,
) -> Sequence[TilingSearch]:
    """In all spaces that are allowed; `asked` is the same in each."""
    found = [
        TilingSearch(
            space=space,
            patch=None if patch is None else turned(patch, space.axis),
            splits=splits(space.network) if depth_first else splits(space.network)[:1],
            **asked,
        )
        for space in _allowed(spaces, columns)
    ]
    if scheme is None:
        return found
    return [SchemeSearch.beside(patches, scheme) for patches in found if not patches.space.streams]


def _allowed(spaces: Sequence[TilingSpace], columns: bool | None) -> list[TilingSpace]:
    """Of columns only, or of patches; NoPlanError where there is none of them."""
    allowed = [space for space in spaces if columns is None or space.streams == columns]
    if not allowed:
        raise NoPlanError(
            f"{spaces[0].network.name} sees one voxel along every axis, so that columns have nothing to carry; drop "
            f"{option('cover')}"
        )
    return allowed


def options_for(
    machine: Machine,
    limits: Limits,
    *,
    only: Sequence[str] = (),
    table: tuple[Primitive, ...] = TABLE,
    rates: Rates | None = None,
    device: DeviceKind = "cpu",
) -> OptionTable:
    """For `make_plan` at several limits in turn: words as there, of `limits` only the threads."""
    rates = rates or assumed_rates(machine, limits.threads, device)
    there = tuple(primitive for primitive in table if device_of(primitive.name) == device)
    return OptionTable(there, machine, limits.threads, rates, frozenset(only))


Ranked = Sequence[tuple[TilingSearch, Solution]]  # searches that found something, the fastest first


def _ranked(searches: Sequence[TilingSearch]) -> Ranked:
    return sorted(((search, found) for search in searches if (found := search.run())), key=lambda pair: pair[1].seconds)


def _leanest_first(ranked: Ranked) -> Ranked:
    """Put the plan first that needs the least memory of those that take at most ALIKE times the least seconds.

    If memory costs no time, the fastest plan stays first.
    """
    (search, fastest), *_ = ranked
    if not search.price:
        return ranked
    most = ALIKE * fastest.seconds
    near = [(search, search.leaner(found, most)) for search, found in ranked if found.seconds <= most]
    best = min(near, key=lambda pair: (pair[1].memory.device_bytes, pair[1].seconds))
    return [best, *(pair for pair in ranked if pair[0] is not best[0])]


def _kinds(
    network: Network, machine: Machine, plan: Plan, searches: Sequence[TilingSearch], ranked: Ranked
) -> Iterator[Alternative]:
    """Of columns and of patches the best, and the best without depth first; but for the plan itself."""
    for walks in (True, False):
        of_kind = [search for search in searches if search.space.streams == walks]
        best = next((pair for pair in ranked if pair[0].space.streams == walks), None)
        best = best or _least(of_kind)
        if best is not None and (plan.streams != walks or best[1].memory != plan.memory):
            yield kind_of(network, plan, _plan_of(network, machine, *best))
        if best is None or all(way.sub_batches == 1 for _, way in best[1].layer_runs):
            continue
        whole = [search.undivided() for search in of_kind]
        found = _ranked(whole)
        best = found[0] if found else _least(whole)
        if best is not None:
            yield kind_of(network, plan, _plan_of(network, machine, *best))


def _baselines(
    network: Network, machine: Machine, plan: Plan, searches: Sequence[TilingSearch]
) -> Iterator[Alternative]:
    """Of every scheme that no session runs the best patches, where patches are allowed."""
    for patches in searches:
        for scheme in () if patches.space.streams else baselines_of(network):
            search = SchemeSearch.beside(patches, scheme)
            found = search.run()
            best = (search, found) if found else _least([search])
            if best is not None:
                yield kind_of(network, plan, _plan_of(network, machine, *best), scheme.words)


def _least(searches: Sequence[TilingSearch]) -> tuple[TilingSearch, Solution] | None:
    """The smallest need of all shapes, and where it was found; None where there is a layer nobody runs."""
    found = [(search, least) for search in searches if isinstance(least := search.least(), Solution)]
    return min(
        found, default=None, key=lambda need: (sum(need[1].memory.excess(need[0].limits)), need[1].memory.device_bytes)
    )


def _check_wishes(
    network: Network,
    output: Vec3,
    limits: Limits,
    patch: Vec3 | None,
    only: Sequence[str],
    table: tuple[Primitive, ...],
) -> None:
    if limits.ram_bytes < 1 or limits.threads < 1:
        raise NoPlanError(
            f"a run needs memory and at least one thread, not {limits.ram_bytes} bytes and {limits.threads} threads; "
            f"raise {option('ram')} or {option('threads')}"
        )
    if min(output) < 1:
        raise ShapeError(f"there is nothing to compute: the output is {text(output)}; give a larger volume or region")
    if patch is not None and len(patch) != 3:
        raise ShapeError(f"an output patch has three sizes (z, y, x), not {patch}")
    for name in only:
        try:
            find(name, table)
        except KeyError as error:
            raise NoPlanError(f"{error.args[0]}; `znnpy primitives` lists them all") from None
    if patch is not None:
        network.layer_shapes(patch)  # ShapeError when it is none


def _check_device(machine: Machine, limits: Limits, device: DeviceKind, only: Sequence[str]) -> None:
    if device == "gpu" and machine.gpu is None:
        raise NoPlanError(
            f"layers are to run on a GPU, and there is none; drop {option('device')}, "
            f"or choose {option('device', 'cpu')}"
        )
    if device == "gpu" and limits.vram_bytes is None:
        raise NoPlanError(f"a run on a GPU needs memory there, and has no limit for it; give {option('vram')}")
    for name in only:
        if device_of(name) != device:
            raise NoPlanError(
                f"{name} does not run on the {device.upper()}; drop {option('only', name)}, "
                f"or choose another {option('device')}"
            )


def _narrowing(patch: Vec3 | None, only: Sequence[str], columns: bool | None, depth_first: bool) -> str:
    """Advice to drop those arguments that were given and leave plans out; empty where none was."""
    words = (
        (option("patch"), patch is not None),
        (option("only"), bool(only)),
        (option("cover"), columns is not None),
        (option("depth_first", False), not depth_first),
    )
    return "".join(f", or drop {word}" for word, given in words if given)


def _plan(network: Network, machine: Machine, ranked: Ranked) -> Plan:
    """The best of all spaces as a plan; the others, and what is next best, as its runners-up."""
    search, found = ranked[0]
    others = [other.runner_up(best) for other, best in ranked if other.space.streams != search.space.streams]
    larger = search.next_larger(found.seconds)
    return replace(
        _plan_of(network, machine, search, found),
        other=others[0] if others else None,
        runners_up=(*larger, *search.slower(found, RUNNERS_UP - len(larger))),
    )


def _plan_of(network: Network, machine: Machine, search: TilingSearch, best: Solution) -> Plan:
    """What was found as a plan without runners-up."""
    choices = tuple(choice_of(layers, way, search.options.rates) for layers, way in best.layer_runs)
    return plan_of(
        network,
        machine,
        search.limits,
        best.tiling,
        (Stage(search.device, choices, best.tensors),),
        best.memory,
        itemsize_in=search.itemsize_in,
        itemsize_out=search.itemsize_out,
        preparing_seconds=best.preparing,
        preparing_measured=best.preparing > 0 and search.options.rates.first_touch_measured,
    )
