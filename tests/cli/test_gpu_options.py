"""--device, --vram and --precision: what is said where there is no GPU, and what a run on one promises and prints.

Nothing here needs a GPU: what is asked of CuPy is answered by `Cuda`, and layers run on the emulator.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

import znnpy
from tests.support.cli import Place
from tests.support.emulated_gpus import EmulatedGpus, show_traces_of_cuda
from tests.support.emulator import EMULATED_GPU, EmulatedDevice
from tests.support.messages import assert_holds
from znnpy.errors import DeviceError
from znnpy.kernels.gpu import device as gpu_device
from znnpy.machine import Gpu
from znnpy.run import target

pytestmark = pytest.mark.slow

MIB = 2**20
CARD = replace(EMULATED_GPU, name="a card", memory_bytes=4 * 2**30)


class CudaError(Exception):
    """An error with the attributes of those that CuPy raises."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


@dataclass
class Cuda:
    """A stand-in for the parts of CuPy's runtime that `find_gpu` calls before it describes the device."""

    driver: int = 13000
    devices: int = 0
    CUDARuntimeError = CudaError

    def driverGetVersion(self) -> int:
        return self.driver

    def runtimeGetVersion(self) -> int:
        return 13000

    def getDeviceCount(self) -> int:
        if self.devices == 0:
            raise CudaError(100)
        return self.devices


def answer(patch: pytest.MonkeyPatch, cuda: Cuda | None) -> None:
    """CuPy as `cuda` has it, or none that can be imported."""

    def cupy() -> Any:
        if cuda is None:
            raise DeviceError("a GPU is driven through CuPy, which cannot be imported: pip install 'znnpy[gpu]'")
        return SimpleNamespace(cuda=SimpleNamespace(runtime=cuda))

    patch.setattr(gpu_device, "import_cupy", cupy)


@pytest.fixture(autouse=True)
def _asks_cupy(emulated_gpus: EmulatedGpus) -> None:
    """Let GPUs be looked for, also where other tests find none."""
    emulated_gpus.restore()


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the machine have neither driver nor CuPy."""
    answer(monkeypatch, None)
    show_traces_of_cuda(monkeypatch, cupy=False)


@pytest.fixture
def card(emulated_gpus: EmulatedGpus) -> Callable[..., None]:
    """`card()` gives the machine one, emulated; `taken` bytes of it are other programs'."""

    def there(gpu: Gpu = CARD, taken: int = 0) -> None:
        class Card(EmulatedDevice):
            def free_bytes(self) -> int:
                return super().free_bytes() - taken

        emulated_gpus.use(gpu=gpu, device=Card)

    return there


NO_DRIVER = "this machine has no NVIDIA driver: install one, or run on the CPU"
OLD_DRIVER = "the NVIDIA driver supports CUDA 12.4 and CuPy needs CUDA 13: install a newer driver, or run on the CPU"
NO_DEVICE = (
    "the NVIDIA driver shows this process no CUDA device: check nvidia-smi and CUDA_VISIBLE_DEVICES, or run on the CPU"
)
NO_CUPY = "a GPU is driven through CuPy, which cannot be imported: pip install 'znnpy[gpu]'"
MISSING = [
    pytest.param(Cuda(driver=0), NO_DRIVER, id="no driver"),
    pytest.param(Cuda(driver=12040, devices=1), OLD_DRIVER, id="driver too old"),
    pytest.param(Cuda(), NO_DEVICE, id="no device"),
    pytest.param(None, NO_CUPY, id="no CuPy"),
]


@pytest.mark.parametrize("command", ["plan", "infer"])
@pytest.mark.parametrize(("cuda", "said"), MISSING)
def test_missing_gpu_is_an_error_if_asked_for(
    place: Place, monkeypatch: pytest.MonkeyPatch, cuda: Cuda | None, said: str, command: str
) -> None:
    answer(monkeypatch, cuda)
    arguments = (
        place.arguments
        if command == "infer"
        else ["plan", str(place.folder / "net.yaml"), "--volume", str(place.volume)]
    )
    assert place.refusal(*arguments, "--device", "gpu") == said
    assert not place.out.exists()


@pytest.mark.parametrize(("cuda", "said"), MISSING)
def test_auto_device_falls_back_to_the_cpu_and_says_why(
    place: Place, monkeypatch: pytest.MonkeyPatch, cuda: Cuda | None, said: str
) -> None:
    """If only one of CuPy and a driver is there, the message says what to install."""
    answer(monkeypatch, cuda)
    show_traces_of_cuda(monkeypatch, cupy=cuda is not None, drivers=(place.volume,))  # a file that exists
    result = place.infer()
    assert result.exit_code == 0
    assert f"\ndevice     CPU; {said}\n" in result.stdout
    planned = place.run("plan", place.folder / "net.yaml", "--volume", place.volume)
    assert planned.exit_code == 0
    assert said in planned.stdout.splitlines()
    assert json.loads(place.infer("--overwrite", "--json").stdout)["notes"] == [said]


