"""Describe what each layer of a network computes, without sizes. Sizes and positions are (z, y, x).

Convolutions are cross-correlations. Layers that a chain may hold come first, then those of graphs alone. Definitions
follow PyTorch, where ONNX and PyTorch agree on all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from znnpy.shapes import Activation, Vec3, text

PadMode = Literal["zeros", "reflect", "replicate"]  # values beyond the faces of a volume
PAD_MODES: tuple[PadMode, ...] = ("zeros", "reflect", "replicate")
# The functions of value by value that a graph may hold. Those with parameters: leaky_relu (slope), elu (alpha), clip
# (least, most). prelu has weights, one slope or one per map.
Function = Literal[
    "none", "relu", "leaky_relu", "prelu", "elu", "selu", "gelu", "gelu_tanh", "silu", "softplus", "sigmoid", "tanh",
    "hardswish", "clip", "softmax",
]  # fmt: skip
FUNCTIONS: tuple[Function, ...] = (
    "none", "relu", "leaky_relu", "prelu", "elu", "selu", "gelu", "gelu_tanh", "silu", "softplus", "sigmoid", "tanh",
    "hardswish", "clip", "softmax",
)  # fmt: skip
NormType = Literal["instance_norm", "group_norm", "layer_norm"]
DEFAULT_PARAMETERS: dict[str, tuple[float, ...]] = {"leaky_relu": (0.01,), "elu": (1.0,), "clip": (0.0, 1.0)}
ZERO: Vec3 = (0, 0, 0)
ONE: Vec3 = (1, 1, 1)
Sides = tuple[Vec3, Vec3]  # voxels before the first and behind the last, along each axis
NO_PADDING: Sides = (ZERO, ZERO)


@dataclass(frozen=True, slots=True)
class Conv:
    """A convolution with bias and activation; without padding, stride and dilation it is valid."""

    kernel: Vec3
    out: int  # maps
    activation: Activation | Function = "none"
    stride: Vec3 = ONE
    dilation: Vec3 = ONE
    groups: int = 1
    padding: Sides = NO_PADDING
    padding_mode: PadMode = "zeros"
    parameters: tuple[float, ...] = ()  # of the activation
    type: Literal["conv"] = "conv"

    @property
    def reach(self) -> Vec3:
        """Return the extent of the inputs that one output depends on."""
        z, y, x = (d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True))
        return z, y, x

    @property
    def slides(self) -> bool:
        """Return whether it is a valid convolution of all maps, with stride 1, as chains have them."""
        plain = self.stride == ONE and self.dilation == ONE and self.groups == 1 and self.padding == NO_PADDING
        return plain and self.activation in ("none", "relu", "tanh", "sigmoid", "softmax")

    def __str__(self) -> str:
        return f"conv {text(self.kernel)} -> {self.out} {self.activation}{_settings(self)}"


@dataclass(frozen=True, slots=True)
class Pool:
    """A max-pooling. In a network that slides over a volume it runs as fragments (MPF)."""

    window: Vec3
    stride: Vec3 | None = None  # None: the window
    padding: Sides = NO_PADDING  # with minus infinity
    ceil: bool = False  # round the number of windows up: the last may reach beyond the image
    type: Literal["pool"] = "pool"

    @property
    def step(self) -> Vec3:
        """Return the stride."""
        return self.stride or self.window

    @property
    def slides(self) -> bool:
        """Return whether windows are side by side, without padding, as chains have them."""
        return self.step == self.window and self.padding == NO_PADDING and not self.ceil

    def __str__(self) -> str:
        return f"pool {text(self.window)}{_windows(self)}"


@dataclass(frozen=True, slots=True)
class MaxFilter:
    """The maximum over a window at every position (stride 1)."""

    window: Vec3
    type: Literal["maxfilter"] = "maxfilter"

    def __str__(self) -> str:
        return f"maxfilter {text(self.window)}"


@dataclass(frozen=True, slots=True)
class Maxout:
    """The maximum over groups of `of` neighbouring maps."""

    of: int
    type: Literal["maxout"] = "maxout"

    def __str__(self) -> str:
        return f"maxout of {self.of}"


@dataclass(frozen=True, slots=True)
class ConvTranspose:
    """A transposed convolution: output voxel `i * stride - padding + d * dilation` gets in[i] * w[d], summed up."""

    kernel: Vec3
    out: int
    stride: Vec3 = ONE
    padding: Sides = NO_PADDING  # taken off the output
    output_padding: Vec3 = ZERO  # added to the output behind
    dilation: Vec3 = ONE
    groups: int = 1
    activation: Activation | Function = "none"
    parameters: tuple[float, ...] = ()
    type: Literal["conv_transpose"] = "conv_transpose"

    @property
    def reach(self) -> Vec3:
        """Return the extent of the outputs that one input contributes to."""
        z, y, x = (d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True))
        return z, y, x

    def __str__(self) -> str:
        return f"conv_transpose {text(self.kernel)} -> {self.out} {self.activation}{_settings(self)}"


@dataclass(frozen=True, slots=True)
class AveragePool:
    """The mean over windows."""

    window: Vec3
    stride: Vec3 | None = None
    padding: Sides = NO_PADDING  # with zeros
    ceil: bool = False
    count_padding: bool = True  # divide by the whole window; else by its voxels inside the image
    type: Literal["average_pool"] = "average_pool"

    @property
    def step(self) -> Vec3:
        """Return the stride."""
        return self.stride or self.window

    def __str__(self) -> str:
        return f"average_pool {text(self.window)}{_windows(self)}"


@dataclass(frozen=True, slots=True)
class Upsample:
    """Interpolation to a finer lattice, by a factor or to the size of another node.

    nearest  output voxel i is input voxel floor(i / factor)
    linear   trilinear between voxel centres, clamped at the faces: output voxel i lies at (i + 0.5) / factor - 0.5.
             With align_corners the first and the last voxels coincide, so the result depends on the size of the volume.

    A map of 2n - 1 voxels that goes to 2n by `nearest` repeats its first voxel, as PyTorch's interpolation does.
    """

    factor: Vec3 | None = None
    like: str | None = None  # node whose size it gets
    how: Literal["nearest", "linear"] = "nearest"
    align_corners: bool = False
    type: Literal["upsample"] = "upsample"

    def __str__(self) -> str:
        to = f"to {self.like}" if self.factor is None else text(self.factor)
        return f"upsample {to} {self.how}{' align_corners' if self.align_corners else ''}"


@dataclass(frozen=True, slots=True)
class Crop:
    """Cut voxels off, so many before and behind, or the centre to the size of another node."""

    before: Vec3 = ZERO
    behind: Vec3 = ZERO
    like: str | None = None  # node whose size it gets; the larger half of an odd difference is cut off behind
    type: Literal["crop"] = "crop"

    def __str__(self) -> str:
        return f"crop to {self.like}" if self.like else f"crop {text(self.before)} {text(self.behind)}"


@dataclass(frozen=True, slots=True)
class Pad:
    """Add voxels around the image."""

    before: Vec3
    behind: Vec3
    how: PadMode = "zeros"
    type: Literal["pad"] = "pad"

    def __str__(self) -> str:
        return f"pad {text(self.before)} {text(self.behind)} {self.how}"


@dataclass(frozen=True, slots=True)
class Concat:
    """The maps of all inputs, one after the other."""

    type: Literal["concat"] = "concat"

    def __str__(self) -> str:
        return "concat"


@dataclass(frozen=True, slots=True)
class Add:
    """The sum of its inputs; one of one map is added to all maps, and one of one voxel (GlobalPool) to all voxels."""

    activation: Activation | Function = "none"
    parameters: tuple[float, ...] = ()
    type: Literal["add"] = "add"

    def __str__(self) -> str:
        return f"add {self.activation}"


@dataclass(frozen=True, slots=True)
class Multiply:
    """The product of its inputs; one of one map multiplies all maps, and one of one voxel (GlobalPool) all voxels."""

    activation: Activation | Function = "none"
    parameters: tuple[float, ...] = ()
    type: Literal["multiply"] = "multiply"

    def __str__(self) -> str:
        return f"multiply {self.activation}"


@dataclass(frozen=True, slots=True)
class Scale:
    """Each map times a factor plus an offset: weights (f,) and (f,). A batch norm is one, at inference."""

    activation: Activation | Function = "none"
    parameters: tuple[float, ...] = ()
    epsilon: float | None = None  # of a batch norm: its weights are read as such
    type: Literal["scale", "batch_norm"] = "scale"

    def __str__(self) -> str:
        return f"{self.type} {self.activation}"


@dataclass(frozen=True, slots=True)
class Activate:
    """A function of each value, or softmax over the maps of each voxel."""

    function: Function
    parameters: tuple[float, ...] = ()
    type: Literal["activation"] = "activation"

    def __str__(self) -> str:
        return " ".join((self.function, *(f"{value:g}" for value in self.parameters)))


@dataclass(frozen=True, slots=True)
class Norm:
    """Each value less the mean of its maps over the whole image, divided by their standard deviation there.

    The mean and the variance are those of one map (instance_norm), of each of `groups` groups of neighbouring maps
    (group_norm), or of all maps together (layer_norm). The variance is the mean squared deviation; `epsilon` is added
    to it before the root is taken. With `affine` each map is then multiplied by a factor and an offset is added:
    weights (f,) and (f,).
    """

    type: NormType
    epsilon: float = 1e-5
    groups: int = 1  # of a group norm
    affine: bool = False
    activation: Activation | Function = "none"
    parameters: tuple[float, ...] = ()

    def groups_of(self, maps: int) -> int:
        """Return into how many groups so many maps are divided."""
        return {"instance_norm": maps, "group_norm": self.groups, "layer_norm": 1}[self.type]

    def __str__(self) -> str:
        words = [self.type, f"groups {self.groups}" if self.groups > 1 else "", "affine" if self.affine else ""]
        return " ".join(word for word in (*words, self.activation if self.activation != "none" else "") if word)


@dataclass(frozen=True, slots=True)
class GlobalPool:
    """The mean or the maximum of each map over the whole image: an image of one voxel.

    Layers that read it alone give one voxel too. Add and Multiply take it, and what follows from it, for every voxel
    of the image with which they join it; Upsample repeats it up to the size of another node.
    """

    how: Literal["average", "max"] = "average"
    type: Literal["global_pool"] = "global_pool"

    def __str__(self) -> str:
        return "global_pool" if self.how == "average" else f"global_pool {self.how}"


Layer = (
    Conv | Pool | MaxFilter | Maxout
    | ConvTranspose | AveragePool | Upsample | Crop | Pad | Concat | Add | Multiply | Scale | Activate
    | Norm | GlobalPool
)  # fmt: skip
JOINS = (Concat, Add, Multiply)  # layers that take two inputs or more
OF_WHOLE_IMAGES = (Norm, GlobalPool)  # layers of which each voxel depends on the whole image
WEIGHTED = (Conv, ConvTranspose, Scale)  # layers with weights, besides prelu and affine norms


def has_weights(layer: Layer) -> bool:
    """Return whether a layer has trained values."""
    match layer:
        case Activate(function="prelu") | Norm(affine=True):
            return True
        case _:
            return isinstance(layer, WEIGHTED)


def maps_after(layer: Layer, maps: tuple[int, ...]) -> int:
    """Return the maps that a layer gives for the maps of its inputs."""
    match layer:
        case Conv() | ConvTranspose():
            return layer.out
        case Maxout():
            return maps[0] // layer.of
        case Concat():
            return sum(maps)
        case Add() | Multiply():
            return max(maps)
        case _:
            return maps[0]


def parameter_count(layer: Layer, maps: int) -> int:
    """Return the number of trained values of a layer that takes so many maps; a prelu counts one per map."""
    match layer:
        case Conv() | ConvTranspose():
            return maps // layer.groups * layer.out * prod(layer.kernel) + layer.out
        case Scale() | Norm(affine=True):
            return 2 * maps
        case Activate(function="prelu"):
            return maps
        case _:
            return 0


def _settings(layer: Conv | ConvTranspose) -> str:
    """Return the settings that are not those of a valid convolution, in words."""
    words = []
    if layer.stride != ONE:
        words.append(f"stride {text(layer.stride)}")
    if layer.dilation != ONE:
        words.append(f"dilation {text(layer.dilation)}")
    if layer.groups > 1:
        words.append(f"groups {layer.groups}")
    if layer.padding != NO_PADDING:
        words.append(_padding(layer.padding))
    if isinstance(layer, Conv) and layer.padding_mode != "zeros":
        words.append(layer.padding_mode)
    if isinstance(layer, ConvTranspose) and layer.output_padding != ZERO:
        words.append(f"output_padding {text(layer.output_padding)}")
    return "".join(f" {word}" for word in words)


def _windows(layer: Pool | AveragePool) -> str:
    stride = f" stride {text(layer.step)}" if layer.step != layer.window else ""
    padding = f" {_padding(layer.padding)}" if layer.padding != NO_PADDING else ""
    return f"{stride}{padding}{' ceil' if layer.ceil else ''}"


def _padding(padding: Sides) -> str:
    before, behind = padding
    return f"padding {text(before)}" if before == behind else f"padding {text(before)} before, {text(behind)} behind"
