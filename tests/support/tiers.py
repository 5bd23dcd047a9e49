"""Leave cases of a long list of parameters to the long tier."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases of a parametrized test, of which one in `count` runs always; the others are marked `long`.

    A case is a value that is no tuple, or a plain tuple of the values of several parameters.
    """
    found = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=[pytest.mark.long] if number % count else []))
    return found
