"""What `papers.py` makes of its measurements: each paper's own table, with the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from papers_cases import (
    CUCONV_AT_ONE,
    CUCONV_SAYS,
    CUDNN_BATCH_16,
    CUDNN_SAYS,
    PASCAL_SAYS,
    POST_SAYS,
    PROFILES,
    TITAN_X_SAYS,
    Paper,
)

if TYPE_CHECKING:
    from znnpy.machine import Gpu

OURS, COPIED, CUDNN, PROCESSOR = "ours", "ours, with copies", "cuDNN", "processor"
INEXACT = "cuDNN, inexact"  # beyond the error that a precision allows, as by Winograd's transforms
BESIDE = "ours, beside"  # no method of the paper's
PYTORCH = "PyTorch"
FLOPS_A_CLOCK = {  # of a multiprocessor, not sparse: NVIDIA's white papers on the A100 and the H100
    (8, 0): {"fp32": 128, "tf32": 1024, "fp16": 2048},
    (9, 0): {"fp32": 256, "tf32": 2048, "fp16": 4096},
}
Found = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A layer as it was measured, and who was asked to compete."""

    set: str
    layer: str  # side-kernel-fout-fin
    side: int
    kernel: int
    batch: int
    precision: str
    why: str
    flops: float
    plans: int  # of cuDNN, for three dimensions, channels last
    most_plans: int | None  # that it was asked for, as it recommends them; None: all
    most_bytes: int | None  # of scratch and workspace; None: what the device has
    pytorch: bool  # whether PyTorch, with cuDNN's plans for two dimensions, took part
    too_large: tuple[str, ...] = ()  # left out for the memory they want
    algorithms: int | None = None  # that PyTorch tried of each layout, as cuDNN's heuristics like them; None: all
    copy_us: float | None = None  # of a copy that reads and writes as many bytes as images, kernels and outputs have
    others: int = 0  # plans of cuDNN's that were measured and are slower than those that a file names

    def bound_us(self, flops: float | None) -> float | None:
        """No method that computes every product at so many operations a second, and copies no faster, needs less."""
        return None if self.copy_us is None or not flops else max(self.copy_us, 1e6 * self.flops / flops)


@dataclass(frozen=True, slots=True)
class Row:
    """One competitor on one layer."""

    who: str
    name: str
    variant: str
    seconds: tuple[float, ...]  # of every round; of one alone where it was far behind
    error: float  # rms, of the rms of the definition
    scratch_bytes: int

    @property
    def us(self) -> float:
        return 1e6 * median(self.seconds)

    @property
    def words(self) -> str:
        return f"{self.name} {self.variant}".strip()


@dataclass(frozen=True, slots=True)
class Match:
    """A layer, and the fastest of either side on it."""

    case: Case
    rows: Sequence[Row]
    ours: Row | None
    cudnn: Row | None
    inexact: Row | None
    beside: Row | None = None

    @property
    def speedup(self) -> float | None:
        """cuDNN's time over ours; None where one of them is missing."""
        return None if self.ours is None or self.cudnn is None else self.cudnn.us / self.ours.us

    @property
    def band(self) -> tuple[float, float] | None:
        """Least and most of single rounds."""
        return None if self.ours is None or self.cudnn is None else _band(self.ours, self.cudnn)

    @property
    def beside_speedup(self) -> float | None:
        return None if self.beside is None or self.cudnn is None else self.cudnn.us / self.beside.us

    def possible(self, flops: float | None) -> float | None:
        """cuDNN's time over the least that is possible at so many operations a second."""
        bound = self.case.bound_us(flops)
        return None if self.cudnn is None or bound is None else self.cudnn.us / bound

    @property
    def any_cudnn(self) -> Row | None:
        """The fastest of cuDNN's, inexact or not."""
        return min((row for row in (self.cudnn, self.inexact) if row), key=lambda row: row.us, default=None)

    def tflops(self, row: Row | None) -> float | None:
        return None if row is None else self.case.flops / row.us / 1e6

    def summary(self) -> Found:
        case = self.case
        found: Found = {key: getattr(case, key) for key in ("set", "layer", "batch", "precision", "why")}
        for key, row in (
            ("ours", self.ours),
            ("cudnn", self.cudnn),
            ("inexact", self.inexact),
            ("beside", self.beside),
        ):
            if row is not None:
                found |= {key: row.words, f"{key}_us": row.us, f"{key}_tflops": self.tflops(row)}
        if self.inexact is not None:
            found["inexact_error"] = self.inexact.error
        if self.band is not None:
            found |= {"speedup": self.speedup, "speedup_least": self.band[0], "speedup_most": self.band[1]}
        return found


def match(case: Case, rows: Sequence[Row]) -> Match:
    def fastest(who: str) -> Row | None:
        return min((row for row in rows if row.who == who), key=lambda row: row.us, default=None)

    return Match(case, rows, fastest(OURS), fastest(CUDNN), fastest(INEXACT), fastest(BESIDE))


