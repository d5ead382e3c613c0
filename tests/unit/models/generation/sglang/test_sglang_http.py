import pickle

import httpx
import pytest
from fake_server import FakeEngineServer

from nemo_rl.models.generation.sglang.access import AccessKeys
from nemo_rl.models.generation.sglang.http_client import EngineClient, EngineError, ServerCapabilities, check_answer

KEYS = AccessKeys.make()


def _client(fake, timeout_s=5.0):
    return EngineClient("engine 4", fake.url, timeout_s, KEYS)


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (200, {"success": False, "message": "partially updated"}, "partially updated"),
        (400, {"success": False, "message": "no session is open"}, "no session is open"),
        (400, {"error": {"message": "too long"}}, "too long"),
        (500, "Internal Server Error", "Internal Server Error"),
        (404, {"detail": "Not Found"}, "Not Found"),
    ],
)
def test_a_bad_answer_raises_with_engine_endpoint_status_and_text(status, body, text):
    with FakeEngineServer({"/end_weight_update": (status, body)}) as fake, pytest.raises(EngineError) as caught:
        _client(fake).post("/end_weight_update", {})
    assert (caught.value.endpoint, caught.value.status) == ("/end_weight_update", status)
    assert fake.url in caught.value.engine
    for part in ("engine 4", "/end_weight_update", str(status), text):
        assert part in str(caught.value)


def test_every_call_carries_the_key_that_its_endpoint_needs_and_no_error_shows_one():
    with FakeEngineServer({"/model_info": (200, {}), "/flush_cache": (401, {"error": "Unauthorized"})}) as fake:
        _client(fake).get("/model_info")
        with pytest.raises(EngineError, match="Unauthorized") as caught:
            _client(fake).post("/flush_cache", {})
    assert fake.authorizations == [f"Bearer {KEYS.api_key}", f"Bearer {KEYS.admin_api_key}"]
    assert not {KEYS.api_key, KEYS.admin_api_key} & {*str(caught.value).split(), *repr(caught.value).split()}


def test_good_answers_are_json_or_text():
    answers = {"/flush_cache": (200, "Cache flushed.\n"), "/continue_generation": (200, {"status": "ok"})}
    with FakeEngineServer(answers) as fake:
        assert _client(fake).post("/flush_cache", {}) == "Cache flushed.\n"
        assert _client(fake).post("/continue_generation", {}) == {"status": "ok"}


def test_an_answer_that_is_too_late_is_an_error():
    with (
        FakeEngineServer({"/x": (200, {})}, delay_s=1.0) as fake,
        pytest.raises(EngineError, match=r"engine 4 .* /x: no answer: not within 0.1 s"),
    ):
        _client(fake).post("/x", {}, timeout_s=0.1)


def test_nobody_listening_is_an_error():
    with FakeEngineServer() as fake:
        client = _client(fake)
    with pytest.raises(EngineError, match="no answer: ConnectError"):
        client.get("/health")


def test_error_survives_pickling():
    error = pickle.loads(pickle.dumps(EngineError("engine 1", "/generate", 500, "boom")))
    assert (error.engine, error.endpoint, error.status, error.text) == ("engine 1", "/generate", 500, "boom")


def _description(*paths, update_fields=()):
    body = {"requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Update"}}}}}
    return {
        "paths": {**{path: {"post": {}} for path in paths}, "/update_weights_from_distributed": {"post": body}},
        "components": {"schemas": {"Update": {"properties": {name: {} for name in ("names", *update_fields)}}}},
    }


def test_capabilities_come_from_the_servers_description():
    session = ("/begin_weight_update", "/end_weight_update")
    full = _description(*session, "/weights_checker", "/update_weight_version", update_fields=["load_format"])
    assert ServerCapabilities.from_openapi(full) == ServerCapabilities(True, True, True, True, False)
    assert ServerCapabilities.from_openapi(_description()) == ServerCapabilities(False, False, False, False, False)
    assert not ServerCapabilities.from_openapi(_description(session[0])).weight_update_session


def test_checksums_of_all_ranks():
    ranks = [{"checksums": {"a": "1", "b": "2"}}, {"checksums": {"a": "3", "b": "4"}}]
    with FakeEngineServer({"/weights_checker": (200, {"success": True, "ranks": ranks})}) as fake:
        assert _client(fake).checksums() == {"0/a": "1", "0/b": "2", "1/a": "3", "1/b": "4"}
        assert fake.requests == [("/weights_checker", {"action": "checksum"})]


def test_a_success_without_what_was_asked_for_is_an_error_that_names_the_engine():
    ranks = [None, [{"success": True}], [{"checksums": ["a"]}]]
    with FakeEngineServer() as fake:
        for body in [{"success": True}, "ok", [], *({"ranks": value} for value in ranks)]:
            fake.answers = {"/weights_checker": (200, body), "/openapi.json": (200, body)}
            with pytest.raises(EngineError, match=r"engine 4 .* /weights_checker: HTTP 200: unexpected answer: "):
                _client(fake).checksums()
            with pytest.raises(EngineError, match=r"engine 4 .* /openapi.json: HTTP 200: unexpected answer: "):
                _ = _client(fake).capabilities


@pytest.mark.parametrize("text", [b"{", b"not json", b"\xff"])
@pytest.mark.parametrize("status", [200, 500])
def test_json_that_is_none_is_an_error_with_its_text(status, text):
    response = httpx.Response(status, headers={"content-type": "application/json"}, content=text)
    with pytest.raises(EngineError, match=f"engine 4 /x: HTTP {status}: ") as caught:
        check_answer("engine 4", "/x", response)
    assert response.text in caught.value.text
