"""The child of planning.py: seconds of single layers, one after the other. Lines of JSON on stdin and on stdout.

The first line says where layers run; every other is one layer. It is answered with a line when the layer is prepared,
and with its seconds in another before the next is read. A layer is prepared and bound as in a session, on input, output
and scratch where an arena of its own has them, with the planes that it carries from step to step where there are any:
those are moved as well, and count.

The first run does not count. Those that do are repeated for `repeat_seconds`, or until one takes more than `most`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from apart import limit_memory
from gpu_card import Clock, often
from layer_by_layer import timed
from pydantic import TypeAdapter

from znnpy.errors import ZnnpyError
from znnpy.formats.networks import read_network
from znnpy.kernels.aligned import aligned_bytes
from znnpy.kernels.crew import Crew
from znnpy.kernels.primitive import ConvWeights, Footprint
from znnpy.kernels.table import find
from znnpy.planner.layout import chain, place, reads_carry_in_place
from znnpy.planner.plan import Choice, Plan
from znnpy.run.arena import Arena, host_arena
from znnpy.run.host import HostWorkshop
from znnpy.run.workshop import dtype_of
from znnpy.shapes import ConvShape, LayerShape

SEED = 20261121
BLOCK = 2**20  # random values that inputs are made of
LARGEST = 8.0  # of them: what a GPU's layers are told

Run = Callable[[], None]


class Room(Protocol):
    """Where arrays of a layer are, and who works."""

    hands: Any
    threads: int
    compiles: bool  # in a layer's first run

    def arena(self, nbytes: int, tensors: Any) -> Arena: ...

    def room(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any: ...

    def fill(self, x: Any) -> None: ...

    def words(self, footprint: Footprint) -> dict[str, int]: ...

    def keep(self, kept: Any, x: Any, *, join: bool) -> None: ...

    def seconds(self, run: Run) -> float: ...


class HostRoom:
    """The processor's."""

    compiles = False

    def __init__(self, plan: Plan, network: str, crew: Crew) -> None:
        self.hands, self.threads = crew, crew.threads
        shop = HostWorkshop(plan, read_network(network).network, crew)
        self.keep, self.room = shop.keep, shop.room

    def arena(self, nbytes: int, tensors: Any) -> Arena:
        return host_arena(aligned_bytes(nbytes), tensors)

    def fill(self, x: Any) -> None:
        some, flat = values(x.dtype), x.reshape(-1)
        for at in range(0, flat.size, some.size):
            flat[at : at + some.size] = some[: flat.size - at]

    def words(self, footprint: Footprint) -> dict[str, int]:
        del footprint  # nothing is asked of a processor's layers
        return {}

    def seconds(self, run: Run) -> float:
        return timed(run)


