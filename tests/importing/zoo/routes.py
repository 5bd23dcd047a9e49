"""How a network of the zoo is read by each route, and compared with its framework. This module needs PyTorch."""

from __future__ import annotations

import contextlib
import io
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.importing.zoo.nets import Net, Route
from znnpy.import_check import Run, check_model, compared, run_module
from znnpy.importing.finish import Wishes
from znnpy.importing.from_torch import imported_module
from znnpy.importing.imported import Imported
from znnpy.network_files import read_model


def made(net: Net) -> Any:
    """Return the module in evaluation mode, with random statistics in its batch norms; or the model of ONNX."""
    torch.manual_seed(1)
    module = net.make()
    if not isinstance(module, torch.nn.Module):
        return module
    for part in module.modules():
        if isinstance(part, torch.nn.BatchNorm2d | torch.nn.BatchNorm3d):
            part.running_mean.normal_(0, 0.3)
            part.running_var.uniform_(0.5, 2)
            torch.nn.init.uniform_(part.weight, 0.5, 1.5)
            torch.nn.init.normal_(part.bias, 0, 0.3)
    return module.eval()


def read(net: Net, module: Any, route: Route, folder: Path) -> Imported:
    """Return the network as a route gives it. The errors are those of the importers."""
    found = _read(net, module, route, folder, Wishes())
    return _read(net, module, route, folder, Wishes(found.words[:1])) if net.first else found


def _read(net: Net, module: Any, route: Route, folder: Path, wishes: Wishes) -> Imported:
    if route == "from_torch":
        return imported_module(module, None, wishes, "net")
    path = folder / f"net{route}"
    image = torch.zeros(1, 1, *(net.size[1:] if net.planes else net.size))
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # of PyTorch about itself
        if route == ".pt2":
            torch.export.save(torch.export.export(module, (image,)), path)
        elif isinstance(module, torch.nn.Module):
            sizes = dict.fromkeys(range(2, image.ndim), torch.export.Dim.AUTO)
            shapes = (sizes,) if net.dynamic else None
            torch.onnx.export(module, (image,), path, dynamo=True, verbose=False, dynamic_shapes=shapes)
        else:
            path.write_bytes(module.SerializeToString())
    return read_model(path, wishes)


def differences(found: Imported, module: Any, folder: Path) -> list[float]:
    """Return how far each output is from the framework's on a volume of odd size, as a part of the largest value."""
    if isinstance(module, torch.nn.Module):
        _, each = compared(found, _in_order(found, module))
    else:
        _, each = check_model(folder / "net.onnx", found)
    return [one.largest / one.scale for one in each]


def _in_order(found: Imported, module: Any) -> Run:
    """Return how PyTorch runs a module whose outputs have other names in a file."""
    numbers = replace(found, words=tuple(map(str, range(len(found.words))))).words
    return run_module(module, numbers, planar=found.planar)
