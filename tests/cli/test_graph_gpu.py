"""Graphs and windows on GPUs, here emulators, through the command line: planned, computed, resumed, verified."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.cli.test_graph_infer import graph
from tests.support.cli import Place
from tests.support.emulated_gpus import EmulatedGpus
from tests.support.emulator import needs_compiler

pytestmark = [pytest.mark.slow, needs_compiler]
WINDOWS = ("--window", "16,16,16", "--overlap", "0.5", "--blend", "gaussian")


@pytest.fixture(autouse=True)
def _emulated(emulated_gpus: EmulatedGpus) -> None:
    emulated_gpus.use(count=2)


def predicted(place: Place, *words: str) -> np.ndarray[Any, Any]:
    ran = place.infer(*words, "--no-calibrate", "--overwrite")
    assert ran.exit_code == 0, ran.output
    return place.prediction()


@pytest.mark.parametrize("words", [(), WINDOWS], ids=["whole", "windows"])
@pytest.mark.parametrize("gpus", ["1", "2"])
def test_gpus_give_what_the_processor_gives(place: Place, words: tuple[str, ...], gpus: str) -> None:
    graph(place)
    exact = predicted(place, *words, "--device", "cpu")
    found = predicted(place, *words, "--device", "gpu", "--gpus", gpus)
    assert abs(found - exact).max() <= 1e-5 * abs(exact).max()
    half = predicted(place, *words, "--device", "gpu", "--gpus", gpus, "--precision", "fp16")
    assert 0 < abs(half - exact).max() <= 5e-3 * abs(exact).max()
    checked = place.run(
        "verify", place.out, place.volume, "--network", place.folder / "net.yaml", "--precision", "fp16"
    )
    assert checked.exit_code == 0, checked.output


def test_a_plan_for_a_gpu_names_it_and_its_memory(place: Place) -> None:
    graph(place)
    path = place.folder / "plan.json"
    made = place.run("plan", place.folder / "net.yaml", "--volume", place.volume, "--device", "gpu", "--vram", "1100M",
                     "--no-calibrate", "--out", path)  # fmt: skip
    assert made.exit_code == 0, made.output
    (worker,) = json.loads(path.read_text())["workers"]
    choices = worker["plan"]["stages"][0]["choices"]
    assert {choice["device"] for choice in choices} == {"gpu"}
    found = predicted(place, "--plan", str(path))
    exact = predicted(place, "--device", "cpu")
    assert abs(found - exact).max() <= 1e-5 * abs(exact).max()


def test_too_little_memory_of_a_gpu_is_said_in_bytes(place: Place) -> None:
    graph(place)
    sentence = place.refusal(*place.arguments, "--device", "gpu", "--vram", "256M", "--no-calibrate")
    assert "of the GPU" in sentence
    assert "raise --vram to at least" in sentence
