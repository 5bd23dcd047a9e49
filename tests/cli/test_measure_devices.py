"""`znnpy measure`, and stored costs, on a machine with a GPU: one that opens, and one that does not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.cli import Place
from tests.support.emulated_gpus import EmulatedGpus
from tests.support.emulator import EMULATED_GPU, needs_compiler
from znnpy import measurement
from znnpy.costs.cost_file import Costs
from znnpy.costs.store import stored_path
from znnpy.errors import DeviceError
from znnpy.kernels.contract import Primitive, Variant
from znnpy.layer_shapes import LayerShape
from znnpy.machine import Gpu, this_machine
from znnpy.measure.layer_bench import DeviceLayer, Position
from znnpy.options import MeasureOptions

pytestmark = pytest.mark.slow


class Clock:
    """Every layer takes a millisecond; nothing is run."""

    def seconds(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> float:
        return 1e-3


def refused(gpu: Gpu, number: int) -> Any:
    raise DeviceError("cudaErrorMemoryAllocation: out of memory")


@pytest.fixture(autouse=True)
def _here(place: Place, emulated_gpus: EmulatedGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a separate cache, and a GPU that takes no time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(place.folder / "cache"))

    @contextmanager
    def clock(*arguments: Any) -> Iterator[Clock]:
        yield Clock()

    monkeypatch.setattr(measurement, "_clock", clock)
    emulated_gpus.use()


def costs_of_the_cpu() -> Any:
    return stored_path(this_machine(), "cpu", this_machine().cores)


def test_cpu_is_measured_with_a_warning_if_the_gpu_does_not_open(place: Place, emulated_gpus: EmulatedGpus) -> None:
    emulated_gpus.open_as(refused)
    result = place.run("measure", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["device"] == "cpu"
    assert document["notes"] == [f"{EMULATED_GPU.name} is not used: cudaErrorMemoryAllocation: out of memory"]
    assert Costs.load(costs_of_the_cpu()).device == "cpu"
    assert place.refusal("measure", "--device", "gpu") == "cudaErrorMemoryAllocation: out of memory"


@needs_compiler
def test_threads_option_is_refused_for_a_gpu(place: Place) -> None:
    result = place.run("measure", "--device", "gpu", "--threads", 2)
    assert result.exit_code == 2
    assert "--threads applies to the CPU, and layers on a GPU do not use it: omit it" in result.stderr
    with pytest.raises(ValueError, match="`threads` are for the processor"):
        measurement.measure(MeasureOptions(device="gpu", threads=2))
    document = json.loads(place.run("measure", "--json", "--threads", 2).stdout)
    assert document["device"] == "gpu"
    assert document["notes"] == ["--threads are for the processor, and the GPU was measured"]


@needs_compiler
def test_stale_cpu_costs_are_reported_beside_a_gpu_plan(place: Place) -> None:
    """The CPU's plan, which is listed with the GPU's, is estimated without them."""
    place.write_small_volume()
    assert place.run("measure", "--device", "cpu").exit_code == 0
    arguments = ("plan", place.folder / "net.yaml", "--volume", place.volume, "--json")
    fresh = json.loads(place.run(*arguments).stdout)
    assert fresh["notes"] == []
    assert fresh["plan"]["workers"][0]["plan"]["stages"][-1]["device"] == "gpu"
    assert "cpu" in {kind["device"] for kind in fresh["plan"]["alternatives"]}
    content = json.loads(costs_of_the_cpu().read_text())
    content["machine"]["blas"] = "mkl none"
    costs_of_the_cpu().write_text(json.dumps(content))
    (note,) = json.loads(place.run(*arguments).stdout)["notes"]
    assert note.startswith("stored costs of the CPU are not used: BLAS was mkl none and is ")
    assert note.endswith("; measure again with `znnpy measure --device cpu`"), "the GPU is measured otherwise"


@needs_compiler
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gpu_layers_are_compared_with_the_definition(
    place: Place, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    arguments = (
        "plan",
        place.folder / "net.yaml",
        "--volume",
        place.volume,
        "--device",
        "gpu",
        "--precision",
        precision,
    )
    place.write_small_volume()
    assert place.run(*arguments, "--paranoid").exit_code == 0
    right = DeviceLayer.at

    def at(self: DeviceLayer, position: Position) -> Any:
        return right(self, position) + (0.2 if precision == "fp16" else 1e-3)

    monkeypatch.setattr(DeviceLayer, "at", at)
    result = place.run(*arguments, "--paranoid")
    assert result.exit_code == 1
    assert " run by gpu." in result.stderr
    assert ", of random values, and by definition it is " in result.stderr
