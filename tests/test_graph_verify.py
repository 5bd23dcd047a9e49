"""Voxels of graphs by definition: equal to those of the whole volume, and what differs in an output is found."""

from __future__ import annotations

import json
import random
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

import znnpy
from tests.support.seeded_graphs import Case, case
from tests.support.small_unet import LAYERS, SIZE, written
from tests.support.tiers import one_in
from znnpy import graph_check, graph_crop, graph_voxels, self_check
from znnpy.admissible import admissible
from znnpy.errors import ShapeError, VerifyError
from znnpy.geometry import Geometry, Interval
from znnpy.graph_crop import outputs_in
from znnpy.graph_operations import Region
from znnpy.graph_shapes import GraphConvShape, Pooled
from znnpy.graph_voxels import GraphVoxels
from znnpy.kernels import definition
from znnpy.kernels.contract import ConvWeights, Footprint, Variant
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.kernels.whole import whole
from znnpy.patches import Box
from znnpy.planning import plan
from znnpy.trained import TrainedNetwork, load_network
from znnpy.verify import verify
from znnpy.volume.array import ArrayVolume

SEEDS = range(60)


def some(rng: random.Random, geometry: Geometry, tensor: int) -> Region:
    found = []
    for size in geometry.size(tensor):
        lo = rng.choice((0, rng.randrange(size), size - 1))
        found.append(Interval(lo, rng.choice((lo + 1, size, rng.randint(lo + 1, size)))))
    return found[0], found[1], found[2]


@pytest.mark.parametrize("seed", one_in(4, SEEDS))
def test_a_part_of_the_output_equals_that_of_the_whole(seed: int) -> None:
    given, rng = case(seed), random.Random(seed)
    network, geometry = given.network, admissible(given.network, given.size)
    exact = whole(network, given.weights, given.grown)
    for _ in range(4):
        wanted = [some(rng, geometry, tensor) for tensor in network.outputs]
        found = outputs_in(geometry, given.weights, wanted, lambda box: given.grown[box.slices])
        for output, part, (z, y, x) in zip(exact, found, wanted, strict=True):
            np.testing.assert_allclose(part, output[z.lo : z.hi, y.lo : y.hi, x.lo : x.hi], rtol=0, atol=1e-12)


def test_a_region_that_lacks_a_voxel_is_an_error() -> None:
    part = graph_crop._Part(Box((1, 0, 0), (3, 2, 2)), (4, 2, 2), np.zeros((2, 2, 2, 1)))
    assert part.around(Box((1, -1, 0), (3, 2, 2)), "reflect").shape == (2, 3, 2, 1)
    with pytest.raises(IndexError, match=r"^voxels 0 to 2 are read, and 1 to 2 are there$"):
        part.around(Box((0, 0, 0), (3, 2, 2)))


