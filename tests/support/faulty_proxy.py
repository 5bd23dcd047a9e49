"""A proxy in front of an object store that spoils some requests, by a fixed rule, and counts all of them."""

from __future__ import annotations

import http.client
import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.http_servers import DISCONNECTED, QuietHandler, Server, served

Fault = Literal["missing", "busy", "reset", "truncated", "shortened", "lost", "denied"]
Vanished = Literal["closed", "no bucket", "denied"]

IN_TURN: tuple[Fault, ...] = ("missing", "busy", "reset", "truncated")
"""404, 503, connection reset before the store sees the request, and an answer that ends in the middle.

The others are for those who ask. "denied": 403. "lost": the store does what was asked for, and the connection is reset
before that is said. "shortened": half of the body, whose length is said to be that half's.
"""

METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE")
HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "expect"})
XML = {"Content-Type": "application/xml"}


def xml_error(code: str, message: str) -> bytes:
    """Return the body that S3 sends along with an error."""
    return (
        f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    )


SPOILED: dict[str, tuple[int, bytes]] = {
    "missing": (404, xml_error("NoSuchKey", "The specified key does not exist.")),
    "busy": (503, xml_error("SlowDown", "Please reduce your request rate.")),
    "denied": (403, xml_error("AccessDenied", "Access Denied")),
    "no bucket": (404, xml_error("NoSuchBucket", "The specified bucket does not exist")),
}


@dataclass(frozen=True)
class Seen:
    """One request: its answer's status, None where the connection ended, and the fault it met."""

    method: str
    path: str
    headers: dict[str, str]
    status: int | None
    fault: str | None


def name_of_object(path: str) -> str:
    """Return bucket and key, whether a path is of S3 (`/BUCKET/KEY`) or of Google's uploads and downloads."""
    parts = urlsplit(path)
    google = re.fullmatch(r"(?:/upload)?/storage/v1/b/([^/]+)/o(?:/(.*))?", parts.path)
    if google:
        name = google[2] or parse_qs(parts.query).get("name", [""])[0]
        return f"{unquote(google[1])}/{unquote(name) if google[2] else name}"
    return unquote(parts.path).lstrip("/")


class FaultyProxy(Server):
    """The proxy: its rule, which may be changed at any time, and what it saw."""

    def __init__(
        self,
        store: str,
        every: int = 20,
        faults: Sequence[Fault] = (),
        only: str = "",
        methods: Sequence[str] = METHODS,
    ) -> None:
        """Stand before the store at the address `store`.

        Parameters
        ----------
        every : int, optional
            Each so-manieth request meets a fault; 0 for none.
        faults : sequence of str, optional
            Kinds of faults, taken in turn; `IN_TURN` if there are none.
        only : str, optional
            A regular expression: requests whose path it does not find are passed on, and are not counted by `every`.
        methods : sequence of str, optional
            Requests of other methods are passed on, and are not counted by `every`.
        """
        super().__init__(ProxyHandler)
        self.store = urlsplit(store)
        self.every = every
        self.faults = tuple(faults) or IN_TURN
        self.only = only
        self.methods = tuple(methods)
        self.vanished: Vanished | None = None
        self.seen: list[Seen] = []
        self._counted = 0
        self._spoiled = 0
        self._guard = threading.Lock()

    @property
    def requests(self) -> int:
        """Return how many requests came."""
        return len(self.seen)

    @property
    def faults_met(self) -> Counter[str]:
        """Return how many requests met which fault; `vanished` where the store was gone."""
        return Counter(one.fault for one in list(self.seen) if one.fault)

    @property
    def spoiled_uploads(self) -> Counter[str]:
        """Return how many uploads of each object, by its bucket and key, met a fault."""
        return Counter(
            name_of_object(one.path) for one in list(self.seen) if one.fault and one.method in ("PUT", "POST")
        )

    @property
    def uploads(self) -> Counter[str]:
        """Return how often the store took each object, by its bucket and key.

        An upload whose answer was spoiled on the way back counts too: the store has it.
        """
        return Counter(
            name_of_object(one.path)
            for one in list(self.seen)
            if one.method in ("PUT", "POST") and one.status is not None and one.status < 300
        )

    def vanish(self, how: Vanished = "closed") -> None:
        """Refuse all that comes from now on, until `come_back`."""
        self.vanished = how
        if how == "closed":
            self.drop_connections()

    def come_back(self) -> None:
        """Pass requests on again."""
        self.vanished = None

    def spoil(self, *faults: Fault, every: int = 1, only: str = "", methods: Sequence[str] = METHODS) -> None:
        """Begin a new rule: its first fault meets the next request that it covers, and then each `every`th."""
        with self._guard:
            self.every, self.faults, self.only, self.methods = every, faults or IN_TURN, only, tuple(methods)
            self._counted, self._spoiled = every - 1, 0

    def next_fault(self, method: str, path: str) -> Fault | None:
        """Return what is to happen to a request."""
        if not self.every or method not in self.methods or not re.search(self.only, path):
            return None
        with self._guard:
            self._counted += 1
            if self._counted % self.every:
                return None
            self._spoiled += 1
            return self.faults[(self._spoiled - 1) % len(self.faults)]


