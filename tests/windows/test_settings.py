"""Settings of windows refuse what neither package computes, and describe what decides the result."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.messages import assert_holds
from znnpy.errors import ZnnpyError
from znnpy.windows.settings import Windows


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"size": (8, 0, 8)}, ("8x0x8",)),
        ({"overlap": (0.5, 1.0, 0.5)}, ("1.0",)),
        ({"overlap": (0.5, -0.1, 0.5)}, ("-0.1",)),
        ({"overlap": (float("nan"), 0.5, 0.5)}, ("nan",)),
        ({"blend": "linear"}, ("linear", "constant", "gaussian", "bump")),
        ({"sigma": 0.0}, ("0.0",)),
        ({"sigma": float("inf")}, ("inf",)),
        ({"mirror": (0, 3)}, ("3",)),
        ({"mirror": (1, 0)}, ("(1, 0)",)),
        ({"mirror": (1, 1)}, ("(1, 1)",)),
        ({"rule": "torchio"}, ("torchio", "monai", "nnunet")),
        ({"rule": "nnunet", "overlap": (0.5, 0.9, 0.5)}, ("along y", "8 voxels", "0.9", "0.8 voxels", "0.875")),
    ],
)
def test_unusable_settings_are_refused_with_their_numbers(settings: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(ZnnpyError) as error:
        Windows(**{"size": (8, 8, 8), **settings})
    assert isinstance(error.value, ValueError)
    assert_holds(error.value, *parts)


def test_steps_of_one_voxel_are_accepted() -> None:
    assert Windows((8, 10, 2), (0.875, 0.9, 0.5), rule="nnunet").overlap == (0.875, 0.9, 0.5)


def test_mirrors_are_all_subsets_of_the_axes_with_the_empty_one_first() -> None:
    assert Windows((4, 4, 4)).mirrors == ((),)
    assert Windows((4, 4, 4), mirror=(1,)).mirrors == ((), (1,))
    all_axes = ((), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2))
    assert Windows((4, 4, 4), mirror=(0, 1, 2)).mirrors == all_axes


def test_description_holds_what_decides_the_result() -> None:
    assert Windows((4, 5, 6), (0.5, 0.25, 0.0), "gaussian", 0.2, (0, 2), "nnunet").described == {
        "size": [4, 5, 6],
        "overlap": [0.5, 0.25, 0.0],
        "blend": "gaussian",
        "sigma": 0.2,
        "mirror": [0, 2],
        "rule": "nnunet",
    }


def test_sigma_decides_nothing_without_a_gaussian() -> None:
    assert Windows((4, 5, 6), blend="bump", sigma=0.2).described == Windows((4, 5, 6), blend="bump").described
