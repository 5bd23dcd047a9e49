"""The layers and the figures of four papers on direct convolution on GPUs, as data. `papers.py` repeats them.

first_principles  Convolution in CUDA from First Principles: one image of 4000 x 4000. The post names no kernel.
pascal            Chang, Onishi, Maruyama, Fast convolution kernels on Pascal GPU with high memory efficiency, 4. The
                  text gives the ends of both ranges; every pair of a size and a number of maps in between
                  counts, though the paper may have measured large images with few maps alone.
cuconv            Jorda, Valero-Lara, Pena, cuConv, section 4. Layers are those whose numbers are Table 1's: of
                  GoogLeNet without the projections behind poolings, of ResNet-50 those of each stage's first block, as
                  if it did not stride: only there has a layer 1024 maps of 7 x 7. 86 of the 88 differ, times 7
                  batches are 602, and the 50 that the paper wins are its 8.31 %.
cudnn             Chetlur et al., cuDNN: Efficient Primitives for Deep Learning, Tables 2 and 3, and 3.2: of the mean
                  speed of all five layers, in a batch of 16, against the best batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from znnpy.shapes import ConvShape, Precision

Paper = Literal["first_principles", "pascal", "cuconv", "cudnn"]
PAPERS: tuple[Paper, ...] = ("first_principles", "pascal", "cuconv", "cudnn")


@dataclass(frozen=True, slots=True, order=True)
class Layer:
    """Convolutions of square images by square kernels, one output pixel at every place of the kernel."""

    side: int  # of the image, without padding
    kernel: int
    fout: int
    fin: int
    padding: int = 0  # zeros on every side

    def __str__(self) -> str:
        return f"{self.side}-{self.kernel}-{self.fout}-{self.fin}"

    def shape(self, batch: int, precision: Precision) -> ConvShape:
        """As a valid convolution in three dimensions, of an image whose zeros are there beforehand."""
        side = self.side + 2 * self.padding
        return ConvShape(
            batch, self.fin, self.fout, (1, side, side), (1, self.kernel, self.kernel), precision=precision
        )


@dataclass(frozen=True, slots=True)
class PaperCase:
    """A layer with a batch. `set` is what its figures are joined with, `why` what the row is there to show."""

    set: str
    layer: Layer
    batch: int
    why: str


METHODS: Mapping[Paper, tuple[str, ...]] = {
    "first_principles": ("gpu.conv.direct", "gpu.conv.first", "gpu.conv.implicit_gemm"),
    "pascal": ("gpu.conv.first", "gpu.conv.block"),
    "cuconv": ("gpu.conv.cuconv",),
    "cudnn": ("gpu.conv.implicit_gemm",),
}
BESIDE: Mapping[Paper, tuple[str, ...]] = {  # ours that are no paper's method: shown, and not counted as one
    "first_principles": (),
    "pascal": ("gpu.conv.implicit_gemm",),
    "cuconv": ("gpu.conv.implicit_gemm",),
    "cudnn": (),
}
PAPER_PRECISIONS: Mapping[Paper, tuple[Precision, ...]] = {
    "first_principles": ("fp32",),
    "pascal": ("fp32",),
    "cuconv": ("fp32", "tf32"),
    "cudnn": ("fp32", "tf32", "fp16"),
}


def same(side: int, kernel: int, fout: int, fin: int) -> Layer:
    """With so much padding that the image keeps its size."""
    return Layer(side, kernel, fout, fin, (kernel - 1) // 2)


def _layers(*groups: tuple[int, int, int, Sequence[int]]) -> tuple[Layer, ...]:
    """(side, kernel, fin, (fout, ..)) each, without repetitions."""
    return tuple(dict.fromkeys(same(side, kernel, fout, fin) for side, kernel, fin, fouts in groups for fout in fouts))


# cuConv: the distinct layers of stride 1 of each network, Table 1.
NETWORKS: Mapping[str, tuple[Layer, ...]] = {
    "GoogLeNet": _layers(
        (56, 1, 64, (64,)), (56, 3, 64, (192,)),
        (28, 1, 192, (64, 96, 16)), (28, 3, 96, (128,)), (28, 5, 16, (32,)),
        (28, 1, 256, (128, 32)), (28, 3, 128, (192,)), (28, 5, 32, (96,)),
        (14, 1, 480, (192, 96, 16)), (14, 3, 96, (208,)), (14, 5, 16, (48,)),
        (14, 1, 512, (160, 112, 24)), (14, 3, 112, (224,)), (14, 5, 24, (64,)),
        (14, 1, 512, (128, 24)), (14, 3, 128, (256,)),
        (14, 1, 512, (112, 144, 32)), (14, 3, 144, (288,)), (14, 5, 32, (64,)),
        (14, 1, 528, (256, 160, 32)), (14, 3, 160, (320,)), (14, 5, 32, (128,)),
        (7, 1, 832, (256, 160, 32)), (7, 3, 160, (320,)), (7, 5, 32, (128,)),
        (7, 1, 832, (384, 192, 48)), (7, 3, 192, (384,)), (7, 5, 48, (128,)),
    ),
    "SqueezeNet": _layers(
        (55, 1, 96, (16,)), (55, 1, 16, (64,)), (55, 3, 16, (64,)), (55, 1, 128, (16, 32)),
        (55, 1, 32, (128,)), (55, 3, 32, (128,)),
        (27, 1, 256, (32, 48)), (27, 1, 32, (128,)), (27, 3, 32, (128,)), (27, 1, 48, (192,)), (27, 3, 48, (192,)),
        (27, 1, 384, (48, 64)), (27, 1, 64, (256,)), (27, 3, 64, (256,)),
        (13, 1, 512, (64, 1000)), (13, 1, 64, (256,)), (13, 3, 64, (256,)),
    ),
    "AlexNet": _layers((27, 5, 96, (256,)), (13, 3, 256, (384,)), (13, 3, 384, (384, 256))),
    "ResNet-50": _layers(
        (56, 1, 64, (64, 256)), (56, 3, 64, (64,)),
        (28, 1, 256, (128,)), (28, 3, 128, (128,)), (28, 1, 128, (512,)),
        (14, 1, 512, (256,)), (14, 3, 256, (256,)), (14, 1, 256, (1024,)),
        (7, 1, 1024, (512,)), (7, 3, 512, (512,)), (7, 1, 512, (2048,)),
    ),
    "VGG19": _layers(
        (224, 3, 3, (64,)), (224, 3, 64, (64,)), (112, 3, 64, (128,)), (112, 3, 128, (128,)),
        (56, 3, 128, (256,)), (56, 3, 256, (256,)), (28, 3, 256, (512,)), (28, 3, 512, (512,)),
        (14, 3, 512, (512,)),
    ),
}  # fmt: skip
BATCHES = (1, 8, 16, 32, 64, 128, 256)
MOST_BYTES: Mapping[Paper, int | None] = {  # of scratch and workspace; None: what the device has
    "first_principles": None,
    "pascal": None,
    "cuconv": 2**30,  # section 4: "We limit the temporary allocation size to 1 GB", the paper's own included
    "cudnn": None,
}


@dataclass(frozen=True, slots=True)
class Profile:
    """A column of cuConv's Tables 3 to 5, on a V100: microseconds of all kernels together.

    The tables name some of cuDNN's algorithms, not always the fastest: of 5 A they have 3.3 times its speed, and the
    text 1.97 at most with kernels of 5.
    """

    table: str
    layer: Layer
    batch: int
    ours_us: float
    cudnn_us: Mapping[str, float]  # by algorithm

    @property
    def speedup(self) -> float:
        return min(self.cudnn_us.values()) / self.ours_us


PROFILES = (
    Profile("3 A", same(7, 1, 256, 832), 1, 58.56, {"implicit GEMM": 128.13, "precomputed": 107.29}),
    Profile("3 B", same(14, 1, 1024, 256), 1, 73.86, {"implicit GEMM": 47.87, "precomputed": 45.23}),
    Profile("3 C", same(27, 1, 256, 64), 1, 22.53, {"implicit GEMM": 19.20, "precomputed": 24.29}),
    Profile("4 A", same(7, 3, 384, 192), 1, 57.79, {"Winograd": 111.03, "non-fused": 105.63, "precomputed": 203.45}),
    Profile("4 B", same(13, 3, 384, 384), 1, 466.68, {"Winograd": 232.35, "non-fused": 327.55, "precomputed": 389.08}),
    Profile("5 A", same(7, 5, 128, 48), 1, 22.50, {"Winograd non-fused": 74.80}),
    Profile("5 B", same(7, 5, 128, 48), 8, 116.60, {"Winograd non-fused": 76.58}),
)
CUCONV_SAYS: Mapping[str, float] = {
    "share won": 0.0831,
    "mean speed-up where it wins": 1.46,
    "largest speed-up": 2.29,  # 7-1-32-832, batch 1
}
CUCONV_AT_ONE = {1: (1.23, 2.29), 5: (1.36, 1.97)}  # mean and largest speed-up in batches of 1, by kernel


@dataclass(frozen=True, slots=True)
class Gain:
    """How many times cuDNN's throughput a paper has."""

    mean: float
    least: float
    most: float


