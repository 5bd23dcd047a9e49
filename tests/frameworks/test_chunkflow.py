"""chunkflow computes its patches with znnpy."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import znnpy
import znnpy.chunkflow
from tests.support import normed_unet
from znnpy.errors import ShapeError, VolumeError
from znnpy.formats.network_writer import weights_bytes
from znnpy.formats.weights import random_weights
from znnpy.kernels.whole import whole
from znnpy.network_files import read_network
from znnpy.shapes import Vec3

PADDED: list[dict[str, Any]] = [
    {"name": "enter", "type": "conv", "kernel": 3, "out": 4, "padding": "same", "activation": "relu"},
    {"name": "leave", "type": "conv", "kernel": [1, 3, 3], "out": 2, "padding": "same", "activation": "sigmoid"},
]
UNPADDED: list[dict[str, Any]] = [
    {"name": "enter", "type": "conv", "kernel": 3, "out": 4, "activation": "relu"},
    {"name": "leave", "type": "conv", "kernel": [1, 3, 3], "out": 2, "activation": "sigmoid"},
]
SIZES: list[tuple[list[dict[str, Any]], Vec3, Vec3]] = [
    (PADDED, (8, 16, 12), (8, 16, 12)),
    (PADDED, (8, 16, 12), (6, 12, 10)),
    (UNPADDED, (8, 16, 12), (6, 12, 8)),
    (normed_unet.LAYERS, (8, 16, 12), (8, 16, 12)),
]
IDS = ["padded", "middle", "unpadded", "normed"]


def model() -> Any:
    """Return the file of the adapter as chunkflow loads it: as a module without a place in the table of modules."""
    loader = SourceFileLoader("Model", str(znnpy.chunkflow.__file__))
    module = types.ModuleType(loader.name)
    loader.exec_module(module)
    return module


def network_file(folder: Path, layers: list[dict[str, Any]]) -> Path:
    """Write a network file with weights."""
    path = folder / "net.yaml"
    path.write_text(json.dumps({"name": "net", "input_channels": 1, "weights": "net.npz", "layers": layers}))
    network = read_network(path).network
    (folder / "net.npz").write_bytes(weights_bytes(network, random_weights(network, 4)))
    return path


def definition(path: Path, patch: npt.NDArray[Any], size: Vec3) -> npt.NDArray[np.float64]:
    """Return the middle of what the network gives for a patch (channels, z, y, x), in float64."""
    net = znnpy.load_network(path)
    (found,) = whole(net.network, net.weights, patch.transpose(1, 2, 3, 0).astype(np.float64))
    spare = [(n - wanted) // 2 for n, wanted in zip(found.shape, size, strict=False)]
    z, y, x = (slice(before, before + wanted) for before, wanted in zip(spare, size, strict=True))
    return found[z, y, x].transpose(3, 0, 1, 2)


@pytest.mark.parametrize(("layers", "size", "out"), SIZES, ids=IDS)
def test_patches_are_computed_and_masked(layers: list[dict[str, Any]], size: Vec3, out: Vec3, tmp_path: Path) -> None:
    path = network_file(tmp_path, layers)
    rng = np.random.default_rng(2)
    mask = rng.random(out, np.float32)
    inferencer = model().PatchInferencer(str(path), mask)
    for count in (2, 1):
        patches = rng.random((count, 1, *size), np.float32)
        found = inferencer(patches)
        assert found.dtype == np.float32
        wanted = np.stack([definition(path, patch, out) * mask for patch in patches])
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())
    larger = rng.random((1, 1, size[0] + 2, size[1], size[2]), np.float32)
    np.testing.assert_allclose(inferencer(larger)[0], definition(path, larger[0], out) * mask, atol=1e-4)


def test_other_arrays_and_sizes_are_refused(tmp_path: Path) -> None:
    path = str(network_file(tmp_path, UNPADDED))
    patch = np.zeros((1, 1, 8, 16, 12), np.float32)
    with pytest.raises(VolumeError, match=r"and chunkflow gives \(batch, channels, z, y, x\)"):
        znnpy.chunkflow.PatchInferencer(path, np.ones((6, 12, 8)))(patch[0])
    for size in ((8, 16, 12), (5, 12, 8)):
        with pytest.raises(ShapeError, match="gives 6x12x8 voxels for a patch, of which the output patch of"):
            znnpy.chunkflow.PatchInferencer(path, np.ones(size))(patch)


def test_a_process_ends_with_an_open_session(tmp_path: Path, repository: Path) -> None:
    code = (
        "import numpy as np, znnpy.chunkflow as model\n"
        "class Mine(model.PatchInferencer):\n"
        "    options = {'threads': 2, 'calibrate': False}\n"
        f"run = Mine({str(network_file(tmp_path, PADDED))!r}, np.ones((8, 16, 12)))\n"
        "print(run(np.ones((1, 1, 8, 16, 12), np.float32)).shape)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "(1, 2, 8, 16, 12)\n"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("layers", "size", "out"), SIZES[:3], ids=IDS[:3])
def test_chunkflow_itself_blends_the_patches(
    layers: list[dict[str, Any]], size: Vec3, out: Vec3, tmp_path: Path
) -> None:
    """The chunk equals the one of a model that computes each patch by its definition."""
    pytest.importorskip("chunkflow", reason="chunkflow is not installed; `pip install chunkflow`")
    from chunkflow.chunk import Chunk
    from chunkflow.flow.divid_conquer.inferencer import Inferencer
    from chunkflow.flow.divid_conquer.patch.patch_mask import PatchMask

    path, overlap = network_file(tmp_path, layers), (2, 4, 2)
    mask = np.asarray(PatchMask(out, overlap))

    def exact(patches: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.stack([definition(path, patch, out) * mask for patch in patches]).astype(np.float32)

    chunk = Chunk(np.random.default_rng(3).integers(0, 256, (20, 40, 30), np.uint8), voxel_offset=(5, 6, 7))
    shared: dict[str, Any] = {
        "num_output_channels": 2,
        "output_patch_overlap": overlap,
        "output_patch_size": out,
        "output_crop_margin": overlap,
    }
    file = znnpy.chunkflow.__file__
    with Inferencer(file, str(path), size, framework="universal", **shared) as ours:
        found = ours(chunk)
    with Inferencer(exact, "", size, framework="prebuilt", **shared) as theirs:
        theirs.patch_inferencer.output_patch_mask_numpy = mask
        wanted = theirs(chunk)
    assert tuple(found.voxel_offset) == tuple(wanted.voxel_offset)
    assert found.array.any()
    np.testing.assert_allclose(found.array, wanted.array, atol=1e-5)
