"""benchmarks/papers*.py: layers are those of the papers, files and tables say what was found."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from znnpy.kernels import reference
from znnpy.shapes import ConvShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


def test_layers_of_cuconv(imported: Callable[[str], Any]) -> None:
    """Table 1: how many of each network, and shares of 1x1, 3x3, 5x5; 8.31 % of all configurations are 50."""
    cases = imported("papers_cases")
    says = {
        "GoogLeNet": (42, (57.2, 23.8, 19.0)),
        "SqueezeNet": (21, (71.4, 28.6, 0)),
        "AlexNet": (4, (0, 75, 25)),
        "ResNet-50": (12, (66.7, 33.3, 0)),
        "VGG19": (9, (0, 100, 0)),
    }
    for name, (count, shares) in says.items():
        layers = cases.NETWORKS[name]
        assert len(layers) == len(set(layers)) == count
        for kernel, share in zip((1, 3, 5), shares, strict=True):
            assert 100 * sum(layer.kernel == kernel for layer in layers) / count == pytest.approx(share, abs=0.06)
    layers = {case.layer for case in cases.CASES["cuconv"]}
    assert sum(layer.kernel == 1 for layer in layers) / len(layers) == pytest.approx(0.523, abs=5e-4)
    assert 50 / len(cases.CASES["cuconv"]) == pytest.approx(cases.CUCONV_SAYS["share won"], abs=5e-5)
    assert {layer.side for layer in layers} >= {7, 224}
    assert {layer.fout for layer in layers} >= {16, 2048}
    assert all(profile.layer in layers for profile in cases.PROFILES)
    assert cases.PROFILES[0].speedup == pytest.approx(1.83, abs=5e-3)


def test_layers_as_shapes(imported: Callable[[str], Any]) -> None:
    cases = imported("papers_cases")
    assert cases.same(13, 3, 384, 256).shape(8, "tf32") == ConvShape(
        8, 256, 384, (1, 15, 15), (1, 3, 3), precision="tf32"
    )
    assert cases.CUDNN_LAYERS[0].shape(128, "fp32").out == (1, 118, 118)
    sides = {(case.set, case.layer.side, case.layer.kernel) for case in cases.CASES["pascal"]}
    assert {("single", 28, 1), ("single", 1024, 5), ("multi", 7, 5), ("multi", 512, 3)} <= sides


def test_padded_images(imported: Callable[[str], Any], device: Any) -> None:
    """Zeros around each image of the batch, ReLUs within; boxes are the definition of what the device has."""
    inputs = imported("papers_inputs")
    made = inputs.Inputs(device)
    layer = replace(imported("papers_cases").same(7, 3, 2, 3), padding=2)
    shape = layer.shape(9, "fp32")
    given = made.of(layer, 9, "fp32")
    values = device.get(given.device)
    assert values.shape == (9, 1, 11, 11, 3)
    for edge in (slice(2), slice(-2, None)):
        assert not values[:, :, edge].any()
        assert not values[:, :, :, edge].any()
    inner = values[:, :, 2:-2, 2:-2]
    assert 0.4 < (inner > 0).mean() < 0.6
    assert not np.array_equal(values[0], values[1])
    out = reference.convolve(values[[0, 8]], given.weights.weight, given.weights.bias)
    boxes = [(0, 0), (1, 2), (4, 4)]
    exact = np.stack([out[:, :, y : y + 5, x : x + 5] for y, x in boxes], axis=1)
    assert shape.out == (1, 9, 9)
    assert np.allclose(given.expected(), exact, rtol=1e-12, atol=1e-12)
    one, half = made.of(layer, 1, "fp32"), made.of(layer, 9, "fp16")
    assert np.array_equal(device.get(one.device), values[:1])
    assert np.array_equal(device.get(half.device), values.astype(np.float16))
    assert np.array_equal(one.expected(), given.expected()[:1])
    assert half.right is given.right
    assert sorted(given.right) == [0, 1]


def test_images_that_are_forgotten(
    imported: Callable[[str], Any], device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes again is not made again, until there is no room."""
    inputs, cases = imported("papers_inputs"), imported("papers_cases")
    monkeypatch.setattr(inputs, "KEPT_BYTES", 2 * 4 * 8 * 8 * 3)  # two images of 8 x 8, three maps
    asked: list[int] = []
    made = inputs.padded_images

    def padded(shape: ConvShape, padding: int, count: int) -> Any:
        asked.append(shape.fout)
        return made(shape, padding, count)

    monkeypatch.setattr(inputs, "padded_images", padded)
    ready = inputs.Inputs(device)
    for fout in (1, 2, 1, 3, 1, 2):
        ready.of(cases.same(6, 3, fout, 3), 1, "fp32")
    assert asked == [1, 2, 3, 2]


