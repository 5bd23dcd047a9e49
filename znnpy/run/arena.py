"""The arena of a stage: one block of memory with a view for every tensor, at the offset that the plan gives."""

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
        """Return the array that begins `offset` bytes into the block."""


class Arena:
    """Tensors by name."""

    def __init__(self, tensors: Sequence[Tensor], view: View) -> None:
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._view = view

    def tensor(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Return the tensor called `name` as a C-ordered array."""
        return self._view(shape, dtype, self._tensors[name].offset)

    def scratch(self, step: int) -> dict[str, Any]:
        """Return the scratch buffers of one choice as bytes, by the names that its primitive gave them."""
        prefix = f"step{step}."
        return {
            name.removeprefix(prefix): self._view((tensor.nbytes,), np.uint8, tensor.offset)
            for name, tensor in self._tensors.items()
            if name.startswith(prefix)
        }


def host_arena(block: Bytes, tensors: Sequence[Tensor]) -> Arena:
    """Return an arena in an aligned block of host memory."""

    def view(shape: tuple[int, ...], dtype: npt.DTypeLike, offset: int) -> Any:
        return np.ndarray(shape, dtype, buffer=block, offset=offset)

    return Arena(tensors, view)
