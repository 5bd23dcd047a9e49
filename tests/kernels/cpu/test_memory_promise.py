"""Memory is a promise: for every primitive of the CPU in the table, the system counts what its footprint says."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.footprint_promise import Measurements, smallest
from tests.support.tiers import one_in
from znnpy.kernels.table import TABLE
from znnpy.machine import AMX, AVX512_BF16, this_machine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from znnpy.kernels.contract import Primitive
    from znnpy.shapes import Precision

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the peak of one process is known on Linux only"),
]


ABSENT = tuple({AMX, AVX512_BF16} - {*this_machine().bf16})  # units of other processors
ON_CPU = [p for p in TABLE if p.name.startswith("cpu.") and not p.name.endswith(ABSENT)]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
EACH = [(p, precision) for p in ON_CPU for precision in PRECISIONS if precision == "fp32" or smallest(p, precision)]


@pytest.fixture(scope="module")
def measurements() -> Iterator[Measurements]:
    with Measurements() as asked:
        yield asked


@pytest.mark.parametrize(("primitive", "precision"), one_in(3, EACH), ids=lambda value: getattr(value, "name", value))
def test_system_counts_no_more_bytes_than_the_footprint(
    measurements: Measurements, primitive: Primitive, precision: Precision
) -> None:
    """Random shapes of 24 MiB and more run with one and three threads, each in its own process."""
    words = ["--shapes", "3", "--threads", "1", "3", "--only", primitive.name, "--most-mib", "80"]
    rows, said = measurements.ask("--precision", precision, *words)
    missing = "takes no shape here" in said
    assert len(rows) == 6 or (missing and this_machine().simd == "other"), said
    assert all(row.kept for row in rows), said
