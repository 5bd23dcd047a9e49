"""Weights: what is read, converted and refused; damaged files; random ones."""

from __future__ import annotations

import io
import os
import pickle
import sys
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

from tests.support.messages import assert_holds
from znnpy.errors import MissingExtraError, NetworkFileError
from znnpy.formats.weights import random_weights, read_weights, sha256
from znnpy.network import Conv, ConvWeights, Maxout, Network, Pool
from znnpy.network_files import read_network

Arrays = dict[str, npt.NDArray[Any]]

NETWORK = Network("tiny", 1, (Conv((1, 2, 3), 4, "relu"), Pool((2, 2, 2)), Maxout(2), Conv((1, 1, 2), 3)))
FIRST = "layer 0 (conv 1x2x3 -> 4 relu)"
SECOND = "layer 3 (conv 1x1x2 -> 3 none)"


@pytest.fixture
def arrays() -> Arrays:
    named: Arrays = {}
    for i, one in enumerate(random_weights(NETWORK, seed=20261120)):
        named[f"conv{i}_weight"], named[f"conv{i}_bias"] = one.weight, one.bias
    return named


def save_npz(path: Path, arrays: Arrays) -> Path:
    with path.open("wb") as stream:
        np.savez(stream, allow_pickle=True, **arrays)
    return path


def save_safetensors(path: Path, arrays: Arrays) -> Path:
    safetensors.numpy.save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)
    return path


SAVE: dict[str, Callable[[Path, Arrays], Path]] = {"w.npz": save_npz, "w.safetensors": save_safetensors}


def refusal(path: Path, network: Network = NETWORK) -> str:
    with pytest.raises(NetworkFileError) as caught:
        read_weights(path, network)
    message = str(caught.value)
    assert message.startswith(f"{path}: "), message
    return message.removeprefix(f"{path}: ")


def assert_equal(read: tuple[ConvWeights, ...], arrays: Arrays) -> None:
    assert len(read) == 2
    for i, one in enumerate(read):
        for array, name in ((one.weight, f"conv{i}_weight"), (one.bias, f"conv{i}_bias")):
            assert array.dtype == np.float32
            assert array.dtype.isnative
            assert array.flags.c_contiguous
            np.testing.assert_array_equal(array, arrays[name].astype(np.float32))


@pytest.mark.parametrize("name", SAVE)
@pytest.mark.parametrize("dtype", ["<f4", "<f8", "<f2"])
def test_real_floating_types_become_float32(name: str, dtype: str, arrays: Arrays, tmp_path: Path) -> None:
    stored = {key: array.astype(dtype) for key, array in arrays.items()}
    assert_equal(read_weights(SAVE[name](tmp_path / name, stored), NETWORK), stored)


def test_byte_order_array_order_and_compression_do_not_matter(arrays: Arrays, tmp_path: Path) -> None:
    stored = {key: np.asfortranarray(array.astype(">f8")) for key, array in reversed(arrays.items())}
    path = tmp_path / "W.NPZ"
    with path.open("wb") as stream:
        np.savez_compressed(stream, allow_pickle=True, **stored)
    assert_equal(read_weights(path, NETWORK), stored)


@pytest.mark.parametrize("name", SAVE)
def test_missing_and_unknown_arrays_are_refused(name: str, arrays: Arrays, tmp_path: Path) -> None:
    path = tmp_path / name
    bias = arrays.pop("conv1_bias")
    held = "conv0_weight, conv0_bias, conv1_weight" if name == "w.npz" else "conv0_bias, conv0_weight, conv1_weight"
    assert_holds(refusal(SAVE[name](path, arrays)), SECOND, "conv1_bias is missing", "(3,)", "float32", held)
    arrays |= {"conv1_bias": bias} | {f"conv{i}_bias": bias for i in range(2, 12)}
    message = refusal(SAVE[name](path, arrays))
    assert_holds(message, "no layer takes conv", "2 more", "conv0_weight, conv0_bias, conv1_weight, conv1_bias")


@pytest.mark.parametrize("name", SAVE)
def test_wrong_shape_is_refused(name: str, arrays: Arrays, tmp_path: Path) -> None:
    arrays["conv1_weight"] = arrays["conv1_weight"].swapaxes(0, 1)
    message = refusal(SAVE[name](tmp_path / name, arrays))
    assert_holds(message, SECOND, "conv1_weight has shape (2, 3, 1, 1, 2)", "must be (3, 2, 1, 1, 2)")


