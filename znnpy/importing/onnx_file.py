"""Read a model of ONNX from its file: operators in order, arrays, and the input. Nothing in the file is trusted."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from znnpy.errors import MissingExtraError, NetworkFileError
from znnpy.extras import install
from znnpy.files import open_regular
from znnpy.formats.files import cannot_read, require_file
from znnpy.importing.onnx_tensors import BFLOAT16, FLOAT, FLOAT16, Array, Arrays, type_name, word
from znnpy.importing.tensors import LayoutError
from znnpy.messages import excerpt

LARGEST_FILE = 2**31 - 1  # bytes of a message of protobuf
MOST_NODES = 100_000  # of a model whose functions are written out
DEEPEST = 40  # functions that call each other
OLDEST_OPSET = 13
_FOREIGN = (  # first bytes of files that are often taken for a model
    (b"PK\x03\x04", "a zip archive, as PyTorch and Keras write"),
    (b"\x80", "a pickle"),
    (b"\x89HDF", "an HDF5 file"),
    (b"version https://git-lfs", "a pointer of Git LFS: run `git lfs pull`"),
    (b"<", "a page of HTML or XML"),
)


@dataclass(frozen=True, slots=True)
class Step:
    """One operator of a model.

    kind        the operator, `Conv`; with its domain, `com.microsoft::FusedConv`, if that is not ONNX's own
    attributes  numbers, words, arrays and lists of these; None for a graph and whatever else is not read
    """

    name: str
    kind: str
    inputs: tuple[str, ...]  # an empty name is an input that is left out
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]

    @property
    def here(self) -> str:
        """Name the node in an error, as Builder does."""
        return f"node {excerpt(self.name, 60)} ({excerpt(self.kind, 60)})"


@dataclass(frozen=True, slots=True)
class OnnxInput:
    """The array that a model takes: its name and sizes, None for those that a caller chooses."""

    name: str
    dims: tuple[int | None, ...]

    @property
    def orders(self) -> tuple[str, ...]:
        """Return which orders its dimensions may be in, the usual one first."""
        return ("nczyx", "nzyxc") if len(self.dims) == 5 else ("ncyx", "nyxc")

    def maps(self, order: str) -> int:
        """Return the number of maps; LayoutError if the size of that dimension is left open."""
        found = self.dims[order.index("c")]
        if found is None:
            raise LayoutError(
                f"input {excerpt(self.name, 60)} has the sizes {self.words}, of which {order.index('c')} would be the "
                "number of maps and is left open; export the model with a fixed number of maps"
            )
        return found

    def size(self, order: str) -> tuple[int | None, int | None, int | None]:
        """Return the sizes along z, y, x, None for those that are left open; an image has z = 1."""
        z, y, x = (self.dims[order.index(axis)] if axis in order else 1 for axis in "zyx")
        return z, y, x

    @property
    def words(self) -> str:
        """Return the sizes as text, `?` for those that are left open."""
        return " x ".join("?" if size is None else str(size) for size in self.dims)


@dataclass(frozen=True, slots=True)
class OnnxModel:
    """A model: operators in order, known arrays by name, what it takes and gives.

    source  what made it, such as `ONNX, opset 20, by pytorch 2.9`
    """

    steps: tuple[Step, ...]
    constants: Mapping[str, Array]
    input: OnnxInput
    outputs: tuple[str, ...]
    opset: int
    source: str


def read_model(path: Path) -> OnnxModel:
    """Read a model. NetworkFileError says what is wrong with it; MissingExtraError: the package onnx is missing.

    What a model says of its training is ignored: its graph is the one for inference.
    """
    require_file(path, "ONNX", (".onnx",))
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise MissingExtraError(f"{path} needs the package onnx, which is not installed; {install('onnx')}") from error
    content = _content(path)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError as error:
        raise _foreign(path, content, "is damaged") from error
    if not model.graph.node or not model.opset_import:
        raise _foreign(path, content, f"has {len(model.graph.node)} nodes and no version of its operators")
    del content  # the parsed model has all of it
    with Arrays(path.parent) as arrays:
        return _read(onnx, model, arrays)


def _content(path: Path) -> bytes:
    """Return the bytes of the file, whose size is checked first."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST_FILE:
                raise NetworkFileError(
                    f"{path} has {size:,} bytes, and an ONNX file has {LARGEST_FILE:,} at most; save the model with "
                    "its weights as external data"
                )
            content = file.read(size)
            if len(content) < size:
                raise NetworkFileError(f"{path} gave {len(content):,} of {size:,} bytes; copy it again")
    except OSError as error:
        raise cannot_read(path, error) from error
    if not content:
        raise NetworkFileError(f"{path} is empty; save or copy the model again")
    return content


