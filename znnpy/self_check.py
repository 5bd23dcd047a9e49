"""Check layers of a plan, or patches during a run, against the definition in float64 (option --paranoid).

This is slow, and its memory is not part of a plan's promise: fields of view are recomputed voxel by voxel in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import ValuesOverflowError, VerifyError
from znnpy.graph_check import compared, small
from znnpy.graph_columns import Area
from znnpy.graph_shapes import GraphShape
from znnpy.graph_voxels import GraphVoxels
from znnpy.kernels.contract import ConvWeights, Primitive, Variant
from znnpy.kernels.reference import convolve, max_filter, maxout
from znnpy.kernels.table import find
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.layer_shapes import with_batch
from znnpy.measure.budget import FreeBytes, Placement, Progress, lacking, layers_of
from znnpy.measure.fftw_wisdom import wisdom_kept
from znnpy.measure.layer_bench import DeviceLayer, HostLayer, HostRamLayer, Position, Values
from znnpy.messages import excerpt, option
from znnpy.network import Network
from znnpy.patches import Box
from znnpy.planner.plan import Choice
from znnpy.planner.run_plan import RunPlan
from znnpy.run.pipeline import Writes
from znnpy.run.session import ALL
from znnpy.run.target import OpenTarget
from znnpy.shapes import ChainShape, ConvShape, FilterShape, MaxoutShape, PoolShape, Vec3
from znnpy.trained import TrainedNetwork
from znnpy.units import human_bytes
from znnpy.verify import TOLERANCES, Judged, at_voxels, magnitude_of
from znnpy.volume.base import Volume
from znnpy.window_voxels import WindowVoxels, result_of

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device

VOXELS = 64  # voxels of a layer's output that are recomputed from their windows
PATCH_VOXELS = 2  # voxels of a patch, recomputed from their fields of view
SCALE_VOXELS = 4096  # voxels of a patch that show how large its values are

Real = npt.NDArray[np.float64]


def check_plan(plan: RunPlan, network: Network, target: OpenTarget, tell: Callable[[Progress], None]) -> None:
    """Run every layer of all workers of `plan` with its primitive on random values.

    VerifyError names the first layer whose output differs from the definition by more than its precision allows, at
    VOXELS voxels including corners, or that does not fit this machine.
    """
    free_bytes = target.free_bytes_by_device(plan.limits)
    layers = {(where, c.primitive, c.shape, c.variant): c for where, c in layers_of(plan)}
    with wisdom_kept(target.machine, plan.seconds):
        for done, ((where, *_), choice) in enumerate(layers.items()):
            tell(Progress(done, len(layers), np.inf, f"checking {choice.primitive} on {choice.shape}"))
            name = _name(plan, network, choice)
            with ThreadPool(max(1, where.threads)) as pool:
                _check_layer(choice, name, where, free_bytes, pool, target.gpu)
        tell(Progress(len(layers), len(layers), np.inf, ""))


def _name(plan: RunPlan, network: Network, choice: Choice) -> str:
    """Name the layer of a choice, or the node of a graph."""
    if plan.main.graph is None:
        return f"{choice.where} ({network.layers[choice.layers[0]]})"
    node = plan.main.graph.nodes[1 + plan.main.by_node.index(choice)]
    return f"node {excerpt(node.name)} ({excerpt(node.layer)})"


def _check_layer(
    choice: Choice, name: str, where: Placement, free_bytes: FreeBytes, pool: ThreadPool, gpu: Device | None
) -> None:
    """Check one layer; it runs on fewer images if all do not fit into `free_bytes`."""
    primitive, shape, variant = find(choice.primitive, ALL), choice.shape, choice.variant
    if isinstance(shape, GraphShape):
        shape = small(shape)
    while (lacks := lacking(where, primitive, shape, variant, free_bytes)) and shape.batch > 1:
        shape = with_batch(shape, shape.batch // 2)
    if lacks is not None:
        device, needed = lacks
        raise VerifyError(
            f"{name} needs {human_bytes(needed)} to be checked, and {human_bytes(max(free_bytes[device], 0))} are "
            f"free: plan within less memory, or without {option('paranoid')}"
        )
    try:
        at, written, exact = (
            compared(shape, primitive, variant, pool)
            if isinstance(shape, GraphShape)
            else _sampled(shape, primitive, variant, where, pool, gpu)
        )
    except ValuesOverflowError as overflow:
        raise VerifyError(f"{name} run by {primitive.name}: {overflow}; {_advice(primitive.name)}") from None
    error, allowed = np.abs(written - exact), TOLERANCES[shape.precision] * magnitude_of(exact)
    error[np.isnan(error)] = np.inf
    if (error > allowed).any():
        how = f"{primitive.name} {variant}".rstrip()
        index, map_ = (int(i) for i in np.unravel_index((error / allowed).argmax(), error.shape))
        raise VerifyError(
            f"{name} run by {how} gives {written[index, map_]:.8g} at (image, z, y, x) = "
            f"{at[index]}, map {map_}, of random values, and by definition it is {exact[index, map_]:.8g} (allowed "
            f"{allowed[index, map_]:.1e}); {_advice(primitive.name)}"
        )


def _sampled(
    shape: ChainShape, primitive: Primitive, variant: Variant, where: Placement, pool: ThreadPool, gpu: Device | None
) -> tuple[list[Position], Real, Real]:
    """Return positions of a layer on random values, what a primitive gives there, and what it is by definition."""
    layer: HostLayer | DeviceLayer | HostRamLayer
    if where.device == "cpu":
        layer = HostLayer(pool, primitive, shape, variant)
    elif gpu is not None and where.in_host_ram:
        layer = HostRamLayer(gpu, pool, primitive, shape, variant)
    else:
        assert gpu is not None, "layers of a GPU are checked only if one is open"
        layer = DeviceLayer(gpu, primitive, shape, variant)
    layer.run()
    at = positions(shape.out_shape[:4], VOXELS)
    written = np.stack([layer.at(position) for position in at])
    return at, written, np.stack([voxel(shape, layer.values, position) for position in at])


def _advice(primitive: str) -> str:
    return f"report it, and choose other primitives than {primitive} with {option('only')} until it is repaired"


def positions(size: tuple[int, ...], count: int) -> list[Position]:
    """Return the first voxel, the last, and random ones: (image, z, y, x), each once."""
    rng, voxels = np.random.default_rng(20261121), prod(size)
    flat = np.unique([0, voxels - 1, *rng.integers(0, voxels, max(0, count - 2))])
    found = []
    for place in flat:
        image, z, y, x = (int(i) for i in np.unravel_index(int(place), size))
        found.append((image, z, y, x))
    return found


def voxel(shape: ChainShape, values: Values, position: Position) -> Real:
    """Compute all maps of one voxel by definition, from the window of the layer's input that it depends on."""
    image, z, y, x = position
    window: Vec3
    step: Vec3 = (1, 1, 1)
    match shape:
        case ConvShape(k=k, pool=p):
            window, step = (k[0] + p[0] - 1, k[1] + p[1] - 1, k[2] + p[2] - 1), p
        case PoolShape(p=p):
            window, step = p, p
        case FilterShape(p=p):
            window = p
        case MaxoutShape():
            window = (1, 1, 1)
    offset = (0, 0, 0)
    if not isinstance(shape, PoolShape) or shape.fragments:
        image, fragment = divmod(image, prod(step))
        offset = (fragment // (step[1] * step[2]), fragment // step[2] % step[1], fragment % step[2])
    corner = (image, z * step[0] + offset[0], y * step[1] + offset[1], x * step[2] + offset[2])
    crop = values.window(corner, window)
    maps: Real = _applied(shape, crop, values.weights)[0, 0, 0, 0]
    return maps


def _applied(shape: ChainShape, crop: Real, weights: ConvWeights | None) -> Real:
    """Apply the layer to a window that gives one voxel."""
    match shape:
        case ConvShape():
            assert weights is not None, "a convolution has weights"
            return max_filter(convolve(crop, weights.weight, weights.bias, shape.activation), shape.pool)
        case PoolShape() | FilterShape():
            return max_filter(crop, shape.p)
        case MaxoutShape():
            return maxout(crop, shape.of)


@dataclass(frozen=True)
class CheckedOutput:
    """An output that checks every patch against the definition before it is written; see `pipeline.Writes`."""

    output: Writes
    trained: TrainedNetwork
    volume: Volume  # opened for the check alone, since the run reads patches at the same time
    offset: Vec3  # position of the output's first voxel in the volume
    area: Area | None  # that is predicted of a graph
    precision: str

    @cached_property
    def _exactly(self) -> Sequence[Callable[[npt.NDArray[np.int64]], Real]]:
        """The maps at positions in each output by definition."""
        if self.area is None:
            return [partial(at_voxels, self.trained, self.volume, self.offset)]
        if self.trained.network.meaning == "windows":
            return [WindowVoxels(self.trained, self.volume, self.offset).at]
        regions = enumerate(self.area.regions)
        return [GraphVoxels(self.trained, self.volume, number, region.lo).at for number, region in regions]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.output.dtype

    @property
    def done(self) -> Set[int]:
        return self.output.done

    def write(self, box: Box, voxels: npt.NDArray[Any], number: int) -> None:
        """Check PATCH_VOXELS voxels, then write the patch; VerifyError if one is wrong."""
        rng = np.random.default_rng([*box.lo])
        inside = np.stack([rng.integers(0, size, PATCH_VOXELS) for size in box.size], axis=1)
        written = np.stack([voxels[(slice(None), *place)] for place in inside])
        at = inside + np.array(box.lo)
        exact, network = self._exactly[number](at), self.trained.network
        if network.meaning == "windows":
            exact = result_of(exact, network, written, TOLERANCES[self.precision])
        if network.result.is_integer:
            written = written.astype(np.float64)
        some = np.stack([rng.integers(0, size, SCALE_VOXELS) for size in box.size])
        others = voxels[(slice(None), *some)].T.astype(written.dtype)
        judged = Judged.of(at, written, exact, TOLERANCES[self.precision], others)
        if judged.beyond:
            raise VerifyError(
                f"output voxel (z, y, x) = {judged.where}, map {judged.channel}, is {judged.written:.8g}, and by "
                f"definition {judged.definition:.8g} (allowed {judged.allowed:.1e}): its patch is not written; find "
                "the layer with `znnpy plan --paranoid`, and report it"
            )
        self.output.write(box, voxels, number)

    def finish_column(self, index: int) -> None:
        self.output.finish_column(index)
