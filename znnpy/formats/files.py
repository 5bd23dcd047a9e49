"""Check files that a user names, with errors that help to find the right one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from reprlib import Repr

from znnpy.errors import NetworkFileError
from znnpy.messages import excerpt, option

LARGEST = 10**6  # limit of sizes and counts in a file, and of the resulting field of view
COUNT = f"a whole number from 1 to {LARGEST}"
MANY = 12  # names listed in a message
LONGEST_WORD = 100  # characters of an unknown word that are compared with the known ones

_TORCH, _KERAS, _TENSORFLOW = "a file of PyTorch", "a file of HDF5 or Keras", "a file of TensorFlow"
_FOREIGN = {  # files in which other tools keep networks with their weights, by suffix
    **dict.fromkeys((".pt", ".pth", ".pt2", ".ckpt", ".torchscript"), _TORCH),
    ".onnx": "a file of ONNX",
    **dict.fromkeys((".keras", ".h5", ".hdf5"), _KERAS),
    **dict.fromkeys((".pb", ".tflite"), _TENSORFLOW),
    ".caffemodel": "a file of Caffe",
}
_WEIGHTS = (".npz", ".safetensors")

_SHORT = Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHORT.maxother = 60


def shown(value: object) -> str:
    """Return `value` as a message shows it: short and on one line."""
    return "empty" if value is None else excerpt(_SHORT.repr(value))


def suggestion(word: object, known: Iterable[str]) -> str:
    """Advise which known word to use in place of an unknown one: a similar one if there is any, else any of them."""
    names = {name.lower(): name for name in known}
    given = word[:LONGEST_WORD] if isinstance(word, str) else shown(word)
    matches = get_close_matches(given.lower(), names, n=3)
    if matches:
        return f"did you mean {' or '.join(names[match] for match in matches)}?"
    every = [*names.values()]
    return f"use one of {', '.join(every[:MANY])}{' ...' if len(every) > MANY else ''}"


def require_file(path: Path, what: str, suffixes: Sequence[str], also: Sequence[str] = ()) -> None:
    """Raise NetworkFileError unless `path` is a file with one of the suffixes; OSError if that cannot be determined.

    what      what the file should hold, for the message: "network", "weights"
    also      further names to suggest, besides the files in the folder
    """
    accepted = " or ".join(suffixes)
    if path.is_dir():
        names = _names(path, suffixes)
        inside = f"give a file in it; {suggestion(path.name, names)}" if names else f"no {accepted} file is in it"
        raise NetworkFileError(f"{path} is a folder, not a {what} file; {inside}")
    if not path.exists():
        if not path.parent.is_dir():
            raise NetworkFileError(f"there is no {what} file {path}: its folder does not exist; correct the path")
        names = [*_names(path.parent, suffixes), *also]
        hint = suggestion(path.name, names) if names else f"no {accepted} file is in that folder; correct the path"
        raise NetworkFileError(f"there is no {what} file {path}; {hint}")
    if path.suffix.lower() not in suffixes:
        if advice := _foreign(path.suffix.lower(), what):
            raise NetworkFileError(f"{path} is {advice}")
        raise NetworkFileError(f"the name of a {what} file ends in {accepted}, but {path} does not; give such a file")
    if not path.is_file():
        raise NetworkFileError(f"{path} is a device or a pipe, not a {what} file; give a file on disk")


def _foreign(suffix: str, what: str) -> str | None:
    """Say which tool a file is of, and what to do with it; None if the suffix does not tell."""
    if suffix in _WEIGHTS:
        return (
            "a file of weights, and a network is a text file that lists the layers: give that .yaml file, and this one "
            f"by {option('weights')}"
        )
    kind = _FOREIGN.get(suffix)
    if kind is None:
        return None
    if what == "weights":
        return (
            f"{kind}, and weights are read from {' or '.join(_WEIGHTS)} only: save conv<i>_weight (out, in, z, y, x) "
            "and conv<i>_bias of every convolution i, counted from 0, with numpy.savez, as 'Your network' in the "
            "README shows"
        )
    return (
        f"{kind}, which is not read as a network: convert it to ONNX (networks of Keras and TensorFlow with tf2onnx), "
        "and give the .onnx file"
    )


def cannot_read(path: Path, error: OSError) -> NetworkFileError:
    """Return the error for a file that the system does not let us read."""
    return NetworkFileError(f"cannot read {path}: {error.strerror or error}; check its permissions and the disk")


def _names(folder: Path, suffixes: Sequence[str]) -> list[str]:
    """Return the names of the visible files in `folder` with one of the suffixes; none when it may not be listed."""
    try:
        found = [path for path in folder.iterdir() if path.suffix.lower() in suffixes and path.is_file()]
        return sorted(path.name for path in found if not path.name.startswith("."))
    except PermissionError:
        return []
