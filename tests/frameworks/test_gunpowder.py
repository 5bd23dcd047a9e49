"""The node of gunpowder gives each request the voxels that the network gives there, and says where they lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import znnpy
from tests.support import normed_unet
from znnpy.errors import ShapeError
from znnpy.formats.network_writer import weights_bytes
from znnpy.formats.weights import random_weights
from znnpy.network_files import read_network
from znnpy.shapes import Vec3

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
gp: Any = pytest.importorskip("gunpowder", reason="gunpowder is not installed; `pip install 'gunpowder>=1.4'`")

VOXEL, BEGIN, SIZE = (40, 8, 4), (80, -16, 12), (24, 30, 26)
CHAIN: list[dict[str, Any]] = [
    {"name": "enter", "type": "conv", "kernel": [2, 3, 3], "out": 4, "activation": "relu"},
    {"name": "pool", "type": "pool", "window": [1, 2, 2]},
    {"name": "leave", "type": "conv", "kernel": [1, 3, 3], "out": 2},
]
HEADS: list[dict[str, Any]] = [
    {"name": "enter", "type": "conv", "kernel": 3, "out": 4, "padding": "same", "activation": "relu"},
    {"name": "first", "type": "conv", "kernel": 1, "out": 2},
    {"name": "second", "type": "conv", "kernel": 1, "out": 3, "from": "enter"},
]
COARSE: list[dict[str, Any]] = [
    {"name": "enter", "type": "conv", "kernel": 3, "out": 4, "padding": "same", "activation": "relu"},
    {"name": "pool", "type": "pool", "window": [1, 2, 2]},
    {"name": "leave", "type": "conv", "kernel": 1, "out": 2},
]


def trained(folder: Path, layers: list[dict[str, Any]], **entries: Any) -> znnpy.TrainedNetwork:
    path = folder / "net.yaml"
    path.write_text(json.dumps({"name": "net", "input_channels": 1, "weights": "n.npz", "layers": layers, **entries}))
    network = read_network(path).network
    (folder / "n.npz").write_bytes(weights_bytes(network, random_weights(network, 4)))
    return znnpy.load_network(path)


def volume() -> npt.NDArray[np.float32]:
    return np.random.default_rng(7).standard_normal(SIZE, np.float32)


def source(key: Any, voxel: Vec3 = VOXEL) -> Any:
    """Return a node that provides the volume."""

    class Volume(gp.BatchProvider):  # type: ignore[misc]
        def setup(self) -> None:
            roi = gp.Roi(BEGIN, gp.Coordinate(SIZE) * gp.Coordinate(voxel))
            self.provides(key, gp.ArraySpec(roi=roi, voxel_size=voxel, dtype=np.float32, interpolatable=True))

        def provide(self, request: Any) -> Any:
            batch = gp.Batch()
            spec = self.spec[key].copy()
            batch.arrays[key] = gp.Array(volume(), spec).crop(request[key].roi)
            return batch

    return Volume()


def requested(pipeline: Any, **parts: tuple[Any, Any]) -> Any:
    request = gp.BatchRequest()
    for key, roi in parts.values():
        request[key] = gp.ArraySpec(roi=roi)
    with gp.build(pipeline):
        return pipeline.request_batch(request)


def world(lo: Vec3, size: Vec3, voxel: Vec3 = VOXEL) -> Any:
    """Return the region of some voxels of the volume."""
    unit = gp.Coordinate(voxel)
    return gp.Roi(gp.Coordinate(BEGIN) + unit * gp.Coordinate(lo), unit * gp.Coordinate(size))


@pytest.mark.parametrize("subprocess", [False, True])
def test_a_network_that_slides_gives_the_voxels_of_the_whole(tmp_path: Path, subprocess: bool) -> None:
    from znnpy.gunpowder import Predict

    net = trained(tmp_path, CHAIN)
    wanted = net(volume(), threads=1, calibrate=False)
    grey, out = gp.ArrayKey("GREY"), gp.ArrayKey("OUT")
    node = Predict(net, grey, {0: out}, spawn_subprocess=subprocess, threads=1, calibrate=False)
    fov = net.network.field_of_view
    before = (0, (fov[1] - 1) // 2, (fov[2] - 1) // 2)
    inner = world(before, wanted.shape[1:])
    step = gp.BatchRequest()
    step[out] = gp.ArraySpec(roi=gp.Roi((0, 0, 0), gp.Coordinate(VOXEL) * gp.Coordinate((7, 5, 6))))
    pipeline = source(grey) + node + gp.Scan(step)
    request = gp.BatchRequest()
    request[out] = gp.ArraySpec(roi=inner)
    with gp.build(pipeline):
        assert pipeline.spec[out].roi == inner
        assert tuple(pipeline.spec[out].voxel_size) == VOXEL
        found = pipeline.request_batch(request)
        again = pipeline.request_batch(request)
    assert found[out].spec.roi == inner
    assert found[out].spec.dtype == np.float32
    np.testing.assert_allclose(found[out].data, wanted, atol=1e-5 * np.abs(wanted).max())
    np.testing.assert_array_equal(again[out].data, found[out].data)


def test_outputs_are_chosen_by_name_and_batches_are_computed(tmp_path: Path) -> None:
    from znnpy.gunpowder import Predict

    net = trained(tmp_path, HEADS, output=["first", "second"])
    grey, one, two = gp.ArrayKey("GREY"), gp.ArrayKey("ONE"), gp.ArrayKey("TWO")
    roi = world((3, 4, 5), (8, 10, 12))
    node = Predict(str(tmp_path / "net.yaml"), grey, {"second": two, 0: one}, threads=1, calibrate=False)
    batch = requested(source(grey) + gp.Unsqueeze([grey]) + gp.Stack(2) + node, a=(one, roi), b=(two, roi))
    maps = net(volume()[3:11, 4:14, 5:17], threads=1, calibrate=False)
    assert batch[one].data.shape == (2, 2, 8, 10, 12)
    np.testing.assert_allclose(batch[one].data[1], maps[:2], atol=1e-5)
    np.testing.assert_allclose(batch[two].data[0], maps[2:], atol=1e-5)


def test_context_surrounds_what_is_requested(tmp_path: Path) -> None:
    from znnpy.gunpowder import Predict

    net = trained(tmp_path, HEADS[:2])
    grey, out = gp.ArrayKey("GREY"), gp.ArrayKey("OUT")
    node = Predict(net, grey, {0: out}, context=(1, 1, 1), threads=1, calibrate=False)
    pipeline = source(grey) + node
    batch = requested(pipeline, a=(out, world((3, 4, 5), (8, 10, 12))), b=(grey, world((3, 4, 5), (2, 2, 2))))
    wanted = net(volume(), threads=1, calibrate=False)[:, 3:11, 4:14, 5:17]
    np.testing.assert_allclose(batch[out].data, wanted, atol=1e-5 * np.abs(wanted).max())
    np.testing.assert_array_equal(batch[grey].data, volume()[3:5, 4:6, 5:7])


def test_coarser_outputs_have_larger_voxels(tmp_path: Path) -> None:
    from znnpy.gunpowder import Predict

    net = trained(tmp_path, COARSE, meaning="whole")
    grey, out = gp.ArrayKey("GREY"), gp.ArrayKey("OUT")
    node = Predict(net, grey, {0: out}, threads=1, calibrate=False)
    roi = gp.Roi(gp.Coordinate(BEGIN) + gp.Coordinate(40, 16 * 2, 8 * 2 - 4), (40 * 5, 16 * 4, 8 * 6))
    with gp.build(source(grey) + node) as pipeline:
        assert tuple(pipeline.spec[out].voxel_size) == (40, 16, 8)
        roi = roi.snap_to_grid(pipeline.spec[out].voxel_size)
        request = gp.BatchRequest()
        request[out] = gp.ArraySpec(roi=roi)
        batch = pipeline.request_batch(request)
    lo = (roi.begin - gp.Coordinate(BEGIN)) / gp.Coordinate(VOXEL)
    n = roi.shape / gp.Coordinate(VOXEL)
    part = volume()[tuple(slice(a, a + m) for a, m in zip(lo, n, strict=True))]
    wanted = net(part, threads=1, calibrate=False)
    assert batch[out].data.shape == wanted.shape
    np.testing.assert_allclose(batch[out].data, wanted, atol=1e-5 * np.abs(wanted).max())


def test_networks_in_windows(tmp_path: Path) -> None:
    from znnpy.gunpowder import Predict

    net = znnpy.load_network(normed_unet.written(tmp_path))
    grey, out = gp.ArrayKey("GREY"), gp.ArrayKey("OUT")
    given: dict[str, Any] = {"window": (8, 8, 12), "output": "labels", "threads": 1, "calibrate": False}
    batch = requested(source(grey) + Predict(net, grey, {0: out}, **given), a=(out, world((0, 0, 0), SIZE)))
    assert batch[out].spec.dtype == np.uint8
    np.testing.assert_array_equal(batch[out].data, net(volume(), **given))


def test_what_cannot_be_computed_is_refused(tmp_path: Path) -> None:
    from znnpy.gunpowder import Predict

    net = trained(tmp_path, HEADS, output=["first", "second"])
    grey, out = gp.ArrayKey("GREY"), gp.ArrayKey("OUT")
    for which in (2, "third"):
        with pytest.raises(ValueError, match=r"has no output .*; it has 0 to 1, which are first, second"):
            Predict(net, grey, {which: out})
    coarse = trained(tmp_path, [*COARSE[:1], {"name": "up", "type": "upsample", "factor": 2}])
    node = Predict(coarse, grey, {0: out})
    with pytest.raises(gp.pipeline.PipelineSetupError) as caught, gp.build(source(grey, (40, 8, 5)) + node):
        raise AssertionError("it was built")
    assert isinstance(caught.value.__cause__, ShapeError)
    assert "are 20 x 4 x 5/2 units of the world, and gunpowder has whole ones" in str(caught.value.__cause__)
