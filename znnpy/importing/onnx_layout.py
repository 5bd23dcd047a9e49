"""ONNX's operators that rearrange, cut and join arrays."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod

import numpy as np

from znnpy.importing.onnx_site import Part, Site, Value, operator
from znnpy.importing.tensors import Factor, LayoutError, Tensor

# --- shapes ---


@operator("Shape")
def _shape(site: Site) -> Value:
    x = site.tensor()
    rank = len(x.dims)
    return np.asarray(x.shape[slice(site.count("start", 0), site.count("end", rank))], np.int64)


@operator("Size")
def _size(site: Site) -> Value:
    return np.asarray(prod(site.tensor().shape), np.int64)


@operator("Reshape")
def _reshape(site: Site) -> Value:
    x, wanted = site.tensor(), site.whole(1, "") or []
    if not site.count("allowzero", 0):
        if any(n == 0 and at >= len(x.dims) for at, n in enumerate(wanted)):
            raise site.error(f"keeps a dimension of {x.shape} that there is not, by {wanted}; save the model again")
        wanted = [x.shape[at] if n == 0 else n for at, n in enumerate(wanted)]
    return x.reshaped(wanted)


@operator("Flatten")
def _flatten(site: Site) -> Value:
    x, rank = site.tensor(), len(site.tensor().dims)
    given = site.count("axis", 1)
    axis = rank if given == rank else site.axis(given, rank)
    return x.reshaped((prod(x.shape[:axis]), prod(x.shape[axis:])))


@operator("Transpose")
def _transpose(site: Site) -> Value:
    x = site.tensor()
    return x.transposed([site.axis(at, len(x.dims)) for at in site.sizes("perm", range(len(x.dims))[::-1])])


@operator("Unsqueeze")
def _unsqueeze(site: Site) -> Value:
    x, given = site.tensor(), site.whole(1, "axes") or []
    rank = len(x.dims) + len(given)
    axes = {site.axis(axis, rank) for axis in given}
    if len(axes) < len(given):
        raise site.error(f"names dimensions twice in {given}; save the model again")
    own = iter(x.dims)
    return replace(x, dims=tuple(() if at in axes else next(own) for at in range(rank)))


@operator("Squeeze")
def _squeeze(site: Site) -> Value:
    x, given = site.tensor(), site.whole(1, "axes")
    rank = len(x.dims)
    axes = [at for at in range(rank) if x.shape[at] == 1] if given is None else [site.axis(at, rank) for at in given]
    if any(x.shape[at] != 1 for at in axes):
        raise LayoutError(
            f"{site.builder.here} leaves out the dimensions {axes} of {x.shape}, which are not all of size 1"
        )
    return replace(x, dims=tuple(dim for at, dim in enumerate(x.dims) if at not in axes))


@operator("Expand")
def _expand(site: Site) -> Value:
    x, wanted = site.tensor(), site.whole(1, "") or []
    many = max(len(wanted), len(x.dims))
    own, full = ((1,) * (many - len(sizes)) + tuple(sizes) for sizes in (x.shape, wanted))
    return x.expanded([n if to == 1 else to for n, to in zip(own, full, strict=True)])


@operator("Tile")
def _tile(site: Site) -> Value:
    x, times = site.tensor(), site.whole(1, "") or []
    if len(times) != len(x.dims) or min(times, default=1) < 1:
        raise site.error(f"repeats an array of shape {x.shape} {times} times; save the model again")
    return x.tiled(times)


def _blocks(site: Site) -> tuple[Tensor, int, tuple[int, ...]]:
    x, size = site.tensor(), site.count("blocksize", 0)
    if len(x.dims) != 4:
        raise LayoutError(f"{site.builder.here} gets an array of shape {x.shape}, and takes (1, maps, y, x)")
    if size < 1:
        raise site.error(f"has blocksize={size}; save the model again")
    return x, size, x.shape


@operator("DepthToSpace")
def _depth_to_space(site: Site) -> Value:
    x, b, (n, c, h, w) = _blocks(site)
    site.only("mode", "DCR", "CRD", usual="DCR")
    if c % (b * b):
        raise LayoutError(f"{site.builder.here} makes blocks of {b} x {b} from {c} maps")
    if site.word("mode", "DCR") == "DCR":
        parts = x.reshaped((n, b, b, c // b**2, h, w)).transposed((0, 3, 4, 1, 5, 2))
    else:
        parts = x.reshaped((n, c // b**2, b, b, h, w)).transposed((0, 1, 4, 2, 5, 3))
    return parts.reshaped((n, c // b**2, h * b, w * b))


@operator("SpaceToDepth")
def _space_to_depth(site: Site) -> Value:
    x, b, (n, c, h, w) = _blocks(site)
    if h % b or w % b:
        raise LayoutError(f"{site.builder.here} takes blocks of {b} x {b} from {h} x {w} voxels")
    parts = x.reshaped((n, c, h // b, b, w // b, b)).transposed((0, 3, 5, 1, 2, 4))
    return parts.reshaped((n, c * b**2, h // b, w // b))


# --- parts ---


@operator("Slice")
def _slice(site: Site) -> Value:
    x, begins, ends = site.tensor(), site.whole(1, "starts") or [], site.whole(2, "ends") or []
    rank = len(x.dims)
    axes = site.whole(3, "axes")
    axes = list(range(len(begins))) if axes is None else [site.axis(axis, rank) for axis in axes]
    steps = site.whole(4, "") or [1] * len(begins)
    if not len(begins) == len(ends) == len(axes) == len(steps) or len(set(axes)) < len(axes) or len(axes) > rank:
        raise site.error(f"has {len(begins)} starts, {len(ends)} ends and {len(steps)} steps for the dimensions {axes}")
    for axis, begin, end, step in zip(axes, begins, ends, steps, strict=True):
        if step < 1:
            raise site.error(f"takes dimension {axis} in steps of {step}, and only steps of 1 or more can be computed")
        first, last, _ = slice(begin, end, step).indices(x.shape[axis])
        x = site.builder.cut(x, axis, first, last, step)
    return x


@operator("Split")
def _split(site: Site) -> list[Value]:
    x, sizes = site.tensor(), site.whole(1, "split")
    axis = site.axis(site.count("axis", 0), len(x.dims))
    whole, many = x.shape[axis], len(site.step.outputs)
    if sizes is None:
        each = -(-whole // many)
        sizes = [each] * (many - 1) + [whole - each * (many - 1)]
    if len(sizes) != many or sum(sizes) != whole or min(sizes) < 1:
        raise LayoutError(
            f"{site.builder.here} splits dimension {axis} of {x.shape} into {many} parts of sizes {sizes[:9]}"
        )
    ends = np.cumsum(sizes)
    return [Part(x, axis, int(end) - size, int(end)) for size, end in zip(sizes, ends, strict=True)]


@operator("Gather")
def _gather(site: Site) -> Value:
    x, index = site.tensor(), site.known(1)
    axis = site.axis(site.count("axis", 0), len(x.dims))
    if index.dtype.kind not in "iu" or index.size == 0 or index.ndim > 1:
        raise site.error(f"takes parts by an array of shape {index.shape}, and only whole numbers in a row can be")
    n = x.shape[axis]
    taken = [site.axis(int(at), n) for at in index.reshape(-1)]
    steps = {b - a for a, b in pairwise(taken)} or {1}
    if len(steps) > 1 or min(steps) < 1:
        raise site.error(
            f"takes the parts {taken[:9]} of dimension {axis}, and only ascending ones in even steps can be"
        )
    made = site.builder.cut(x, axis, taken[0], taken[-1] + 1, steps.pop())
    return made if index.ndim else replace(made, dims=(*made.dims[:axis], *made.dims[axis + 1 :]))


@operator("Concat")
def _concat(site: Site) -> Value:
    axis = site.count("axis", 0)
    repeated = _repeated(site, axis)
    if repeated is not None:
        return repeated
    parts = [value if isinstance(value, np.ndarray) else site.tensor(at) for at, value in enumerate(site.given)]
    rank = next(len(part.dims) for part in parts if isinstance(part, Tensor))
    return site.builder.joined(parts, site.axis(axis, rank))


def _repeated(site: Site, axis: int) -> Tensor | None:
    """Return an array of which each plane is repeated as often, if that is what is joined: Keras upsamples so."""
    parts = [value for value in site.given if isinstance(value, Part)]
    if not parts or len(parts) < len(site.given) or any(part.of != parts[0].of for part in parts[1:]):
        return None
    x, dimension = parts[0].of, parts[0].dimension
    n = x.shape[dimension]
    times = len(parts) // n
    planes = [(at, at + 1) for at in range(n) for _ in range(times)]
    if site.axis(axis, len(x.dims)) != dimension or any(part.dimension != dimension for part in parts):
        return None
    if times < 1 or [(part.begin, part.end) for part in parts] != planes:
        return None
    if times == 1:
        return x
    dims = list(x.dims)
    dims[dimension] = (*dims[dimension], Factor("copies", times))
    return replace(x, dims=tuple(dims))
