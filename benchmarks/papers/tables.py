"""Make the tables of the papers' experiments: those of each paper, with its printed figures next to ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log2, prod
from statistics import mean
from typing import Any

from benchmarks.harness import markdown
from benchmarks.harness.results import Ratio, Result, Results, Row, device_of, ratio_of
from benchmarks.papers.cases import Case, cases_of, experiments
from benchmarks.papers.run import COPIED, COPY, CPU, INEXACT, OTHER, OURS, PEER

FLOPS_A_CLOCK = {  # dense operations of a multiprocessor: NVIDIA's white papers on the A100 and the H100
    (8, 0): {"fp32": 128, "tf32": 1024, "fp16": 2048},
    (9, 0): {"fp32": 256, "tf32": 2048, "fp16": 4096},
}
FFT_OPERATIONS = 2.5  # operations of a real transform of n values, over n log2 n
Found = dict[str, Any]


def peak_flops(header: Mapping[str, Any]) -> dict[str, float]:
    """Return the operations per second of a GPU at the highest clock that the driver names; empty where unknown."""
    gpu, clock = header["gpu"], (header.get("readings") or {}).get("clocks.max.sm", "").removesuffix(" MHz")
    known = FLOPS_A_CLOCK.get(tuple(gpu["capability"]), {})
    if not clock.isdigit():
        return {}
    return {precision: gpu["multiprocessors"] * flops * 1e6 * float(clock) for precision, flops in known.items()}


@dataclass(frozen=True)
class Match:
    """A case with everything that was measured on it."""

    case: Case
    rows: Sequence[Row]

    def fastest(self, *who: str) -> Row | None:
        """Return the fastest of some sides."""
        some = [row for row in self.rows if row.values and row.facts["who"] in who]
        return min(some, key=lambda row: row.median, default=None)

    @property
    def speedup(self) -> Ratio | None:
        """Return the speed of the paper's method over that of the fastest exact peer."""
        return self.over(OURS, PEER)

    def over(self, who: str, *peers: str) -> Ratio | None:
        """Return the speed of one side over that of the fastest peer; None if either is missing."""
        ours, peer = self.fastest(who), self.fastest(*peers)
        return ratio_of(peer.values, ours.values) if ours and peer else None

    def possible(self, flops: float | None) -> float | None:
        """Return the peer's time over the least possible time here: copying the bytes or computing every product."""
        peer, copy = self.fastest(PEER), self.fastest(COPY)
        if peer is None or copy is None or not flops:
            return None
        return peer.median / max(copy.median, 1e6 * self.case.flops / flops)

    def tflops(self, who: str) -> float | None:
        """Return the speed in 10^12 operations of the definition per second."""
        row = self.fastest(who)
        return self.case.flops / row.median / 1e6 if row else None


def matches(result: Result, paper: str) -> list[Match]:
    """Return the cases of a paper that were measured, in the order of the experiment."""
    known = {str(case): case for quick in (True, False) for case in cases_of(paper, device_of(result), quick=quick)}
    found = dict(result.cases(paper))
    return [Match(known[name], found[name]) for name in known if name in found]


def gains(some: Iterable[Match], who: str = OURS, peers: Sequence[str] = (PEER,)) -> Found:
    """Return how often a side is faster than its peers and by how much; `surely` counts those that win every round."""
    ratios = [ratio for match in some if (ratio := match.over(who, *peers)) is not None]
    if not ratios:
        return {"cases": 0}
    speedups = [ratio.median for ratio in ratios]
    won = [speedup for speedup in speedups if speedup > 1]
    found: Found = {"cases": len(ratios), "won": len(won), "surely": sum(ratio.low > 1 for ratio in ratios)}
    found |= {"mean": mean(speedups), "least": min(speedups), "most": max(speedups)}
    return found | {"mean_where_won": mean(won) if won else None}


GAIN_HEAD = ("", "cases", "won", "in every round", "share", "mean where won", "mean", "least", "most")


def gain_line(name: str, found: Found) -> list[str]:
    """Return a line of a table of gains."""
    if not found["cases"]:
        return [name, "0", *["-"] * 7]
    counts = [str(found["cases"]), str(found["won"]), str(found["surely"]), f"{found['won'] / found['cases']:.1%}"]
    figures = (found["mean_where_won"], found["mean"], found["least"], found["most"])
    return [name, *counts, *("-" if value is None else f"{value:.2f}" for value in figures)]


