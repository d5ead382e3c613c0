"""One sample: from configuration and prompt to the body of `/generate`, from its answer to tokens, and into a batch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_rl.config.schema import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict


@dataclass(frozen=True)
class Sample:
    """What the engine sampled for one prompt, to the token: the end-of-text or stop tokens are in it."""

    token_ids: list[int]
    logprobs: list[float]
    """Of each token, at the sampling temperature, before top-p and top-k."""
    truncated: bool
    """Ended by length, or by an abort."""
    weight_version: str


def build_request(
    cfg: PolicyConfig,
    prompt: Sequence[int],
    *,
    stop_strings: Sequence[str] | None,
    stop_token_ids: list[int],
    greedy: bool,
    images: Sequence[str] = (),
    image_token_id: int | None = None,
) -> dict[str, Any]:
    """The body of `/generate` for one sample.

    Args:
        prompt: with all image tokens of each picture.
        images: data URIs.
        image_token_id: of the model; needed with pictures.
        stop_strings: of this sample, added to the configured ones.
        stop_token_ids: all token ids that end a response.

    Raises:
        ValueError: the prompt fills `policy.max_total_sequence_length`.
    """
    generation = cfg.generation
    room = cfg.max_total_sequence_length - len(prompt)
    if room < 1:
        raise ValueError(
            f"policy.max_total_sequence_length: got {cfg.max_total_sequence_length}; a prompt of {len(prompt)} tokens "
            "leaves no room for a response; allowed: more than the longest prompt"
        )
    parameters = {
        "max_new_tokens": min(generation.max_new_tokens, room),
        "temperature": 0.0 if greedy else generation.temperature,
        "top_p": 1.0 if greedy else generation.top_p,
        "top_k": -1 if greedy or generation.top_k is None else generation.top_k,
        "stop": [*(generation.stop_strings or []), *(stop_strings or [])],
        "stop_token_ids": stop_token_ids,
    }
    body = {"input_ids": list(prompt), "sampling_params": parameters, "return_logprob": True}
    if images:
        body |= {"input_ids": join_image_tokens(prompt, image_token_id), "image_data": list(images)}
    return body


def join_image_tokens(prompt: Sequence[int], image_token_id: int | None) -> list[int]:
    """One image token for each run of them: the engine keeps the ids and puts in what it counts for each picture."""
    before = (None, *prompt)
    return [token for token, last in zip(prompt, before, strict=False) if token != image_token_id or last != token]


def parse_answer(answer: Mapping[str, Any], num_prompt_tokens: int) -> Sample:
    """Read one answer of `/generate`.

    Args:
        num_prompt_tokens: of the prompt as the trainer has it.

    Raises:
        ValueError: a log-prob is not a finite number, or the engine read another number of prompt tokens.
    """
    meta = answer["meta_info"]
    # Absent where the request was aborted before the engine read it.
    num_read = meta.get("prompt_tokens", num_prompt_tokens)
    if num_read != num_prompt_tokens:
        raise ValueError(
            f"the engine read {num_read} prompt tokens, the trainer counts {num_prompt_tokens}: "
            "their image tokens differ"
        )
    tokens = meta["output_token_logprobs"]
    logprobs = [math.nan if entry[0] is None else float(entry[0]) for entry in tokens]
    if not all(math.isfinite(value) for value in logprobs):
        raise ValueError(f"log-probs of sampled tokens are not finite: {logprobs}")
    return Sample(
        token_ids=[int(entry[1]) for entry in tokens],
        logprobs=logprobs,
        truncated=meta["finish_reason"]["type"] in ("length", "abort"),
        weight_version=str(meta["weight_version"]),
    )


def pack_samples(prompts: list[list[int]], samples: list[Sample], pad_token_id: int) -> BatchedDataDict:
    """Prompts and responses as the right-padded batch that `GenerationInterface.generate` promises."""
    sequences = [prompt + sample.token_ids for prompt, sample in zip(prompts, samples, strict=True)]
    width = max((len(sequence) for sequence in sequences), default=0)
    output_ids = torch.full((len(sequences), width), pad_token_id, dtype=torch.int64)
    logprobs = torch.zeros(len(sequences), width, dtype=torch.float32)
    for row, (prompt, sequence, sample) in enumerate(zip(prompts, sequences, samples, strict=True)):
        output_ids[row, : len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
        logprobs[row, len(prompt) : len(sequence)] = torch.tensor(sample.logprobs, dtype=torch.float32)
    return BatchedDataDict(
        {
            "output_ids": output_ids,
            "logprobs": logprobs,
            "generation_lengths": torch.tensor([len(sample.token_ids) for sample in samples], dtype=torch.int64),
            "unpadded_sequence_lengths": torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64),
            "truncated": torch.tensor([sample.truncated for sample in samples], dtype=torch.bool),
            "weight_version": [sample.weight_version for sample in samples],
        }
    )