@pytest.mark.parametrize("everything", [True, False])
@pytest.mark.parametrize("seed", one_in(10, SEEDS))
def test_voxels_of_a_volume_equal_those_of_the_whole(
    seed: int, everything: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = case(seed)
    if not everything:
        monkeypatch.setattr(graph_voxels, "MOST_VALUES", 0)
    for number, exact in enumerate(whole(given.network, given.weights, given.grown)):
        size = exact.shape[:3]
        first = (size[0] // 2, 0, size[2] - 1)
        voxels = voxels_of(given, number, first)
        there = (size[0] - first[0], size[1], 1)
        (at,) = voxels.drawn(there, 100, seed=seed)
        assert len(np.unique(at, axis=0)) == len(at) <= 100
        assert (at.min(axis=0) >= 0).all()
        assert (at.max(axis=0) < there).all()
        np.testing.assert_allclose(voxels.at(at), exact[tuple((at + np.array(first)).T)], rtol=0, atol=1e-12)


def voxels_of(given: Case, number: int, first: tuple[int, int, int]) -> GraphVoxels:
    return GraphVoxels(TrainedNetwork(given.network, given.weights), ArrayVolume(given.volume), number, first)


@pytest.mark.parametrize(("samples", "cells"), [(1, 1), (2, 2), (20, 3), (1000, 16)])
def test_places_of_a_deep_network_are_few_and_hold_two_corners(
    samples: int, cells: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_voxels, "SPREAD", 1)
    at = drawn(tmp_path, samples, monkeypatch)
    places = np.unique(at // (8, 8, 8), axis=0).tolist()
    assert len(places) == cells
    assert len(at) == samples
    if samples > 1:
        assert [0, 0, 0] in places
        assert [7, 5, 4] in places


def test_samples_of_a_network_that_sees_little_are_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = drawn(tmp_path, 100, monkeypatch)
    assert len(np.unique(at // (8, 8, 8), axis=0)) == 100


def drawn(folder: Path, samples: int, monkeypatch: pytest.MonkeyPatch) -> np.ndarray[Any, Any]:
    """Draw voxels of a small U-Net in a volume that is not computed as a whole."""
    monkeypatch.setattr(graph_voxels, "MOST_VALUES", 0)
    trained = load_network(written(folder))
    size = (62, 43, 40)
    voxels = GraphVoxels(trained, ArrayVolume(np.zeros(size, np.uint8)), 0, (0, 0, 0))
    return np.concatenate(list(voxels.drawn(size, samples, seed=4)))


def predicted(folder: Path, **words: object) -> Path:
    """Predict the volume of a small U-Net."""
    out = folder / "out.h5"
    network = written(folder)
    znnpy.infer(folder / "volume.npy", network, out=out, ram="4G", calibrate=False, device="cpu", **words)  # type: ignore[arg-type]
    return out


@pytest.mark.parametrize("roi", [None, "3:20,:,5:"])
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_a_right_output_passes(tmp_path: Path, roi: str | None, dtype: str) -> None:
    out = predicted(tmp_path, roi=roi, output_dtype=dtype)
    report = verify(out, tmp_path / "volume.npy", network=tmp_path / "net.yaml", samples=200)
    assert report.samples == 200
    assert report.worst <= report.allowed
    assert report.meaning == "whole"
    lines = report.lines()
    assert "200 voxels recomputed from the part of the volume that each depends on in float64" in lines[0]
    assert lines[1] == f"the output covers {'part 3:20,0:20,5:25 of the volume' if roi else 'the whole volume'}"


def test_a_changed_voxel_is_found(tmp_path: Path) -> None:
    out = predicted(tmp_path)
    with h5py.File(out, "r+") as file:
        file["prediction"][1, 7, 3, 24] += np.float32(1e-3)
    voxels = 23 * 20 * 25
    with pytest.raises(
        VerifyError, match=rf"^1 of {voxels} voxels are wrong; worst error 1.00e-03 at .* = \(7, 3, 24\)"
    ):
        verify(out, tmp_path / "volume.npy", network=tmp_path / "net.yaml", samples=voxels)


def test_another_network_is_refused(tmp_path: Path) -> None:
    out = predicted(tmp_path)
    entries = json.loads((tmp_path / "net.yaml").read_text())
    changed = [{**layer, "from": ["up", "bend"]} if layer["name"] == "join" else layer for layer in LAYERS]
    (tmp_path / "other.yaml").write_text(json.dumps({**entries, "layers": changed}))
    with pytest.raises(VerifyError, match="was predicted with other network: digest"):
        verify(out, tmp_path / "volume.npy", network=tmp_path / "other.yaml")


@pytest.mark.parametrize("name", ["voxel_offset", "offset"])
def test_another_offset_is_refused(tmp_path: Path, name: str) -> None:
    """Early versions wrote `offset` alone; it is read only where there is no `voxel_offset`."""
    out = predicted(tmp_path, roi="3:20,:,5:")
    with h5py.File(out, "r+") as file:
        del file["prediction"].attrs["voxel_offset"]
        file["prediction"].attrs[name] = np.array([3, 0, 4])
    with pytest.raises(VerifyError, match=r"has offset \(3, 0, 4\), and \(3, 0, 5\) follows from region .* and the"):
        verify(out, tmp_path / "volume.npy", network=tmp_path / "net.yaml")


def test_patches_are_checked_before_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert predicted(tmp_path, paranoid=True, cover="patches", patch=(8, 10, 12)).is_file()
    right = GraphVoxels.at
    monkeypatch.setattr(GraphVoxels, "at", lambda self, at: right(self, at) + 1e-3)
    (tmp_path / "out.h5").unlink()
    with pytest.raises(VerifyError, match=r"^output voxel \(z, y, x\) = .* its patch is not written"):
        predicted(tmp_path, paranoid=True)
    assert not (tmp_path / "out.h5").exists()


def test_layers_are_checked_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path)
    plan(file, shape=SIZE, ram="4G", calibrate=False, device="cpu", paranoid=True)
    right = graph_check.compared

    def off(*given: object) -> object:
        at, values, exact = right(*given)  # type: ignore[arg-type]
        return at, values + 1e-3, exact

    monkeypatch.setattr(self_check, "compared", off)
    with pytest.raises(VerifyError, match=r"^node enter \+ batch_norm \+ relu \(conv 3x3x3 -> 4 relu padding 1x1x1\)"):
        plan(file, shape=SIZE, ram="4G", calibrate=False, device="cpu", paranoid=True)


class _Exact:
    """A primitive that computes a convolution and its maxima by definition, these with an error of `off`."""

    def __init__(self, off: float) -> None:
        self._off = off

    def footprint(self, *given: object) -> Footprint:
        return Footprint()

    def prepare(self, weights: ConvWeights, *given: object) -> ConvWeights:
        return weights

    def bind(self, weights: ConvWeights, shape: GraphConvShape, *given: object) -> Any:
        def run(inputs: Any, out: Any, scratch: Any, pooled: Any) -> None:
            exact = definition.convolve(shape, weights, inputs)
            out[...], pooled[...] = exact, definition.pooled(shape, exact) + self._off

        return SimpleNamespace(run=run)


def test_a_second_output_is_checked_too() -> None:
    large = GraphConvShape((3,), 2, (30, 41, 63), (3, 3, 3), pooled=Pooled((1, 2, 3), (2, 0, 1), (26, 19, 20)))
    shape = graph_check.small(large)
    assert isinstance(shape, GraphConvShape)
    assert shape.out < large.out
    assert shape.pooled == Pooled((1, 2, 3), (2, 0, 1), (shape.out[0] - 2, shape.out[1] // 2, (shape.out[2] - 1) // 3))
    for off in (0.0, 1e-2):
        with ThreadPool(1) as pool:
            at, written, exact = graph_check.compared(shape, _Exact(off), Variant(), pool)  # type: ignore[arg-type]
        wrong = np.abs(written - exact).max(axis=1) > 1e-3
        assert {image for image, *_ in at} == {0, 1}
        assert [image for (image, *_), bad in zip(at, wrong, strict=True) if bad] == [1] * (
            prod(shape.pooled.m) * (off > 0)
        )


def test_an_image_that_is_mirrored_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="pads by itself"):
        predicted(tmp_path, border="reflect")