def _gain_lines(some: Sequence[Match], name: str) -> Iterator[list[str]]:
    """Yield lines for the paper's method against exact peers and against all peers, and for our other methods."""
    yield gain_line(name, gains(some))
    if any(match.fastest(INEXACT) for match in some):
        yield gain_line(f"{name}, if inexact plans counted", gains(some, peers=(PEER, INEXACT)))
    if any(match.fastest(OTHER) for match in some):
        yield gain_line(f"{name}, our other methods", gains(some, OTHER))


def cuconv_table(result: Result) -> str:
    """Return the share of configurations won, by kernel and batch, and the profiled layers next to Tables 3 to 5."""
    found, paper = matches(result, "cuconv"), experiments()["cuconv"]["paper"]
    share = f"{paper['won'] / paper['configurations']:.1%}"
    figures = [f"{paper['mean_where_won']:.2f}", "-", "-", f"{paper['most']:.2f}"]
    lines = [["paper, V100, cuDNN 7.1, fp32", str(paper["configurations"]), str(paper["won"]), "-", share, *figures]]
    for precision in _in_order(match.case.precision for match in found):
        alike = [match for match in found if match.case.precision == precision]
        lines += _gain_lines(alike, f"all, {precision}")
        for kernel in sorted({match.case.kernel for match in alike}):
            for batch in sorted({match.case.batch for match in alike if match.case.kernel == kernel}):
                some = [match for match in alike if (match.case.kernel, match.case.batch) == (kernel, batch)]
                if (gain := gains(some))["cases"]:
                    lines.append(gain_line(f"k = {kernel}, batch {batch}, {precision}", gain))
                if batch == 1 and (note := paper["batch_1"].get(kernel)):
                    lines.append(
                        [f"k = {kernel}, batch 1, paper", *["-"] * 5, f"{note['mean']:.2f}", "-", f"{note['most']:.2f}"]
                    )
    profiles = [line for profile in paper["profiles"] for line in _profile_lines(profile, found)]
    head = ["table, layer, batch", "paper us", "cuDNN us", "times", "ours us", "peer us", "times"]
    return "\n\n".join([markdown.table(GAIN_HEAD, lines), markdown.table(head, profiles)]) if found else ""


def _profile_lines(profile: Mapping[str, Any], found: Sequence[Match]) -> Iterator[list[str]]:
    peer_us = min(profile["cudnn_us"].values())
    printed = [f"{profile['us']:.1f}", f"{peer_us:.1f}", f"{peer_us / profile['us']:.2f}"]
    for match in found:
        if (match.case.layer, match.case.batch) == (profile["layer"], profile["batch"]):
            ours, peer, ratio = match.fastest(OURS), match.fastest(PEER), match.speedup
            here = [f"{row.median:.1f}" if row else "-" for row in (ours, peer)] + [
                f"{ratio.median:.2f}" if ratio else "-"
            ]
            yield [f"{profile['table']}, {match.case}", *printed, *here]


def pascal_table(result: Result) -> str:
    """Return the speed-ups for one map and for several, by kernel and by side of the image, and the possible ones."""
    found, paper = matches(result, "pascal"), experiments()["pascal"]["paper"]
    flops = result.header.get("peak_flops", {}).get("fp32")
    lines: list[list[str]] = []
    for name in ("single", "multi"):
        for card, note in paper.items():
            figures = [f"{note[name][key]:.2f}" if key in note[name] else "-" for key in ("mean", "least", "most")]
            lines.append([f"{name}, paper, {card}", *["-"] * 5, *figures, "-"])
        alike = [match for match in found if match.case.set == name]
        for kernel, side in sorted({(match.case.kernel, match.case.side) for match in alike}):
            some = [match for match in alike if (match.case.kernel, match.case.side) == (kernel, side)]
            if (gain := gains(some))["cases"]:
                lines.append([*gain_line(f"{name}, k = {kernel}, side {side}", gain), _possible(some, flops)])
        lines += [[*line, _possible(alike, flops)] for line in _gain_lines(alike, f"{name}, all")]
    return markdown.table([*GAIN_HEAD, "possible, mean"], lines) if found else ""


