"""Divide the places of a convolution on the unit for bfloat16 among threads, and say what a thread holds."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from znnpy.kernels.cpu.bf16_problem import Problem
from znnpy.layers import ONE
from znnpy.machine import AMX, AVX512_BF16
from znnpy.shapes import FLOAT16, FLOAT32, Vec3

STEP = 32  # products of a step of the unit, as in bf16_unit.hpp
ROWS = {AMX: 32, AVX512_BF16: 12}  # places of a block
WIDTH = 32  # maps of a block: two panels
STEP_CYCLES = {AMX: 2.0, AVX512_BF16: 16.0}  # of a core, for a step of one place of a block
PACK_CYCLES = {1: 4.0, 2: 12.0, 3: 18.0}  # to pack the words of a step of a voxel
PIECE_CYCLES = 2.0  # to gather neighbours along x for a place
ROW_CYCLES = 150.0  # to begin a packed row: memory is read ahead within rows alone
MAXIMA_CYCLES = 8.0  # to raise maxima by the results of a place of a block
PLANE_CYCLES = 1000.0  # to begin a plane of a unit
RING_BYTES = 512 * 1024  # of the packed planes of a thread: they stay in L2 beside kernels
MOST_ROWS, MOST_RUN = 32, 128  # places of a unit of work along y and x
MOST_PLANES = 64  # as in bf16_conv.cpp
FOLD_MAPS = 16  # most maps of an input whose taps are gathered
UNITS_A_THREAD = 4  # units of work for each thread, so that all end at about the same time
THICK = (4, 1, 0)  # places along z of a unit, for each plane that a place reads; 0: one place
KERNELS_BYTES = 2**20  # of kernels, beyond which they do not stay in L2, ..
KERNELS_SPEED = 8.0  # .. and of which so many bytes a cycle come from the cache behind it, for each unit of work anew
POINTER = 8  # bytes


class Packed(NamedTuple):
    """The packed planes of one group of inputs."""

    steps: int  # of a tap
    depth: int  # planes in the ring
    height: int  # rows of a lattice
    slot: int  # bytes of a plane
    ring: int  # bytes of scratch before the ring


class Division(NamedTuple):
    """The units of work of a problem, and what a thread holds for one."""

    unit: Vec3  # windows along z, y and x
    units: int
    flat: bool  # whether blocks go on from row to row
    fold: bool  # whether the inputs of all taps are gathered place by place
    pitch: int  # voxels of a packed row
    groups: tuple[Packed, ...]
    gathered: int  # bytes of scratch before the gathered places
    lists: int  # bytes of scratch before the lists of pointers
    factors: int  # length of such a list
    before_pool: int  # bytes of scratch before what a pooling needs
    worker_bytes: int  # scratch of a thread
    multiplied: float  # places times steps, of all blocks and maps
    packed: float  # cycles of packing, and of what else is done beside the products


def products_of(words: int) -> int:
    """Return how often a value is multiplied that is divided into words."""
    return words * (words + 1) // 2


def folds(problem: Problem, words: int, unit: str) -> bool:
    """Return whether gathering the inputs of all taps takes less time than multiplying the zeros of each tap."""
    fin, taps, (kz, ky, _) = problem.groups[0].fin, problem.taps[0], problem.k
    alone = len(problem.phases) == len(problem.groups) == 1 and problem.step == ONE and problem.dilation[2] == 1
    if not alone or fin > FOLD_MAPS or kz > MOST_PLANES or taps == 1:
        return False
    each = products_of(words) * STEP_CYCLES[unit] * problem.width / WIDTH
    steps, gathered = -(-fin // STEP), -(-fin * taps // STEP)
    pieces = kz * ky * PIECE_CYCLES * words * -(-2 * problem.k[2] * fin // STEP)
    return gathered * each + pieces < taps * steps * each


@lru_cache(maxsize=1024)
def division(problem: Problem, words: int, fold: bool, unit: str, threads: int) -> Division:
    """Return the division that takes the least time with its ring in L2; if none has, that of the smallest ring.

    The time is that until the last thread ends: small images are cut into thinner units, so that every thread has some.
    """
    best: tuple[tuple[bool, float], Division] | None = None
    (_, along_y, along_x), (_, wy, wx), (_, by, bx) = problem.windows, problem.kept, problem.before
    for rows in _sizes(along_y + by, MOST_ROWS, wy):
        for run, thick in product(_sizes(along_x + bx, MOST_RUN, wx), THICK):
            found = _division(problem, words, fold, unit, threads, rows, run, thick)
            cycles = found.multiplied * products_of(words) * STEP_CYCLES[unit] + found.packed
            cycles *= -(-found.units // threads) * threads / found.units
            large = found.worker_bytes > RING_BYTES
            key = (True, float(found.worker_bytes)) if large else (False, cycles)
            if best is None or key < best[0]:
                best = key, found
    assert best is not None, "there is a size along each axis"
    return best[1]


def _sizes(count: int, most: int, window: int) -> list[int]:
    """Return some sizes of equal parts of an axis, about so large at most, and half of these and so on.

    They are multiples of `window`.
    """
    least = -(-count // most)
    sizes = (-(-count // min(count, least * 2**halvings + more)) for halvings in range(6) for more in range(3))
    return sorted({-(-size // window) * window for size in sizes})


def _division(
    problem: Problem, words: int, fold: bool, unit: str, threads: int, rows: int, run: int, thick: int
) -> Division:
    """Return the division into units of so many windows along y and x; `thick` is one of THICK."""
    pz, py, px = problem.pool
    high, wide, size = rows + py - 1, run + px - 1, ROWS[unit]  # high, wide: places of a unit
    (planes, along_y, along_x), (bz, by, bx) = problem.windows, problem.before
    columns = problem.images * -(-(along_y + by) // rows) * -(-(along_x + bx) // run)
    depths = [reach[0] + 1 for reach in problem.reach]
    parts = min(max(1, -(-UNITS_A_THREAD * threads // columns)), max(1, planes // max(1, thick * max(depths))))
    thick = -(-(planes + bz) // (parts * problem.kept[0])) * problem.kept[0]
    parts = -(-(planes + bz) // thick)
    units = columns * parts
    computed = columns * (planes + parts * (pz - 1))  # planes of places
    groups, at, cycles, factors = [], 0, computed * PLANE_CYCLES, 0
    if problem.kept != ONE:
        cycles += computed * high * wide * problem.width / WIDTH * MAXIMA_CYCLES
    pitch = _pitch(problem, fold, wide)
    for number, (group, depth) in enumerate(zip(problem.groups, depths, strict=True)):
        (sz, sy, _), (_, ry, _) = group.stride, problem.reach[number]
        read = units * depth + (computed - units) * min(sz, depth)  # planes
        if fold:
            steps, height = -(-group.fin * problem.taps[0] // STEP), (high - 1) * sy + ry + 1
            slot = 2 * words * height * pitch * group.fin
            pieces = problem.k[0] * problem.k[1] * -(-2 * problem.k[2] * group.fin // STEP)
            cycles += read * height * (pitch * PACK_CYCLES[words] / 4 + ROW_CYCLES)
            cycles += computed * high * wide * pieces * PIECE_CYCLES * words
        else:
            steps, height = -(-group.fin // STEP), high + ry // sy
            lattices = prod(map(len, problem.sides[number]))
            slot = 2 * STEP * words * steps * lattices * height * pitch
            cycles += read * lattices * height * (pitch * steps * PACK_CYCLES[words] + ROW_CYCLES)
        groups.append(Packed(steps, depth, height, slot, at))
        at += depth * slot
        factors += steps * (1 if fold else problem.taps[number])
    kernels = 2 * words * STEP * factors * problem.width
    if kernels > KERNELS_BYTES:
        cycles += units * kernels / KERNELS_SPEED
    voxel = 2 * STEP * (words * groups[0].steps if fold else 1)  # bytes from place to place
    across = wide if fold else pitch
    own = size - (problem.shifts - 1)  # places of a block that become outputs
    by_row, flat = high * -(-wide // own), -(-((high - 1) * across + wide) // own)
    gathered = at
    lists = _lines(at + (high * wide * voxel if fold else 0) + size * voxel + 64)
    longest = words * (groups[0].steps if fold else _most_factors(problem, groups))
    before_pool = _lines(lists + 2 * POINTER * longest)
    pooled = (high * wide + pz * rows * run) * problem.fout * (FLOAT16 if words == 1 else FLOAT32)
    return Division(
        (thick, rows, run), units, flat < by_row, fold, pitch, tuple(groups), gathered, lists, longest, before_pool,
        before_pool + (pooled if problem.pool != ONE else 0),
        float(computed) * min(by_row, flat) * size * factors * problem.width / WIDTH, cycles,
    )  # fmt: skip


def _pitch(problem: Problem, fold: bool, wide: int) -> int:
    """Return the voxels of a packed row, which all groups share."""
    reaches = [(group.stride[2], reach[2]) for group, reach in zip(problem.groups, problem.reach, strict=True)]
    return max((wide - 1) * stride + reach + 1 if fold else wide + reach // stride for stride, reach in reaches) + (
        problem.shifts - 1
    )


def _most_factors(problem: Problem, groups: list[Packed]) -> int:
    """Return the most taps and steps of a phase, over all groups."""
    return max(
        sum(packed.steps * len(taps) for packed, taps in zip(groups, phase.taps, strict=True))
        for phase in problem.phases
    )


def _lines(nbytes: int) -> int:
    """Return bytes rounded up to whole cache lines."""
    return -(-nbytes // 64) * 64
