"""The tree of errors that znnpy raises for unusable files, sizes, memory and values.

ZnnpyError
├── ShapeError           sizes, maps or layers do not fit each other (also a ValueError)
├── NetworkFileError     a network or weights file cannot be read or does not fit (also a ValueError)
├── VolumeError          the input volume cannot be used as it is (also a ValueError)
├── OutputError          the output cannot be written, or may not be (also an OSError)
├── ResumeError          the files on disk were written by another job (also a ValueError)
├── PlanFileError        a plan or cost file is damaged, foreign, or does not fit this machine (also a ValueError)
├── NoPlanError          no patch size and primitives fit the limits (also a MemoryError)
├── ValuesOverflowError  a layer's result is infinite or not a number (also an OverflowError)
├── VerifyError          sampled voxels differ from the definition by more than allowed (also an ArithmeticError)
├── DeviceError          there is no GPU to use, or it refused a call (also a RuntimeError)
│   └── VramError        it refused memory (also a MemoryError)
├── ThreadError          the system refuses to start a thread (also a RuntimeError)
└── MissingExtraError    an optional package is needed for this (also an ImportError)

Each message says what happened, with numbers, and what to do. Inner code raises the cause; a caller that knows more
(which layer, which patch) adds it with `with_context`.

Invalid arguments (border="x", ram="12Q", threads=0) raise a plain ValueError or TypeError.

Stopped is not an error: it unwinds worker threads after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

from typing import Self

from znnpy.messages import option


class ZnnpyError(Exception):
    """The base class of znnpy's errors. The command line turns it into one sentence and exit code 1."""

    def with_context(self, context: str) -> Self:
        """Return the same error with `context: ` in front, for a caller that knows where it happened."""
        return type(self)(f"{context}: {self}")


class ShapeError(ZnnpyError, ValueError):
    """Sizes, maps or layers do not fit each other."""


class NetworkFileError(ZnnpyError, ValueError):
    """A network or weights file cannot be read, or its parts do not fit each other."""


class VolumeError(ZnnpyError, ValueError):
    """The input volume cannot be used as it is."""


class OutputError(ZnnpyError, OSError):
    """The output cannot be written, or may not be."""


class ResumeError(ZnnpyError, ValueError):
    """The files on disk were written by another job, so they cannot be continued."""


class PlanFileError(ZnnpyError, ValueError):
    """A plan or cost file is damaged, belongs to something else, or needs what this machine lacks."""


class NoPlanError(ZnnpyError, MemoryError):
    """No patch size and primitives fit the limits."""

    needed_bytes: int | None = None  # smallest sufficient memory of the device that runs the layers, if known
    needs: tuple[int, int] | None = None  # smallest sufficient bytes of RAM and of VRAM, if known


class ValuesOverflowError(ZnnpyError, OverflowError):
    """A layer's result is infinite or not a number although its input was finite."""


class VerifyError(ZnnpyError, ArithmeticError):
    """Sampled voxels differ from the float64 definition by more than allowed."""


class DeviceError(ZnnpyError, RuntimeError):
    """There is no GPU to use, or it refused a call: the message names the call, its code and the bytes."""


class VramError(DeviceError, MemoryError):
    """The GPU refused memory: the message names the bytes asked for and those that are free."""


class DeviceLostError(ZnnpyError, RuntimeError):
    """A GPU no longer runs anything in this process; the message holds its first error."""


class ThreadError(ZnnpyError, RuntimeError):
    """The system refuses to start another thread: a limit on processes or on address space is reached."""

    REFUSED = "can't start new thread"  # message of Python's RuntimeError

    @classmethod
    def check(cls, error: Exception) -> None:
        """Raise ThreadError if `error`, of any library, says that a thread was refused."""
        if str(error) == cls.REFUSED:
            raise cls.refused() from error

    @classmethod
    def refused(cls) -> Self:
        """Make the error, with advice on what to do."""
        return cls(
            "the system refuses to start another thread, because a limit on processes or on address space is reached; "
            f"raise it (`ulimit -u`, `ulimit -v`), or give a smaller {option('threads')}"
        )


class ClusterError(ZnnpyError, RuntimeError):
    """Workers of a cluster cannot be reached, or could not compute a part of the output."""


class MissingExtraError(ZnnpyError, ImportError):
    """An optional package is needed for this; the message says which and how to install it."""


class Stopped(BaseException):
    """Unwinds worker threads after a run was stopped."""
