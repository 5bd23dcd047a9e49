"""What a run had goes when the run is over, not when the garbage collector comes: it may be most of the memory."""

from __future__ import annotations

import weakref
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from emulated import compiler
from hosted_sessions import a_plan, emulated_device, session_for
from odd import Poisoned
from probes import COLUMNS, Output, Session, volume
from probes import Source as Voxels

from znnpy.errors import OutputError
from znnpy.kernels.crew import Crew
from znnpy.run import pipeline
from znnpy.run.lane import Lane
from znnpy.run.shares import Shares
from znnpy.volume.array import ArrayVolume
from znnpy.volume.source import Source

pytestmark = pytest.mark.usefixtures("collects_nothing")


def failing(at: str, stage: str, patch: int) -> None:
    if stage == at and patch == 1:
        raise OutputError("a")


@pytest.mark.parametrize("at", ["nowhere", "read", "compute", "write"])
@pytest.mark.parametrize("lanes", [1, 2])
def test_sessions_sources_and_outputs(at: str, lanes: int) -> None:
    def go() -> list[weakref.ref[Any]]:
        hook = partial(failing, at)
        with Crew(1) as crew:
            output, source = Output(hook), Voxels(volume(), hook)
            sessions = [Session(hook, crew) for _ in range(lanes)]
            shares = Shares(COLUMNS)
            with suppress(OutputError):
                pipeline.run_lanes([Lane("CPU", session, crew, shares) for session in sessions], source, output)
                assert at == "nowhere"
        return [weakref.ref(thing) for thing in (output, source, *sessions)]

    assert [there() for there in go()] == [None] * (2 + lanes)


@pytest.mark.skipif(compiler() is None, reason="the emulator needs a C++ compiler")
@pytest.mark.parametrize("fails", [False, True])
def test_hosted_sessions(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    plan, net, voxels = a_plan()

    def go() -> weakref.ref[Any]:
        def progress(event: pipeline.Event) -> None:
            if fails and event.steps_done > 1:
                raise OutputError("a")

        with emulated_device(monkeypatch) as device, session_for(plan, net, device) as session:
            source = Source(ArrayVolume(voxels), roi=None, border="valid", network=net.network, allow_nan=False)
            output = Poisoned.of((net.network.output_channels, *plan.output), np.float32)
            with suppress(OutputError):
                pipeline.run(session, session.crew, source, output, plan.cover(net.network), progress)
                assert not fails
        return weakref.ref(session)

    assert go()() is None
