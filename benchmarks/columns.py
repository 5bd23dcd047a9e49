"""Throughput and waste against RAM: patches, patches depth first, and columns.

    python benchmarks/columns.py [--networks n337 ...] [--ram 1G 2G 4G 8G 16G] [--volumes 256x256x256 ...]
                                 [--measure layers check whole] [--measured 512x512x512] [--rounds 2]
                                 [--plans FOLDER] [--add] [--out RESULT.json]

Sizes are those of volumes, of one byte a voxel; throughput is output voxels over seconds. Three ways are planned for
each network, volume and limit: `patches` (all fragments go through a layer before any goes through the next, as in the
paper), `depth_first` (patches whose fragments may go on in parts), and `columns` (which may do so too). Waste is work
done over the work that no border would need: `waste` weighs layers by their planned seconds, `arithmetic_waste` counts
the multiply-adds of the convolutions by their definition. What does not fit is recorded with the reason.

Planned is everything. Measured, with `--measure`, is for the volumes of `--measured`:
    layers  every plan, layer by layer, in a process of its own with the limit as its memory. A descent runs each choice
            of the plan once, as in a step (layer_by_layer.py), loading and storing included; it takes a step divided by
            its parts, and the first of a process does not count. Its figure is scaled to the whole output by the counts
            of the plan: the seconds of each choice times `Choice.runs`, which counts the steps of a column before its
            first output, and those of the last step that are not written; loading times the steps; storing times the
            steps that give output and their parts. Reading, writing and waiting are left out: a run reads and writes
            while it computes. In each of `--rounds` the ways take turns; the figure is the median of all descents.
    check   what that leaves out: one column and one patch of `--check-output` a network, from end to end through
            `znnpy infer`, whose seconds of computing stand beside those of the descents, scaled as above.
    whole   every plan over the whole volume through `znnpy infer`, from an HDF5 file into another; nothing is scaled.

`--plans` keeps plans in a folder and takes those that lie there already: plan once on all cores, measure later. `--add`
keeps what the result file holds of the same plans and of other points. Results and picture are written after every row.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from itertools import chain
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import bars
import curves
from apart import run_apart
from columns_plans import WAYS, Made, Point, all_plans, planned
from header import machine_header, without_forced_blas_kernels
from networks import ORIGINAL
from pen import Colour
from whole_runs import infer, random_volume

from znnpy.formats.networks import read_network
from znnpy.machine import parse_bytes, this_machine
from znnpy.planner.plan import Plan
from znnpy.shapes import Vec3, text

CHILD = Path(__file__).with_name("layer_by_layer.py")
GIB = 2**30
LOOKS = {
    "patches": ("patches, as in the paper", bars.ORIGINAL),
    "depth_first": ("patches, depth first", bars.PEER),
    "columns": ("columns", bars.OURS),
}
ORIGINAL_GIB = 12.0  # that the original took, at most
ORIGINAL_COLOUR: Colour = (0, 0, 0)


@dataclass(slots=True)
class Row:
    """One point; seconds are of the whole output."""

    network: str
    volume: Vec3
    ram: str
    way: str
    failure: str | None
    planning_seconds: float
    planned: dict[str, Any] = field(default_factory=dict)
    layers: dict[str, Any] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)


def descents(network: str, plan: Plan, repeat_seconds: float, limit_seconds: float) -> dict[str, Any]:
    """What layer_by_layer.py answers; `failure` alone where it did not."""
    request = {"network": network, "plan": plan.to_json(), "repeat_seconds": repeat_seconds}
    outcome = run_apart(CHILD, request, ram_bytes=plan.limits.ram_bytes, seconds=limit_seconds)
    return {"failure": outcome.failure} if outcome.failure else outcome.answer


def together(plan: Plan, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All rounds of a way as one figure."""
    if failures := [answer["failure"] for answer in rounds if "failure" in answer]:
        return {"failure": failures[0]}
    seconds = [spent for answer in rounds for spent in answer["seconds"]]
    each = [descent for answer in rounds for descent in answer["descents"]]
    return {
        "rounds": [answer["seconds"] for answer in rounds],
        "seconds": median(seconds),
        "voxels_per_second": prod(plan.output) / median(seconds),
        "of_the_planned": plan.seconds / median(seconds),
        "layer_seconds": [median(found) for found in zip(*(descent["layers"] for descent in each), strict=True)],
        "load_seconds": median(descent["load"] for descent in each),
        "store_seconds": median(descent["store"] for descent in each),
    }


