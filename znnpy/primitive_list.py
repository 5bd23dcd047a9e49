"""List the primitives, and find out by means of typical layers which of them do not run on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from znnpy.errors import DeviceError
from znnpy.graph_shapes import (
    GlobalPoolShape,
    GraphConvShape,
    Normed,
    NormShape,
    PadShape,
    PointShape,
    TransposeShape,
    UpsampleShape,
    WindowPoolShape,
)
from znnpy.kernels.contract import Kind, Primitive
from znnpy.kernels.cpu.native.library import why_not
from znnpy.kernels.table import TABLE
from znnpy.layer_shapes import LayerShape
from znnpy.layers import ONE, ZERO
from znnpy.machine import this_machine
from znnpy.report.wide_table import WideOrNarrow, columns_for, indented
from znnpy.run.target import DRIVER
from znnpy.shapes import ConvShape, FilterShape, MaxoutShape, PoolShape, Vec3

CUBE: Vec3 = (15, 15, 15)  # a size that windows of 2 pool into fragments
TWICE: Vec3 = (30, 30, 30)
TWO: Vec3 = (2, 2, 2)
SAMPLES: dict[Kind, tuple[LayerShape, ...]] = {
    "conv": tuple(ConvShape(1, fin, 16, CUBE, (3, 3, 3), "relu") for fin in (1, 16)),  # a first layer, and another
    "pool": (PoolShape(1, 16, CUBE, (2, 2, 2)), PoolShape(1, 16, (16, 16, 16), (2, 2, 2), fragments=False)),
    "maxfilter": (FilterShape(1, 16, CUBE, (2, 2, 2)),),
    "maxout": (MaxoutShape(1, 16, CUBE, 2),),
    "graph_conv": (
        GraphConvShape((16,), 16, CUBE, (3, 3, 3), ONE, ONE, activation="relu"),
        GraphConvShape((16,), 16, CUBE, (3, 3, 3), ONE, ONE, stride=TWO, activation="relu"),
        GraphConvShape((16,), 16, CUBE, (3, 3, 3), ONE, ONE, groups=16, activation="relu"),
        GraphConvShape((16,), 16, CUBE, (3, 3, 3), ONE, ONE, activation="relu", precision="fp16"),
        GraphConvShape((16,), 16, TWICE, (3, 3, 3), ONE, ONE, factors=(TWO,), precision="fp16"),
        GraphConvShape((16,), 16, CUBE, (3, 3, 3), ONE, ONE, normed=Normed(16, 1e-5, True), precision="fp16"),
    ),
    "conv_transpose": (TransposeShape(16, 16, CUBE, TWICE, TWO, ZERO, stride=TWO),),
    "window_pool": (WindowPoolShape(16, CUBE, TWO, TWO),),
    "upsample": (UpsampleShape(16, CUBE, TWICE, TWO, ZERO),),
    "point": (PointShape("add", (16, 16), CUBE, "relu"),),
    "norm": (NormShape(16, CUBE, 16, activation="relu"),),
    "global_pool": (GlobalPoolShape(16, CUBE),),
    "pad": (PadShape(16, CUBE, (17, 17, 17), (-1, -1, -1), ZERO, CUBE, "reflect"),),
}


def why_not_here(table: Sequence[Primitive] = TABLE) -> dict[str, str]:
    """Return the primitives that do not run on this machine, by name, with the reason."""
    machine = this_machine()
    no_gpu = ""
    try:
        machine = replace(machine, gpu=DRIVER.find())
    except DeviceError as error:
        no_gpu = str(error)
    lacking = {}
    uncompiled = why_not(machine)
    for primitive in table:
        reasons = [primitive.why_not(shape, machine) for shape in SAMPLES[primitive.kind]]
        if None in reasons:
            continue
        if primitive.name.startswith("gpu.") and no_gpu:
            lacking[primitive.name] = no_gpu
        else:  # a reason that concerns the layer says nothing about this machine
            needs = [reason for reason in reasons if reason is not None and reason.startswith("needs")]
            lacking[primitive.name] = str(uncompiled if uncompiled in reasons else (*needs, reasons[-1])[0])
    return lacking


def primitives_table(table: Sequence[Primitive]) -> RenderableType:
    """Lay out the output of `znnpy primitives`: a table, or on a narrow terminal a paragraph for each primitive."""
    wide = Table(box=SIMPLE_HEAD, show_edge=False)
    wide.add_column("primitive", no_wrap=True)
    wide.add_column("layer", no_wrap=True)
    wide.add_column("when")
    wide.add_column("source")
    paragraphs: list[RenderableType] = []
    for primitive in table:
        wide.add_row(primitive.name, primitive.kind, primitive.summary, primitive.source)
        paragraphs += indented((f"{primitive.name}  {primitive.kind}", primitive.summary, primitive.source))
    names, kinds = [primitive.name for primitive in table], [primitive.kind for primitive in table]
    return WideOrNarrow(wide, Group(*paragraphs), columns_for(names, kinds, sentences=2))
