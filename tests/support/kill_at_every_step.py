"""Run as a program: replace an output, killed before each step that changes names or files, then go on and look.

    python -m tests.support.kill_at_every_step FOLDER/out.h5
    python -m tests.support.kill_at_every_step FOLDER/out.zarr zarr3 sharded 2

Every run is a process of its own, forked from this one, and dies by `os._exit`, so nothing is tidied up. Prints how
many kills there were. The format, `sharded` and the number of coarser levels may follow the name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.stored_outputs import stored
from znnpy.errors import ResumeError
from znnpy.patches import cover
from znnpy.shapes import Vec3
from znnpy.volume import column_record, registry, store
from znnpy.volume.chunk_writes import ChunkFiles
from znnpy.volume.journal import JournalHeader
from znnpy.volume.location import PREFIXES
from znnpy.volume.output import Mode, Output
from znnpy.volume.registry import FOLDER_SUFFIXES
from znnpy.volume.store import OutputArray, Storage

CHANGES = {"os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate"}
KILLED = 86  # exit code
SIZE: Vec3 = (8, 6, 6)
COLUMNS = cover(SIZE, (4, 6, 6))
STORAGE = Storage()  # what the command names
BYSTANDERS = ("out.old", "out.draft", "partial")  # files that are nobody's business


def main(path: Path) -> None:
    """Kill the first run before its first step, its second, and so on, until it ends; and the runs after it too."""
    store.CHUNK, column_record.SYNC_SECONDS = 6, 0.0
    registry.store_for(path)  # imports libraries once, not in every process
    for name in BYSTANDERS:
        path.with_name(name).write_text("of the user")
    kills = 0
    expect(forked(partial(run, path, "overwrite", generation=0)), 0)
    for step in range(1000):
        code = forked(partial(killed_before, step, partial(run, path, "overwrite", generation=1)))
        again = forked(partial(killed_before, step // 2, partial(go_on, path)))
        kills += (code == KILLED) + (again == KILLED)
        expect(forked(partial(settle, path)), 0)
        if code == 0:
            print(kills)
            return
        assert code == KILLED, (step, code)
    raise AssertionError("the run does not end")


def run(path: Path, mode: Mode, generation: int) -> None:
    """Write, or go on with, the output of `generation`."""
    job = {"generation": generation}
    arrays = (OutputArray((1, *SIZE)),)
    with Output(path, inputs={}, arrays=arrays, dtype=np.dtype("f4"), mode=mode, job=job, storage=STORAGE) as out:
        if out.header is None and not out.finished:
            out.begin(JournalHeader(job, {}, "", "", len(COLUMNS)), {}, [COLUMNS])
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


def settle(path: Path) -> None:
    """Look at what is there, go on to the end, look again, and write the first generation anew for the next kill."""
    look(path, (0, 1))
    go_on(path)
    look(path, (1,))
    assert {item.name for item in path.parent.iterdir()} == {path.name, *BYSTANDERS}
    run(path, "overwrite", generation=0)


def look(path: Path, generations: tuple[int, ...]) -> None:
    """Check that the output is a whole one of either generation; a folder may be away while it is replaced."""
    if len(generations) > 1 and path.suffix in FOLDER_SUFFIXES and not path.exists():
        (old,) = path.parent.glob(f"{path.name}.*.old")
        path = old
    found = stored(path)
    assert any(np.array_equal(found, voxels(generation)[0]) for generation in generations), found
    for level in range(1, STORAGE.multiscale + 1):
        coarse = stored(path, level=level)
        mean = found.astype(np.float64).reshape(4, 2, 3, 2, 3, 2).mean((1, 3, 5))
        np.testing.assert_allclose(coarse, mean if level == 1 else edges(mean), rtol=1e-6, atol=1e-6)


def edges(voxels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return means of 2x2x2 voxels, of fewer at the ends."""
    z, y, x = (range(0, size, 2) for size in voxels.shape)
    return np.array([[[voxels[k : k + 2, j : j + 2, i : i + 2].mean() for i in x] for j in y] for k in z])


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

    def begun(files: ChunkFiles, *given: Any) -> None:
        count()
        start(files, *given)

    pwrite, start = os.pwrite, ChunkFiles.start
    setattr(ChunkFiles, "start", begun)  # noqa: B010 - mypy knows methods better
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
    words = sys.argv[2:]
    levels = next((int(word) for word in words if word.isdecimal()), 0)
    prefix = next((word for word in words if word in PREFIXES), None)
    STORAGE = Storage(prefix, "sharded" in words, levels)
    main(Path(sys.argv[1]))
