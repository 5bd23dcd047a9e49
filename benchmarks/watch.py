"""A thread that looks at something now and then."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Self

PAUSE = 2e-2  # seconds between two looks


class Watch(ABC):
    """Looks every `pause` seconds while it is open."""

    def __init__(self, pause: float = PAUSE) -> None:
        self._pause, self._ended = pause, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *cause: object) -> None:
        self._ended.set()
        self._thread.join()

    @abstractmethod
    def look(self) -> None:
        """From any thread."""

    def _watch(self) -> None:
        while not self._ended.wait(self._pause):
            self.look()
