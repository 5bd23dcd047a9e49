"""Object stores on this machine: S3, Google Cloud Storage, files over HTTP, and what tensorstore needs to open them.

Each is a context manager that sets the environment while it is open; nothing leaves the machine.
"""

from __future__ import annotations

import hashlib
import logging
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.faulty_proxy import METHODS, Fault, FaultyProxy, faulty_proxy
from tests.support.gcs_emulator import Bucket, GcsServer
from tests.support.http_servers import QuietHandler, Server, served, wanted_range

Kind = Literal["s3", "gcs", "http"]

S3_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
}
S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
GCS_URL = "TENSORSTORE_GCS_HTTP_URL"
GCS_TOKEN = "GOOGLE_AUTH_TOKEN_FOR_TESTING"  # tensorstore sends it as it is, and asks nobody for another

_numbers = count()


@dataclass(frozen=True)
class ObjectStore:
    """A store that answers at `address`, and the bucket (or nothing, over HTTP) that is there."""

    kind: Kind
    address: str
    bucket: str = ""

    def at(self, address: str) -> ObjectStore:
        """Return the same store by another address, that of a proxy; for Google's see `gcs_address`."""
        return replace(self, address=address)

    def kvstore(self, path: str = "") -> dict[str, Any]:
        """Return tensorstore's description of a key, or of a prefix that ends in a slash."""
        if self.kind == "s3":
            return {
                "driver": "s3",
                "bucket": self.bucket,
                "endpoint": self.address,
                "aws_region": "us-east-1",
                "aws_credentials": {"type": "environment"},  # asks no other provider, which would write to stderr
                "path": path,
            }
        if self.kind == "gcs":
            return {"driver": "gcs", "bucket": self.bucket, "path": path}
        return {"driver": "http", "base_url": f"{self.address}/", "path": path}

    def url(self, path: str = "") -> str:
        """Return the address that a user writes."""
        if self.kind == "http":
            return f"{self.address}/{path}"
        return f"{'gs' if self.kind == 'gcs' else 's3'}://{self.bucket}/{path}"


@contextmanager
def _bucket_of_moto(address: str) -> Iterator[ObjectStore]:
    bucket = f"bucket-{next(_numbers)}"
    request = urllib.request.Request(f"{address}/{bucket}", method="PUT")
    urllib.request.urlopen(request, timeout=60).close()
    yield ObjectStore("s3", address, bucket)


@contextmanager
def s3_store() -> Iterator[ObjectStore]:
    """Start moto's S3 with an empty bucket; AWS_ENDPOINT_URL_S3 names it, and credentials are in the environment."""
    from moto.server import ThreadedMotoServer  # takes a quarter of a second

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in S3_ENVIRONMENT.items():
                patch.setenv(name, value)
            patch.delenv("AWS_PROFILE", raising=False)
            address = f"http://{host}:{port}"
            with s3_endpoint(address), _bucket_of_moto(address) as store:
                yield store
    finally:
        server.stop()


@contextmanager
def s3_endpoint(address: str) -> Iterator[None]:
    """Let the environment name an address of S3, that of a proxy for example."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(S3_ENDPOINTS[1], raising=False)
        patch.setenv(S3_ENDPOINTS[0], address)
        yield


@contextmanager
def gcs_store() -> Iterator[ObjectStore]:
    """Start Google Cloud Storage with an empty bucket; the environment names it to tensorstore."""
    server = GcsServer()
    bucket = f"bucket-{next(_numbers)}"
    server.buckets[bucket] = Bucket()
    with served(server), gcs_address(server.url):
        yield ObjectStore("gcs", server.url, bucket)


@contextmanager
def gcs_address(address: str) -> Iterator[None]:
    """Let stores that tensorstore opens from now on be at an address, that of a proxy for example.

    A store that is open already, of the same bucket and context, stays where it is: open with a context of your own.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(GCS_URL, address)
        patch.setenv(GCS_TOKEN, "token")
        yield


class FileHandler(QuietHandler):
    """One request for a file."""

    server: FileServer

    def do_GET(self) -> None:
        path = self.server.folder / unquote(urlsplit(self.path).path).lstrip("/")
        if not path.is_file() or not path.resolve().is_relative_to(self.server.folder.resolve()):
            self.reply(404, b"Not found")
            return
        value = path.read_bytes()
        headers = {
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
            "ETag": f'"{hashlib.md5(value).hexdigest()}"',
        }
        try:
            span = wanted_range(self.headers.get("Range"), len(value))
        except ValueError:
            self.reply(416, headers={"Content-Range": f"bytes */{len(value)}"})
            return
        if span is None:
            self.reply(200, value, headers)
        else:
            headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{len(value)}"
            self.reply(206, value[slice(*span)], headers)

    do_HEAD = do_GET


class FileServer(Server):
    """Files of a folder, whole or in part, to be read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(FileHandler)
        self.folder = folder


@contextmanager
def http_store(folder: Path) -> Iterator[ObjectStore]:
    """Serve the files of a folder, with ranges; nothing can be written or listed."""
    with served(FileServer(folder)) as server:
        yield ObjectStore("http", server.url)


@contextmanager
def behind_proxy(
    store: ObjectStore, every: int = 20, faults: Sequence[Fault] = (), only: str = "", methods: Sequence[str] = METHODS
) -> Iterator[tuple[ObjectStore, FaultyProxy]]:
    """Put a proxy before a store, and return the store as seen through it; the environment names the proxy.

    Parameters are those of `FaultyProxy`; without `faults` its own are taken in turn.
    """
    with ExitStack() as stack:
        proxy = stack.enter_context(faulty_proxy(store.address, every, faults, only, methods))
        if store.kind == "s3":
            stack.enter_context(s3_endpoint(proxy.url))
        if store.kind == "gcs":
            stack.enter_context(gcs_address(proxy.url))
        yield store.at(proxy.url), proxy
