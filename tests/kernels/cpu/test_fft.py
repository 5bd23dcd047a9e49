"""FFTW's transforms equal those of numpy, and planning them leaves the process as it was."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyfftw
import pytest

from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.cpu import fft
from znnpy.kernels.cpu.pruned import twiddles


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


@pytest.mark.slow
def test_fftw_plans_neither_read_nor_change_wisdom_of_the_process() -> None:
    def bytes_of(process: str) -> str:
        command = [sys.executable, "-c", WITH_WISDOM, process]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert bytes_of("measured") == bytes_of("fresh")


BINDINGS_ALONE = """
import sys
from znnpy.kernels.cpu import fft
assert not {"pyfftw", "scipy", "dask"} & {*sys.modules}
import pyfftw
assert pyfftw.FFTW is fft.pyfftw.FFTW
assert pyfftw.interfaces.scipy_fft and pyfftw.__version__
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["", "import pyfftw; from znnpy.kernels.cpu import fft; assert fft.pyfftw is pyfftw"])
def test_bindings_are_loaded_without_what_the_package_imports(first: str) -> None:
    """Whoever imports the package, later or before, has all of it."""
    subprocess.run([sys.executable, "-W", "error", "-c", first or BINDINGS_ALONE], check=True)


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