def _possible(some: Sequence[Match], flops: float | None) -> str:
    most = [value for match in some if (value := match.possible(flops)) is not None]
    return f"{mean(most):.2f}" if most else "-"


def cudnn_table(result: Result) -> str:
    """Return the shares of the device's peak, and the mean of all layers by batch, over that of the best batch."""
    found, paper = matches(result, "cudnn"), experiments()["cudnn"]["paper"]
    peaks, lines = result.header.get("peak_flops", {}), []
    for match in found:
        ours, peer, peak = match.tflops(OURS), match.tflops(PEER), peaks.get(match.case.precision)
        shares = [f"{1e12 * value / peak:.0%}" if value and peak else "-" for value in (ours, peer)]
        number = match.case.set.removeprefix("layer ")
        printed = [f"{of_card[int(number) - 1]:.0%}" for of_card in paper["share_of_peak"].values()]
        speeds = [markdown.number(value) if value else "-" for value in (ours, peer)]
        lines.append([f"{match.case.set}: {match.case}", *speeds, *shares, *printed])
    head = ["", "TFLOP/s", "peer", "of peak", "peer", *(f"paper, {card}" for card in paper["share_of_peak"])]
    means = [[f"batch {batch}, {precision}", *(f"{value:.0%}" if value else "-" for value in shares),
              f"{paper['batch_16_of_best']:.0%}" if batch == 16 else "-"]
             for precision, batch, shares in batch_shares(found)]  # fmt: skip
    mean_head = ["mean of all layers", "of the best batch", "peer", "paper, K40"]
    return "\n\n".join([markdown.table(head, lines), markdown.table(mean_head, means)]) if found else ""


def batch_shares(found: Sequence[Match]) -> Iterator[tuple[str, int, list[float | None]]]:
    """Yield the mean speed of all layers in a batch over that in the best batch, of ours and of the peer.

    None for a batch in which a layer is missing.
    """
    sets = {match.case.set for match in found}
    for precision in _in_order(match.case.precision for match in found):
        speeds: dict[int, list[float | None]] = {}
        alike = [match for match in found if match.case.precision == precision]
        for batch in sorted({match.case.batch for match in alike}):
            some = [match for match in alike if match.case.batch == batch]
            speeds[batch] = []
            for who in (OURS, PEER):
                values = [value for match in some if (value := match.tflops(who)) is not None]
                speeds[batch].append(mean(values) if len(values) == len(sets) else None)
        best = [max((one[side] or 0.0 for one in speeds.values()), default=0.0) for side in (0, 1)]
        for batch, both in speeds.items():
            yield precision, batch, [value / most if value else None for value, most in zip(both, best, strict=True)]


def first_principles_table(result: Result) -> str:
    """Return the milliseconds of every method by kernel, and the CPU's time over the GPU's, with copies and without."""
    found, paper = matches(result, "first_principles"), experiments()["first_principles"]["paper"]
    names = _in_order(row.subject for match in found for row in match.rows if row.facts["who"] != COPY)
    lines = []
    for name in names:
        rows = [next((row for row in match.rows if row.subject == name and row.values), None) for match in found]
        lines.append([name, *(markdown.number(row.median / 1e3) if row else "-" for row in rows)])
    for who in (OURS, COPIED):
        ratios = [match.over(who, CPU) for match in found]
        if any(ratios):
            lines.append([f"CPU over {who}", *(f"{ratio.median:.1f}x" if ratio else "-" for ratio in ratios)])
    head = ["ms", *(f"k = {match.case.kernel}" for match in found)]
    note = (
        f"The post: {paper['cpu_seconds']} s on a CPU, {paper['gpu_seconds']} s on a GPU, process and copies included."
    )
    return f"{markdown.table(head, lines)}\n\n{note}" if found else ""


