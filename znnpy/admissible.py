"""Find which volumes a network admits, and the lattices of its tensors: voxel sizes, where each begins, the period."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import lcm
from typing import Self

from znnpy.errors import ShapeError
from znnpy.geometry import AXES, AxisGeometry, AxisLayer, Geometry, Interval, vector
from znnpy.layers import (
    JOINS,
    OF_WHOLE_IMAGES,
    AveragePool,
    Conv,
    ConvTranspose,
    Crop,
    Layer,
    MaxFilter,
    Pad,
    Pool,
    Upsample,
)
from znnpy.messages import option
from znnpy.network import Network
from znnpy.shapes import Vec3, text

MOST_TIMES = 1024  # times as many voxels along an axis as the volume has, beyond which a network is taken for a mistake
VOXELS_AT_ONCE = 4096  # of a period, of which it is worked out together what they depend on


def refuse_non_local(network: Network) -> None:
    """Raise ShapeError that names a node of which a voxel depends on the whole volume, and says what to do.

    Windows are never divided: norms and global poolings may depend on the whole of them.
    """
    for node in network.nodes:
        if isinstance(node.layer, OF_WHOLE_IMAGES) and network.meaning != "windows":
            raise ShapeError(
                f"every voxel of node {node.name} ({node.layer}) depends on the whole image, so that the network over "
                f"a volume has no result that patches can give; compute it in windows, with {option('window')} and "
                f"without {option('meaning', 'whole')}"
            )
        if isinstance(node.layer, Upsample) and node.layer.how == "linear" and node.layer.align_corners:
            raise ShapeError(
                f"node {node.name} upsamples with align_corners, so that its result depends on the size of the whole "
                "volume; use align_corners: false, with which the network was trained or can be trained again"
            )


def _resolved(layer: Layer, n: Vec3, like: Vec3, name: str, ratio: Sequence[Fraction]) -> Layer:
    """Return a layer that refers to the size `like` of another node as one that does not; ShapeError: there is none."""
    if isinstance(layer, Crop):
        spare = vector(a - b for a, b in zip(n, like, strict=True))
        if min(spare) < 0:
            raise ShapeError(f"node {name} crops {text(n)} voxels to {text(like)}, which is more")
        before = vector(more // 2 for more in spare)
        return Crop(before, vector(a - b for a, b in zip(spare, before, strict=True)))
    assert isinstance(layer, Upsample)
    factors, shifts = [], []
    for axis in range(3):
        factor, shift = _reached(layer, name, axis, n[axis], like[axis], ratio[axis])
        factors.append(factor)
        shifts.append(shift)
    if any(shifts) and max(factors) > 1:
        raise ShapeError(
            f"node {name} ({layer}) gets {text(n)} voxels, and {layer.like} has {text(like)}: it would repeat a voxel "
            "along one axis and upsample along another; use two layers"
        )
    if any(shifts):
        return Pad(vector(shifts), (0, 0, 0), "replicate")
    return replace(layer, factor=vector(factors), like=None)


def _reached(layer: Upsample, name: str, axis: int, n: int, like: int, ratio: Fraction) -> tuple[int, int]:
    """Return the factor by which a layer goes from n voxels to `like` along an axis, and by how many it shifts.

    ratio  voxels of the other node's lattice in a voxel of this one's

    ShapeError unless the sizes are those of the lattices.
    """
    if ratio == 1 and like == n + 1 and layer.how == "nearest":
        return 1, 1
    if ratio < 1 or ratio.denominator != 1 or like != n * ratio:
        raise ShapeError(
            f"node {name} ({layer}) gets {n} voxels along {AXES[axis]}, and {layer.like} has {like}, which is not "
            f"{ratio} times as many"
        )
    return int(ratio), 0


def _check_size(name: str, layer: Layer, axis: int, size: int, volume: int) -> None:
    """Raise ShapeError if a layer gives far more voxels than the volume has: no network is meant to."""
    if size > MOST_TIMES * max(volume, MOST_TIMES):
        raise ShapeError(
            f"node {name} ({layer}) gives {size:,} voxels along {AXES[axis]} for a volume of {volume:,} there, which "
            f"is more than {MOST_TIMES} times as many; correct its sizes"
        )


def _check_reflects(name: str, layer: Layer, axis: int, n: int) -> None:
    """Raise ShapeError if a layer pads by reflection with more voxels than there are beside the face."""
    match layer:
        case Conv(padding_mode="reflect", padding=(before, behind)) | Pad(how="reflect", before=before, behind=behind):
            most = max(before[axis], behind[axis])
            if most >= n:
                raise ShapeError(
                    f"node {name} ({layer}) pads {most} voxels along {AXES[axis]} by reflection and gets {n}, of which "
                    f"it can reflect {n - 1}; give a larger volume"
                )


def geometry_of(network: Network, volume: Vec3) -> Geometry:
    """Return the geometry over a volume; ShapeError if a node gets no voxel, or sizes or lattices do not meet."""
    refuse_non_local(network)
    sizes: list[Vec3] = [volume]
    steps: list[tuple[Fraction, ...]] = [(Fraction(1),) * 3]
    layers: list[Layer] = []
    tensors = {"input": 0, **{name: index + 1 for index, name in enumerate(network.names)}}
    for name, layer, sources in zip(network.names, network.layers, network.images, strict=True):
        n, lattice = sizes[sources[0]], None
        if isinstance(layer, Crop | Upsample) and layer.like is not None:
            other = tensors[layer.like]
            if isinstance(layer, Upsample) and sources[0] in network.pooled:
                layer, lattice = Upsample(sizes[other]), steps[other]
            else:
                ratio = [mine / its for mine, its in zip(steps[sources[0]], steps[other], strict=True)]
                layer = _resolved(layer, n, sizes[other], name, ratio)
        if isinstance(layer, JOINS):
            _check_meets(network, name, layer, sources, sizes, steps)
        for axis in range(3):
            _check_reflects(name, layer, axis, n[axis])
        along = [AxisLayer(layer, axis) for axis in range(3)]
        size = vector(one.size(n[one.axis]) for one in along)
        for axis in range(3):
            _check_size(name, layer, axis, size[axis], volume[axis])
        if min(size) < 1:
            raise ShapeError(
                f"node {name} ({layer}) gets {text(n)} voxels of a volume of {text(volume)}, which is too few for one "
                "output; give a larger volume"
            )
        layers.append(layer)
        sizes.append(size)
        steps.append(lattice or tuple(step * one.step for step, one in zip(steps[sources[0]], along, strict=True)))
    # The lattices of nodes that were resolved follow from the nodes that they got their size from.
    resolved = replace(network, layers=tuple(layers))
    axes = [
        AxisGeometry(
            layers=tuple(AxisLayer(layer, axis) for layer in layers),
            sources=network.sources,
            outputs=network.outputs,
            sizes=tuple(size[axis] for size in sizes),
            steps=tuple(step[axis] for step in steps),
        )
        for axis in range(3)
    ]
    return Geometry(resolved, volume, (axes[0], axes[1], axes[2]))


def _check_meets(
    network: Network,
    name: str,
    layer: Layer,
    sources: Sequence[int],
    sizes: Sequence[Vec3],
    steps: Sequence[tuple[Fraction, ...]],
) -> None:
    """Raise ShapeError if what a node joins differs in lattice or size."""
    names = ("input", *network.names)
    first, *others = sources
    for other in others:
        for axis in range(3):
            if steps[first][axis] != steps[other][axis]:
                raise LatticeError.of(
                    name, layer, axis, (names[first], names[other]), (steps[first][axis], steps[other][axis])
                )
        if sizes[first] != sizes[other]:
            raise ShapeError(
                f"node {name} ({layer}) joins {names[first]} of {text(sizes[first])} voxels with {names[other]} of "
                f"{text(sizes[other])}, for a volume of {text(sizes[0])}; crop or pad one of them"
            )


class LatticeError(ShapeError):
    """Nodes with voxels of different sizes are joined: no size of a volume makes them meet."""

    @classmethod
    def of(cls, name: str, layer: Layer, axis: int, names: tuple[str, str], steps: tuple[Fraction, Fraction]) -> Self:
        """Make the error for a layer that joins two nodes, whose voxels have these sizes along an axis."""
        return cls(
            f"node {name} ({layer}) joins {names[0]}, one voxel for {steps[0]} of the input along {AXES[axis]}, with "
            f"{names[1]}, one for {steps[1]}; bring both to one lattice by pooling or upsampling"
        )


def admissible(network: Network, volume: Vec3) -> Geometry:
    """Return the geometry over the smallest volume that holds `volume` and that the network admits.

    Each axis grows at its far face by less than a period. ShapeError if no size within a period will do, if the
    network refuses to be padded, or if the volume is smaller than a period.
    """
    period = period_of(network)
    size, error = list(volume), None
    for axis in range(3):
        for more in range(period[axis]):
            try:
                check_axis(network, axis, volume[axis] + more)
            except LatticeError:
                raise
            except ShapeError as found:
                error = error or found
                continue
            size[axis] = volume[axis] + more
            break
        else:
            assert error is not None
            raise error
    grown: Vec3 = (size[0], size[1], size[2])
    if grown != volume:
        if network.pad_to_period == "refuse":
            raise ShapeError(
                f"{network.name} takes no volume of {text(volume)} voxels, and refuses to pad it to {text(grown)}; "
                "crop or pad the volume, or change pad_to_period in the network file"
            )
        short = [AXES[a] for a in range(3) if grown[a] != volume[a] and volume[a] < period[a]]
        if short:
            raise ShapeError(
                f"the volume of {text(volume)} voxels is smaller than one period of {network.name}, "
                f"{text(period)} voxels, along {short[0]}; give a larger volume"
            )
    return geometry_of(network, grown)


def check_axis(network: Network, axis: int, n: int) -> None:
    """Raise ShapeError unless the network admits n voxels along an axis; the others are left out of account."""
    sizes, tensors = [n], {"input": 0, **{name: index + 1 for index, name in enumerate(network.names)}}
    steps = [Fraction(1)]
    names = ("input", *network.names)
    for name, layer, sources in zip(network.names, network.layers, network.images, strict=True):
        here = sizes[sources[0]]
        step = steps[sources[0]] * AxisLayer(layer, axis).step
        if isinstance(layer, Crop | Upsample) and layer.like is not None:
            like = sizes[tensors[layer.like]]
            if isinstance(layer, Upsample) and sources[0] in network.pooled:
                step = steps[tensors[layer.like]]
            elif isinstance(layer, Upsample):
                ratio = step / steps[tensors[layer.like]]
                step /= _reached(layer, name, axis, here, like, ratio)[0]
            elif here < like:
                raise ShapeError(
                    f"node {name} ({layer}) gets {here} voxels along {AXES[axis]} and cannot give {like}, for a volume "
                    f"of {n} there; crop to a smaller node, or pad what it reads"
                )
            size = like
        else:
            _check_reflects(name, layer, axis, here)
            size = AxisLayer(layer, axis).size(here)
        for other in sources[1:] if isinstance(layer, JOINS) else ():
            if steps[other] != step:
                raise LatticeError.of(name, layer, axis, (names[sources[0]], names[other]), (step, steps[other]))
            if sizes[other] != here:
                raise ShapeError(
                    f"node {name} ({layer}) joins {names[sources[0]]} of {here} voxels along {AXES[axis]} with "
                    f"{names[other]} of {sizes[other]}, for a volume of {n} there; crop or pad one of them"
                )
        _check_size(name, layer, axis, size, n)
        if size < 1:
            raise ShapeError(
                f"node {name} ({layer}) gets {here} voxels along {AXES[axis]}, which is too few for one output; give a "
                "larger volume"
            )
        sizes.append(size)
        steps.append(step)


def lattices_of(network: Network) -> tuple[tuple[Fraction, Fraction, Fraction], ...]:
    """Return the size of a voxel of every tensor, in voxels of the input, whatever the volume.

    A layer that goes to the size of another node is taken to reach that node's lattice, except that `nearest` from
    2n - 1 to 2n voxels changes none.
    """
    tensors = {"input": 0, **{name: index + 1 for index, name in enumerate(network.names)}}
    steps = [(Fraction(1), Fraction(1), Fraction(1))]
    for layer, sources in zip(network.layers, network.images, strict=True):
        if isinstance(layer, Upsample) and layer.like is not None:
            steps.append(steps[tensors[layer.like]])
        else:
            z, y, x = (step * AxisLayer(layer, axis).step for axis, step in enumerate(steps[sources[0]]))
            steps.append((z, y, x))
    return tuple(steps)


def period_of(network: Network) -> Vec3:
    """Return voxels of the input after which the network does the same again, whatever the volume."""
    refuse_non_local(network)
    return vector(lcm(*(step[axis].numerator for step in lattices_of(network))) for axis in range(3))


def origins(geometry: Geometry) -> tuple[tuple[Fraction, Fraction, Fraction], ...]:
    """Return where the centre of each tensor's first voxel lies, in voxels of the input from its first centre."""
    found: list[tuple[Fraction, ...]] = [(Fraction(0),) * 3]
    for index, (layer, sources) in enumerate(zip(geometry.network.layers, geometry.network.sources, strict=True)):
        before = found[sources[0]]
        steps, mine = geometry.step(sources[0]), geometry.step(index + 1)
        found.append(tuple(before[a] + _moved(layer, a, steps[a], mine[a]) for a in range(3)))
    return tuple((z, y, x) for z, y, x in found)


