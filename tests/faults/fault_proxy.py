"""Stands between everybody and one real SGLang server, and does to a chosen call what a network or a server may do."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

UPDATE = "/update_weights_from_distributed"
HELD_S = 600.0
"""A call without an answer is held so long: beyond every deadline."""


@dataclass(frozen=True)
class EngineFault:
    """What happens, once, to the `call`-th call (from 0) of an endpoint from now on."""

    endpoint: str
    before: str = ""
    """Before the server sees the call: `` nothing, or the name of a process fault (see `FaultyEngine`)."""
    forward: bool = True
    """Whether the server ever sees it."""
    after: str = ""
    """After the server has answered: as `before`."""
    answer: str = "true"
    """What the caller gets: `true` the server's, `lie` success, `500`, `close` nothing but the end of the connection,
    `silence` nothing at all, `altered` the server's checksums with one digest changed.
    """
    call: int = 0
    delay_s: float = 0.0
    """Before all that."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class FaultProxy:
    """Listens on a port of its own; forwards every call, but the one that a fault is armed for."""

    def __init__(self, target_url: str, act: Callable[[str], None]) -> None:
        """`act`: carries out a process fault by its name."""
        self._target_url = target_url
        self._act = act
        self._http = httpx.Client(trust_env=False, limits=httpx.Limits(max_connections=None), timeout=HELD_S)
        self._lock = threading.Lock()
        self._fault: EngineFault | None = None
        self._num_calls = 0
        self._closing = threading.Event()
        self._server = _Server(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, name="fault proxy", daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def arm(self, fault: EngineFault | None) -> None:
        with self._lock:
            self._fault, self._num_calls = fault, 0

    @property
    def is_armed(self) -> bool:
        """Whether a fault still waits for its call."""
        return self._fault is not None

    def close(self) -> None:
        """Calls that are held end."""
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()

    def _take(self, endpoint: str) -> EngineFault | None:
        """The fault, when this is its call."""
        with self._lock:
            if self._fault is None or self._fault.endpoint != endpoint:
                return None
            self._num_calls += 1
            if self._num_calls <= self._fault.call:
                return None
            fault, self._fault = self._fault, None
            return fault

    def answer(self, request: "_Request") -> httpx.Response | None:
        """What the caller gets; None: its connection ends.

        Raises:
            httpx.HTTPError: the server did not answer; the caller's connection ends, too.
        """
        fault = self._take(request.path)
        if fault is None:
            return self._forward(request)
        time.sleep(fault.delay_s)
        if fault.before:
            self._act(fault.before)
        truth = self._forward(request) if fault.forward else None
        if fault.after:
            self._act(fault.after)
        return self._told(fault, truth)

    def _told(self, fault: EngineFault, truth: httpx.Response | None) -> httpx.Response | None:
        match fault.answer:
            case "true":
                return truth
            case "lie":
                return httpx.Response(200, json={"success": True, "message": "done"})
            case "500":
                return httpx.Response(500, json={"message": "injected failure"})
            case "close":
                return None
            case "silence":
                self._closing.wait(HELD_S)
                return None
            case "altered":
                return _altered(truth)
        raise ValueError(f"answer: got {fault.answer!r}; allowed: true, lie, 500, close, silence, altered")

    def _forward(self, request: "_Request") -> httpx.Response:
        url = self._target_url + request.target
        return self._http.request(request.method, url, content=request.body, headers=request.headers)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._pass()

            do_POST = do_GET  # noqa: N815 as above

            def _pass(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                try:
                    response = proxy.answer(_Request(self.command, self.path, body, _end_to_end(self.headers)))
                except httpx.HTTPError:
                    response = None
                if response is None:
                    self.close_connection = True
                    return
                self.send_response(response.status_code)
                self.send_header("content-type", response.headers.get("content-type", "text/plain"))
                self.send_header("content-length", str(len(response.content)))
                self.end_headers()
                self.wfile.write(response.content)

            def log_message(self, *_: object) -> None:
                """Nothing: the server logs its calls itself."""

        return Handler


@dataclass(frozen=True)
class _Request:
    method: str
    target: str
    body: bytes
    headers: Mapping[str, str]

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


def _end_to_end(headers: Any) -> dict[str, str]:
    own = {"host", "connection", "content-length", "accept-encoding", "transfer-encoding"}
    return {name: value for name, value in headers.items() if name.lower() not in own}


def _altered(truth: httpx.Response | None) -> httpx.Response:
    if truth is None:
        raise ValueError("forward: got False; an altered answer needs the server's")
    body = json.loads(truth.content)
    digests = body["ranks"][0]["checksums"]
    digests[next(iter(digests))] = "0" * 64
    return httpx.Response(200, json=body)
