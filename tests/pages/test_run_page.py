"""The page of a run shows what its record holds, loads nothing, and is drawn by a browser."""

from __future__ import annotations

import base64
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from tests.support.browser import needs_browser
from tests.support.cli import Place
from tests.support.messages import assert_holds
from tests.support.pages import Page, outside
from tests.support.small_unet import written as small_unet
from tests.support.viewed_files import written
from znnpy.cli import main
from znnpy.errors import MissingExtraError, PlanFileError, VolumeError
from znnpy.inference import infer
from znnpy.pages.page import require_report
from znnpy.pages.run_page import run_page
from znnpy.view.browser import page_screenshot
from znnpy.volume.location import Location
from znnpy.volume.written import attributes_of

pytestmark = pytest.mark.slow

SECTIONS = ["slices", "plan-and-run", "devices", "memory", "progress", "machine", "reproduce", "details"]


@pytest.fixture
def record(place: Place) -> Path:
    """Run a small network, and return the record of the run."""
    path = place.folder / "run.json"
    infer(
        place.volume, place.folder / "net.yaml", out=place.out, device="cpu", threads=1, calibrate=False,
        patch=(4, 4, 4), record=path,
    )  # fmt: skip
    return path


def changed(record: Path, **changes: Any) -> Path:
    document = json.loads(record.read_text())
    path = record.with_name("changed.json")
    path.write_text(json.dumps({**document, **changes}))
    return path


def pngs(page: Page) -> list[Image.Image]:
    head = "data:image/png;base64,"
    found: list[Image.Image] = []
    for source in page.pictures:
        if source.startswith(head):
            picture = Image.open(io.BytesIO(base64.b64decode(source.removeprefix(head))))
            picture.load()
            found.append(picture)
    return found


def test_page_of_a_record_shows_all_of_it(place: Place, record: Path) -> None:
    page = Page.of(run_page(str(record)))
    document = json.loads(record.read_text())
    assert page.ids == SECTIONS
    assert_holds(
        page.text,
        "tiny over volume.h5",
        place.out,
        document["machine"]["processor"],
        document["machine"]["host"],
        f"znnpy infer {place.volume} --network {place.folder}/net.yaml",
        "--patch 4,4,4",
        f"znnpy verify {place.out} {place.volume} --network {place.folder}/net.yaml",
        document["network_sha256"],
        document["weights_sha256"],
        "cpu.conv.",
        "the plan promised",
        *document["lines"][:3],
    )
    assert all(layer["name"] in page.text for layer in document["layers"])
    assert len(page.pictures) == 4 + 4  # slices of two planes; layers, devices, memory, progress
    assert all(picture.width > 100 for picture in pngs(page))


def verifying(text: str) -> list[str]:
    """Return the words of the printed command that verifies."""
    return next(shlex.split(line) for line in text.splitlines() if line.startswith("znnpy verify "))


def test_what_verifying_needs_is_carried_over(place: Place) -> None:
    path = place.folder / "run.json"
    mask = np.zeros((20, 23, 25), np.uint8)
    mask[:, :12] = 1
    weights = place.folder / "moved.npz"
    (place.folder / "net.npz").rename(weights)
    infer(
        place.volume, place.folder / "net.yaml", weights=weights, mask=place.write_volume(mask, "mask.h5"),
        fill_missing=float("nan"), out=place.out, record=path, device="cpu", calibrate=False, patch=(4, 4, 4),
    )  # fmt: skip
    words = verifying(Page.of(run_page(str(path))).text)
    assert words == [
        *("znnpy", "verify", str(place.out), str(place.volume), "--network", f"{place.folder}/net.yaml"),
        *("--weights", str(weights), "--mask", f"{place.folder}/mask.h5", "--fill-missing", "nan"),
    ]
    assert place.run(*words[1:]).exit_code == 0


def test_a_run_is_verified_in_the_precision_that_it_had(record: Path) -> None:
    """A plan may state it, and a CPU computes in fp32 where tf32 is asked for."""
    document = json.loads(record.read_text())
    arguments = {**document["arguments"], "precision": "tf32"}
    assert "--precision" not in verifying(Page.of(run_page(str(changed(record, arguments=arguments)))).text)
    report = {**document["report"], "precision": "fp16"}
    assert verifying(Page.of(run_page(str(changed(record, report=report)))).text)[-2:] == ["--precision", "fp16"]


def test_page_loads_nothing(record: Path, place: Place) -> None:
    for run in (record, place.out):
        html = run_page(str(run), str(place.volume))
        assert outside(html) == []
        assert "<script" not in html
        assert "default-src 'none'" in html


