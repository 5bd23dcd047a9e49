"""Offsets: no two tensors that live together share a byte, and the arena is no larger than it must be."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tests.support.fake_primitives import FAST, MACHINE, OVER, POOL, SLOW
from znnpy.kernels.contract import Footprint, Scratch, Variant
from znnpy.layer_shapes import LayerShape
from znnpy.network import Conv, Layer, MaxFilter, Maxout, Network, Pool
from znnpy.planner.layout import (
    ALIGNMENT,
    Tensor,
    aligned,
    carried_bytes,
    carried_planes,
    chain,
    live_peak,
    place,
    reads_carry_in_place,
    scratch_peaks,
    sub_batch_counts,
)
from znnpy.shapes import ConvShape, FilterShape, PoolShape, Vec3


def tensors_of(spans: list[tuple[int, int, int]]) -> list[Tensor]:
    return [Tensor(f"t{i}", nbytes, first, first + life) for i, (nbytes, first, life) in enumerate(spans)]


TENSORS = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 12), st.integers(0, 6)), min_size=0, max_size=14).map(
    tensors_of
)


def most_alive(tensors: list[Tensor]) -> int:
    """Peak of live bytes, tick by tick."""
    ticks = range(max((t.last for t in tensors), default=0) + 1)
    return max(sum(aligned(t.nbytes) for t in tensors if t.first <= tick <= t.last) for tick in ticks)


@given(TENSORS)
def test_live_tensors_share_no_byte(tensors: list[Tensor]) -> None:
    placed, size = place(tensors)
    assert [(t.name, t.nbytes, t.first, t.last) for t in placed] == [
        (t.name, t.nbytes, t.first, t.last) for t in tensors
    ]
    for tick in range(20):
        owner: dict[int, str] = {}
        for t in placed:
            assert t.offset % ALIGNMENT == 0
            if t.first <= tick <= t.last:
                for block in range(t.offset // ALIGNMENT, aligned(t.end) // ALIGNMENT):
                    assert block not in owner, f"{t.name} and {owner[block]} share bytes in tick {tick}"
                    assert block * ALIGNMENT < size
                    owner[block] = t.name
    assert size >= most_alive(tensors) == live_peak(tensors)


def random_chain(rng: random.Random) -> tuple[Tensor, ...]:
    """Up to 10 layers of up to 4 stages and 4 buffers, all sizes within a factor of 1,000."""
    steps = []
    maps = rng.randint(1, 1000)
    for _ in range(rng.randint(1, 10)):
        stages = rng.randint(1, 4)
        scratch = []
        for index in range(rng.randint(0, 4)):
            first = rng.randint(0, stages - 1)
            scratch.append(Scratch(str(index), 64 * rng.randint(1, 1000), first, rng.randint(first, stages - 1)))
        out = rng.randint(1, 1000)
        footprint = Footprint(
            input_until=rng.randint(0, stages - 1),
            output_from=rng.randint(0, stages - 1),
            stages=stages,
            scratch=tuple(scratch),
        )
        steps.append((ConvShape(16, maps, out, (1, 1, 1), (1, 1, 1)), footprint))
        maps = out
    return chain(steps)


def test_arena_is_close_to_its_lower_bound() -> None:
    rng = random.Random(20261120)
    over = []
    for _ in range(300):
        tensors = random_chain(rng)
        over.append(place(tensors)[1] / live_peak(tensors) - 1)
    reached = sum(excess == 0 for excess in over) / len(over)
    assert reached >= 0.97, f"only {reached:.1%} reach the bound"
    assert max(over) <= 0.15, f"the worst is {max(over):.1%} above it"


def ticks(tensors: tuple[Tensor, ...]) -> dict[str, tuple[int, int, int]]:
    return {t.name: (t.nbytes, t.first, t.last) for t in tensors}


def test_lifetimes_of_a_chain_equal_those_by_hand() -> None:
    """The layers have two stages, then three with an output that may overwrite the input, then one."""
    first = ConvShape(1, 1, 2, (9, 9, 9), (2, 2, 2))
    second = ConvShape(1, 2, 4, (8, 8, 8), (3, 3, 3))
    third = PoolShape(1, 4, (6, 6, 7), (1, 1, 2))
    variant = Variant.of(scale=1)
    steps: list[tuple[LayerShape, Footprint]] = [
        (first, FAST.footprint(first, variant, 1)),
        (second, OVER.footprint(second, variant, 1)),
        (third, POOL.footprint(third, variant, 1)),
    ]
    assert ticks(chain(steps)) == {
        "x0": (4 * 9**3, 0, 0),
        "step0.s0": (first.out_bytes // 2, 0, 0),
        "step0.s1": (first.out_bytes // 4, 1, 1),
        "x1": (4 * 2 * 8**3, 0, 2),  # written from tick 0, read in the first stage of layer 1
        "step1.s0": (int(0.9 * second.out_bytes), 2, 2),
        "x2": (4 * 4 * 6 * 6 * 7, 4, 5),  # written in the last of its three stages, as large as the pooling takes it
        "x3": (third.out_bytes, 5, 6),  # one tick longer, to be recombined
    }


def test_lifetimes_of_images_in_parts_equal_those_by_hand() -> None:
    """The input of a layer that takes a part of it stays to the end; what is behind is as large as one part's."""
    footprint = Footprint(stages=2, output_from=1, scratch=(Scratch("s", 100, 1, 1),))
    shapes: list[LayerShape] = [
        PoolShape(1, 3, (3, 3, 1), (2, 2, 1)),  # makes 4 images of 1x1x1 x 3 maps
        ConvShape(2, 3, 5, (1, 1, 1), (1, 1, 1)),  # takes 2 of them
        FilterShape(2, 5, (1, 1, 1), (1, 1, 1)),
        ConvShape(1, 5, 7, (1, 1, 1), (1, 1, 1)),  # and 1 of those
    ]
    assert sub_batch_counts(shapes) == (1, 2, 2, 4)
    assert ticks(chain([(shape, footprint) for shape in shapes])) == {
        "x0": (4 * 9 * 3, 0, 0),
        "step0.s": (100, 1, 1),
        "x1": (4 * 4 * 3, 1, 8),  # held: of 4 images 2 go on
        "step1.s": (100, 3, 3),
        "x2": (4 * 2 * 5, 3, 4),
        "step2.s": (100, 5, 5),
        "x3": (4 * 2 * 5, 5, 8),  # held: of 2 images 1 goes on
        "step3.s": (100, 7, 7),
        "x4": (4 * 7, 7, 8),
    }


