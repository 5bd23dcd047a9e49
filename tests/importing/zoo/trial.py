"""Read a network of the zoo by each of its routes, and say what became of it. This module needs PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.importing.zoo.nets import Net, Route
from tests.importing.zoo.routes import differences, made, read
from tests.importing.zoo.table import Entry
from znnpy.admissible import refuse_non_local
from znnpy.errors import NetworkFileError, ShapeError
from znnpy.import_check import ALLOWED
from znnpy.importing.imported import Imported
from znnpy.lattices import context_of, period_along
from znnpy.shapes import text


def tried(net: Net, folder: Path) -> Entry:
    """Return what became of a network. AssertionError: a route gives other values, or another reason than expected."""
    module = made(net)
    verdicts: dict[Route, str] = {}
    whys: list[str] = []
    first: Imported | None = None
    in_window = False
    for route in net.routes:
        found, why = _found(net, module, route, folder)
        whys.append(why)
        if why:
            assert net.refused, f"{net.name} by {route}: {why}"
            assert all(word in why.lower() for word in ("node ", *net.refused)), f"{net.name} by {route}: {why}"
        elif found is not None:
            assert not net.refused, f"{net.name} by {route} is computed, and was to be refused"
            each = differences(found, module, folder)
            assert max(each) <= ALLOWED, f"{net.name} by {route} differs by {each} of the largest value"
            in_window = not found.network.is_local
        verdicts[route] = "refused" if why else "one window" if in_window else "equal"
        first = first or found
    if first is None:
        return Entry(net, verdicts, whys[0])
    network = first.network
    return Entry(
        net,
        verdicts,
        whys[0],
        f"{len(network.layers)}",
        f"{network.parameters:,}",
        text(period_along(network)),
        "" if whys[0] or in_window else _context(first),
    )


def _found(net: Net, module: Any, route: Route, folder: Path) -> tuple[Imported | None, str]:
    """Return the network, if it is read, and why it is refused, if it is."""
    try:
        found = read(net, module, route, folder)
    except NetworkFileError as error:
        return None, str(error).partition("; ")[0]
    return found, _refusal(found)


def _refusal(found: Imported) -> str:
    """Return the first part of the sentence that says why a network has no meaning, or nothing."""
    try:
        refuse_non_local(found.network)
    except ShapeError as error:
        return str(error).partition(", so that")[0]
    return ""


def _context(found: Imported) -> str:
    before, behind = context_of(found.network)
    return text(before) if before == behind else f"{text(before)} and {text(behind)}"
