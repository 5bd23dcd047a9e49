"""A type checker knows the public names: it refuses wrong programs and passes a right one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

RIGHT = """
from pathlib import Path
from typing import assert_type

import numpy as np
import numpy.typing as npt

import znnpy


def watch(event: znnpy.Event) -> None:
    print(event.voxels_done / event.voxels, event.stage_seconds["reading"])


def predict(volume: Path, array: npt.NDArray[np.uint8]) -> znnpy.Report:
    plan = znnpy.plan("fib25_boundary", shape=(256, 256, 256), ram="2G")
    assert_type(plan, znnpy.RunPlan)
    network = znnpy.load_network("fib25_boundary")
    assert_type(network, znnpy.TrainedNetwork)
    assert_type(network(array), npt.NDArray[np.float32])
    layer = znnpy.MaxoutShape(1, 4, (8, 8, 8), 2)
    shapes: list[znnpy.ConvShape | znnpy.PoolShape | znnpy.FilterShape | znnpy.MaxoutShape] = [layer]
    print(shapes, znnpy.ops.relu(np.ones((1, 2, 3, 4, 5), np.float32)), znnpy.primitive("cpu.conv.direct").summary)
    try:
        return znnpy.infer(volume, out="prediction.h5", plan=plan, progress=watch)
    except znnpy.NoPlanError as error:
        print(error.needed_bytes)
        raise
"""

WRONG = {
    "a parameter that there is not": (
        'import znnpy\nznnpy.infer("volume.h5", outt="prediction.h5")\n',
        'Unexpected keyword argument "outt" for "infer"',
    ),
    "a result taken for another type": (
        'import znnpy\nplan = znnpy.plan("n337")\nspeed: str = plan.voxels_per_second\n',
        r'expression has type "float", variable has type "str"',
    ),
    "a name that there is not": ("import znnpy\nprint(znnpy.nonsense)\n", "Module has no attribute"),
    "a callback that takes something else": (
        'import znnpy\n\n\ndef watch(done: str) -> None: ...\n\n\nznnpy.infer("volume.h5", progress=watch)\n',
        'Argument "progress" to "infer" has incompatible type',
    ),
}


@pytest.fixture(scope="module")
def checked(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Run mypy once on all programs and return its output."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "right.py").write_text(RIGHT)
    for number, (program, _) in enumerate(WRONG.values()):
        (folder / f"wrong{number}.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *sorted(map(str, folder.glob("*.py")))],
        capture_output=True,
        text=True,
        check=False,
        cwd=repository,
        env={**os.environ, "MYPYPATH": str(repository)},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_correct_program_passes(checked: str) -> None:
    assert "right.py" not in checked


@pytest.mark.parametrize("number", range(len(WRONG)), ids=list(WRONG))
def test_wrong_program_is_refused(number: int, checked: str) -> None:
    _, error = list(WRONG.values())[number]
    said = [line for line in checked.splitlines() if f"wrong{number}.py" in line]
    assert any(re.search(error, line) for line in said), checked
