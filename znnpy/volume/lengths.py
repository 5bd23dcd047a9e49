"""Units of length: what they are called in metadata and on the command line, and how long they are.

This module loads no numpy, as the command line does not.
"""

from __future__ import annotations

import re
from fractions import Fraction

from znnpy.errors import VolumeError
from znnpy.messages import excerpt

# Short names, which are written behind numbers, and in metres.
_METRES = {
    "Å": Fraction(1, 10**10),
    "nm": Fraction(1, 10**9),
    "um": Fraction(1, 10**6),
    "mm": Fraction(1, 10**3),
    "cm": Fraction(1, 100),
    "m": Fraction(1),
}
_SPELT = {
    "Å": ("å", "a", "angstrom", "angstroms", "ångström"),
    "nm": ("nanometer", "nanometers", "nanometre", "nanometres"),
    "um": ("µm", "μm", "micron", "microns", "micrometer", "micrometers", "micrometre", "micrometres"),
    "mm": ("millimeter", "millimeters", "millimetre", "millimetres"),
    "cm": ("centimeter", "centimeters", "centimetre", "centimetres"),
    "m": ("meter", "meters", "metre", "metres"),
}
_NAMES = {name: short for short, names in _SPELT.items() for name in (short, *names)}
UNITS = "nm, um, mm, cm, m and angstrom"  # for messages and help
LENGTH = re.compile(r"(-?\d{1,18}(?:\.\d{1,18})?)([^\W\d_]+)")


def metres(unit: str | None) -> Fraction | None:
    """Return the metres in a unit, by its name in metadata or its short form; None if it is no known unit of length."""
    if unit is None:
        return None
    short = _NAMES.get(unit.strip()) or _NAMES.get(unit.strip().lower())
    return None if short is None else _METRES[short]


def short_name(unit: str) -> str:
    """Return the short form of a unit, or the unit itself if it is not known."""
    return _NAMES.get(unit) or _NAMES.get(unit.lower()) or excerpt(unit, 20)


def length_of(text: str) -> Fraction | None:
    """Return the metres that a text such as `10um` or `-0.5 nm` means; None if it is no number with a known unit."""
    match = LENGTH.fullmatch(re.sub(r"\s", "", text))
    unit = metres(match[2]) if match else None
    return Fraction(match[1]) * unit if match and unit is not None else None


def in_voxels(position: Fraction, first: float, size: float, unit: str | None, what: object) -> Fraction:
    """Return where a position in metres lies along an axis, counted in voxels from the centre of the first one.

    first  position of the centre of the first voxel, and `size` of a voxel, in `unit`

    VolumeError if the unit is not known.
    """
    length = metres(unit)
    if length is None:
        named = "states no unit of length" if unit is None else f"states the unit {excerpt(unit, 20)}"
        raise VolumeError(f"{what} {named} in its metadata, and {UNITS} are known; give voxels, as in 0:64,0:64,0:64")
    return (position / length - Fraction(first)) / Fraction(size)
