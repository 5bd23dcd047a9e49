"""Some consecutive layers of a patch or column, hosted or behind those, and the fastest primitives for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod

from znnpy.kernels.contract import Footprint
from znnpy.network import Network
from znnpy.patches import Cover
from znnpy.planner.candidates import Candidate, Space
from znnpy.planner.layout import aligned, place
from znnpy.planner.memory import Memory, reading_bytes, staging_bytes, writing_bytes
from znnpy.planner.shape_search import Found, ShapeSearch
from znnpy.planner.sides import Side, device_side, host_side, lives_with_host
from znnpy.planner.trade import Front, Option, front, in_turn, smallest
from znnpy.planner.with_host import WithHost
from znnpy.shapes import LayerShape, Vec3


@dataclass(frozen=True)
class PartSpace(Space):
    """Some consecutive layers of a space, as a network of their own."""

    whole: Space | None = None
    first: int = 0

    @cached_property
    def ahead(self) -> tuple[int, ...]:
        assert self.whole is not None
        return self.whole.ahead[self.first : self.first + len(self.network.layers)]

    @staticmethod
    def of(whole: Space, layers: range) -> PartSpace:
        own = whole.network.layers[layers.start : layers.stop]
        network = Network(whole.network.name, whole.network.maps[layers.start], own)
        return PartSpace(
            network, whole.output, whole.axis, whole.walks, whole.precision, whole=whole, first=layers.start
        )


@dataclass(frozen=True)
class Part(Candidate):
    """What those layers are of a candidate."""

    whole: Candidate
    fed: Vec3  # new voxels of each image of the first layer's input
    behind: bool  # the others; else they are hosted

    @property
    def new(self) -> Vec3:
        return self.fed

    @cached_property
    def cover(self) -> Cover:
        return self.whole.cover

    @cached_property
    def tensors(self) -> tuple[int, ...]:
        """What is handed over is no tensor of the arena that it leaves."""
        nbytes = self.plain.tensors
        return nbytes if self.behind else (*nbytes[:-1], 0)

    @property
    def layers(self) -> list[tuple[int, int]]:
        """Spans, as the whole network counts them."""
        first = len(self.whole.shapes) - len(self.shapes) if self.behind else 0
        return [(first + a, first + b) for a, b in self.space.spans]

    @property
    def plain(self) -> Candidate:
        """The same layers, whatever is around them."""
        return Candidate(self.space, self.patch, self.column, self.shapes, self.parts)


@dataclass
class PartSearch(ShapeSearch):
    """The fastest primitives for the layers of one side of a shape, within its memory."""

    handed: int = 0  # bytes in page-locked memory of what is handed over, all buffers
    taken: int = 0  # bytes of this side's memory that the other side takes
    slots: int = 0  # bytes of what is handed over in a part, on the GPU
    with_host: WithHost | None = None  # hosted convolutions that a GPU computes

    def front(self, shape: Candidate, span: int) -> Front:
        """Options of one span: of hosted layers the GPU's too."""
        found, lent = super().front(shape, span), self.with_host
        first, last = self.space.spans[span]
        conv, pool = shape.shapes[first], shape.shapes[last]
        asked = {way.primitive.name for option in found for way in option.ways if way.shape.kind == "conv"}
        if lent is None or conv.kind != "conv" or asked & self.options.only:
            return found
        place, below = self.place(shape, span), found[-1].seconds if found and not lent.asked else inf
        if first == last:
            by_gpu = front(lent.options(conv, place, below))
            return by_gpu if by_gpu and lent.asked else front((*found, *by_gpu))
        between = aligned(pool.in_bytes)
        before = front(lent.options(conv, replace(place, out=between), below))
        behind = self.options.of((pool,), replace(place, x=between, joined=0, steps=place.steps[1:]))
        by_gpu = front(in_turn(before, behind))
        return by_gpu if by_gpu and lent.asked else front((*found, *by_gpu))

    def edges(self, shape: Candidate) -> float:
        """Of both sides together."""
        del shape
        return 0.0

    @property
    def price(self) -> float:
        """The seconds of preparing a byte, which are not counted for layers on two devices: always 0."""
        return 0.0

    def around(self, shape: Candidate) -> Memory:
        assert isinstance(shape, Part)
        whole = shape.whole
        network = whole.space.network
        reads, writes = whole.steps_of(whole.cover.margin), whole.steps_of(0)
        seen = network.patch_in(whole.patch) if self.masks else None
        maps_in, maps_out, on_gpu = network.input_channels, network.output_channels, self.device == "gpu"
        out_bytes = maps_out * prod(whole.patch) * self.itemsize_out
        return Memory(
            device=self.device,
            baseline=self.baseline,
            arena=0,
            carries=0,
            residents=self.taken if on_gpu else 0,
            reading=reading_bytes(maps_in, whole.new, self.itemsize_in, steps=reads, seen=seen, device="gpu"),
            writing=writing_bytes(maps_out, whole.patch, self.itemsize_out, steps=writes, device="gpu"),
            allowance=0,
            staging=staging_bytes(self.slots, out_bytes, writes=writes) if on_gpu else 0,
            context=self.context if on_gpu else 0,
            pinned=0 if on_gpu else self.taken,
            handover=self.handed,
        )

    def laid_out(self, shape: Candidate, options: tuple[Option, ...]) -> Found:
        steps = [(way.shape, way.footprint) for option in options for way in option.ways]
        side = self._side(steps, shape)
        tensors, arena = place(side.tensors)
        around = self.around(shape)
        memory = replace(
            around,
            arena=arena,
            carries=side.carries,
            residents=around.residents + side.residents,
            pinned=around.pinned + side.pinned + sum(fp.host for _, fp in steps if lives_with_host(fp)),
            allowance=side.allowance,
        )
        return Found(shape, options, tensors, memory, 0.0, 0.0)

    def _side(self, steps: Sequence[tuple[LayerShape, Footprint]], shape: Candidate) -> Side:
        if self.device == "cpu":
            return host_side(steps, shape.new[0])
        side = device_side(steps, 0, shape.new[0])
        return replace(side, carries=shape.parts[0] * side.carries)

    def fastest(self, shape: Candidate, below: float = inf) -> Found | None:
        """The fastest primitives within this side's memory; None unless below `below` seconds for the output."""
        fronts = self.fronts(shape)
        return self._within_room(shape, fronts, below) if all(fronts) else None

    def quickest(self, shape: Part) -> float:
        """Seconds for the whole output whatever memory there is; inf: some layer runs nowhere."""
        return sum(options[0].seconds if options else inf for options in self.fronts(shape))

    def over_link(self, shape: Part) -> float:
        """The same at least, as the processor or the link has it."""
        least, lent = 0.0, self.with_host
        for index, (first, _) in enumerate(self.space.spans):
            options = super().front(shape, index)
            link = inf if lent is None else lent.least(shape.shapes[first]) * shape.steps[first]
            least += min(options[0].seconds if options else inf, link)
        return least

    def leanest(self, shape: Candidate) -> Found | None:
        """Those that need the least memory; None where there is a layer nobody runs."""
        fronts = self.fronts(shape)
        return self.laid_out(shape, smallest(fronts)) if all(fronts) else None
