"""Networks of znnpy in pipelines of gunpowder: the node `Predict`."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.admissible import lattices_of
from znnpy.array_session import ArraySession
from znnpy.errors import MissingExtraError, ShapeError, VolumeError
from znnpy.extras import install
from znnpy.messages import excerpt
from znnpy.network_files import Trained
from znnpy.network_result import NetworkResult
from znnpy.shapes import Vec3
from znnpy.trained import TrainedNetwork, load_network
from znnpy.volume.source import Predicted

try:
    from gunpowder import Array, ArrayKey, ArraySpec, Batch, BatchRequest, Coordinate, Roi
    from gunpowder.nodes.generic_predict import GenericPredict
except ImportError:
    raise MissingExtraError(f"znnpy.gunpowder needs gunpowder; `{install('gunpowder')}`") from None


class Predict(GenericPredict):  # type: ignore[misc]
    """Adds what a network gives for an array to each batch, computed on the CPU.

    network           network file, the name of a network that ships, or a TrainedNetwork
    input             array that the network is given: (z, y, x), (channels, z, y, x) or (batch, channels, z, y, x)
    outputs           arrays to add, (maps, z, y, x) or (batch, maps, z, y, x), by the numbers of the network's outputs,
                      or by the names of their nodes
    context           voxels Z,Y,X by which the network gets more than is requested, on each side; None: the field of
                      view of a network that slides over a volume, else nothing
    array_specs       what the arrays are said to be, where it does not follow from the network, by their keys
    spawn_subprocess  compute in a process of its own
    options           of the network's session, such as ram="16G", threads=8, window=(128, 128, 128), overlap=0.5

    A network that slides over a volume gives the voxels of the whole volume, whatever is requested. Any other is
    computed on the requested region, with its context, as on a volume of its own.

    ValueError for outputs that the network does not have.
    """

    def __init__(
        self,
        network: str | Path | Trained,
        input: ArrayKey,
        outputs: Mapping[int | str, ArrayKey],
        *,
        context: Vec3 | None = None,
        array_specs: Mapping[ArrayKey, ArraySpec] | None = None,
        spawn_subprocess: bool = False,
        **options: Any,
    ) -> None:
        super().__init__({0: input}, dict(outputs), dict(array_specs or {}), spawn_subprocess)
        given = load_network(network) if isinstance(network, str | Path) else network
        self._net, self._key = TrainedNetwork(given.network, given.weights), input
        self._options = {"device": "cpu", **options}
        self._numbers = {key: self._number(which) for which, key in outputs.items()}
        slides = self._net.network.meaning == "sliding" and options.get("window") is None
        self._dtype = np.uint8 if NetworkResult(options.get("output", "maps")).is_integer else np.float32
        self._slides = slides and options.get("meaning") in (None, "sliding")
        seen = self._net.network.field_of_view
        before = [(n - 1) // 2 if self._slides else 0 for n in seen] if context is None else context
        behind = [n // 2 if self._slides else 0 for n in seen] if context is None else context
        self._before, self._behind = Coordinate(before), Coordinate(behind)
        self._run: ArraySession | None = None
        self._opened: Any = None  # the dtype that the session is for

    def _number(self, which: int | str) -> int:
        """Return the number of an output; ValueError if there is none."""
        network = self._net.network
        names = [network.names[tensor - 1] for tensor in network.outputs]
        if isinstance(which, str) and which in names:
            return names.index(which)
        if isinstance(which, int) and 0 <= which < len(names):
            return which
        raise ValueError(
            f"{excerpt(network.name, 60)} has no output {excerpt(repr(which), 60)}; it has 0 to {len(names) - 1}, "
            f"which are {excerpt(', '.join(names))}"
        )

    def setup(self) -> None:
        """Announce the outputs: their voxels, and the region in which all that they depend on is there."""
        super().setup()
        self.enable_autoskip()
        spec = self.spec[self._key]
        for key in self.outputs.values():
            mine = self.spec[key].copy()
            if getattr(self.array_specs.get(key), "voxel_size", None) is None:
                mine.voxel_size = self._voxel_size(key, spec.voxel_size)
            mine.dtype = self._dtype
            if mine.roi is None and spec.roi is not None:
                inner = spec.roi.grow(-spec.voxel_size * self._before, -spec.voxel_size * self._behind)
                mine.roi = inner.snap_to_grid(mine.voxel_size, mode="shrink")
            self.spec[key] = mine

    def _voxel_size(self, key: ArrayKey, of_input: Coordinate) -> Coordinate:
        """Return the size of an output's voxels in the units of the world, which are whole numbers."""
        network = self._net.network
        step = (Fraction(1),) * 3
        if not self._slides:
            step = lattices_of(network)[network.outputs[self._numbers[key]]]
        sizes = [one * size for one, size in zip(step, of_input, strict=True)]
        if any(size.denominator != 1 for size in sizes):
            raise ShapeError(
                f"voxels of {key} are {' x '.join(map(str, sizes))} units of the world, and gunpowder has whole ones; "
                f"give the input voxels a size that is a multiple of {lcm(*(one.denominator for one in step))}"
            )
        return Coordinate(int(size) for size in sizes)

    def prepare(self, request: BatchRequest) -> BatchRequest:
        """Ask for the voxels that the requested outputs depend on; sessions are opened where they are used."""
        size = self.spec[self._key].voxel_size
        needed = None
        for key in self.outputs.values():
            if key in request:
                roi = request[key].roi.grow(size * self._before, size * self._behind).snap_to_grid(size, mode="grow")
                needed = roi if needed is None else needed.union(roi)
        found = BatchRequest()
        if needed is not None:
            found[self._key] = ArraySpec(roi=needed)
        return found

    def predict(self, batch: Batch, request: BatchRequest) -> None:
        """Compute the requested outputs."""
        given = batch.arrays[self._key]
        data = given.data
        if data.ndim not in (3, 4, 5):
            raise VolumeError(
                f"{self._key} has the shape {excerpt(data.shape, 60)}; give (z, y, x), (channels, z, y, x) or (batch, "
                "channels, z, y, x)"
            )
        volumes = data if data.ndim == 5 else data[None]
        run = self._session(volumes.dtype)
        found = np.stack([run(np.ascontiguousarray(one)) for one in volumes])
        found = found if data.ndim == 5 else found[0]
        ends, places = np.cumsum([0, *run.output_maps]).tolist(), run.places_of(volumes.shape[1:])
        for key, number in self._numbers.items():
            if key in request:
                maps = found[..., ends[number] : ends[number + 1], :, :, :]
                batch.arrays[key] = self._array(key, maps, places[number], given.spec).crop(request[key].roi)

    def _array(self, key: ArrayKey, maps: npt.NDArray[Any], place: Predicted, of_input: ArraySpec) -> Array:
        """Return an output with its place in the world."""
        spec = self.spec[key].copy()
        size = of_input.voxel_size
        step = [Fraction(one).limit_denominator(2**16) for one in place.step]
        faces = [
            (Fraction(at).limit_denominator(2**16) + Fraction(1, 2) - one / 2) * unit
            for at, one, unit in zip(place.position, step, size, strict=True)
        ]
        begin = of_input.roi.begin + Coordinate(int(face) for face in faces)
        spec.roi = Roi(begin, spec.voxel_size * Coordinate(maps.shape[-3:]))
        return Array(maps, spec)

    def _session(self, dtype: Any) -> ArraySession:
        """Return the session for arrays of a dtype, which plans and prepares once for each shape."""
        if self._run is None or self._opened != dtype:
            self.stop()
            self._run = self._net.session(dtype=dtype, **self._options).__enter__()
            self._opened = dtype
        return self._run

    def stop(self) -> None:
        """Give back the memory."""
        if self._run is not None:
            self._run.__exit__(None, None, None)
        self._run = None
