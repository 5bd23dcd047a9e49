"""Primitives for CUDA devices: kernels in CUDA C++, compiled at run time for the installed GPU.

Everything here imports without CuPy and without a device; CuPy is imported only when a device is looked for or opened.
"""
