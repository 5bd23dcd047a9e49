"""Measure networks in windows that overlap by half, as medical images are segmented, beside MONAI with PyTorch.

Every subject predicts the same volume, from an array in memory to an array in memory, in a process that lives as long
as the case. A round runs each once, in an order that alternates. A run over a volume of one window comes before the
first round and does not count: memory is touched, kernels are compiled, and znnpy measures its costs if they are not
known yet. Planning counts in every run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import click

from benchmarks.harness.inputs import Vec3
from benchmarks.harness.isolate import Child, run_child
from benchmarks.harness.machine import header, machine_name
from benchmarks.harness.merging import merge
from benchmarks.harness.options import OUT, QUICK
from benchmarks.harness.results import Result, Row
from benchmarks.harness.timing import Budget
from benchmarks.harness.window_nets import NETS, windows_of, within
from benchmarks.window_children import why_not
from benchmarks.window_tables import PROGRAM as PROGRAM
from znnpy.machine import this_machine

CHILDREN = "benchmarks.window_children"
GROUPS: Mapping[str, tuple[str, ...]] = {  # what each choice of --group measures
    "peers": ("peers", "exactness"),
    "operations": ("operations",),
    "memory": ("memory",),
}
LIBRARIES = ("PyTorch", "OpenVINO")
REFERENCE = "MONAI, PyTorch fp32"
TRACED_WINDOWS = 4
RUN_SECONDS = 3 * 3600.0
FLOAT16 = 2  # bytes: nnU-Net keeps the sums of all maps in this precision


@dataclass
class Subject:
    """One that predicts the volume, in a child process.

    file  its prediction of the last round
    """

    name: str
    function: str
    precision: str
    child: Child
    request: dict[str, Any]
    file: Path
    values: list[float] = field(default_factory=list)
    answer: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None

    def run(self, **changed: Any) -> dict[str, Any]:
        """Return the answer to a request; after a failure the child is not asked again."""
        if self.failure is not None:
            return {}
        outcome = self.child.ask({**self.request, **changed}, RUN_SECONDS)
        self.failure = outcome.failure
        if self.failure is None and outcome.answer["not_written"]:
            self.failure = f"void: {outcome.answer['not_written']} values were not written"
        return outcome.answer


@dataclass(frozen=True)
class Asked:
    """The options of the command line.

    size      of every volume; None: that of the network
    planes    of the volume for labels; None: as many as `size` has
    windows   the most that a run of the peers computes; None: all
    """

    networks: Mapping[str, str]
    precisions: tuple[str, ...]
    threads: tuple[int, ...]
    size: Vec3 | None
    planes: int | None
    windows: int | None
    ram: str
    rounds: int


class Bench:
    """The measurements with one number of threads."""

    def __init__(self, asked: Asked, threads: int, folder: Path, budget: Budget) -> None:
        self._asked, self._threads, self._folder, self._budget = asked, threads, folder, budget

    def _request(self, group: str, size: Vec3, precision: str, **more: Any) -> dict[str, Any]:
        return {
            "folder": str(self._folder), "network": self._asked.networks[group], "size": size, "ram": self._asked.ram,
            "threads": self._threads, "precision": precision, **more,
        }  # fmt: skip

    def _case(self, group: str, size: Vec3) -> str:
        threads = f"{self._threads} thread{'s' if self._threads > 1 else ''}"
        return f"{self._asked.networks[group]} {'x'.join(map(str, size))}, {threads}"

    def peers(self) -> Iterator[list[Row]]:
        """Yield the rows of all subjects after every round, and the differences of their predictions at the end."""
        asked, net = self._asked, NETS[self._asked.networks["peers"]]
        whole = asked.size or net.size
        size = whole if asked.windows is None else within(whole, net.window, asked.windows)
        case, count = self._case("peers", size), windows_of(size, net.window)
        facts = {"size": size, "whole": whole, "window": net.window, "windows": count, "threads": self._threads}
        for library in LIBRARIES:
            if (reason := why_not(library)) is not None:
                yield [Row("peers", case, f"MONAI, {library}", "voxels/s", failure=reason)]
        with ExitStack() as stack:
            subjects = self._subjects(stack, size)
            for subject in subjects:
                subject.answer["warm_seconds"] = subject.run(size=net.window, keep=None).get("seconds")
            for number in range(asked.rounds):
                if number and not self._budget.allows(
                    sum(subject.values[-1] for subject in subjects if subject.values)
                ):
                    break
                for subject in subjects if number % 2 == 0 else reversed(subjects):
                    answer = subject.run()
                    if subject.failure is None:
                        subject.values.append(answer["seconds"])
                        subject.answer |= answer
                yield [self._row(case, subject, prod(size), facts) for subject in subjects]
        yield from self._exactness(case, subjects)

    def _subjects(self, stack: ExitStack, size: Vec3) -> list[Subject]:
        """Start the children of znnpy and of every peer that can run here."""
        found: list[Subject] = []
        for precision in self._asked.precisions:
            ways = [("znnpy", f"{CHILDREN}:run_znnpy", "")]
            ways += [(f"MONAI, {one}", f"{CHILDREN}:run_monai", one) for one in LIBRARIES if why_not(one) is None]
            for name, function, library in ways:
                file = self._folder / f"prediction{len(found)}.npy"
                request = self._request("peers", size, precision, keep=str(file), library=library)
                child = stack.enter_context(Child(function))
                found.append(Subject(f"{name} {precision}", function, precision, child, request, file))
        return found

    def _row(self, case: str, subject: Subject, voxels: int, facts: Mapping[str, Any]) -> Row:
        values = () if subject.failure else tuple(voxels / seconds for seconds in subject.values)
        more = {**facts, **subject.answer, "seconds": subject.values}
        return Row("peers", case, subject.name, "voxels/s", values, subject.failure, more)

    def _exactness(self, case: str, subjects: Sequence[Subject]) -> Iterator[list[Row]]:
        """Yield the difference of each prediction from PyTorch's in fp32, relative to its largest value."""
        reference = next((one for one in subjects if one.name == REFERENCE), None)
        if reference is None or reference.failure:
            return
        for subject in subjects:
            if subject is reference or subject.failure:
                continue
            request = {"ours": str(subject.file), "theirs": str(reference.file)}
            outcome = run_child(f"{CHILDREN}:compare", request, seconds=RUN_SECONDS)
            found = outcome.answer
            values = () if outcome.failure else (found["difference"] / found["largest"],)
            yield [Row("exactness", case, subject.name, "relative to the largest", values, outcome.failure, found)]

    def operations(self) -> Iterator[list[Row]]:
        """Yield the seconds that each kind of operation takes of a window, by znnpy."""
        net = NETS[self._asked.networks["operations"]]
        size = within(
            self._asked.size or net.size, net.window, min(TRACED_WINDOWS, self._asked.windows or TRACED_WINDOWS)
        )
        case = self._case("operations", size)
        for precision in self._asked.precisions:
            request = self._request("operations", size, precision)
            outcome = run_child(f"{CHILDREN}:operations", request, seconds=RUN_SECONDS)
            if outcome.failure is not None:
                yield [Row("operations", case, f"znnpy {precision}", "s", failure=outcome.failure)]
                continue
            answer = outcome.answer
            facts = {key: answer[key] for key in ("windows", "computing")}
            yield [
                Row("operations", f"{case}, {precision}", kind, "s", (one["seconds"] / answer["windows"],), None,
                    {**facts, "operations": one["operations"] / answer["windows"]})
                for kind, one in sorted(answer["kinds"].items(), key=lambda of: -of[1]["seconds"])
            ]  # fmt: skip

    def memory(self) -> Iterator[list[Row]]:
        """Yield the seconds of labels of many classes from file to file, with the peak of memory beside the promise."""
        net = NETS[self._asked.networks["memory"]]
        planes, *across = self._asked.size or net.size
        size = (self._asked.planes or planes, across[0], across[1])
        logits = FLOAT16 * net.classes * prod(size)
        run_child(f"{CHILDREN}:write_volume", self._request("memory", size, "fp32"), seconds=RUN_SECONDS)
        for precision in self._asked.precisions:
            outcome = run_child(f"{CHILDREN}:run_labels", self._request("memory", size, precision), seconds=RUN_SECONDS)
            values = () if outcome.failure else (outcome.answer["seconds"],)
            facts = {
                **outcome.answer, "size": size, "whole": net.size, "classes": net.classes, "ram": self._asked.ram,
                "windows": windows_of(size, net.window), "nnunet_logits_bytes": logits,
            }  # fmt: skip
            case = f"{self._case('memory', size)} within {self._asked.ram}"
            yield [Row("memory", case, f"znnpy {precision}", "s", values, outcome.failure, facts)]


