"""gpu.conv.host_ram against the float64 definition: all divisions and inner primitives, what it needs, how it stops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import numpy as np
import pytest

from tests.support.closeness import INPUTS, MACHINE, assert_close, error_of, random_input, random_weights
from znnpy.costs.model import assumed_rates, seconds
from znnpy.errors import Stopped, ValuesOverflowError
from znnpy.kernels.contract import ConvWeights, Variant
from znnpy.kernels.gpu.conv_direct import DirectStep
from znnpy.kernels.gpu.host_ram.division import Order
from znnpy.kernels.gpu.host_ram.primitive import ConvHostRam
from znnpy.kernels.gpu.host_ram.search import Space, vram
from znnpy.kernels.gpu.host_ram.timeline import Speeds
from znnpy.kernels.table import IN_HOST_RAM, TABLE, find
from znnpy.kernels.thread_pool import ThreadPool
from znnpy.machine import Gpu
from znnpy.shapes import Activation, ConvShape, PoolShape, Precision

(HOST_RAM,) = IN_HOST_RAM
GPU = Gpu("card", (9, 0), 132, 2**34, 2**25, 232448, 233472, 4.8e12, 13000, ())
WITH_GPU = replace(MACHINE, gpu=GPU)
DIRECT = {"inner": "gpu.conv.direct", "inner_kernel": "shared"}
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "fp16")
ALLOWED: dict[Precision, float] = {"fp32": 1e-6, "tf32": 1e-3, "fp16": 5e-3}
SHAPE = ConvShape(3, 5, 7, (9, 8, 7), (3, 2, 4), "relu")
SHAPES = [
    SHAPE,
    ConvShape(1, 3, 5, (4, 5, 6), (4, 5, 6), "tanh"),  # one voxel out
    ConvShape(2, 1, 6, (7, 3, 9), (1, 3, 2), "sigmoid"),  # one map in
    ConvShape(1, 7, 1, (11, 6, 5), (5, 1, 1), "none"),  # one map out
]


def variant(
    shape: ConvShape,
    *,
    images: int = 1,
    planes: int = 0,
    maps_in: int = 0,
    maps_out: int = 0,
    order: Order = "outputs",
    inner: dict[str, Any] = DIRECT,
) -> Variant:
    """0: all there are."""
    return Variant.of(
        images=images,
        planes=planes or shape.out[0],
        maps_in=maps_in or shape.fin,
        maps_out=maps_out or shape.fout,
        order=order,
        **inner,
    )


def tiled(precision: Precision, kernels: str = "kept") -> dict[str, Any]:
    spectra = {"fp32": "split", "tf32": "half", "fp16": "quick"}[precision]
    parameters = {"tile": (8, 16, 16), "group": 64, "spectra": spectra, "kernels": kernels}
    return {"inner": "gpu.conv.fft_tiled", **{f"inner_{name}": value for name, value in parameters.items()}}


def of_host(values: Any, *, strided: bool = False) -> Any:
    """On the host, as they lie or every second along two axes."""
    if not strided:
        return values.copy()
    room = np.full((*values.shape[:2], 2 * values.shape[2], values.shape[3], 2 * values.shape[4]), np.nan, values.dtype)
    view = room[:, :, ::2, :, ::2]
    view[...] = values
    return view


def run(
    device: Any,
    shape: ConvShape,
    x: Any,
    weights: ConvWeights,
    chosen: Variant,
    *,
    strided: bool = False,
    times: int = 1,
    threads: int = 2,
) -> Any:
    """Return the output, from poisoned memory, and fail if the device holds more than the footprint says."""
    kind = np.dtype(np.float16 if shape.precision == "fp16" else np.float32)
    given = of_host(x.astype(kind), strided=strided)
    promised = HOST_RAM.footprint(shape, chosen, 1)
    held = device.allocated
    resident = HOST_RAM.prepare(weights, chosen, device)
    kept = device.allocated - held
    assert kept <= promised.resident
    assert kept == promised.resident or chosen.text("inner") != "gpu.conv.direct"
    scratch = {s.name: device.put(np.full(s.nbytes, 0xFF, np.uint8), s.name) for s in promised.scratch}
    step = HOST_RAM.bind(resident, shape, chosen, device)
    outs = []
    with ThreadPool(threads) as pool:
        for _ in range(times):
            out = of_host(np.full(shape.out_shape, np.nan, kind), strided=strided)
            step.run(given, out, scratch, pool)
            outs.append(out.copy())
    assert all(np.array_equal(out, outs[0]) for out in outs)
    assert np.array_equal(given, of_host(x.astype(kind), strided=strided)), "the input was modified"
    return outs[0]


def divisions(shape: ConvShape) -> Iterator[Variant]:
    """Few of many: every axis in equal parts, in parts that leave one over, and one by one, in both orders."""
    chunks = [(shape.batch, shape.out[0]), (2, shape.out[0]), (1, shape.out[0]), (1, 3), (1, 1)]
    for images, planes in dict.fromkeys((min(i, shape.batch), min(p, shape.out[0])) for i, p in chunks):
        for maps_in, maps_out in dict.fromkeys(
            (min(a, shape.fin), min(b, shape.fout)) for a, b in ((9, 9), (9, 3), (2, 9), (2, 3), (1, 2))
        ):
            for order in get_args(Order):
                whole = shape.out[0] if images > 1 else planes
                yield variant(shape, images=images, planes=whole, maps_in=maps_in, maps_out=maps_out, order=order)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_division_equals_the_definition(device: Any, shape: ConvShape) -> None:
    x, weights = random_input(shape), random_weights(shape)
    for chosen in dict.fromkeys(divisions(shape)):
        assert_close(run(device, shape, x, weights, chosen), x, weights, shape)


@pytest.mark.parametrize("kernels", ["kept", "streamed"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_tiled_fft_computes_sublayers(device: Any, precision: Precision, kernels: str) -> None:
    """It needs the largest value of its input, and finds that of its output."""
    shape = ConvShape(1, 3, 4, (8, 9, 7), (3, 4, 2), "relu", precision=precision)
    x, weights = random_input(shape), random_weights(shape)
    x *= np.float32(1 if precision == "fp16" else 1e6)
    x[:, 4:] *= 100
    order: Order = "inputs" if kernels == "kept" else "outputs"
    chosen = variant(shape, planes=4, maps_in=2, maps_out=3, order=order, inner=tiled(precision, kernels))
    out = run(device, shape, x, weights, chosen)
    assert np.isfinite(out).all()
    assert error_of(out, x, weights, shape) <= ALLOWED[precision]


@pytest.mark.parametrize(
    "inner",
    [
        {"inner": "gpu.conv.implicit_gemm", "inner_units": "tensor", "inner_precision": "fp32"},
        {"inner": "gpu.conv.fft", "inner_maps": 2},
        {"inner": "gpu.conv.cudnn", "inner_choice": 0, "inner_precision": "fp32", "inner_workspace": 16},
    ],
    ids=lambda inner: inner["inner"],
)
def test_other_primitives_compute_sublayers(device: Any, inner: dict[str, Any]) -> None:
    """Some find the largest of what they write themselves, of others it is looked for."""
    if inner["inner"] == "gpu.conv.cudnn" and not hasattr(device.libraries, "offers"):
        pytest.importorskip("cudnn")
    shape = ConvShape(2, 8, 12, (7, 9, 6), (3, 2, 2), "tanh")
    x, weights = random_input(shape), random_weights(shape)
    for chosen in (
        variant(shape, images=2, inner=inner),
        variant(shape, planes=2, maps_in=4, maps_out=8, inner=inner),
        variant(shape, planes=3, maps_in=4, maps_out=4, order="inputs", inner=inner),
    ):
        assert_close(run(device, shape, x, weights, chosen), x, weights, shape)


@pytest.mark.parametrize("maps_in", [5, 2])
@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("precision", PRECISIONS)
def test_all_activations_equal_the_definition(
    device: Any, precision: Precision, activation: Activation, maps_in: int
) -> None:
    shape = replace(SHAPE, activation=activation, precision=precision)
    x, weights = 3 * random_input(shape), random_weights(shape)
    all_maps = activation == "softmax"
    chosen = variant(shape, planes=3, maps_in=5 if all_maps else maps_in, maps_out=7 if all_maps else 3)
    out = run(device, shape, x, weights, chosen)
    assert np.isfinite(out).all()
    assert error_of(out, x, weights, shape) <= (ALLOWED["fp32"] if precision != "fp16" else 2e-3)


@pytest.mark.parametrize("kind", INPUTS)
def test_odd_inputs_are_as_accurate(device: Any, kind: str) -> None:
    x, weights = random_input(SHAPE, kind), random_weights(SHAPE)
    out = run(device, SHAPE, x, weights, variant(SHAPE, planes=2, maps_in=2, maps_out=3))
    assert_close(out, x, weights, SHAPE)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("order", get_args(Order))
def test_runs_repeat_byte_by_byte_on_arrays_of_any_strides(
    device: Any, order: Order, threads: int, strided: bool
) -> None:
    x, weights = random_input(SHAPE), random_weights(SHAPE)
    chosen = variant(SHAPE, planes=3, maps_in=2, maps_out=3, order=order)
    out = run(device, SHAPE, x, weights, chosen, strided=strided, times=3, threads=threads)
    assert np.array_equal(out, run(device, SHAPE, x, weights, chosen))


def test_pinned_memory_equals_the_footprint(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, taken = device.pinned, []

    def noted(shape: Any, dtype: Any) -> Any:
        taken.append(pinned(shape, dtype))
        return taken[-1]

    monkeypatch.setattr(device, "pinned", noted)
    x, weights = random_input(SHAPE), random_weights(SHAPE)
    for chosen in list(dict.fromkeys(divisions(SHAPE)))[::3]:  # of 2 orders and 5 of maps: each beside each
        taken.clear()
        run(device, SHAPE, x, weights, chosen)
        assert sum(array.nbytes for array in taken) == HOST_RAM.footprint(SHAPE, chosen, 1).host


def test_transfers_overlap_with_computing(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next part is on its way before a sub-layer is queued, and outputs are fetched when the next one is queued."""
    told: list[str] = []
    copy_async = device.copy_async

    def copying(target: Any, source: Any, stream: Any) -> None:
        if stream is device.uploads or stream is device.downloads:
            told.append("up" if stream is device.uploads else "down")
        copy_async(target, source, stream)

    monkeypatch.setattr(device, "copy_async", copying)
    compute = DirectStep.run

    def computing(*arguments: Any, **words: Any) -> None:
        told.append("compute")
        compute(*arguments, **words)

    monkeypatch.setattr(DirectStep, "run", computing)
    x, weights = random_input(SHAPE), random_weights(SHAPE)
    run(device, SHAPE, x, weights, variant(SHAPE))
    assert told == ["up", "up", "compute", "down", "up", "compute", "down", "compute", "down"]
    told.clear()
    run(device, SHAPE, x, weights, variant(replace(SHAPE, batch=1), images=3, maps_in=2, maps_out=4))
    sums = ["up", "up", "compute", "up", "compute", "compute", "down"]  # two of three groups stay where a pass ends
    assert told == [*sums, "compute", "up", "compute", "compute", "down"]