@pytest.mark.usefixtures("without")
def test_machine_without_any_gpu_gets_no_warning(place: Place) -> None:
    result = place.infer()
    assert "\ndevice     CPU; no GPU for CUDA here\n" in result.stdout
    asked = place.infer("--overwrite", "--device", "cpu")
    assert "\ndevice     CPU\n" in asked.stdout


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_cpu_computes_in_fp32_and_says_so_once(place: Place, precision: str) -> None:
    said = f"the CPU computes in fp32, more exactly than the {precision} that is asked for"
    result = place.infer("--precision", precision, "--device", "cpu")
    assert result.exit_code == 0
    assert result.stdout.count(said) == 1
    assert "\nprecision  fp32, 32-bit floating point; BLAS kernels " in result.stdout
    with h5py.File(place.out) as file:
        assert file["prediction"].attrs["precision"] == "fp32"
    assert said in place.run("plan", "--shape", "60,60,60", "--precision", precision).stdout


@pytest.mark.usefixtures("without")
def test_vram_limit_without_gpu_limits_nothing(place: Place) -> None:
    result = place.infer("--vram", "2G")
    assert result.exit_code == 0
    assert "\ndevice     CPU; no GPU for CUDA here; --vram limits nothing on the CPU\n" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "tpu"), "'tpu' is not one of 'auto', 'cpu', 'gpu'"),
        (("--precision", "int4"), "'int4' is not one of 'fp32', 'tf32', 'fp16', 'bf16x2', 'bf16'"),
        (("--vram", "12Q"), "'12Q' is not a size: give a number with K, M, G or T"),
        (("--vram", "0"), "'0' is 0 bytes: give a positive size such as 2G"),
        (("--device", "cpu", "--vram", "2G"), "--vram limits the memory of a GPU, and none is used: drop it"),
        (("--only", "cpu.conv.direct", "--vram", "2G"), "--vram limits the memory of a GPU, and none is used: drop it"),
        (
            ("--only", "cpu.conv.direct", "--device", "gpu"),
            "--only cpu.conv.direct is of the CPU, and --device gpu was asked for: drop one",
        ),
        (
            ("--only", "gpu.conv.fft", "--device", "cpu"),
            "--only gpu.conv.fft is of the GPU, and --device cpu was asked for: drop one",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
@pytest.mark.parametrize("command", ["plan", "infer"])
def test_contradicting_gpu_options_are_usage_errors(
    place: Place, command: str, arguments: tuple[str, ...], said: str
) -> None:
    result = place.run(command, *(["v.h5"] if command == "infer" else []), *arguments)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize("arguments", [("--device", "gpu"), ("--vram", "2G"), ("--precision", "tf32")])
def test_given_plan_fixes_the_device(place: Place, arguments: tuple[str, str]) -> None:
    result = place.infer("--plan", "p.json", *arguments)
    assert result.exit_code == 2
    assert f"{arguments[0]} is fixed by the plan: omit it, or omit --plan" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"device": "GPU"}, "there is no device 'GPU'; choose one of auto, cpu, gpu"),
        ({"precision": "int4"}, "there is no precision 'int4'; choose one of fp32, tf32, fp16, bf16x2, bf16"),
        ({"device": "cpu", "vram": "2G"}, "`vram` limits the memory of a GPU, and none is used: drop it"),
    ],
)
def test_invalid_arguments_are_value_errors_in_the_library(place: Place, arguments: dict[str, Any], said: str) -> None:
    network = place.folder / "net.yaml"
    with pytest.raises(ValueError, match=said):
        znnpy.infer(place.volume, network, out=place.out, **arguments)
    with pytest.raises(ValueError, match=said):
        znnpy.plan(network, shape=(20, 20, 20), **arguments)
    with pytest.raises(ValueError, match=said):
        znnpy.load_network(network)(np.zeros((20, 20, 20), np.uint8), **arguments)


def plan_words(place: Place, *more: object) -> list[object]:
    return ["plan", place.folder / "net.yaml", "--volume", place.volume, *more]


def test_gpu_plan_promises_its_memory(place: Place, card: Callable[..., None]) -> None:
    card()
    place.write_small_volume()
    result = place.run(*plan_words(place, "--precision", "tf32"))
    assert result.exit_code == 0, result.stderr
    assert "GPU: prepared weights" in result.stdout
    assert "GPU: all, of the limit of 3.60 GiB" in result.stdout
    assert "on the GPU in tf32" in result.stdout
    document = json.loads(place.run(*plan_words(place, "--json", "--vram", "1G")).stdout)
    assert document["plan"]["workers"][0]["plan"]["limits"]["vram_bytes"] == 2**30
    assert 0 < document["vram_bytes"] <= 2**30
    assert document["notes"] == []


