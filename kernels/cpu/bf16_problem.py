"""Describe (transposed) convolutions alike for the unit for bfloat16.

Outputs lie on a grid of places. A tap reads the input at place * stride + its position - lead. A transposed convolution
has a phase for each remainder of its outputs by the stride; the result of a phase at a place is one output.

A convolution of an upsampled input has such phases too: of the voxels that a kernel meets, several are the same voxel
of the array, and their kernels are added. So its inputs are two groups: the upsampled one, which is read at its own
resolution, and the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import NamedTuple, TypeAlias

from znnpy.geometry import vector
from znnpy.graph_shapes import GraphConvShape, TransposeShape
from znnpy.layers import ONE, ZERO
from znnpy.shapes import ConvShape, Vec3

AnyConv: TypeAlias = ConvShape | GraphConvShape | TransposeShape
MOST_REPEATED = 4  # times that a voxel counts along an axis
Taps: TypeAlias = tuple[tuple[Vec3, ...], ...]  # for each tap the places of the kernel that it sums


class Group(NamedTuple):
    """Inputs that are read alike."""

    inputs: tuple[int, ...]  # their numbers
    fin: int  # maps of these
    stride: Vec3
    lead: Vec3  # planes of zeros before the input
    held: Vec3  # voxels of the input


class Phase(NamedTuple):
    """The positions of the taps of one phase, for each group, and its outputs."""

    taps: tuple[tuple[Vec3, ...], ...]
    at: Vec3  # its output at place 0
    lo: Vec3  # the places whose outputs are wanted
    hi: Vec3


@dataclass(frozen=True)
class Problem:
    """A convolution on a grid of places."""

    groups: tuple[Group, ...]
    fout: int
    places: Vec3
    phases: tuple[Phase, ...]
    k: Vec3
    images: int = 1
    dilation: Vec3 = ONE
    step: Vec3 = ONE  # outputs from place to place
    pool: Vec3 = ONE  # window of a pooling into fragments
    kept: Vec3 = ONE  # window of a pooling whose input is an output too: units of work hold these whole
    before: Vec3 = ZERO  # places of the first such window that there are none of
    shifts: int = 1  # taps along x that are maps of a panel

    @cached_property
    def windows(self) -> Vec3:
        """Positions of the window of a pooling; without one, the places."""
        return vector(places - p + 1 for places, p in zip(self.places, self.pool, strict=True))

    @cached_property
    def width(self) -> int:
        """Maps of the panels."""
        return 16 * -(-self.fout // 16)

    @cached_property
    def taps(self) -> tuple[int, ...]:
        """Taps of all phases, for each group."""
        return tuple(sum(map(len, taps)) for taps in zip(*(phase.taps for phase in self.phases), strict=True))

    @cached_property
    def reach(self) -> tuple[Vec3, ...]:
        """The last position of a tap along each axis, for each group."""
        found = []
        for group in zip(*(phase.taps for phase in self.phases), strict=True):
            z, y, x = zip(*((0, 0, 0), *(tap for taps in group for tap in taps)), strict=True)
            found.append((max(z), max(y), max(x)))
        return tuple(found)

    @cached_property
    def sides(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """The remainders of the positions of taps along y and x by the stride, for each group."""
        found = []
        for group, taps in zip(self.groups, zip(*(phase.taps for phase in self.phases), strict=True), strict=True):
            y, x = (sorted({tap[axis] % group.stride[axis] for some in taps for tap in some} or {0}) for axis in (1, 2))
            found.append((tuple(y), tuple(x)))
        return tuple(found)


def upsampled_input(shape: GraphConvShape) -> int | None:
    """Return the number of the input that is upsampled; None: there is none, or several, or it meets other strides."""
    which = [number for number, factor in enumerate(shape.factors) if factor != ONE]
    return which[0] if len(which) == 1 and shape.plain else None


def why_not_repeated(shape: GraphConvShape) -> str | None:
    """Return None if the voxels of a convolution's inputs are repeated as a phase can read them, else a reason."""
    if max((max(factor) for factor in shape.factors), default=1) > MOST_REPEATED:
        return f"repeats voxels up to {MOST_REPEATED} times along an axis"
    if (low := upsampled_input(shape)) is None:
        return None
    axes = zip(shape.n, shape.before, shape.behind, shape.first, shape.factors[low], strict=True)
    if any((before and first) or (behind and (first + n) % by) for n, before, behind, first, by in axes):
        return "a volume that is upsampled begins and ends with whole voxels"
    return None