@pytest.mark.parametrize(
    ("activation", "maps_in", "value"),
    [
        *(("none", maps_in, value) for maps_in in (5, 2) for value in (np.inf, np.nan)),
        *(("tanh", maps_in, value) for maps_in, value in ((5, np.nan), (2, np.inf), (2, np.nan))),
    ],
)
def test_values_not_finite_are_reported(device: Any, value: float, activation: Activation, maps_in: int) -> None:
    """Sums too, where the activation would hide it."""
    shape = replace(SHAPE, activation=activation)
    x, weights = random_input(shape), random_weights(shape)
    x[1, 4, 4, 4, 1] = value
    with pytest.raises(ValuesOverflowError, match=r"a result of conv 3x5->7 .* became (inf|nan), beyond float32"):
        run(device, shape, x, weights, variant(shape, planes=3, maps_in=maps_in, maps_out=3))


@pytest.mark.parametrize("activation", ["none", "sigmoid"])
def test_partial_sums_beyond_float16_are_reported(device: Any, activation: Activation) -> None:
    """They may be, where the sum itself is small."""
    shape = ConvShape(1, 2, 3, (4, 4, 4), (1, 1, 1), activation, precision="fp16")
    weights = ConvWeights(np.ones((3, 2, 1, 1, 1), np.float32), np.zeros(3, np.float32))
    weights.weight[:, 1] = -1
    x = np.full(shape.in_shape, 40000, np.float32)
    weights.weight[...] *= 2
    assert np.isfinite(run(device, shape, x, weights, variant(shape))).all()
    with pytest.raises(ValuesOverflowError, match=r"became 80000, beyond float16; choose precision='tf32', or check"):
        run(device, shape, x, weights, variant(shape, maps_in=1))


