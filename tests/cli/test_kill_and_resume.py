"""SIGKILL at any moment of a run, of a resumed run and of its end: the output is that of a run that was left alone."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.support.cli import Place
from tests.support.forked_commands import Answer, ForkedRuns
from tests.support.stored_outputs import stored
from znnpy.network import Network
from znnpy.volume.output_names import RUN_ATTRIBUTE
from znnpy.volume.registry import FOLDER_SUFFIXES, store_for

pytestmark = pytest.mark.slow

KILLS_OF_AN_OUTPUT = 4
SUFFIXES = (".h5", ".zarr", ".n5", ".precomputed")
Contents = dict[str, tuple[bytes, int]]
Prediction = tuple[bytes, dict[str, Any]]


def contents(folder: Path) -> Contents:
    """Every file below a folder: its bytes, and the time of its last change in ns."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def prediction(path: Path) -> Prediction:
    """Voxels and attributes, but for the random id of the run."""
    voxels, attributes = stored(path), store_for(path).attributes_of(path)
    plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in attributes.items()}
    del plain[RUN_ATTRIBUTE]
    return voxels.tobytes(), plain


@dataclass(frozen=True)
class Ground:
    """A folder with volume, network and plan, and what a run and an earlier one give there."""

    folder: Path
    runs: ForkedRuns
    expected: dict[str, Prediction]  # by suffix
    earlier: dict[str, Prediction]  # of another job
    seconds: float  # that a run takes
    changes: dict[str, int]  # of files in a run, by suffix
    options: tuple[object, ...] = ()  # of every run

    def copy(self, folder: Path, suffix: str, *, replaces: bool) -> Path:
        """Make `folder` with the files of a user, some of them with names like ours. Returns where the output goes."""
        shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns("out.*", "earlier.*"))
        out = folder / f"out{suffix}"
        for ending in ("old", "0123456789abcdef.draft", "0123456789abcdef.gone"):
            out.with_name(f"{out.name}.{ending}").write_text("a user's")
        out.with_name(f"{out.name}.new").mkdir()
        out.with_name(f"{out.name}.new").joinpath("notes.txt").write_text("a user's")
        if replaces:
            copy = shutil.copytree if suffix in FOLDER_SUFFIXES else shutil.copy2
            copy(self.folder / f"earlier{suffix}", out)
        return out


def arguments(folder: Path, out: Path, *more: object) -> list[object]:
    files = ("--network", folder / "net.yaml", "--plan", folder / "plan.json")
    return ["infer", folder / "volume.h5", *files, "--out", out, *more]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, tiny_network: Callable[..., Network]) -> Iterator[Ground]:
    folder = tmp_path_factory.mktemp("killed")
    place = Place.furnish(folder, tiny_network())
    network = ("--network", folder / "net.yaml", "--device", "cpu", "--patch", "4,8,8", "--threads", "1")
    with ForkedRuns() as runs:

        def run(*arguments: object) -> Answer:
            ended = runs.run(*arguments)
            assert ended.code == 0, ended.stderr
            return ended

        run("plan", *network[1:2], "--volume", place.volume, *network[2:], "--out", folder / "plan.json")
        earlier = [folder / f"earlier{suffix}" for suffix in SUFFIXES]
        for path in earlier:
            run("infer", place.volume, *network, "--out", path, "--roi", "0:12,:,:")
        expected = [folder / f"out{suffix}" for suffix in SUFFIXES]
        ended = [run(*arguments(folder, path)) for path in expected]
        yield Ground(
            folder,
            runs,
            {path.suffix: prediction(path) for path in expected},
            {path.suffix: prediction(path) for path in earlier},
            max(each.seconds for each in ended),
            {path.suffix: each.changes for path, each in zip(expected, ended, strict=True)},
        )


