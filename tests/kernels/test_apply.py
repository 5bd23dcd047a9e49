"""A primitive is applied to an array in three lines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import znnpy
from tests.support.emulated_gpus import EmulatedGpus
from tests.support.emulator import EMULATED_GPU, compiler
from znnpy.errors import DeviceError, ShapeError, ValuesOverflowError
from znnpy.kernels import reference
from znnpy.kernels.contract import Variant
from znnpy.kernels.cpu.conv_fft_tiled import ConvFftTiled
from znnpy.kernels.table import find, of_kind
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.layer_shapes import LayerShape
from znnpy.machine import this_machine
from znnpy.network import ConvWeights
from znnpy.shapes import ConvShape, PoolShape, Precision

SHAPE = ConvShape(batch=2, fin=3, fout=4, n=(9, 11, 10), k=(2, 3, 4), activation="relu")


def arrays(shape: ConvShape) -> tuple[np.ndarray, ConvWeights]:
    rng = np.random.default_rng(12)
    weight = rng.standard_normal((shape.fout, shape.fin, *shape.k)).astype(np.float32)
    return rng.standard_normal(shape.in_shape).astype(np.float32), ConvWeights(
        weight, rng.standard_normal(shape.fout).astype(np.float32)
    )


@pytest.mark.parametrize("name", [p.name for p in of_kind("conv") if p.why_not(SHAPE, this_machine()) is None])
def test_every_convolution_primitive_equals_the_definition(name: str) -> None:
    """Each runs with the variant that is chosen for it."""
    x, weights = arrays(SHAPE)
    out = znnpy.apply(name, SHAPE, x, weights, threads=2)
    exact = reference.convolve(x, weights.weight, weights.bias, "relu")
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, exact, atol=1e-5 * np.abs(exact).max())


def test_pooling_takes_no_weights() -> None:
    shape = PoolShape(2, 3, (9, 11, 11), (2, 3, 2))
    x = np.random.default_rng(1).standard_normal(shape.in_shape).astype(np.float32)
    for name in [p.name for p in of_kind("pool") if p.why_not(shape, this_machine()) is None]:
        np.testing.assert_array_equal(znnpy.apply(name, shape, x), reference.fragments(x, shape.p))


@pytest.fixture
def _emulated(emulated_gpus: EmulatedGpus) -> None:
    if compiler() is None:
        pytest.skip("the emulator needs a C++ compiler")
    emulated_gpus.use()


ON_GPU = replace(this_machine(), gpu=EMULATED_GPU)


@pytest.mark.slow
@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "name", [p.name for p in of_kind("conv") if p.why_not(SHAPE, ON_GPU) is None and "gpu" in p.name]
)
def test_convolution_on_a_gpu_equals_the_definition(name: str, precision: Precision) -> None:
    x, weights = arrays(SHAPE)
    shape = replace(SHAPE, precision=precision)
    if find(name).why_not(shape, ON_GPU):
        pytest.skip(f"{name} does not compute in {precision}")
    out = znnpy.apply(name, shape, x, weights)
    exact = reference.convolve(x, weights.weight, weights.bias, "relu")
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, exact, atol={"fp32": 1e-5, "fp16": 1e-2}[precision] * np.abs(exact).max())


@pytest.mark.slow
@pytest.mark.usefixtures("_emulated")
def test_pooling_on_a_gpu_is_exact_and_overflow_is_refused() -> None:
    shape = PoolShape(2, 3, (9, 11, 11), (2, 3, 2))
    x = np.random.default_rng(1).standard_normal(shape.in_shape).astype(np.float32)
    np.testing.assert_array_equal(znnpy.apply("gpu.pool.fragments", shape, x), reference.fragments(x, shape.p))
    with pytest.raises(ValuesOverflowError, match=r"70000, beyond float16; choose fp32 or tf32"):
        znnpy.apply("gpu.pool.fragments", replace(shape, precision="fp16"), np.full_like(x, -7e4))
    x, weights = arrays(SHAPE)
    with pytest.raises(ValuesOverflowError, match=r"gpu\.conv\.direct computed non-finite values for conv .* in fp32"):
        znnpy.apply("gpu.conv.direct", SHAPE, x, ConvWeights(weights.weight * np.float32(1e38), weights.bias))


def test_missing_gpu_is_named(emulated_gpus: EmulatedGpus) -> None:
    emulated_gpus.remove("no driver")
    with pytest.raises(DeviceError, match="no driver"):
        znnpy.apply("gpu.conv.direct", SHAPE, *arrays(SHAPE))


def test_unfit_arrays_are_refused() -> None:
    x, weights = arrays(SHAPE)
    with pytest.raises(
        ShapeError, match=r"takes \(S, z, y, x, f\) = \(2, 9, 11, 10, 3\) float32 in C order, not \(1, "
    ):
        znnpy.apply("cpu.conv.direct", SHAPE, x[:1], weights)
    with pytest.raises(ShapeError, match=r"not .* float64"):
        znnpy.apply("cpu.conv.direct", SHAPE, x.astype(np.float64), weights)
    with pytest.raises(ShapeError, match=r"kernels of shape \(4, 3, 2, 3, 4\), not None"):
        znnpy.apply("cpu.conv.direct", SHAPE, x)
    with pytest.raises(ShapeError, match=r"takes biases of shape \(4,\), not \(1,\)"):
        znnpy.apply("cpu.conv.direct", SHAPE, x, ConvWeights(weights.weight, weights.bias[:1]))
    with pytest.raises(ShapeError, match=r"takes kernels of float32, not float64"):
        znnpy.apply("cpu.conv.direct", SHAPE, x, ConvWeights(weights.weight.astype(np.float64), weights.bias))
    with pytest.raises(ShapeError, match=r"takes biases of float32, not int64"):
        znnpy.apply("cpu.conv.direct", SHAPE, x, ConvWeights(weights.weight, weights.bias.astype(np.int64)))
    with pytest.raises(ShapeError, match=r"cpu\.pool\.max does not apply to conv 2x3->4"):
        znnpy.apply("cpu.pool.max", SHAPE, x, weights)
    with pytest.raises(KeyError, match=r"no primitive 'cpu\.conv\.dirct'; did you mean cpu\.conv\.direct"):
        znnpy.apply("cpu.conv.dirct", SHAPE, x, weights)


def test_variant_with_the_least_work_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ConvShape(1, 8, 8, (24, 24, 24), (3, 3, 3))
    x, weights = arrays(shape)
    taken: list[Variant] = []
    bind = ConvFftTiled.bind

    def spy(self: ConvFftTiled, resident: object, shape: LayerShape, variant: Variant, pool: ThreadPool) -> object:
        taken.append(variant)
        return bind(self, resident, shape, variant, pool)

    monkeypatch.setattr(ConvFftTiled, "bind", spy)
    znnpy.apply("cpu.conv.fft_tiled", shape, x, weights, threads=1)
    primitive = find("cpu.conv.fft_tiled")
    variants = primitive.variants(shape, this_machine())
    flops = {variant: sum(stage.flops for stage in primitive.work(shape, variant)) for variant in variants}
    assert flops[taken[0]] < flops[variants[0]]
    assert flops[taken[0]] < 1.01 * min(flops.values())
    given = variants[-1]
    znnpy.apply("cpu.conv.fft_tiled", shape, x, weights, variant=given, threads=1)
    assert taken[1] == given


@pytest.mark.parametrize("variant", [Variant(), Variant.of(tile=(5, 5, 5), group=1, kept=0)])
@pytest.mark.parametrize("name", ["cpu.conv.fft_tiled", "cpu.conv.fft_lanes"])
def test_unknown_variant_is_refused(name: str, variant: Variant) -> None:
    """A tile side or a group of zero that no code was compiled for would crash."""
    shape = ConvShape(1, 8, 8, (24, 24, 24), (3, 3, 3))
    x, weights = arrays(shape)
    if find(name).why_not(shape, this_machine()):
        pytest.skip("the kernels are not compiled here")
    with pytest.raises(ShapeError, match=r"has no variant .*; omit it, or "):
        znnpy.apply(name, shape, x, weights, variant=variant, threads=1)
