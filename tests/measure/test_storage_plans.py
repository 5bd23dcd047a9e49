"""Plans whose columns lie along chunks are taken where reading takes longer than computing, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest

import znnpy
from tests.measure.test_transfers import network, planned
from tests.volume.test_chunk_layers import CHUNK, Counted
from znnpy.errors import NoPlanError
from znnpy.measure import transfers as transfers_module
from znnpy.measure.storage_plans import suited_plan, wide_patches
from znnpy.measure.transfers import Transfers, read_bytes
from znnpy.network import Conv, Network, Pool
from znnpy.planner.run_plan import RunPlan
from znnpy.shapes import Vec3
from znnpy.volume.source import Source


def source_of(net: Network) -> Source:
    return Source(Counted(net.input_channels), roi=None, border="valid", network=net, allow_nan=False)


def test_patches_are_whole_chunks_and_periods() -> None:
    source = source_of(network())
    assert source.output == (35, 25, 40)
    assert list(wide_patches(network(), source)) == [(16, 25, 40), (16, 16, 24), (16, 8, 12)]
    pooled = Network("pooled", 1, (Conv((2, 2, 2), 1), Pool((2, 2, 5))))
    for patch in wide_patches(pooled, source_of(pooled)):
        assert all(size % period == 0 for size, period in zip(patch, pooled.period, strict=True))
        assert patch[0] == CHUNK[0]


def test_patches_are_no_thinner_than_some_planes() -> None:
    source = Source(Counted(2, (1, 8, 12)), roi=None, border="valid", network=network(), allow_nan=False)
    assert {patch[0] for patch in wide_patches(network(), source)} == {16}


def test_slow_volumes_get_wide_columns_and_fast_ones_keep_their_plan(tmp_path: Path) -> None:
    narrow, source, made = planned(tmp_path, (5, 6, 7), "patches"), source_of(network()), list[Vec3]()

    def wider(patch: Vec3) -> RunPlan:
        made.append(patch)
        if patch == (16, 16, 24):
            raise NoPlanError("it takes too much memory")
        return planned(tmp_path, patch, "columns")

    bytes_ = read_bytes(narrow, network(), source)
    fast = Transfers(bytes_, 1e15, 0, None)
    assert suited_plan(narrow, fast, network(), source, wider) == (narrow, fast)
    assert made == []
    slow = Transfers(bytes_, 1e3, 0, None)
    chosen, found = suited_plan(narrow, slow, network(), source, wider)
    assert made == list(wide_patches(network(), source))
    assert chosen.patch_out[1:] == (25, 40)
    assert found.read_bytes == read_bytes(chosen, network(), source) < bytes_ / 3


def test_a_run_and_a_plan_of_a_slow_volume_take_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zarr

    monkeypatch.setattr(transfers_module, "LARGE_BYTES", 0)
    monkeypatch.setattr("znnpy.measure.transfers.reading_rate", lambda volume, needed: 1000.0)
    volume = Counted()
    zarr.create_array(tmp_path / "v.zarr", data=volume.voxels, chunks=(1, *CHUNK))
    monkeypatch.setattr("znnpy.measure.storage_plans.WIDTHS", (2,))
    planned(tmp_path, (5, 6, 7), "patches")
    net = tmp_path / "probe.yaml"
    told: list[str] = []
    made = znnpy.plan(net, volume=tmp_path / "v.zarr", ram="2G", device="cpu", tell=told.append)
    assert isinstance(made, RunPlan)
    # The whole cross-section reads every voxel once; where another plan computes faster, two chunks are as WIDTHS says.
    assert made.patch_out[1:] in ((25, 40), (25, 10))
    assert any(line.startswith("reading ") and "at 1000 B/s" in line for line in told), told
    fixed = znnpy.plan(net, volume=tmp_path / "v.zarr", ram="2G", device="cpu", patch=(5, 6, 7), cover="patches")
    assert isinstance(fixed, RunPlan)
    assert fixed.patch_out == (5, 6, 7)
