"""A device's memory, views, copies, streams and refusals, on the emulator and on a device."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.emulator import EMULATED_GPU, EmulatedDevice
from tests.support.messages import assert_holds
from znnpy.errors import DeviceError
from znnpy.kernels.gpu.device import ALIGNMENT, Device, find_gpu
from znnpy.machine import Gpu

SOURCE = str(Path(__file__).parent / "ops.cu")


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float16, np.float32, np.float64, np.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5, 2, 1, 9)])
def test_arrays_return_unchanged(device: Any, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
    host = np.random.default_rng(1).integers(0, 100, shape).astype(dtype)
    array = device.put(host, "an array")
    back = device.get(array)
    assert type(back) is np.ndarray
    assert (array.shape, array.dtype, back.shape, back.dtype) == (shape, host.dtype) * 2
    assert np.array_equal(back, host)


def test_arrays_of_any_memory_order_are_uploaded(device: Any) -> None:
    host = np.arange(60, dtype=np.float32).reshape(3, 4, 5).transpose(2, 0, 1)[:, ::-1]
    array = device.put(host, "turned")
    assert array.strides == (48, 16, 4)
    assert np.array_equal(device.get(array), host)


def test_views_of_any_stride_are_downloaded(device: Any) -> None:
    host = np.arange(240, dtype=np.float16).reshape(2, 10, 12)
    array = device.put(host, "an array")
    assert np.array_equal(device.get(array[:, 3:7, ::2]), host[:, 3:7, ::2])


def test_memory_is_aligned_accounted_and_freed_with_its_last_view(device: Any) -> None:
    gc.collect()
    before = device.allocated
    data = device.allocate(1000, "some bytes")
    assert (data.shape, data.dtype, data.nbytes) == ((1000,), np.uint8, 1000)
    assert device.address(data) % ALIGNMENT == 0
    assert device.allocated == before + 1000
    view = device.view(data, (5, 5), np.float32, offset=100)
    del data
    gc.collect()
    assert device.allocated == before + 1000
    del view
    gc.collect()
    assert device.allocated == before


def test_memory_is_freed_at_once_on_request(device: Any) -> None:
    first = device.allocate(1000, "first")
    view = device.view(first, (10,), np.float32)
    held = device.allocated
    device.free(first)
    assert device.allocated == held - 1000
    second = device.allocate(1000, "second, most likely where the first was")
    del first, view
    gc.collect()
    assert device.allocated == held
    assert second.nbytes == 1000


def test_views_lie_at_their_offsets(device: Any) -> None:
    data = device.put(np.arange(256, dtype=np.uint8), "bytes")
    view = device.view(data, (2, 3, 2), np.uint16, offset=6, strides=(100, 10, 2))
    assert view.strides == (100, 10, 2)
    assert device.address(view) == device.address(data) + 6
    first = np.array([[[0, 2], [10, 12], [20, 22]], [[100, 102], [110, 112], [120, 122]]]) + 6
    assert np.array_equal(device.get(view), first + 256 * (first + 1))
    assert np.array_equal(device.get(device.view(data, (256,), np.uint8)), np.arange(256))


@pytest.mark.parametrize(
    ("shape", "offset", "strides", "words"),
    [
        ((65,), 0, None, "ends 4 bytes beyond the 256"),
        ((64,), 1, None, "ends 1 bytes beyond the 256"),
        ((2, 2), 0, (252, 4), "ends 4 bytes beyond the 256"),
        ((2,), 8, (-4,), "describe no array"),
        ((2,), -4, None, "describe no array"),
        ((2, 2), 0, (4,), "describe no array"),
    ],
)
def test_views_beyond_their_memory_are_refused(
    device: Any, shape: tuple[int, ...], offset: int, strides: tuple[int, ...] | None, words: str
) -> None:
    data = device.allocate(256, "bytes")
    with pytest.raises(ValueError, match=words):
        device.view(data, shape, np.float32, offset=offset, strides=strides)


def test_too_large_an_allocation_is_refused_in_one_sentence(device: Any) -> None:
    much = 1 << 50
    with pytest.raises(DeviceError, match=r"cudaErrorMemoryAllocation: .*; \d+ bytes are free") as caught:
        device.allocate(much, "a whole brain")
    assert_holds(caught.value, f"a whole brain of {much} bytes", "lower `vram`")
    assert np.array_equal(device.get(device.put(np.ones(3), "it goes on")), np.ones(3))


def test_free_bytes_fall_by_the_held_bytes(device: Any) -> None:
    before = device.free_bytes()
    held = device.allocate(256 << 20, "a lot")
    assert 0 < device.free_bytes() <= before - held.nbytes


def test_pinned_arrays_are_numpy_arrays(device: Any) -> None:
    array = device.pinned((3, 4), np.float16)
    array[...] = np.arange(12).reshape(3, 4)
    assert type(array) is np.ndarray
    assert array.flags.writeable
    assert (array.shape, array.dtype, array.sum()) == ((3, 4), np.float16, 66)
    assert device.pinned((0, 4), np.float32).shape == (0, 4)


def test_copies_wait_for_their_events(device: Any) -> None:
    """One stream uploads, a second runs a kernel, and a third downloads."""
    kernel = device.kernels(SOURCE, ["add_one"])["add_one"]
    count = 1 << 16
    source, target = device.pinned((count,), np.float32), device.pinned((count,), np.float32)
    source[:], target[:] = np.arange(count), np.nan
    array = device.view(device.allocate(source.nbytes, "values"), (count,), np.float32)
    uploaded, computed, downloaded = (device.event() for _ in range(3))
    device.copy_async(array, source, device.uploads)
    device.uploads.record(uploaded)
    device.stream.wait_event(uploaded)
    for _ in range(20):
        kernel((count // 256,), (256,), array, count)
    device.stream.record(computed)
    device.downloads.wait_event(computed)
    device.copy_async(target, array, device.downloads)
    downloaded.record(device.downloads)
    downloaded.synchronize()
    assert downloaded.done
    assert np.array_equal(target, np.arange(count) + 20)


def test_unsynchronised_stream_reads_old_values() -> None:
    """The emulator runs late on purpose, and the download was not told to wait."""
    with EmulatedDevice() as device:
        source, target = np.ones(4, np.float32), np.zeros(4, np.float32)
        array = device.view(device.allocate(16, "values"), (4,), np.float32)
        device.copy_async(array, source, device.uploads)
        device.copy_async(target, array, device.downloads)
        device.downloads.synchronize()
        assert np.isnan(target).all()


def test_copies_may_skip_between_images(device: Any) -> None:
    host = np.random.default_rng(2).random((3, 4, 5), np.float32)
    data = device.put(np.zeros((3, 9, 5), np.float32), "images with room")
    source = device.pinned((3, 4, 5), np.float32)
    source[...] = host
    device.copy_async(data[:, 2:6], source, device.stream)
    device.copy_async(data[:1, 6:8], data[1:2, 2:4], device.stream)
    expected = np.zeros((3, 9, 5), np.float32)
    expected[:, 2:6] = host
    expected[0, 6:8] = host[1, :2]
    assert np.array_equal(device.get(data), expected)


def test_copies_between_unequal_sizes_are_refused(device: Any) -> None:
    data = device.put(np.zeros((4, 6, 2), np.float32), "an array")
    with pytest.raises(ValueError, match=r"a copy of \(4, 6, 3\) float32 into \(4, 6, 2\) float32"):
        device.copy_async(data, np.zeros((4, 6, 3), np.float32), device.stream)
    with pytest.raises(ValueError, match="all but the first must be in C order"):
        device.copy_async(data[:, :, :1], np.zeros((4, 6, 1), np.float32), device.stream)


def test_clearing_leaves_zeros(device: Any) -> None:
    data = device.put(np.full((4, 5), np.nan, np.float32), "an array")
    device.clear(data[1:3])
    assert np.array_equal(np.isnan(device.get(data)), [[row not in (1, 2)] * 5 for row in range(4)])
    with pytest.raises(ValueError, match="only arrays in C order"):
        device.clear(data[:, :2])


def test_kernels_are_compiled_once(device: Any) -> None:
    first = device.kernels(SOURCE, ["add_one", "transpose<16>"])
    assert device.kernels(SOURCE, ["add_one", "transpose<16>"]) is first
    assert device.kernels(SOURCE, ["add_one"], UNUSED=3) is not first
    assert first["transpose<16>"].name == "transpose<16>"


def test_seconds_of_work_are_positive(device: Any) -> None:
    kernel = device.kernels(SOURCE, ["add_one"])["add_one"]
    array = device.put(np.zeros(1 << 16, np.float32), "values")
    seconds = device.elapsed(lambda: kernel((256,), (256,), array, array.size), 3)
    assert len(seconds) == 3
    assert all(0 < each < 10 for each in seconds)
    assert device.get(array)[-1] == 3


@pytest.mark.parametrize("value", [True, "words", [1, 2], 1j])
def test_invalid_kernel_arguments_are_refused(device: Any, value: object) -> None:
    kernel = device.kernels(SOURCE, ["add_one"])["add_one"]
    with pytest.raises(TypeError, match="argument 1 of add_one is a"):
        kernel((1,), (32,), device.allocate(4, "a value"), value)


def test_impossible_launches_are_refused(device: Any) -> None:
    kernel = device.kernels(SOURCE, ["add_one"])["add_one"]
    array = device.put(np.zeros(8, np.float32), "values")
    words = r"launch of add_one on grid \(1,\) of blocks \(2048,\).* was refused: CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(DeviceError, match=words):
        kernel((1,), (2048,), array, 8)
    too_much = device.gpu.shared_block_bytes + 1
    with pytest.raises(DeviceError, match=f"of {too_much} bytes was refused: CUDA_ERROR_INVALID_VALUE"):
        kernel((1,), (32,), array, 8, shared=too_much)
    assert np.array_equal(device.get(array), np.zeros(8))


def test_closed_device_holds_no_memory(device: Any) -> None:
    other = type(device)(device.gpu)
    kept = other.allocate(1000, "an array that outlives its device")
    assert other.allocated == 1000
    other.close()
    other.close()
    assert other.allocated == 0
    del kept


@pytest.mark.gpu
def test_device_reports_plausible_properties(cuda_device: Device) -> None:
    gpu = cuda_device.gpu
    assert gpu.capability >= (8, 0)
    assert 1 << 30 < gpu.memory_bytes < 1 << 40
    assert 48 << 10 < gpu.shared_block_bytes <= gpu.shared_multiprocessor_bytes
    assert 1e11 < gpu.bandwidth < 2e13
    assert gpu.multiprocessors > 8
    assert gpu.l2_bytes > 1 << 20
    assert gpu.driver >= 13000
    assert {"cupy", "cuda", "nvrtc"} <= {name for name, _ in gpu.versions}


@pytest.mark.gpu
def test_compiler_error_is_reported(cuda_device: Device, tmp_path: Path) -> None:
    (tmp_path / "wrong.cu").write_text("__global__ void wrong() { nothing(); }\n")
    with pytest.raises(DeviceError, match=r'(?s)the CUDA compiler refused .*wrong.cu: wrong:.*"nothing" is undefined'):
        cuda_device.kernels(str(tmp_path / "wrong.cu"), ["wrong"])


@pytest.mark.gpu
def test_kernels_report_their_registers_and_local_bytes(cuda_device: Device) -> None:
    kernel = cuda_device.kernels(SOURCE, ["add_one"])["add_one"]
    assert 0 < kernel.registers < 64
    assert kernel.local_bytes == 0


class Refused(RuntimeError):
    """An error like CuPy's, whose text has the name of a code, and which has the code."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


