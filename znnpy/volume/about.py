"""The description of a stored volume for its owner: what `Volume.about` returns, beyond what every volume has."""

from __future__ import annotations

from dataclasses import dataclass

from znnpy.volume.space import Space


@dataclass(frozen=True, slots=True)
class Inside:
    """An array in the same file or folder, or a scale of an image.

    name   as `dataset` names it
    shape  as stored
    dtype  of its elements, as text
    space  the position of its voxels, if it is known
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    space: Space | None = None


@dataclass(frozen=True, slots=True)
class About:
    """How a volume is stored.

    format       with its version, such as "Zarr 3, OME-Zarr 0.5"; empty: the format has none
    compression  of the chunks, such as "zstd 3"; empty: there is none, or it is not known
    shard        elements of a file that holds several chunks, along the stored axes; empty: there are none
    parts        parts of a page that are stored together, such as "tiles of 64x64 pixels"; empty: there are no pages
    scales       the resolutions of the image that the volume belongs to, the finest first; empty: there is one
    datasets     the arrays in the file or folder; empty: it holds this array alone
    notes        further sentences without their full stops
    """

    format: str = ""
    compression: str = ""
    shard: tuple[int, ...] = ()
    parts: str = ""
    scales: tuple[Inside, ...] = ()
    datasets: tuple[Inside, ...] = ()
    notes: tuple[str, ...] = ()
