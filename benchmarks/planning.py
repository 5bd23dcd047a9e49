"""Can the planner's word be trusted, and can its pick be beaten? The paper's four networks, limit by limit.

    python benchmarks/planning.py [--device gpu] [--networks n337 ...] [--limits 1G 2G 4G 8G 16G] [--side 512]
                                  [--do layers rivals whole findings peers] [--minutes 60] [--resume] [--quick]
                                  [--no-torch] [--out RESULT.json]

Limits are of RAM, or of VRAM with `--device gpu`. For each network and limit the planner plans for a volume of `--side`
voxels along every axis, uint8, and its plan, the pick, is held against the machine:

    layers    each distinct layer (shape, primitive, version, variant) is timed by itself, in a process that runs
              nothing else (planning_layer.py); seconds times runs, summed, are the measured seconds of a plan. A
              second reading in another process gives the band of A against A.
    rivals    every uniform choice (one primitive wherever it applies, with the patches that suit it), `--random` random
              feasible plans, and every plan that differs from the pick in one choice (planning_plans.py), summed in the
              same way; a rival whose layers take more than `--give-up` times as long as the pick is not timed further.
    whole     the pick and its three fastest rivals from end to end, in turn, `--rounds` times: throughput and peak
              memory. On a CPU by `znnpy infer`; a volume that would take longer than `--run-seconds` is run in part,
              as many whole steps as fit, and the rest scaled by what the plan says of both. The pick takes two turns in
              each round: their medians are the band.
    findings  section VI-A of the paper: one image at a time, and all poolings as fragments (planning_findings.py)
    peers     Table V today: PyTorch with all subsamplings recomputed, dilated and as fragments, with the largest patch
              that fits the limit (planning_peers.py)

Results, table and pictures are written after every step; timed layers are kept beside them (`-layers.json`), and
`--resume` takes both up. What does not fit into `--minutes` is not there. Costs are those that `znnpy measure` stored.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import date
from importlib.util import find_spec
from math import inf
from pathlib import Path
from statistics import median

from columns_plans import own_bytes, planned
from header import machine_header, taken_device, without_forced_blas_kernels
from planning_clock import Kept, NoTimeLeft, Stopwatch, band
from planning_findings import best, schemes, theory, theory_verdict
from planning_peers import METHODS
from planning_plans import Ground, Maker, Rival, all_rivals
from planning_runs import Point, peer, peer_sides, run, together
from planning_tables import Facts, Row, error, pictures, summary, table

from znnpy.errors import DeviceError, NoPlanError, ShapeError
from znnpy.formats.networks import read_network
from znnpy.machine import this_machine
from znnpy.network import Network
from znnpy.planner.cost import assumed_rates
from znnpy.planner.plan import Plan
from znnpy.run.devices import Site, site_for
from znnpy.run.shelf import Shelf
from znnpy.shapes import FLOAT32, PRECISIONS, text

NETWORKS = ("n337", "n537", "n726", "n926")
LIMITS = {"cpu": ["1G", "2G", "4G", "8G", "16G"], "gpu": ["4G", "8G", "16G", "32G", "64G", "128G"]}
STEPS = ("layers", "rivals", "whole", "findings", "peers")
FINALISTS = 3
THEORY_GIB = (1, 4, 16, 64)


def grounded(options: argparse.Namespace, name: str, limit: str) -> tuple[Network, Ground, Plan, float]:
    """The planner's pick, what it was made on, and the seconds that took; NoPlanError, ShapeError, DeviceError."""
    network = read_network(name).network
    output = network.dense_size((options.side,) * 3)
    found: list[tuple[Ground, float]] = []
    gpu = options.device == "gpu"

    def make(site: Site) -> Plan:
        limits = site.limits(None if gpu else limit, options.threads, limit if gpu else None)
        rates = site.rates(network, limits) or assumed_rates(site.machine, limits.threads, site.device)
        ground = Ground(
            machine=site.machine,
            limits=limits,
            rates=rates,
            baseline=own_bytes() + FLOAT32 * network.parameters + site.later_bytes,
            device=site.device,
            precision=site.precision,
            context=site.context_bytes,
        )
        found.append((ground, time.perf_counter()))
        return ground.plan(network, output)

    costs = Shelf(options.costs)
    with site_for(make, options.device, limit if gpu else None, options.precision if gpu else None, costs) as (_, plan):
        ground, begin = found[-1]
        return network, ground, plan, time.perf_counter() - begin


