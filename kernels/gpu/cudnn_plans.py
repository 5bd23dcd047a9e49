"""Select cuDNN plans that compute a convolution correctly.

Method   cuDNN's heuristics propose plans. A plan is used if it needs no more workspace than given and computes a small
         layer of the same maps and kernel correctly: some versions have 3D kernels that do not. Then a few voxels of
         its result for the first input are checked, since some plans are wrong for some sizes only. The results of
         these checks are kept until the process ends.
Memory   While a plan is tried: the small layer twice, its weights, CHECK_BYTES of workspace.
Source   nvidia-cudnn-frontend; observed errors: cuDNN 9.8 to 9.15.
Tested   tests/kernels/gpu/test_conv_cudnn.py
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from znnpy.errors import DeviceError
from znnpy.graph_shapes import GraphConvShape
from znnpy.kernels import definition, reference
from znnpy.kernels.contract import ConvWeights
from znnpy.kernels.gpu.libraries import Convolution, RefusedError
from znnpy.messages import option
from znnpy.shapes import FLOAT32, Vec3, add

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from znnpy.kernels.gpu.device import Device
    from znnpy.kernels.gpu.libraries import ConvolutionPlan
    from znnpy.shapes import Activation

ALLOWED = {"fp32": 1e-6, "tf32": 1e-3, "fp16": 2e-3}  # rms error of a plan, relative to the rms answer
ROUNDING = {"fp32": 2.0**-22, "tf32": 2.0**-22, "fp16": 2.0**-10}  # relative rounding error of stored values
BEYOND: Vec3 = (1, 4, 9)  # voxels of the small layer's output, minus one
CHECK_BYTES = 8 << 20  # workspace for the small layer
CHECKED_VOXELS = 15  # voxels that are checked, besides the last
NAIVE = "eng0"
MOST_VALUES = 2**31  # values of a tensor passed to cuDNN: beyond it, cuDNN is not reliable
LESS_VALUES = (2**29, 2**27)  # tried if it has no good plan for so many: 2^31 bytes in fp32, and less

_RIGHT: dict[tuple[object, ...], bool] = {}  # results of this process's checks
_REFUSED: set[tuple[Convolution, str]] = set()  # plans that failed to run, for exactly these sizes


def forget() -> None:
    """Forget the results of all checks, so that plans are checked again as in a new process."""
    _RIGHT.clear()
    _REFUSED.clear()


def refuse(problem: Convolution, plan: ConvolutionPlan) -> None:
    """Never choose the plan for exactly this problem again: it failed to run."""
    _REFUSED.add((problem, plan.name))


def reject(problem: Convolution, plan: ConvolutionPlan) -> None:
    """Never choose the plan for these maps and this kernel again: its result was wrong."""
    _RIGHT[_key(problem, plan)] = False


class Chosen(NamedTuple):
    """A plan and its problem, with or without bias and activation."""

    problem: Convolution
    plan: ConvolutionPlan


class NoPlanError(DeviceError):
    """cuDNN has no plan that computes a layer of this size correctly."""


class HasChosen(Protocol):
    """A part of a layer that is convolved at once."""

    @property
    def by(self) -> Chosen:
        """Return what computes it."""


Call = TypeVar("Call", bound=HasChosen)
Part = TypeVar("Part")


def best_division(
    divided: Callable[[int], Sequence[Part]], calls_for: Callable[[Sequence[Part]], tuple[Call, ...]], layer: object
) -> tuple[Call, ...]:
    """Plan parts as large as possible; smaller ones if cuDNN has no plan for those, or only the naive one.

    divided    returns parts of fewer values than given; none if a plane has more
    calls_for  plans parts; raises NoPlanError
    layer      the layer in words
    """
    ways = [divided(MOST_VALUES)]
    if not ways[0]:
        raise DeviceError(f"one plane of {layer} is more than cuDNN convolves at once: plan smaller patches")
    for most in LESS_VALUES:
        smaller = divided(most)
        if len(smaller) > len(ways[-1]):
            ways.append(smaller)
    naive: tuple[Call, ...] = ()
    refusal: NoPlanError | None = None
    for way in ways:
        try:
            calls = calls_for(way)
        except NoPlanError as error:  # the error stands if smaller parts do not help
            refusal = refusal or error
            continue
        if not any(is_naive(call.by.plan) for call in calls):
            return calls
        naive = naive or calls
    if naive:
        return naive
    assert refusal is not None
    raise refusal


def choose(device: Device, asked: Convolution, limit: int, choice: int) -> Chosen:
    """Return number `choice`, or the last, of the plans that fit and compute correctly.

    Plans that fuse bias and activation go first, the naive one last.
    """
    right: list[Chosen] = []
    wrong, refused = [], []
    for finishes, naive in ((True, False), (False, False), (True, True), (False, True)):
        if right:
            break
        problem = asked if finishes else replace(asked, finish=None)
        for plan in device.libraries.convolutions(problem):
            if plan.workspace_bytes > limit or is_naive(plan) != naive:
                continue
            if (problem, plan.name) in _REFUSED:
                refused.append(plan.name)
            elif is_right(device, problem, plan):
                right.append(Chosen(problem, plan))
            else:
                wrong.append(plan.name)
            if len(right) > choice:
                break
    if right:
        return right[-1]
    failures = f"; wrong on a small layer: {', '.join(wrong)}" if wrong else ""
    failures += f"; refused to run: {', '.join(refused)}" if refused else ""
    raise NoPlanError(
        f"cuDNN has no plan for {asked} within {limit} bytes of workspace{failures}; "
        f"choose another primitive with {option('only')}"
    )


def is_naive(plan: ConvolutionPlan) -> bool:
    """Return whether it is the plan that always exists and is many times slower than others."""
    return plan.name.split("_")[0] == NAIVE


def is_right(device: Device, problem: Convolution, plan: ConvolutionPlan) -> bool:
    """Return whether the plan computes a small layer of these maps and this kernel correctly; tried once per process.

    False also if it cannot be tried.
    """
    key = _key(problem, plan)
    if key not in _RIGHT:
        _RIGHT[key] = _computes_right(device, problem, plan)
    return _RIGHT[key]


def _key(problem: Convolution, plan: ConvolutionPlan) -> tuple[object, ...]:
    kind = problem.k, problem.before, problem.behind, problem.stride, problem.dilation
    return plan.name, problem.fin, problem.fout, kind, problem.precision, problem.finish, _gaps(problem)


class _Gaps(NamedTuple):
    """The gaps of a problem: between images, planes and lines of the input, and between images of the output."""

    several: bool
    images: bool
    planes: bool
    lines: bool
    out: bool


def _gaps(problem: Convolution) -> _Gaps:
    n, m, several = problem.n, prod(problem.m) * problem.fout, problem.batch > 1
    plane, line = problem.steps
    return _Gaps(
        several,
        images=several and problem.x_step != n[0] * plane,
        planes=plane != n[1] * line,
        lines=line != n[2] * problem.fin,
        out=several and problem.out_step != m,
    )


def _computes_right(device: Device, problem: Convolution, plan: ConvolutionPlan) -> bool:
    """Try the plan on images with the problem's layout: adjacent, or with gaps between images, planes and lines.

    The weights are not the layer's: those may be 0, or so large that sums overflow.
    """
    gaps, n, dtype = _gaps(problem), small_size(problem), np.float16 if problem.precision == "fp16" else np.float32
    images, more = 2 if gaps.several else 1, (int(gaps.images), int(gaps.planes), int(gaps.lines))
    around, m = add(n, more), replace(problem, n=n).m
    wide = (images, *around, problem.fin), (images, m[0] + gaps.out, *m[1:], problem.fout)
    line = around[2] * problem.fin
    small = replace(
        problem, batch=images, n=n, x_step=prod(wide[0][1:]), out_step=prod(wide[1][1:]), apart=(around[1] * line, line)
    )
    same = device.libraries.same(small, plan)
    if same is None or same.workspace_bytes > CHECK_BYTES:
        return False
    rng = np.random.default_rng(20261121)
    x: Any = rng.standard_normal(wide[0], np.float32).astype(dtype)
    weight: Any = rng.standard_normal((problem.fout, *problem.k, problem.fin), np.float32)
    weight = (weight / np.float32(np.sqrt(weight[0].size))).astype(dtype)
    bias = rng.standard_normal(problem.fout, np.float32)
    inner = (slice(None), *(slice(skipped, None) for skipped in more))
    given = device.put(x, "a small layer")[inner]
    out = device.put(np.full(wide[1], np.nan, dtype), "its result")
    kernels, biases = device.put(weight, "its weights"), device.put(bias, "its biases")
    workspace = device.allocate(same.workspace_bytes, "its workspace")
    try:
        same.run(given, kernels, biases, out[:, int(gaps.out) :], workspace)
    except RefusedError:
        return False
    found = device.get(out)[:, int(gaps.out) :]
    plain = _sums(problem, x[inner], weight)
    exact = plain if problem.finish is None else reference.activate(plain + bias, problem.finish)
    limit = ALLOWED[problem.precision] * _rms(plain) + ROUNDING[problem.precision] * _rms(exact)
    return bool(_rms(found - exact) <= limit)  # NaN is not


def small_size(problem: Convolution) -> Vec3:
    """Return the size of a small input of these maps and this kernel, with an output of BEYOND + 1 voxels or more."""
    last = zip(BEYOND, problem.stride, problem.dilation, problem.k, problem.before, problem.behind, strict=True)
    z, y, x = (max(1, more * s + d * (k - 1) + 1 - a - b) for more, s, d, k, a, b in last)
    return z, y, x


def _sums(problem: Convolution, images: Any, weight: Any) -> Any:
    """Return the convolution of images in float64; weight (f', k, f)."""
    weights = ConvWeights(weight.transpose(0, 4, 1, 2, 3), np.zeros(problem.fout, np.float32))
    shape = GraphConvShape(
        *((problem.fin,), problem.fout, images.shape[1:4], problem.k),
        *(problem.before, problem.behind, problem.stride, problem.dilation),
    )
    return np.stack([definition.convolve(shape, weights, [image]) for image in images])


def looks_plausible(
    device: Device, problem: Convolution, given: Any, kernels: Any, biases: Any, into: Any, activation: Activation
) -> bool:
    """Return whether some voxels of a result are plausible; the bound is above all rounding errors of sums.

    biases  those of the result; None: it has none
    """
    weight = device.get(kernels).astype(np.float64)
    bias = 0.0 if biases is None else device.get(biases).astype(np.float64)
    rng = np.random.default_rng(20261121)
    last = [m - 1 for m in into.shape[:4]]
    for s, *voxel in [[int(rng.integers(m + 1)) for m in last] for _ in range(CHECKED_VOXELS)] + [last]:
        taps, there = _inside(problem, voxel)
        window = device.get(given[s][there]).astype(np.float64)
        found = device.get(into[s, voxel[0], voxel[1], voxel[2]]).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):  # overflow is detected elsewhere
            exact = reference.activate(np.tensordot(weight[:, *taps], window, 4) + bias, activation)
            # Products of tf32 are within 2^-11 twice, and steps of float16 near 0 are 2^-24.
            largest = np.tensordot(abs(weight[:, *taps]), abs(window), 4)
            bound = 2.0**-9 * largest + 2.0**-10 * abs(exact) + 2.0**-24
            # Elsewhere the result may be infinite or NaN.
            held = (abs(exact) < np.finfo(into.dtype).max / 2) & (largest < np.finfo(np.float32).max / 2)
            if not (abs(found - exact) <= bound)[held].all():
                return False
    return True


def _inside(problem: Convolution, voxel: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the taps of a voxel of the output that lie in the image, and where they lie."""
    taps, there = [], []
    axes = zip(voxel, problem.n, problem.k, problem.before, problem.stride, problem.dilation, strict=True)
    for at, n, k, before, stride, dilation in axes:
        begin = at * stride - before
        first, end = max(0, -(begin // dilation)), min(k, -((begin - n) // dilation))
        taps.append(slice(first, end))
        start = begin + first * dilation
        there.append(slice(start, start + max(0, (end - first - 1) * dilation + 1), dilation))
    return tuple(taps), tuple(there)


def check_bytes(problem: Convolution, more: Vec3) -> int:
    """Return the bytes of the small layers, with weights and workspace.

    more  voxels that a small layer may have in gaps, along each axis; those of several images are planes
    """
    n, m = add(small_size(problem), more), replace(problem, n=small_size(problem)).m
    values = problem.batch * (prod(n) * problem.fin + (m[0] + more[0]) * m[1] * m[2] * problem.fout)
    weights = problem.itemsize * problem.fout * problem.fin * prod(problem.k) + FLOAT32 * problem.fout
    return problem.itemsize * values + weights + CHECK_BYTES


def _rms(values: Any) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
