"""Can the planner's word be trusted, and can its pick be beaten? The paper's four networks, limit by limit.

    python benchmarks/planning.py [--device gpu] [--networks n337 ...] [--limits 1G 2G 4G 8G 16G] [--minutes 40]
                                  [--do runs layers rivals finals findings peers] [--costs FILE] [--resume] [--quick]
                                  [--side 512] [--no-torch] [--out RESULT.json]

Limits are of RAM, or of VRAM with `--device gpu`. First `znnpy measure` measures the machine, unless `--costs` names a
file of it. For each network and limit the planner plans for a volume, uint8; its plan, the pick, is held against the
machine, the most important figures first, each of them over all points before the next:

    runs      the pick from end to end, twice `--rounds` times: throughput and peak memory. Every other run and those
              between are A and A: how far their medians lie apart is the band. Volumes are as large as a run of
              `--point-seconds` allows (planning_points.py): whole steps, what comes before the output among them.
              On a CPU by `znnpy infer`, each run a process; on a GPU from memory to memory (planning_gpu.py).
    layers    each distinct layer (shape, primitive, version, variant) is timed by itself, in a process that runs
              nothing else (planning_layer.py); seconds times runs, summed, are the measured seconds of a plan. A
              second reading in another process gives the band of A against A.
    rivals    every uniform choice (one primitive wherever it applies, with the patches that suit it), `--random` random
              feasible plans, and every plan that differs from the pick in one choice (planning_plans.py), summed in the
              same way, those that are predicted to be the fastest first, for `--rival-seconds` a point; a rival whose
              layers take more than `--give-up` times as long as the pick is not timed further.
    finals    the pick and its three fastest rivals from end to end, `--rounds` times, on a GPU five times at least; in
              turn on a CPU, there and back. A rival that walks in the steps of the pick runs the same part
    findings  section VI-A of the paper: one image at a time, and all poolings as fragments (planning_findings.py)
    peers     Table V today: PyTorch with all subsamplings recomputed, dilated and as fragments, with the best of the
              patches that fit the limit (planning_peers.py)

Results, table and pictures are written after every point. Beside them lie timed layers (`-layers.json`) and what was
measured of the machine (`-cache`); `--resume` takes all of it up, plans included. What is not likely to fit into the
rest of `--minutes` is left out.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import date
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

from columns_plans import own_bytes
from header import machine_header, taken_device, without_forced_blas_kernels
from planning_child import NoTimeLeft
from planning_clock import Kept, Stopwatch, band
from planning_findings import Best, best, schemes, theory, theory_verdict
from planning_plans import Maker, Rival, all_rivals, turns
from planning_points import SIDES, Point, measured, own_cache, points, spread
from planning_runs import Runs, decided, peers
from planning_tables import KINDS, Facts, Row, band_of, error, pictures, summary, table

from znnpy.machine import this_machine
from znnpy.planner.plan import Plan
from znnpy.shapes import PRECISIONS

NETWORKS = ("n337", "n537", "n726", "n926")
LIMITS = {"cpu": ["1G", "2G", "4G", "8G", "16G"], "gpu": ["4G", "8G", "16G", "32G", "64G", "128G"]}
POINT_SECONDS = {"cpu": 5.0, "gpu": 1.0}
RIVAL_SECONDS = {"cpu": 20.0, "gpu": 8.0}
START_SECONDS = {"cpu": 4.0, "gpu": 3.0}  # assumed, of a run or of a child
STEPS = ("runs", "layers", "rivals", "finals", "findings", "peers")
FINALISTS = 3
GPU_FINALS = 5  # runs of each, or more: they take about a second, beside several that it takes to start
THEORY_GIB = (1, 4, 16, 64)


class Benchmark:
    """Does what is asked for, step by step, and keeps it."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self.end = time.monotonic() + 60 * options.minutes
        header = machine_header()
        self._header = header | {"threads": options.threads, "device": options.device}
        self._header |= {"point_seconds": options.point_seconds, "sides": options.sides}
        facts = {key: header[key] for key in ("processor", "cores", "simd", "blas", "libraries")}
        facts |= {"threads": options.threads, "device": options.device, "gpu": None}
        if options.device == "gpu":
            from gpu_card import gpu_header

            from znnpy.kernels.gpu.device import find_gpu

            self._header |= gpu_header(find_gpu())
            facts["gpu"] = self._header["gpu"]["name"]
        self._kept = Kept(options.out.with_name(f"{options.out.stem}-layers.json"), facts, resume=options.resume)
        before = options.resume and options.out.is_file()
        old = json.loads(options.out.read_text()) if before else {"rows": [], "measured": [], "commands": []}
        self.rows = {(row["network"], row["limit"]): Row(**row) for row in old["rows"]}
        self._measured, self._commands = old["measured"], [*old["commands"], header["command"]]
        self.runner = Runs(folder, self.end)
        self._pace = 1.0  # seconds that the last pick took, over those predicted
        self._rivals: dict[str, list[Rival]] = {}
        self._best: dict[str, list[Best]] = {}

    @property
    def left(self) -> float:
        """Seconds."""
        return float(self.end - time.monotonic())

    def measure_machine(self) -> None:
        """Unless that was done, or a file of it is given."""
        if self._options.costs is None and not self._measured:
            self._measured = measured(self._options)

    def points(self) -> list[Point]:
        found = points(self._options, self.rows)
        self.write()
        return found

    def seconds_of(self, step: str, point: Point) -> float:
        """About so long a step takes at a point; of those that can be cut short, the least that makes sense."""
        options = self._options
        start, run = START_SECONDS[options.device], self._pace * point.part_seconds(point.pick)
        if step in ("runs", "finals"):
            contestants, times = (1, 2 * options.rounds) if step == "runs" else (1 + FINALISTS, options.finals)
            gpu = options.device == "gpu"
            return float(contestants * (start + (1 + times) * run if gpu else times * (start + run)))
        once = self._pace * sum(choice.seconds for choice in point.pick.choices)
        if step == "layers":
            return float(2 * (start + 2 * once + len(point.pick.choices) * options.repeat_seconds))
        return start

    def watch(self, point: Point, seconds: float = inf) -> Stopwatch:
        end = min(self.end, time.monotonic() + seconds)
        return Stopwatch(
            self._kept, point.row.network, point.pick, repeat_seconds=self._options.repeat_seconds, end=end
        )

    def runs(self, point: Point) -> None:
        for same in self._same_pick(point):
            if same.runs and not same.runs["failure"]:
                point.row.runs = {"as_within": same.limit} | same.runs
                return
        (found,) = self.runner.of(point, [("pick", point.pick)], 2 * self._options.rounds)
        if not found["failure"]:
            self._pace = max(1.0, 1 + found["error"])
        point.row.runs = found if found["failure"] else found | {"band": band_of(found["rounds"])}

    def _same_pick(self, point: Point) -> list[Row]:
        """Rows, of whatever limit, whose plan is the same."""
        own = point.row.plan | {"limits": None}
        return [row for row in self.rows.values() if row.plan | {"limits": None} == own]

    def layers(self, point: Point) -> None:
        """The pick's, twice."""
        with self.watch(point) as watch:
            one = watch.total(point.pick)
            watch.stop()
            other = watch.total(point.pick, reading=1)
        if not (one.whole and other.whole):
            point.row.layers = {"failure": one.failure or other.failure or "not all layers were timed"}
            return
        predicted = sum(choice.runs * choice.seconds for choice in point.pick.choices)
        point.row.layers = {
            "seconds": one.seconds,
            "again": other.seconds,
            "band": band(one, other),
            "predicted": predicted,
            "error": error(one.seconds, predicted),  # of voxels per second: predicted over measured
        }

    def prepare(self, step: str, todo: Sequence[Point]) -> None:
        """What has to be planned for a step, of all points at once."""
        asked = [(point, self._options) for point in todo]
        if step in ("rivals", "finals"):
            missing = [one for one in asked if str(one[0]) not in self._rivals]
            found = spread(rivals_of, missing, self._options.workers)
            self._rivals |= {str(point): rivals for (point, _), rivals in zip(missing, found, strict=True)}
        if step == "findings":
            schemed = spread(schemes_of, todo, self._options.workers)
            self._best |= {str(point): one for point, one in zip(todo, schemed, strict=True)}

    def rivals(self, point: Point) -> None:
        if "seconds" not in point.row.layers:
            return
        options, found = self._options, []
        most = options.give_up * point.row.layers["seconds"]
        in_time = True
        with self.watch(point, options.rival_seconds) as watch:
            for rival in turns(self._rivals[str(point)], KINDS):
                facts: Facts = {"kind": rival.kind, "what": rival.what, "failure": rival.failure}
                if rival.plan is not None:
                    facts |= of_rival(rival.plan)
                    try:
                        if in_time:
                            total = watch.total(rival.plan, below=most)
                            facts |= {"failure": total.failure, "seconds": total.seconds, "whole": total.whole}
                    except NoTimeLeft:
                        in_time = False
                found.append(facts)
        point.row.rivals = found

    def finals(self, point: Point) -> None:
        """The pick and its finalists in turn; where they are those of another limit, what they did there."""
        contest = [("pick", point.pick), *self._finalists(point)]
        plans = [decided(plan) for _, plan in contest]
        for same in self._same_pick(point):
            if [run.get("plan") for run in same.finals] == plans and not any(run["failure"] for run in same.finals):
                point.row.finals = [{"as_within": same.limit} | run for run in same.finals]
                return
        ran = self.runner.of(point, contest, self._options.finals)
        point.row.finals = [run | {"plan": plan} for run, plan in zip(ran, plans, strict=True)]

    def _finalists(self, point: Point) -> list[tuple[str, Plan]]:
        """The fastest rivals whose layers were all timed, and then those that are predicted to be; each plan once."""
        timed = {(r["kind"], r["what"]): r["seconds"] for r in point.row.rivals if r.get("whole")}
        plans = [(r.kind, r.what, r.plan) for r in self._rivals[str(point)] if r.plan is not None]
        ranked = sorted(plans, key=lambda one: (timed.get(one[:2], inf), one[2].seconds))
        found, met = list[tuple[str, Plan]](), [point.pick.choices]  # one primitive wherever it applies may be the pick
        for kind, what, plan in ranked:
            if len(found) < FINALISTS and plan.choices not in met:
                found.append((f"{kind} {what}", plan))
                met.append(plan.choices)
        return found

    def findings(self, point: Point) -> None:
        """Every scheme's best patch, its layers summed."""
        found: list[Facts] = []
        options = self._options
        in_time = True
        with self.watch(point, options.rival_seconds) as watch:
            least = inf
            for one in self._best[str(point)]:
                of = "paper" if not found else "images" if one.scheme.images > 1 else "fragments"
                facts: Facts = {"of": of, "scheme": str(one.scheme), "seconds": None, "whole": False}
                if one.plan is not None:
                    facts |= {"predicted": one.seconds, "patch_out": one.plan.patch_out}
                    try:
                        if in_time:
                            total = watch.total(one.plan, below=options.give_up * least)
                            least = min(least, total.seconds) if total.whole else least
                            facts |= {"seconds": total.seconds, "whole": total.whole, "failure": total.failure}
                    except NoTimeLeft:
                        in_time = False
                found.append(facts)
        point.row.findings = found

    def peers(self, of_network: Sequence[Point]) -> None:
        """PyTorch's ways, of all limits of a network together."""
        for point, facts in zip(of_network, peers(of_network, self._options, self.end), strict=True):
            point.row.peers = facts

    def write(self) -> None:
        """Everything so far, as JSON and as pictures."""
        options = self._options
        rows = list(self.rows.values())
        fig4 = {str(pools): theory(pools) for pools in (1, 2)}
        result = {
            "header": self._header,
            "commands": self._commands,
            "measured": self._measured,
            "summary": summary(rows),
            "fig4": {
                pools: {"best": [theory_verdict(points, gib) for gib in THEORY_GIB], "points": points}
                for pools, points in fig4.items()
            },
            "rows": [asdict(row) for row in rows],
        }
        options.out.parent.mkdir(exist_ok=True)
        draft = options.out.with_suffix(".part")
        draft.write_text(json.dumps(result, indent=1) + "\n")
        draft.replace(options.out)  # in one step: a run may be killed
        name = self._header["gpu"]["name"] if options.device == "gpu" else self._header["processor"]
        machine = f"{name}, {options.threads} threads, {self._header['date'][:10]}"
        pictures(options.out.with_suffix(".png"), rows, machine)