NETWORK = Network("a", 2, (Conv((3, 1, 2), 4), Pool((2, 1, 1)), MaxFilter((3, 1, 1)), Maxout(2), Conv((2, 2, 2), 3)))


def test_carried_planes_and_bytes_equal_those_by_hand() -> None:
    """Steps of 4 planes: 2 fragments get 2 new planes each. In (z, y, x): 4x3x5 out, 4x4x7 in."""
    shapes = NETWORK.layer_shapes((4, 3, 5), streams=True)
    assert [shape.in_shape for shape in shapes] == [
        (1, 4 + 2, 4, 7, 2),
        (1, 4 + 1, 4, 6, 4),
        (2, 2 + 2, 4, 6, 4),
        (2, 2, 4, 6, 4),
        (2, 2 + 1, 4, 6, 2),
    ]
    assert carried_planes(shapes, 4) == (2, 1, 2, 0, 1)
    planes = [2 * 4 * 7 * 2, 1 * 4 * 6 * 4, 2 * 2 * 4 * 6 * 4, 0, 2 * 1 * 4 * 6 * 2]
    assert carried_bytes(shapes, 4) == 4 * sum(planes)
    split = NETWORK.layer_shapes((4, 3, 5), streams=True, batches=(1, 1, 1, 1, 1))
    assert sub_batch_counts(split) == (1, 1, 2, 2, 2)
    assert carried_planes(split, 4) == (2, 1, 2, 0, 1)
    assert carried_bytes(split, 4) == 4 * sum(planes), "of all images, in whatever parts they run"
    patch = NETWORK.layer_shapes((4, 3, 5))
    whole = NETWORK.patch_in((4, 3, 5))[0]
    assert carried_planes(patch, whole) == (0, 0, 0, 0, 0)
    assert carried_bytes(patch, whole) == 0


