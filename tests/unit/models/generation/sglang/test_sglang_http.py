import pickle

import pytest
import torch
from fake_server import FakeEngineServer
from sglang_config import make_config

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.sglang.http_client import EngineClient, EngineError, ServerCapabilities
from nemo_rl.models.generation.sglang.sampler import EngineSampler


def _client(fake, timeout_s=5.0):
    return EngineClient("engine 4", fake.url, timeout_s)


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


def _generation(urls, **server):
    config = make_config(server=server)
    return EngineSampler(cfg=config, urls=urls, pad_token_id=0, eos_token_ids=[2])


def _prompts(num_prompts):
    """Row i: i % 3 + 1 tokens, the last one 10 + i."""
    lengths = [i % 3 + 1 for i in range(num_prompts)]
    rows = [[7] * (n - 1) + [10 + i] + [0] * (3 - n) for i, n in enumerate(lengths)]
    return BatchedDataDict({"input_ids": torch.tensor(rows), "input_lengths": torch.tensor(lengths)})


def test_requests_in_flight_are_bounded_per_engine_and_answers_keep_their_order():
    with FakeEngineServer(delay_s=0.05) as first, FakeEngineServer(delay_s=0.05) as second:
        batch = _generation([first.url, second.url], sglang_server_concurrency=3).generate(_prompts(20))
    assert (first.max_in_flight, second.max_in_flight) == (3, 3)
    assert (len(first.requests), len(second.requests)) == (10, 10)
    last = batch["unpadded_sequence_lengths"] - 1
    assert batch["output_ids"][torch.arange(20), last].tolist() == list(range(10, 30))
    assert batch["unpadded_sequence_lengths"].tolist() == [i % 3 + 2 for i in range(20)]


def test_prompts_reach_the_engine_without_padding_and_with_their_own_stop_strings():
    data = _prompts(2)
    data["stop_strings"] = [["a"], None]
    with FakeEngineServer() as fake:
        _generation([fake.url]).generate(data)
    sent = {tuple(body["input_ids"]): body["sampling_params"]["stop"] for _, body in fake.requests}
    assert sent == {(10,): ["a"], (7, 11): []}


def test_a_failed_request_names_the_engine():
    with (
        FakeEngineServer() as good,
        FakeEngineServer({"/generate": (500, "boom")}) as bad,
        pytest.raises(EngineError, match=rf"engine 1 at {bad.url} /generate: HTTP 500: boom"),
    ):
        _generation([good.url, bad.url]).generate(_prompts(4))


def test_an_engine_that_does_not_answer_is_an_error():
    with FakeEngineServer(delay_s=2.5) as fake, pytest.raises(EngineError, match=r"engine 0 .*not within 1 s"):
        _generation([fake.url], request_timeout_s=1.0).generate(_prompts(1))
