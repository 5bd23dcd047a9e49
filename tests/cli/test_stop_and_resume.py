"""Real processes stopped by real signals, then resumed: the data equal an uninterrupted run's in every byte."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
import pytest

from tests.support.cli import Place
from znnpy.network import Network

pytestmark = pytest.mark.slow

Bits = npt.NDArray[np.uint32]

PROGRAM = Path(sys.executable).with_name("znnpy")
SLOW = ("--patch", "2,2,2", "--threads", "1")  # thousands of patches: seconds of work to interrupt


def furnish(folder: Path, network: Network) -> Place:
    """Write a volume that takes seconds in tiny patches."""
    place = Place.furnish(folder, network)
    place.write_volume(np.random.default_rng(11).integers(0, 256, (45, 43, 41), np.uint8))
    return place


@pytest.fixture
def slow(tmp_path: Path, tiny_network: Callable[..., Network]) -> Place:
    return furnish(tmp_path, tiny_network())


def start(place: Place, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [PROGRAM, *place.arguments, *SLOW, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        preexec_fn=_heed_interrupts,
    )


def _heed_interrupts() -> None:
    """Restore SIGINT: a shell starts background jobs, and so perhaps pytest, with it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_until_recorded(place: Place, process: subprocess.Popen[str], lines: int = 2) -> int:
    """Wait until the journal has more than `lines` lines, and return how many it has."""
    journal = place.out.with_name("out.h5.journal")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if journal.exists() and (found := journal.read_bytes().count(b"\n")) > lines:
            return found
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError("no column was recorded within a minute")


def finish(place: Place, *arguments: str) -> str:
    """Resume to the end; what it printed."""
    process = start(place, "--resume", *arguments)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    return stdout


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, tiny_network: Callable[..., Network]) -> Bits:
    """Return the prediction of an uninterrupted run."""
    place = furnish(tmp_path_factory.mktemp("uninterrupted"), tiny_network())
    finish(place)
    return bits(place)


def bits(place: Place) -> Bits:
    prediction: Bits = place.prediction().view(np.uint32)
    return prediction


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        pytest.param(signal.SIGTERM, 143, "stopped by SIGTERM; ", marks=pytest.mark.long),
        (signal.SIGINT, 130, "interrupted; "),
    ],
    ids=["SIGTERM", "SIGINT"],
)
def test_stopped_run_keeps_finished_columns(slow: Place, expected: Bits, number: int, code: int, said: str) -> None:
    process = start(slow)
    wait_until_recorded(slow, process)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=30)
    assert process.returncode == code
    assert stdout == ""
    assert stderr.splitlines()[-1].startswith(said)
    assert "--resume" in stderr
    assert "Traceback" not in stderr
    assert not slow.out.exists()
    assert "an unfinished run left" in slow.refusal(*slow.arguments)
    assert "of them in this run" in finish(slow)
    np.testing.assert_array_equal(bits(slow), expected)


def test_killed_run_resumes_byte_for_byte(slow: Place, expected: Bits) -> None:
    rng = np.random.default_rng(5)
    partial = slow.out.with_name("out.h5.partial")
    kills = 0
    for _ in range(4):
        process = start(slow, "--resume")
        time.sleep(float(rng.uniform(0.6, 2.5)))
        process.kill()
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        if partial.exists():
            with h5py.File(partial) as file:
                assert file["prediction"].shape == expected.shape
    assert kills
    finish(slow)
    np.testing.assert_array_equal(bits(slow), expected)
    assert {path.name for path in slow.folder.iterdir()} == {"volume.h5", "net.yaml", "net.npz", "out.h5"}


def test_run_killed_within_a_column_resumes_byte_for_byte(slow: Place) -> None:
    """A column that was not finished is computed again from its first step."""
    columns = ("--cover", "columns", "--patch", "2,4,4", "--threads", "1")  # 100 columns of 20 steps
    lines = 2
    for _ in range(2):
        process = start(slow, "--resume", *columns)
        lines = wait_until_recorded(slow, process, lines)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    process = start(slow, "--resume", "--json", *columns)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    report = json.loads(stdout)
    assert report["column"] > 4
    assert 0 < report["computed"] < report["voxels"]
    resumed = bits(slow)
    assert slow.infer("--overwrite", *columns).exit_code == 0
    np.testing.assert_array_equal(bits(slow), resumed)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names kernels of x86 processors")
def test_resumed_run_uses_the_blas_kernels_of_its_start(slow: Place) -> None:
    process = start(slow, OPENBLAS_CORETYPE="Nehalem")
    wait_until_recorded(slow, process)
    process.kill()
    process.communicate()
    assert "BLAS kernels openblas Nehalem" in finish(slow)


def test_resume_after_the_volume_changed_is_refused(slow: Place) -> None:
    process = start(slow)
    wait_until_recorded(slow, process)
    process.terminate()
    process.communicate()
    with h5py.File(slow.volume, "r+") as file:
        file["raw"][0, 0, 0] += 1
    sentence = slow.refusal(*slow.arguments, *SLOW, "--resume")
    assert "belongs to another job: volume." in sentence
