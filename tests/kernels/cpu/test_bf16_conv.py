"""Convolutions on units for bfloat16: by plain twins of their instructions, and on the real unit if there is one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.bf16_twins import compiler, twin
from tests.support.closeness import MACHINE, aligned
from znnpy.errors import ValuesOverflowError
from znnpy.graph_shapes import GraphConvShape, Pooled, TransposeShape, WindowPoolShape
from znnpy.kernels import definition, reference
from znnpy.kernels.contract import ConvWeights
from znnpy.kernels.cpu import bf16_steps
from znnpy.kernels.cpu.bf16_conv import Bf16Conv
from znnpy.kernels.cpu.native import library
from znnpy.kernels.dtypes import kept_dtype
from znnpy.kernels.table import TABLE
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.layers import ONE, ZERO
from znnpy.machine import AMX, AVX512_BF16, this_machine
from znnpy.shapes import ConvShape

if TYPE_CHECKING:
    from znnpy.kernels.contract import Array
    from znnpy.shapes import Precision

UNITS = (AMX, AVX512_BF16)
REAL = [unit for unit in UNITS if unit in MACHINE.bf16]
WITH_UNITS = replace(MACHINE, bf16=UNITS)
GUARD = 256  # bytes around scratch that nothing may write to
LIMITS: dict[Precision, float] = {"fp32": 1e-6, "bf16x2": 1e-5, "bf16": 5e-3}  # relative rms error
RUNS = [
    *(pytest.param(unit, False, id=f"twin of {unit}") for unit in UNITS),
    *(pytest.param(unit, True, id=unit) for unit in REAL),
]

GRAPH_CONVOLUTIONS = [
    GraphConvShape((8,), 16, (5, 6, 7), (3, 3, 3)),
    GraphConvShape((40,), 33, (3, 3, 3), (3, 3, 3)),  # one voxel
    GraphConvShape((1,), 32, (5, 7, 40), (3, 3, 3), (1, 1, 1), (1, 1, 1), activation="relu"),
    GraphConvShape((2,), 5, (7, 9, 11), (5, 3, 4), (2, 0, 1), (1, 1, 3), (2, 1, 3), (1, 2, 1), activation="elu"),
    GraphConvShape((33, 20), 37, (4, 5, 9), (3, 3, 3), ONE, ONE, activation="leaky_relu", parameters=(0.1,)),
    GraphConvShape((40,), 48, (6, 8, 11), (2, 2, 2), stride=(2, 2, 2)),
    GraphConvShape((24,), 70, (7, 9, 13), (3, 1, 3), (1, 0, 2), (1, 0, 1), (1, 2, 3), (2, 1, 1), addend=True),
    GraphConvShape((17,), 5, (4, 5, 6), (1, 1, 1), activation="softmax", addend=True),
    GraphConvShape((20, 9), 33, (5, 6, 7), (3, 3, 3), (0, 1, 0), ONE, factors=((2, 2, 2), ONE), first=(1, 0, 1)),
    GraphConvShape((7, 40, 3), 5, (4, 6, 9), (1, 3, 4), ZERO, (0, 0, 1), addend=True, factors=(ONE, (1, 2, 3), ONE)),
    GraphConvShape((18,), 17, (6, 5, 4), (3, 5, 3), (2, 0, 1), (0, 0, 1), factors=((2, 2, 2),), first=(0, 1, 0)),
    GraphConvShape((3, 4), 5, (4, 4, 4), (3, 3, 3), ONE, ONE, factors=((2, 2, 2), (2, 2, 2))),
    GraphConvShape((32,), 1, (1, 7, 70), (1, 3, 3), (0, 1, 1), (0, 1, 1), activation="sigmoid"),
    GraphConvShape((40,), 5, (4, 6, 71), (3, 2, 3), ONE, (0, 1, 2), (1, 2, 1), addend=True, activation="elu"),
    GraphConvShape((33, 2), 3, (3, 5, 6), (2, 3, 5), (0, 1, 2), (1, 1, 2), dilation=(1, 2, 1), activation="softmax"),
    GraphConvShape((3,), 4, (9, 2, 3), (3, 1, 1), stride=(4, 1, 2)),
]  # fmt: skip
TWO = (2, 2, 2)
POOLED = [
    replace(shape, pooled=Pooled(*pooled))
    for shape, *pooled in (
        (GraphConvShape((32,), 32, (8, 10, 36), (3, 3, 3), ONE, ONE, activation="relu"), TWO, ZERO, (4, 5, 18)),
        (GraphConvShape((20,), 37, (7, 9, 31), (3, 3, 3), ONE, ONE, activation="relu"), TWO, ZERO, (3, 4, 15)),  # odd
        (GraphConvShape((8,), 16, (5, 6, 7), (3, 3, 3), addend=True, activation="elu"), (1, 2, 2), ZERO, (3, 2, 2)),
        (GraphConvShape((33, 9), 70, (4, 7, 61), (3, 1, 3), ONE, ONE), (1, 2, 3), (1, 1, 2), (3, 4, 19)),
        (GraphConvShape((40,), 33, (3, 3, 3), (3, 3, 3)), ONE, ZERO, ONE),  # one voxel
        (GraphConvShape((40,), 33, (4, 4, 4), (3, 3, 3)), TWO, ZERO, ONE),
        (GraphConvShape((40,), 33, (3, 3, 3), (3, 3, 3)), TWO, ZERO, ZERO),  # no whole window
        (GraphConvShape((1,), 32, (9, 7, 40), (3, 3, 3), ONE, ONE, activation="relu"), (3, 2, 4), (2, 1, 3), (2, 3, 9)),
        (GraphConvShape((24,), 3, (5, 8, 71), (3, 2, 3), ONE, (0, 1, 2), addend=True), TWO, (0, 1, 1), (2, 4, 35)),
        (GraphConvShape((40,), 48, (12, 12, 22), TWO, stride=TWO, activation="relu"), TWO, ZERO, (3, 3, 5)),
        (GraphConvShape((3, 4), 5, (8, 8, 8), (3, 3, 3), ONE, ONE, factors=(TWO, TWO)), TWO, ZERO, (4, 4, 4)),
        (GraphConvShape((16,), 16, (40, 5, 35), (3, 3, 3), ONE, ONE, activation="tanh"), TWO, (1, 2, 3), (15, 1, 16)),
    )
]
LONG = GraphConvShape((80,), 16, (9, 9, 10), (9, 9, 9))  # sums of 58,320 products
TRANSPOSED = [
    TransposeShape(20, 18, (3, 4, 5), (6, 8, 10), (2, 2, 2), (0, 0, 0), (2, 2, 2)),
    TransposeShape(33, 40, (4, 3, 5), (7, 5, 11), (3, 4, 2), (1, 2, 0), (2, 1, 2), (1, 2, 1), activation="relu"),
    TransposeShape(5, 3, (2, 3, 1), (3, 1, 3), (1, 3, 1), (1, 3, -1), (3, 2, 4)),  # some outputs are the bias alone
]
CHAINS = [
    ConvShape(2, 40, 33, (5, 6, 7), (3, 2, 3), "relu"),
    ConvShape(3, 1, 16, (6, 5, 40), (2, 3, 3)),
    ConvShape(1, 20, 24, (8, 9, 23), (2, 3, 4), "relu", pool=(2, 2, 3)),
    ConvShape(2, 24, 3, (6, 7, 41), (2, 2, 4), "sigmoid", pool=(2, 1, 3)),
    ConvShape(2, 2, 37, (10, 6, 8), (3, 2, 2), "tanh", pool=(3, 1, 2)),
]


@pytest.fixture(autouse=True)
def _needs_compiler(request: pytest.FixtureRequest) -> None:
    if compiler() is None and "twin" in request.node.name:
        pytest.skip("no C++ compiler is here")


def use(monkeypatch: pytest.MonkeyPatch, unit: str, *, real: bool) -> None:
    """Let primitives run on the unit itself, or on its twin."""
    if not real:
        monkeypatch.setattr(bf16_steps, "unit_library", twin)
    else:
        assert library.why_not_bf16(MACHINE, unit) is None


def random_weights(shape: ConvShape | GraphConvShape | TransposeShape, seed: int) -> ConvWeights:
    rng = np.random.default_rng(seed)
    maps = (shape.fin, shape.fout) if isinstance(shape, TransposeShape) else (shape.fout, shape.fin)
    weight = rng.standard_normal((*maps, *shape.k), np.float32) / np.float32(np.sqrt(shape.fin * np.prod(shape.k)))
    return ConvWeights(weight, rng.standard_normal(shape.fout, np.float32))


def cut_out(array: Array) -> Array:
    """Copy an array (z, y, x, f) into a larger one full of NaN."""
    z, y, x, f = array.shape
    larger = np.full((z + 2, y + 3, x + 4, f + 5), np.nan, array.dtype)
    view = larger[1 : 1 + z, 2 : 2 + y, 1 : 1 + x, 3 : 3 + f]
    view[...] = array
    return view


def inputs_of(shape: GraphConvShape | TransposeShape, seed: int) -> list[Array]:
    """Return inputs that are cut out of larger arrays, in the dtype of the precision."""
    rng, dtype = np.random.default_rng(seed), kept_dtype(shape.precision)
    if isinstance(shape, TransposeShape):
        sizes = [(*shape.n, shape.fin)]
    else:
        sizes = [(*shape.size_of(index), maps) for index, maps in enumerate(shape.fins)]
        sizes += [(*shape.out, shape.fout)] * shape.addend
    return [cut_out(rng.standard_normal(size, np.float32).astype(dtype)) for size in sizes]


def computed(
    primitive: Any,
    shape: Any,
    weights: ConvWeights,
    inputs: Any,
    out: Array,
    threads: int = 2,
    pooled: Array | None = None,
) -> Array:
    """Run with NaN in output and scratch beforehand; fail when a byte around a scratch buffer changes."""
    (variant,) = primitive.variants(shape, WITH_UNITS)
    footprint = primitive.footprint(shape, variant, threads)
    stores = {one.name: aligned(one.nbytes + 2 * GUARD) for one in footprint.scratch}
    out[...] = np.nan
    with ThreadPool(threads) as pool:
        resident = primitive.prepare(weights, variant, pool)
        held = sum(len(kernels) for kernels in resident.kernels) + resident.bias.nbytes
        assert held <= footprint.resident, f"holds {held} bytes and promised {footprint.resident}"
        step = primitive.bind(resident, shape, variant, pool)
        scratch = {name: store[GUARD : len(store) - GUARD] for name, store in stores.items()}
        step.run(inputs, out, scratch, *(() if pooled is None else (pooled,)))
    for name, store in stores.items():
        assert (store[:GUARD] == 0xFF).all(), f"wrote before {name}"
        assert (store[len(store) - GUARD :] == 0xFF).all(), f"wrote beyond {name}"
    assert np.isfinite(out).all(), f"{(~np.isfinite(out)).sum()} of {out.size} values not finite"
    return out


def assert_close(out: Array, exact: Any, precision: Precision) -> None:
    """Fail where the rms error is more than the precision allows."""
    error = out.astype(np.float64) - exact
    worst = np.unravel_index(np.abs(error).argmax(), out.shape)
    limit = LIMITS[precision] * rms(exact)
    assert rms(error) <= limit, f"rms error {rms(error):.2e} > {limit:.2e}; worst at {worst}"


def rms(values: Any) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


@pytest.mark.parametrize("precision", ["fp32", "bf16x2", "bf16"])
@pytest.mark.parametrize("shape", [*GRAPH_CONVOLUTIONS, *TRANSPOSED], ids=str)
@pytest.mark.parametrize(("unit", "real"), RUNS)
def test_layers_of_graphs(
    unit: str,
    real: bool,
    shape: GraphConvShape | TransposeShape,
    precision: Precision,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, unit, real=real)
    shape = replace(shape, precision=precision)
    primitive = Bf16Conv(unit, shape.kind)
    weights, inputs = random_weights(shape, 1), inputs_of(shape, 2)
    out = computed(primitive, shape, weights, inputs, np.empty(shape.out_shape[1:], kept_dtype(precision)))
    assert_close(out, definition.layer(shape, weights, inputs), precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16x2", "bf16"])
@pytest.mark.parametrize(
    ("shape", "threads", "past"),
    [
        (shape, threads, past)
        for number, shape in enumerate(POOLED)
        for threads, past in ((1, bool(number % 2)), (3, not number % 2))
    ],
    ids=str,
)
@pytest.mark.parametrize(("unit", "real"), RUNS)
def test_maxima_are_a_second_output(
    unit: str,
    real: bool,
    shape: GraphConvShape,
    precision: Precision,
    threads: int,
    past: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are those of the values that the first output holds, bit by bit, and lie among voxels left as they were."""
    use(monkeypatch, unit, real=real)
    if past:
        monkeypatch.setattr(bf16_steps, "STREAM_BYTES", 0)
    shape = replace(shape, precision=precision)
    assert shape.pooled is not None
    window, first, m = shape.pooled.window, shape.pooled.first, shape.pooled.m
    primitive, dtype = Bf16Conv(unit, "graph_conv"), kept_dtype(precision)
    assert primitive.why_not(shape, WITH_UNITS) is None
    weights, inputs = random_weights(shape, 1), inputs_of(shape, 2)
    around = np.full((m[0] + 2, *shape.pooled_shape[1:]), np.nan, dtype)
    out = aligned(shape.out_bytes).view(dtype).reshape(shape.out_shape[1:])
    computed(primitive, shape, weights, inputs, out, threads, around[1:-1])
    exact = definition.layer(shape, weights, inputs)
    assert_close(out, exact, precision)
    covered = tuple(slice(lo, lo + size * count) for lo, size, count in zip(first, window, m, strict=True))
    if min(m):
        held = out[covered].astype(np.float64)
        pool = WindowPoolShape(shape.fout, held.shape[:3], window, window)
        np.testing.assert_array_equal(around[1:-1].astype(np.float64), definition.pool(pool, held))
        assert_close(around[1:-1], definition.pool(pool, exact[covered]), precision)
    assert np.isnan(around[[0, -1]].astype(np.float64)).all(), "wrote around the maxima"
    alone = np.empty_like(out)
    computed(primitive, replace(shape, pooled=None), weights, inputs, alone, threads)
    np.testing.assert_array_equal(out.astype(np.float64), alone.astype(np.float64))


