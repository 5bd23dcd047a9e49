"""Read a .pt2 file of PyTorch, without PyTorch: the graph is JSON, and the weights are raw bytes; no pickle is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import NetworkFileError
from znnpy.importing import exported, pt2_archive
from znnpy.importing.exported import EXPORT, SHOWN
from znnpy.importing.program import Call, Program, Ref
from znnpy.importing.pt2_archive import SAVE_AGAIN, Pt2Archive, UnreadableError
from znnpy.importing.pt2_json import SymbolicError, field, number, static_int, static_sizes, typed, union
from znnpy.importing.pt2_outputs import output_words
from znnpy.importing.torch_files import why_not_pt2
from znnpy.messages import excerpt

SCHEMA = (8, 20)  # newest version of the graph's format that was tested, of PyTorch 2.14
ARCHIVE = "0"  # version of the archive's format

_MEMORY_FORMATS = {1: "contiguous_format", 2: "channels_last", 3: "channels_last_3d", 4: "preserve_format"}
_LAYOUTS = dict(
    enumerate(("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "_mkldnn", "strided"), 1)
)
_WORDS = {"as_scalar_type": pt2_archive.TYPES, "as_memory_format": _MEMORY_FORMATS, "as_layout": _LAYOUTS}
_PLAIN: dict[str, type] = {"as_int": int, "as_bool": bool, "as_string": str}
_LISTS = {
    "as_ints": "as_int", "as_bools": "as_bool", "as_strings": "as_string", "as_floats": "as_float",
    "as_tensors": "as_tensor", "as_int_lists": "as_ints", "as_float_lists": "as_floats",
    "as_nested_tensors": "as_tensors",
}  # fmt: skip
_STORED = {  # where the signature keeps the name of a stored array, by the kind of input
    "parameter": "parameter_name",
    "buffer": "buffer_name",
    "tensor_constant": "tensor_constant_name",
}


def read_pt2(path: Path) -> Program:
    """Read the file that torch.export.save wrote. NetworkFileError names it; OSError if it cannot be opened."""
    if why := why_not_pt2(path):
        raise NetworkFileError(f"{path} {why}")
    try:
        with pt2_archive.opened(path) as archive:
            return _program(archive)
    except NetworkFileError as error:
        raise error.with_context(str(path)) from error


def _program(archive: Pt2Archive) -> Program:
    if (order := archive.text("byteorder", "little")) != "little":
        raise NetworkFileError(f"its bytes are in the order {excerpt(order, SHOWN)}, not little; {SAVE_AGAIN}")
    models = [name for name in archive.members if name.startswith("models/") and name.endswith(".json")]
    if len(models) > 1:
        names = excerpt(", ".join(models), SHOWN)
        raise NetworkFileError(f"it holds {len(models)} networks ({names}); save one per file: {EXPORT}")
    content = archive.json(models[0])
    try:
        reader = _Reader(archive, models[0].removeprefix("models/").removesuffix(".json"), content)
        return reader.program()
    except NetworkFileError:  # also a ValueError
        raise
    except ValueError as error:
        why = excerpt(str(error))
        raise NetworkFileError(f"its graph cannot be read ({why}); {_version(archive, content)}") from error


def _version(archive: Pt2Archive, content: object) -> str:
    """Say what to do with a graph that is not as expected: another version may be the reason."""
    version = content.get("schema_version") if isinstance(content, dict) else None
    found = (version.get("major"), version.get("minor")) if isinstance(version, dict) else ()
    kind = archive.text("archive_version", ARCHIVE)
    if found == SCHEMA and kind == ARCHIVE:
        return f"it is damaged, or was not written by PyTorch; {SAVE_AGAIN}"
    shown = excerpt(".".join(map(str, found)) or "unknown", SHOWN)
    return (
        f"it is of format {shown} in an archive of format {excerpt(kind, SHOWN)}, and {SCHEMA[0]}.{SCHEMA[1]} in an "
        f"archive of format {ARCHIVE}, of PyTorch 2.14, is the newest that was tested; {SAVE_AGAIN} of that version"
    )


class _Reader:
    """The graph of an archive. ValueError for parts that are not as PyTorch writes them."""

    def __init__(self, archive: Pt2Archive, name: str, content: object) -> None:
        self._archive = archive
        self._module = field(content, "graph_module", dict)
        self._graph = field(self._module, "graph", dict)
        self._signature = field(self._module, "signature", dict)
        self._tensors = field(self._graph, "tensor_values", dict)
        self._configs = {
            folder: field(archive.json(f"data/{folder}/{name}_{folder}_config.json"), "config", dict)
            for folder in ("weights", "constants")
        }
        self._unreadable: dict[str, str] = {}

    def program(self) -> Program:
        inputs: list[tuple[str, tuple[int, ...]]] = []
        constants: dict[str, npt.NDArray[np.generic]] = {}
        for one in field(self._signature, "input_specs", list):
            kind, spec = union(one, "an input")
            if kind in _STORED:
                self._add_stored(constants, kind, spec)
            elif kind == "user_input":
                name = self._tensor_name(field(spec, "arg", dict), "an input")
                inputs.append((name, self._shape(name)))
            elif kind != "constant_input":  # of which the graph holds the value
                raise exported.refused(f"its input {excerpt(kind, SHOWN)}")
        nodes = field(self._graph, "nodes", list)
        outputs = self._outputs()
        return exported.checked(Program(list(map(self._call, nodes)), inputs, constants, outputs), self._unreadable)

    def _add_stored(self, constants: dict[str, npt.NDArray[np.generic]], kind: str, spec: object) -> None:
        name, target = field(field(spec, "arg", dict), "name", str), field(spec, _STORED[kind], str)
        outside = kind == "tensor_constant" or (kind == "buffer" and not field(spec, "persistent", bool))
        folder = "constants" if outside else "weights"
        if target not in self._configs[folder]:
            raise NetworkFileError(f"{excerpt(target, SHOWN)} is not among the {folder} of the archive; {SAVE_AGAIN}")
        try:
            constants[name] = self._archive.array(f"data/{folder}", target, self._configs[folder][target])
        except UnreadableError as error:
            self._unreadable[name] = str(error)

    def _shape(self, name: str) -> tuple[int, ...]:
        try:
            return static_sizes(field(self._tensors, name, dict), "sizes", name)
        except SymbolicError as error:
            raise NetworkFileError(
                f"the input {excerpt(name, SHOWN)} is of any size along a dimension; {exported.STATIC}"
            ) from error

    def _tensor_name(self, argument: object, what: str) -> str:
        kind, value = union(argument, what)
        if kind.startswith("as_sym_"):
            raise exported.symbolic(what)
        if kind != "as_tensor":
            raise exported.refused(f"{what}, stored as {excerpt(kind, SHOWN)},")
        return field(value, "name", str)

    def _outputs(self) -> dict[str, str]:
        values: list[str | None] = []
        for one in field(self._signature, "output_specs", list):
            kind, spec = union(one, "an output")
            if kind in ("buffer_mutation", "parameter_mutation"):
                stored = field(spec, kind.replace("mutation", "name"), str)
                raise exported.changed(f"the graph changes {excerpt(stored, SHOWN)}")
            if kind == "user_output":
                is_tensor = union(field(spec, "arg", dict), "an output")[0] == "as_tensor"
                values.append(self._tensor_name(spec["arg"], "an output") if is_tensor else None)
            elif kind != "user_input_mutation":  # which nobody sees
                raise exported.refused(f"its output {excerpt(kind, SHOWN)}")
        return exported.named_outputs(values, self._output_words())

    def _output_words(self) -> list[str] | None:
        """Return the words of the outputs' structure; None if it has parts that have no words."""
        calls = field(self._module, "module_call_graph", list)
        signature = calls[0].get("signature") if calls and isinstance(calls[0], dict) else None
        if signature is None:
            return None
        return output_words(field(signature, "out_spec", str), self._module.get("treespec_namedtuple_fields"))

    def _call(self, content: object) -> Call:
        target = field(content, "target", str)
        outputs = field(content, "outputs", list)
        operator = target.removeprefix("torch.ops.")
        path = _module_path(field(content, "metadata", dict))
        first = next((name for one in outputs for name in _result_names(one)), "")
        name = exported.call_name(path, operator, [first] if first else [])
        here = exported.node(name, operator)
        if operator.startswith("higher_order."):
            raise NetworkFileError(f"{here} {exported.OWN_GRAPH}")
        if operator == target:  # arithmetic of Python, with numbers
            raise exported.symbolic(here)
        arguments = {
            field(one, "name", str): self._argument(field(one, "arg", dict), here)
            for one in field(content, "inputs", list)
        }
        return Call(name, operator, arguments, self._results(outputs, here))

    def _results(self, outputs: list[Any], here: str) -> tuple[str, ...]:
        if len(outputs) == 1 and union(outputs[0], here)[0] == "as_tensors":
            return tuple(_result_names(outputs[0]))
        return tuple(self._tensor_name(one, here) for one in outputs)

    def _argument(self, content: object, here: str) -> object:
        """Return the value of an argument: a Ref, a number, a word, None, or a list of these."""
        kind, value = union(content, here)
        if kind in _LISTS:
            return [self._argument({_LISTS[kind]: one}, here) for one in typed(value, list, kind)]
        if kind in _PLAIN:
            return typed(value, _PLAIN[kind], kind)
        if kind in _WORDS:
            return _word(_WORDS[kind], typed(value, int, kind), kind)
        match kind:
            case "as_none":
                return None
            case "as_tensor":
                return Ref(field(value, "name", str))
            case "as_float":
                return number(value, kind)
            case "as_optional_tensor":
                return self._argument(value, here)
            case "as_optional_tensors" | "as_sym_ints" | "as_sym_floats" | "as_sym_bools":
                return [self._argument(one, here) for one in typed(value, list, kind)]
            case "as_sym_int" | "as_sym_float" | "as_sym_bool":
                return self._argument(value, here)
            case "as_name":
                return self._static(typed(value, str, kind), here)
            case "as_device":
                index = value.get("index") if isinstance(value, dict) else None
                return field(value, "type", str) + ("" if index is None else f":{typed(index, int, 'index')}")
            case "as_graph":
                raise NetworkFileError(f"{here} {exported.OWN_GRAPH}")
            case _:
                raise exported.refused(f"an argument of {here}, stored as {excerpt(kind, SHOWN)},")

    def _static(self, name: str, here: str) -> int:
        """Return a whole number that the graph has a name for."""
        sizes: Mapping[str, object] = field(self._graph, "sym_int_values", dict)
        try:
            return static_int(sizes[name], name)
        except (KeyError, SymbolicError) as error:
            raise exported.symbolic(here) from error


def _word(words: Mapping[int, str], value: int, kind: str) -> str:
    if value not in words:
        raise ValueError(f"{kind} is {value}")
    return words[value]


def _result_names(output: object) -> list[str]:
    """Return the names of one result, which may be a list of arrays; none for what is no array."""
    kind, value = union(output, "a result")
    if kind == "as_tensors":
        return [field(one, "name", str) for one in typed(value, list, kind)]
    return [field(value, "name", str)] if kind == "as_tensor" else []


def _module_path(metadata: Mapping[str, object]) -> str:
    """Return the path of the innermost module, from entries `key,path,type` that are joined by semicolons."""
    parts = typed(metadata.get("nn_module_stack", ""), str, "nn_module_stack").split(";")[-1].split(",")
    return parts[1] if len(parts) > 1 else ""
