"""Public functions describe each of their parameters, and public objects fit a screen when they are printed."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import znnpy

FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(znnpy, name) for name in znnpy.__all__ if inspect.isfunction(getattr(znnpy, name))},
    "TrainedNetwork.__call__": znnpy.TrainedNetwork.__call__,
    "TrainedNetwork.session": znnpy.TrainedNetwork.session,
    "ArraySession.__call__": znnpy.ArraySession.__call__,
}
OPERATIONS = {name: getattr(znnpy.ops, name) for name in znnpy.ops.__all__}


def described(name: str, docstring: str) -> bool:
    """Return whether a line of the docstring begins with the parameter, or a sentence has it in backticks."""
    return re.search(rf"^ *{name}\b|`{name}`", docstring, re.MULTILINE) is not None


def missing(function: Callable[..., Any], also: str = "") -> list[str]:
    docstring = (inspect.getdoc(function) or "") + also
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    return [name for name in names if not described(name, docstring)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_is_described(name: str) -> None:
    assert missing(FUNCTIONS[name]) == []


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_parameter_of_an_operation_is_described(name: str) -> None:
    assert missing(OPERATIONS[name], also=znnpy.ops.__doc__ or "") == []


def test_every_field_of_an_event_is_described() -> None:
    names = [field.name for field in dataclasses.fields(znnpy.Event)]
    assert [name for name in names if not described(name, inspect.getdoc(znnpy.Event) or "")] == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_fit_a_screen(name: str) -> None:
    assert len(str(inspect.signature(FUNCTIONS[name]))) <= 22 * 80  # characters of a usual terminal


def test_modules_of_operations_list_operations_only() -> None:
    assert set(dir(znnpy.ops)) == set(OPERATIONS)


def test_networks_plans_and_reports_print_in_a_few_lines(tmp_path: Path) -> None:
    network = znnpy.load_network("fib25_boundary")
    np.save(tmp_path / "volume.npy", np.full((30, 31, 32), 128, np.uint8))
    report = znnpy.infer(tmp_path / "volume.npy", out=tmp_path / "out.h5", device="cpu")
    for thing in (network, network.network, network.weights, report.plan, report):
        assert len(repr(thing)) <= 5 * 80, repr(thing)
        assert repr(thing).isprintable()
    assert str(report).splitlines() == report.lines()


def test_control_characters_in_names_are_escaped_when_printed() -> None:
    hostile = znnpy.Network("\x1b[31m" * 1000, 1, (znnpy.Pool((2, 2, 2)),))
    assert len(repr(hostile)) <= 200
    assert repr(hostile).isprintable()
