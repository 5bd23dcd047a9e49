"""The layers that ATen operators stand for which take parts of arrays, join them, or rearrange their dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from znnpy.importing.aten_walk import Arguments, aten, many, tensor
from znnpy.importing.builder import Builder
from znnpy.importing.tensors import Tensor

# --- parts and joins ---


@aten("cat", "concat", "concatenate")
def _cat(builder: Builder, a: Arguments) -> Tensor:
    return builder.joined(a["tensors"], a.get("dim", 0))


@aten("stack")
def _stack(builder: Builder, a: Arguments) -> Tensor:
    parts = [tensor(part) for part in a["tensors"]]
    return builder.stacked(parts, a.get("dim", 0) % (len(parts[0].dims) + 1))


def _ends(n: int, begin: int | None, end: int | None) -> tuple[int, int]:
    found = slice(begin, end).indices(n)
    return found[0], found[1]


@aten("slice")
def _slice(builder: Builder, a: Arguments) -> Tensor:
    x, dim = a["self"], a.get("dim", 0)
    begin, end = _ends(x.shape[dim], a.get("start"), a.get("end"))
    return builder.cut(x, dim, begin, end, a.get("step", 1))


@aten("narrow")
def _narrow(builder: Builder, a: Arguments) -> Tensor:
    begin = a["start"] % a["self"].shape[a["dim"]]
    return builder.cut(a["self"], a["dim"], begin, begin + a["length"])


@aten("select")
def _select(builder: Builder, a: Arguments) -> Tensor:
    x, dim = a["self"], a["dim"] % len(a["self"].dims)
    index = a["index"] % x.shape[dim]
    part = builder.cut(x, dim, index, index + 1)
    return part.reshaped([n for i, n in enumerate(part.shape) if i != dim])


def _parts(builder: Builder, x: Tensor, dim: int, sizes: Sequence[int]) -> list[Tensor]:
    ends = np.cumsum([0, *sizes]).tolist()
    return [builder.cut(x, dim, begin, end) for begin, end in pairwise(ends)]


@aten("split", "split_with_sizes")
def _split(builder: Builder, a: Arguments) -> list[Tensor]:
    x, dim = a["self"], a.get("dim", 0)
    sizes = a.get("split_size", a.get("split_sizes"))
    n = x.shape[dim]
    each = sizes if isinstance(sizes, list) else [min(sizes, n - at) for at in range(0, n, sizes)]
    return _parts(builder, x, dim, each)


@aten("chunk")
def _chunk(builder: Builder, a: Arguments) -> list[Tensor]:
    x, dim = a["self"], a.get("dim", 0)
    found: list[Tensor] = _split(builder, {"self": x, "dim": dim, "split_size": -(-x.shape[dim] // a["chunks"])})
    return found


@aten("unbind")
def _unbind(builder: Builder, a: Arguments) -> list[Tensor]:
    x, dim = a["self"], a.get("dim", 0)
    return [_select(builder, {"self": x, "dim": dim, "index": i}) for i in range(x.shape[dim])]


# --- dimensions ---


@aten("view", "reshape", "_unsafe_view", "_reshape_copy")
def _view(builder: Builder, a: Arguments) -> Tensor:
    return tensor(a["self"]).reshaped(many(a.get("size", a.get("shape"))))


@aten("flatten")
def _flatten(builder: Builder, a: Arguments) -> Tensor:
    x = tensor(a["self"])
    begin, end = a.get("start_dim", 0) % len(x.dims), a.get("end_dim", -1) % len(x.dims)
    return x.reshaped([*x.shape[:begin], int(np.prod(x.shape[begin : end + 1])), *x.shape[end + 1 :]])


@aten("unflatten")
def _unflatten(builder: Builder, a: Arguments) -> Tensor:
    x, dim = tensor(a["self"]), a["dim"] % len(a["self"].dims)
    sizes, n = list(a["sizes"]), a["self"].shape[dim]
    if -1 in sizes:
        sizes[sizes.index(-1)] = n // -int(np.prod(sizes))
    return x.reshaped([*x.shape[:dim], *sizes, *x.shape[dim + 1 :]])


@aten("permute", "movedim")
def _permute(builder: Builder, a: Arguments) -> Tensor:
    x = tensor(a["self"])
    if "source" not in a:
        return x.transposed(many(a["dims"]))
    source, target = ([d % len(x.dims) for d in many(a[key])] for key in ("source", "destination"))
    order = [i for i in range(len(x.dims)) if i not in source]
    for to, at in sorted(zip(target, source, strict=True)):
        order.insert(to, at)
    return x.transposed(order)


@aten("transpose", "swapaxes")
def _transpose(builder: Builder, a: Arguments) -> Tensor:
    x = tensor(a["self"])
    one, two = (d % len(x.dims) for d in (a.get("dim0", a.get("axis0")), a.get("dim1", a.get("axis1"))))
    order = list(range(len(x.dims)))
    order[one], order[two] = two, one
    return x.transposed(order)


@aten("squeeze")
def _squeeze(builder: Builder, a: Arguments) -> Tensor:
    x = tensor(a["self"])
    dims = [d % len(x.dims) for d in many(a.get("dim"))] or list(range(len(x.dims)))
    return x.reshaped([n for i, n in enumerate(x.shape) if i not in dims or n != 1])


@aten("unsqueeze")
def _unsqueeze(builder: Builder, a: Arguments) -> Tensor:
    x = tensor(a["self"])
    dim = a["dim"] % (len(x.dims) + 1)
    return x.reshaped([*x.shape[:dim], 1, *x.shape[dim:]])


@aten("expand")
def _expand(builder: Builder, a: Arguments) -> Tensor:
    return tensor(a["self"]).expanded(many(a["size"]))


@aten("repeat", "tile")
def _repeat(builder: Builder, a: Arguments) -> Tensor:
    x, times = tensor(a["self"]), many(a.get("repeats", a.get("dims")))
    wider = x.reshaped([1] * (len(times) - len(x.dims)) + list(x.shape))
    return wider.tiled([1] * (len(x.dims) - len(times)) + times)  # `tile` takes fewer


@aten("pixel_shuffle")
def _pixel_shuffle(builder: Builder, a: Arguments) -> Tensor:
    x, r = tensor(a["self"]), a["upscale_factor"]
    n, c, y, w = x.shape
    return x.reshaped([n, c // r**2, r, r, y, w]).transposed([0, 1, 4, 2, 5, 3]).reshaped([n, c // r**2, y * r, w * r])


@aten("pixel_unshuffle")
def _pixel_unshuffle(builder: Builder, a: Arguments) -> Tensor:
    x, r = tensor(a["self"]), a["downscale_factor"]
    n, c, y, w = x.shape
    if y % r or w % r:
        raise builder.error(f"makes blocks of {r} voxels of {y} x {w}, which do not divide")
    return (
        x.reshaped([n, c, y // r, r, w // r, r]).transposed([0, 1, 3, 5, 2, 4]).reshaped([n, c * r**2, y // r, w // r])
    )


@aten("channel_shuffle")
def _channel_shuffle(builder: Builder, a: Arguments) -> Tensor:
    x, groups = tensor(a["self"]), a["groups"]
    n, c, *space = x.shape
    swapped = x.reshaped([n, groups, c // groups, *space]).transposed([0, 2, 1, *range(3, len(space) + 3)])
    return swapped.reshaped([n, c, *space])
