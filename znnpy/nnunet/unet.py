"""The layers of an architecture, and the arrays of a checkpoint that hold their weights.

Arrays have the names of the modules of nnU-Net. Heads of deep supervision are left out: only the last one, at the full
resolution, predicts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from znnpy.errors import NetworkFileError
from znnpy.formats.wiring import Given, network_of
from znnpy.layers import (
    NO_PADDING,
    ONE,
    Add,
    AveragePool,
    Concat,
    Conv,
    ConvTranspose,
    Function,
    Layer,
    Norm,
)
from znnpy.messages import excerpt
from znnpy.network import ConvWeights, Network
from znnpy.nnunet.architecture import Architecture
from znnpy.shapes import Vec3
from znnpy.wiring import INPUT

SHOWN = 60  # characters of a name in a message


class Held(Protocol):
    """An array of a checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def values(self) -> npt.NDArray[np.float32]:
        """Return the values, in C order; ValueError if they are of a type that float32 does not hold."""
        ...


@dataclass(frozen=True, slots=True)
class Arrays:
    """The arrays that hold the weights of a layer: their names and the shape of the first; a bias may be missing."""

    weight: str
    shape: tuple[int, ...]
    bias: str | None
    biases: int


@dataclass(frozen=True)
class Unet:
    """A network, and the arrays of a checkpoint for each of its layers that has weights, in order."""

    network: Network
    arrays: tuple[Arrays, ...]
    stages: int

    def weights(self, held: Mapping[str, Held], where: str) -> tuple[ConvWeights, ...]:
        """Return the weights that a checkpoint holds.

        NetworkFileError, which begins with `where`, for arrays that are missing, too many or of other shapes.
        """
        needed = {one.weight: one.shape for one in self.arrays}
        needed |= {one.bias: (one.biases,) for one in self.arrays if one.bias is not None}
        for name, shape in needed.items():
            if name not in held:
                raise NetworkFileError(
                    f"{where} has no array {name}, which the architecture of plans.json needs; give the plans that it "
                    "was trained with"
                )
            if held[name].shape != shape:
                raise NetworkFileError(
                    f"{where} has {name} of shape {excerpt(held[name].shape, SHOWN)}, and the architecture of "
                    f"plans.json needs {shape}; give the plans that it was trained with"
                )
        for name in held:
            if name not in needed and not self._is_spare(name):
                raise NetworkFileError(
                    f"{where} has the array {excerpt(name, SHOWN)}, which no layer of the architecture of plans.json "
                    "takes, so that its trainer made another network; predict with nnU-Net itself"
                )
        return tuple(
            ConvWeights(
                _values(held, one.weight, where),
                np.zeros(one.biases, np.float32) if one.bias is None else _values(held, one.bias, where),
            )
            for one in self.arrays
        )

    def _is_spare(self, name: str) -> bool:
        """Return whether an array is held a second time under another name, or is that of a head that is left out."""
        head = re.fullmatch(r"decoder\.seg_layers\.(\d{1,3})\.(weight|bias)", name)
        return (
            name.startswith("decoder.encoder.")
            or ".all_modules." in name
            or (head is not None and int(head[1]) < self.stages - 2)
        )


def unet_of(architecture: Architecture, channels: int, heads: int, name: str) -> Unet:
    """Return the network of an architecture, which gives logits of so many heads for so many channels."""
    made = _Layers(architecture, channels)
    made.encode()
    made.decode(heads)
    network = network_of(name, channels, made.given, None, [made.given[-1].name or ""])
    return Unet(network, tuple(made.arrays), len(architecture.features))


