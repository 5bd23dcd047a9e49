"""Memory that a run takes in the process and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Annotated

from pydantic import Field

from znnpy.machine import Limits, process_bytes
from znnpy.network import Network
from znnpy.option_values import DeviceKind
from znnpy.planner.layout import Count, aligned
from znnpy.shapes import Vec3

MIB = 2**20
BUFFERS = 2  # input patches, and as many output patches: one is filled while the other is used
PINNED = 3  # the same for a GPU: a third one is copied meanwhile
STAGED = 2  # input patches, and as many output patches, on a GPU
READER_BYTES = 16 * MIB  # chunk cache of the volume, decompression, one chunk at a time
WRITER_BYTES = 6 * MIB  # buffers of the output
GATHERED_BYTES = 256 * MIB  # most that chunks of an output take until they are whole, ..
PACKING_BYTES = 8 * MIB  # threads that pack and write chunks
GATHERED_PART = 16  # .. and the part of the memory of the process, one in so many
MARGIN_BYTES = 8 * MIB  # threads, allocators that keep what was freed, modules that are loaded later
CONTEXT_BYTES = 512 * MIB  # of a GPU: what CUDA takes when it is initialised
LIBRARIES_BYTES = 256 * MIB  # of a GPU: kernels, handles and tables that libraries load later
_GRAIN = 4 * MIB  # the baseline is rounded up to it, so that equal runs make equal plans
_GPU_GRAIN = 32 * MIB  # the same for what CUDA takes


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes that the layers of one stage take."""

    device: DeviceKind  # in whose memory the tensors of the stage lie
    arena: Count = 0
    carries: Count = 0  # planes that a column keeps from step to step
    weights: Count = 0  # prepared weights
    allowance: Count = 0  # what libraries allocate themselves while a layer runs or its weights are prepared
    pinned: Count = 0  # page-locked memory of the process: prepared weights for which the GPU has no room

    @property
    def total(self) -> int:
        """Bytes in the memory of the stage's device."""
        return self.prepared + self.allowance

    @property
    def prepared(self) -> int:
        """Bytes of weights and tensors, which are written to before the first step."""
        return self.arena + self.carries + self.weights


@dataclass(frozen=True, slots=True)
class Memory:
    """The promised bytes of the whole process, and of everything on a GPU."""

    stages: Annotated[tuple[StageMemory, ...], Field(min_length=1)]
    baseline: Count  # interpreter and libraries, measured
    reading: Count  # input patches: queue and reader
    writing: Count  # output patches
    staging: Count = 0  # of a GPU: input and output patches
    context: Count = 0  # of a GPU: what CUDA and its libraries take for any plan
    handover: Count = 0  # page-locked memory of the process: what the first stage hands over to the second

    @property
    def device(self) -> DeviceKind:
        """The device of the last stage, which gives the output."""
        return self.stages[-1].device

    @property
    def last(self) -> StageMemory:
        """The bytes of the last stage."""
        return self.stages[-1]

    @property
    def pinned(self) -> int:
        """Page-locked bytes of the process for prepared weights."""
        return sum(stage.pinned for stage in self.stages)

    def layers(self, device: DeviceKind) -> int:
        """Return the bytes that layers take in the memory of one kind of device."""
        return sum(stage.total for stage in self.stages if stage.device == device)

    @property
    def peak(self) -> int:
        """Bytes of the whole process."""
        return self.baseline + self.reading + self.writing + self.pinned + self.handover + self.layers("cpu")

    @property
    def vram(self) -> int:
        """Bytes of each GPU; 0 where none is used."""
        return self.layers("gpu") + self.staging + self.context if self.device == "gpu" else 0

    @property
    def device_bytes(self) -> int:
        """Bytes in the memory of the device that gives the output: of the process, or of the GPU."""
        return self.peak if self.device == "cpu" else self.vram

    def excess(self, limits: Limits) -> tuple[int, int]:
        """Return the bytes above the limits, of the process and of the GPU."""
        return max(0, self.peak - limits.ram_bytes), max(0, self.vram - (limits.vram_bytes or 0))


def run_memory(first: Memory, devices: int, others: Sequence[Memory]) -> Memory:
    """Return the memory of all workers of a run, of which the first has so many devices; GPUs are counted as one."""
    own = (replace(stage, pinned=devices * stage.pinned) for stage in first.stages)
    return replace(
        first,
        stages=(*(stage for memory in others for stage in memory.stages), *own),
        baseline=sum(memory.baseline for memory in (first, *others)),
        reading=devices * first.reading + sum(memory.reading for memory in others),
        writing=devices * first.writing + sum(memory.writing for memory in others),
        handover=devices * first.handover + sum(memory.handover for memory in others),
    )