def test_fused_convolution_carries_planes_for_both_layers() -> None:
    shapes = NETWORK.layer_shapes((4, 3, 5), streams=True)
    conv, pool = shapes[:2]
    assert isinstance(conv, ConvShape)
    assert isinstance(pool, PoolShape)
    both = ConvShape(1, 2, 4, (4 + 3, 4, 7), (3, 1, 2), pool=(2, 1, 1))
    assert both.out_shape == pool.out_shape
    assert carried_planes((both, *shapes[2:]), 4) == (3, 2, 0, 1)
    assert carried_bytes((both,), 4) == 4 * 3 * 4 * 7 * 2


def test_inputs_read_beside_carried_planes_hold_only_new_planes() -> None:
    """They stay until planes are kept of them, at the end of the layer."""
    shapes = NETWORK.layer_shapes((4, 3, 5), streams=True)
    joins = Footprint(stages=3, output_from=1)
    reads = Footprint(stages=3, output_from=1, reads_carried=True)
    plane = [4 * 4 * 7 * 2, 4 * 4 * 6 * 4, 4 * 4 * 6 * 4, 4 * 4 * 6 * 4, 4 * 4 * 6 * 2]
    joined = ticks(chain([(shape, joins) for shape in shapes], 4))
    assert [joined[f"x{i}"] for i in range(5)] == [
        (6 * plane[0], 0, 0),
        (5 * plane[1], 1, 3),
        (2 * 4 * plane[2], 4, 6),
        (2 * 2 * plane[3], 7, 9),
        (2 * 3 * plane[4], 10, 12),
    ]
    apart = ticks(chain([(shape, reads) for shape in shapes], 4))
    assert [apart[f"x{i}"] for i in range(5)] == [
        (4 * plane[0], 0, 2),
        (4 * plane[1], 1, 5),
        (2 * 2 * plane[2], 4, 8),
        (2 * 2 * plane[3], 7, 9),  # carries nothing
        (2 * 2 * plane[4], 10, 14),
    ]
    patch = NETWORK.layer_shapes((4, 3, 5))
    assert chain([(shape, reads) for shape in patch]) == chain([(shape, joins) for shape in patch])
    assert [reads_carry_in_place(reads, 2), reads_carry_in_place(reads, 0), reads_carry_in_place(joins, 2)] == [
        True,
        False,
        False,
    ]


@st.composite
def footprints(draw: st.DrawFn) -> Footprint:
    stages = draw(st.integers(1, 3))
    spans = draw(st.lists(st.tuples(st.integers(0, stages - 1), st.integers(0, stages - 1)), max_size=2))
    return Footprint(
        input_until=draw(st.integers(0, stages - 1)),
        output_from=draw(st.integers(0, stages - 1)),
        stages=stages,
        scratch=tuple(Scratch(str(i), 64 * (1 + i + stages), min(s), max(s)) for i, s in enumerate(spans)),
        reads_carried=draw(st.booleans()),
    )


LAYERS: st.SearchStrategy[Layer] = st.one_of(
    st.builds(Conv, st.tuples(*[st.integers(1, 3)] * 3), st.integers(1, 9)),
    st.builds(Pool, st.sampled_from([(1, 1, 2), (2, 1, 1), (2, 2, 1), (3, 1, 1)])),
)


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[tuple[LayerShape, Footprint]], int]:
    """Layers of a patch or of a step of a column, whose images run in some parts; and the planes that it reads."""
    network = Network("a", 1, tuple(draw(st.lists(LAYERS, min_size=1, max_size=5))))
    out, walks = network.period, draw(st.booleans())
    batches, images = [], 1
    for layer in network.layers:
        batches.append(draw(st.sampled_from([n for n in range(1, images + 1) if images % n == 0])))
        p: Vec3 = layer.window if isinstance(layer, Pool) else (1, 1, 1)
        images = batches[-1] * p[0] * p[1] * p[2]
    shapes = network.layer_shapes(out, streams=walks, batches=batches)
    return [(shape, draw(footprints())) for shape in shapes], out[0] if walks else network.patch_in(out)[0]