@dataclass
class _Layers:
    """The layers so far. Methods add some and return the name of the last; `maps` has those of each."""

    of: Architecture
    channels: int
    given: list[Given] = field(default_factory=list)
    arrays: list[Arrays] = field(default_factory=list)
    maps: dict[str, int] = field(default_factory=dict)
    stages: list[str] = field(default_factory=list)  # what each stage of the encoder gives

    def encode(self) -> None:
        """Add the encoder."""
        of, x = self.of, INPUT
        self.maps[INPUT] = self.channels
        is_plain = of.kind == "PlainConvUNet"
        if not is_plain:
            x = self._block("encoder.stem.convs.0", x, of.stem, of.kernels[0])
        for stage, (out, kernel, stride, repeats) in enumerate(
            zip(of.features, of.kernels, of.strides, of.encoder, strict=True)
        ):
            for index in range(repeats):
                step = ONE if index else stride
                if is_plain:
                    x = self._block(f"encoder.stages.{stage}.0.convs.{index}", x, out, kernel, step)
                else:
                    x = self._residual(f"encoder.stages.{stage}.blocks.{index}", x, out, kernel, step)
            self.stages.append(x)

    def decode(self, heads: int) -> None:
        """Add the decoder, and the head that predicts."""
        of, x = self.of, self.stages[-1]
        last = len(self.stages) - 1
        for stage in range(last):
            beside = self.stages[last - 1 - stage]
            out, stride = of.features[last - 1 - stage], of.strides[last - stage]
            name = f"decoder.transpconvs.{stage}"
            shape = (self.maps[x], out, *stride)
            up = self._weighted(name, ConvTranspose(stride, out, stride), x, Arrays(*_named(name, shape, of.bias, out)))
            x = self._add(f"decoder.skips.{stage}", Concat(), (up, beside), out + self.maps[beside])
            for index in range(of.decoder[stage]):
                x = self._block(f"decoder.stages.{stage}.convs.{index}", x, out, of.kernels[last - 1 - stage])
        name = f"decoder.seg_layers.{last - 1}"
        arrays = Arrays(*_named(name, (heads, self.maps[x], 1, 1, 1), True, heads))
        self._weighted(name, Conv(ONE, heads), x, arrays)

    def _block(
        self,
        name: str,
        x: str,
        out: int,
        kernel: Vec3,
        stride: Vec3 = ONE,
        *,
        bias: bool | None = None,
        ends: bool = True,
    ) -> str:
        """Add a convolution, a norm and, if it `ends` with one, the function of each value."""
        of = self.of
        side = (kernel[0] // 2, kernel[1] // 2, kernel[2] // 2)
        has_bias = of.bias if bias is None else bias
        function: Function = of.function if ends else "none"
        parameters = of.parameters if ends else ()
        here = of.function_first or of.epsilon is None  # the function follows the convolution
        layer = Conv(
            kernel,
            out,
            function if here else "none",
            stride,
            padding=(side, side) if any(side) else NO_PADDING,
            parameters=parameters if here else (),
        )
        shape = (out, self.maps[x], *kernel)
        x = self._weighted(f"{name}.conv", layer, x, Arrays(*_named(f"{name}.conv", shape, has_bias, out)))
        return (
            x
            if of.epsilon is None
            else self._norm(f"{name}.norm", x, *(("none", ()) if here else (function, parameters)))
        )

    def _norm(self, name: str, x: str, function: Function, parameters: tuple[float, ...]) -> str:
        """Add an instance norm, which ends with the function of each value."""
        assert self.of.epsilon is not None
        maps, affine = self.maps[x], self.of.affine
        layer = Norm("instance_norm", self.of.epsilon, affine=affine, activation=function, parameters=parameters)
        if not affine:
            return self._add(name, layer, (x,), maps)
        return self._weighted(name, layer, x, Arrays(f"{name}.weight", (maps,), f"{name}.bias", maps))

    def _residual(self, name: str, x: str, out: int, kernel: Vec3, stride: Vec3) -> str:
        """Add a residual block, whose skip averages where the block strides and projects where maps change."""
        of, skip, at = self.of, x, 0
        main = self._block(f"{name}.conv1", x, out, kernel, stride)
        main = self._block(f"{name}.conv2", main, out, kernel, ends=False)
        if stride != ONE:
            skip = self._add(f"{name}.skip.0", AveragePool(stride), (skip,), self.maps[skip])
            at = 1
        if self.maps[skip] != out:
            skip = self._block(f"{name}.skip.{at}", skip, out, ONE, bias=False, ends=False)
        return self._add(f"{name}.sum", Add(of.function, of.parameters), (main, skip), out)

    def _weighted(self, name: str, layer: Layer, x: str, arrays: Arrays) -> str:
        self.arrays.append(arrays)
        return self._add(name, layer, (x,), arrays.biases)

    def _add(self, name: str, layer: Layer, reads: Sequence[str], maps: int) -> str:
        self.given.append(Given(layer, name, tuple(reads)))
        self.maps[name] = maps
        return name


def _named(name: str, shape: tuple[int, ...], bias: bool, out: int) -> tuple[str, tuple[int, ...], str | None, int]:
    return f"{name}.weight", shape, f"{name}.bias" if bias else None, out


def _values(held: Mapping[str, Held], name: str, where: str) -> npt.NDArray[np.float32]:
    """Return the values of an array; NetworkFileError if they are of another type, or not finite."""
    try:
        found = held[name].values()
    except ValueError as error:
        raise NetworkFileError(f"{where} has {name} with {excerpt(error)}; save it with float32") from None
    if not np.isfinite(found).all():
        wrong = found.size - int(np.count_nonzero(np.isfinite(found)))
        raise NetworkFileError(
            f"{where} has {name} with {wrong} of {found.size} values that are not finite; train again"
        )
    return found