def znni_table(result: Result) -> str:
    """Return the speeds of the networks next to Table V, the predicted ones of section VI-A's schemes, and Fig. 4."""
    about = experiments()["znni"]
    names = ("cpu", "gpu", "gpu-host", "cpu-to-gpu")
    lines, schemes = [], []
    for case, rows in result.cases("znni"):
        network, by_mode = case.split(",")[0], {row.subject: row for row in rows if row.values}
        printed = about["paper"]["table_5"].get(network, {})
        for mode in (*names, "side-by-side"):
            if mode in by_mode:
                note = [markdown.speed(printed[one]) if one in printed else "-" for one in (mode, "cuDNN", "ZNN")]
                lines.append([f"{case}, {mode}", markdown.speed(by_mode[mode].median), *note])
        some = {name.removeprefix("predicted: "): row.median for name, row in by_mode.items() if "predicted" in name}
        if len(some) > 1:
            best = some.pop("the plan")
            schemes += [[f"{case}, {name}", f"{speed / best:.3f}"] for name, speed in some.items()]
    fig4 = []
    for poolings in about["theory"]["poolings"]:
        points = theory(poolings)
        for gib in about["theory"]["gib"]:
            best_point = max((one for one in points if one["gib"] <= gib), key=lambda one: one["speedup"])
            fig4.append(
                [f"{poolings} poolings, {gib} GiB", str(best_point["images"]), markdown.number(best_point["speedup"])]
            )
    tables = [(["network, volume, mode", "voxels/s", "ZNNi", "their cuDNN baseline", "ZNN"], lines),
              (["section VI-A", "predicted speed over the plan's"], schemes),
              (["Fig. 4, by operations", "best batch", "times the naive way"], fig4)]  # fmt: skip
    return "\n\n".join(markdown.table(head, some) for head, some in tables if some) if lines else ""


def theory(poolings: int) -> list[Found]:
    """Return Fig. 4: operations per output voxel of patches of one voxel over those of larger ones, against memory.

    Operations are those of Table I for convolutions by FFT; bytes are those of the largest layer: all transforms of its
    input or of its output, whichever are more. A plain pooling computes everything again for each of its offsets.
    """
    about = experiments()["znni"]["theory"]
    layers = [*[(5, 80), (2, 0)] * poolings, (5, 80), (5, 80), (5, 80), (5, 3)]
    naive, _ = _cost(layers, 1, 1, fragments=False)
    found = []
    for images in about["batches"]:
        for side in about["sides"]:
            operations, nbytes = _cost(layers, side, images, fragments=True)
            found.append({"images": images, "side": side, "gib": nbytes / 2**30, "speedup": naive / operations})
    return found


def _cost(layers: Sequence[tuple[int, int]], side: int, images: int, *, fragments: bool) -> tuple[float, int]:
    """Return operations per output voxel, and bytes of the largest layer.

    layers  kernel and output maps; window and 0 of a pooling.
    """
    sizes, size = [], side
    for window, maps in reversed(layers):
        size = size + window - 1 if maps else size * window + (window - 1 if fragments else 0)
        sizes.append(size)
    operations, nbytes, fin, batch = 0.0, 0, 1, images
    for (window, maps), n in zip(layers, reversed(sizes), strict=True):
        if not maps:
            batch *= window**3 if fragments else 1
            continue
        transforms = 3 * FFT_OPERATIONS * n**3 * log2(n) * batch * (fin + maps)
        kernels = fin * maps * FFT_OPERATIONS * n * log2(n) * (window**2 + window * n + n**2)
        operations += transforms + 4 * batch * fin * maps * n**3 + kernels
        nbytes, fin = max(nbytes, 4 * batch * max(fin, maps) * n**3), maps
    return operations / (batch * prod([side] * 3)), nbytes


def _in_order(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _of_all(table: Callable[[Result], str]) -> Callable[[Results], str]:
    def made(results: Results) -> str:
        some = results.get("papers", ())
        return markdown.sections(some, map(table, some), "papers")

    return made


TABLES: Mapping[str, Callable[[Results], str]] = {
    "papers-first-principles": _of_all(first_principles_table),
    "papers-pascal": _of_all(pascal_table),
    "papers-cuconv": _of_all(cuconv_table),
    "papers-cudnn": _of_all(cudnn_table),
    "papers-znni": _of_all(znni_table),
}


def headline(result: Result) -> str:
    """Return how many configurations of cuConv and Pascal are faster than the peer."""
    found = []
    for paper in ("cuconv", "pascal"):
        gain = gains(matches(result, paper))
        if gain["cases"]:
            found.append(f"{paper}: {gain['won']} of {gain['cases']} faster, {gain['mean']:.2f} times in the mean")
    return "; ".join(found) or f"{len({row.case for row in result.rows})} cases"
