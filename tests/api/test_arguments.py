"""Words of the library that the command line would have refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cli import Place
from znnpy.errors import NetworkFileError, ShapeError, VolumeError
from znnpy.inference import infer
from znnpy.planning import plan
from znnpy.trained import load_network


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"output_dtype": "int16"}, "there is no output dtype 'int16'; choose one of float32, float16, uint8"),
        ({"border": "mirror"}, "there is no border 'mirror'; choose one of valid, reflect"),
        ({"overwrite": True, "resume": True}, "give one of them"),
    ],
)
def test_invalid_arguments_of_infer_are_value_errors(place: Place, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        infer(place.volume, place.folder / "net.yaml", out=place.out, **arguments)
    assert not place.out.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"border": "mirror"}, "there is no border 'mirror'"),
        ({"output_dtype": "int16"}, "there is no output dtype 'int16'"),
        ({"volume": "volume.h5", "shape": (50, 50, 50)}, "give one of them"),
    ],
)
def test_invalid_arguments_of_plan_are_value_errors(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan("fib25_boundary", **arguments)


def test_network_without_convolutions_needs_no_weights(tmp_path: Path) -> None:
    (tmp_path / "pools.yaml").write_text("input_channels: 1\nlayers:\n- {type: pool, window: [1, 2, 2]}\n")
    grey = np.random.default_rng(2).integers(0, 256, (3, 5, 6), np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(grey, (1, 2, 2)).max(axis=(3, 4, 5))
    np.testing.assert_array_equal(load_network(tmp_path / "pools.yaml")(grey)[0], windows)


@pytest.mark.parametrize(
    ("name", "content", "also"),
    [
        ("a.znni", "INPUTS:1, LAYERS:1\nCONV 2,2,2 1\n", r"npz'$"),
        (
            "a.yaml",
            "input_channels: 1\nlayers: [{type: conv, kernel: 2, out: 1}]",
            "npz', or name it in the network",
        ),
    ],
)
def test_missing_weights_are_refused_with_advice(tmp_path: Path, name: str, content: str, also: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(NetworkFileError, match=r"give weights='FILE\." + also):
        load_network(tmp_path / name)


@pytest.mark.parametrize(
    ("array", "said"),
    [
        ([[[1, 2]]], "is a numpy array, not list; make it with np.asarray"),
        (None, "not NoneType"),
        (np.ma.masked_less(np.zeros((40, 40, 40)), 1), "the array is masked, and masks are not read"),
    ],
)
def test_arrays_of_other_types_are_refused(array: Any, said: str) -> None:
    with pytest.raises(VolumeError, match=said):
        load_network("fib25_boundary")(array)


def test_sizes_without_three_axes_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"an output patch has three sizes \(z, y, x\), not \(8, 8\)"):
        plan("fib25_boundary", shape=(50, 50, 50), patch=(8, 8))  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"a shape has three sizes \(z, y, x\), not \(50, 50\)"):
        plan("fib25_boundary", shape=(50, 50))  # type: ignore[arg-type]


def test_single_primitive_may_be_given_without_a_list() -> None:
    chosen = plan("fib25_boundary", shape=(50, 50, 50), only="cpu.conv.direct")
    names = {choice.primitive for choice in chosen.choices}
    assert {name for name in names if ".conv." in name} == {"cpu.conv.direct"}
    assert {name for name in names if ".pool." in name} <= {"cpu.pool.fragments", "cpu.pool.fragments_lanes"}
