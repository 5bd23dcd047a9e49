"""FFTW's measured plans, kept between runs: the same plan then gives the same bytes, and starts faster."""

from __future__ import annotations

import os
from pathlib import Path

from znnpy.kernels.cpu.fft import export_wisdom, import_wisdom
from znnpy.machine import Machine


def cache_folder() -> Path:
    """Where measured things live: $XDG_CACHE_HOME/znnpy, else ~/.cache/znnpy."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "znnpy"


def load(machine: Machine) -> None:
    """Import what earlier runs on this machine measured, if anything."""
    path = _path(machine)
    if path.is_file():
        import_wisdom(path.read_text())


def save(machine: Machine) -> str | None:
    """Keep what this process knows for later runs. Returns a sentence when the folder cannot be written."""
    path = _path(machine)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(export_wisdom())
        draft.replace(path)  # whole or not at all, whoever else writes it
    except OSError as error:
        return (
            f"FFT measurements could not be kept in {path.parent} ({error.strerror}): the next run measures again and "
            "may round differently; set XDG_CACHE_HOME to a writable folder"
        )
    return None


def _path(machine: Machine) -> Path:
    return cache_folder() / f"fftw-wisdom-{machine.fingerprint}.txt"
