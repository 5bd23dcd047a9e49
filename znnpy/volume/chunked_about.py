"""How volumes in chunks are stored, for their owner: made of metadata that were checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from znnpy.messages import excerpt
from znnpy.volume.about import About, Inside
from znnpy.volume.space import Space
from znnpy.volume.stored_array import Node

LEVELS = ("level", "clevel", "blockSize", "preset")  # what formats call the strength of a compression
LONGEST = 40  # characters of a codec
LONGEST_VERSION = 10
NOT_PACKING = ("bytes", "transpose", "crc32c", "raw")  # codecs that make nothing smaller


def about_chunks(
    name: str, node: Node, arrays: Mapping[str, Node], scales: Sequence[tuple[str, Space | None]] = ()
) -> About:
    """Return how an array is stored.

    name    of the format, with its version
    arrays  in the file or folder, by their names; groups are left out
    scales  names and places of the resolutions of its image, the finest first
    """
    found = {one: other for one, other in arrays.items() if other.dtype is not None}
    levels = tuple(inside(one, found[one], space) for one, space in scales if one in found)
    others = found.keys() - {one for one, _ in scales}
    return About(
        name,
        compression=", ".join(_packing(node.spec)),
        shard=node.file if node.file != node.chunk else (),
        scales=levels if len(levels) > 1 else (),
        datasets=tuple(inside(one, other) for one, other in found.items()) if others and len(found) > 1 else (),
        notes=("its chunks lie in shards",) if node.is_sharded and node.file == node.chunk else (),
    )


def inside(name: str, node: Node, space: Space | None = None) -> Inside:
    """Describe an array by its metadata."""
    return Inside(name, node.shape, str(node.dtype), space)


def version(found: object, otherwise: str) -> str:
    """Return the version that metadata state, or another where they state none that can be shown."""
    return found if isinstance(found, str) and 0 < len(found) <= LONGEST_VERSION and found.isprintable() else otherwise


def _packing(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield the codecs that make chunks smaller, each with its strength."""
    if spec["driver"] == "neuroglancer_precomputed":
        scale = spec["scale_metadata"]
        codecs = [scale["encoding"], scale.get("sharding", {}).get("data_encoding", "raw")]
    elif spec["driver"] == "zarr3":
        codecs = list(spec["metadata"]["codecs"])
    else:
        codecs = [spec["metadata"].get("compressor") or spec["metadata"].get("compression") or "raw"]
    while codecs:
        codec = codecs.pop(0)
        settings = codec if isinstance(codec, Mapping) else {"name": codec}
        more = settings.get("configuration")
        settings = {**settings, **(more if isinstance(more, Mapping) else {})}
        kind = settings.get("name") or settings.get("id") or settings.get("type")
        if kind == "sharding_indexed":
            codecs = [*settings["codecs"], *codecs]
        elif kind not in NOT_PACKING:
            level = next((settings[key] for key in LEVELS if key in settings), None)
            words = [kind, settings.get("cname"), level if level != -1 else None]
            yield excerpt(" ".join(str(word) for word in words if word is not None), LONGEST)
