"""Options are written down as they can be given again."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest

from tests.support.cli import Place
from znnpy.given_options import Given, command_line, given_options, held_place, python_call
from znnpy.options import InferOptions, PlanOptions


def test_only_options_that_were_given_are_written_down(tmp_path: Path) -> None:
    asked = InferOptions("v.h5", ram="2G", patch=(1, 2, 3), depth_first=False, border="valid", roi=None)
    assert given_options(asked) == ({"volume": "v.h5", "ram": "2G", "patch": (1, 2, 3), "depth_first": False}, False)
    assert given_options(asked, ("ram", "patch"))[0] == {"volume": "v.h5", "depth_first": False}


def test_callbacks_that_are_defaults_are_not_given() -> None:
    assert given_options(PlanOptions()) == ({}, False)
    assert given_options(PlanOptions(tell=print))[1]


def test_places_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "v.h5").touch()
    monkeypatch.chdir(tmp_path)
    assert held_place("v.h5") == str(tmp_path / "v.h5")
    assert held_place(Path("v.h5")) == str(tmp_path / "v.h5")
    assert held_place("v.h5::raw") == f"{tmp_path}/v.h5::raw"
    assert held_place("zarr2://v.h5") == f"zarr2://{tmp_path}/v.h5"
    assert held_place("s3://bucket/v.zarr") == "s3://bucket/v.zarr"
    assert held_place("gone.h5") == "gone.h5"
    for name in ("a", "zarr", "my data", "e::f"):
        (tmp_path / name).mkdir()
    assert held_place("zarr://a") == f"zarr://{tmp_path}/a"
    assert held_place("zarr://zarr::raw/0") == f"zarr://{tmp_path}/zarr::raw/0"
    assert held_place(f"file://{tmp_path}/my%20data::raw") == f"{tmp_path}/my data::raw"
    assert held_place("e::f") == f"{tmp_path}/e::f"
    assert held_place("fib25_boundary") == "fib25_boundary"


def test_objects_of_the_caller_are_described() -> None:
    given, has_objects = given_options(InferOptions(np.zeros((3, 3, 3)), network=["a.yaml", Path("b.yaml")]))
    assert has_objects
    assert given == {"volume": "<ndarray>", "network": ("a.yaml", "b.yaml")}
    assert python_call("infer", given) == "znnpy.infer(volume=<ndarray>, network=('a.yaml', 'b.yaml'))"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_numbers_that_json_lacks_are_kept_as_text(value: str) -> None:
    given, has_objects = given_options(InferOptions("v.h5", fill_missing=float(value)))
    assert (given, has_objects) == ({"volume": "v.h5", "fill_missing": value}, False)
    assert command_line("infer", [], {"fill_missing": value}) == f"znnpy infer --fill-missing {value}"
    assert python_call("infer", {"fill_missing": value}) == f"znnpy.infer(fill_missing=float('{value}'))"
    assert python_call("infer", {"fill_missing": 0.5, "dataset": value}) == (
        f"znnpy.infer(fill_missing=0.5, dataset='{value}')"
    )


def test_a_command_line_is_quoted() -> None:
    given: Given = {
        "network": ("a b.yaml", "c.yaml"),
        "patch": (4, 4, 4),
        "depth_first": False,
        "sharded": True,
        "ram": "2G",
        "only": ("cpu.conv.direct", "cpu.pool.fragments"),
    }
    line = command_line("infer", ["my volume.h5"], given)
    assert shlex.split(line) == [
        *("znnpy", "infer", "my volume.h5", "--network", "a b.yaml", "--network", "c.yaml", "--patch", "4,4,4"),
        *("--no-depth-first", "--sharded", "--ram", "2G", "--only", "cpu.conv.direct", "--only", "cpu.pool.fragments"),
    ]


@pytest.mark.slow
def test_a_command_line_runs(place: Place) -> None:
    asked = InferOptions(
        str(place.volume), str(place.folder / "net.yaml"), out=str(place.out), device="cpu", calibrate=False,
        patch=(4, 4, 4), roi="0:20,0:20,0:20", threads=1, only=("cpu.conv.direct", "cpu.pool.fragments"), overlap=None,
    )  # fmt: skip
    given, _ = given_options(asked)
    line = command_line("infer", [str(given.pop("volume"))], given)
    assert place.run(*shlex.split(line)[1:]).exit_code == 0
    assert place.prediction().shape == (2, 15, 13, 14)
