"""Implicit matrix product on tensor cores or float32 units: the lowered matrix exists only in shared memory."""
