"""Tests may ask for shared volumes, a GPU, and small networks with weights."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from znnpy.network import Conv, Layer, Network, Normalise, Pool

if TYPE_CHECKING:
    from tests.support.cli import Place
    from tests.support.emulated_gpus import EmulatedGpus
    from znnpy.kernels.gpu.device import Device

REPOSITORY = Path(__file__).resolve().parent.parent
NO_CALIBRATION = "ZNNPY_NO_CALIBRATE"  # set to anything: runs measure nothing before they are planned
COMPILED = "ZNNPY_COMPILED_KERNELS"  # names a folder; see tests/support: emulator/compiling.py and nvrtc.py
KEPT_DAYS = 14
ON_REQUEST = frozenset({"long", "torch", "gpu"})  # markers of tests that run only if `-m` names them
SEARCH_ONCE = ("api", "cli", "cluster", "frameworks", "nnunet", "pages", "report", "view", "volume")  # folders
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"), Path("/dev/dxg"))  # the last: under Windows


def pytest_collection_finish() -> None:
    """Let collections of garbage pass over the tests: each run collects before it counts memory, and they are many."""
    gc.freeze()


@pytest.fixture(scope="session")
def repository() -> Path:
    """Return the folder that holds pyproject.toml."""
    return REPOSITORY


@pytest.fixture
def imported(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return a function that imports a module of the benchmarks."""
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def sublayers_take_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host spend no time on a sub-layer: it is longer than all that fake primitives take."""
    monkeypatch.setattr("znnpy.planner.sublayers.SUBLAYER_SECONDS", 0.0)


@pytest.fixture
def collects_nothing() -> Iterator[None]:
    """Only what nothing refers to goes."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep measurements in a folder of the tests, here and in processes that tests start, and calibrate nothing.

    Tests on a real GPU measure it first; see `_gpus_are_measured`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv(NO_CALIBRATION, "1")
        yield


@pytest.fixture(autouse=True)
def _gpus_are_measured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests on a real GPU measure the layers of their networks, as the runs of users do."""
    if request.node.get_closest_marker("gpu"):
        monkeypatch.delenv(NO_CALIBRATION)


@pytest.fixture(autouse=True)
def _plans_are_kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs in this process search for a plan once: in folders whose tests are about other things than plans."""
    folder = request.path.relative_to(REPOSITORY / "tests").parts[0]
    if folder in SEARCH_ONCE and not request.node.get_closest_marker("gpu"):
        from tests.support import kept_plans

        monkeypatch.setattr(kept_plans.ASKED, kept_plans.KEPT.make_plan)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the real volume, its labels and the original networks; not part of the repository.

    The environment variable ZNNPY_TEST_DATA names it, and then it has to be there; else `shared/data` beside the
    repository, and without it tests that ask for it are skipped.
    """
    named = os.environ.get("ZNNPY_TEST_DATA")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        if named:
            pytest.fail(f"ZNNPY_TEST_DATA names {folder}, and there is no such folder")
        pytest.skip(f"the real volumes are not here: {folder}; ZNNPY_TEST_DATA may name their folder")
    return folder


def has_driver() -> bool:
    """Return whether this machine has an NVIDIA driver; with one, tests that need a device fail instead of skipping."""
    return any(path.exists() for path in DRIVERS)


def pytest_configure(config: pytest.Config) -> None:
    """Keep what compilers made of kernels in build/: the workers of a run share it, and later runs find it.

    What no run used for KEPT_DAYS is removed.
    """
    if COMPILED in os.environ:
        return
    folder = REPOSITORY / "build" / "compiled-kernels"
    folder.mkdir(parents=True, exist_ok=True)
    for entry in folder.iterdir():
        if time.time() - entry.stat().st_mtime > KEPT_DAYS * 24 * 3600:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    os.environ[COMPILED] = str(folder)

    def forget() -> None:
        del os.environ[COMPILED]

    config.add_cleanup(forget)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked `long` or `torch`, and `gpu` if there is no driver, unless `-m` names the marker.

    A case for a real GPU that is marked `long` too runs whenever cases marked `gpu` do, since it is short there. Tests
    of the benchmarks are marked `slow`.
    """
    for item in items:
        if item.path.is_relative_to(REPOSITORY / "tests" / "benchmarks"):  # they run whole benchmarks
            item.add_marker(pytest.mark.slow)
    unnamed = {marker for marker in ON_REQUEST if marker not in config.option.markexpr}
    left_out = {item for item in items if unnamed & _asked_for(item)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _asked_for(item: pytest.Item) -> set[str]:
    """Return the markers of a test that `-m` has to name."""
    markers = {mark.name for mark in item.iter_markers()} & ON_REQUEST
    if "gpu" in markers:
        markers -= {"long", "gpu"} if has_driver() else {"long"}
    return markers


@pytest.fixture
def emulated_gpus() -> Iterator[EmulatedGpus]:
    """Return the GPUs that znnpy sees: the machine's, until `emulated_gpus.use(...)` or `.remove(...)`."""
    from tests.support.emulated_gpus import EmulatedGpus

    gpus = EmulatedGpus()
    yield gpus
    gpus.restore()


@pytest.fixture(autouse=True)
def _the_gpu_is_for_tests_that_want_it(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the GPU from tests not marked `gpu`, here and in processes that they start."""
    if not has_driver() or request.node.get_closest_marker("gpu"):
        return
    gpus: EmulatedGpus = request.getfixturevalue("emulated_gpus")
    gpus.remove("tests that are not marked for it have no GPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture(scope="session")
def cuda_device() -> Iterator[Device]:
    """Open the device of this machine."""
    from znnpy.kernels.gpu.device import Device, find_gpu

    if not has_driver():
        pytest.skip("this machine has no NVIDIA driver")
    with Device(find_gpu()) as device:
        yield device


@pytest.fixture(params=[pytest.param("emulated", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Open a Device: each test that asks for it runs on the emulator and, if there is one, on a CUDA device."""
    if request.param == "cuda":
        yield request.getfixturevalue("cuda_device")
        return
    yield request.getfixturevalue("gpu")


TINY: tuple[Layer, ...] = (  # field of view 6x8x7, period 2x2x1: no two axes alike
    Conv((1, 5, 2), 3, "relu"),
    Pool((2, 2, 1)),
    Conv((3, 2, 3), 4, "tanh"),
    Conv((1, 1, 4), 2, "sigmoid"),
)


@pytest.fixture(scope="session")
def tiny_network() -> Callable[..., Network]:
    """`tiny_network()`, or with other layers, channels or normalisation: milliseconds to run, every axis different."""

    def make(
        *layers: Layer, input_channels: int = 1, name: str = "tiny", normalise: Normalise | None = None
    ) -> Network:
        return Network(name, input_channels, layers or TINY, normalise)

    return make


@pytest.fixture
def place(tmp_path: Path, tiny_network: Callable[..., Network]) -> Place:
    """Make a folder with a small volume, a small network and its weights, for the command line to run on."""
    from tests.support.cli import Place

    return Place.furnish(tmp_path, tiny_network())


@pytest.fixture
def gpu() -> Iterator[Any]:
    """Open an emulated Device."""
    from tests.support.emulator import EmulatedDevice, compiler

    if compiler() is None:
        pytest.skip("the emulator needs a C++ compiler")
    with EmulatedDevice() as emulated:
        yield emulated