def test_stopped_layer_ends_between_sublayers_with_nothing_pending(device: Any) -> None:
    chosen = variant(SHAPE, planes=1, maps_in=2)
    resident = HOST_RAM.prepare(random_weights(SHAPE), chosen, device)
    scratch = {s.name: device.allocate(s.nbytes, s.name) for s in HOST_RAM.footprint(SHAPE, chosen, 1).scratch}
    step, x = HOST_RAM.bind(resident, SHAPE, chosen, device), random_input(SHAPE)

    class Watched(np.ndarray[Any, Any]):
        """An output that stops its run when it is first written to."""

        pool: ThreadPool

        def __setitem__(self, at: Any, value: Any) -> None:
            super().__setitem__(at, value)
            if isinstance(self.base, Watched):
                self.base.pool.stop()

    out = np.full(SHAPE.out_shape, np.nan, np.float32).view(Watched)
    with ThreadPool(1) as out.pool, pytest.raises(Stopped):
        step.run(x, out, scratch, out.pool)
    assert all(stream.done for stream in (device.uploads, device.stream, device.downloads))
    assert np.isnan(np.asarray(out)).any()
    again = np.full(SHAPE.out_shape, np.nan, np.float32)
    with ThreadPool(1) as pool:
        step.run(x, again, scratch, pool)
    assert_close(again, x, random_weights(SHAPE), SHAPE)


