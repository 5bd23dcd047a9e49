"""Convolutions with the norm behind them, whose mean and variance are found while the convolution is in registers.

Method   warpgroup.cu computes the convolution, and mean and squared deviations of each map in each part of the voxels.
         The kernels of norm.cu join these, and normalise the output where it is.
Memory   Kernels; the moments of all parts; a shift, a factor and an offset of each map.
Bound    Arithmetic as for the convolution, then memory: the output is read once, and by a norm of its own twice.
Exact    Moments are those of the values as they are stored. A thread sums up to 64 differences from its first value,
         and their squares, in float32; threads of a part are joined in float32, parts in double.
Source   Chan, Golub and LeVeque 1979 (joining parts).
Tested   tests/kernels/gpu/graph_gemm/test_normed.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from znnpy.graph_shapes import GraphConvShape, NormShape
from znnpy.kernels.contract import Footprint, Kind, Variant, Work
from znnpy.kernels.gpu.graph.norm import SecondPass, moments_scratch, terms_scratch
from znnpy.kernels.gpu.graph.point import Resident, upload_terms
from znnpy.kernels.gpu.graph_gemm.plan import MULTIPLIERS, Plan, plan_of
from znnpy.kernels.gpu.graph_gemm.warpgroup import GraphConvWarpgroup, WarpgroupStep, Weights
from znnpy.shapes import FLOAT32

if TYPE_CHECKING:
    from znnpy.kernels.contract import ConvWeights
    from znnpy.kernels.gpu.device import Device
    from znnpy.layer_shapes import LayerShape
    from znnpy.machine import Machine

PRODUCTS = GraphConvWarpgroup()


class Prepared(NamedTuple):
    """Weights on the device: of the convolution, and of an affine norm."""

    conv: Weights
    norm: Resident | None


@dataclass(frozen=True, slots=True)
class GraphConvNormed:
    """Products of kernels and voxels with a norm behind them, on the tensor cores of an H100 or H200."""

    name: str = "gpu.graph_conv.normed"
    kind: Kind = "graph_conv"
    version: int = 1
    summary: str = "float16 on an H100 or H200, with the norm behind it: its statistics are gathered on the way"
    source: str = "Chan, Golub and LeVeque 1979"

    def why_not(self, shape: LayerShape, machine: Machine) -> str | None:
        if not isinstance(shape, GraphConvShape) or shape.normed is None:
            return f"computes convolutions with a norm behind them: see {PRODUCTS.name}"
        if reason := PRODUCTS.why_not(_conv(shape), machine):
            return reason
        if shape.addend or shape.activation != "none":
            return "normalises what the convolution gives, without an addend or a function between"
        if shape.normed.activation in ("softmax", "prelu"):
            return f"applies no {shape.normed.activation}, which needs more than one value"
        if not self.variants(shape, machine):
            return "has so few voxels that its sums are computed in parts: a norm of its own reads them once"
        return None

    def variants(self, shape: LayerShape, machine: Machine) -> Sequence[Variant]:
        """Return those of the convolution that compute whole sums, the fastest first."""
        shape = _normed(shape)
        found = PRODUCTS.variants(_conv(shape), machine)
        return tuple(variant for variant in found if _plan(shape, variant).parts == 1)

    def footprint(self, shape: LayerShape, variant: Variant, threads: int) -> Footprint:
        shape, norm = _normed(shape), _norm(shape)
        conv = PRODUCTS.footprint(_conv(shape), variant, threads)
        affine = 2 * FLOAT32 * shape.fout if norm.affine else 0
        scratch = moments_scratch(shape.fout, _parts(_plan(shape, variant))), terms_scratch(shape.fout)
        return replace(conv, resident=conv.resident + affine, scratch=scratch)

    def work(self, shape: LayerShape, variant: Variant) -> Sequence[Work]:
        shape = _normed(shape)
        return (*PRODUCTS.work(_conv(shape), variant), Work("gpu_stream", 0.0, 2.0 * shape.out_bytes))

    def prepare(self, weights: ConvWeights | None, variant: Variant, device: Device) -> Prepared:
        assert weights is not None
        return Prepared(PRODUCTS.prepare(weights, variant, device), upload_terms(weights.norm, device, self.name))

    def bind(self, resident: Prepared, shape: LayerShape, variant: Variant, device: Device) -> _Step:
        return _Step(resident, _normed(shape), variant, device)


def _normed(shape: LayerShape) -> GraphConvShape:
    assert isinstance(shape, GraphConvShape), "why_not says so"
    return shape


def _conv(shape: GraphConvShape) -> GraphConvShape:
    """Return the convolution alone."""
    return replace(shape, normed=None)


def _norm(shape: GraphConvShape) -> NormShape:
    """Return the norm alone."""
    norm = shape.norm_shape
    assert norm is not None, "why_not says so"
    return norm


def _plan(shape: GraphConvShape, variant: Variant) -> Plan:
    plan = plan_of(_conv(shape), variant.count("steps"))
    assert plan is not None, "why_not says so"
    return plan


def _parts(plan: Plan) -> int:
    """Return how many parts of the voxels have moments of their own, as in warpgroup.cu."""
    return prod(plan.tiles) * MULTIPLIERS * plan.columns.lines


class _Step:
    """A GraphDeviceStep."""

    def __init__(self, resident: Prepared, shape: GraphConvShape, variant: Variant, device: Device) -> None:
        plan = _plan(shape, variant)
        self._conv = WarpgroupStep(resident.conv, _conv(shape), plan, device, moments=True)
        self._parts = _parts(plan)
        self._norm = SecondPass(resident.norm, _norm(shape), device)

    def run(self, inputs: Sequence[Any], out: Any, scratch: Mapping[str, Any], *, out_peak: int = 0) -> None:
        """Compute the layer; see GraphDeviceStep."""
        self._conv.run(inputs, out, scratch, out_peak=out_peak)
        self._norm.run(out, self._parts, scratch, out, out_peak)
