"""network.yaml: what is read, what is refused and in which words, and the networks that ship."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from tests.support.messages import assert_holds
from znnpy.admissible import period_of
from znnpy.errors import NetworkFileError
from znnpy.formats import network_yaml
from znnpy.formats.layer_entries import ENTRIES
from znnpy.lattices import reaches_of
from znnpy.network import Conv, MaxFilter, Maxout, Network, Normalise, Pool
from znnpy.network_files import DEFAULT, LARGEST_FILE, read_network, shipped
from znnpy.shapes import ACTIVATIONS

POOL = "input_channels: 1\nlayers:\n- {type: pool, window: 2}\n"  # a network to which a test adds its mistake
SIZE = "a whole number from 1 to 1000000 or three of them, [z, y, x]"
ONE_LINE = "text on one line of at most 200 characters"
CONV_EXAMPLE = "layers: [{type: conv, kernel: [3, 3, 3], out: 1}]"


def layer(text: str) -> str:
    return f"input_channels: 1\nlayers:\n- {text}\n"


def write(folder: Path, content: str | bytes, name: str = "net.yaml") -> Path:
    path = folder / name
    path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    return path


def refusal(path: Path) -> str:
    """Return the message with which reading `path` ends, without the path in front."""
    with pytest.raises(NetworkFileError) as caught:
        read_network(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: "), message
    assert "\n" not in message
    assert "pydantic" not in message
    return message.removeprefix(f"{path}: ")


def test_full_grammar_is_read(tmp_path: Path) -> None:
    read = read_network(
        write(
            tmp_path,
            """\ufeff
