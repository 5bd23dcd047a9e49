"""Layers before and behind a network: what a description does to grey values and to outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from znnpy.errors import NetworkFileError
from znnpy.importing.builder import Builder
from znnpy.layers import Function
from znnpy.messages import excerpt
from znnpy.wiring import INPUT

if TYPE_CHECKING:
    from znnpy.importing.tensors import Tensor

Real = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Affine:
    """A factor and an offset, one for all maps or one for each."""

    factor: tuple[float, ...]
    offset: tuple[float, ...]

    def applied(self, maps: Real) -> Real:
        """Return what it makes of (maps, z, y, x)."""
        factor, offset = (np.array(one)[:, None, None, None] for one in (self.factor, self.offset))
        found: Real = maps * factor + offset
        return found

    def emitted(self, builder: Builder, x: Tensor) -> Tensor:
        """Add the layer."""
        for values in (self.factor, self.offset):
            if len(values) not in (1, x.maps):
                raise builder.error(f"has {len(values)} values for {x.maps} channels; write one, or one per channel")
        return builder.affine(x, np.array(self.factor), np.array(self.offset))


@dataclass(frozen=True, slots=True)
class Apply:
    """A function of each value: clip with a lowest and a highest value, sigmoid, or softmax over the maps."""

    function: Function
    parameters: tuple[float, ...] = ()

    def applied(self, maps: Real) -> Real:
        """Return what it makes of (maps, z, y, x)."""
        match self.function:
            case "clip":
                low, high = self.parameters
                found: Real = np.clip(maps, low, high)
            case "sigmoid":
                found = 0.5 + 0.5 * np.tanh(0.5 * maps)
            case _:
                powers = np.exp(maps - maps.max(axis=0))
                found = powers / powers.sum(axis=0)
        return found

    def emitted(self, builder: Builder, x: Tensor) -> Tensor:
        """Add the layer."""
        if self.function == "softmax":
            return builder.softmax(x, 1)
        return builder.activation(x, self.function, *self.parameters)


Step = Affine | Apply


@dataclass(frozen=True, slots=True)
class OutputSteps:
    """One output of a description.

    position  among all outputs that the description lists; maps: as it says, None if it does not
    """

    name: str
    position: int
    maps: int | None
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Processing:
    """The steps around a network that a description lists, and its outputs.

    maps     of the input, None if it does not say
    before   steps between the normalised input and the network
    outputs  those that are wanted; listed: how many the description lists
    """

    maps: int | None = None
    before: tuple[Step, ...] = ()
    outputs: tuple[OutputSteps, ...] = ()
    listed: int = 0

    def names(self, known: Sequence[str]) -> tuple[str, ...] | None:
        """Return the names that the outputs have in the network's own file, which has the outputs `known`, in order.

        They are found by name, or else by position.
        """
        if not self.outputs:
            return None
        if all(one.name in known for one in self.outputs):
            return tuple(one.name for one in self.outputs)
        if len(known) != self.listed:
            theirs, ours = (excerpt(", ".join(names)) for names in (known, [one.name for one in self.outputs]))
            raise NetworkFileError(
                f"the description lists {self.listed} outputs ({ours}), and the network has {len(known)} ({theirs}); "
                "give the outputs of the description the names that they have in the network"
            )
        return tuple(known[one.position] for one in self.outputs)

    def surround(self, builder: Builder, outputs: Sequence[str]) -> list[str]:
        """Add the layers before and behind those of a builder; return the nodes that are outputs now."""
        if self.maps is not None and self.maps != builder.input_maps:
            raise NetworkFileError(
                f"the description gives the input {self.maps} channels, and the network takes {builder.input_maps}; "
                "correct the axes of the input"
            )
        self._put_before(builder)
        if not self.outputs:
            return list(outputs)
        return [_put_behind(builder, node, one) for node, one in zip(outputs, self.outputs, strict=True)]

    def _put_before(self, builder: Builder) -> None:
        own, builder.drafts = builder.drafts, []
        x = builder.tensor(INPUT)
        for step in self.before:
            builder.at("preprocessing", _word(step))
            x = step.emitted(builder, x)
        for draft in own:
            draft.reads = tuple(x.node if read == INPUT else read for read in draft.reads)
        builder.drafts += own


def _put_behind(builder: Builder, node: str, one: OutputSteps) -> str:
    x = builder.tensor(node)
    if one.maps is not None and one.maps != x.maps:
        raise NetworkFileError(
            f"the description gives output {excerpt(one.name, 60)} {one.maps} channels, and the network has {x.maps}; "
            "correct the axes of that output"
        )
    for step in one.steps:
        builder.at("postprocessing", _word(step))
        x = step.emitted(builder, x)
    return x.node


def _word(step: Step) -> str:
    return step.function if isinstance(step, Apply) else "scale_linear"
