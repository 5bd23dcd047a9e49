"""A few whole messages equal those in tests/golden/messages.txt; other tests check classes, names and numbers.

After an intended change: `python -m tests.cli.test_golden_messages > tests/golden/messages.txt`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.cli import Place

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "messages.txt"
GREY = np.zeros((20, 23, 25), np.uint8)


def missing_volume(place: Place) -> str:
    return place.refusal("infer", place.folder / "gone.h5")


def several_datasets(place: Place) -> str:
    place.write_volume(GREY, second=GREY)
    return place.refusal(*place.arguments)


def volume_below_the_field_of_view(place: Place) -> str:
    place.write_volume(GREY[:5])
    return place.refusal(*place.arguments)


def region_outside_the_volume(place: Place) -> str:
    return place.refusal(*place.arguments, "--roi", "0:20,0:23,0:26")


def nan_in_bytes(place: Place) -> str:
    return place.refusal(*place.arguments, "--allow-nan", "--output-dtype", "uint8")


def missing_network(place: Place) -> str:
    return place.refusal("plan", "n377")


def unknown_layer(place: Place) -> str:
    place.write_network(layers=[{"type": "deconv", "kernel": 3, "out": 1}])
    return place.refusal(*place.arguments)


def weights_of_a_wrong_shape(place: Place) -> str:
    place.write_weights(conv0_weight=np.zeros((3, 1, 1, 5, 3), np.float32))
    return place.refusal(*place.arguments)


def weights_beyond_the_limit(place: Place) -> str:
    place.write_network(layers=[{"type": "conv", "kernel": 1, "out": 4096}, {"type": "conv", "kernel": 2, "out": 4096}])
    return place.refusal(*place.arguments, "--ram", "400M")


def existing_output(place: Place) -> str:
    place.out.write_text("precious")
    return place.refusal(*place.arguments)


def foreign_output_to_resume(place: Place) -> str:
    place.out.write_text("precious")
    return place.refusal(*place.arguments, "--resume")


def volume_as_output(place: Place) -> str:
    return place.refusal(*place.arguments[:-1], place.volume, "--overwrite")


def missing_folder_for_the_output(place: Place) -> str:
    return place.refusal(*place.arguments[:-1], place.folder / "gone" / "out.h5")


def missing_plan(place: Place) -> str:
    return place.refusal(*place.arguments, "--plan", place.folder / "gone.json")


def patch_off_the_period(place: Place) -> str:
    return place.refusal(*place.arguments, "--cover", "columns", "--patch", "4,5,5")


MESSAGES: tuple[Callable[[Place], str], ...] = (
    missing_volume,
    several_datasets,
    volume_below_the_field_of_view,
    region_outside_the_volume,
    nan_in_bytes,
    missing_network,
    unknown_layer,
    weights_of_a_wrong_shape,
    weights_beyond_the_limit,
    existing_output,
    foreign_output_to_resume,
    volume_as_output,
    missing_folder_for_the_output,
    missing_plan,
    patch_off_the_period,
)


def line(message: Callable[[Place], str], place: Place) -> str:
    """Return the name of a case and its message, with the place's folder left out."""
    return f"{message.__name__}: {message(place).replace(f'{place.folder}/', '')}"


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_message_equals_the_golden_file(place: Place, message: Callable[[Place], str]) -> None:
    start = f"{message.__name__}: "
    (expected,) = (kept for kept in GOLDEN.read_text().splitlines() if kept.startswith(start))
    assert line(message, place) == expected


if __name__ == "__main__":
    from tests.conftest import TINY
    from znnpy.network import Network

    for each in MESSAGES:
        with tempfile.TemporaryDirectory() as folder:
            print(line(each, Place.furnish(Path(folder), Network("tiny", 1, TINY))))
