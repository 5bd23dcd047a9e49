"""What `papers.py` prints: each paper's table, with the paper's figures beside ours."""

from __future__ import annotations

from typing import Literal

from papers_cases import CUDNN_SAYS, Paper
from papers_tables import PROCESSOR, Found

GAIN_HEAD = (
    f"{'':28}{'cases':>6}{'won':>5}{'surely':>7}{'share':>8}{'mean won':>9}{'mean':>7}{'most':>7}{'least':>7}"
    f" |{'inexact':>8}{'first':>6}{'won':>5}{'share':>8}{'mean won':>9} |{'memory':>7}"
    f" |{'beside':>7}{'share':>8}{'mean':>7} |{'possible':>9}{'less':>6}"
)
GAIN_NOTES = (
    "surely: in every round. Behind the bar: cases in which plans of cuDNN's are beyond the error that the precision",
    "allows, in which one of them is its fastest, and what ours would have won if they counted. memory: cases in which",
    "something was left out that wants more than the experiment allows. beside: what methods of ours that are not the",
    "paper's would have won. possible: by the limits of the card, in the mean; less: cases where that is less than the",
    "paper's mean.",
)


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
    return [*out, *GAIN_NOTES, *possible_words(table)]


def possible_words(table: Found) -> list[str]:
    """What no method that computes every product could win more than: a line for one map, and one for many."""
    return [
        f"{name}: at the speed of a copy, and every product at the float32 rate, {found['mean']:.2f} times cuDNN's"
        f" speed is possible in the mean; less than the paper's {here['paper']['mean']:g} in"
        f" {found['less_than_the_paper']} of {found['cases']} cases"
        for name, here in table.items()
        if (found := here.get("possible"))
    ]


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
    line = f"{line:122} |{gain['left_out_for_memory']:7}"
    beside = gain.get("beside", {})
    if not beside and "possible" not in gain:
        return line
    line += f" |{beside.get('won', ''):7}{_share(beside, 'share_won', 8)}{_number(beside, 'mean', 7, 2)}"
    possible = gain.get("possible", {})
    return f"{line} |{_number(possible, 'mean', 9, 2)}{possible.get('less_than_the_paper', ''):6}".rstrip(" |")


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
