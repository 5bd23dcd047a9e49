"""Dense inference of 3D convolutional networks over volumes larger than memory: exact, planned, fast.

    import znnpy
    net = znnpy.load_network("network.yaml")   # layers and weights
    prediction = net(array)                     # (z, y, x) or (c, z, y, x) numpy array -> (maps, z, y, x) float32
    plan = znnpy.plan("network.yaml", ram="16G", shape=(512, 512, 512))
    report = znnpy.infer("volume.h5", network="network.yaml", out="prediction.h5", ram="16G")
    for box, block in znnpy.stream("volume.h5", "network.yaml"): ...  # finished blocks while the run goes on
    fast = znnpy.compile(module.eval())         # a PyTorch module; also znnpy.load_network("model.onnx")
    y = znnpy.ops.relu(x)                       # single operations on arrays

Each public name is imported when it is first used: `import znnpy` alone loads no numpy.
"""

from importlib import import_module

__version__ = "0.1.0"

TYPE_CHECKING = False  # true for type checkers; `typing` takes longer to import than a signal may go unanswered

__all__ = [
    "ArraySession",
    "BlockStream",
    "Box",
    "ClusterError",
    "ClusterReport",
    "CompiledModule",
    "Considered",
    "Conv",
    "ConvShape",
    "ConvWeights",
    "Device",
    "DeviceError",
    "DeviceLostError",
    "Event",
    "FilterShape",
    "Gpu",
    "MaxFilter",
    "Maxout",
    "MaxoutShape",
    "MissingExtraError",
    "Network",
    "NetworkFileError",
    "NoPlanError",
    "Normalise",
    "OutputError",
    "Plan",
    "PlanFileError",
    "Point",
    "Pool",
    "PoolShape",
    "Primitive",
    "Progress",
    "Report",
    "ResumeError",
    "RunPlan",
    "ShapeError",
    "ThreadError",
    "ThreadPool",
    "TrainedNetwork",
    "ValuesOverflowError",
    "Variant",
    "VerifyError",
    "VolumeError",
    "VramError",
    "ZnnpyError",
    "apply",
    "compile",
    "explain",
    "find_gpu",
    "from_torch",
    "infer",
    "load_network",
    "ops",
    "plan",
    "primitive",
    "stream",
]

if TYPE_CHECKING:
    from znnpy import ops
    from znnpy.array_session import ArraySession
    from znnpy.cluster.report import ClusterReport
    from znnpy.errors import (
        ClusterError,
        DeviceError,
        DeviceLostError,
        MissingExtraError,
        NetworkFileError,
        NoPlanError,
        OutputError,
        PlanFileError,
        ResumeError,
        ShapeError,
        ThreadError,
        ValuesOverflowError,
        VerifyError,
        VolumeError,
        VramError,
        ZnnpyError,
    )
    from znnpy.inference import infer
    from znnpy.kernels.apply import apply
    from znnpy.kernels.contract import Primitive, Variant
    from znnpy.kernels.gpu.device import Device, find_gpu
    from znnpy.kernels.table import find as primitive
    from znnpy.kernels.thread_pool import ThreadPool
    from znnpy.machine import Gpu
    from znnpy.measure.budget import Progress
    from znnpy.network import Conv, ConvWeights, MaxFilter, Maxout, Network, Normalise, Pool
    from znnpy.patches import Box
    from znnpy.planner.plan import Plan
    from znnpy.planner.run_plan import RunPlan
    from znnpy.planning import plan
    from znnpy.report.memory_sweep import Point
    from znnpy.report.plan_text import explain
    from znnpy.report.rejected import Considered
    from znnpy.report.run_report import Report
    from znnpy.run.pipeline import Event
    from znnpy.shapes import ConvShape, FilterShape, MaxoutShape, PoolShape
    from znnpy.streaming import BlockStream, stream
    from znnpy.torch_modules import CompiledModule, compile, from_torch
    from znnpy.trained import TrainedNetwork, load_network
else:
    _HOMES = {  # module -> its public names
        "znnpy.array_session": "ArraySession",
        "znnpy.cluster.report": "ClusterReport",
        "znnpy.errors": (
            "ClusterError DeviceError DeviceLostError MissingExtraError NetworkFileError NoPlanError OutputError "
            "PlanFileError ResumeError ShapeError ThreadError ValuesOverflowError VerifyError VolumeError VramError "
            "ZnnpyError"
        ),
        "znnpy.inference": "infer",
        "znnpy.kernels.apply": "apply",
        "znnpy.kernels.thread_pool": "ThreadPool",
        "znnpy.kernels.gpu.device": "Device find_gpu",
        "znnpy.kernels.contract": "Primitive Variant",
        "znnpy.kernels.table": "find",
        "znnpy.machine": "Gpu",
        "znnpy.network": "Conv ConvWeights MaxFilter Maxout Network Normalise Pool",
        "znnpy.patches": "Box",
        "znnpy.planner.plan": "Plan",
        "znnpy.planner.run_plan": "RunPlan",
        "znnpy.report.memory_sweep": "Point",
        "znnpy.report.plan_text": "explain",
        "znnpy.report.rejected": "Considered",
        "znnpy.planning": "plan",
        "znnpy.report.run_report": "Report",
        "znnpy.run.pipeline": "Event",
        "znnpy.measure.budget": "Progress",
        "znnpy.shapes": "ConvShape FilterShape MaxoutShape PoolShape",
        "znnpy.streaming": "BlockStream stream",
        "znnpy.torch_modules": "CompiledModule compile from_torch",
        "znnpy.trained": "TrainedNetwork load_network",
    }
    _MODULES = {name: module for module, names in _HOMES.items() for name in names.split()}

    def __getattr__(name: str) -> object:
        """Import a public name from its module when it is first asked for."""
        if name not in __all__:
            raise AttributeError(f"module 'znnpy' has no attribute {name!r}")
        if name == "ops":
            return import_module("znnpy.ops")
        there = "find" if name == "primitive" else name
        return getattr(import_module(_MODULES[there]), there)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
