"""One block of memory per device; every tensor of a step is a view into it, at the offset the plan says."""

from __future__ import annotations

from math import prod

import numpy as np
import numpy.typing as npt

from znnpy.kernels.aligned import aligned_bytes
from znnpy.planner.plan import Tensor


class Arena:
    """`nbytes` bytes of host memory, aligned; pages are touched when first written."""

    def __init__(self, nbytes: int, tensors: tuple[Tensor, ...]) -> None:
        self._bytes = aligned_bytes(nbytes)
        self._tensors = {tensor.name: tensor for tensor in tensors}

    def bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor called `name` as bytes."""
        tensor = self._tensors[name]
        return self._bytes[tensor.offset : tensor.offset + tensor.nbytes]

    def floats(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """The tensor called `name` as a C-ordered float32 array of `shape`."""
        return self.bytes(name)[: 4 * prod(shape)].view(np.float32).reshape(shape)

    def scratch(self, step: int) -> dict[str, npt.NDArray[np.uint8]]:
        """The scratch buffers of one step by the names its primitive gave them."""
        prefix = f"step{step}."
        return {name.removeprefix(prefix): self.bytes(name) for name in self._tensors if name.startswith(prefix)}
