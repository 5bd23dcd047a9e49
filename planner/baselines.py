"""Schemes that lose to fragments of one patch at a time; no session runs them, but a plan says by how much they lose.

A scheme says how many patches a step computes together (the paper's S), and which poolings give fragments. A pooling
that gives none is plain max-pooling: all layers run again for every offset of its window.

Source  Zlateski, Lee, Seung, ZNNi (SC16), section VI.A.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from znnpy.network import Network, Pool
from znnpy.planner.tiling_search import TilingSearch
from znnpy.planner.tilings import Sizes, Tiling
from znnpy.shapes import ChainShape, PoolShape, Precision, Vec3, add, multiply, subtract
from znnpy.sliding_layers import extent, layer_shape

BATCHES = (2, 4)


@dataclass(frozen=True, slots=True)
class Scheme:
    """A number of patches at a time, and the poolings that give fragments."""

    images: int
    fragments: tuple[bool, ...]  # of each pooling

    @property
    def words(self) -> str:
        """How a plan describes the scheme."""
        return f"{self.images} at a time" if self.images > 1 else "by plain max-pooling, every offset again"


def schemes(network: Network) -> Iterator[Scheme]:
    """Yield the schemes of several patches at a time, and of plain max-pooling where there are poolings."""
    pools = sum(isinstance(layer, Pool) for layer in network.layers)
    for images in BATCHES:
        yield Scheme(images, (True,) * pools)
    if pools:
        yield Scheme(1, (False,) * pools)


def shapes_of(network: Network, out: Vec3, scheme: Scheme, precision: Precision = "fp32") -> tuple[ChainShape, ...]:
    """Return the shape of every layer; `out` is the size of one image of the last output."""
    sizes, pools = [out], list(scheme.fragments)
    for layer in reversed(network.layers):
        size, window = sizes[-1], extent(layer)
        if isinstance(layer, Pool):
            size = multiply(size, window)
            sizes.append(subtract(add(size, window), (1, 1, 1)) if pools.pop() else size)
        else:
            sizes.append(subtract(add(size, window), (1, 1, 1)))
    sizes.reverse()
    wanted, images, found = iter(scheme.fragments), scheme.images, []
    for layer, maps, size in zip(network.layers, network.maps, sizes, strict=False):
        if isinstance(layer, Pool):
            shape: ChainShape = PoolShape(images, maps, size, layer.window, next(wanted), precision)
        else:
            shape = layer_shape(layer, images, maps, size, precision)
        found.append(shape)
        images = shape.out_shape[0]
    return tuple(found)


def repeats(network: Network, scheme: Scheme) -> int:
    """Return how often all is computed for one dense patch: once for every offset of the plain poolings."""
    windows = [layer.window for layer in network.layers if isinstance(layer, Pool)]
    return prod(prod(window) for window, kept in zip(windows, scheme.fragments, strict=True) if not kept)


@dataclass(frozen=True)
class Schemed(Tiling):
    """Patches of one shape by a scheme, which are never divided."""

    scheme: Scheme = Scheme(1, ())

    @property
    def step_input(self) -> Vec3:
        return self.shapes[0].in_shape[1:4]

    def steps_of(self, ahead: int) -> int:
        """Return the steps of all patches; no step of a patch is left out."""
        return -(-len(self.cover) // self.scheme.images) * repeats(self.space.network, self.scheme)

    def split(self, at_once: object) -> Schemed:
        return self


@dataclass
class SchemeSearch(TilingSearch):
    """The search among patches of one scheme."""

    scheme: Scheme = Scheme(1, ())

    @classmethod
    def like(cls, patches: TilingSearch, scheme: Scheme) -> SchemeSearch:
        """Return the search by a scheme for what another search of patches was asked for."""
        splits = patches.splits[:1]
        return cls(patches.request, patches.space, patches.options, splits, patches.patch, scheme=scheme)

    def tiling(self, patch: Vec3) -> Tiling:
        space = self.space
        z, y, x = (size // period for size, period in zip(patch, space.network.period, strict=True))
        shapes = shapes_of(space.network, (z, y, x), self.scheme, space.precision)
        return Schemed(space, patch, 0, shapes, (1,) * len(shapes), scheme=self.scheme)

    def _sizes(self, budget: int | None) -> Sizes:
        """Return all sizes there are: what does not fit as fragments may fit plain."""
        return super()._sizes(None)