def of_rival(plan: Plan) -> Facts:
    """What is kept of a plan that is held against the pick."""
    return {
        "seconds": None,
        "whole": False,
        "predicted": sum(choice.executions * choice.seconds for choice in plan.choices),
        **decided(plan),
    }


def rivals_of(asked: tuple[Point, argparse.Namespace]) -> list[Rival]:
    """The same in every call."""
    point, options = asked
    return all_rivals(Maker(point.ground, point.network, point.pick), options.random, options.seed, options.most)


def schemes_of(point: Point) -> list[Best]:
    return [best(point.ground, point.network, point.pick, scheme) for scheme in schemes(point.network)]


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    device, words = taken_device(given)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), help="names of those that ship, or files")
    parser.add_argument("--limits", nargs="+", help=f"of RAM or VRAM; {' '.join(LIMITS[device])}")
    parser.add_argument("--side", dest="sides", nargs="+", type=int, help="of the volume: the largest that will do")
    parser.add_argument("--point-seconds", type=float, help="that a whole run is to take; longer ones are run in part")
    parser.add_argument("--do", nargs="*", choices=STEPS, default=list(STEPS), help="nothing: plan only")
    parser.add_argument("--minutes", type=float, default=40, help="of all; what would take longer is not measured")
    parser.add_argument("--measure-minutes", type=float, default=2, help="of `znnpy measure`; 0: rates are assumed")
    parser.add_argument(
        "--network-minutes", type=float, default=0, help="of `znnpy measure NETWORK` on a CPU, for each"
    )
    parser.add_argument("--resume", action="store_true", help="take up what --out holds, and layers timed before")
    parser.add_argument("--quick", action="store_true", help="one small network, few rivals: to see that it works")
    parser.add_argument("--no-torch", dest="torch", action="store_false")
    parser.add_argument("--costs", type=Path, help="a file of `znnpy measure --out`, instead")
    parser.add_argument("--precision", choices=PRECISIONS, default="tf32", help="on a GPU")
    parser.add_argument("--peer-precision", choices=("fp32", "tf32", "bf16"), help="fp32, on a GPU tf32")
    parser.add_argument("--threads", type=int, default=this_machine().cores)
    parser.add_argument("--workers", type=int, default=this_machine().cores, help="processes that plan")
    parser.add_argument("--rounds", type=int, default=3, help="of whole runs")
    parser.add_argument("--random", type=int, default=30, help="random plans")
    parser.add_argument("--most", type=int, help="rivals of each kind")
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--give-up", type=float, default=1.5, help="rivals that take so many times as long as the pick")
    parser.add_argument("--rival-seconds", type=float, help="that rivals, and schemes, of one point are timed for")
    parser.add_argument("--repeat-seconds", type=float, default=0.3, help="shorter runs of layers are repeated")
    parser.add_argument("--peer-seconds", type=float, default=60, help="limit of one process of PyTorch")
    parser.add_argument("--peer-sides", type=int, nargs="*", default=[], help="output patches, the largest first")
    parser.add_argument("--out", type=Path, help="pictures and timed layers stand beside it")
    options = parser.parse_args(words)
    options.device = device
    options.peer_precision = options.peer_precision or ("tf32" if device == "gpu" else "fp32")
    if options.quick:
        options.networks = options.networks[:1]
        options.limits = options.limits or LIMITS[device][:1]
        options.sides = options.sides or [108]
        options.random, options.rounds, options.repeat_seconds = min(2, options.random), 1, 0.0
        options.measure_minutes = 0
        options.most = options.most or 2
        options.peer_sides = options.peer_sides or [8]
    options.finals = max(options.rounds, GPU_FINALS) if device == "gpu" else options.rounds
    options.limits = options.limits or LIMITS[device]
    options.sides = sorted(options.sides or SIDES[device], reverse=True)
    for word, default in (("point_seconds", POINT_SECONDS), ("rival_seconds", RIVAL_SECONDS)):
        if getattr(options, word) is None:
            setattr(options, word, default[device])
    name = "-".join(this_machine().processor.lower().split()[:3]) if device == "cpu" else "gpu"
    options.out = options.out or Path(__file__).parent / "results" / f"planning-{name}-{date.today()}.json"
    return options


