"""Which primitives run on this machine: each is asked about layers that it is made for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from znnpy.errors import DeviceError
from znnpy.kernels.gpu.device import find_gpu
from znnpy.kernels.primitive import Kind, Primitive
from znnpy.kernels.table import TABLE
from znnpy.machine import this_machine
from znnpy.shapes import ConvShape, FilterShape, LayerShape, MaxoutShape, PoolShape, Vec3

CUBE: Vec3 = (15, 15, 15)  # pooled into fragments by windows of 2
SAMPLES: dict[Kind, tuple[LayerShape, ...]] = {
    "conv": tuple(ConvShape(1, fin, 16, CUBE, (3, 3, 3), "relu") for fin in (1, 16)),  # a first layer, and another
    "pool": (PoolShape(1, 16, CUBE, (2, 2, 2)), PoolShape(1, 16, (16, 16, 16), (2, 2, 2), fragments=False)),
    "maxfilter": (FilterShape(1, 16, CUBE, (2, 2, 2)),),
    "maxout": (MaxoutShape(1, 16, CUBE, 2),),
}


def why_not_here(table: Sequence[Primitive] = TABLE) -> dict[str, str]:
    """Primitives that do not run on this machine, by name, and why."""
    machine = this_machine()
    no_gpu = ""
    try:
        machine = replace(machine, gpu=find_gpu())
    except DeviceError as error:
        no_gpu = str(error)
    lacking = {}
    for primitive in table:
        reasons = [primitive.why_not(shape, machine) for shape in SAMPLES[primitive.kind]]
        if None not in reasons:
            lacking[primitive.name] = no_gpu if no_gpu and primitive.name.startswith("gpu.") else str(reasons[-1])
    return lacking
