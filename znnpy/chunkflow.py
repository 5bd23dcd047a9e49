"""Networks of znnpy in chunkflow: its framework "universal" reads this file as a model, and needs nothing but znnpy.

    chunkflow ... inference --framework universal --convnet-model FILE --convnet-weight-path net.yaml ...

FILE is what `python -c "import znnpy.chunkflow as model; print(model.__file__)"` prints. chunkflow calls the class
PatchInferencer with the path of the weights, for which a network file stands, and with the mask of a patch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from znnpy.array_session import ArraySession
from znnpy.errors import ShapeError, VolumeError
from znnpy.messages import excerpt
from znnpy.shapes import text
from znnpy.trained import load_network


class PatchInferencer:
    """Computes patches of chunkflow on the CPU.

    A network that slides over a volume gives a patch that is smaller by its field of view minus 1; any other is
    computed on the patch as on an image of its own. If the volume holds integers, chunkflow gives values from 0 to 1,
    and the network's `normalise` is applied to these.

    model_weight_file  network file, or the name of a network that ships
    output_patch_mask  weights (z, y, x) by which chunkflow blends patches; their size is that of its output patch

    A subclass in a file of your own may set `options`: those of `TrainedNetwork.session`, such as {"ram": "16G"}.
    """

    options: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, model_weight_file: str, output_patch_mask: npt.NDArray[Any]) -> None:
        self._net = load_network(model_weight_file)
        self._mask = np.asarray(output_patch_mask, np.float32)
        self._run: ArraySession | None = None
        self._shape: tuple[int, ...] = ()

    def __call__(self, input_patch: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return the network's result for each patch, (batch, maps, z, y, x), times the mask.

        input_patch  (batch, channels, z, y, x)

        VolumeError for other arrays, ShapeError if the result is smaller than the output patch or not in its middle.
        """
        if input_patch.ndim != 5:
            raise VolumeError(
                f"the patch has shape {excerpt(input_patch.shape, 60)}, and chunkflow gives (batch, channels, z, y, x)"
            )
        run = self._session(input_patch.shape[1:])
        maps, *given = run.output_shape
        spare = [n - wanted for n, wanted in zip(given, self._mask.shape, strict=True)]
        if min(spare) < 0 or any(more % 2 for more in spare):
            raise ShapeError(
                f"the network gives {text((given[0], given[1], given[2]))} voxels for a patch, of which the output "
                f"patch of {text(self._mask.shape)} is not the middle; make the output patch as large"
            )
        middle = (slice(None), *(slice(more // 2, n - more // 2) for more, n in zip(spare, given, strict=True)))
        found = np.empty((len(input_patch), maps, *self._mask.shape), np.float32)
        for patch, out in zip(input_patch, found, strict=True):
            np.multiply(run(patch.astype(np.float32))[middle], self._mask, out=out)
        return found

    def _session(self, shape: tuple[int, ...]) -> ArraySession:
        """Return the session for patches of a shape, planned and prepared once."""
        if self._run is None or shape != self._shape:
            if self._run is not None:
                self._run.__exit__(None, None, None)
            _, *size = shape
            alone = {} if self._net.network.meaning != "windows" else {"window": tuple(size), "overlap": 0.0}
            self._run = self._net.session(shape, **{"device": "cpu", **alone, **self.options}).__enter__()
            self._shape = shape
        return self._run
