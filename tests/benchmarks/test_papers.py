"""benchmarks/papers.py: the papers' layers are theirs, and each experiment runs, once and tiny, on the emulator."""

from __future__ import annotations

import importlib
import json
import time
from dataclasses import asdict, replace
from importlib.util import find_spec
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from znnpy.kernels import reference
from znnpy.machine import this_machine
from znnpy.shapes import ConvShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

PAPERS = ("first_principles", "pascal", "cuconv", "cudnn")


@pytest.fixture
def imported(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def default_benchmark(imported: Callable[[str], Any], device: Any) -> Callable[..., None]:
    """The script on the device at hand, with what it does where nothing is said."""

    def run(paper: str, *words: str | Path | float) -> None:
        papers = imported("papers")
        given = ["--paper", paper, "--quick", "--rounds", "2", *map(str, words)]
        papers.benchmark(device, replace(this_machine(), gpu=device.gpu), papers.parsed(given))

    return run


@pytest.fixture
def benchmark(default_benchmark: Callable[..., None]) -> Callable[..., None]:
    """The same with the method that every device has."""

    def run(paper: str, *words: str | Path | float) -> None:
        default_benchmark(paper, "--methods", "gpu.conv.direct", "--beside", *words)

    return run


@pytest.fixture
def told(imported: Callable[[str], Any]) -> Callable[[Path], dict[str, Any]]:
    """A file with its cases and their rows as dictionaries, and what is made of each."""

    def read(out: Path) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(out.read_text())
        matches = imported("papers_files").read(out).matches
        cases: list[dict[str, Any]] = []
        for one, case in zip(matches, found["cases"], strict=True):
            cases.append(dict(zip(found["case_columns"], case, strict=True)) | one.summary())
            cases[-1]["rows"] = [asdict(row) | {"us": row.us} for row in one.rows]
        return found | {"cases": cases}

    return read


@pytest.mark.parametrize("paper", PAPERS)
def test_papers(
    told: Callable[[Path], dict[str, Any]],
    benchmark: Callable[..., None],
    imported: Callable[[str], Any],
    tmp_path: Path,
    paper: str,
) -> None:
    out = tmp_path / "papers.json"
    benchmark(paper, "--no-torch", "--precisions", "fp32", "--out", out)
    found = told(out)
    cases = imported("papers_cases").QUICK[paper]
    assert [(case["layer"], case["batch"]) for case in found["cases"]] == [(str(c.layer), c.batch) for c in cases]
    for case, asked in zip(found["cases"], cases, strict=True):
        rows = case["rows"]
        assert {"ours", "cuDNN"} <= {row["who"] for row in rows}
        allowed = {"ours": 1e-6, "cuDNN": 1e-5, "cuDNN, inexact": 2e-2}
        assert all(row["error"] < allowed.get(row["who"], 1e-5) for row in rows)
        fastest = {who: min(row["us"] for row in rows if row["who"] == who) for who in ("ours", "cuDNN")}
        assert case["speedup"] == pytest.approx(fastest["cuDNN"] / fastest["ours"], rel=1e-3)
        flops = 2 * prod(asked.layer.shape(asked.batch, "fp32").out_shape) * asked.layer.fin * asked.layer.kernel**2
        assert case["flops"] == flops
        assert case["ours_tflops"] == pytest.approx(flops / fastest["ours"] / 1e6, rel=1e-3)
        assert case["plans"] >= 1
        assert (case["most_plans"], case["pytorch"], case["too_large"]) == (None, False, [])
    assert found["void"] == found["left_out"] == []  # a real cuDNN may refuse or miscompute in some plans
    assert found["against"][1].startswith("PyTorch's conv2d was not asked")
    assert {"inputs", "cuDNN's plans", "checks", "screening", "rounds"} <= found["header"]["spent_seconds"].keys()
    with Image.open(out.with_suffix(".png")) as image:
        assert np.asarray(image.convert("L")).min() < 60


@pytest.mark.parametrize("paper", PAPERS)
def test_papers_as_they_are(
    told: Callable[[Path], dict[str, Any]],
    default_benchmark: Callable[..., None],
    imported: Callable[[str], Any],
    tmp_path: Path,
    paper: str,
) -> None:
    """Without words on methods and precisions, the paper's own take part in every case that they apply to."""
    out = tmp_path / "papers.json"
    default_benchmark(paper, "--no-torch", "--out", out)
    found, cases = told(out), imported("papers_cases")
    assert found["header"]["methods"] == list(cases.METHODS[paper])
    assert found["header"]["missing"] == found["void"] == []
    assert [case["precision"] for case in found["cases"]] == [
        precision for precision in cases.PAPER_PRECISIONS[paper] for _ in cases.QUICK[paper]
    ]
    assert found["header"]["beside"] == list(cases.BESIDE[paper])
    for case in found["cases"]:
        beside = [row for row in case["rows"] if row["who"] == "ours, beside"]
        assert [row["name"] for row in beside] == list(cases.BESIDE[paper])
        assert all(row["error"] < 1e-6 or case["precision"] != "fp32" for row in beside)
        assert (case["copy_us"] is not None) == (paper == "pascal")
        ours = {row["name"] for row in case["rows"] if row["who"] == "ours"}
        assert ours
        assert ours <= set(cases.METHODS[paper])
        assert case["most_bytes"] == (2**30 if paper == "cuconv" else None)
    assert {row["name"] for case in found["cases"] for row in case["rows"] if row["who"] == "ours"} == set(
        cases.METHODS[paper]
    )


def test_the_post_has_a_processor_and_copies(
    told: Callable[[Path], dict[str, Any]], benchmark: Callable[..., None], tmp_path: Path
) -> None:
    out = tmp_path / "post.json"
    benchmark("first_principles", "--no-torch", "--out", out)
    (case,) = told(out)["cases"]
    rows = case["rows"]
    assert {row["who"] for row in rows} == {"ours", "ours, with copies", "cuDNN", "processor"}
    assert {"cpu.conv.direct", "cpu.conv.direct_naive"} <= {row["name"] for row in rows}
    assert any(row["variant"].endswith("threads=1") for row in rows)
    (case,) = told(out)["table"]["kernels"]
    fastest = case["fastest"]
    assert case["processor over ours"] == pytest.approx(fastest["processor"]["ms"] / fastest["ours"]["ms"], rel=1e-4)


def test_the_processor_has_little_time(
    told: Callable[[Path], dict[str, Any]],
    imported: Callable[[str], Any],
    benchmark: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What there is no time for is told: by the cost model, or stopped; what is far behind ran once."""
    papers = imported("papers_processor")
    out = tmp_path / "post.json"
    benchmark("first_principles", "--no-torch", "--processor-seconds", 0, "--out", out)
    found = told(out)
    assert "processor" not in {row["who"] for row in found["cases"][0]["rows"]}
    assert any("cpu.conv.direct_naive threads=1 on" in what for what in found["left_out"])
    assert all(what.endswith("s predicted, 0.0 s left") for what in found["left_out"])
    entry, slow = papers.layers.entry, []

    def sleepy(primitive: Any, *given: Any) -> Any:
        made, crew = entry(primitive, *given), given[-1]
        run = made.run

        def later() -> Any:
            slow.append(primitive.name)
            crew.each(lambda lo, hi, worker: time.sleep(0.4 * (hi - lo)), 4)
            crew.check()
            return run()

        return replace(made, run=later) if primitive.name == "cpu.conv.direct" else made

    monkeypatch.setattr(papers.layers, "entry", sleepy)
    monkeypatch.setattr(papers, "FAR", 0.0)
    benchmark("first_principles", "--no-torch", "--processor-seconds", 1.5, "--out", out)
    found = told(out)
    names = [row["name"] for row in found["cases"][0]["rows"] if row["who"] == "processor"]
    assert "cpu.conv.direct" not in names
    assert "cpu.conv.direct_naive" in names
    assert all(len(row["seconds"]) == 1 for row in found["cases"][0]["rows"] if row["who"] == "processor")
    assert len(slow) == len([what for what in found["left_out"] if what.endswith("stopped after 0.5 s")]) > 0


def test_papers_beside_pytorch(
    told: Callable[[Path], dict[str, Any]],
    imported: Callable[[str], Any],
    benchmark: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if find_spec("torch") is None:
        pytest.skip("the comparison needs PyTorch; pip install 'znnpy[bench]'")
    out = tmp_path / "papers.json"
    monkeypatch.setattr(imported("papers_files"), "KEPT", {})
    benchmark("cuconv", "--precisions", "fp32", "fp16", "--kernels", 3, "--out", out)
    found = told(out)
    peers = [
        (case["precision"], row["name"])
        for case in found["cases"]
        for row in case["rows"]
        if row["name"].startswith("PyTorch")
    ]
    names = ("PyTorch conv2d, contiguous", "PyTorch conv2d, channels_last")
    assert sorted(peers) == sorted((precision, name) for precision in ("fp32", "fp16") for name in names)
    assert "PyTorch's conv2d beside: for two dimensions, both layouts, the first 10 that" in found["against"][1]
    assert {case["algorithms"] for case in found["cases"]} == {10}
    benchmark("cuconv", "--precisions", "fp32", "--no-torch", "--resume", "--out", out)
    assert "heuristics like, in 2 of 3 cases alone" in told(out)["against"][1]


def test_a_search_has_little_time(imported: Callable[[str], Any]) -> None:
    """By hand: 0.1 s for two layouts are 0.05 s each: 5 algorithms of 0.01 s and no more than 4 of a little longer."""
    search = imported("papers_torch").Search(0.1, 8)
    assert search.fewest() is None
    for _ in range(3):
        assert search.tried() == 8
        search.took(0.08001, 8)
    assert search.tried() == 4
    search.took(1.0, 1)
    assert search.tried() == 4  # one slow one changes nothing
    assert (search.fewest(), search.fewest()) == (4, None)
    for _ in range(9):
        search.took(1.0, 1)
    assert search.tried() == 1
    for _ in range(9):
        search.took(0.0, 1)
    assert search.tried() == 8


def test_an_experiment_goes_on(
    told: Callable[[Path], dict[str, Any]],
    benchmark: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What a file has is not measured again; what there was no time for is told, and methods that are not there."""
    out = tmp_path / "papers.json"
    words = ("--no-torch", "--precisions", "fp32", "--out", out, "--resume")
    benchmark("pascal", *words, "--kernels", 3)
    before = told(out)["cases"]
    benchmark("pascal", *words, "--minutes", 0, "--methods", "gpu.conv.direct", "gpu.conv.nobody")
    said = capsys.readouterr().out
    assert "there is no gpu.conv.nobody in the table" in said
    assert "@1x7x7 k1x1x1 none: no time left" in said
    assert any("@1x7x7 k1x1x1 none: no time left" in what for what in told(out)["left_out"])
    benchmark("pascal", *words)
    after = told(out)
    assert after["cases"][: len(before)] == before
    assert [case["layer"] for case in after["cases"]] == ["9-3-5-1", "7-1-4-4"]
    assert not any("no time left" in what for what in after["left_out"])
    assert len(after["header"]["joined"]) == 2
    with pytest.raises(SystemExit, match="has the experiment pascal, not cudnn"):
        benchmark("cudnn", *words)


def test_wrong_results_do_not_count(
    told: Callable[[Path], dict[str, Any]],
    benchmark: Callable[..., None],
    device: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An inexact plan of cuDNN's is counted apart, a wrong one left out; a method of ours makes the experiment void."""
    if device.gpu.name != "emulated":
        pytest.skip("only the emulated cuDNN can be made wrong")
    from libraries import Offer

    device.libraries.offers = [
        Offer("wrong", fault=0.1), Offer("winograd", fault=1e-3), Offer("eng0_naive"), Offer("greedy", 2**20 + 1),
        Offer("right", 64), Offer("shy", refuses=lambda problem: True),
    ]  # fmt: skip
    out = tmp_path / "papers.json"
    words = ("--no-torch", "--precisions", "fp32", "--kernels", 3, "--out", out)
    benchmark("cuconv", *words, "--workspace", 2**-10)
    found = told(out)
    (case,) = found["cases"]
    assert {(row["who"], row["name"]) for row in case["rows"]} == {
        ("ours", "gpu.conv.direct"), ("cuDNN, inexact", "cuDNN winograd"), ("cuDNN", "cuDNN right"),
    }  # fmt: skip
    assert (case["cudnn"], case["inexact"], case["plans"]) == ("cuDNN right", "cuDNN winograd", 6)
    assert case["inexact_error"] == pytest.approx(1e-3, rel=0.1)
    assert [word.split(" on ")[0] for word in found["wrong"]] == ["cuDNN wrong ", "cuDNN shy "]
    assert case["too_large"] == ["cuDNN greedy: 1,048,577 bytes"]
    assert "in 0.000976562 GiB" in found["against"][0]
    all_ = found["table"]["fp32"]
    assert (all_["inexact"], all_["left_out_for_memory"], all_["without_ours"]) == (1, 1, 0)
    assert all_["if_inexact_counted"]["cases"] == 1
    inputs = importlib.import_module("papers_inputs")
    right = inputs.definition
    monkeypatch.setattr(inputs, "definition", lambda *given: right(*given) * 1.01)
    device.libraries.offers = []
    with pytest.raises(SystemExit, match=r"void:\ngpu.conv.direct"):
        benchmark("cuconv", *words)


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
    from emulated import EMULATED_GPU

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
