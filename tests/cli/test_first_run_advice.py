"""Messages name what is missing for a first run, and what to do about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cli import Place
from tests.support.messages import assert_holds
from znnpy.kernels.cpu.native import library
from znnpy.network_files import shipped


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make znnpy run without compiled kernels, as after an installation without a C++ compiler."""
    missing: list[Path] = []
    monkeypatch.setattr(library, "path", lambda simd: next(iter(missing), None))


@pytest.mark.usefixtures("uncompiled")
def test_run_without_compiled_kernels_warns_of_lost_speed(place: Place) -> None:
    lost = "the fastest methods do not run here, so a run takes two to three times as long: the kernels for avx"
    result = place.infer()
    assert result.exit_code == 0
    assert f"\nwarning: {lost}" in result.stdout
    assert "reinstall it where there is a C++ compiler (g++ or clang++)" in result.stdout
    assert lost in place.run("plan", "--shape", "40,40,40").stdout


@pytest.mark.usefixtures("uncompiled")
def test_reason_of_this_machine_is_given_without_a_shape(place: Place) -> None:
    rows = json.loads(place.run("primitives", "--json").stdout)
    reasons = {row["name"]: row["why_not"] for row in rows if row["name"].startswith("cpu.")}
    assert "were not compiled" in reasons["cpu.conv.first"]
    assert "were not compiled" in reasons["cpu.conv.fft_lanes"]
    assert not [reason for reason in reasons.values() if reason and "input maps" in reason]
    assert "cannot run here: takes up to" not in place.run("primitives").stdout


def test_shipped_network_without_weights_is_refused_with_advice(place: Place) -> None:
    names = sorted(set(shipped()) - {"fib25_boundary", "fib25_unet"})
    assert len(names) == 4
    for name in names:
        sentence = place.refusal("infer", place.volume, "--network", name)
        assert_holds(sentence, f"the network {name}", "no weights", "--weights FILE.npz", "run fib25_boundary")