class Benchmark:
    """Does what is asked for, step by step, and keeps it."""

    def __init__(self, options: argparse.Namespace, rows: Sequence[Row], folder: Path) -> None:
        self._options, self._folder = options, folder
        self.end = time.monotonic() + 60 * options.minutes
        self.rows = {(row.network, row.limit): row for row in rows}
        header = machine_header()
        self._header = header | {"threads": options.threads, "side": options.side, "device": options.device}
        facts = {key: header[key] for key in ("processor", "cores", "simd", "blas", "libraries")}
        facts |= {"threads": options.threads, "device": options.device, "gpu": None}
        if options.device == "gpu":
            from gpu_card import gpu_header

            from znnpy.kernels.gpu.device import find_gpu

            self._header |= gpu_header(find_gpu())
            facts["gpu"] = self._header["gpu"]["name"]
        self._kept = Kept(options.out.with_name(f"{options.out.stem}-layers.json"), facts, resume=options.resume)

    @property
    def left(self) -> float:
        """Seconds; NoTimeLeft when there are none."""
        left: float = self.end - time.monotonic()
        if left <= 0:
            raise NoTimeLeft
        return left

    def plan(self) -> Iterator[Point]:
        """Every network within every limit that has a plan."""
        options = self._options
        for name in options.networks:
            for limit in options.limits:
                row = Row(name, limit, options.side)
                try:
                    network, ground, pick, seconds = grounded(options, name, limit)
                except (NoPlanError, ShapeError, DeviceError) as failure:
                    self.rows[name, limit] = Row(name, limit, options.side, failure=str(failure))
                    print(f"{name} {limit}: {failure}", flush=True)
                    continue
                facts = json.loads(pick.to_json())
                old = self.rows.get((name, limit))
                if old is not None and old.plan == facts:
                    row = old  # figures of another plan would tell nothing of this one
                row.plan = facts
                row.planned = planned(pick) | {"planning_seconds": seconds, "fitted": pick.fitted}
                row.planned["vram_bytes"] = pick.memory.vram
                self.rows[name, limit] = row
                self.write()
                print(f"{name} {limit}: {pick.voxels_per_second:,.0f} voxels/s planned in {seconds:.1f} s", flush=True)
                yield Point(row, network, ground, pick)

    def watch(self, point: Point) -> Stopwatch:
        return Stopwatch(
            self._kept, point.row.network, point.pick, repeat_seconds=self._options.repeat_seconds, end=self.end
        )

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

    def rivals(self, point: Point) -> None:
        if "seconds" not in point.row.layers:
            return
        options = self._options
        most = options.give_up * point.row.layers["seconds"]
        found = []
        with self.watch(point) as watch:
            for rival in rivals_of(point, options):
                facts: Facts = {"kind": rival.kind, "what": rival.what, "failure": rival.failure}
                if rival.plan is not None:
                    total = watch.total(rival.plan, below=most)
                    facts |= {
                        "failure": total.failure,
                        "seconds": total.seconds,
                        "whole": total.whole,
                        "predicted": sum(choice.runs * choice.seconds for choice in rival.plan.choices),
                        "patch_out": rival.plan.patch_out,
                        "column": rival.plan.column,
                        "choices": [f"{c.primitive} {c.variant}".strip() for c in rival.plan.choices],
                    }
                found.append(facts)
        point.row.rivals = found

    def whole(self, point: Point) -> None:
        """The pick and its finalists in turn."""
        contest = [("pick", point.pick), *self._finalists(point)]
        rounds: dict[str, list[Facts]] = {what: [] for what, _ in contest}
        for _ in range(self._options.rounds):
            for what, plan in (*contest, contest[0]):  # the pick is its own rival
                rounds[what].append(run(self._folder, point, plan, self._options.run_seconds, self.left))
        point.row.whole = {"runs": [together(what, plan, rounds[what]) for what, plan in contest], "band": 0.0}
        first = rounds["pick"]
        if not any(run["failure"] for run in first):
            halves = [median(run["seconds"] for run in first[half::2]) for half in (0, 1)]
            point.row.whole["band"] = max(halves) / min(halves) - 1

    def _finalists(self, point: Point) -> list[tuple[str, Plan]]:
        """The fastest rivals whose layers were all timed."""
        timed = {(r["kind"], r["what"]): r["seconds"] for r in point.row.rivals if r.get("whole")}
        plans = {(r.kind, r.what): r.plan for r in rivals_of(point, self._options)} if timed else {}
        ranked = sorted((key for key in timed if plans.get(key)), key=timed.__getitem__)
        found: list[tuple[str, Plan]] = []
        for key in ranked:
            plan = plans[key]
            if plan is not None and len(found) < FINALISTS and plan.choices not in [p.choices for _, p in found]:
                found.append((f"{key[0]} {key[1]}", plan))
        return found

    def findings(self, point: Point) -> None:
        """Every scheme's best patch, its layers summed."""
        found: list[Facts] = []
        with self.watch(point) as watch:
            least = inf
            for scheme in schemes(point.network):
                one = best(point.ground, point.network, point.pick, scheme)
                of = "paper" if not found else "images" if scheme.images > 1 else "fragments"
                facts: Facts = {"of": of, "scheme": str(scheme), "seconds": None, "whole": False}
                if one.plan is not None:
                    total = watch.total(one.plan, below=self._options.give_up * least)
                    least = min(least, total.seconds) if total.whole else least
                    facts |= {
                        "predicted": one.seconds,
                        "seconds": total.seconds,
                        "whole": total.whole,
                        "failure": total.failure,
                        "patch_out": one.plan.patch_out,
                    }
                found.append(facts)
        point.row.findings = found

    def peers(self, point: Point) -> None:
        """PyTorch's ways, each with the largest patch that fits."""
        options = self._options
        found = []
        for method in METHODS:
            facts: Facts = {"method": method, "precision": options.peer_precision, "failure": "no patch fits"}
            for side in peer_sides(point, method, options):
                facts = peer(point, method, side, options, self.left)
                if not facts["failure"]:
                    break
            print(f"{point} PyTorch {method}: {facts['failure'] or facts['voxels_per_second']}", flush=True)
            found.append(facts)
        point.row.peers = found

    def write(self) -> None:
        """Everything so far, as JSON and as pictures."""
        options, rows = self._options, list(self.rows.values())
        fig4 = {str(pools): theory(pools) for pools in (1, 2)}
        result = {
            "header": self._header,
            "summary": summary(rows),
            "fig4": {
                pools: {"best": [theory_verdict(points, gib) for gib in THEORY_GIB], "points": points}
                for pools, points in fig4.items()
            },
            "rows": [asdict(row) for row in rows],
        }
        options.out.parent.mkdir(exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        name = self._header["gpu"]["name"] if options.device == "gpu" else self._header["processor"]
        machine = f"{name}, {options.threads} threads, volume {text((options.side,) * 3)}, {self._header['date'][:10]}"
        pictures(options.out.with_suffix(".png"), rows, machine)


def rivals_of(point: Point, options: argparse.Namespace) -> list[Rival]:
    """The same in every call."""
    return all_rivals(Maker(point.ground, point.network, point.pick), options.random, options.seed, options.most)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    device, words = taken_device(given)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), help="names of those that ship, or files")
    parser.add_argument("--limits", nargs="+", help=f"of RAM or VRAM; {' '.join(LIMITS[device])}")
    parser.add_argument("--side", type=int, help="of the volume; 512")
    parser.add_argument("--do", nargs="*", choices=STEPS, default=list(STEPS), help="nothing: plan only")
    parser.add_argument("--minutes", type=float, default=60, help="after which nothing more is measured")
    parser.add_argument("--resume", action="store_true", help="take up what --out holds, and layers timed before")
    parser.add_argument("--quick", action="store_true", help="one small network, few rivals: to see that it works")
    parser.add_argument("--no-torch", dest="torch", action="store_false")
    parser.add_argument("--costs", type=Path, help="a file of `znnpy measure --export`; default: what was stored here")
    parser.add_argument("--precision", choices=PRECISIONS, default="tf32", help="on a GPU")
    parser.add_argument("--peer-precision", choices=("fp32", "tf32", "bf16"), help="fp32, on a GPU tf32")
    parser.add_argument("--threads", type=int, default=this_machine().cores)
    parser.add_argument("--rounds", type=int, default=3, help="of whole runs")
    parser.add_argument("--random", type=int, default=30, help="random plans")
    parser.add_argument("--most", type=int, help="rivals of each kind")
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--give-up", type=float, default=1.5, help="rivals that take so many times as long as the pick")
    parser.add_argument("--repeat-seconds", type=float, default=1.0, help="shorter runs of layers are repeated")
    parser.add_argument("--run-seconds", type=float, default=120, help="longer whole runs are run in part")
    parser.add_argument("--peer-seconds", type=float, default=300, help="limit of one process of PyTorch")
    parser.add_argument("--peer-sides", type=int, nargs="*", default=[], help="output patches, the largest first")
    parser.add_argument("--out", type=Path, help="pictures and timed layers stand beside it")
    options = parser.parse_args(words)
    options.device = device
    options.peer_precision = options.peer_precision or ("tf32" if device == "gpu" else "fp32")
    if options.quick:
        options.networks = options.networks[:1]
        options.limits = options.limits or LIMITS[device][:1]
        options.side = options.side or 108
        options.random, options.rounds, options.repeat_seconds = min(2, options.random), 1, 0.0
        options.most = options.most or 2
        options.peer_sides = options.peer_sides or [8]
    options.limits = options.limits or LIMITS[device]
    options.side = options.side or 512
    name = "-".join(this_machine().processor.lower().split()[:3]) if device == "cpu" else "gpu"
    default = Path(__file__).parent / "results" / f"planning-{name}-{date.today()}.json"
    options.out = options.out or default
    return options


