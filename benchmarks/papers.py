"""The experiments of four papers on direct convolution, repeated on this card against today's cuDNN.

    python benchmarks/papers.py --paper first_principles|pascal|cuconv|cudnn [--quick] [--minutes M] [--out RESULT.json]
                                [--precisions fp32 tf32] [--batches 1 8] [--methods NAME ...] [--resume] [--no-torch]

first_principles  One image of 4000 x 4000, kernels of 3 to 15: processor and GPU, kernels alone and with copies.
pascal            One map to many, many to as many: cuDNN's time over that of the paper's methods, in float32.
cuconv            All layers of stride 1 of five networks, batches of 1 to 256: how many configurations the method wins
                  against every plan of cuDNN, and by how much; the profiled ones beside the paper's Tables 3 to 5.
cudnn             The five layers of Table 2 as shares of the card's peak, in batches of 128 to 16.

Layers, and what the papers found, are in papers_cases.py; who competes in papers_entries.py. Every result is compared
with the definition in float64, in boxes at its beginning, middle and end: a method of ours beyond its precision's limit
is void and the exit code 1, a plan of cuDNN's beyond it does not count. Rounds are interleaved, in an order that
alternates, after a run that warms up; each is a series of runs timed by events of the device, which begins once the
host has queued all of it. Medians count. cuDNN's plans that are far behind its best run once.

A method that is not in the table, or does not apply, is told and left out. `--resume` goes on with the file that
`--out` names: cases that it has are not measured again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import date
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import papers_pictures
from gpu_card import Device, WallClock, gpu_header, often, product_rates, torch_on_the_card
from header import without_forced_blas_kernels
from layer_entries_gpu import Entry, Times, rms_error
from layers_gpu import MAX_ERROR
from papers_cases import CASES, METHODS, PAPER_PRECISIONS, PAPERS, QUICK, Paper, PaperCase
from papers_entries import (
    HeldClock,
    HeldTorchClock,
    cudnn_entries,
    our_entries,
    padded_input,
    processor_entries,
    torch_entries,
)
from papers_tables import COPIED, CUDNN, OURS, PROCESSOR, TABLES, Match, Row, lines, match, peak_flops

from znnpy.errors import VramError
from znnpy.kernels.crew import Crew
from znnpy.kernels.table import TABLE
from znnpy.shapes import PRECISIONS, Precision

if TYPE_CHECKING:
    from layer_entries_gpu import Input

    from znnpy.machine import Machine

FAR_BEHIND = 1.6  # times the time of cuDNN's best plan: not in the rounds
SLOW_SECONDS, SLOW_ROUNDS = 0.5, 2  # what runs longer, and how often then
LATE = ": no time left"
LISTED = 6  # of what is left out, on stdout
QUICK_BYTES = 2**12  # of the copy that holds work back
Asked = tuple[PaperCase, Precision]
Key = tuple[str, int, str]  # layer, batch, precision


class Bench:
    """A device, and what was measured on it."""

    def __init__(
        self, device: Device, machine: Machine, options: argparse.Namespace, crews: Sequence[Crew] = ()
    ) -> None:
        self._device, self._machine, self._options, self._crews = device, machine, options, crews
        self._end = time.monotonic() + 60 * options.minutes
        self._cuda = torch_on_the_card()
        nbytes = {"nbytes": QUICK_BYTES} if options.quick else {}
        self._clock: Times = HeldClock(device, **nbytes)
        self._torch_clock: Times = HeldTorchClock(device, **nbytes) if self._cuda and options.torch else WallClock()
        self.matches: list[Match] = []
        self.left_out: list[str] = []  # no time, no memory
        self.wrong: list[str] = []  # of cuDNN's
        self.void: list[str] = []  # of ours

    def run(self, cases: Sequence[Asked]) -> Iterator[Match]:
        """Case after case, until the time is up; not those that there are."""
        known = {_key(found.case) for found in self.matches}
        for case, precision in cases:
            shape = case.layer.shape(case.batch, precision)
            if (str(case.layer), case.batch, precision) in known:
                continue
            if time.monotonic() > self._end:
                self.left_out.append(f"{shape}{LATE}")
                continue
            print(f"\n{shape}: {case.why}", flush=True)
            try:
                rows = self._measure(case, padded_input(shape, case.layer.padding, self._device))
            except VramError as error:
                self.left_out.append(f"{shape}: {error}")
                continue
            if self._cuda:
                import torch

                torch.cuda.empty_cache()
            if rows:
                self.matches.append(match(rows))
                yield self.matches[-1]

    def _measure(self, case: PaperCase, given: Input) -> list[Row]:
        options = self._options
        entries = our_entries(given, self._device, self._machine, self._clock, options, self.void)
        found = [(COPIED if entry.variant.endswith("with copies") else OURS, entry) for entry in entries]
        found += [(PROCESSOR, entry) for entry in processor_entries(given, self._crews, options.variants)]
        found += [
            (CUDNN, entry) for entry in cudnn_entries(given, self._device, self._clock, options.plans, self.left_out)
        ]
        if options.torch:
            where = "cuda" if self._cuda else "cpu"
            found += [(CUDNN, entry) for entry in torch_entries(given, self._torch_clock, where)]
        right = [(who, entry, error) for who, entry in found if (error := self._error(who, entry)) is not None]
        self._compete([(who, entry) for who, entry, _ in right])
        return [_row(case, who, entry, error) for who, entry, error in right]

    def _error(self, who: str, entry: Entry) -> float | None:
        """Of a run on an output that held no numbers; None where its figure would be void."""
        if entry.poison is not None:
            entry.poison()
        name = f"{entry.name} {entry.variant} on {entry.measured}"
        listed = self.wrong if who == CUDNN else self.void
        try:
            entry.run()
            self._device.synchronize()
        except RuntimeError as failure:  # PyTorch's and cuDNN's own, and a DeviceError: told, and the rest is measured
            listed.append(f"{name}: {str(failure)[:300]}")
            return None
        error = rms_error(entry)
        if error <= MAX_ERROR[entry.precision]:  # NaN is not; in tf32 what computes in float32 takes part
            return error
        listed.append(f"{name}: rms error {error:.1e}")
        return None

    def _compete(self, entries: Sequence[tuple[str, Entry]]) -> None:
        once = [entry.clock.seconds(entry.run) for _, entry in entries]
        best = min((spent for (who, _), spent in zip(entries, once, strict=True) if who == CUDNN), default=0.0)
        turns = []
        for (who, entry), spent in zip(entries, once, strict=True):
            if who == CUDNN and spent > FAR_BEHIND * best:
                entry.seconds.append(spent)
            else:
                turns.append((entry, often(spent), SLOW_ROUNDS if spent > SLOW_SECONDS else self._options.rounds))
        for index in range(self._options.rounds):
            for entry, times, rounds in turns if index % 2 == 0 else reversed(turns):
                if index < rounds:
                    entry.seconds.append(entry.clock.seconds(entry.run, times))


def _row(case: PaperCase, who: str, entry: Entry, error: float) -> Row:
    shape = case.layer.shape(case.batch, entry.given.shape.precision)
    return Row(
        set=case.set,
        layer=str(case.layer),
        side=case.layer.side,
        kernel=case.layer.kernel,
        batch=case.batch,
        precision=shape.precision,
        why=case.why,
        flops=2.0 * prod(shape.out_shape) * shape.fin * prod(shape.k),
        who=who,
        name=entry.name,
        variant=entry.variant,
        seconds=tuple(entry.seconds),
        error=error,
        scratch_bytes=entry.scratch_bytes,
    )


def _key(row: Row) -> Key:
    return row.layer, row.batch, row.precision


def _by_case(rows: Iterable[Row]) -> list[list[Row]]:
    found: dict[Key, list[Row]] = {}
    for row in rows:
        found.setdefault(_key(row), []).append(row)
    return list(found.values())


def show(found: Match) -> None:
    """One case on stdout: all that took part in the rounds."""
    for row in sorted(found.rows, key=lambda row: row.us):
        if len(row.seconds) > 1 or row.who != CUDNN:
            least = 1e6 * min(row.seconds)
            print(f"  {row.words[:64]:64}{row.us:12.2f} us {least:12.2f} least  error {row.error:.1e}", flush=True)
    if found.band is not None:
        print(f"  {found.speedup:.2f} times cuDNN's speed, {found.band[0]:.2f} to {found.band[1]:.2f}", flush=True)


def write(out: Path, paper: Paper, bench: Bench, header: dict[str, Any], peaks: dict[str, float | None]) -> None:
    """Everything so far, as JSON and as a picture."""
    table = TABLES[paper](bench.matches, peaks)
    result = {
        "header": header,
        "paper": paper,
        "peak_flops": peaks,
        "table": table,
        "left_out": bench.left_out,
        "wrong": bench.wrong,
        "void": bench.void,
        "cases": [found.summary() for found in bench.matches],
        "rows": [asdict(row) | {"us": row.us} for found in bench.matches for row in found.rows],
    }
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    card = f"{header['gpu']['name']}, {header['date'][:10]}"
    papers_pictures.draw(paper, out.with_suffix(".png"), bench.matches, table, card)


def resume(bench: Bench, out: Path, paper: Paper, header: dict[str, Any]) -> None:
    """Go on with what a file has; SystemExit if it is of another paper or another card."""
    found = json.loads(out.read_text())
    for what, there, here in (
        ("the experiment", found["paper"], paper),
        ("a card", found["header"]["gpu"]["name"], header["gpu"]["name"]),
    ):
        if there != here:
            raise SystemExit(f"{out} has {what} {there}, not {here}: give another --out")
    header["joined"] = [*found["header"].get("joined", ()), found["header"]["command"]]
    names = Row.__dataclass_fields__
    rows = [{key: value for key, value in row.items() if key in names} for row in found["rows"]]
    bench.matches = [match(some) for some in _by_case(Row(**row | {"seconds": tuple(row["seconds"])}) for row in rows)]
    bench.wrong, bench.void = found["wrong"], found["void"]
    bench.left_out += [what for what in found["left_out"] if not what.endswith(LATE)]


def chosen(options: argparse.Namespace) -> list[Asked]:
    """The cases of the words that were given, each in every precision; one precision after the other."""
    paper: Paper = options.paper
    cases = (QUICK if options.quick else CASES)[paper]
    if options.batches:
        cases = tuple(case for case in cases if case.batch in options.batches)
    if options.kernels:
        cases = tuple(case for case in cases if case.layer.kernel in options.kernels)
    return [(case, precision) for precision in options.precisions for case in cases]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paper", choices=PAPERS, required=True)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, help="default: those of the experiment")
    parser.add_argument("--batches", type=int, nargs="+", help="only these")
    parser.add_argument("--kernels", type=int, nargs="+", help="only these")
    parser.add_argument("--methods", nargs="+", help="primitives of ours; default: those of the paper")
    parser.add_argument("--variants", type=int, default=12, help="that are tried at most, twice, of a primitive")
    parser.add_argument(
        "--plans", type=int, help="of cuDNN that are tried at most, as it recommends them; default: all"
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=9.0, help="no case begins later")
    parser.add_argument("--no-torch", dest="torch", action="store_false")
    parser.add_argument("--resume", action="store_true", help="go on with the file of --out")
    parser.add_argument("--quick", action="store_true", help="tiny cases, to see that everything works")
    parser.add_argument("--out", type=Path, help="default: results/papers_PAPER-GPU-DATE.json; none with --quick")
    options = parser.parse_args(arguments)
    options.precisions = options.precisions or list(PAPER_PRECISIONS[options.paper])
    options.methods = options.methods or list(METHODS[options.paper])
    options.every_variant = options.paper == "first_principles"
    return options


def benchmark(device: Device, machine: Machine, options: argparse.Namespace) -> None:
    """One paper on this device."""
    paper: Paper = options.paper
    header = gpu_header(device.gpu)
    name = "-".join(device.gpu.name.lower().split())
    out = options.out or Path(__file__).parent / "results" / f"papers_{paper}-{name}-{date.today()}.json"
    missing = sorted(set(options.methods) - {primitive.name for primitive in TABLE})
    if missing:
        print(f"there is no {', no '.join(missing)} in the table of primitives: left out")
    header["methods"], header["missing"] = options.methods, missing
    header["product_flops"] = product_rates() if torch_on_the_card() else {}
    peaks = {precision: peak_flops(device.gpu, header["readings"], precision) for precision in options.precisions}
    with ExitStack() as open_crews:
        threads = sorted({1, machine.cores}) if paper == "first_principles" else []
        crews = [open_crews.enter_context(Crew(count)) for count in threads]
        bench = Bench(device, machine, options, crews)
        if options.resume and out.exists():
            resume(bench, out, paper, header)
        kept = options.out or not options.quick
        for found in bench.run(chosen(options)):
            show(found)
            if kept:
                write(out, paper, bench, header, peaks)
        if kept and bench.matches:
            write(out, paper, bench, header, peaks)  # what was left out last
    print("\n".join(["", *lines(paper, TABLES[paper](bench.matches, peaks))]))
    for what, some in (("left out", bench.left_out), ("of cuDNN, wrong or refused", bench.wrong)):
        if some:
            more = ["the others are in the JSON file"] if len(some) > LISTED else []
            print("\n  ".join([f"{what}: {len(some)}", *some[:LISTED], *more]))
    if bench.void:
        raise SystemExit("void:\n" + "\n".join(bench.void))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    if options.torch:
        from layers import require_torch

        require_torch()
    from znnpy.kernels.gpu.device import Device, find_gpu
    from znnpy.machine import this_machine

    gpu = find_gpu()
    with Device(gpu) as device:
        benchmark(device, replace(this_machine(), gpu=gpu), options)


if __name__ == "__main__":
    without_forced_blas_kernels()
    main()
