"""Grey values on another scale than the network expects are noticed, and ordinary volumes are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from znnpy.network import Conv, Network, Normalise
from znnpy.volume.array import ArrayVolume
from znnpy.volume.sample import sample_of

BYTES = Network("for bytes", 1, (Conv((3, 3, 3), 1),), Normalise((130.0,), (33.5,)))


def crop(mean: float = 130.0, std: float = 33.5) -> npt.NDArray[np.uint8]:
    """Grey values as electron microscopes give them."""
    values = np.random.default_rng(1).normal(mean, std, (40, 41, 42))
    return np.clip(values, 0, 255).astype(np.uint8)


def padded() -> npt.NDArray[np.uint8]:
    """Make a volume whose faces are black: only the box in the centre holds tissue."""
    volume = np.zeros((60, 60, 60), np.uint8)
    volume[15:45, 15:45, 15:45] = crop()[:30, :30, :30]
    return volume


def doubts(volume: npt.NDArray[Any], network: Network = BYTES) -> tuple[str, ...]:
    return sample_of(ArrayVolume(volume)).doubts(network)


@pytest.mark.parametrize(
    "volume",
    [
        crop(),
        crop(40.0, 10.0),
        crop(220.0, 12.0),
        padded(),
        np.zeros((20, 20, 20), np.uint8),
        np.full((20, 20, 20), 255, np.uint8),
        crop().astype(np.float32),
        crop().astype(np.uint64),
        np.random.default_rng(2).integers(0, 2, (30, 30, 30), np.uint8) * 255,
    ],
    ids=["usual", "dark", "bright", "padded", "black", "white", "floats", "uint64", "black and white"],
)
def test_ordinary_volumes_are_not_doubted(volume: npt.NDArray[Any]) -> None:
    assert doubts(volume) == ()


@pytest.mark.parametrize(
    ("volume", "asks"),
    [
        (crop().astype(np.float32) / 255, "is the volume scaled to 0..1"),
        (padded().astype(np.float32) / 255, "is the volume scaled to 0..1"),
        (crop().astype(np.uint16) * 256, "does the volume hold 16 bits"),
        (crop().astype(np.uint16) * 16, "does the volume hold 16 bits"),
        (np.random.default_rng(2).integers(0, 2, (30, 30, 30), np.uint64), "does it hold labels"),
        ((crop().astype(np.float32) - 130) / 33.5, "is the volume scaled as"),
        (crop().astype(np.int16) - 1024, "is the volume scaled as"),
    ],
    ids=["0..1", "0..1, padded", "16 bits", "12 bits", "labels", "standardised", "tomography"],
)
def test_another_scale_is_doubted(volume: npt.NDArray[Any], asks: str) -> None:
    (doubt,) = doubts(volume)
    assert asks in doubt
    assert "the network expects about 130 +- 33.5" in doubt
    assert f"the sampled mean of channel 0 is {sampled_mean(volume):.4g}" in doubt


def sampled_mean(volume: npt.NDArray[Any]) -> float:
    (greys,) = sample_of(ArrayVolume(volume)).channels
    assert greys is not None
    return greys.mean


def test_moments_equal_those_of_the_sampled_voxels() -> None:
    """A volume that one box of each place covers is sampled whole, so numpy knows the answer."""
    volume = np.random.default_rng(3).normal(5.0, 2.0, (2, 8, 8, 8))
    volume[1, 3, 4, 5] = np.nan
    first, second = sample_of(ArrayVolume(volume)).channels
    assert first is not None
    assert second is not None
    assert [first.mean, first.std] == pytest.approx([volume[0].mean(), volume[0].std()])
    assert (first.lowest, first.highest) == (volume[0].min(), volume[0].max())
    assert [second.mean, second.std] == pytest.approx([np.nanmean(volume[1]), np.nanstd(volume[1])])


def test_each_channel_is_compared_with_its_own_values() -> None:
    network = Network("two", 2, BYTES.layers, Normalise((130.0, 0.5), (33.5, 0.2)))
    volume = np.stack([crop().astype(np.float32), crop().astype(np.float32)])
    assert ["channel 1" in doubt for doubt in doubts(volume, network)] == [True]


def test_nothing_is_expected_without_normalise() -> None:
    assert doubts(crop(), Network("any", 1, BYTES.layers)) == ()


@pytest.mark.parametrize("largest", [1e200, np.finfo(np.float64).max])
def test_values_near_the_largest_are_doubted_without_overflow(largest: float) -> None:
    volume = np.full((20, 20, 20), largest)
    volume[::2] = -largest / 2
    (doubt,) = doubts(volume)
    assert "is the volume scaled as" in doubt or "16 bits" in doubt


def test_channel_without_finite_voxels_is_not_doubted() -> None:
    assert doubts(np.full((9, 9, 9), np.nan, np.float32)) == ()
