"""Recognise files of PyTorch that hold no graph that can be read, by their content, and say how to convert them."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

from znnpy.errors import NetworkFileError
from znnpy.files import read_regular
from znnpy.importing.exported import EXPORT
from znnpy.importing.pt2_archive import opened_zip
from znnpy.messages import excerpt

MOST_PICKLE = 2**20  # bytes of a pickle that are searched for words; it is never executed
HEAD = 512  # bytes at the beginning that tell which kind of file it is
LONGEST_PATH = 120  # characters of a path in a line of Python

_MODEL = re.compile(r"models/[^/]+\.json")
_OLD_WEIGHTS = re.compile(r"data/weights/[^/]+\.pt")
_STATE_DICT = b"X\x0a\x00\x00\x00state_dict"  # the text as a pickle holds it
_MODULE = b"X\x08\x00\x00\x00_modules"  # the name of an attribute of every module


def why_not_pt2(path: Path) -> str | None:
    """Say what a file is that is no PT2 archive, and how to make one of it; None for an archive with a graph.

    The text continues a sentence that begins with the path. OSError if the file cannot be opened.
    """
    head = read_regular(path, HEAD)
    if head.startswith(b"PK\x03\x04"):
        try:
            with opened_zip(path) as archive:
                return _why_not_zip(path, archive)
        except NetworkFileError as error:
            return f"cannot be read: {error}"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return _pickled(path, read_regular(path, MOST_PICKLE))
    if head[257:262] == b"ustar":
        return _pickled(path, b"")
    what = f"begins with {excerpt(head[:8])}" if head else "is empty"
    return f"is no file of PyTorch, as it {what}; {_export('module = ...')}"


def _why_not_zip(path: Path, archive: zipfile.ZipFile) -> str | None:
    names = archive.namelist()
    ends = {name.partition("/")[2] for name in names}
    if "serialized_exported_program.json" in names or any(map(_OLD_WEIGHTS.fullmatch, ends)):
        return (
            "was written by torch.export.save of PyTorch 2.8 or older, which keeps weights as a pickle, and these are "
            "not read; write it again with PyTorch 2.9 or newer: "
            f"`torch.export.save(torch.export.load({_quoted(path)}), 'net.pt2')`"
        )
    if any(map(_MODEL.fullmatch, ends)):
        return None
    if "constants.pkl" in ends or "bytecode.pkl" in ends:
        weights = f"module.load_state_dict(torch.jit.load({_quoted(path)}).state_dict())"
        return f"is a TorchScript archive, whose graph is not read; {_export(f'module = ...; {weights}')}"
    if pickles := [name for name in names if name.split("/", 1)[-1] == "data.pkl"]:
        with archive.open(pickles[0]) as stream:
            return _pickled(path, stream.read(MOST_PICKLE))
    if any(name.startswith("data/aotinductor/") for name in ends):
        return f"holds compiled code and no graph; {_export('module = ...')}"
    return f"is a zip archive without a graph of PyTorch (models/model.json); {_export('module = ...')}"


def _pickled(path: Path, pickle: bytes) -> str:
    """Say what to do with a file of torch.save. Its words tell whether it holds a whole module or only weights."""
    if _MODULE in pickle:
        return (
            "is a module that torch.save stored as a pickle, which may run any code and is not read; "
            f"{_export('module = ...')}"
        )
    key = "['state_dict']" if _STATE_DICT in pickle else ""
    load = f"module.load_state_dict(torch.load({_quoted(path)}, weights_only=True){key})"
    return (
        "holds weights that torch.save stored as a pickle, without the layers that use them, and pickles are not read; "
        f"{_export(f'module = ...; {load}')}"
    )


def _export(lines: str) -> str:
    return f"make the module in Python and export it: `{lines}; {EXPORT}`"


def _quoted(path: Path) -> str:
    return repr(excerpt(path, LONGEST_PATH))
