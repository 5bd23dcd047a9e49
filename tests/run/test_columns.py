"""Columns and parts against the float64 sliding window: what is carried, what is skipped, and how often things run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.flat_requests import make_plan
from tests.support.odd_networks import (
    MACHINE,
    NETWORKS,
    ODDER,
    Ways,
    assert_dense,
    definition,
    planned,
    poisoned_session,
    ran,
    small,
    some_volume,
    trained,
    without_borders,
)
from tests.support.tiers import one_in
from znnpy.errors import ValuesOverflowError
from znnpy.kernels import aligned
from znnpy.kernels.contract import ALIGNMENT, Step
from znnpy.kernels.table import TABLE
from znnpy.machine import AMX, AVX512_BF16, Limits, this_machine
from znnpy.network import Conv, Network, Pool
from znnpy.patches import Column
from znnpy.planner import search
from znnpy.planner.tilings import TilingSpace, splits
from znnpy.planner.validate import check_runs
from znnpy.run.session import Session
from znnpy.shapes import Vec3, multiply, turned, turned_back
from znnpy.volume.array import ArrayVolume
from znnpy.volume.source import Source

pytestmark = pytest.mark.slow

Floats = npt.NDArray[np.float32]

ALL = NETWORKS + ODDER
WALKED = [(network, (number + turn) % 3) for number, network in enumerate(ALL) for turn in range(3)]
POOLED = [(network, axis) for network, axis in WALKED if any(isinstance(layer, Pool) for layer in network.layers[:-1])]


def ids(value: object) -> str:
    return value.name if isinstance(value, Network) else "zyx"[value] if isinstance(value, int) else str(value)


def some_patches(network: Network, axis: int, output: Vec3) -> list[tuple[Vec3, int]]:
    """Return patches, and steps of columns from the smallest to thicker than the output."""
    along, period = turned(output, axis), turned(network.period, axis)
    whole = multiply(period, tuple(-(-n // p) for n, p in zip(along, period, strict=True)))  # type: ignore[arg-type]
    shapes = [
        ((period[0], 2 * period[1], whole[2]), 1),  # a column for every step
        ((period[0], whole[1], 2 * period[2]), 3),
        ((2 * period[0], period[1], period[2] * max(1, along[2] // period[2] - 1)), 2),
        ((3 * period[0], 2 * period[1], whole[2]), 1000),  # longer than the output
        ((whole[0] + 2 * period[0], whole[1], whole[2] + period[2]), 1),  # a step thicker than the output
    ]
    return [(turned_back(patch, axis), steps * patch[0]) for patch, steps in shapes]


@pytest.mark.parametrize(("network", "axis"), one_in(3, WALKED), ids=ids)
def test_columns_equal_the_sliding_window(network: Network, axis: int) -> None:
    net, volume = trained(network), some_volume(network, seed=21, more=(6, 7, 8))
    exact = definition(net, volume)
    output = network.dense_size(volume.shape[1:])
    for seed, (patch, column) in enumerate(some_patches(network, axis, output)):
        plan = planned(network, output, patch, axis=axis, column=column, ways=Ways(seed), threads=1 + seed % 2)
        assert_dense(ran(plan, net, volume), exact)


@pytest.mark.parametrize(("network", "axis"), one_in(3, POOLED), ids=ids)
def test_parts_of_the_fragments_equal_the_sliding_window(network: Network, axis: int) -> None:
    """Every way to split, in columns and in patches."""
    net, volume = trained(network), some_volume(network, seed=22, more=(6, 5, 7))
    exact = definition(net, volume)
    output = network.dense_size(volume.shape[1:])
    thick, *across = turned(network.period, axis)
    patch = turned_back((thick, 2 * across[0], across[1]), axis)
    for seed, at_once in enumerate(splits(network.turned(axis))[:: 1 if axis == 0 else 2]):
        column = (2 * thick if seed % 2 else 1000 * thick) if seed % 4 < 3 else 0
        plan = planned(network, output, patch, axis=axis, column=column, at_once=at_once, ways=Ways(seed))
        assert max(plan.sub_batches) > 1 or not any(at_once)
        assert_dense(ran(plan, net, volume), exact)


@pytest.mark.parametrize("axis", [0, 1, 2], ids=ids)
def test_columns_equal_patches_to_rounding(axis: int) -> None:
    network = NETWORKS[0]
    net, volume = trained(network), some_volume(network, seed=23, more=(15, 14, 13))
    output, patch = network.dense_size(volume.shape[1:]), (4, 6, 4)
    ways = {"only": ["cpu.conv.direct"], "in_one": False}  # sums in the same order, whatever the shape
    patches = ran(planned(network, output, patch, axis=axis, ways=Ways(**ways)), net, volume)  # type: ignore[arg-type]
    walked = planned(network, output, patch, axis=axis, column=2 * patch[axis], ways=Ways(**ways))  # type: ignore[arg-type]
    assert walked.columns < planned(network, output, patch).columns
    assert np.abs(ran(walked, net, volume) - patches).max() <= 1e-6 * np.abs(patches).max()


ABSENT = tuple({AMX, AVX512_BF16} - {*this_machine().bf16})  # units of other processors
CONVS = [p.name for p in TABLE if p.kind == "conv" and p.name.startswith("cpu.") and not p.name.endswith(ABSENT)]


@pytest.mark.parametrize("primitive", CONVS)
def test_every_primitive_equals_the_sliding_window_in_columns_and_parts(primitive: str) -> None:
    """One map and many that fill no cache line: arrays of a step start on none."""
    convs = Conv((2, 2, 2), 17, "relu"), Conv((2, 3, 2), 18, "relu"), Conv((1, 2, 3), 2)
    network = small("n", 1, convs[0], Pool((2, 2, 2)), *convs[1:])
    net, volume = trained(network), some_volume(network, seed=24, more=(7, 9, 10))
    exact = definition(net, volume)
    output = network.dense_size(volume.shape[1:])
    used: set[str] = set()
    for seed, (axis, at_once) in enumerate([(0, 0), (1, 4), (2, 1), (0, 1)]):
        ways = Ways(seed, [primitive], in_one=seed % 2 == 0)
        patch = turned_back((2, 4, 6), axis)
        plan = planned(network, output, patch, axis=axis, column=3 * patch[axis], at_once=(at_once,), ways=ways)
        used.update(choice.primitive for choice in plan.choices)
        assert_dense(ran(plan, net, volume), exact)
    assert primitive in used


@pytest.mark.parametrize("dtype", ["uint8", "float16"])
def test_other_output_types_in_parts_equal_the_sliding_window(dtype: str) -> None:
    network = NETWORKS[4]  # ends with a sigmoid
    net, volume = trained(network), some_volume(network, seed=25)
    output = network.dense_size(volume.shape[1:])
    plan = planned(network, output, (3, 4, 5), column=6, at_once=(1,), ways=Ways(0, ["cpu.conv.direct"]))
    exact = ran(plan, net, volume)
    wanted = np.rint(np.clip(exact, 0, 1) * np.float32(255)) if dtype == "uint8" else exact
    np.testing.assert_array_equal(ran(plan, net, volume, dtype=dtype), wanted.astype(dtype))


@pytest.mark.parametrize("axis", one_in(3, range(3)), ids=ids)
def test_nan_is_written_exactly_if_the_field_of_view_holds_one(axis: int) -> None:
    """Planes before the output of a column count, as do borders of steps and columns."""
    network = NETWORKS[0]
    net, volume = trained(network), some_volume(network, seed=26, more=(13, 11, 12))
    exact = definition(net, volume)
    output = network.dense_size(volume.shape[1:])
    holes = volume.astype(np.float32)
    holes[0][np.random.default_rng(27).random(volume.shape[1:]) < 0.002] = np.nan
    windows = np.lib.stride_tricks.sliding_window_view(np.isnan(holes[0]), network.field_of_view)
    unknown = windows.any(axis=(3, 4, 5))
    assert 0.1 < unknown.mean() < 0.6
    patch = turned_back((2, 4, 6), axis)
    for column in (0, 2, 6, 1000):
        plan = planned(network, output, patch, axis=axis, column=column, at_once=(2,), ways=Ways(column))
        got = ran(plan, net, holes, allow_nan=True)
        assert (np.isnan(got) == unknown).all()
        assert_dense(got[:, ~unknown], exact[:, ~unknown])


def test_column_is_independent_of_the_one_before() -> None:
    """Its first planes decide how tiles round, so that resumed runs give the same bytes."""
    network = NETWORKS[0]
    net, volume = trained(network), some_volume(network, seed=28, more=(15, 6, 8))
    output = network.dense_size(volume.shape[1:])
    ways = Ways(0, ["cpu.conv.fft_tiled"], in_one=False)
    plan = planned(network, output, (2, 8, 10), column=4, ways=ways)
    every = ran(plan, net, volume)
    source = Source(ArrayVolume(volume), roi=None, border="valid", network=network, allow_nan=False)
    columns = plan.cover(network)
    assert len(columns) == 4
    with poisoned_session(plan, net) as session:
        raw = np.empty((1, *plan.patch_in), source.dtype)
        alone = np.full((3, *plan.patch_out), np.nan, np.float32)
        for number, step in enumerate(columns[2].steps):
            source.read(step.read, raw)
            session.run(raw, alone if step.write.voxels else None, begins=number == 0)
            if step.write.voxels:
                np.testing.assert_array_equal(alone[:, :, :7, :9], every[(slice(None), *step.write.slices)])


@dataclass
class Watched:
    """A step of which is seen how much it writes."""

    step: Step
    written: int = 0  # values of one map
    unaligned: bool = False  # input or output began on no cache line

    def run(self, x: Floats, out: Floats, scratch: Mapping[str, Any], *before: Floats) -> None:
        if not np.may_share_memory(x, out):
            out[...] = np.nan
        self.step.run(x, out, scratch, *before)
        self.written += int(np.isfinite(out).all(axis=-1).sum())
        self.unaligned |= (x.ctypes.data | out.ctypes.data) % ALIGNMENT > 0


def watch(session: Session) -> list[Watched]:
    """Record the steps of an open session from now on."""
    (runner,) = session._runners
    watched = [Watched(bound.step) for bound in runner._bound]
    pairs = zip(runner._bound, watched, strict=True)
    runner._bound = tuple(replace(bound, step=step) for bound, step in pairs)
    return watched


def columns_through(session: Session) -> Iterator[Iterator[list[int]]]:
    """Run every column of a plan on noise; of each step, what `Session.written` grows by."""
    plan, network = session.plan, session.network
    rng = np.random.default_rng(29)
    out = np.empty((network.output_channels, *plan.patch_out), np.float32)

    def steps(column: Column) -> Iterator[list[int]]:
        for number, step in enumerate(column.steps):
            before = list(session.written)
            raw = rng.integers(0, 256, (network.input_channels, *plan.patch_in), np.uint8)
            session.run(raw, out if step.write.voxels else None, begins=number == 0)
            yield [after - then for after, then in zip(session.written, before, strict=True)]

    return map(steps, plan.cover(network))


@pytest.mark.parametrize("in_one", [False, True], ids=["layer by layer", "in one"])
@pytest.mark.parametrize(("network", "axis"), one_in(3, WALKED), ids=ids)
def test_no_plane_is_computed_twice(network: Network, axis: int, in_one: bool) -> None:
    """Each step gives of every layer the new planes alone; and no layer runs before its planes are needed."""
    period = turned(network.period, axis)
    patch = turned_back((period[0], 2 * period[1], period[2]), axis)
    output = turned_back((7 * period[0] - 1, 2 * period[1], 2 * period[2]), axis)
    at_once = splits(network.turned(axis))[-1]
    plan = planned(network, output, patch, axis=axis, column=4 * period[0], at_once=at_once, ways=Ways(1, (), in_one))
    with poisoned_session(plan, trained(network)) as session:
        watched = watch(session)
        grown = [list(column) for column in columns_through(session)]
        written = session.written
    cover, thick = plan.cover(network), period[0]
    needed = without_borders(plan, network)
    ahead = [network.margins[choice.layers[1] + 1][axis] for choice in plan.choices]  # planes, of each one's output
    assert len({len(column) for column in grown}) == 2  # the last column is shorter
    for column in grown:
        for number, step in enumerate(column):
            planes = (number - cover.ahead + 1) * thick  # of output up to this step, negative before the column
            assert step == [n if planes + more > 0 else 0 for n, more in zip(needed, ahead, strict=True)], number
    for choice, parts, n, more, values in zip(plan.choices, plan.sub_batches, needed, ahead, written, strict=True):
        assert values == n * cover.steps(more) == choice.executions * prod(choice.shape.out_shape[:4])
        assert choice.executions == parts * cover.steps(more)
    assert [step.written for step in watched] == written


def test_steps_get_unaligned_arrays() -> None:
    """So the tests above say something about primitives that ask for none."""
    network = small("n", 1, Conv((2, 3, 2), 3, "relu"), Conv((2, 2, 2), 1), Pool((2, 1, 1)), Conv((2, 1, 2), 3))
    plan = planned(network, (8, 5, 7), (2, 5, 7), column=8, ways=Ways(0, ["cpu.conv.direct"], in_one=False))
    with poisoned_session(plan, trained(network)) as session:
        watched = watch(session)
        assert sum(len(list(column)) for column in columns_through(session)) > 4
    assert sum(step.unaligned for step in watched) > 2


@pytest.mark.parametrize("axis", one_in(3, (2, 0, 1)), ids=ids)
def test_planned_columns_and_parts_run(axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns along one axis, and smallest parts, whether they pay or not."""
    network = ODDER[5]  # several poolings
    net, volume = trained(network), some_volume(network, seed=30, more=(14, 9, 15))
    output = network.dense_size(volume.shape[1:])
    space = TilingSpace(network.turned(axis), turned(output, axis), axis, streams=True)
    monkeypatch.setattr(search, "all_spaces", lambda *of: (space,))
    monkeypatch.setattr(search, "splits", lambda network: [splits(network)[-1]])
    for patch in (network.period, multiply(network.period, (1, 3, 2))):
        plan = make_plan(network, output, MACHINE, Limits(2**32, 2), patch=patch, columns=True)
        check_runs(plan, network, MACHINE)
        assert (plan.main.streams, plan.main.axis, max(plan.main.sub_batches)) == (True, axis, prod(network.period))
        assert_dense(ran(plan.main, net, volume), definition(net, volume))


