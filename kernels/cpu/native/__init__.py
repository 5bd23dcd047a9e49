"""Compiled kernels, one library for each set of vector instructions; the source is C++ without any dependency."""
