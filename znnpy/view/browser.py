"""Run Chromium without a window: it draws with the processor alone, so that no screen and no GPU is needed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from znnpy.errors import MissingExtraError, OutputError

if TYPE_CHECKING:
    from neuroglancer import Viewer

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
WITHOUT_WINDOW = (
    "--headless=new",
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",  # it draws pages of this machine alone
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # nothing is loaded from elsewhere
    "--enable-logging=stderr",
)
SECONDS = 120.0  # within which a page is drawn
LOOK_SECONDS = 0.1
ATTEMPTS = 5  # at a picture of the size that was asked for
CONSOLE = re.compile(r'(?:INFO|WARNING|ERROR):CONSOLE[:(]\d+\)?\] (".*", source: .*)')  # of errors too: INFO

Size = tuple[int, int]  # width and height in pixels


def find_browser() -> str | None:
    """Return the path of Chromium, Chrome or Edge; None if none of them is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def require_browser() -> str:
    """Return the path of a browser; MissingExtraError if none is installed."""
    found = find_browser()
    if found is None:
        raise MissingExtraError(
            f"a screenshot needs Chromium or Chrome, and none of {', '.join(NAMES)} is on the PATH; "
            "install one (`apt-get install chromium`)"
        )
    return found


@dataclass
class Browser:
    """A running browser, and what its pages wrote to the console: texts and errors, each with its source."""

    process: subprocess.Popen[str]
    console: list[str] = field(default_factory=list)

    def listen(self) -> None:
        """Collect the messages of pages until the browser ends."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := CONSOLE.search(line):
                self.console.append(found[1])


@contextmanager
def browsing(url: str, size: Size, words: Sequence[str] = ()) -> Iterator[Browser]:
    """Open a page in a browser without a window, until the context ends.

    MissingExtraError if no browser is installed.
    """
    program = require_browser()
    with tempfile.TemporaryDirectory(prefix="znnpy-browser-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [*_command(program, size, folder), *words, url],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C in a terminal is for znnpy, which then ends the browser
        )
        browser = Browser(process)
        listener = threading.Thread(target=browser.listen, daemon=True)
        listener.start()
        try:
            yield browser
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            listener.join()  # the browser's end closes what it writes to
            assert process.stderr is not None
            process.stderr.close()


def _command(program: str, size: Size, folder: str) -> list[str]:
    # A process of root has no sandbox of its own; the page is one that znnpy made.
    rights = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    return [program, *WITHOUT_WINDOW, *rights, f"--user-data-dir={folder}", f"--window-size={size[0]},{size[1]}"]


def screenshot(viewer: Viewer, size: Size, seconds: float = SECONDS) -> tuple[bytes, tuple[str, ...]]:
    """Return a PNG of what a viewer shows when all of it is loaded, and what the page wrote to the console.

    OutputError if the browser ends, or if nothing is drawn within so many seconds.
    """
    with viewer.config_state.txn() as config:
        config.show_ui_controls = False
        config.show_panel_borders = False
        config.viewer_size = list(size)
    until = time.monotonic() + seconds
    with browsing(viewer.get_viewer_url(), size, ("--remote-debugging-port=0",)) as browser:
        for _ in range(ATTEMPTS):
            drawn = _drawn(viewer, browser, until)
            if (drawn.width, drawn.height) == size:
                return drawn.image, tuple(browser.console)
    raise OutputError(f"the browser draws {drawn.width}x{drawn.height} pixels, and not {size[0]}x{size[1]}; try again")


def _drawn(viewer: Viewer, browser: Browser, until: float) -> Any:
    """Return a screenshot of the viewer."""
    done, found = threading.Event(), []

    def take(state: Any) -> None:
        found.append(state.screenshot)
        done.set()

    viewer.async_screenshot(take)
    while not done.wait(LOOK_SECONDS):
        if browser.process.poll() is not None:
            raise OutputError(f"the browser ended with exit code {browser.process.returncode}; try again")
        if time.monotonic() > until:
            said = f" (it says: {browser.console[-1][:200]})" if browser.console else ""
            raise OutputError(f"the browser has drawn nothing in time{said}; try again, or open the link yourself")
    return found[0]


def page_screenshot(page: Path, picture: Path, size: Size, seconds: float = SECONDS) -> tuple[str, ...]:
    """Save a PNG of a page in a file on this machine; return what it wrote to the console.

    OutputError if nothing is drawn within so many seconds.
    """
    url = page.resolve().as_uri()
    with browsing(url, size, (f"--screenshot={picture}", "--virtual-time-budget=5000")) as browser:
        try:
            browser.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise OutputError(f"the browser has not drawn {page} within {seconds:.0f} s; try again") from None
    if not picture.is_file():
        raise OutputError(f"the browser has not drawn {page}: exit code {browser.process.returncode}; try again")
    return tuple(browser.console)
