"""The widget of napari runs a network in a thread, and adds layers that lie over the image."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import znnpy
from tests.support import normed_unet
from znnpy.errors import ShapeError, VolumeError

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
napari: Any = pytest.importorskip("napari", reason="napari is not installed; `pip install 'napari[pyqt6]'`")

SCALE, TRANSLATE = (4.0, 2.0, 1.0), (40.0, 0.0, 5.0)


@pytest.fixture
def viewer() -> Any:
    """Return a viewer without a window, which would need OpenGL; the widget itself is one of Qt."""
    from napari.components import ViewerModel
    from napari.qt import get_qapp

    get_qapp()
    return ViewerModel()


def finished(worker: Any) -> None:
    """Wait until a worker has ended and the viewer heard of it."""
    from qtpy.QtWidgets import QApplication

    until = time.monotonic() + 60
    ended: list[bool] = []
    worker.finished.connect(lambda: ended.append(True))
    while not ended:
        assert time.monotonic() < until, "the worker does not end"
        QApplication.processEvents()
        time.sleep(0.01)
    QApplication.processEvents()


def run(viewer: Any, data: Any, network: Path, **arguments: Any) -> list[Any]:
    """Return the layers that the widget adds."""
    from znnpy.napari import network_widget

    image = viewer.add_image(data, name="grey", scale=SCALE, translate=TRANSLATE)
    finished(network_widget()(viewer, image, network, **arguments))
    return list(viewer.layers)[1:]


def test_maps_of_a_network_that_slides_lie_over_the_image(viewer: Any) -> None:
    from znnpy.network_files import SHIPPED

    volume = np.random.default_rng(0).integers(0, 256, (30, 33, 36), np.uint8)
    (layer,) = run(viewer, volume, SHIPPED / "fib25_boundary.yaml", ram="2G")
    assert type(layer).__name__ == "Image"
    assert layer.name == "grey maps"
    np.testing.assert_allclose(layer.data, znnpy.load_network("fib25_boundary")(volume, border="reflect")[0], atol=1e-5)
    np.testing.assert_allclose(layer.scale, SCALE)
    np.testing.assert_allclose(layer.translate, TRANSLATE)


def test_labels_of_windows_are_a_layer_of_labels(viewer: Any, tmp_path: Path) -> None:
    path = normed_unet.written(tmp_path)
    volume = np.load(tmp_path / "volume.npy")
    (layer,) = run(viewer, volume, path, window=(8, 8, 12), overlap=0.25, output="labels")
    assert type(layer).__name__ == "Labels"
    wanted = znnpy.load_network(path)(volume, window=(8, 8, 12), overlap=0.25, output="labels")
    np.testing.assert_array_equal(layer.data, wanted[0])
    maps = run(viewer, volume, path, window=(8, 8, 12), output="softmax")[-3:]
    assert [one.name for one in maps] == [f"grey [1] softmax {number}" for number in range(3)]
    np.testing.assert_allclose(sum(one.data for one in maps), 1, atol=1e-5)


def test_coarser_maps_lie_over_the_voxels_that_they_come_from(viewer: Any, tmp_path: Path) -> None:
    path = tmp_path / "net.yaml"
    layers = [{"type": "pool", "window": [1, 2, 2]}]
    path.write_text(json.dumps({"name": "net", "input_channels": 1, "meaning": "whole", "layers": layers}))
    volume = np.random.default_rng(0).integers(0, 256, (6, 8, 10), np.uint8)
    (layer,) = run(viewer, volume, path)
    np.testing.assert_array_equal(layer.data, volume.reshape(6, 4, 2, 5, 2).max(axis=(2, 4)))
    np.testing.assert_allclose(layer.scale, (4.0, 4.0, 2.0))
    np.testing.assert_allclose(layer.translate, (40.0, 1.0, 5.5))


def test_closing_the_iterator_ends_the_run(tmp_path: Path) -> None:
    from znnpy.napari import predictions

    path = normed_unet.written(tmp_path)
    shares = predictions(np.zeros((200, 200, 200), np.uint8), path, {"window": (8, 8, 12)})
    assert next(shares) == 0
    began = time.monotonic()
    shares.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < 30


def test_images_that_are_no_volumes_are_refused(viewer: Any, tmp_path: Path) -> None:
    from znnpy.napari import network_widget

    image = viewer.add_image(np.zeros((20, 20)), name="flat")
    with pytest.raises(VolumeError, match=r"layer flat has the shape \(20, 20\); choose one that is \(z, y, x\)"):
        network_widget()(viewer, image, normed_unet.written(tmp_path))


def test_errors_of_the_run_reach_the_viewer(viewer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are raised in the thread of the viewer, where napari shows what nobody catches."""
    from znnpy.napari import network_widget

    found: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, at: found.append(error))
    image = viewer.add_image(np.zeros((20, 20, 20), np.uint8))
    finished(network_widget()(viewer, image, normed_unet.written(tmp_path)))
    assert isinstance(found[0], ShapeError)
    assert "give `window`" in str(found[0])


def test_the_manifest_names_the_widget(repository: Path) -> None:
    from npe2 import PluginManifest

    manifest = PluginManifest.from_file(repository / "znnpy" / "napari.yaml")
    (widget,), (command,) = manifest.contributions.widgets, manifest.contributions.commands
    assert widget.command == command.id
    assert str(command.python_name) == "znnpy.napari:network_widget"
