"""Measure how fast volumes are read and written, and what the journal and whole runs on disk cost.

    python -m benchmarks io [--device gpu] [--minutes 10] [--do read --do write ..] [--folder DISK] [--against TREE]

read     GB/s of reading a volume by format, chunks and compression, in boxes that cut chunks like those of a run: with
         the file in the page cache, and without it. For comparison a plain reader of the same package reads the volume
         at once.
write    GB/s of writing an output until the system has the bytes, by format, type and shape of the steps; for
         comparison, of a plain file of as many bytes.
journal  Seconds of a run of many columns, with and without waiting for the disk: calls of `fsync` are counted and
         timed, or skipped.
whole    Output voxels per second of a real network from file to file, and from memory to memory; with --volume, of the
         network that ships with znnpy on a real volume.
copy     GB/s of a run of one tiny convolution on uint8 Zarr from disk to disk, and of its reading and writing; for
         comparison, of tensorstore reading and writing the same chunks in slabs that hold whole ones.

All runs are calls of `znnpy.infer`, except for `whole` with a network of one tiny convolution; the report of each run
has the times of its stages. With --against the runs alternate with those of another source tree.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, Self

import click
import numpy as np

from benchmarks.harness import markdown, options
from benchmarks.harness.inputs import Vec3, field_of_view, layers_of, network_file, noise
from benchmarks.harness.isolate import Child
from benchmarks.harness.machine import find_gpu, header, machine_name
from benchmarks.harness.merging import merge
from benchmarks.harness.results import Program, Result, Results, Row
from benchmarks.harness.timing import Budget

EXPERIMENTS = ("read", "write", "journal", "whole", "copy")
GB = 1e9
RUN_SECONDS = 300.0  # limit of one run
VOLUME: Vec3 = (400, 400, 400)
QUICK_VOLUME: Vec3 = (70, 80, 90)
READING_STEP: Vec3 = (100, 100, 100)  # output of a patch: cuts chunks of 64

COPIED = 1024  # voxels along each axis of what is copied
COPIES = {"chunks of 64^3": False, "shards": True}  # whether the output is sharded

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stored:
    """A way to store a volume: the format, the side of chunks (0: none), and the package's name of the compression."""

    suffix: str
    chunk: int = 0
    compression: str | None = None
    zarr_format: int = 2
    shard: int = 0  # chunks along an axis of a shard; 0: none

    def __str__(self) -> str:
        kind = f"Zarr v{self.zarr_format}" if self.suffix == "zarr" else {"h5": "HDF5", "npy": "npy"}[self.suffix]
        chunks = f", chunks of {self.chunk}^3" if self.chunk else ""
        shards = f" in shards of {self.shard}^3 chunks" if self.shard else ""
        return f"{kind}{chunks}{shards}{', ' + self.compression if self.compression else ''}"


STORED = (
    Stored("npy"),
    Stored("h5"),
    Stored("h5", 64),
    Stored("h5", 64, "gzip"),
    Stored("h5", 64, "lzf"),
    Stored("h5", 32),
    Stored("zarr", 64),
    Stored("zarr", 64, "blosc"),
    Stored("zarr", 64, "zstd"),
    Stored("zarr", 64, zarr_format=3),
    Stored("zarr", 64, "zstd", zarr_format=3),
    Stored("zarr", 32, "zstd", zarr_format=3, shard=4),
)


@dataclass(frozen=True, slots=True)
class Written:
    """An output and the shape of the steps that write it."""

    name: str
    maps: int
    size: Vec3
    step: Vec3
    cover: str
    why: str


WRITTEN = (
    Written("thin steps", 3, (228, 456, 456), (16, 132, 132), "columns", "parts of chunks along every axis"),
    Written("wide steps", 3, (176, 600, 600), (88, 436, 436), "columns", "many chunks a step, most of them whole"),
    Written("whole patches", 1, (400, 400, 400), (200, 200, 200), "patches", "most chunks are whole"),
)
QUICK_WRITTEN = (Written("thin steps", 3, (40, 70, 70), (16, 30, 30), "columns", "small"),)
OUTPUTS = (("h5", "float32"), ("h5", "uint8"), ("zarr", "float32"), ("zarr", "uint8"))


