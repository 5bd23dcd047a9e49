"""The seam under all kernels, on the emulator and on a device: each operation against numpy, and what is caught."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.emulator import EMULATED_GPU, SMALL_GPU, EmulatedDevice
from znnpy.errors import DeviceError
from znnpy.kernels.gpu.kernel_source import KERNELS, source_text
from znnpy.shapes import ACTIVATIONS

pytestmark = pytest.mark.slow

SOURCE = str(Path(__file__).parent / "ops.cu")
NAMES = (
    "add_one",
    "every_argument",
    "of_struct",
    "places",
    "transpose<16>",
    "sum_of_block<1>",
    "untouched<0>",
    "shuffles",
    "to_halves",
    "wide<float>",
    "wide<half>",
    "peaks",
    "tf32_of",
    "matrices",
    "product_half",
    "product_tf32",
    "copies<0>",
    "activations",
    "times",
    "quotients",
)
FAULTS = ("sum_of_block<0>", "untouched<1>", "half_a_barrier", "copies<2>", "beyond", "add_one")


@pytest.fixture
def kernels(device: Any) -> dict[str, Any]:
    found: dict[str, Any] = device.kernels(SOURCE, NAMES)
    return found


@pytest.fixture
def emulated() -> Any:
    with EmulatedDevice() as device:
        yield device


@pytest.fixture
def faulty(emulated: Any) -> dict[str, Any]:
    found: dict[str, Any] = emulated.kernels(SOURCE, FAULTS)
    return found


def poisoned(device: Any, *shape: int, dtype: npt.DTypeLike = np.float32) -> Any:
    return device.put(np.full(shape, np.nan, dtype), "a result")


def test_every_thread_of_a_grid_runs_once(device: Any, kernels: dict[str, Any]) -> None:
    values = device.put(np.arange(1000, dtype=np.float32), "values")
    kernels["add_one"]((5,), (256,), values, 999)
    expected = np.arange(1000, dtype=np.float32) + (np.arange(1000) < 999)
    assert np.array_equal(device.get(values), expected)


def test_arguments_arrive_unchanged(device: Any, kernels: dict[str, Any]) -> None:
    out = poisoned(device, 1)
    one = device.put(np.ones(3, np.float32), "one")
    kernels["every_argument"]((1,), (32,), one, out, 2**32 + 2**20, 0.5, np.int32(-7), None)
    assert device.get(out)[0] == np.float32(1 + 2**32 + 2**20 + 0.5 - 7 + 1000)


def test_structs_are_passed_by_value(device: Any, kernels: dict[str, Any]) -> None:
    out = poisoned(device, 3)
    kind = np.dtype([("whole", "i8"), ("narrow", "i4", 3), ("real", "f4")], align=True)
    kernels["of_struct"]((1,), (3,), np.array((2**22, (10, -20, 30), 0.5), kind)[()], out)
    np.testing.assert_array_equal(device.get(out), 2**22 + np.array([10.5, -19.5, 30.5]))


def test_grids_and_blocks_have_three_dimensions(device: Any, kernels: dict[str, Any]) -> None:
    out = poisoned(device, 4, 2, 3, 2, 4, 5)
    kernels["places"]((3, 2, 4), (5, 4, 2), out)
    where = np.indices(out.shape)
    assert np.array_equal(device.get(out), np.tensordot([100000, 10000, 1000, 100, 10, 1], where, 1))


def test_barriers_order_accesses_to_shared_memory(device: Any, kernels: dict[str, Any]) -> None:
    values = np.random.default_rng(1).random((16, 16), np.float32)
    out = poisoned(device, 16, 16)
    kernels["transpose<16>"]((1,), (16, 16), device.put(values, "values"), out)
    assert np.array_equal(device.get(out), values.T)


def test_dynamic_shared_memory_has_the_requested_size(device: Any, kernels: dict[str, Any]) -> None:
    values = np.random.default_rng(2).integers(0, 100, (7, 128)).astype(np.float32)
    out = poisoned(device, 7)
    kernels["sum_of_block<1>"]((7,), (128,), device.put(values, "values"), out, shared=96 << 10)
    assert np.array_equal(device.get(out), values.sum(axis=1))


def test_shuffles_reach_the_named_lanes(device: Any, kernels: dict[str, Any]) -> None:
    values = np.random.default_rng(3).random(64, np.float32)
    out = poisoned(device, 64, 5)
    kernels["shuffles"]((1,), (64,), device.put(values, "values"), out)
    warps, lane = values.reshape(2, 32), np.arange(32)
    expected = np.stack(
        [
            np.repeat(warps[:, 5:6], 32, axis=1),
            warps[:, lane ^ 7],
            warps[:, np.where(lane + 3 < 32, lane + 3, lane)],
            warps[:, np.where(lane >= 4, lane - 4, lane)],
            np.broadcast_to(((lane + 1) % 32 * 2.0**33).astype(np.float32), (2, 32)),
        ],
        axis=-1,
    )
    assert np.array_equal(device.get(out), expected.reshape(64, 5))


def test_halves_round_to_nearest_even(device: Any, kernels: dict[str, Any]) -> None:
    """Every float16, the middles between neighbours, and their neighbours in float32."""
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    every = np.append(halves[~np.isnan(halves)], np.float16(np.nan)).astype(np.float32)
    numbers = np.unique(every[np.isfinite(every)])
    middles = (numbers[1:] + numbers[:-1]) / 2
    values = np.concatenate(
        [every, middles, np.nextafter(middles, np.float32(np.inf)), -numbers[-3:] - 15, [65519.996, 65520, 1e30]]
    )
    values = values.astype(np.float32)
    out, back = poisoned(device, len(values), dtype=np.float16), poisoned(device, len(values))
    kernels["to_halves"]((-(-len(values) // 256),), (256,), device.put(values, "values"), out, back, len(values))
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    assert np.array_equal(device.get(out), expected, equal_nan=True)
    assert np.array_equal(device.get(back), expected.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize(("name", "dtype"), [("wide<float>", np.float32), ("wide<half>", np.float16)])
def test_activations_are_read_and_written_in_three_widths(
    device: Any, kernels: dict[str, Any], name: str, dtype: npt.DTypeLike
) -> None:
    values = np.random.default_rng(4).integers(-50, 50, (40, 8)).astype(dtype)
    out = device.put(np.zeros((40, 8), dtype), "a result")
    kernels[name]((1,), (40,), device.put(values, "values"), out, values.size)
    assert np.array_equal(device.get(out)[:, :7], values[:, :7] + 1)


@pytest.mark.parametrize("worst", [-3.5, np.inf, -np.inf, np.nan])
def test_peak_is_a_magnitude_and_keeps_values_not_finite(device: Any, kernels: dict[str, Any], worst: float) -> None:
    values = np.random.default_rng(5).uniform(-1, 1, 1000).astype(np.float32)
    values[777] = worst
    peaks = device.put(np.zeros(2, np.float32), "peaks")
    kernels["peaks"]((4,), (256,), device.put(values, "values"), peaks[:1], peaks[1:], len(values))
    assert np.array_equal(device.get(peaks), np.abs([np.float32(worst)] * 2), equal_nan=True)


def test_peak_never_falls(device: Any, kernels: dict[str, Any]) -> None:
    peaks = device.put(np.full(2, 7, np.float32), "peaks")
    kernels["peaks"]((1,), (32,), device.put(np.ones(32, np.float32), "values"), peaks[:1], peaks[1:], 32)
    assert np.array_equal(device.get(peaks), [7, 7])


def test_tf32_keeps_ten_bits(device: Any, kernels: dict[str, Any]) -> None:
    bits = np.random.default_rng(6).integers(0, 2**32, 1024, dtype=np.uint32)
    bits[(bits & 0x7F800000) == 0x7F800000] = 0x3F801000  # a tie
    bits[(bits & 0x7F800000) == 0] = 0x80000000
    out = poisoned(device, 1024)
    kernels["tf32_of"]((1,), (1024,), device.put(bits.view(np.float32), "values"), out)
    expected = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    assert np.array_equal(device.get(out).view(np.uint32), expected)


def test_matrices_are_distributed_over_the_lanes(device: Any, kernels: dict[str, Any]) -> None:
    """Lane 4 g + t: elements 2 t, 2 t + 1 of row g; transposed, of column g; the first in the lower half of a word."""
    numbers = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    out = device.put(np.zeros((32, 12), np.uint32), "words")
    kernels["matrices"]((1,), (32,), device.put(numbers.view(np.float16), "matrices"), out)
    words = numbers.view(np.uint32).reshape(4, 32).T
    turned = np.ascontiguousarray(numbers.transpose(0, 2, 1)).view(np.uint32).reshape(4, 32).T
    expected = np.concatenate([words, turned, words[:, :2], turned[:, :2]], axis=1)
    assert np.array_equal(device.get(out), expected)


def test_warp_products_in_float16_equal_numpy(device: Any, kernels: dict[str, Any]) -> None:
    """cp.async, ldmatrix, its transposed twin and mma together: small integers, so that float16 is exact."""
    rng = np.random.default_rng(7)
    a, b = rng.integers(-8, 8, (16, 16)).astype(np.float16), rng.integers(-8, 8, (16, 8)).astype(np.float16)
    start = rng.integers(-8, 8, (16, 8)).astype(np.float32)
    d = device.put(start, "d")
    kernels["product_half"]((1,), (32,), device.put(a, "a"), device.put(b, "b"), d)
    assert np.array_equal(device.get(d), start + a.astype(np.float32) @ b.astype(np.float32))


def test_warp_products_in_tf32_equal_numpy(device: Any, kernels: dict[str, Any]) -> None:
    rng = np.random.default_rng(8)
    a, b = rng.integers(-99, 99, (16, 8)).astype(np.float32), rng.integers(-99, 99, (8, 8)).astype(np.float32)
    d = poisoned(device, 16, 8)
    kernels["product_tf32"]((1,), (32,), device.put(a, "a"), device.put(b, "b"), d)
    assert np.array_equal(device.get(d), a @ b)


def test_asynchronous_copies_give_values_or_zeros(device: Any, kernels: dict[str, Any]) -> None:
    values = np.random.default_rng(9).random(384, np.float32)
    out = poisoned(device, 384)
    kernels["copies<0>"]((1,), (32,), device.put(values, "values"), out, 260)
    assert np.array_equal(device.get(out), np.where(np.arange(384) < 260, values, 0))


def test_activations_equal_the_definition(device: Any, kernels: dict[str, Any]) -> None:
    values = np.concatenate([np.linspace(-100, 100, 201), [np.nan, np.inf, -np.inf]]).astype(np.float32)
    out = poisoned(device, 4, len(values))
    kernels["activations"]((1,), (256,), device.put(values, "values"), out, len(values))
    wide = values.astype(np.float64)
    with np.errstate(over="ignore"):
        expected = [wide, np.maximum(wide, 0), np.tanh(wide), 1 / (1 + np.exp(-wide))]
    assert ACTIVATIONS == ("none", "relu", "tanh", "sigmoid", "softmax")
    np.testing.assert_allclose(device.get(out), expected, rtol=3e-7, atol=1e-37)


def test_denormals_are_flushed_to_zero(device: Any, kernels: dict[str, Any]) -> None:
    """CuPy has it so: scales must not depend on them."""
    values = np.array([1e-39, -1e-39, 1.2e-38, 3e-45], np.float32)
    out = poisoned(device, 4)
    kernels["times"]((1,), (4,), device.put(values, "values"), out, 1.0)
    assert np.array_equal(device.get(out), [0, 0, values[2], 0])
    kernels["times"]((1,), (4,), device.put(values, "values"), out, 0.5)
    assert np.array_equal(device.get(out), [0, 0, 0, 0])
    assert values[0] * np.float32(2) > 0  # on the host they are what they were


def test_quotients_equal_integer_division(device: Any, kernels: dict[str, Any]) -> None:
    """They are tried at multiples and beside them, up to the largest that are promised."""
    rng = np.random.default_rng(10)
    most = 2**31 - 65
    d = np.concatenate([np.arange(1, 3000), rng.integers(1, 2**20, 3000), [most - 1, most]])
    d = np.concatenate([d[:1000], d[:1000], d, d])
    near = rng.integers(0, most // d + 1) * d + rng.integers(-1, 2, len(d))
    n = np.clip(np.where(np.arange(len(d)) % 5 == 0, most, near), 0, most)
    out = device.put(np.full((2, len(n)), -1, np.int32), "a result")
    values = (device.put(v.astype(np.int32), "values") for v in (n, d))
    kernels["quotients"]((-(-len(n) // 256),), (256,), *values, out, len(n))
    found = device.get(out)
    assert np.array_equal(found[0], n // d)
    assert np.array_equal(found[1][d < 2**12], (n % 2**20 // d)[d < 2**12])


def test_shared_memory_is_poisoned_when_a_block_starts(emulated: Any) -> None:
    kernel = emulated.kernels(SOURCE, NAMES)["untouched<0>"]
    out = emulated.put(np.zeros((3, 2, 64), np.float32), "a result")
    kernel((3,), (64,), out, 64, shared=256)
    assert np.isnan(emulated.get(out)).all()


def test_a_missing_barrier_changes_the_answer(emulated: Any, faulty: dict[str, Any]) -> None:
    values = np.ones((4, 128), np.float32)
    out = poisoned(emulated, 4)
    faulty["sum_of_block<0>"]((4,), (128,), emulated.put(values, "values"), out, shared=512)
    assert not np.array_equal(emulated.get(out), [128] * 4)


def test_copies_without_a_wait_have_not_arrived(emulated: Any, faulty: dict[str, Any]) -> None:
    out = poisoned(emulated, 384)
    faulty["copies<2>"]((1,), (32,), emulated.put(np.ones(384, np.float32), "values"), out, 384)
    assert np.array_equal(np.isnan(emulated.get(out)), np.arange(384) >= 128)


def test_barrier_missed_by_some_threads_is_reported(emulated: Any, faulty: dict[str, Any]) -> None:
    faulty["half_a_barrier"]((1,), (32,), poisoned(emulated, 32))
    with pytest.raises(DeviceError, match=r"16 of 32 threads wait at a barrier of the block, 16 at one of a warp"):
        emulated.synchronize()


@pytest.mark.parametrize("at", [1024, -1024, 2**40])
def test_access_far_beyond_an_array_is_reported(emulated: Any, faulty: dict[str, Any], at: int) -> None:
    faulty["beyond"]((1,), (1,), poisoned(emulated, 64), at)
    with pytest.raises(DeviceError, match=r"beyond on grid \(1,\) .* thread \(0, 0, 0\): reaches beyond an array"):
        emulated.synchronize()


@pytest.mark.parametrize("at", [3, -1])
def test_writes_just_beside_an_array_are_reported(emulated: Any, faulty: dict[str, Any], at: int) -> None:
    faulty["beyond"]((1,), (1,), poisoned(emulated, 3), at)
    with pytest.raises(DeviceError, match="wrote beside the 12 bytes of a result"):
        emulated.synchronize()


def test_use_beyond_shared_memory_is_reported(emulated: Any, faulty: dict[str, Any]) -> None:
    faulty["untouched<1>"]((1,), (64,), poisoned(emulated, 128), 64, shared=256)
    with pytest.raises(DeviceError, match="reaches beyond its 256 bytes of dynamic shared memory"):
        emulated.synchronize()


def test_arguments_of_a_wrong_size_are_refused(emulated: Any, faulty: dict[str, Any]) -> None:
    array = poisoned(emulated, 3)
    with pytest.raises(TypeError, match=r"argument 1 of add_one is int32; it takes an integer of 8 bytes"):
        faulty["add_one"]((1,), (32,), array, np.int32(3))
    with pytest.raises(TypeError, match=r"argument 1 of add_one is float32; it takes an integer of 8 bytes"):
        faulty["add_one"]((1,), (32,), array, 3.0)
    with pytest.raises(TypeError, match=r"argument 1 of add_one is float64; it takes an integer of 8 bytes"):
        faulty["add_one"]((1,), (32,), array, np.float64(3))
    with pytest.raises(TypeError, match=r"argument 0 of add_one is float64; it takes a pointer of 8 bytes"):
        faulty["add_one"]((1,), (32,), np.float64(3), 3)
    with pytest.raises(TypeError, match=r"add_one takes 2 arguments, not 1"):
        faulty["add_one"]((1,), (32,), array)


def test_small_gpu_refuses_missing_features() -> None:
    with EmulatedDevice(SMALL_GPU) as device:
        kernel = device.kernels(SOURCE, NAMES)["untouched<0>"]
        out = poisoned(device, 128)
        kernel((1,), (64,), out, 64, shared=SMALL_GPU.shared_block_bytes)
        with pytest.raises(DeviceError, match=f"of {SMALL_GPU.shared_block_bytes + 1} bytes was refused"):
            kernel((1,), (64,), out, 64, shared=SMALL_GPU.shared_block_bytes + 1)
        assert np.isnan(device.get(out)).all()
        assert EMULATED_GPU.shared_block_bytes > SMALL_GPU.shared_block_bytes


def test_headers_are_included_once() -> None:
    text = source_text(SOURCE)
    assert text.count("DEVICE void sync_block()") == 1
    assert '\n#include "' not in text
    assert '#line 1 "device_ops.cuh"' in text


def test_changed_header_changes_the_source_text(tmp_path: Path) -> None:
    (tmp_path / "part.cuh").write_text("int part = 1;\n")
    (tmp_path / "whole.cu").write_text('#include "part.cuh"\n#include "part.cuh"\nint whole = part;\n')
    assert source_text(str(tmp_path / "whole.cu")).count("int part = 1;") == 1
    (tmp_path / "part.cuh").write_text("int part = 2;\n")
    assert source_text(str(tmp_path / "whole.cu")).count("int part = 2;") == 1


def test_missing_header_is_named(tmp_path: Path) -> None:
    (tmp_path / "whole.cu").write_text('#include "nothing.cuh"\n')
    with pytest.raises(FileNotFoundError, match=r'whole.cu includes "nothing.cuh"'):
        source_text(str(tmp_path / "whole.cu"))


SEAM = {KERNELS / name for name in ("device_ops.cuh", "wgmma.cuh", "pipeline.cuh")}


@pytest.mark.parametrize("source", sorted(set(KERNELS.rglob("*.cu*")) - SEAM), ids=lambda path: path.name)
def test_kernels_use_device_intrinsics_only_through_the_shared_headers(source: Path) -> None:
    """Three files hold the words that only a device knows, and raw shared memory, which the emulator cannot poison."""
    text = source.read_text()
    found = [
        word for word in ("asm(", "asm volatile", "__shared__", "__syncthreads", "_sync(", "__cluster") if word in text
    ]
    assert not found, f"{source.name} uses {found} past device_ops.cuh"