@pytest.mark.parametrize("precision", ["fp32", "bf16x2", "bf16"])
@pytest.mark.parametrize(("unit", "real"), RUNS)
def test_long_sums(unit: str, real: bool, precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, unit, real=real)
    shape = replace(LONG, precision=precision)
    weights, inputs = random_weights(shape, 7), inputs_of(shape, 8)
    out = computed(
        Bf16Conv(unit, "graph_conv"), shape, weights, inputs, np.empty(shape.out_shape[1:], kept_dtype(precision))
    )
    assert_close(out, definition.layer(shape, weights, inputs), precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16x2", "bf16"])
@pytest.mark.parametrize("shape", CHAINS, ids=str)
@pytest.mark.parametrize(("unit", "real"), RUNS)
def test_layers_of_chains(
    unit: str, real: bool, shape: ConvShape, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, unit, real=real)
    shape = replace(shape, precision=precision)
    weights = random_weights(shape, 3)
    x = np.random.default_rng(4).standard_normal(shape.in_shape, np.float32).astype(kept_dtype(precision))
    out = computed(Bf16Conv(unit, "conv"), shape, weights, x, np.empty(shape.out_shape, kept_dtype(precision)))
    exact = reference.convolve(x.astype(np.float64), weights.weight, weights.bias, shape.activation)
    assert_close(out, reference.fragments(exact, shape.pool) if shape.pools else exact, precision)


@pytest.mark.parametrize(("unit", "real"), RUNS)
def test_sums_that_are_not_finite_are_counted(unit: str, real: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, unit, real=real)
    shape = GraphConvShape((3,), 20, (4, 5, 6), (3, 3, 3), precision="bf16")
    weights, (x,) = random_weights(shape, 5), inputs_of(shape, 6)
    x[2, 2, 3, 1] = np.inf
    with pytest.raises(ValuesOverflowError, match="360 of 480"):
        computed(Bf16Conv(unit, "graph_conv"), shape, weights, [x], np.empty(shape.out_shape[1:], kept_dtype("bf16")))


def test_a_processor_with_the_unit_runs_it() -> None:
    """Fail, not skip, where the processor has the unit and the kernels refuse to run."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    expected = [AMX] * ({"amx_tile", "amx_bf16"} <= flags) + [AVX512_BF16] * ("avx512_bf16" in flags)
    assert list(this_machine().bf16) == expected
    for unit in expected:
        assert library.why_not_bf16(this_machine(), unit) is None


def test_reasons_to_refuse() -> None:
    shape = GraphConvShape((8,), 40, (5, 6, 7), (3, 3, 3), precision="bf16")
    primitive = Bf16Conv(AMX, "graph_conv")
    without = replace(MACHINE, bf16=(), processor="an old one")
    assert primitive.why_not(shape, without) == (
        "needs a processor with AMX that the system lets programs use, and an old one has none"
    )
    for other, reason in (
        (replace(shape, precision="fp16"), "computes in fp32 and bf16, not in fp16"),
        (replace(shape, groups=2), "computes no groups"),
        (replace(shape, activation="softmax"), "applies a softmax to up to 32 maps, not to 40"),
        (replace(shape, activation="prelu"), "applies no prelu, whose slope may differ from map to map"),
        (replace(shape, stride=(1, 17, 1)), "takes strides of up to 16, not 17"),
        (replace(shape, factors=((2, 5, 1),)), "repeats voxels up to 4 times along an axis"),
        (
            replace(shape, factors=((2, 2, 2),), before=(1, 0, 0), first=(1, 0, 0)),
            "a volume that is upsampled begins and ends with whole voxels",
        ),
        (replace(shape, n=(20, 20, 20), k=(17, 17, 17)), "takes kernels of up to 4096 taps, not 4913"),
        (
            replace(shape, fout=20, activation="softmax", pooled=Pooled(TWO, ZERO, (1, 2, 2))),
            "takes maxima of all functions but a softmax",
        ),
        (
            replace(shape, factors=(TWO,), pooled=Pooled(TWO, ZERO, (1, 2, 2))),
            "takes no maxima where outputs come by phases",
        ),
    ):
        assert primitive.why_not(other, WITH_UNITS) == reason


def test_other_convolutions_take_no_maxima() -> None:
    shape = GraphConvShape((8,), 8, (5, 6, 7), (3, 3, 3), pooled=Pooled(TWO, ZERO, (1, 2, 2)))
    others = [
        one
        for one in TABLE
        if one.kind == "graph_conv" and one.name.startswith("cpu.") and not isinstance(one, Bf16Conv)
    ]
    assert len(others) > 3
    for primitive in others:
        assert primitive.why_not(shape, MACHINE) == "takes no maxima of its output: see cpu.graph_conv.amx"
