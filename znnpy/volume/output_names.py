"""The names of the files beside an output, and the removal of what a killed run left there.

    out.h5.partial        the unfinished output, which takes the name of the output when it is complete
    out.h5.journal        created before all other files of the run, and removed last: it names the run
    out.h5.lock           the lock, see `lock.py`
    out.h5.<run>.draft    the output before it has its full size and becomes `.partial`
    out.h5.<run>.old      a folder with an earlier output that is being replaced
    out.h5.<run>.gone     a folder that is being removed

`<run>` is the run's id, 16 random hexadecimal digits, so no other program uses these names. The journal names the run
before these files are made and until they are removed, so a run after a kill finds them.
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from znnpy.errors import OutputError
from znnpy.files import Inputs, is_zarr_array, refuse_inputs, remove
from znnpy.messages import option
from znnpy.volume.journal import journal_path

RUN = re.compile(r"[0-9a-f]{16}")
RUN_ATTRIBUTE = "znnpy_run"  # the id of the run that made an output
OUTPUTS = "outputs"  # group with the arrays of the outputs of a network that has several
# Names in the folder of an output: metadata, the outputs of a network that has several, and the folders of arrays.
_OF_OUTPUT = re.compile(
    r"zarr\.json|\.zgroup|\.zattrs|attributes\.json|znnpy\.json|info|s?\d\d?|[\d.e+-]+_[\d.e+-]+_[\d.e+-]+|" + OUTPUTS
)


def new_run() -> str:
    """Return the id of a new run."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class Names:
    """The names beside the output `out`."""

    out: Path

    @property
    def partial(self) -> Path:
        """Path of the unfinished output."""
        return self._named("partial")

    @property
    def journal(self) -> Path:
        """Path of the output's journal."""
        return journal_path(self.out)

    @property
    def lock(self) -> Path:
        """Path of the output's lock."""
        return self._named("lock")

    def draft(self, run: str) -> Path:
        """Return the path of a run's output before it has its full size."""
        return self._named(f"{run}.draft")

    def old(self, run: str) -> Path:
        """Return the path of the folder that the output of a run replaces."""
        return self._named(f"{run}.old")

    def discard(self, path: Path, run: str) -> None:
        """Remove a file or folder. A folder is renamed first, so that a kill leaves no part of it at `path`."""
        if path.is_dir() and not path.is_symlink():
            gone = self._named(f"{run}.gone")
            path.rename(gone)
            path = gone
        remove(path)

    def recover(self, run: str, *, published: bool) -> None:
        """Finish the renaming that a killed run began: restore an output that was being replaced, or remove it.

        published  `out` is the complete output of that run.

        OutputError if the output that was being replaced would take a name that something else has now.
        """
        remove(self._named(f"{run}.gone"))
        remove(self.draft(run))
        old = self.old(run)
        if published and os.path.lexists(self.partial) and self.partial.samefile(self.out):
            self.partial.unlink()  # an HDF5 file has both names for a moment
        if not os.path.lexists(old):
            return
        if published:
            self.discard(old, run)
        elif not os.path.lexists(self.out):
            old.rename(self.out)
        else:
            raise OutputError(
                f"{old} is the earlier output, moved there by a run that was killed, and {self.out} is something else; "
                f"move one of them away, or give another {option('out')}"
            )

    def _named(self, ending: str) -> Path:
        return self.out.with_name(f"{self.out.name}.{ending}")


def check_place(out: Path, inputs: Inputs, *, folder: bool) -> None:
    """Raise OutputError if `out` cannot be written, or if one of its names is that of an input.

    folder  whether the output will be a folder
    """
    if not out.parent.is_dir():
        raise OutputError(f"there is no folder {out.parent} to write {out.name} in; create it first")
    names = Names(out)
    for name in (out, names.partial, names.journal, names.lock):
        refuse_inputs(name, inputs)
    if out.is_dir() and not folder:
        raise OutputError(f"the output {out} is a folder; give the name of a file in {option('out')}")
    if out.exists() and not out.is_dir() and not (out.is_file() and not folder):
        kind = "is a file, and the output is to be a folder" if out.is_file() else "is neither a file nor a folder"
        raise OutputError(f"the output {out} {kind}; remove it, or give another {option('out')}")


def check_replaced(out: Path, run: str | None) -> None:
    """Raise OutputError if replacing `out` would remove more than one output.

    run  id of the run that made it; None: no run did
    """
    if os.path.ismount(out):
        raise OutputError(f"a file system is mounted at {out}, which cannot be replaced; give another {option('out')}")
    if out.is_dir() and not out.is_symlink() and not is_zarr_array(out) and not _holds_one(out, run):
        raise OutputError(
            f"the output {out} is a folder that is not an output or a Zarr array, and replacing it would remove all "
            f"that it holds; remove it, or give another {option('out')}"
        )


def _holds_one(folder: Path, run: str | None) -> bool:
    """Return whether a folder is empty, or holds nothing but what a run made."""
    inside = [entry.name for entry in folder.iterdir()]
    return not inside or (run is not None and all(map(is_of_output, inside)))


def is_of_output(name: str) -> bool:
    """Return whether a file or folder in the folder of an output has a name that outputs give."""
    return _OF_OUTPUT.fullmatch(name) is not None