def _foreign(path: Path, content: bytes, why: str) -> NetworkFileError:
    """Return the error for a file that is no model, with what it may be instead."""
    kind = next((kind for start, kind in _FOREIGN if content.startswith(start)), None)
    what = f"it looks like {kind}" if kind else f"or it {why}"
    return NetworkFileError(f"{path} is not an ONNX file: {what}; export the model to ONNX, or copy it again")


def _read(onnx: Any, model: Any, arrays: Arrays) -> OnnxModel:
    opset = _opset(onnx, model)
    graph = model.graph
    if graph.sparse_initializer:
        raise NetworkFileError(
            f"the model has {len(graph.sparse_initializer)} sparse arrays, which are not read; save it with dense ones"
        )
    constants: dict[str, Array] = {}
    for tensor in graph.initializer:
        name = word(tensor.name)
        if name in constants:
            raise NetworkFileError(f"the model has two arrays {excerpt(name, 60)}; save it again")
        constants[name] = arrays.read(tensor, f"array {excerpt(name, 60)}")
    given = _input(graph, constants)
    maker = f"{word(model.producer_name)} {word(model.producer_version)}".strip()
    source = f"ONNX, opset {opset}{f', by {excerpt(maker, 60)}' if maker else ''}"
    del graph.initializer[:]
    if model.functions:
        graph = _inlined(onnx, model).graph
    steps = tuple(_step(node, arrays) for node in graph.node)
    outputs = tuple(word(output.name) for output in graph.output)
    _check_names(steps, {given.name, *constants}, outputs)
    return OnnxModel(steps, constants, given, outputs, opset, source)