@click.command()
@click.option(
    "--group", "-g", "groups", multiple=True, type=click.Choice(list(GROUPS)),
    help="Measure only these; repeatable [default: peers and operations: the volume of memory takes an hour].",
)  # fmt: skip
@click.option(
    "--size", type=int, nargs=3, help="Voxels z y x of every volume [default: 192 256 256; 400 512 512 of memory]."
)
@click.option("--windows", type=click.IntRange(1), help="Shorten the volume of peers to so many windows.")
@click.option("--planes", type=click.IntRange(1), help="Planes of the volume of memory [default: all].")
@click.option(
    "--precision", "precisions", multiple=True, type=click.Choice(["fp32", "bf16"]),
    help="Of all subjects; repeatable [default: fp32, and bf16 where the processor multiplies it].",
)  # fmt: skip
@click.option("--threads", "threads", multiple=True, type=int, help="Threads of each; repeatable [default: all cores].")
@click.option("--ram", default="8G", show_default=True, help="Limit of memory for znnpy.")
@click.option("--rounds", default=3, show_default=True, help="Runs of each subject of peers.")
@click.option("--minutes", type=float, default=120.0, show_default=True, help="Time after which no round begins.")
@OUT
@QUICK
def command(
    groups: tuple[str, ...],
    size: Vec3 | None,
    windows: int | None,
    planes: int | None,
    precisions: tuple[str, ...],
    threads: tuple[int, ...],
    ram: str,
    rounds: int,
    minutes: float,
    out: Path | None,
    quick: bool,
) -> None:
    """Measure U-Nets in windows with half overlap, beside MONAI's SlidingWindowInferer."""
    machine = this_machine()
    asked = Asked(
        dict.fromkeys(GROUPS, "tiny_unet")
        if quick
        else {"peers": "mlperf_unet", "operations": "mlperf_unet", "memory": "nnunet_unet"},
        precisions or (("fp32", "bf16") if machine.bf16 else ("fp32",)),
        threads or (machine.cores,),
        size,
        planes,
        windows,
        "2G" if quick else ram,
        rounds,
    )
    wanted = groups or (tuple(GROUPS) if quick else ("peers", "operations"))
    result = Result("windows", machine_name(), header())
    if out is not None or not quick:
        merge(result, out, [part for group in wanted for part in GROUPS[group]])
    budget = Budget(minutes)
    for count in asked.threads:
        with tempfile.TemporaryDirectory() as folder:
            bench = Bench(asked, count, Path(folder), budget)
            for group in wanted:
                for rows in getattr(bench, group)():
                    for row in rows:
                        click.echo(f"{row.group}: {row.case}, {row.subject}: {_said(row)}")
                    result.add(rows)
                    if out is not None or not quick:
                        result.write(out)


def _said(row: Row) -> str:
    return row.failure or f"{row.median:,.4g} {row.unit}"
