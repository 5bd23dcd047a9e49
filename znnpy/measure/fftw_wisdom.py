"""Keep FFTW's wisdom between runs, in a file in the cache folder, and say how long a run may measure transforms.

A run that its plan predicts to take less than SHORT_SECONDS measures nothing. A longer one measures for LEARNING_PART
of its time, and for LEARNING_SECONDS at most. All runs on this machine use what earlier ones found. A run that is
resumed uses the transforms it began with: its journal holds their wisdom, and the cache is not read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from znnpy.errors import ResumeError
from znnpy.files import cache_folder, read_regular, replace_file
from znnpy.kernels.contract import ALIGNMENT
from znnpy.kernels.cpu.fft import Wisdom, signature
from znnpy.machine import Machine
from znnpy.messages import excerpt, option

SHORT_SECONDS = 10.0
LEARNING_PART = 0.02
LEARNING_SECONDS = 3.0
FORMAT = 1  # version of the file
MOST_BYTES = 2**18  # of the file, about 300 transforms: the oldest are forgotten


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class _Remembered:
    """The content of the file; `sha256` is the checksum of `transforms` as JSON, and a damaged file is not used."""

    facts: dict[str, str]
    sha256: str
    transforms: dict[str, str]


def learning_seconds(predicted: float) -> float:
    """Return the seconds for which a run of `predicted` seconds may measure transforms."""
    return 0.0 if predicted < SHORT_SECONDS else min(LEARNING_SECONDS, LEARNING_PART * predicted)


@contextmanager
def wisdom_begun(journal: Mapping[str, str]) -> Iterator[Wisdom]:
    """Plan transforms inside as the run with this journal did; ResumeError if FFTW cannot read the wisdom."""
    with Wisdom(journal, 0.0) as wisdom:
        yield wisdom
    if wisdom.refused:
        raise ResumeError(
            f"the journal's FFTW wisdom of {len(wisdom.refused)} transforms is damaged, and without it they may round "
            f"differently; start again with {option('overwrite', True)}"
        )


@contextmanager
def wisdom_kept(machine: Machine, predicted: float) -> Iterator[Wisdom]:
    """Plan transforms inside with the wisdom in the cache folder, and measure others; keep what was learned on leaving.

    predicted  seconds of the run, which limit how long transforms are measured

    A file that is damaged or of another machine is not used, and `sentences` says so. A cache that cannot be written is
    no error.
    """
    facts = _facts(machine)
    path = cache_folder() / f"fftw-{_digest(facts)[:12]}.json"
    known, complaint = _read(path, facts)
    with Wisdom(known, learning_seconds(predicted)) as wisdom:
        yield wisdom
    if wisdom.refused and complaint is None:
        complaint = f"{path}: FFTW makes nothing of {len(wisdom.refused)} transforms"
    if complaint is not None:
        wisdom.sentences.append(f"{complaint}; it was not used and is written anew")
    if wisdom.learned or complaint is not None:
        for name in (*wisdom.refused, *wisdom.used):
            known.pop(name, None)
        try:
            _write(path, facts, known | wisdom.used)
        except OSError as error:
            wisdom.sentences.append(f"FFTW's wisdom was not kept: {error}; the next run will measure again")


def _facts(machine: Machine) -> dict[str, str]:
    """Return what determines the fastest plan of a transform, and whether FFTW can read it."""
    return {
        "format": str(FORMAT),
        "fftw": signature(),
        "processor": f"{machine.processor} {machine.simd}",
        "threads of a transform": "1",
        "alignment": str(ALIGNMENT),
    }


def _digest(of: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()


def _read(path: Path, facts: Mapping[str, str]) -> tuple[dict[str, str], str | None]:
    """Return the transforms in the file, and the reason if they cannot be used."""
    try:
        text = read_regular(path, MOST_BYTES + 1)
    except FileNotFoundError:
        return {}, None
    except OSError as error:
        return {}, f"{path} cannot be read ({error.strerror})"
    try:
        if len(text) > MOST_BYTES:
            return {}, f"{path} is longer than {MOST_BYTES} bytes"
        remembered = _adapter().validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = excerpt(".".join(map(str, first["loc"])), 60)
        return {}, f"{path} is damaged ({where}: {excerpt(first['msg'], 100)})"
    for name, here in facts.items():
        if (there := remembered.facts.get(name)) != here:
            return {}, f"{path} is of another machine ({name} {excerpt(repr(there), 60)}, here {here!r})"
    if remembered.sha256 != _digest(remembered.transforms):
        return {}, f"{path} is damaged (its checksum differs)"
    return dict(remembered.transforms), None


def _write(path: Path, facts: Mapping[str, str], transforms: dict[str, str]) -> None:
    """Replace the file in one step; the first transforms are left out when there are too many."""
    while True:
        content: dict[str, Any] = {"facts": facts, "sha256": _digest(transforms), "transforms": transforms}
        text = json.dumps(content, indent=1).encode()
        if len(text) <= MOST_BYTES:
            break
        transforms = dict(list(transforms.items())[1 + len(transforms) // 8 :])
    replace_file(path, text)


@cache
def _adapter() -> TypeAdapter[_Remembered]:
    return TypeAdapter(_Remembered)
