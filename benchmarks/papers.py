"""The experiments of four papers on direct convolution, repeated on this card against today's cuDNN.

    python benchmarks/papers.py --paper first_principles|pascal|cuconv|cudnn [--quick] [--minutes M] [--out RESULT.json]
                                [--precisions fp32 tf32] [--batches 1 8] [--methods NAME ...] [--resume] [--no-torch]
                                [--workspace GIB] [--plans N] [--beside NAME ...]

first_principles  One image of 4000 x 4000, kernels of 3 to 15: processor and GPU, kernels alone and with copies.
pascal            One map to many, many to as many: cuDNN's time over that of the paper's methods, in float32, and over
                  the least that copying as many bytes, or computing every product, takes on this card.
cuconv            All layers of stride 1 of five networks, batches of 1 to 256: how many configurations the method wins
                  against cuDNN, and by how much; the profiled ones beside the paper's Tables 3 to 5.
cudnn             The five layers of Table 2 as shares of the card's peak, in batches of 128 to 16.

Layers, and what the papers found, are in papers_cases.py; who competes in papers_entries.py. cuDNN has more plans for
two dimensions than for three: without PyTorch, which finds those, they do not take part. It tries as many as
`--algorithms` and `--torch-seconds` allow. Table, file and picture say what took part.

Every result is compared with the definition in float64, in boxes at its beginning, middle and end, of the first and the
last image: a method of ours beyond its precision's limit is void and the exit code 1. A plan of cuDNN's beyond it is
inexact, as those by Winograd's transforms may be: figures are without such plans, and beside them what they would be if
they counted. One that is wrong altogether, or refused, is told. Methods of ours that are not the paper's are beside its
own (`--beside`), and count as none of its figures.

After a first run everything runs once behind another run, and what is within 1.5 of the time of cuDNN's best takes part
in rounds. Rounds are interleaved, in an order that alternates; each is a series of runs timed by events of the device,
behind a run that does not count, which begins once the host has queued all of it. Medians count.

A method that is not in the table, or does not apply, is told and left out. `--resume` goes on with the file that
`--out` names: cases that it has are not measured again. Where the time went is told at the end.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_card import Device, WallClock, gpu_header, product_rates, torch_on_the_card
from header import without_forced_blas_kernels
from layer_entries_gpu import Entry, Times
from layers_gpu import MAX_ERROR
from papers_cases import BESIDE as BESIDE_METHODS
from papers_cases import CASES, METHODS, MOST_BYTES, PAPER_PRECISIONS, PAPERS, QUICK, Paper, PaperCase
from papers_clock import HeldClock, HeldTorchClock, Spent, series_of
from papers_entries import CLOSE, Terms, cudnn_entries, our_entries
from papers_files import WRONG, Result, read, write
from papers_inputs import Inputs, rms_error
from papers_processor import Allowed, processor_entries
from papers_tables import (
    BESIDE,
    COPIED,
    CUDNN,
    INEXACT,
    OURS,
    PROCESSOR,
    PYTORCH,
    Case,
    Match,
    Row,
    match,
    peak_flops,
)
from papers_torch import Search, torch_entries

from znnpy.errors import VramError
from znnpy.kernels.table import TABLE
from znnpy.shapes import PRECISIONS, LayerShape, Precision

if TYPE_CHECKING:
    from znnpy.machine import Machine

SLOW_SECONDS, SLOW_ROUNDS = 0.02, 4  # what runs longer, and how often then
BESIDE_VARIANTS = 2  # of what is beside the paper's methods
LATE = ": no time left"
LISTED = 6  # of what is left out, on stdout
QUICK_BYTES = 2**12  # of the copy that holds work back
WRITTEN_SECONDS = 60.0  # after so long the file is written again
HELD_BYTES = 2**30  # that PyTorch may keep for itself from case to case
Asked = tuple[PaperCase, Precision]
Key = tuple[str, int, str]  # layer, batch, precision


class Bench:
    """A device, and what was measured on it."""

    def __init__(
        self, device: Device, machine: Machine, options: argparse.Namespace, threads: Sequence[int] = ()
    ) -> None:
        self._device, self._machine, self._options, self._threads = device, machine, options, threads
        self._end = time.monotonic() + 60 * options.minutes
        self._cuda = torch_on_the_card()
        nbytes = {"nbytes": QUICK_BYTES} if options.quick else {}
        self._clock = HeldClock(device, **nbytes)
        self._torch_clock: Times = HeldTorchClock(device, **nbytes) if self._cuda and options.torch else WallClock()
        self._search = Search(options.torch_seconds, options.algorithms)
        self._inputs = Inputs(device)
        self.spent = Spent()
        self.matches: list[Match] = []
        self.left_out: list[str] = []  # whole cases: no time, no memory; the processor's that take too long
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
                with ExitStack() as crews:
                    found = self._measure(case, precision, crews)
            except VramError as error:
                self.left_out.append(f"{shape}: {error}")
                continue
            if self._cuda:
                import torch

                if torch.cuda.memory_reserved() > HELD_BYTES:
                    torch.cuda.empty_cache()
            if found.rows:
                self.matches.append(found)
                yield found

    def _measure(self, case: PaperCase, precision: Precision, crews: ExitStack) -> Match:
        options = self._options
        terms = Terms(
            self._device, self._machine, self._clock, self.spent, options.methods, options.variants,
            options.every_variant, options.plans, options.most_bytes, void=self.void,
        )  # fmt: skip
        with self.spent.on("inputs"):
            given = self._inputs.of(case.layer, case.batch, precision)
        entries = our_entries(given, terms)
        found = [(COPIED if entry.variant.endswith("with copies") else OURS, entry) for entry in entries]
        few = min(BESIDE_VARIANTS, options.variants)
        others = replace(terms, methods=options.beside, variants=few, every_variant=False, too_large=[])
        found += [(BESIDE, entry) for entry in our_entries(given, others)]
        with self.spent.on("first runs of the processor"):
            allowed = Allowed(options.processor_seconds, crews, self.left_out)
            found += [(PROCESSOR, entry) for entry in processor_entries(given, self._threads, allowed)]
        found += [(CUDNN, entry) for entry in cudnn_entries(given, terms)]
        if options.torch:
            where = "cuda" if self._cuda else "cpu"
            with self.spent.on("inputs"):
                found += [(CUDNN, entry) for entry in torch_entries(given, self._torch_clock, self._search, where)]
        right = [(*told, entry) for who, entry in found if (told := self._checked(who, entry)) is not None]
        self._compete([(who, entry) for who, _, entry in right])
        copied = None
        if options.paper == "pascal":
            with self.spent.on("copies"):
                copied = 1e6 * self._clock.copied_seconds(_least_bytes(case, given.shape))
        return match(
            _case(case, precision, terms, pytorch=options.torch, algorithms=self._search.fewest(), copy_us=copied),
            [_row(who, entry, error) for who, error, entry in right],
        )

    def _checked(self, who: str, entry: Entry) -> tuple[str, float] | None:
        """Who it is, and the error of a run on an output that held no numbers; None where its figure would be void."""
        listed = self.wrong if who == CUDNN else self.void
        name = f"{entry.name} {entry.variant} on {entry.measured}"
        with self.spent.on(f"first runs of {PYTORCH}" if entry.name.startswith(PYTORCH) else "first runs"):
            if entry.poison is not None:
                entry.poison()
            try:
                if not entry.seconds:  # else it ran
                    entry.run()
                self._device.synchronize()
            except RuntimeError as failure:  # PyTorch's and cuDNN's own, and a DeviceError: told, the rest is measured
                listed.append(f"{name}: {str(failure)[:300]}")
                return None
        with self.spent.on("checks"):
            error = rms_error(entry)
        if error <= MAX_ERROR[entry.precision]:  # NaN is not; in tf32 what computes in float32 takes part
            return who, error
        if who == CUDNN and error <= WRONG:
            return INEXACT, error
        listed.append(f"{name}: rms error {error:.1e}")
        return None

    def _compete(self, entries: Sequence[tuple[str, Entry]]) -> None:
        entries = [(who, entry) for who, entry in entries if not entry.seconds]
        with self.spent.on("screening"):
            once = [entry.clock.seconds(entry.run) for _, entry in entries]
        exact = [spent for (who, _), spent in zip(entries, once, strict=True) if who == CUDNN]
        best = min(exact, default=min(once, default=0.0))
        turns = []
        for (who, entry), spent in zip(entries, once, strict=True):
            if who in (CUDNN, INEXACT) and spent > CLOSE * best:
                entry.seconds.append(spent)
            else:
                rounds = self._options.rounds
                turns.append((entry, series_of(spent), min(SLOW_ROUNDS, rounds) if spent > SLOW_SECONDS else rounds))
        with self.spent.on("rounds"):
            for index in range(self._options.rounds):
                for entry, times, rounds in turns if index % 2 == 0 else reversed(turns):
                    if index < rounds:
                        entry.seconds.append(entry.clock.seconds(entry.run, times))


def _case(
    case: PaperCase,
    precision: Precision,
    terms: Terms,
    *,
    pytorch: bool,
    algorithms: int | None,
    copy_us: float | None,
) -> Case:
    shape = case.layer.shape(case.batch, precision)
    return Case(
        set=case.set,
        layer=str(case.layer),
        side=case.layer.side,
        kernel=case.layer.kernel,
        batch=case.batch,
        precision=precision,
        why=case.why,
        flops=2.0 * prod(shape.out_shape) * shape.fin * prod(shape.k),
        plans=terms.plans,
        most_plans=terms.most_plans,
        most_bytes=terms.most_bytes,
        pytorch=pytorch,
        algorithms=algorithms,
        copy_us=copy_us,
        too_large=tuple(terms.too_large),
    )


def _least_bytes(case: PaperCase, shape: LayerShape) -> int:
    """Of images, kernels and outputs, each once."""
    return shape.in_bytes + shape.out_bytes + 4 * case.layer.fin * case.layer.fout * case.layer.kernel**2


def _row(who: str, entry: Entry, error: float) -> Row:
    seconds = tuple(float(f"{spent:.6g}") for spent in entry.seconds)
    return Row(who, entry.name, entry.variant, seconds, float(f"{error:.3g}"), entry.scratch_bytes)


def _key(case: Case) -> Key:
    return case.layer, case.batch, case.precision


def show(found: Match) -> None:
    """One case on stdout: all that took part in the rounds."""
    for row in sorted(found.rows, key=lambda row: row.us):
        if len(row.seconds) > 1 or row.who not in (CUDNN, INEXACT):
            least, inexact = 1e6 * min(row.seconds), "  inexact" if row.who == INEXACT else ""
            print(f"  {row.words[:64]:64}{row.us:12.2f} us {least:12.2f} least  error {row.error:.1e}{inexact}")
    if found.case.too_large:
        print(f"  left out for the memory they want: {'; '.join(found.case.too_large[:LISTED])}")
    if found.band is not None:
        print(f"  {found.speedup:.2f} times cuDNN's speed, {found.band[0]:.2f} to {found.band[1]:.2f}", flush=True)


def resume(bench: Bench, out: Path, result: Result) -> None:
    """Go on with what a file has; SystemExit if it is of another paper or another card."""
    found, header = read(out), result.header
    for what, there, here in (
        ("the experiment", found.paper, result.paper),
        ("a card", found.header["gpu"]["name"], header["gpu"]["name"]),
    ):
        if there != here:
            raise SystemExit(f"{out} has {what} {there}, not {here}: give another --out")
    header["joined"] = [*found.header.get("joined", ()), found.header["command"]]
    bench.matches += found.matches
    bench.wrong += found.wrong
    bench.void += found.void
    bench.left_out += [what for what in found.left_out if not what.endswith(LATE)]


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
    parser.add_argument("--beside", nargs="*", help="others of ours, which do not count; default: by paper")
    parser.add_argument("--variants", type=int, default=12, help="that are tried at most, twice, of a primitive")
    parser.add_argument(
        "--plans", type=int, help="of cuDNN that are tried at most, as it recommends them; default: all"
    )
    parser.add_argument(
        "--workspace", type=float, help="GiB of scratch at most; default: the paper's limit, if it has one"
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=9.0, help="no case begins later")
    parser.add_argument("--processor-seconds", type=float, default=4.0, help="of a case, for first runs on it")
    parser.add_argument("--algorithms", type=int, default=10, help="that PyTorch may try for a layout at most")
    parser.add_argument("--torch-seconds", type=float, default=0.1, help="of a case, for PyTorch's search")
    parser.add_argument("--no-torch", dest="torch", action="store_false")
    parser.add_argument("--resume", action="store_true", help="go on with the file of --out")
    parser.add_argument("--quick", action="store_true", help="tiny cases, to see that everything works")
    parser.add_argument("--out", type=Path, help="default: results/papers_PAPER-GPU-DATE.json; none with --quick")
    options = parser.parse_args(arguments)
    options.precisions = options.precisions or list(PAPER_PRECISIONS[options.paper])
    options.methods = options.methods or list(METHODS[options.paper])
    beside = BESIDE_METHODS[options.paper] if options.beside is None else options.beside
    options.beside = [name for name in beside if name not in options.methods]
    limit = MOST_BYTES[options.paper]
    options.most_bytes = limit if options.workspace is None else int(options.workspace * 2**30)
    options.every_variant = options.paper == "first_principles"
    return options


def measure(bench: Bench, cases: Sequence[Asked], keep: Callable[[], None]) -> None:
    """All cases; what there is is kept now and then, at the end, and where something ends it before."""
    written = time.monotonic()
    try:
        for found in bench.run(cases):
            show(found)
            if time.monotonic() > written + WRITTEN_SECONDS:
                with bench.spent.on("writing"):
                    keep()
                written = time.monotonic()
    finally:
        keep()


def benchmark(device: Device, machine: Machine, options: argparse.Namespace) -> None:
    """One paper on this device."""
    paper: Paper = options.paper
    header = gpu_header(device.gpu)
    name = "-".join(device.gpu.name.lower().split())
    out = options.out or Path(__file__).parent / "results" / f"papers_{paper}-{name}-{date.today()}.json"
    missing = sorted({*options.methods, *options.beside} - {primitive.name for primitive in TABLE})
    if missing:
        print(f"there is no {', no '.join(missing)} in the table of primitives: left out")
    header["methods"], header["beside"], header["missing"] = options.methods, options.beside, missing
    header["product_flops"] = product_rates() if torch_on_the_card() else {}
    peaks = {precision: peak_flops(device.gpu, header["readings"], precision) for precision in options.precisions}
    bench = Bench(device, machine, options, sorted({1, machine.cores}) if paper == "first_principles" else [])
    result = Result(paper, header, peaks, bench.matches, bench.left_out, bench.wrong, bench.void)
    if options.resume and out.exists():
        resume(bench, out, result)
    kept = bool(options.out or not options.quick)

    def keep() -> None:
        header["spent_seconds"] = {what: round(seconds, 1) for what, seconds in bench.spent.seconds.items()}
        write(out, result)

    measure(bench, chosen(options), keep if kept else lambda: None)
    if kept and bench.matches:
        result.draw(out.with_suffix(".png"))
    print("\n".join(["", *result.words()]))
    for what, some in (("left out", bench.left_out), ("of cuDNN, wrong or refused", bench.wrong)):
        if some:
            more = ["the others are in the JSON file"] if len(some) > LISTED else []
            print("\n  ".join([f"{what}: {len(some)}", *some[:LISTED], *more]))
    print(bench.spent.line())
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
