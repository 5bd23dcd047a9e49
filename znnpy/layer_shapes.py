"""The shapes of all layers: of chains (`shapes`) and of graphs (`graph_shapes`)."""

from znnpy.graph_shapes import GraphShape
from znnpy.shapes import ChainShape

LayerShape = ChainShape | GraphShape
