"""Sends prompts to the engines and gathers what they sampled, over plain HTTP; what an engine loses is sent again."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from nemo_rl.config.schema import PolicyConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.sglang.access import AccessKeys
from nemo_rl.models.generation.sglang.http_client import EngineError, check_answer, transport_error
from nemo_rl.models.generation.sglang.sampling import Sample, build_request, pack_samples, parse_answer

logger = logging.getLogger(__name__)

_ENDPOINT = "/generate"
_ROUTING_KEY = "x-smg-routing-key"
"""Header by which sglang-router's policies `manual` and `consistent_hashing` keep requests together."""
_RETRY_DELAY_S = 0.5
"""Before a request is sent again; a server whose scheduler has died needs a moment to follow it. Doubled each time."""
_SERVER_FAULT = 500


@dataclass(frozen=True)
class Endpoint:
    """Where one request goes."""

    name: str
    """For messages."""
    url: str


class Dispatcher(Protocol):
    """Knows the engines of the run."""

    @property
    def num_engines(self) -> int:
        """That take requests now; raises EnginesLostError when there is none."""
        ...

    def choose(self, index: int, attempt: int) -> Endpoint:
        """Where request `index` goes in its attempt 0, 1, ...; raises EnginesLostError when nobody is left."""
        ...

    def report(self, endpoint: Endpoint, attempt: int, error: EngineError) -> None:
        """Find out who is still alive after a request has failed. Blocks; one call at a time.

        Raises:
            EnginesLostError: nobody.
        """
        ...


@dataclass(frozen=True)
class SampleBatch:
    """Requests, and the samples that have come so far."""

    prompts: list[list[int]]
    requests: list[dict[str, Any]]
    routing_keys: list[str]
    """Equal for equal prompts and pictures: one engine caches what they share. No two batches have one in common."""
    samples: list[Sample | None]
    """By request; each is set once."""

    @property
    def missing(self) -> list[int]:
        return [index for index, sample in enumerate(self.samples) if sample is None]


