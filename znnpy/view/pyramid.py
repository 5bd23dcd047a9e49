"""Give Neuroglancer the stored lower resolutions of an image where it asks for means of many voxels."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, cast

from neuroglancer import CoordinateSpace, LocalVolume
from neuroglancer.downsample_scales import DEFAULT_MAX_DOWNSAMPLING

from znnpy.view.voxels import ShownVoxels

Factors = tuple[int, ...]  # voxels along each axis of which one of a lower resolution is the mean


class PyramidVolume(LocalVolume):  # type: ignore[misc]
    """A source of voxels for the viewer. Means of more voxels are made of the coarsest resolution that fits."""

    def __init__(
        self,
        finest: ShownVoxels,
        coarser: Sequence[tuple[Factors, ShownVoxels]],
        dimensions: CoordinateSpace,
        volume_type: str,
    ) -> None:
        most = DEFAULT_MAX_DOWNSAMPLING * max((prod(factors) for factors, _ in coarser), default=1)
        super().__init__(finest, dimensions, volume_type=volume_type, max_downsampling=most)
        self._coarser = [
            (factors, LocalVolume(voxels, dimensions, volume_type=volume_type)) for factors, voxels in coarser
        ]

    def get_encoded_subvolume(self, data_format: str, start: Any, end: Any, scale_key: str) -> tuple[bytes, str]:
        """Return a box of the image at a lower resolution, encoded, and its type.

        scale_key  voxels along each axis of which one is asked for, with commas between them
        """
        asked = tuple(map(int, scale_key.split(",")))
        for factors, source in reversed(self._coarser):
            if len(asked) == len(factors) and all(one % own == 0 for one, own in zip(asked, factors, strict=True)):
                rest = ",".join(str(one // own) for one, own in zip(asked, factors, strict=True))
                return cast("tuple[bytes, str]", source.get_encoded_subvolume(data_format, start, end, rest))
        return cast("tuple[bytes, str]", super().get_encoded_subvolume(data_format, start, end, scale_key))
