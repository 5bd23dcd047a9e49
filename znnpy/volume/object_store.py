"""Files in buckets and on web servers, by tensorstore. Needs the extra `io`.

S3: the server is that of AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, else Amazon's; the region that of AWS_REGION or
AWS_DEFAULT_REGION. The credentials are those of the environment, else of a profile in ~/.aws, else of the machine at
Amazon; without any, requests are anonymous. Google Cloud: as its own tools have it (GOOGLE_APPLICATION_CREDENTIALS, or
`gcloud auth application-default login`), else anonymous.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from znnpy.errors import MissingExtraError, VolumeError
from znnpy.extras import install
from znnpy.messages import excerpt
from znnpy.volume.location import Location
from znnpy.volume.stored_files import LocalFiles, StoredFiles

LOW_SPEED = {"TIME_SECONDS": "15", "LIMIT_BYTES": "1"}  # a server that sends nothing for so long is not waited for
for _name, _value in LOW_SPEED.items():
    os.environ.setdefault(f"TENSORSTORE_CURL_LOW_SPEED_{_name}", _value)  # read when tensorstore is first used

try:
    import tensorstore
except ImportError:
    raise MissingExtraError(
        "Zarr, N5 and precomputed volumes, and volumes in buckets, need the package tensorstore, which is not "
        f"installed; `{install('io')}`"
    ) from None

ts = tensorstore  # other modules import it from here, where its absence is explained
RETRIES = {"max_retries": 8, "initial_delay": "100ms", "max_delay": "4s"}  # at most 20 s in all
ATTEMPTS = 4  # for requests that fail in spite of these, or whose answer is that the file is not there
SECONDS = 120  # for one request with its retries
MOST_THREADS = 16  # that unpack and copy at the same time
REQUESTS = 32  # at the same time
AMAZON = Path("/sys/devices/virtual/dmi/id/board_vendor")  # says so on machines of Amazon
AMAZON_VARIABLES = ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_ROLE_ARN")
REFUSED = re.compile(r"code\W{1,2}40[13]\b|PERMISSION_DENIED|UNAUTHENTICATED|AccessDenied|Forbidden|InvalidAccessKeyId")
MISSING = re.compile(r"code\W{1,2}404\b|NOT_FOUND")
NO_BUCKET = re.compile(r"NoSuchBucket|bucket does not exist")
NO_CREDENTIALS = re.compile(
    r"Failed to (get|create) credentials|INVALID_ENVIRONMENT|No credentials|credentials.*not found", re.I
)
NEVER = re.compile(f"{NO_BUCKET.pattern}|resolve host|Could not connect|{NO_CREDENTIALS.pattern}")
TOO_LATE = re.compile(r"DEADLINE_EXCEEDED|timed out|Timeout", re.IGNORECASE)


def threads() -> int:
    """Return the number of threads that unpack at the same time."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def context() -> ts.Context:
    """Return the limits of all that tensorstore does for a volume: no cache, few threads, few retries."""
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},
            "data_copy_concurrency": {"limit": threads()},
            "file_io_concurrency": {"limit": threads()},
            "s3_request_concurrency": {"limit": REQUESTS},
            "gcs_request_concurrency": {"limit": REQUESTS},
            "http_request_concurrency": {"limit": REQUESTS},
            "s3_request_retries": RETRIES,
            "gcs_request_retries": RETRIES,
            "http_request_retries": RETRIES,
        }
    )


def kvstore_spec(place: Location) -> dict[str, Any]:
    """Return the specification of the files below a place; their keys follow its slash."""
    if place.is_local:
        return {"driver": "file", "path": f"{os.path.abspath(place.place).rstrip('/')}/"}
    path = f"{place.key}/".lstrip("/")
    if place.scheme == "gs":
        return {"driver": "gcs", "bucket": place.bucket, "path": path}
    if place.scheme == "s3":
        found = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        spec: dict[str, Any] = {"driver": "s3", "bucket": place.bucket, "path": path, "aws_credentials": _credentials()}
        if found:
            spec["endpoint"] = found.rstrip("/")
        if found or region:
            spec["aws_region"] = region or "us-east-1"  # servers of others ignore it
        return spec
    parts = urlsplit(place.place)
    return {"driver": "http", "base_url": f"{parts.scheme}://{parts.netloc}", "path": f"{parts.path}/"}


def _credentials() -> dict[str, str]:
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return {"type": "environment"}
    names = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
    files = [Path(os.environ.get(name) or usual).expanduser() for name, usual in names.items()]
    if os.environ.get("AWS_PROFILE") or any(file.is_file() for file in files):
        return {"type": "profile"}
    try:
        is_amazon = AMAZON.read_text().startswith("Amazon")
    except OSError:
        is_amazon = False
    is_given = is_amazon or any(os.environ.get(name) for name in AMAZON_VARIABLES)
    return {"type": "default" if is_given else "anonymous"}