@pytest.mark.parametrize("dtype", ["int64", "bool", "complex64", "<U1", "object"])
def test_types_other_than_real_floating_are_refused(dtype: str, arrays: Arrays, tmp_path: Path) -> None:
    arrays["conv0_bias"] = np.zeros(4, dtype)
    message = refusal(save_npz(tmp_path / "w.npz", arrays))
    assert_holds(message, FIRST, f"conv0_bias has dtype {dtype}", "float32, float16 or float64")
    assert ("pickled" in message) == (dtype == "object")


def test_integers_in_safetensors_are_refused(arrays: Arrays, tmp_path: Path) -> None:
    arrays["conv0_bias"] = np.zeros(4, np.int16)
    assert "conv0_bias has dtype I16, but must be" in refusal(save_safetensors(tmp_path / "w.safetensors", arrays))


@pytest.mark.parametrize("name", SAVE)
def test_values_not_finite_are_refused(name: str, arrays: Arrays, tmp_path: Path) -> None:
    wide = arrays["conv0_weight"].astype(np.float64)
    wide[2, 0, 0, 1, 2] = 1e39  # finite, but not in float32
    wide[3, 0, 0, 0, 1] = np.nan
    arrays["conv0_weight"] = wide
    message = refusal(SAVE[name](tmp_path / name, arrays))
    assert_holds(message, FIRST, "conv0_weight", "2 of 24 values", "float32", "1e+39 at (2, 0, 0, 1, 2)")


def test_pickle_is_never_loaded(arrays: Arrays, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path(tmp_path / "went_off").touch, ())

    path = tmp_path / "w.npz"
    path.write_bytes(pickle.dumps(Bomb()))
    assert_holds(refusal(path), "not an .npz archive", "numpy.savez")
    arrays["conv0_bias"] = np.array([Bomb()] * 4, object)
    refusal(save_npz(path, arrays))
    assert not (tmp_path / "went_off").exists()


