"""The lock of an output: an empty file beside it that one run at a time holds, and that it removes at its end."""

from __future__ import annotations

import errno
import fcntl
import os
from io import FileIO
from pathlib import Path

from znnpy.errors import OutputError
from znnpy.files import create_new, is_still, reopen
from znnpy.messages import option

WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)  # errors of file systems without locks


class OutputLockedError(OutputError):
    """Another run holds the lock of an output."""


class OutputLock:
    """A lock that is held from `hold` to `release`. The system releases it when the process ends for any reason."""

    def __init__(self, path: Path, output: Path) -> None:
        """Remember the paths.

        path    of the lock file.
        output  the file that it protects, for messages.
        """
        self._path = path
        self._output = output
        self._file: FileIO | None = None

    def hold(self) -> None:
        """Take the lock, or check that it is still held; take it again if its file was removed in the meantime.

        OutputError if another run holds it, or if the file was not made by a run.
        """
        while self._file is None or not is_still(self._path, self._file.fileno()):
            self.release()
            self._file = self._taken()

    def release(self) -> None:
        """Remove the lock file if it is still ours, and release the lock."""
        if self._file is None:
            return
        with self._file as file:
            self._file = None
            if is_still(self._path, file.fileno()):
                self._path.unlink()

    def _taken(self) -> FileIO:
        """Open the lock file and lock it."""
        created, file = self._opened()
        try:
            if os.fstat(file.fileno()).st_size:
                raise self._foreign("it is not empty, as locks are")
            self._lock(file, created)
        except BaseException:
            file.close()
            raise
        return file

    def _opened(self) -> tuple[bool, FileIO]:
        """Open the lock file; return whether it was created, and the file."""
        while True:
            try:
                return False, reopen(self._path)
            except FileNotFoundError:
                try:
                    return True, create_new(self._path)
                except FileExistsError:
                    continue  # another run created it just now
                except OSError as error:
                    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                        raise
                    raise OutputError(
                        f"cannot create {self._path}, which keeps a second run away: {error.strerror}; "
                        f"give another {option('out')}"
                    ) from error
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
                raise self._foreign(error.strerror) from error

    def _lock(self, file: FileIO, created: bool) -> None:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputLockedError(
                f"another run is writing {self._output} (it holds {self._path}); wait for it, or give another "
                f"{option('out')}"
            ) from None
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
            if not created:  # without locks, the file itself indicates a run
                raise OutputLockedError(
                    f"another run is writing {self._output}, or was killed: this file system has no locks to tell "
                    f"which; remove {self._path} if no run is active, or give another {option('out')}"
                ) from None

    def _foreign(self, why: str | None) -> OutputError:
        return OutputError(
            f"{self._path} is not the lock of a run ({why}), and is left as it is; move it away, or give another "
            f"{option('out')}"
        )
