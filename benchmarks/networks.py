"""Measure whole networks with dense output: znnpy in every mode, PyTorch in three ways, in memory, on disk; exactness.

Every run is a separate process; on the CPU `--ram` limits its memory. znnpy predicts a whole cube of uint8 noise by its
own plan; the cube is so large that a run takes `--run-seconds` at the planned speed. A speed is output voxels divided
by the seconds from the first voxel that is read to the last that is written: planning and preparing, which are done
once for a volume of any size, are recorded separately. A first run that takes less than 20 s does not count. PyTorch
runs single patches, from voxels in host memory to a prediction in host memory. It begins with the largest patch that
fits and ends when a smaller one is slower; its best speed counts. Weights are random, and outputs are compared.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from benchmarks.harness import against, options
from benchmarks.harness.inputs import LAYERS, NETWORKS, field_of_view, network_file, period
from benchmarks.harness.isolate import Answer, Outcome, run_child
from benchmarks.harness.machine import find_gpu, header, machine_name, multiplies_bf16, torch_sees_a_gpu
from benchmarks.harness.merging import merge
from benchmarks.harness.peers import difference, sides
from benchmarks.harness.results import Program, Result, Row
from benchmarks.harness.timing import Budget
from benchmarks.network_tables import draw, exactness_table, headline, networks_table, pairs_table
from znnpy.machine import parse_bytes, this_machine

CHILDREN = "benchmarks.network_children"
GROUPS = ("networks", "columns", "disk", "modes", "gpus", "exactness")
MODES = ("gpu", "gpu-host", "cpu-to-gpu", "side-by-side")
LARGEST_SIDE = 1024
MOST_DIFFERENCE = {"fp32": 1e-3, "tf32": 5e-2, "fp16": 5e-2, "bf16": 0.5}  # relative rms; a figure beyond it is void
SPARE_SECONDS = 60.0  # time of a process besides its runs: imports, planning, compiling kernels


@dataclass(frozen=True)
class Asked:
    """The options of the command line."""

    device: str
    networks: tuple[str, ...]
    ram: str
    vram: tuple[str, ...]
    precisions: tuple[str, ...]
    run_seconds: float
    rounds: int
    gpus: int
    quick: bool


class Bench:
    """Runs networks in child processes and adds the rows to a result."""

    def __init__(self, asked: Asked, folder: Path, budget: Budget) -> None:
        self._asked, self._folder, self._budget = asked, folder, budget
        self._sides: dict[tuple[str, ...], int] = {}
        self._threads = this_machine().cores

    def networks(self, name: str) -> Iterator[Row]:
        """Measure znnpy in every precision, then PyTorch in every way."""
        for precision in self._asked.precisions:
            yield self._znnpy("networks", name, f"znnpy {precision}", precision=precision, corner=precision)
        yield from self._torch(name)

    def columns(self, name: str) -> Iterator[Row]:
        """Compare columns with patches, within a smaller memory limit."""
        for ram in dict.fromkeys(("2G", self._asked.ram)):
            side = 0
            for cover in ("columns", "patches"):
                row = self._znnpy("columns", f"{name} within {ram}", cover, name=name, ram=ram, cover=cover, side=side)
                side = row.facts.get("side", 0)
                yield row

    def disk(self, name: str) -> Iterator[Row]:
        """Predict from an HDF5 file into another."""
        yield self._znnpy("disk", name, "from file to file", folder=str(self._folder))

    def modes(self, name: str) -> Iterator[Row]:
        """Measure all modes of a GPU within several limits of its memory, and the CPU alone."""
        yield self._znnpy("modes", f"{name} without GPU", "cpu", name=name, mode="cpu", precision="fp32")
        for vram in self._asked.vram:
            for mode in MODES:
                yield self._znnpy("modes", f"{name} within {vram} of VRAM", mode, name=name, mode=mode, vram=vram,
                                  precision="fp32")  # fmt: skip

    def gpus(self, name: str) -> Iterator[Row]:
        """Compare several GPUs with one."""
        for count in dict.fromkeys((1, self._asked.gpus)):
            yield self._znnpy("gpus", name, f"{count} GPUs" if count > 1 else "1 GPU", gpus=count, precision="tf32")

    def exactness(self, name: str) -> Iterator[Row]:
        """Compare outputs with the float64 definition."""
        on_gpu = self._asked.device == "gpu"
        devices = [["cpu", "fp32"], *(["gpu", precision] for precision in self._asked.precisions if on_gpu)]
        request = {"folder": str(self._folder), "network": name, "side": 8, "devices": devices}
        seconds = max(30.0, self._budget.left)
        outcome = run_child(f"{CHILDREN}:exactness", request, seconds=seconds)
        for answer in outcome.answers:
            yield Row("exactness", name, answer["subject"], "largest relative error", (answer["most"],),
                      facts={"rms": answer["rms"], "side": answer["side"]})  # fmt: skip
        if outcome.failure:
            yield Row("exactness", name, "all others", "largest relative error", failure=outcome.failure)

    def _znnpy(self, group: str, case: str, subject: str, **more: Any) -> Row:
        """Run znnpy; `more` has options of `infer` and of the child (name, side, folder, corner)."""
        asked = self._asked
        name = more.pop("name", case)
        given = {"side": more.pop("side", 0), "folder": more.pop("folder", None), "corner": more.pop("corner", None)}
        mode = more.get("mode", "auto")
        settings = {"ram": asked.ram, **more}
        if mode == "auto":
            settings["device"] = asked.device
        if asked.device == "cpu" or mode == "cpu":
            settings.pop("precision", None)
        row = partial(Row, group, case, subject, "voxels/s")
        if not self._budget.left:
            return row(failure="no time left")
        try:
            side = given["side"] or self._side(name, settings)
        except RuntimeError as error:
            return row(failure=str(error))
        path = str(network_file(self._folder, name))
        corner = str(self._corner(name, given["corner"])) if given["corner"] else None
        request = {"network": path, "side": side, "options": settings, "rounds": asked.rounds,
                   "folder": given["folder"], "corner": corner}  # fmt: skip
        limit = min(self._budget.left, (2 + asked.rounds) * 4 * asked.run_seconds) + SPARE_SECONDS
        in_memory = 0 if given["folder"] else (maps_of(name) * 4 + 1) * side**3  # volume and output lie in the child
        ram = settings["ram"] = parse_bytes(settings["ram"]) + in_memory
        ram_bytes = ram if asked.device == "cpu" else None
        outcome = run_child(f"{CHILDREN}:run_znnpy", request, seconds=limit, ram_bytes=ram_bytes)
        return self._row(row, side, outcome, corner, name)

    def _row(self, row: Callable[..., Row], side: int, outcome: Outcome, corner: str | None, name: str) -> Row:
        counted = [answer for answer in outcome.answers if not answer["is_warm_up"]] or list(outcome.answers)
        if not counted:
            return row(failure=outcome.failure or "it gave no answer")
        last = counted[-1]
        facts = {"side": side, "planned": last["predicted"]["voxels_per_second"], **last}
        if outcome.failure:
            facts["ended"] = outcome.failure
        if last["not_written"]:
            return row(failure=f"void: {last['not_written']} values were not written")
        if corner and (reference := self._corner(name, "fp32")).exists() and Path(corner).exists():
            facts["difference"] = difference(np.load(reference), np.load(corner))[1]
            if not facts["difference"] <= MOST_DIFFERENCE[last["precision"]]:
                return row(failure=f"void: rms {facts['difference']:.1e} from the output in fp32")
        return row(values=tuple(answer["voxels_per_second"] for answer in counted), facts=facts)

    def _side(self, name: str, settings: dict[str, Any]) -> int:
        """Return the side of a cube that takes `run_seconds` at the planned speed."""
        asked = self._asked
        least = field_of_view(name) + 2 * period(name) - 1
        if asked.quick:
            return least
        known = {key: value for key, value in settings.items() if key not in ("gpus", "cover", "ram", "precision")}
        key = (name, *map(str, known.values()))
        if key not in self._sides:
            request = {"network": str(network_file(self._folder, name)), "side": LARGEST_SIDE, "options": settings}
            outcome = run_child(f"{CHILDREN}:speed_of_plan", request, seconds=self._budget.left + SPARE_SECONDS)
            if outcome.failure:
                raise RuntimeError(outcome.failure)
            inner = (outcome.answer["voxels_per_second"] * asked.run_seconds) ** (1 / 3)
            self._sides[key] = min(LARGEST_SIDE, max(least, int(inner) // 8 * 8 + field_of_view(name) - 1))
        return self._sides[key]

    def _corner(self, name: str, what: str) -> Path:
        return self._folder / f"{name}-{what}.npy"

    def _torch(self, name: str) -> Iterator[Row]:
        """Yield PyTorch's best run in each way."""
        if find_spec("torch") is None:
            return
        on_gpu = self._asked.device == "gpu"
        if on_gpu and not torch_sees_a_gpu():
            return
        fast = "bf16" if on_gpu or multiplies_bf16() else "fp32"  # other processors are far slower in bf16
        ways = [
            ("fragments", fast),
            ("fragments", "tf32" if on_gpu else "fp32"),
            ("dilated", fast),
            ("plain", fast),
        ]
        if on_gpu:
            ways.append(("fragments", "fp32"))
        for method, precision in dict.fromkeys(ways):
            yield self._way(name, method, precision, "cuda" if on_gpu else "cpu")

    def _way(self, name: str, method: str, precision: str, device: str) -> Row:
        asked, best = self._asked, Answer()
        row = partial(Row, "networks", name, f"PyTorch {precision} {method}", "voxels/s")
        corner = self._folder / "peer.npy"
        corner.unlink(missing_ok=True)
        todo = [2 * period(name)] if asked.quick else sides(name)
        failure: str | None = "no time left"
        seconds = min(self._budget.left, 3 * asked.run_seconds)
        while todo and self._budget.left > 1 and seconds > 1:
            request = {"network": name, "folder": str(self._folder), "method": method, "precision": precision,
                       "layout": "contiguous" if (precision, device) == ("fp32", "cuda") else "channels_last_3d",
                       "device": device, "threads": self._threads, "algorithms": 4, "sides": todo, "seconds": seconds,
                       "run_seconds": asked.run_seconds, "corner": str(corner)}  # fmt: skip
            ram = parse_bytes(asked.ram) if device == "cpu" else None
            outcome = run_child(f"{CHILDREN}:run_torch", request, seconds=seconds + SPARE_SECONDS, ram_bytes=ram)
            ran = [answer for answer in outcome.answers if not answer["failure"]]
            best = max([best, *ran] if best else ran, key=speed_of, default=Answer())
            failure = outcome.failure or next(
                (a["failure"] for a in outcome.answers[::-1] if a["failure"]), "no patch fits"
            )
            if outcome.failure is None:
                break
            reached = outcome.answers[-1]["side"] if outcome.answers else 0
            todo = [side for side in todo if side < reached]  # sides that killed the process are not tried again
            seconds -= outcome.seconds
        if not best:
            return row(failure=failure)
        facts: dict[str, Any] = {key: best[key] for key in ("side", "voxels", "peak_bytes")}
        reference = self._corner(name, "fp32")
        if corner.exists() and reference.exists():
            facts["difference"] = difference(np.load(reference), np.load(corner))[1]
            if not facts["difference"] <= MOST_DIFFERENCE[precision]:
                return row(failure=f"void: rms {facts['difference']:.1e} from znnpy's output")
        return row(values=tuple(best["voxels"] / spent for spent in best["seconds"]), facts=facts)


