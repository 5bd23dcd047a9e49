"""Read a model description of bioimage.io (rdf.yaml), versions 0.4 and 0.5: a network's file, and what goes around it.

A description names files in its own folder alone, and no code that it names is run. Its halo is ignored: it says how
much of a tile's edge to cut off, and a volume that is computed as a whole has no such edges.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from znnpy.errors import NetworkFileError
from znnpy.files import open_regular, read_regular
from znnpy.formats.entries import AnyEntry, Count, Entry, check
from znnpy.formats.files import COUNT, cannot_read, shown, suggestion
from znnpy.formats.yaml12 import read_yaml
from znnpy.importing.description_steps import Layout, postprocessing, preprocessing
from znnpy.importing.finish import Wishes
from znnpy.importing.imported import Tested
from znnpy.importing.processing import OutputSteps, Processing
from znnpy.importing.recognised import LARGEST_DESCRIPTION, description_in
from znnpy.messages import excerpt

READ_BYTES = 2**20  # of a file whose digest is computed
_VERSION = re.compile(r"0\.(4|5)\.\d{1,3}")
_LETTERS = {"b": "n", "c": "c", "z": "z", "y": "y", "x": "x"}  # of axes in format 0.4
_ORDERS = ("nczyx", "nzyxc", "ncyx", "nyxc")
_READ = {"onnx": ".onnx", "pytorch_exported": ".pt2"}  # weights that are read, the best first, and how files end
_EXPORT = "make the network in Python, and give it to znnpy.from_torch(module, description={path})"
_NOT_READ = {  # weights that are not, and what to do instead
    "pytorch_state_dict": f"weights alone, and no source of a description is run; {_EXPORT}",
    "torchscript": f"a graph of TorchScript, which is not read; {_EXPORT}, or add weights in ONNX",
    "keras_hdf5": "a model of Keras, which is not read; convert it with tf2onnx, and add weights in ONNX",
    "keras_v3": "a model of Keras, which is not read; write it with model.export('net.onnx', format='onnx')",
    "tensorflow_saved_model_bundle": "a model of TensorFlow, which is not read; convert it with tf2onnx",
    "tensorflow_js": "a model of TensorFlow.js, which is not read; convert the original with tf2onnx",
}
_SHA256 = r"^[0-9a-f]{64}$"


def _as_list(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class _DescriptionEntry(Entry):
    type: Literal["model"] = Field(description="model", examples=["model"])
    format_version: str = Field(description="text such as 0.5.4", examples=["0.5.4"])
    name: str = Field("", max_length=1000, description="text", examples=["my network"])
    inputs: list[Any] = Field(min_length=1, description="a list of tensors", examples=["[...]"])
    outputs: list[Any] = Field(min_length=1, description="a list of tensors", examples=["[...]"])
    weights: dict[str, Any] = Field(
        description="a mapping from kinds of weights to files", examples=["{onnx: {source: net.onnx}}"]
    )
    test_inputs: list[Any] = Field(default_factory=list, description="a list of .npy files", examples=["[in.npy]"])
    test_outputs: list[Any] = Field(default_factory=list, description="a list of .npy files", examples=["[out.npy]"])


class _TensorEntry(Entry):
    id: str | None = Field(None, description="a name", examples=["raw"])
    name: str | None = Field(None, description="a name", examples=["raw"])
    axes: str | list[Any] = Field(
        description="letters such as bczyx (format 0.4), or a list of axes", examples=["bczyx"]
    )
    shape: Any = None
    preprocessing: Any = None
    postprocessing: Any = None
    test_tensor: Any = None


class _AxisEntry(Entry):
    type: str = Field(description="one of batch, channel, space", examples=["space"])
    id: str | None = Field(None, description="a name", examples=["z"])
    channel_names: Annotated[tuple[Any, ...], BeforeValidator(_as_list)] | None = Field(
        None, description="a list of names", examples=["[membrane]"]
    )
    size: Any = None


class _FileEntry(Entry):
    source: str = Field(min_length=1, max_length=4096, description="the path of a file", examples=["net.onnx"])
    sha256: Annotated[str, Field(pattern=_SHA256)] | None = Field(
        None, description="64 hexadecimal digits", examples=["e3b0c4..."]
    )
    external_data: Any = None


class _ShapeEntry(Entry):
    min: list[Count] = Field(description=f"a list of sizes, {COUNT}", examples=["[1, 1, 64, 64, 64]"])


@dataclass(frozen=True)
class Description:
    """A description whose tensors and steps were read.

    wishes  what it says of the network
    """

    path: Path
    name: str
    wishes: Wishes
    inputs: Layout
    outputs: tuple[Layout, ...]  # those that are wanted
    _raw: _DescriptionEntry

    def model(self) -> Path:
        """Return the file of the network, which is in the description's folder and has the digest that it states."""
        weights = self._raw.weights
        for kind, suffix in _READ.items():
            if weights.get(kind) is not None:
                here = f"weights: {kind}: "
                entry = _entry(_FileEntry, weights[kind], here)
                if entry.external_data is not None:
                    self._file(_entry(_FileEntry, entry.external_data, f"{here}external_data: "), here)
                path = self._file(entry, here)
                if path.suffix.lower() != suffix:
                    raise NetworkFileError(f"{here}{path.name} does not end in {suffix}; rename the file")
                return path
        for kind, why in _NOT_READ.items():
            if weights.get(kind) is not None:
                advice = why.replace("{path}", repr(excerpt(self.path.name, 60)))
                raise NetworkFileError(f"the weights ({kind}) are {advice}")
        known = [*_READ, *_NOT_READ]
        found = excerpt(", ".join(str(kind) for kind, entry in weights.items() if entry is not None), 60) or "nothing"
        raise NetworkFileError(f"weights names {found}, which is not known; {suggestion(found, known)}")

    def check_order(self, order: str, of: str) -> None:
        """Raise NetworkFileError unless the network, which is that `of` something, takes the axes of the input."""
        if order != self.inputs.order:
            ours, theirs = (one.replace("n", "b") for one in (self.inputs.order, order))
            raise NetworkFileError(f"{self.path}: axes of the input are {ours}, and {of} takes {theirs}; correct them")

    def tested(self) -> Tested | None:
        """Return the arrays of the test that the description gives; None if it gives none."""
        raw = self._raw
        if raw.test_inputs and len(raw.test_outputs) == len(raw.outputs):
            given, results = raw.test_inputs[0], raw.test_outputs
        else:
            given = raw.inputs[0].get("test_tensor")
            results = [one.get("test_tensor") for one in raw.outputs]
        assert self.wishes.processing is not None, "made from the outputs"
        chosen = [results[one.position] for one in self.wishes.processing.outputs]
        if given is None or any(one is None for one in chosen):
            return None
        orders = tuple(layout.order for layout in self.outputs)
        return Tested(self._test_file(given), tuple(map(self._test_file, chosen)), orders)

    def _test_file(self, raw: object) -> Path:
        entry = {"source": raw} if isinstance(raw, str) else raw
        return self._file(_entry(_FileEntry, entry, "test tensor: "), "test tensor: ")

    def _file(self, entry: _FileEntry, where: str) -> Path:
        """Return the path of a file of the description; NetworkFileError unless it is one in its folder."""
        path = _inside(self.path.parent, entry.source, where)
        if entry.sha256 is not None and (digest := _digest(path)) != entry.sha256:
            raise NetworkFileError(
                f"{where}{path.name} has the digest {digest[:12]}, and the description states {entry.sha256[:12]}; "
                "download it again"
            )
        return path


