"""The work of the child processes of `io.py`: runs of `znnpy.infer` with timed stages, plain readers and writers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import znnpy

GB = 1e9

Facts = dict[str, Any]


class Discard:
    """An output that discards everything that is assigned to it.

    shape  (maps, z, y, x).
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape if shape[0] > 1 else shape[1:]
        self.dtype, self.ndim = np.dtype(np.float32), len(self.shape)

    def __setitem__(self, where: Any, voxels: Any) -> None:
        pass


def answer(request: Facts) -> Facts:
    """Call the function that the request names."""
    functions: dict[str, Callable[[Facts], Facts]] = {
        "read": read,
        "read_plainly": read_plainly,
        "write": write,
        "write_plainly": write_plainly,
        "journal": journal,
        "whole": whole,
        "store_for_copies": store_for_copies,
        "copy": copy,
    }
    return functions[request["function"]](request)


def infer(request: Facts) -> Facts:
    """Run the network of the request over its volume, and return the report; if `out` is a shape, nothing is kept."""
    out: Any = request["out"]
    arguments: Facts = {key: request[key] for key in ("cover", "output_dtype", "sharded") if key in request}
    if "patch" in request:
        arguments["patch"] = tuple(request["patch"])
    if isinstance(out, list):
        out = Discard(tuple(out))
    else:
        _remove(out)
    volume: Any = request["volume"]
    if request.get("from_memory"):
        volume = _whole(volume)
    run: Callable[..., Any] = znnpy.infer
    report: Facts = run(volume, request["network"], out=out, device=request["device"], **arguments).as_json()
    return report


def read(request: Facts) -> Facts:
    """Time only the reading of a run."""
    if not request["is_cached"]:
        _forget(Path(request["volume"]))
    report = infer(request)
    spent = report["stage_seconds"]["reading"]
    return {"gb_per_second": request["bytes"] / spent / GB, "seconds": report["seconds"]}


def read_plainly(request: Facts) -> Facts:
    """Read the whole volume at once by the package of its format."""
    begin = time.perf_counter()
    assert _whole(request["volume"]).nbytes == request["bytes"]
    return {"gb_per_second": request["bytes"] / (time.perf_counter() - begin) / GB}


def write(request: Facts) -> Facts:
    """Time only the writing of a run, until the system has the bytes: `fsync` returns at once."""
    with timed_fsync(really=False) as synced:
        report = infer(request)
    _check(request)
    spent = report["stage_seconds"]["writing"]
    return {"gb_per_second": request["bytes"] / spent / GB, "seconds": report["seconds"], "fsyncs": synced["calls"]}


def write_plainly(request: Facts) -> Facts:
    """Write zeros into a new file, a MiB at a time."""
    block, path = bytes(2**20), Path(request["out"])
    begin = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for start in range(0, request["bytes"], len(block)):
            file.write(block[: request["bytes"] - start])
        spent = time.perf_counter() - begin
        os.fsync(file.fileno())
    synced = time.perf_counter() - begin - spent
    path.unlink()
    return {"gb_per_second": request["bytes"] / spent / GB, "fsync_seconds": synced}


def journal(request: Facts) -> Facts:
    """Time a whole run, and how much of it went into `fsync`."""
    with timed_fsync(really=request["syncs"]) as synced:
        report = infer(request)
    return {"seconds": report["seconds"], "fsyncs": synced["calls"], "fsync_seconds": synced["seconds"]}


def whole(request: Facts) -> Facts:
    """Time a whole run; if `verify` is set, compare voxels with the definition."""
    report = infer(request)
    found: Facts = {name: report[name] for name in ("voxels_per_second", "seconds", "stage_seconds", "peak_bytes")}
    if request.get("verify"):
        command = ["verify", request["out"], request["volume"], "--json", "--samples", "200"]
        done = subprocess.run([sys.executable, "-m", "znnpy", *command], capture_output=True, text=True, check=False)
        found["verified"] = done.returncode == 0
    return found


def store_for_copies(request: Facts) -> Facts:
    """Write a volume of grey values in slabs of whole chunks, and return how long it took."""
    begin = time.perf_counter()
    array = _new_array(request["volume"], request["size"], sharded=request["sharded"])
    rng = np.random.default_rng(1)
    for lo, hi in _slabs(array):
        slab = rng.integers(0, 32, (hi - lo, *request["size"][1:]), np.uint8) * 8
        array[lo:hi].write(slab).result()
    return {"seconds": time.perf_counter() - begin}