def fake_cupy(
    driver: int = 13000,
    library: int = 13020,
    devices: int = 1,
    refused: Refused | None = None,
    major: int = 8,
    no_compiler: str = "",
) -> SimpleNamespace:
    """Make the parts of CuPy that `find_gpu` calls, for a machine with these properties."""

    def count() -> int:
        if refused is not None:
            raise refused
        return devices

    properties = {"name": b"Fake", "major": major, "minor": 6, "multiProcessorCount": 82}
    properties |= {"totalGlobalMem": 24 << 30, "l2CacheSize": 6 << 20}
    runtime = SimpleNamespace(
        CUDARuntimeError=Refused,
        driverGetVersion=lambda: driver,
        runtimeGetVersion=lambda: library,
        getDeviceCount=count,
        getDeviceProperties=lambda number: properties,
        deviceGetAttribute=lambda attribute, number: attribute,
        cudaDevAttrMaxSharedMemoryPerBlockOptin=99 << 10,
        cudaDevAttrMaxSharedMemoryPerMultiprocessor=100 << 10,
        cudaDevAttrMemoryClockRate=9751000,
        cudaDevAttrGlobalMemoryBusWidth=384,
    )

    def compiler() -> tuple[int, int]:
        if no_compiler:
            raise RuntimeError(no_compiler)
        return 13, 0

    nvrtc = SimpleNamespace(getVersion=compiler)
    return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, nvrtc=nvrtc), __version__="14.2.0")


