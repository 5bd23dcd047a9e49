"""Compiled kernels, one library per vector instruction set; the C++ sources have no dependencies."""
