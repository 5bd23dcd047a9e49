"""Threads of a run that can be waited for even if Ctrl-C interrupts the wait."""

from __future__ import annotations

import threading
from collections.abc import Callable

from znnpy.errors import ThreadError

PREFIX = "znnpy-"  # of the names of all threads that a run has, those of `ThreadPool` too


def is_of_a_run(thread: threading.Thread) -> bool:
    """Return whether a thread belongs to a run, which waits for it."""
    return thread.name.startswith(PREFIX)


class Thread(threading.Thread):
    """A daemon thread, so that a second Ctrl-C ends the process even if the thread hangs in a read.

    The thread notes its end itself: after Ctrl-C interrupted a `join`, Python before 3.13 reports any thread as ended.
    """

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(target=work, name=f"{PREFIX}{name}", daemon=True)
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin the work. ThreadError is raised when the system refuses another thread."""
        try:
            super().start()
        except RuntimeError as error:
            ThreadError.check(error)
            raise

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._ended.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the thread has ended, or for so many seconds; return whether it ended or never began."""
        if self.ident is None:
            return True
        if not self._ended.wait(timeout):
            return False
        self.join()
        return True
