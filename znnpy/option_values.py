"""The legal values of options that allow only some; `znnpy.shapes` lists the precisions of a layer.

This module loads no numpy, as the command line does not.
"""

from __future__ import annotations

from typing import Literal, get_args

Border = Literal["valid", "reflect"]
BORDERS: tuple[Border, ...] = get_args(Border)

OutputDtype = Literal["float32", "float16", "uint8"]
OUTPUT_DTYPES: tuple[OutputDtype, ...] = get_args(OutputDtype)

Meaning = Literal["sliding", "whole", "windows"]  # of a network over a volume
MEANINGS: tuple[Meaning, ...] = get_args(Meaning)

Blend = Literal["gaussian", "constant", "bump"]  # of windows
BLENDS: tuple[Blend, ...] = get_args(Blend)

WindowRule = Literal["monai", "nnunet"]  # whose windows and weights
WINDOW_RULES: tuple[WindowRule, ...] = get_args(WindowRule)

Result = Literal["maps", "softmax", "sigmoid", "labels", "above"]  # of the maps that a network gives
RESULTS: tuple[Result, ...] = get_args(Result)

Ensemble = Literal["logits", "probabilities"]  # what is averaged over its members
ENSEMBLES: tuple[Ensemble, ...] = get_args(Ensemble)

MissingChunks = Literal["fill", "error"]
MISSING_CHUNKS: tuple[MissingChunks, ...] = get_args(MissingChunks)

Cover = Literal["columns", "patches"]
COVERS: tuple[Cover, ...] = get_args(Cover)

Device = Literal["auto", "cpu", "gpu"]
DEVICES: tuple[Device, ...] = get_args(Device)

DeviceKind = Literal["cpu", "gpu"]  # device that a plan is for

OffloadMode = Literal["gpu-host", "cpu-to-gpu"]  # one GPU; the tensors of the first layers lie in host memory
OFFLOAD_MODES: tuple[OffloadMode, ...] = get_args(OffloadMode)

Mode = Literal["cpu", "gpu", "gpu-host", "cpu-to-gpu", "side-by-side"]  # mode of a plan
AskedMode = Literal["auto", "cpu", "gpu", "gpu-host", "cpu-to-gpu", "side-by-side"]
MODES: tuple[AskedMode, ...] = get_args(AskedMode)

RigorLevel = Literal["estimate", "measure", "exhaustive"]
RIGOR_LEVELS: tuple[RigorLevel, ...] = get_args(RigorLevel)
