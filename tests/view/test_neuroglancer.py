"""The viewer gets every array at its place, with the size of its voxels and the right shader, and reads it in boxes."""

from __future__ import annotations

import gc
import io
import json
import socket
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.viewed_files import RESOLUTION, grey, written
from znnpy.errors import MissingExtraError, OutputError
from znnpy.inference import infer
from znnpy.view import neuroglancer as viewers
from znnpy.view.neuroglancer import GREY, PROBABILITY, served, shader
from znnpy.view.scene import Layer, Scene, opened_scene
from znnpy.view.voxels import ShownVoxels

pytest.importorskip("neuroglancer", reason="the viewer is not installed")

from neuroglancer.downsample import downsample_with_averaging

NUMBER = r"[0-9a-f]{40}"


@contextmanager
def viewed(*paths: Path) -> Iterator[tuple[dict[str, Any], Any, Scene]]:
    """Serve a prediction, a volume and labels; yield the state of the viewer, and the viewer."""
    prediction, *rest = map(str, paths)
    with opened_scene(prediction, rest[0] if rest else None, rest[1:]) as scene, served(scene) as viewer:
        yield viewer.state.to_json(), viewer, scene


def source_of(state: dict[str, Any], layer: int) -> dict[str, Any]:
    source = state["layers"][layer]["source"]
    found: dict[str, Any] = source[0] if isinstance(source, list) else source
    return found


def got(viewer: Any, path: str) -> bytes:
    """Return what the server of a viewer gives."""
    base = "/".join(viewer.get_viewer_url().split("/")[:3])
    with urllib.request.urlopen(f"{base}/{path}") as answer:
        content: bytes = answer.read()
        return content


