"""PyTorch modules as networks of znnpy: `from_torch` and `compile`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import NetworkFileError, VolumeError
from znnpy.importing.finish import Wishes
from znnpy.messages import excerpt
from znnpy.network import Normalise
from znnpy.option_values import Meaning
from znnpy.trained import TrainedNetwork
from znnpy.wiring import PadToPeriod

if TYPE_CHECKING:
    import torch


def from_torch(
    module: torch.nn.Module,
    example: Any = None,
    *,
    name: str | None = None,
    outputs: Sequence[str] | None = None,
    normalise: Normalise | None = None,
    pad_to_period: PadToPeriod | None = None,
    description: str | Path | None = None,
    meaning: Meaning | None = None,
) -> TrainedNetwork:
    """Return a PyTorch module in evaluation mode as a network with its weights.

    module         takes one array, (1, channels, z, y, x) float32; or (1, channels, y, x), which is computed for each z
    example        an array that the module takes; None: its size is found by trial, without computing anything
    name           of the network; None: the name of the module's class
    outputs        names of outputs, or of nodes, that are the network's output; None: all outputs of the module
    normalise      of the grey values, before the module; None: the module gets them as they are
    pad_to_period  what lies beyond the far faces of a volume whose size does not suit; None: "reflect"
    description    of bioimage.io (rdf.yaml), for what is done before and behind the module; its weights are not read
    meaning        "sliding", "whole" or "windows": what an output voxel is; None: windows if norms or global poolings
                   make every voxel depend on the whole volume, else sliding if the network supports it

    NetworkFileError: torch.export makes no graph of the module, or an operator is not supported, or its result depends
    on the size of the volume; the message names it. MissingExtraError without PyTorch.
    """
    from znnpy.importing.from_torch import imported_module

    wishes = Wishes(None if outputs is None else tuple(outputs), normalise, pad_to_period)
    described = None
    if description is not None:
        from znnpy.importing.description import read_description

        described = read_description(Path(description), wishes)
        wishes, name = described.wishes, name or described.name
    wishes = replace(wishes, order=None)  # compared below, in the words of the description
    made = imported_module(module, example, wishes, name or type(module).__name__)
    if described is not None:
        described.check_order(made.order, "the module")
    network = made.network if meaning is None else replace(made.network, asked_meaning=meaning)
    return TrainedNetwork(network, made.weights)


@dataclass(frozen=True)
class CompiledModule:
    """A PyTorch module that znnpy computes. Calling it takes and gives what the module does.

    network   layers and weights
    words     names of the module's outputs: numbers if it gives one array or several, keys if it gives a dictionary
    planar    the module is over images, (batch, channels, y, x)
    options   of each call, such as `ram` and `threads`
    is_alone  the module gives one array, and no tuple or dictionary of it
    """

    network: TrainedNetwork
    words: tuple[str, ...]
    planar: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    is_alone: bool = True

    def __call__(self, volume: Any) -> Any:
        """Return what the module gives for a volume.

        volume  (z, y, x), (channels, z, y, x) or (batch, channels, z, y, x), and (batch, channels, y, x) for a module
                over images: a tensor of PyTorch, or anything that numpy makes an array of, such as a Zarr array

        Returns float32, or uint8 of labels, with maps in place of channels; (maps, z, y, x) for (z, y, x): a tensor on
        the device of the input for a tensor, and else a numpy array. Each call makes a plan: for many,
        `znnpy.torch.Dense` keeps a session open. For a volume larger than memory use `znnpy.infer`.

        ShapeError, NoPlanError, VolumeError: as from TrainedNetwork.
        """
        given = volume.detach().cpu().numpy() if _is_tensor(volume) else np.asarray(volume)
        found = self.outputs(given, partial(self.network, **self.options))
        if _is_tensor(volume):
            import torch

            return self.named([torch.from_numpy(one).to(volume.device) for one in found])
        return self.named(found)

    def outputs(
        self, given: npt.NDArray[Any], predict: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
    ) -> list[npt.NDArray[Any]]:
        """Return each output of the module for an array of any of the shapes that a call takes.

        predict  gives the prediction of one volume (channels, z, y, x), such as `network` or a session of it
        """
        if given.ndim not in (3, 4, 5):
            raise VolumeError(
                f"the volume has the shape {excerpt(given.shape)}; give (batch, channels, z, y, x), or fewer"
            )
        if not given.size:
            raise VolumeError(f"the volume has the shape {given.shape}, which holds nothing; give at least one voxel")
        if self.planar and given.ndim == 4:  # (batch, channels, y, x): each image is a plane of a volume
            return [
                np.moveaxis(one, 0, 1) for one in self._split(predict(np.ascontiguousarray(np.moveaxis(given, 0, 1))))
            ]
        if given.ndim < 5:
            return self._split(predict(np.ascontiguousarray(given)))
        first = predict(np.ascontiguousarray(given[0]))
        found = np.empty((len(given), *first.shape), first.dtype)
        found[0] = first
        for volume, out in zip(given[1:], found[1:], strict=True):
            out[...] = predict(np.ascontiguousarray(volume))
        return self._split(found)

    def named(self, outputs: Sequence[Any]) -> Any:
        """Return outputs as the module gives them: one, a tuple, which also stands for a list, or a dictionary."""
        if self.is_alone:
            return outputs[0]
        if all(word.isdecimal() for word in self.words):
            return tuple(outputs)
        return dict(zip(self.words, outputs, strict=True))

    def _split(self, maps: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Return the maps of each output, of an array (.., maps, z, y, x)."""
        ends = np.cumsum([0, *self.network.network.output_maps]).tolist()
        return [maps[..., begin:end, :, :, :] for begin, end in pairwise(ends)]


def _is_tensor(volume: Any) -> bool:
    return type(volume).__module__.partition(".")[0] == "torch"


def compile(
    module: torch.nn.Module, example: Any = None, *, pad_to_period: PadToPeriod = "refuse", **options: Any
) -> CompiledModule:
    """Return a drop-in for a PyTorch module in evaluation mode that znnpy computes.

    module         as `from_torch` takes it, and `example`
    pad_to_period  what lies beyond the far faces of a volume whose size does not suit the network: "reflect",
                   "replicate" or "zeros". By default such a volume is a ShapeError, since a module that takes it gives
                   other values for it
    options        of each call, as `TrainedNetwork` takes them, such as ram="16G", threads=8, device="cpu"

    The errors are those of `from_torch`; NetworkFileError also for a module that gives nested outputs.
    """
    from znnpy.importing.from_torch import imported_module

    made = imported_module(module, example, Wishes(pad_to_period=pad_to_period), type(module).__name__)
    if any("." in word and word.replace(".", "").isdecimal() for word in made.words):
        raise NetworkFileError(
            f"{type(module).__name__} gives nested outputs ({excerpt(', '.join(made.words), 60)}); return one array, a "
            "flat tuple or a dictionary, or choose outputs by name with znnpy.from_torch"
        )
    network = replace(made.network, asked_meaning="whole")  # of which a chain would give another result than the module
    return CompiledModule(TrainedNetwork(network, made.weights), made.words, made.planar, options, made.is_alone)
