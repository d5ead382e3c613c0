import pytest
import torch
from sglang_config import make_config

from nemo_rl.models.generation.sglang.sampling import (
    Sample,
    build_request,
    join_image_tokens,
    pack_samples,
    parse_answer,
)


def _request(config, prompt_length, *, stop=None, greedy=False):
    return build_request(config, [7] * prompt_length, stop_strings=stop, stop_token_ids=[2, 5], greedy=greedy)


@pytest.mark.parametrize(("prompt_length", "max_new_tokens"), [(1, 16), (48, 16), (49, 15), (63, 1)])
def test_response_is_capped_by_the_total_length(prompt_length, max_new_tokens):
    request = _request(make_config(), prompt_length)
    assert request["sampling_params"]["max_new_tokens"] == max_new_tokens
    assert len(request["input_ids"]) == prompt_length


@pytest.mark.parametrize("prompt_length", [64, 65])
def test_prompt_without_room_is_refused_with_key_and_both_numbers(prompt_length):
    with pytest.raises(ValueError, match=f"policy.max_total_sequence_length: got 64; a prompt of {prompt_length} tok"):
        _request(make_config(), prompt_length)


def test_stop_strings_of_the_sample_are_added_to_the_configured_ones():
    config = make_config(generation={"stop_strings": ["\n"]})
    assert _request(config, 3, stop=["END"])["sampling_params"]["stop"] == ["\n", "END"]
    assert _request(config, 3)["sampling_params"]["stop"] == ["\n"]
    assert _request(config, 3)["sampling_params"]["stop_token_ids"] == [2, 5]


def test_greedy_overrides_the_sampling_settings():
    config = make_config(generation={"temperature": 0.7, "top_p": 0.9, "top_k": 8})
    sampled = _request(config, 3)["sampling_params"]
    greedy = _request(config, 3, greedy=True)["sampling_params"]
    assert (sampled["temperature"], sampled["top_p"], sampled["top_k"]) == (0.7, 0.9, 8)
    assert (greedy["temperature"], greedy["top_p"], greedy["top_k"]) == (0.0, 1.0, -1)


def _answer(kind, logprobs=((-0.5, 4, None), (-0.25, 2, None))):
    meta = {"output_token_logprobs": [list(x) for x in logprobs], "finish_reason": {"type": kind}, "weight_version": 3}
    return {"meta_info": {**meta, "prompt_tokens": 7}}


@pytest.mark.parametrize(("kind", "truncated"), [("stop", False), ("length", True), ("abort", True)])
def test_answer_becomes_tokens(kind, truncated):
    assert parse_answer(_answer(kind), 7) == Sample([4, 2], [-0.5, -0.25], truncated, "3")


def test_an_abort_before_the_first_token_is_an_empty_truncated_sample():
    assert parse_answer(_answer("abort", logprobs=()), 7) == Sample([], [], True, "3")


@pytest.mark.parametrize("bad", [None, float("nan"), float("-inf")])
def test_a_log_prob_that_is_no_number_is_an_error(bad):
    with pytest.raises(ValueError, match="not finite"):
        parse_answer(_answer("stop", logprobs=((bad, 4, None),)), 7)


def test_another_number_of_prompt_tokens_is_an_error_with_both_numbers():
    with pytest.raises(ValueError, match="the engine read 7 prompt tokens, the trainer counts 9: their image tokens"):
        parse_answer(_answer("stop"), 9)


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ([5, 9, 9, 9, 6], [5, 9, 6]),
        ([9, 9, 6, 6, 9], [9, 6, 6, 9]),
        ([5, 9, 6, 5, 9, 9, 6], [5, 9, 6, 5, 9, 6]),
        ([5, 5], [5, 5]),
        ([], []),
    ],
)
def test_each_run_of_image_tokens_is_sent_as_one(prompt, sent):
    assert join_image_tokens(prompt, 9) == sent


def test_a_request_with_pictures_leaves_room_for_all_of_their_tokens():
    prompt = [5, *[9] * 50, 6]
    settings = {"stop_strings": None, "stop_token_ids": [2], "greedy": False}
    request = build_request(make_config(), prompt, **settings, images=["data:a"], image_token_id=9)
    assert (request["input_ids"], request["image_data"]) == ([5, 9, 6], ["data:a"])
    assert request["sampling_params"]["max_new_tokens"] == 64 - 52
    assert "image_data" not in build_request(make_config(), [5, 5], **settings)


def test_samples_are_packed_right_padded():
    samples = [Sample([4, 2], [-0.5, -0.25], False, "1"), Sample([], [], True, "1"), Sample([9], [-1.0], True, "1")]
    batch = pack_samples([[7], [7, 8], [7, 8, 9, 10]], samples, pad_token_id=99)
    assert batch["output_ids"].tolist() == [[7, 4, 2, 99, 99], [7, 8, 99, 99, 99], [7, 8, 9, 10, 9]]
    assert batch["logprobs"].tolist() == [[0, -0.5, -0.25, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, -1.0]]
    assert batch["generation_lengths"].tolist() == [2, 0, 1]
    assert batch["unpadded_sequence_lengths"].tolist() == [3, 2, 5]
    assert batch["truncated"].tolist() == [False, True, True]
    assert batch["weight_version"] == ["1", "1", "1"]
    assert (batch["output_ids"].dtype, batch["logprobs"].dtype) == (torch.int64, torch.float32)
    assert batch.size == 3
