"""Choosing: patch shape and a primitive per layer, under a memory limit, for the most output voxels per second."""

if __name__ != "znnpy.planner":
    raise ImportError(f"this folder is znnpy.planner, not {__name__}; import znnpy.planner")
