"""HTTP servers in threads of the test run: what stores and proxies of the tests have in common."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOST = "127.0.0.1"
RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: on, for no time
DISCONNECTED = (ConnectionError, TimeoutError, ValueError)  # the last: the handler has closed its side


class Server(ThreadingHTTPServer):
    """A server on a free port that ends connections the way its handlers asked for, and says nothing."""

    daemon_threads = True
    request_queue_size = 128  # clients open many connections at once

    def __init__(self, handler: type[QuietHandler]) -> None:
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__((HOST, 0), handler)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection: with a reset where `reset_when_closed` asked for one."""
        with self._lock:
            self._open.discard(request)
        with suppress(OSError):
            resets = request.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8) == RESET_AT_CLOSE
            if not resets:
                request.shutdown(socket.SHUT_RDWR)
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients close connections whenever they like."""

    def drop_connections(self) -> None:
        """End all connections that are open, also those that wait for a next request."""
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class QuietHandler(BaseHTTPRequestHandler):
    """Requests over connections that stay open."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""

    def body(self) -> bytes:
        """Return what was sent along with the request."""
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def reply(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        """Answer; to HEAD with the length of the body alone."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD" and status not in (204, 304):
            self.wfile.write(body)

    def reset_when_closed(self) -> None:
        """Let the client see a reset instead of an ordinary end once this handler returns."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)
        self.close_connection = True


@contextmanager
def served(server: Server) -> Iterator[Server]:
    """Answer requests in threads until the block ends."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        server.drop_connections()
        thread.join()


def wanted_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Return begin and end of the bytes that a header Range asks of `size` bytes, None for all of them.

    Raises
    ------
    ValueError
        No byte is there of what was asked for.
    """
    if not header or not header.startswith("bytes=") or "," in header:
        return None
    first, _, last = header.removeprefix("bytes=").partition("-")
    if not first:
        begin, end = max(size - int(last), 0), size
    else:
        begin, end = int(first), min(int(last) + 1, size) if last else size
    if begin >= end:
        raise ValueError(header)
    return begin, end
