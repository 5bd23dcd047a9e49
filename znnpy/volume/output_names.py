"""Names of the files beside an output, and what a killed run left under them.

    out.h5.partial        what grows, and takes the name of the output when it is complete
    out.h5.journal        begun before anything else of the run, and removed last: it names the run
    out.h5.lock           see `lock.py`
    out.h5.<run>.draft    what becomes `.partial` once it has its full size
    out.h5.<run>.old      an output that is a folder and is being replaced
    out.h5.<run>.gone     a folder that is being removed

`<run>` is the run's id, 16 random hexadecimal digits: nobody else has files of these names. As the journal names the
run before they are made and until they are gone, every run after a kill knows them.
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
FOLDER_SUFFIX = ".zarr"  # of outputs that are folders; all others are files


def new_run() -> str:
    """The id of a new run."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class Names:
    """The names beside the output `out`."""

    out: Path

    @property
    def partial(self) -> Path:
        """The output while it grows."""
        return self._named("partial")

    @property
    def journal(self) -> Path:
        """The path of the output's journal."""
        return journal_path(self.out)

    @property
    def lock(self) -> Path:
        """The path of the output's lock."""
        return self._named("lock")

    def draft(self, run: str) -> Path:
        """The output of a run before it has its full size."""
        return self._named(f"{run}.draft")

    def old(self, run: str) -> Path:
        """The folder that the output of a run replaces."""
        return self._named(f"{run}.old")

    def discard(self, path: Path, run: str) -> None:
        """Remove a file or folder of ours. A folder is renamed first, so that a kill leaves no half of it at `path`."""
        if path.is_dir() and not path.is_symlink():
            gone = self._named(f"{run}.gone")
            path.rename(gone)
            path = gone
        remove(path)

    def recover(self, run: str, *, published: bool) -> None:
        """Bring to an end what a killed run did to names: an output that was about to be replaced is back, or gone.

        published  what has the name of the output is the complete output of that run.

        OutputError where the output that was to be replaced would take a name that something else has now.
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


def check_place(out: Path, inputs: Inputs) -> None:
    """OutputError where no output `out` can be written, or where one of its names is an input's."""
    if not out.parent.is_dir():
        raise OutputError(f"there is no folder {out.parent} to write {out.name} in; create it first")
    names = Names(out)
    for name in (out, names.partial, names.journal, names.lock):
        refuse_inputs(name, inputs)
    if out.is_dir() and out.suffix != FOLDER_SUFFIX:
        raise OutputError(f"the output {out} is a folder; give the name of a file in {option('out')}")
    if out.exists() and not out.is_dir() and not (out.is_file() and out.suffix != FOLDER_SUFFIX):
        kind = "is a file, and a Zarr output is a folder" if out.is_file() else "is neither a file nor a folder"
        raise OutputError(f"the output {out} {kind}; remove it, or give another {option('out')}")


def check_replaced(out: Path) -> None:
    """OutputError where what has the name of an output holds more than one output, so that replacing it loses more."""
    if os.path.ismount(out):
        raise OutputError(f"a file system is mounted at {out}, which cannot be replaced; give another {option('out')}")
    if out.is_dir() and not out.is_symlink() and not is_zarr_array(out) and any(out.iterdir()):
        raise OutputError(
            f"the output {out} is a folder that is no Zarr array, and replacing it would remove all that it holds; "
            f"remove it, or give another {option('out')}"
        )
