"""What do the memory of the host and the processor add to a GPU? Table V of ZNNi (SC16) for the modes there are now.

    python benchmarks/modes.py [--networks n337 n537 n726 n926] [--modes cpu gpu gpu-host cpu-to-gpu side-by-side]
                               [--vram 2G 4G 8G 12G 24G] [--ram 96G] [--precision fp32] [--side 512]
                               [--turns 2] [--run-seconds 4] [--minutes 9] [--definition] [--resume] [--quick]
                               [--out RESULT.json]

First `znnpy measure` measures the card and the processor; then every mode is planned for one volume of each network
within every limit of the GPU's memory. At most so many `--turns` the layers of these plans are timed and all are
planned anew, as with `--rigor measure`, until no plan of a network holds any that were not; no turn begins when half of
the `--minutes` are gone. Each row has what was planned before that, and whether all its layers were timed. Then the
plans run, from the host's memory into the host's memory, through the pipeline that a run goes through. What takes
longer than `--run-seconds` runs in part, as many steps and whole columns as fit, or a few steps where two sides
overlap; what it says of the whole output is the plan's prediction times how far the part was off its own. Side by side
runs whole: against it the GPU alone should run for half a minute. As much of the host's memory as the largest plan
takes is touched before, since a virtual machine may be given it only then. Buffers are pinned, and what moves voxels is
compiled before the clock starts; of what takes less than ten seconds a first run does not count either, in which the
rest is compiled. `--resume` takes up what `--out` holds, plans as they are.

Each row has the speeds that were planned and measured, the memory of the card and of the process, beside what that had
before, that was promised and taken, and how far a corner of the output is from that of the processor, as a share of the
size of the values; with `--definition` from what exactness.py computes in float64, with PyTorch. Of layers that run on
two devices the row says for how much of the run each was busy, and of its steady state the slower; of side by side how
much of what the processor does alone was gained, and how many cells it gave up.
"""

from __future__ import annotations

import argparse
import json
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from contestants import random_network
from contestants_gpu import Held, noise
from gpu_card import gpu_header
from header import machine_header
from modes_runs import WARM_SECONDS, Corner, corner_of, ran, to_run, touch
from planning_plans import Ground
from planning_points import apart, grounds, measured, own_cache, spread

from znnpy.errors import NoPlanError, ShapeError, ZnnpyError
from znnpy.formats.networks import read_network
from znnpy.kernels.gpu import device
from znnpy.machine import Limits, limits_of, parse_bytes, this_machine
from znnpy.planner.cost_model import Rates
from znnpy.planner.memory import DeviceKind
from znnpy.planner.plan import Plan
from znnpy.planner.search import make_plan
from znnpy.run.devices import Site, opened
from znnpy.run.learning import Known
from znnpy.run.modes import Task, processor_plans, processor_rates
from znnpy.run.rigor import Study, layers_timed
from znnpy.shapes import PRECISIONS, Precision, Vec3

NETWORKS = ("n337", "n537", "n726", "n926")
MODES = ("gpu", "cpu", "gpu-host", "cpu-to-gpu", "side-by-side")  # in the order in which they are planned and run
SIDES = {"n337": 1024, "n537": 768, "n726": 768, "n926": 512}  # of volumes: a GPU takes seconds for them
OTHER_SIDE = 256
SPARE_SECONDS = 10.0  # of a run, beside what is predicted: a session is made, memory taken, kernels are compiled

Facts = dict[str, Any]
Key = tuple[str, str, str]  # network, mode and limit of a row


