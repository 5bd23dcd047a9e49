"""A drop-in for MONAI's SlidingWindowInferer that computes on the CPU: `ZnnpyInferer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np

from znnpy.errors import MissingExtraError, ShapeError, VolumeError
from znnpy.extras import install
from znnpy.messages import excerpt
from znnpy.option_values import Blend
from znnpy.shapes import Precision

try:
    import torch
    from monai.inferers import Inferer
    from monai.utils import convert_to_dst_type, fall_back_tuple

    from znnpy.torch import ModuleRunner
except ImportError:
    raise MissingExtraError(f"znnpy.monai needs MONAI and PyTorch; `{install('monai')}`") from None

BLENDED: tuple[Blend, ...] = ("constant", "gaussian")
REFUSED = {
    "sw_batch_size": "windows are computed one after the other, each by all threads",
    "sw_device": "windows are computed on the CPU",
    "device": "the result is on the device of the inputs",
    "progress": "no progress is shown",
    "cache_roi_weight_map": "weights of windows are always kept",
    "cpu_thresh": "everything is computed on the CPU",
    "buffer_steps": "sums are kept for as few windows as need them",
    "buffer_dim": "sums are kept for as few windows as need them",
    "with_coord": "a network gets voxels alone",
}


class ZnnpyInferer(Inferer):  # type: ignore[misc]
    """Computes what `monai.inferers.SlidingWindowInferer` computes, on the CPU.

    roi_size      voxels (z, y, x) of a window, or one number for all axes; None or -1: as many as the inputs have
    overlap       share of a window by which it overlaps the next one, or one for each axis
    mode          "constant" | "gaussian": weights of the voxels of a window
    sigma_scale   standard deviation of the Gaussian, as a share of the window
    padding_mode  "constant", since inputs that are smaller than a window are padded with zeros, and `cval` is 0
    ram           memory limit of the process, in bytes or as "16G"; None: 3/4 of the machine's memory
    threads       that compute; None: one for each core
    precision     "fp32" | "bf16x2" | "bf16"; None: "fp32"

    What is prepared for a module stays in memory for the next inputs, until the module or the inferer is gone.

    ValueError for values that arguments cannot have; TypeError for further arguments of SlidingWindowInferer, which
    would change nothing.
    """

    def __init__(
        self,
        roi_size: Sequence[int | None] | int,
        *,
        overlap: Sequence[float] | float = 0.25,
        mode: str = "constant",
        sigma_scale: Sequence[float] | float = 0.125,
        padding_mode: str = "constant",
        cval: float = 0.0,
        ram: int | str | None = None,
        threads: int | None = None,
        precision: Precision | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        for name in others:
            why = REFUSED.get(name, "there is no such argument")
            raise TypeError(f"ZnnpyInferer takes no {excerpt(name, 60)}, since {why}; leave it out")
        sigmas = {float(one) for one in np.ravel(np.asarray(sigma_scale, float))}
        if len(sigmas) != 1:
            raise ValueError(f"sigma_scale is one number for all axes, and not {excerpt(sigma_scale, 60)}")
        if mode not in BLENDED:
            raise ValueError(f"mode is {' or '.join(map(repr, BLENDED))}, not {excerpt(mode, 60)!r}")
        if padding_mode != "constant" or cval != 0:
            raise ValueError(
                f"inputs that are smaller than a window are padded with zeros, and not as padding_mode="
                f"{excerpt(padding_mode, 60)!r} with cval={cval!r} says; leave both out, or pad the inputs before"
            )
        self.roi_size = tuple(roi_size) if isinstance(roi_size, Sequence) else (roi_size,) * 3
        if len(self.roi_size) != 3:
            raise ValueError(
                f"roi_size is three numbers of voxels, and not {excerpt(self.roi_size, 60)}: networks over volumes are "
                "computed, and none over images"
            )
        self.options: dict[str, Any] = {
            "overlap": tuple(overlap) if isinstance(overlap, Sequence) else overlap,
            "blend": cast(Blend, str(mode)),
            "sigma": sigmas.pop() if mode == "gaussian" else None,
            "ram": ram,
            "threads": threads,
            "precision": precision,
            "device": "cpu",
        }
        self._runners: WeakKeyDictionary[Any, ModuleRunner] = WeakKeyDictionary()  # by module

    def __call__(self, inputs: torch.Tensor, network: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what a module gives for a batch of volumes: on the device of the inputs, and of their type.

        inputs   (batch, channels, z, y, x), floating point
        network  a module in evaluation mode that takes one tensor and returns one of the same size. It is converted in
                 the first call, and again when its weights have other values.

        VolumeError for other inputs, TypeError for what is no module and for further arguments, NetworkFileError for a
        module that cannot be read, ShapeError if windows do not suit it, NoPlanError when nothing fits into `ram`.
        """
        if args or kwargs:
            given = [*map(repr, args), *kwargs]
            raise TypeError(
                f"the module gets the volume alone, and not {excerpt(', '.join(given), 60)} too; leave that out"
            )
        if not isinstance(network, torch.nn.Module):
            raise TypeError(
                f"the network is a torch.nn.Module, and not {excerpt(type(network).__name__, 60)}: a function cannot "
                "be read as layers; give the module that it calls"
            )
        if inputs.ndim != 5 or not inputs.is_floating_point():
            raise VolumeError(
                f"the inputs are {inputs.dtype} of shape {tuple(inputs.shape)}; give floating-point volumes (batch, "
                "channels, z, y, x)"
            )
        z, y, x = fall_back_tuple(self.roi_size, tuple(inputs.shape[2:]))
        runner = self._runners.get(network)
        if runner is None:
            runner = self._runners[network] = ModuleRunner("refuse", self.options)
        example = torch.empty((1, inputs.shape[1], z, y, x), device="meta")
        compiled = runner.read(network, example)
        words = compiled.words
        if words != ("0",):
            raise ShapeError(
                f"{type(network).__name__} gives {excerpt(', '.join(words), 60)}, and the inferer returns one tensor; "
                "give a module that returns one, without deep supervision"
            )
        found = runner(network, inputs, example, window=(z, y, x))
        tensor = found if compiled.is_alone else found[0]  # of a tuple of one, as MONAI's inferer returns it
        return cast(torch.Tensor, convert_to_dst_type(tensor, inputs)[0])
