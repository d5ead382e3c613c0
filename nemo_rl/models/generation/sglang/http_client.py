"""Talks to one SGLang server: every call has a deadline, and every answer is checked."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import httpx

from nemo_rl.models.generation.sglang.access import AccessKeys, is_admin_endpoint

T = TypeVar("T")

_OK = 200
_SHOWN_CHARACTERS = 200
_IDLE_S = 3.0
"""After which a connection is not used again."""


class EngineError(RuntimeError):
    """An engine refused a call, failed in it or did not answer. Survives pickling, so it crosses Ray whole."""

    def __init__(self, engine: str, endpoint: str, status: int | None, text: str) -> None:
        super().__init__(engine, endpoint, status, text)
        self.engine = engine
        self.endpoint = endpoint
        self.status = status
        """HTTP status; None where no answer came."""
        self.text = text

    def __str__(self) -> str:
        status = "no answer" if self.status is None else f"HTTP {self.status}"
        return f"{self.engine} {self.endpoint}: {status}: {self.text}"


@dataclass(frozen=True)
class ServerCapabilities:
    """What a server offers, read from its own description and not from its version."""

    weight_update_session: bool
    """`/begin_weight_update` and `/end_weight_update` exist, and updates need them."""
    flattened_bucket: bool
    """`/update_weights_from_distributed` takes a `load_format`."""
    weights_checker: bool
    weight_version: bool
    """`/update_weight_version` exists."""
    pause_modes: bool
    """`/pause_generation` takes a `mode`."""

    @classmethod
    def from_openapi(cls, description: Mapping[str, Any]) -> "ServerCapabilities":
        """`description`: the JSON of `/openapi.json`."""
        paths = description["paths"]
        session = {"/begin_weight_update", "/end_weight_update"}
        return cls(
            weight_update_session=session <= set(paths),
            flattened_bucket="load_format" in _body_fields(description, "/update_weights_from_distributed"),
            weights_checker="/weights_checker" in paths,
            weight_version="/update_weight_version" in paths,
            pause_modes="mode" in _body_fields(description, "/pause_generation"),
        )


def _body_fields(description: Mapping[str, Any], path: str) -> set[str]:
    """Names of the fields that a POST to `path` takes; empty where there is no such path."""
    operation = description["paths"].get(path, {}).get("post")
    if operation is None:
        return set()
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    if "$ref" in schema:
        schema = description["components"]["schemas"][schema["$ref"].rsplit("/", 1)[-1]]
    return set(schema.get("properties", {}))


def check_answer(engine: str, endpoint: str, response: httpx.Response) -> Any:
    """The JSON of a good answer, or its text where it is not JSON.

    Raises:
        EngineError: HTTP status other than 2xx, `success: false` in any answer, or JSON that is none.
    """
    is_json = response.headers.get("content-type", "").startswith("application/json")
    try:
        body = response.json() if is_json and response.content else response.text
    except ValueError as error:
        raise EngineError(engine, endpoint, response.status_code, f"no JSON: {response.text}") from error
    failed = isinstance(body, dict) and body.get("success") is False
    if failed or not response.is_success:
        raise EngineError(engine, endpoint, response.status_code, _message(body))
    return body


def _message(body: Any) -> str:
    """The engine's own words."""
    if isinstance(body, dict) and isinstance(body.get("message"), str):
        return str(body["message"])
    if isinstance(body, dict) and isinstance(body.get("error"), dict):
        return _message(body["error"])
    return str(body)


def transport_error(engine: str, endpoint: str, timeout_s: float, error: httpx.HTTPError) -> EngineError:
    if isinstance(error, httpx.TimeoutException):
        return EngineError(engine, endpoint, None, f"not within {round(timeout_s, 1):g} s")
    return EngineError(engine, endpoint, None, f"{type(error).__name__}: {error}")


class EngineClient:
    """Blocking calls to one server; several threads may call at once.

    Every method raises `EngineError` when the server refuses, fails, or does not answer in `timeout_s`.
    """

    def __init__(self, name: str, url: str, timeout_s: float, keys: AccessKeys) -> None:
        """`name`: of the engine, for messages. `timeout_s`: of a call that is given none."""
        self.name = name
        self.url = url
        self.engine = f"{name} at {url}"
        self._timeout_s = timeout_s
        self._keys = keys

    @cached_property
    def _http(self) -> httpx.Client:
        # No proxy stands between the processes of a run, whatever the environment says. Servers drop what has been idle
        # for 5 s; certificates, which nobody here has, would take 20 ms to read.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_S)
        return httpx.Client(base_url=self.url, trust_env=False, verify=False, limits=limits)

    def post(self, endpoint: str, body: Mapping[str, Any], timeout_s: float | None = None) -> Any:
        return self._call("POST", endpoint, body, timeout_s)

    def get(self, endpoint: str, timeout_s: float | None = None) -> Any:
        return self._call("GET", endpoint, None, timeout_s)

    def _call(self, method: str, endpoint: str, body: Mapping[str, Any] | None, timeout_s: float | None) -> Any:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        headers = self._keys.headers(admin=is_admin_endpoint(endpoint))
        try:
            response = self._http.request(method, endpoint, json=body, timeout=limit_s, headers=headers)
        except httpx.HTTPError as error:
            raise transport_error(self.engine, endpoint, limit_s, error) from error
        return check_answer(self.engine, endpoint, response)

    @cached_property
    def capabilities(self) -> ServerCapabilities:
        return self._read("/openapi.json", ServerCapabilities.from_openapi, self.get("/openapi.json"))

    def checksums(self, timeout_s: float | None = None) -> dict[str, str]:
        """`rank/parameter` -> digest, over all ranks, of what the engine holds in its own layout."""
        body = self.post("/weights_checker", {"action": "checksum"}, timeout_s)
        return self._read("/weights_checker", _digests, body)

    def _read(self, endpoint: str, read: Callable[[Any], T], body: Any) -> T:
        """What `read` finds in a good answer, which may still be another than was asked for."""
        try:
            return read(body)
        except (LookupError, TypeError, AttributeError) as error:
            text = f"unexpected answer: {str(body)[:_SHOWN_CHARACTERS]}"
            raise EngineError(self.engine, endpoint, _OK, text) from error


def _digests(body: Mapping[str, Any]) -> dict[str, str]:
    digests: dict[str, str] = {}
    for index, rank in enumerate(body["ranks"]):
        digests.update({f"{index}/{name}": digest for name, digest in rank["checksums"].items()})
    return digests