def measure(benchmark: Benchmark, points: Sequence[Point], options: argparse.Namespace) -> None:
    """Step by step over all points, but for what is there already; NoTimeLeft when time is up."""
    steps: dict[str, Callable[[Point], None]] = {
        "layers": benchmark.layers,
        "rivals": benchmark.rivals,
        "whole": benchmark.whole,
        "findings": benchmark.findings,
        "peers": benchmark.peers,
    }
    for step in STEPS:
        for point in points if step in options.do else ():
            if getattr(point.row, step):
                continue
            begin = time.monotonic()
            steps[step](point)
            print(f"{step:9} {point} {time.monotonic() - begin:7.1f} s", flush=True)
            benchmark.write()


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    if "peers" in options.do and (not options.torch or find_spec("torch") is None):
        options.do = [step for step in options.do if step != "peers"]
        print("PyTorch is left out", flush=True)
    kept = json.loads(options.out.read_text()) if options.resume and options.out.is_file() else {"rows": []}
    rows = [Row(**row) for row in kept["rows"] if row["side"] == options.side]
    own_bytes()  # before anything is planned
    with tempfile.TemporaryDirectory() as folder:
        benchmark = Benchmark(options, rows, Path(folder))
        points = list(benchmark.plan())
        try:
            measure(benchmark, points, options)
        except NoTimeLeft:
            print(f"{options.minutes:g} minutes are over; go on with --resume", flush=True)
        benchmark.write()
    for line in table(list(benchmark.rows.values())):
        print(line)
    print(options.out)


if __name__ == "__main__":
    without_forced_blas_kernels()
    main()
