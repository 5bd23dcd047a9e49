"""A plan awake: owns the arena, the prepared weights and the bound steps; turns input patches into output patches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from znnpy.errors import ValuesOverflowError
from znnpy.kernels.crew import Crew
from znnpy.kernels.primitive import Primitive, Step
from znnpy.kernels.table import TABLE, find
from znnpy.network import ConvWeights, Network, Pool
from znnpy.planner.plan import Plan
from znnpy.run.arena import Arena
from znnpy.shapes import Vec3

if TYPE_CHECKING:
    from znnpy.kernels.primitive import Array, Bytes


@dataclass(frozen=True, slots=True)
class _Bound:
    """One step with the arrays it runs on."""

    step: Step
    x: Array
    out: Array
    scratch: dict[str, Bytes]


class Session:
    """Runs patches of one plan. A context manager: `with Session(...) as session: session.run(raw, out)`.

    Entering prepares weights and plans transforms; after that nothing of the size of a patch is allocated.
    """

    def __init__(
        self,
        plan: Plan,
        network: Network,
        weights: Sequence[ConvWeights],
        crew: Crew,
        table: tuple[Primitive, ...] = TABLE,
    ) -> None:
        self.plan = plan
        self.network = network
        self.crew = crew
        self._table = table
        self._weights = dict(zip(network.convolutions, weights, strict=True))
        self._bound: tuple[_Bound, ...] = ()

    def __enter__(self) -> Self:
        steps = []
        for choice in self.plan.choices:
            primitive = find(choice.primitive, self._table)
            resident = primitive.prepare(self._weights.get(choice.layers[0]), choice.variant, self.crew)
            steps.append(primitive.bind(resident, choice.shape, choice.variant, self.crew))
        # Weights come first: their preparation needs room that the arena takes only when it is written to.
        arena = Arena(self.plan.memory.arena, self.plan.tensors)
        self._bound = tuple(
            _Bound(
                step,
                arena.floats(f"x{i}", choice.shape.in_shape),
                arena.floats(f"x{i + 1}", choice.shape.out_shape),
                arena.scratch(i),
            )
            for i, (step, choice) in enumerate(zip(steps, self.plan.choices, strict=True))
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bound = ()

    def run(self, raw: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """Compute one dense output patch.

        raw  (c, *patch_in), any real dtype, as the volume stores it; read only.
        out  (maps, *patch_out) float32, float16 or uint8 (`round(255 * clip(x, 0, 1))`); overwritten.

        ValuesOverflowError names the layer whose result is not finite.
        """
        self._load(raw)
        for choice, bound in zip(self.plan.choices, self._bound, strict=True):
            try:
                bound.step.run(bound.x, bound.out, bound.scratch)
            except ValuesOverflowError as error:
                layer = choice.layers[0]
                raise error.with_context(f"layer {layer} ({self.network.layers[layer]})") from None
        self._store(out)

    def _load(self, raw: npt.NDArray[Any]) -> None:
        """Normalise into the arena, channels last."""
        x = self._bound[0].x[0]
        normalise = self.network.normalise
        wide = raw.dtype.itemsize > 2 and raw.dtype != np.float32  # float32 would round before the mean is gone
        dtype = np.float64 if wide else np.float32

        @np.errstate(over="raise")
        def piece(lo: int, hi: int, worker: int) -> None:
            for channel in range(raw.shape[0]):
                target = x[lo:hi, ..., channel]
                if normalise is None:
                    np.copyto(target, raw[channel, lo:hi], casting="unsafe")
                    continue
                mean, std = dtype(normalise.mean[channel]), dtype(normalise.std[channel])
                np.subtract(raw[channel, lo:hi], mean, out=target, dtype=dtype, casting="unsafe")
                np.divide(target, np.float32(std), out=target)

        try:
            self.crew.each(piece, x.shape[0])
        except FloatingPointError:
            largest = max(abs(raw.max()), abs(raw.min()))
            raise ValuesOverflowError(
                f"the volume holds values up to {largest:.6g}, and normalised they exceed float32's largest number "
                f"{np.finfo(np.float32).max:.6g}; rescale the volume, or correct `normalise` in the network file"
            ) from None

    def _store(self, out: npt.NDArray[Any]) -> None:
        """Recombine the fragments into the dense patch, maps first, in the output's dtype."""
        fragments = self._bound[-1].out
        windows = [layer.window for layer in self.network.layers if isinstance(layer, Pool)]
        dense = _as_dense(fragments, windows)  # (f, mz, .., pz, my, .., py, mx, .., px)
        target = out.reshape(dense.shape)

        def piece(lo: int, hi: int, worker: int) -> None:
            part = fragments[:, lo:hi]
            if out.dtype == np.uint8:
                np.clip(part, 0, 1, out=part)
                np.multiply(part, np.float32(255), out=part)
                np.rint(part, out=part)
            try:
                with np.errstate(over="raise"):
                    np.copyto(target[:, lo:hi], dense[:, lo:hi], casting="unsafe")
            except FloatingPointError:
                raise ValuesOverflowError(
                    f"the output holds {np.abs(part).max():.6g}, beyond {out.dtype}'s largest number "
                    f"{np.finfo(out.dtype).max:.6g}; choose --output-dtype float32"
                ) from None

        self.crew.each(piece, fragments.shape[1])


def _as_dense(fragments: Array, windows: Sequence[Vec3]) -> Array:
    """Fragments (P1 * P2 * .., mz, my, mx, f) as a view (f, mz, .., p2z, p1z, my, .., p2y, p1y, mx, .., p2x, p1x).

    Reshaped to (f, mz * pz, my * py, mx * px) it is the dense output: voxel z = o1 + p1 * (o2 + p2 * (.. + i)).
    """
    batch = [size for window in windows for size in window]
    split = fragments.reshape(*batch, *fragments.shape[1:])
    spatial = len(batch)
    order = [split.ndim - 1]
    for axis in range(3):
        order.append(spatial + axis)
        order.extend(3 * pool + axis for pool in reversed(range(len(windows))))
    return split.transpose(order)