def read_description(path: Path, wishes: Wishes) -> Description:
    """Read a description. NetworkFileError says what is wrong with it, or what in it cannot be computed.

    wishes  its outputs are those of the description that are wanted; its normalisation replaces statistics of the whole
            volume
    """
    if path.is_dir():
        path = description_in(path) or path
    try:
        content = read_regular(path, LARGEST_DESCRIPTION + 1)
    except OSError as error:
        raise cannot_read(path, error) from error
    try:
        return _read(path, content, wishes)
    except NetworkFileError as error:
        raise error.with_context(str(path)) from None


def _read(path: Path, content: bytes, wishes: Wishes) -> Description:
    if len(content) > LARGEST_DESCRIPTION:
        raise NetworkFileError(f"it is larger than {LARGEST_DESCRIPTION:,} bytes, as no description is; shorten it")
    try:
        raw = read_yaml(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise NetworkFileError(f"byte {error.start} is not UTF-8; save it as UTF-8") from None
    if isinstance(raw, dict) and raw.get("type") != "model":
        raise NetworkFileError(
            f"it describes {shown(raw.get('type'))}, and networks are described with type: model; give such a file"
        )
    entry = _entry(_DescriptionEntry, raw, "")
    if not _VERSION.fullmatch(entry.format_version):
        raise NetworkFileError(
            f"its format_version is {shown(entry.format_version)}, and versions 0.4 and 0.5 are read; convert it with "
            "`bioimageio update-format` of the package bioimageio.core"
        )
    if len(entry.inputs) != 1:
        raise NetworkFileError(
            f"the network takes {len(entry.inputs)} tensors, and networks that take one volume can be computed"
        )
    tensor, inputs = _tensor(entry.inputs[0], "input: ")
    if inputs.order not in _ORDERS:
        axes = ", ".join(order.replace("n", "b") for order in _ORDERS)
        raise NetworkFileError(
            f"input: axes are {inputs.order.replace('n', 'b')}, and networks with {axes} can be computed; export it "
            "with such an input"
        )
    before = preprocessing(tensor.preprocessing, inputs, "preprocessing", wishes.normalise)
    outputs, layouts = _outputs(entry, wishes)
    processing = Processing(inputs.maps, before.steps, outputs, len(entry.outputs))
    own = replace(
        wishes,
        outputs=None,
        normalise=before.normalise,
        statistics=before.statistics,
        order=inputs.order,
        processing=processing,
    )
    return Description(path, " ".join(excerpt(entry.name, 60).split()), own, inputs, layouts, entry)


def _outputs(entry: _DescriptionEntry, wishes: Wishes) -> tuple[tuple[OutputSteps, ...], tuple[Layout, ...]]:
    """Return the outputs that are wanted, in the order of the wishes."""
    tensors = [_tensor(raw, f"output {index}: ") for index, raw in enumerate(entry.outputs)]
    names = [layout.name for _, layout in tensors]
    wanted = names if wishes.outputs is None else wishes.outputs
    found = []
    for name in wanted:
        if name not in names:
            raise NetworkFileError(f"there is no output {excerpt(name, 60)}; {suggestion(name, names)}")
        position = names.index(name)
        tensor, layout = tensors[position]
        steps = postprocessing(tensor.postprocessing, layout, f"postprocessing of {excerpt(name, 40)}")
        found.append((OutputSteps(name, position, layout.maps, steps), layout))
    return tuple(one for one, _ in found), tuple(layout for _, layout in found)


def _tensor(raw: object, where: str) -> tuple[_TensorEntry, Layout]:
    entry = _entry(_TensorEntry, raw, where)
    name = entry.id or entry.name or where.rstrip(": ").replace(" ", "")
    if isinstance(entry.axes, str):
        pairs = [(letter, _LETTERS.get(letter)) for letter in entry.axes]
        maps = _maps_of_shape(entry.shape, entry.axes)
    else:
        axes = [_entry(_AxisEntry, axis, f"{where}axis {index}: ") for index, axis in enumerate(entry.axes)]
        pairs = [_pair(axis) for axis in axes]
        maps = next((len(axis.channel_names) for axis in axes if axis.channel_names is not None), None)
    order = "".join(letter or "?" for _, letter in pairs)
    for own, letter in pairs:
        if letter is None:
            raise NetworkFileError(
                f"{where}has the axis {shown(own)}, and networks over batch, channels, z, y and x can be computed; "
                "export it without that axis"
            )
    if len(set(order)) < len(order) or not {"n", "y", "x"} <= set(order):
        raise NetworkFileError(
            f"{where}axes are {shown(''.join(letter for letter in order).replace('n', 'b'))}; write each of b, c, z, y "
            "and x once, where only c and z may be missing"
        )
    return entry, Layout(name, order, {own: letter for own, letter in pairs if letter is not None}, maps)


def _pair(axis: _AxisEntry) -> tuple[str, str | None]:
    """Return id and letter of an axis in format 0.5; the letter is None where it is none of ours."""
    match axis.type:
        case "batch":
            return axis.id or "batch", "n"
        case "channel":
            return axis.id or "channel", "c"
        case "space" if (own := axis.id or "x") in ("z", "y", "x"):
            return own, own
        case _:
            return axis.id or axis.type, None


def _maps_of_shape(shape: object, axes: str) -> int | None:
    """Return the maps that a shape of format 0.4 states; None if it follows from another tensor."""
    sizes = _entry(_ShapeEntry, shape, "shape: ").min if isinstance(shape, dict) and "min" in shape else shape
    if not isinstance(sizes, list) or "c" not in axes or len(sizes) != len(axes):
        return None
    found = sizes[axes.index("c")]
    return found if isinstance(found, int) else None


def _entry(entry: type[AnyEntry], raw: object, where: str) -> AnyEntry:
    """Check the keys of a mapping that are read here, and ignore others: a description holds much besides."""
    keys = entry.keys()
    known = {key: value for key, value in raw.items() if key in keys} if isinstance(raw, dict) else raw
    return check(entry, known, where)


def _inside(folder: Path, source: str, where: str) -> Path:
    """Return the file in a folder that a description names."""
    name = excerpt(source, 120)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", source):
        file = PurePosixPath(source.partition("?")[0]).name or "weights"
        raise NetworkFileError(
            f"{where}source is the address {name}, and nothing is downloaded; run `curl -L -o {excerpt(file, 60)} "
            f"'{name}'` in the folder, and write source: {excerpt(file, 60)}"
        )
    parts = PurePosixPath(source).parts
    if source.startswith(("/", "~")) or "\\" in source or "\0" in source or ".." in parts or not parts:
        raise NetworkFileError(
            f"{where}source is {name}, and only files in the description's own folder are read; put the file there, "
            "and write its name"
        )
    path = folder.joinpath(*parts)
    if os.path.realpath(path) != os.path.join(os.path.realpath(folder), *parts):
        raise NetworkFileError(
            f"{where}{name} is reached by a symbolic link, which is not followed; copy the file here"
        )
    if not path.is_file():
        raise NetworkFileError(f"{where}there is no file {name} beside the description; download or copy it")
    return path


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    try:
        with open_regular(path) as file:
            while part := file.read(READ_BYTES):
                found.update(part)
    except OSError as error:
        raise cannot_read(path, error) from error
    return found.hexdigest()