@dataclass(frozen=True)
class Wanted:
    """One row to be planned."""

    network: str
    mode: str
    vram: str
    side: int
    ground: Ground

    @property
    def key(self) -> Key:
        return self.network, self.mode, self.vram

    def plan(self, known: Known) -> Plan:
        """In a process of its own; NoPlanError where the mode has none."""
        ground, network = self.ground, read_network(self.network).network
        site = Site(ground.machine, ground.precision, context_bytes=ground.context)
        rates = known.get(ground.device) or ground.rates

        def make(output: Vec3, limits: Limits, **more: Any) -> Plan:
            words: dict[str, Any] = {"baseline": ground.baseline, "rates": rates, "context": ground.context}
            words |= {"device": ground.device, "precision": ground.precision}
            return make_plan(network, output, ground.machine, limits, **{**words, **more})

        task = Task(
            self.mode,
            site,
            network,
            network.dense_size((self.side,) * 3),
            ground.limits,
            ground.baseline,
            only=(),
            masks=False,
            make=make,
            processor=processor_plans(site, network, (), known.get("cpu")),
            host_rates=known.get("cpu"),
        )
        return task.best()[0]


def planned(asked: tuple[Wanted, Known]) -> Facts:
    """A row without a run."""
    want, known = asked
    row: Facts = {"network": want.network, "mode": want.mode, "vram": want.vram, "side": want.side}
    began = time.process_time()
    try:
        plan = want.plan(known)
    except (NoPlanError, ShapeError) as error:
        return row | {"failure": str(error)}
    return row | {
        "failure": None,
        "planning_seconds": time.process_time() - began,
        "planned_voxels_per_second": plan.voxels_per_second,
        "plan": json.loads(plan.to_json()),
    }


def plan_all(known: dict[Key, Facts], options: Namespace, until: float, keep: Callable[[], None]) -> None:
    """Every mode within every limit for all networks, but for what is known; after `until` no layers are timed."""
    wanted = [want for name in options.networks for want in _wanted(name, known, options)]
    if not wanted:
        return
    rates: dict[str, Known] = {name: _stored(name, wanted) for name in options.networks}
    for turn in range(options.turns + 1):
        rows = spread(planned, [(want, rates[want.network]) for want in wanted], options.workers)
        for want, row in zip(wanted, rows, strict=True):
            before = known.get(want.key, {}).get("planned_before", [])
            known[want.key] = row | {"planned_before": before, "all_timed": False}
            print(said_of(row), flush=True)
        keep()
        if turn == options.turns or time.monotonic() > until:
            return
        asked = {name: [row["plan"] for row in rows if row["network"] == name and not row["failure"]] for name in rates}
        found = apart(timed, (asked, rates, options.precision, options.layer_seconds), alone=True)
        for want in wanted:
            known[want.key]["all_timed"] = found[want.network] == rates[want.network]
        wanted = [want for want in wanted if not known[want.key]["all_timed"]]  # others would be the same
        rates |= found
        for row in (known[want.key] for want in wanted):
            if not row["failure"]:
                row["planned_before"] = [*row["planned_before"], row["planned_voxels_per_second"]]


def _wanted(name: str, known: dict[Key, Facts], options: Namespace) -> list[Wanted]:
    """Rows of a network that have to be planned; why others cannot be goes into `known`."""
    ram = str(options.ram)
    missing = [key for key in keys(name, options) if key not in known]
    found: dict[tuple[str, str], Ground | str] = {}
    for on, limits in (("gpu", options.vram), ("cpu", [ram])):
        if any((mode == "cpu") == (on == "cpu") for _, mode, _ in missing):
            words = vars(options) | {"device": on, "limits": limits, "networks": [name], "costs": None}
            found |= apart(grounds, Namespace(**words), alone=on == "gpu")
    side, wanted = options.side or SIDES.get(name, OTHER_SIDE), []
    for _, mode, vram in missing:
        ground = found[name, vram or ram]
        if isinstance(ground, str):
            known[name, mode, vram] = {"network": name, "mode": mode, "vram": vram, "side": side, "failure": ground}
        else:
            limits = replace(ground.limits, ram_bytes=options.ram)
            wanted.append(Wanted(name, mode, vram, side, replace(ground, limits=limits)))
    return wanted