@lru_cache(maxsize=64)
def transposed_taps(k: Vec3, stride: Vec3, dilation: Vec3) -> tuple[Taps, ...]:
    """Return the taps of each phase of a transposed convolution: those of the kernel with its remainder."""
    along = [
        [[d for d in range(size) if d * apart % by == r] for r in range(by)]
        for size, by, apart in zip(k, stride, dilation, strict=True)
    ]
    return tuple(tuple((tap,) for tap in _positions(*axes)) for axes in product(*along))


@lru_cache(maxsize=64)
def upsampled_taps(k: Vec3, factor: Vec3) -> tuple[Taps, ...]:
    """Return the taps of each phase of a convolution on an array whose voxels are repeated `factor` times."""
    along = [
        [
            [[d for d in range(size) if (r + d) // times == e] for e in range((r + size - 1) // times + 1)]
            for r in range(times)
        ]
        for size, times in zip(k, factor, strict=True)
    ]
    return tuple(tuple(_positions(*tap) for tap in product(*axes)) for axes in product(*along))


def whole_taps(k: Vec3) -> Taps:
    """Return the taps of a kernel, each of one place."""
    return tuple((tap,) for tap in _positions(*map(range, k)))


def _positions(z: Iterable[int], y: Iterable[int], x: Iterable[int]) -> tuple[Vec3, ...]:
    """Return all positions with these places along each axis."""
    return tuple(product(z, y, x))


@lru_cache(maxsize=256)
def problem_of(shape: AnyConv) -> Problem:
    """Return a layer as a problem."""
    if isinstance(shape, TransposeShape):
        return _transposed(shape)
    if isinstance(shape, ConvShape):
        group = Group((0,), shape.fin, ONE, ZERO, shape.n)
        phase = Phase((_positions(*map(range, shape.k)),), ZERO, ZERO, shape.unpooled)
        return Problem((group,), shape.fout, shape.unpooled, (phase,), shape.k, shape.batch, pool=shape.pool)
    if (low := upsampled_input(shape)) is not None:
        return _upsampled(shape, low)
    taps = tuple(_times(tap, shape.dilation) for tap in _positions(*map(range, shape.k)))
    group = Group(tuple(range(len(shape.fins))), shape.fin, shape.stride, shape.before, shape.n)
    phase = Phase((taps,), ZERO, ZERO, shape.out)
    found = Problem((group,), shape.fout, shape.out, (phase,), shape.k, dilation=shape.dilation)
    if (pooled := shape.pooled) is None:
        return found
    before = vector(-first % size for first, size in zip(pooled.first, pooled.window, strict=True))
    return replace(found, kept=pooled.window, before=before)


def _times(a: Vec3, b: Vec3) -> Vec3:
    return a[0] * b[0], a[1] * b[1], a[2] * b[2]


def shifts_of(shape: AnyConv) -> int:
    """Return how many taps along x fit one panel as maps, if the kernel's do; 1: they do not, or cannot be shifted."""
    if isinstance(shape, TransposeShape) or shape.k[2] * shape.fout > 16:
        return 1
    if isinstance(shape, GraphConvShape) and (
        shape.stride[2] > 1 or shape.dilation[2] > 1 or upsampled_input(shape) is not None
    ):
        return 1
    return shape.k[2] if len(problem_of(shape).groups) == len(problem_of(shape).phases) == 1 else 1


@lru_cache(maxsize=256)
def shifted(problem: Problem) -> Problem:
    """Return a convolution whose taps along x are maps: its outputs are sums of neighbours' maps."""
    (phase,) = problem.phases
    taps = tuple(tap for tap in phase.taps[0] if tap[2] == 0)
    return replace(problem, phases=(phase._replace(taps=(taps,)),), shifts=problem.k[2])


class _Grid(NamedTuple):
    """The grid of places of outputs whose phase is the remainder of output + first by the step."""

    begin: Vec3  # the first place is output + first = begin * step
    places: Vec3
    phases: list[tuple[Vec3, Vec3, Vec3, Vec3]]  # remainder, at, lo, hi

    @staticmethod
    def of(m: Vec3, first: Vec3, step: Vec3) -> _Grid:
        begin = vector(one // by for one, by in zip(first, step, strict=True))
        ends = (-(-(one + size) // by) for one, size, by in zip(first, m, step, strict=True))
        places = vector(end - one for end, one in zip(ends, begin, strict=True))
        phases = []
        for r in _positions(*map(range, step)):
            at = vector(b * by + rest - one for b, by, rest, one in zip(begin, step, r, first, strict=True))
            lo = vector(max(0, -(one // by)) for one, by in zip(at, step, strict=True))
            hi = vector(
                min(count, -(-(size - one) // by)) for count, size, one, by in zip(places, m, at, step, strict=True)
            )
            phases.append((r, at, lo, hi))
        return _Grid(begin, places, phases)


def _transposed(shape: TransposeShape) -> Problem:
    """Return a transposed convolution: output j of place q and remainder r is q * stride + r - first.

    It sums the inputs q - e over all places d of the kernel with d * dilation = r + e * stride.
    """
    grid = _Grid.of(shape.m, shape.first, shape.stride)
    most = vector((k - 1) * d // s for k, d, s in zip(shape.k, shape.dilation, shape.stride, strict=True))
    taps = transposed_taps(shape.k, shape.stride, shape.dilation)
    phases = []
    for kernel, (_, at, lo, hi) in zip(taps, grid.phases, strict=True):
        positions = tuple(
            vector(reach - d * by // s for reach, d, by, s in zip(most, tap, shape.dilation, shape.stride, strict=True))
            for (tap,) in kernel
        )
        phases.append(Phase((positions,), at, lo, hi))
    lead = vector(reach - begin for reach, begin in zip(most, grid.begin, strict=True))
    group = Group((0,), shape.fin, ONE, lead, shape.n)
    return Problem((group,), shape.fout, grid.places, tuple(phases), shape.k, step=shape.stride)


def _upsampled(shape: GraphConvShape, low: int) -> Problem:
    """Return a convolution of which one input is upsampled.

    Output o begins at voxel p = o - before + first of the upsampled array, p = q * factor + r. Place d of the kernel
    meets voxel q + (r + d) // factor of the array.
    """
    factor = shape.factors[low]
    first = vector(one - before for one, before in zip(shape.first, shape.before, strict=True))
    grid = _Grid.of(shape.out, first, factor)
    positions = _positions(*map(range, shape.k))
    phases = []
    for r, at, lo, hi in grid.phases:
        beside = tuple(vector(d + rest for d, rest in zip(tap, r, strict=True)) for tap in positions)
        own = _positions(*(range((rest + k - 1) // by + 1) for rest, k, by in zip(r, shape.k, factor, strict=True)))
        phases.append(Phase((beside, own) if len(shape.fins) > 1 else (own,), at, lo, hi))
    upsampled = Group((low,), shape.fins[low], ONE, _negative(grid.begin), shape.size_of(low))
    rest = tuple(number for number in range(len(shape.fins)) if number != low)
    lead = vector(one - b * by for one, b, by in zip(shape.first, grid.begin, factor, strict=True))
    others = Group(rest, shape.fin - shape.fins[low], factor, lead, shape.n)
    groups = (others, upsampled) if rest else (upsampled,)
    return Problem(groups, shape.fout, grid.places, tuple(phases), shape.k, step=factor)


def _negative(at: Vec3) -> Vec3:
    return -at[0], -at[1], -at[2]


def maps_of(fins: Sequence[int], inputs: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first map of each of these inputs, and the one behind its last."""
    ends = [sum(fins[: number + 1]) for number in inputs]
    return [(end - fins[number], end) for end, number in zip(ends, inputs, strict=True)]
