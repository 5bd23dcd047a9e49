"""Volumes in buckets and on web servers, through a proxy that fails in many ways: equal voxels, or one sentence."""

from __future__ import annotations

import http.client
import logging
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from znnpy.errors import VolumeError
from znnpy.patches import Box
from znnpy.volume import object_store, open_volume
from znnpy.volume.base import Chunks, MissingVoxels, Volume
from znnpy.volume.location import Location
from znnpy.volume.registry import format_of

zarr = pytest.importorskip("zarr")
ts = pytest.importorskip("tensorstore")

VOXELS = np.random.default_rng(5).integers(1, 60_000, (40, 50, 60)).astype(np.uint16)
FAULTS = ("404", "503", "reset", "cut")
Store = Callable[[Path], Path]

pytestmark = pytest.mark.slow


@dataclass
class Proxy:
    """A server before another one, or before a folder; every `every`-th request fails in one of FAULTS in turn."""

    target: str | Path
    every: int = 0
    faults: tuple[str, ...] = FAULTS
    requests: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fault(self) -> str:
        with self.lock:
            self.requests += 1
            if not self.every or self.requests % self.every:
                return ""
            return self.faults[self.requests // self.every % len(self.faults)]

    def answer(self, path: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        if isinstance(self.target, str):
            connection = http.client.HTTPConnection(self.target)
            connection.request("GET", path, headers=headers)
            found = connection.getresponse()
            return found.status, {k: v for k, v in found.getheaders() if k.lower() != "content-length"}, found.read()
        file = self.target / path.lstrip("/")
        if not file.is_file():
            return 404, {}, b""
        content = file.read_bytes()
        asked = headers.get("Range", headers.get("range", "")).removeprefix("bytes=")
        if not asked:
            return 200, {}, content
        first, _, last = asked.partition("-")
        lo = int(first) if first else max(0, len(content) - int(last))
        hi = min(len(content), int(last) + 1) if first and last else len(content)
        if lo >= len(content):
            return 416, {}, b""
        return 206, {"Content-Range": f"bytes {lo}-{hi - 1}/{len(content)}"}, content[lo:hi]

    def start(self) -> tuple[str, Callable[[], None]]:
        """Return the address, and the function that ends the server."""
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            wbufsize = -1

            def do_GET(self) -> None:
                fault = proxy.fault()
                if fault == "reset":
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    self.close_connection = True
                    self.connection.close()
                    return
                status, headers, body = proxy.answer(self.path, dict(self.headers))
                if fault in ("404", "503"):
                    status, headers, body = int(fault), {}, b""
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: len(body) // 2] if fault == "cut" else body)
                if fault == "cut":
                    self.close_connection = True

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

            def handle(self) -> None:
                with suppress(OSError, ValueError):
                    super().handle()

            def finish(self) -> None:
                with suppress(OSError, ValueError):
                    super().finish()

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()

        def end() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return f"http://127.0.0.1:{server.server_address[1]}", end


def as_zarr2(folder: Path) -> Path:
    packer = zarr.registry.get_numcodec({"id": "blosc"})
    array = zarr.create_array(
        folder / "two.zarr",
        shape=VOXELS.shape,
        chunks=(16, 16, 16),
        dtype="u2",
        zarr_format=2,
        compressors=packer,
        fill_value=9,
    )
    array[...] = VOXELS
    return folder / "two.zarr"


def as_ome(folder: Path) -> Path:
    group = zarr.open_group(folder / "ome.zarr", mode="w", zarr_format=3)
    for name, step in (("0", 1), ("1", 2)):
        voxels = VOXELS[::step, ::step, ::step]
        group.create_array(name, shape=voxels.shape, chunks=(16, 16, 16), dtype="u2")[...] = voxels
    axes = [{"name": name, "type": "space", "unit": "nanometer"} for name in "zyx"]
    datasets = [
        {"path": name, "coordinateTransformations": [{"type": "scale", "scale": [s, s, s]}]}
        for name, s in (("0", 4), ("1", 8))
    ]
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": axes, "datasets": datasets}]}
    return folder / "ome.zarr"


def as_shards(folder: Path) -> Path:
    path = folder / "shards.zarr"
    array = zarr.create_array(path, shape=VOXELS.shape, chunks=(8, 8, 8), shards=(16, 16, 16), dtype="u2")
    array[...] = VOXELS
    return path


def by_tensorstore(path: Path, driver: str, **metadata: Any) -> Path:
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{path}/"}, **metadata}
    ts.open(spec, create=True).result()[...] = VOXELS.T if driver == "n5" else VOXELS.T[..., None]
    return path


def as_n5(folder: Path) -> Path:
    metadata = {
        "dimensions": [60, 50, 40],
        "blockSize": [16, 16, 16],
        "dataType": "uint16",
        "compression": {"type": "gzip"},
    }
    path = by_tensorstore(folder / "v.n5/raw/s0", "n5", metadata=metadata)
    for group in (path.parent, path.parent.parent):
        (group / "attributes.json").write_text("{}")
    return folder / "v.n5"


def as_precomputed(folder: Path) -> Path:
    return by_tensorstore(
        folder / "v.precomputed",
        "neuroglancer_precomputed",
        multiscale_metadata={"data_type": "uint16", "num_channels": 1, "type": "image"},
        scale_metadata={
            "size": [60, 50, 40],
            "chunk_size": [16, 16, 16],
            "encoding": "raw",
            "resolution": [4, 4, 40],
            "voxel_offset": [100, 0, 7],
        },
    )


STORES: list[tuple[Store, str]] = [
    (as_zarr2, ""),
    (as_ome, ""),
    (as_shards, ""),
    (as_n5, "::raw"),
    (as_precomputed, ""),
]
stores = pytest.mark.parametrize(("store", "inside"), STORES, ids=["zarr2", "OME", "sharded", "N5", "precomputed"])


@pytest.fixture(scope="module")
def bucket() -> Iterator[tuple[str, Any]]:
    """Return the address of a server of buckets, and a client; its bucket is `bucket`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        moto = pytest.importorskip("moto.server")
        boto3 = pytest.importorskip("boto3")
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        client = boto3.client(
            "s3",
            endpoint_url=f"http://{host}:{port}",
            aws_access_key_id="a",
            aws_secret_access_key="b",
            region_name="us-east-1",
        )
        client.create_bucket(Bucket="bucket")
        yield f"{host}:{port}", client
        server.stop()


@pytest.fixture(autouse=True)
def _few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "RETRIES", {"max_retries": 4, "initial_delay": "20ms", "max_delay": "100ms"})
    monkeypatch.setattr(object_store, "pause", lambda attempt: None)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "a")


def uploaded(client: Any, folder: Path) -> str:
    for file in folder.rglob("*"):
        if file.is_file():
            key = f"{folder.name}/{file.relative_to(folder)}"
            client.put_object(Bucket="bucket", Key=key, Body=file.read_bytes())
    return f"s3://bucket/{folder.name}"


def whole(volume: Volume) -> npt.NDArray[Any]:
    out = np.full(volume.shape, 77, volume.dtype)
    volume.expect(Box((0, 0, 0), volume.size))
    volume.read(Box((0, 0, 0), volume.size), out)
    return out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every", [0, 20, 7])
@stores
def test_volumes_in_buckets_are_equal_whatever_fails(
    tmp_path: Path, bucket: tuple[str, Any], monkeypatch: pytest.MonkeyPatch, store: Store, inside: str, every: int
) -> None:
    name = uploaded(bucket[1], store(tmp_path))
    proxy = Proxy(bucket[0], every)
    address, end = proxy.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    try:
        with open_volume(name + inside) as volume:
            np.testing.assert_array_equal(whole(volume)[0], VOXELS)
            assert volume.chunks.missing == volume.chunks.damaged == 0
            assert volume.stored() == volume.stored()
            assert volume.files == ()
    finally:
        end()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("every", [0, 20])
@stores
def test_volumes_on_web_servers_are_equal_whatever_fails(tmp_path: Path, store: Store, inside: str, every: int) -> None:
    path = store(tmp_path)
    address, end = Proxy(tmp_path, every).start()
    try:
        with open_volume(f"{address}/{path.name}{inside}") as volume:
            np.testing.assert_array_equal(whole(volume)[0], VOXELS)
            assert volume.chunks.missing == 0
    finally:
        end()


@pytest.mark.filterwarnings("ignore")
def test_missing_chunks_in_a_bucket_are_filled_or_refused(
    tmp_path: Path, bucket: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = uploaded(bucket[1], as_zarr2(tmp_path))
    bucket[1].delete_object(Bucket="bucket", Key="two.zarr/1.1.1")
    address, end = Proxy(bucket[0], 11, ("404",)).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    expected = VOXELS.copy()
    expected[16:32, 16:32, 16:32] = 9
    try:
        with open_volume(name) as volume:
            np.testing.assert_array_equal(whole(volume)[0], expected)
            assert volume.chunks == Chunks(1, 48)
        with pytest.raises(VolumeError, match=r"s3://bucket/two\.zarr/1\.1\.1 is missing; write it, or leave out"):
            whole(open_volume(name, missing_voxels=MissingVoxels(chunks="error")))
        bucket[1].put_object(Bucket="bucket", Key="two.zarr/1.1.1", Body=b"rubbish that is no chunk")
        with pytest.raises(VolumeError, match=r"chunk \(1, 1, 1\) in s3://bucket/two\.zarr/1\.1\.1 is damaged: "):
            whole(open_volume(name))
        with open_volume(name, missing_voxels=MissingVoxels(fill=9)) as volume:
            np.testing.assert_array_equal(whole(volume)[0], expected)
            assert volume.chunks == Chunks(0, 48, damaged=1)
    finally:
        end()


@pytest.mark.filterwarnings("ignore")
def test_places_without_a_volume_are_one_sentence(
    tmp_path: Path, bucket: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{bucket[0]}")
    uploaded(bucket[1], as_ome(tmp_path))
    for name, said in (
        (
            "s3://bucket/none.zarr",
            r"none\.zarr is not Zarr: it holds no zarr\.json, \.zarray or \.zgroup; check the path",
        ),
        ("s3://nobody/v.zarr", "there is no such bucket; check its name, and the server in AWS_ENDPOINT_URL"),
        (
            "s3://bucket/none",
            r"is no volume: none of zarr\.json, \.zarray, \.zgroup, attributes\.json, info lies there",
        ),
        ("s3://bucket/ome.zarr::nope", "has no dataset 'nope', and the names that it has cannot be listed there; give"),
        ("s3://bucket/none.n5", r"is not N5: it holds no attributes\.json; check the path"),
        ("precomputed://s3://bucket/v", "is not precomputed: it holds no file info; check the path"),
        ("s3://bucket/v.h5", "is HDF5, and only Zarr, N5, precomputed can be read from buckets and web servers"),
        ("http://127.0.0.1:9/v.zarr", "its server does not answer; check its address, and the network of this machine"),
        ("http://nobody.invalid/v.zarr", "its host is not found; check the name, and the network of this machine"),
    ):
        with pytest.raises(VolumeError, match=said):
            open_volume(name)
    with open_volume("s3://bucket/ome.zarr", scale=1) as volume:
        assert volume.size == (20, 25, 30)
    with pytest.raises(VolumeError, match="holds 2 resolutions, from 0 to 1, and no 2; give another `scale`"):
        open_volume("s3://bucket/ome.zarr", scale=2)


@pytest.mark.filterwarnings("ignore")
def test_denied_access_names_the_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Denying(Proxy):
        def answer(self, path: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
            return 403, {"Content-Type": "application/xml"}, b"<Error><Code>AccessDenied</Code></Error>"

    address, end = Denying(tmp_path).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    try:
        for name in ("s3://bucket/v.zarr", f"{address}/v.zarr"):
            with pytest.raises(VolumeError, match="access is denied; give credentials that may read it"):
                open_volume(name)
    finally:
        end()


@pytest.mark.filterwarnings("ignore")
def test_format_is_that_of_the_files_below_a_url(tmp_path: Path) -> None:
    address, end = Proxy(tmp_path).start()
    try:
        for store, _ in STORES:
            path = store(tmp_path)
            plain = path.rename(tmp_path / path.stem)
            assert format_of(Location.of(f"{address}/{plain.name}")).name == format_of(Location(str(path))).name
            plain.rename(path)
    finally:
        end()