PASCAL_SAYS = {"single": Gain(2.6, 1.5, 5.6), "multi": Gain(1.39, 1.05, 2.0)}  # GTX 1080 Ti, cuDNN 7.1, fp32
TITAN_X_SAYS = {"single": (1.3, 3.7), "multi": (1.08, 1.8)}  # least and most on a GTX Titan X (Maxwell)
PASCAL_KERNELS = (1, 3, 5)
SINGLE_SIDES, SINGLE_MAPS = (28, 56, 112, 224, 512, 1024), (512, 256, 128, 64, 32)
MULTI_SIDES, MULTI_MAPS = (7, 14, 28, 56, 112, 224, 512), (64, 128, 256, 512)

CUDNN_LAYERS = (  # Table 2; without padding
    Layer(128, 11, 96, 3),
    Layer(64, 9, 128, 96),
    Layer(32, 9, 128, 128),
    Layer(16, 7, 128, 128),
    Layer(13, 3, 384, 128),
)
CUDNN_SAYS = {
    "Tesla K40": (0.23, 0.35, 0.35, 0.32, 0.24),
    "GTX 980": (0.30, 0.51, 0.49, 0.45, 0.38),
}  # of peak, Table 3
CUDNN_BATCH_16 = 0.86  # of the mean throughput of all layers in the best batch: 3.2, Figure 2
MINIBATCHES = (128, 64, 32, 16)

