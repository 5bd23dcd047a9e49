"""Run as a program: replace an output, killed before each step that changes names or files, then go on and look.

    python -m tests.support.kill_at_every_step FOLDER/out.h5

Every run is a process of its own, forked from this one, and dies by `os._exit`, so nothing is tidied up. Prints how
many kills there were.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.support.other_libraries import read_elsewhere
from znnpy.errors import ResumeError
from znnpy.patches import cover
from znnpy.shapes import Vec3
from znnpy.volume import output, registry, store
from znnpy.volume.journal import JournalHeader
from znnpy.volume.output import Mode, Output
from znnpy.volume.output_names import FOLDER_SUFFIX
from znnpy.volume.store import OutputArray

CHANGES = {"os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate"}
KILLED = 86  # exit code
SIZE: Vec3 = (8, 6, 6)
COLUMNS = cover(SIZE, (4, 6, 6))
BYSTANDERS = ("out.old", "out.draft", "partial")  # files that are nobody's business


def main(path: Path) -> None:
    """Kill the first run before its first step, its second, and so on, until it ends; and the runs after it too."""
    store.CHUNK, output.SYNC_SECONDS = 6, 0.0
    registry.store_for(path)  # imports libraries once, not in every process
    for name in BYSTANDERS:
        path.with_name(name).write_text("of the user")
    kills = 0
    for step in range(1000):
        expect(forked(partial(run, path, "overwrite", generation=0)), 0)
        code = forked(partial(killed_before, step, partial(run, path, "overwrite", generation=1)))
        again = forked(partial(killed_before, step // 2, partial(go_on, path)))
        kills += (code == KILLED) + (again == KILLED)
        expect(forked(partial(look, path, (0, 1))), 0)
        expect(forked(partial(go_on, path)), 0)
        expect(forked(partial(look, path, (1,))), 0)
        assert {item.name for item in path.parent.iterdir()} == {path.name, *BYSTANDERS}, step
        if code == 0:
            print(kills)
            return
        assert code == KILLED, (step, code)
    raise AssertionError("the run does not end")


def run(path: Path, mode: Mode, generation: int) -> None:
    """Write, or go on with, the output of `generation`."""
    job = {"generation": generation}
    with Output(path, inputs={}, arrays=(OutputArray((1, *SIZE)),), dtype=np.dtype("f4"), mode=mode, job=job) as out:
        if out.header is None and not out.finished:
            out.begin(JournalHeader(job, {}, "", "", len(COLUMNS)), {})
        for index, column in enumerate(COLUMNS):
            if not out.finished and index not in out.done:
                for step in column.steps:
                    out.write(step.write, voxels(generation)[(slice(None), *step.write.slices)])
                out.finish_column(index)
        out.complete()


def go_on(path: Path) -> None:
    """Do as a user does after a kill: resume, or start again if the new output was not begun."""
    try:
        run(path, "resume", generation=1)
    except ResumeError as error:
        if "generation was 0 and is 1 now" not in str(error):
            raise
        run(path, "overwrite", generation=1)


def look(path: Path, generations: tuple[int, ...]) -> None:
    """Check that the output is a whole one of either generation; a folder may be away while it is replaced."""
    if len(generations) > 1 and path.suffix == FOLDER_SUFFIX and not path.exists():
        (old,) = path.parent.glob(f"{path.name}.*.old")
        path = old
    found = read_elsewhere(path)
    assert any(np.array_equal(found, voxels(generation)[0]) for generation in generations), found


def voxels(generation: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(generation).standard_normal((1, *SIZE)).astype(np.float32)


def killed_before(step: int, work: Callable[[], None]) -> None:
    """Do the work, and die before its change number `step`, counted from 0: of a name, or what is brought to disk."""
    left = [step]

    def count() -> None:
        if not left[0]:
            os._exit(KILLED)
        left[0] -= 1

    def heard(event: str, arguments: tuple[object, ...]) -> None:
        if event in CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT):
            count()

    def written(descriptor: int, voxels: memoryview, at: int) -> int:
        count()
        return pwrite(descriptor, voxels, at)

    pwrite = os.pwrite
    setattr(os, "pwrite", written)  # noqa: B010 - its parameters have no names
    sys.addaudithook(heard)
    work()


def forked(work: Callable[[], None]) -> int:
    """Do it in a process of its own: its exit code."""
    child = os.fork()
    if not child:
        code = 1
        setattr(os, "fsync", lambda descriptor: None)  # noqa: B010 - a killed process loses nothing that it wrote
        try:
            work()
            code = 0
        finally:
            sys.stderr.flush()
            if code:
                sys.excepthook(*sys.exc_info())
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def expect(found: int, code: int) -> None:
    assert found == code, found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
