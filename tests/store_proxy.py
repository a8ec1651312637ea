"""A proxy in front of an S3 server: latency, one cap on bandwidth for everybody, faults by script, and exact counts.

It forwards bytes and reads only the first line of each request, so signatures stay valid. Requests of a connection come
one after the other (no client here pipelines).
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_CHUNK = 256 << 10
_METHODS = (b"GET ", b"PUT ", b"HEAD ", b"POST ", b"DELETE ")


@dataclass(frozen=True, slots=True)
class Request:
    """One request: its number from 0 over all connections, and when it came in (seconds on the monotonic clock)."""

    method: str
    path: str
    number: int
    at_mono_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """What happens to a request. status: answered by the proxy, with the S3 error `code`; delay_s: before anything
    else; cut_after: bytes of the answer (headers too) after which the connection is closed."""

    status: int | None = None
    code: str = "SlowDown"
    delay_s: float = 0.0
    cut_after: int | None = None


Faults = Callable[[Request], Strike | None]


class StoreProxy:
    """Threads of this process between clients and `upstream_port` on this host. Context manager.

    bytes_per_s: of all answers together, bodies and headers. `fetched_bytes` and `requests` count what was sent to
    clients, and asked for.
    """

    def __init__(
        self,
        upstream_port: int,
        *,
        latency_s: float = 0.0,
        bytes_per_s: float | None = None,
        faults: Faults | None = None,
    ) -> None:
        self._upstream_port = upstream_port
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self.faults = faults
        self.sent_bytes_per_s: float | None = None  # of what each connection sends up; may be set at any time
        self.fetched_bytes = 0
        self.requests: list[Request] = []
        self._mutex = threading.Lock()
        self._free_at_mono_s = 0.0
        self._closed = False
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def options(self, server: Any) -> dict[str, Any]:
        """`server.storage_options`, through this proxy."""
        return {**server.storage_options, "endpoint_url": self.endpoint_url}

    def times_fetched(self, suffix: str, since: int = 0) -> Counter[str]:
        """How often each object of that ending was asked for, by its name, from request number `since` on."""
        paths = [request.path.split("?")[0] for request in self.requests[since:] if request.method == "GET"]
        return Counter(path.rpartition("/")[2] for path in paths if path.endswith(suffix))

    def __enter__(self) -> StoreProxy:
        threading.Thread(target=self._accept, name="store-proxy", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._listener.close()
        with self._mutex:
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            upstream = socket.create_connection(("127.0.0.1", self._upstream_port))
            with upstream:
                for sock in (client, upstream):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._mutex:
                    self._sockets |= {client, upstream}
                try:
                    self._forward(client, upstream)
                finally:
                    with self._mutex:
                        self._sockets -= {client, upstream}

    def _forward(self, client: socket.socket, upstream: socket.socket) -> None:
        buffer = memoryview(bytearray(_CHUNK))
        left: int | None = None  # bytes of the present answer before it is cut
        while True:
            ready, _, _ = select.select([client, upstream], [], [])
            if client in ready:
                limit = self.sent_bytes_per_s
                got = client.recv_into(buffer, 0 if limit is None else max(1, int(limit / 5)))
                if not got:
                    return
                if limit is not None:
                    time.sleep(got / limit)
                data = buffer[:got]
                if bytes(data[:8]).startswith(_METHODS):
                    strike = self._strike(bytes(data[:4096]))
                    left = None if strike is None else strike.cut_after
                    if strike is not None and strike.status is not None:
                        client.sendall(_answer(strike.status, strike.code))
                        return
                upstream.sendall(data)
            if upstream in ready:
                got = upstream.recv_into(buffer)
                if not got:
                    return
                sent = got if left is None else min(got, left)
                self._throttle(sent)
                client.sendall(buffer[:sent])
                if left is not None:
                    left -= sent
                    if left <= 0:
                        return

    def _strike(self, head: bytes) -> Strike | None:
        method, path, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
        with self._mutex:
            request = Request(method, path, len(self.requests), time.monotonic())
            self.requests.append(request)
        strike = None if self.faults is None else self.faults(request)
        pause_s = self._latency_s + (0.0 if strike is None else strike.delay_s)
        if pause_s:
            time.sleep(pause_s)
        return strike

    def _throttle(self, size: int) -> None:
        with self._mutex:
            self.fetched_bytes += size
            if self._bytes_per_s is None:
                return
            begin = max(time.monotonic(), self._free_at_mono_s)
            self._free_at_mono_s = begin + size / self._bytes_per_s
        pause_s = begin - time.monotonic()
        if pause_s > 0:
            time.sleep(pause_s)


class ProxyProcess:
    """A `StoreProxy` in a process of its own, so that its work is not counted as a client's. Context manager."""

    def __init__(self, upstream_port: int, *, latency_s: float, bytes_per_s: float) -> None:
        self._pipe, child = mp.get_context("spawn").Pipe()
        self._process = mp.get_context("spawn").Process(
            target=_proxy_process, args=(child, upstream_port, latency_s, bytes_per_s), daemon=True
        )
        self.port = 0

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def counts(self) -> tuple[int, int]:
        """(bytes sent to clients, requests) so far."""
        self._pipe.send("counts")
        return self._pipe.recv()

    def __enter__(self) -> ProxyProcess:
        self._process.start()
        self.port = self._pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join(10)


def _proxy_process(pipe: Any, upstream_port: int, latency_s: float, bytes_per_s: float) -> None:
    with StoreProxy(upstream_port, latency_s=latency_s, bytes_per_s=bytes_per_s) as proxy:
        pipe.send(proxy.port)
        with contextlib.suppress(EOFError):
            while pipe.recv():
                pipe.send((proxy.fetched_bytes, len(proxy.requests)))


def _answer(status: int, code: str) -> bytes:
    body = f"<Error><Code>{code}</Code><Message>Said by the test.</Message></Error>".encode()
    head = f"HTTP/1.1 {status} Said\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body
