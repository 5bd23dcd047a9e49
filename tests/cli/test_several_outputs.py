"""Networks with several outputs: each is an array of its own, with its own lattice and place, in HDF5 and Zarr."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

import znnpy
from tests.cli.test_graph_infer import UNET, Layers, attributes, graph
from tests.support.cli import Place
from tests.support.forked_commands import ForkedRuns
from znnpy.errors import OutputError, ShapeError, VerifyError, VolumeError
from znnpy.formats.weights import random_weights
from znnpy.kernels.whole import grown_by, whole
from znnpy.network import Network
from znnpy.planner.memory import BUFFERS, WRITER_BYTES
from znnpy.verify import verify
from znnpy.volume.registry import store_for

# Deep supervision: at full and at half resolution, and one that is cropped.
DEEP: Layers = [
    *UNET,
    {"name": "half", "type": "conv", "kernel": 1, "out": 1, "activation": "sigmoid", "from": "bottom"},
    {"name": "in.side", "type": "conv", "kernel": [5, 3, 3], "out": 3, "from": "joined"},
]
OUTPUTS = ["last", "half", "in.side"]
PERIODS = (20, 24, 26)  # size of the volume, padded
FILES = ["out.h5", "out.zarr"]
Arrays = dict[str, np.ndarray[Any, Any]]


def deep(place: Place, **entries: Any) -> Network:
    return graph(place, DEEP, output=OUTPUTS, **entries)


def defined(place: Place, network: Network) -> Arrays:
    """Return the definition of each output, (maps, z, y, x), without what belongs to the padding."""
    with h5py.File(place.volume) as file:
        image = np.asarray(file["raw"])[..., None]
    z, y, x = (a - b for a, b in zip(PERIODS, image.shape, strict=False))
    found = whole(network, random_weights(network, seed=4), (grown_by(image, (z, y, x), "reflect") - 120.0) / 40.0)
    last, half, inside = (one.transpose(3, 0, 1, 2) for one in found)
    return {"last": last[:, :, :23, :25], "half": half, "in_side": inside[:, :, :21, :23]}


def stored(path: Path) -> Arrays:
    """Return the arrays of an output, (maps, z, y, x)."""
    if path.suffix == ".zarr":
        outputs: Any = zarr.open_group(path, mode="r")["outputs"]
        found = {name: np.asarray(group["0"][:]) for name, group in outputs.groups()}
    else:
        with h5py.File(path) as file:
            assert list(file) == ["outputs"]
            found = {name: np.asarray(dataset) for name, dataset in file["outputs"].items()}
    return {name: array if array.ndim == 4 else array[None] for name, array in found.items()}


def assert_close(found: Arrays, exact: Arrays) -> None:
    assert found.keys() == exact.keys()
    for name, voxels in exact.items():
        assert found[name].shape == voxels.shape, name
        assert np.abs(found[name] - voxels).max() <= 1e-5 * np.abs(voxels).max(), name


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "more", [(), ("--cover", "patches", "--patch", "4,6,8"), ("--cover", "columns", "--patch", "2,8,26")], ids=str
)
def test_each_output_equals_the_definition(place: Place, name: str, more: tuple[str, ...]) -> None:
    network, out = deep(place), place.folder / name
    result = place.run(*place.arguments[:-1], out, *more, "--no-calibrate")
    assert result.exit_code == 0, result.output
    assert_close(stored(out), defined(place, network))
    words = ("verify", out, place.volume, "--network", place.folder / "net.yaml", "--samples", "300")
    checked = json.loads(place.run(*words, "--json").stdout)
    assert checked["samples"] == 900
    assert checked["dataset"] in ("outputs/last", "outputs/half", "outputs/in_side")


def test_a_plan_names_all_sizes_and_counts_all_outputs(place: Place) -> None:
    deep(place)
    words = ("--volume", place.volume, "--cover", "columns", "--patch", "2,24,26", "--device", "cpu", "--no-calibrate")
    said = place.run("plan", place.folder / "net.yaml", *words).stdout
    assert "20x23x25 output voxels, and 10x12x13, 16x21x23 of further outputs, in 1 column" in " ".join(said.split())
    made = json.loads(place.run("plan", place.folder / "net.yaml", *words, "--json").stdout)["plan"]
    (worker,) = made["workers"]
    values = 2 * 24 * 26 * (2 + 1 / 8 + 3)  # of a step of one period, whose outputs lie on two lattices
    assert worker["plan"]["memory"]["writing"] == BUFFERS * 4 * values + WRITER_BYTES


@pytest.mark.parametrize("name", FILES)
def test_a_region_has_the_voxels_whose_centres_lie_in_it(place: Place, name: str) -> None:
    network, out = deep(place), place.folder / name
    assert place.run(*place.arguments[:-1], out, "--roi", "3:17,:,5:20", "--no-calibrate").exit_code == 0
    exact = defined(place, network)
    regions = {"last": np.s_[:, 3:17, :, 5:20], "half": np.s_[:, 1:8, :, 2:10], "in_side": np.s_[:, 1:15, :, 4:19]}
    assert_close(stored(out), {node: exact[node][region] for node, region in regions.items()})
    checked = place.run("verify", out, place.volume, "--network", place.folder / "net.yaml", "--samples", 100)
    assert checked.exit_code == 0


def attributes_of(path: Path, name: str | None = None) -> dict[str, Any]:
    """Return the attributes of an output, or of one of its arrays."""
    if path.suffix == ".zarr":
        group: Any = zarr.open_group(path, mode="r")
        return dict(group.attrs if name is None else group[f"outputs/{name}"].attrs)
    with h5py.File(path) as file:
        holder = file if name is None else file[f"outputs/{name}"]
        return {key: np.asarray(value).tolist() for key, value in holder.attrs.items()}


@pytest.mark.parametrize("name", FILES)
def test_each_array_says_where_its_voxels_are(place: Place, name: str) -> None:
    deep(place)
    out = place.folder / name
    with h5py.File(place.volume, "r+") as file:
        file["raw"].attrs["element_size_um"] = [0.04, 0.02, 0.01]
    assert place.run(*place.arguments[:-1], out, "--roi", "3:17,:,5:20", "--no-calibrate").exit_code == 0
    places = {
        "last": ([3, 0, 5], [3, 0, 5], [1, 1, 1]),
        "half": ([2, 0, 4], [2.5, 0.5, 4.5], [2, 2, 2]),
        "in_side": ([3, 1, 5], [3, 1, 5], [1, 1, 1]),
    }
    for node, (offset, position, step) in places.items():
        said = attributes_of(out, node)
        assert (said["voxel_offset"], said["voxel_position"], said["voxel_step"]) == (offset, position, step)
        assert said["offset"] == said["translation"]  # in units
        size = np.array([0.04, 0.02, 0.01])
        np.testing.assert_allclose(said["resolution"], size * step)
        np.testing.assert_allclose(said["translation"], size * position)
        assert "job" not in said
    shared = attributes_of(out)
    assert {"job", "plan", "network", "meaning", "weights_sha256", "pad_to_period"} <= shared.keys()
    assert json.loads(shared["outputs"]) == ["outputs/last", "outputs/half", "outputs/in_side"]
    if name == "out.zarr":
        assert attributes_of(out, "half")["ome"]["multiscales"][0]["axes"][0]["name"] == "z"


def test_arrays_are_read_as_volumes(place: Place) -> None:
    deep(place)
    for name in FILES:
        out = place.folder / name
        assert place.run(*place.arguments[:-1], out, "--no-calibrate").exit_code == 0
        words = ("plan", "fib25_unet", "--volume", out, "--no-calibrate", "--device", "cpu")
        dataset = store_for(out).dataset_of(out, "outputs/half")
        assert place.run(*words, "--dataset", dataset).exit_code == 0
        assert "name one with --dataset" in place.refusal(*words)


@pytest.mark.parametrize("name", FILES)
def test_changed_voxels_are_found_in_each_array(place: Place, name: str) -> None:
    deep(place)
    out = place.folder / name
    assert place.run(*place.arguments[:-1], out, "--no-calibrate").exit_code == 0
    if name == "out.zarr":
        group: Any = zarr.open_group(out, mode="r+")
        group["outputs/half/0"][4, 5, 6] += np.float32(1e-3)
    else:
        with h5py.File(out, "r+") as file:
            file["outputs/half"][4, 5, 6] += np.float32(1e-3)
    with pytest.raises(VerifyError, match=r"^1 of \d+ voxels are wrong; .* = \(4, 5, 6\), map 0 of outputs/half: "):
        verify(out, place.volume, network=place.folder / "net.yaml", samples=10 * 12 * 13)  # all of that array


def test_arrays_that_were_moved_or_renamed_are_refused(place: Place) -> None:
    deep(place)
    assert place.infer("--no-calibrate").exit_code == 0
    words = ("verify", place.out, place.volume, "--network", place.folder / "net.yaml")
    with h5py.File(place.out, "r+") as file:
        file["outputs/half"].attrs["voxel_offset"] = np.array([0, 1, 0])
    assert "outputs/half has offset (0, 1, 0), and (0, 0, 0) follows from region" in place.refusal(*words)
    with h5py.File(place.out, "r+") as file:
        file["outputs/half"].attrs["voxel_offset"] = np.array([0, 0, 0])
        file.attrs["outputs"] = json.dumps(["outputs/half", "outputs/last", "outputs/in_side"])
    assert "has arrays ('outputs/half', " in place.refusal(*words)
    with h5py.File(place.out, "r+") as file:
        file.attrs["outputs"] = "[1]"
    assert "the attribute outputs of" in place.refusal(*words)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_run_that_is_killed_and_resumed_gives_the_same_bytes(place: Place, name: str) -> None:
    deep(place)
    plan, net, out = place.folder / "plan.json", place.folder / "net.yaml", place.folder / name
    made = place.run("plan", net, "--volume", place.volume, "--patch", "2,4,6", "--threads", 1, "--device", "cpu",
                     "--no-calibrate", "--out", plan)  # fmt: skip
    assert made.exit_code == 0, made.output
    alone = place.folder / f"alone{out.suffix}"
    command = ["infer", place.volume, "--network", net, "--plan", plan]
    with ForkedRuns() as runs:
        left_alone = runs.run(*command, "--out", alone)
        assert left_alone.code == 0, left_alone.stderr
        killed = 0
        for change in range(8, left_alone.changes - 10, max(1, left_alone.changes // 6)):
            ended = runs.run(*command, "--out", out, "--resume", changes=change)
            killed += ended.code == -9
            if ended.code == 0:
                break
        assert killed >= 2
        ended = runs.run(*command, "--out", out, "--resume")
        assert ended.code == 0, ended.stderr
    first, second = stored(alone), stored(out)
    assert {node: array.tobytes() for node, array in first.items()} == {
        node: array.tobytes() for node, array in second.items()
    }
    assert not [path.name for path in place.folder.iterdir() if path.name.startswith(f"{name}.")]


@pytest.mark.parametrize("name", FILES)
def test_an_output_is_replaced_and_resumed_as_a_whole(place: Place, name: str) -> None:
    network, out = deep(place), place.folder / name
    command = [*place.arguments[:-1], out, "--no-calibrate"]
    assert place.run(*command).exit_code == 0
    assert "exists; give --overwrite" in place.refusal(*command)
    assert place.run(*command, "--overwrite", "--output-dtype", "uint8").exit_code == 0
    assert {array.dtype.name for array in stored(out).values()} == {"uint8"}
    assert place.run(*command, "--overwrite").exit_code == 0
    assert place.run(*command, "--resume").exit_code == 0
    assert_close(stored(out), defined(place, network))
    assert "output_dtype was" in place.refusal(*command, "--resume", "--output-dtype", "uint8")


def test_a_group_with_something_else_is_not_replaced(place: Place) -> None:
    deep(place)
    out = place.folder / "out.zarr"
    command = [*place.arguments[:-1], out, "--no-calibrate"]
    assert place.run(*command).exit_code == 0
    (out / "mine").mkdir()
    assert "is a folder that is not an output or a Zarr array" in place.refusal(*command, "--overwrite")


def test_patches_are_checked_before_they_are_written(place: Place) -> None:
    network = deep(place)
    assert place.infer("--no-calibrate", "--paranoid").exit_code == 0
    assert_close(stored(place.out), defined(place, network))


def test_python_gives_outputs_of_one_size_in_one_array(place: Place) -> None:
    graph(place, UNET, output=["last", "joined"])
    with h5py.File(place.volume) as file:
        volume = np.asarray(file["raw"])
    net = znnpy.load_network(place.folder / "net.yaml")
    found = net(volume, device="cpu", calibrate=False)
    assert found.shape == (9, *volume.shape)
    given = np.zeros_like(found)
    znnpy.infer(volume, place.folder / "net.yaml", out=given, device="cpu", calibrate=False)
    np.testing.assert_array_equal(given, found)
    assert place.infer("--no-calibrate").exit_code == 0
    arrays = stored(place.out)
    np.testing.assert_allclose(np.concatenate([arrays["last"], arrays["joined"]]), found, atol=1e-5)


def test_one_array_does_not_hold_outputs_of_several_sizes(place: Place) -> None:
    deep(place)
    volume = np.zeros((20, 24, 26), np.uint8)
    sizes = "gives 20x24x26 voxels of last and 10x12x13 of half, which one array cannot hold; "
    with pytest.raises(ShapeError, match=f"{sizes}call znnpy.infer with a path"):
        znnpy.load_network(place.folder / "net.yaml")(volume)
    with pytest.raises(ShapeError, match=f"{sizes}give a path as `out`"):
        znnpy.infer(volume, place.folder / "net.yaml", out=np.zeros((6, 20, 24, 26), np.float32), device="cpu")


def test_a_region_without_voxels_of_an_output_is_refused(place: Place) -> None:
    deep(place)
    sentence = place.refusal(*place.arguments, "--roi", "2:10,0:1,:", "--no-calibrate")
    assert "tiny has no output half between 0 and 1 along y" in sentence


def test_a_single_output_has_the_attributes_of_before(place: Place) -> None:
    graph(place)
    assert place.infer("--no-calibrate").exit_code == 0
    said = attributes(place.out)
    assert {"offset", "voxel_offset", "voxel_step", "voxel_position", "job", "plan"} <= said.keys()
    assert "outputs" not in said


def test_provenance_of_an_output_without_arrays(place: Place) -> None:
    deep(place)
    assert place.infer("--no-calibrate").exit_code == 0
    with h5py.File(place.out, "r+") as file:
        del file["outputs/half"]
    with pytest.raises(VolumeError, match="has no dataset 'outputs/half'"):
        verify(place.out, place.volume, network=place.folder / "net.yaml")
    with pytest.raises(OutputError, match="exists"):
        znnpy.infer(place.volume, place.folder / "net.yaml", out=place.out)
