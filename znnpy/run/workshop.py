"""Where a session's arrays are and who moves them: what the walk through a plan asks of a processor or a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from znnpy.errors import ValuesOverflowError
from znnpy.network import Network
from znnpy.planner.plan import Choice, Plan, Tensor
from znnpy.shapes import LayerShape, Vec3
from znnpy.wording import option

if TYPE_CHECKING:
    from znnpy.kernels.contract import Footprint

Voxels = npt.NDArray[Any]
UNTRACED = nullcontext()  # enters nothing, as often as one likes


class Workshop(Protocol):
    """A context manager; its arrays are numpy's on the host, and those of its Device on a GPU.

    On a GPU everything but `wait` and `buffers` is queued: a call returns before the work is done.
    """

    def hands_for(self, choice: Choice) -> Any:
        """Whom its primitive prepares and binds for: a ThreadPool, or a Device."""

    @property
    def under_way(self) -> int:
        """Steps that may be submitted and not waited for when the next is."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *cause: Any) -> None: ...

    def abandon(self) -> None:
        """The device failed: nothing is asked of it any more."""

    def lay_out(self, nbytes: int, tensors: Sequence[Tensor], footprints: Sequence[Footprint]) -> None:
        """Take the arena; the footprints are those of the steps that will `run`.

        After weights are prepared: that needs room which the arena takes only when written to.
        """

    def tensor(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """That one of the arena, C order."""

    def scratch(self, step: int) -> Mapping[str, Any]:
        """The scratch buffers of one step by the names its primitive gave them."""

    def room(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """Beside the arena, C order; it holds anything."""

    def clear(self, kept: Any) -> None:
        """Zeros for the planes before a column."""

    def keep(self, kept: Any, x: Any, *, join: bool) -> None:
        """Keep the last planes of every image for the next step of the column.

        kept  (S, carried, y, x, f); of the step before; overwritten.
        x     (S, new, y, x, f); if `join`, (S, carried + new, ..), and first `kept` goes into its first planes.
        """

    def load(self, raw: Any, x: Any) -> None:
        """Normalise raw voxels (c, z, y, x) of any real dtype and strides into x (z, y, x, c)."""

    def store(self, fragments: Any, first: int, out: Any) -> None:
        """Put fragments in their places in the dense patch, in the output's dtype.

        fragments  (S, z, y, x, maps); may be overwritten. The first of them is image `first` of all.
        out        (maps, z, y, x) float32, float16 or uint8 (`round(255 * clip(x, 0, 1))`), any strides.
        """

    def run(self, index: int, step: Any, x: Any, out: Any, scratch: Mapping[str, Any], before: Any | None) -> None:
        """Run the step of choice `index`; `before` as for a CarryingStep. ValuesOverflowError here, or from `wait`."""

    def span(self, name: str, **facts: int) -> AbstractContextManager[None]:
        """Around what is one span of a trace, between `take` and `give`; nothing where there is no trace."""

    def buffers(
        self, raw: np.dtype[Any], out: np.dtype[Any], *, reads: int, writes: int
    ) -> tuple[Iterable[Voxels], Iterable[Voxels]]:
        """Arrays for `take` in the memory of the host, as many as are of use to so many steps, all and with output.

        On a GPU each is made when it is asked for, from any thread.
        """

    def take(self, raw: Voxels, out: Voxels | None, *, begins: bool) -> tuple[Any, Any | None]:
        """Begin a step: `raw` and `out` where `load` reads and `store` writes; `begins` a column."""

    def give(self) -> Any:
        """End the step that `take` began; a ticket for `wait`."""

    def done(self, ticket: Any) -> bool:
        """`wait` would not wait."""

    def wait(self, ticket: Any) -> None:
        """Until the step's output is where it belongs. ValuesOverflowError names the layer."""


def dtype_of(shape: LayerShape) -> np.dtype[Any]:
    """What a layer's input and output are stored in."""
    return np.dtype(np.float16 if shape.precision == "fp16" else np.float32)


def layer_of(plan: Plan, network: Network, index: int) -> str:
    """Choice `index` in words, for errors."""
    layer = plan.choices[index].layers[0]
    return f"layer {layer} ({network.layers[layer]})"


def corners(windows: Sequence[Vec3], images: range) -> npt.NDArray[np.int32]:
    """Dense voxel at which each of these images begins that poolings with such windows leave: (images, 3) int32.

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
    """The error for voxels that are beyond `kept` once they are normalised."""
    largest, kept = max(abs(raw.max()), abs(raw.min())), np.dtype(kept)
    precision = f"choose {option('precision', 'tf32')}, " if kept == np.float16 else ""
    return ValuesOverflowError(
        f"the volume holds values up to {largest:.6g}, and normalised they exceed {kept}'s largest number "
        f"{np.finfo(kept).max:.6g}; {precision}rescale the volume, or correct `normalise` in the network file"
    )


def output_overflow(largest: float, dtype: np.dtype[Any]) -> ValuesOverflowError:
    """The error for an output that `dtype` cannot hold."""
    return ValuesOverflowError(
        f"the output holds {largest:.6g}, beyond {dtype}'s largest number {np.finfo(dtype).max:.6g}; "
        f"choose {option('output_dtype', 'float32')}"
    )
