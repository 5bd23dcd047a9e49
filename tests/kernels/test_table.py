"""Every primitive in the table has its own name, and a wrong name suggests near ones."""

from __future__ import annotations

import pytest

from znnpy.kernels.table import TABLE, find, of_kind


def test_every_primitive_has_a_name_of_its_own() -> None:
    names = [p.name for p in TABLE]
    assert len(set(names)) == len(names)
    for primitive in TABLE:
        assert primitive.name.startswith((f"cpu.{primitive.kind}.", f"gpu.{primitive.kind}."))
        assert primitive in of_kind(primitive.kind)
        assert find(primitive.name) is primitive
        assert primitive.version >= 1
        assert primitive.summary
        assert primitive.source


def test_unknown_primitive_suggests_near_names() -> None:
    with pytest.raises(KeyError, match=r"did you mean cpu\.conv\.fft_tiled"):
        find("cpu.conv.fft_tile")
