"""ZnnpyInferer computes what MONAI's SlidingWindowInferer computes, and refuses in one sentence what it cannot."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from znnpy.errors import NetworkFileError, ShapeError, VolumeError
from znnpy.shapes import Vec3

pytestmark = pytest.mark.torch

CPU: dict[str, Any] = {"threads": 1}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Let PyTorch compute its small layers on one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def unet(norm: str = "INSTANCE") -> Any:
    """Return MONAI's U-Net with two poolings."""
    import torch
    from monai.networks.nets import UNet

    torch.manual_seed(3)
    return UNet(3, 2, 3, (4, 8, 8), (2, 2), norm=norm).eval()


def batch(size: Vec3, count: int = 1) -> Any:
    import torch

    return torch.randn(count, 2, *size, generator=torch.Generator().manual_seed(5))


def both(module: Any, inputs: Any, roi_size: Any, **arguments: Any) -> tuple[Any, Any]:
    """Return what both inferers give."""
    import torch
    from monai.inferers import SlidingWindowInferer

    from znnpy.monai import ZnnpyInferer

    with torch.no_grad():
        theirs = SlidingWindowInferer(roi_size, sw_batch_size=2, **arguments)(inputs, module)
    return ZnnpyInferer(roi_size, **arguments, **CPU)(inputs, module), theirs


@pytest.mark.parametrize(
    ("size", "roi_size", "arguments"),
    [
        ((20, 25, 30), (16, 16, 16), {}),
        ((20, 25, 30), 16, {"overlap": 0.5, "mode": "gaussian"}),
        ((20, 25, 30), (12, 16, 20), {"overlap": (0.25, 0.5, 0.0), "mode": "gaussian", "sigma_scale": 0.2}),
        ((9, 25, 13), (16, 16, 16), {"mode": "gaussian", "padding_mode": "constant", "cval": 0.0}),
        ((16, 24, 20), (8, -1, None), {}),
    ],
)
@pytest.mark.parametrize("norm", ["INSTANCE", "BATCH"])
def test_it_equals_the_sliding_window_inferer(size: Vec3, roi_size: Any, arguments: dict[str, Any], norm: str) -> None:
    import torch

    ours, theirs = both(unet(norm), batch(size, 2), roi_size, **arguments)
    assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


def test_types_and_metadata_of_the_inputs_are_kept() -> None:
    import torch
    from monai.data import MetaTensor

    from znnpy.monai import ZnnpyInferer

    module, inputs = unet(), batch((16, 16, 20))
    affine = torch.diag(torch.tensor([2.0, 3.0, 4.0, 1.0], dtype=torch.float64))
    ours, theirs = both(module, MetaTensor(inputs, affine=affine), 16)
    assert isinstance(ours, MetaTensor)
    torch.testing.assert_close(ours.affine, theirs.affine)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        found = ZnnpyInferer(16, **CPU)(inputs.to(dtype), module)
        assert found.dtype == dtype
        assert not found.requires_grad


def test_a_module_is_converted_once_and_changed_weights_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    import znnpy.monai
    import znnpy.torch

    conversions = []
    convert = znnpy.torch.compile  # type: ignore[attr-defined]

    def counting(*given: Any, **options: Any) -> Any:
        conversions.append(given)
        return convert(*given, **options)

    monkeypatch.setattr(znnpy.torch, "compile", counting)
    module, inputs = unet(), batch((16, 16, 20))
    inferer = znnpy.monai.ZnnpyInferer(16, **CPU)
    before = inferer(inputs, module)
    torch.testing.assert_close(inferer(inputs, module), before, rtol=0, atol=0)
    assert len(conversions) == 1
    next(module.parameters()).data.mul_(1.5)  # which PyTorch's own counts of versions do not tell
    after = inferer(inputs, module)
    assert len(conversions) == 2
    assert not torch.equal(before, after)
    with torch.no_grad():
        list(module.parameters())[-1].add_(1)
    torch.testing.assert_close(inferer(inputs, module), after + 1)
    module.train()
    with pytest.raises(NetworkFileError, match="training mode"):
        inferer(inputs, module)
    conversions.clear()
    del module
    gc.collect()
    assert len(inferer._runners) == 0


def test_modules_and_inputs_that_cannot_be_computed_are_refused() -> None:
    import torch
    from torch import nn

    from znnpy.monai import ZnnpyInferer

    class Two(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv3d(2, 3, 3, padding=1)

        def forward(self, x: Any) -> Any:
            return self.conv(x), self.conv(x) * 2

    inferer, module, inputs = ZnnpyInferer(16, **CPU), unet(), batch((16, 16, 20))
    refused: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (VolumeError, r"shape \(1, 2, 16, 20\)", (inputs[:, :, 0], module), {}),
        (VolumeError, "torch.int64", (inputs.long(), module), {}),
        (ShapeError, "gives 0, 1, and the inferer returns one tensor", (inputs, Two().eval()), {}),
        (TypeError, "is a torch.nn.Module, and not function", (inputs, lambda x: x), {}),
        (TypeError, "gets the volume alone, and not condition too", (inputs, module), {"condition": inputs}),
        (NetworkFileError, "node ", (inputs, nn.Sequential(nn.Conv3d(2, 2, 1), nn.AdaptiveMaxPool3d(3)).eval()), {}),
        (ShapeError, "as large as the input", (inputs, nn.Conv3d(2, 2, 3).eval()), {}),
        (NetworkFileError, "to have 2 channels", (torch.cat([inputs, inputs[:, :1]], 1), module), {}),
    ]
    for error, words, given, named in refused:
        with pytest.raises(error, match=words) as caught:
            inferer(*given, **named)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (TypeError, "takes no sw_batch_size, since windows are computed one after the other", {"sw_batch_size": 4}),
        (TypeError, "takes no device, since the result is on the device of the inputs", {"device": "cuda"}),
        (TypeError, "takes no colour, since there is no such argument", {"colour": 1}),
        (ValueError, "mode is 'constant' or 'gaussian', not 'bump'", {"mode": "bump"}),
        (ValueError, "padded with zeros", {"padding_mode": "reflect"}),
        (ValueError, "padded with zeros", {"cval": 1.0}),
        (ValueError, "sigma_scale is one number", {"sigma_scale": (0.1, 0.2, 0.3)}),
        (ValueError, "roi_size is three numbers", {"roi_size": (16, 16)}),
    ],
)
def test_arguments_that_would_not_be_honoured_are_refused(
    error: type[Exception], words: str, arguments: dict[str, Any]
) -> None:
    from znnpy.monai import ZnnpyInferer

    with pytest.raises(error, match=words):
        ZnnpyInferer(**{"roi_size": 16, **arguments})


def test_a_bundle_names_it_in_its_configuration() -> None:
    import torch
    from monai.bundle import ConfigParser

    from znnpy.monai import ZnnpyInferer

    entry = {"_target_": "znnpy.monai.ZnnpyInferer", "roi_size": [16, 16, 16], "overlap": 0.5, "mode": "gaussian"}
    inferer = ConfigParser({"inferer": entry}).get_parsed_content("inferer")
    assert isinstance(inferer, ZnnpyInferer)
    module, inputs = unet(), batch((20, 16, 16))
    torch.testing.assert_close(
        inferer(inputs, module), both(module, inputs, 16, overlap=0.5, mode="gaussian")[1], rtol=0, atol=1e-5
    )