def _stored(name: str, wanted: Sequence[Wanted]) -> Known:
    """What was measured before a plan is made, by device."""
    rates: dict[DeviceKind, Rates] = {}
    for ground in (want.ground for want in wanted if want.network == name):
        rates[ground.device] = ground.rates
        if ground.device == "gpu" and (cpu := processor_rates(ground.machine, ground.limits)) is not None:
            rates["cpu"] = cpu
    return rates


def timed(asked: tuple[dict[str, list[Facts]], dict[str, Known], Precision, float]) -> dict[str, Known]:
    """What is known of each network's layers once those of its plans were timed, for so many seconds each."""
    plans, rates, precision, seconds = asked
    with opened("gpu", precision) as site:
        for name, some in plans.items():
            began = time.perf_counter()
            for facts in some:
                plan = Plan.from_json(json.dumps(facts))
                rates[name] = layers_timed(plan, site, rates[name], Study("measure", seconds))
            print(f"{Path(name).stem}: layers of {len(some)} plans in {time.perf_counter() - began:.1f} s", flush=True)
    return rates


def defined(asked: tuple[str, int]) -> npt.NDArray[np.float64]:
    """The corner (maps, z, y, x) of a network's output for a volume of noise of such a side, by definition."""
    from exactness import by_definition  # PyTorch is an extra

    name, side = asked
    network = random_network(name)
    return by_definition(network, Held(noise((side,) * 3, network.input_channels)), corner_of(network, side))


def keys(name: str, options: Namespace) -> list[Key]:
    """Of all rows of a network; the processor alone has no limit of VRAM."""
    limits = {mode: [""] if mode == "cpu" else options.vram for mode in options.modes}
    return [(name, mode, vram) for mode in options.modes for vram in limits[mode]]


def said_of(row: Facts) -> str:
    """One line."""
    what = f"{Path(row['network']).stem:5} {row['mode']:13} {row['vram']:>6}"
    if row["failure"]:
        return f"{what} {row['failure'][:150]}"
    line = f"{what} planned {row['planned_voxels_per_second']:12,.0f} voxels/s"
    if "voxels_per_second" not in row:
        return f"{line}, in {row['planning_seconds']:.1f} s"
    speed, apart_by = row["voxels_per_second"], row["apart"]
    line += f", measured {speed:12,.0f} ({speed / row['planned_voxels_per_second']:.3f}), apart by {apart_by:.0e}"
    if row["busy"]:
        line += "; busy " + ", ".join(f"{side} {share:.0%}" for side, share in row["busy"].items())
    return line


def gains(rows: Sequence[Facts]) -> list[str]:
    """Of every mode beside the GPU alone, and of side by side how much of what the processor does alone was gained."""
    speeds = {(row["network"], row["mode"], row["vram"]): row.get("voxels_per_second") for row in rows}
    lines = []
    for (name, mode, vram), speed in speeds.items():
        alone, cpu = speeds.get((name, "gpu", vram)), speeds.get((name, "cpu", ""))
        if mode in ("cpu", "gpu") or not speed or not alone:
            continue
        line = f"{Path(name).stem:5} {vram:>6} {mode:13} {speed / alone:.3f} times the GPU alone"
        if mode == "side-by-side" and cpu:
            line += (
                f", {(speed - alone) / cpu:.3f} of what the processor adds at most, {cpu / (cpu + alone):.1%} of all"
            )
        lines.append(line)
    return lines


def run_all(rows: Sequence[Facts], options: Namespace, end: float, keep: Callable[[], None]) -> None:
    """Those of one network that have not run; what is not likely to fit into the time that is left is left out."""
    left = waiting(rows)
    if not left or time.monotonic() + SPARE_SECONDS > end:
        return
    of = left[0]["network"], left[0]["side"]
    corner = Corner.of(*of, options.threads, apart(defined, of, alone=True) if options.definition else None)
    with opened("gpu", options.precision) as site:
        for row in left:
            plan = Plan.from_json(json.dumps(row["plan"]))
            likely = to_run(plan, corner.network, options.run_seconds).seconds
            runs = options.rounds + (likely < WARM_SECONDS)
            if time.monotonic() + runs * likely + SPARE_SECONDS > end:
                print(f"{said_of(row)}: there is no time for it", flush=True)
                continue
            try:
                row |= ran(plan, corner, site, options.run_seconds, options.rounds)
            except (ZnnpyError, MemoryError) as error:
                row["failure"] = f"{type(error).__name__}: {error}"[:500]
            print(said_of(row), flush=True)
            keep()


