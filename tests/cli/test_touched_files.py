"""Commands touch no path but those that they are given to write, those beside them, and the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.audited_command import Touched, touched_by
from tests.support.cli import Place
from znnpy.network import Network

pytestmark = pytest.mark.slow

PATCHES = ("--patch", "4,8,8", "--threads", "1")


@dataclass
class Audited:
    """A place, and what each command that ran there touched."""

    place: Place
    logs: Path
    users: set[Path]
    cache: Path
    done: dict[str, tuple[Touched, list[Path]]] = field(default_factory=dict)

    def run(self, name: str, *arguments: object, writes: list[Path], code: int = 0, kill_at: int = 0) -> None:
        """Run a command that may write these files, and names beside them."""
        folder = self.place.folder
        touched = touched_by(folder, self.logs / name.replace(" ", "-"), *arguments, kill_at=kill_at)
        assert touched.code == code, touched.stderr
        self.done[name] = touched, writes

    def elsewhere(self, name: str, paths: Callable[[Touched], frozenset[Path] | None]) -> set[Path]:
        """Paths that this command touched and had no business with."""
        touched, writes = self.done[name]
        found = paths(touched)
        assert found is not None
        return {path for path in found if path in self.users or not any(_may(path, name) for name in writes)}


def _may(path: Path, written: Path) -> bool:
    """Return whether a command that writes `written` may touch `path`: that, what is in it, or names beside it."""
    beside = path.parent == written.parent and path.name.startswith(f"{written.name}.")
    return path == written or path.is_relative_to(written) or beside or _may_in_folder(path, written)


def _may_in_folder(path: Path, written: Path) -> bool:
    """Return whether `path` is in a folder named `written` plus an ending, such as a partial Zarr array."""
    return any(
        folder.parent == written.parent and folder.name.startswith(f"{written.name}.") for folder in path.parents
    )


def network(place: Place) -> list[object]:
    return ["--network", place.folder / "net.yaml", "--device", "cpu"]


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory, tiny_network: Callable[..., Network]) -> Iterator[Audited]:
    """One command after the other, in a folder with files of a user whose names are like ours."""
    folder = tmp_path_factory.mktemp("audited")
    place = Place.furnish(folder, tiny_network())
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("own") / "cache"
        patch.setenv("XDG_CACHE_HOME", str(cache))
        users = [
            folder / f"out{suffix}.{ending}" for suffix in (".h5", ".zarr") for ending in ("old", "new", "d.draft")
        ]
        for path in users:
            path.write_text("a user's")
        users += [place.volume, folder / "net.yaml", folder / "net.npz"]
        audit = Audited(place, tmp_path_factory.mktemp("logs"), set(users), cache)
        _run_all(audit, folder, cache)
        yield audit


def _run_all(audit: Audited, folder: Path, cache: Path) -> None:
    place, given = audit.place, network(audit.place)
    plan, trace, timeline = folder / "plan.json", folder / "trace.json", folder / "timeline.png"
    demo = folder / "demo"
    audit.run(
        "plan", "plan", given[1], "--volume", place.volume, *given[2:], *PATCHES, "--out", plan, writes=[plan, cache]
    )
    for suffix in (".h5", ".zarr"):
        out = folder / f"out{suffix}"
        infer: list[object] = ["infer", place.volume, *given[:2], "--plan", plan, "--out", out]
        audit.run(f"infer {suffix}", *infer, "--trace", trace, "--overwrite", writes=[out, trace, cache])
        audit.run(f"overwrite {suffix}", *infer, "--overwrite", writes=[out, cache])
        audit.run(f"killed {suffix}", *infer, "--overwrite", writes=[out, cache], kill_at=12, code=-9)
        audit.run(f"resume {suffix}", *infer, "--resume", writes=[out, cache])
        audit.run(f"refused {suffix}", *infer, writes=[out], code=1)
        audit.run(f"verify {suffix}", "verify", out, place.volume, *given[:2], "--samples", 5, writes=[])
    audit.run(
        "timeline", "timeline", trace, "--out", timeline, writes=[timeline, cache]
    )  # Matplotlib keeps its list of fonts
    audit.run("demo", "demo", "--folder", demo, "--size", 32, writes=[demo, cache])


COMMANDS = ["plan", "timeline", "demo"]
COMMANDS += [
    f"{word} {suffix}"
    for word in ("infer", "overwrite", "killed", "resume", "refused", "verify")
    for suffix in (".h5", ".zarr")
]


@pytest.mark.parametrize("name", COMMANDS)
def test_python_audit_reports_only_allowed_paths(audited: Audited, name: str) -> None:
    assert audited.elsewhere(name, lambda touched: touched.told) == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_system_calls_name_only_allowed_paths(audited: Audited, name: str) -> None:
    if audited.done[name][0].asked is None:
        pytest.skip("strace is not installed, or may not trace processes here")
    assert audited.elsewhere(name, lambda touched: touched.asked) == set()


def test_audit_sees_every_written_file(audited: Audited) -> None:
    """Python's audit reports the files of a run, and strace reports at least those."""
    touched, (out, trace, *_) = audited.done["infer .h5"]
    seen = {path.name for path in touched.told}
    assert {"out.h5.partial", "out.h5.journal", "out.h5.lock", trace.name} <= seen
    assert touched.asked is None or touched.told <= touched.asked | {out}


def test_users_files_are_unchanged(audited: Audited) -> None:
    left = {path.name for path in audited.place.folder.iterdir()} - {path.name for path in audited.users}
    assert left == {"plan.json", "trace.json", "timeline.png", "demo", "out.h5", "out.zarr"}
    assert all(path.read_text() == "a user's" for path in audited.users if path.suffix not in (".yaml", ".npz", ".h5"))


@pytest.mark.long
def test_measure_writes_its_cost_file_and_the_cache(audited: Audited, tmp_path: Path) -> None:
    """Costs go to the file that is named, and what FFTW learns meanwhile into the cache."""
    costs = tmp_path / "costs.json"
    audited.run("measure", "measure", "--device", "cpu", "--out", costs, writes=[costs, audited.cache])
    for paths in (lambda touched: touched.told, lambda touched: touched.asked or frozenset()):
        assert audited.elsewhere("measure", paths) == set()
