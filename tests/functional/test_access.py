"""Who gets what out of a real SGLang server with which key, and where the keys can be seen."""

import os
import stat
from pathlib import Path

import httpx
import psutil
import pytest

from nemo_rl.models.generation.sglang.access import ADMIN_ENDPOINTS
from nemo_rl.models.generation.sglang.http_client import EngineError

REQUEST = {"input_ids": [7, 8], "sampling_params": {"max_new_tokens": 1}}
INFORMATION = ["/model_info", "/server_info", "/openapi.json", "/v1/models"]
OTHERADMIN_ENDPOINTS = ["/update_weights_from_tensor", "/release_memory_occupation", "/configure_logging"]
"""The program does not call them; each would be as bad in others' hands."""


@pytest.fixture
def client(shared_engine):
    return shared_engine


@pytest.fixture
def family(shared_worker, shared_engine):
    supervisor = psutil.Process(shared_worker.pid())
    return [supervisor, *supervisor.children(recursive=True)]


def _status(url: str, endpoint: str, headers: dict[str, str], body: dict | None = None) -> int:
    method = "GET" if body is None else "POST"
    return httpx.request(method, url + endpoint, json=body, headers=headers, timeout=60, trust_env=False).status_code


WRONG = {"none": {}, "wrong": {"Authorization": "Bearer " + "0" * 64}, "scheme": {"Authorization": "Basic " + "0" * 64}}


@pytest.mark.parametrize("headers", WRONG.values(), ids=WRONG)
def test_without_the_right_key_every_door_is_shut(shared_engine, headers):
    url = shared_engine.url
    assert _status(url, "/generate", headers, REQUEST) == 401
    assert [endpoint for endpoint in INFORMATION if _status(url, endpoint, headers) != 401] == []
    endpoints = [*sorted(ADMIN_ENDPOINTS), *OTHERADMIN_ENDPOINTS]
    assert [endpoint for endpoint in endpoints if _status(url, endpoint, headers, {}) != 401] == []


def test_health_is_open(shared_engine):
    assert _status(shared_engine.url, "/health", {}) == 200


def test_the_api_key_opens_generation_and_information_and_nothing_that_changes_the_engine(shared_engine, engine_keys):
    url, headers = shared_engine.url, engine_keys.headers(admin=False)
    assert _status(url, "/generate", headers, REQUEST) == 200
    assert [endpoint for endpoint in INFORMATION if _status(url, endpoint, headers) != 200] == []
    endpoints = [*sorted(ADMIN_ENDPOINTS), *OTHERADMIN_ENDPOINTS]
    assert [endpoint for endpoint in endpoints if _status(url, endpoint, headers, {}) != 401] == []


def test_the_administrative_key_opens_what_changes_the_engine_and_no_generation(shared_engine, engine_keys):
    url, headers = shared_engine.url, engine_keys.headers(admin=True)
    assert _status(url, "/generate", headers, REQUEST) == 401
    # Refused for what they say, not for who asks.
    assert [endpoint for endpoint in sorted(ADMIN_ENDPOINTS) if _status(url, endpoint, headers, {}) == 401] == []
    # An empty body paused and continued it, and closed the session that it opened.
    assert _status(url, "/continue_generation", headers, {}) == 200


def test_the_client_sends_each_endpoint_its_key(client):
    answer = client.post("/generate", REQUEST)
    assert answer["meta_info"]["completion_tokens"] == 1
    client.post("/pause_generation", {"mode": "retract"})
    client.post("/flush_cache", {})
    client.post("/continue_generation", {})
    assert client.checksums()
    with pytest.raises(EngineError, match="HTTP 401: .*Unauthorized"):
        client.get("/get_weights_by_name")


def test_nccl_cumem_is_the_servers_own(shared_worker, family):
    values = {
        line
        for process in family
        for line in Path(f"/proc/{process.pid}/environ").read_text().split("\0")
        if line.startswith("NCCL_CUMEM_ENABLE=")
    }
    assert values == {f"NCCL_CUMEM_ENABLE={shared_worker.nccl_cumem_enable()}"}


def test_no_process_shows_a_key(family, engine_keys):
    for process in [*family, psutil.Process(os.getpid())]:
        folder = Path(f"/proc/{process.pid}")
        shown = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        assert len(shown) > 100
        assert engine_keys.api_key.encode() not in shown
        assert engine_keys.admin_api_key.encode() not in shown


def test_the_log_tells_the_arguments_and_no_key(shared_engine, engine_keys, engine_log_folder):
    log = (engine_log_folder / "sglang_engine_0.log").read_text()
    (line,) = [line for line in log.splitlines() if "server_args=" in line]
    assert "'api_key': '<redacted>'" in line
    assert "'admin_api_key': '<redacted>'" in line
    for key in (engine_keys.api_key, engine_keys.admin_api_key):
        assert not any(key[start : start + 16] in log for start in range(len(key) - 15))


def test_sockets_between_the_servers_processes_are_for_this_user_alone(family):
    paths = {c.laddr for process in family for c in process.net_connections("unix") if c.laddr.startswith("/")}
    assert paths
    assert {stat.S_IMODE(os.stat(path).st_mode) for path in paths} == {0o700}


def test_every_socket_of_the_server_is_on_loopback(family):
    listening = [
        connection.laddr.ip
        for process in family
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert set(listening) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