def found_match(imported: Callable[[str], Any], rows: Sequence[tuple[str, Sequence[float]]], **words: Any) -> Any:
    """A match of competitors: (who, seconds)."""
    tables = imported("papers_tables")
    case = {"set": "k = 3", "layer": "13-3-4-4", "side": 13, "kernel": 3, "batch": 1, "precision": "fp32", "why": ""}
    case |= {"flops": 4e9, "plans": 1, "most_plans": None, "most_bytes": None, "pytorch": False} | words
    return tables.match(tables.Case(**case), [tables.Row(who, who, "", tuple(s), 0.0, 0) for who, s in rows])


def test_files_name_few_plans(imported: Callable[[str], Any], tmp_path: Path) -> None:
    """By hand: of five plans two are named, and one of two inexact ones; rounds of whoever is fastest are kept.

    What is made from a file is what was made from everything, and a file of it is the same file.
    """
    files, tables = imported("papers_files"), imported("papers_tables")
    rows = [("ours", [1e-6, 2e-6]), *(("cuDNN", [1e-6 * n, 2e-6, 9e-6, 4e-6]) for n in (8, 3, 7, 2, 9))]
    rows += [("cuDNN, inexact", [1e-6]), ("cuDNN, inexact", [2e-6])]
    whole = found_match(imported, rows, others=1, too_large=("a plan",), set="single")
    short = files.kept(whole)
    assert [row.us for row in short.rows] == pytest.approx([1.5, 3.5, 3, 1])
    assert short.case.others == 1 + 3 + 1
    header = {"gpu": {"name": "a card"}, "date": "2026-11-21T"}
    result = files.Result("pascal", header, {"fp32": 1e12}, [whole], ["one"], ["two"], ["three"])
    out = tmp_path / "papers.json"
    files.write(out, result)
    again, text = files.read(out), out.read_text()
    assert [[round(1e6 * spent, 3) for spent in row.seconds] for row in again.matches[0].rows] == [
        [1], [1, 2], [2, 2, 9, 4], [2, 3.5, 9],
    ]  # fmt: skip
    assert again.matches[0].case == short.case
    assert again.words() == result.words()
    assert (again.left_out, again.wrong, again.void, again.peaks) == (["one"], ["two"], ["three"], {"fp32": 1e12})
    files.main([str(out)])
    assert out.read_text() == text
    assert out.with_suffix(".png").exists()
    every = tables.match(whole.case, whole.rows)
    files.write(out, replace(result, paper="first_principles", matches=[every]))
    assert len(files.read(out).matches[0].rows) == len(rows)


def test_gains(imported: Callable[[str], Any]) -> None:
    """By hand: 2 times in every round, 1.25 times but not always, 0.5 times; one without cuDNN, one without ours.

    An inexact plan is faster than the first's and makes 2 times 0.5; slower than the second's it changes nothing.
    """
    tables = imported("papers_tables")
    matches = [
        found_match(imported, [("ours", ours), ("cuDNN", peer), ("cuDNN", [9.0]), *more], too_large=large)
        for ours, peer, more, large in (
            ([1, 1, 1], [2, 2, 3], [("cuDNN, inexact", [0.5])], ("a plan",)),
            ([4, 4, 4], [5, 5, 3], [("cuDNN, inexact", [8.0])], ()),
            ([2, 2, 2], [1, 1, 1], [], ()),
        )
    ]
    alone = [found_match(imported, [("ours", [1.0])]), found_match(imported, [("cuDNN", [1.0])])]
    found = tables.gains([*matches, *alone])
    assert found == {
        "cases": 3, "won": 2, "won_surely": 1, "share_won": pytest.approx(2 / 3), "mean": 1.25, "least": 0.5,
        "most": 2.0, "mean_where_won": 1.625, "without_ours": 1, "left_out_for_memory": 1, "inexact": 2,
        "inexact_fastest": 1,
        "if_inexact_counted": {
            "cases": 3, "won": 1, "won_surely": 0, "share_won": pytest.approx(1 / 3), "mean": 0.75, "least": 0.5,
            "most": 1.25, "mean_where_won": 1.25,
        },
    }  # fmt: skip
    assert matches[1].band == (0.75, 1.25)
    assert matches[0].summary()["inexact_us"] == 5e5
    assert tables.gains([])["cases"] == tables.gains([])["if_inexact_counted"]["cases"] == 0