def test_gpu_description_follows_cudas_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    gpu = find_gpu()
    assert gpu == Gpu("Fake", (8, 6), 82, 24 << 30, 6 << 20, 99 << 10, 100 << 10, 936.096e9, 13000, gpu.versions)
    assert gpu.versions[:3] == (("cupy", "14.2.0"), ("cuda", "13.2"), ("nvrtc", "13.0"))


@pytest.mark.parametrize(
    ("cupy", "sentence"),
    [
        (None, r"a GPU is driven through CuPy, which cannot be imported \(.*\): pip install 'cupy-cuda13x\[ctk\].*'"),
        (fake_cupy(driver=0), "this machine has no NVIDIA driver: install one, or run on the CPU"),
        (
            fake_cupy(driver=12080),
            "the NVIDIA driver supports CUDA 12.8 and CuPy needs CUDA 13: install a newer driver, or run on the CPU",
        ),
        (
            fake_cupy(major=7),
            r"the GPU, a Fake, has compute capability 7\.6, and the kernels need 8\.0 \(Ampere\) and newer: .*",
        ),
        (
            fake_cupy(no_compiler="no libnvrtc.so.13\nsearched here\nand there"),
            r"CUDA's compiler, which CuPy needs, cannot be loaded \(no libnvrtc.so.13\): pip install .cupy-cuda13x.*",
        ),
        (fake_cupy(devices=0), "the NVIDIA driver shows this process no CUDA device: check nvidia-smi and .*"),
        (
            fake_cupy(refused=Refused(100, "cudaErrorNoDevice")),
            "the NVIDIA driver shows this process no CUDA device: .*",
        ),
        (
            fake_cupy(refused=Refused(999, "cudaErrorUnknown: unknown error")),
            "cudaGetDeviceCount was refused: cudaErrorUnknown: unknown error",
        ),
    ],
    ids=["no CuPy", "no driver", "old driver", "too old a card", "no compiler", "no device", "none visible", "unknown"],
)
def test_missing_gpu_is_explained_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, cupy: SimpleNamespace | None, sentence: str
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(DeviceError, match=f"^{sentence}$"):
        find_gpu()


def test_emulator_has_the_interface_of_a_device() -> None:
    """Whoever runs on one runs on the other: the same names, and the same parameters in the same order."""
    from inspect import signature

    offered = {name for name in vars(Device) if not name.startswith("_")}
    assert offered <= set(vars(EmulatedDevice)), offered - set(vars(EmulatedDevice))
    for name in sorted(offered):
        real, emulated = getattr(Device, name), getattr(EmulatedDevice, name)
        if callable(real):
            assert list(signature(real).parameters) == list(signature(emulated).parameters), name
    assert EMULATED_GPU.shared_block_bytes >= 99 << 10
