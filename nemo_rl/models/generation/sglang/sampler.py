"""Spreads prompts over the engines and gathers what they sampled, over plain HTTP."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import torch

from nemo_rl.config.schema import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.sglang.http_client import EngineError, check_answer, transport_error
from nemo_rl.models.generation.sglang.sampling import Sample, build_request, parse_answer


class EngineSampler:
    """Requests to the servers of one run."""

    def __init__(
        self, *, cfg: PolicyConfig, urls: Sequence[str], pad_token_id: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._cfg = cfg
        self._server_cfg = cfg.generation.sglang_cfg.sglang_server_config
        self._urls = list(urls)
        self._pad_token_id = pad_token_id
        self._stop_token_ids = sorted({*eos_token_ids, *(cfg.generation.stop_token_ids or [])})

    def generate(self, data: BatchedDataDict, *, greedy: bool = False) -> BatchedDataDict:
        """See `GenerationInterface`.

        Raises:
            EngineError: an engine refused a request, failed, or did not answer in `request_timeout_s`; the other
                requests are given up.
            ValueError: a prompt leaves no room for a response.
        """
        prompts = [row[:length].tolist() for row, length in zip(data["input_ids"], data["input_lengths"], strict=True)]
        stop_strings = data["stop_strings"] if "stop_strings" in data else [None] * len(prompts)
        requests = [
            build_request(self._cfg, prompt, stop_strings=stop, stop_token_ids=self._stop_token_ids, greedy=greedy)
            for prompt, stop in zip(prompts, stop_strings, strict=True)
        ]
        return pack_samples(prompts, asyncio.run(self._sample_all(requests)), self._pad_token_id)

    async def _sample_all(self, requests: list[dict[str, Any]]) -> list[Sample]:
        """Neighbours go to one engine: samples of one prompt share its prefix cache."""
        slots = [asyncio.Semaphore(self._server_cfg.sglang_server_concurrency) for _ in self._urls]
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(trust_env=False, limits=limits) as http:
            samples = []
            for index, request in enumerate(requests):
                engine = index * len(self._urls) // len(requests)
                samples.append(self._sample(http, engine, slots[engine], request))
            # The first error ends the wait; `asyncio.run` cancels what is still in flight.
            return await asyncio.gather(*samples)

    async def _sample(
        self, http: httpx.AsyncClient, engine: int, slot: asyncio.Semaphore, request: dict[str, Any]
    ) -> Sample:
        name, endpoint = f"engine {engine} at {self._urls[engine]}", "/generate"
        timeout_s = self._server_cfg.request_timeout_s
        async with slot:
            try:
                response = await http.post(self._urls[engine] + endpoint, json=request, timeout=timeout_s)
            except httpx.HTTPError as error:
                raise transport_error(name, endpoint, timeout_s, error) from error
        answer = check_answer(name, endpoint, response)
        try:
            return parse_answer(answer)
        except ValueError as error:
            raise EngineError(name, endpoint, response.status_code, str(error)) from error


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
