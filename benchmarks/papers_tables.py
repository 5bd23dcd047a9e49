"""What `papers.py` makes of its measurements: each paper's own table, with the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import TYPE_CHECKING, Any, Literal

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
PYTORCH = "PyTorch"
FLOPS_A_CLOCK = {  # of a multiprocessor, not sparse: NVIDIA's white papers on the A100 and the H100
    (8, 0): {"fp32": 128, "tf32": 1024, "fp16": 2048},
    (9, 0): {"fp32": 256, "tf32": 2048, "fp16": 4096},
}
GAIN_HEAD = (
    f"{'':28}{'cases':>6}{'won':>5}{'surely':>7}{'share':>8}{'mean won':>9}{'mean':>7}{'most':>7}{'least':>7}"
    f" |{'inexact':>8}{'first':>6}{'won':>5}{'share':>8}{'mean won':>9} |{'memory':>7}"
)
GAIN_NOTES = (
    "surely: in every round. Behind the bar: cases in which plans of cuDNN's are beyond the error that the precision",
    "allows, in which one of them is its fastest, and what ours would have won if they counted. memory: cases in which",
    "something was left out that wants more than the experiment allows.",
)

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

    @property
    def speedup(self) -> float | None:
        """cuDNN's time over ours; None where one of them is missing."""
        return None if self.ours is None or self.cudnn is None else self.cudnn.us / self.ours.us

    @property
    def band(self) -> tuple[float, float] | None:
        """Least and most of single rounds."""
        return None if self.ours is None or self.cudnn is None else _band(self.ours, self.cudnn)

    @property
    def any_cudnn(self) -> Row | None:
        """The fastest of cuDNN's, inexact or not."""
        return min((row for row in (self.cudnn, self.inexact) if row), key=lambda row: row.us, default=None)

    def tflops(self, row: Row | None) -> float | None:
        return None if row is None else self.case.flops / row.us / 1e6

    def summary(self) -> Found:
        case = self.case
        found: Found = {key: getattr(case, key) for key in ("set", "layer", "batch", "precision", "why")}
        for key, row in (("ours", self.ours), ("cudnn", self.cudnn), ("inexact", self.inexact)):
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

    return Match(case, rows, fastest(OURS), fastest(CUDNN), fastest(INEXACT))


