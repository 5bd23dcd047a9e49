"""Networks that are called on arrays compute them in windows, as `znnpy.infer` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import znnpy
from tests.support import normed_unet
from znnpy.errors import ShapeError, VolumeError
from znnpy.kernels.whole import whole
from znnpy.windows.definition import blended
from znnpy.windows.settings import Windows

WINDOW = (8, 8, 12)
WINDOWS = Windows(WINDOW)
GIVEN: dict[str, Any] = {"window": WINDOW, "calibrate": False, "threads": 1, "device": "cpu"}


@pytest.fixture
def net(tmp_path: Path) -> znnpy.TrainedNetwork:
    return znnpy.load_network(normed_unet.written(tmp_path))


@pytest.fixture
def volume(net: znnpy.TrainedNetwork, tmp_path: Path) -> npt.NDArray[np.uint8]:
    found: npt.NDArray[np.uint8] = np.load(tmp_path / "volume.npy")
    return found


def definition(
    net: znnpy.TrainedNetwork, volume: npt.NDArray[np.uint8], windows: Windows = WINDOWS
) -> npt.NDArray[np.float64]:
    """Return the blended maps in float64."""
    mean, std = normed_unet.NORMALISE

    def computed(window: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        (found,) = whole(net.network, net.weights, window.transpose(1, 2, 3, 0))
        return found.transpose(3, 0, 1, 2)

    return blended(((volume.astype(np.float64) - mean) / std)[None], computed, windows)


@pytest.mark.parametrize(
    ("options", "windows"),
    [
        ({}, Windows(WINDOW)),
        ({"overlap": (0.5, 0.25, 0.0), "mirror": "z,x"}, Windows(WINDOW, (0.5, 0.25, 0.0), mirror=(0, 2))),
        ({"blend": "constant", "windows_like": "nnunet"}, Windows(WINDOW, blend="constant", rule="nnunet")),
        ({"window": [8, 32, 40], "sigma": 0.3}, Windows((8, 32, 40), sigma=0.3)),
    ],
)
def test_a_call_equals_the_definition(
    net: znnpy.TrainedNetwork, volume: npt.NDArray[np.uint8], options: dict[str, Any], windows: Windows
) -> None:
    wanted = definition(net, volume, windows)
    found = net(volume, **{**GIVEN, **options})
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


def test_a_session_gives_the_bits_of_a_call(net: znnpy.TrainedNetwork, volume: npt.NDArray[np.uint8]) -> None:
    with net.session(volume.shape, dtype=np.uint8, **GIVEN) as run:
        assert run.output_shape == (3, *volume.shape)
        found = [run(volume), run(volume[::-1])]
    np.testing.assert_array_equal(found[0], net(volume, **GIVEN))
    np.testing.assert_array_equal(found[1], net(volume[::-1], **GIVEN))


@pytest.mark.parametrize("kind", ["labels", "above"])
def test_whole_numbers_are_given_as_uint8(net: znnpy.TrainedNetwork, volume: npt.NDArray[np.uint8], kind: Any) -> None:
    maps = definition(net, volume)
    wanted = maps.argmax(axis=0)[None] if kind == "labels" else maps > 0.1
    threshold = 0.1 if kind == "above" else None
    with net.session(volume.shape, output=kind, threshold=threshold, **GIVEN) as run:
        assert run.output_shape == wanted.shape
        assert run.output_dtype == np.uint8
        out = np.full(run.output_shape, 7, np.uint8)
        assert run(volume, out=out) is out
        with pytest.raises(ShapeError, match=r"`out` is .* float32, and the prediction is .* uint8"):
            run(volume, out=np.empty(run.output_shape, np.float32))
    assert (out != wanted).mean() < 1e-3


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"window": None}, ShapeError, r"give `window`, such as window=\(128, 128, 128\)"),
        ({"window": (8, 7, 12)}, ShapeError, "next larger one is 8x8x12"),
        ({"meaning": "whole"}, ShapeError, "leave out `window`, or meaning='whole'"),
        ({"border": "reflect"}, ShapeError, "leave out `border`"),
        ({"output": "above", "threshold": (0.1, 0.2)}, ShapeError, "2 thresholds for 3 maps"),
        ({"threshold": 0.5}, ShapeError, "`threshold` has no effect on output='maps': leave it out, or give output="),
        ({"output": "labels", "threshold": (0.1, 0.2, 0.3)}, ShapeError, "no effect on output='labels'"),
        ({"output": "above", "threshold": ()}, ValueError, "threshold is a number such as 0.5"),
        ({"window": (8, 8)}, ValueError, r"window is three numbers of voxels .* not \(8, 8\)"),
        ({"overlap": (0.5, 0.5)}, ValueError, "overlap is a share of a window"),
        ({"overlap": 1.0}, ValueError, "each below 1"),
        ({"mirror": "z,t"}, ValueError, "mirror is axes with commas between them"),
    ],
)
def test_refusals(
    net: znnpy.TrainedNetwork,
    volume: npt.NDArray[np.uint8],
    options: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    with pytest.raises(error, match=words) as caught:
        net(volume, **{**GIVEN, **options})
    assert "\n" not in str(caught.value)


def test_voxels_that_are_not_finite_are_refused(net: znnpy.TrainedNetwork, volume: npt.NDArray[np.uint8]) -> None:
    holed = volume.astype(np.float32)
    holed[3, 4, 5] = np.nan
    with pytest.raises(VolumeError, match="NaN or infinite"):
        net(holed, **GIVEN)


def test_networks_without_windows_refuse_their_options() -> None:
    net = znnpy.load_network("fib25_boundary")
    with pytest.raises(ShapeError, match="leave out `overlap`, or give `window`"):
        net(np.zeros((40, 40, 40), np.uint8), overlap=0.5)
