"""benchmarks/papers.py: the papers' layers are theirs, and each experiment runs, once and tiny, on the emulator."""

from __future__ import annotations

import importlib
import json
import re
import time
from dataclasses import asdict, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from znnpy.machine import this_machine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PAPERS = ("first_principles", "pascal", "cuconv", "cudnn")


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


@pytest.mark.torch
def test_papers_beside_pytorch(
    told: Callable[[Path], dict[str, Any]],
    imported: Callable[[str], Any],
    benchmark: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    tried = r"PyTorch's conv2d beside: for two dimensions, both layouts, the first (\d+ to )?10 that"  # as time allows
    assert re.search(tried, found["against"][1])
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
    from tests.support.emulator.libraries import Offer

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