def test_stopped_run_ends_the_wait_for_the_device(device: Any) -> None:
    chosen = variant(SHAPE)
    step = HOST_RAM.bind(HOST_RAM.prepare(random_weights(SHAPE), chosen, device), SHAPE, chosen, device)

    class Never:
        looks = 0

        @property
        def done(self) -> bool:
            self.looks += 1
            assert self.looks < 100, "it waits for ever"
            return False

    with ThreadPool(1) as pool:
        pool.stop()
        with pytest.raises(Stopped):
            step._await(Never(), pool)


@pytest.mark.parametrize("order", get_args(Order))
@pytest.mark.parametrize("early", ["uploads", "stream", "downloads"])
def test_streams_may_run_ahead_of_each_other(
    device: Any, monkeypatch: pytest.MonkeyPatch, early: str, order: Order
) -> None:
    """Each does what it is given as soon as it may, while the others wait until somebody asks."""
    compute, copy_async = DirectStep.run, device.copy_async

    def computing(*arguments: Any, **words: Any) -> None:
        compute(*arguments, **words)
        if early == "stream":
            device.synchronize(device.stream)

    def copying(target: Any, source: Any, stream: Any) -> None:
        copy_async(target, source, stream)
        if stream is getattr(device, early):
            device.synchronize(stream)

    monkeypatch.setattr(DirectStep, "run", computing)
    monkeypatch.setattr(device, "copy_async", copying)
    x, weights = random_input(SHAPE), random_weights(SHAPE)
    for maps_in in (2, 5):
        chosen = variant(SHAPE, planes=3, maps_in=maps_in, maps_out=3, order=order)
        assert_close(run(device, SHAPE, x, weights, chosen, times=2), x, weights, SHAPE)


def test_plans_use_it_only_if_named() -> None:
    """Tensors of plans live on the device."""
    assert HOST_RAM not in TABLE
    assert find("gpu.conv.host_ram", IN_HOST_RAM) is HOST_RAM
    with pytest.raises(KeyError):
        find("gpu.conv.host_ram")


def test_unsupported_shape_gets_a_reason() -> None:
    assert HOST_RAM.why_not(SHAPE, MACHINE) == "needs a CUDA device"
    assert HOST_RAM.why_not(PoolShape(1, 1, (3, 3, 3), (2, 2, 2)), WITH_GPU) == "computes convolutions, not pool"
    pooled = replace(SHAPE, n=(9, 8, 8), pool=(1, 2, 1))
    assert HOST_RAM.why_not(pooled, WITH_GPU) == ("does not fuse pooling into fragments: see gpu.conv.fft_tiled")
    assert HOST_RAM.why_not(SHAPE, WITH_GPU) is None
    assert isinstance(HOST_RAM, ConvHostRam)
    none = ConvHostRam(HOST_RAM.inner[:1])
    assert none.why_not(replace(SHAPE, k=(1, 1, 1)), WITH_GPU) == "none of gpu.conv.fft_tiled computes its sub-layers"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("activation", ["relu", "softmax"])