def gains(matches: Sequence[Match]) -> Found:
    """How often ours was faster and by how much, `won_surely` in every round; `if_inexact_counted`: the same again."""
    found = _gain([(m.ours, m.cudnn) for m in matches if m.ours and m.cudnn])
    found["without_ours"] = sum(m.ours is None for m in matches)
    found["left_out_for_memory"] = sum(bool(m.case.too_large) for m in matches)
    found["inexact"] = sum(m.inexact is not None for m in matches)
    found["inexact_fastest"] = sum(m.inexact is not None and m.any_cudnn is m.inexact for m in matches)
    pairs = [(m.ours, peer) for m in matches if m.ours and (peer := m.any_cudnn)]
    return found | {"if_inexact_counted": _gain(pairs)}


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
    if not beside:
        torch = "PyTorch's conv2d was not asked: none of its plans for two dimensions took part"
    elif beside == len(matches):
        torch = "PyTorch's conv2d beside: also its plans for two dimensions, both layouts, without a limit of memory"
    else:
        torch = f"PyTorch's conv2d beside, with its plans for two dimensions, in {beside} of {len(matches)} cases alone"
    return [f"against cuDNN's plans for three dimensions, channels last: {words} it recommends, in {memory}", torch]


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
    """Speed-ups of one map and of several, by kernel and by size of the image."""
    del peaks
    found: Found = {}
    for name in _in_order(m.case.set for m in matches):
        alike, says = _of(matches, set=name), PASCAL_SAYS[name]
        found[name] = gains(alike) | {"paper": {"mean": says.mean, "least": says.least, "most": says.most}}
        found[name]["paper"]["titan_x"] = dict(zip(("least", "most"), TITAN_X_SAYS[name], strict=True))
        found[name]["by_kernel_and_side"] = [
            {"kernel": kernel, "side": side} | gains(_of(alike, kernel=kernel, side=side))
            for kernel in sorted({m.case.kernel for m in alike})
            for side in sorted({m.case.side for m in alike})
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


def lines(paper: Paper, table: Found) -> list[str]:
    """The table as it is printed."""
    match paper:
        case "cuconv":
            return _cuconv_lines(table)
        case "pascal":
            return _pascal_lines(table)
        case "cudnn":
            return _cudnn_lines(table)
        case "first_principles":
            return _first_lines(table)


def _cuconv_lines(table: Found) -> list[str]:
    says = table["paper"]
    out = [f"{'paper, V100, cuDNN 7.1, fp32':28}{602:6}{50:5}{'':7}{says['share won']:8.2%}"
           f"{says['mean speed-up where it wins']:9.2f}{'':7}{says['largest speed-up']:7.2f}"]  # fmt: skip
    for precision, here in table.items():
        if precision == "paper":
            continue
        out.append(_gain_line(f"all, {precision}", here))
        for part in here["by_kernel_and_batch"]:
            words = f"k = {part['kernel']}, batch {part['batch']}"
            out.append(_gain_line(f"  {words}, {precision}", part))
            if "paper_mean" in part:
                out.append(f"{f'  {words}, paper':63}{part['paper_mean']:7.2f}{part['paper_most']:7.2f}")
        out += [
            "",
            f"{'Table':6}{'layer, batch':20}{'paper us':>9}{'cuDNN':>8}{'times':>7}{'us':>9}{'cuDNN':>8}{'times':>7}",
        ]
        for p in here["profiles"]:
            name = f"{p['layer']}, {p['batch']}"
            paper = f"{p['paper_us']:9.2f}{p['paper_cudnn_us']:8.2f}{p['paper_speedup']:7.2f}"
            out.append(f"{p['table']:6}{name:20}{paper}{_pair(p)}  {p.get('cudnn', '')}{_inexact(p, 'us', 2)}")
        out.append("")
    return [GAIN_HEAD, *out, *GAIN_NOTES]


def _pascal_lines(table: Found) -> list[str]:
    out = [GAIN_HEAD]
    for name, here in table.items():
        says = here["paper"]
        paper = f"{f'{name}, paper, GTX 1080 Ti':28}{'':6}{'':5}{'':7}{1:8.2%}{'':9}"
        out.append(f"{paper}{says['mean']:7.2f}{says['most']:7.2f}{says['least']:7.2f}")
        least, most = (says["titan_x"][key] for key in ("least", "most"))
        out.append(f"{f'{name}, paper, GTX Titan X':28}{'':42}{most:7.2f}{least:7.2f}")
        out.append(_gain_line(f"{name}, all", here))
        if here["without_ours"]:
            out.append(f"  and {here['without_ours']} that no method of ours takes, which do not count")
        out += [_gain_line(f"  k = {part['kernel']}, side {part['side']}", part) for part in here["by_kernel_and_side"]]
    return [*out, *GAIN_NOTES]


def _cudnn_lines(table: Found) -> list[str]:
    cards = "".join(f"{card:>11}" for card in CUDNN_SAYS)
    out = [f"{'layer, batch':26}{'TFLOP/s':>9}{'cuDNN':>8}{'times':>7}{'of peak':>9}{'cuDNN':>8}{'of best':>9}{cards}"]
    for row in table["layers"]:
        name = f"{row['set']}, {row['batch']}, {row['precision']}"
        speeds = _number(row, "ours_tflops", 9, 1) + _number(row, "cudnn_tflops", 8, 1) + _number(row, "speedup", 7, 2)
        shares = _share(row, "ours_of_peak", 9) + _share(row, "cudnn_of_peak", 8) + _share(row, "of_best_batch", 9)
        out.append(f"{name:26}{speeds}{shares}{''.join(f'{share:11.0%}' for share in row['paper_of_peak'].values())}")
        out[-1] += _inexact(row, "tflops", 1)
    return [*out, *_mean_lines(table)]


def _mean_lines(table: Found) -> list[str]:
    out = ["", f"{'mean of the layers':26}{'TFLOP/s':>9}{'cuDNN':>8}{'of best':>9}{'cuDNN':>8}{'paper, K40, fp32':>18}"]
    for row in table["batches"]:
        speeds = _number(row, "ours_tflops", 9, 1) + _number(row, "cudnn_tflops", 8, 1)
        shares = _share(row, "ours_of_best", 9) + _share(row, "cudnn_of_best", 8)
        paper = f"{table['paper']['batch_16_of_best']:18.0%}" if row["batch"] == 16 else ""
        out.append(f"{'batch ' + str(row['batch']) + ', ' + row['precision']:26}{speeds}{shares}{paper}")
    return out


def _first_lines(table: Found) -> list[str]:
    paper = table["paper"]
    out = [f"the post: {paper['processor']} s on a processor, {paper['GPU']} s on a GPU: {paper['times']:.1f} times"]
    for here in table["kernels"]:
        times = "; ".join(f"{key}: {value:,.1f}" for key, value in here.items() if key.startswith(PROCESSOR))
        out.append(f"k = {here['kernel']:2}  {times}")
        out += [f"    {ms:12.4f} ms  {name}" for name, ms in sorted(here["ms"].items(), key=lambda item: item[1])]
    return out


def _gain_line(name: str, gain: Found) -> str:
    line = f"{name:28}{gain['cases']:6}"
    if gain["cases"]:
        line += f"{gain['won']:5}{gain['won_surely']:7}{gain['share_won']:8.2%}{_number(gain, 'mean_where_won', 9, 2)}"
        line += f"{gain['mean']:7.2f}{gain['most']:7.2f}{gain['least']:7.2f}"
    line = f"{line:84} |{gain['inexact']:8}{gain['inexact_fastest']:6}"
    counted = gain["if_inexact_counted"]
    if counted["cases"]:
        line += f"{counted['won']:5}{counted['share_won']:8.2%}{_number(counted, 'mean_where_won', 9, 2)}"
    return f"{line:122} |{gain['left_out_for_memory']:7}"


def _pair(row: Found) -> str:
    return _number(row, "ours_us", 9, 2) + _number(row, "cudnn_us", 8, 2) + _number(row, "speedup", 7, 2)


def _inexact(row: Found, figure: Literal["us", "tflops"], digits: int) -> str:
    """A plan of cuDNN's beyond the error allowed that is faster than all others."""
    if "inexact_us" not in row or row["inexact_us"] >= row.get("cudnn_us", float("inf")):
        return ""
    unit = "us" if figure == "us" else "TFLOP/s"
    value = row[f"inexact_{figure}"]
    return f"; inexact, {value:.{digits}f} {unit}, error {row['inexact_error']:.0e}: {row['inexact']}"


def _number(row: Found, key: str, width: int, digits: int) -> str:
    return f"{row[key]:{width}.{digits}f}" if key in row else " " * width


def _share(row: Found, key: str, width: int) -> str:
    return f"{row[key]:{width}.0%}" if key in row else " " * width


def _of(matches: Iterable[Match], **wanted: object) -> list[Match]:
    return [m for m in matches if all(getattr(m.case, key) == value for key, value in wanted.items())]


def _in_order(words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(words))
