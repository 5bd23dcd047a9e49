"""The networks that are tried: how each is made, and why some are refused. This module needs no PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Literal

from znnpy.shapes import Vec3

Route = Literal["from_torch", ".onnx", ".pt2"]
ROUTES: tuple[Route, ...] = ("from_torch", ".onnx", ".pt2")
HERE = "tests.importing.zoo"
DESCRIPTION = "its description"


@dataclass(frozen=True)
class Net:
    """A network of the zoo.

    name     in the table; package: on PyPI, or what it was written from
    make     makes the module, in any mode
    refused  words of the error that says why it is not computed; empty: it is equal
    size     of the volume for which it is exported
    routes   by which it is read; dynamic: the ONNX is for any size of the volume
    planes   it is over images
    first    only its first output is asked for, since the others are coarser and one array cannot hold all
    """

    name: str
    package: str
    make: Callable[[], Any]
    refused: tuple[str, ...] = ()
    size: Vec3 = (32, 48, 64)
    routes: tuple[Route, ...] = ("from_torch", ".onnx")
    dynamic: bool = False
    planes: bool = False
    first: bool = False


def _made(module: str, name: str, *arguments: Any, **options: Any) -> Any:
    """Return an object of a package, which is loaded now."""
    return getattr(import_module(module), name)(*arguments, **options)


monai = partial(_made, "monai.networks.nets")
unets, residual = partial(_made, f"{HERE}.unets"), partial(_made, f"{HERE}.residual_symmetric")
unet3d = partial(_made, "pytorch3dunet.unet3d.model")
UNETS3D = {"in_channels": 1, "out_channels": 2, "f_maps": 8, "num_levels": 3}
BASIC = ((4, 4, 8, 8, 16, 4),)
FEWER = {"filters": [4, 8, 16]}


def nnunet(name: str, norm: str, **options: Any) -> Any:
    """Return a network of nnU-Net, whose first stage is flat, as for anisotropic voxels."""
    from torch import nn

    plain = name == "PlainConvUNet"
    each = {"n_conv_per_stage" if plain else "n_blocks_per_stage": 2}
    return _made(
        "dynamic_network_architectures.architectures.unet",
        name,
        input_channels=1,
        n_stages=3,
        features_per_stage=(4, 8, 16),
        conv_op=nn.Conv3d,
        kernel_sizes=((1, 3, 3), (3, 3, 3), (3, 3, 3)),
        strides=((1, 1, 1), (1, 2, 2), (2, 2, 2)),
        num_classes=2,
        n_conv_per_stage_decoder=2 if plain else 1,
        conv_bias=True,
        norm_op=getattr(nn, norm),
        norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
        **each,
        **options,
    )


def batch_normed(net: Any) -> Any:
    """Return a network whose norms over space are batch norms, for packages that have no such option."""
    from torch import nn

    for name, part in list(net.named_modules()):
        if isinstance(part, nn.GroupNorm | nn.InstanceNorm3d):
            maps = part.num_channels if isinstance(part, nn.GroupNorm) else part.num_features
            parent, _, last = name.rpartition(".")
            setattr(net.get_submodule(parent), last, nn.BatchNorm3d(maps))
    return net


def _mednext(**options: Any) -> Any:
    blocks = {"blocks_down": (1, 1), "blocks_up": (1, 1), "encoder_expansion_ratio": 2, "decoder_expansion_ratio": 2}
    return monai(
        "MedNeXt", 3, 4, 1, 2, **{"bottleneck_expansion_ratio": 2, "blocks_bottleneck": 1, **blocks, **options}
    )


PYPI = ("monai", "dynamic-network-architectures", "pytorch3dunet")
MONAI, NNUNET, UNET3D = PYPI
BATCH = "batch"
ONLY_ONNX: tuple[Route, ...] = (".onnx",)


def _keras(name: str, *arguments: Any, **options: Any) -> Callable[[], Any]:
    return partial(_made, f"{HERE}.keras_models", name, *arguments, **options)


def _monai_nets() -> list[Net]:
    unet, dyn = (3, 1, 2, (4, 8, 16), (2, 2)), (3, 1, 2, [3, (1, 3, 3), 3], [1, (1, 2, 2), 2], [(1, 2, 2), 2])
    few: dict[str, Any] = {"blocks_down": (1, 1, 1), "blocks_up": (1, 1)}
    deep: dict[str, Any] = {"deep_supervision": True, "res_block": True, "filters": [4, 4, 8, 16]}
    deeper = (3, 1, 2, [3] * 4, [1, 2, 2, 2], [2, 2, 2])
    return [
        Net("UNet", MONAI, lambda: monai("UNet", *unet)),
        Net("UNet, batch norm", MONAI, lambda: monai("UNet", *unet, norm=BATCH), routes=ROUTES),
        Net("UNet with residual units", MONAI, lambda: monai("UNet", *unet, num_res_units=2)),
        Net(
            "UNet with residual units, batch norm",
            MONAI,
            lambda: monai("UNet", *unet, num_res_units=2, norm=BATCH),
            dynamic=True,
        ),
        Net("BasicUNet", MONAI, lambda: monai("BasicUNet", 3, 1, 2, *BASIC)),
        Net("BasicUNet, batch norm", MONAI, lambda: monai("BasicUNet", 3, 1, 2, *BASIC, norm=BATCH), dynamic=True),
        Net(
            "BasicUNet `nontrainable`, batch norm",
            MONAI,
            lambda: monai("BasicUNet", 3, 1, 2, *BASIC, norm=BATCH, upsample="nontrainable"),
            ("align_corners",),
        ),
        Net(
            "BasicUNet `pixelshuffle`, batch norm",
            MONAI,
            lambda: monai("BasicUNet", 3, 1, 2, *BASIC, norm=BATCH, upsample="pixelshuffle"),
        ),
        Net("DynUNet", MONAI, lambda: monai("DynUNet", *dyn, **FEWER)),
        Net("DynUNet, batch norm", MONAI, lambda: monai("DynUNet", *dyn, **FEWER, norm_name=BATCH)),
        Net(
            "DynUNet with residual blocks and deep supervision, batch norm",
            MONAI,
            lambda: monai("DynUNet", *deeper, **deep, norm_name=BATCH),
        ),
        Net("SegResNet", MONAI, lambda: monai("SegResNet", 3, 16, 1, 2, **few)),
        Net(
            "SegResNet, batch norm",
            MONAI,
            lambda: monai("SegResNet", 3, 4, 1, 2, **few, norm=BATCH),
            routes=ROUTES,
            dynamic=True,
        ),
        Net(
            "SegResNet `deconv`, batch norm",
            MONAI,
            lambda: monai("SegResNet", 3, 4, 1, 2, **few, norm=BATCH, upsample_mode="deconv"),
        ),
        Net(
            "SegResNetDS, batch norm",
            MONAI,
            lambda: monai("SegResNetDS", 3, 4, 1, 2, blocks_down=(1, 1, 1), norm=BATCH),
        ),
        Net("VNet", MONAI, lambda: monai("VNet", 3, 1, 2), routes=("from_torch",)),
        Net("AttentionUnet", MONAI, lambda: monai("AttentionUnet", *unet)),
        Net("AttentionUnet, batch norm", MONAI, lambda: batch_normed(monai("AttentionUnet", *unet))),
        Net("MedNeXt", MONAI, _mednext),
        Net("MedNeXt, batch norm", MONAI, lambda: batch_normed(_mednext()), dynamic=True),
        Net(
            "MedNeXt of kernel 5 with deep supervision, batch norm",
            MONAI,
            lambda: batch_normed(_mednext(kernel_size=5, deep_supervision=True)),
        ),
    ]


def _other_packages() -> list[Net]:
    bcr: dict[str, Any] = {**UNETS3D, "layer_order": "bcr"}
    return [
        Net("PlainConvUNet (nnU-Net)", NNUNET, lambda: nnunet("PlainConvUNet", "InstanceNorm3d")),
        Net(
            "PlainConvUNet (nnU-Net), batch norm", NNUNET, lambda: nnunet("PlainConvUNet", "BatchNorm3d"), routes=ROUTES
        ),
        Net(
            "PlainConvUNet (nnU-Net) with deep supervision, batch norm",
            NNUNET,
            lambda: nnunet("PlainConvUNet", "BatchNorm3d", deep_supervision=True),
            first=True,
        ),
        Net("ResidualEncoderUNet (nnU-Net)", NNUNET, lambda: nnunet("ResidualEncoderUNet", "InstanceNorm3d")),
        Net(
            "ResidualEncoderUNet (nnU-Net), batch norm",
            NNUNET,
            lambda: nnunet("ResidualEncoderUNet", "BatchNorm3d"),
        ),
        Net("UNet3D", UNET3D, lambda: unet3d("UNet3D", **UNETS3D)),
        Net("UNet3D, batch norm", UNET3D, lambda: unet3d("UNet3D", **bcr), routes=ROUTES, dynamic=True),
        Net("UNet3D `trilinear`, batch norm", UNET3D, lambda: unet3d("UNet3D", **bcr, upsample="trilinear")),
        Net("UNet3D `deconv`, batch norm", UNET3D, lambda: unet3d("UNet3D", **bcr, upsample="deconv")),
        Net("ResidualUNet3D", UNET3D, lambda: unet3d("ResidualUNet3D", **UNETS3D)),
        Net("ResidualUNet3D, batch norm", UNET3D, lambda: unet3d("ResidualUNet3D", **bcr)),
        Net("ResidualUNetSE3D, batch norm", UNET3D, lambda: unet3d("ResidualUNetSE3D", **bcr)),
    ]


def _written() -> list[Net]:
    flat = ((1, 2, 2), (1, 3, 3))
    mixed = ((1, 2, 2), (2, 2, 2))
    funlib = "funlib.learn.torch"
    emvision, connectomics = "DeepEM, emvision", "PyTorch Connectomics"
    return [
        Net("U-Net", funlib, lambda: unets("FunlibUNet"), size=(52, 52, 56)),
        Net(
            "U-Net, repeating, anisotropic, two heads",
            funlib,
            lambda: unets("FunlibUNet", factors=flat, kernels=((1, 3, 3), (3, 3, 3)), constant=True, heads=(3, 10)),
            size=(20, 60, 66),
            routes=ROUTES,
        ),
        Net("residual symmetric U-Net", emvision, lambda: residual("RSUNet"), routes=ROUTES, dynamic=True),
        Net(
            "residual symmetric U-Net, repeating, ELU",
            emvision,
            lambda: residual("RSUNet", function="elu", nearest=True, factors=mixed),
        ),
        Net("residual symmetric U-Net, group norm", emvision, lambda: residual("RSUNet", "group")),
        Net(
            "residual symmetric U-Net, flat finest level, reflected",
            connectomics,
            lambda: residual("RSUNet", function="prelu", flat=1, mode="reflect"),
        ),
        Net(
            "residual symmetric U-Net, instance norm",
            connectomics,
            lambda: residual("RSUNet", "instance", "leaky"),
        ),
        Net("residual symmetric U-Net, trilinear", "Superhuman", lambda: residual("Superhuman")),
        Net("3D denoiser", "topaz", lambda: unets("TopazDenoiser"), dynamic=True),
        Net("UNet3d", "torch-em", lambda: unets("TorchEmUNet")),
        Net("UNet3d without norm", "torch-em", lambda: unets("TorchEmUNet", None)),
        Net("AnisotropicUNet, batch norm", "torch-em", lambda: unets("TorchEmUNet", BATCH, mixed), dynamic=True),
        Net("chain with dilation", "torch.nn", lambda: unets("dilated"), routes=ROUTES),
        Net("network over images", "torch.nn", lambda: unets("over_images"), routes=ROUTES, planes=True, dynamic=True),
    ]


def _of_tensorflow() -> list[Net]:
    fixed: Vec3 = (12, 16, 20)
    return [
        Net("StarDist3D", "StarDist", _keras("stardist"), routes=ONLY_ONNX),
        Net("StarDist3D for one size", "StarDist", _keras("stardist", (16, 16, 24)), routes=ONLY_ONNX),
        Net("CARE", "CSBDeep", _keras("care"), routes=ONLY_ONNX),
        Net("CARE, probabilistic", "CSBDeep", _keras("care", probabilistic=True), routes=ONLY_ONNX),
        Net("CARE for one size", "CSBDeep", _keras("care", fixed), routes=ONLY_ONNX),
        Net("N2V, batch norm", "N2V", _keras("care", normed=True), routes=ONLY_ONNX),
        Net("IsoNet", "IsoNet", _keras("isonet"), routes=ONLY_ONNX),
    ]


NETS: tuple[Net, ...] = (*_monai_nets(), *_other_packages(), *_written(), *_of_tensorflow())
