"""cuDNN's convolutions: how a plan is chosen and called, on the emulator; what it computes, on a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.closeness import MACHINE, assert_close, random_input, random_weights
from tests.support.emulator.libraries import Offer
from znnpy.errors import DeviceError
from znnpy.kernels import reference
from znnpy.kernels.contract import Variant
from znnpy.kernels.gpu import conv_cudnn, cudnn_plans
from znnpy.kernels.gpu.conv_cudnn import ConvCudnn, ConvCudnnWorkspace, parts
from znnpy.kernels.gpu.libraries import Convolution
from znnpy.machine import Gpu
from znnpy.shapes import ConvShape, PoolShape, valid

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights
    from znnpy.shapes import Activation, Precision

PLAIN, ROOMY = ConvCudnn(), ConvCudnnWorkspace()
GPU = Gpu("some card", (9, 0), 132, 2**36, 2**25, 2**17, 2**17, 4e12, 13000, (("cudnn-frontend", "1.28.0"),))
WITH_GPU = replace(MACHINE, gpu=GPU)
SHAPE = ConvShape(2, 8, 16, (6, 7, 9), (3, 2, 4), "relu")
ALLOWED = {"fp32": 1e-6, "tf32": 1e-3, "fp16": 2e-3}


@pytest.fixture(autouse=True)
def nothing_was_checked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_plans, "_RIGHT", {})
    monkeypatch.setattr(cudnn_plans, "_REFUSED", set())


@pytest.fixture
def offers(device: Any) -> Iterator[list[Offer]]:
    """Plans that the emulated cuDNN has; tests on them run on the emulator alone."""
    if not hasattr(device.libraries, "offers"):
        pytest.skip("what cuDNN offers is not ours to choose")
    yield device.libraries.offers
    device.libraries.offers[:] = [Offer()]


def run(device: Any, shape: ConvShape, x: Any, weights: ConvWeights, mib: int = 1, choice: int = 0) -> Any:
    dtype = np.float16 if shape.precision == "fp16" else np.float32
    primitive = PLAIN
    variant = Variant.of(precision=shape.precision, workspace=mib, choice=choice)
    scratch = {s.name: device.allocate(s.nbytes, s.name) for s in primitive.footprint(shape, variant, 1).scratch}
    step = primitive.bind(primitive.prepare(weights, variant, device), shape, variant, device)
    out = device.put(np.full(shape.out_shape, np.nan, dtype), "out")
    step.run(device.put(x.astype(dtype), "x"), out, scratch)
    return device.get(out)


@pytest.mark.parametrize("mib", [1, 64])
@pytest.mark.parametrize("activation", ["none", "relu", "tanh", "sigmoid"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
def test_output_equals_the_definition(device: Any, precision: Precision, activation: Activation, mib: int) -> None:
    shape = replace(SHAPE, precision=precision, activation=activation)
    weights, x = random_weights(shape), random_input(shape)
    if precision == "fp16":
        x = x.astype(np.float16).astype(np.float32)
    out = run(device, shape, x, weights, mib)
    exact = reference.convolve(x, weights.weight, weights.bias, activation)
    assert np.isfinite(out).all()
    assert np.sqrt(np.mean((out - exact) ** 2) / np.mean(exact**2)) <= ALLOWED[precision]


def test_bias_and_activation_run_separately_if_no_plan_fuses_them(device: Any, offers: list[Offer]) -> None:
    offers[:] = [Offer(finishes=False)]
    x, weights = random_input(SHAPE), random_weights(SHAPE)
    assert_close(run(device, SHAPE, x, weights), x, weights, SHAPE)


def error_apart(device: Any, precision: Precision, planes: tuple[int, int]) -> float:
    """Rms error where so many planes lie between images of input and of output; they must stay as they are."""
    shape, variant = (
        replace(SHAPE, batch=5, precision=precision),
        Variant.of(precision=precision, workspace=1, choice=0),
    )
    dtype = np.float16 if precision == "fp16" else np.float32
    x, weights = random_input(shape), random_weights(shape)
    more_in, more_out = planes
    wide = np.full((5, 6 + more_in, *x.shape[2:]), np.nan, dtype)
    wide[:, more_in:] = x
    out = device.put(np.full((5, 4 + more_out, *shape.out_shape[2:]), np.nan, dtype), "out")
    step = PLAIN.bind(PLAIN.prepare(weights, variant, device), shape, variant, device)
    workspace = {"workspace": device.allocate(2**20, "workspace")}
    step.run(device.put(wide, "x")[:, more_in:], out[:, more_out // 2 :][:, :4], workspace)
    found = device.get(out)
    exact = reference.convolve(wide[:, more_in:], weights.weight, weights.bias, "relu")
    untouched = np.isnan(found).sum() == found[:, :more_out].size
    return (
        float(np.sqrt(np.mean((found[:, more_out // 2 :][:, :4] - exact) ** 2) / np.mean(exact**2)))
        if untouched
        else np.inf
    )


@pytest.mark.parametrize("planes", [(0, 0), (3, 2), (3, 0), (0, 2)])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
def test_images_may_lie_apart(device: Any, precision: Precision, planes: tuple[int, int]) -> None:
    assert error_apart(device, precision, planes) <= ALLOWED[precision]


@pytest.mark.parametrize("most", [65535, 2])
def test_images_may_lie_apart_with_separate_bias_and_activation(
    device: Any, offers: list[Offer], monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(conv_cudnn, "MOST_IMAGES", most)  # of five
    offers[:] = [Offer(finishes=False)]
    assert error_apart(device, "tf32", (3, 2)) <= 1e-3


@pytest.mark.parametrize("planes", [(3, 2), (3, 0), (0, 2)])
def test_plan_failing_on_strided_images_is_not_used_for_them(
    device: Any, offers: list[Offer], planes: tuple[int, int]
) -> None:
    offers[:] = [
        Offer("careless", fault=0.01, faulty=lambda p: p.batch > 1 and not _is_dense(p)),
        Offer("careful"),
    ]
    assert error_apart(device, "tf32", planes) <= 1e-3
    taken = [key[0] for key, right in cudnn_plans._RIGHT.items() if right]
    assert taken == ["careless", "careful"], "where images lie next to each other, the first will do"


def _is_dense(problem: Convolution) -> bool:
    m = valid(problem.n, problem.k)
    return (problem.x_step, problem.out_step) == (prod(problem.n) * problem.fin, prod(m) * problem.fout)


def test_plan_failing_for_some_sizes_is_found_by_its_first_result(device: Any, offers: list[Offer]) -> None:
    offers[:] = [Offer("sometimes", fault=0.1, faulty=lambda problem: problem.n == SHAPE.n), Offer("always")]
    x, weights = random_input(SHAPE), random_weights(SHAPE)
    assert_close(run(device, SHAPE, x, weights), x, weights, SHAPE)
    assert {key[0]: right for key, right in cudnn_plans._RIGHT.items()} == {"sometimes": False, "always": True}


@pytest.mark.parametrize("large", [True, False])
def test_plan_refusing_to_run_is_replaced(device: Any, offers: list[Offer], large: bool) -> None:
    """It is replaced for the sizes that it refuses, and for all if it refuses the small layer."""
    offers[:] = [Offer("some", refuses=lambda problem: (problem.n == SHAPE.n) == large), Offer("all")]
    x, weights = random_input(SHAPE), random_weights(SHAPE)
    assert_close(run(device, SHAPE, x, weights), x, weights, SHAPE)
    assert {key[0]: right for key, right in cudnn_plans._RIGHT.items()} == {"some": large, "all": True}
    assert {(problem.n, name) for problem, name in cudnn_plans._REFUSED} == ({(SHAPE.n, "some")} if large else set())


def test_strides_of_one_image_are_those_of_its_part(
    device: Any, offers: list[Offer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strides of the whole layer would exceed 2^31 values, which cuDNN refuses."""
    offers[:] = [Offer(refuses=lambda problem: problem.batch == 1 and not _is_dense(problem))]
    shape = replace(SHAPE, batch=1)
    monkeypatch.setattr(cudnn_plans, "MOST_VALUES", 5 * 7 * 9 * 8)
    x, weights = random_input(shape), random_weights(shape)
    assert_close(run(device, shape, x, weights), x, weights, shape)
    assert max(parts_tried(device)) < shape.n[0]