class Case:
    """One output that is killed again and again."""

    def __init__(self, ground: Ground, folder: Path, suffix: str, *, replaces: bool) -> None:
        self.ground, self.folder = ground, folder
        self.out = ground.copy(folder, suffix, replaces=replaces)
        self.users = {
            name: there for name, there in contents(folder).items() if not name.startswith(f"{self.out.name}/")
        }
        self.users.pop(self.out.name, None)
        self.whole = [ground.expected[suffix]] + [ground.earlier[suffix]] * replaces
        self.mode = "--overwrite" if replaces else "--resume"
        self.replaces = replaces

    def run(self, **when: Any) -> bool:
        """Run or go on, and look at all files; whether it was killed before the output was complete."""
        ended = self.ground.runs.run(*arguments(self.folder, self.out, self.mode, *self.ground.options), **when)
        now = contents(self.folder)
        assert {name: now.get(name) for name in self.users} == self.users, "a file of the user's has changed"
        if ended.code == 1:  # it was killed before a column was on record, and what is there is the earlier output
            assert self.replaces
            assert "belongs to another job" in ended.stderr
            self.mode = "--overwrite"
            return self.run(**when)
        assert ended.code in (0, -9), ended.stderr
        self.mode = "--resume"
        if self.out.exists():  # never in part
            assert prediction(self.out) in self.whole
        return ended.code == -9

    def end(self) -> None:
        """Go on to the end; the output is right, and nothing else is left."""
        assert not self.run()
        assert prediction(self.out) == self.ground.expected[self.out.suffix]
        left = {path.name for path in self.folder.iterdir()} - {name.partition("/")[0] for name in self.users}
        assert left == {self.out.name}


def kill(ground: Ground, folder: Path, times: int) -> None:
    """Kill so many runs, over all formats, with and without an output to replace; each output some times at most."""
    rng, kills, number = random.Random(20261123), 0, 0
    each = min(KILLS_OF_AN_OUTPUT, times // len(SUFFIXES))
    while kills < times:
        suffix = SUFFIXES[number % len(SUFFIXES)]
        case = Case(ground, folder / str(number), suffix, replaces=number // len(SUFFIXES) % 2 > 0)
        for _ in range(min(each, times - kills)):
            at_change = rng.random() < 0.5
            change, moment = rng.randint(1, ground.changes[suffix]), rng.uniform(0.1, 1) * ground.seconds
            if not case.run(**({"changes": change} if at_change else {"seconds": moment})):
                break
            kills += 1
        case.end()
        shutil.rmtree(case.folder)
        number += 1
    assert number >= len(SUFFIXES)


def test_output_survives_some_kills(ground: Ground, tmp_path: Path) -> None:
    kill(ground, tmp_path, 8)


def test_masked_output_survives_some_kills(ground: Ground, tmp_path: Path) -> None:
    """Kill masked runs: what is left out is written as zeros, once, by whichever run comes to it."""
    path = ground.folder / "mask.npy"
    with h5py.File(ground.folder / "volume.h5") as file:
        size = file["raw"].shape
    axes = np.meshgrid(*((np.arange(n) + 0.5) / n - 0.5 for n in size), indexing="ij")
    np.save(path, np.asarray(sum(axis**2 for axis in axes) <= 0.3**2, np.uint8))
    expected, changes, seconds = {}, {}, 0.0
    for suffix in SUFFIXES:
        out = tmp_path / f"out{suffix}"
        ended = ground.runs.run(*arguments(ground.folder, out, "--mask", path))
        assert ended.code == 0, ended.stderr
        voxels, _ = expected[suffix] = prediction(out)
        whole, _ = ground.expected[suffix]
        inside = np.frombuffer(voxels, np.float32) != 0
        assert 0 < inside.sum() < 0.5 * inside.size
        np.testing.assert_array_equal(
            np.frombuffer(voxels, np.float32), np.where(inside, np.frombuffer(whole, np.float32), 0)
        )
        changes[suffix], seconds = ended.changes, max(seconds, ended.seconds)
    masked = replace(ground, expected=expected, changes=changes, seconds=seconds, options=("--mask", path))
    kill(masked, tmp_path, 8)


@pytest.mark.long
def test_output_survives_a_hundred_kills(ground: Ground, tmp_path: Path) -> None:
    kill(ground, tmp_path, 100)


@pytest.mark.long
@pytest.mark.parametrize(("suffix", "replaces"), list(zip(SUFFIXES, cycle((False, True)), strict=False)))
def test_output_survives_a_kill_before_each_final_change(
    ground: Ground, tmp_path: Path, suffix: str, replaces: bool
) -> None:
    """Kill runs while the output takes its name and files beside it are removed; kill the runs that go on too."""
    killed = 0
    for change in range(ground.changes[suffix] - 12, ground.changes[suffix] + 8):  # replacing takes some more
        case = Case(ground, tmp_path / str(change), suffix, replaces=replaces)
        killed += case.run(changes=change)
        case.run(changes=1 + change % 5)
        case.end()
    assert killed >= 12
