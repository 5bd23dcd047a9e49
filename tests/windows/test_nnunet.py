"""Windows, weights and averages equal nnU-Net's own.

nnU-Net adds weighted results and weights in half precision, on a CPU too. An addition there errs by up to 2^-11 of the
sum, and by up to 2^-25 where the sum is very small. At the corners of a volume all weights are as small as 6e-8, so its
results are rounded to about whole numbers there. Where its sums are made float32 it equals the definition everywhere.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from znnpy.option_values import Blend
from znnpy.shapes import Vec3
from znnpy.windows.definition import Values, blended
from znnpy.windows.grid import WindowGrid
from znnpy.windows.settings import Windows
from znnpy.windows.weights import total_weights, window_weights

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_thread")]

HALF_STEP = 2.0**-11  # relative error of rounding to half precision
LEAST_STEP = 2.0**-25  # absolute error of rounding very small numbers to it

VOLUMES: tuple[Vec3, ...] = ((15, 23, 11), (7, 25, 9), (5, 7, 6))
WINDOW: Vec3 = (8, 12, 7)


@pytest.mark.parametrize("step", [1.0, 0.9, 0.75, 0.5, 0.4, 0.25, 0.2, 0.1])
def test_positions_equal_compute_steps(step: float) -> None:
    from nnunetv2.inference.sliding_window_prediction import compute_steps_for_sliding_window

    for length, size in product(range(1, 70, 2), range(10, 40)):
        grid = WindowGrid((length, 9, 40), Windows((size, 10, 16), (1 - step,) * 3, rule="nnunet"))
        theirs = compute_steps_for_sliding_window(grid.padded, grid.windows.size, step)
        assert [list(starts) for starts in grid.starts] == theirs


@pytest.mark.parametrize("size", [(8, 8, 8), (7, 33, 16), (1, 5, 2), (96, 64, 48)])
@pytest.mark.parametrize("sigma", [0.05, 0.125, 0.3])
def test_weights_equal_compute_gaussian_bit_by_bit(size: Vec3, sigma: float) -> None:
    import torch
    from nnunetv2.inference.sliding_window_prediction import compute_gaussian

    theirs = compute_gaussian(size, sigma, 10, device=torch.device("cpu"))
    assert theirs.dtype == torch.float16
    np.testing.assert_array_equal(window_weights(Windows(size, sigma=sigma, rule="nnunet")), theirs.float().numpy())


def predicted(module: Any, volume: NDArray[np.float32], windows: Windows) -> NDArray[np.float32]:
    """Return what nnU-Net's predictor makes of a volume on a CPU."""
    import torch
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    from tests.windows.torch_networks import MAPS

    predictor = nnUNetPredictor(
        tile_step_size=1 - windows.overlap[0],
        use_gaussian=windows.blend == "gaussian",
        use_mirroring=bool(windows.mirror),
        device=torch.device("cpu"),
        allow_tqdm=False,
    )
    predictor.network = module
    predictor.configuration_manager = SimpleNamespace(patch_size=windows.size)
    predictor.label_manager = SimpleNamespace(num_segmentation_heads=MAPS)
    predictor.allowed_mirroring_axes = windows.mirror
    logits = predictor.predict_sliding_window_return_logits(torch.from_numpy(volume))
    result: NDArray[np.float32] = logits.float().numpy()
    return result


def both(size: Vec3, windows: Windows) -> tuple[Values, NDArray[np.float32]]:
    """Return the definition of a volume's result and nnU-Net's."""
    from tests.windows import torch_networks

    module, volume = torch_networks.network(), torch_networks.grey(size)
    ours = blended(volume.astype(np.float64), torch_networks.in_float64(module), windows)
    return ours, predicted(module, volume, windows)


def windows_of(overlap: float, blend: Blend, mirror: tuple[int, ...]) -> Windows:
    return Windows(WINDOW, (overlap, overlap, overlap), blend, mirror=mirror, rule="nnunet")


@pytest.mark.parametrize("size", VOLUMES)
@pytest.mark.parametrize("overlap", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("blend", ["constant", "gaussian"])
@pytest.mark.parametrize("mirror", [(), (0, 2), (0, 1, 2)])
def test_average_equals_the_predictor_with_sums_in_float32(
    size: Vec3, overlap: float, blend: Blend, mirror: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from nnunetv2.inference import predict_from_raw_data

    with_float_sums = SimpleNamespace(**{**vars(torch), "half": torch.float32})
    monkeypatch.setattr(predict_from_raw_data, "torch", with_float_sums)
    ours, theirs = both(size, windows_of(overlap, blend, mirror))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("size", VOLUMES)
@pytest.mark.parametrize("overlap", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("blend", ["constant", "gaussian"])
@pytest.mark.parametrize("mirror", [(), (0, 2)])
def test_average_equals_the_predictor_to_the_error_of_half_sums(
    size: Vec3, overlap: float, blend: Blend, mirror: tuple[int, ...]
) -> None:
    windows = windows_of(overlap, blend, mirror)
    ours, theirs = both(size, windows)
    grid = WindowGrid(size, windows)
    counts = Windows(WINDOW, windows.overlap, "constant", rule="nnunet")
    additions = total_weights(WindowGrid(size, counts), grid.inside)
    greatest = np.abs(ours).max() + 1
    allowed = greatest * (2 * additions + 1) * (HALF_STEP + LEAST_STEP / total_weights(grid, grid.inside))
    assert (np.abs(ours - theirs) <= allowed).all()


def test_results_of_nnunet_in_the_corners_of_a_volume_are_whole_numbers() -> None:
    """The corner weight is the least half, 2^-24, so a weighted result there is a whole number of it."""
    ours, theirs = both((16, 18, 14), windows_of(0.5, "gaussian", ()))
    assert theirs[:, 0, 0, 0].tolist() == np.round(ours[:, 0, 0, 0]).tolist()
    assert np.abs(ours[:, 0, 0, 0] - theirs[:, 0, 0, 0]).max() > 0.01