def _moved(layer: Layer, axis: int, step: Fraction, out_step: Fraction) -> Fraction:
    """Return how far the centre of a layer's first output lies behind that of its first input."""
    half = Fraction(1, 2)
    match layer:
        case Conv():
            return step * (half * (layer.reach[axis] - 1) - layer.padding[0][axis])
        case Pool() | AveragePool():
            return step * (half * (layer.window[axis] - 1) - layer.padding[0][axis])
        case MaxFilter():
            return step * half * (layer.window[axis] - 1)
        case ConvTranspose():
            return -out_step * (half * (layer.reach[axis] - 1) - layer.padding[0][axis])
        case Upsample(factor=factor):
            assert factor is not None, "resolved before"
            return -out_step * half * (factor[axis] - 1)
        case Crop():
            return step * layer.before[axis]
        case Pad():
            return -step * layer.before[axis]
        case _:
            return Fraction(0)


def seen_by_one(network: Network) -> Vec3:
    """Return the most input voxels that one output voxel depends on, along each axis, far from the faces."""
    period = period_of(network)
    reach = vector(sum(_extent(layer, axis) for layer in network.layers) for axis in range(3))
    far = vector(p * (2 + 2 * r) for p, r in zip(period, reach, strict=True))
    if network.wiring is not None:  # the padding of a real volume does not matter here
        network = replace(network, wiring=replace(network.wiring, pad_to_period="zeros"))
    geometry = admissible(network, far)
    return vector(_widest_seen(axis) for axis in geometry.axes)