def waiting(rows: Sequence[Facts]) -> list[Facts]:
    """Those that were planned and have not run."""
    return [row for row in rows if not row["failure"] and "voxels_per_second" not in row]


def against(options: Namespace) -> str:
    """What outputs are held against."""
    return "definition" if options.definition else "processor"


def taken_up(options: Namespace) -> tuple[list[Facts], dict[Key, Facts]]:
    """What `znnpy measure` said and all rows, of an earlier run in the same words; SystemExit where they differ."""
    if not options.resume or not options.out.exists():
        return [], {}
    before = json.loads(options.out.read_text())
    if (there := before["precision"]) != options.precision:
        raise SystemExit(f"{options.out} holds runs in {there}: give another --out")
    if (there := before.get("apart_from", "processor")) != against(options):
        raise SystemExit(f"{options.out} holds runs that are held against the {there}: give another --out")
    return before["measure"], {(row["network"], row["mode"], row["vram"]): row for row in before["rows"]}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--vram", nargs="+", default=["2G", "4G", "8G", "12G", "24G"])
    parser.add_argument("--ram", type=parse_bytes, default=limits_of(this_machine()).ram_bytes, help="of the process")
    parser.add_argument("--side", type=int, default=0, help="of all volumes; without it they differ by network")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--threads", type=int, default=limits_of(this_machine()).threads)
    parser.add_argument("--run-seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--turns", type=int, default=2, help="of timing layers, and of planning anew")
    parser.add_argument("--layer-seconds", type=float, default=10.0, help="of timing the layers of one plan")
    parser.add_argument("--minutes", type=float, default=9.0, help="of all")
    parser.add_argument("--measure-minutes", type=float, default=0.8, help="of `znnpy measure`; 0: rates are assumed")
    parser.add_argument("--workers", type=int, default=limits_of(this_machine()).threads, help="that plan")
    parser.add_argument("--definition", action="store_true", help="what outputs are held against, by PyTorch")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--quick", action="store_true", help="a small volume, one limit: to see that it works")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "modes.json")
    options = parser.parse_args(given)
    if options.definition and find_spec("torch") is None:
        raise SystemExit("--definition needs PyTorch: pip install 'znnpy[bench]'")
    begin = time.monotonic()
    end = begin + 60 * options.minutes
    if options.quick:
        options.side, options.run_seconds, options.measure_minutes = options.side or 40, 0.2, 0.0
        options.vram, options.workers, options.turns = options.vram[-1:], 1, 1
    measure, known = taken_up(options)

    def keep() -> None:
        rows = list(known.values())
        facts = {
            "precision": options.precision,
            "apart_from": against(options),
            "measure": measure,
            "gains": gains(rows),
            "rows": rows,
        }
        head = machine_header() | gpu_header(device.find_gpu())
        options.out.write_text(json.dumps({"header": head} | facts) + "\n")

    with own_cache(options.out.with_name(f"{options.out.stem}-cache")):
        for on in () if measure else ("gpu", "cpu"):
            measure += measured(Namespace(**vars(options) | {"device": on, "network_minutes": 0.0}))
        keep()
        plan_all(known, options, (begin + end) / 2, keep)
        plans = [Plan.from_json(json.dumps(row["plan"])) for row in waiting(list(known.values()))]
        touch(max((plan.memory.peak for plan in plans), default=0), options.threads)
        for name in options.networks:
            run_all([known[key] for key in keys(name, options)], options, end, keep)
    keep()
    print("\n".join([*gains(list(known.values())), str(options.out)]))


if __name__ == "__main__":
    main()