@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("network", ALL, ids=ids)
def test_best_plan_equals_the_sliding_window(network: Network, columns: bool) -> None:
    if columns and network.field_of_view == (1, 1, 1):
        pytest.skip("a network that sees one voxel has no columns")
    net, volume = trained(network), some_volume(network, seed=31)
    output = network.dense_size(volume.shape[1:])
    plan = make_plan(network, output, MACHINE, Limits(2**32, 2), columns=columns)
    assert plan.main.streams == columns
    assert_dense(ran(plan.main, net, volume), definition(net, volume))


def test_overflow_within_a_column_names_its_layer_and_position() -> None:
    network = small("hot", 1, Conv((2, 2, 2), 3, "relu"), Pool((2, 2, 2)), Conv((2, 2, 2), 2))
    net, volume = trained(network), some_volume(network, seed=32, more=(15, 8, 8))
    net.weights[1].weight[:] = 3e38
    volume[:, :10] = 127  # about 0 once normalised
    net.weights[0].bias[:] = 0
    plan = planned(network, network.dense_size(volume.shape[1:]), (2, 8, 8), column=16, ways=Ways(0, (), in_one=False))
    step = r"output voxels \(z, y, x\) = \(\d+, 0, 0\) to \(\d+, 8, 8\), step \d+ of column 0"
    said = rf"^{step}: layer 2 \(conv 2x2x2 -> 2 none\): "
    with pytest.raises(ValuesOverflowError, match=said):
        ran(plan, net, volume)


def test_column_keeps_as_many_bytes_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    network = NETWORKS[3]
    plan = planned(network, (8, 12, 6), (4, 6, 2), axis=2, column=4)
    assert plan.patch_in == (*network.patch_in((4, 6, 2))[:2], 2)
    assert plan.memory.last.carries > 0 == planned(network, (8, 12, 6), (4, 6, 2)).memory.last.carries
    kept: list[int] = []
    own = aligned.aligned_bytes

    def keeping(nbytes: int) -> npt.NDArray[np.uint8]:
        kept.append(nbytes)
        return own(nbytes)

    monkeypatch.setattr(aligned, "aligned_bytes", keeping)
    with poisoned_session(plan, trained(network)):
        assert sum(kept) == plan.memory.last.arena + plan.memory.last.carries
