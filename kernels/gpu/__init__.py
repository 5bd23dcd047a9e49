"""Primitives on a CUDA device: their kernels in CUDA C++, compiled for the card that is there.

Everything here imports without CuPy and without a device; only `device` imports CuPy, when a device is opened.
"""
