"""The shapes of all layers: of chains (`shapes`) and of graphs (`graph_shapes`)."""

from dataclasses import replace

from znnpy.graph_shapes import GraphShape
from znnpy.shapes import ChainShape

LayerShape = ChainShape | GraphShape


def with_batch(shape: LayerShape, batch: int) -> LayerShape:
    """Return the shape of the same layer for so many images at a time; ValueError: a layer of a graph takes one."""
    if isinstance(shape, ChainShape):
        return replace(shape, batch=batch)
    if batch != 1:
        raise ValueError(f"a layer of a graph takes one image at a time, not {batch} ({shape})")
    return shape
