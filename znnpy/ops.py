"""Single operations of convolutional networks on numpy arrays, or on arrays of a GPU.

    from znnpy import ops
    y = ops.convolve(x, weights, stride=(1, 2, 2), padding=(1, 1, 1), activation="relu")
    y = ops.max_pool(y, (1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1))
    y = ops.softmax(ops.average_pool(y, y.shape[1:4]))
    z = ops.convert_layout(y, "szyxf -> sfzyx")

Arrays are (S, z, y, x, f), channels last, float32 or float16; a 2D image has depth 1. S may be 0, but images may not be
empty; activations and layouts take any array. Arithmetic is in float32 unless `convolve` gets another precision. A
result has the type of x, and values beyond the range of float16 become infinite.

    x        is only read. A numpy array may have any strides; a GPU array is in C order within an image, and images are
             any distance apart (`convert_layout` takes and gives any strides).
    device   the Device that holds x and out, opened by `znnpy.Device(znnpy.find_gpu())`; work is queued on its
             `stream`. `convolve` and softmax over all values wait for it, since they need further memory; the others
             return before it is done, and `device.get` waits. Freeing an array that is no longer referenced waits too.
             None: the arrays are numpy arrays, and the work is done on the CPU.
    out      array for the result, of its shape and type; it may be x itself for activations and softmax, otherwise the
             two must not share memory. None: new memory. It is returned.

ShapeError says which size, type or order does not fit; TypeError that an object is not an array of `device`, or not a
numpy array if there is none.
Sessions do not run these operations: they plan (`znnpy.plan`), fuse, and keep what they prepared.

Source  Chetlur et al., cuDNN: efficient primitives for deep learning, 2014, 3: its primitives, in 3D.
Tested  tests/kernels/cpu/test_ops.py, tests/kernels/gpu/test_ops.py
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from znnpy import fast_convolution
from znnpy.errors import ShapeError
from znnpy.kernels.cpu import ops as on_cpu
from znnpy.kernels.gpu import ops as on_gpu
from znnpy.network import ConvWeights
from znnpy.shapes import ACTIVATIONS, GPU_PRECISIONS, Activation, Precision, Sliding, Vec3, text

if TYPE_CHECKING:
    import numpy.typing as npt

    from znnpy.kernels.gpu.device import Device

    Array = Any  # a numpy.ndarray, or an array of a Device

Over = Literal["maps", "all"]
Mode = Literal["correlation", "convolution"]
Method = Literal["auto", "direct", "implicit_gemm"]

__all__ = [
    "average_pool",
    "convert_layout",
    "convolve",
    "max_pool",
    "relu",
    "sigmoid",
    "softmax",
    "tanh",
]

ONE, ZERO = (1, 1, 1), (0, 0, 0)
MOST_AXES = 5
FEW_MAPS = 4  # up to this number of input maps one lowered matrix is faster than a product for each tap
OVERLAP_WORK = 10**5  # steps of the search for shared memory, after which it is assumed
_LAYOUT = re.compile(r"\s*([a-z]+)\s*->\s*([a-z]+)\s*")


def relu(x: Array, *, device: Device | None = None, out: Array | None = None) -> Array:
    """Return max(x, 0) of each value, for an array with any number of axes; NaN stays NaN."""
    return _pointwise("relu", x, device, out)


def sigmoid(x: Array, *, device: Device | None = None, out: Array | None = None) -> Array:
    """Return 1 / (1 + exp(-x)) of each value, for an array with any number of axes."""
    return _pointwise("sigmoid", x, device, out)


def tanh(x: Array, *, device: Device | None = None, out: Array | None = None) -> Array:
    """Return the hyperbolic tangent of each value, for an array with any number of axes."""
    return _pointwise("tanh", x, device, out)


def softmax(x: Array, over: Over = "maps", *, device: Device | None = None, out: Array | None = None) -> Array:
    """Return exp(x - largest) / sum of exp(x - largest).

    over  "maps": sums over the maps of each voxel; "all": over all values of each image.
    """
    _check_choice("over", over, get_args(Over))
    _check(x, device)
    result = _result(x.shape, x, device, out, in_place=True)
    if not result.size:
        return result
    if device is None:
        on_cpu.softmax(x, result, over_maps=over == "maps")
    else:
        on_gpu.softmax(device, x, result, over_maps=over == "maps")
    return result


def max_pool(
    x: Array,
    window: Vec3,
    *,
    stride: Vec3 | None = None,
    padding: Vec3 = ZERO,
    device: Device | None = None,
    out: Array | None = None,
) -> Array:
    """Return the maximum of each window, (S, floor((n - window + 2 padding) / stride) + 1, f); padding never wins.

    window   size (z, y, x) of the window, in voxels.
    stride   distance between windows; default: `window`, so that they do not overlap.
    padding  number of planes around the image, less than the window.
    """
    return _pool("max", x, window, stride, padding, device, out, counts_padding=False)


def average_pool(
    x: Array,
    window: Vec3,
    *,
    stride: Vec3 | None = None,
    padding: Vec3 = ZERO,
    counts_padding: bool = False,
    device: Device | None = None,
    out: Array | None = None,
) -> Array:
    """Return the mean of each window; `window`, `stride`, `padding` and result sizes as for `max_pool`.

    counts_padding  the zeros around the image count as values of the window.
    """
    return _pool("average", x, window, stride, padding, device, out, counts_padding=counts_padding)


def convert_layout(
    x: Array,
    layout: str,
    *,
    dtype: npt.DTypeLike | None = None,
    device: Device | None = None,
    out: Array | None = None,
) -> Array:
    """Return the same values with their axes in another order, in C order or in the strides of `out`.

    layout  one letter per axis, before and after, up to 5: "szyxf -> sfzyx" turns channels last into channels first.
    dtype   float32 or float16; default: that of x, or of `out`.

    x and out may have any strides: parts of images, or transposed axes.
    """
    _check_array(x, device)
    match = _LAYOUT.fullmatch(layout)
    if match is None or len(set(match[1])) != len(match[1]) or sorted(match[1]) != sorted(match[2]):
        raise ShapeError(f"{layout!r} is not a layout: write the same letters, each once, before and after '->'")
    if len(match[1]) != x.ndim or x.ndim > MOST_AXES:
        raise ShapeError(
            f"{layout!r} names {len(match[1])} axes of {x.ndim}, {x.shape}; up to {MOST_AXES} may be reordered"
        )
    turned = x.transpose([match[1].index(axis) for axis in match[2]])
    kind = np.dtype(dtype if dtype is not None else x.dtype if out is None else out.dtype)
    if kind not in (np.float32, np.float16):
        raise ShapeError(f"layouts are converted to float32 or float16, not {kind}")
    result = _result(turned.shape, turned, device, out, kind, any_order=True)
    if not result.size:
        return result
    if device is None:
        on_cpu.copy(turned, result)
    else:
        on_gpu.copy(device, turned, result)
    return result


def convolve(
    x: Array,
    weights: ConvWeights,
    *,
    activation: Activation = "none",
    stride: Vec3 = ONE,
    padding: Vec3 = ZERO,
    mode: Mode = "correlation",
    method: Method = "auto",
    precision: Precision = "fp32",
    device: Device | None = None,
    out: Array | None = None,
) -> Array:
    """Return activation(bias + x convolved with the kernels): (S, floor((n - k + 2 padding) / stride) + 1, f').

    activation  function of the sums: none, relu, tanh, sigmoid, or softmax over the maps of a voxel.
    stride   voxels (z, y, x) from one position of the kernels to the next.
    weights  numpy arrays: kernels (f', f, kz, ky, kx) float32 and biases (f',) float32.
    padding  number of planes of zeros before and after the image.
    mode     correlation: out[p] sums x[p * stride + d - padding] * w[d]; convolution: w[k - 1 - d], the flipped kernel.
    method   auto: the fastest. On the CPU with stride 1 that is one of the methods that plans choose from, within
             64 MiB or twice the memory of x and the result, and a copy of x if it is padded, float16 or not in C order;
             transforms round to about 1e-6 of the largest values near a voxel. On a device it is direct, or
             implicit_gemm for a precision other than fp32.
             direct: tap by tap; implicit_gemm: one matrix product, whose lowered matrix is built part by part.
    precision  precision of products by implicit_gemm on a device; everything else is fp32, and sums are always float32.
               Errors are rms relative to the rms result, before a float16 result is rounded.
               fp32: 1e-6, except for values below 2^-18 of the largest in x, by which float32 arrays are scaled when
               they are split into pairs of float16 for tensor cores. Float16 arrays run on float32 units.
               tf32: float32 arrays, 1e-3, except for values below 2^-26 of the largest; arrays and kernels are rounded
               to 11 significant bits.
               fp16: float16 arrays, 2e-3; kernels are rounded to float16. Softmax runs on float32 units.
               ShapeError if kernels are too large for the shared memory that feeds the tensor cores.
    """
    for word, given, known in (
        ("activation", activation, ACTIVATIONS),
        ("mode", mode, get_args(Mode)),
        ("method", method, get_args(Method)),
        ("precision", precision, GPU_PRECISIONS),
    ):
        _check_choice(word, given, known)
    _check(x, device)
    if method == "auto" and device is not None:
        method = "direct" if precision == "fp32" else "implicit_gemm"
    _check_precision(x, precision, method, device)
    sliding = Sliding(stride, padding)
    _check_weights(x, weights)
    k = weights.weight.shape[2:]
    positions = sliding.positions(x.shape[1:4], (k[0], k[1], k[2]))
    if mode == "convolution":
        weights = ConvWeights(weights.weight[:, :, ::-1, ::-1, ::-1], weights.bias)
    result = _result((x.shape[0], *positions, len(weights.bias)), x, device, out)
    if not result.size:
        return result
    if device is not None:
        assert method != "auto", "chosen above"
        on_gpu.convolve(device, x, result, weights, sliding, activation, method, precision)
        return result
    if method == "auto":
        if stride == ONE and fast_convolution.convolve(x, result, weights, padding, activation):
            return result
        method = "implicit_gemm" if x.shape[4] <= FEW_MAPS else "direct"
    on_cpu.convolve(x, result, weights, sliding, activation, method)
    return result


def __dir__() -> list[str]:
    return __all__


def _pointwise(activation: Activation, x: Array, device: Device | None, out: Array | None) -> Array:
    _check_array(x, device)
    _check_order("x", x, device)
    result = _result(x.shape, x, device, out, in_place=True)
    if not result.size:
        return result
    if device is None:
        on_cpu.pointwise(activation, x, result)
    else:
        on_gpu.pointwise(device, activation, x, result)
    return result


def _pool(
    how: Literal["max", "average"],
    x: Array,
    window: Vec3,
    stride: Vec3 | None,
    padding: Vec3,
    device: Device | None,
    out: Array | None,
    *,
    counts_padding: bool,
) -> Array:
    _check(x, device)
    if min(window) < 1:
        raise ShapeError(f"a window must be at least 1 along every axis, not {text(window)}")
    sliding = Sliding(window if stride is None else stride, padding)
    if any(pad >= size for pad, size in zip(padding, window, strict=True)):
        raise ShapeError(
            f"padding {text(padding)} gives windows of {text(window)} without a value; give less than the window"
        )
    result = _result((x.shape[0], *sliding.positions(x.shape[1:4], window), x.shape[4]), x, device, out)
    if not result.size:
        return result
    if device is None:
        on_cpu.pool(x, result, window, sliding, how, counts_padding=counts_padding)
    else:
        on_gpu.pool(device, x, result, window, sliding, how, counts_padding=counts_padding)
    return result


def _result(
    shape: tuple[int, ...],
    x: Array,
    device: Device | None,
    out: Array | None,
    dtype: npt.DTypeLike | None = None,
    *,
    any_order: bool = False,
    in_place: bool = False,
) -> Array:
    """Return `out` after checks, or new memory, of x's type unless `dtype` is given. in_place: `out` may be x."""
    kind = np.dtype(x.dtype if dtype is None else dtype)
    if out is not None:
        _check_array(out, device)
        if out.shape != tuple(shape) or out.dtype != kind:
            raise ShapeError(f"the result is {tuple(shape)} {kind}, and out is {out.shape} {out.dtype}")
        if not any_order:
            _check_order("out", out, device)
        _check_separate(x, out, device, in_place=in_place)
        return out
    if device is None:
        return np.empty(shape, kind)
    return device.view(device.allocate(prod(shape) * kind.itemsize, "a result"), shape, kind)


def _check(x: Array, device: Device | None) -> None:
    _check_array(x, device)
    if x.ndim != MOST_AXES:
        raise ShapeError(f"x has {x.ndim} axes, {x.shape}; it must be (S, z, y, x, f), with z = 1 for 2D images")
    if 0 in x.shape[1:]:
        raise ShapeError(f"x is {x.shape}: its images are empty; S may be 0, but no other axis")
    _check_order("x", x, device)


def _check_array(array: Array, device: Device | None) -> None:
    if device is None and not isinstance(array, np.ndarray):
        raise TypeError(f"{type(array).__name__} is not a numpy array: name the device that holds it, device=")
    if device is not None and not device.holds(array):
        raise TypeError(
            f"{type(array).__name__} is not an array of {device.gpu.name}: copy it there with device.put, "
            "or omit device="
        )
    if array.dtype not in (np.float32, np.float16):
        raise ShapeError(f"arrays are float32 or float16, not {array.dtype}; use array.astype(numpy.float32)")


def _check_order(what: str, array: Array, device: Device | None) -> None:
    if device is None or not array.size:
        return
    if array.ndim and not array[0].flags.c_contiguous:
        raise ShapeError(
            f"{what}, {array.shape} with strides {array.strides}, is not in C order within an image; "
            "use ops.convert_layout"
        )


def _check_separate(x: Array, out: Array, device: Device | None, *, in_place: bool) -> None:
    places = _place(x, device), _place(out, device)
    if not np.may_share_memory(*places, max_work=OVERLAP_WORK):  # type: ignore[arg-type]  # any number is accepted
        return
    if not in_place:
        raise ShapeError("out shares memory with x, which is read while out is written; give separate memory")
    steps = [[s for s, n in zip(array.strides, array.shape, strict=True) if n > 1] for array in (x, out)]
    if _address(x, device) != _address(out, device) or steps[0] != steps[1]:
        raise ShapeError("out shares some memory with x and is not x; give x itself, or separate memory")


def _address(array: Array, device: Device | None) -> int:
    return int(array.ctypes.data) if device is None else device.address(array)


class _Place:
    """The memory range of an array, for numpy's comparison; nothing is read there."""

    def __init__(self, array: Array, address: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": array.dtype.str,
        }


def _place(array: Array, device: Device | None) -> npt.NDArray[Any]:
    return np.asarray(_Place(array, _address(array, device)))


def _check_weights(x: Array, weights: ConvWeights) -> None:
    kernels, bias = weights.weight, weights.bias
    if kernels.ndim != MOST_AXES or kernels.shape[1] != x.shape[4] or bias.shape != kernels.shape[:1]:
        raise ShapeError(
            f"{x.shape[4]} maps of x take kernels (f', {x.shape[4]}, kz, ky, kx) and biases (f',), "
            f"not {kernels.shape} and {bias.shape}"
        )
    if kernels.dtype != np.float32 or bias.dtype != np.float32:
        raise ShapeError(f"kernels and biases are float32, not {kernels.dtype} and {bias.dtype}")
    if not kernels.size:
        raise ShapeError(f"kernels {kernels.shape} are empty")


def _check_precision(x: Array, precision: Precision, method: Method, device: Device | None) -> None:
    if precision == "fp32":
        return
    if device is None or method != "implicit_gemm":
        raise ValueError(f"{precision} is for method='implicit_gemm' on a device; everything else computes in fp32")
    takes = np.dtype(np.float16 if precision == "fp16" else np.float32)
    if x.dtype != takes:
        raise ShapeError(f"{precision} multiplies {takes} arrays, not {x.dtype}: use ops.convert_layout with dtype")


def _check_choice(what: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise ValueError(f"{what} is {given!r}; it may be {', '.join(known)}")
