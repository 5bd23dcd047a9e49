"""Tests that need a real browser."""

from __future__ import annotations

import pytest

from znnpy.view.browser import NAMES, find_browser

needs_browser = pytest.mark.skipif(
    find_browser() is None, reason=f"no browser is installed: none of {', '.join(NAMES)} is on the PATH"
)
