"""The facts of a model that its dataset.json states: channels, labels, regions and the names of files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from znnpy.errors import NetworkFileError
from znnpy.messages import excerpt
from znnpy.nnunet.documents import MOST_ITEMS, SHOWN, Document, Word, checked, read_object

MOST_LABEL = 2**16 - 1
WIDE = 255  # foreground labels from which on labels are written with 16 bits

Label = Annotated[int, Field(ge=0, le=MOST_LABEL)]
Labels = Annotated[list[Label], Field(min_length=1, max_length=MOST_ITEMS)]


class _Dataset(Document):
    labels: Annotated[dict[Word, Label | Labels], Field(min_length=1, max_length=MOST_ITEMS)]
    channel_names: Annotated[dict[str, Any], Field(min_length=1, max_length=MOST_ITEMS)]
    file_ending: Annotated[str, Field(min_length=1, max_length=20, pattern=r"^\.[a-zA-Z0-9.]+$")]
    regions_class_order: Annotated[list[Label], Field(max_length=MOST_ITEMS)] | None = None


@dataclass(frozen=True)
class Dataset:
    """The facts of a dataset.

    channels  number of images of a case
    ending    of their names, such as `.nii.gz`
    heads     outputs of the network: one for each label, or for each region
    order     the label that each region writes, later ones over earlier ones; None: labels do not overlap
    wide      whether labels need 16 bits
    """

    channels: int
    ending: str
    heads: int
    order: tuple[int, ...] | None
    wide: bool


def read_dataset(path: Path) -> Dataset:
    """Read dataset.json; NetworkFileError for what cannot be."""
    content = read_object(path)
    if "modality" in content:  # the word of older datasets, which goes before the newer one
        content["channel_names"] = content["modality"]
    found = checked(_Dataset, content, str(path))
    if found.labels.get("background") != 0:
        raise NetworkFileError(f"{path} has no label background = 0, which nnU-Net needs; copy the folder again")
    named = {name: label for name, label in found.labels.items() if name != "ignore"}
    every = {one for label in named.values() for one in (label if isinstance(label, list) else [label])}
    foreground = len(every - {0})
    order = _order(found, named, path)
    wide = foreground >= WIDE
    if order is not None and max(order) > (MOST_LABEL if wide else 2**8 - 1):
        raise NetworkFileError(
            f"{path} has the label {max(order)} in regions_class_order, and with {foreground} labels nnU-Net writes 8 "
            "bits of each; number the labels from 0 on"
        )
    return Dataset(
        len(found.channel_names), found.file_ending, len(every) if order is None else len(order), order, wide
    )


def _order(found: _Dataset, named: Mapping[str, object], path: Path) -> tuple[int, ...] | None:
    """Return the labels that regions write, in order; None for a dataset without regions."""
    if not any(isinstance(label, list) and len(label) > 1 for label in found.labels.values()):
        return None
    regions = [
        name for name, label in named.items() if label != 0 and not (isinstance(label, list) and set(label) == {0})
    ]
    given = found.regions_class_order
    if given is None or len(given) != len(regions):
        raise NetworkFileError(
            f"{path} has {len(regions)} regions ({excerpt(', '.join(regions), SHOWN)}) and "
            f"{0 if given is None else len(given)} labels in regions_class_order; give one label for each region"
        )
    return tuple(given)
