"""The graph networks that benchmarks run: their files for znnpy, and the same networks in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness.inputs import GREY, SEED, Vec3

Entry = dict[str, Any]  # a layer of a network file


@dataclass(frozen=True)
class GraphNet:
    """A network for a benchmark.

    size    voxels of the volume that it runs over
    reach   input voxels beyond an output voxel that it depends on, along each axis, for tiles with a halo
    period  voxels by which tiles with a halo are aligned
    """

    name: str
    entries: tuple[Entry, ...]
    size: Vec3
    reach: Vec3
    period: Vec3

    @property
    def flops(self) -> float:
        """Multiplications and additions of all convolutions for an input voxel."""
        maps, voxels, total = {"input": 1}, {"input": 1.0}, 0.0
        before = "input"
        for entry in self.entries:
            name, kind = entry["name"], entry["type"]
            sources = entry.get("from", [before])
            fin, share = sum(maps[one] for one in sources), voxels[sources[0]]
            maps[name] = entry["out"] if kind == "conv" else fin if kind == "concat" else maps[sources[0]]
            window: tuple[int, ...] = entry.get("window") or entry.get("factor", (1, 1, 1))
            scale = prod(window)
            voxels[name] = share / scale if kind == "pool" else share * scale
            if kind == "conv":
                total += 2.0 * share * fin * entry["out"] * prod(entry["kernel"])
            before = name
        return total


def plain(widths: tuple[int, ...] = (32, 64, 128, 256)) -> GraphNet:
    """Return a U-Net of two 3^3 convolutions a level, with max-pooling, nearest upsampling and concatenation."""
    entries: list[Entry] = []

    def block(name: str, maps: int) -> None:
        entries.extend(_conv(f"{name}_conv{number}", maps, (3, 3, 3), "relu") for number in (1, 2))

    for level, maps in enumerate(widths):
        if level:
            entries.append({"name": f"pool{level}", "type": "pool", "window": (2, 2, 2)})
        block(f"down{level}", maps)
    for level in reversed(range(len(widths) - 1)):
        entries.append({"name": f"up{level}", "type": "upsample", "factor": (2, 2, 2)})
        entries.append({"name": f"concat{level}", "type": "concat", "from": [f"down{level}_conv2", f"up{level}"]})
        block(f"merge{level}", widths[level])
    entries.append(_conv("output", 1, (1, 1, 1), "sigmoid"))
    period = 2 ** (len(widths) - 1)
    return GraphNet("plain_unet", tuple(entries), (512, 512, 512), (48, 48, 48), (period,) * 3)


def residual(widths: tuple[int, ...] = (16, 32, 64, 128)) -> GraphNet:
    """Return a residual U-Net for anisotropic volumes.

    Kernels are 1x3x3 at the finest level and 3x3x3 below, the first step down is 1x2x2, skips are sums, and each
    convolution is followed by a batch norm and ELU.
    """
    entries: list[Entry] = []

    def block(name: str, maps: int, kernel: Vec3) -> str:
        """Add a block: a convolution, and a residual of two."""
        for part in ("in", "mid"):
            _normed(entries, f"{name}_{part}", maps, kernel, "elu")
        _normed(entries, f"{name}_out", maps, kernel, None)
        entries.append({"name": f"{name}_sum", "type": "add", "from": [f"{name}_out_norm", f"{name}_in_elu"]})
        entries.append({"name": name, "type": "activation", "function": "elu"})
        return name

    steps = [(1, 2, 2), *[(2, 2, 2)] * (len(widths) - 2)]
    for level, maps in enumerate(widths):
        if level:
            entries.append({"name": f"pool{level}", "type": "pool", "window": steps[level - 1]})
        block(f"down{level}", maps, (3, 3, 3) if level else (1, 3, 3))
    for level in reversed(range(len(widths) - 1)):
        entries.append({"name": f"up{level}", "type": "upsample", "factor": steps[level]})
        entries.append(_conv(f"narrow{level}", widths[level], (1, 1, 1), "none"))
        entries.append({"name": f"skip{level}", "type": "add", "from": [f"narrow{level}", f"down{level}"]})
        block(f"merge{level}", widths[level], (3, 3, 3) if level else (1, 3, 3))
    entries.append(_conv("output", 1, (1, 1, 1), "sigmoid"))
    z = prod(step[0] for step in steps)
    yx = prod(step[1] for step in steps)
    return GraphNet("residual_unet", tuple(entries), (128, 1024, 1024), (52, 104, 104), (z, yx, yx))


def _conv(name: str, maps: int, kernel: Vec3, activation: str) -> Entry:
    return {
        "name": name, "type": "conv", "kernel": kernel, "out": maps, "padding": "same", "activation": activation
    }  # fmt: skip


def _normed(entries: list[Entry], name: str, maps: int, kernel: Vec3, function: str | None) -> None:
    """Add a convolution with its batch norm and function."""
    entries.append(_conv(name, maps, kernel, "none"))
    entries.append({"name": f"{name}_norm", "type": "batch_norm"})
    if function is not None:
        entries.append({"name": f"{name}_{function}", "type": "activation", "function": function})


NETS: Mapping[str, GraphNet] = {net.name: net for net in (plain(), residual())}


def graph_file(folder: Path, net: GraphNet) -> Path:
    """Write a network with random weights as NAME.yaml and NAME.npz, and return the first."""
    path = folder / f"{net.name}.yaml"
    np.savez(folder / f"{net.name}.npz", **weights_of(net))  # type: ignore[arg-type]  # numpy's stub
    lines = [f"name: {net.name}", "input_channels: 1", f"normalise: {{mean: {GREY[0]}, std: {GREY[1]}}}"]
    lines += [f"weights: {net.name}.npz", "layers:"]
    for entry in net.entries:
        fields = [f"{key}: {list(value) if isinstance(value, tuple) else value}" for key, value in entry.items()]
        lines.append(f"  - {{{', '.join(fields)}}}".replace("'", ""))
    path.write_text("\n".join(lines) + "\n")
    return path


def weights_of(net: GraphNet) -> dict[str, npt.NDArray[np.float32]]:
    """Return random weights with which values neither grow nor shrink much."""
    rng, maps, before = np.random.default_rng(SEED), {"input": 1}, "input"
    found: dict[str, npt.NDArray[np.float32]] = {}
    for entry in net.entries:
        name, kind = entry["name"], entry["type"]
        fin = (
            sum(maps[one] for one in entry.get("from", [before]))
            if kind == "concat"
            else maps[entry.get("from", [before])[0]]
        )
        maps[name] = entry["out"] if kind == "conv" else fin
        if kind == "conv":
            spread = np.float32(np.sqrt(2 / (fin * prod(entry["kernel"]))))
            kernels, maps_out = (entry["out"], fin, *entry["kernel"]), (entry["out"],)
            found[f"{name}.weight"] = spread * rng.standard_normal(kernels, np.float32)
            found[f"{name}.bias"] = np.float32(0.1) * rng.standard_normal(maps_out, np.float32)
        elif kind == "batch_norm":
            found[f"{name}.weight"] = rng.uniform(0.5, 1.0, fin).astype(np.float32)
            found[f"{name}.bias"] = np.float32(0.1) * rng.standard_normal(fin, np.float32)
            found[f"{name}.running_mean"] = np.float32(0.1) * rng.standard_normal(fin, np.float32)
            found[f"{name}.running_var"] = rng.uniform(0.5, 1.5, fin).astype(np.float32)
        before = name
    return found


class TorchGraph:
    """A network in PyTorch, channels last, with batch norms folded as PyTorch's own tools do.

    where  "cpu" or "cuda"
    """

    def __init__(self, net: GraphNet, precision: str, where: str = "cpu") -> None:
        import torch

        dtypes = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        self._net, self._dtype, self._where = net, dtypes[precision], where
        arrays = weights_of(net)
        self._weights: dict[str, tuple[Any, Any]] = {}
        self._folded: set[str] = set()
        for entry, following in zip(net.entries, (*net.entries[1:], {"type": "", "name": ""}), strict=True):
            if entry["type"] != "conv":
                continue
            weight, bias = arrays[f"{entry['name']}.weight"], arrays[f"{entry['name']}.bias"]
            if following["type"] == "batch_norm":
                norm = following["name"]
                scale = arrays[f"{norm}.weight"] / np.sqrt(arrays[f"{norm}.running_var"] + np.float32(1e-5))
                weight = weight * scale[:, None, None, None, None]
                bias = (bias - arrays[f"{norm}.running_mean"]) * scale + arrays[f"{norm}.bias"]
                self._folded.add(norm)
            tensor = torch.from_numpy(np.ascontiguousarray(weight)).to(where, self._dtype)
            tensor = tensor.contiguous(memory_format=torch.channels_last_3d)
            self._weights[entry["name"]] = tensor, torch.from_numpy(np.ascontiguousarray(bias)).to(where, self._dtype)

    def __call__(self, raw: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Return the output (1, z, y, x) for grey values (z, y, x)."""
        import torch

        with torch.inference_mode():
            x = (torch.from_numpy(np.ascontiguousarray(raw)).to(self._where).float() - GREY[0]) / GREY[1]
            x = self.compute(x[None, None].to(self._dtype).contiguous(memory_format=torch.channels_last_3d))
            return np.asarray(x[0].float().cpu().contiguous().numpy())

    def compute(self, x: Any) -> Any:
        """Return the output (1, 1, z, y, x) of a tensor (1, 1, z, y, x), where the network is."""
        import torch
        from torch.nn import functional

        tensors: dict[str, Any] = {"input": x}
        last_read = self._last_reads()
        for number, entry in enumerate(self._net.entries):
            inputs = [tensors[name] for name in self._sources(number)]
            x = inputs[0]
            match entry["type"]:
                case "conv":
                    padding = tuple(size // 2 for size in entry["kernel"])
                    x = functional.conv3d(x, *self._weights[entry["name"]], padding=padding)
                    x = _activated(x, entry["activation"])
                case "activation":
                    x = _activated(x, entry["function"])
                case "pool":
                    x = functional.max_pool3d(x, entry["window"])
                case "upsample":
                    x = functional.interpolate(x, scale_factor=entry["factor"], mode="nearest")
                case "concat":
                    x = torch.cat(inputs, 1)
                case "add":
                    x = inputs[0] + inputs[1]
            tensors[entry["name"]] = x
            for name in [name for name, last in last_read.items() if last == number]:
                del tensors[name]
        return x

    def _sources(self, number: int) -> list[str]:
        entry = self._net.entries[number]
        before = self._net.entries[number - 1]["name"] if number else "input"
        sources: list[str] = entry.get("from", [before])
        return sources

    def _last_reads(self) -> dict[str, int]:
        return {name: number for number in range(len(self._net.entries)) for name in self._sources(number)}


def _activated(x: Any, function: str) -> Any:
    import torch
    from torch.nn import functional

    match function:
        case "relu":
            return torch.relu_(x)
        case "elu":
            return functional.elu_(x)
        case "sigmoid":
            return torch.sigmoid(x)
        case _:
            return x
