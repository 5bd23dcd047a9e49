"""Walk programs of ATen operators, all of which are registered here."""

from znnpy.importing import aten_arithmetic, aten_layout, aten_operators
from znnpy.importing.aten_walk import walked

OPERATORS = (aten_arithmetic, aten_layout, aten_operators)  # modules that register what operators are

__all__ = ["walked"]
