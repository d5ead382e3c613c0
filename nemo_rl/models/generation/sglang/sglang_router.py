"""sglang-router in front of several engines, seen from the driver: its process, and the engines that it knows."""

import json
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx

from nemo_rl.config.schema import PolicyConfig
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.models.generation.sglang.access import AccessKeys
from nemo_rl.models.generation.sglang.http_client import check_answer, transport_error
from nemo_rl.models.generation.sglang.server_process import ServerProcess, start_on_free_ports

_PROCESS = "nemo_rl.models.generation.sglang.router_process"
_POLL_INTERVAL_S = 0.1
_REGISTRATION_TIMEOUT_S = 30
"""For the router's one look at an engine that it is told of."""
_KEY_IDLE_S = 600
_EXTRA_TIMEOUT_S = 30
"""The driver's own time limit of a request ends it first, and names it."""


def router_settings(cfg: PolicyConfig, *, host: str, port: int, metrics_port: int) -> dict[str, Any]:
    """Fields of sglang-router's `RouterArgs`, without keys.

    Who is alive and what is sent again is for the driver alone to decide: its answer must be the same for requests,
    for refits and for replacements, and a refit's pause would look like death to the router. So the router neither
    checks engines, nor shuns those that fail, nor sends again.
    """
    router = cfg.generation.sglang_cfg.sglang_router_config
    server = cfg.generation.sglang_cfg.sglang_server_config
    return {
        # The router puts a colon and the port behind it; the other host it takes as an address.
        "host": f"[{host}]" if ":" in host else host,
        "port": port,
        "policy": router.policy,
        "assignment_mode": "min_load",
        # A key is of one batch of prompts.
        "max_idle_secs": _KEY_IDLE_S,
        "cache_threshold": router.cache_threshold,
        "balance_abs_threshold": router.balance_abs_threshold,
        "balance_rel_threshold": router.balance_rel_threshold,
        "request_timeout_secs": math.ceil(server.request_timeout_s) + _EXTRA_TIMEOUT_S,
        "disable_health_check": True,
        "disable_circuit_breaker": True,
        "disable_retries": True,
        "health_check_timeout_secs": _REGISTRATION_TIMEOUT_S,
        "shutdown_grace_period_secs": 0,
        # There is no way to have no metrics port; without a number it would be 29000.
        "prometheus_host": host,
        "prometheus_port": metrics_port,
        "history_backend": "none",
        "log_level": "warn",
    }


class SGLangRouter:
    """Started by the driver and ended with it. Calls may come from any thread, one at a time.

    Engines are told to the router without their key. It passes the `Authorization` header of each request on, so
    nothing gets through to an engine that does not bring the key itself; with an engine's key the router would also
    ask the engine for its description, and load the tokenizer that it names.
    """

    def __init__(self, *, cfg: PolicyConfig, keys: AccessKeys, host: str, log_file: Path) -> None:
        """`host`: address to bind to."""
        self._cfg = cfg
        self._startup_timeout_s = cfg.generation.sglang_cfg.sglang_server_config.startup_timeout_s
        self._keys = keys
        self._host = host
        self._log_file = log_file
        self._process: ServerProcess | None = None
        self._http = httpx.Client(trust_env=False)
        self.url = ""

    @property
    def name(self) -> str:
        return f"router at {self.url}"

    def start(self, limit_s: float = math.inf) -> None:
        """Start the process and wait until it answers, at most `startup_timeout_s`; it knows no engine yet.

        Raises:
            ServerStartError: with the end of its log.
        """
        self._process = start_on_free_ports(self._host, min(limit_s, self._startup_timeout_s), self._launch)
        self.url = self._process.url

    def _launch(self, port: int, metrics_port: int) -> ServerProcess:
        settings = router_settings(self._cfg, host=self._host, port=port, metrics_port=metrics_port)
        command = [sys.executable, "-m", _PROCESS, json.dumps(settings)]
        # Kept from the start, so that `stop` ends one that does not answer yet.
        self._process = ServerProcess(command, os.environ, self._log_file, self._host, port, self._keys)
        return self._process

    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def stop(self) -> None:
        """Idempotent."""
        self._http.close()
        if self._process is not None:
            self._process.stop()

    def set_engines(self, urls: Iterable[str], deadline: Deadline) -> set[str]:
        """Send requests to these engines and no others from now on; returns those that the router did not reach.

        Raises:
            EngineError: the router refused or did not answer.
        """
        wanted = set(urls)
        known = self._known_engines(deadline)
        for url in known.keys() - wanted:
            self._call("DELETE", f"/workers/{known[url]}", None, deadline)
        for url in wanted - known.keys():
            self._call("POST", "/workers", {"url": url}, deadline)
        # The router does both in the background.
        registration = Deadline(min(_REGISTRATION_TIMEOUT_S, deadline.remaining_s()))
        while (known := self._known_engines(deadline)).keys() != wanted and registration.remaining_s():
            time.sleep(_POLL_INTERVAL_S)
        return wanted - known.keys()

    def _known_engines(self, deadline: Deadline) -> dict[str, str]:
        """URL -> the router's id of every engine that it sends requests to."""
        workers = self._call("GET", "/workers", None, deadline)["workers"]
        return {worker["url"]: worker["id"] for worker in workers if worker["is_healthy"]}

    def _call(self, method: str, endpoint: str, body: Mapping[str, Any] | None, deadline: Deadline) -> Any:
        timeout_s = deadline.require(f"{self.name} {endpoint}")
        headers = self._keys.headers(admin=True)
        try:
            response = self._http.request(method, self.url + endpoint, json=body, headers=headers, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise transport_error(self.name, endpoint, timeout_s, error) from error
        return check_answer(self.name, endpoint, response)
