"""benchmarks/papers.py: the papers' layers are theirs, and each experiment runs, once and tiny, on the emulator."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
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
def benchmark(imported: Callable[[str], Any], device: Any) -> Callable[..., None]:
    """The script on the device at hand, with the method that every device has."""

    def run(paper: str, *words: str | Path | float) -> None:
        papers = imported("papers")
        given = ["--paper", paper, "--quick", "--rounds", "2", "--methods", "gpu.conv.direct", *map(str, words)]
        papers.benchmark(device, replace(this_machine(), gpu=device.gpu), papers.parsed(given))

    return run


@pytest.mark.parametrize("paper", PAPERS)
def test_papers(benchmark: Callable[..., None], imported: Callable[[str], Any], tmp_path: Path, paper: str) -> None:
    out = tmp_path / "papers.json"
    benchmark(paper, "--no-torch", "--precisions", "fp32", "--out", out)
    found = json.loads(out.read_text())
    cases = imported("papers_cases").QUICK[paper]
    assert [(case["layer"], case["batch"]) for case in found["cases"]] == [(str(c.layer), c.batch) for c in cases]
    for case, asked in zip(found["cases"], cases, strict=True):
        rows = [row for row in found["rows"] if (row["layer"], row["batch"]) == (case["layer"], case["batch"])]
        assert {"ours", "cuDNN"} <= {row["who"] for row in rows}
        assert all(row["error"] < (1e-6 if row["who"] == "ours" else 1e-5) for row in rows)
        fastest = {who: min(row["us"] for row in rows if row["who"] == who) for who in ("ours", "cuDNN")}
        assert case["speedup"] == pytest.approx(fastest["cuDNN"] / fastest["ours"])
        flops = 2 * prod(asked.layer.shape(asked.batch, "fp32").out_shape) * asked.layer.fin * asked.layer.kernel**2
        assert case["ours_tflops"] == pytest.approx(flops / fastest["ours"] / 1e6)
    assert found["void"] == found["left_out"] == []  # a real cuDNN may refuse or miscompute in some plans
    with Image.open(out.with_suffix(".png")) as image:
        assert np.asarray(image.convert("L")).min() < 60


def test_the_post_has_a_processor_and_copies(benchmark: Callable[..., None], tmp_path: Path) -> None:
    out = tmp_path / "post.json"
    benchmark("first_principles", "--no-torch", "--out", out)
    rows = json.loads(out.read_text())["rows"]
    assert {row["who"] for row in rows} == {"ours", "ours, with copies", "cuDNN", "processor"}
    assert {"cpu.conv.direct", "cpu.conv.direct_naive"} <= {row["name"] for row in rows}
    assert any(row["variant"].endswith("threads=1") for row in rows)
    (case,) = json.loads(out.read_text())["table"]["kernels"]
    fastest = case["fastest"]
    assert case["processor over ours"] == pytest.approx(fastest["processor"]["ms"] / fastest["ours"]["ms"])


def test_papers_beside_pytorch(benchmark: Callable[..., None], tmp_path: Path) -> None:
    if find_spec("torch") is None:
        pytest.skip("the comparison needs PyTorch; pip install 'znnpy[bench]'")
    out = tmp_path / "papers.json"
    benchmark("cuconv", "--precisions", "fp32", "fp16", "--kernels", 3, "--out", out)
    found = json.loads(out.read_text())
    peers = [(row["precision"], row["name"]) for row in found["rows"] if row["name"].startswith("PyTorch")]
    names = ("PyTorch conv2d, contiguous", "PyTorch conv2d, channels_last")
    assert peers == [(precision, name) for precision in ("fp32", "fp16") for name in names]


def test_an_experiment_goes_on(
    benchmark: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a file has is not measured again; what there was no time for is told, and methods that are not there."""
    out = tmp_path / "papers.json"
    words = ("--no-torch", "--precisions", "fp32", "--out", out, "--resume")
    benchmark("pascal", *words, "--kernels", 3)
    before = json.loads(out.read_text())["rows"]
    benchmark("pascal", *words, "--minutes", 0, "--methods", "gpu.conv.direct", "gpu.conv.nobody")
    said = capsys.readouterr().out
    assert "there is no gpu.conv.nobody in the table" in said
    assert "@1x7x7 k1x1x1 none: no time left" in said
    assert any("@1x7x7 k1x1x1 none: no time left" in what for what in json.loads(out.read_text())["left_out"])
    benchmark("pascal", *words)
    after = json.loads(out.read_text())
    assert after["rows"][: len(before)] == before
    assert [case["layer"] for case in after["cases"]] == ["9-3-5-1", "7-1-4-4"]
    assert not any("no time left" in what for what in after["left_out"])
    assert len(after["header"]["joined"]) == 2
    with pytest.raises(SystemExit, match="has the experiment pascal, not cudnn"):
        benchmark("cudnn", *words)


