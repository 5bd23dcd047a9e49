"""The page of a plan shows how the output is cut, where the time goes and what takes memory, and loads nothing."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.browser import needs_browser
from tests.support.messages import assert_holds
from tests.support.pages import Page, outside
from tests.support.small_unet import written
from znnpy.network_files import read_network
from znnpy.options import PlanOptions
from znnpy.pages.plan_page import cut_words, plan_page
from znnpy.planner.run_plan import RunPlan
from znnpy.planning import plan_as_asked
from znnpy.plots.plan_figures import gpu_parts, process_parts
from znnpy.view.browser import page_screenshot

pytestmark = pytest.mark.slow

SECTIONS = ["cut", "time", "memory", "reproduce", "details"]


def asked(**options: object) -> PlanOptions:
    how: dict[str, object] = {"shape": (200, 220, 240), "device": "cpu", "threads": 1, "calibrate": False}
    return PlanOptions(**{**how, **options})  # type: ignore[arg-type]


def page_of(options: PlanOptions, *notes: str) -> tuple[str, RunPlan]:
    run = plan_as_asked(options)
    assert isinstance(options.network, str | Path)
    return plan_page(run, read_network(options.network, options.meaning).network, None, options, notes), run


def test_page_of_columns() -> None:
    html, run = page_of(asked(cover="columns", ram="4G"), "a note")
    page = Page.of(html)
    assert page.ids == SECTIONS
    assert len(page.pictures) == 3
    assert outside(html) == []
    assert_holds(page.text, "Plan of fib25_boundary", "a note", cut_words(run), "predicted: ", "174x194x214")
    assert_holds(cut_words(run), "In one column along", "each step keeps what the next one needs")


def test_page_of_patches() -> None:
    html, run = page_of(asked(cover="patches", patch=(40, 40, 40)))
    assert Page.of(html).ids == SECTIONS
    assert cut_words(run).startswith(f"In {run.main.columns} patches, of which one is filled, of 40x40x40 voxels")


@pytest.mark.parametrize("windows", [{}, {"window": (16, 16, 16)}])
def test_page_of_a_graph(tmp_path: Path, windows: dict[str, object]) -> None:
    html, run = page_of(asked(network=str(written(tmp_path)), shape=(23, 20, 25), **windows))
    page = Page.of(html)
    assert page.ids == SECTIONS
    assert outside(html) == []
    assert ("In windows of 16x16x16 voxels" in cut_words(run)) == bool(windows)


def test_parts_of_memory_add_up_to_the_promise() -> None:
    run = plan_as_asked(asked())
    assert sum(nbytes for _, nbytes in process_parts(run.memory)) == run.memory.peak
    assert gpu_parts(run.memory) == []


def test_commands_make_the_plan_and_run_it(tmp_path: Path) -> None:
    network = written(tmp_path)
    volume = tmp_path / "volume.npy"
    html, _ = page_of(asked(network=str(network), shape=None, volume=str(volume), ram="4G", roi="0:20,0:20,0:20"))
    plan, infer = (line for line in Page.of(html).text.splitlines() if line.startswith("znnpy "))
    command, options = shlex.split(plan)[:5], shlex.split(plan)[5:]
    assert command == ["znnpy", "plan", str(network), "--volume", str(volume)]
    expected = "--ram 4G --threads 1 --device cpu --no-calibrate --roi 0:20,0:20,0:20 --out plan.json"
    assert sorted(options) == sorted(expected.split())
    assert shlex.split(infer) == [
        *("znnpy", "infer", str(volume), "--network", str(network), "--roi", "0:20,0:20,0:20"),
        *("--plan", "plan.json"),
    ]


@needs_browser
def test_a_browser_draws_the_page(tmp_path: Path) -> None:
    page, picture = tmp_path / "plan.html", tmp_path / "plan.png"
    page.write_text(page_of(asked(cover="columns", ram="4G"))[0])
    assert page_screenshot(page, picture, (1000, 2200)) == ()
    with Image.open(picture) as opened:
        pixels = np.asarray(opened.convert("RGB")).astype(int)
    orange = (pixels[..., 0] > 220) & (pixels[..., 2] < 130) & (pixels[..., 1] > 130)  # the filled column
    blue = (abs(pixels - (42, 111, 176)).max(axis=2) < 12).sum()  # bars of layers
    assert orange.sum() > 2000
    assert blue > 5000