class DeviceRoom:
    """A GPU's."""

    threads, compiles = 1, True

    def __init__(self, plan: Plan, network: str, device: Any) -> None:
        from znnpy.kernels.gpu.moves import Moves

        self.hands = device
        of = read_network(network).network
        values_type = dtype_of(plan.choices[0].shape)
        moves = Moves(device, raw=np.uint8, values=values_type, out=np.float32, normalise=of.normalise)
        self.keep = moves.keep
        self._clock = Clock(device)
        self._peaks = device.put(np.array([LARGEST, 0.0], np.float32), "largest values")

    def arena(self, nbytes: int, tensors: Any) -> Arena:
        block = self.hands.allocate(nbytes, "a layer")

        def view(shape: tuple[int, ...], dtype: npt.DTypeLike, offset: int) -> Any:
            return self.hands.view(block, shape, dtype, offset=offset)

        return Arena(tensors, view)

    def room(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        nbytes = np.dtype(dtype).itemsize * prod(shape)
        return self.hands.view(self.hands.allocate(nbytes, "carried planes"), shape, dtype)

    def fill(self, x: Any) -> None:
        some, flat = values(x.dtype), x.reshape(-1)
        there = self.hands.put(some, "random values")
        for at in range(0, flat.size, some.size):
            part = flat[at : at + some.size]
            self.hands.copy_async(part, there[: part.size], self.hands.stream)
        self.hands.synchronize()

    def words(self, footprint: Footprint) -> dict[str, int]:
        address = self.hands.address(self._peaks)
        return {
            "x_peak": address if footprint.reads_peak else 0,
            "out_peak": address + self._peaks.itemsize if footprint.raises_peak else 0,
        }

    def seconds(self, run: Run) -> float:
        """Short work is queued several times."""
        once = self._clock.seconds(run)
        repeats = often(once)
        return once if repeats == 1 else self._clock.seconds(run, repeats)


def values(dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """As behind an activation: none is negative, half are zero."""
    some = np.random.default_rng(SEED).standard_normal(BLOCK, np.float32)
    return np.clip(some, 0, LARGEST).astype(dtype)


def weights_of(shape: LayerShape) -> ConvWeights | None:
    """Such that values neither grow nor shrink much."""
    if not isinstance(shape, ConvShape):
        return None
    kernels = np.random.default_rng(SEED).standard_normal((shape.fout, shape.fin, *shape.k), np.float32)
    kernels /= np.float32(np.sqrt(kernels[0].size))
    return ConvWeights(kernels, np.zeros(shape.fout, np.float32))


def bound(choice: Choice, carried: int, room: Room) -> tuple[Run, Run]:
    """What fills the input, and what runs the layer once, its carried planes included."""
    shape, primitive = choice.shape, find(choice.primitive)
    footprint = primitive.footprint(shape, choice.variant, room.threads)
    apart = reads_carry_in_place(footprint, carried)
    images, planes, y, x_size, maps = shape.in_shape
    tensors, nbytes = place(chain([(shape, footprint)], planes - carried))
    resident = primitive.prepare(weights_of(shape), choice.variant, room.hands)
    step = primitive.bind(resident, shape, choice.variant, room.hands)
    arena, dtype = room.arena(nbytes, tensors), dtype_of(shape)
    x = arena.tensor("x0", (images, planes - carried if apart else planes, y, x_size, maps), dtype)
    out, scratch, words = arena.tensor("x1", shape.out_shape, dtype), arena.scratch(0), room.words(footprint)
    kept = room.room((images, carried, y, x_size, maps), dtype) if carried else None
    if kept is not None:
        room.fill(kept)

    def run() -> None:
        if kept is None:
            step.run(x, out, scratch, **words)
        elif apart:
            step.run(x, out, scratch, kept, **words)
            room.keep(kept, x, join=False)
        else:
            room.keep(kept, x, join=True)
            step.run(x, out, scratch, **words)

    return partial(room.fill, x), run


def layer(request: dict[str, Any], room: Room) -> list[float]:
    """Seconds of single runs of one layer."""
    choice = TypeAdapter(Choice).validate_json(json.dumps(request["choice"]))
    fill, run = bound(choice, request["carried"], room)
    fill()
    if room.compiles:
        room.seconds(run)
    print(json.dumps({"ready": True}), flush=True)
    room.seconds(run)
    found: list[float] = []
    begin = time.perf_counter()
    while not found or (found[-1] < request["most"] and time.perf_counter() - begin < request["repeat_seconds"]):
        fill()  # where memory is shared, the output lies there now
        found.append(room.seconds(run))
    return found


def answers(room: Room) -> None:
    """One line for each that comes."""
    for line in sys.stdin:
        request = json.loads(line)
        try:
            said: dict[str, Any] = {"seconds": layer(request, room)}
        except (ZnnpyError, MemoryError) as error:
            said = {"failure": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(said), flush=True)


def main() -> None:
    first = json.loads(sys.stdin.readline())
    plan = Plan.from_json(first["plan"])
    with ExitStack() as stack:
        if plan.device == "cpu":
            limit_memory(first["ram_bytes"])
            crew = stack.enter_context(Crew(plan.limits.threads))
            answers(HostRoom(plan, first["network"], crew))
        else:
            from znnpy.kernels.gpu.device import Device, find_gpu

            device = stack.enter_context(Device(find_gpu()))
            answers(DeviceRoom(plan, first["network"], device))


if __name__ == "__main__":
    main()