def maps_of(name: str) -> int:
    """Return the output maps of a network: the last number of its last layer."""
    return int(LAYERS[name][-1].split()[-1])


def speed_of(answer: Answer) -> float:
    """Return the voxels per second of an answer of `run_torch`."""
    return float(answer["voxels"] / median(answer["seconds"]))


def show(row: Row) -> None:
    """Print one row."""
    what = f"{row.group}: {row.case:28} {row.subject:26}"
    if row.failure:
        click.echo(f"{what} {row.failure}")
    elif row.unit == "voxels/s":
        planned = row.facts.get("planned")
        of_plan = f", {row.median / planned:.2f} of the plan" if planned else ""
        click.echo(f"{what} {row.median:14,.0f} voxels/s +- {row.spread:.0%}{of_plan}, side {row.facts['side']}")
    else:
        click.echo(f"{what} {row.median:.1e}")


PROGRAM = Program(
    "networks",
    "How fast is a whole network, and how exact?",
    "networks [--device gpu]",
    {
        "networks-cpu": partial(networks_table, "cpu"),
        "networks-gpu": partial(networks_table, "gpu"),
        "columns": partial(pairs_table, "columns", "cpu"),
        "modes": partial(pairs_table, "modes", "gpu"),
        "gpus": partial(pairs_table, "gpus", "gpu"),
        "exactness": exactness_table,
    },
    headline,
    {"networks": draw},
)