def test_wrong_results_do_not_count(
    benchmark: Callable[..., None], device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan of cuDNN's is left out; a method of ours makes the experiment void."""
    if device.gpu.name != "emulated":
        pytest.skip("only the emulated cuDNN can be made wrong")
    from libraries import Offer

    device.libraries.offers = [
        Offer("wrong", fault=1e-3), Offer("eng0_naive"), Offer("greedy", 2**30 + 1), Offer("right", 64),
        Offer("shy", refuses=lambda problem: True),
    ]  # fmt: skip
    out = tmp_path / "papers.json"
    words = ("--no-torch", "--precisions", "fp32", "--kernels", 3, "--out", out)
    benchmark("cuconv", *words)
    found = json.loads(out.read_text())
    assert [row["name"] for row in found["rows"]] == ["gpu.conv.direct", "cuDNN right"]
    assert [word.split(" on ")[0] for word in found["wrong"]] == ["cuDNN wrong ", "cuDNN shy "]
    assert found["left_out"][0].startswith("cuDNN greedy on conv 9x4->5 @1x8x8 k1x3x3")
    right = reference.convolve
    monkeypatch.setattr(reference, "convolve", lambda *given: right(*given) * 1.01)
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
    """Zeros around each image of the batch, ReLUs within; boxes are what the device has."""
    entries = imported("papers_entries")
    shape = ConvShape(9, 3, 2, (1, 8, 9), (1, 3, 3))
    given = entries.padded_input(shape, 2, device)
    values = device.get(given.device)
    assert not values[:, :, :2].any()
    assert not values[:, :, -2:].any()
    assert not values[:, :, :, :2].any()
    assert not values[:, :, :, -2:].any()
    inner = values[:, :, 2:-2, 2:-2]
    assert 0.4 < (inner > 0).mean() < 0.6
    assert not np.array_equal(values[0], values[1])
    assert np.array_equal(given.box((0, 1, 2), (1, 7, 9)), values[[0, 8], :, 1:7, 2:9])


def row(imported: Callable[[str], Any], who: str, seconds: Sequence[float], **words: Any) -> Any:
    case = {"set": "k = 3", "layer": "13-3-4-4", "side": 13, "kernel": 3, "batch": 1, "precision": "fp32", "why": ""}
    case |= {"flops": 4e9, "name": who, "variant": "", "error": 0.0, "scratch_bytes": 0} | words
    return imported("papers_tables").Row(who=who, seconds=tuple(seconds), **case)


def test_gains(imported: Callable[[str], Any]) -> None:
    """By hand: 2 times in every round, 1.25 times but not always, 0.5 times, and one without cuDNN."""
    tables = imported("papers_tables")
    matches = [
        tables.match([row(imported, "ours", ours), row(imported, "cuDNN", peer), row(imported, "cuDNN", [9.0])])
        for ours, peer in (([1, 1, 1], [2, 2, 3]), ([4, 4, 4], [5, 5, 3]), ([2, 2, 2], [1, 1, 1]))
    ]
    found = tables.gains([*matches, tables.match([row(imported, "ours", [1.0])])])
    assert found == {
        "cases": 3, "won": 2, "won_surely": 1, "share_won": pytest.approx(2 / 3), "mean": 1.25, "least": 0.5,
        "most": 2.0, "mean_where_won": 1.625,
    }  # fmt: skip
    assert matches[1].band == (0.75, 1.25)
    assert tables.gains([]) == {"cases": 0}


def test_shares_of_peak(imported: Callable[[str], Any]) -> None:
    """By hand: 4e9 operations in 1 ms are 4 TFLOP/s, an eighth of a peak of 32, and half of the best batch's."""
    tables = imported("papers_tables")
    matches = [
        tables.match([row(imported, who, [spent], set="layer 2", batch=batch) for who, spent in spents.items()])
        for batch, spents in ((128, {"ours": 5e-4, "cuDNN": 5e-4}), (16, {"ours": 1e-3, "cuDNN": 5e-4}))
    ]
    _, small = tables.cudnn(matches, {"fp32": 32e12})["layers"]
    assert small["ours_of_peak"] == pytest.approx(0.125)
    assert small["cudnn_of_peak"] == pytest.approx(0.25)
    assert small["of_best_batch"] == pytest.approx(0.5)
    assert small["paper_of_peak"] == {"Tesla K40": 0.35, "GTX 980": 0.51}


def test_peak(imported: Callable[[str], Any]) -> None:
    """Data sheets: 67 TFLOP/s of an H200 in float32; 989 in float16 are at 1830 MHz."""
    from emulated import EMULATED_GPU

    peak = imported("papers_tables").peak_flops
    assert peak(EMULATED_GPU, {"clocks.max.sm": "1980 MHz"}, "fp32") == pytest.approx(67e12, rel=2e-3)
    assert peak(EMULATED_GPU, {"clocks.max.sm": "1830 MHz"}, "fp16") == pytest.approx(989e12, rel=2e-3)
    assert peak(EMULATED_GPU, {"clocks.max.sm": "[N/A]"}, "fp32") is None
    assert peak(EMULATED_GPU, None, "fp32") is None
    assert peak(replace(EMULATED_GPU, capability=(12, 0)), {"clocks.max.sm": "1980 MHz"}, "fp16") is None


def test_the_device_waits_for_the_host(imported: Callable[[str], Any]) -> None:
    """By hand: copies of 0.1 ms are queued before 30 runs whose launches take 0.02 ms each; half as many again."""
    entries = imported("papers_entries")
    assert entries.holds(30 * 2e-5, 1e-4) == 9
    assert entries.holds(10.0, 1e-4) == entries.MOST_HOLDS

    class Card:
        """Writes down what is queued."""

        stream = None

        def __init__(self) -> None:
            self.queued: list[str] = []

        def allocate(self, nbytes: int, what: str) -> str:
            return what

        def copy_async(self, target: str, source: str, stream: None) -> None:
            self.queued.append("copy")

        def synchronize(self) -> None:
            self.queued.append("wait")

        def elapsed(self, work: Callable[[], None], repeats: int = 1) -> list[float]:
            self.queued.append("begin")
            work()
            return [1e-3] * repeats

    card = Card()
    clock = entries.HeldClock(card)
    card.queued.clear()
    assert clock.seconds(lambda: card.queued.append("run"), 5) == pytest.approx(2e-4)
    assert card.queued[:3] == ["wait", "run", "wait"]
    assert card.queued[3] == "copy"
    begin = card.queued.index("begin")
    assert set(card.queued[3:begin]) == {"copy"}
    assert card.queued[begin:] == ["begin", *["run"] * 5]