def copy(request: Facts) -> Facts:
    """Copy a volume by tensorstore, and by a run; GB/s of reading, of writing and of both for each."""
    import tensorstore

    _remove(request["out"])
    source = tensorstore.open({"driver": "zarr3", "kvstore": f"file://{request['volume']}"}, open=True).result()
    target = _new_array(request["out"], source.shape, sharded=request["sharded"])
    reading = writing = 0.0
    for lo, hi in _slabs(source):
        begin = time.perf_counter()
        slab = source[lo:hi].read().result()
        middle = time.perf_counter()
        target[lo:hi].write(slab).result()
        reading, writing = reading + middle - begin, writing + time.perf_counter() - middle
    theirs = {"read": reading, "write": writing, "copy": reading + writing}
    report = infer(request)
    stages = report["stage_seconds"]
    ours = {"read": stages["reading"], "write": stages["writing"], "copy": report["seconds"]}
    return {
        who: {part: request["bytes"] / seconds / GB for part, seconds in spent.items()} | {"seconds": spent["copy"]}
        for who, spent in (("tensorstore", theirs), ("znnpy", ours))
    }


def _new_array(path: str, size: tuple[int, ...], *, sharded: bool) -> Any:
    """Create a Zarr array of uint8, chunks of 64^3 and zstd by blosc, in shards of 256^3 or not."""
    import tensorstore

    codecs: list[Facts] = [
        {"name": "bytes"},
        {"name": "blosc", "configuration": {"cname": "zstd", "clevel": 1, "shuffle": "noshuffle", "typesize": 1}},
    ]
    chunk = [64] * 3
    if sharded:
        inner = {"chunk_shape": chunk, "codecs": codecs}
        chunk, codecs = [256] * 3, [{"name": "sharding_indexed", "configuration": inner}]
    grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
    metadata = {"shape": list(size), "data_type": "uint8", "chunk_grid": grid, "codecs": codecs}
    spec = {"driver": "zarr3", "kvstore": f"file://{path}", "metadata": metadata}
    return tensorstore.open(spec, create=True, delete_existing=True).result()


def _slabs(array: Any) -> Iterator[tuple[int, int]]:
    """Yield the planes of slabs of whole chunks or shards."""
    thick = array.chunk_layout.write_chunk.shape[0]
    for lo in range(0, array.shape[0], thick):
        yield lo, min(lo + thick, array.shape[0])


@contextmanager
def timed_fsync(*, really: bool) -> Iterator[Facts]:
    """Count and time `os.fsync` in this block; if not `really`, it returns at once."""
    kept, found = os.fsync, {"calls": 0, "seconds": 0.0}

    def fsync(file: Any) -> None:
        begin = time.perf_counter()
        if really:
            kept(file)
        found["calls"] += 1
        found["seconds"] += time.perf_counter() - begin

    os.fsync = fsync  # type: ignore[assignment]  # its type is the module's own
    try:
        yield found
    finally:
        os.fsync = kept


def _check(request: Facts) -> None:
    """Raise RuntimeError unless corners of the output are copies of the input."""
    expected, found = _whole(request["volume"]), _whole(request["out"])
    first = found[0] if found.ndim == 4 else found
    expected = expected[tuple(slice(length) for length in first.shape)]
    for corner in (np.s_[:8, :8, :8], np.s_[-8:, -8:, -8:]):
        scale, most = (255, 1.0) if first.dtype == np.uint8 else (1, 1e-6)
        if np.abs(first[corner] - scale * (expected[corner] / 256)).max() > most:
            raise RuntimeError(f"{request['out']} is no copy of {request['volume']}")


def _whole(path: str) -> Any:
    """Return the only array in a file."""
    if path.endswith(".npy"):
        return np.load(path)
    if path.endswith(".zarr"):
        import zarr

        found = zarr.open(path, mode="r")
        return (found if hasattr(found, "dtype") else next(iter(dict(found.arrays()).values())))[...]
    import h5py

    with h5py.File(path) as file:
        return next(iter(file.values()))[...]


def _forget(path: Path) -> None:
    """Ask the system to drop a file, or all files of a folder, from its cache."""
    for file in [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def _remove(path: str) -> None:
    for one in Path(path).parent.glob(f"{Path(path).name}*"):
        if one.is_dir():
            shutil.rmtree(one)
        else:
            one.unlink()