def test_zip_of_other_files_is_refused(arrays: Arrays, tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name in arrays:
            archive.writestr(name, b"hello")
    assert_holds(refusal(path), "conv0_weight is damaged", "5 of 8 bytes")


def npy(array: npt.NDArray[Any]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


BAD_MEMBERS = [
    (lambda whole: whole + b"x", "(97 bytes of an array of 96)"),
    (lambda whole: whole[:-1], "(95 bytes of an array of 96)"),
    (lambda whole: whole.replace(b"'shape': (", b"'shape': ["), "(its header is {'descr'"),
    (lambda whole: whole.replace(b"{'descr'", b"({'descr'"), "(its header is ({'descr'"),
    (lambda whole: whole.replace(b"<f4", b"<04"), "(its header names the dtype <04)"),
    (lambda whole: whole.replace(b"NUMPY\x01", b"NUMPY\x04"), "(.npy version (4, 0))"),
    (lambda whole: whole.replace(b"(4, 1", b"(True"), "(its header is {'descr'"),
    (lambda whole: whole[:8] + b"\x28\x23" + b"[" * 9000, "(its header has 9,000 bytes, more than the 1,024 that"),
    (lambda whole: whole[:8] + b"\xe8\x03" + b"-" * 1000, "(its header is -----"),
    (lambda whole: whole[:8] + b"\x04\x00" + b"\x1b[2J", r"(its header is \x1b[2J)"),
]


@pytest.mark.parametrize(("damage", "why"), BAD_MEMBERS, ids=[why for _, why in BAD_MEMBERS])
def test_damage_unseen_by_the_zip_checksum_is_refused(
    damage: Callable[[bytes], bytes], why: str, arrays: Arrays, tmp_path: Path
) -> None:
    path = tmp_path / "w.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            archive.writestr(f"{name}.npy", damage(npy(array)) if name == "conv0_weight" else npy(array))
    assert refusal(path).startswith(f"conv0_weight is damaged or cut short {why}")


def test_unusual_compression_is_refused(arrays: Arrays, tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2) as archive:
        for name, array in arrays.items():
            archive.writestr(f"{name}.npy", npy(array))
    assert_holds(refusal(path), "conv0_weight is damaged", "zip compression 12")


def test_wrong_header_allocates_nothing(arrays: Arrays, tmp_path: Path) -> None:
    """A file that claims a terabyte is refused by its header."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": (4, 10**11)})
    path = tmp_path / "w.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name in arrays:
            archive.writestr(f"{name}.npy", stream.getvalue())
    assert_holds(refusal(path), "conv0_weight has shape (4, 100000000000)", "must be (4, 1, 1, 2, 3)")


def written(path: Path, members: list[tuple[str, bytes]]) -> Path:
    """Write a compressed archive of these members, in which a name may occur twice."""
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        warnings.simplefilter("ignore")  # of a name that comes twice
        for name, content in members:
            archive.writestr(name, content)
    return path


def peak_bytes(path: Path, network: Network = NETWORK) -> int:
    """Return the most memory that Python takes to refuse a file."""
    tracemalloc.start()
    try:
        refusal(path, network)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_huge_header_is_not_read(tmp_path: Path) -> None:
    """A header of 256 MiB takes 256 KiB in the file. It was read whole, and ended in advice to allow pickles."""
    header = b"\x93NUMPY\x02\x00" + (2**28).to_bytes(4, "little") + b" " * 2**28
    path = written(tmp_path / "w.npz", [("conv0_weight.npy", header)])
    bare = Network("bare", 1, (Conv((1, 1, 1), 1),))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("conv0_bias.npy", npy(np.zeros(1, np.float32)))
    del header
    said = refusal(path, bare)
    assert_holds(said, "conv0_weight is damaged", "268,435,456 bytes", "1,024")
    assert peak_bytes(path, bare) < 2**22


@pytest.mark.parametrize("second", ["conv1_bias", "conv1_bias.npy"])
def test_duplicate_array_is_refused(second: str, arrays: Arrays, tmp_path: Path) -> None:
    members = [(f"{name}.npy", npy(array)) for name, array in arrays.items()]
    path = written(tmp_path / "w.npz", [*members, (second, npy(np.ones(3, np.float32)))])
    assert refusal(path) == "the file holds conv1_bias twice; save it again with numpy.savez"


def test_long_list_of_members_is_not_read(tmp_path: Path) -> None:
    path = written(tmp_path / "w.npz", [(f"{index:0200}", b"") for index in range(5000)])
    assert_holds(refusal(path), "the file is damaged", "1,230,000 bytes", "1,048,576")
    assert peak_bytes(path) < 2**22


def test_member_claiming_more_than_it_has_is_refused(tmp_path: Path) -> None:
    """The size that the archive states is compared with the header before memory is taken."""
    wide = Network("wide", 1, (Conv((8, 8, 8), 2**16),))
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": (2**16, 1, 8, 8, 8)})
    members = [("conv0_weight.npy", stream.getvalue()), ("conv0_bias.npy", npy(np.zeros(2**16, np.float32)))]
    path = written(tmp_path / "w.npz", members)
    assert_holds(refusal(path, wide), "conv0_weight is damaged", "0 bytes of an array of 134217728")
    assert peak_bytes(path, wide) < 2**22


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ((2**40).to_bytes(8, "little") + b"{}", "its header has 1,099,511,627,776 bytes, more than the 1,048,576"),
        ((2**19).to_bytes(8, "little") + b"[" * 2**19, "its header is nested too deeply"),
        (b"\x02" + bytes(7) + b"{}" + b"x" * 10**6, "Error while deserializing header"),
    ],
)
def test_hostile_headers_of_safetensors_are_refused(content: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    assert refusal(path).startswith(f"the file is damaged or cut short ({why}")


def test_duplicate_array_in_safetensors_is_refused(arrays: Arrays, tmp_path: Path) -> None:
    path = save_safetensors(tmp_path / "w.safetensors", arrays)
    path.write_bytes(path.read_bytes().replace(b'"conv1_bias"', b'"conv0_bias"'))
    assert refusal(path) == "the file holds conv0_bias twice; save it again"


@pytest.mark.parametrize("name", SAVE)
def test_pipes_and_devices_are_not_opened(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / f"zero_{name}").symlink_to("/dev/zero")
    for path in (tmp_path / name, tmp_path / f"zero_{name}"):
        with pytest.raises(NetworkFileError, match="is a device or a pipe, not a weights file; give a file on disk"):
            read_weights(path, NETWORK)


def test_array_of_an_npz_is_in_memory_once(tmp_path: Path) -> None:
    network = Network("wide", 1, (Conv((1, 1, 1), 512), Conv((2, 2, 2), 512)))
    named: Arrays = {}
    for i, one in enumerate(random_weights(network, seed=1)):
        named[f"conv{i}_weight"], named[f"conv{i}_bias"] = one.weight.astype(np.float64), one.bias
    path = save_npz(tmp_path / "w.npz", named)
    nbytes = sum(4 * array.size for array in named.values())
    tracemalloc.start()
    try:
        read_weights(path, network)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert nbytes <= peak < nbytes + 2**21, "a part of what the file holds in float64"


@pytest.mark.slow
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed], ids=["stored", "compressed"])
def test_every_damage_to_an_npz_is_noticed(save: Callable[..., None], arrays: Arrays, tmp_path: Path) -> None:
    """Every byte flipped, every few bytes cut: the right weights, or a NetworkFileError."""
    path = tmp_path / "w.npz"
    with path.open("wb") as stream:
        save(stream, **arrays)
    whole = path.read_bytes()
    right = sha256(read_weights(path, NETWORK))
    damaged = [whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :] for at in range(len(whole))]
    cut = [whole[:at] for at in range(0, len(whole), 7)]
    seen = 0
    for content in damaged + cut:
        path.write_bytes(content)
        try:
            assert sha256(read_weights(path, NETWORK)) == right
        except NetworkFileError:
            seen += 1
    assert seen > len(cut) + len(damaged) // 2


def test_damaged_safetensors_are_refused(arrays: Arrays, tmp_path: Path) -> None:
    path = save_safetensors(tmp_path / "w.safetensors", arrays)
    whole = path.read_bytes()
    for content in (b"", b"\xff" * 100, whole[:-3], whole[:20]):
        path.write_bytes(content)
        assert refusal(path).startswith("the file is damaged or cut short (")


def test_safetensors_is_optional(arrays: Arrays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_safetensors(tmp_path / "w.safetensors", arrays)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingExtraError) as caught:
        read_weights(path, NETWORK)
    assert_holds(caught.value, path, "pip install 'safetensors>=0.4'")


def test_missing_file_is_refused(arrays: Arrays, tmp_path: Path) -> None:
    save_npz(tmp_path / "cells.npz", arrays)
    with pytest.raises(NetworkFileError, match=r"there is no weights file .*/cell\.npz; did you mean cells\.npz\?$"):
        read_weights(tmp_path / "cell.npz", NETWORK)
    (tmp_path / "w.txt").touch()
    with pytest.raises(NetworkFileError, match=r"a weights file ends in \.npz or \.safetensors, but .*w\.txt does not"):
        read_weights(tmp_path / "w.txt", NETWORK)
    (tmp_path / "w.pt").touch()
    with pytest.raises(NetworkFileError) as caught:
        read_weights(tmp_path / "w.pt", NETWORK)
    assert_holds(caught.value, f"{tmp_path}/w.pt is a file of PyTorch", ".npz or .safetensors", "numpy.savez", "README")


def test_network_without_convolutions_needs_no_arrays(tmp_path: Path) -> None:
    assert read_weights(save_npz(tmp_path / "w.npz", {}), Network("pool", 1, (Pool((2, 2, 2)),))) == ()


def test_shipped_weights_equal_the_trained_ones(shared_data: Path) -> None:
    read = read_network("fib25_boundary")
    assert read.weights is not None
    weights = read_weights(read.weights, read.network)
    with np.load(shared_data / "fib25_boundary.npz") as original:
        assert len(original.files) == 2 * len(weights)
        for i, one in enumerate(weights):
            np.testing.assert_array_equal(one.weight, original[f"conv{i}_weight"])
            np.testing.assert_array_equal(one.bias, original[f"conv{i}_bias"])


def test_random_weights_keep_the_scale_of_activations() -> None:
    network = Network("wide", 8, (Conv((3, 4, 5), 40, "relu"), Maxout(4), Conv((1, 2, 3), 30, "relu")))
    first, second = random_weights(network)
    assert [one.weight.shape for one in (first, second)] == [(40, 8, 3, 4, 5), (30, 10, 1, 2, 3)]
    for one, fan in ((first, 8 * 60), (second, 10 * 6)):
        assert one.weight.dtype == one.bias.dtype == np.float32
        assert one.weight.std() == pytest.approx(np.sqrt(2 / fan), rel=0.05)
        assert 0 < np.abs(one.bias).max() < 0.3


def test_sha256_depends_on_values_shapes_and_seeds() -> None:
    one = random_weights(NETWORK)
    assert sha256(one) == sha256(random_weights(NETWORK, seed=0))
    assert sha256(one) != sha256(random_weights(NETWORK, seed=1))
    turned = (ConvWeights(one[0].weight.reshape(4, 1, 2, 1, 3), one[0].bias), one[1])
    assert sha256(one) != sha256(turned)
    changed = one[1].bias.copy()
    changed[2] = np.nextafter(changed[2], np.float32(1))
    assert sha256(one) != sha256((one[0], ConvWeights(one[1].weight, changed)))


def test_sha256_copies_no_weights() -> None:
    """Memory of a copy would stay with the process, and no plan would count it."""
    one = random_weights(Network("wide", 16, (Conv((8, 8, 8), 64),)))
    tracemalloc.start()
    sha256(one)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert one[0].weight.nbytes == 2**21
    assert peak < 2**16
