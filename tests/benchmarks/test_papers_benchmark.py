"""`python -m benchmarks papers`: layers are those of the papers, run on an emulated GPU and the CPU, and counted."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import znnpy
from benchmarks.harness.layer_runner import Host, OnGpu, place_of
from benchmarks.harness.results import Result, Row, read
from benchmarks.harness.timing import Budget, WallClock
from benchmarks.papers import keep, product_rate
from benchmarks.papers.cases import LAYERS, cases_of, experiments
from benchmarks.papers.clock import MOST_HOLDS, HeldClock, holds
from benchmarks.papers.run import (
    COPIED,
    COPY,
    CPU,
    INEXACT,
    OTHER,
    OURS,
    PEER,
    Contender,
    LayerBench,
    Plain,
    judged,
    layer_rows,
)
from benchmarks.papers.tables import (
    TABLES,
    batch_shares,
    gain_line,
    gains,
    headline,
    matches,
    peak_flops,
    theory,
)


def result_of(paper: str, rows: list[Row], **header: Any) -> Result:
    """Make a result of a GPU that does not exist."""
    about = {"gpu": {"name": "g"}, "cores": 2, "date": "2026-01-01", "commit": "c", **header}
    return Result("papers", "m", about, [replace(row, group=paper) for row in rows])


def row(case: str, subject: str, who: str, *us: float) -> Row:
    return Row("", case, subject, "us", us, facts={"who": who, "variant": "", "error": 0.0})


def test_the_experiments_are_as_large_as_the_papers_say() -> None:
    assert [len(cases_of(paper, "cpu")) for paper in LAYERS] == [7, 174, 602, 20]
    assert [len(cases_of(paper, "gpu")) for paper in LAYERS] == [7, 174, 2 * 602, 3 * 20]
    cuconv = cases_of("cuconv", "gpu")
    assert len({str(case) for case in cuconv}) == 2 * 602
    assert len({case.layer for case in cuconv}) == 86
    profiles = [(one["layer"], one["batch"]) for one in experiments()["cuconv"]["paper"]["profiles"]]
    assert [(case.layer, case.batch) for case in cuconv[:7]] == profiles, "what the tables profile comes first"
    assert {case.set for case in cuconv} == {"k = 1", "k = 3", "k = 5"}
    assert cuconv == cases_of("cuconv", "gpu"), "the random order is always the same"


def test_shapes_and_operations_count_the_padding() -> None:
    case = next(case for case in cases_of("cuconv", "cpu") if case.layer == "7-5-128-48" and case.batch == 8)
    assert case.shape.n == (1, 11, 11)
    assert case.shape.out == (1, 7, 7)
    assert case.flops == 2 * 8 * 48 * 128 * 49 * 25
    assert case.least_bytes == 4 * (8 * 48 * 121 + 8 * 128 * 49 + 48 * 128 * 25)
    first = cases_of("cudnn", "cpu")[0]
    assert (str(first), first.set) == ("128-11-96-3, batch 128, fp32", "layer 1")
    assert first.shape.out == (1, 118, 118), "without padding"


@pytest.mark.parametrize("paper", LAYERS)
def test_layers_run_on_a_gpu(paper: str, device: Any) -> None:
    left: list[str] = []
    rows = list(layer_rows(paper, OnGpu(device), Budget(5), left, quick=True, rounds=2, variants=1, slow=1))
    assert left == []
    assert [row for row in rows if row.failure] == []
    by_case: dict[str, set[str]] = {}
    for one in rows:
        by_case.setdefault(one.case, set()).add(one.facts["who"])
    assert set(by_case) == {str(case) for case in cases_of(paper, "gpu", quick=True)}
    for who in by_case.values():
        assert {OURS, COPY} <= who
    others = {"first_principles": {COPIED, CPU}, "pascal": {OTHER}, "cuconv": {OTHER}, "cudnn": set()}
    assert others[paper] <= set.union(*by_case.values())
    assert all(row.facts["error"] < 1e-3 for row in rows if row.facts["who"] != COPY)
    text = TABLES[f"papers-{paper.replace('_', '-')}"]({"papers": [result_of(paper, rows)]})
    assert text.startswith("|")


def test_layers_run_on_the_cpu_within_time_and_are_kept(tmp_path: Path) -> None:
    left: list[str] = []
    with place_of("cpu", 1) as place:
        rows = layer_rows("cudnn", place, Budget(5), left, quick=True, rounds=2, variants=1, slow=1)
        result = result_of("cudnn", [])
        path = tmp_path / "papers-m.json"
        keep(result, rows, path)
        assert list(layer_rows("cuconv", place, Budget(0), left, quick=True, rounds=1, variants=1, slow=1)) == []
        slow = layer_rows("pascal", place, Budget(5), left, quick=True, rounds=1, variants=1, slow=1e-9)
        assert list(slow) == []
    assert left[0] == "cuconv: no time left for 2 of 2 cases"
    assert [line.endswith("would take too long") for line in left[1:]] == [True, True]
    found = read(path)
    assert found.rows
    assert {row.facts["who"] for row in found.rows if not row.facts["variant"].startswith("PyTorch")} <= {OURS, PEER}


def contender(who: str, seconds: float, error: float = 0.0) -> Contender:
    return Contender(who, who, "", lambda: None, WallClock(0.0), error, [seconds])


@pytest.fixture
def bench() -> Any:
    with place_of("cpu", 1) as place:
        assert isinstance(place, Host)
        yield LayerBench("cudnn", place, Budget(1), 3, 1, 10.0, WallClock(0.0), None, [])


def test_a_peer_beyond_the_error_allowed_is_inexact_and_ours_is_void() -> None:
    assert judged(contender(OURS, 1.0, 5e-6), "fp32").failure is None
    assert judged(contender(OURS, 1.0, 1e-3), "fp32").failure == "void: rms error 1.0e-03"
    assert judged(contender(OURS, 1.0, 1e-3), "tf32").failure is None
    assert judged(contender(PEER, 1.0, 1e-3), "fp32").who == INEXACT
    assert judged(contender(PEER, 1.0, 0.1), "fp32").failure == "void: rms error 1.0e-01"


def test_a_method_that_writes_nothing_is_void(bench: LayerBench) -> None:
    problem = Plain.of(cases_of("cudnn", "cpu", quick=True)[0].shape, bench.place)
    direct = znnpy.primitive("cpu.conv.direct")
    (right,) = bench._variants(direct, problem, OURS)
    assert right.error < 1e-6

    class Idle:
        """A primitive whose step does nothing."""

        name = "idle"
        variants, footprint, work, prepare = direct.variants, direct.footprint, direct.work, direct.prepare

        def bind(self, *given: Any) -> Any:
            return self

        def run(self, *given: Any) -> None:
            pass

    (idle,) = bench._variants(Idle(), problem, OURS)
    assert idle.failure == "void: rms error nan", "what the method before it wrote does not count"


def test_only_what_is_close_to_the_best_of_its_side_takes_part_in_rounds(bench: LayerBench) -> None:
    some = [contender(OURS, 1e-3), contender(OURS, 1.4e-3), contender(OURS, 1.6e-3), contender(PEER, 9.0)]
    bench._compete(some)
    assert [len(one.seconds) for one in some] == [3, 3, 1, 3]
    assert some[2].seconds == [1.6e-3]


def test_the_held_clock_holds_the_device_while_the_host_queues(device: Any) -> None:
    assert holds(1e-3, 1e-4) == 15
    assert holds(1.0, 1e-4) == MOST_HOLDS
    clock = HeldClock(device, nbytes=2**12)
    queued = []

    def run() -> None:
        queued.append(time.perf_counter())

    assert clock.seconds(run, 3) >= 0
    assert len(queued) % 4 == 0, "three runs behind one that does not count, once or more"
    assert clock.copied_seconds(2**20) > clock.copied_seconds(2**12) / 100 > 0


A, B, C = "7-1-32-832, batch 1, fp32", "7-5-128-48, batch 1, fp32", "7-5-128-48, batch 8, fp32"


def test_gains_count_what_is_faster_in_the_median_and_in_every_round() -> None:
    rows = [
        row(A, "ours", OURS, 10, 10, 10), row(A, "cuDNN", PEER, 20, 20, 20), row(A, "slow", PEER, 90),
        row(B, "ours", OURS, 10, 10, 10), row(B, "cuDNN", PEER, 9, 11, 12),
        row(C, "ours", OURS, 10), row(C, "cuDNN", PEER, 5), row(C, "inexact", INEXACT, 4), row(C, "o", OTHER, 2),
    ]  # fmt: skip
    result = result_of("cuconv", rows)
    found = matches(result, "cuconv")
    assert [str(match.case) for match in found] == [B, C, A], "in the order of the experiment"
    gain = gains(found)
    assert (gain["cases"], gain["won"], gain["surely"]) == (3, 2, 1)
    assert (gain["most"], gain["least"]) == (2.0, 0.5)
    assert gain["mean"] == pytest.approx((2 + 1.1 + 0.5) / 3)
    assert gain["mean_where_won"] == pytest.approx((2 + 1.1) / 2)
    assert gains(found, peers=(PEER, INEXACT))["least"] == 0.4
    assert gains(found, OTHER) == gains(found[1:2], OTHER)
    assert gain_line("all", gain) == ["all", "3", "2", "1", "66.7%", "1.55", "1.20", "0.50", "2.00"]
    assert gain_line("none", gains([])) == ["none", "0", *["-"] * 7]
    text = TABLES["papers-cuconv"]({"papers": [result]})
    assert "| paper, V100, cuDNN 7.1, fp32 | 602 | 50 | - | 8.3% | 1.46 | - | - | 2.29 |" in text
    assert "| 5 A, 7-5-128-48, batch 1, fp32 | 22.5 | 74.8 | 3.32 | 10.0 | 11.0 | 1.10 |" in text
    assert headline(result) == "cuconv: 2 of 3 faster, 1.20 times in the mean"


def test_what_is_possible_is_bound_by_copying_and_by_products() -> None:
    case = "28-1-512-1, batch 1, fp32"
    rows = [row(case, "cuDNN", PEER, 30.0), row(case, "copy", COPY, 3.0), row(case, "ours", OURS, 10.0)]
    (match,) = matches(result_of("pascal", rows), "pascal")
    flops = 2 * 512 * 28 * 28
    assert match.possible(flops / 1e-6) == pytest.approx(10.0), "products take 1 us, the copy 3"
    assert match.possible(flops / 6e-6) == pytest.approx(5.0), "products take 6 us"
    assert match.possible(None) is None
    text = TABLES["papers-pascal"]({"papers": [result_of("pascal", rows, peak_flops={"fp32": flops / 1e-6})]})
    assert "| single, k = 1, side 28 | 1 | 1 | 1 | 100.0% | 3.00 | 3.00 | 3.00 | 3.00 | 10.00 |" in text


def test_shares_of_the_best_batch_need_all_layers() -> None:
    names = {batch: [str(case) for case in cases_of("cudnn", "cpu") if case.batch == batch] for batch in (16, 128)}
    flops = {str(case): case.flops for case in cases_of("cudnn", "cpu")}
    rows = [row(case, "ours", OURS, flops[case] / 1e7) for case in names[16]]  # 10 TFLOP/s
    rows += [row(case, "ours", OURS, flops[case] / 4e7) for case in names[128]]
    rows += [row(case, "cuDNN", PEER, flops[case] / 2e7) for case in names[128][1:]]
    shares = {batch: values for _, batch, values in batch_shares(matches(result_of("cudnn", rows), "cudnn"))}
    assert shares[16] == [pytest.approx(0.25), None]
    assert shares[128] == [pytest.approx(1.0), None], "of the peer one layer is missing"


def test_peaks_are_those_of_the_card_at_its_highest_clock() -> None:
    about = {"gpu": {"capability": (9, 0), "multiprocessors": 132}, "readings": {"clocks.max.sm": "1980 MHz"}}
    assert peak_flops(about)["fp32"] == 132 * 256 * 1980e6
    assert peak_flops({**about, "readings": None}) == {}
    assert product_rate(64) > 0


def test_figure_4_prefers_one_image_with_two_poolings() -> None:
    for poolings in (1, 2):
        points = theory(poolings)
        (naive,) = [one for one in points if (one["images"], one["side"]) == (1, 1)]
        assert naive["speedup"] > 1, "fragments of one voxel each share what offsets compute again"
    within = [one for one in theory(2) if one["gib"] <= 4]
    assert max(within, key=lambda one: one["speedup"])["images"] == 1


def test_networks_stand_beside_table_5() -> None:
    rows = [
        Row("", "n537, 512^3", "cpu", "voxels/s", (2e5,)),
        Row("", "n537, 512^3", "predicted: the plan", "voxels/s", (4e5,)),
        Row("", "n537, 512^3", "predicted: 2 at a time", "voxels/s", (1e5,)),
    ]
    text = TABLES["papers-znni"]({"papers": [result_of("znni", rows)]})
    assert "| n537, 512^3, cpu | 200 k | 195 k | 1.05 k | 9.49 k |" in text
    assert "| n537, 512^3, 2 at a time | 0.250 |" in text
    assert "| 2 poolings, 64 GiB | 1 |" in text
