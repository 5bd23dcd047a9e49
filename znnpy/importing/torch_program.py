"""Read a program of torch.export that is in memory, as `pt2_file` reads one from a file."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from znnpy.errors import NetworkFileError
from znnpy.importing import exported as shared
from znnpy.importing.exported import SHOWN
from znnpy.importing.program import Call, Program, Ref
from znnpy.importing.pt2_outputs import word
from znnpy.messages import excerpt

if TYPE_CHECKING:
    import torch


def program_of(exported: torch.export.ExportedProgram) -> Program:
    """Return the operators, inputs, constants and outputs of an exported program.

    Constants share the memory of its tensors where that is possible. NetworkFileError if the program has parts that no
    network from arrays to arrays has.
    """
    reader = _Reader(exported)
    inputs: list[tuple[str, tuple[int, ...]]] = []
    constants: dict[str, npt.NDArray[np.generic]] = {}
    unreadable: dict[str, str] = {}
    for spec in exported.graph_signature.input_specs:
        name = spec.arg.name
        match spec.kind.name:
            case "PARAMETER" | "BUFFER" | "CONSTANT_TENSOR":
                tensor = reader.stored(spec)
                array = _array(tensor, name)
                if array is None:
                    unreadable[name] = _type(tensor)
                else:
                    constants[name] = array
            case "USER_INPUT" if type(spec.arg).__name__ == "TensorArgument":
                inputs.append((name, reader.shape(name)))
            case "USER_INPUT" if type(spec.arg).__name__ == "ConstantArgument":
                pass  # the graph holds its value
            case kind:
                raise shared.refused(f"its input {excerpt(name, SHOWN)} ({excerpt(kind, SHOWN)})")
    calls = [call for node in exported.graph.nodes if (call := reader.call(node)) is not None]
    return shared.checked(Program(calls, inputs, constants, reader.outputs(), reader.is_alone), unreadable)


class _Reader:
    """An exported program, and the names of its nodes."""

    def __init__(self, exported: torch.export.ExportedProgram) -> None:
        self._exported = exported
        self._nodes = {node.name: node for node in exported.graph.nodes}
        self._same: dict[str, str] = {}  # names of the first of several nodes that take the same part of a result

    def stored(self, spec: Any) -> Any:
        """Return a tensor that the module holds."""
        held = self._exported.state_dict
        if spec.kind.name == "CONSTANT_TENSOR" or (spec.kind.name == "BUFFER" and not spec.persistent):
            held = self._exported.constants
        if spec.target not in held:
            raise NetworkFileError(f"the program has no tensor {excerpt(spec.target, SHOWN)}; export it again")
        return held[spec.target]

    def shape(self, name: str) -> tuple[int, ...]:
        sizes = tuple(self._nodes[name].meta["val"].shape)
        if not all(type(size) is int for size in sizes):
            raise NetworkFileError(
                f"the input {excerpt(name, SHOWN)} is of any size along a dimension; {shared.STATIC}"
            )
        return sizes

    def outputs(self) -> dict[str, str]:
        values: list[str | None] = []
        for spec in self._exported.graph_signature.output_specs:
            match spec.kind.name:
                case "BUFFER_MUTATION" | "PARAMETER_MUTATION":
                    raise shared.changed(f"the graph changes {excerpt(spec.target, SHOWN)}")
                case "USER_OUTPUT":
                    is_tensor = type(spec.arg).__name__ == "TensorArgument"
                    values.append(self._same.get(spec.arg.name, spec.arg.name) if is_tensor else None)
                case "USER_INPUT_MUTATION":
                    pass  # nobody sees it
                case kind:
                    raise shared.refused(f"its output {excerpt(kind, SHOWN)}")
        return shared.named_outputs(values, self._output_words())

    @property
    def is_alone(self) -> bool:
        """Return whether it gives one array, and no tuple or dictionary of it."""
        return bool(self._exported.call_spec.out_spec.is_leaf())

    def _output_words(self) -> list[str] | None:
        from torch.utils import _pytree as pytree

        structure = self._exported.call_spec.out_spec
        numbers = pytree.tree_unflatten(list(range(structure.num_leaves)), structure)
        words: list[str] = []
        for path, _ in pytree.tree_flatten_with_path(numbers)[0]:
            found = word([_key(part) for part in path])
            if found is None:
                return None
            words.append(found)
        return words

    def call(self, node: torch.fx.Node) -> Call | None:
        """Return a node's call; None if it is none, or takes a part of another's result."""
        import torch

        if node.op != "call_function" or node.target is operator.getitem:
            return None
        stack = [*(node.meta.get("nn_module_stack") or {}).values()]
        path = stack[-1][0] if stack else ""
        if not isinstance(node.target, torch._ops.OpOverload):
            here = shared.node(path or node.name, str(node.target))
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                raise NetworkFileError(f"{here} {shared.OWN_GRAPH}")
            raise shared.symbolic(here)
        results = self._results(node)
        name = shared.call_name(path, str(node.target), results)
        here = shared.node(name, str(node.target))
        arguments = {
            argument: self._value(value, here) for argument, value in _named(node.target, node.args, node.kwargs)
        }
        return Call(name, str(node.target), arguments, results)

    def _results(self, node: torch.fx.Node) -> tuple[str, ...]:
        """Return the names of what an operator gives: parts of a list have those of the nodes that take them."""
        import torch

        here = shared.node(node.name, str(node.target))
        value = node.meta.get("val")
        if not node.target._schema.returns:
            return ()
        if isinstance(value, torch.Tensor):
            return (node.name,)
        if not isinstance(value, list | tuple) or not all(isinstance(one, torch.Tensor) for one in value):
            raise shared.symbolic(here)
        taken: dict[int, str] = {}
        for user in node.users:
            self._same[user.name] = taken.setdefault(user.args[1], user.name)
        return tuple(taken.get(index, f"{node.name}_unused_{index}") for index in range(len(value)))

    def _value(self, value: object, here: str) -> object:
        """Return the value of an argument: a Ref, a number, a word, None, or a list of these."""
        import torch

        match value:
            case None | bool() | int() | float() | str():
                return value
            case list() | tuple():
                return [self._value(one, here) for one in value]
            case torch.fx.Node():
                if not isinstance(value.meta.get("val"), torch.Tensor):
                    raise shared.symbolic(here)
                return Ref(self._same.get(value.name, value.name))
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                raise shared.symbolic(here)
            case torch.dtype() | torch.layout() | torch.memory_format() | torch.device():
                return str(value).removeprefix("torch.")
        raise shared.refused(f"an argument of {here}, {excerpt(type(value).__name__, SHOWN)},")


def _named(target: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Yield the arguments of a call with their names in the operator's schema."""
    for number, argument in enumerate(target._schema.arguments):
        if argument.name in named:
            yield argument.name, named[argument.name]
        elif not argument.kwarg_only and number < len(given):
            yield argument.name, given[number]


def _key(part: object) -> object:
    """Return the key, number or name of a step into nested outputs."""
    return next((getattr(part, name) for name in ("key", "idx", "name") if hasattr(part, name)), None)


def _array(tensor: torch.Tensor, name: str) -> npt.NDArray[np.generic] | None:
    """Return a tensor as an array that cannot be written; None if numpy does not know its type."""
    import torch

    if tensor.layout != torch.strided or tensor.dtype == torch.complex32 or "float8" in str(tensor.dtype):
        return None
    try:
        held = tensor.detach().cpu()
        found: npt.NDArray[np.generic] = (held.float() if held.dtype == torch.bfloat16 else held).numpy()
    except (RuntimeError, TypeError) as error:
        raise NetworkFileError(
            f"{excerpt(name, SHOWN)} has no values in memory ({excerpt(error)}); export the module with its weights"
        ) from error
    found.flags.writeable = False
    return found


def _type(tensor: torch.Tensor) -> str:
    import torch

    return str(tensor.dtype).removeprefix("torch.") if tensor.layout == torch.strided else "an array that is not dense"
