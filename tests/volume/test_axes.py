"""Stored axes with names become (c, z, y, x)."""

from __future__ import annotations

import numpy as np
import pytest

from znnpy.errors import VolumeError
from znnpy.patches import Box
from znnpy.volume.axes import arranged

SIZES = {"t": 3, "c": 2, "z": 5, "y": 6, "x": 7, "s": 1}


@pytest.mark.parametrize("names", ["zyx", "xyz", "czyx", "tczyx", "xyzct", "yx", "yxc", "tzcyx", "zyxs", "xtsyzc"])
def test_a_box_is_read_in_the_order_of_a_volume(names: str) -> None:
    stored = np.random.default_rng(1).integers(0, 100, [SIZES[name] for name in names])
    one = arranged(tuple(names), stored.shape, 1 if "t" in names else None, "v")
    picked = stored[tuple(1 if name == "t" else slice(None) for name in names)]
    rest = [name for name in names if name != "t"]
    if "s" in rest:
        picked, rest = picked.squeeze(rest.index("s")), [name for name in rest if name != "s"]
    whole = picked.transpose([rest.index(name) for name in "czyx" if name in rest])
    whole = whole.reshape([SIZES[name] if name in rest else 1 for name in "czyx"])
    assert one.shape == whole.shape
    box = Box((0, 1, 2), (one.shape[1], 4, 7)) if one.shape[1] == 1 else Box((1, 1, 2), (4, 4, 7))
    out = np.full((one.shape[0], *box.size), -1)
    one.view(out)[...] = stored[one.region(box).slices]
    assert np.array_equal(out, whole[(slice(None), *box.slices)])


@pytest.mark.parametrize(
    ("names", "shape", "time", "why"),
    [
        ("tzyx", (3, 4, 5, 6), None, "has 3 points of time; choose one"),
        ("tzyx", (3, 4, 5, 6), 3, "from 0 to 2, and no 3"),
        ("zyx", (4, 5, 6), 0, "has no points of time"),
        ("zyq", (4, 5, 6), None, "a volume has z, y and x"),
        ("qzyx", (2, 4, 5, 6), None, "an axis 'q' of length 2"),
        ("zzyx", (2, 4, 5, 6), None, "two axes of one name"),
        ("zyx", (2, 4, 5, 6), None, "has 4 axes, and its metadata name 3"),
    ],
)
def test_axes_that_are_no_volume_are_refused(names: str, shape: tuple[int, ...], time: int | None, why: str) -> None:
    with pytest.raises(VolumeError, match=why):
        arranged(tuple(names), shape, time, "v")
