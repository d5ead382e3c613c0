"""A small HTTP server that answers like an engine, and records how it was asked."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any


class FakeEngineServer:
    """`answers`: path -> (status, body); `/generate` echoes the last prompt token, after `delay_s`."""

    def __init__(self, answers: dict[str, tuple[int, Any]] | None = None, delay_s: float = 0.0) -> None:
        self.answers = answers or {}
        self.delay_s = delay_s
        self.requests: list[tuple[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.num_in_flight = 0
        self.max_in_flight = 0
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _make_handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "FakeEngineServer":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: Any, authorization: str | None) -> tuple[int, Any]:
        with self.lock:
            self.requests.append((path, body))
            self.authorizations.append(authorization)
            self.num_in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        time.sleep(self.delay_s)
        with self.lock:
            self.num_in_flight -= 1
        if path in self.answers:
            return self.answers[path]
        if path == "/generate":
            return 200, echo(body["input_ids"][-1], len(body["input_ids"]))
        return 404, {"detail": "Not Found"}


def echo(token_id: int, num_prompt_tokens: int) -> dict[str, Any]:
    meta = {"output_token_logprobs": [[-1.0, token_id, None]], "finish_reason": {"type": "stop"}, "weight_version": "0"}
    return {"meta_info": {**meta, "prompt_tokens": num_prompt_tokens}}


def _make_handler(fake: FakeEngineServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(*fake.answer(self.path, body, self.headers["Authorization"]))

        def do_GET(self) -> None:
            self._send(*fake.answer(self.path, None, self.headers["Authorization"]))

        def _send(self, status: int, body: Any) -> None:
            text = body if isinstance(body, str) else json.dumps(body)
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if isinstance(body, str) else "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
