"""The backend of a GPU: one arena, and the steps of `GpuSteps`.

Peaks  Every activation has a float32 on the device that holds the largest |value| in the column so far. Primitives that
       need it get its address. Poolings pass the peak of their input on. The peaks of a step begin as those of the step
       before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from znnpy.network import Network, Pool
from znnpy.planner.memory import PINNED, STAGED
from znnpy.planner.plan import Choice, Plan, Tensor
from znnpy.run.arena import Arena
from znnpy.run.backend import Voxels, dtype_of, input_overflow, layer_of, output_overflow
from znnpy.run.gpu_steps import FLOAT16_END, Checks, GpuSteps, Ticket, layer_overflow
from znnpy.shapes import FLOAT32

if TYPE_CHECKING:
    from znnpy.kernels.contract import Footprint
    from znnpy.kernels.gpu.device import Device
    from znnpy.run.trace import Spans


@dataclass(frozen=True, slots=True)
class _Layer:
    """How one choice reads and raises peaks."""

    seconds: float  # predicted
    x_peak: int | None  # byte offset of the peak that it reads
    out_peak: int | None  # offset of the peak that it raises
    looked_at: int | None  # offset of the peak that is raised after it


class GpuBackend(GpuSteps):
    """Runs the last stage of a plan on a GPU, see `Backend`."""

    def __init__(
        self,
        plan: Plan,
        network: Network,
        pool: Checks,
        device: Device | None = None,
        trace: Spans | None = None,
        lane: str = "GPU",
    ) -> None:
        self._plan, self._network = plan, network
        windows = [layer.window for layer in network.turned(plan.axis).layers if isinstance(layer, Pool)]
        own = enumerate(plan.stages[-1].choices, plan.offloaded)
        self._convolutions = [index for index, choice in own if choice.shape.kind == "conv"]
        values = dtype_of(plan.choices[-1].shape)
        super().__init__(pool, device, trace, lane, values=values, normalise=network.normalise, windows=windows)

    def _release(self) -> None:
        super()._release()
        self._arena = Arena((), _no_view)
        self._layers: list[_Layer] = []
        self._handed: deque[tuple[Any, Any]] = deque()  # slots for handed-over parts, and events of their last use

    def executor_for(self, choice: Choice) -> Any:
        del choice
        return self.executor

    def allocate_arena(self, nbytes: int, tensors: Sequence[Tensor], footprints: Sequence[Footprint]) -> None:
        device, plan, network = self.executor, self._plan, self._network
        block = device.allocate(nbytes, "the arena")

        def view(shape: tuple[int, ...], dtype: npt.DTypeLike, offset: int) -> Any:
            return device.view(block, shape, dtype, offset=offset)

        self._arena = Arena(tensors, view)
        word = 0  # index of the peak of a choice's input
        for choice, footprint in zip(plan.stages[-1].choices, footprints, strict=True):
            x_peak = FLOAT32 * word if footprint.reads_peak else None
            word += choice.shape.kind == "conv"
            peak = FLOAT32 * word if choice.shape.kind == "conv" else None
            raised = (peak, None) if footprint.raises_peak else (None, peak)
            self._layers.append(_Layer(choice.seconds, x_peak, *raised))
        cover = plan.cover(network)
        reads, writes = min(STAGED, cover.steps(cover.margin)), min(STAGED, cover.steps(0))
        raw_bytes = network.input_channels * prod(plan.patch_in) * plan.itemsize_in
        out_bytes = network.output_channels * prod(plan.patch_out) * plan.itemsize_out
        if plan.offloaded:
            part = plan.handover_bytes // plan.sub_batches[plan.offloaded]
            slots = [device.allocate(part, "what is handed over") for _ in range(STAGED)]
            self._handed.extend((slot, device.event()) for slot in slots)
        peaks = len(self._convolutions) + 2  # one for the input, the last for the output
        reads = 0 if plan.offloaded else reads
        self._allocate_slots(raw_bytes, out_bytes, reads=reads, writes=writes, peaks=peaks)

    def tensor(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        return self._arena.tensor(name, shape, dtype)

    def scratch(self, step: int) -> dict[str, Any]:
        return self._arena.scratch(step)

    def allocate(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        nbytes = np.dtype(dtype).itemsize * prod(shape)
        return self.executor.view(self.executor.allocate(nbytes, "carried planes"), shape, dtype)

    def buffers(
        self, raw: np.dtype[Any], out: np.dtype[Any], *, reads: int, writes: int
    ) -> tuple[Iterable[Voxels], Iterable[Voxels]]:
        plan, network, pinned = self._plan, self._network, self.executor.pinned
        self._compile(raw.newbyteorder("="), out)
        raw_shape, out_shape = (network.input_channels, *plan.patch_in), (network.output_channels, *plan.patch_out)
        raws = (pinned(raw_shape, raw.newbyteorder("=")) for _ in range(min(PINNED, reads)))
        return raws, (pinned(out_shape, out) for _ in range(min(PINNED, writes)))

    def fetch(self, handed: npt.NDArray[np.float32], x: Any) -> None:
        """Queue the upload of what another stage hands over into `x`, both (S, new, y, x, f).

        handed  page-locked, in C order; it is read until the step is done
        x       in C order within an image
        """
        device = self.executor
        slot, read = self._handed.popleft()
        staged = device.view(slot, handed.shape, handed.dtype)
        device.uploads.wait_event(read)
        with self._span("upload", device.uploads, "upload"):
            device.copy_async(staged, handed, device.uploads)
        device.stream.wait_event(self._mark(device.uploads))
        with self.span("load"):
            device.copy_async(x, staged, device.stream)
            self._moving.peak(x, self._lent[-1].address)
        with device.calling("cudaEventRecord"):
            device.stream.record(read)
        self._handed.append((slot, read))

    def clear_carry(self, kept: Any) -> None:
        self._moving.clear(kept)

    def save_carry(self, kept: Any, x: Any, *, join: bool) -> None:
        self._moving.keep(kept, x, join=join)

    def load(self, raw: Any, x: Any) -> None:
        self._moving.load(raw, x, self._lent[-1].address)

    def store(self, fragments: Any, first: int, out: Any) -> None:
        self._moving.store(first, fragments, out, self._lent[-1].address + FLOAT32 * (len(self._convolutions) + 1))

    def run(self, index: int, step: Any, x: Any, out: Any, scratch: Mapping[str, Any], before: Any | None) -> None:
        self._wait_for_room()
        layer, words = self._layers[index - self._plan.offloaded], self._lent[-1].address
        x_peak, out_peak = (0 if at is None else words + at for at in (layer.x_peak, layer.out_peak))
        step.run(x, out, scratch, before, x_peak=x_peak, out_peak=out_peak)
        if layer.looked_at is not None:
            self._moving.peak(out, words + layer.looked_at)
        self._note_queued(layer.seconds)

    def _check(self, ticket: Ticket, peaks: Sequence[float]) -> None:
        """Raise ValuesOverflowError if a peak of the column so far exceeds the dtype of its values."""
        plan, network = self._plan, self._network
        kept = dtype_of(plan.choices[-1].shape)
        end = FLOAT16_END if kept == np.float16 else np.inf
        entering, *layers, leaving = peaks
        if not entering < end:
            if ticket.raw is None:
                raise layer_overflow(entering, kept).with_context(layer_of(plan, network, plan.offloaded - 1))
            raise input_overflow(ticket.raw, kept)
        for index, peak in zip(self._convolutions, layers, strict=True):
            if not peak < end:
                raise layer_overflow(peak, kept).with_context(layer_of(plan, network, index))
        if ticket.out is not None and ticket.out.dtype == np.float16 and not leaving < FLOAT16_END:
            raise output_overflow(leaving, ticket.out.dtype)


def _no_view(shape: tuple[int, ...], dtype: npt.DTypeLike, offset: int) -> Any:
    raise RuntimeError(f"no arena holds {shape} {dtype} at {offset}")
