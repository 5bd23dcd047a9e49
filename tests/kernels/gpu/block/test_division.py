"""How convolutions are divided among multiprocessors: the paper's numbers, and what every division must fulfil."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from znnpy.kernels.gpu.block.division import (
    Card,
    Image,
    Multiple,
    Single,
    card_of,
    divide_multiple,
    divide_single,
)
from znnpy.machine import Gpu

GTX_1080_TI = Card(
    latency=258, clock=1.48e9, bandwidth=484e9, multiprocessors=28, shared_bytes=96 << 10, products=256
)  # the paper's table 1
H200 = Gpu("H200", (9, 0), 132, 141 << 30, 50 << 20, 227 << 10, 228 << 10, 4.8e12, 13000, ())


def test_products_to_hide_latency_equal_those_of_the_paper() -> None:
    """The numbers are those of section 2.2 and table 1."""
    assert GTX_1080_TI.bytes_a_cycle == 327
    assert GTX_1080_TI.hiding_bytes == 84366
    assert GTX_1080_TI.threads == 768
    assert GTX_1080_TI.threads * 4 == 3072
    assert GTX_1080_TI.volume == 86016
    assert GTX_1080_TI.hiding_products == 258 * 256


def test_gpu_is_described_by_its_properties_and_its_architecture() -> None:
    card = card_of(H200)
    assert (card.multiprocessors, card.shared_bytes, card.bandwidth) == (132, 228 << 10, 4.8e12)
    assert (card.latency, card.products) == (479, 128)
    assert card_of(replace(H200, capability=(8, 0))).products == 64
    newest, unknown = (card_of(replace(H200, capability=capability)) for capability in ((12, 0), (13, 7)))
    assert unknown == newest


@pytest.mark.parametrize("segment", [32, 64])
@pytest.mark.parametrize("kx", [1, 3, 5])
def test_the_papers_own_choice_of_filters_is_among_those_allowed(segment: int, kx: int) -> None:
    """Section 4: 64 filters and 128 pixels were best, for segments of 32 and 64 bytes. 32 bytes hide all but 1 %."""
    taps = segment // 4
    allowed = divide_multiple(GTX_1080_TI, taps, 128, 4 * -(-taps // kx) * 128)
    assert 0.98 * allowed.fewest <= 64 <= allowed.most


def test_division_of_many_input_maps_equals_that_by_hand() -> None:
    # 66,048 products of 8 taps x 128 pixels; 48 KiB less 3 lines of 512 bytes, in segments of 32
    assert divide_multiple(GTX_1080_TI, 8, 128, 3 * 512) == Multiple(fewest=65, most=(49152 - 1536) // 32)
    assert divide_multiple(GTX_1080_TI, 16, 32, 16 * 128) == Multiple(fewest=129, most=(49152 - 16 * 128) // 64)
    assert divide_multiple(replace(GTX_1080_TI, shared_bytes=4096), 16, 256, 16 * 1024).most == 0


def test_small_image_with_many_filters_is_divided_by_filters() -> None:
    """28 x 28, 512 filters of 3 x 3: a multiprocessor takes 19 filters and the whole image."""
    found = divide_single(GTX_1080_TI, Image(28, 28, 2), 512, 9)
    nbytes = 4 * (9 * 19 + 2 * 28 + 28 * 28)
    assert found == Single("filters", 1, 19, nbytes, 9 * 19 * 28 * 28, hides=True)


def test_large_image_with_few_filters_is_divided_by_lines() -> None:
    """1024 x 1024, 32 filters of 5 x 5: 37 lines and 4 of halo are more than is there, so the image goes in pieces."""
    found = divide_single(GTX_1080_TI, Image(1024, 1024, 4), 32, 25)
    assert (found.divided, found.filters, found.hides) == ("filters", 2, True)
    held = 4 * (25 * 2 + 4 * 1024)
    assert found.pieces == -(-4 * 1024 * 1024 // ((96 << 10) - held))
    roomy = replace(GTX_1080_TI, shared_bytes=512 << 10)
    found = divide_single(roomy, Image(1024, 1024, 4), 32, 25)
    assert found == Single("image", 1, 32, 4 * (41 * 1024 + 25 * 32), 25 * 32 * 37 * 1024, hides=True)


def test_latency_hiding_division_wins_over_a_smaller_one() -> None:
    """56 x 56, 64 filters of 3 x 3: 2 lines a multiprocessor are 64,512 products, 66,048 are needed."""
    found = divide_single(GTX_1080_TI, Image(56, 56, 2), 64, 9)
    assert found == Single("filters", 1, 3, 4 * (27 + 58 * 56), 27 * 56 * 56, hides=True)


def test_all_multiprocessors_are_filled_first() -> None:
    """132 multiprocessors: 28 lines would leave most of them idle, though 28 of them would hide their memory."""
    card = card_of(H200)
    found = divide_single(card, Image(28, 28, 2), 512, 9)
    assert (found.divided, found.filters, found.hides) == ("filters", 4, False)
    found = divide_single(card, Image(1024, 1024, 2), 32, 9)
    assert (found.divided, found.filters, found.hides) == ("image", 32, True)


def test_layer_with_too_little_work_is_divided_no_further() -> None:
    found = divide_single(GTX_1080_TI, Image(28, 28, 0), 32, 1)
    assert (found.pieces, found.hides) == (1, False)
    assert found.products < GTX_1080_TI.hiding_products


def test_every_latency_hiding_division_keeps_its_promises() -> None:
    for n, filters, k in product((28, 56, 112, 224, 512, 1024), (32, 64, 128, 256, 512), (1, 3, 5)):
        found = divide_single(GTX_1080_TI, Image(n, n, k - 1), filters, k * k)
        assert 1 <= found.filters <= filters
        if found.hides:
            assert found.nbytes <= GTX_1080_TI.shared_bytes
            assert found.products >= GTX_1080_TI.hiding_products
            assert found.pieces <= (n if found.divided == "filters" else filters)
        else:
            assert found.pieces == 1
