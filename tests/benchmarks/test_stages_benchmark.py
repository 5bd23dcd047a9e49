"""The benchmark of the stages of the tiled FFT runs, once and tiny, and what it times are the transforms it names."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from znnpy.kernels.cpu.native.library import why_not
from znnpy.machine import this_machine

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(why_not(this_machine()) is not None, reason="the compiled kernels are not here")


@pytest.fixture
def limits(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    return importlib.import_module("stages_limits")


def test_stages_benchmark_runs(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / "stages.json"
    command = [sys.executable, str(repository / "benchmarks" / "stages.py"), "--quick", "--no-torch", "--rounds", "2"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert [row["side"] for row in result["transforms"]] == [4, 6]
    for row in result["transforms"]:
        for way in ("forward", "inverse"):
            assert set(row[way]["ns"]) == {"own", "fftw, channels innermost", "fftw, channels outermost"}
    (product,) = result["products"]
    assert {"own", "numpy real, 64 tiles", "in registers"} <= set(product["gflops"])
    assert len(result["layers"]) == 2
    for row in result["layers"]:
        stages = {"forward", "multiply", "inverse"}
        assert set(row["seconds"]) == {"layer", "gather", "scatter", "copy", "numpy copy", *stages}
        assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in row["seconds"].values())
        assert row["of_sum"] > 0
    assert result["header"]["command"].startswith("python stages.py")


@pytest.mark.parametrize("side", [6, 16])
def test_what_is_timed_as_a_transform_is_one(side: int, limits: Any) -> None:
    cube = limits.Cube(side)
    image = np.random.default_rng(20261121).standard_normal(cube.image.shape, np.float32)
    cube.image[...] = image
    cube.run("forward", 2)
    # (x, y, z, re/im, lane) to (z, y, x, lane)
    spectra = (cube.spectra[:, :, :side, 0] + 1j * cube.spectra[:, :, :side, 1]).transpose(2, 1, 0, 3)
    np.testing.assert_allclose(spectra, np.fft.rfftn(image.astype(float), axes=(0, 1, 2)), atol=1e-5 * side**3)
    cube.image[...] = np.nan
    cube.run("inverse", 1)
    np.testing.assert_allclose(cube.image / side**3, image, atol=1e-5)


def test_what_is_timed_as_a_transform_of_fftw_is_one(limits: Any) -> None:
    plan = limits.fftw(6, "forward", innermost=True)
    image = np.random.default_rng(20261121).standard_normal(plan.input_shape).astype(np.float32)
    plan.input_array[...] = image
    plan.execute()
    np.testing.assert_allclose(plan.output_array, np.fft.rfftn(image.astype(float), axes=(0, 1, 2)), atol=1e-4)