def _widest_seen(axis: AxisGeometry) -> int:
    """Return the most voxels of the input that an output voxel of a period in the middle depends on, along an axis."""
    from znnpy.many_intervals import of_ranges

    middle, step = axis.sizes[axis.outputs[0]] // 2, axis.steps[axis.outputs[0]]
    widest, voxels = 0, range(middle, middle + axis.voxels(axis.outputs[0]))
    for first in range(0, len(voxels), VOXELS_AT_ONCE):
        places = [int(step * voxel) for voxel in voxels[first : first + VOXELS_AT_ONCE]]
        mine = {tuple(int(place / axis.steps[tensor]) for tensor in axis.outputs) for place in places}
        wanted = [[Interval(voxel, voxel + 1) for voxel in one] for one in sorted(mine)]
        widest = max(widest, int(of_ranges(axis, wanted).size[0].max()))
    return widest


def _extent(layer: Layer, axis: int) -> int:
    """Return the most voxels of its input or output that a layer reaches over along an axis."""
    match layer:
        case Conv() | ConvTranspose():
            return layer.reach[axis]
        case Pool() | AveragePool() | MaxFilter():
            return layer.window[axis]
        case Pad() | Crop():
            return layer.before[axis] + layer.behind[axis] + 1
        case _:
            return 2
