"""A process that speaks as much of an engine's HTTP as the driver needs, without a model.

    python little_engine.py HOST PORT --config KEYS

It wants the keys where SGLang wants them, holds requests while it is paused, and echoes the last prompt token after
10 ms per token of `max_new_tokens`.
"""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ADMIN = {
    "/pause_generation",
    "/continue_generation",
    "/flush_cache",
    "/begin_weight_update",
    "/end_weight_update",
    "/update_weight_version",
}


class Engine:
    def __init__(self, keys: dict[str, str]) -> None:
        self.keys = keys
        self.running = threading.Event()
        self.running.set()
        self.version = "0"
        self.failing = False
        self.num_generated = 0
        self.num_health_checks = 0

    def answer(self, path: str, body: Any, authorization: str | None) -> tuple[int, Any]:
        if path in ("/health", "/health_generate"):
            self.running.wait()
            self.num_health_checks += path == "/health_generate"
            return (503 if self.failing else 200), {}
        key = self.keys["admin-api-key" if path in ADMIN else "api-key"]
        if authorization != f"Bearer {key}":
            return 401, {"error": "Unauthorized"}
        return self.answer_known(path, body)

    def answer_known(self, path: str, body: Any) -> tuple[int, Any]:
        match path:
            case "/generate":
                return self.generate(body)
            case "/openapi.json":
                return 200, {"paths": {"/update_weight_version": {}, "/weights_checker": {}}}
            case "/model_info":
                return 200, {"weight_version": self.version, "generated": self.num_generated, "pid": os.getpid()}
            case "/pause_generation":
                self.running.clear()
            case "/continue_generation":
                self.running.set()
            case "/update_weight_version":
                self.version = body["new_version"]
            case "/fail":
                self.failing = True
            case "/flush_cache":
                pass
            case _:
                return 404, {"detail": "Not Found"}
        return 200, {"success": True, "checks": self.num_health_checks}

    def generate(self, body: Any) -> tuple[int, Any]:
        time.sleep(0.01 * body["sampling_params"]["max_new_tokens"])
        self.running.wait()
        if self.failing:
            return 500, "sick"
        self.num_generated += 1
        token = [-1.0, body["input_ids"][-1], None]
        meta = {"output_token_logprobs": [token], "finish_reason": {"type": "stop"}, "weight_version": self.version}
        return 200, {"meta_info": {**meta, "prompt_tokens": len(body["input_ids"])}}


def make_handler(engine: Engine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply(None)

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, body: Any) -> None:
            status, answer = engine.answer(self.path, body, self.headers["Authorization"])
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


if __name__ == "__main__":
    host, port, _, key_file = sys.argv[1:]
    Server((host, int(port)), make_handler(Engine(json.loads(Path(key_file).read_text())))).serve_forever()
