"""benchmarks/papers_clock.py: what is queued on the device and when, by a card that writes it down."""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def clocks(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    return importlib.import_module("papers_clock")


class Card:
    """Writes down what is queued. A run takes it `long` seconds, a copy that holds work back a millisecond."""

    stream = None

    def __init__(self, long: float) -> None:
        self.queued: list[str] = []
        self.long = long

    def view(self, buffer: str, shape: tuple[int], dtype: type) -> str:
        self.viewed = shape[0]
        return buffer

    def allocate(self, nbytes: int, what: str) -> str:
        return what

    def copy_async(self, target: str, source: str, stream: None) -> None:
        self.queued.append("copy")

    def synchronize(self) -> None:
        self.queued.append("wait")

    def elapsed(self, work: Callable[[], None], repeats: int = 1) -> list[float]:
        self.queued.append("begin")
        before = self.queued.count("run")
        work()
        runs = self.queued.count("run") - before
        return [runs * self.long] if runs else [1e-3] * repeats


class Steady(Card):
    """Whatever is queued takes it a millisecond."""

    def elapsed(self, work: Callable[[], None], repeats: int = 1) -> list[float]:
        work()
        return [1e-3]


def test_the_device_waits_for_the_host(clocks: Any) -> None:
    """By hand: copies of 0.1 ms are queued before 30 runs whose launches take 0.02 ms each; half as many again.

    A run that does not count goes behind the copies; what runs long needs none once that is known.
    """
    assert clocks.holds(30 * 2e-5, 1e-4) == 9
    assert clocks.holds(10.0, 1e-4) == clocks.MOST_HOLDS
    card = Card(1e-5)
    clock = clocks.HeldClock(card)

    def run() -> None:
        card.queued.append("run")

    for long, warm in ((1e-5, 1), (1.0, 1), (1.0, 0)):
        card.long = long
        card.queued.clear()
        assert clock.seconds(run, 5) == pytest.approx(long)
        assert card.queued == ["wait", "copy", *["run"] * warm, "begin", *["run"] * 5]


def test_a_slow_host_is_waited_for(clocks: Any) -> None:
    """What takes the host longer than was known is queued once more, behind as many copies as that takes."""
    card = Card(1e-5)
    clock = clocks.HeldClock(card)
    card.queued.clear()

    def run() -> None:
        time.sleep(2e-3)
        card.queued.append("run")

    clock.seconds(run, 2)
    first, *again = "".join(word[0] for word in card.queued).split("w")[1:]  # wait, copy, run, begin, run, run
    assert first == "crbrr"
    assert again
    assert again[-1].count("c") >= 9  # three runs of 2 ms, half as much again


def test_copies(clocks: Any) -> None:
    """By hand: a copy of 100 bytes reads 50 and writes 50; of four times what the clock has room for, it scales."""
    card = Steady(1e-3)
    clock = clocks.HeldClock(card, 1000)
    for nbytes, viewed, seconds in ((100, 50, 1e-3), (8000, 1000, 4e-3), (0, 1, 1e-3)):
        times = clocks.series_of(1e-3)
        assert clock.copied_seconds(nbytes) == pytest.approx(seconds / times)
        assert card.viewed == viewed


def test_series(clocks: Any) -> None:
    """A millisecond at least, twelve runs at most."""
    series_of = clocks.series_of
    assert [series_of(once) for once in (1.0, 1e-3, 3e-4, 1e-6, 0.0)] == [1, 1, 4, 12, 12]


def test_where_the_time_goes(clocks: Any) -> None:
    """What is within is counted once."""
    spent = clocks.Spent()
    for _ in range(2):
        with spent.on("all"), spent.on("part"):
            time.sleep(0.01)
    assert spent.seconds["part"] >= 0.02
    assert spent.seconds["all"] < 0.01
    assert "part 0.0" in spent.line()