class ProxyHandler(QuietHandler):
    """One request, passed on or spoiled."""

    server: FaultyProxy

    def do_GET(self) -> None:
        proxy = self.server
        sent = self.body()
        if proxy.vanished:
            self._vanished(proxy.vanished)
            return
        fault = proxy.next_fault(self.command, self.path)
        if fault in SPOILED:
            self._saw(SPOILED[fault][0], fault)
            self._reply_with_error(fault)
        elif fault == "reset":
            self._saw(None, fault)
            self.reset_when_closed()
        else:
            status, headers, body = self._passed_on(sent)
            self._saw(status, fault)
            if fault == "lost":
                self.reset_when_closed()
            else:
                if fault == "shortened":
                    body = body[: len(body) // 2]
                self._reply_as_the_store(status, headers, body, cut=fault == "truncated")

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _saw(self, status: int | None, fault: str | None) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.seen.append(Seen(self.command, self.path, headers, status, fault))

    def _vanished(self, how: Vanished) -> None:
        if how == "closed":
            self._saw(None, "vanished")
            self.reset_when_closed()
            return
        self._saw(SPOILED[how][0], "vanished")
        self._reply_with_error(how)

    def _reply_with_error(self, kind: str) -> None:
        status, body = SPOILED[kind]
        self.reply(status, body, XML)

    def _passed_on(self, sent: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """Return status, headers and body of the store's answer; it sees the client's own header Host."""
        host, port = self.server.store.hostname, self.server.store.port
        assert host
        connection = http.client.HTTPConnection(host, port, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in HOP_BY_HOP:
                    connection.putheader(name, value)
            connection.endheaders(sent or None)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _reply_as_the_store(self, status: int, headers: list[tuple[str, str]], body: bytes, cut: bool) -> None:
        """Send the store's answer: the first half of its body if `cut`, of its headers where it has no body."""
        lines = [f"HTTP/1.1 {status} {http.client.responses.get(status, '')}"]
        lines += [f"{name}: {value}" for name, value in headers if name.lower() not in HOP_BY_HOP | {"content-length"}]
        lengths = [value for name, value in headers if name.lower() == "content-length"]
        if self.command != "HEAD" and status not in (204, 304):
            lengths = [str(len(body))]
        lines += [f"Content-Length: {length}" for length in lengths]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        if cut:
            self.close_connection = True
            self.wfile.write(head + body[: len(body) // 2] if body else head[: len(head) // 2])
        else:
            self.wfile.write(head + body)

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except DISCONNECTED:
            self.close_connection = True


@contextmanager
def faulty_proxy(
    store: str, every: int = 20, faults: Sequence[Fault] = (), only: str = "", methods: Sequence[str] = METHODS
) -> Iterator[FaultyProxy]:
    """Start a `FaultyProxy` in front of a store's address, and stop it."""
    proxy = FaultyProxy(store, every, faults, only, methods)
    with served(proxy):
        yield proxy