POST_SIDE, POST_KERNELS = 4000, tuple(range(3, 16, 2))
POST_SAYS = {"processor": 1.5, "GPU": 0.5}  # seconds by `time`, process and copies included: Xeon Gold 6342, A30


def _first_principles() -> tuple[PaperCase, ...]:
    why = "one image, one map: does a GPU need more than a thread for each pixel?"
    return tuple(PaperCase("image", Layer(POST_SIDE, k, 1, 1), 1, why) for k in POST_KERNELS)


def _pascal() -> tuple[PaperCase, ...]:
    single = (
        PaperCase("single", Layer(side, k, maps, 1), 1, f"one map to {maps}: mostly writing")
        for k, side, maps in product(PASCAL_KERNELS, SINGLE_SIDES, SINGLE_MAPS)
        if side >= k
    )
    multi = (
        PaperCase("multi", Layer(side, k, maps, maps), 1, f"{maps} maps to as many")
        for k, side, maps in product(PASCAL_KERNELS, MULTI_SIDES, MULTI_MAPS)
        if side >= k
    )
    return (*single, *multi)


def _cuconv() -> tuple[PaperCase, ...]:
    """The profiled ones first, then batch after batch: what there is time for is what the paper is about."""
    profiled = [(p.layer, p.batch, f"Table {p.table}") for p in PROFILES]
    where: dict[Layer, list[str]] = {}
    for network, layers in NETWORKS.items():
        for layer in layers:
            where.setdefault(layer, []).append(network)
    rest = [(layer, batch, ", ".join(names)) for batch in BATCHES for layer, names in where.items()]
    named = {(layer, batch): f"{why}; {', '.join(where[layer])}" for layer, batch, why in profiled}
    named |= {(layer, batch): why for layer, batch, why in rest if (layer, batch) not in named}
    return tuple(PaperCase(f"k = {layer.kernel}", layer, batch, why) for (layer, batch), why in named.items())


def _cudnn() -> tuple[PaperCase, ...]:
    return tuple(
        PaperCase(f"layer {number}", layer, batch, f"Table 2, layer {number}")
        for batch in MINIBATCHES
        for number, layer in enumerate(CUDNN_LAYERS, start=1)
    )


CASES: Mapping[Paper, tuple[PaperCase, ...]] = {
    "first_principles": _first_principles(),
    "pascal": _pascal(),
    "cuconv": _cuconv(),
    "cudnn": _cudnn(),
}
_WORKS = "that the script works"
QUICK: Mapping[Paper, tuple[PaperCase, ...]] = {
    "first_principles": (PaperCase("image", Layer(19, 3, 1, 1), 1, _WORKS),),
    "pascal": (
        PaperCase("single", Layer(9, 3, 5, 1), 1, _WORKS),
        PaperCase("multi", Layer(7, 1, 4, 4), 1, _WORKS),
    ),
    "cuconv": (PaperCase("k = 3", same(6, 3, 5, 4), 9, _WORKS), PaperCase("k = 1", same(5, 1, 4, 3), 1, _WORKS)),
    "cudnn": (
        PaperCase("layer 1", Layer(11, 3, 5, 3), 4, _WORKS),
        PaperCase("layer 1", Layer(11, 3, 5, 3), 2, _WORKS),
    ),
}
