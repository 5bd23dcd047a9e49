"""Say how the layers of a network are wired: their names, what each reads, and which give the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from znnpy.errors import ShapeError
from znnpy.layers import Layer
from znnpy.messages import excerpt

INPUT = "input"  # name of the network's input
PadToPeriod = Literal["reflect", "replicate", "zeros", "refuse"]
PAD_TO_PERIOD: tuple[PadToPeriod, ...] = ("reflect", "replicate", "zeros", "refuse")


@dataclass(frozen=True, slots=True)
class Node:
    """A layer with its name and the names of the nodes that it reads; "input" is the network's input."""

    name: str
    layer: Layer
    inputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wiring:
    """The wiring of a network's layers. Tensor 0 is the network's input, and tensor i + 1 the output of layer i."""

    names: tuple[str, ...]  # of the layers
    sources: tuple[tuple[int, ...], ...]  # tensors that each layer reads; every layer reads earlier ones
    outputs: tuple[int, ...]  # tensors that are the network's output
    pad_to_period: PadToPeriod = "reflect"  # beyond the far faces of a volume whose size does not divide

    def check(self, layers: Sequence[Layer]) -> None:
        """Raise ShapeError unless every layer has a name and reads earlier ones, and all are read or are outputs."""
        if not len(self.names) == len(self.sources) == len(layers):
            raise ShapeError(
                f"the wiring has {len(self.names)} names and {len(self.sources)} lists of what layers read, and the "
                f"network has {len(layers)} layers; give one of each for every layer"
            )
        for index, (name, layer, sources) in enumerate(zip(self.names, layers, self.sources, strict=True)):
            here = f"node {excerpt(name, 60)} ({layer})"
            if name == INPUT or name in self.names[:index]:
                raise ShapeError(f"{here} has the name of another node, or of the input; give it another name")
            if not sources or not all(0 <= source <= index for source in sources):
                raise ShapeError(
                    f"{here} reads the tensors {excerpt(sources, 60)}, and there are 0 to {index} before it: the input "
                    "and what earlier layers give; put layers after those that they read"
                )
            like = getattr(layer, "like", None)
            if like is not None and like not in (INPUT, *self.names[:index]):
                raise ShapeError(
                    f"{here} gets the size of {excerpt(like, 60)}, which is no node before it; name an earlier one"
                )
        if not self.outputs or len(set(self.outputs)) < len(self.outputs):
            raise ShapeError("a network has one output or several different ones; name each once")
        if not all(1 <= tensor <= len(layers) for tensor in self.outputs):
            raise ShapeError(
                f"the outputs are the tensors {excerpt(self.outputs, 60)}, and layers give 1 to {len(layers)}; correct "
                "them"
            )
        if self.pad_to_period not in PAD_TO_PERIOD:
            raise ShapeError(f"pad_to_period is {self.pad_to_period!r}; choose one of {', '.join(PAD_TO_PERIOD)}")
        read = {*self.outputs, *(source for sources in self.sources for source in sources)}
        unread = [name for tensor, name in enumerate(self.names, 1) if tensor not in read]
        if len(unread) == 1:
            raise ShapeError(
                f"no node reads {excerpt(unread[0], 60)}, and it is no output; remove it, or add it to output"
            )
        if unread:
            names = excerpt(", ".join(excerpt(name, 60) for name in unread))
            raise ShapeError(f"no node reads {names}, and they are no outputs; remove them, or add them to output")