def copying_network(folder: Path, maps: int) -> Path:
    """Write a network that gives `maps` copies of its input, divided by 256 and without its last planes.

    Its kernels of 2x2x2 have one tap that is not zero: so columns carry planes from step to step.
    """
    path = folder / f"copy{maps}.yaml"
    weight = np.zeros((maps, 1, 2, 2, 2), np.float32)
    weight[:, :, 0, 0, 0] = 1 / 256
    np.savez(folder / f"copy{maps}.npz", conv0_weight=weight, conv0_bias=np.zeros(maps, np.float32))
    layer = f"- {{type: conv, kernel: [2, 2, 2], out: {maps}, activation: none}}"
    path.write_text(f"name: copy{maps}\ninput_channels: 1\nweights: copy{maps}.npz\nlayers:\n{layer}\n")
    return path


def point_network(folder: Path) -> Path:
    """Write a network that gives its input divided by 255: a convolution of one tap, so that files decide the time."""
    path = folder / "point.yaml"
    weight = np.full((1, 1, 1, 1, 1), 1 / 255, np.float32)
    np.savez(folder / "point.npz", conv0_weight=weight, conv0_bias=np.zeros(1, np.float32))
    layer = "- {type: conv, kernel: [1, 1, 1], out: 1, activation: none}"
    path.write_text(f"name: point\ninput_channels: 1\nweights: point.npz\nlayers:\n{layer}\n")
    return path


def grey_values(size: Vec3) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return noise of about 5 bits a voxel, which compresses like images of microscopes."""
    return noise(size) // 8 * 8


def store(folder: Path, how: Stored, voxels: np.ndarray[Any, np.dtype[np.uint8]]) -> Path:
    """Write a volume, and return its path."""
    path = folder / f"volume.{how.suffix}"
    remove(path)
    chunks = (how.chunk,) * 3 if how.chunk else None
    if how.suffix == "npy":
        np.save(path, voxels)
    elif how.suffix == "h5":
        import h5py

        with h5py.File(path, "w") as file:
            file.create_dataset("raw", data=voxels, chunks=chunks, compression=how.compression)
    else:
        import numcodecs
        import zarr

        packed = {"blosc": numcodecs.Blosc("lz4"), "zstd": numcodecs.Zstd(3), None: None}[how.compression]
        if how.zarr_format == 3:
            packed = zarr.codecs.ZstdCodec(level=3) if how.compression else None
        shards = (how.chunk * how.shard,) * 3 if how.shard else None
        array = zarr.create_array(
            path, shape=voxels.shape, dtype=voxels.dtype, chunks=chunks, shards=shards, compressors=packed,
            zarr_format=how.zarr_format,
        )  # fmt: skip
        array[...] = voxels
    return path


def _plus_one(size: Vec3) -> Vec3:
    """Return the input of the copying network for an output."""
    z, y, x = size
    return z + 1, y + 1, x + 1


def remove(path: Path) -> None:
    """Remove a file or a folder if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@dataclass
