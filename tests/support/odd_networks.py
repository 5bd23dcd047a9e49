"""Odd networks, their definition, and plans for them that no search would choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.fake_pipeline import run_session
from znnpy.formats.weights import random_weights
from znnpy.kernels.contract import Footprint, Primitive, Variant
from znnpy.kernels.reference import dense_by_sliding
from znnpy.kernels.table import TABLE
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.layer_shapes import LayerShape
from znnpy.machine import Limits, Machine, this_machine
from znnpy.network import Conv, Layer, MaxFilter, Maxout, Network, Normalise, Pool
from znnpy.option_values import DeviceKind
from znnpy.patches import Box
from znnpy.planner.layout import place
from znnpy.planner.plan import Choice, Memory, Plan, Stage, patch_in
from znnpy.planner.stages import last_stage
from znnpy.planner.tilings import TilingSpace, fusion_groups, tiling_of
from znnpy.planner.validate import check_plan
from znnpy.run import cpu_backend, pipeline
from znnpy.run.session import Session
from znnpy.shapes import Precision, Vec3, fused, turned
from znnpy.trained import TrainedNetwork
from znnpy.volume.array import ArrayVolume
from znnpy.volume.source import Source

MACHINE = replace(this_machine(), cores=2)  # some primitives want more maps where there are more cores


def small(name: str, channels: int, *layers: Layer) -> Network:
    """Return a network that brings bytes to about zero mean and unit spread, as trained ones do."""
    return Network(name, channels, layers, Normalise((127.5,) * channels, (74.0,) * channels))


NETWORKS = (
    small("pool between", 1, Conv((2, 3, 2), 5, "relu"), Pool((2, 2, 2)), Conv((3, 2, 3), 3, "tanh")),
    small("pool first", 1, Pool((2, 1, 3)), Conv((3, 3, 2), 4, "relu"), Conv((1, 1, 1), 2, "softmax")),
    small("pool last", 2, Conv((3, 1, 2), 6, "relu"), Pool((1, 2, 2))),
    small("pool after pool", 1, Conv((2, 2, 2), 4, "relu"), Pool((2, 2, 1)), Pool((1, 3, 2)), Conv((2, 2, 2), 3)),
    small("windows of 3 and 5", 1, Conv((2, 2, 2), 3, "relu"), Pool((3, 1, 5)), Conv((2, 3, 2), 2, "sigmoid")),
    small("2D", 3, Conv((1, 4, 4), 8, "relu"), Maxout(2), Pool((1, 2, 2)), Conv((1, 3, 2), 2, "sigmoid")),
    small("max-filter", 1, Conv((2, 2, 2), 4, "relu"), MaxFilter((2, 3, 1)), Pool((2, 2, 2)), Conv((2, 2, 2), 2)),
    small("one voxel of view", 1, Conv((1, 1, 1), 3, "sigmoid")),
    Network("two scales", 2, (Conv((2, 2, 3), 3, "relu"), Conv((2, 2, 2), 1)), Normalise((128.0, 99.0), (33.0, 99.0))),
)

# Networks for which a step of a column could go wrong: poolings at both ends, one behind the other, in steps that leave
# one plane to a fragment; layers that keep nothing from step to step before, between and behind those that do.
ODDER = (
    small("pools at both ends", 2, Pool((2, 2, 1)), Conv((2, 2, 3), 4, "relu"), Pool((3, 1, 2))),
    small("only pools", 1, Pool((2, 3, 1)), Pool((2, 1, 2))),
    small("first 1x1x1", 3, Conv((1, 1, 1), 4, "relu"), Pool((2, 2, 2)), Conv((3, 2, 2), 2, "tanh")),
    small("a window of 5", 1, Conv((3, 2, 2), 3, "relu"), Pool((5, 3, 2)), Conv((2, 2, 1), 2)),
    small("windows of 2x3x1", 1, Conv((2, 2, 2), 3, "relu"), Pool((2, 3, 1)), Conv((3, 2, 3), 4), Pool((1, 1, 2))),
    small(
        "pool, pool, conv, pool",
        1,
        Conv((2, 1, 3), 3, "relu"),
        Pool((2, 2, 1)),
        Pool((1, 1, 2)),
        Conv((2, 2, 2), 5, "relu"),
        Pool((2, 1, 2)),
        Conv((2, 2, 2), 2, "softmax"),
    ),
    small("maxout between", 2, Conv((3, 2, 2), 6, "relu"), Maxout(3), Pool((2, 2, 2)), Conv((2, 3, 1), 4), Maxout(2)),
    small("wide filter", 1, MaxFilter((3, 2, 4)), Conv((2, 2, 2), 3, "relu"), Pool((2, 2, 2)), MaxFilter((2, 1, 2))),
)


def some_volume(network: Network, seed: int, more: Vec3 = (4, 6, 8)) -> npt.NDArray[np.uint8]:
    """Return a size a little above the field of view that differs along each axis."""
    size = tuple(fov + extra for fov, extra in zip(network.field_of_view, more, strict=True))
    return np.random.default_rng(seed).integers(0, 256, (network.input_channels, *size), np.uint8)


def trained(network: Network) -> TrainedNetwork:
    return TrainedNetwork(network, random_weights(network, seed=3))


def definition(trained: TrainedNetwork, volume: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the sliding window's output, (maps, z, y, x)."""
    network = trained.network
    x = np.moveaxis(volume, 0, -1).astype(np.float64)
    if network.normalise:
        x = (x - np.array(network.normalise.mean)) / np.array(network.normalise.std)
    return np.moveaxis(dense_by_sliding(network, trained.weights, x[None])[0], -1, 0)