def test_slices_show_volume_and_prediction(place: Place, record: Path) -> None:
    volume = np.full((20, 23, 25), 90, np.uint8)
    volume[:, 12:] = 150
    place.write_volume(volume)
    first, second, *_ = pngs(Page.of(run_page(str(record))))
    shades = np.asarray(first.convert("L"))
    assert shades[:40].max() < 40
    assert shades[-40:].min() > 210
    assert second.size == first.size


def test_names_from_files_are_escaped(record: Path) -> None:
    evil = "<script>alert(1)</script><img src='https://evil.example/x'>"
    document = json.loads(record.read_text())
    report = {**document["report"], "warnings": [evil], "device": evil}
    layers = [{**layer, "name": evil} for layer in document["layers"]]
    html = run_page(str(changed(record, network=evil, report=report, layers=layers, lines=[evil], plan=[evil])))
    page = Page.of(html)
    assert "script" not in page.elements
    assert page.elements.count("img") == 8
    assert [source for source in page.loaded if not source.startswith("data:")] == []
    assert evil in page.text


def test_files_that_are_gone_are_named(place: Place, record: Path) -> None:
    place.volume.unlink()
    page = Page.of(run_page(str(record)))
    assert len(pngs(page)) == 2  # of the prediction alone
    assert f"not shown: there is no file {place.volume}" in page.text
    place.out.unlink()
    page = Page.of(run_page(str(record)))
    assert pngs(page) == []
    assert str(place.out) in page.text
    assert "plan-and-run" in page.ids


def test_another_volume_may_be_named(place: Place, record: Path) -> None:
    moved = place.folder / "moved.h5"
    place.volume.rename(moved)
    assert len(pngs(Page.of(run_page(str(record), str(moved))))) == 4


def test_run_in_python_is_reproduced_in_python(place: Place) -> None:
    path = place.folder / "run.json"
    volume = np.random.default_rng(0).integers(0, 255, (14, 15, 16), np.uint8)
    infer(volume, place.folder / "net.yaml", out=place.out, record=path, device="cpu", calibrate=False)
    page = Page.of(run_page(str(path)))
    assert f"znnpy.infer(volume=<ndarray>, network='{place.folder}/net.yaml', out='{place.out}'" in page.text
    assert "znnpy verify" not in page.text
    assert len(pngs(page)) == 2


def test_complete_output_has_nothing_measured(place: Place, record: Path) -> None:
    path = place.folder / "again.json"
    infer(place.volume, place.folder / "net.yaml", out=place.out, resume=True, record=path, device="cpu")
    page = Page.of(run_page(str(path)))
    assert page.ids == ["slices", "reproduce", "details"]
    assert "complete already: nothing to do" in page.text


def test_page_of_a_prediction_alone(place: Place, record: Path) -> None:
    record.unlink()
    page = Page.of(run_page(str(place.out), str(place.volume)))
    assert page.ids == ["slices", "reproduce", "details"]
    assert len(pngs(page)) == 4
    assert_holds(
        page.text,
        "there is no record of this run",
        f"znnpy infer {place.volume} --network tiny",
        f"znnpy verify {place.out} {place.volume}",
        "tiny over 20x23x25 voxels",
        "predicted: ",
    )
    assert len(pngs(Page.of(run_page(str(place.out))))) == 2


def test_options_of_a_prediction_are_those_of_its_job(place: Place) -> None:
    infer(
        place.volume, place.folder / "net.yaml", out=place.out, device="cpu", calibrate=False, roi="0:18,:,2:23",
        border="reflect", output_dtype="float16", dataset="raw", allow_nan=True,
    )  # fmt: skip
    assert (
        "znnpy infer VOLUME --network tiny --dataset raw --roi 0:18,0:23,2:23 --border reflect --output-dtype float16 "
        "--meaning sliding --allow-nan --out OUTPUT.h5\n"
    ) in Page.of(run_page(str(place.out))).text


