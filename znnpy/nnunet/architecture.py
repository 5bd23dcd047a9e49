"""The architecture that plans describe, in the words of today or in those before nnU-Net 2.3; no code is looked up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from znnpy.errors import NetworkFileError
from znnpy.layers import ONE, Function
from znnpy.messages import excerpt
from znnpy.nnunet.documents import MOST_COUNT, SHOWN, Count, Document, Finite, Positive, Word, checked
from znnpy.shapes import Vec3, multiply, text

MOST_STAGES = 16
MOST_REPEATED = 64  # convolutions or blocks of a stage
LARGEST_KERNEL = 31
EPSILON, SLOPE = 1e-5, 0.01  # of PyTorch, where plans state none
KNOWN = ("PlainConvUNet", "ResidualEncoderUNet")
PACKAGE = "dynamic_network_architectures.architectures."

Edge = Annotated[int, Field(ge=1, le=LARGEST_KERNEL)]
Edges = tuple[Edge, Edge, Edge]
Sizes = Edge | list[Edge | Edges]
Repeats = Annotated[int, Field(ge=1, le=MOST_REPEATED)]
Stages = Annotated[int, Field(ge=2, le=MOST_STAGES)]
Kind = Literal["PlainConvUNet", "ResidualEncoderUNet"]
Value = TypeVar("Value")


class _Norm(Document):
    eps: Positive = EPSILON
    affine: bool = False
    track_running_stats: Literal[False] = False


class _Nonlin(Document):
    negative_slope: Finite = SLOPE


class _Keywords(Document):
    n_stages: Stages
    features_per_stage: Count | list[Count]
    conv_op: Word
    kernel_sizes: Sizes
    strides: Sizes
    n_conv_per_stage: Repeats | list[Repeats] | None = None
    n_blocks_per_stage: Repeats | list[Repeats] | None = None
    n_conv_per_stage_decoder: Repeats | list[Repeats]
    conv_bias: bool = False
    norm_op: Word | None = None
    norm_op_kwargs: _Norm | None = None
    dropout_op: Word | None = None
    dropout_op_kwargs: dict[str, Any] | None = None
    nonlin: Word | None = None
    nonlin_kwargs: _Nonlin | None = None
    nonlin_first: bool = False
    deep_supervision: bool = False
    stem_channels: Count | None = None


class _Described(Document):
    network_class_name: Word
    arch_kwargs: dict[str, Any]


class _Old(Document):
    UNet_class_name: Word
    UNet_base_num_features: Count
    unet_max_num_features: Count
    conv_kernel_sizes: list[Any]
    pool_op_kernel_sizes: list[Any]
    n_conv_per_stage_encoder: Annotated[list[Repeats], Field(min_length=2, max_length=MOST_STAGES)]
    n_conv_per_stage_decoder: list[Repeats]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A U-Net, whose encoder has the stages in order and whose decoder goes through all but the last the other way.

    features, kernels, strides  of each stage
    encoder, decoder            convolutions of each stage; in the encoder of a residual U-Net, blocks
    bias                        whether convolutions have one
    epsilon                     of the instance norms; None: there are none
    affine                      whether they have weights
    function, parameters        of each value, behind a norm
    function_first              whether it comes before the norm
    stem                        maps of the convolution before the first stage of a residual U-Net
    """

    kind: Kind
    features: tuple[int, ...]
    kernels: tuple[Vec3, ...]
    strides: tuple[Vec3, ...]
    encoder: tuple[int, ...]
    decoder: tuple[int, ...]
    bias: bool = True
    epsilon: float | None = EPSILON
    affine: bool = True
    function: Function = "leaky_relu"
    parameters: tuple[float, ...] = (SLOPE,)
    function_first: bool = False
    stem: int = 0

    @property
    def period(self) -> Vec3:
        """Return the product of all strides, of which patches are multiples."""
        return list(accumulate(self.strides, multiply))[-1]


def architecture_of(configuration: Mapping[str, Any], patch: Vec3, where: str) -> Architecture:
    """Return the architecture that a configuration of the plans describes.

    NetworkFileError, which begins with `where`, for one that is not known or cannot be.
    """
    where = f"{where}: architecture"
    described = configuration.get("architecture")
    if described is None:
        name, keywords = _modern(checked(_Old, configuration, where))
    else:
        found = checked(_Described, described, where)
        name, keywords = found.network_class_name, found.arch_kwargs
    kind: Kind
    if name.startswith(PACKAGE) and name.endswith(".PlainConvUNet"):
        kind = "PlainConvUNet"
    elif name.startswith(PACKAGE) and name.endswith(".ResidualEncoderUNet"):
        kind = "ResidualEncoderUNet"
    else:
        raise NetworkFileError(
            f"{where} is {excerpt(name, SHOWN)}, and only {' and '.join(KNOWN)} of {PACKAGE[:-1]} are known here; "
            "predict with nnU-Net itself"
        )
    if unknown := [key for key in keywords if key not in _Keywords.model_fields]:
        raise NetworkFileError(
            f"{where} has {excerpt(unknown[0], SHOWN)}, which is not known here; predict with nnU-Net itself"
        )
    made = _architecture(kind, checked(_Keywords, keywords, where), where)
    if any(n % period for n, period in zip(patch, made.period, strict=True)):
        raise NetworkFileError(
            f"{where} has strides that divide patches by {text(made.period)}, which does not divide those of "
            f"{text(patch)} voxels; plan and train again"
        )
    return made


