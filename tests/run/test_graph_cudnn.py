"""Graphs whose convolutions cuDNN computes, on the emulator: in columns, in windows, and as recorded work."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.run import test_window_session as windows_on_cpu
from tests.run.test_graph_session import made
from tests.support.emulator import EMULATED_GPU
from tests.support.graph_runs import MACHINE, assert_equal, planned, ran, reference, whole_region
from tests.support.seeded_graphs import weights_of
from znnpy.formats.wiring import Given
from znnpy.kernels.contract import Primitive
from znnpy.kernels.gpu.graph.conv import GraphConvDirect
from znnpy.kernels.gpu.graph.cudnn import GraphConvCudnn
from znnpy.kernels.table import TABLE
from znnpy.layers import Add, Conv, ConvTranspose
from znnpy.machine import Machine
from znnpy.planner.plan import Plan, Sums
from znnpy.planner.request import Target
from znnpy.windows.settings import Windows

pytestmark = pytest.mark.slow
ONES = ((1, 1, 1), (1, 1, 1))
LAYERS = [
    Given(Conv((3, 3, 3), 8, "relu", padding=ONES), "enter", ("input",)),
    Given(Conv((3, 3, 3), 16, "elu", stride=(1, 2, 2), padding=ONES), "down"),
    Given(Conv((3, 3, 3), 16, dilation=(2, 2, 2), padding=((2, 2, 2), (2, 2, 2))), "wide"),
    Given(ConvTranspose((1, 2, 2), 8, (1, 2, 2)), "up"),
    Given(Conv((1, 1, 3), 8, padding=((0, 0, 1), (0, 0, 1))), "skip", ("enter",)),
    Given(Add("relu"), "sum", ("skip", "up")),
    Given(Conv((3, 3, 3), 8, padding=ONES), "leave"),
]
VERSIONS = (*EMULATED_GPU.versions, ("cudnn-frontend", "1.28.0"))
TARGET = Target(replace(MACHINE, gpu=replace(EMULATED_GPU, versions=VERSIONS)), "gpu", mode="gpu")


class Direct(GraphConvDirect):
    """The primitive for what cuDNN does not take."""

    __slots__ = ()

    def why_not(self, shape: Any, machine: Machine) -> str | None:
        return "cuDNN does" if GraphConvCudnn().why_not(shape, machine) is None else super().why_not(shape, machine)


LAYERS_OF_GPU = tuple(p for p in TABLE if p.name.startswith("gpu.") and p.kind != "graph_conv")
GPU: tuple[Primitive, ...] = (Direct(), GraphConvCudnn(), *LAYERS_OF_GPU)


def by_cudnn(plan: Plan) -> int:
    return sum(choice.primitive == "gpu.graph_conv.cudnn" for choice in plan.choices)


@pytest.mark.parametrize("axis", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(("patch", "column"), [((2, 2, 3), 4), pytest.param((3, 2, 2), 0, marks=pytest.mark.long)])
def test_columns_equal_the_definition(gpu: Any, axis: int, patch: Any, column: int) -> None:
    one = made(LAYERS, (7, 8, 10))
    plan = planned(one.network, one.size, whole_region(one), patch, axis=axis, column=column, table=GPU, target=TARGET)
    assert by_cudnn(plan) >= 3
    assert_equal(ran(plan, one, gpu).out, reference(one), axis)


@pytest.mark.parametrize("members", [pytest.param(1, marks=pytest.mark.long), 2])
def test_windows_are_recorded(gpu: Any, monkeypatch: pytest.MonkeyPatch, members: int) -> None:
    """The second member of an ensemble has layers, with weights, of its own."""
    named = [(one.name, one.layer, one.reads or (before.name,)) for before, one in pairwise([LAYERS[0], *LAYERS])]
    monkeypatch.setitem(windows_on_cpu.NETWORKS, "cudnn", named)
    net = windows_on_cpu.network("cudnn", Windows((6, 8, 8)))
    size = (9, 8, 13)
    each, volume = [weights_of(net, seed) for seed in range(members)], windows_on_cpu.volume_of(size)
    wanted = np.mean([windows_on_cpu.exact(net, weights, volume) for weights in each], axis=0)
    both = replace(net, members=members)
    plan = windows_on_cpu.planned(both, size, 0, Sums(), target=TARGET, table=GPU)
    assert by_cudnn(plan) >= 3
    weights = tuple(one for some in each for one in some)
    assert_equal(windows_on_cpu.ran(plan, both, weights, volume, device=gpu), wanted, members)
