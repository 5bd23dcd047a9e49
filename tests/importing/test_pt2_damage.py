"""Files of torch.export.save that are damaged, hostile or of another kind: nothing in them is executed."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import time
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.damage import damaged_bytes, damaged_json
from tests.support.pt2_archives import Archive, attempt, read, refused, zipped
from znnpy.importing.pt2_archive import MOST_JSON
from znnpy.importing.torch_files import why_not_pt2

SEED = 20


class Bomb:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    created = tmp_path / "created"
    bomb = pickle.dumps(Bomb(created))
    made = Archive()
    made.members["data/sample_inputs/model.pt"] = bomb
    read(tmp_path, made)
    made.members["data/weights/weight_1"] = bomb
    made.weights["net.conv.bias"]["use_pickle"] = True
    refused(tmp_path, made, "net.conv.bias", "pickle", "torch.export.save(", "torch.onnx.export(")
    made.members["data/weights/model.pt"] = bomb
    refused(tmp_path, made, "pickle", "torch.export.save(torch.export.load(")
    refused(tmp_path, bomb, "pickle")
    refused(tmp_path, zipped({"net/data.pkl": bomb}), "pickle")
    refused(tmp_path, zipped({"net/constants.pkl": bomb, "net/code/x.py": b""}), "TorchScript")
    assert not created.exists()
    with pytest.raises(FileNotFoundError):
        os.rmdir(created)
    pickle.loads(bomb)
    assert created.exists()


# --- the zip file ---


def test_member_outside_the_folder_is_refused(tmp_path: Path) -> None:
    for name in ("other/x", "net/../../x", "/net/x", "net//x", "net", "net/a\\..\\x"):
        members = {f"net/{key}": content for key, content in Archive().contents().items()}
        refused(tmp_path, zipped(members | {name: b""}), "not in its folder")


def test_member_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = tmp_path / "net.pt2"
        path.write_bytes(Archive().zipped())
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("net/data/weights/weight_0", b"0" * 216)
    refused(tmp_path, path.read_bytes(), "weight_0", "twice")


def test_compressed_members_are_refused_before_they_are_read(tmp_path: Path) -> None:
    made = Archive()
    made.members["data/weights/weight_0"] = bytes(2**24)
    content = made.zipped(zipfile.ZIP_DEFLATED)
    assert len(content) < 2**17
    refused(tmp_path, content, "compressed")


def test_members_that_overlap_cannot_be_larger_than_the_file(tmp_path: Path) -> None:
    content = bytearray(Archive().zipped())
    directory = content.index(b"PK\x01\x02")
    assert content[directory + 46 :].startswith(b"net/data/weights/weight_0")
    struct.pack_into("<II", content, directory + 20, len(content), len(content))  # of the first member, both sizes
    refused(tmp_path, bytes(content), "damaged")


def test_long_graph_and_long_list_of_members_are_refused(tmp_path: Path) -> None:
    made = Archive()
    made.members["models/model.json"] = b" " * (MOST_JSON + 1)
    refused(tmp_path, made, f"{MOST_JSON + 1:,}")
    made = Archive()
    made.members = {f"data/weights/{'x' * 1000}{number}": b"" for number in range(1100)}
    refused(tmp_path, made, "list of members")


def test_cut_file_is_refused(tmp_path: Path) -> None:
    content = Archive().zipped()
    for length in (0, 1, 3, 4, 100, len(content) // 2, len(content) - 1):
        refused(tmp_path, content[:length])


FOREIGN: list[tuple[bytes, list[str]]] = [
    (b"", ["empty", "torch.export.save("]),
    (b"\x93NUMPY", ["torch.export.save("]),
    (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", ["weights_only=True", "module.load_state_dict("]),
    (b"\x80\x02X\x08\x00\x00\x00_modules", ["torch.export.save("]),
    (b"\0" * 257 + b"ustar" + b"\0" * 300, ["weights_only=True"]),
    (zipped({"n/data.pkl": b"\x80\x02}.", "n/data/0": b""}), ["weights_only=True))", "module.eval()"]),
    (zipped({"n/data.pkl": b"X\x0a\0\0\0state_dict"}), ["weights_only=True)['state_dict'])"]),
    (zipped({"n/data.pkl": b"X\x08\0\0\0_modules"}), ["module = ...; torch.export.save("]),
    (zipped({"n/constants.pkl": b"", "n/data.pkl": b"", "n/code/a.py": b""}), ["TorchScript", "torch.jit.load("]),
    (zipped({"serialized_exported_program.json": b"", "version": b""}), ["2.8", "torch.export.load("]),
    (zipped({"n/data/aotinductor/model/a.so": b""}), ["compiled"]),
    (zipped({"a.npy": b""}), ["models/model.json"]),
]


@pytest.mark.parametrize(("content", "parts"), FOREIGN, ids=range(len(FOREIGN)))
def test_foreign_file_is_recognised_by_its_content(tmp_path: Path, content: bytes, parts: list[str]) -> None:
    refused(tmp_path, content, *parts)
    why = why_not_pt2(tmp_path / "net.pt2")
    assert why is not None
    assert "\n" not in why


def test_archive_with_a_graph_is_no_foreign_file(tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    path.write_bytes(Archive().zipped())
    assert why_not_pt2(path) is None


# --- damage ---


def test_any_damaged_byte_gives_a_program_or_an_error(tmp_path: Path) -> None:
    rng, content = random.Random(SEED), Archive().zipped()
    path, began = tmp_path / "net.pt2", time.monotonic()
    directory = content.index(b"PK\x01\x02")
    places = [rng.randrange(len(content)) for _ in range(400)] + list(range(directory, directory + 80))
    places += list(range(len(content) - 22, len(content)))
    reads = 0
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= rng.randrange(1, 256)
        reads += attempt(path, bytes(damaged))
    for _ in range(200):
        reads += attempt(path, damaged_bytes(content, rng))
    assert 0 < reads < 200
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    "member",
    ["models/model.json", "data/weights/model_weights_config.json", "data/constants/model_constants_config.json"],
)
def test_any_damaged_document_gives_a_program_or_an_error(tmp_path: Path, member: str) -> None:
    rng, path = random.Random(SEED), tmp_path / "net.pt2"
    made = Archive()
    whole = json.loads(made.contents()[member])
    reads = 0
    for _ in range(400):
        made.members[member] = damaged_json(whole, rng).encode(errors="surrogatepass")
        reads += attempt(path, made.zipped())
    assert 0 < reads < 400


def test_random_bytes_are_refused(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    for head in (b"", b"PK\x03\x04", b"\x80\x02", b"PK\x05\x06"):
        for _ in range(20):
            assert not attempt(tmp_path / "net.pt2", head + rng.randbytes(rng.randrange(2000)))