class Benchmark:
    """Runs what is asked for, row by row, and keeps it."""

    def __init__(self, options: argparse.Namespace, rows: Sequence[Row], folder: Path) -> None:
        self._options, self._folder = options, folder
        self._end = time.monotonic() + 60 * options.minutes
        self.rows = {Point(row.network, row.volume, row.ram, row.way): row for row in rows}
        self.checks: list[dict[str, Any]] = []
        self.earlier: list[dict[str, Any]] = []  # calls whose figures are kept

    def plan(self, points: Sequence[Point], folder: Path) -> dict[Point, Made]:
        made = all_plans(points, folder, self._options.threads, self._options.workers)
        for point, found in made.items():
            facts = planned(found.plan) if found.plan else {}
            old = self.rows.get(point)
            again = old is not None and json.dumps(old.planned) == json.dumps(facts)
            self.rows[point] = Row(
                *(point.network, point.volume, point.ram, point.way),
                failure=found.failure,
                planning_seconds=found.planning_seconds,
                planned=facts,
                layers=old.layers if old and again else {},  # figures of another plan would tell nothing of this one
                whole=old.whole if old and again else {},
            )
        self.write()
        return made

    def layers(self, points: Sequence[Point], made: dict[Point, Made]) -> None:
        """All ways of one network, volume and limit in turn."""
        for group in grouped(points):
            plans = {point: plan for point in group if (plan := made[point].plan)}
            rounds: dict[Point, list[dict[str, Any]]] = {point: [] for point in plans}
            for _ in range(self._options.rounds):
                for point, plan in plans.items():
                    rounds[point].append(descents(point.network, plan, self._options.repeat_seconds, self._left()))
            for point, plan in plans.items():
                self.rows[point].layers = together(plan, rounds[point])
                self._tell("layers", point, self.rows[point].layers)
            self.write()

    def whole(self, points: Sequence[Point], made: dict[Point, Made]) -> None:
        for point in points:
            plan = made[point].plan
            if plan is None:
                continue
            volume = random_volume(self._folder, point.volume, read_network(point.network).network.input_channels)
            done = infer(self._folder, point.network, volume, plan, limit_seconds=self._left())
            found = asdict(done) | {"promised_over_peak": done.promised_over_peak, "kept": done.kept}
            if not done.failure:
                speed = done.voxels / done.seconds
                found |= {"voxels_per_second": speed, "of_the_planned": plan.seconds / done.seconds}
            self.rows[point].whole = found
            self._tell("whole", point, found)
            self.write()

    def check(self, made: dict[Point, Made]) -> None:
        """Each of these plans from end to end."""
        for point, found in made.items():
            self.checks = [
                check for check in self.checks if (check["network"], check["way"]) != (point.network, point.way)
            ]
            said = {"failure": found.failure} if found.plan is None else self._checked(point, found.plan)
            self.checks.append(asdict(point) | said)
            ratio = said.get("run_over_layers", 0.0)
            print(f"check   {point!s:40} {said.get('failure') or f'run / layers {ratio:.3f}'}", flush=True)
            self.write()

    def _checked(self, point: Point, plan: Plan) -> dict[str, Any]:
        """Descents and the run in turn."""
        volume = random_volume(self._folder, point.volume, read_network(point.network).network.input_channels)
        rounds: list[dict[str, Any]] = []
        computing: list[float] = []
        for _ in range(self._options.rounds):
            rounds.append(descents(point.network, plan, self._options.repeat_seconds, self._left()))
            run = infer(self._folder, point.network, volume, plan, limit_seconds=self._left())
            if run.failure:
                return {"failure": run.failure}
            computing.append(run.stage_seconds["computing"])
        layers = together(plan, rounds)
        if "failure" in layers:
            return layers
        ratio = median(computing) / layers["seconds"]
        return {"planned": planned(plan), "layers": layers, "run_seconds": computing, "run_over_layers": ratio}

    def _left(self) -> float:
        """Seconds that the next process may take."""
        limit: float = min(self._options.run_seconds, self._end - time.monotonic())
        return max(1.0, limit)

    def _tell(self, what: str, point: Point, found: dict[str, Any]) -> None:
        if found.get("failure"):
            print(f"{what:7} {point!s:40} {found['failure']}", flush=True)
        else:
            speed = f"{found['voxels_per_second']:12,.0f} voxels/s"
            print(f"{what:7} {point!s:40} {speed}, {found['of_the_planned']:.2f} of the planned", flush=True)

    def write(self) -> None:
        """Everything so far, as JSON and as a picture."""
        options = self._options
        header = machine_header() | {"layer_threads": options.threads}
        rows = list(self.rows.values())
        result = {
            "header": header,
            "earlier": self.earlier,
            "summary": list(summary(rows)),
            "checks": self.checks,
            "rows": [asdict(row) for row in rows],
        }
        options.out.parent.mkdir(exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        picture(options.out.with_suffix(".png"), rows, header)


def grouped(points: Iterable[Point]) -> list[list[Point]]:
    """By all but the way."""
    groups: dict[tuple[object, ...], list[Point]] = {}
    for point in points:
        groups.setdefault((point.network, point.volume, point.ram), []).append(point)
    return list(groups.values())


def summary(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Per network, volume and limit: how many times patches columns are, planned and measured."""
    by_point = {Point(row.network, row.volume, row.ram, row.way): row for row in rows}
    for group in grouped(by_point):
        ways = {point.way: by_point[point] for point in group}
        first = ways[group[0].way]
        found: dict[str, Any] = {"network": first.network, "volume": first.volume, "ram": first.ram}
        found["waste"] = {way: row.planned["waste"] for way, row in ways.items() if row.planned}
        columns = ways.get("columns")
        for way, row in ways.items():
            if way == "columns" or columns is None:
                continue
            for what in ("planned", "layers", "whole"):
                mine, other = getattr(columns, what), getattr(row, what)
                if mine.get("voxels_per_second") and other.get("voxels_per_second"):
                    found[f"{what}_times_{way}"] = mine["voxels_per_second"] / other["voxels_per_second"]
            if "rounds" in columns.layers and "rounds" in row.layers:
                least, most = (limit(chain(*row.layers["rounds"])) for limit in (min, max))
                own_least, own_most = (limit(chain(*columns.layers["rounds"])) for limit in (min, max))
                found[f"layers_times_{way}_band"] = least / own_most, most / own_least
        yield found


def picture(path: Path, rows: Sequence[Row], header: dict[str, Any]) -> None:
    """Volumes below each other, networks side by side."""
    networks, volumes = dict.fromkeys(row.network for row in rows), dict.fromkeys(row.volume for row in rows)
    across = sorted({parse_bytes(row.ram) / GIB for row in rows})
    diagrams = [[_diagram(rows, name, volume, across) for name in networks] for volume in volumes]
    shown = ORIGINAL.keys() & networks.keys() and across[0] <= ORIGINAL_GIB <= across[-1]
    original = [("original ZNNi, measured earlier", ORIGINAL_COLOUR)] if shown else []
    notes = [
        f"{header['processor']}, {header['layer_threads']} threads, {header['date'][:10]}; size: of the volume",
        "Lines are planned; points are measured: layer by layer, or whole volumes where they were run.",
    ]
    title = "Output voxels per second against RAM"
    curves.draw(path, title, notes, [*LOOKS.values(), *original], across, diagrams)


def _diagram(rows: Sequence[Row], name: str, volume: Vec3, across: Sequence[float]) -> curves.Diagram:
    found = []
    for way, (_, colour) in LOOKS.items():
        line, points = [], []
        for row in rows:
            if (row.network, row.volume, row.way) == (name, volume, way) and row.planned:
                gib = parse_bytes(row.ram) / GIB
                line.append((gib, row.planned["voxels_per_second"]))
                points += [
                    (gib, said["voxels_per_second"]) for said in (row.layers, row.whole) if "voxels_per_second" in said
                ]
        found.append(curves.Curve(colour, sorted(line), points))
    if name in ORIGINAL and across[0] <= ORIGINAL_GIB <= across[-1]:
        found.append(curves.Curve(ORIGINAL_COLOUR, (), [(ORIGINAL_GIB, ORIGINAL[name])]))
    return curves.Diagram(f"{Path(name).stem}, {text(volume)}", found)


def checks(options: argparse.Namespace) -> list[Point]:
    """A patch and a column of each network."""
    points = []
    for name in options.networks:
        network = read_network(name).network
        volume = network.patch_in(network.round_up(options.check_output))
        points += [Point(name, volume, options.check_ram, way) for way in ("depth_first", "columns")]
    return points


def size_of(words: str) -> Vec3:
    """`512x1024x1024`"""
    z, y, x = map(int, words.split("x"))
    return z, y, x


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(ORIGINAL), help="names of those that ship, or files")
    parser.add_argument("--ram", nargs="+", default=["1G", "2G", "4G", "8G", "16G"])
    sizes = [(256, 256, 256), (512, 512, 512), (512, 1024, 1024)]
    parser.add_argument("--volumes", type=size_of, nargs="+", default=sizes, help="as 256x256x256")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    measures = ["layers", "check", "whole"]
    parser.add_argument("--measure", nargs="*", choices=measures, default=measures[:2], help="nothing: plan only")
    parser.add_argument("--measured", type=size_of, nargs="+", default=sizes[1:2], help="volumes, those of --volumes")
    parser.add_argument("--rounds", type=int, default=2, help="in which the ways take turns")
    parser.add_argument("--repeat-seconds", type=float, default=3, help="shorter descents are repeated")
    parser.add_argument("--check-output", type=size_of, default=(96, 48, 48))
    parser.add_argument("--check-ram", default="4G")
    parser.add_argument("--threads", type=int, default=this_machine().cores)
    parser.add_argument("--workers", type=int, default=this_machine().cores, help="that plan at a time")
    parser.add_argument("--run-seconds", type=float, default=1200, help="limit of one process")
    parser.add_argument("--minutes", type=float, default=240, help="after which what is left fails")
    parser.add_argument("--plans", type=Path, help="folder of plans to take and to add to")
    parser.add_argument("--add", action="store_true", help="to what --out holds")
    name = "-".join(this_machine().processor.lower().split()[:3])
    default = Path(__file__).parent / "results" / f"columns-{name}-{date.today()}.json"
    parser.add_argument("--out", type=Path, default=default, help="the picture stands beside it")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    old = json.loads(options.out.read_text()) if options.add and options.out.is_file() else {}
    rows = [Row(**row | {"volume": tuple(row["volume"])}) for row in old.get("rows", ())]
    volumes = list(dict.fromkeys(options.volumes))
    points = [
        Point(name, volume, ram, way)
        for volume in volumes
        for name in options.networks
        for ram in options.ram
        for way in options.ways
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plans = options.plans or folder / "plans"
        plans.mkdir(parents=True, exist_ok=True)
        benchmark = Benchmark(options, rows, folder)
        benchmark.checks = old.get("checks", [])
        if old:
            call = {key: old["header"][key] for key in ("command", "commit", "date")}
            benchmark.earlier = [*old["earlier"], call]
        made = benchmark.plan(points, plans)
        measured = [point for point in points if point.volume in options.measured]
        if "check" in options.measure:
            benchmark.check(all_plans(checks(options), plans, options.threads, options.workers))
        if "layers" in options.measure:
            benchmark.layers(measured, made)
        if "whole" in options.measure:
            benchmark.whole(measured, made)
        benchmark.write()
    for found in summary(list(benchmark.rows.values())):
        print(json.dumps(found))
    print(options.out)


if __name__ == "__main__":
    without_forced_blas_kernels()
    main()