def assert_dense(got: npt.NDArray[np.float32], exact: npt.NDArray[np.float64]) -> None:
    assert got.shape == exact.shape
    assert np.isfinite(got).all()
    scale = max(1.0, float(np.sqrt(np.mean(exact**2))))
    assert np.abs(got - exact).max() <= 1e-5 * scale


@dataclass(frozen=True)
class Ways:
    """The choice of primitives for a plan: drawn from all that apply, or from `only` where one of those applies."""

    seed: int = 0
    only: Sequence[str] = ()
    in_one: bool = True  # a convolution and the pooling behind it in one, where a primitive can
    machine: Machine = MACHINE  # with a GPU: primitives for it, and no others
    table: tuple[Primitive, ...] = TABLE
    cheap: bool = False  # the variant that does least, not any
    _random: Random = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_random", Random(self.seed))

    def of(self, shape: LayerShape) -> tuple[Primitive, Variant] | None:
        able = [p for p in self.table if p.kind == shape.kind and p.name.startswith(self.device)]
        able = [p for p in able if p.why_not(shape, self.machine) is None]
        able = [p for p in able if p.name in self.only] or able
        if not able:
            return None
        primitive = self._random.choice(able)
        variants = primitive.variants(shape, self.machine)
        if self.cheap:
            return primitive, min(variants, key=lambda v: sum(work.flops for work in primitive.work(shape, v)))
        return primitive, self._random.choice(variants)

    @property
    def device(self) -> DeviceKind:
        return "gpu" if self.machine.gpu else "cpu"


def planned(
    network: Network,
    output: Vec3,
    patch: Vec3,
    *,
    axis: int = 0,
    column: int = 0,
    at_once: Sequence[int] = (),
    ways: Ways | None = None,
    threads: int = 2,
    precision: Precision = "fp32",
) -> Plan:
    """Return the plan of just this patch and column, checked as one that is read from a file.

    at_once  images that layers take at a time behind each pooling; 0: all there are.
    """
    ways = ways or Ways()
    space = TilingSpace(network.turned(axis), turned(output, axis), axis, streams=column > 0, precision=precision)
    shapes = tiling_of(space, turned(patch, axis)).split(at_once or (0,) * len(network.layers)).shapes
    chosen: list[tuple[tuple[int, int], LayerShape, Primitive, Variant]] = []
    for first, last in fusion_groups(space.network):
        both = fused(shapes[first], shapes[last]) if last > first and ways.in_one else None
        way = ways.of(both) if both else None
        if both and way:
            chosen.append(((first, last), both, *way))
            continue
        for layer in range(first, last + 1):
            way = ways.of(shapes[layer])
            assert way is not None
            chosen.append(((layer, layer), shapes[layer], *way))
    footprints = [primitive.footprint(shape, variant, threads) for _, shape, primitive, variant in chosen]
    step = patch_in(network, patch, axis, streams=column > 0)
    steps = [(way[1], footprint) for way, footprint in zip(chosen, footprints, strict=True)]
    needs = last_stage(steps, 0, step[axis], ways.device)
    tensors, nbytes = place(needs.tensors)
    memory = Memory(stages=(replace(needs.memory, arena=nbytes),), baseline=0, reading=0, writing=0)
    choices = tuple(choice_of(*way, footprint) for way, footprint in zip(chosen, footprints, strict=True))
    plan = Plan(
        limits=Limits(2**32, threads, 2**32 if ways.machine.gpu else None),
        output=output,
        patch_out=patch,
        patch_in=step,
        axis=axis,
        column_planes=column,
        stages=(Stage(ways.device, choices, tensors),),
        memory=memory,
        itemsize_in=1,
        itemsize_out=4,
        columns=1,
    ).for_output(output, network)
    check_plan(plan, network, ways.machine, ways.table)
    return plan


