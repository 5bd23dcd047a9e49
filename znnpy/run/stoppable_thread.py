"""Threads of a run that are waited for, also where Ctrl-C comes meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable

from znnpy.errors import ThreadError


class Thread(threading.Thread):
    """A daemon, so that a second Ctrl-C gets out even if it hangs in a read that never returns.

    It says itself when it has ended: of one whose `join` Ctrl-C interrupted, Python before 3.13 says so at once.
    """

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(target=work, name=f"znnpy-{name}", daemon=True)
        self._ended = threading.Event()

    def start(self) -> None:
        """Begin the work; ThreadError when the system refuses another thread."""
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
        """Until it has ended, if it ever began, or so many seconds; whether it has."""
        if self.ident is None:
            return True
        if not self._ended.wait(timeout):
            return False
        self.join()
        return True
