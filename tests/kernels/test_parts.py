"""What primitives are made of: the crew, FFTW's plans, pruned transforms, the last pass, the table."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pyfftw
import pytest

from znnpy.errors import Stopped, ValuesOverflowError
from znnpy.kernels import reference
from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.contract import Footprint, Scratch, Variant
from znnpy.kernels.cpu import fft
from znnpy.kernels.cpu.epilogue import Epilogue, quiet
from znnpy.kernels.cpu.pruned import twiddles
from znnpy.kernels.table import TABLE, find, of_kind
from znnpy.kernels.thread_pool import ThreadPool, chunks, min_chunk
from znnpy.shapes import ACTIVATIONS, ConvShape

if TYPE_CHECKING:
    from znnpy.shapes import Activation


# The crew


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_shares_cover_the_range_once(threads: int) -> None:
    seen = np.zeros(103, int)
    busy = [threading.Lock() for _ in range(threads)]

    def piece(lo: int, hi: int, worker: int) -> None:
        assert busy[worker].acquire(blocking=False), "two calls of one worker overlap"
        seen[lo:hi] += 1
        time.sleep(0.001)
        busy[worker].release()

    with ThreadPool(threads) as crew:
        crew.each(piece, 103)
    assert (seen == 1).all()


def test_first_error_is_raised_after_every_worker_has_ended() -> None:
    ended = []

    def piece(lo: int, hi: int, worker: int) -> None:
        del hi, worker
        if lo == 0:
            raise ValuesOverflowError("too large")
        time.sleep(0.05)
        ended.append(lo)

    with ThreadPool(2) as crew:
        with pytest.raises(ValuesOverflowError, match="too large"):
            crew.each(piece, 2)
        assert ended == [1]


def test_stopped_thread_pool_takes_no_more_work() -> None:
    calls = []

    def piece(lo: int, hi: int, worker: int) -> None:
        del hi, worker
        calls.append(lo)
        crew.stop()
        crew.stop()

    with ThreadPool(2) as crew:
        with pytest.raises(Stopped):
            crew.each(piece, 100)
        assert 1 <= len(calls) <= 2
        with pytest.raises(Stopped):
            crew.each(piece, 1)


def test_interrupt_of_the_caller_stops_the_workers() -> None:
    def piece(lo: int, hi: int, worker: int) -> None:
        del lo, hi, worker
        for _ in range(1000):
            crew.check()
            time.sleep(0.01)

    with ThreadPool(2) as crew:
        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(0.1, signal.pthread_kill, [main, signal.SIGINT])
        timer.start()
        start = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            crew.each(piece, 2)
        timer.join()
    assert time.perf_counter() - start < 2


def test_thread_pool_without_threads_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one thread, not 0"):
        ThreadPool(0)


@pytest.mark.parametrize(
    ("nbytes", "calls"), [(0, 1), (2**21, 1), (2**22 - 1, 1), (2**22, 2), (7 * 2**21, 6), (2**30, 8)]
)
def test_few_bytes_are_not_shared_among_threads(nbytes: int, calls: int) -> None:
    """2 MiB a share, and no more than four shares a thread."""
    seen = np.zeros(1000, np.int64)
    found = []

    def piece(lo: int, hi: int, worker: int) -> None:
        del worker
        found.append(hi - lo)
        seen[lo:hi] += 1

    with ThreadPool(2) as crew:
        crew.each(piece, 1000, least=min_chunk(nbytes, 1000))
    assert (seen == 1).all()
    assert len(found) == calls


def test_shares_are_near_equal() -> None:
    assert chunks(7, 3) == [(0, 2), (2, 4), (4, 7)]
    assert chunks(2, 5) == [(0, 1), (1, 2)]


def test_blas_runs_one_thread_inside_a_thread_pool() -> None:
    from threadpoolctl import threadpool_info

    with ThreadPool(2):
        assert {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"} == {1}


# FFTW


def test_transforms_equal_numpy() -> None:
    x = _aligned((4, 6, 8, 3), np.float32)
    x[...] = np.random.default_rng(1).standard_normal(x.shape)
    spectrum = _aligned((4, 6, 5, 3), np.complex64)
    transform = fft.Transform(
        fft.like(x.shape, x.strides, x.dtype, place=1),
        fft.like(spectrum.shape, spectrum.strides, spectrum.dtype),
        (1, 2),
    )
    exact = np.fft.rfft2(x.astype(np.float64), axes=(1, 2))
    transform(x, spectrum)
    np.testing.assert_allclose(spectrum, exact, atol=1e-5)
    back = fft.Transform(spectrum, spectrum, (1,), "FFTW_BACKWARD")
    back(spectrum, spectrum)
    np.testing.assert_allclose(spectrum, np.fft.rfft(x, axis=2) * 6, atol=1e-4)


def test_transform_refuses_other_shapes() -> None:
    x = _aligned((4, 8), np.complex64)
    transform = fft.Transform(x, x, (0,))
    with pytest.raises(ValueError, match=r"[Ii]nvalid"):
        transform(_aligned((4, 9), np.complex64), _aligned((4, 9), np.complex64))


def _aligned(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return aligned_bytes(nbytes).view(dtype).reshape(shape)


@pytest.mark.parametrize(("n", "good"), [(1, 1), (11, 11), (17, 18), (97, 98), (101, 104), (121, 125), (143, 144)])
def test_good_size_is_the_next_fast_length(n: int, good: int) -> None:
    assert fft.good_size(n) == good


WITH_WISDOM = """
import hashlib, sys
import numpy as np, pyfftw