class Runs:
    """Runs requests in child processes, each of which lives until one of its runs fails.

    folder  folder on the disk that is measured.
    trees   source trees by name; None is our own.
    """

    device: str
    budget: Budget
    folder: Path
    rounds: int
    trees: Mapping[str, Path | None]
    children: dict[str, Child] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *cause: object) -> None:
        for child in self.children.values():
            child.close()

    def ask(self, tree: str, request: Facts) -> Facts:
        """Return the answer of one tree, or `failure`."""
        child = self.children.pop(tree, None) or Child("benchmarks.io_runs:answer", source=self.trees[tree])
        outcome = child.ask(request, RUN_SECONDS)
        if outcome.failure is not None:
            child.close()
            return {"failure": outcome.failure}
        self.children[tree] = child
        return outcome.answer

    def of(self, function: str, request: Facts, ours_only: bool = False) -> dict[str, list[Facts]]:
        """Return the answers of every tree, measured in interleaved rounds; a tree ends with its first failure."""
        found: dict[str, list[Facts]] = {tree: [] for tree in self.trees if tree == "here" or not ours_only}
        for number in range(self.rounds + 1):
            if number > 1 and not self.budget.allows(0.1):
                break
            for tree in found if number % 2 == 0 else reversed(found):
                if found[tree] and "failure" in found[tree][-1]:
                    continue
                found[tree].append(self.ask(tree, {"function": function, "device": self.device, **request}))
        return {tree: answers[1:] if len(answers) > 1 else answers for tree, answers in found.items()}

    def rows(
        self,
        group: str,
        case: str,
        found: Mapping[str, Sequence[Facts]],
        subject: str,
        unit: str,
        figure: str,
        **facts: Any,
    ) -> Iterator[Row]:
        """Yield a row for each tree, named `subject` or "subject, against"."""
        for tree, answers in found.items():
            name = subject if tree == "here" else f"{subject}, {tree}"
            failure = next((answer["failure"] for answer in answers if "failure" in answer), None)
            values = () if failure else tuple(answer[figure] for answer in answers)
            more = {} if failure else {key: value for key, value in answers[-1].items() if key != figure}
            yield Row(group, case, name, unit, values, failure, {**facts, **more})


def read(runs: Runs, size: Vec3, ways: Sequence[Stored]) -> Iterator[Row]:
    """Yield GB/s of reading."""
    voxels = grey_values(size)
    network = str(copying_network(runs.folder, 1))
    out = [length - 1 for length in size]
    step = [min(a, b) for a, b in zip(READING_STEP, out, strict=True)]
    for how in ways:
        if not runs.budget.allows(2):
            return
        path = str(store(runs.folder, how, voxels))
        facts = {"bytes": voxels.nbytes, "step": step}
        for cached in (True, False):
            asked = {"volume": path, "network": network, "out": [1, *out], "patch": step, "cover": "patches"}
            found = runs.of("read", {**asked, "is_cached": cached, "bytes": voxels.nbytes})
            subject = "cached" if cached else "from disk"
            yield from runs.rows("read", str(how), found, subject, "GB/s", "gb_per_second", **facts)
        plain = runs.of("read_plainly", {"volume": path, "bytes": voxels.nbytes}, ours_only=True)
        yield from runs.rows("read", str(how), plain, "plain, cached", "GB/s", "gb_per_second", **facts)
        remove(Path(path))


def write(runs: Runs, cases: Sequence[Written]) -> Iterator[Row]:
    """Yield GB/s of writing."""
    for case in cases:
        volume = str(store(runs.folder, Stored("npy"), grey_values(_plus_one(case.size))))
        network = str(copying_network(runs.folder, case.maps))
        for suffix, dtype in OUTPUTS:
            if not runs.budget.allows(2):
                return
            nbytes = prod(case.size) * case.maps * np.dtype(dtype).itemsize
            asked: Facts = {"volume": volume, "network": network, "out": str(runs.folder / f"out.{suffix}")}
            asked |= {"patch": case.step, "cover": case.cover, "output_dtype": dtype}
            found = runs.of("write", {**asked, "bytes": nbytes})
            name = f"{case.name}, {dtype}"
            facts = {"why": case.why, "maps": case.maps, "size": case.size, "step": case.step, "bytes": nbytes}
            yield from runs.rows(
                "write", name, found, "HDF5" if suffix == "h5" else "Zarr", "GB/s", "gb_per_second", **facts
            )
            if suffix == "h5":
                plain = runs.of("write_plainly", {"out": str(runs.folder / "plain"), "bytes": nbytes}, ours_only=True)
                yield from runs.rows("write", name, plain, "plain file", "GB/s", "gb_per_second", **facts)
        remove(Path(volume))