def gains(matches: Sequence[Match]) -> Found:
    """How often ours was faster and by how much, `won_surely` in every round; `if_inexact_counted`: the same again."""
    found = _gain([(m.ours, m.cudnn) for m in matches if m.ours and m.cudnn])
    found["without_ours"] = sum(m.ours is None for m in matches)
    found["left_out_for_memory"] = sum(bool(m.case.too_large) for m in matches)
    found["inexact"] = sum(m.inexact is not None for m in matches)
    found["inexact_fastest"] = sum(m.inexact is not None and m.any_cudnn is m.inexact for m in matches)
    pairs = [(m.ours, peer) for m in matches if m.ours and (peer := m.any_cudnn)]
    found["if_inexact_counted"] = _gain(pairs)
    beside = [(m.beside, m.cudnn) for m in matches if m.beside and m.cudnn]
    if beside:
        found["beside"] = _gain(beside) | {"error": max(row.error for row, _ in beside)}
    return found


def _possible(matches: Sequence[Match], flops: float | None, wanted: float) -> Found:
    """What could be won over cuDNN's time at most, and in how many cases that is less than `wanted` times."""
    most = [times for m in matches if (times := m.possible(flops)) is not None]
    if not most:
        return {}
    less = sum(times < wanted for times in most)
    return {"possible": {"cases": len(most), "mean": mean(most), "most": max(most), "less_than_the_paper": less}}


def _gain(pairs: Sequence[tuple[Row, Row]]) -> Found:
    if not pairs:
        return {"cases": 0}
    speedups = [peer.us / ours.us for ours, peer in pairs]
    won = [speedup for speedup in speedups if speedup > 1]
    found: Found = {"cases": len(speedups), "won": len(won), "share_won": len(won) / len(speedups)}
    found["won_surely"] = sum(_band(*pair)[0] > 1 for pair in pairs)
    found |= {"mean": mean(speedups), "least": min(speedups), "most": max(speedups)}
    return found | ({"mean_where_won": mean(won)} if won else {})


def _band(ours: Row, peer: Row) -> tuple[float, float]:
    single = [b / a for a, b in zip(ours.seconds, peer.seconds, strict=False)]
    return min(single), max(single)


def against(matches: Sequence[Match]) -> list[str]:
    """What of cuDNN took part, in words: a line each."""
    plans = {m.case.most_plans for m in matches}
    words = " or ".join("all" if most is None else f"the first {most}" for most in sorted(plans, key=str))
    limits = {m.case.most_bytes for m in matches}
    memory = " or ".join(
        "what is free" if most is None else f"{most / 2**30:g} GiB" for most in sorted(limits, key=str)
    )
    beside = sum(m.case.pytorch for m in matches)
    searched = _searched([m.case.algorithms for m in matches if m.case.pytorch])
    if not beside:
        torch = "PyTorch's conv2d was not asked: none of its plans for two dimensions took part"
    elif beside == len(matches):
        torch = f"PyTorch's conv2d beside: for two dimensions, both layouts, {searched}, without a limit of memory"
    else:
        torch = f"PyTorch's conv2d beside, for two dimensions, {searched}, in {beside} of {len(matches)} cases alone"
    return [f"against cuDNN's plans for three dimensions, channels last: {words} it recommends, in {memory}", torch]


def _searched(algorithms: Sequence[int | None]) -> str:
    some = [most for most in algorithms if most is not None]
    if not some:
        return "all of cuDNN's algorithms"
    first = f"{min(some)}" if min(some) == max(some) else f"{min(some)} to {max(some)}"
    rest = "" if len(some) == len(algorithms) else f" (all in {len(algorithms) - len(some)} cases)"
    return f"the first {first} that cuDNN's heuristics like{rest}"


def cuconv(matches: Sequence[Match], peaks: Mapping[str, float | None]) -> Found:
    """Share of configurations won and by how much, by kernel and batch; the profiled layers beside Tables 3 to 5."""
    del peaks
    found: Found = {"paper": dict(CUCONV_SAYS)}
    for precision in _in_order(m.case.precision for m in matches):
        alike = [m for m in matches if m.case.precision == precision]
        here = found[precision] = gains(alike)
        here["by_kernel_and_batch"] = [
            {"kernel": kernel, "batch": batch}
            | (
                dict(zip(("paper_mean", "paper_most"), CUCONV_AT_ONE[kernel], strict=True))
                if _paper_has(kernel, batch)
                else {}
            )
            | gains(_of(alike, kernel=kernel, batch=batch))
            for kernel in sorted({m.case.kernel for m in alike})
            for batch in sorted({m.case.batch for m in alike})
        ]
        here["profiles"] = [
            {"table": p.table, "layer": str(p.layer), "batch": p.batch}
            | {"paper_us": p.ours_us, "paper_cudnn_us": min(p.cudnn_us.values()), "paper_speedup": p.speedup}
            | {key: value for m in _of(alike, layer=str(p.layer), batch=p.batch) for key, value in m.summary().items()}
            for p in PROFILES
        ]
    return found


def _paper_has(kernel: int, batch: int) -> bool:
    return batch == 1 and kernel in CUCONV_AT_ONE


