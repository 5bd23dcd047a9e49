"""A network with its weights, to call on numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from znnpy.array_session import ArraySession
from znnpy.errors import NetworkFileError, NoPlanError
from znnpy.formats.weights import check_weights, read_weights
from znnpy.machine import limits_of, this_machine
from znnpy.messages import excerpt, option
from znnpy.network import ConvWeights, Network
from znnpy.network_files import DEFAULT, SHIPPED, NetworkFile, read_asked, read_network
from znnpy.option_declarations import method_of
from znnpy.option_values import Meaning
from znnpy.options import CallOptions, SessionOptions
from znnpy.shapes import FLOAT32
from znnpy.units import mebibytes
from znnpy.volume.array import ArrayVolume
from znnpy.volume.statistics import with_statistics


@dataclass(frozen=True)
class TrainedNetwork:
    """Layers and weights. Calling it gives the dense prediction of an array.

    NetworkFileError if the weights are not those that the layers take.
    """

    network: Network
    weights: tuple[ConvWeights, ...]

    def __post_init__(self) -> None:
        check_weights(self.network, self.weights)

    def __repr__(self) -> str:
        """Return one line; `network` and `weights` hold the rest."""
        return f"<TrainedNetwork of {self.network!r}>"

    @method_of(CallOptions)
    def __call__(self, asked: CallOptions) -> npt.NDArray[np.float32]:
        """Return the prediction of a volume that fits into memory, (maps, z, y, x) float32; uint8 of labels.

        `session` saves time if there are many arrays.

        OPTIONS

        ShapeError when the array is smaller than the field of view, or windows do not suit the network; NoPlanError
        when nothing fits into `ram` or `vram`, PlanFileError when `plan` does not fit network or machine, DeviceError
        when there is no GPU for device "gpu", VolumeError for a dtype or values that cannot be used.
        """
        array = asked.array
        volume = ArrayVolume(array)  # refuses an object that is no volume before its shape is used
        network = with_statistics(read_asked(self, asked).network, volume)
        with ArraySession(network, self.weights, array.shape, array.dtype, asked.border, asked) as run:
            return run(array, progress=asked.progress)

    @method_of(SessionOptions)
    def session(self, asked: SessionOptions) -> ArraySession:
        """Plan and prepare once for each shape, for any number of arrays.

            with net.session((64, 64, 64), ram="2G") as run:
                for array, out in blocks:
                    run(array, out=out)

        OPTIONS

        Returns an ArraySession. Any thread may call it; calls run one after the other.

        ShapeError when `shape` is smaller than the field of view, or windows do not suit the network; NoPlanError when
        nothing fits into `ram` or `vram`, PlanFileError when `plan` does not fit network or machine, DeviceError when
        there is no GPU for device "gpu"; the last two are raised when the session is entered, or by the first array.
        """
        network = read_asked(self, asked).network
        return ArraySession(network, self.weights, asked.shape, asked.dtype, asked.border, asked)


def load_network(
    where: str | Path, weights: str | Path | None = None, meaning: Meaning | None = None
) -> TrainedNetwork:
    """Read a network and its weights.

    where    network file (.yaml, .znni, .onnx, .pt2, rdf.yaml), or the name of a network that ships.
    weights  weights file, .npz or .safetensors; None: the one that the network file names.
    meaning  "sliding", "whole" or "windows": what an output voxel is; None: what the network file says, windows if
             every voxel depends on the whole volume, or sliding if the network supports it.

    NetworkFileError says what is wrong with either file; ShapeError if the network does not have that meaning.
    """
    return load_trained(read_network(where, meaning), weights)


def load_trained(file: NetworkFile, weights: str | Path | None = None, ram: int | str | None = None) -> TrainedNetwork:
    """Return the network of `file` with `weights`, or with those that the file names.

    NoPlanError, before they are read, when the weights alone take more than `ram`, by default 3/4 of the machine's
    memory: a small compressed file may unpack to any number of weights.
    """
    if file.members:
        if weights is not None:
            raise NetworkFileError(
                f"{option('weights')} is one file, and {len(file.members)} networks are given; leave it out, and name "
                "the weights in the network files"
            )
        _check_fits(file.network, ram)
        sets = [load_trained(member, None, ram).weights for member in file.members]
        return TrainedNetwork(file.network, tuple(one for some in sets for one in some))
    path = Path(weights) if weights is not None else file.weights
    if path is None and file.held is not None:
        return TrainedNetwork(file.network, file.held)
    if path is not None:
        _check_fits(file.network, ram)
        return TrainedNetwork(file.network, read_weights(path, file.network))
    if not file.network.weighted:
        return TrainedNetwork(file.network, ())
    assert file.path is not None, "what was not read came with its weights"
    if file.path.parent == SHIPPED:
        raise NetworkFileError(
            f"the network {file.network.name} ships for planning only and has no weights; give its own with "
            f"{option('weights', 'FILE.npz')}, or run {DEFAULT}, which ships with weights"
        )
    also = "" if file.path.suffix == ".znni" else ", or name it in the network file (`weights: FILE.npz`)"
    raise NetworkFileError(
        f"{file.path} names no weights, and none were given; give {option('weights', 'FILE.npz')}{also}"
    )


def _check_fits(network: Network, ram: int | str | None) -> None:
    """Raise NoPlanError if the weights of all members of a network alone take more than a limit."""
    needed = FLOAT32 * network.parameters * network.members
    allowed = limits_of(this_machine(), ram).ram_bytes
    if needed > allowed:
        error = NoPlanError(
            f"the weights of {excerpt(network.name, 60)} take {mebibytes(needed)}, and {option('ram')} allows "
            f"{mebibytes(allowed)}; allow more, or give a smaller network"
        )
        error.needed_bytes = needed
        raise error
