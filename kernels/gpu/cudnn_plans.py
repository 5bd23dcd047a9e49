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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from znnpy.errors import DeviceError
from znnpy.kernels import reference
from znnpy.kernels.gpu.libraries import Convolution, RefusedError
from znnpy.messages import option
from znnpy.shapes import FLOAT32, ConvShape, Vec3, add, valid

if TYPE_CHECKING:
    from znnpy.kernels.gpu.device import Device
    from znnpy.kernels.gpu.libraries import ConvolutionPlan
    from znnpy.shapes import Activation

ALLOWED = {"fp32": 1e-6, "tf32": 1e-3, "fp16": 2e-3}  # rms error of a plan, relative to the rms answer
ROUNDING = {"fp32": 2.0**-22, "tf32": 2.0**-22, "fp16": 2.0**-10}  # relative rounding error of stored values
BEYOND: Vec3 = (1, 4, 9)  # voxels of the small layer's output, minus one
CHECK_BYTES = 8 << 20  # workspace for the small layer
CHECKED_VOXELS = 15  # voxels that are checked, besides the last
NAIVE = "eng0"

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
    return plan.name, problem.fin, problem.fout, problem.k, problem.precision, problem.finish, _gaps(problem)


def _gaps(problem: Convolution) -> tuple[bool, bool, bool]:
    """Return whether there are several images, and whether there are gaps between those of input and of output."""
    n, m = prod(problem.n) * problem.fin, prod(valid(problem.n, problem.k)) * problem.fout
    several = problem.batch > 1
    return several, several and problem.x_step != n, several and problem.out_step != m


def _computes_right(device: Device, problem: Convolution, plan: ConvolutionPlan) -> bool:
    """Try the plan on images with the problem's layout: adjacent, or with planes between them.

    The weights are not the layer's: those may be 0, or so large that sums overflow.
    """
    several, x_gap, out_gap = _gaps(problem)
    n, dtype = add(problem.k, BEYOND), np.float16 if problem.precision == "fp16" else np.float32
    m, images = valid(n, problem.k), 2 if several else 1
    wide = (images, n[0] + x_gap, *n[1:], problem.fin), (images, m[0] + out_gap, *m[1:], problem.fout)
    small = replace(problem, batch=images, n=n, x_step=prod(wide[0][1:]), out_step=prod(wide[1][1:]))
    same = device.libraries.same(small, plan)
    if same is None or same.workspace_bytes > CHECK_BYTES:
        return False
    rng = np.random.default_rng(20261121)
    x: Any = rng.standard_normal(wide[0], np.float32).astype(dtype)
    weight: Any = rng.standard_normal((problem.fout, *problem.k, problem.fin), np.float32)
    weight = (weight / np.float32(np.sqrt(weight[0].size))).astype(dtype)
    bias = rng.standard_normal(problem.fout, np.float32)
    given = device.put(x, "a small layer")[:, int(x_gap) :]
    out = device.put(np.full(wide[1], np.nan, dtype), "its result")
    kernels, biases = device.put(weight, "its weights"), device.put(bias, "its biases")
    workspace = device.allocate(same.workspace_bytes, "its workspace")
    try:
        same.run(given, kernels, biases, out[:, int(out_gap) :], workspace)
    except RefusedError:
        return False
    found = device.get(out)[:, int(out_gap) :]
    plain = reference.convolve(x[:, int(x_gap) :], weight.transpose(0, 4, 1, 2, 3), np.zeros_like(bias))
    exact = plain if problem.finish is None else reference.activate(plain + bias, problem.finish)
    limit = ALLOWED[problem.precision] * _rms(plain) + ROUNDING[problem.precision] * _rms(exact)
    return bool(_rms(found - exact) <= limit)  # NaN is not


def looks_plausible(device: Device, given: Any, kernels: Any, biases: Any, into: Any, activation: Activation) -> bool:
    """Return whether some voxels of a result are plausible; the bound is above all rounding errors of sums."""
    kz, ky, kx = kernels.shape[1:4]
    weight = device.get(kernels).astype(np.float64)
    bias = device.get(biases).astype(np.float64)
    rng = np.random.default_rng(20261121)
    last = [m - 1 for m in into.shape[:4]]
    for s, z, y, v in [[int(rng.integers(m + 1)) for m in last] for _ in range(CHECKED_VOXELS)] + [last]:
        window = device.get(given[s, z : z + kz, y : y + ky, v : v + kx]).astype(np.float64)
        found = device.get(into[s, z, y, v]).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):  # overflow is detected elsewhere
            exact = reference.activate(np.tensordot(weight, window, 4) + bias, activation)
            # Products of tf32 are within 2^-11 twice, and steps of float16 near 0 are 2^-24.
            largest = np.tensordot(abs(weight), abs(window), 4)
            bound = 2.0**-9 * largest + 2.0**-10 * abs(exact) + 2.0**-24
            # Elsewhere the result may be infinite or NaN.
            held = (abs(exact) < np.finfo(into.dtype).max / 2) & (largest < np.finfo(np.float32).max / 2)
            if not (abs(found - exact) <= bound)[held].all():
                return False
    return True


def check_bytes(shape: ConvShape) -> int:
    """Return the bytes of the small layers, with weights and workspace."""
    small = add(shape.k, add(BEYOND, (1, 0, 0)))
    values = prod(small) * shape.fin + prod(valid(small, shape.k)) * shape.fout
    weights = shape.itemsize * shape.fout * shape.fin * prod(shape.k) + FLOAT32 * shape.fout
    return 2 * shape.itemsize * values + weights + CHECK_BYTES


def _rms(values: Any) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