def test_what_is_possible(imported: Callable[[str], Any]) -> None:
    """By hand: 4e9 operations take 1 ms at 4e12 a second. cuDNN's 3 ms may be 3 times as fast, but 1.5
    times where a copy takes 2 ms.

    Without the copy, or the card's rate, nothing is said.
    """
    tables, words = imported("papers_tables"), imported("papers_lines").possible_words
    some = [
        found_match(imported, [("ours", [1e-3]), ("cuDNN", [seconds])], set="single", copy_us=copy)
        for seconds, copy in ((3e-3, 10.0), (3e-3, 2e3), (1e-3, None))
    ]
    (line,) = words(tables.pascal(some, {"fp32": 4e12}))
    assert "2.25 times cuDNN's speed is possible in the mean; less than the paper's 2.6 in 1 of 2 cases" in line
    assert tables.pascal(some, {"fp32": 4e12})["single"]["possible"]["most"] == pytest.approx(3)
    assert words(tables.pascal(some, {"fp32": None})) == words(tables.pascal(some[2:], {"fp32": 4e12})) == []
    (told,) = [line for line in imported("papers_lines").lines("pascal", tables.pascal(some, {"fp32": 4e12}))
               if line.startswith("single, all")]  # fmt: skip
    assert told.endswith("|     2.25     1")


def test_others_are_beside(imported: Callable[[str], Any]) -> None:
    """By hand: what is no method of the paper's wins one of two, 4 times and 0.5 times; ours, won none, stays so."""
    tables = imported("papers_tables")
    some = [
        found_match(imported, [("ours", [2.0]), ("cuDNN", [1.0]), ("ours, beside", [seconds])], set="single")
        for seconds in (0.25, 2.0)
    ]
    found = tables.gains(some)
    assert (found["won"], found["beside"]["won"], found["beside"]["mean"]) == (0, 1, 2.25)
    assert some[0].summary()["beside_us"] == 2.5e5
    told = imported("papers_lines").lines("pascal", tables.pascal(some, {}))
    (line,) = [line for line in told if line.startswith("single, all")]
    assert line.endswith("|      1     50%   2.25")
    assert "beside" not in tables.gains([replace(one, beside=None) for one in some])


def test_who_took_part(imported: Callable[[str], Any]) -> None:
    """No table says that it is against every plan of cuDNN where it is not."""
    tables = imported("papers_tables")
    alone = found_match(imported, [("ours", [1.0])], most_bytes=2**30)
    first = found_match(imported, [("ours", [1.0])], most_plans=8)
    beside = found_match(imported, [("ours", [1.0])], pytorch=True)
    plans, torch = tables.against([alone])
    assert plans.endswith("three dimensions, channels last: all it recommends, in 1 GiB")
    assert "not asked" in torch
    assert "the first 8 it recommends, in what is free" in tables.against([first])[0]
    assert "all of cuDNN's algorithms, in 1 of 2 cases alone" in tables.against([alone, beside])[1]
    few, some = (found_match(imported, [("ours", [1.0])], pytorch=True, algorithms=count) for count in (1, 7))
    assert "both layouts, the first 1 to 7 that cuDNN's heuristics like," in tables.against([few, some])[1]
    assert "the first 7 that cuDNN's heuristics like (all in 1 cases)," in tables.against([some, beside])[1]
    assert "alone" not in tables.against([beside])[1]


def test_cuconv_beside_the_paper(imported: Callable[[str], Any]) -> None:
    """Means in batches of one, and the profiles of Tables 3 to 5, are beside ours."""
    tables, lines = imported("papers_tables"), imported("papers_lines").lines
    words = {"set": "k = 1", "layer": "7-1-256-832", "side": 7, "kernel": 1}
    table = tables.cuconv([found_match(imported, [("ours", [1e-5]), ("cuDNN", [2e-5])], **words)], {})
    (part,) = table["fp32"]["by_kernel_and_batch"]
    assert (part["paper_mean"], part["paper_most"], part["mean"]) == (1.23, 2.29, 2.0)
    first = table["fp32"]["profiles"][0]
    assert (first["paper_us"], first["paper_cudnn_us"], first["speedup"]) == (58.56, 107.29, 2.0)
    told = "\n".join(lines("cuconv", table))
    assert "k = 1, batch 1, paper" in told
    assert "8.31%" in told