def pascal(matches: Sequence[Match], peaks: Mapping[str, float | None]) -> Found:
    """Speed-ups of one map and of several, by kernel and by size of the image, and what is possible at most."""
    flops = peaks.get("fp32")
    found: Found = {}
    for name in _in_order(m.case.set for m in matches):
        alike, says = _of(matches, set=name), PASCAL_SAYS[name]
        found[name] = gains(alike) | {"paper": {"mean": says.mean, "least": says.least, "most": says.most}}
        found[name] |= _possible(alike, flops, says.mean)
        found[name]["paper"]["titan_x"] = dict(zip(("least", "most"), TITAN_X_SAYS[name], strict=True))
        found[name]["by_kernel_and_side"] = [
            {"kernel": kernel, "side": side} | gains(some) | _possible(some, flops, says.mean)
            for kernel in sorted({m.case.kernel for m in alike})
            for side in sorted({m.case.side for m in alike})
            if (some := _of(alike, kernel=kernel, side=side))
        ]
    return found


def cudnn(matches: Sequence[Match], peaks: Mapping[str, float | None]) -> Found:
    """Share of what the card computes at most, and of what the best batch has; the mean of all layers by batch."""
    found: Found = {"paper": {"share_of_peak": CUDNN_SAYS, "batch_16_of_best": CUDNN_BATCH_16}, "layers": []}
    found["batches"] = _mean_speeds(matches)
    for m in matches:
        case, summary, peak = m.case, m.summary(), peaks.get(m.case.precision)
        others = [other.tflops(other.ours) for other in _of(matches, set=case.set, precision=case.precision)]
        best = max((value for value in others if value is not None), default=None)
        for key, row in (("ours", m.ours), ("cudnn", m.cudnn)):
            speed = m.tflops(row)
            if speed is not None and peak:
                summary[f"{key}_of_peak"] = 1e12 * speed / peak
        speed = m.tflops(m.ours)
        if speed is not None and best:
            summary["of_best_batch"] = speed / best
        number = case.set.removeprefix("layer ")
        summary["paper_of_peak"] = {card: shares[int(number) - 1] for card, shares in CUDNN_SAYS.items()}
        found["layers"].append(summary)
    return found


def _mean_speeds(matches: Sequence[Match]) -> list[Found]:
    """Mean TFLOP/s of all layers, of each batch that has all, and the share of what the best batch has."""
    found: list[Found] = []
    sets = {m.case.set for m in matches}
    for precision in _in_order(m.case.precision for m in matches):
        some: list[Found] = []
        for batch in sorted({m.case.batch for m in matches}):
            alike = _of(matches, precision=precision, batch=batch)
            here: Found = {"batch": batch, "precision": precision}
            for key in ("ours", "cudnn"):
                speeds = [m.tflops(getattr(m, key)) for m in alike]
                if len(speeds) == len(sets) and None not in speeds:
                    here[f"{key}_tflops"] = mean(speed for speed in speeds if speed is not None)
            some.append(here)
        for key in ("ours", "cudnn"):
            best = max((here[f"{key}_tflops"] for here in some if f"{key}_tflops" in here), default=0.0)
            for here in some:
                if f"{key}_tflops" in here:
                    here[f"{key}_of_best"] = here[f"{key}_tflops"] / best
        found += some
    return found


def first_principles(matches: Sequence[Match], peaks: Mapping[str, float | None]) -> Found:
    """Milliseconds of every way by kernel; how many times the processor's time a GPU saves, with copies and without."""
    del peaks
    found: Found = {"paper": POST_SAYS | {"times": POST_SAYS["processor"] / POST_SAYS["GPU"]}, "kernels": []}
    for m in matches:
        fastest: dict[str, Row] = {}
        for row in sorted(m.rows, key=lambda row: row.us):
            fastest.setdefault(row.who, row)
        here: Found = {"kernel": m.case.kernel, "ms": {_told(row): row.us / 1e3 for row in m.rows}}
        here["fastest"] = {who: {"name": _told(row), "ms": row.us / 1e3} for who, row in fastest.items()}
        for who in (OURS, COPIED):
            if who in fastest and PROCESSOR in fastest:
                here[f"processor over {who}"] = fastest[PROCESSOR].us / fastest[who].us
        found["kernels"].append(here)
    return found


def _told(row: Row) -> str:
    return f"{row.words} (inexact)" if row.who == INEXACT else row.words


TABLES: Mapping[Paper, Callable[[Sequence[Match], Mapping[str, float | None]], Found]] = {
    "first_principles": first_principles,
    "pascal": pascal,
    "cuconv": cuconv,
    "cudnn": cudnn,
}


def peak_flops(gpu: Gpu, readings: Mapping[str, str] | None, precision: str) -> float | None:
    """Operations a second at the highest clock that the driver names; None where either is not known."""
    clock = (readings or {}).get("clocks.max.sm", "").removesuffix(" MHz")
    flops = FLOPS_A_CLOCK.get(gpu.capability, {}).get(precision)
    return gpu.multiprocessors * flops * 1e6 * float(clock) if flops and clock.isdigit() else None


def _of(matches: Iterable[Match], **wanted: object) -> list[Match]:
    return [m for m in matches if all(getattr(m.case, key) == value for key, value in wanted.items())]


def _in_order(words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(words))
