"""One block of memory per device; every tensor of a step is a view into it, at the offset the plan says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from znnpy.planner.plan import Tensor

if TYPE_CHECKING:
    from znnpy.kernels.contract import Bytes


class View(Protocol):
    """C-ordered arrays in one block of memory."""

    def __call__(self, shape: tuple[int, ...], dtype: npt.DTypeLike, offset: int) -> Any:
        """The one that begins `offset` bytes into the block."""


class Arena:
    """The tensors of a step by name."""

    def __init__(self, tensors: Sequence[Tensor], view: View) -> None:
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._view = view

    def tensor(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """The tensor called `name` as a C-ordered array."""
        return self._view(shape, dtype, self._tensors[name].offset)

    def scratch(self, step: int) -> dict[str, Any]:
        """The scratch buffers of one step by the names its primitive gave them, as bytes."""
        prefix = f"step{step}."
        return {
            name.removeprefix(prefix): self._view((tensor.nbytes,), np.uint8, tensor.offset)
            for name, tensor in self._tensors.items()
            if name.startswith(prefix)
        }


def host_arena(block: Bytes, tensors: Sequence[Tensor]) -> Arena:
    """In a block of host memory, aligned."""

    def view(shape: tuple[int, ...], dtype: npt.DTypeLike, offset: int) -> Any:
        return np.ndarray(shape, dtype, buffer=block, offset=offset)

    return Arena(tensors, view)