def measure(benchmark: Benchmark, found: Sequence[Point], options: argparse.Namespace) -> None:
    """Step by step over all points, but for what is there already and what would take too long."""
    steps: dict[str, Callable[[Any], None]] = {step: getattr(benchmark, step) for step in STEPS}
    for step in (step for step in STEPS if step in options.do):
        todo = [point for point in found if not getattr(point.row, step)]
        if step == "rivals":
            todo = [point for point in todo if "seconds" in point.row.layers]
        needed = {str(point): benchmark.seconds_of(step, point) for point in todo}
        affordable = {str(point): point for point in todo if needed[str(point)] <= benchmark.left}
        if affordable:
            benchmark.prepare(step, list(affordable.values()))
        parts: list[Any] = list(todo)
        if step == "peers":
            parts = [[p for p in todo if p.row.network == name] for name in dict.fromkeys(p.row.network for p in todo)]
        for part in parts:
            first = part[0] if step == "peers" else part
            if needed[str(first)] > benchmark.left or str(first) not in affordable:
                least = f"{needed[str(first)]:.0f} s, and {max(0.0, benchmark.left):.0f} s are left"
                print(f"{step:9} {first} left out: {least}", flush=True)
                continue
            begin = time.monotonic()
            try:
                steps[step](part)
            except NoTimeLeft:
                print(f"{step:9} {first} not done when time was up", flush=True)
            print(f"{step:9} {first} {time.monotonic() - begin:7.1f} s", flush=True)
            benchmark.write()


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    if "peers" in options.do and (not options.torch or find_spec("torch") is None):
        options.do = [step for step in options.do if step != "peers"]
        print("PyTorch is left out", flush=True)
    own_bytes()  # before anything is planned
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(own_cache(options.out.with_name(f"{options.out.stem}-cache")))
        benchmark = Benchmark(options, Path(folder))
        stack.enter_context(benchmark.runner)
        benchmark.measure_machine()
        measure(benchmark, benchmark.points(), options)
        benchmark.write()
    for line in table(list(benchmark.rows.values())):
        print(line)
    print(options.out)


if __name__ == "__main__":
    without_forced_blas_kernels()
    main()
