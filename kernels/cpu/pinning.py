"""Pin workers to cores, spread over the chips, and choose the primary workers (ZNNi IV-A.3)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of one worker."""

    worker: int
    chip: int
    primary: bool  # transforms kernels, into a buffer of its own
    core: int | None  # the core it is pinned to; None if workers are not pinned


@dataclass(frozen=True, slots=True)
class Placements:
    """The places of all workers; `unpinned` is the reason why they are not pinned, if they are not."""

    places: tuple[Placement, ...]
    unpinned: str | None = None


def chips_of(cores: Iterable[int], root: Path = CPUS) -> tuple[tuple[int, ...], ...]:
    """Group the cores by chip: by shared third-level cache, or by package if the cache is unknown.

    root  a folder like Linux's /sys/devices/system/cpu; unknown topology counts as one chip. Of cores that share one
          set of arithmetic units (hyper-threading), the second ones come last.
    """
    chips: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for core in sorted(cores):
        topology = root / f"cpu{core}" / "topology"
        cache = _text(root / f"cpu{core}" / "cache" / "index3" / "shared_cpu_list")
        siblings = _listed(_text(topology / "thread_siblings_list"))
        rank = siblings.index(core) if core in siblings else 0
        chips.setdefault((_text(topology / "physical_package_id"), cache), []).append((rank, core))
    return tuple(tuple(core for _, core in sorted(chip)) for chip in chips.values())


def place_workers(threads: int, primaries: int) -> Placements:
    """Place workers on the cores that this process may use."""
    if threads == 1:
        return Placements(placements(1, primaries, None), "a single worker needs no pinning")
    if not hasattr(os, "sched_setaffinity"):
        return Placements(placements(threads, primaries, None), "this system cannot pin threads")
    cores = os.sched_getaffinity(0)
    if len(cores) < threads:
        return Placements(placements(threads, primaries, None), f"{threads} workers have {len(cores)} cores")
    try:
        os.sched_setaffinity(0, cores)  # changes nothing, but is refused where pinning is
    except OSError as error:
        return Placements(placements(threads, primaries, None), f"the system refuses to pin threads: {error.strerror}")
    return Placements(placements(threads, primaries, chips_of(cores)))


def placements(threads: int, primaries: int, chips: Sequence[Sequence[int]] | None) -> tuple[Placement, ...]:
    """Return a place for each worker; the first `primaries` are primary.

    chips  cores of each chip, `threads` or more in total: workers are assigned to chips round-robin, so that the
           workers, and the primary ones among them, are spread evenly. None: not pinned, and all on one chip.
    """
    if chips is None:
        return tuple(Placement(worker, 0, worker < primaries, None) for worker in range(threads))
    longest = max(map(len, chips))
    taken = [(chip, cores[rank]) for rank in range(longest) for chip, cores in enumerate(chips) if rank < len(cores)]
    return tuple(
        Placement(worker, chip, worker < primaries, core) for worker, (chip, core) in enumerate(taken[:threads])
    )


@contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """Pin the calling thread to this core inside the block, then restore its affinity. None: do nothing.

    If the core was taken away in the meantime (OSError), the thread stays as it is: only speed is lost.
    """
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {core})
    except OSError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _listed(text: str) -> list[int]:
    """Parse `0-2,8` as [0, 1, 2, 8]."""
    cores: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return cores


def _text(path: Path) -> str:
    """Read a file of the system; return "" if there is none."""
    return path.read_text().strip() if path.is_file() else ""
