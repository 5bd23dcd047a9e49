"""Collect the layers of a network that is being made, with names, sizes and errors that tell where it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import prod

import numpy as np
import numpy.typing as npt

from znnpy.errors import NetworkFileError
from znnpy.formats.entries import LONGEST_LINE
from znnpy.formats.files import LARGEST
from znnpy.geometry import AxisLayer, vector
from znnpy.importing.tensors import Dimension, LayoutError, Tensor, whole
from znnpy.layers import OF_WHOLE_IMAGES, Layer, maps_after
from znnpy.messages import excerpt
from znnpy.network import ConvWeights
from znnpy.shapes import Vec3, text
from znnpy.wiring import INPUT

Real = npt.NDArray[np.float32]
MOST_DRAFTS = 10_000  # layers before some are joined
MOST_OF_SIZE = 64  # nodes of a size that another may be given the size of
STORED = ("float16", "float32")  # types of weights that are float32 values exactly


@dataclass(slots=True)
class Draft:
    """A layer of a network that is being made.

    options  layers that give the same for the sizes at hand: the first one that also holds for other sizes is taken
    """

    name: str
    options: tuple[Layer, ...]
    reads: tuple[str, ...]
    weights: ConvWeights | None = None

    @property
    def layer(self) -> Layer:
        return self.options[0]


@dataclass
class Drafts:
    """The layers so far, in an order in which each comes after those that it reads.

    folded  what was left out or joined with another layer, and how often
    """

    drafts: list[Draft] = field(default_factory=list)
    folded: Counter[str] = field(default_factory=Counter)
    _sizes: dict[str, Vec3] = field(default_factory=dict)
    _maps: dict[str, int] = field(default_factory=dict)
    _drafts_by_name: dict[str, Draft] = field(default_factory=dict)
    _name: str = "node"
    _kind: str = ""

    def input(self, maps: int, size: Vec3, order: str = "nczyx") -> Tensor:
        """Return the network's input as an array whose dimensions are in the order of the letters n, c, z, y, x."""
        if maps > LARGEST or max(size) > LARGEST:
            raise LayoutError(f"the input has {maps} maps of {text(size)} voxels, and {LARGEST} at most are computed")
        self._sizes[INPUT], self._maps[INPUT] = size, maps
        return whole(INPUT, maps, size, order)

    def at(self, name: str, kind: str) -> None:
        """Say which node of the framework's graph comes next, for the names of layers and for errors."""
        self._name, self._kind = name, kind

    def tensor(self, node: str) -> Tensor:
        """Return what a node gives, as an array (1, maps, z, y, x)."""
        return whole(node, self._maps[node], self._sizes[node])

    @property
    def input_maps(self) -> int:
        """Return the maps of the network's input."""
        return self._maps[INPUT]

    @property
    def here(self) -> str:
        """Name the node at hand in an error."""
        return f"node {excerpt(self._name, 60)} ({excerpt(self._kind, 60)})"

    def error(self, what: str) -> NetworkFileError:
        """Return the error that begins with the node at hand."""
        return NetworkFileError(f"{self.here} {what}")

    def unsupported(self, nearest: str | None, register: str) -> NetworkFileError:
        """Return the error for an operator that is not known.

        nearest   known operator with a similar name; register: function with which users add one
        """
        similar = f"; the nearest that is: {nearest}" if nearest else ""
        pooled = next((draft.name for draft in self.drafts if isinstance(draft.layer, OF_WHOLE_IMAGES)), None)
        besides = "" if pooled is None else f"; besides, node {excerpt(pooled, 60)} depends on the whole volume"
        return self.error(
            f"is not supported{similar}; write the network with operators that are, or register this one with "
            f"{register}{besides}"
        )

    # --- the parts of layers ---

    def values(self, array: npt.NDArray[np.generic], what: str) -> Real:
        """Return weights as float32; NetworkFileError if they are of another type, or not finite."""
        if array.dtype.name not in STORED:
            raise self.error(
                f"has {what} of type {array.dtype}, and networks are computed in float32; save the network with float32"
            )
        found = np.ascontiguousarray(array, np.float32)
        return self._finite(found, what)

    def _finite(self, array: npt.NDArray[np.floating], what: str) -> Real:
        with np.errstate(over="ignore"):
            found = np.ascontiguousarray(array, np.float32)
        finite = np.isfinite(found)
        if not finite.all():
            first = tuple(int(i) for i in np.unravel_index(int(finite.argmin()), finite.shape))
            raise self.error(
                f"has {int(finite.size - np.count_nonzero(finite))} of {finite.size} values of its {what} that are not "
                f"finite, the first {found[first]} at {first}; train or save the network again"
            )
        return found

    def _bias(self, bias: npt.NDArray[np.generic] | None, out: int) -> Real:
        found = np.zeros(out, np.float32) if bias is None else self.values(bias, "bias").reshape(-1)
        if found.shape != (out,):
            raise self.error(f"has {found.size} biases for {out} maps; save the network again")
        return found

    def _of_size(self, size: Vec3) -> list[str]:
        """Return the latest nodes of a size, the latest first."""
        return list(islice((name for name, own in reversed(self._sizes.items()) if own == size), MOST_OF_SIZE))

    def _emit(
        self,
        layer: Layer,
        reads: Sequence[Tensor],
        weights: ConvWeights | None = None,
        *,
        like: Tensor | None = None,
        options: Sequence[Layer] = (),
        size: Vec3 | None = None,
        dimensions: int = 5,
    ) -> Tensor:
        """Add a layer and return what it gives.

        like        an array whose dimensions the result has
        size        of the result; None: as the layer gives it
        dimensions  of the result's array
        """
        if len(self.drafts) == MOST_DRAFTS:
            raise self.error(f"is one layer more than the {MOST_DRAFTS:,} that are read; split the network")
        name = self._unused()
        first = reads[0]
        if size is None:
            size = max((t.size for t in reads), key=prod)
            size = vector(AxisLayer(layer, axis).size(size[axis]) for axis in range(3))
        if min(size) < 1:
            raise LayoutError(f"{self.here} gets {text(first.size)} voxels, which are too few for one output")
        maps = maps_after(layer, tuple(t.maps for t in reads))
        if maps > LARGEST:
            raise self.error(f"gives {maps} maps, and {LARGEST} at most are computed")
        draft = Draft(name, tuple(options) or (layer,), tuple(t.node for t in reads), weights)
        self.drafts.append(draft)
        self._drafts_by_name[name] = draft
        self._sizes[name], self._maps[name] = size, maps
        if like is not None:
            return Tensor(name, maps, size, like.dims)
        made = whole(name, maps, size)
        return made if dimensions == 5 else replace(made, dims=planar_dims(made, maps))

    def _unused(self) -> str:
        """Return a name for a layer that no other has, of printable characters without spaces."""
        words = "".join(sign if sign.isprintable() and not sign.isspace() else "_" for sign in self._name)
        name = words[: LONGEST_LINE - 8].strip("/") or "node"
        count, found = 1, name
        while found in self._sizes or found == INPUT:
            count += 1
            found = f"{name}_{count}"
        return found


def planar_dims(x: Tensor, maps: int) -> tuple[Dimension, ...]:
    """Return dimensions (1, maps, y, x) if the array has depth 1 and four of them."""
    dims = whole("", maps, x.size).dims
    return (*dims[:2], *dims[3:])