def _opset(onnx: Any, model: Any) -> int:
    found = [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")]
    if len(found) != 1:
        raise NetworkFileError(f"the model names {len(found)} versions of ONNX's operators, not one; save it again")
    newest = onnx.defs.onnx_opset_version()
    if found[0] < OLDEST_OPSET:
        raise NetworkFileError(
            f"the model has opset {found[0]}, and {OLDEST_OPSET} to {newest} are read; convert it with "
            f"onnx.version_converter.convert_version(model, {OLDEST_OPSET})"
        )
    if found[0] > newest:
        raise NetworkFileError(
            f"the model has opset {found[0]}, and the package onnx {onnx.__version__} knows opsets up to {newest}; "
            "install a newer onnx, or export the model with an older opset"
        )
    return int(found[0])


def _input(graph: Any, constants: Mapping[str, Array]) -> OnnxInput:
    """Return the one input of the model that is an image."""
    found = [entry for entry in graph.input if entry.name not in constants]
    if len(found) != 1:
        names = excerpt(", ".join(excerpt(entry.name, 60) for entry in found))
        raise NetworkFileError(
            f"the model has {len(found)} inputs{': ' + names if names else ''}, and networks of one can be computed; "
            "export it with the image alone, and other values as constants"
        )
    (entry,) = found
    what = f"input {excerpt(entry.name, 60)}"
    kind = entry.type.tensor_type
    if entry.type.WhichOneof("value") != "tensor_type" or not kind.HasField("shape"):
        raise NetworkFileError(f"{what} states no sizes; export the model with an example of its input")
    if kind.elem_type not in (FLOAT, FLOAT16, BFLOAT16):
        raise NetworkFileError(
            f"{what} has values of type {type_name(kind.elem_type)}, and networks are computed in float32; export the "
            "model with such an input"
        )
    dims = tuple(
        int(dim.dim_value) if dim.WhichOneof("value") == "dim_value" and dim.dim_value > 0 else None
        for dim in kind.shape.dim
    )
    given = OnnxInput(word(entry.name), dims)
    if len(dims) not in (4, 5):
        raise NetworkFileError(
            f"{what} has {len(dims)} dimensions ({given.words or 'no sizes'}); 5 are read, (1, maps, z, y, x), or 4 "
            "for images: export the model with such an input"
        )
    if dims[0] not in (None, 1):
        raise NetworkFileError(
            f"{what} has a batch of {dims[0]} images ({given.words}); export the model with a batch of 1"
        )
    return given


def _step(node: Any, arrays: Arrays) -> Step:
    inputs, outputs = (tuple(word(one) for one in names) for names in (node.input, node.output))
    operator, domain = word(node.op_type), word(node.domain)
    name = word(node.name) or next((output for output in outputs if output), "") or operator
    kind = operator if domain in ("", "ai.onnx") else f"{domain}::{operator}"
    here = f"node {excerpt(name, 60)} ({excerpt(kind, 60)})"
    attributes = {word(one.name): _attribute(one, arrays, here) for one in node.attribute}
    return Step(name, kind, inputs, outputs, attributes)


def _attribute(one: Any, arrays: Arrays, here: str) -> Any:
    match one.type:
        case 1:
            return float(one.f)
        case 2:
            return int(one.i)
        case 3:
            return one.s.decode("utf-8", "replace")
        case 4:
            return arrays.read(one.t, f"{here}, attribute {excerpt(one.name, 60)},")
        case 6:
            return [float(value) for value in one.floats]
        case 7:
            return [int(value) for value in one.ints]
        case 8:
            return [value.decode("utf-8", "replace") for value in one.strings]
        case _:
            return None


def _check_names(steps: Sequence[Step], known: set[str], outputs: Sequence[str]) -> None:
    """Raise NetworkFileError unless every value is given once, before it is read."""
    for step in steps:
        missing = next((name for name in step.inputs if name and name not in known), None)
        if missing is not None:
            raise NetworkFileError(
                f"{step.here} reads {excerpt(missing, 60)}, which nothing before it gives; save the model again"
            )
        for name in step.outputs:
            if name and name in known:
                raise NetworkFileError(
                    f"{step.here} gives {excerpt(name, 60)}, which there is already; save the model again"
                )
            known.add(name)
    missing = next((name for name in outputs if name not in known), None)
    if missing is not None or not outputs:
        what = f"gives no {excerpt(missing, 60)}, which is its output" if missing is not None else "has no output"
        raise NetworkFileError(f"the model {what}; save it again")


def _inlined(onnx: Any, model: Any) -> Any:
    """Return the model with the calls of its own functions written out; NetworkFileError if that is too much."""
    from onnx.inliner import inline_local_functions

    functions = {(one.domain, one.name): one for one in model.functions}
    counts: dict[tuple[str, str], int] = {}
    total = _written_out(model.graph.node, functions, counts, ())
    if total > MOST_NODES:
        raise NetworkFileError(
            f"the model has {total} nodes if its {len(functions)} functions are written out, and {MOST_NODES} at most "
            "are read; export it without functions"
        )
    try:
        return inline_local_functions(model)
    except (RuntimeError, ValueError, TypeError) as error:
        raise NetworkFileError(
            f"the functions of the model cannot be written out ({excerpt(error, 100)}); export it without functions"
        ) from error


def _written_out(
    nodes: Sequence[Any],
    functions: Mapping[tuple[str, str], Any],
    counts: dict[tuple[str, str], int],
    inside: tuple[tuple[str, str], ...],
) -> int:
    """Return how many nodes there are if calls of functions are written out."""
    total = 0
    for node in _with_inner(nodes):
        key = (node.domain, node.op_type)
        if key in inside or len(inside) > DEEPEST:
            what = "calls itself" if key in inside else f"is called through more than {DEEPEST} others"
            raise NetworkFileError(f"function {excerpt(key[1], 60)} of the model {what}; export it without functions")
        if key in functions and key not in counts:
            counts[key] = _written_out(functions[key].node, functions, counts, (*inside, key))
        total += counts.get(key, 1)
    return total


def _with_inner(nodes: Sequence[Any]) -> Iterator[Any]:
    """Yield nodes and those of the graphs that they hold."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _with_inner(graph.node)