def test_variants_fit_the_gpu_and_run(precision: Precision, activation: Activation) -> None:
    shape = ConvShape(2, 6, 12, (20, 30, 30), (3, 3, 3), activation, precision=precision)
    small = replace(WITH_GPU, gpu=replace(GPU, memory_bytes=2**22))
    for machine in (WITH_GPU, small):
        found = HOST_RAM.variants(shape, machine)
        assert found
        assert len(set(found)) == len(found)
        assert machine.gpu is not None
        for chosen in found:
            assert vram(shape, HOST_RAM.footprint(shape, chosen, 1)) <= machine.gpu.memory_bytes
            assert seconds(HOST_RAM.work(shape, chosen), assumed_rates(machine, 1, "gpu")) > 0
            assert activation != "softmax" or (chosen.count("maps_in"), chosen.count("maps_out")) == (6, 12)


def test_fastest_inner_primitive_is_chosen() -> None:
    shape, speeds = ConvShape(2, 6, 12, (20, 30, 30), (3, 3, 3), "relu"), Speeds(25e9, 25e9, 2e12)
    rates = assumed_rates(WITH_GPU, 1, "gpu")
    assert isinstance(HOST_RAM, ConvHostRam)
    seen = []
    for limit in (2**30, 2**22, 2**21):
        choice = HOST_RAM.fastest(shape, WITH_GPU, limit, speeds, rates.seconds)
        assert choice is not None
        assert HOST_RAM.footprint(shape, choice.variant, 1) == choice.found.footprint
        assert vram(shape, choice.found.footprint) <= limit
        seen.append(choice.found.seconds)
    assert seen == sorted(seen)
    assert seen[0] < seen[-1]
    assert HOST_RAM.fastest(shape, WITH_GPU, 2**10, speeds, rates.seconds) is None


def test_work_counts_all_sublayers_and_transfers() -> None:
    shape = ConvShape(2, 5, 7, (9, 8, 7), (3, 2, 4), "relu")
    up, inner, sums, down = HOST_RAM.work(shape, variant(shape, planes=3, maps_in=2, maps_out=4))
    assert (up.unit, inner.unit, sums.unit, down.unit) == ("gpu_link", "gpu_direct", "gpu_stream", "gpu_link")
    planes = 7 + 3 * 2  # of three chunks, with those they share
    maps = 5 + (5 - 2 - 1)  # one of three groups goes up again
    assert up.nbytes == 2 * planes * 8 * 7 * maps * 4
    assert down.nbytes == shape.out_bytes
    assert sums.nbytes == 2 * 12 * np.prod(shape.out_shape)
    direct = find("gpu.conv.direct")
    every = (
        direct.work(ConvShape(1, fin, fout, (m + 2, 8, 7), shape.k), Variant.of(kernel="shared"))[0]
        for m, fin, fout in product((3, 3, 1), (2, 2, 1), (4, 3))
    )
    assert inner.flops == 2 * sum(work.flops for work in every)
    whole = HOST_RAM.work(shape, variant(shape, images=2))
    (plain,) = direct.work(shape, Variant.of(kernel="shared"))
    assert [work.unit for work in whole] == ["gpu_link", "gpu_direct", "gpu_link"]
    assert (whole[1].flops, whole[1].nbytes) == (plain.flops, plain.nbytes)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_large_layers_equal_layers_held_by_the_device(cuda_device: Any, precision: Precision) -> None:
    """Copies overlap with computing."""
    shape = ConvShape(2, 48, 40, (90, 96, 96), (5, 5, 5), "relu", precision=precision)
    x, weights = random_input(shape), random_weights(shape)
    inner = tiled(precision)
    whole = run(cuda_device, shape, x, weights, variant(shape, images=2, inner=inner)).astype(np.float32)
    for maps_in, maps_out, order in ((48, 40, "outputs"), (20, 16, "outputs"), (20, 16, "inputs")):
        chosen = variant(shape, planes=30, maps_in=maps_in, maps_out=maps_out, order=order, inner=inner)  # type: ignore[arg-type]
        out = run(cuda_device, shape, x, weights, chosen).astype(np.float32)
        assert np.sqrt(np.mean((out - whole) ** 2) / np.mean(whole**2)) <= 2 * ALLOWED[precision]


def test_search_space_holds_every_variant() -> None:
    shape = ConvShape(2, 6, 12, (20, 30, 30), (3, 3, 3), "relu")
    space = Space.whole(shape)
    for chosen in HOST_RAM.variants(shape, WITH_GPU):
        assert (chosen.count("images"), chosen.count("planes")) in space.chunks
