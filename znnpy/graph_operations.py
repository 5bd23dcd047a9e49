"""The operations that compute a graph's layers, what each reads, and its shape for a region of its output.

A crop is a view of what it crops, and a concatenation that only convolutions read is no operation: these read all its
inputs. Nor is an upsampling that repeats voxels for convolutions: they repeat them as they read. A convolution whose
result is only added to another tensor adds it itself: the two layers are one operation. Every other layer is an
operation, and its output a tensor in memory.

A convolution and the max-pooling behind it are two operations, which may be merged into one that gives two tensors; a
convolution and the norm behind it, into one that gives the tensor of the norm. Whether they are depends on the
primitives, so that the planner decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from znnpy.geometry import Geometry, Interval, vector
from znnpy.graph_shapes import (
    GlobalPoolShape,
    GraphConvShape,
    GraphShape,
    Normed,
    NormShape,
    PadShape,
    PointShape,
    Pooled,
    TransposeShape,
    UpsampleShape,
    WindowPoolShape,
)
from znnpy.layers import (
    ONE,
    ZERO,
    Activate,
    Add,
    AveragePool,
    Concat,
    Conv,
    ConvTranspose,
    Crop,
    GlobalPool,
    Layer,
    MaxFilter,
    Maxout,
    Multiply,
    Norm,
    Pad,
    Pool,
    Scale,
    Upsample,
)
from znnpy.network import Network
from znnpy.patches import Box
from znnpy.shapes import MaxoutShape, Precision, Vec3, add

Region = tuple[Interval, Interval, Interval]
UPSAMPLED_MAPS = 16  # least maps of an upsampling, and of a convolution that reads it, for which it is a view


@dataclass(frozen=True, slots=True)
class Read:
    """One input of an operation: voxel i of its input is voxel (i + `shift`) // `factor` of the tensor.

    Of a tensor that is `single`, its one voxel counts for all.
    """

    tensor: int
    shift: Vec3
    maps: int
    factor: Vec3 = ONE
    single: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """A layer that is computed, and the tensors that it reads.

    added   the layer that adds the addend to the result; None: there is none
    addend  read at the voxels of the output
    pool    the max-pooling of the result that it computes too; None: there is none
    norm    the norm of the result that it gives in place of it; None: there is none
    """

    layer: int
    reads: tuple[Read, ...]
    added: int | None = None
    addend: Read | None = None
    pool: int | None = None
    norm: int | None = None

    @property
    def result(self) -> int:
        """The tensor of the layer itself, or of the sum with the addend; with a norm behind it, it is not kept."""
        return (self.layer if self.added is None else self.added) + 1

    @property
    def tensor(self) -> int:
        """The tensor that it gives; of two, that which is not pooled."""
        return self.result if self.norm is None else self.norm + 1

    @property
    def tensors(self) -> tuple[int, ...]:
        """The tensors that it gives."""
        return (self.tensor,) if self.pool is None else (self.tensor, self.pool + 1)

    @property
    def layers(self) -> tuple[int, int]:
        """The layer, and the last one that it computes with it, but for a sum."""
        return self.layer, next(behind for behind in (self.pool, self.norm, self.layer) if behind is not None)

    @property
    def sources(self) -> tuple[int, ...]:
        """The tensors that it reads."""
        reads = self.reads if self.addend is None else (*self.reads, self.addend)
        return tuple(read.tensor for read in reads)


def operations(network: Network) -> tuple[Operation, ...]:
    """Return the operations of a network whose sizes are resolved, in the order of its layers."""
    views = {index + 1 for index in range(len(network.layers)) if _is_view(network, index)}
    sums = {}
    for index in range(len(network.layers)):
        if (found := _summed(network, views, index)) is not None:
            conv, addend = found
            sums[conv] = index, addend
    apart = views | {index + 1 for index, _ in sums.values()}
    return tuple(
        Operation(
            index,
            tuple(
                replace(read, single=source not in network.images[index])
                for source in sources
                for read in _reads(network, views, source, ZERO)
            ),
            *sums.get(index, ()),
        )
        for index, sources in enumerate(network.sources)
        if index + 1 not in apart
    )


def pairs_of(network: Network, found: Sequence[Operation]) -> dict[int, Operation]:
    """Return what a convolution becomes with the pooling or norm that is the next operation, by number.

    Windows of a pooling lie side by side, so that each is within the result of the convolution; of a norm no other
    operation reads what it normalises.
    """
    merged = {}
    for number, (operation, behind) in enumerate(pairwise(found)):
        layer, tensor = network.layers[behind.layer], operation.tensor
        alone = behind.reads == (Read(tensor, ZERO, network.maps[tensor]),)
        if not isinstance(network.layers[operation.layer], Conv) or not alone:
            continue
        if isinstance(layer, Pool) and layer.slides:
            merged[number] = replace(operation, pool=behind.layer)
        elif isinstance(layer, Norm) and operation.addend is None and _is_open(network, tensor):
            merged[number] = replace(operation, norm=behind.layer)
    return merged


def _summed(network: Network, views: set[int], index: int) -> tuple[int, Read] | None:
    """Return the convolution that computes a sum in its last pass, and what it adds; None if there is none.

    The addend is there when the convolution runs: else this would wait, and its inputs would be kept for longer.
    """
    sources = network.sources[index]
    if not isinstance(network.layers[index], Add) or len(network.images[index]) != 2 or len(sources) != 2:
        return None
    for tensor, other in (sorted(sources, reverse=True), sorted(sources)):
        (addend,) = _reads(network, views, other, ZERO)  # a concatenation that is added is in memory
        if addend.tensor < tensor and addend.maps == network.maps[tensor] and _is_open(network, tensor):
            return tensor - 1, addend
    return None


def _is_open(network: Network, tensor: int) -> bool:
    """Return whether a tensor is the result of a convolution without a function, and read by one layer alone."""
    layer = network.layers[tensor - 1]
    alone = len(network.readers[tensor]) == 1 and tensor not in network.outputs
    return isinstance(layer, Conv) and layer.activation == "none" and alone


def _is_view(network: Network, index: int) -> bool:
    """Return whether a layer is computed by those that read it."""
    layer, tensor = network.layers[index], index + 1
    if tensor in network.outputs:
        return False
    readers = [network.layers[reader] for reader in network.readers[tensor]]
    if isinstance(layer, Upsample):
        return _is_upsampled(network, index)
    if isinstance(layer, Concat):
        return all(isinstance(reader, Conv) and reader.groups == 1 for reader in readers)
    return isinstance(layer, Crop) and not any(isinstance(reader, Crop) for reader in readers)


def _is_upsampled(network: Network, index: int) -> bool:
    """Return whether all readers of an upsampling are convolutions that gain by repeating its voxels themselves.

    Those transform its input instead of its output; with few maps other methods are faster, which need all voxels.
    """
    layer, tensor = network.layers[index], index + 1
    if not isinstance(layer, Upsample) or layer.how != "nearest" or layer.factor is None:
        return False
    readers = set[int]()
    for reader in network.readers[tensor]:
        if isinstance(network.layers[reader], Concat):
            parts = [network.layers[source - 1] for source in network.sources[reader] if source > 0]
            if not _is_view(network, reader) or sum(isinstance(part, Upsample) for part in parts) > 1:
                return False  # a convolution repeats the voxels of one input
            readers |= set(network.readers[reader + 1])
        else:
            readers.add(reader)
    return network.maps[tensor] >= UPSAMPLED_MAPS and all(
        _may_repeat(network.layers[reader], layer.factor) for reader in readers
    )


def _may_repeat(layer: Layer, factor: Vec3) -> bool:
    """Return whether a layer is a convolution that can repeat voxels as it reads them, and gains by it."""
    return (
        isinstance(layer, Conv)
        and (layer.stride, layer.dilation, layer.groups) == (ONE, ONE, 1)
        and layer.out >= UPSAMPLED_MAPS
        and all(times == 1 or (times == 2 and k >= 3 and k % 2) for times, k in zip(factor, layer.kernel, strict=True))
    )


def _reads(network: Network, views: set[int], tensor: int, shift: Vec3) -> list[Read]:
    """Return the tensors in memory that a tensor consists of, in the order of its maps."""
    if tensor not in views:
        return [Read(tensor, shift, network.maps[tensor])]
    layer = network.layers[tensor - 1]
    if isinstance(layer, Upsample):
        assert layer.factor is not None, "resolved before"
        source = network.sources[tensor - 1][0]
        return [Read(source, shift, network.maps[source], layer.factor)]
    shift = add(shift, layer.before) if isinstance(layer, Crop) else shift
    return [read for source in network.sources[tensor - 1] for read in _reads(network, views, source, shift)]


def input_region(geometry: Geometry, operation: Operation, region: Region) -> Region:
    """Return what an operation reads of its input for a region of its output, before any shift."""
    source = geometry.network.images[operation.layer][0]
    z, y, x = (axis.read(operation.layer, along, source) for axis, along in zip(geometry.axes, region, strict=True))
    return z, y, x


def box_of(region: Region) -> Box:
    """Return a region as a box."""
    return Box(vector(along.lo for along in region), vector(along.hi for along in region))


def voxels_of(read: Read, region: Region) -> Box:
    """Return the voxels of its tensor that an input reads for a region of itself."""
    if read.single:
        return Box(ZERO, ONE)
    box = box_of(region).shifted(read.shift)
    return Box(
        vector(at // factor for at, factor in zip(box.lo, read.factor, strict=True)),
        vector(-(-at // factor) for at, factor in zip(box.hi, read.factor, strict=True)),
    )


def shape_of(
    geometry: Geometry,
    operation: Operation,
    region: Region,
    precision: Precision = "fp32",
    windows: Region | None = None,
) -> GraphShape | MaxoutShape:
    """Return the shape of an operation for a region of its output.

    windows  the region of the second output, if there is one; None: all windows within the region
    """
    shape = _shape_of(geometry, operation, region)
    if operation.pool is not None:
        assert isinstance(shape, GraphConvShape), "only convolutions have two outputs"
        shape = replace(shape, pooled=_pooled(geometry.network.layers[operation.pool], region, windows))
    if operation.norm is not None:
        assert isinstance(shape, GraphConvShape), "only convolutions are normalised in one"
        assert shape.out == geometry.size(operation.tensor), "a norm is computed for a whole image"
        shape = replace(shape, normed=_normed(geometry.network.layers[operation.norm], shape.fout))
    return shape if precision == "fp32" else replace(shape, precision=precision)


def _normed(layer: Layer, maps: int) -> Normed:
    """Return the norm of so many maps."""
    assert isinstance(layer, Norm), layer
    return Normed(layer.groups_of(maps), layer.epsilon, layer.affine, layer.activation, layer.parameters)


def _pooled(layer: Layer, region: Region, windows: Region | None) -> Pooled:
    """Return which windows of a pooling a region of its input holds, or which of these are wanted."""
    assert isinstance(layer, Pool), layer
    axes = list(zip(region, layer.window, strict=True))
    if windows is None:
        z, y, x = (Interval(-(-along.lo // size), along.hi // size) for along, size in axes)
        windows = z, y, x
    if all(along.size > 0 for along in windows):
        sides = list(zip(windows, axes, strict=True))
        first = vector(wanted.lo * size - along.lo for wanted, (along, size) in sides)
        behind = vector(along.hi - wanted.hi * size for wanted, (along, size) in sides)
        assert min(*first, *behind) >= 0, f"windows {windows} of {layer} are not all within {region}"
        return Pooled(layer.window, first, vector(wanted.size for wanted in windows))
    return Pooled(layer.window, vector(-along.lo % size for along, size in axes), ZERO)


def _shape_of(geometry: Geometry, operation: Operation, region: Region) -> GraphShape | MaxoutShape:
    network, index = geometry.network, operation.layer
    layer, source = network.layers[index], network.images[index][0]
    read = input_region(geometry, operation, region)
    needs = [axis.needed(index, along, source) for axis, along in zip(geometry.axes, region, strict=True)]
    n, m = vector(one.size for one in read), vector(one.size for one in region)
    before = vector(there.lo - need.lo for need, there in zip(needs, read, strict=True))
    behind = vector(need.hi - there.hi for need, there in zip(needs, read, strict=True))
    fins = tuple(one.maps for one in operation.reads)
    sizes = geometry.size(source)
    match layer:
        case Conv():
            end = layer if operation.added is None else network.layers[operation.added]
            assert isinstance(end, Conv | Add)
            upsampled = [one.factor for one in operation.reads if one.factor != ONE]
            factors = tuple(one.factor for one in operation.reads) if upsampled else ()
            assert len(upsampled) < 2, "upsamplings of which a convolution would read two are operations"
            first = vector(there.lo % factor for there, factor in zip(read, (*upsampled, ONE)[0], strict=True))
            return GraphConvShape(
                fins, layer.out, n, layer.kernel, before, behind, layer.stride, layer.dilation, layer.groups,
                end.activation, end.parameters, addend=operation.addend is not None, factors=factors, first=first,
            )  # fmt: skip
        case ConvTranspose():
            first = _first(region, read, layer.stride, layer.padding[0])
            return TransposeShape(
                sum(fins), layer.out, n, m, layer.kernel, first, layer.stride, layer.dilation, layer.groups,
                layer.activation, layer.parameters,
            )  # fmt: skip
        case Pool() | AveragePool():
            overhang = vector(
                max(0, need.hi - size - padding)
                for need, size, padding in zip(needs, sizes, layer.padding[1], strict=True)
            )
            how: Literal["max", "average"] = "max" if isinstance(layer, Pool) else "average"
            counts = isinstance(layer, Pool) or layer.count_padding
            return WindowPoolShape(sum(fins), n, layer.window, layer.step, how, before, behind, overhang, counts)
        case MaxFilter():
            return WindowPoolShape(sum(fins), n, layer.window, ONE)
        case Upsample(factor=factor):
            assert factor is not None, "resolved before"
            return UpsampleShape(sum(fins), n, m, factor, _first(region, read, factor, (0, 0, 0)), layer.how)
        case Pad():
            return _pad_shape(layer, sum(fins), region, read, sizes)
        case Norm() | GlobalPool():
            assert (n, m) == (sizes, geometry.size(index + 1)), f"{layer} is computed for a part of an image"
            return _whole_shape(layer, sum(fins), n)
        case _:
            return _point_shape(layer, fins, n, tuple(i for i, one in enumerate(operation.reads) if one.single))


def _whole_shape(layer: Norm | GlobalPool, maps: int, n: Vec3) -> GraphShape:
    if isinstance(layer, GlobalPool):
        return GlobalPoolShape(maps, n, layer.how)
    groups = layer.groups_of(maps)
    return NormShape(maps, n, groups, layer.epsilon, layer.affine, layer.activation, layer.parameters)


def _point_shape(layer: Layer, fins: tuple[int, ...], n: Vec3, single: tuple[int, ...]) -> GraphShape | MaxoutShape:
    match layer:
        case Add():
            return PointShape("add", fins, n, layer.activation, layer.parameters, single=single)
        case Multiply():
            return PointShape("multiply", fins, n, layer.activation, layer.parameters, single=single)
        case Scale():
            return PointShape("scale", fins, n, layer.activation, layer.parameters)
        case Activate():
            return PointShape("function", fins, n, layer.function, layer.parameters)
        case Maxout(of=of):
            return MaxoutShape(1, sum(fins), n, of)
        case Concat() | Crop():
            return PointShape("concat", fins, n)
        case _:
            raise TypeError(f"no operation computes a {layer.type}")


def _pad_shape(layer: Pad, maps: int, region: Region, read: Region, sizes: Vec3) -> PadShape:
    """Return the shape of a padding; far from the faces of the volume it does not say where they are."""
    first, low, high = [], [], []
    for along, there, size, before in zip(region, read, sizes, layer.before, strict=True):
        begin = along.lo - before - there.lo
        end = begin + along.size
        first.append(begin)
        low.append(-there.lo if begin < -there.lo else min(0, begin))
        high.append(size - there.lo if end > size - there.lo else max(end, there.size))
    n, m = vector(one.size for one in read), vector(one.size for one in region)
    return PadShape(maps, n, m, vector(first), vector(low), vector(high), layer.how)


def _first(region: Region, read: Region, factor: Vec3, padding: Vec3) -> Vec3:
    """Return where the output begins, counted from the first voxel of the input on the output's lattice."""
    axes = zip(region, read, factor, padding, strict=True)
    return vector(along.lo + before - there.lo * times for along, there, times, before in axes)
