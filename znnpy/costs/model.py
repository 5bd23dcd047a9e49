"""Seconds of a layer: its work, stage by stage, divided by the rates of the machine; or measured there.

Rates are assumed if nothing was measured. Those of CPUs were fitted on 2 cores of a Zen 5 processor with AVX-512 and
2 threads (2026-11-20: 27 runs of convolutions, 1 to 80 maps, k = 3 to 9, within 40 %, most within 20 %; 20 of poolings,
max-filters and maxouts, windows of 2 to 5, within a factor of 1.5), and are scaled by threads and by the width of the
vector instructions. Those of GPUs are what an H200 reached, scaled by what a card says of itself. Ratios between
primitives hold better than the seconds do.

On a measured machine primitives also have a factor for each size of a layer (its seconds as the rates give them): small
layers stay in caches, or wait for each other. What was measured of one layer corrects the estimate of that
layer at every size: the layer's own speed counts there, between two sizes that were measured the speeds of both, beyond
them as all variants of the layer go on (`size_trend.Trend`), and the primitive's work says how it grows. It corrects
the primitive's other variants too, and less surely its other layers, as far as these were not measured themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf, log
from statistics import geometric_mean
from typing import TYPE_CHECKING

from znnpy.costs.size_trend import Sizes, Trend, interpolated
from znnpy.kernels.contract import Unit, Variant, Work

if TYPE_CHECKING:
    from znnpy.kernels.contract import Primitive
    from znnpy.layer_shapes import LayerShape
    from znnpy.machine import Gpu, Machine
    from znnpy.option_values import DeviceKind
    from znnpy.shapes import Precision

_THREADS = 2  # threads of the runs that the CPU rates come from
_SHARED = 0.8  # traffic grows with threads to this power: 14 GB/s of copies with 1 thread, 25 with 2
# 16 lanes, 8, and 4 with no fused multiply-add
_FLOPS_OF_AVX512 = {"avx512": 1.0, "avx2": 0.5, "other": 0.125}


LONGEST_SIZE = 1.0  # seconds from which on measured layers count as equally large
NEAR = log(1.5)  # log of the ratio below which two sizes count as the same
OPTIMISM_AT_OTHER_SIZES = 0.25  # exponent of the optimism for layers measured at other sizes


@dataclass(frozen=True, slots=True)
class Rate:
    """The speed that one kind of unit reaches when nothing else limits it."""

    flops: float  # per second
    nbytes: float  # per second, read and written together

    def times(self, flops: float, nbytes: float) -> Rate:
        return Rate(self.flops * flops, self.nbytes * nbytes)


CPU_RATES: Mapping[Unit, Rate] = {
    "product": Rate(flops=400e9, nbytes=25e9),
    "fft": Rate(flops=74e9, nbytes=25e9),
    "copy": Rate(flops=50e9, nbytes=25e9),
    "pool": Rate(flops=50e9, nbytes=30e9),
    "lane_product": Rate(flops=450e9, nbytes=28e9),
    "lane_bf16_product": Rate(flops=860e9, nbytes=28e9),
    "lane_amx_product": Rate(flops=4e12, nbytes=28e9),  # assumed: two fifths of what AMX reaches in registers
    "lane_fft": Rate(flops=300e9, nbytes=40e9),
    "lane_stream": Rate(flops=500e9, nbytes=42e9),
    "amx_product": Rate(flops=4e12, nbytes=42e9),
    "bf16_product": Rate(flops=800e9, nbytes=42e9),
}
CPU_FIRST_TOUCH = 2.0**30  # assumed bytes per second of first writes: a virtual machine asks its host for each page
CPU_STAGE_SECONDS = 5e-5  # to hand one stage to the threads and to wait for the last of them
# Rate of kernels not yet proven on any card: too slow to be chosen or measured, unless `only` asks for them.
UNPROVEN = Rate(flops=0.5e12, nbytes=0.5e12)
# These are the rates of an H200 with 132 multiprocessors and 4.8 TB/s. Those of the fused tiled FFT are fitted to
# layers of 80 to 80 maps: benchmarks/results/layers-nvidia-h200-2026-11-21.json keeps the runs with k = 2, 3, 5 and 7,
# and layers_k9-.. those with k = 9. Those of gpu.conv.implicit_gemm, block and cuconv are fitted to layers_gemm-..,
# layers_first-.., papers_pascal-.. and papers_cuconv-.. (the run that gave gpu_gemm_half and _split was not kept).
# The others are assumed.
GPU_RATES: Mapping[Unit, Rate] = {
    "gpu_fft16": Rate(flops=18e12, nbytes=3.4e12),
    "gpu_fft24": Rate(flops=19e12, nbytes=3.0e12),
    "gpu_fft32": Rate(flops=21e12, nbytes=3.0e12),
    "gpu_half_product": Rate(flops=215e12, nbytes=2.95e12),
    "gpu_split_product": Rate(flops=300e12, nbytes=2.8e12),
    "gpu_float_product": Rate(flops=37e12, nbytes=3.5e12),
    "gpu_direct": UNPROVEN,
    "gpu_gemm_float": Rate(flops=8e12, nbytes=3.0e12),  # seen: the kernel was gpu.conv.direct's
    "gpu_gemm_half": Rate(flops=150e12, nbytes=1.0e12),
    "gpu_gemm_split": Rate(flops=250e12, nbytes=1.0e12),
    "gpu_wgmma_half": Rate(flops=700e12, nbytes=3.0e12),
    "gpu_wgmma_split": Rate(flops=700e12, nbytes=3.0e12),
    "gpu_scatter_half": Rate(flops=150e12, nbytes=1.9e12),  # layers of a U-Net, 2026-11-28, tile=128
    "gpu_first": Rate(flops=18e12, nbytes=2.7e12),
    "gpu_block": Rate(flops=38e12, nbytes=2.0e12),
    "gpu_cuconv": Rate(flops=25e12, nbytes=1.5e12),
    "gpu_stream": Rate(flops=25e12, nbytes=2.8e12),
    "gpu_cufft": Rate(flops=8e12, nbytes=2.5e12),
    "gpu_cudnn_fp32": Rate(flops=28e12, nbytes=3.0e12),
    "gpu_cudnn_tf32": Rate(flops=140e12, nbytes=3.0e12),
    "gpu_cudnn_fp16": Rate(flops=230e12, nbytes=3.0e12),
    "gpu_upload": Rate(flops=25e12, nbytes=50e9),  # scaled as memory is: less than most cards reach
    "gpu_link": Rate(flops=25e12, nbytes=50e9),
}
UNPROVEN_UNITS = frozenset(unit for unit, rate in GPU_RATES.items() if rate == UNPROVEN)
GPU_STAGE_SECONDS = 3e-5  # to queue a kernel from Python, which short kernels wait for (2026-11-21: 35 to 50 µs)
_EDGE_BYTES = 5e9  # assumed, per second: one thread's copies to and from page-locked buffers
_H200_MULTIPROCESSORS, _H200_BANDWIDTH = 132, 4.8e12
# Speed of one multiprocessor relative to one of an H200, by capability: arithmetic in float32, and on tensor cores.
_FLOPS_OF_H200: Mapping[tuple[int, int], tuple[float, float]] = {
    (8, 0): (0.40, 0.38),
    (8, 6): (0.75, 0.11),
    (8, 9): (1.10, 0.23),
    (9, 0): (1.0, 1.0),
    (12, 0): (1.10, 0.25),
}
_TENSOR: frozenset[Unit] = frozenset(
    {
        "gpu_half_product",
        "gpu_split_product",
        "gpu_gemm_half",
        "gpu_gemm_split",
        "gpu_wgmma_half",
        "gpu_wgmma_split",
        "gpu_scatter_half",
        "gpu_cudnn_tf32",
        "gpu_cudnn_fp16",
    }
)


LayerGroup = tuple[object, ...]  # a `LayerKey` without its variant


@dataclass(frozen=True, slots=True)
class LayerKey:
    """Everything that determines the speed of a layer except its size. Axes are interchangeable."""

    primitive: str
    version: int
    variant: Variant
    kind: str
    maps: tuple[int, int]  # in and out
    window: tuple[int, ...]  # kernel, or pooling window, or size of a group of maps; axes in the order of their sizes
    pool: tuple[int, ...]  # window of a pooling in one with a convolution, likewise
    activation: str
    precision: str

    @property
    def method(self) -> LayerKey:
        """The key without the counts in its variant, such as how much is done at a time."""
        kept = tuple((name, value) for name, value in self.variant.parameters if not isinstance(value, int))
        return replace(self, variant=Variant(kept))

    @property
    def layer(self) -> LayerGroup:
        """The key without the variant."""
        return (
            self.primitive, self.version, self.precision, self.kind, self.maps, self.window, self.pool, self.activation
        )  # fmt: skip

    def similarity(self, other: LayerKey) -> tuple[int, float, int] | None:
        """Return how much a measurement of this key says about `other`, as a sortable rank; None: nothing.

        The same layer ranks first, then the number of equal names plus the share of equal sizes (a tile that differs
        along one axis is closer than one that differs along all), then the number of equal counts.
        """
        mine, its = (self.primitive, self.version, self.precision), (other.primitive, other.version, other.precision)
        if mine != its:
            return None
        kinds, counts = 0.0, 0
        its_own = dict(other.variant.parameters)
        for name, value in self.variant.parameters:
            also = its_own.get(name)
            if isinstance(value, tuple) and isinstance(also, tuple):
                kinds += sum(one == another for one, another in zip(value, also, strict=True)) / 3
            elif value == also:
                kinds += isinstance(value, str)
                counts += isinstance(value, int)
        return int(self.layer == other.layer), kinds, counts


def layer_key(primitive: Primitive, shape: LayerShape, variant: Variant) -> LayerKey:
    """Return the key of a measurement of `primitive` on `shape`."""
    return LayerKey(primitive.name, primitive.version, variant, *_kind_of_layer(shape))


@lru_cache(maxsize=1)  # the variants of one shape are requested one after the other
def _kind_of_layer(shape: LayerShape) -> tuple[str, tuple[int, int], tuple[int, ...], tuple[int, ...], str, str]:
    """Return what a key says of a shape."""
    pool: tuple[int, ...] = ()
    activation = ""
    window: tuple[int, ...]
    match shape.kind:
        case "conv":
            window, pool, activation = shape.k, shape.pool, shape.activation
        case "pool" | "maxfilter":
            window = shape.p
        case "maxout":
            window = (shape.of,)
        case "graph_conv" | "conv_transpose":
            window, pool = shape.k, (*shape.stride, *shape.dilation, shape.groups)
            activation = f"{shape.activation} {len(shape.fins) if shape.kind == 'graph_conv' else ''}"
            activation += " addend" if shape.kind == "graph_conv" and shape.addend else ""
        case "window_pool":
            window, pool, activation = shape.window, shape.stride, shape.how
        case "upsample":
            window, activation = shape.factor, shape.how
        case "point":
            window, activation = (len(shape.fins),), f"{shape.how} {shape.activation}"
        case "pad" | "global_pool":
            window, activation = (), shape.how
        case "norm":
            window, activation = (shape.groups,), f"{shape.affine} {shape.activation}"
    maps = shape.in_shape[4], shape.out_shape[4]
    return shape.kind, maps, tuple(sorted(window)), tuple(sorted(pool)), activation, _costed(shape)


def _costed(shape: LayerShape) -> Precision:
    """Return the precision that decides how long a variant takes: bf16x2 only admits more variants than fp32."""
    return "fp32" if shape.precision == "bf16x2" else shape.precision


@dataclass(frozen=True, slots=True)
class Rates:
    """Speed of a machine with a number of threads, or of a GPU: per kind of unit, and of layers measured there.

    fitted    units whose rates were fitted to runs on the machine; the others are assumed
    by_size   for each measured primitive and precision, factors on its seconds at SIZES
    measured  for each layer, sizes (seconds as the rates give them), ascending, and the factors measured there
    refused   layers, of any variant, that a primitive refused to run when measured, with its message
    optimism  factor, at most 1, on the seconds of layers not measured at about their size
    slowdown  factor on all seconds: fewer threads compute than when it was measured
    first_touch  bytes per second of the first write to new memory; inf: it takes no time
    first_touch_measured  whether that was measured on the machine; else it is assumed
    """

    units: Mapping[Unit, Rate] = field(default_factory=lambda: CPU_RATES)
    stage_seconds: float = CPU_STAGE_SECONDS
    fitted: frozenset[Unit] = frozenset()
    by_size: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    measured: Mapping[LayerKey, Sizes] = field(default_factory=dict)
    refused: Mapping[LayerKey, str] = field(default_factory=dict)
    optimism: float = 1.0
    slowdown: float = 1.0
    first_touch: float = inf
    first_touch_measured: bool = False
    _alike: dict[LayerKey, list[tuple[Sizes, Trend]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _trends: dict[LayerGroup, Trend] = field(default_factory=dict, init=False, repr=False, compare=False)
    _kin: dict[LayerGroup, list[LayerKey]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of(self, unit: Unit) -> Rate:
        return self.units[unit]

    @property
    def copy_bandwidth(self) -> float:
        """Bytes per second, read and written together, of copying carried planes."""
        return self.of("gpu_stream" if "gpu_stream" in self.units else "copy").nbytes / self.slowdown

    def scaled(self, flops: float, nbytes: float) -> Rates:
        """Return these rates with arithmetic and traffic multiplied."""
        return replace(self, units={unit: rate.times(flops, nbytes) for unit, rate in self.units.items()})

    def slowed(self, by: float) -> Rates:
        """Return these rates with all seconds multiplied."""
        return replace(self, slowdown=self.slowdown * by)

    def replaced(self, **units: Rate) -> Rates:
        """Return these rates with others for some units."""
        return replace(self, units={unit: units.get(unit, rate) for unit, rate in self.units.items()})

    def all_fitted(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> bool:
        """Return whether the rates of all units that it works with were measured."""
        return all(work.unit in self.fitted for work in primitive.work(shape, variant))

    def seconds(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> float:
        """Return the seconds of one run of `shape`, from measurements of it or of similar layers, else from rates."""
        if not self.measured and not self.by_size and self.optimism == 1:
            return self.slowdown * seconds(primitive.work(shape, variant), self)
        between, working = self._estimate(primitive, shape, variant)
        wanted = layer_key(primitive, shape, variant)
        hope = 1.0
        if self.optimism != 1 and not self._near(wanted, working):
            hope = self.optimism**OPTIMISM_AT_OTHER_SIZES if wanted in self.measured else self.optimism
        return self.slowdown * (between + hope * self._factor(wanted, working) * working)

    def _estimate(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> tuple[float, float]:
        """Return the estimated seconds that the stages take to begin, and those that they work."""
        work = primitive.work(shape, variant)
        between = len(work) * self.stage_seconds
        working = seconds(work, self) - between
        factors = self.by_size.get(method(primitive, shape))
        if factors is None or working <= 0:
            return between, working
        return between, working * interpolated(factors, working)

    def _factor(self, wanted: LayerKey, size: float) -> float:
        """Return the factor of the key itself, or the mean over the most similar ones; 1 if there is none."""
        known = self.measured.get(wanted)
        if known is not None:
            return self._trend(wanted).at(known, size)
        found = self._alike.get(wanted)
        if found is None:
            alike: dict[tuple[int, float, int], list[LayerKey]] = {}
            for other in self._of_primitive(wanted):
                if (likeness := other.similarity(wanted)) is not None:
                    alike.setdefault(likeness, []).append(other)
            most = alike[max(alike)] if alike else []
            found = self._alike[wanted] = [(self.measured[other], self._trend(other)) for other in most]
        return geometric_mean([trend.at(sizes, size) for sizes, trend in found]) if found else 1.0

    def _of_primitive(self, wanted: LayerKey) -> Sequence[LayerKey]:
        """Return the measured keys of the same primitive and precision; others say nothing."""
        if not self._kin:
            for other in self.measured:
                self._kin.setdefault(other.layer[:3], []).append(other)
        return self._kin.get(wanted.layer[:3], ())

    def _trend(self, of: LayerKey) -> Trend:
        """Return the trend of a measured layer, from all its variants."""
        layer = of.layer
        found = self._trends.get(layer)
        if found is None:
            measured = [sizes for other, sizes in self.measured.items() if other.layer == layer]
            found = self._trends[layer] = Trend(measured)
        return found

    def was_measured(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> bool:
        """Return whether the layer was measured with this very variant."""
        return layer_key(primitive, shape, variant) in self.measured

    def was_measured_near(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> bool:
        """Return whether the layer was measured with this very variant at about this size."""
        return self._near(layer_key(primitive, shape, variant), self._estimate(primitive, shape, variant)[1])

    def _near(self, wanted: LayerKey, size: float) -> bool:
        known = self.measured.get(wanted, ())
        return any(abs(log(min(size, LONGEST_SIZE) / min(other, LONGEST_SIZE))) <= NEAR for other, _ in known)

    def why_not(self, primitive: Primitive, shape: LayerShape) -> str | None:
        """Return the machine's message when it refused to run the layer; None if it did not."""
        return self.refused.get(layer_key(primitive, shape, Variant(()))) if self.refused else None

    def measured_similar(self, primitive: Primitive, shape: LayerShape, variant: Variant) -> bool:
        """Return whether the layer was measured with this variant or one that differs only in counts."""
        wanted = layer_key(primitive, shape, variant)
        return any(known.method == wanted.method for known in self.measured)

    def with_measurement(self, primitive: Primitive, shape: LayerShape, variant: Variant, spent: float) -> Rates:
        """Return these rates with a measurement: `spent` seconds of one run of `shape`, with no wait between stages."""
        of, (_, size) = layer_key(primitive, shape, variant), self._estimate(primitive, shape, variant)
        others = [(other, factor) for other, factor in self.measured.get(of, ()) if other != size]
        here = size, spent / self.slowdown / size
        return replace(self, measured={**self.measured, of: tuple(sorted([*others, here]))})

    def with_refusal(self, primitive: Primitive, shape: LayerShape, reason: str) -> Rates:
        """Return these rates with a layer that the machine refuses to run."""
        return replace(self, refused={**self.refused, layer_key(primitive, shape, Variant(())): reason})


