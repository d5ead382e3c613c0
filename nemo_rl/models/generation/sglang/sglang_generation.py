"""The driver's handle on all engines: spreads prompts over them and gathers what they sampled."""

import asyncio
import logging
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import httpx
import torch

from nemo_rl.config.schema import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.interfaces import GenerationInterface
from nemo_rl.models.generation.sglang.http_client import EngineError, check_answer, transport_error
from nemo_rl.models.generation.sglang.sampling import Sample, build_request, parse_answer

logger = logging.getLogger(__name__)

_SHUTDOWN_TIMEOUT_S = 60.0


class SGLangGeneration(GenerationInterface):
    """Engines are Ray actors of `SGLangGenerationWorker`, started by setup; requests go straight to their servers."""

    def __init__(
        self,
        *,
        cfg: PolicyConfig,
        engines: Sequence[Any],
        urls: Sequence[str],
        pad_token_id: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._cfg = cfg
        self._server_cfg = cfg.generation.sglang_cfg.sglang_server_config
        self._engines = list(engines)
        self._urls = list(urls)
        self._pad_token_id = pad_token_id
        self._stop_token_ids = sorted({*eos_token_ids, *(cfg.generation.stop_token_ids or [])})
        self._num_new_engines = len(self._engines)

    @property
    def rollout_engines(self) -> list[Any]:
        return list(self._engines)

    @property
    def engine_gpu_counts(self) -> list[int]:
        """Ranks of each engine in the weight-update group."""
        return [self._server_cfg.num_gpus_per_engine] * len(self._engines)

    @property
    def engine_gpu_offsets(self) -> list[int]:
        """Rank of each engine's first slot in the weight-update group; the trainer is rank 0."""
        return list(accumulate(self.engine_gpu_counts, initial=1))[:-1]

    @property
    def num_new_engines(self) -> int:
        """Engines that no weight-update group has seen."""
        return self._num_new_engines

    def clear_updatable_num_new_engines(self) -> None:
        self._num_new_engines = 0

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

    def shutdown(self) -> None:
        if not self._engines:
            return
        # Only the end needs Ray: sampling is plain HTTP.
        import ray

        ray.get([engine.shutdown.remote() for engine in self._engines], timeout=_SHUTDOWN_TIMEOUT_S)
        self._engines = []


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
