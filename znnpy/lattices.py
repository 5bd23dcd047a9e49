"""Find out what holds for a graph over volumes of any size: whether its joins meet, and how far each node reaches."""

from __future__ import annotations

from fractions import Fraction
from math import floor, lcm, prod

from znnpy.admissible import LatticeError, check_axis, lattices_of
from znnpy.errors import ShapeError
from znnpy.geometry import AXES, NOTHING, AxisLayer, Interval, vector
from znnpy.layers import (
    JOINS,
    AveragePool,
    Conv,
    ConvTranspose,
    Crop,
    Layer,
    MaxFilter,
    Pool,
    Sides,
    Upsample,
)
from znnpy.messages import excerpt
from znnpy.network import Network
from znnpy.shapes import Vec3

MOST_PERIOD = 1024  # voxels: sizes of one period are tried one by one


def check_meets(network: Network) -> None:
    """Raise ShapeError unless there are volumes for which all that is joined has one lattice and one size."""
    steps = lattices_of(network)
    names = ("input", *network.names)
    for name, layer, sources in zip(network.names, network.layers, network.images, strict=True):
        for other in sources[1:] if isinstance(layer, JOINS) else ():
            for axis in range(3):
                if steps[sources[0]][axis] != steps[other][axis]:
                    raise LatticeError.of(
                        name,
                        layer,
                        axis,
                        (names[sources[0]], names[other]),
                        (steps[sources[0]][axis], steps[other][axis]),
                    )
    for axis, period in enumerate(period_along(network)):
        along = [step[axis] for step in steps]
        if period > MOST_PERIOD:
            raise ShapeError(
                f"the strides of the network multiply to a period of {excerpt(period, 20)} voxels along {AXES[axis]}, "
                f"more than {MOST_PERIOD}; use smaller ones"
            )
        if any(isinstance(layer, JOINS) or getattr(layer, "like", None) for layer in network.layers):
            _check_sizes_meet(network, axis, along, period)


def _check_sizes_meet(network: Network, axis: int, steps: list[Fraction], period: int) -> None:
    """Raise ShapeError unless the network admits a size along an axis, tried over one period of large ones."""
    lost = sum(
        _extent(layer, axis) * steps[sources[0]] for layer, sources in zip(network.layers, network.sources, strict=True)
    )
    large = period * (8 + floor(lost / period))
    refused = None
    for size in range(large, large + period):
        try:
            return check_axis(network, axis, size)
        except ShapeError as error:
            refused = refused or error
    raise ShapeError(f"no size of a volume suits the network: {refused}")


def _extent(layer: Layer, axis: int) -> int:
    """Return at least as many voxels of the input as a layer loses along an axis."""
    match layer:
        case Conv():
            return layer.reach[axis] + layer.stride[axis]
        case Pool() | AveragePool():
            return layer.window[axis] + layer.step[axis]
        case MaxFilter():
            return layer.window[axis]
        case ConvTranspose():
            return layer.padding[0][axis] + layer.padding[1][axis] + 1
        case Crop():
            return layer.before[axis] + layer.behind[axis]
        case _:
            return 1


def period_along(network: Network) -> Vec3:
    """Return the period of a network along each axis, even of one that no meaning computes."""
    steps = lattices_of(network)
    z, y, x = (lcm(*(step[axis].numerator for step in steps)) for axis in range(3))
    return z, y, x


def reaches_of(network: Network) -> tuple[Vec3, ...]:
    """Return for each tensor how many voxels of the input along each axis one of its voxels depends on, at most."""
    z, y, x = (_reaches_along(network, axis) for axis in range(3))
    return tuple(zip(z, y, x, strict=True))


def context_of(network: Network) -> Sides:
    """Return the voxels of the input that one period of output depends on before it, and behind it.

    The output begins at a multiple of the period. Where layers cut off faces, as in networks without padding, both are
    counted from the place of the output in the input.
    """
    before, behind = zip(*(_context_along(network, axis) for axis in range(3)), strict=True)
    return vector(before), vector(behind)


def _context_along(network: Network, axis: int) -> tuple[int, int]:
    """Take the interval of one period from the outputs back to the input."""
    steps = [step[axis] for step in lattices_of(network)]
    period = lcm(*(step.numerator for step in steps))
    needed: dict[int, Interval] = {}
    for tensor in network.outputs:
        end = max(1, int(period / steps[tensor]))
        needed[tensor] = needed.get(tensor, NOTHING).joined(Interval(0, end))
    for index in reversed(range(len(network.layers))):
        layer, sources = network.layers[index], network.images[index]
        if index + 1 not in needed:
            continue
        step = steps[index + 1] / steps[sources[0]]
        one = AxisLayer(_alone(layer, max(1, round(1 / step))), axis)
        for source in sources:
            needed[source] = needed.get(source, NOTHING).joined(one.needed(*needed[index + 1], None))
    return -needed[0].lo, needed[0].hi - period


def multiply_adds(network: Network) -> float:
    """Return the multiply-adds of all convolutions for each voxel of the input, computed by their definition."""
    total = 0.0
    for index, layer in enumerate(network.layers):
        source = network.sources[index][0]
        if isinstance(layer, Conv | ConvTranspose):
            # A transposed convolution works for each voxel that it reads, and a convolution for each that it gives.
            voxels = source if isinstance(layer, ConvTranspose) else index + 1
            volume = prod(float(step) for step in lattices_of(network)[voxels])
            total += prod(layer.kernel) * network.maps[source] // layer.groups * layer.out / volume
    return total


def _reaches_along(network: Network, axis: int) -> list[int]:
    """Follow the voxels of one period from each layer to the next."""
    steps = [step[axis] for step in lattices_of(network)]
    period = lcm(*(step.numerator for step in steps))
    spans = [[Interval(i, i + 1) for i in range(period)]]  # of each tensor: what its voxels of a period depend on
    for index, (layer, sources) in enumerate(zip(network.layers, network.images, strict=True)):
        step = steps[index + 1] / steps[sources[0]]
        one = AxisLayer(_alone(layer, max(1, round(1 / step))), axis)
        found = []
        for i in range(int(period / steps[index + 1])):
            lo, hi = one.needed(i, i + 1, None)
            # Where a transposed convolution leaves gaps, a voxel needs nothing, and counts as if it needed one.
            ends = [(_span(spans[s], lo, period).lo, _span(spans[s], max(lo, hi - 1), period).hi) for s in sources]
            found.append(Interval(min(begin for begin, _ in ends), max(end for _, end in ends)))
        spans.append(found)
    return [max(span.size for span in of) for of in spans]


def _span(of_period: list[Interval], voxel: int, period: int) -> Interval:
    """Return what a voxel depends on, which may lie in another period than those that are known."""
    periods, within = divmod(voxel, len(of_period))
    return Interval(of_period[within].lo + periods * period, of_period[within].hi + periods * period)


def _alone(layer: Layer, factor: int) -> Layer:
    """Return a layer that needs the same and refers to no other node; `factor` is what an upsampling multiplies by."""
    match layer:
        case Upsample(like=like) if like is not None:
            return Upsample((factor, factor, factor), how=layer.how)
        case Crop(like=like) if like is not None:
            return Crop()  # the centre stays where it is
        case _:
            return layer