def job_in(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(str(attributes_of(Location.of(str(path)))["job"]))
    return found


WINDOWS = {"window": (16, 16, 16), "overlap": (0.25, 0.5, 0.5), "windows_like": "nnunet", "mirror": "z,x"}


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        (
            {**WINDOWS, "sigma": 0.25, "output": "above", "threshold": (0.5, 0.25), "ensemble": "probabilities"},
            "--window 16,16,16 --overlap 0.25,0.5,0.5 --blend gaussian --sigma 0.25 --mirror z,x --windows-like nnunet "
            "--output above --threshold 0.5,0.25 --ensemble probabilities",
        ),
        (
            {**WINDOWS, "overlap": 0.25, "mirror": "none", "blend": "constant", "output": "labels", "fill_missing": -1},
            "--window 16,16,16 --overlap 0.25,0.25,0.25 --blend constant --mirror none --windows-like nnunet "
            "--output labels --fill-missing -1",
        ),
        ({**WINDOWS, "mask": "mask.npy"}, "--windows-like nnunet --mask MASK --out OUTPUT.zarr"),
        (
            {"meaning": "whole", "multiscale": 2, "sharded": True, "fill_missing": float("nan")},
            "--meaning whole --fill-missing nan --multiscale 2 --sharded --out OUTPUT.zarr",
        ),
        ({"out": "zarr2://out.zarr", "output_dtype": "float16"}, "--meaning whole --out zarr2://OUTPUT.zarr"),
    ],
)
def test_the_command_of_a_prediction_alone_does_the_same_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], printed: str
) -> None:
    monkeypatch.chdir(tmp_path)
    network = small_unet(tmp_path)
    with h5py.File("volume.h5", "w") as file:
        file["raw"] = np.load("volume.npy")
    np.save("mask.npy", np.tri(23 * 20, 25, dtype=np.uint8).reshape(23, 20, 25))
    infer("volume.h5", network, **{"out": "out.zarr", "device": "cpu", "calibrate": False, **options})
    text = Page.of(run_page("out.zarr", "volume.h5")).text
    assert printed in text
    assert ("that of the mask" in text) == ("mask" in options)
    files = {"small": str(network), "MASK": "mask.npy"}
    infer_again, verify = (shlex.split(line)[1:] for line in text.splitlines() if line.startswith("znnpy "))
    words = [files.get(word, word).replace("OUTPUT", "again") for word in infer_again]
    result = CliRunner().invoke(main, [*words, "--device", "cpu", "--no-calibrate"], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    assert job_in(tmp_path / "again.zarr") == job_in(tmp_path / "out.zarr")
    result = CliRunner().invoke(main, [files.get(word, word) for word in verify], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr


def test_place_in_a_series_and_precision_are_stated(place: Place, record: Path) -> None:
    job = job_in(place.out)
    job["volume"] |= {"dataset": "", "scale": 2, "time": 0}
    with h5py.File(place.out, "r+") as file:
        file["prediction"].attrs["job"] = json.dumps(job)
        file["prediction"].attrs["precision"] = "bf16"
    text = Page.of(run_page(str(place.out))).text
    assert (
        "znnpy infer VOLUME --network tiny --scale 2 --time 0 --precision bf16 --device cpu --meaning sliding" in text
    )
    assert verifying(text)[4:] == ["--network", "tiny", "--precision", "bf16"]


def test_what_is_no_run_is_refused(place: Place) -> None:
    with pytest.raises(VolumeError, match=r"volume\.h5 is neither a record nor a prediction"):
        run_page(str(place.volume))
    other = place.folder / "trace.json"
    other.write_text('{"format": "another"}')
    with pytest.raises(PlanFileError, match="reads format 1"):
        run_page(str(other))
    with pytest.raises(PlanFileError, match="no record of a run"):
        run_page(str(place.folder / "gone.json"))


def test_damaged_plan_of_a_prediction_is_refused(place: Place, record: Path) -> None:
    with h5py.File(place.out, "r+") as file:
        file["prediction"].attrs["plan"] = '{"format": 13}'
    with pytest.raises(PlanFileError, match=f"the plan in {re.escape(str(place.out))}"):
        run_page(str(place.out))


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setattr("znnpy.pages.page.find_spec", lambda name: None if name == package else object())
    with pytest.raises(MissingExtraError, match=f"pages need the package {package}.*pip install"):
        require_report()


@needs_browser
def test_a_browser_draws_the_page(place: Place, record: Path) -> None:
    """The page loads without a word on its console; its slices and figures are drawn."""
    written(place.volume, np.full((20, 23, 25), 120, np.uint8))
    page, picture = place.folder / "report.html", place.folder / "report.png"
    page.write_text(run_page(str(record)))
    assert page_screenshot(page, picture, (1000, 3600)) == ()
    with Image.open(picture) as opened:
        pixels = np.asarray(opened.convert("RGB")).astype(int)
    assert pixels.shape == (3600, 1000, 3)
    blue = (pixels[..., 2] > pixels[..., 0] + 60) & (pixels[..., 2] > 130)  # bars and curves of what was measured
    rows = np.flatnonzero(blue.sum(axis=1) > 5)
    assert rows.size > 100
    assert rows[-1] - rows[0] > 800
    black = (pixels.max(axis=2) < 10).sum()  # the slice of a volume of one grey
    assert black > 50_000
