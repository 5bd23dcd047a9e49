"""The meaning of a network over a volume, asked for as an option or in the network file: computed so, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import znnpy
from tests.cli.test_graph_infer import UNET, graph
from tests.support.cli import Place
from znnpy.errors import NetworkFileError, ShapeError
from znnpy.formats.weights import random_weights
from znnpy.kernels.whole import whole
from znnpy.network import Conv, MaxFilter, Maxout, Network, Pool
from znnpy.network_files import read_network
from znnpy.verify import verify

CHAINS = {
    "two poolings": (
        Conv((3, 2, 3), 4, "relu"), Pool((2, 2, 2)), Conv((2, 3, 2), 4, "tanh"), Pool((2, 3, 1)),
        Conv((2, 2, 3), 2, "sigmoid"),
    ),
    "first and last": (Pool((2, 1, 3)), Conv((2, 2, 2), 4, "relu"), Maxout(2), Pool((3, 2, 2))),
    "max-filter": (Conv((2, 2, 2), 6, "relu"), MaxFilter((2, 3, 1)), Pool((2, 2, 2)), Maxout(3)),
    "no pooling": (Conv((3, 3, 3), 2, "softmax"),),
}  # fmt: skip
SIZES = [(20, 23, 25), (19, 22, 27), (17, 25, 24)]
WHOLE = ("--meaning", "whole", "--no-calibrate")


def chain(place: Place, name: str, size: tuple[int, int, int] = SIZES[0], **entries: Any) -> Place:
    """Write the network, its weights and a volume of another size."""
    made = Place(place.folder, Network("chain", 1, CHAINS[name]))
    made.write_network(**entries)
    made.write_weights()
    made.write_volume(np.random.default_rng(11).integers(0, 256, size, np.uint8))
    return made


def defined(place: Place) -> np.ndarray[Any, Any]:
    """Return what the network gives for the whole volume, in float64."""
    with h5py.File(place.volume) as file:
        image = (np.asarray(file["raw"], np.float64)[..., None] - 120.0) / 40.0
    (found,) = whole(place.network, random_weights(place.network, seed=3), image)
    return found.transpose(3, 0, 1, 2)


def assert_close(found: np.ndarray[Any, Any], exact: np.ndarray[Any, Any]) -> None:
    found = found if found.ndim == 4 else found[None]
    assert found.shape == exact.shape
    assert np.abs(found - exact).max() <= 1e-5 * np.abs(exact).max()


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_computed_whole_equals_the_definition(place: Place, name: str, size: tuple[int, int, int]) -> None:
    place = chain(place, name, size)
    result = place.infer(*WHOLE)
    assert result.exit_code == 0, result.output
    assert_close(place.prediction(), defined(place))
    period = place.network.period
    with h5py.File(place.out) as file:
        said = file["prediction"].attrs
        assert said["meaning"] == "whole"
        assert said["voxel_step"].tolist() == [float(step) for step in period]
        assert json.loads(said["job"])["meaning"] == "whole"
    checked = place.run("verify", place.out, place.volume, "--network", place.folder / "net.yaml", "--samples", 100)
    assert checked.exit_code == 0


@pytest.mark.parametrize("cover", ["patches", "columns"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_any_division_gives_the_same(place: Place, cover: str, axis: int) -> None:
    size = [21, 24, 23]
    size[axis] += 30  # columns along the longest axis
    place = chain(place, "two poolings", (size[0], size[1], size[2]))
    result = place.infer(*WHOLE, "--cover", cover, "--patch", "2,2,3")
    assert result.exit_code == 0, result.output
    assert_close(place.prediction(), defined(place))


def test_a_region_is_a_part_of_the_whole(place: Place) -> None:
    place = chain(place, "max-filter")
    assert place.infer(*WHOLE, "--roi", "5:18,0:11,6:").exit_code == 0
    # the centre of voxel i of the output is at 2 i + (1.5, 2, 1)
    assert_close(place.prediction(), defined(place)[:, 2:8, 0:5, 3:12])


def test_python_takes_the_meaning(place: Place) -> None:
    place = chain(place, "two poolings")
    path = place.folder / "net.yaml"
    with h5py.File(place.volume) as file:
        volume = np.asarray(file["raw"])
    net = znnpy.load_network(path, meaning="whole")
    assert_close(net(volume, device="cpu", calibrate=False), defined(place))
    assert repr(net.network).endswith("computed whole>")
    plan = znnpy.plan(path, volume=place.volume, meaning="whole", device="cpu", calibrate=False)
    report = znnpy.infer(place.volume, path, meaning="whole", plan=plan, out=place.out, calibrate=False, border="valid")
    assert report.voxels == np.prod(plan.output) == np.prod(defined(place).shape[1:])
    assert verify(place.out, place.volume, network=path, meaning="whole", samples=50).meaning == "whole"
    with pytest.raises(ValueError, match="there is no meaning 'half'; choose one of sliding, whole, windows"):
        znnpy.plan(path, meaning="half")  # type: ignore[arg-type]


def test_graph_and_plan_say_it(place: Place) -> None:
    path = chain(place, "two poolings").folder / "net.yaml"
    said = place.run("graph", path, "--meaning", "whole", "--size", "20,23,25").stdout
    assert "meaning     whole: the output is what the network gives on the whole volume" in said
    assert "meaning     sliding" in place.run("graph", path).stdout
    assert place.run("graph", path, "--meaning", "sliding").stdout == place.run("graph", path).stdout
    said = place.run("plan", path, "--volume", place.volume, *WHOLE, "--device", "cpu").stdout
    assert "computed whole of a volume of 20x23x25" in " ".join(said.split())


def test_a_network_file_may_name_it(place: Place) -> None:
    place = chain(place, "two poolings", meaning="whole", field_of_view=[12, 17, 10])
    network = read_network(place.folder / "net.yaml").network
    assert network.meaning == "whole"
    assert network.sha256 == read_network(chain(place, "two poolings").folder / "net.yaml", "whole").network.sha256
    assert network.sha256 != read_network(place.folder / "net.yaml").network.sha256
    place.write_network(meaning="whole")
    assert place.infer("--no-calibrate").exit_code == 0
    assert_close(place.prediction(), defined(place))
    assert read_network(place.folder / "net.yaml", "sliding").network.meaning == "sliding"
    assert "meaning is 'half', but must be one of sliding, whole, windows" in place.refusal(
        "graph", place.write_network(meaning="half")
    )


# --- refused ---

SLIDING = [
    ("padding", {}, "node top (conv 3x3x3 -> 3 relu padding 1x1x1) is none of the layers that slide"),
    (
        "skip",
        {"layers": [
            {"name": "a", "type": "conv", "kernel": 1, "out": 2},
            {"name": "b", "type": "conv", "kernel": 1, "out": 2},
            {"name": "c", "type": "conv", "kernel": 1, "out": 2, "from": "a"},
            {"name": "d", "type": "concat", "from": ["b", "c"]},
        ]},
        "node c (conv 1x1x1 -> 2 none) reads a, and not the layer before it alone",
    ),
    (
        "outputs",
        {"output": ["a", "b"], "layers": [
            {"name": "a", "type": "conv", "kernel": 1, "out": 2},
            {"name": "b", "type": "conv", "kernel": 1, "out": 2},
        ]},
        "node a is an output, and not the last layer",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("entries", "said"), [one[1:] for one in SLIDING], ids=[one[0] for one in SLIDING])
def test_a_graph_that_does_not_slide_is_refused(place: Place, entries: dict[str, Any], said: str) -> None:
    graph(place, **{"layers": UNET, **entries})
    path = place.folder / "net.yaml"
    sliding = ("--meaning", "sliding")
    for words in (["graph", path], ["plan", path], place.arguments, ["measure", path]):
        sentence = place.refusal(*words, *sliding)
        assert sentence.startswith(f"tiny does not slide over a volume, since {said}")
        assert sentence.endswith("; leave out --meaning sliding, so that it is computed whole")
    with pytest.raises(ShapeError, match="leave out meaning='sliding', so"):
        znnpy.load_network(path, meaning="sliding")
    place.write_network(**{"layers": UNET, **entries, "meaning": "sliding"})
    with pytest.raises(NetworkFileError) as refused:
        read_network(path)
    assert f"net.yaml: meaning is sliding, but {said}" in str(refused.value)
    assert str(refused.value).endswith("; delete the line, so that it is computed whole")


def test_a_plan_of_another_meaning_is_refused(place: Place) -> None:
    place = chain(place, "two poolings")
    plans = {}
    for meaning in ("sliding", "whole"):
        plans[meaning] = place.folder / f"{meaning}.json"
        words = ("--meaning", meaning, "--no-calibrate", "--device", "cpu", "--out", plans[meaning])
        assert place.run("plan", place.folder / "net.yaml", "--volume", place.volume, *words).exit_code == 0
    for made, here in (("sliding", "whole"), ("whole", "sliding")):
        assert place.refusal(*place.arguments, "--meaning", here, "--plan", plans[made], "--no-calibrate") == (
            f"the plan is for a network of the meaning {made}, and that of chain is {here} here; make one with "
            f"`znnpy plan NETWORK --meaning {here}`, or, if the network supports it, give --meaning {made}"
        )
    assert place.infer("--meaning", "whole", "--plan", plans["whole"], "--no-calibrate").exit_code == 0
    assert_close(place.prediction(), defined(place))


def test_a_resumed_run_has_the_meaning_that_it_began_with(place: Place) -> None:
    place = chain(place, "two poolings")
    assert place.infer(*WHOLE).exit_code == 0
    assert place.infer(*WHOLE, "--resume").exit_code == 0
    assert place.refusal(*place.arguments, "--no-calibrate", "--resume") == (
        f'the finished {place.out} belongs to another job: meaning was "whole" and is "sliding" now; give another '
        "--out, or start again with --overwrite"
    )


def test_an_output_of_another_meaning_is_not_verified(place: Place) -> None:
    place = chain(place, "two poolings")
    path: Path = place.folder / "net.yaml"
    assert place.infer(*WHOLE).exit_code == 0
    words = ("verify", place.out, place.volume, "--network", path)
    assert place.refusal(*words, "--meaning", "sliding") == (
        f"{place.out} was predicted with --meaning whole; leave out --meaning sliding"
    )
    graph(place, layers=UNET)
    place.write_network(layers=UNET)
    assert "was predicted with other network" in place.refusal(*words)
