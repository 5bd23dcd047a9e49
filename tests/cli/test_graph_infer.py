"""`znnpy infer` with graphs: equal to the definition, killed and resumed, on other lattices, and refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.support.cli import Place
from tests.support.forked_commands import ForkedRuns
from tests.support.infer_process import infer
from znnpy.formats.weights import random_weights
from znnpy.kernels.whole import grown_by, whole
from znnpy.network import Network
from znnpy.network_files import read_network

Layers = list[dict[str, Any]]
GRAIN = 4 * 2**20  # what the process takes without the plan is rounded up to it
UNET: Layers = [
    {"name": "top", "type": "conv", "kernel": 3, "out": 3, "padding": "same", "activation": "relu"},
    {"name": "down", "type": "pool", "window": 2},
    {"name": "bottom", "type": "conv", "kernel": 3, "out": 4, "padding": 1, "activation": "elu"},
    {"name": "up", "type": "upsample", "factor": 2},
    {"name": "joined", "type": "concat", "from": ["top", "up"]},
    {"name": "last", "type": "conv", "kernel": 1, "out": 2, "activation": "sigmoid"},
]
COARSE: Layers = [*UNET[:3], {"name": "last", "type": "conv", "kernel": 1, "out": 1}]
FINE: Layers = [*UNET, {"name": "fine", "type": "upsample", "factor": [1, 2, 2]}]


def graph(place: Place, layers: Layers = UNET, **entries: Any) -> Network:
    """Write net.yaml and net.npz of a graph."""
    path = place.write_network(layers=layers, **entries)
    network = read_network(path).network
    arrays: dict[str, Any] = {}
    for index, weights in zip(network.weighted, random_weights(network, seed=4), strict=True):
        arrays |= {f"{network.names[index]}.weight": weights.weight, f"{network.names[index]}.bias": weights.bias}
    save: Any = np.savez  # its keywords are arrays, whatever the stubs say
    save(place.folder / "net.npz", **arrays)
    return network


def defined(place: Place, network: Network, size: tuple[int, int, int]) -> np.ndarray[Any, Any]:
    """Return the definition for the volume, padded by reflection to a size, (maps, z, y, x)."""
    with h5py.File(place.volume) as file:
        image = np.asarray(file["raw"])[..., None]
    z, y, x = (a - b for a, b in zip(size, image.shape, strict=False))
    grown = grown_by(image, (z, y, x), "reflect")
    (found,) = whole(network, random_weights(network, seed=4), (grown - 120.0) / 40.0)
    return found.transpose(3, 0, 1, 2)


def attributes(path: Path) -> dict[str, Any]:
    with h5py.File(path) as file:
        return {name: np.asarray(value).tolist() for name, value in file["prediction"].attrs.items()}


def close(found: np.ndarray[Any, Any], exact: np.ndarray[Any, Any]) -> bool:
    return found.shape == exact.shape and bool(np.abs(found - exact).max() <= 1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("more", [(), ("--patch", "4,6,8"), ("--roi", "3:17,:,5:20")], ids=["planned", "patch", "roi"])
def test_unet_equals_the_definition_on_the_padded_volume(place: Place, more: tuple[str, ...]) -> None:
    network = graph(place)
    result = place.infer(*more, "--no-calibrate")
    assert result.exit_code == 0, result.output
    exact = defined(place, network, (20, 24, 26))[:, :20, :23, :25]
    if "--roi" in more:
        exact = exact[:, 3:17, :, 5:20]
    assert close(place.prediction(), exact)


@pytest.mark.parametrize(
    ("layers", "step", "offset", "cut"),
    [(COARSE, (2, 2, 2), (0.5, 0.5, 0.5), (10, 11, 12)), (FINE, (1, 0.5, 0.5), (0, -0.25, -0.25), (20, 46, 50))],
    ids=["coarser", "finer"],
)
def test_output_says_where_its_voxels_are(
    place: Place, layers: Layers, step: tuple[float, ...], offset: tuple[float, ...], cut: tuple[int, int, int]
) -> None:
    network = graph(place, layers)
    assert place.infer("--no-calibrate").exit_code == 0
    size = (20, 24, 26) if layers is FINE else (20, 23, 25)  # windows that do not fit are left out, as PyTorch does
    exact = defined(place, network, size)[:, : cut[0], : cut[1], : cut[2]]
    found = place.prediction()
    assert close(found if found.ndim == 4 else found[None], exact)
    said = attributes(place.out)
    assert (said["voxel_step"], said["voxel_position"]) == (list(step), list(offset))


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_gives_the_same_bytes(place: Place) -> None:
    graph(place)
    words = ["--network", place.folder / "net.yaml", "--threads", "1"]
    plan = place.folder / "plan.json"
    made = place.run("plan", place.folder / "net.yaml", "--volume", place.volume, "--patch", "2,4,6", "--threads", 1,
                     "--device", "cpu", "--no-calibrate", "--out", plan)  # fmt: skip
    assert made.exit_code == 0, made.output
    with ForkedRuns() as runs:
        command = ["infer", place.volume, *words[:2], "--plan", plan]
        left_alone = runs.run(*command, "--out", place.folder / "alone.h5")
        assert left_alone.code == 0, left_alone.stderr
        killed = 0
        for change in range(8, left_alone.changes - 10, max(1, left_alone.changes // 6)):
            ended = runs.run(*command, "--out", place.out, "--resume", changes=change)
            killed += ended.code == -9
            if ended.code == 0:
                break
        assert killed >= 2
        ended = runs.run(*command, "--out", place.out, "--resume")
        assert ended.code == 0, ended.stderr
    with h5py.File(place.folder / "alone.h5") as file:
        assert np.asarray(file["prediction"]).tobytes() == place.prediction().tobytes()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of one process is known on Linux only")
def test_memory_stays_below_what_the_plan_promises(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "volume.h5", "w") as file:
        noise = np.random.default_rng(3).integers(0, 256, (72, 96, 96), np.uint8)
        file.create_dataset("raw", data=noise)
    for number, ram in enumerate(("350M", "700M")):
        words = ["--network", "fib25_unet", "--ram", ram, "--threads", "2", "--no-calibrate", "--device", "cpu"]
        promised, peak = infer(tmp_path / "volume.h5", *words, "--out", str(tmp_path / f"out{number}.h5"))
        assert peak <= promised <= 1.15 * peak + GRAIN, f"promised {promised:,}, peak {peak:,}"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of one process is known on Linux only")
def test_planning_a_deep_graph_stays_within_what_its_plan_promises(place: Place) -> None:
    layers: Layers = [{"name": "sum0", "type": "conv", "kernel": 3, "out": 2, "padding": "same"}]
    for number in range(1, 161):
        before, conv = f"sum{number - 1}", {"type": "conv", "kernel": 3, "out": 2, "padding": "same"}
        layers += [
            {"name": f"first{number}", "from": [before], "activation": "relu", **conv},
            {"name": f"second{number}", **conv},
            {"name": f"sum{number}", "type": "add", "from": [before, f"second{number}"], "activation": "tanh"},
        ]
    graph(place, layers)
    place.write_volume(np.zeros((3000, 12, 10), np.uint8))
    words = ["--network", str(place.folder / "net.yaml"), "--ram", "200M", "--threads", "2", "--no-calibrate"]
    promised, peak = infer(place.volume, *words, "--device", "cpu", "--out", str(place.out))
    assert peak <= promised <= 200 * 2**20, f"promised {promised:,}, peak {peak:,}"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of one process is known on Linux only")
def test_what_planning_a_deep_graph_leaves_behind_is_promised(place: Place) -> None:
    layers = [
        {"name": f"conv{number}", "type": "conv", "kernel": 3, "out": 1, "padding": "same"} for number in range(300)
    ]
    graph(place, layers)
    place.write_volume(np.zeros((96, 96, 96), np.uint8))
    words = [
        "--network",
        str(place.folder / "net.yaml"),
        "--ram",
        "600M",
        "--threads",
        "2",
        "--no-calibrate",
        "--device",
        "cpu",
    ]
    promised, peak = infer(place.volume, *words, "--out", str(place.out))
    margin = 12 * 2**20  # of every plan: for threads and allocators, and up to the next 4 MiB
    assert peak <= promised <= 1.1 * peak + margin, f"promised {promised:,}, peak {peak:,}"


# --- bad input ---


def tiny_volume(place: Place) -> None:
    place.write_volume(np.zeros((1, 23, 25), np.uint8))


NORM = [*UNET[:1], {"name": "normed", "type": "instance_norm"}, UNET[-1]]
ALIGNED = [*UNET[:3], {"name": "up", "type": "upsample", "factor": 2, "how": "linear", "align_corners": True}]
REFUSED: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("small", {}, [], ["1x23x25", "smaller than one period", "2x2x2", "along z", "give a larger volume"]),
    ("border", {}, ["--border", "reflect"], ["--border reflect", "pads by itself", "leave out --border"]),
    ("nan", {}, ["--allow-nan"], ["computed whole", "leave out --allow-nan"]),
    (
        "norm",
        {"layers": NORM},
        [],
        ["tiny is computed in windows", "give --window"],
    ),
    (
        "norm as a whole",
        {"layers": NORM, "meaning": "whole"},
        [],
        ["node normed (instance_norm)", "compute it in windows, with --window"],
    ),
    ("corners", {"layers": ALIGNED}, [], ["node up upsamples with align_corners", "use align_corners: false"]),
    ("refuse", {"pad_to_period": "refuse"}, [], ["20x23x25", "refuses to pad it to 20x24x26", "pad_to_period"]),
    ("gpu", {}, ["--device", "gpu"], ["GPU"]),
]


@pytest.mark.parametrize(("name", "entries", "words", "said"), REFUSED, ids=[one[0] for one in REFUSED])
def test_bad_input_is_refused_in_one_sentence(
    place: Place, name: str, entries: dict[str, Any], words: list[str], said: list[str]
) -> None:
    graph(place, **entries)
    if name == "small":
        tiny_volume(place)
    sentence = place.refusal(*place.arguments, *words, "--no-calibrate")
    for part in said:
        assert part in sentence, sentence


def test_a_graph_runs_on_one_kind_of_device(place: Place, emulated_gpus: Any) -> None:
    graph(place)
    emulated_gpus.use(1)
    sentence = place.refusal(*place.arguments, "--mode", "side-by-side", "--no-calibrate")
    assert "is computed on one kind of device: leave out --mode side-by-side" in sentence


def test_missing_weights_are_named(place: Place) -> None:
    graph(place)
    with np.load(place.folder / "net.npz") as arrays:
        kept = {name: arrays[name] for name in arrays.files if name != "bottom.weight"}
    np.savez(place.folder / "net.npz", **kept)
    sentence = place.refusal(*place.arguments, "--no-calibrate")
    assert "bottom.weight" in sentence


Change = Callable[[Layers], None]
CHANGES: list[tuple[str, Change, list[str]]] = [
    ("cycle", lambda layers: layers[0].update({"from": ["up"]}), ["cycle", "top"]),
    ("missing", lambda layers: layers[4].update({"from": ["top", "upp"]}), ["upp", "not a node", "up"]),
    ("twice", lambda layers: layers[3].update(name="down"), ["both called down"]),
    ("lattice", lambda layers: layers[4].update({"from": ["top", "bottom"]}), ["joined", "one lattice"]),
    ("maps", lambda layers: layers[4].update(type="add"), ["joined", "3", "4", "maps"]),
    ("even", lambda layers: layers[0].update(kernel=2), ["top", "padding is same", "one side"]),
    ("unknown", lambda layers: layers[2].update(groops=2), ["bottom", "groops", "groups"]),
    ("type", lambda layers: layers[3].update(type="upsampel"), ["up", "upsampel", "upsample"]),
]


@pytest.mark.parametrize(("name", "change", "said"), CHANGES, ids=[one[0] for one in CHANGES])
def test_a_graph_that_does_not_fit_together_is_refused(
    place: Place, name: str, change: Change, said: list[str]
) -> None:
    layers: Layers = json.loads(json.dumps(UNET))
    graph(place)
    change(layers)
    if name == "lattice":
        layers[3:4] = [{"name": "up", "type": "activation", "function": "relu"}]
        layers[4]["from"] = ["top", "up"]
    place.write_network(layers=layers)
    sentence = place.refusal(*place.arguments, "--no-calibrate")
    for part in said:
        assert part in sentence, sentence
