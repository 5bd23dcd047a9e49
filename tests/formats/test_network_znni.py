"""The 33 original .znni networks, and what is refused in such a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.messages import assert_holds
from znnpy.errors import NetworkFileError
from znnpy.network import Conv, MaxFilter, Maxout, Network, Pool
from znnpy.network_files import read_network
from znnpy.shapes import Vec3

CONTRADICTS_ITSELF = "VD2d3d-MP-p3.znni"


def size(text: str) -> Vec3:
    *z, y, x = map(int, text.split("x"))
    return (z[0] if z else 1), y, x


def test_original_33_files_agree_with_their_table(shared_data: Path) -> None:
    folder = shared_data / "znni_networks"
    row = re.compile(r"\| (\S+\.znni) \| (\d+) \| ([\dx]+)(?: \([\dx]+\))? \| ([\dx]+) \| (.*) \|")
    rows = [found.groups() for found in map(row.fullmatch, (folder / "README.md").read_text().splitlines()) if found]
    assert sorted(name for name, *_ in rows) == sorted(path.name for path in folder.glob("*.znni"))
    assert len(rows) == 33
    for name, channels, view, period, layers in rows:
        if name == CONTRADICTS_ITSELF:
            continue
        network = read_network(folder / name).network
        assert network.name == name.removesuffix(".znni")
        assert network.input_channels == int(channels), name
        assert network.field_of_view == size(view), name
        assert network.period == size(period), name
        kinds = {Conv: "C", Pool: "P", MaxFilter: "F", Maxout: "M"}
        assert [kinds[type(layer)] for layer in network.layers] == [word[0] for word in layers.split()], name
        convolutions = [layer for layer in network.layers if isinstance(layer, Conv)]
        assert [str(one.out) for one in convolutions] == re.findall(r"C\S+:(\d+)", layers), name
        assert {one.activation for one in convolutions} == {"relu"}


def test_header_contradicting_its_lines_is_refused(shared_data: Path) -> None:
    path = shared_data / "znni_networks" / CONTRADICTS_ITSELF
    with pytest.raises(NetworkFileError) as caught:
        read_network(path)
    assert_holds(caught.value, path, "line 1 says LAYERS:16", "LAYERS:17")


@pytest.mark.parametrize("end", ["", "\n", "\r\n\r\n"])
def test_axes_are_kept_and_line_ends_do_not_matter(end: str, tmp_path: Path) -> None:
    path = tmp_path / "a.znni"
    lines = ["INPUTS:2,  LAYERS:4", "CONV 2,3,4 6", "FOOL 1,2,3", "MAXOUT 3", "POOL\t5,1,2"]
    path.write_text((end or "\n").join(lines) + end, newline="")
    read = read_network(path)
    assert read.network == Network(
        "a", 2, (Conv((2, 3, 4), 6, "relu"), MaxFilter((1, 2, 3)), Maxout(3), Pool((5, 1, 2)))
    )
    assert read.weights is None


REFUSED = [
    ("", "the file is empty; its first line must be INPUTS:<channels>, LAYERS:<count>"),
    ("INPUTS:1", "line 1 is 'INPUTS:1', but must be INPUTS:<channels>, LAYERS:<count>; correct it"),
    (
        "\nINPUTS:0, LAYERS:1\nPOOL 2,2,2",
        "line 2: INPUTS is 0, but must be a whole number from 1 to 1000000; correct it",
    ),
    ("INPUTS:1, LAYERS:0", "line 1 says LAYERS:0, but a network needs at least one layer; add it"),
    (
        "INPUTS:1, LAYERS:2\nPOOL 2,2,2",
        "line 1 says LAYERS:2, but the layer lines after it are 1; write LAYERS:1, or add what is missing",
    ),
    ("INPUTS:1, LAYERS:1\nPOLL 2,2,2", "line 2: unknown layer 'POLL'; did you mean POOL?"),
    (
        "INPUTS:1, LAYERS:1\n\nPOOL 2",
        "line 3 is 'POOL 2', but must be POOL a,b,c, all whole numbers; correct it",
    ),
    (
        "INPUTS:1, LAYERS:1\nCONV 2,2,2",
        "line 2 is 'CONV 2,2,2', but must be CONV a,b,c maps, all whole numbers; correct it",
    ),
    (
        "INPUTS:1, LAYERS:1\nCONV 2,-1,2 3",
        "line 2 is 'CONV 2,-1,2 3', but must be CONV a,b,c maps, all whole numbers; correct it",
    ),
    (
        "INPUTS:1, LAYERS:1\nCONV 2,0,2 3",
        "line 2 is 'CONV 2,0,2 3', but every number must be a whole number from 1 to 1000000; correct it",
    ),
    (
        "INPUTS:3, LAYERS:1\nMAXOUT 2",
        "layer 0 (maxout of 2) does not divide the 3 maps it gets; change of, or the number of maps",
    ),
    (
        "INPUTS:1, LAYERS:2\nCONV 2,2,2 2\nPOOL 2,2",
        "some layers have two sizes and some three; write three everywhere, 1 along z for 2D",
    ),
]


@pytest.mark.parametrize(("content", "message"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_znni_file_is_refused_in_one_sentence(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.znni"
    path.write_text(content)
    with pytest.raises(NetworkFileError) as caught:
        read_network(path)
    assert str(caught.value) == f"{path}: {message}"