class Arena:
    """A record of the tensor that was written last to each block of 64 bytes."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._tensors = {t.name: t for t in tensors}
        self._owner: dict[int, str] = {}

    def write(self, name: str) -> None:
        for block in self._blocks(name):
            self._owner[block] = name

    def lost(self, *names: str) -> list[str]:
        """Return the tensors of which a byte was overwritten."""
        return [name for name in names if any(self._owner.get(block) != name for block in self._blocks(name))]

    def _blocks(self, name: str) -> range:
        tensor = self._tensors[name]
        return range(tensor.offset // ALIGNMENT, aligned(tensor.end) // ALIGNMENT)


@given(chains())
def test_step_overwrites_no_needed_tensor(built: tuple[list[tuple[LayerShape, Footprint]], int]) -> None:
    """Layers and parts run stage by stage in the order of a session."""
    steps, new = built
    shapes = [shape for shape, _ in steps]
    carried = carried_planes(shapes, new)
    tensors, size = place(chain(steps, new))
    assert all(t.offset % ALIGNMENT == 0 and t.end <= size for t in tensors)
    arena = Arena(tensors)
    arena.write("x0")
    images, done = 1, [0] * len(steps)

    def go_on(index: int, images: int, held: tuple[str, ...]) -> None:
        if index == len(steps):
            assert arena.lost(*held, f"x{index}") == []  # recombined
            return
        shape, footprint = steps[index]
        x, out, parts = f"x{index}", f"x{index + 1}", images // shape.in_shape[0]
        scratch = {f"step{index}.{s.name}": s for s in footprint.scratch}
        stays = parts > 1 or reads_carry_in_place(footprint, carried[index])
        for _ in range(parts):
            done[index] += 1
            for stage in range(footprint.stages):
                for name, buffer in scratch.items():
                    if buffer.first == stage:
                        arena.write(name)
                if footprint.output_from == stage:
                    arena.write(out)
                alive = [name for name, buffer in scratch.items() if buffer.first <= stage <= buffer.last]
                alive += [x] if stage <= footprint.input_until or stays else []
                alive += [out] if stage >= footprint.output_from else []
                assert arena.lost(*held, *alive) == [], f"layer {index}, stage {stage}"
            go_on(index + 1, shape.out_shape[0], (*held, x) if parts > 1 else held)

    go_on(0, images, ())
    assert tuple(done) == sub_batch_counts(shapes)


@given(footprints(), st.integers(0, 999), st.integers(0, 999))
def test_fullest_stage_of_a_layer_equals_the_peak_of_its_chain(footprint: Footprint, maps: int, more: int) -> None:
    """One or two numbers suffice for any size of input and output."""
    shape = ConvShape(1, 1 + maps, 1 + more, (1, 1, 1), (1, 1, 1))
    assert scratch_peaks(footprint).arena_bytes(shape.in_bytes, shape.out_bytes) == live_peak(
        chain([(shape, footprint)])
    )


def test_working_bytes_equal_those_of_the_footprint() -> None:
    """One layer alone needs what `Footprint.working` says, up to alignment."""
    shape = ConvShape(2, 3, 5, (12, 11, 13), (3, 2, 4))
    for primitive in (SLOW, FAST, OVER):
        for variant in primitive.variants(shape, MACHINE):
            footprint = primitive.footprint(shape, variant, 2)
            live = scratch_peaks(footprint).arena_bytes(shape.in_bytes, shape.out_bytes)
            assert live == live_peak(chain([(shape, footprint)]))
            excess = live + footprint.allowance - footprint.working(shape)
            assert 0 <= excess < ALIGNMENT * (2 + len(footprint.scratch))