def plan(flags):
    transforms = []
    for shape in ((24, 24, 5), (40, 40, 5), (100, 64), (100, 100)):
        for direction in ("FFTW_FORWARD", "FFTW_BACKWARD"):
            x = pyfftw.empty_aligned(shape, "complex64", n=64)
            flags = ("FFTW_DESTROY_INPUT", *flags)  # wisdom is of the problem and this flag
            transforms.append((x, pyfftw.FFTW(x, x, axes=(0,), direction=direction, flags=flags)))
    return transforms

if sys.argv[1] == "measured":
    plan(("FFTW_MEASURE",))
from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.cpu import fft
users = plan(("FFTW_ESTIMATE",))
before = pyfftw.export_wisdom()
digest = hashlib.sha256()
for x, same in users:
    x.view(np.float32)[...] = np.random.default_rng(3).standard_normal(x.view(np.float32).shape, np.float32)
    fft.Transform(x, x, (0,), same.direction)(x, x)
    digest.update(x.tobytes())
print(digest.hexdigest())
assert sorted(b"".join(pyfftw.export_wisdom()).split(b"\\n")) == sorted(b"".join(before).split(b"\\n"))
if sys.argv[1] == "measured":
    plan(("FFTW_MEASURE", "FFTW_WISDOM_ONLY"))
"""


def test_fftw_plans_neither_read_nor_change_wisdom_of_the_process() -> None:
    def bytes_of(process: str) -> str:
        command = [sys.executable, "-c", WITH_WISDOM, process]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert bytes_of("measured") == bytes_of("fresh")


def test_fftw_planning_is_reentrant_and_survives_a_failure() -> None:
    before = pyfftw.export_wisdom()
    x = _aligned((4, 8), np.complex64)
    with fft.planning(), fft.planning():
        fft.Transform(x, x, (0,))
    with pytest.raises(IndexError, match="axes"), fft.planning():
        fft.Transform(x, x, (5,))
    assert pyfftw.export_wisdom() == before


@pytest.mark.parametrize(("n", "k"), [(8, 3), (20, 20), (12, 1), (1, 1)])
def test_twiddles_are_the_conjugate_transform_over_n(n: int, k: int) -> None:
    kernel = np.random.default_rng(2).standard_normal(k)
    np.testing.assert_allclose(twiddles(n, k) @ kernel, np.conj(np.fft.fft(kernel, n)) / n, atol=1e-6)
    half = n // 2 + 1
    np.testing.assert_array_equal(twiddles(n, k, half), twiddles(n, k)[:half])


# The last pass


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogue_works_in_place_and_on_rows_apart(activation: Activation) -> None:
    rows = np.random.default_rng(4).standard_normal((2, 4, 15)).astype(np.float32)
    apart = np.full((2, 4, 30), np.nan, np.float32)
    finish = Epilogue(np.arange(3, dtype=np.float32), activation, 8)
    with quiet():
        finish(rows, apart[:, :, :15])
        finish(rows, rows)
    np.testing.assert_array_equal(apart[:, :, :15], rows)
    assert np.isnan(apart[:, :, 15:]).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogue_equals_the_definition(activation: Activation) -> None:
    rng = np.random.default_rng(5)
    bias = rng.standard_normal(3).astype(np.float32)
    source = np.concatenate([rng.standard_normal((6, 3)) * 5, [[-200, 200, 0], [90, -90, 88]]]).astype(np.float32)
    out = np.full((1, 24), np.nan, np.float32)
    with quiet():
        Epilogue(bias, activation, 8)(source.reshape(1, 24), out)
    exact = reference.activate(source.astype(np.float64) + bias, activation)
    np.testing.assert_allclose(out.reshape(8, 3), exact, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_epilogue_counts_values_not_finite(bad: float, activation: Activation) -> None:
    source = np.zeros((2, 6), np.float32)
    source[1, 4] = bad
    with quiet(), pytest.raises(ValuesOverflowError, match="1 of 12 values of a block became infinite or not a number"):
        Epilogue(np.zeros(2, np.float32), activation, 3)(source, source)


# The contract and the table


def test_every_primitive_has_a_name_of_its_own() -> None:
    names = [p.name for p in TABLE]
    assert len(set(names)) == len(names)
    for primitive in TABLE:
        assert primitive.name.startswith((f"cpu.{primitive.kind}.", f"gpu.{primitive.kind}."))
        assert primitive in of_kind(primitive.kind)
        assert find(primitive.name) is primitive
        assert primitive.version >= 1
        assert primitive.summary
        assert primitive.source


def test_unknown_primitive_suggests_near_names() -> None:
    with pytest.raises(KeyError, match=r"did you mean cpu\.conv\.fft_tiled"):
        find("cpu.conv.fft_tile")


def test_variant_returns_its_settings_by_type() -> None:
    variant = Variant.of(tile=(8, 16, 32), group=27)
    assert str(variant) == "group=27 tile=8x16x32"
    assert (variant.size("tile"), variant.count("group")) == ((8, 16, 32), 27)
    with pytest.raises(TypeError, match="tile is"):
        variant.count("tile")
    with pytest.raises(TypeError, match="group is 27, not a size"):
        variant.size("group")


def test_working_bytes_equal_those_of_the_fullest_stage() -> None:
    shape = ConvShape(1, 1, 1, (4, 4, 4), (1, 1, 1))  # 256 bytes in, 256 out
    footprint = Footprint(
        input_until=0,
        output_from=1,
        stages=2,
        scratch=(Scratch("a", 1000, 0, 1), Scratch("b", 500, 1, 1)),
        allowance=7,
    )
    assert footprint.working(shape) == 256 + 1500 + 7