def method(primitive: Primitive, shape: LayerShape) -> str:
    """Return the name that factors by size are kept under, as "cpu.conv.direct fp32"."""
    return f"{primitive.name} {_costed(shape)}"


def assumed_rates(machine: Machine, threads: int, device: DeviceKind = "cpu") -> Rates:
    """Return the rates of a machine, or of its GPU, that was not measured.

    On a CPU arithmetic grows with the threads, up to the cores; memory traffic less, as cores share the memory.
    """
    if device == "gpu" and machine.gpu is not None:
        return _gpu_rates(machine.gpu)
    workers = min(threads, machine.cores) / _THREADS
    flops, nbytes = workers * _FLOPS_OF_AVX512[machine.simd], workers**_SHARED
    rates = Rates(first_touch=CPU_FIRST_TOUCH).scaled(flops, nbytes)
    if machine.blas_warning is None:
        return rates
    return rates.replaced(product=rates.of("product").times(_FLOPS_OF_AVX512["avx2"], 1.0))


def _gpu_rates(gpu: Gpu) -> Rates:
    """Scale an H200's rates by multiprocessors and their speed, and by memory bandwidth."""
    size, nbytes = gpu.multiprocessors / _H200_MULTIPROCESSORS, gpu.bandwidth / _H200_BANDWIDTH
    older = [capability for capability in _FLOPS_OF_H200 if capability <= gpu.capability]
    plain, tensor = _FLOPS_OF_H200[max(older, default=(8, 0))]
    return Rates(
        {unit: rate.times(size * (tensor if unit in _TENSOR else plain), nbytes) for unit, rate in GPU_RATES.items()},
        GPU_STAGE_SECONDS,
    )


def unhidden_io_seconds(device: DeviceKind, nbytes: int) -> float:
    """Return the seconds in which a GPU idles while the first patch is read and the last written, `nbytes` in all.

    On a processor this is negligible.
    """
    return nbytes / _EDGE_BYTES if device == "gpu" else 0.0


def seconds(work: Sequence[Work], rates: Rates) -> float:
    """Return the seconds of all stages in sequence; each takes the longer of its arithmetic and its traffic."""
    total, units, begin = 0.0, rates.units, rates.stage_seconds
    for stage in work:
        rate = units[stage.unit]
        total += max(stage.flops / rate.flops, stage.nbytes / rate.nbytes) + begin
    return total
