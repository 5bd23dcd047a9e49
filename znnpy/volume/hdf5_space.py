"""Read the voxel size from the attributes of an HDF5 dataset. Attributes of other programs never stop a run.

The attributes are `resolution`, `translation`, `units` and `axes`, which outputs of znnpy have, and `element_size_um`
of ilastik and Fiji: (z, y, x) in micrometres.
"""

from __future__ import annotations

import logging
from math import isfinite

import h5py
import numpy as np

from znnpy.messages import excerpt
from znnpy.volume.hdf5_links import HDF5_ERRORS
from znnpy.volume.space import AXES, LONGEST_NAME, Space

MOST = 1e300  # upper limit of sizes and positions
NO_UNIT = (None, None, None)
MICROMETERS = ("micrometer", "micrometer", "micrometer")

log = logging.getLogger("znnpy")


class _Invalid(ValueError):
    """An attribute that cannot be used; the text is the end of a sentence that begins with its name."""


def space_of(dataset: h5py.h5d.DatasetID, name: str) -> Space | None:
    """Read the space from the attributes of `dataset`; None if they hold none, or none that can be used.

    name  of the volume, for the log line about attributes that cannot be used
    """
    try:
        scale = _numbers(dataset, "resolution")
        if scale is None:
            scale, units = _numbers(dataset, "element_size_um"), MICROMETERS
            return None if scale is None else Space(_positive(scale, "element_size_um"), units=units)
        axes = _text(dataset, "axes")
        if axes not in (None, ",".join(AXES)):
            raise _Invalid(f"axes are {excerpt(axes, 60)}, not {','.join(AXES)}")
        translation = _numbers(dataset, "translation") or (0.0, 0.0, 0.0)
        return Space(_positive(scale, "resolution"), translation, _units(_text(dataset, "units")))
    except HDF5_ERRORS as error:
        log.info("%s: the voxel size in its attributes is not used: %s", name, excerpt(error))
        return None


def _numbers(dataset: h5py.h5d.DatasetID, name: str) -> tuple[float, float, float] | None:
    """Return three finite numbers, (z, y, x); None where there is no such attribute."""
    if not h5py.h5a.exists(dataset, name.encode()):
        return None
    attribute = h5py.h5a.open(dataset, name.encode())
    if attribute.shape != (3,) or attribute.dtype.kind not in "iuf":
        raise _Invalid(f"{name} is {attribute.dtype} of shape {attribute.shape}, not 3 numbers")
    read = np.empty(3, np.float64)
    attribute.read(read)
    z, y, x = (float(number) for number in read)
    if not all(isfinite(number) and abs(number) < MOST for number in (z, y, x)):
        raise _Invalid(f"{name} is {(z, y, x)}")
    return z, y, x


def _positive(scale: tuple[float, float, float], name: str) -> tuple[float, float, float]:
    if min(scale) <= 0:
        raise _Invalid(f"{name} is {scale}, and a voxel size is positive")
    return scale


def _text(dataset: h5py.h5d.DatasetID, name: str) -> str | None:
    if not h5py.h5a.exists(dataset, name.encode()):
        return None
    attribute = h5py.h5a.open(dataset, name.encode())
    if attribute.shape != () or h5py.check_string_dtype(attribute.dtype) is None:
        raise _Invalid(f"{name} is {attribute.dtype} of shape {attribute.shape}, not text")
    value = h5py.Dataset(dataset).attrs[name]
    value = value.decode() if isinstance(value, bytes) else value
    if not isinstance(value, str) or len(value) > 4 * LONGEST_NAME:
        raise _Invalid(f"{name} is {excerpt(value, 60)}")
    return value


def _units(text: str | None) -> tuple[str | None, str | None, str | None]:
    """Return the units of z, y and x from `nanometer,nanometer,nanometer`; None for an empty one."""
    if text is None:
        return NO_UNIT
    units = text.split(",")
    if len(units) != 3 or any(len(unit) > LONGEST_NAME or not unit.isprintable() for unit in units):
        raise _Invalid(f"units are {excerpt(text, 60)}, not 3 names")
    z, y, x = (unit or None for unit in units)
    return z, y, x
