"""The protocol between a stage of a plan and the device that runs it: memory, transfers and steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from znnpy.errors import ValuesOverflowError
from znnpy.kernels.dtypes import kept_dtype
from znnpy.layer_shapes import LayerShape
from znnpy.messages import option
from znnpy.network import Network
from znnpy.planner.plan import Choice, Plan, Tensor
from znnpy.shapes import Vec3

if TYPE_CHECKING:
    from znnpy.kernels.contract import Footprint

Voxels = npt.NDArray[Any]
UNTRACED = nullcontext()  # may be entered any number of times


class Backend(Protocol):
    """A processor or a GPU that runs a stage. A context manager.

    Its arrays are numpy's on the host, and those of its Device on a GPU. On a GPU everything except `wait` and
    `buffers` is queued: a call returns before the work is done.
    """

    def executor_for(self, choice: Choice) -> Any:
        """Return what the primitive of a choice prepares and binds for: a ThreadPool, or a Device."""

    @property
    def max_in_flight(self) -> int:
        """Number of steps that may be submitted and not waited for when the next one is."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *cause: Any) -> None: ...

    def abandon(self) -> None:
        """Ask nothing of a device that failed any more."""

    def allocate_arena(self, nbytes: int, tensors: Sequence[Tensor], footprints: Sequence[Footprint]) -> None:
        """Allocate the arena for the steps with these footprints.

        It is called after weights are prepared, because preparing needs memory that the arena takes once written to.
        """

    def tensor(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Return a tensor of the arena, in C order."""

    def scratch(self, step: int) -> Mapping[str, Any]:
        """Return the scratch buffers of one choice by the names that its primitive gave them."""

    def allocate(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Allocate an array beside the arena, in C order, with any content."""

    def clear_carry(self, kept: Any) -> None:
        """Write zeros for the planes before a column."""

    def save_carry(self, kept: Any, x: Any, *, join: bool) -> None:
        """Save the last planes of every image for the next step of the column.

        kept  (S, carried, y, x, f), the planes of the step before; overwritten
        x     (S, new, y, x, f); if `join`, (S, carried + new, ..), and `kept` is copied into its first planes before
        """

    def load(self, raw: Any, x: Any) -> None:
        """Normalise raw voxels (c, z, y, x) of any real dtype and strides into `x` (z, y, x, c)."""

    def store(self, fragments: Any, first: int, out: Any) -> None:
        """Put fragments in their places in the dense patch, in the dtype of the output.

        fragments  (S, z, y, x, maps); may be overwritten. The first of them is image `first` of all images.
        out        (maps, z, y, x) float32, float16 or uint8 (`round(255 * clip(x, 0, 1))`), any strides.
        """

    def run(self, index: int, step: Any, x: Any, out: Any, scratch: Mapping[str, Any], before: Any | None) -> None:
        """Run the bound primitive of choice `index`. ValuesOverflowError is raised here or by `wait`.

        before  carried planes for a CarryingStep that reads them where they are kept; None: there are none
        """

    def span(self, name: str, **facts: int) -> AbstractContextManager[None]:
        """Trace what happens within as one span, between `begin_step` and `end_step`."""

    def buffers(
        self, raw: np.dtype[Any], out: np.dtype[Any], *, reads: int, writes: int
    ) -> tuple[Iterable[Voxels], Iterable[Voxels]]:
        """Return input and output arrays for `begin_step`, in the memory of the host.

        reads, writes  steps of the run, and those with output: there are no more arrays than are useful

        On a GPU each array is made when it is asked for, from any thread.
        """

    def begin_step(self, raw: Voxels, out: Voxels | None, *, begins: bool) -> tuple[Any, Any | None]:
        """Begin a step; return the arrays that `load` reads and `store` writes. `begins`: the step begins a column."""

    def end_step(self) -> Any:
        """End the step that `begin_step` began; return a ticket for `wait`."""

    def done(self, ticket: Any) -> bool:
        """Return whether `wait` would return at once."""

    def wait(self, ticket: Any) -> None:
        """Wait until the output of the step is in its array. ValuesOverflowError names the layer."""


def dtype_of(shape: LayerShape) -> np.dtype[Any]:
    """Return the dtype of a layer's input and output."""
    return kept_dtype(shape.precision)


def layer_of(plan: Plan, network: Network, index: int) -> str:
    """Name the layer of choice `index`, for errors."""
    layer = plan.choices[index].layers[0]
    return f"layer {layer} ({network.layers[layer]})"


def corners(windows: Sequence[Vec3], images: range) -> npt.NDArray[np.int32]:
    """Return the dense voxel at which each image begins after poolings with these windows: (images, 3) int32.

    Voxel i of fragment o1 of the first pooling, o2 of the second, .. is voxel o1 + p1 * (o2 + p2 * (.. + i)).
    """
    places = np.zeros((len(images), 3), np.int32)
    for row, image in enumerate(images):
        z = y = x = 0
        rest = image
        for pz, py, px in reversed(windows):  # the last pooling's offset counts fastest
            rest, offset = divmod(rest, pz * py * px)
            z, y, x = z * pz + offset // (py * px), y * py + offset // px % py, x * px + offset % px
        places[row] = z, y, x
    return places


def input_overflow(raw: Voxels, kept: npt.DTypeLike = np.float32) -> ValuesOverflowError:
    """Return the error for voxels that exceed the dtype `kept` once they are normalised."""
    largest, kept = max(abs(raw.max()), abs(raw.min())), np.dtype(kept)
    precision = f"choose {option('precision', 'tf32')}, " if kept == np.float16 else ""
    return ValuesOverflowError(
        f"the volume holds values up to {largest:.6g}, and normalised they exceed {kept}'s largest number "
        f"{np.finfo(kept).max:.6g}; {precision}rescale the volume, or correct `normalise` in the network file"
    )


def output_overflow(largest: float, dtype: np.dtype[Any]) -> ValuesOverflowError:
    """Return the error for an output that exceeds `dtype`."""
    return ValuesOverflowError(
        f"the output holds {largest:.6g}, beyond {dtype}'s largest number {np.finfo(dtype).max:.6g}; "
        f"choose {option('output_dtype', 'float32')}"
    )
