"""What planning.py found, in words and pictures: errors, promises, verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import bars
import curves
from pen import Place

from znnpy.machine import parse_bytes

GIB = 2**30
MARGIN = 0.03  # by which a rival has to be faster, beyond the band
LOOKS = {
    "planned": ("planned", bars.OURS),
    "plain": ("PyTorch, all subsamplings recomputed", bars.ORIGINAL),
    "dilated": ("PyTorch, dilated", bars.PEER_LESS_EXACT),
    "fragments": ("PyTorch, fragments", bars.PEER),
}
KINDS = ("uniform", "random", "neighbour")

Facts = dict[str, Any]


@dataclass(slots=True)
class Row:
    """One network within one limit; empty where nothing was done."""

    network: str
    limit: str
    side: int = 0  # of the volume
    point_seconds: float = 0.0  # that a whole run is to take; longer ones are run in part
    failure: str | None = None  # why there is no plan
    plan: Facts = field(default_factory=dict)  # as `Plan.to_json`
    planned: Facts = field(default_factory=dict)
    runs: Facts = field(default_factory=dict)  # whole runs of the pick
    layers: Facts = field(default_factory=dict)
    rivals: list[Facts] = field(default_factory=list)
    finals: list[Facts] = field(default_factory=list)  # whole runs of the pick and its fastest rivals
    findings: list[Facts] = field(default_factory=list)
    peers: list[Facts] = field(default_factory=list)


def error(predicted: float, measured: float) -> float:
    """Of seconds or of voxels per second, as a share of what was measured."""
    return predicted / measured - 1


def band_of(rounds: Sequence[float]) -> float:
    """How far the medians of every other run and of those between lie apart, as a share; 0 of one run."""
    if len(rounds) < 2:
        return 0.0
    halves = [median(rounds[half::2]) for half in (0, 1)]
    return max(halves) / min(halves) - 1


def beyond(share: float, band: float) -> float:
    """What of an error lies outside the band."""
    return max(0.0, abs(share) - band)


def beaten_by(row: Row) -> list[Facts]:
    """Rivals whose layers take less time than the pick's, by more than the margin and the band; the fastest first."""
    if not row.layers or row.layers.get("failure"):
        return []
    most = row.layers["seconds"] / (1 + MARGIN + row.layers["band"])
    faster = [rival for rival in row.rivals if rival.get("whole") and rival["seconds"] < most]
    return sorted(faster, key=lambda rival: rival["seconds"])


def beaten_whole(row: Row) -> list[str]:
    """The same of whole runs, where the pick's own have told the band: in runs or in finals, whichever is larger."""
    if not row.finals or row.finals[0]["failure"] or "band" not in row.runs:
        return []
    pick = row.finals[0]
    most = pick["seconds"] / (1 + MARGIN + max(row.runs["band"], band_of(pick["rounds"])))
    return [run["what"] for run in row.finals[1:] if not run["failure"] and run["seconds"] < most]


def whole_runs(row: Row) -> list[Facts]:
    """All of a point that came to their end."""
    return [run for run in (row.runs, *row.finals) if run and not run["failure"]]


def summary(rows: Sequence[Row]) -> Facts:
    """Over all points: errors beyond the band, promise over peak, who is beaten, and both findings."""
    layered = [beyond(row.layers["error"], row.layers["band"]) for row in rows if "error" in row.layers]
    ran = [row for row in rows if row.runs and not row.runs["failure"]]
    promises = [run["promised_over_peak"] for row in rows for run in whole_runs(row) if run["promised_over_peak"]]
    return {
        "points": len(rows),
        "without_a_plan": sum(row.failure is not None for row in rows),
        "run": len(ran),
        "error_of_layers": _spread(layered),
        "error_of_runs": _spread([beyond(row.runs["error"], row.runs["band"]) for row in ran]),
        "error_of_runs_with_the_band": _spread([abs(row.runs["error"]) for row in ran]),
        "band": _spread([row.runs["band"] for row in ran]),
        "promised_over_peak": _spread(promises) | {"least": min(promises, default=None)},
        "broken_promises": sum(promise < 1 for promise in promises),
        "rivals": sum(len(row.rivals) for row in rows),
        "rivals_timed_whole": sum(bool(rival.get("whole")) for row in rows for rival in row.rivals),
        "rivals_slower": sum(rival.get("seconds") is not None for row in rows for rival in row.rivals),
        "beaten_by": [f"{row.network} {row.limit}: {r['kind']} {r['what']}" for row in rows for r in beaten_by(row)],
        "finals": sum(bool(row.finals) for row in rows),
        "beaten_in_runs_by": [f"{row.network} {row.limit}: {what}" for row in rows for what in beaten_whole(row)],
        "one_image_is_best": _finding(rows, "images"),
        "all_fragments_are_best": _finding(rows, "fragments"),
    }


def _spread(values: Sequence[float]) -> Facts:
    return {"median": median(values), "worst": max(values)} if values else {"median": None, "worst": None}


def _finding(rows: Sequence[Row], what: str) -> Facts:
    """At how many points the paper's word holds, within the band, and where it does not."""
    confirmed, refuted = 0, []
    for row in rows:
        of_it = [f for f in row.findings if f["of"] in ("paper", what) and f["seconds"] is not None]
        paper = next((f for f in of_it if f["of"] == "paper"), None)
        others = [f for f in of_it if f is not paper and f["whole"]]
        if paper is None or not paper["whole"] or len(of_it) < 2:
            continue
        limit = paper["seconds"] / (1 + row.layers.get("band", 0.0))
        if faster := [f["scheme"] for f in others if f["seconds"] < limit]:
            refuted.append(f"{row.network} {row.limit}: {', '.join(faster)}")
        else:
            confirmed += 1
    return {"confirmed": confirmed, "refuted": refuted}


