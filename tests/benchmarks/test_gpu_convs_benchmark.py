"""The benchmark of convolutions of graphs on a GPU, on an emulated one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks import gpu_convs
from benchmarks.gpu_conv_tables import PROGRAM
from benchmarks.harness.results import Result, Row, read
from tests.support.emulator import EmulatedDevice

if TYPE_CHECKING:
    from pathlib import Path


def test_a_layer_is_measured_and_compared(tmp_path: Path) -> None:
    path = tmp_path / "gpu_convs-emulated.json"
    with EmulatedDevice() as device:
        gpu_convs.command_on(device, path, quick=True, peers=False, graphs=False)
    found = read(path)
    shape, normed = gpu_convs.QUICK
    one, two = ({(row.group, row.subject) for row in found.rows if row.case == str(each)} for each in (shape, normed))
    names = ("direct", "implicit_gemm", "fft_tiled", "warpgroup")
    assert one == {(group, f"gpu.graph_conv.{name}") for group in ("layers", "errors") for name in names}
    both = [f"gpu.graph_conv.{name} and gpu.norm.passes" for name in names]
    assert two == {(group, name) for group in ("layers", "errors") for name in ("gpu.graph_conv.normed", *both)}
    assert all(max(row.values) < 5e-3 for row in found.of_group("errors"))
    (row,) = (row for row in found.of_group("layers") if row.subject == "gpu.graph_conv.warpgroup")
    assert row.case == str(shape)
    assert row.facts["bytes"] == 2 * (2 * 8 * 64 + 8 * 8 * 27)
    assert row.facts["tflops"] == pytest.approx(2 * 64 * 64 * 27 / row.facts["us"] / 1e6)


def test_tables_tell_shares_and_the_ratio_to_cudnn() -> None:
    case = "conv 64->64 @8x8x8 k3x3x3 pad 1x1x1 1x1x1 none fp16"
    own = {"us": 20.0, "tflops": 500.0, "share": 0.5, "bound": "tensor"}
    rows = [
        Row("layers", case, "gpu.graph_conv.warpgroup", "ns/voxel", (2.0,), facts=own),
        Row("layers", case, "PyTorch fp16, cuDNN 91900", "ns/voxel", (5.0,), facts={"us": 50.0, "tflops": 200.0}),
    ]
    about = {"gpu": {"name": "one"}, "cores": 2, "date": "2026-01-01", "commit": "abc"}
    about |= {"peak_flops": 1e15, "copy_bytes_per_second": 3e12}
    result = Result("gpu_convs", "one", about, rows)
    table = PROGRAM.tables["gpu-convs-layers"]({"gpu_convs": [result]})
    layer = "conv 64->64 @8x8x8 k3x3x3 pad 1x1x1 1x1x1"
    assert f"| {layer} | `warpgroup` | 20.0 | 500 | 0.50 tensor | 50.0 | 2.5x |" in table
    assert PROGRAM.headline(result) == f"{case}: 500 TFLOP/s, 2.5x cuDNN"