class ObjectFiles(StoredFiles):
    """The files in a bucket or on a web server."""

    def __init__(self, place: Location, limits: ts.Context) -> None:
        super().__init__(place)
        self._known: str | None = None  # key of a file that was read, so that it is there
        try:
            self._store = ts.KvStore.open(kvstore_spec(place), context=limits).result(timeout=SECONDS)
        except (ValueError, TimeoutError) as error:
            raise remote_error(place, error) from None

    def read(self, key: str, most: int) -> bytes | None:
        for attempt in range(ATTEMPTS):
            found = self.heads([key], most)[0]
            self._known = self._known if found is None else key
            if found is not None or self.holds(key) is False or attempt == ATTEMPTS - 1:
                return found
        return None

    def heads(self, keys: Sequence[str], most: int) -> list[bytes | None]:
        """Return the first `most` bytes of files, asked for at the same time; None for those said not to be there."""
        asked = [self._store.read(key, byte_range=slice(0, most)) for key in keys]
        return [self._answer(key, one, most) for key, one in zip(keys, asked, strict=True)]

    def _answer(self, key: str, asked: ts.Future[Any], most: int) -> bytes | None:
        """Wait for the answer to a request; ask again where the network or the server failed."""
        for attempt in range(ATTEMPTS):
            try:
                answer = asked.result(timeout=SECONDS)
            except (ValueError, TimeoutError) as error:
                if "OUT_OF_RANGE" in str(error):  # it is shorter
                    asked = self._store.read(key)
                    continue
                if attempt == ATTEMPTS - 1 or not is_transient(error):
                    raise remote_error(self.named(key), error) from None
                pause(attempt)
                asked = self._store.read(key, byte_range=slice(0, most))
            else:
                return answer.value if answer.state == "value" else None
        return None

    def folders(self, key: str) -> Sequence[str]:
        del key
        return ()

    def holds(self, key: str) -> bool | None:
        """Return whether a bucket lists this file; None for web servers, which list nothing.

        A request for the file itself may be answered that it is not there although it is; a list that is not
        answered is an error. Of Google's, a bucket that is gone or may not be listed lists nothing at all, so there a
        list that lacks a file which was read says nothing.
        """
        if self.place.scheme in ("http", "https"):
            return None
        if self._lists(key):
            return True
        return None if self.place.scheme == "gs" and self._known is not None and not self._lists(self._known) else False

    def check_there(self, key: str) -> None:
        """Raise VolumeError if a file of metadata, which was read before, is not there any more."""
        if self.read(key, 1) is None:
            raise VolumeError(
                f"{self.place} is gone: {self.named(key)} was read before, and is not there now; run it again when it "
                "is back"
            )

    def _lists(self, key: str) -> bool:
        for attempt in range(ATTEMPTS):
            try:
                return bool(self._store.list(ts.KvStore.KeyRange(key, f"{key}\0")).result(timeout=SECONDS))
            except (ValueError, TimeoutError) as error:
                is_passing = is_transient(error) or ("NOT_FOUND" in str(error) and not NEVER.search(str(error)))
                if attempt == ATTEMPTS - 1 or not is_passing:
                    raise remote_error(self.named(key), error) from None
                pause(attempt)
        raise AssertionError("the last attempt returns or raises")


def is_transient(error: Exception) -> bool:
    """Return whether the same request may succeed later."""
    said = str(error)
    never = REFUSED.search(said) or NEVER.search(said) or isinstance(error, TimeoutError) or TOO_LATE.search(said)
    return not never and not said.startswith("NOT_FOUND")


def pause(attempt: int) -> None:
    """Wait before a request is repeated, longer each time."""
    time.sleep(0.2 * 2**attempt)


def files_of(place: Location, limits: ts.Context) -> StoredFiles:
    """Return the files below a place."""
    return LocalFiles(place) if place.is_local else ObjectFiles(place, limits)


def remote_error(what: object, error: Exception) -> VolumeError:
    """Return an error of a bucket or web server in one sentence."""
    said = str(error)
    if NO_CREDENTIALS.search(said):
        why = "its credentials are not complete; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    elif re.search(r"Invalid \w+ bucket name", said):
        why = "no bucket can have this name; check the name"
    elif NO_BUCKET.search(said):
        why = "there is no such bucket; check its name, and the server in AWS_ENDPOINT_URL"
    elif REFUSED.search(said):
        why = (
            "access is denied; give credentials that may read it (s3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
            "AWS_PROFILE; gs: GOOGLE_APPLICATION_CREDENTIALS)"
        )
    elif "resolve host" in said:
        why = "its host is not found; check the name, and the network of this machine"
    elif "Could not connect" in said:
        why = "its server does not answer; check its address, and the network of this machine"
    elif isinstance(error, TimeoutError) or TOO_LATE.search(said):
        why = f"no answer came within {SECONDS} s; run it again when the network is faster"
    elif MISSING.search(said):
        why = "it is not there; check the name"
    else:
        why = f"{excerpt(said)}; run it again"
    return VolumeError(f"{what} cannot be read: {why}")