def table(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each point, then the medians."""
    yield (
        f"{'network':10}{'limit':>7}{'volume':>8}{'planned':>14}{'measured':>14}{'runs':>9}{'band':>7}{'layers':>9}"
        f"{'promise':>9}{'rivals':>9}  fastest rival over the pick"
    )
    for row in rows:
        start = f"{Path(row.network).stem:10}{row.limit:>7}{row.side:>8}"
        if row.failure or not row.planned:
            yield f"{start}  {row.failure or 'not planned'}"[:150]
            continue
        run = row.runs if row.runs and not row.runs["failure"] else {}
        timed = sorted((r for r in row.rivals if r.get("whole")), key=lambda r: r["seconds"])
        best = f"{timed[0]['seconds'] / row.layers['seconds']:.3f} {timed[0]['what']}" if timed and row.layers else ""
        told = sum(r.get("seconds") is not None for r in row.rivals)
        measured = f"{run['voxels_per_second']:,.0f}" if run else "-"
        yield (
            f"{start}{row.planned['voxels_per_second']:14,.0f}{measured:>14}{_share(run.get('error')):>9}"
            f"{_share(run.get('band')):>7}{_share(row.layers.get('error')):>9}"
            f"{_ratio(run.get('promised_over_peak')):>9}{f'{told}/{len(row.rivals)}':>9}  {best}"
        )
        if row.finals and not row.finals[0]["failure"]:
            first = row.finals[0]["seconds"]
            others = (f"{f['seconds'] / first:.3f} {f['what']}" for f in row.finals[1:] if not f["failure"])
            yield f"{'':17}whole runs over the pick's: {'; '.join(others)}"
        if shown := [p for p in row.peers if not p["failure"]]:
            peers = (f"{peer['of_the_pick']:.3f} {peer['method']}" for peer in shown)
            yield f"{'':17}PyTorch over planned: {'; '.join(peers)}"
    yield from _verdicts(summary(rows))


def _verdicts(found: Facts) -> Iterator[str]:
    yield f"{found['points']} points, {found['without_a_plan']} without a plan, {found['run']} run"
    for key in ("error_of_runs", "error_of_layers", "error_of_runs_with_the_band", "band"):
        yield f"{key.replace('_', ' ')}: median {_share(found[key]['median'])}, worst {_share(found[key]['worst'])}"
    promise = found["promised_over_peak"]
    yield f"promised over peak: median {_ratio(promise['median'])}, broken {found['broken_promises']}"
    yield (
        f"rivals: {found['rivals']}, {found['rivals_timed_whole']} timed, "
        f"{found['rivals_slower'] - found['rivals_timed_whole']} given up as slower; {found['finals']} points by runs"
    )
    for key in ("beaten_by", "beaten_in_runs_by"):
        yield f"{key.replace('_', ' ')}: {'; '.join(found[key]) or 'nobody'}"
    for key in ("one_image_is_best", "all_fragments_are_best"):
        said = found[key]
        yield f"{key.replace('_', ' ')}: {said['confirmed']} points; not at {'; '.join(said['refuted']) or 'any other'}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f} %"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def pictures(path: Path, rows: Sequence[Row], machine: str) -> None:
    """Throughput against memory beside `path`, and the pick among its rivals in another file."""
    planned = [row for row in rows if row.planned]
    if not planned:
        return
    networks = list(dict.fromkeys(row.network for row in planned))
    across = sorted({parse_bytes(row.limit) / GIB for row in planned})
    diagrams = [_diagram([row for row in planned if row.network == name], name) for name in networks]
    notes = [machine, "The line is planned; points on it are measured, layer by layer and in whole runs."]
    curves.draw(path, "Output voxels per second against memory", notes, list(LOOKS.values()), across, [diagrams])
    groups = [group for row in planned if (group := _group(row)) is not None]
    if groups:
        notes = [machine, "Seconds for the whole volume, summed over layers that were timed; shorter is better."]
        bars.draw(path.with_name(f"{path.stem}-rivals.png"), "The planner's pick and its rivals", notes, groups)


def _diagram(rows: Sequence[Row], name: str) -> curves.Diagram:
    line, points = [], []
    by_method: dict[str, list[Place]] = {}
    for row in rows:
        gib = parse_bytes(row.limit) / GIB
        line.append((gib, row.planned["voxels_per_second"]))
        if "error" in row.layers:
            points.append((gib, row.planned["voxels_per_second"] / (1 + row.layers["error"])))
        points += [(gib, run["voxels_per_second"]) for run in whole_runs(row)[:1]]
        for peer in row.peers:
            if not peer["failure"]:
                by_method.setdefault(peer["method"], []).append((gib, peer["voxels_per_second"]))
    found = [curves.Curve(LOOKS["planned"][1], sorted(line), points)]
    found += [curves.Curve(LOOKS[method][1], sorted(places), places) for method, places in by_method.items()]
    return curves.Diagram(Path(name).stem, found)


def _group(row: Row) -> bars.Group | None:
    """The pick, and the fastest rival of each kind that was timed."""
    if "seconds" not in row.layers:
        return None
    shown = [("the pick", row.layers["seconds"], bars.OURS)]
    for kind in KINDS:
        timed = [rival for rival in row.rivals if rival["kind"] == kind and rival.get("whole")]
        if timed:
            best = min(timed, key=lambda rival: rival["seconds"])
            label = best["what"] if kind == "random" else f"{kind}: {best['what']}"
            shown.append((label[:56], best["seconds"], bars.OURS_TOO))
    group = [bars.Bar(label, spent, f"{spent:,.3g} s", colour) for label, spent, colour in shown]
    return bars.Group(f"{Path(row.network).stem}, {row.limit}", group)
