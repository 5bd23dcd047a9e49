"""Implicit matrix product: the lowered matrix exists only in shared memory, on tensor cores or float32 units."""
