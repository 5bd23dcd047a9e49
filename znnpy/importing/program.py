"""A program of ATen operators, as torch.export makes it before decompositions, without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Ref:
    """The name of a value of a program."""

    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """One operator.

    name       of the module that it is in, and the operator's, such as `encoder.0.conv`
    target     such as `aten.conv3d.default`
    arguments  by their names in the operator's schema; those left out have the schema's default. A value is a Ref, a
               number, a word, None, or a list of these
    results    names of the values that it gives
    """

    name: str
    target: str
    arguments: Mapping[str, object]
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """Operators in order, and the values that they begin with.

    inputs     names and shapes of the arrays that a caller gives
    constants  parameters, buffers and other arrays by the names of their values
    outputs    names of the values that are given back, by the words for them: a key of a dictionary, or 0, 1, ..
    is_alone   it gives one array, and no tuple or dictionary of it
    """

    calls: Sequence[Call]
    inputs: Sequence[tuple[str, tuple[int, ...]]]
    constants: Mapping[str, npt.NDArray[np.generic]]
    outputs: Mapping[str, str]
    is_alone: bool = True