def test_auto_plan_is_compared_with_the_best_cpu_plan(place: Place, card: Callable[..., None]) -> None:
    """Its best plan, the same as with --device cpu, and that it takes longer; where one device is meant, it is not."""
    card()
    place.write_small_volume()
    document = json.loads(place.run(*plan_words(place, "--json")).stdout)
    assert {kind["device"] for kind in document["plan"]["alternatives"]} == {"cpu", "gpu"}
    kind = document["plan"]["alternatives"][-1]
    alone = json.loads(place.run(*plan_words(place, "--json", "--device", "cpu")).stdout)
    assert kind["device"] == "cpu"
    assert kind["best"]["voxels_per_second"] == alone["voxels_per_second"]
    assert kind["vram_bytes"] == 0
    told = " ".join(place.run(*plan_words(place)).stdout.split())
    assert "instead: on the CPU: " in told
    for arguments in (("--device", "gpu"), ("--vram", "1G")):
        assert {
            kind["device"]
            for kind in json.loads(place.run(*plan_words(place, "--json", *arguments)).stdout)["plan"]["alternatives"]
        } <= {"gpu"}


def test_vram_held_by_other_programs_is_not_planned_with(place: Place, card: Callable[..., None]) -> None:
    """The default is nine tenths of the free bytes; a larger limit is planned for, and refused at run time."""
    card(taken=3 * 2**30)
    place.write_small_volume()
    limit = json.loads(place.run(*plan_words(place, "--json")).stdout)["plan"]["workers"][0]["plan"]["limits"][
        "vram_bytes"
    ]
    assert limit == int(0.9 * (2**30 + target.MOST_CONTEXT_BYTES))
    planned = json.loads(place.run(*plan_words(place, "--json", "--vram", "3G")).stdout)
    assert planned["plan"]["workers"][0]["plan"]["limits"]["vram_bytes"] == 3 * 2**30
    (note,) = planned["notes"]
    assert_holds(note, "--vram allows 3.00 GiB", "4.00 GiB of the a card", "1.62 GiB are free")
    sentence = place.refusal("infer", place.volume, "--network", place.folder / "net.yaml", "--vram", "3G")
    assert_holds(sentence, "--vram allows 3.00 GiB", "4.00 GiB", "only 1.62 GiB are free", "at most --vram 1664M")


def test_too_little_vram_names_the_nearest_miss(place: Place, card: Callable[..., None]) -> None:
    card()
    place.write_small_volume()
    sentence = place.refusal(*plan_words(place, "--vram", "100M"))
    assert sentence.startswith("nothing fits in ")
    assert "VRAM" in sentence
    assert "allow at least --vram " in sentence


def test_full_gpu_is_named_with_its_free_bytes(place: Place, card: Callable[..., None]) -> None:
    """Asked for, it is an error; else the run goes on with the CPU and says why."""
    card(replace(CARD, memory_bytes=2**30), taken=960 * MIB)
    place.write_small_volume()
    sentence = place.refusal(*plan_words(place, "--device", "gpu"))
    assert_holds(sentence, "1,073,741,824 bytes of the a card", "738,197,504 were free")
    result = place.infer()
    assert result.exit_code == 0
    assert "\ndevice     CPU; a card is not used: nothing fits in " in result.stdout


def test_gpu_primitives_are_listed_with_reasons_without_gpu(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, Cuda(driver=0))
    listed = place.run("primitives").stdout
    (told,) = (line for line in listed.splitlines() if line.endswith(f" cannot run here: {NO_DRIVER}"))
    rows = json.loads(place.run("primitives", "--json").stdout)
    on_gpu = {row["name"] for row in rows if row["name"].startswith("gpu.")}
    assert {"gpu.conv.fft", "gpu.pool.fragments"} <= on_gpu
    assert on_gpu == set(told.partition(" cannot")[0].split(", "))
    assert {row["name"] for row in rows if row["why_not"] == NO_DRIVER} == on_gpu
    assert all(row["why_not"] is None for row in rows if row["name"] in ("cpu.conv.direct", "cpu.conv.first"))


def test_primitive_without_its_library_names_the_library(place: Place, emulated_gpus: EmulatedGpus) -> None:
    emulated_gpus.use(gpu=CARD)
    lacking = {row["name"]: row["why_not"] for row in json.loads(place.run("primitives", "--json").stdout)}
    assert lacking["gpu.conv.fft"] is None
    assert "pip install 'nvidia-cudnn-frontend" in lacking["gpu.conv.cudnn"]