def choice_of(
    layers: tuple[int, int], shape: LayerShape, primitive: Primitive, variant: Variant, footprint: Footprint
) -> Choice:
    return Choice(
        layers=layers,
        shape=shape,
        primitive=primitive.name,
        version=primitive.version,
        device="gpu" if primitive.name.startswith("gpu") else "cpu",
        variant=variant,
        seconds=1.0,
        executions=1,
        measured=False,
        fitted=False,
        resident_bytes=footprint.resident,
        working_bytes=footprint.working(shape),
    )


@dataclass
class Poisoned:
    """An output that counts how often each voxel was written; it holds NaN, or 77, where none was."""

    array: npt.NDArray[Any]  # (maps, z, y, x)
    times: npt.NDArray[np.int8]  # (z, y, x)
    done: frozenset[int] = frozenset()
    finished: list[int] = field(default_factory=list)

    @staticmethod
    def of(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Poisoned:
        nothing = 77 if np.dtype(dtype).kind == "u" else np.nan
        return Poisoned(np.full(shape, nothing, dtype), np.zeros(shape[1:], np.int8))

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    def write(self, box: Box, voxels: npt.NDArray[Any], number: int = 0) -> None:
        self.array[(slice(None), *box.slices)] = voxels
        self.times[box.slices] += 1

    def finish_column(self, index: int) -> None:
        self.finished.append(index)


@contextmanager
def poisoned_session(
    plan: Plan, trained: TrainedNetwork, table: tuple[Primitive, ...] = TABLE, device: Any = None
) -> Iterator[Session]:
    """Open a session whose arena holds NaN; on a GPU, poisoning is up to `device`."""
    with pytest.MonkeyPatch.context() as patch, ThreadPool(plan.compute_threads) as pool:
        patch.setattr(cpu_backend, "aligned_bytes", _nan_bytes)
        with Session(plan, trained.network, trained.weights, pool, table, device=device) as session:
            yield session


def ran(
    plan: Plan,
    trained: TrainedNetwork,
    volume: npt.NDArray[Any],
    *,
    allow_nan: bool = False,
    dtype: npt.DTypeLike = np.float32,
    table: tuple[Primitive, ...] = TABLE,
    device: Any = None,
    progress: Callable[[pipeline.Event], None] | None = None,
) -> npt.NDArray[Any]:
    """Return a plan's output (maps, z, y, x) through the pipeline, from an arena of NaN."""
    network = trained.network
    source = Source(ArrayVolume(volume), roi=None, border="valid", network=network, allow_nan=allow_nan)
    assert source.output == plan.output
    output = Poisoned.of((network.output_channels, *plan.output), dtype)
    with poisoned_session(plan, trained, table, device) as session:
        run_session(session, session.pool, source, output, plan.cover(network), progress)
    assert (output.times == 1).all()
    assert output.finished == list(range(plan.columns))
    return output.array


def _nan_bytes(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return bytes for the arena, in which each float is NaN."""
    from znnpy.kernels.aligned import aligned_bytes

    room = aligned_bytes(nbytes)
    room[:] = 0xFF
    return room


def without_borders(plan: Plan, network: Network) -> list[int]:
    """Return the values of one map that a step has to give, for each choice: new planes times their area.

    Counted in dense voxels, from fields of view alone: fragments share them out and add none.
    """
    along, (thick, *across) = network.turned(plan.axis), turned(plan.patch_out, plan.axis)
    values = []
    for choice in plan.choices:
        behind = choice.layers[1] + 1
        period = Network("so far", network.input_channels, along.layers[:behind]).period
        rest = along.layers[behind:]
        fov = Network("to come", along.maps[behind], rest).field_of_view if rest else (1, 1, 1)
        sizes = (size + p * (seen - 1) for size, p, seen in zip(across, period[1:], fov[1:], strict=True))
        values.append(thick * prod(sizes))
    return values