def run_against(other: Path, device: str, ram: str, budget: Budget, rounds: int) -> list[Row]:
    """Compare whole networks and planning times with another source tree."""
    settings = {"device": device, "ram": ram}
    scale = 2.5 if device == "gpu" else 1.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = [(f"{network} {round(scale * side)}^3 within {ram}",
                 against.session_request(folder, network, round(scale * side), **settings))
                for network, side in (("fib25", 250), ("n337", 180), ("n926", 190))]  # fmt: skip
        plans = [(f"plan of {network}", against.plan_request(network, 512, **settings))
                 for network in ("fib25_boundary", "n337", "n926")]  # fmt: skip
        found = [*against.compare(plans, other, 2, budget, alone=True)]
        found += against.compare(runs, other, rounds, budget, alone=True)
    return [row for rows in found for row in rows]


@click.command()
@options.shared
@options.AGAINST
@click.option(
    "--groups", "-g", multiple=True, type=click.Choice(GROUPS), help="Measure only these groups of cases; repeatable."
)
@click.option(
    "--network",
    "-n",
    "names",
    multiple=True,
    type=click.Choice(list(LAYERS)),
    help="Measure only these networks; repeatable.",
)
@click.option("--ram", default="16G", show_default=True, help="Memory limit of each process.")
@click.option(
    "--vram", multiple=True, default=("4G", "12G"), show_default=True, help="Limits of GPU memory for the device modes."
)
@click.option(
    "--precision", "precisions", multiple=True, type=click.Choice(["fp32", "tf32", "fp16"]), help="Precisions on a GPU."
)
@click.option("--gpus", default=1, show_default=True, help="Number of GPUs for --groups gpus.")
@click.option("--run-seconds", type=float, help="Planned time of one run [default: a thirtieth of --minutes].")
@click.option("--rounds", default=2, show_default=True)
def command(
    device: str,
    minutes: float,
    quick: bool,
    out: Path | None,
    against: Path | None,
    groups: tuple[str, ...],
    names: tuple[str, ...],
    ram: str,
    vram: tuple[str, ...],
    precisions: tuple[str, ...],
    gpus: int,
    run_seconds: float | None,
    rounds: int,
) -> None:
    """Measure how fast and how exact whole networks are, in every mode and in PyTorch."""
    budget = Budget(minutes)
    if against is not None:
        compare_trees(against, device, ram, budget, rounds, out)
        return
    on_gpu = device == "gpu"
    kinds = precisions or (("fp32", "tf32", "fp16") if on_gpu else ("fp32",))
    asked = Asked(device, names or (("tiny",) if quick else NETWORKS), ram, vram, kinds, run_seconds or 2 * minutes,
                  1 if quick else rounds, gpus, quick)  # fmt: skip
    default = ("networks", "exactness", "modes") if on_gpu else ("networks", "columns", "disk", "exactness")
    default = (*default, "gpus") if gpus > 1 else default
    measure_all(asked, groups or default, budget, out, find_gpu(device))


def compare_trees(other: Path, device: str, ram: str, budget: Budget, rounds: int, out: Path | None) -> None:
    """Compare with another source tree, and fail if ours is slower."""
    rows = run_against(other, device, ram, budget, rounds)
    if out is not None:
        Result("networks", machine_name(), header(), rows).write(out)
    against.report(rows)


def measure_all(asked: Asked, groups: Sequence[str], budget: Budget, out: Path | None, gpu: Any) -> Result:
    """Measure network by network, group by group, and write after each."""
    result = Result("networks", machine_name(gpu, asked.gpus), {**header(gpu), "ram": asked.ram})
    wanted = [(group, name) for group in groups for name in asked.networks]
    missing = [f"{group} of {name}" for group, name in wanted]
    if out is not None or not asked.quick:
        merge(result, out, groups)
    earlier = list(result.left_out)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(asked, Path(folder), budget)
        for group, name in wanted:
            if not budget.left:
                break
            for row in getattr(bench, group)(name):
                show(row)
                result.add([row])
            missing.pop(0)
            result.left_out = [*earlier, *missing]
            if out is not None or not asked.quick:
                result.write(out)
    if missing:
        click.echo(f"no time left for {'; '.join(missing)}")
    return result