def box_of(viewer: Any, source: dict[str, Any], scale: str, lo: str, hi: str) -> npt.NDArray[Any]:
    """Return a box of an array as the page gets it."""
    token = source["url"].removeprefix("python://volume/")
    found: npt.NDArray[Any] = np.load(
        io.BytesIO(zlib.decompress(got(viewer, f"neuroglancer/npz/{token}/{scale}/{lo}/{hi}")))
    )
    return found


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Return a prediction, its volume, and labels, of voxels of 40x8x8 nm."""
    return (
        written(
            tmp_path / "p.h5", np.linspace(0, 1, 480, dtype="f4").reshape(6, 8, 10), RESOLUTION, (520.0, 112.0, 56.0)
        ),
        written(tmp_path / "v.h5", grey(), RESOLUTION, (400.0, 80.0, 16.0)),
        written(tmp_path / "l.h5", np.arange(20 * 24 * 28, dtype=np.int64).reshape(20, 24, 28)),
    )


def test_viewer_listens_on_this_machine_alone(files: tuple[Path, ...]) -> None:
    with viewed(*files) as (_, viewer, _):
        assert viewer.get_viewer_url().startswith("http://127.0.0.1:")
        port = int(viewer.get_viewer_url().split("/")[2].rpartition(":")[2])
        others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), port, socket.AF_INET)}
        for address in others - {"127.0.0.1"}:
            with socket.socket() as connection:
                connection.settimeout(1)
                assert connection.connect_ex((address, port)) != 0
        assert b"<!doctype html>" in got(viewer, f"v/{viewer.token}/")[:200]
    with socket.socket() as connection:
        assert connection.connect_ex(("127.0.0.1", port)) != 0


def test_page_and_its_scripts_come_from_this_machine(files: tuple[Path, ...]) -> None:
    with viewed(*files) as (_, viewer, _):
        page = got(viewer, f"v/{viewer.token}/").decode()
    assert "http://" not in page
    assert "https://" not in page


def test_state_holds_scale_place_and_kind_of_every_layer(files: tuple[Path, ...]) -> None:
    with viewed(*files) as (state, _, scene):
        pass
    assert {axis: [pytest.approx(size), unit] for axis, (size, unit) in state["dimensions"].items()} == {
        "x": [8e-9, "m"],
        "y": [8e-9, "m"],
        "z": [40e-9, "m"],
    }
    assert [layer["name"] for layer in state["layers"]] == ["volume", "prediction", "l.h5"]
    assert [layer["type"] for layer in state["layers"]] == ["image", "image", "segmentation"]
    matrices = [source_of(state, layer)["transform"]["matrix"] for layer in range(3)]
    assert [[row[3] for row in matrix] for matrix in matrices] == [[0, 0, 0], [3, 4, 5], [0, 0, 0]]
    assert [np.array(matrix)[:, :3].tolist() for matrix in matrices] == [np.eye(3).tolist()] * 3
    below, above, _ = state["layers"]
    assert (below["shader"], above["shader"]) == (GREY, PROBABILITY)
    assert below["shaderControls"]["normalized"]["range"] == list(scene.layers[0].contrast)
    assert above["shaderControls"]["normalized"]["range"] == [0.0, 1.0]
    assert below["opacity"] == 1.0
    assert source_of(state, 2)["subsources"] == {"mesh": False}


def test_one_looks_at_the_middle_of_the_prediction(files: tuple[Path, ...]) -> None:
    """The prediction lies from 3, 4, 5 to 9, 12, 15 in the volume; its longest side is 240 nm, 30 voxels of 8 nm."""
    with viewed(*files) as (state, _, _):
        pass
    assert state["position"] == [10.5, 8.5, 6.5]
    assert state["crossSectionScale"] == pytest.approx(30 / viewers.PANEL)


def test_without_a_size_a_voxel_is_one(tmp_path: Path) -> None:
    with viewed(written(tmp_path / "p.h5", grey())) as (state, _, _):
        pass
    assert state["dimensions"] == {"x": [1.0, ""], "y": [1.0, ""], "z": [1.0, ""]}


def test_voxels_of_another_size_are_scaled(tmp_path: Path) -> None:
    """Voxels twice as large, with centres that lie between those of the volume, begin where the volume begins."""
    below = written(tmp_path / "v.h5", grey(), (8.0, 8.0, 8.0))
    above = written(tmp_path / "p.h5", np.zeros((4, 4, 4), np.float32), (16.0, 16.0, 16.0), (4.0, 4.0, 4.0))
    with viewed(above, below) as (state, viewer, _):
        source = source_of(state, 1)
        token = source["url"].removeprefix("python://volume/")
        info = json.loads(got(viewer, f"neuroglancer/info/{token}"))
    assert source["transform"]["matrix"] == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]
    assert info["coordinateSpace"] == {axis: [pytest.approx(16e-9), "m"] for axis in "zyx"}
    assert source["transform"]["outputDimensions"] == {axis: [pytest.approx(8e-9), "m"] for axis in "zyx"}


def test_voxels_are_read_from_the_file_as_the_page_asks(files: tuple[Path, ...]) -> None:
    with viewed(*files) as (state, viewer, scene):
        shown = box_of(viewer, source_of(state, 0), "1,1,1", "1,2,3", "5,9,20")
        np.testing.assert_array_equal(shown, grey()[1:5, 2:9, 3:20])
        labels = box_of(viewer, source_of(state, 2), "1,1,1", "0,0,0", "1,1,4")
        assert labels.dtype == np.uint64
        assert labels.ravel().tolist() == [0, 1, 2, 3]
        coarse = box_of(viewer, source_of(state, 0), "2,2,2", "0,0,0", "10,12,14")
        assert coarse.shape == (10, 12, 14)
        assert all(layer.volume.files for layer in scene.layers)


@pytest.mark.parametrize(
    ("dtype", "shown"),
    [("f2", "float32"), ("f8", "float32"), ("i8", "float32"), ("u1", "uint8"), (">u2", "uint16"), ("i4", "int32")],
)
def test_types_that_browsers_lack_are_turned_into_others(tmp_path: Path, dtype: str, shown: str) -> None:
    below = written(tmp_path / "v.h5", np.full((4, 4, 4), 7, dtype))
    with viewed(written(tmp_path / "p.h5", np.zeros((4, 4, 4), "f4")), below) as (state, viewer, _):
        source = source_of(state, 0)
        info = json.loads(got(viewer, f"neuroglancer/info/{source['url'].removeprefix('python://volume/')}"))
        voxels = box_of(viewer, source, "1,1,1", "0,0,0", "4,4,4")
    assert info["dataType"] == voxels.dtype.name == shown
    assert (voxels == 7).all()


@pytest.mark.parametrize(("channels", "axis"), [(2, "c^"), (3, "c^"), (5, "c'")])
def test_channels_are_colours_or_are_chosen(tmp_path: Path, channels: int, axis: str) -> None:
    maps = np.arange(channels, dtype=np.float32).repeat(64).reshape(channels, 4, 4, 4)
    with viewed(written(tmp_path / "p.h5", maps, RESOLUTION)) as (state, viewer, scene):
        source = source_of(state, 0)
        shown = box_of(viewer, source, "1,1,1,1", "0,0,0,0", f"{channels},1,1,1")
        code = shader(scene.layers[0])
    assert shown.ravel().tolist() == list(range(channels))
    assert list(source["transform"]["outputDimensions"]) == [axis, "z", "y", "x"]
    assert code.count("#uicontrol invlerp") == (channels if channels <= 3 else 1)
    controls = state["layers"][0]["shaderControls"]
    assert set(controls) == (
        {"red", "green", "blue"} if channels == 3 else {"red", "green"} if channels == 2 else {"normalized"}
    )


def test_a_part_that_cannot_be_read_is_told(files: tuple[Path, ...], caplog: pytest.LogCaptureFixture) -> None:
    from znnpy.errors import VolumeError

    with viewed(*files) as (state, viewer, scene):

        def read(box: object, out: object) -> None:
            raise VolumeError("the disk is gone; look for it")

        scene.layers[0].volume.read = read  # type: ignore[method-assign]
        for _ in range(2):
            with pytest.raises(HTTPError, match="400"):
                box_of(viewer, source_of(state, 0), "1,1,1", "0,0,0", "4,4,4")
    told = [record.getMessage() for record in caplog.records if record.name.startswith("znnpy")]
    assert told == ["a part is not shown: the disk is gone; look for it"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the server leaves its socket open
def test_a_taken_port_is_refused(files: tuple[Path, ...]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with opened_scene(str(files[0])) as scene, pytest.raises(OutputError, match=f"port {port} .*another `port`"):
            served(scene, port).__enter__()
    gc.collect()


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewers, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="needs the package neuroglancer"):
        served(Scene((), None)).__enter__()


def test_turned_arrays_get_their_whole_matrix(files: tuple[Path, ...]) -> None:
    matrix = np.eye(4)
    matrix[:3, :3] = [[0, 1, 0], [1, 0, 0], [0, 0, -1]]
    matrix[:3, 3] = [1, 2, 30]
    with opened_scene(str(files[1])) as scene:
        turned = Layer("turned", "prediction", scene.layers[0].volume, matrix, (0.0, 255.0))
        with served(Scene((turned,), (40e-9, 8e-9, 8e-9))) as viewer:
            found = source_of(viewer.state.to_json(), 0)["transform"]["matrix"]
    low, high = turned.corners  # the array has 20x24x28 voxels: its y runs along z of the scene
    assert (low.tolist(), high.tolist()) == ([1, 2, 3], [25, 22, 31])
    assert [row[3] for row in found] == [1, 2, 31]
    assert [row[:3] for row in found] == [[0, 1, 0], [1, 0, 0], [0, 0, -1]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["p.zarr", "p.n5", "p.precomputed"])
def test_means_of_many_voxels_are_read_from_stored_resolutions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A pyramid of three: what the page asks for is the same as without it, and read where fewest voxels are read."""
    volume, out = np.random.default_rng(0).integers(0, 255, (75, 76, 77), np.uint8), tmp_path / name
    infer(volume, out=out, multiscale=2, device="cpu", calibrate=False, threads=1)
    read: list[tuple[int, ...]] = []
    real = ShownVoxels.__getitem__

    def noted(self: ShownVoxels, slices: tuple[slice, ...]) -> npt.NDArray[Any]:
        read.append(self.shape)
        return real(self, slices)

    monkeypatch.setattr(ShownVoxels, "__getitem__", noted)
    with viewed(out) as (state, viewer, scene):
        source = source_of(state, 0)
        size = scene.layers[0].volume.size
        whole = {
            factor: box_of(
                viewer, source, ",".join([str(factor)] * 3), "0,0,0", ",".join(str(-(-n // factor)) for n in size)
            )
            for factor in (1, 2, 4, 8)
        }
    assert read == [(49, 50, 51), (25, 25, 26), (13, 13, 13), (13, 13, 13)]
    for factor, coarse in whole.items():
        expected = downsample_with_averaging(whole[1], (factor,) * 3)
        inside = (slice(0, 49 // 8 * 8 // factor),) * 3  # at the ends, means of means weigh voxels otherwise
        np.testing.assert_allclose(coarse[inside], expected[inside], atol=1e-5)


@pytest.mark.slow
def test_stored_resolutions_of_long_voxels_are_not_used(tmp_path: Path) -> None:
    """The viewer wants means of 1x2x2 voxels that are longer along z, and those of 2x2x2 are stored."""
    volume = written(tmp_path / "v.h5", grey((40, 41, 42)), RESOLUTION)
    out = tmp_path / "p.zarr"
    infer(volume, out=out, multiscale=1, device="cpu", calibrate=False, threads=1)
    with viewed(out) as (_, viewer, scene):
        assert len(scene.layers[0].coarser) == 1
        (source,) = viewer.volume_manager.volumes.values()
        assert source._coarser == []