def _modern(old: _Old) -> tuple[str, dict[str, Any]]:
    """Return the name and the keywords of an architecture that older plans describe."""
    stages = len(old.n_conv_per_stage_encoder)
    repeats = "n_conv_per_stage" if old.UNet_class_name == "PlainConvUNet" else "n_blocks_per_stage"
    doubled = accumulate([2] * (stages - 1), mul, initial=old.UNet_base_num_features)
    return f"{PACKAGE}unet.{old.UNet_class_name}", {
        "n_stages": stages,
        "features_per_stage": [min(features, old.unet_max_num_features) for features in doubled],
        "conv_op": "torch.nn.modules.conv.Conv3d",
        "kernel_sizes": old.conv_kernel_sizes,
        "strides": old.pool_op_kernel_sizes,
        repeats: old.n_conv_per_stage_encoder,
        "n_conv_per_stage_decoder": old.n_conv_per_stage_decoder,
        "conv_bias": True,
        "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
        "norm_op_kwargs": {"eps": EPSILON, "affine": True},
        "nonlin": "torch.nn.LeakyReLU",
    }


def _architecture(kind: Kind, found: _Keywords, where: str) -> Architecture:
    stages, is_plain = found.n_stages, kind == "PlainConvUNet"
    repeats = found.n_conv_per_stage if is_plain else found.n_blocks_per_stage
    other = found.n_blocks_per_stage if is_plain else found.n_conv_per_stage
    if repeats is None or other is not None or (found.stem_channels if is_plain else found.nonlin_first):
        right = "n_conv_per_stage and no stem_channels" if is_plain else "n_blocks_per_stage and no nonlin_first"
        raise NetworkFileError(f"{where}: a {kind} has {right}; copy the folder again")
    _check_class(found.conv_op, ("Conv3d",), where)
    if found.norm_op is not None:
        _check_class(found.norm_op, ("InstanceNorm3d",), where)
    norm = found.norm_op_kwargs or _Norm()
    function: Function = "none"
    parameters: tuple[float, ...] = ()
    if found.nonlin is not None:
        _check_class(found.nonlin, ("LeakyReLU", "ReLU"), where)
        function = "relu"
        if found.nonlin.endswith(".LeakyReLU"):
            function, parameters = "leaky_relu", ((found.nonlin_kwargs or _Nonlin()).negative_slope,)
    features = _of_stages(found.features_per_stage, stages, "features_per_stage", where)
    made = Architecture(
        kind,
        features,
        _edges(found.kernel_sizes, stages, "kernel_sizes", where),
        _edges(found.strides, stages, "strides", where),
        _of_stages(repeats, stages, "n_conv_per_stage" if is_plain else "n_blocks_per_stage", where),
        _of_stages(found.n_conv_per_stage_decoder, stages - 1, "n_conv_per_stage_decoder", where),
        found.conv_bias,
        norm.eps if found.norm_op is not None else None,
        norm.affine,
        function,
        parameters,
        found.nonlin_first,
        0 if is_plain else found.stem_channels or features[0],
    )
    if made.strides[0] != ONE:
        raise NetworkFileError(
            f"{where}: the first stage has stride {text(made.strides[0])}, with which the network gives fewer voxels "
            "than it reads; plan and train again"
        )
    if even := [kernel for kernel in made.kernels if any(k % 2 == 0 for k in kernel)]:
        raise NetworkFileError(f"{where} has the kernel {text(even[0])}, and only odd sizes are known; train again")
    if max(made.period) > MOST_COUNT:
        raise NetworkFileError(f"{where} has strides whose product is {text(made.period)}; plan and train again")
    return made


def _of_stages(given: Value | list[Value], stages: int, key: str, where: str) -> tuple[Value, ...]:
    """Return a value for each stage; one stands for all."""
    values = given if isinstance(given, list) else [given] * stages
    if len(values) != stages:
        raise NetworkFileError(f"{where} has {len(values)} values in {key} for {stages} stages; copy the folder again")
    return tuple(values)


def _edges(given: Sizes, stages: int, key: str, where: str) -> tuple[Vec3, ...]:
    """Return the size of each stage along each axis; one number stands for all axes."""
    values: list[Edge | Edges] = given if isinstance(given, list) else [given] * stages
    sizes: tuple[int | Vec3, ...] = _of_stages(values, stages, key, where)
    return tuple((one, one, one) if isinstance(one, int) else one for one in sizes)


def _check_class(name: str, known: tuple[str, ...], where: str) -> None:
    if not name.startswith("torch.nn.") or name.rpartition(".")[2] not in known:
        raise NetworkFileError(
            f"{where} has layers {excerpt(name, SHOWN)}, and only {' and '.join(known)} of torch.nn are known here; "
            "predict with nnU-Net itself"
        )
