"""gpu.graph_conv.cudnn: how its plans are called on the emulator, and what they compute on a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest

from tests.support.closeness import MACHINE
from tests.support.emulator.libraries import Offer
from tests.support.graph_cases import CONVS, weights_for, with_parameters
from tests.support.graph_on_gpu import GPU, WITH_GPU, among_nan, in_precision, rounded_inputs, run
from znnpy.errors import DeviceError
from znnpy.graph_shapes import GraphConvShape, PadShape
from znnpy.kernels import definition
from znnpy.kernels.contract import Variant
from znnpy.kernels.gpu import cudnn_plans
from znnpy.kernels.gpu.graph.cudnn import GraphConvCudnn, GraphConvCudnnWorkspace, slabs
from znnpy.network import ConvWeights
from znnpy.shapes import GPU_PRECISIONS

PLAIN, ROOMY = GraphConvCudnn(), GraphConvCudnnWorkspace()
ALLOWED = {"fp32": 1e-5, "tf32": 1e-3, "fp16": 5e-3}  # of the largest |out|
SAME = ((1, 1, 1), (1, 1, 1))
FULL = GraphConvShape((16,), 24, (7, 6, 5), (3, 3, 3), *SAME, activation="relu")
STRIDED = GraphConvShape((8,), 16, (8, 7, 9), (3, 3, 3), *SAME, stride=(2, 2, 2))
DILATED = GraphConvShape((8,), 8, (9, 10, 8), (3, 2, 3), (2, 0, 3), (2, 3, 3), dilation=(2, 4, 3), activation="elu")
EACH: list[Any] = [
    FULL,
    STRIDED,
    with_parameters(DILATED),
    GraphConvShape((8,), 16, (6, 5, 7), (3, 3, 3)),
    GraphConvShape((8,), 16, (5, 6, 7), (3, 3, 3), (1, 0, 1), (0, 1, 1), activation="relu"),  # beside faces
    GraphConvShape((8,), 8, (5, 6, 7), (2, 3, 1), (0, 1, 0), (1, 1, 0), (1, 2, 2), activation="leaky_relu"),
    GraphConvShape((16,), 8, (5, 6, 7), (3, 3, 3), *SAME, activation="relu", addend=True),
    GraphConvShape((16,), 8, (4, 6, 5), (1, 1, 1), stride=(2, 2, 2), addend=True),
    GraphConvShape((8,), 8, (1, 6, 7), (1, 3, 3), (0, 1, 1), (0, 1, 1), activation="clip"),
    GraphConvShape((64,), 32, (5, 6, 7), (3, 3, 3), *SAME, activation="silu"),
]
FACES = EACH[4]
SLIGHT = 1e-3  # a fault that a small layer shows, and a few voxels of a result do not


@pytest.fixture(autouse=True)
def nothing_was_checked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_plans, "_RIGHT", {})
    monkeypatch.setattr(cudnn_plans, "_REFUSED", set())


@pytest.fixture
def offers(device: Any) -> Iterator[list[Offer]]:
    """Plans that the emulated cuDNN has; tests on them run on the emulator alone."""
    if not hasattr(device.libraries, "offers"):
        pytest.skip("what cuDNN offers is not ours to choose")
    device.libraries.asked.clear()
    yield device.libraries.offers
    device.libraries.offers[:] = [Offer()]


def variant_of(shape: GraphConvShape, finish: str = "own", mib: int = 64) -> Variant:
    return Variant.of(choice=0, finish=finish, precision=shape.precision, workspace=mib)


def in_a_part(device: Any, x: Any) -> Any:
    """Copy an input into a larger image of NaN, with gaps between lines and planes."""
    z, y, x_, f = x.shape
    larger = np.full((z + 1, y + 3, x_ + 2, f), np.nan, x.dtype)
    larger[:z, 2 : 2 + y, 1 : 1 + x_] = x
    return device.put(larger, "a larger input")[:z, 2 : 2 + y, 1 : 1 + x_]


def check(device: Any, shape: GraphConvShape, place: Any = None, finish: str = "own") -> None:
    """Run one case, and compare output and peak with the definition."""
    inputs = rounded_inputs(shape)
    exact = definition.layer(shape, weights_for(shape), inputs)
    out, peak = run(device, PLAIN, shape, inputs, variant_of(shape, finish), place=place)
    largest = np.abs(exact).max()
    np.testing.assert_allclose(out, exact, rtol=0, atol=ALLOWED[shape.precision] * largest)
    assert abs(peak - largest) <= ALLOWED[shape.precision] * largest
    assert peak == np.abs(out).max() or finish == "own"


USUAL = [(FULL, "fp16", in_a_part, "cudnn"), (EACH[2], "fp32", None, "own"), (EACH[6], "fp16", in_a_part, "own")]


@pytest.mark.parametrize(
    ("shape", "precision", "place", "finish"),
    [
        pytest.param(
            *case,
            id=f"{shape} {precision} {'whole' if place is None else 'part'} {finish}",
            marks=() if case in USUAL else pytest.mark.long,
        )
        for shape in EACH
        for precision in GPU_PRECISIONS
        for place in (None, in_a_part)
        for finish in ("cudnn", "own")
        for case in [(shape, precision, place, finish)]
    ],
)
def test_output_equals_the_definition(device: Any, shape: Any, precision: Any, place: Any, finish: str) -> None:
    check(device, in_precision(shape, precision), place, finish)


@pytest.mark.parametrize(
    ("shape", "finish", "asked"),
    [
        (FULL, "cudnn", "relu"),
        (EACH[3], "cudnn", "none"),
        (EACH[6], "cudnn", "none"),
        (DILATED, "cudnn", "none"),
        (FULL, "own", None),
        (DILATED, "own", None),
    ],
)
def test_cudnn_finishes_what_it_can(device: Any, offers: list[Offer], shape: Any, finish: str, asked: Any) -> None:
    shape = with_parameters(shape)
    check(device, shape, finish=finish)
    assert {problem.finish for problem in device.libraries.asked} == {asked}
    offers[:] = [Offer(finishes=False)]
    check(device, shape, finish=finish)


def test_cudnn_adds_the_bias_for_parts_of_images(device: Any, offers: list[Offer]) -> None:
    """It has faster plans that do."""
    check(device, FULL, in_a_part, "own")
    assert {problem.finish for problem in device.libraries.asked} == {"relu"}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("finish", ["cudnn", "own"])
@pytest.mark.parametrize("precision", ["fp16", pytest.param("fp32", marks=pytest.mark.long)])
def test_what_is_not_finite_reaches_the_peak(device: Any, precision: Any, finish: str, bad: float) -> None:
    """A plan may give the least finite value instead of -infinity."""
    if hasattr(device.libraries, "offers"):
        device.libraries.offers[:] = [Offer(clamps=True)]
    shape = replace(EACH[3], precision=precision)
    inputs, weights = rounded_inputs(shape), weights_for(shape)
    assert weights is not None
    inputs[0][2, 2, 2, 1] = bad
    for sign in (1, -1):
        signed = ConvWeights(sign * abs(weights.weight), weights.bias)
        with np.errstate(invalid="ignore"):
            exact = definition.layer(shape, signed, inputs)
        out, peak = run(device, PLAIN, shape, inputs, variant_of(shape, finish), signed)
        assert not np.isfinite(peak)
        kept = (abs(out) < np.finfo(out.dtype).max) if finish == "cudnn" else np.isfinite(out)
        np.testing.assert_array_equal(kept, np.isfinite(exact))


def planned_slabs(shape: GraphConvShape, most: int) -> list[Any]:
    return slabs(shape, prod(shape.n[1:]) * shape.fin, most)


@pytest.mark.parametrize("shape", [pytest.param(s, marks=() if s is EACH[2] else pytest.mark.long) for s in EACH[:7]])
@pytest.mark.parametrize("place", [pytest.param(None, marks=pytest.mark.long), in_a_part])
def test_large_layers_are_computed_in_slabs(
    device: Any, monkeypatch: pytest.MonkeyPatch, shape: Any, place: Any
) -> None:
    read = (shape.n[1] + 3) * (shape.n[2] + 2) * shape.fin if place else prod(shape.n[1:]) * shape.fin
    planes = shape.dilation[0] * (shape.k[0] - 1) + 1 + shape.stride[0]
    most = 1 + max(planes * read, 2 * prod(shape.out_shape[2:]))
    monkeypatch.setattr(cudnn_plans, "MOST_VALUES", most)
    calls = slabs(shape, read, most)
    assert len(calls) > 1
    if hasattr(device.libraries, "offers"):
        device.libraries.asked.clear()
        check(device, shape, place, "cudnn")
        assert len(device.libraries.asked) == len({(s.before, s.behind, s.planes.stop - s.planes.start) for s in calls})
    else:
        check(device, shape, place, "cudnn")


@pytest.mark.parametrize("shape", EACH, ids=str)
@pytest.mark.parametrize("planes", [2, 3, 4, 5, 7])
def test_slabs_cover_all_and_none_is_too_large(shape: Any, planes: int) -> None:
    most = 1 + planes * max(prod(shape.n[1:]) * shape.fin, prod(shape.out_shape[2:]))
    found = planned_slabs(shape, most)
    extent, stride = shape.dilation[0] * (shape.k[0] - 1) + 1, shape.stride[0]
    if not found:
        assert (most - 1) // (prod(shape.n[1:]) * shape.fin) < extent, "a window does not fit"
        return
    assert [z for slab in found for z in range(slab.planes.start, slab.planes.stop)] == list(range(shape.out[0]))
    for slab in found:
        n, m = slab.given.stop - slab.given.start, slab.planes.stop - slab.planes.start
        assert n > 0
        assert n * prod(shape.n[1:]) * shape.fin < most
        assert m * prod(shape.out_shape[2:]) < most
        assert (n + slab.before + slab.behind - extent) // stride + 1 == m
        assert slab.given.start - slab.before == slab.planes.start * stride - shape.before[0]


def test_no_slab_reads_padding_only() -> None:
    shape = GraphConvShape((8,), 8, (6, 2, 2), (3, 1, 1), before=(4, 0, 0), behind=(4, 0, 0))
    plane = 2 * 2 * 8
    assert slabs(shape, plane, 1 + 3 * plane) == []
    assert [slab.given for slab in slabs(shape, plane, 1 + 6 * plane)] == [slice(0, 2), slice(0, 6), slice(4, 6)]


def test_one_plane_may_be_too_large(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_plans, "MOST_VALUES", 100)
    with pytest.raises(DeviceError, match=r"one plane of conv 16->24 @7x6x5 .* is more than cuDNN convolves at once"):
        check(device, FULL)


@pytest.mark.parametrize(
    ("shape", "place", "faulty", "fault"),
    [
        (FULL, in_a_part, lambda p: p.apart is not None and p.steps[1] > p.n[2] * p.fin, SLIGHT),
        (FACES, None, lambda p: p.before != p.behind, SLIGHT),
        (STRIDED, None, lambda p: p.stride != (1, 1, 1), SLIGHT),
        (DILATED, None, lambda p: p.dilation != (1, 1, 1), SLIGHT),
        (FULL, None, lambda p: p.n == FULL.n, 0.05),  # in its first result
    ],
)
def test_plan_that_is_wrong_for_such_a_layer_is_not_used(
    device: Any, offers: list[Offer], shape: Any, place: Any, faulty: Any, fault: float
) -> None:
    offers[:] = [Offer("careless", fault=fault, faulty=faulty), Offer("careful")]
    check(device, with_parameters(shape), place)
    assert {key[0]: right for key, right in cudnn_plans._RIGHT.items()} == {"careless": False, "careful": True}


def test_plan_that_refuses_to_run_is_replaced(device: Any, offers: list[Offer]) -> None:
    offers[:] = [Offer("some", refuses=lambda problem: problem.n == FULL.n), Offer("all")]
    check(device, FULL)
    assert {(problem.n, name) for problem, name in cudnn_plans._REFUSED} == {(FULL.n, "some")}


def test_missing_plan_names_the_layer(device: Any, offers: list[Offer]) -> None:
    offers[:] = [Offer("greedy", 2**40)]
    words = r"no plan for 1x8->8 @9x10x8 k3x2x3 pad 2x0x3 2x3x3 dilation 2x4x3 fp32 within 67108864 bytes"
    with pytest.raises(DeviceError, match=words):
        check(device, DILATED)


@pytest.mark.parametrize("finish", ["cudnn", "own"])
def test_second_run_can_be_recorded(device: Any, monkeypatch: pytest.MonkeyPatch, finish: str) -> None:
    """It neither waits nor allocates; what is recorded computes the layer again."""
    shape = EACH[6] if finish == "own" else FULL
    inputs, weights, variant = rounded_inputs(shape), weights_for(shape), variant_of(shape, finish)
    step = PLAIN.bind(PLAIN.prepare(weights, variant, device), shape, variant, device)
    on_device = [in_a_part(device, x) for x in inputs]
    out, peak = device.put(np.zeros(shape.out_shape[1:], np.float32), "out"), device.put(np.zeros(1, "f4"), "peak")
    scratch = {"workspace": device.allocate(2**26, "workspace")}

    def work() -> None:
        step.run(on_device, out, scratch, out_peak=device.address(peak))

    work()
    first = device.get(out)
    with monkeypatch.context() as forbidden:
        for name in ("allocate", "put", "get", "synchronize"):
            forbidden.setattr(device, name, None)
        recording = device.recorded(work)
    for array in (out, peak):
        device.clear(array)
    recording.play()
    np.testing.assert_array_equal(device.get(out), first)
    assert device.get(peak)[0] == pytest.approx(np.abs(definition.layer(shape, weights, inputs)).max(), rel=1e-4)


def test_inputs_that_cudnn_cannot_read_are_named(device: Any) -> None:
    with pytest.raises(ValueError, match="cuDNN needs voxels side by side and lines that begin at multiples of 16"):
        check(device, FULL, among_nan)


def test_each_step_of_inputs_is_planned_for(device: Any, offers: list[Offer]) -> None:
    """A step takes a whole image, and parts of larger ones."""
    weights, variant, (x,) = weights_for(FULL), variant_of(FULL), rounded_inputs(FULL)
    step = PLAIN.bind(PLAIN.prepare(weights, variant, device), FULL, variant, device)
    scratch = {"workspace": device.allocate(2**26, "workspace")}
    exact = definition.layer(FULL, weights, [x])
    for given in (device.put(x, "x"), in_a_part(device, x), device.put(x, "x")):
        out = device.put(np.full(FULL.out_shape[1:], np.nan, np.float32), "out")
        step.run([given], out, scratch)
        np.testing.assert_allclose(device.get(out), exact, rtol=0, atol=1e-5 * np.abs(exact).max())
    assert [asked.apart for asked in device.libraries.asked] == [None, (9 * 7 * 16, 7 * 16)]


def test_unsupported_shape_gets_a_reason() -> None:
    def reason(machine: Any = WITH_GPU, **changes: Any) -> str:
        return PLAIN.why_not(replace(FULL, **changes), machine) or ""

    other = "see gpu.graph_conv.direct"
    pad = PadShape(3, (4, 5, 6), (4, 5, 6), (0, 0, 0), (0, 0, 0), (4, 5, 6), "zeros")
    assert PLAIN.why_not(FULL, WITH_GPU) is None
    assert reason(MACHINE) == "needs a CUDA device"
    assert "pip install 'nvidia-cudnn-frontend" in reason(replace(MACHINE, gpu=replace(GPU, versions=())))
    assert PLAIN.why_not(pad, WITH_GPU) == f"computes convolutions of graphs, not {pad}"
    several = f"takes one input as it is, and does not copy several, or upsampled ones: {other}"
    assert reason(fins=(8, 8)) == several
    assert reason(factors=((2, 2, 2),)) == several
    assert reason(groups=2) == f"does not compute 2 groups apart: {other}"
    assert reason(activation="softmax") == f"softmax needs all maps of a voxel at once: {other}"
    nothing = "some of its windows hold nothing but padding, which is 1x1x1 and 1x3x1 voxels"
    assert reason(behind=(1, 3, 1)) == f"{nothing}: {other}"
    assert reason(behind=(1, 2, 1)) == ""
    assert reason(fins=(6,)).startswith("cuDNN needs images aligned to 16 bytes, and planes of 6 or 24 maps in fp32")
    assert reason(fins=(12,), precision="fp16").endswith(other)
    assert "8,640 products" in reason(fins=(320,))
    assert reason(fins=(320,), precision="tf32") == ""
    assert all(PLAIN.why_not(shape, WITH_GPU) for shape in CONVS if len(shape.fins) > 1 or shape.groups > 1)


def test_variants_divide_the_finish() -> None:
    finishes = [(v.text("finish"), v.count("choice")) for v in PLAIN.variants(DILATED, WITH_GPU)]
    assert finishes == [(finish, choice) for finish in ("cudnn", "own") for choice in range(4)]
    assert len({v.count("workspace") for v in ROOMY.variants(FULL, WITH_GPU)}) == 1  # both are a megabyte more
    large = GraphConvShape((64,), 64, (128, 128, 128), (3, 3, 3), *SAME, precision="fp16")
    assert [v.count("workspace") for v in ROOMY.variants(large, WITH_GPU)[::8]] == [17 + 256, 17 + 512]


@pytest.mark.parametrize("shape", EACH, ids=str)
def test_costs_are_those_of_a_whole_layer_and_of_its_finish(shape: Any) -> None:
    own = variant_of(shape, mib=17)
    work, finish = PLAIN.work(shape, own)
    assert (work.unit, work.flops) == ("gpu_cudnn_fp32", 2.0 * prod(shape.out_shape) * shape.fin * prod(shape.k))
    assert work.nbytes == shape.in_bytes + shape.out_bytes
    assert (finish.unit, finish.nbytes) == ("gpu_stream", (3 if shape.addend else 2) * shape.out_bytes)
    done = shape.activation in ("none", "relu") and not shape.addend
    more = PLAIN.work(shape, variant_of(shape, "cudnn", 17))[1].nbytes
    assert more == (shape.out_bytes if done else finish.nbytes)
    footprint = PLAIN.footprint(shape, own, 1)
    assert footprint.raises_peak
    assert footprint.resident == 4 * shape.fout * (shape.fin * prod(shape.k) + 1)
    assert [(s.name, s.nbytes) for s in footprint.scratch] == [("workspace", 17 * 2**20)]
    assert footprint.allowance > cudnn_plans.CHECK_BYTES + footprint.resident


@pytest.mark.parametrize("shape", [FULL, DILATED, STRIDED], ids=str)
def test_small_layers_stay_within_the_allowance(
    device: Any, offers: list[Offer], monkeypatch: pytest.MonkeyPatch, shape: Any
) -> None:
    offers[:] = [Offer("greedy", cudnn_plans.CHECK_BYTES, fault=0.1), Offer("modest")]
    variant, (x,) = variant_of(shape), rounded_inputs(shape)
    step = PLAIN.bind(PLAIN.prepare(weights_for(shape), variant, device), shape, variant, device)
    arrays = in_a_part(device, x), device.put(np.zeros(shape.out_shape[1:], np.float32), "out")
    scratch, held, allocate = {"workspace": device.allocate(2**26, "workspace")}, [], device.allocate

    def noted(nbytes: int, what: str) -> Any:
        array = allocate(nbytes, what)
        held.append(device.allocated)
        return array

    before = device.allocated
    monkeypatch.setattr(device, "allocate", noted)
    step.run([arrays[0]], arrays[1], scratch)
    assert cudnn_plans.CHECK_BYTES < max(held) - before <= PLAIN.footprint(shape, variant, 1).allowance
