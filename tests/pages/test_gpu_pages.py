"""Records and pages of runs on emulated GPUs: every layer is found on its device, and the GPU's memory is shown."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cli import Place
from tests.support.emulated_gpus import EmulatedGpus
from tests.support.emulator import needs_compiler
from tests.support.messages import assert_holds
from tests.support.pages import Page, outside
from znnpy.inference import infer
from znnpy.network_files import read_network
from znnpy.options import PlanOptions
from znnpy.pages.plan_page import plan_page
from znnpy.pages.run_page import run_page
from znnpy.planning import plan_as_asked
from znnpy.plots.plan_figures import gpu_parts, process_parts
from znnpy.run_record import RunRecord

pytestmark = [pytest.mark.slow, needs_compiler]


@pytest.fixture(autouse=True)
def _emulated(emulated_gpus: EmulatedGpus) -> None:
    emulated_gpus.use()


@pytest.mark.parametrize(
    ("mode", "devices", "tracks"),
    [
        ("gpu", ["GPU"], {"GPU compute"}),
        ("gpu-host", ["CPU", "GPU"], {"GPU compute"}),  # the CPU computes small layers itself
        ("cpu-to-gpu", ["CPU", "GPU"], {"CPU", "GPU compute"}),
        ("side-by-side", ["GPU", "CPU"], {"CPU", "GPU compute"}),
    ],
)
def test_layers_are_found_on_their_devices(place: Place, mode: Any, devices: list[str], tracks: set[str]) -> None:
    path = place.folder / "run.json"
    infer(
        place.volume, place.folder / "net.yaml", out=place.out, mode=mode, threads=2, record=path, calibrate=False,
        patch=(4, 4, 6),
    )  # fmt: skip
    record = RunRecord.load(path)
    assert list(dict.fromkeys(layer.device for layer in record.layers)) == devices
    assert tracks <= set(record.over_time.busy)
    assert all(layer.measured > 0 and layer.predicted > 0 for layer in record.layers)
    assert record.report.vram_bytes
    html = run_page(str(path))
    assert outside(html) == []
    assert_holds(Page.of(html).text, "memory of the GPU", record.machine.gpu, mode)


@pytest.mark.parametrize("mode", ["gpu", "gpu-host", "cpu-to-gpu", "side-by-side"])
def test_page_of_a_plan_counts_the_memory_of_both(place: Place, mode: Any) -> None:
    network = place.folder / "net.yaml"
    asked = PlanOptions(network, volume=place.volume, mode=mode, threads=2, calibrate=False, patch=(4, 4, 6))
    run = plan_as_asked(asked)
    assert sum(nbytes for _, nbytes in process_parts(run.memory)) == run.memory.peak
    assert sum(nbytes for _, nbytes in gpu_parts(run.memory)) == run.memory.vram
    html = plan_page(run, read_network(network, None).network, None, asked, ())
    assert outside(html) == []
    assert_holds(Page.of(html).text, "memory of each GPU")
