"""Words of the library that the command line would have refused."""

from __future__ import annotations

from typing import Any

import pytest
from place import Place

from znnpy.inference import infer, plan


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"output_dtype": "int16"}, "there is no output dtype 'int16'; choose one of float32, float16, uint8"),
        ({"border": "mirror"}, "there is no border 'mirror'; choose one of valid, reflect"),
        ({"overwrite": True, "resume": True}, "ask for one of them"),
    ],
)
def test_infer(place: Place, words: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        infer(place.volume, place.folder / "net.yaml", out=place.out, **words)
    assert not place.out.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"border": "mirror"}, "there is no border 'mirror'"),
        ({"output_dtype": "int16"}, "there is no output dtype 'int16'"),
        ({"volume": "volume.h5", "shape": (50, 50, 50)}, "give one of them"),
    ],
)
def test_plan(words: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan("fib25_boundary", **words)