def journal(runs: Runs, size: Vec3, step: Vec3) -> Iterator[Row]:
    """Yield seconds of a run of many columns, with and without waiting for the disk."""
    volume = str(store(runs.folder, Stored("npy"), grey_values(_plus_one(size))))
    network = str(copying_network(runs.folder, 1))
    for suffix in ("h5", "zarr"):
        columns = prod(-(-a // b) for a, b in zip(size, step, strict=True))
        for syncs in (True, False):
            if not runs.budget.allows(2):
                return
            asked: Facts = {
                "volume": volume,
                "network": network,
                "out": str(runs.folder / f"out.{suffix}"),
                "patch": step,
            }
            found = runs.of("journal", {**asked, "cover": "patches", "syncs": syncs})
            case = f"{columns} patches of {'x'.join(map(str, step))}, {'HDF5' if suffix == 'h5' else 'Zarr'}"
            yield from runs.rows("journal", case, found, "fsync" if syncs else "no fsync", "s", "seconds")
    remove(Path(volume))


def whole(runs: Runs, network: str, side: int, real: Path | None) -> Iterator[Row]:
    """Yield voxels per second of whole runs on disk and in memory, also on the real volume if there is one."""
    size = (side + field_of_view(network) - 1,) * 3
    name, maps = str(network_file(runs.folder, network)), layers_of(network)[-1].maps
    for how in (Stored("h5"), Stored("zarr", 64, "zstd")):
        path = str(store(runs.folder, how, grey_values(size)))
        for out in (str(runs.folder / f"out.{how.suffix}"), [maps, side, side, side]):
            if not runs.budget.allows(5):
                return
            found = runs.of(
                "whole", {"volume": path, "network": name, "out": out, "from_memory": isinstance(out, list)}
            )
            subject = "memory to memory" if isinstance(out, list) else "file to file"
            yield from runs.rows(
                "whole", f"{network}, {side}^3, {how}", found, subject, "voxels/s", "voxels_per_second"
            )
        remove(Path(path))
    if real is not None:
        asked = {"volume": str(real), "network": "fib25_boundary", "out": str(runs.folder / "out.h5"), "verify": True}
        found = runs.of("whole", asked)
        yield from runs.rows(
            "whole", f"fib25_boundary, {real.name}", found, "file to file", "voxels/s", "voxels_per_second"
        )


def copy(runs: Runs, side: int) -> Iterator[Row]:
    """Yield GB/s of copies from Zarr to Zarr by a run, and by tensorstore alone."""
    size = (side, side, side)
    network = str(point_network(runs.folder))
    for name, sharded in COPIES.items():
        if not runs.budget.allows(5):
            return
        volume, facts = str(runs.folder / "volume.zarr"), {"bytes": side**3, "size": size}
        made = {"function": "store_for_copies", "volume": volume, "size": size, "sharded": sharded}
        runs.ask("here", {**made, "device": runs.device})
        asked = {"volume": volume, "out": str(runs.folder / "out.zarr"), "bytes": side**3, "sharded": sharded}
        found = runs.of("copy", {**asked, "network": network, "output_dtype": "uint8"}, ours_only=True)
        for subject in ("tensorstore", "znnpy"):
            for part in ("read", "write", "copy"):
                answers = {
                    tree: [one if "failure" in one else one[subject] for one in some] for tree, some in found.items()
                }
                yield from runs.rows("copy", f"{side}^3, {name}", answers, f"{subject}, {part}", "GB/s", part, **facts)
        remove(Path(volume))


@click.command()
@options.shared
@options.AGAINST
@click.option(
    "--do", "experiments", type=click.Choice(EXPERIMENTS), multiple=True, help="Run only these experiments; repeatable."
)
@click.option(
    "--folder", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Folder on the disk to measure."
)
@click.option("--volume", type=click.Path(path_type=Path, exists=True), help="Real volume to predict and verify.")
@click.option("--rounds", type=int, default=4, show_default=True)
def command(
    device: str,
    minutes: float,
    quick: bool,
    out: Path | None,
    against: Path | None,
    experiments: Sequence[str],
    folder: Path | None,
    volume: Path | None,
    rounds: int,
) -> None:
    """Measure reading and writing by format, the journal, and whole runs on disk."""
    gpu = find_gpu(device)
    result, budget = Result("io", machine_name(gpu), header(gpu)), Budget(minutes)
    if experiments:
        merge(result, out, experiments)
    trees: dict[str, Path | None] = {"here": None} | ({"against": against} if against else {})
    with (
        tempfile.TemporaryDirectory(dir=folder) as name,
        Runs(device, budget, Path(name), 1 if quick else rounds, trees) as runs,
    ):
        size = QUICK_VOLUME if quick else VOLUME
        made = {
            "read": read(runs, size, STORED),
            "write": write(runs, QUICK_WRITTEN if quick else WRITTEN),
            "journal": journal(runs, size, (20, 25, 30) if quick else (100, 40, 40)),
            "whole": whole(runs, "tiny" if quick else "fib25", 30 if quick else 256, volume),
            "copy": copy(runs, 70 if quick else COPIED),
        }
        wanted = experiments or EXPERIMENTS
        for number, experiment in enumerate(wanted):
            runs.budget = Budget(budget.left / 60 / (len(wanted) - number))  # the others get what one leaves
            for row in made[experiment]:
                figure = row.failure or f"{row.median:.3g} {row.unit} ({min(row.values):.3g} to {max(row.values):.3g})"
                click.echo(f"{row.group:8} {row.case:52} {row.subject:24} {figure}"[:200])
                result.add([row])
                if out or not quick:
                    result.write(out)
            if not runs.budget.left:
                result.left_out.append(f"{experiment}: the time was up before all of it was measured")


COPY_SUBJECTS = tuple(f"{who}, {part}" for part in ("read", "write", "copy") for who in ("tensorstore", "znnpy"))


def _table(result: Result, group: str, subjects: Sequence[str], head: str, digits: int = 3) -> str:
    """Return a table of the medians of some subjects, with a line for each case."""
    lines = []
    for case, rows in result.cases(group):
        by_subject = {row.subject: row for row in rows}
        if any(subject in by_subject for subject in subjects):
            lines.append(
                [case, *(markdown.number(by_subject[s].median, digits) if s in by_subject else "-" for s in subjects)]
            )
    return markdown.table([head, *subjects], lines) if lines else ""


def tables_of(result: Result) -> str:
    """Return all tables of one machine."""
    parts = {
        "GB/s of reading": _table(result, "read", ("cached", "from disk", "plain, cached"), "volume"),
        "GB/s of writing": _table(result, "write", ("HDF5", "Zarr", "plain file"), "output"),
        "Seconds of a run of many columns": _table(result, "journal", ("fsync", "no fsync"), "run"),
        "Output voxels per second": _table(result, "whole", ("file to file", "memory to memory"), "run"),
        "GB/s from Zarr to Zarr": _table(result, "copy", COPY_SUBJECTS, "uint8"),
    }
    return "\n\n".join(f"{name}:\n\n{part}" for name, part in parts.items() if part)


def io_table(results: Results) -> str:
    """Return the tables of all machines."""
    some = results.get("io", ())
    return markdown.sections(some, map(tables_of, some), "io")


def headline(result: Result) -> str:
    """Return the median GB/s of reading from the page cache and of writing."""
    found = []
    for group, subjects in (("read", ("cached",)), ("write", ("HDF5", "Zarr"))):
        values = [row.median for row in result.of_group(group) if row.subject in subjects and row.values]
        if values:
            found.append(f"{group} {markdown.number(median(values))} GB/s")
    return ", ".join(found) or "nothing measured"


PROGRAM = Program(
    name="io",
    question="How fast are volumes read and written, by format; what do journal and disk cost?",
    command="io [--device gpu]",
    tables={"io": io_table},
    headline=headline,
)
