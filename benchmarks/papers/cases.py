"""Read the layers of `cases.yaml`, each as a convolution of square images by square kernels."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

import znnpy

FILE = Path(__file__).with_name("cases.yaml")
LAYERS = ("first_principles", "pascal", "cuconv", "cudnn")  # experiments that measure single layers
PAPERS = (*LAYERS, "znni")
SEED = 20261121


@dataclass(frozen=True, slots=True)
class Case:
    """A layer with a batch, in a precision.

    set      name by which figures are grouped.
    side     side of the image, without its padding.
    padding  planes of zeros on every side, which are part of the input.
    why      purpose of the figure.
    """

    paper: str
    set: str
    side: int
    kernel: int
    fin: int
    fout: int
    padding: int
    batch: int
    precision: str
    why: str

    @property
    def layer(self) -> str:
        """Return the layer as the papers write it: side-kernel-output maps-input maps."""
        return f"{self.side}-{self.kernel}-{self.fout}-{self.fin}"

    def __str__(self) -> str:
        return f"{self.layer}, batch {self.batch}, {self.precision}"

    @property
    def shape(self) -> znnpy.ConvShape:
        """Return the layer as a valid convolution in three dimensions, without activation."""
        side = self.side + 2 * self.padding
        size, kernel = (1, side, side), (1, self.kernel, self.kernel)
        return znnpy.ConvShape(
            self.batch,
            self.fin,
            self.fout,
            size,
            kernel,
            "none",
            precision=self.precision,  # type: ignore[arg-type]
        )

    @property
    def flops(self) -> float:
        """Return the operations of the definition."""
        out = self.side + 2 * self.padding - self.kernel + 1
        return 2.0 * self.batch * self.fin * self.fout * out**2 * self.kernel**2

    @property
    def least_bytes(self) -> int:
        """Return the bytes of images, kernels and outputs, each once."""
        shape = self.shape
        return int(shape.in_bytes + shape.out_bytes + 4 * self.fin * self.fout * self.kernel**2)


@cache
def experiments() -> Mapping[str, Any]:
    """Return the content of the file: everything about each paper by its name."""
    found: Mapping[str, Any] = YAML(typ="safe", pure=True).load(FILE)
    return found


def cases_of(paper: str, device: str, *, quick: bool = False) -> list[Case]:
    """Return the cases of an experiment in the order in which they are measured; on a CPU in fp32 alone."""
    about = experiments()[paper]
    precisions = about["precisions"] if device == "gpu" else ["fp32"]
    groups = about["quick" if quick else "groups"]
    found: list[Case] = []
    for precision in precisions:
        first = [case for group in groups if group.get("first") for case in _of_group(paper, group, precision)]
        rest = [case for group in groups if not group.get("first") for case in _of_group(paper, group, precision)]
        if about.get("shuffled"):
            random.Random(SEED).shuffle(rest)
        seen: dict[str, Case] = {}
        for case in (*first, *rest):
            seen.setdefault(str(case), case)
        found += seen.values()
    return found


def _of_group(paper: str, group: Mapping[str, Any], precision: str) -> Iterator[Case]:
    same = group.get("padding") == "same"
    if "layers" in group:
        numbered = enumerate(group["layers"], start=1)
        layers = [(n, side, kernel, fin, fout) for n, (side, kernel, fin, fouts) in numbered for fout in fouts]
    else:
        sizes = product(group["kernels"], group["sides"], group["maps"])
        layers = [(0, side, kernel, fin, fout) for kernel, side, (fin, fout) in sizes if side >= kernel]
    for batch, (number, side, kernel, fin, fout) in product(group.get("batches", [1]), layers):
        padding = (kernel - 1) // 2 if same else 0
        name = group["set"].format(layer=number, kernel=kernel)
        yield Case(paper, name, side, kernel, fin, fout, padding, batch, precision, group["why"])
