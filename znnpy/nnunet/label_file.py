"""Write labels as NIfTI, placed as the images of their case, and read what such a file says of its making."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from znnpy.errors import MissingExtraError, VolumeError
from znnpy.extras import install
from znnpy.messages import excerpt
from znnpy.nnunet.names import SUFFIXES

COMMENT = "comment"  # kind of the header extension that holds the record
KEY = "znnpy_labels"
NARROW = 255  # labels that are all smaller are written with 8 bits, as nnU-Net does
PLACE = (
    *("pixdim", "qform_code", "sform_code", "quatern_b", "quatern_c", "quatern_d"),
    *("qoffset_x", "qoffset_y", "qoffset_z", "srow_x", "srow_y", "srow_z"),
)  # fields of a header that say where voxels lie
LEVEL = 6  # of the compression


@dataclass(frozen=True)
class LabelHeader:
    """The header of an image, from which that of labels is made."""

    image: Any  # of nibabel, whose voxels are not read

    @classmethod
    def like(cls, file: Path) -> Self:
        """Read the header of an image; VolumeError if it is no NIfTI, MissingExtraError without nibabel."""
        return cls(loaded(file))

    def content(self, labels: npt.NDArray[Any], record: Mapping[str, Any], *, packed: bool) -> bytes:
        """Return the file of labels (z, y, x).

        record  what `record_of` will return, of JSON types
        """
        from nibabel.nifti1 import Nifti1Extension

        kind = np.uint8 if labels.max(initial=0) < NARROW else np.uint16
        made = type(self.image)(labels.transpose(2, 1, 0).astype(kind, copy=False), self.image.affine)
        header, given = made.header, self.image.header
        header["xyzt_units"] = int(given["xyzt_units"]) & 7
        for place in PLACE:
            header[place] = given[place]
        header.extensions.append(Nifti1Extension(COMMENT, json.dumps({KEY: record}).encode()))
        out = BytesIO()
        if packed:
            with gzip.GzipFile("", "wb", LEVEL, out, mtime=0) as file:
                made.to_stream(file)
        else:
            made.to_stream(out)
        return out.getvalue()


def record_of(file: Path) -> dict[str, Any] | None:
    """Return the record of a file of labels; None if it is none of znnpy, or cannot be read."""
    try:
        for extension in loaded(file).header.extensions:
            content = extension.get_content()
            found = json.loads(content)
            if isinstance(found, dict) and isinstance(found.get(KEY), dict):
                return dict(found[KEY])
    except (VolumeError, ValueError, TypeError):
        pass
    return None


def is_label_file(file: Path) -> bool:
    """Return whether a file holds labels that znnpy wrote."""
    return file.name.endswith(SUFFIXES) and file.is_file() and record_of(file) is not None


def loaded(file: Path) -> Any:
    """Open a NIfTI file with nibabel; VolumeError if its header is damaged, MissingExtraError without that package."""
    try:
        import nibabel
    except ImportError:
        raise MissingExtraError(
            f"reading .nii needs the package nibabel, which is not installed; `{install('nnunet')}`"
        ) from None
    try:
        return nibabel.load(file)
    except Exception as error:  # the library raises whatever a damaged header leads to
        raise VolumeError(f"{file} cannot be read as NIfTI: {excerpt(error)}; write it again") from None
