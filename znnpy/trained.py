"""A network with its weights, to call on numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from znnpy.array_session import ArraySession
from znnpy.errors import NetworkFileError, NoPlanError
from znnpy.formats.networks import DEFAULT, SHIPPED, NetworkFile, read_network
from znnpy.formats.weights import read_weights
from znnpy.machine import limits_of, this_machine
from znnpy.messages import excerpt, option
from znnpy.network import ConvWeights, Network
from znnpy.planner.memory import mebibytes
from znnpy.run.choice import Wishes
from znnpy.shapes import FLOAT32, Vec3
from znnpy.volume.array import ArrayVolume

if TYPE_CHECKING:
    from znnpy.planner.plan import Plan
    from znnpy.run.pipeline import Event


@dataclass(frozen=True)
class TrainedNetwork:
    """Layers and weights. Calling it gives the dense prediction of an array."""

    network: Network
    weights: tuple[ConvWeights, ...]

    def __repr__(self) -> str:
        """One line; `network` and `weights` hold the rest."""
        return f"<TrainedNetwork of {self.network!r}>"

    def __call__(
        self,
        array: npt.NDArray[Any],
        *,
        border: str = "valid",
        plan: str | Path | Plan | None = None,
        ram: int | str | None = None,
        threads: int | None = None,
        patch: Vec3 | None = None,
        only: str | Sequence[str] = (),
        cover: str | None = None,
        depth_first: bool = True,
        device: str = "auto",
        vram: int | str | None = None,
        precision: str | None = None,
        progress: Callable[[Event], None] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Dense prediction of a volume that fits into memory. `session` saves time where there are many arrays.

        array        (z, y, x) or (c, z, y, x), any integer or float dtype: grey values, before the network's
                     `normalise`.
        border       "valid": the output is field of view - 1 voxels smaller; "reflect": as large as the input.
        plan         a Plan, or a file that `znnpy plan --out` wrote; None: the fastest plan is made.
        ram          limit for the whole process, in bytes or as "2G"; None: 3/4 of the machine's memory.
        threads      threads that compute; None: as many as the cores that the process may use.
        patch        output voxels (z, y, x) of one patch, or of one step of a column; None: the fastest.
        only         name of a primitive, or several, for the layers that they fit; empty: any.
        cover        "columns" or "patches", as for `znnpy.infer`; None: either.
        depth_first  True: layers behind a pooling may take its fragments in parts, which needs less memory.
        device       "cpu", "gpu", or "auto": a GPU where one works, else the CPU.
        vram         limit for the memory of the GPU, in bytes or as "12G"; None: 90 % of what is free.
        precision    on a GPU "fp32", "tf32" or "fp16"; None: fp32. The CPU always computes in fp32.
        progress     called with an Event in the calling thread, before the first patch and after each one.

        Returns (maps, z, y, x) float32.

        ShapeError when the array is smaller than the field of view, NoPlanError when nothing fits into `ram` or `vram`,
        PlanFileError when `plan` does not fit network or machine, DeviceError when there is no GPU for device "gpu",
        VolumeError for a dtype or values that cannot be used.
        """
        ask = Wishes(plan, ram, threads, patch, _names(only), cover, depth_first, device, vram, precision)
        ArrayVolume(array)  # refuses what is no volume before its shape is asked for
        with ArraySession(self.network, self.weights, array.shape, array.dtype, border, ask) as run:
            return run(array, progress=progress)

    def session(
        self,
        shape: tuple[int, ...],
        *,
        dtype: npt.DTypeLike = np.float32,
        border: str = "valid",
        plan: str | Path | Plan | None = None,
        ram: int | str | None = None,
        threads: int | None = None,
        patch: Vec3 | None = None,
        only: str | Sequence[str] = (),
        cover: str | None = None,
        depth_first: bool = True,
        device: str = "auto",
        vram: int | str | None = None,
        precision: str | None = None,
    ) -> ArraySession:
        """Plans and prepares once, for any number of arrays of one shape.

            with net.session((64, 64, 64), ram="2G") as run:
                for array, out in blocks:
                    run(array, out=out)

        shape        of the arrays, (z, y, x) or (c, z, y, x).
        dtype        of the arrays, or one with as many bytes; arrays of types with fewer bytes are taken too.
        border       "valid": the output is field of view - 1 voxels smaller; "reflect": as large as the input.
        plan         a Plan, or a file that `znnpy plan --out` wrote; None: the fastest plan is made.
        ram          limit for the whole process, in bytes or as "2G"; None: 3/4 of the machine's memory.
        threads      threads that compute; None: as many as the cores that the process may use.
        patch        output voxels (z, y, x) of one patch, or of one step of a column; None: the fastest.
        only         name of a primitive, or several, for the layers that they fit; empty: any.
        cover        "columns" or "patches", as for `znnpy.infer`; None: either.
        depth_first  True: layers behind a pooling may take its fragments in parts, which needs less memory.
        device       "cpu", "gpu", or "auto": a GPU where one works, else the CPU.
        vram         limit for the memory of the GPU, in bytes or as "12G"; None: 90 % of what is free.
        precision    on a GPU "fp32", "tf32" or "fp16"; None: fp32. The CPU always computes in fp32.

        Returns an ArraySession. Any thread may call it; calls take turns.

        ShapeError when `shape` is smaller than the field of view, NoPlanError when nothing fits into `ram` or `vram`,
        PlanFileError when `plan` does not fit network or machine, DeviceError when there is no GPU for device "gpu":
        these two when the session is entered.
        """
        ask = Wishes(plan, ram, threads, patch, _names(only), cover, depth_first, device, vram, precision)
        return ArraySession(self.network, self.weights, shape, dtype, border, ask)


def _names(only: str | Sequence[str]) -> tuple[str, ...]:
    return (only,) if isinstance(only, str) else tuple(only)


def load_network(where: str | Path, weights: str | Path | None = None) -> TrainedNetwork:
    """Read a network and its weights.

    where    network file (.yaml, .znni), or the name of a network that ships.
    weights  weights file, .npz or .safetensors; None: the one that the network file names.

    NetworkFileError says what is wrong with either.
    """
    return load_trained(read_network(where), weights)


def load_trained(file: NetworkFile, weights: str | Path | None = None, ram: int | str | None = None) -> TrainedNetwork:
    """The network of `file` with `weights`, or with those that the file names.

    NoPlanError, before they are read, when the weights alone take more than `ram`, by default 3/4 of the machine's
    memory: a small compressed file may hold as many as a network asks for.
    """
    path = Path(weights) if weights is not None else file.weights
    if path is not None:
        needed, allowed = FLOAT32 * file.network.parameters, limits_of(this_machine(), ram).ram_bytes
        if needed > allowed:
            error = NoPlanError(
                f"the weights of {excerpt(file.network.name, 60)} take {mebibytes(needed)}, and {option('ram')} allows "
                f"{mebibytes(allowed)}; allow more, or give a smaller network"
            )
            error.needed_bytes = needed
            raise error
        return TrainedNetwork(file.network, read_weights(path, file.network))
    if not file.network.convolutions:
        return TrainedNetwork(file.network, ())
    if file.path.parent == SHIPPED:
        raise NetworkFileError(
            f"the network {file.network.name} ships for planning only and has no weights; give its own with "
            f"{option('weights', 'FILE.npz')}, or run {DEFAULT}, which ships with weights"
        )
    also = "" if file.path.suffix == ".znni" else ", or name it in the network file (`weights: FILE.npz`)"
    raise NetworkFileError(
        f"{file.path} names no weights, and none were given; give {option('weights', 'FILE.npz')}{also}"
    )
