"""Google Cloud Storage in memory: those calls of its JSON interface that clients need for chunks.

gcp-storage-emulator of PyPI ignores `ifGenerationMatch`, so that it cannot show what conditional writes do.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.http_servers import QuietHandler, Server, wanted_range

PAGE = 1000  # names in an answer to a list, as with Google


@dataclass(frozen=True)
class StoredObject:
    """One object of a bucket, and the number of its version."""

    value: bytes
    generation: int

    def headers(self) -> dict[str, str]:
        """Return the headers that come with the value."""
        digest = base64.b64encode(hashlib.md5(self.value).digest()).decode()
        return {
            "Content-Type": "application/octet-stream",
            "x-goog-generation": str(self.generation),
            "x-goog-metageneration": "1",
            "x-goog-stored-content-length": str(len(self.value)),
            "x-goog-hash": f"md5={digest}",
            "ETag": f'"{self.generation}"',
        }


@dataclass
class Bucket:
    """Objects by name; each change gets a number of its own."""

    objects: dict[str, StoredObject] = field(default_factory=dict)
    last_generation: int = 1000

    def put(self, name: str, value: bytes) -> StoredObject:
        self.last_generation += 1
        self.objects[name] = StoredObject(value, self.last_generation)
        return self.objects[name]


class GcsServer(Server):
    """The server and its buckets."""

    def __init__(self) -> None:
        super().__init__(GcsHandler)
        self.buckets: dict[str, Bucket] = {}
        self.lock = threading.Lock()


def description(bucket: str, name: str, stored: StoredObject) -> dict[str, str]:
    """Return what the interface says of an object; numbers are texts there."""
    return {
        "kind": "storage#object",
        "bucket": bucket,
        "name": name,
        "size": str(len(stored.value)),
        "generation": str(stored.generation),
        "metageneration": "1",
        "md5Hash": base64.b64encode(hashlib.md5(stored.value).digest()).decode(),
        "timeCreated": "2024-01-01T00:00:00.000Z",
        "updated": "2024-01-01T00:00:00.000Z",
    }


class GcsHandler(QuietHandler):
    """One request."""

    server: GcsServer

    def do_GET(self) -> None:
        with self.server.lock:
            self._answer()

    do_POST = do_DELETE = do_GET

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        sent = self.body()
        words = parts.path.removeprefix("/upload").split("/")  # '', storage, v1, b, BUCKET, o, NAME
        if words[1:4] != ["storage", "v1", "b"] or len(words) < 6:
            return self._error(400, "Unknown call")
        name_of_bucket = unquote(words[4])
        bucket = self.server.buckets.get(name_of_bucket)
        if bucket is None:
            return self._error(404, "The specified bucket does not exist.")
        if self.command == "POST":
            return self._upload(name_of_bucket, bucket, query, sent)
        if len(words) < 7:
            return self._list(name_of_bucket, bucket, query)
        return self._of_one(name_of_bucket, bucket, unquote(words[6]), query)

    def _error(self, status: int, message: str) -> None:
        self._json(status, {"error": {"code": status, "message": message}})

    def _json(self, status: int, content: dict[str, Any]) -> None:
        self.reply(status, json.dumps(content).encode(), {"Content-Type": "application/json; charset=UTF-8"})

    def _refused(self, bucket: Bucket, name: str, query: dict[str, str]) -> int | None:
        """Return the status for a condition that does not hold."""
        stored = bucket.objects.get(name)
        now = stored.generation if stored else 0
        if "ifGenerationMatch" in query and int(query["ifGenerationMatch"]) != now:
            return 412
        if "ifGenerationNotMatch" in query and int(query["ifGenerationNotMatch"]) == now:
            return 304 if self.command == "GET" else 412
        return None

    def _upload(self, name_of_bucket: str, bucket: Bucket, query: dict[str, str], sent: bytes) -> None:
        name = query["name"]
        refused = self._refused(bucket, name, query)
        if refused:
            return self._error(refused, "At least one of the pre-conditions you specified did not hold.")
        return self._json(200, description(name_of_bucket, name, bucket.put(name, sent)))

    def _list(self, name_of_bucket: str, bucket: Bucket, query: dict[str, str]) -> None:
        begin = max(query.get("startOffset", ""), query.get("pageToken", ""))
        end = query.get("endOffset", "")
        prefix = query.get("prefix", "")
        names = sorted(n for n in bucket.objects if n >= begin and (not end or n < end) and n.startswith(prefix))
        size = int(query.get("maxResults", PAGE))
        answer: dict[str, Any] = {
            "kind": "storage#objects",
            "items": [description(name_of_bucket, name, bucket.objects[name]) for name in names[:size]],
        }
        if len(names) > size:
            answer["nextPageToken"] = names[size]
        self._json(200, answer)

    def _of_one(self, name_of_bucket: str, bucket: Bucket, name: str, query: dict[str, str]) -> None:
        refused = self._refused(bucket, name, query)
        if refused:
            return self._error(refused, "At least one of the pre-conditions you specified did not hold.")
        stored = bucket.objects.get(name)
        if stored is None:
            return self._error(404, f"No such object: {name_of_bucket}/{name}")
        if self.command == "DELETE":
            del bucket.objects[name]
            return self.reply(204)
        if query.get("alt") != "media":
            return self._json(200, description(name_of_bucket, name, stored))
        size = len(stored.value)
        try:
            span = wanted_range(self.headers.get("Range"), size)
        except ValueError:
            return self.reply(416, headers={"Content-Range": f"bytes */{size}"})
        if span is None:
            return self.reply(200, stored.value, stored.headers())
        part = {"Content-Range": f"bytes {span[0]}-{span[1] - 1}/{size}"}
        return self.reply(206, stored.value[slice(*span)], stored.headers() | part)