def test_shares_of_peak(imported: Callable[[str], Any]) -> None:
    """By hand: 4e9 operations in 1 ms are 4 TFLOP/s, an eighth of a peak of 32, and half of the best batch's."""
    tables = imported("papers_tables")
    matches = [
        found_match(imported, [(who, [spent]) for who, spent in spents.items()], set="layer 2", batch=batch)
        for batch, spents in ((128, {"ours": 5e-4, "cuDNN": 5e-4}), (16, {"ours": 1e-3, "cuDNN": 5e-4}))
    ]
    table = tables.cudnn(matches, {"fp32": 32e12})
    _, small = table["layers"]
    assert small["ours_of_peak"] == pytest.approx(0.125)
    assert small["cudnn_of_peak"] == pytest.approx(0.25)
    assert small["of_best_batch"] == pytest.approx(0.5)
    assert small["paper_of_peak"] == {"Tesla K40": 0.35, "GTX 980": 0.51}
    least, _ = table["batches"]
    assert (least["batch"], least["ours_of_best"], least["cudnn_of_best"]) == (16, pytest.approx(0.5), 1.0)
    assert "86%" in "\n".join(imported("papers_lines").lines("cudnn", table))


def test_inexact_plans_are_told(imported: Callable[[str], Any]) -> None:
    """Where one would be cuDNN's fastest, a line says so."""
    tables, lines = imported("papers_tables"), imported("papers_lines").lines
    for seconds, told in ((1e-4, True), (3e-4, False)):
        rows = [("ours", [1e-4]), ("cuDNN", [2e-4]), ("cuDNN, inexact", [seconds])]
        one = found_match(imported, rows, set="layer 2", layer="7-1-256-832", kernel=1, side=7)
        for paper, word in (("cudnn", "inexact, 40.0 TFLOP/s"), ("cuconv", "inexact, 100.00 us")):
            told_lines = lines(paper, tables.TABLES[paper]([one], {}))
            assert any(word in line for line in told_lines) == told
        told_lines = lines("first_principles", tables.first_principles([one], {}))
        assert sum(line.endswith("cuDNN, inexact (inexact)") for line in told_lines) == 1


def test_peak(imported: Callable[[str], Any]) -> None:
    """Data sheets: 67 TFLOP/s of an H200 in float32; 989 in float16 are at 1830 MHz."""
    from tests.support.emulator import EMULATED_GPU

    peak = imported("papers_tables").peak_flops
    assert peak(EMULATED_GPU, {"clocks.max.sm": "1980 MHz"}, "fp32") == pytest.approx(67e12, rel=2e-3)
    assert peak(EMULATED_GPU, {"clocks.max.sm": "1830 MHz"}, "fp16") == pytest.approx(989e12, rel=2e-3)
    assert peak(EMULATED_GPU, {"clocks.max.sm": "[N/A]"}, "fp32") is None
    assert peak(EMULATED_GPU, None, "fp32") is None
    assert peak(replace(EMULATED_GPU, capability=(12, 0)), {"clocks.max.sm": "1980 MHz"}, "fp16") is None


def test_screened_behind_a_run(imported: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: the best of cuDNN's takes 2, so 2.9 and an inexact 2.9 take part, 3.1 does not; ours always does."""
    papers, entries = imported("papers"), imported("layer_entries_gpu")

    class Known:
        def seconds(self, run: Callable[[], Any], repeats: int = 1) -> float:
            return float(run())

    def entry(took: float) -> Any:
        return entries.Entry("", "fp32", "", None, None, lambda: took, None, Known())

    bench = papers.Bench.__new__(papers.Bench)
    bench.spent = imported("papers_clock").Spent()
    bench._options = papers.parsed(["--paper", "cuconv", "--rounds", "4"])
    monkeypatch.setattr(papers, "SLOW_SECONDS", 100.0)
    who = [("ours", 9.0), ("cuDNN", 2.0), ("cuDNN", 2.9), ("cuDNN", 3.1), ("cuDNN, inexact", 2.9)]
    some = [(name, entry(took)) for name, took in who]
    bench._compete(some)
    assert [len(one.seconds) for _, one in some] == [4, 4, 4, 1, 4]
