"""Define what the function for an operator of ONNX gets, and the table of these functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from znnpy.errors import NetworkFileError
from znnpy.importing.builder import Builder
from znnpy.importing.onnx_file import Step
from znnpy.importing.onnx_tensors import Array
from znnpy.importing.tensors import Tensor
from znnpy.messages import excerpt


@dataclass(frozen=True, slots=True)
class Part:
    """The part begin <= i < end of a dimension of an array, as Split gives it, of which no layer has been made yet."""

    of: Tensor
    dimension: int
    begin: int
    end: int


Value = Tensor | Array | Part


@dataclass(slots=True)
class Site:
    """An operator of a model with its inputs, as a walk of the model comes to it.

    given  what each input is: an array of the network, known values, or None for one that is left out
    """

    builder: Builder
    step: Step
    given: list[Value | None]
    opset: int

    def error(self, what: str) -> NetworkFileError:
        """Return the error that begins with the node at hand."""
        return self.builder.error(what)

    def has(self, at: int) -> bool:
        """Return whether an input is given."""
        return at < len(self.given) and self.given[at] is not None

    def value(self, at: int) -> Tensor | Array:
        """Return an input, whichever it is, with a layer for a part of an array."""
        found = self.given[at] if self.has(at) else None
        if found is None:
            raise self.error(f"lacks input {at}; save the model again")
        if isinstance(found, Part):
            found = self.builder.cut(found.of, found.dimension, found.begin, found.end)
            self.given[at] = found
        return found

    def tensor(self, at: int = 0) -> Tensor:
        """Return an input that must be an array of the network."""
        found = self.value(at)
        if not isinstance(found, Tensor):
            raise self.error(f"gets known values as input {at}, where an array that depends on the image can be")
        return found

    def known(self, at: int) -> Array:
        """Return an input that must be known values."""
        found = self.value(at)
        if isinstance(found, Tensor):
            raise self.error(
                f"gets an array that depends on the image as input {at}, where trained or fixed values can be; fixed "
                "ones must not depend on the image"
            )
        return found

    def optional(self, at: int) -> Array | None:
        """Return known values, or None if the input is left out."""
        return self.known(at) if self.has(at) else None

    def number(self, at: int, usual: float) -> float:
        """Return an input that is one number."""
        found = self.optional(at)
        if found is None:
            return usual
        if found.size != 1:
            raise self.error(f"has {found.size} values as input {at}, where one number can be")
        return float(found.reshape(-1)[0])

    def whole(self, at: int, name: str) -> list[int] | None:
        """Return whole numbers that are an input, or an attribute as in older versions; None if left out."""
        found = self.optional(at)
        if found is None:
            return self.sizes(name) if self.step.attributes.get(name) is not None else None
        if found.dtype.kind not in "iu":
            raise self.error(f"has values of type {found.dtype} as input {at}, where whole numbers can be")
        return [int(value) for value in found.reshape(-1)]

    def sizes(self, name: str, usual: Sequence[int] = ()) -> list[int]:
        """Return an attribute that is a list of whole numbers."""
        found = self._attribute(name, list(usual))
        if not isinstance(found, list) or not all(isinstance(value, int) for value in found):
            raise self.error(f"has {excerpt(name)}={excerpt(found, 60)}, which is no list of whole numbers")
        return found

    def count(self, name: str, usual: int) -> int:
        """Return an attribute that is a whole number."""
        found = self._attribute(name, usual)
        if not isinstance(found, int):
            raise self.error(f"has {excerpt(name)}={excerpt(found, 60)}, which is no whole number")
        return found

    def real(self, name: str, usual: float) -> float:
        """Return an attribute that is a finite number."""
        found = self._attribute(name, usual)
        if not isinstance(found, float | int) or not np.isfinite(found):
            raise self.error(f"has {excerpt(name)}={excerpt(found, 60)}, which is no finite number")
        return float(found)

    def word(self, name: str, usual: str) -> str:
        """Return an attribute that is a word."""
        found = self._attribute(name, usual)
        if not isinstance(found, str):
            raise self.error(f"has {excerpt(name)}={excerpt(found, 60)}, which is no word")
        return found

    def _attribute(self, name: str, usual: Any) -> Any:
        found = self.step.attributes.get(name)
        return usual if found is None else found

    def only(self, name: str, *allowed: object, usual: object) -> None:
        """Raise NetworkFileError unless an attribute has one of these values."""
        found = self._attribute(name, usual)
        if found not in allowed:
            raise self.error(
                f"has {name}={excerpt(found, 60)}, and only {' or '.join(map(str, allowed))} can be computed; change "
                "the module, or export it with another option"
            )

    def axis(self, given: int, rank: int) -> int:
        """Return a dimension counted from the first; NetworkFileError if there is none."""
        if not -rank <= given < rank:
            raise self.error(f"names dimension {given} of {rank}; save the model again")
        return given % rank


Handler = Callable[[Site], Value | list[Value]]
HANDLERS: dict[str, Handler] = {}


def register_onnx(kind: str, handler: Handler) -> None:
    """Say what an operator of ONNX is, such as one of an own domain; a later function replaces an earlier one.

    kind     name of the operator, with its domain if that is not ONNX's: `Relu`, `my.domain::Relu`
    handler  gets a Site, and returns the result, or a list of them
    """
    HANDLERS[kind] = handler


def operator(*kinds: str) -> Callable[[Handler], Handler]:
    """Register the function below for operators."""

    def register(handler: Handler) -> Handler:
        for kind in kinds:
            register_onnx(kind, handler)
        return handler

    return register
