"""Units of length: what they are called in metadata and on the command line, and how long they are.

This module loads no numpy, as the command line does not.
"""

from __future__ import annotations

import re
from fractions import Fraction

from znnpy.errors import VolumeError
from znnpy.messages import excerpt

METERS = {
    "meter": Fraction(1),
    "centimeter": Fraction(1, 10**2),
    "millimeter": Fraction(1, 10**3),
    "micrometer": Fraction(1, 10**6),
    "nanometer": Fraction(1, 10**9),
    "angstrom": Fraction(1, 10**10),
    "picometer": Fraction(1, 10**12),
}
SHORT = {
    "meter": "m",
    "centimeter": "cm",
    "millimeter": "mm",
    "micrometer": "um",  # as it is typed
    "nanometer": "nm",
    "angstrom": "angstrom",
    "picometer": "pm",
}
_OTHERWISE = {
    **{short: name for name, short in SHORT.items()},
    "µm": "micrometer",  # the sign for micro
    "μm": "micrometer",  # the Greek letter
    "micron": "micrometer",
    "Å": "angstrom",  # the letter
    "Å": "angstrom",  # the sign for angstrom
    "a": "angstrom",
    "å": "angstrom",
    "ångström": "angstrom",
}
UNITS = "pm, nm, um, mm, cm, m and angstrom"  # for messages and help
LENGTH = re.compile(r"(-?\d{1,18}(?:\.\d{1,18})?)([^\W\d_]+)")


def length_unit(name: str) -> str | None:
    """Return the name of a unit of length, such as "micrometer" for "um" or "microns"; None for other units."""
    word = name.strip()
    for form in (word, word.lower(), word.lower().removesuffix("s").replace("metre", "meter")):
        if form in METERS:
            return form
        if form in _OTHERWISE:
            return _OTHERWISE[form]
    return None


def meters(unit: str | None) -> Fraction | None:
    """Return the meters in a unit, by its name in metadata or its short form; None if it is no known unit of length."""
    name = None if unit is None else length_unit(unit)
    return None if name is None else METERS[name]


def short_name(unit: str) -> str:
    """Return the short form of a unit, or the unit itself if it is not known."""
    name = length_unit(unit)
    return excerpt(unit, 20) if name is None else SHORT[name]


def length_of(text: str) -> Fraction | None:
    """Return the meters that a text such as `10um` or `-0.5 nm` means; None if it is no number with a known unit."""
    match = LENGTH.fullmatch(re.sub(r"\s", "", text))
    unit = meters(match[2]) if match else None
    return Fraction(match[1]) * unit if match and unit is not None else None


def in_voxels(position: Fraction, first: float, size: float, unit: str | None, what: object) -> Fraction:
    """Return where a position in meters lies along an axis, counted in voxels from the centre of the first one.

    first  position of the centre of the first voxel, and `size` of a voxel, in `unit`

    VolumeError if the unit is not known.
    """
    length = meters(unit)
    if length is None:
        named = "states no unit of length" if unit is None else f"states the unit {excerpt(unit, 20)}"
        raise VolumeError(f"{what} {named} in its metadata, and {UNITS} are known; give voxels, as in 0:64,0:64,0:64")
    return (position / length - Fraction(first)) / Fraction(size)
