"""Array operations of networks on a device: activations, softmax, pooling, layouts, convolutions.

`znnpy.ops` checks and documents the arguments. Everything is queued on `device.stream`; operations that allocate memory
wait until it can be freed. Arrays are float32 or float16, computed in float32, images in C order, any number of values
apart; `copy` takes any strides. ops.cu.

Memory   None, except 8 bytes a block for the softmax of images, and the kernels and biases of convolutions.
Bound    Memory: everything is read once (softmax of an image: twice) and written once; convolutions: see theirs.
Source   Chetlur et al., cuDNN: efficient primitives for deep learning, 2014, 3.
Tested   tests/kernels/gpu/test_ops.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from znnpy.errors import ShapeError
from znnpy.kernels.gpu import conv_direct
from znnpy.kernels.gpu.implicit_gemm import floats, tensor, warpgroup
from znnpy.kernels.gpu.implicit_gemm.lowering import Lowering, image_step
from znnpy.kernels.gpu.kernel_source import KernelInstance
from znnpy.shapes import ACTIVATIONS, FLOAT32, Activation, Precision, Sliding, Vec3, text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from znnpy.kernels.contract import ConvWeights
    from znnpy.kernels.gpu.device import Device

SOURCE, PEAK_SOURCE = "ops.cu", "load_store.cu"
PEAKS = ["peak_of<float, 1>", "peak_of<float, 4>"]  # as in load_store.cu
THREADS, WARP, SUMMED_BYTES = 256, 32, 8  # as in ops.cu
WAVES = 16  # blocks per multiprocessor: enough to hide each other's latency
PARTS = 512  # most parts of an image that softmax adds up: each block reads them all
TILE, NARROW = 1024, 32  # values of a tile that is transposed, and the most along its first side
MOST_IMAGES = 65535  # blocks of a grid along y; kernels loop over the rest
REGISTERS = 80


def _value(itemsize: int) -> str:
    return "half" if itemsize == 2 else "float"


def _families(value: str) -> list[list[str]]:
    """Return the kernels for one type in the groups that are compiled together."""
    return [
        [f"pointwise<{value}, {width}>" for width in (1, 4)],
        [f"softmax_maps<{value}>", *(f"softmax_{k}<{value}, {w}>" for k in ("parts", "image") for w in (1, 4))],
        [f"slide<{value}, {width}, {is_max}>" for width in (1, 4) for is_max in ("true", "false")],
        [f"reorder<{value}, {other}>" for other in ("half", "float")],
    ]


def instances() -> list[KernelInstance]:
    """Return the kernels for both types."""
    names = [name for value in ("half", "float") for family in _families(value) for name in family]
    return [KernelInstance(SOURCE, name, REGISTERS) for name in names]


def pointwise(device: Device, activation: Activation, x: Any, out: Any) -> None:
    """Compute out = activation(x), value by value; out may be x."""
    x, out = _in_one(x, out)
    count = prod(x.shape[1:])
    width = _width(device, count, x, out)
    _launch(
        device,
        f"pointwise<{_value(x.dtype.itemsize)}, {width}>",
        _grid(device, len(x), count // width),
        *(x, image_step(x), out, image_step(out), len(x), count, ACTIVATIONS.index(activation)),
    )


def softmax(device: Device, x: Any, out: Any, *, over_maps: bool) -> None:
    """Apply softmax over the maps of each voxel, or over all values of an image; out may be x."""
    value, count, maps = _value(x.dtype.itemsize), prod(x.shape[1:]), x.shape[-1]
    if over_maps:
        voxels, lanes = count // maps, min(WARP, _power(maps))
        _launch(
            device,
            f"softmax_maps<{value}>",
            _grid(device, 1, len(x) * voxels * lanes),
            *(x, image_step(x), out, image_step(out), len(x), voxels, maps, lanes),
        )
        return
    width = _width(device, count, x, out)
    blocks, images = _grid(device, len(x), count // width)
    parts = min(blocks, PARTS)
    found = device.allocate(SUMMED_BYTES * parts * len(x), "parts of a softmax")
    names = f"softmax_parts<{value}, {width}>", f"softmax_image<{value}, {width}>"
    arguments = (x, image_step(x), out, image_step(out), found, parts, len(x), count)
    with _temporary(device, found):
        _launch(device, names[0], (parts, images), x, image_step(x), found, len(x), count)
        _launch(device, names[1], (blocks, images), *arguments)


def pool(
    device: Device,
    x: Any,
    out: Any,
    window: Vec3,
    sliding: Sliding,
    how: Literal["max", "average"],
    *,
    counts_padding: bool,
) -> None:
    """Compute the maximum or the mean over the part of each window inside the image."""
    maps = x.shape[-1]
    width = _width(device, maps, x, out)
    _launch(
        device,
        f"slide<{_value(x.dtype.itemsize)}, {width}, {'true' if how == 'max' else 'false'}>",
        _grid(device, 1, prod(out.shape) // width),
        *(x, image_step(x), out, image_step(out), len(x), *x.shape[1:], *out.shape[1:4]),
        *(*window, *sliding.stride, *sliding.padding, int(counts_padding)),
    )


def copy(device: Device, x: Any, out: Any) -> None:
    """Compute out = x for equal shapes of up to 5 axes and any strides; values are rounded to out's type."""
    plan = copy_plan(x.shape, _steps(x), _steps(out))
    tiles = -(-plan.n[3] // plan.tile[0]) * -(-plan.n[4] // plan.tile[1]) * prod(plan.n[:3])
    _launch(
        device,
        f"reorder<{_value(x.dtype.itemsize)}, {_value(out.dtype.itemsize)}>",
        (min(tiles, WAVES * device.gpu.multiprocessors), 1),
        *(x, out, *plan.n, *plan.x_steps, *plan.out_steps, *plan.tile, int(plan.across)),
        shared=FLOAT32 * plan.tile[0] * (plan.tile[1] + 1),
    )


def convolve(
    device: Device,
    x: Any,
    out: Any,
    weights: ConvWeights,
    sliding: Sliding,
    activation: Activation,
    method: Literal["direct", "implicit_gemm"],
    precision: Precision,
) -> None:
    """Compute the cross-correlation with zeros around the image, bias and activation; kernels are uploaded each time.

    implicit_gemm runs on tensor cores: float32 arrays in fp32 and tf32, float16 arrays in fp16. Float16 arrays in fp32,
    or if softmax follows, run on float32 units. With strides of 1, an H100 or H200 multiplies as in warpgroup.py.

    Raises ShapeError if tensor cores are to multiply kernels so large that no tile fits shared memory.
    """
    nz, ny, nx, fin = x.shape[1:]
    kz, ky, kx = weights.weight.shape[2:]
    stored = precision if x.dtype.itemsize == FLOAT32 else "fp16"
    problem = Lowering(fin, len(weights.bias), (nz, ny, nx), (kz, ky, kx), activation, stored, sliding)
    if method == "direct":
        resident = conv_direct.prepare(weights, device)
        with _temporary(device, *resident):
            conv_direct.DirectStep(resident, problem, device).run(x, out, {})
    elif stored != precision or (stored == "fp16" and activation == "softmax"):  # float16 would round its input
        wholes = floats.prepare(weights, device)
        with _temporary(device, *wholes):
            floats.FloatProduct(wholes, problem, device).run(x, out, None, 0, 0)
    else:
        _on_tensor_cores(device, x, out, weights, problem)


def _on_tensor_cores(device: Device, x: Any, out: Any, weights: ConvWeights, problem: Lowering) -> None:
    soft = problem.activation == "softmax"  # a separate pass: a block does not see all maps
    plain = replace(problem, activation="none") if soft else problem
    by_warpgroups = warpgroup.applies(plain, device.gpu)
    if not by_warpgroups and tensor.plan_of(plain, len(x), device.gpu.shared_block_bytes) is None:
        raise ShapeError(
            f"kernels of {text(problem.k)} are too large for implicit_gemm: no tile of the image fits "
            f"{device.gpu.shared_block_bytes:,} bytes of shared memory; use method='direct'"
        )
    parts = (warpgroup if by_warpgroups else tensor).prepare(weights, problem.precision, device)
    peak = device.allocate(FLOAT32, "the largest value of an image")
    product = warpgroup.WarpgroupProduct if by_warpgroups else tensor.TensorProduct
    step = product(parts, plain, len(x), device)
    with _temporary(device, parts.kernels, parts.bias, peak):
        if problem.precision != "fp16":
            _find_peak(device, x, peak)
        step.run(x, out, None, device.address(peak), 0)
        if soft:
            softmax(device, out, out, over_maps=True)


def _find_peak(device: Device, x: Any, peak: Any) -> None:
    """Compute peak = the largest |x|, for float32."""
    (x,) = _in_one(x)
    count = prod(x.shape[1:])
    width = _width(device, count, x)
    device.clear(peak)
    name = f"peak_of<float, {width}>"
    grid = _grid(device, len(x), count // width)
    device.kernels(PEAK_SOURCE, PEAKS)[name](grid, (THREADS,), x, image_step(x), len(x), count, peak)


@contextmanager
def _temporary(device: Device, *arrays: Any) -> Iterator[None]:
    """Allocate memory for the work queued in this block; afterwards wait for that work and free the memory."""
    try:
        yield
    finally:
        device.free(*arrays)


class CopyPlan(NamedTuple):
    """A copy between two layouts in the kernel's form: five axes, the last two of which are divided into tiles."""

    n: tuple[int, ...]
    x_steps: tuple[int, ...]  # values
    out_steps: tuple[int, ...]
    tile: tuple[int, int]  # along the last two axes
    across: bool  # whether out is contiguous along the last axis but one


def copy_plan(shape: Sequence[int], x_steps: Sequence[int], out_steps: Sequence[int]) -> CopyPlan:
    """Merge axes that are adjacent in both layouts; put x's smallest stride last and out's smallest before it."""
    axes = [axis for axis in zip(shape, x_steps, out_steps, strict=True) if axis[0] != 1]
    axes.sort(key=lambda axis: (-abs(axis[1]), -abs(axis[2])))
    merged: list[tuple[int, int, int]] = []
    for size, x_step, out_step in axes:
        if merged and merged[-1][1:] == (size * x_step, size * out_step):
            size *= merged.pop()[0]
        merged.append((size, x_step, out_step))
    merged = [(1, 0, 0)] * (5 - len(merged)) + merged
    last = merged.pop()
    known = [axis for axis in merged if axis[0] > 1]
    nearest = min(known, key=lambda axis: abs(axis[2])) if known else merged[-1]
    merged.remove(nearest)
    n, x_ready, out_ready = zip(*merged, nearest, last, strict=True)
    narrow = min(_power(last[0]), NARROW)
    tile_3 = min(_power(nearest[0]), TILE // narrow)
    tile = tile_3, min(_power(last[0]), TILE // tile_3)
    return CopyPlan(n, x_ready, out_ready, tile, nearest[0] > 1 and abs(nearest[2]) < abs(last[2]))


def _in_one(*arrays: Any) -> tuple[Any, ...]:
    """Return arrays without gaps as one image, so that thin ones fill the device too; return others unchanged."""
    whole = all(array.flags.c_contiguous for array in arrays)
    return tuple(array.reshape(1, -1) for array in arrays) if whole else arrays


def _steps(array: Any) -> tuple[int, ...]:
    return tuple(step // array.dtype.itemsize for step in array.strides)


def _power(count: int) -> int:
    """Return the smallest power of 2 >= count."""
    return 1 << (count - 1).bit_length()


def _width(device: Device, run: int, *arrays: Any) -> int:
    """Return the values that a thread takes at once: 4 if runs of `run` values and all images are aligned to four."""
    four = 4 * arrays[0].dtype.itemsize
    begins = [number for array in arrays for number in (device.address(array), array.strides[0])]
    return 4 if run % 4 == 0 and all(begin % four == 0 for begin in begins) else 1


def _grid(device: Device, images: int, threads: int) -> tuple[int, int]:
    """Return a grid for so many threads per image; loops in the kernels do the rest once the device is full."""
    most = WAVES * device.gpu.multiprocessors
    along = max(1, min(-(-threads // THREADS), most))
    return along, max(1, min(images, -(-most // along), MOST_IMAGES))


def _launch(device: Device, name: str, grid: tuple[int, int], *arguments: Any, shared: int = 0) -> None:
    family = next(names for value in ("half", "float") for names in _families(value) if name in names)
    device.kernels(SOURCE, family)[name](grid, (THREADS,), *arguments, shared=shared)
