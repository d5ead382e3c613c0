"""The sampler against servers that answer like engines: order, number and key of requests; what is sent again."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fake_server import FakeEngineServer
from fixed_engines import FixedEngines
from sglang_config import make_config

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.interfaces import EnginesLostError
from nemo_rl.models.generation.sglang.access import AccessKeys
from nemo_rl.models.generation.sglang.http_client import EngineError
from nemo_rl.models.generation.sglang.sampler import EngineSampler

KEYS = AccessKeys.make()


def _sampler(engines, *, retries=None, **server):
    tolerance = {} if retries is None else {"use_fault_tolerance": True, "max_request_retries": retries}
    config = make_config(server=server, tolerance=tolerance)
    return EngineSampler(cfg=config, dispatcher=engines, keys=KEYS, pad_token_id=0, eos_token_ids=[2])


def _prompts(num_prompts):
    """Row i: i % 3 + 1 tokens, the last one 10 + i."""
    lengths = [i % 3 + 1 for i in range(num_prompts)]
    rows = [[7] * (n - 1) + [10 + i] + [0] * (3 - n) for i, n in enumerate(lengths)]
    return BatchedDataDict({"input_ids": torch.tensor(rows), "input_lengths": torch.tensor(lengths)})


def _sampled(batch):
    """The last token of each row: the echo of its prompt's last."""
    last = batch["unpadded_sequence_lengths"] - 1
    return batch["output_ids"][torch.arange(batch.size), last].tolist()


def test_requests_in_flight_are_bounded_by_the_number_of_engines():
    with FakeEngineServer(delay_s=0.05) as fake:
        _sampler(FixedEngines([fake.url]), sglang_server_concurrency=3).generate(_prompts(20))
        assert fake.max_in_flight == 3
        _sampler(FixedEngines([fake.url, fake.url]), sglang_server_concurrency=3).generate(_prompts(20))
        assert fake.max_in_flight == 6


def test_answers_keep_the_order_of_their_prompts():
    with FakeEngineServer(delay_s=0.05) as first, FakeEngineServer() as second:
        batch = _sampler(FixedEngines([first.url, second.url])).generate(_prompts(20))
    assert (len(first.requests), len(second.requests)) == (10, 10)
    assert _sampled(batch) == list(range(10, 30))
    assert batch["unpadded_sequence_lengths"].tolist() == [i % 3 + 2 for i in range(20)]


def test_every_request_brings_the_key_of_generation():
    with FakeEngineServer() as fake:
        _sampler(FixedEngines([fake.url])).generate(_prompts(3))
    assert fake.authorizations == [f"Bearer {KEYS.api_key}"] * 3


def test_prompts_reach_the_engine_without_padding_and_with_their_own_stop_strings():
    data = _prompts(2)
    data["stop_strings"] = [["a"], None]
    with FakeEngineServer() as fake:
        _sampler(FixedEngines([fake.url])).generate(data)
    sent = {tuple(body["input_ids"]): body["sampling_params"]["stop"] for _, body in fake.requests}
    assert sent == {(10,): ["a"], (7, 11): []}


def test_without_fault_tolerance_the_first_failure_ends_it_and_names_the_engine():
    with FakeEngineServer() as good, FakeEngineServer({"/generate": (500, "boom")}) as bad:
        engines = FixedEngines([good.url, bad.url])
        with pytest.raises(EngineError, match=rf"engine 1 at {bad.url} /generate: HTTP 500: boom"):
            _sampler(engines).generate(_prompts(4))
    assert engines.reports == []


def test_a_request_that_takes_too_long_is_an_error_and_is_not_sent_again():
    with FakeEngineServer(delay_s=2.5) as fake, pytest.raises(EngineError, match=r"engine 0 .*not within 1 s"):
        _sampler(FixedEngines([fake.url]), retries=3, request_timeout_s=1.0).generate(_prompts(1))
    assert len(fake.requests) == 1


@pytest.mark.parametrize("status", [500, 502, 503])
def test_what_a_sick_engine_fails_is_sent_to_another_and_comes_once(status):
    with FakeEngineServer() as good, FakeEngineServer({"/generate": (status, "boom")}) as bad:
        engines = FixedEngines([good.url, bad.url], gone=[bad.url])
        batch = _sampler(engines, retries=1).generate(_prompts(8))
    assert _sampled(batch) == list(range(10, 18))
    sent = Counter(body["input_ids"][-1] for _, body in good.requests)
    assert sent == Counter(range(10, 18))
    # All four fail at once and share one look at the engines, or two if the look had begun before one failed.
    assert {report[0] for report in engines.reports} == {f"engine 1 at {bad.url}"}
    assert 1 <= len(engines.reports) <= 4


def test_an_engine_that_closes_the_connection_loses_no_prompt():
    with FakeEngineServer() as dead:
        pass
    with FakeEngineServer() as good:
        batch = _sampler(FixedEngines([good.url, dead.url], gone=[dead.url]), retries=1).generate(_prompts(8))
    assert _sampled(batch) == list(range(10, 18))
    assert len(good.requests) == 8


def test_a_refused_request_is_not_sent_again():
    answers = {"/generate": (400, {"error": {"message": "too long"}})}
    with FakeEngineServer(answers) as fake:
        engines = FixedEngines([fake.url])
        with pytest.raises(EngineError, match="HTTP 400: too long"):
            _sampler(engines, retries=3).generate(_prompts(1))
    assert len(fake.requests) == 1
    assert engines.reports == []


def test_the_number_of_retries_is_exact():
    with FakeEngineServer({"/generate": (500, "boom")}) as fake:
        engines = FixedEngines([fake.url])
        with pytest.raises(EngineError, match="HTTP 500: boom"):
            _sampler(engines, retries=2).generate(_prompts(1))
    assert len(fake.requests) == 3
    assert [report[1:] for report in engines.reports] == [(0, 500), (1, 500)]


def test_what_had_come_when_the_last_engine_was_lost_is_kept_and_the_rest_is_finished_later():
    flaky = FakeEngineServer()
    flaky.delay_s = 0.1
    with flaky:
        engines = FixedEngines([flaky.url], gone=[flaky.url])
        sampler = _sampler(engines, retries=3, sglang_server_concurrency=2)
        batch = sampler.prepare(_prompts(6))
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(sampler.finish, batch)
            while len(flaky.requests) < 3:
                time.sleep(0.01)
            flaky.answers["/generate"] = (503, "going down")
            with pytest.raises(EnginesLostError):
                pending.result(timeout=20)
    had_come = 6 - len(batch.missing)
    assert 1 <= had_come < 6
    with FakeEngineServer() as fresh:
        engines.alive = {"engine 1": fresh.url}
        result = sampler.finish(batch)
    assert _sampled(result) == list(range(10, 16))
    assert len(fresh.requests) == 6 - had_come


def test_a_sample_that_is_not_finite_is_an_error():
    meta = {"output_token_logprobs": [[None, 3, None]], "finish_reason": {"type": "stop"}, "prompt_tokens": 1}
    with (
        FakeEngineServer({"/generate": (200, {"meta_info": meta})}) as fake,
        pytest.raises(EngineError, match="HTTP 200: log-probs of sampled tokens are not finite"),
    ):
        _sampler(FixedEngines([fake.url]), retries=3).generate(_prompts(1))
