"""Whatever stands in the place of a value of plans or datasets, the model is read or refused in one sentence."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.nnunet.documents import CONFIGURATION, OLD_ARCHITECTURE, dataset, plans, written
from znnpy.errors import NetworkFileError, ShapeError
from znnpy.nnunet.dataset import read_dataset
from znnpy.nnunet.plans import read_plans
from znnpy.nnunet.unet import unet_of

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 17, 10**5, 10**30, -0.5, 1e-320, 1e308, float("nan"), float("inf"), "", "a\x1b[31m", "1",
    [], [[]], [0], [1, 2, 3], ["a"] * 3, [10**5] * 3, {}, {"a": 1},
)  # fmt: skip


def odd(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield documents in which one value is another, or gone."""
    for path in places(content, ()):
        for value in ODD:
            changed = copy.deepcopy(content)
            holder = changed
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = value
            yield changed
        changed = copy.deepcopy(content)
        holder = changed
        for key in path[:-1]:
            holder = holder[key]
        del holder[path[-1]]
        yield changed


def places(content: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def check(error: Exception) -> None:
    said = str(error)
    assert said.isprintable()
    assert len(said) < 900


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["new", "old"])
def test_plans_with_an_odd_value(architecture: str, tmp_path: Path) -> None:
    content = plans() if architecture == "new" else plans(("CTNormalization",), architecture=None, **OLD_ARCHITECTURE)
    for changed in odd(content):
        try:
            found = read_plans(written(tmp_path, "plans.json", changed), CONFIGURATION, 1)
            with suppress(ShapeError):  # too large, for example
                unet_of(found.architecture, 1, 2, "n")
        except NetworkFileError as error:
            check(error)


def test_datasets_with_an_odd_value(tmp_path: Path) -> None:
    regions = {"background": 0, "whole": [1, 2], "core": [2], "ignore": 3}
    for content in (dataset(2), dataset(1, labels=regions, regions_class_order=[1, 2])):
        for changed in odd(content):
            try:
                read_dataset(written(tmp_path, "dataset.json", changed))
            except NetworkFileError as error:
                check(error)
