"""Warn about runs that are slow, or whose output is incomplete."""

from __future__ import annotations

import logging

from znnpy.kernels.cpu.native.library import why_not
from znnpy.machine import Machine
from znnpy.messages import option
from znnpy.volume.base import Chunks

_log = logging.getLogger(__name__)


def half_missing(chunks: Chunks) -> tuple[str, ...]:
    """Return a sentence if more than half of the chunks that were read are missing."""
    if 2 * chunks.missing <= chunks.looked:
        return ()
    sentence = (
        f"{chunks.missing:,} of {chunks.looked:,} {chunks.unit} of the volume are missing and were read as its fill "
        f"value: is it complete? {option('missing_chunks', 'error')} refuses missing chunks"
    )
    _log.warning("%s", sentence)
    return (sentence,)


def slower_here(machine: Machine) -> tuple[str, ...]:
    """Return warnings about what makes runs slow on this machine."""
    uncompiled = why_not(machine)
    compiled = (
        f"the fastest methods do not run here, so a run takes two to three times as long: {uncompiled}"
        if uncompiled
        else None
    )
    return tuple(sentence for sentence in (machine.blas_warning, compiled) if sentence)
