"""Dense inference of 3D convolutional networks over volumes larger than memory: exact, planned, fast.

    import znnpy
    net = znnpy.load_network("network.yaml")   # layers and weights
    prediction = net(array)                     # (z, y, x) or (c, z, y, x) numpy array -> (maps, z, y, x) float32
    plan = znnpy.plan("network.yaml", ram="16G", shape=(512, 512, 512))
    report = znnpy.infer("volume.h5", network="network.yaml", out="prediction.h5", ram="16G")

Public names open their rooms on first use: `import znnpy` alone loads no numpy.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {  # public name -> (room, name there)
    "ConvShape": ("znnpy.shapes", "ConvShape"),
    "ConvWeights": ("znnpy.network", "ConvWeights"),
    "Crew": ("znnpy.kernels.crew", "Crew"),
    "Network": ("znnpy.network", "Network"),
    "Plan": ("znnpy.planner.plan", "Plan"),
    "PoolShape": ("znnpy.shapes", "PoolShape"),
    "TrainedNetwork": ("znnpy.trained", "TrainedNetwork"),
    "ZnnpyError": ("znnpy.errors", "ZnnpyError"),
    "apply": ("znnpy.kernels.apply", "apply"),
    "infer": ("znnpy.inference", "infer"),
    "load_network": ("znnpy.trained", "load_network"),
    "plan": ("znnpy.planning", "plan"),
    "primitive": ("znnpy.kernels.table", "find"),
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'znnpy' has no attribute {name!r}")
    room, there = _HOMES[name]
    return getattr(import_module(room), there)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