name: all_of_it
description: 2026-11-20
input_channels: 3
normalise: {mean: [1, 2.5, -3e1], std: 1e-3}
weights: sub/w.npz
layers:
- {type: conv, kernel: [1, 2, 3], out: 4, activation: softmax}
- {type: conv, kernel: 3, out: 4}
- {type: pool, window: [1, 2, 5]}
- {type: maxfilter, window: 2}
- {type: maxout, of: 2}
field_of_view: [4, 7, 14]
""",
        )
    )
    assert read.network == Network(
        "all_of_it",
        3,
        (Conv((1, 2, 3), 4, "softmax"), Conv((3, 3, 3), 4), Pool((1, 2, 5)), MaxFilter((2, 2, 2)), Maxout(2)),
        Normalise((1.0, 2.5, -30.0), (1e-3, 1e-3, 1e-3)),
    )
    assert read.weights == tmp_path / "sub" / "w.npz"
    assert read.path == tmp_path / "net.yaml"


def test_scalars_follow_the_core_schema_of_yaml_1_2(tmp_path: Path) -> None:
    """YAML 1.1 would read 010 as 8 and 1:30 as 90."""
    read = read_network(write(tmp_path, POOL + "- {type: conv, kernel: [010, 0o7, 0x1F], out: +3}\nname: 1:30\n"))
    assert read.network.layers[1] == Conv((10, 7, 31), 3)
    assert read.network.name == "1:30"
    for text in ("yes", "2026-11-20", "1_000", "0b1", "12e03x"):
        assert read_network(write(tmp_path, f"{POOL}name: {text}\n")).network.name == text


def test_layer_may_be_repeated_by_an_alias(tmp_path: Path) -> None:
    content = layer("&twice {type: conv, kernel: &k [1, 2, 3], out: 4}") + "- *twice\n- {type: pool, window: *k}\n"
    once = Conv((1, 2, 3), 4)
    assert read_network(write(tmp_path, content)).network.layers == (once, once, Pool((1, 2, 3)))


@pytest.mark.slow
def test_hostile_yaml_ends_within_seconds(tmp_path: Path) -> None:
    """957 bytes of merge keys within each other took over 40 s, and brackets of no depth that is read as long."""
    merges = "a0: &a0 {x: 1}\n" + "".join(
        f"a{i}: &a{i}\n  <<: [{', '.join([f'*a{i - 1}'] * 8)}]\n" for i in range(1, 24)
    )
    long = ["? " * 2**17, "[a, " * 2**16, "- {type: pool, window: 2}\n" * 10_000, "!" * 2**17, "# \n" * 2**16]
    start = time.process_time()
    for content in (merges, *long):
        refusal(write(tmp_path, content))
    assert time.process_time() - start < 12, "six files, each in under 2 s"


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_only_regular_files_are_opened(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "net.yaml"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(NetworkFileError, match="is a device or a pipe, not a network file; give a file on disk"):
        read_network(path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("net.h5", "HDF5 or Keras"),
        ("net.keras", "HDF5 or Keras"),
        ("net.pb", "TensorFlow"),
    ],
)
def test_network_files_of_other_tools_are_refused_with_advice(name: str, kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, b"PK\x03\x04", name)
    with pytest.raises(NetworkFileError) as caught:
        read_network(path)
    assert_holds(caught.value, f"{path} is a file of {kind}", "tf2onnx", ".onnx")


@pytest.mark.parametrize("name", ["net.pt", "net.PTH", "net.ckpt", "net.torchscript"])
def test_network_files_of_pytorch_are_refused_with_the_lines_that_convert_them(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, b"\x80\x02}q\x00.", name)
    with pytest.raises(NetworkFileError) as caught:
        read_network(path)
    assert_holds(caught.value, f"{path} ", "torch.export.save(", "weights_only=True")


def test_weights_file_as_network_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NetworkFileError, match=r"give that \.yaml file, and this one by `weights`$"):
        read_network(write(tmp_path, b"PK\x03\x04", "net.npz"))


def test_control_characters_in_file_names_are_escaped(tmp_path: Path) -> None:
    assert read_network(write(tmp_path, POOL, "a\x1b[31mb.yaml")).network.name == r"a\x1b[31mb"


def test_optional_entries_may_be_missing_or_empty(tmp_path: Path) -> None:
    for text in (POOL, POOL + "name:\nnormalise:\nweights: ~\nfield_of_view: null\n"):
        read = read_network(write(tmp_path, text))
        assert (read.network, read.weights) == (Network("net", 1, (Pool((2, 2, 2)),)), None)


REFUSED = [
    # the whole file
    ("", f"the file is empty, but must be a mapping; write at least input_channels: 1, {CONV_EXAMPLE}"),
    ("[1, 2]", f"the file is [1, 2], but must be a mapping; write at least input_channels: 1, {CONV_EXAMPLE}"),
    ("layers: []", "input_channels is missing; add for example input_channels: 1"),
    ("input_channels: 1", f"layers is missing; add for example {CONV_EXAMPLE}"),
    (
        "input_channels: 1\nlayers: []",
        f"layers is [], but must be a list of at least one layer; write for example {CONV_EXAMPLE}",
    ),
    (
        "input_channels: 1\nlayers: {a: 1}",
        f"layers is {{'a': 1}}, but must be a list of at least one layer; write for example {CONV_EXAMPLE}",
    ),
    (
        "input_channels: 0\nlayers: [1]",
        "input_channels is 0, but must be a whole number from 1 to 1000000; write for example input_channels: 1",
    ),
    (POOL + "discription: x", "unknown key 'discription'; did you mean description?"),
    (
        POOL + "1: 2",
        "unknown key 1; use one of name, description, input_channels, normalise, weights, layers, field_of_view, "
        "output, pad_to_period, meaning, windows",
    ),
    (POOL + "name: 337", f"name is 337, but must be {ONE_LINE}; write for example name: my_network"),
    (POOL + r'name: "a\0b"', rf"name is 'a\x00b', but must be {ONE_LINE}; write for example name: my_network"),
    (
        POOL + "weights: [a]",
        f"weights is ['a'], but must be the path of a file, as {ONE_LINE}; write for example weights: my_network.npz",
    ),
    (
        POOL + "field_of_view: [2, 2, 3]",
        "field_of_view is 2x2x3, but the layers give 2x2x2; correct the layers, or delete the line",
    ),
    # layers
    (layer("conv"), "layer 0 is 'conv', but must be a mapping such as {type: pool, window: [2, 2, 2]}"),
    (layer("{kernel: 3}"), f"layer 0: type is missing; add one of {', '.join(ENTRIES)}"),
    (
        POOL + "- {type: dropout}",
        "layer 1: type is 'dropout', which is not a layer type; use one of conv, pool, maxfilter, maxout, "
        "conv_transpose, average_pool, upsample, crop, pad, concat, add, multiply ...",
    ),
    (layer("{type: Convv}"), "layer 0: type is 'Convv', which is not a layer type; did you mean conv?"),
    (layer("{type: [conv]}"), "layer 0: type is ['conv'], which is not a layer type; did you mean conv?"),
    (layer("{type: conv, kernal: 3, out: 1}"), "layer 0 (conv): unknown key 'kernal'; did you mean kernel?"),
    (
        layer("{type: conv, kernel: 3, out: 1, output_padding: 1}"),
        "layer 0 (conv): unknown key 'output_padding'; did you mean padding?",
    ),
    (layer("{type: conv, out: 1}"), "layer 0 (conv): kernel is missing; add for example kernel: [3, 3, 3]"),
    (layer("{type: maxout}"), "layer 0 (maxout): of is missing; add for example of: 2"),
    *(
        (
            layer(f"{{type: conv, kernel: {came}, out: 1}}"),
            f"layer 0 (conv): kernel is {shown}, but must be {SIZE}; write for example kernel: [3, 3, 3]",
        )
        for came, shown in [
            ("[3, -3, 3]", "[3, -3, 3]"),
            ("[3, 3]", "[3, 3]"),
            ("[3, 3, 3, 3]", "[3, 3, 3, 3]"),
            ("0", "0"),
            ("true", "True"),
            ("[1, yes, 1]", "[1, 'yes', 1]"),
            ("3.0", "3.0"),
            ("'3'", "'3'"),
            ("", "empty"),
            ("{z: 3}", "{'z': 3}"),
            ("1000001", "1000001"),
            ("x" * 200, f"'{'x' * 27}...{'x' * 28}'"),
        ]
    ),
    (
        layer("{type: conv, kernel: 3, out: 1.5}"),
        "layer 0 (conv): out is 1.5, but must be a whole number from 1 to 1000000 (maps); write for example out: 16",
    ),
    (
        layer("{type: conv, kernel: 3, out: 4, activation: mish}"),
        "layer 0 (conv): activation is 'mish', but must be one of none, relu, leaky_relu, elu, selu, gelu, gelu_tanh, "
        "silu, softplus, sigmoid, tanh, hardswish, clip, softmax, or a mapping such as {function: leaky_relu, "
        "slope: 0.1}; write for example activation: relu",
    ),
    (
        POOL + "- {type: maxfilter, window: [2, 0, 2]}",
        f"layer 1 (maxfilter): window is [2, 0, 2], but must be {SIZE}; write for example window: [2, 2, 2]",
    ),
    (
        POOL + "- {type: maxout, of: 2}",
        "layer 1 (maxout of 2) does not divide the 1 maps it gets; change of, or the number of maps",
    ),
    (
        layer("{type: pool, window: 1000000}") + "- {type: pool, window: 2}",
        "the layers give a field of view of more than 1000000 voxels along an axis; correct kernels and windows",
    ),
    # normalise
    (POOL + "normalise: 3", "normalise: expected a mapping, not 3; write mean: 130.0, std: 33.5"),
    (POOL + "normalise: {mean: 3}", "normalise: std is missing; add for example std: 33.5"),
    (POOL + "normalise: {mean: 3, std: 1, sdt: 1}", "normalise: unknown key 'sdt'; did you mean std?"),
    *(
        (
            POOL + f"normalise: {{mean: 3, std: {came}}}",
            f"normalise: std is {shown}, but must be a finite number above 0 or one per input channel; "
            "write for example std: 33.5",
        )
        for came, shown in [
            ("0", "0"),
            ("-1.5", "-1.5"),
            (".inf", "inf"),
            ("1e-300", "1e-300"),
            ("[1, false]", "[1, False]"),
        ]
    ),
    (
        POOL + "normalise: {mean: .nan, std: 1}",
        "normalise: mean is nan, but must be a finite number or one per input channel; write for example mean: 130.0",
    ),
    (
        POOL + "normalise: {mean: [1, 2], std: 1}",
        "normalise: mean has 2 values for input_channels: 1; write one number, or one per channel",
    ),
    (
        POOL + "normalise: {mean: 1, std: []}",
        "normalise: std has 0 values for input_channels: 1; write one number, or one per channel",
    ),
    # YAML
    (
        "a: [1",
        "line 1, column 6: not valid YAML: while parsing a flow sequence, expected ',' or ']', but got "
        "'<stream end>'; correct it there",
    ),
    (POOL + "a: b: c", "line 4, column 5: not valid YAML: mapping values are not allowed here; correct it there"),
    (
        POOL + "input_channels: 3",
        "line 4, column 1: not valid YAML: key 'input_channels' is given twice; correct it there",
    ),
    (
        layer("{type: pool, window: 2, window: 3}"),
        "line 3, column 27: not valid YAML: key 'window' is given twice; correct it there",
    ),
    (
        "a: !!python/object/apply:os.getcwd []",
        "line 1, column 4: the tag tag:yaml.org,2002:python/object/apply:os.getcwd is not read; delete it",
    ),
    ("a: !!int 3", "line 1, column 4: the tag tag:yaml.org,2002:int is not read; delete it"),
    ("a: " + "9" * 5000, "line 1, column 4: a number of 5000 digits; correct it there"),
    ("a: 1\n---\nb: 1", "line 2, column 1: a second document begins; delete it, or what is before it"),
    ("%YAML 1.1\n---\na: 1", "line 2, column 1: it says that it is YAML of another version than 1.2; delete that line"),
    ("a: \x01", "not valid YAML: character 1 at position 3; delete it"),
    (r'a: "\U00110000"', "not valid YAML: chr() arg not in range(0x110000); correct it"),
    ("[" * 5000, "line 1, column 17: more than 16 lists and mappings within each other; flatten them"),
    (
        layer("&a [*a]"),
        "line 3, column 7: the alias *a stands for nothing that ends before it; correct it",
    ),
    ("<<: {a: 1}", "line 1, column 1: merge keys (<<) are not read; write the keys themselves"),
    ("&a <<: *a", "line 1, column 1: merge keys (<<) are not read; write the keys themselves"),
    ("? [a]\n: 1", "line 1, column 3: a list or mapping is a key; write a word there"),
    (
        "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}' if i else 'x'] * 9)}]\n" for i in range(9)),
        "line 5, column 15: more than 20000 values, as no network file has; shorten it",
    ),
    (
        POOL + "- {type: pool, window: 1}\n" * 500,
        "a network has at most 500 layers, and this one has 501; split it",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("content", "message"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_network_is_refused_in_one_sentence(content: str, message: str, tmp_path: Path) -> None:
    assert refusal(write(tmp_path, content)) == message


def test_hidden_files_are_not_suggested(tmp_path: Path) -> None:
    write(tmp_path, POOL, ".net.yaml")
    with pytest.raises(NetworkFileError) as caught:
        read_network(tmp_path / "net.yml")
    assert ".net.yaml" not in str(caught.value)
    with pytest.raises(NetworkFileError, match=r"is a folder, not a network file; no .* file is in it$"):
        read_network(tmp_path)


def test_missing_file_suggests_near_names(tmp_path: Path) -> None:
    write(tmp_path, POOL, "cells.yaml")
    with pytest.raises(NetworkFileError, match=r"there is no network file .*/celsl\.yaml; did you mean cells\.yaml\?$"):
        read_network(tmp_path / "celsl.yaml")
    with pytest.raises(NetworkFileError, match=r"there is no network file .*/m337; did you mean n337\?$"):
        read_network(tmp_path / "m337")
    with pytest.raises(NetworkFileError, match=rf"/q; use one of cells\.yaml, {', '.join(shipped())}$"):
        read_network(tmp_path / "q")
    with pytest.raises(NetworkFileError, match=r"nowhere/net\.yaml: its folder does not exist; correct the path$"):
        read_network(tmp_path / "nowhere" / "net.yaml")


def test_file_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NetworkFileError, match=r"is a folder, not a network file; no \.yaml or .* or \.pt2 file"):
        read_network(tmp_path)
    hdf5 = write(tmp_path, b"\x89HDF\r\n", "net.yml")
    with pytest.raises(NetworkFileError, match="is not text: byte 0x89 at position 0 is not UTF-8"):
        read_network(hdf5)
    with pytest.raises(NetworkFileError, match=r"folder, not a network file; give a file in it; use one of net\.yml$"):
        read_network(tmp_path)
    large = write(tmp_path, b" " * (LARGEST_FILE + 1), "large.yaml")
    with pytest.raises(NetworkFileError, match="is larger than 262144 bytes, so it is not a network file"):
        read_network(large)
    other = write(tmp_path, POOL, "net.json")
    with pytest.raises(
        NetworkFileError,
        match=r"name of a network file ends in \.yaml or \.yml or \.znni or \.onnx or \.pt2, but .*net\.json does not",
    ):
        read_network(other)
    with pytest.raises(NetworkFileError, match=r"cannot read x+: File name too long; check"):
        read_network("x" * 300)


layers = st.one_of(
    st.builds(
        Conv,
        st.tuples(*[st.integers(1, 9)] * 3),
        st.integers(1, 5).map(lambda half: 2 * half),
        st.sampled_from(ACTIVATIONS),
    ),
    st.builds(Pool, st.tuples(*[st.integers(1, 5)] * 3)),
    st.builds(MaxFilter, st.tuples(*[st.integers(1, 5)] * 3)),
)
numbers = st.floats(-1e30, 1e30, allow_subnormal=False)


@pytest.mark.slow
@given(st.lists(layers, min_size=1, max_size=6), st.text("abc_ é:#'\"-1", min_size=1), numbers, st.floats(1e-30, 1e30))
def test_written_network_is_read_back(chain: list[Conv | Pool | MaxFilter], name: str, mean: float, std: float) -> None:
    network = Network(name, 2, tuple(chain), Normalise((mean, mean), (std, 1.0)))
    written = {
        "name": name,
        "input_channels": 2,
        "normalise": {"mean": mean, "std": [std, 1]},
        "layers": [
            {"type": "conv", "kernel": list(one.kernel), "out": one.out, "activation": one.activation}
            if isinstance(one, Conv)
            else {"type": one.type, "window": list(one.window)}
            for one in chain
        ],
        "field_of_view": list(network.field_of_view),
    }
    text = io.StringIO()
    YAML(typ="safe", pure=True).dump(written, text)
    read = network_yaml.parse(text.getvalue(), "other")
    assert read == (network, None, network.field_of_view)


PAPER = {"n337": "m36", "n537": "m56", "n726": "m76", "n926": "m96"}


def test_shipped_networks_have_their_published_sizes() -> None:
    assert shipped() == ("fib25_boundary", "fib25_unet", "n337", "n537", "n726", "n926")
    networks = {name: read_network(name).network for name in shipped()}
    assert [name for name, network in networks.items() if network.meaning == "whole"] == ["fib25_unet"]
    assert (reaches_of(networks["fib25_unet"])[-1], period_of(networks["fib25_unet"])) == ((100,) * 3, (8,) * 3)
    views = {name: network.field_of_view for name, network in networks.items() if network.meaning == "sliding"}
    assert views == {
        "fib25_boundary": (27, 27, 27),
        "n337": (85, 85, 85),
        "n537": (163, 163, 163),
        "n726": (117, 117, 117),
        "n926": (155, 155, 155),
    }


def test_file_with_the_name_of_a_shipped_network_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_network("n337").network.name == "n337"
    write(tmp_path, POOL, "n337")
    with pytest.raises(NetworkFileError, match=r"the name of a network file ends in .*, but n337 does not"):
        read_network("n337")


@pytest.mark.parametrize(("name", "original"), PAPER.items())
def test_networks_of_table_iii_have_the_original_layers(name: str, original: str, shared_data: Path) -> None:
    ours = read_network(name).network
    theirs = read_network(shared_data / "znni_networks" / f"{original}.znni").network
    assert ours.layers == theirs.layers
    assert (ours.input_channels, ours.output_channels, ours.normalise) == (1, 3, None)


def test_default_network_is_the_trained_one(shared_data: Path) -> None:
    read = read_network(DEFAULT)
    assert read.network.parameters == 42_609
    assert read.path is not None
    assert read.weights is not None
    for ours in (read.path, read.weights):
        assert ours.read_bytes() == (shared_data / ours.name).read_bytes()