class EngineSampler:
    """Requests to the engines of one run."""

    def __init__(
        self,
        *,
        cfg: PolicyConfig,
        dispatcher: Dispatcher,
        keys: AccessKeys,
        pad_token_id: int,
        eos_token_ids: Sequence[int],
        image_token_id: int | None = None,
    ) -> None:
        """`image_token_id`: of a model that gets pictures."""
        self._cfg = cfg
        self._server_cfg = cfg.generation.sglang_cfg.sglang_server_config
        tolerance = cfg.generation.sglang_cfg.sglang_fault_tolerance_config
        self._max_retries = tolerance.max_request_retries if tolerance.use_fault_tolerance else 0
        self._dispatcher = dispatcher
        self._headers = keys.headers(admin=False)
        self._num_batches = 0
        self._pad_token_id = pad_token_id
        self._image_token_id = image_token_id
        self._stop_token_ids = sorted({*eos_token_ids, *(cfg.generation.stop_token_ids or [])})

    def generate(self, data: BatchedDataDict, *, greedy: bool = False) -> BatchedDataDict:
        """`prepare` and `finish` in one."""
        return self.finish(self.prepare(data, greedy=greedy))

    def prepare(self, data: BatchedDataDict, *, greedy: bool = False) -> SampleBatch:
        """The requests of a batch; see `GenerationInterface.generate`. Sends nothing.

        Raises:
            ValueError: a prompt leaves no room for a response.
        """
        prompts = [row[:length].tolist() for row, length in zip(data["input_ids"], data["input_lengths"], strict=True)]
        stop_strings = data["stop_strings"] if "stop_strings" in data else [None] * len(prompts)
        images = data["images"] if "images" in data else [()] * len(prompts)
        requests = [
            build_request(
                self._cfg,
                prompt,
                stop_strings=stop,
                stop_token_ids=self._stop_token_ids,
                greedy=greedy,
                images=pictures,
                image_token_id=self._image_token_id,
            )
            for prompt, stop, pictures in zip(prompts, stop_strings, images, strict=True)
        ]
        self._num_batches += 1
        parts = zip(prompts, images, strict=True)
        keys = [f"{self._num_batches}-{hash((*prompt, *pictures))}" for prompt, pictures in parts]
        return SampleBatch(prompts, requests, keys, [None] * len(requests))

    def finish(self, batch: SampleBatch) -> BatchedDataDict:
        """Sample what is missing in `batch`; one sample per prompt, in the order of the prompts.

        A request whose engine dies is sent again, to another engine, at most `max_request_retries` times with
        `use_fault_tolerance` and never without it; what came of it before is dropped.

        Raises:
            EngineError: an engine refused a request, did not answer it in `request_timeout_s`, or failed too often; the
                other requests are given up.
            EnginesLostError: no engine is left. `batch` keeps what has come, and may be finished later.
        """
        asyncio.run(self._sample_all(batch))
        samples = [sample for sample in batch.samples if sample is not None]
        return pack_samples(batch.prompts, samples, self._pad_token_id)

    async def _sample_all(self, batch: SampleBatch) -> None:
        num_in_flight = self._server_cfg.sglang_server_concurrency * self._dispatcher.num_engines
        run = _Run(asyncio.Semaphore(num_in_flight), asyncio.Lock())
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(trust_env=False, limits=limits, headers=self._headers) as http:
            # The first error ends the wait; `asyncio.run` cancels what is still in flight.
            await asyncio.gather(*(self._sample(http, run, batch, index) for index in batch.missing))

    async def _sample(self, http: httpx.AsyncClient, run: "_Run", batch: SampleBatch, index: int) -> None:
        async with run.slots:
            for attempt in range(self._max_retries + 1):
                endpoint = self._dispatcher.choose(index, attempt)
                try:
                    batch.samples[index] = await self._ask(http, endpoint, batch, index)
                except EngineError as error:
                    if attempt == self._max_retries or not _is_lost(error):
                        raise
                    logger.warning("request %d is sent again: %s", index, error)
                    await self._report(run, endpoint, attempt, error)
                    await asyncio.sleep(_RETRY_DELAY_S * 2**attempt)
                else:
                    return

    async def _ask(self, http: httpx.AsyncClient, endpoint: Endpoint, batch: SampleBatch, index: int) -> Sample:
        timeout_s, request = self._server_cfg.request_timeout_s, batch.requests[index]
        headers = {_ROUTING_KEY: batch.routing_keys[index]}
        try:
            response = await http.post(endpoint.url + _ENDPOINT, json=request, headers=headers, timeout=timeout_s)
        except httpx.HTTPError as error:
            raise transport_error(endpoint.name, _ENDPOINT, timeout_s, error) from error
        answer = check_answer(endpoint.name, _ENDPOINT, response)
        try:
            return parse_answer(answer, len(batch.prompts[index]))
        except ValueError as error:
            raise EngineError(endpoint.name, _ENDPOINT, response.status_code, str(error)) from error
        except (LookupError, TypeError) as error:
            text = f"an answer of another form: {type(error).__name__}: {error}"
            raise EngineError(endpoint.name, _ENDPOINT, response.status_code, text) from error

    async def _report(self, run: "_Run", endpoint: Endpoint, attempt: int, error: EngineError) -> None:
        num_reports = run.num_reports
        async with run.reporting:
            # All requests to a dead engine fail at once; a look at the engines after this one failed serves it too.
            if run.num_reports == num_reports or attempt > 0:
                run.num_reports += 1
                await asyncio.to_thread(self._dispatcher.report, endpoint, attempt, error)


@dataclass
class _Run:
    """What the requests of one `finish` share."""

    slots: asyncio.Semaphore
    reporting: asyncio.Lock
    num_reports: int = 0
    """Reports begun."""


def _is_lost(error: EngineError) -> bool:
    """Whether the engine failed, rather than refused the request or took longer than a request may."""
    if error.status is not None:
        return error.status >= _SERVER_FAULT
    return not isinstance(error.__cause__, httpx.TimeoutException)
