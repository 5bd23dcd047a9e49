"""The entries of `layers` in a network.yaml: a model for each type of layer, with its keys."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import isfinite
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PlainValidator

from znnpy.errors import NetworkFileError
from znnpy.formats.entries import (
    FLOAT32_MAX,
    NODE_NAME,
    SIZE,
    SIZE_OR_ZERO,
    Count,
    Entry,
    NodeName,
    Positive,
    Size,
    SizeOrZero,
    check,
)
from znnpy.formats.files import COUNT, LARGEST, shown, suggestion
from znnpy.formats.wiring import Given
from znnpy.layers import (
    DEFAULT_PARAMETERS,
    FUNCTIONS,
    NO_PADDING,
    ONE,
    PAD_MODES,
    ZERO,
    Activate,
    Add,
    AveragePool,
    Concat,
    Conv,
    ConvTranspose,
    Crop,
    Function,
    GlobalPool,
    Layer,
    MaxFilter,
    Maxout,
    Multiply,
    Norm,
    NormType,
    Pad,
    PadMode,
    Pool,
    Scale,
    Sides,
    Upsample,
)
from znnpy.messages import excerpt
from znnpy.shapes import Vec3, text

PARAMETERS = {"leaky_relu": ("slope",), "elu": ("alpha",), "clip": ("least", "most")}  # keys, in the layer's order


class Ending(NamedTuple):
    """A function of each value, with its parameters."""

    function: Function
    parameters: tuple[float, ...]


NOTHING = Ending("none", ())
_ENDINGS = tuple(function for function in FUNCTIONS if function != "prelu")
_ENDING = f"one of {', '.join(_ENDINGS)}, or a mapping such as {{function: leaky_relu, slope: 0.1}}"


def _ending(value: object) -> Ending:
    """Read the activation of a layer: a name, or a mapping with parameters; ValueError for anything else."""
    given = value if isinstance(value, dict) else {"function": value}
    function = given.get("function")
    if function == "prelu":
        raise NetworkFileError(
            "activation is prelu, which has weights of its own; write it as a layer, {type: activation, "
            "function: prelu}, behind this one"
        )
    for known in _ENDINGS:
        if function == known:
            return Ending(known, _parameters(known, {key: own for key, own in given.items() if key != "function"}))
    raise ValueError("not a function")


def _parameters(function: Function, given: dict[Any, object]) -> tuple[float, ...]:
    """Return the parameters of a function from its keys, or the usual ones; NetworkFileError says what is wrong."""
    keys = PARAMETERS.get(function, ())
    if not given:
        return DEFAULT_PARAMETERS.get(function, ())
    for key in given:
        if key not in keys:
            known = f"use {' and '.join(keys)}" if keys else "delete it"
            raise NetworkFileError(f"{shown(key)} is no parameter of {function}; {known}")
    values = []
    for key in keys:
        if key not in given:
            raise NetworkFileError(f"{key} of {function} is missing; add for example {key}: 1.0")
        value = given[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_float32(value):
            raise NetworkFileError(
                f"{key} is {shown(value)}, but must be a finite number; write for example {key}: 1.0"
            )
        values.append(float(value))
    if function == "clip" and values[0] > values[1]:
        raise NetworkFileError(f"least is {values[0]:g}, which is more than most, {values[1]:g}; exchange them")
    return tuple(values)


def _is_float32(value: int | float) -> bool:
    return abs(value) <= FLOAT32_MAX and isfinite(value)


def _sizes(value: object) -> Vec3:
    """Read voxels along each axis, 0 or more; ValueError for anything else."""
    given = value if isinstance(value, list) else [value] * 3
    values = [v for v in given if isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= LARGEST]
    if len(given) != 3 or len(values) != 3:
        raise ValueError("not a size")
    return values[0], values[1], values[2]


def _sides(value: object) -> Sides:
    """Read padding: the same on both sides, or a mapping of both; ValueError for anything else."""
    if not isinstance(value, dict):
        return _sizes(value), _sizes(value)
    if not value or any(key not in ("before", "behind") for key in value):
        raise ValueError("unknown side")
    return _sizes(value.get("before", 0)), _sizes(value.get("behind", 0))


def _sides_or_same(value: object) -> Sides | Literal["same"]:
    return "same" if value == "same" else _sides(value)


_SIDES = f"{SIZE_OR_ZERO}, or {{before: [z, y, x], behind: [z, y, x]}}"
End = Annotated[Ending, PlainValidator(_ending)]
Padding = Annotated[Sides, PlainValidator(_sides)]
PaddingOrSame = Annotated[Sides | Literal["same"], PlainValidator(_sides_or_same)]


def _names(value: object) -> tuple[str, ...]:
    """Read one name or several."""
    values = value if isinstance(value, list) else [value]
    if not values or any(not isinstance(name, str) or not name for name in values):
        raise ValueError("not a name")
    return tuple(values)


Names = Annotated[tuple[str, ...], PlainValidator(_names)]
FROM = "the name of a node or input, or a list of names"


class LayerEntry(Entry, ABC):
    """Any layer: it has a type, and may have a name and the names of the nodes that it reads."""

    type: str
    name: NodeName | None = Field(None, description=NODE_NAME, examples=["conv1"])
    reads: Names | None = Field(None, alias="from", description=FROM, examples=["[conv1, conv2]"])

    @abstractmethod
    def layer(self) -> Layer:
        """Return the layer; NetworkFileError if keys do not fit each other."""


class _Ended(LayerEntry):
    """A layer that ends with a function of each value."""

    activation: End = Field(NOTHING, description=_ENDING, examples=["relu"])


class _ConvEntry(LayerEntry):
    kernel: Size = Field(description=SIZE, examples=["[3, 3, 3]"])
    out: Count = Field(description=f"{COUNT} (maps)", examples=["16"])
    activation: End = Field(NOTHING, description=_ENDING, examples=["relu"])
    stride: Size = Field(ONE, description=SIZE, examples=["2"])
    dilation: Size = Field(ONE, description=SIZE, examples=["2"])
    groups: Count = Field(1, description=COUNT, examples=["16"])
    padding: PaddingOrSame = Field(NO_PADDING, description=f"{_SIDES}, or same", examples=["1"])
    padding_mode: PadMode = Field("zeros", description=f"one of {', '.join(PAD_MODES)}", examples=["reflect"])

    def layer(self) -> Layer:
        return Conv(
            self.kernel,
            self.out,
            self.activation.function,
            self.stride,
            self.dilation,
            self.groups,
            self._same() if self.padding == "same" else self.padding,
            self.padding_mode,
            self.activation.parameters,
        )

    def _same(self) -> Sides:
        """Return the padding with which the output is as large as the input."""
        if self.stride != ONE:
            raise NetworkFileError(
                f"padding is same, which means an output as large as the input, but stride is {text(self.stride)}; "
                "write the padding as a number, for example padding: 1"
            )
        more = [(k - 1) * d for k, d in zip(self.kernel, self.dilation, strict=True)]
        before: Vec3 = (more[0] // 2, more[1] // 2, more[2] // 2)
        behind: Vec3 = (more[0] - before[0], more[1] - before[1], more[2] - before[2])
        if before != behind:
            axis = next(axis for axis, odd in zip("zyx", more, strict=True) if odd % 2)
            raise NetworkFileError(
                f"padding is same, but with the kernel {text(self.kernel)} one side along {axis} gets one voxel more "
                f"than the other, and PyTorch and TensorFlow put it behind; write padding: {{before: {list(before)}, "
                f"behind: {list(behind)}}} instead"
            )
        return before, behind


class _PoolEntry(LayerEntry):
    window: Size = Field(description=SIZE, examples=["[2, 2, 2]"])
    stride: Size | None = Field(None, description=SIZE, examples=["[2, 2, 2]"])
    padding: Padding = Field(NO_PADDING, description=_SIDES, examples=["1"])
    ceil: bool = Field(False, description="true or false", examples=["true"])

    def layer(self) -> Layer:
        return Pool(self.window, self._stride, self.padding, self.ceil)

    @property
    def _stride(self) -> Vec3 | None:
        return None if self.stride == self.window else self.stride


class _AveragePoolEntry(_PoolEntry):
    count_padding: bool = Field(True, description="true or false", examples=["false"])

    def layer(self) -> Layer:
        return AveragePool(self.window, self._stride, self.padding, self.ceil, self.count_padding)


class _MaxFilterEntry(LayerEntry):
    window: Size = Field(description=SIZE, examples=["[2, 2, 2]"])

    def layer(self) -> Layer:
        return MaxFilter(self.window)


class _MaxoutEntry(LayerEntry):
    of: Count = Field(description=f"{COUNT} (maps in a group)", examples=["2"])

    def layer(self) -> Layer:
        return Maxout(self.of)


class _ConvTransposeEntry(LayerEntry):
    kernel: Size = Field(description=SIZE, examples=["[2, 2, 2]"])
    out: Count = Field(description=f"{COUNT} (maps)", examples=["16"])
    stride: Size = Field(ONE, description=SIZE, examples=["2"])
    padding: Padding = Field(NO_PADDING, description=_SIDES, examples=["1"])
    output_padding: SizeOrZero = Field(ZERO, description=SIZE_OR_ZERO, examples=["1"])
    dilation: Size = Field(ONE, description=SIZE, examples=["2"])
    groups: Count = Field(1, description=COUNT, examples=["16"])
    activation: End = Field(NOTHING, description=_ENDING, examples=["relu"])

    def layer(self) -> Layer:
        return ConvTranspose(
            self.kernel,
            self.out,
            self.stride,
            self.padding,
            self.output_padding,
            self.dilation,
            self.groups,
            *self.activation,
        )


_HOW = ("nearest", "linear")


class _UpsampleEntry(LayerEntry):
    factor: Size | None = Field(None, description=SIZE, examples=["2"])
    like: NodeName | None = Field(None, description=NODE_NAME, examples=["conv1"])
    how: Literal["nearest", "linear"] = Field("nearest", description=f"one of {', '.join(_HOW)}", examples=["linear"])
    align_corners: bool = Field(False, description="true or false", examples=["false"])

    def layer(self) -> Layer:
        if (self.factor is None) == (self.like is None):
            given = "neither factor nor like is" if self.factor is None else "both factor and like are"
            raise NetworkFileError(f"{given} given; write one of them, for example factor: 2")
        if self.align_corners and self.how == "nearest":
            raise NetworkFileError("align_corners means nothing for how: nearest; delete it, or write how: linear")
        return Upsample(self.factor, self.like, self.how, self.align_corners)


class _CropEntry(LayerEntry):
    before: SizeOrZero | None = Field(None, description=SIZE_OR_ZERO, examples=["4"])
    behind: SizeOrZero | None = Field(None, description=SIZE_OR_ZERO, examples=["4"])
    like: NodeName | None = Field(None, description=NODE_NAME, examples=["conv1"])

    def layer(self) -> Layer:
        numbers = self.before is not None or self.behind is not None
        if numbers == (self.like is not None):
            given = "both like and voxels are" if numbers else "none of before, behind and like is"
            raise NetworkFileError(
                f"{given} given; write before and behind, or the node whose size it gets, for example like: conv1"
            )
        return Crop(self.before or ZERO, self.behind or ZERO, self.like)


class _PadEntry(LayerEntry):
    before: SizeOrZero = Field(ZERO, description=SIZE_OR_ZERO, examples=["1"])
    behind: SizeOrZero = Field(ZERO, description=SIZE_OR_ZERO, examples=["1"])
    how: PadMode = Field("zeros", description=f"one of {', '.join(PAD_MODES)}", examples=["reflect"])

    def layer(self) -> Layer:
        return Pad(self.before, self.behind, self.how)


class _ConcatEntry(LayerEntry):
    def layer(self) -> Layer:
        return Concat()


class _AddEntry(_Ended):
    def layer(self) -> Layer:
        return Add(*self.activation)


class _MultiplyEntry(_Ended):
    def layer(self) -> Layer:
        return Multiply(*self.activation)


class _ScaleEntry(_Ended):
    def layer(self) -> Layer:
        return Scale(*self.activation)


_EPSILON = Field(1e-5, description="a finite number above 0", examples=["1.0e-5"])


class _BatchNormEntry(_Ended):
    epsilon: Positive = _EPSILON

    def layer(self) -> Layer:
        return Scale(*self.activation, self.epsilon, "batch_norm")


class _ActivationEntry(LayerEntry):
    function: Function = Field(description=f"one of {', '.join(FUNCTIONS)}", examples=["relu"])
    slope: Any = None  # parameters, which are checked for the function
    alpha: Any = None
    least: Any = None
    most: Any = None

    def layer(self) -> Layer:
        given = {key: getattr(self, key) for key in ("slope", "alpha", "least", "most") if key in self.model_fields_set}
        return Activate(self.function, _parameters(self.function, given))


class _NormEntry(_Ended):
    """A norm over the whole image."""

    epsilon: Positive = _EPSILON
    affine: bool = Field(False, description="true or false", examples=["true"])

    def _norm(self, of: NormType, groups: int = 1) -> Layer:
        return Norm(of, self.epsilon, groups, self.affine, *self.activation)


class _InstanceNormEntry(_NormEntry):
    def layer(self) -> Layer:
        return self._norm("instance_norm")


class _LayerNormEntry(_NormEntry):
    def layer(self) -> Layer:
        return self._norm("layer_norm")


class _GroupNormEntry(_NormEntry):
    groups: Count = Field(description=COUNT, examples=["8"])

    def layer(self) -> Layer:
        return self._norm("group_norm", self.groups)


class _GlobalPoolEntry(LayerEntry):
    how: Literal["average", "max"] = Field("average", description="one of average, max", examples=["average"])

    def layer(self) -> Layer:
        return GlobalPool(self.how)


ENTRIES: dict[str, type[LayerEntry]] = {
    "conv": _ConvEntry,
    "pool": _PoolEntry,
    "maxfilter": _MaxFilterEntry,
    "maxout": _MaxoutEntry,
    "conv_transpose": _ConvTransposeEntry,
    "average_pool": _AveragePoolEntry,
    "upsample": _UpsampleEntry,
    "crop": _CropEntry,
    "pad": _PadEntry,
    "concat": _ConcatEntry,
    "add": _AddEntry,
    "multiply": _MultiplyEntry,
    "scale": _ScaleEntry,
    "batch_norm": _BatchNormEntry,
    "activation": _ActivationEntry,
    "instance_norm": _InstanceNormEntry,
    "group_norm": _GroupNormEntry,
    "layer_norm": _LayerNormEntry,
    "global_pool": _GlobalPoolEntry,
}


def read_layer(index: int, raw: object) -> Given:
    """Check an entry of `layers`; NetworkFileError names the node, or the layer by its index."""
    if not isinstance(raw, dict):
        raise NetworkFileError(
            f"layer {index} is {shown(raw)}, but must be a mapping such as {{type: pool, window: [2, 2, 2]}}"
        )
    name = raw.get("name")
    which = f"node {excerpt(name, 60)}" if isinstance(name, str) and name else f"layer {index}"
    if "type" not in raw:
        raise NetworkFileError(f"{which}: type is missing; add one of {', '.join(ENTRIES)}")
    kind = raw["type"]
    if not isinstance(kind, str) or kind not in ENTRIES:
        advice = suggestion(kind, ENTRIES)
        if kind in FUNCTIONS:
            advice = f"write {{type: activation, function: {kind}}}"
        raise NetworkFileError(f"{which}: type is {shown(kind)}, which is not a layer type; {advice}")
    where = f"{which} ({kind}): "
    entry = check(ENTRIES[kind], raw, where)
    try:
        return Given(entry.layer(), entry.name, entry.reads)
    except NetworkFileError as error:
        raise NetworkFileError(f"{where}{error}") from None