def parts_tried(device: Any) -> list[int]:
    """Planes of the input of each part, in the order in which plans for them were looked for, each once."""
    return list(dict.fromkeys(problem.n[0] for problem in device.libraries.asked))


@pytest.mark.parametrize("refuses", ["to be planned", "to run"])
def test_smaller_parts_are_used_if_larger_ones_have_only_the_naive_plan(
    device: Any, offers: list[Offer], monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    plane = 7 * 9 * 8
    monkeypatch.setattr(cudnn_plans, "LESS_VALUES", (1 + 4 * plane, 1 + 3 * plane))
    device.libraries.asked.clear()
    if refuses == "to run":
        offers[:] = [Offer("good", refuses=lambda problem: problem.n[0] > 4), Offer("eng0", fault=1.0)]
    else:
        offers[:] = [Offer("eng0"), Offer("good", takes=lambda problem: problem.n[0] <= 4)]
    x, weights = random_input(SHAPE), random_weights(SHAPE)
    assert_close(run(device, SHAPE, x, weights), x, weights, SHAPE)
    assert parts_tried(device) == [6, 4], "two parts of two planes out, and none smaller"


def test_naive_plan_runs_the_whole_layer_if_smaller_parts_do_not_help(
    device: Any, offers: list[Offer], monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = 7 * 9 * 8
    monkeypatch.setattr(cudnn_plans, "LESS_VALUES", (1 + 5 * plane, plane))
    device.libraries.asked.clear()
    offers[:] = [Offer("eng0")]
    x, weights = random_input(SHAPE), random_weights(SHAPE)
    assert_close(run(device, SHAPE, x, weights), x, weights, SHAPE)
    assert parts_tried(device) == [6, 5, 3]
    offers[:] = [Offer("eng0", refuses=lambda problem: problem.n[0] in (5, 6))]
    with pytest.raises(DeviceError, match=r"no plan for 2x8->16 @6x7x9 .*; refused to run: eng0, eng0; choose"):
        run(device, SHAPE, x, weights)
    monkeypatch.setattr(cudnn_plans, "MOST_VALUES", plane)
    with pytest.raises(
        DeviceError, match=r"one plane of .* is more than cuDNN convolves at once: plan smaller patches"
    ):
        run(device, SHAPE, x, weights)


def test_overflowing_weights_do_not_reject_a_plan(device: Any) -> None:
    shape = replace(SHAPE, activation="none")
    weights, x = random_weights(shape), random_input(shape)
    weights.weight[...] = 3e38
    assert not np.isfinite(run(device, shape, x, weights)).all()


def test_overflowing_partial_sums_do_not_reject_a_plan(device: Any, offers: list[Offer]) -> None:
    offers[:] = [Offer("some", fault=np.nan, faulty=lambda problem: problem.n == SHAPE.n)]
    weights = random_weights(SHAPE)
    weights.weight[:, ::2], weights.weight[:, 1::2] = 3e38, -3e38
    assert np.isnan(run(device, SHAPE, np.ones(SHAPE.in_shape, np.float32), weights)).all()
    assert all(cudnn_plans._RIGHT.values())


def test_infinite_values_do_not_reject_a_plan(device: Any) -> None:
    shape = replace(SHAPE, precision="fp16", activation="none")
    weights = random_weights(shape)
    x = np.full(shape.in_shape, 60000.0, np.float32)
    weights.weight[...] = 1.0
    assert np.isinf(run(device, shape, x, weights)).all()
    x[:] = np.inf
    assert not np.isfinite(run(device, shape, x, weights)).any()


@pytest.mark.parametrize("most", [1 + 6 * 7 * 9 * 8, 4 * 7 * 9 * 8, 2 * 6 * 7 * 9 * 8])
def test_large_tensors_are_computed_in_parts(device: Any, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(cudnn_plans, "MOST_VALUES", most)
    shape = replace(SHAPE, precision="tf32")
    x, weights = random_input(shape), random_weights(shape)
    out = run(device, shape, x, weights)
    exact = reference.convolve(x, weights.weight, weights.bias, "relu")
    assert np.sqrt(np.mean((out - exact) ** 2) / np.mean(exact**2)) <= 1e-3


def test_parts_cover_all_and_none_is_too_large() -> None:
    shape = ConvShape(3, 80, 80, (372, 372, 372), (5, 5, 5), precision="tf32")
    for most in (2**31, 2**29, 2**27):
        found = parts(shape, prod(shape.in_shape[1:]), prod(shape.out_shape[1:]), most)
        covered = [(images.start, z) for images, planes in found for z in range(planes.start, planes.stop)]
        assert covered == [(image, z) for image in range(3) for z in range(368)]
        for images, planes in found:
            count, height = images.stop - images.start, planes.stop - planes.start
            assert count * (height + 4) * 372 * 372 * 80 < most
            assert count * height * 368 * 368 * 80 < most
    assert parts(shape, prod(shape.in_shape[1:]), prod(shape.out_shape[1:]), 5 * 372 * 372 * 80) == []


def test_images_far_apart_are_computed_one_by_one() -> None:
    shape = ConvShape(4, 8, 8, (20, 20, 20), (3, 3, 3))
    assert len(parts(shape, 64000, 46656, 2**31)) == 1
    assert [images for images, _ in parts(shape, 2**30, 46656, 2**31)] == [slice(0, 2), slice(2, 4)]
    assert len(parts(shape, 64000, 2**31, 2**31)) == 4


def test_plan_with_too_large_a_workspace_is_skipped(device: Any, offers: list[Offer]) -> None:
    offers[:] = [Offer("greedy", 64 * 2**20 + 1, fault=1.0), Offer("modest", 2**20), Offer("never reached", fault=1.0)]
    x, weights = random_input(SHAPE), random_weights(SHAPE)
    assert_close(run(device, SHAPE, x, weights, 64), x, weights, SHAPE)


def test_wrong_plan_is_skipped_and_remembered(device: Any, offers: list[Offer]) -> None:
    offers[:] = [Offer("wrong", fault=0.01), Offer("right")]
    x, weights = random_input(SHAPE), random_weights(SHAPE)
    assert_close(run(device, SHAPE, x, weights), x, weights, SHAPE)
    assert {key[0]: right for key, right in cudnn_plans._RIGHT.items()} == {"wrong": False, "right": True}


def test_missing_plan_names_the_layer(device: Any, offers: list[Offer]) -> None:
    offers[:] = [Offer("wrong", fault=0.01), Offer("greedy", 2**20 + 1)]
    words = r"no plan for 2x8->16 @6x7x9 k3x2x4 fp32 within 1048576 bytes.*: wrong, wrong; choose"
    with pytest.raises(DeviceError, match=words):
        run(device, SHAPE, random_input(SHAPE), random_weights(SHAPE))


def test_plan_refusing_the_trial_layer_is_not_used(device: Any, offers: list[Offer]) -> None:
    offers[:] = [Offer("picky", takes=lambda problem: problem.n == SHAPE.n, fault=1.0), Offer("right")]
    x, weights = random_input(SHAPE), random_weights(SHAPE)
    assert_close(run(device, SHAPE, x, weights), x, weights, SHAPE)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_held_bytes_equal_the_footprint(device: Any, precision: Precision) -> None:
    shape, variant = replace(SHAPE, precision=precision), Variant.of(precision=precision, workspace=1, choice=0)
    held = device.allocated
    resident = PLAIN.prepare(random_weights(shape), variant, device)
    footprint = PLAIN.footprint(shape, variant, 1)
    assert device.allocated - held == footprint.resident
    assert [(s.name, s.nbytes) for s in footprint.scratch] == [("workspace", 2**20)]
    assert resident is not None


def test_unsupported_shape_gets_a_reason() -> None:
    assert PLAIN.why_not(SHAPE, WITH_GPU) is None
    assert PLAIN.why_not(SHAPE, MACHINE) == "needs a CUDA device"
    without = replace(MACHINE, gpu=replace(GPU, versions=()))
    assert "pip install 'nvidia-cudnn-frontend" in (PLAIN.why_not(SHAPE, without) or "")
    old = replace(MACHINE, gpu=replace(GPU, versions=(*GPU.versions, ("cudnn-cu13", "9.15.1.7"))))
    assert "9.15.1.7" in (PLAIN.why_not(SHAPE, old) or "")
    assert "softmax" in (PLAIN.why_not(replace(SHAPE, activation="softmax"), WITH_GPU) or "")
    assert "pool" in (PLAIN.why_not(PoolShape(1, 2, (5, 5, 5), (2, 2, 2)), WITH_GPU) or "")


@pytest.mark.parametrize(
    ("precision", "fin", "applies"),
    [
        ("fp32", 1, False),
        ("fp32", 4, True),
        ("tf32", 6, False),
        ("tf32", 12, True),
        ("fp16", 12, False),
        ("fp16", 16, True),
    ],
)
def test_maps_must_fill_aligned_planes(precision: Precision, fin: int, applies: bool) -> None:
    shape = replace(SHAPE, fin=fin, precision=precision)
    assert (PLAIN.why_not(shape, WITH_GPU) is None) == applies
    assert (PLAIN.why_not(replace(shape, fin=8, fout=fin), WITH_GPU) is None) == applies


def test_long_sums_in_fp32_are_refused() -> None:
    shape = ConvShape(1, 80, 80, (20, 20, 20), (4, 4, 4))
    assert "5,120 products" in (PLAIN.why_not(shape, WITH_GPU) or "")
    assert PLAIN.why_not(replace(shape, k=(3, 4, 4)), WITH_GPU) is None
    assert PLAIN.why_not(replace(shape, precision="tf32"), WITH_GPU) is None


@pytest.mark.parametrize(("choice", "name"), [(0, "first"), (1, "second"), (2, "second"), (9, "second")])
def test_variant_names_the_plan_to_use(device: Any, offers: list[Offer], choice: int, name: str) -> None:
    offers[:] = [Offer("eng0"), Offer("greedy", 2**40), Offer("first"), Offer("wrong", fault=0.1), Offer("second")]
    asked = Convolution(2, 8, 16, SHAPE.n, SHAPE.k, "fp32", 6 * 7 * 9 * 8, 4 * 6 * 6 * 16, "relu")
    problem, plan = cudnn_plans.choose(device, asked, 2**20, choice)
    assert (plan.name, problem.finish) == (name, "relu")


@pytest.mark.parametrize(("finishing", "taken"), [(["eng0"], ("plain", False)), (["eng0_k2=1", "a"], ("a", True))])
def test_naive_plan_is_the_last_resort(
    device: Any, offers: list[Offer], finishing: list[str], taken: tuple[str, bool]
) -> None:
    offers[:] = [*(Offer(name) for name in finishing), Offer("eng0", finishes=False), Offer("plain", finishes=False)]
    asked = Convolution(2, 8, 16, SHAPE.n, SHAPE.k, "fp32", 6 * 7 * 9 * 8, 4 * 6 * 6 * 16, "relu")
    problem, plan = cudnn_plans.choose(device, asked, 0, 0)
    assert (plan.name, problem.finish is not None) == taken
    offers[:] = [Offer("eng0_k2=1")]
    assert cudnn_plans.choose(device, asked, 0, 0).plan.name == "eng0_k2=1"


def test_workspace_holds_weights_then_one_tensor_then_both() -> None:
    shape = ConvShape(1, 80, 80, (150, 150, 150), (5, 5, 5), precision="tf32")
    lean, one, both = (
        [v.count("workspace") for v in primitive.variants(shape, WITH_GPU)[::4]] for primitive in (PLAIN, ROOMY, ROOMY)
    )
    assert lean == [16 + 4]
    assert one[0] == 20 + 1030
    assert both[1] == 20 + 1030 + 950
    choices = [v.count("choice") for v in PLAIN.variants(shape, WITH_GPU)]
    assert choices == [0, 1, 2, 3]
    footprint = ROOMY.footprint(shape, ROOMY.variants(shape, WITH_GPU)[0], 1)
    assert [(s.name, s.nbytes) for s in footprint.scratch] == [("workspace", one[0] * 2**20)]


def test_large_kernels_in_tf32_are_fast_only_with_room_for_copies() -> None:
    small, large = (ConvShape(1, 16, 8, (30, 30, 30), k, precision="tf32") for k in ((3, 3, 3), (5, 5, 5)))
    for shape, primitive, unit in (
        (small, PLAIN, "gpu_cudnn_tf32"),
        (large, PLAIN, "gpu_cudnn_fp32"),
        (large, ROOMY, "gpu_cudnn_tf32"),
        (replace(large, precision="fp16"), PLAIN, "gpu_cudnn_fp16"),
    ):
        work = primitive.work(shape, primitive.variants(shape, WITH_GPU)[0])[0]
        assert work.unit == unit
        assert work.flops == 2.0 * prod(shape.out_shape) * 16 * prod(shape.k)
        assert (work.nbytes > shape.in_bytes + shape.out_bytes) == (primitive is ROOMY)
