"""Windows, weights and averages equal MONAI's own."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from znnpy.option_values import Blend
from znnpy.shapes import Vec3
from znnpy.windows.definition import blended
from znnpy.windows.grid import WindowGrid
from znnpy.windows.settings import Windows
from znnpy.windows.weights import total_weights, window_weights

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

OVERLAPS = (0.0, 0.1, 0.25, 0.5, 0.6, 0.75, 0.8, 0.9)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_positions_equal_dense_patch_slices(overlap: float) -> None:
    from monai.data.utils import dense_patch_slices
    from monai.inferers.utils import _get_scan_interval

    for length, size in product(range(1, 60, 2), range(1, 30)):
        windows = Windows((size, 2, 3), (overlap, 0.5, 0.0))
        grid = WindowGrid((length, 3, 5), windows)
        interval = _get_scan_interval(grid.padded, windows.size, 3, windows.overlap)
        theirs = dense_patch_slices(grid.padded, windows.size, interval)
        assert [tuple(cut.start for cut in cuts) for cuts in theirs] == list(product(*grid.starts))


@pytest.mark.parametrize("size", [(8, 8, 8), (7, 33, 16), (1, 5, 2), (96, 64, 48)])
@pytest.mark.parametrize("blend", ["constant", "gaussian"])
@pytest.mark.parametrize("sigma", [0.05, 0.125, 0.3])
def test_weights_equal_compute_importance_map(size: Vec3, blend: Blend, sigma: float) -> None:
    from monai.data.utils import compute_importance_map

    theirs = compute_importance_map(size, blend, sigma).numpy()
    np.testing.assert_allclose(window_weights(Windows(size, blend=blend, sigma=sigma)), theirs, rtol=1e-6)


def averaged_over_mirrors(module: Any, windows: Windows) -> Any:
    """Return a predictor of windows that mirrors each of them, as MONAI's inferer does not."""
    import torch

    def predict(batch: Any) -> Any:
        flips = [tuple(axis + 2 for axis in axes) for axes in windows.mirrors]
        with torch.no_grad():
            return sum(torch.flip(module(torch.flip(batch, flip)), flip) for flip in flips) / len(flips)

    return predict


@pytest.mark.parametrize("size", [(17, 21, 12), (9, 25, 13), (5, 7, 6)])
@pytest.mark.parametrize("overlap", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("blend", ["constant", "gaussian"])
@pytest.mark.parametrize("mirror", [(), (0, 2)])
def test_average_equals_the_sliding_window_inferer(
    size: Vec3, overlap: float, blend: Blend, mirror: tuple[int, ...]
) -> None:
    import torch
    from monai.inferers import SlidingWindowInferer

    from tests.windows import torch_networks

    windows = Windows((12, 10, 9), (overlap, 0.5, overlap), blend, mirror=mirror)
    module, volume = torch_networks.network(), torch_networks.grey(size)
    inferer = SlidingWindowInferer(windows.size, sw_batch_size=3, overlap=windows.overlap, mode=blend)
    theirs = inferer(torch.from_numpy(volume)[None], averaged_over_mirrors(module, windows))[0].numpy()
    ours = blended(volume.astype(np.float64), torch_networks.in_float64(module), windows)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("blend", ["constant", "gaussian"])
def test_sums_of_weights_equal_the_sum_of_importance_maps(blend: Blend) -> None:
    """MONAI's map of counts is inside its inferer, so it is summed here, window by window as there."""
    import torch
    from monai.data.utils import compute_importance_map, dense_patch_slices
    from monai.inferers.utils import _get_scan_interval

    windows = Windows((12, 10, 9), (0.75, 0.5, 0.25), blend)
    grid = WindowGrid((23, 31, 19), windows)
    counts = torch.zeros(grid.padded)
    for cuts in dense_patch_slices(
        grid.padded, windows.size, _get_scan_interval(grid.padded, windows.size, 3, windows.overlap)
    ):
        counts[cuts] += compute_importance_map(windows.size, blend)
    np.testing.assert_allclose(total_weights(grid, grid.inside), counts.numpy(), rtol=1e-6)


def test_average_by_a_bump_equals_the_inferer_with_its_weights() -> None:
    import torch
    from monai.inferers import sliding_window_inference

    from tests.windows import torch_networks

    windows = Windows((12, 10, 9), blend="bump")
    module, volume = torch_networks.network(), torch_networks.grey((23, 31, 19))
    weights = torch.from_numpy(window_weights(windows).copy())
    with torch.no_grad():
        theirs = sliding_window_inference(
            torch.from_numpy(volume)[None], windows.size, 2, module, windows.overlap, roi_weight_map=weights[None, None]
        )[0].numpy()
    ours = blended(volume.astype(np.float64), torch_networks.in_float64(module), windows)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