def reading_bytes(
    channels: int,
    patch_in: Vec3,
    itemsize: int,
    *,
    steps: int = PINNED,
    seen: Vec3 | None = None,
    device: DeviceKind = "cpu",
) -> int:
    """Return the bytes of raw input patches (c, z, y, x) of the volume's dtype, and of the reader.

    steps  steps that read, in all: a run of one step does not touch all buffers
    seen   size of a mask (z, y, x) bool of the voxels that are not finite, of all that the output of a step depends on,
           where they are counted: one for each patch on its way out, and one that a column keeps where it is more than
           `patch_in`. Each patch on its way in has one of its own size.
    """
    count = min(PINNED if device == "gpu" else BUFFERS, steps)
    masks = 0
    if seen is not None:
        masks = count * (prod(patch_in) + prod(seen)) + (prod(seen) if seen != patch_in else 0)
    return count * channels * prod(patch_in) * itemsize + masks + READER_BYTES


def writing_bytes(maps: int, patch_out: Vec3, itemsize: int, *, steps: int = PINNED, device: DeviceKind = "cpu") -> int:
    """Return the bytes of dense output patches (maps, z, y, x) and of the writer; `steps` give output in all."""
    return min(PINNED if device == "gpu" else BUFFERS, steps) * maps * prod(patch_out) * itemsize + WRITER_BYTES


def staging_bytes(raw_bytes: int, out_bytes: int, *, reads: int = STAGED, writes: int = STAGED) -> int:
    """Return the bytes on a GPU of input and output patches as stored, each aligned.

    raw_bytes, out_bytes  of one patch
    reads, writes         steps that read and that give output, in all
    """
    return min(STAGED, reads) * aligned(raw_bytes) + min(STAGED, writes) * aligned(out_bytes)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The sizes that a step reads and writes.

    patch_in, patch_out  voxels of the dense input and output, along z, y, x or with another axis first
    itemsizes            bytes per voxel of the volume and per value of the output, as stored
    images               patches in a step
    """

    network: Network
    patch_in: Vec3
    patch_out: Vec3
    itemsizes: tuple[int, int]
    images: int = 1

    @property
    def raw_bytes(self) -> int:
        """Bytes that a step reads."""
        return self.images * self.network.input_channels * prod(self.patch_in) * self.itemsizes[0]

    @property
    def out_bytes(self) -> int:
        """Bytes that a step writes."""
        return self.images * self.network.output_channels * prod(self.patch_out) * self.itemsizes[1]

    def transfer_bytes(
        self, device: DeviceKind, *, masks: bool, reads: int = PINNED, writes: int = PINNED, handed_over: int = 0
    ) -> tuple[int, int, int]:
        """Return the bytes of a run's patches in transfer: reading, writing, and staging on a GPU.

        masks          count masks of input voxels that are not finite
        reads, writes  steps that read and that give output, in all
        handed_over    bytes of what a GPU is handed over at a time, where no patch is uploaded to it
        """
        network, (item_in, item_out) = self.network, self.itemsizes
        seen = network.patch_in(self.patch_out) if masks else None
        maps_in, maps_out = self.images * network.input_channels, self.images * network.output_channels
        reading = reading_bytes(maps_in, self.patch_in, item_in, steps=reads, seen=seen, device=device)
        writing = writing_bytes(maps_out, self.patch_out, item_out, steps=writes, device=device)
        if device == "cpu":
            return reading, writing, 0
        if handed_over:
            return reading, writing, staging_bytes(handed_over, self.out_bytes, writes=writes)
        return reading, writing, staging_bytes(self.raw_bytes, self.out_bytes, reads=reads, writes=writes)


def gathering_budget(ram_bytes: int) -> int:
    """Return the bytes in which the chunks of an output are gathered, of a process that may take `ram_bytes`."""
    return min(GATHERED_BYTES, ram_bytes // GATHERED_PART)


def gathering_bytes(ram_bytes: int, output_bytes: int) -> int:
    """Return what gathering, packing and writing chunks takes; `output_bytes` are 0 where nothing is gathered.

    A quarter of the budget is packed at a time, which takes up to two copies.
    """
    if not output_bytes:
        return 0
    return min(gathering_budget(ram_bytes), output_bytes) * 3 // 2 + PACKING_BYTES


def context_bytes(taken: int) -> int:
    """Return what CUDA and its libraries will take of a GPU if CUDA took `taken` bytes when initialised."""
    return -(-(taken + LIBRARIES_BYTES) // _GPU_GRAIN) * _GPU_GRAIN


def baseline_bytes() -> int:
    """Measure the resident memory of this process, with its libraries and what the caller holds, and add a margin."""
    import h5py  # noqa: F401 - a run loads it: it counts

    return -(-(process_bytes() + MARGIN_BYTES) // _GRAIN) * _GRAIN
