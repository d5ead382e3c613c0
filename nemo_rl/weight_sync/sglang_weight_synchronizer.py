"""The refit of SGLang engines on devices of their own, seen from the driver."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from nemo_rl.config.errors import ConfigError, refusal
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.errors import TransferError
from nemo_rl.distributed.weight_transfer.sender import RefitStats
from nemo_rl.distributed.weight_transfer.timeline import LANES, busy_s, extent_s
from nemo_rl.models.generation.interfaces import EnginesFailedError, UpdatableGeneration
from nemo_rl.models.policy.interfaces import PolicyInterface
from nemo_rl.utils.timer import Timer
from nemo_rl.weight_sync.interfaces import WeightSynchronizer
from nemo_rl.weight_sync.proof import RefitProof

logger = logging.getLogger(__name__)

MEMORY_RATIO_VARIABLE = "NRL_REFIT_BUFFER_MEMORY_RATIO"
_DEFAULT_MEMORY_RATIO = 0.3
_CLOSE_TIMEOUT_S = 1.0
"""A part of the 5 s after the deadline within which a refit must have failed."""
_LEAVE_TIMEOUT_S = 5.0
"""For the engines to let go of the group at the end of a run: they end next."""
_ACTOR_START_S = 120.0
"""For an engine's process and its imports, before its server starts."""
_MAX_BUFFER_BYTES = 2 * 2**30
"""Larger buckets gain nothing and the engine allocates each one whole."""
_MIN_BUFFER_BYTES = 2**20
"""Of a computed size; a configured one may be smaller."""


class SGLangDisaggregatedWeightSynchronizer(WeightSynchronizer):
    def __init__(
        self,
        policy: PolicyInterface,
        generation: UpdatableGeneration,
        refit_buffer_size_gb: float | None,
        proof: RefitProof,
    ):
        self._policy = policy
        self._generation = generation
        self._proof = proof
        self._refit_buffer_size_gb = refit_buffer_size_gb
        memory_ratio(os.environ)  # a bad value is told now and not after the model has loaded
        self._buffer_size_bytes = 0
        self._stale = True
        self._connected = False
        self._in_session = False
        self._version = 0
        self._num_recoveries = 0
        self._last_stats = RefitStats()

    @property
    def is_stale(self) -> bool:
        return self._stale

    @property
    def version(self) -> int:
        return self._version

    @property
    def last_stats(self) -> RefitStats:
        """Of the last refit."""
        return self._last_stats

    def mark_stale(self) -> None:
        self._stale = True

    def init_communicator(self) -> None:
        """See `WeightSynchronizer`. Engines that fail here are replaced as in `sync_weights`, which see for what it raises."""
        self._until_done("connecting", self._connect)

    def sync_weights(self, *, timer: Timer | None = None, kv_scales: Any = None) -> None:
        """See `WeightSynchronizer`.

        With `use_fault_tolerance` engines that fail, or may hold a part of the new weights, are replaced and the whole
        model is sent again, as often as `max_replacements` allows.

        Raises:
            TransferError, EnginesFailedError, TimeoutError: generation stays paused and `is_stale` true.
        """
        if kv_scales is not None:
            raise NotImplementedError("kv_scales: the KV cache is not quantised; pass None")
        self._send_until_done(timer or Timer(), self._version + 1)

    def restore_engines(self) -> None:
        """Replace engines that were lost between refits; all then serve what they served, under the same version.

        Raises:
            TransferError, EnginesFailedError, TimeoutError: as `sync_weights`.
        """
        self._send_until_done(Timer(), self._version)

    def metrics(self) -> dict[str, float]:
        stats = self._last_stats
        return {
            "refit/bytes": stats.num_bytes,
            "refit/buckets": stats.num_buckets,
            "refit/tensors": stats.num_tensors,
            "refit/weight_version": self._version,
            "refit/recoveries": self._num_recoveries,
            **{f"refit/{lane}_s": busy_s(stats.spans, lane) for lane in LANES},
            "refit/megabytes_per_s": stats.num_bytes / 1e6 / extent_s(stats.spans) if stats.spans else 0.0,
        }

    def shutdown(self) -> None:
        try:
            self._policy.disconnect_sglang_rollout_engines_distributed(timeout_s=_LEAVE_TIMEOUT_S)
        except (TransferError, TimeoutError) as error:
            # An engine that was lost since the last refit is no reason to fail a run that is done.
            logger.warning("%s", error)

    def _send_until_done(self, timer: Timer, version: int) -> None:
        self._stale = True
        self._until_done(f"refit {version}", lambda deadline: self._refit(timer, deadline, version))
        self._stale = False

    def _until_done(self, what: str, attempt: Callable[[Deadline], None]) -> None:
        while True:
            try:
                self._replace_failed_engines()
                attempt(Deadline(self._generation.refit_timeout_s))
                return
            except (TransferError, EnginesFailedError, TimeoutError) as error:
                self._connected = False
                self._quarantine(error)
                self._close_failed_session()
                if not self._generation.replaces_failed_engines or not self._generation.failed_engines:
                    raise
                logger.warning("%s failed, engines are replaced and all is sent again: %s", what, error)
                self._num_recoveries += 1

    def _refit(self, timer: Timer, deadline: Deadline, version: int) -> None:
        if self._generation.num_new_engines or not self._connected:
            self._connect(deadline)
        ticket = None
        with timer.span("refit"):
            if self._version:  # the first one is proven, and begins with other weights
                ticket = self._policy.prepare_weight_update(
                    buffer_size_bytes=self._buffer_size_bytes, timeout_s=deadline.require("refit")
                )
            self._generation.pause(deadline)
            if self._generation.num_new_engines:  # one was found dead until just now: NCCL would wait for it
                self._connect(deadline)
        with timer.span("refit_verify"):
            if self._proof.begin(deadline):
                self._transfer(deadline, negated=True)
                self._proof.check_reach(deadline)
        with timer.span("refit"):
            self._last_stats = self._transfer(deadline, ticket=ticket)
        with timer.span("refit_verify"):
            self._proof.finish(deadline)
        with timer.span("refit"):
            self._generation.set_weight_version(version, deadline)
            self._generation.resume(deadline)
        self._version = version

    def _quarantine(self, error: Exception) -> None:
        """Whatever may hold a part of the new weights, or did not do as it was told, is never resumed."""
        if isinstance(error, TransferError):
            self._generation.quarantine(error.engines_failed, str(error))
        elif isinstance(error, EnginesFailedError):
            self._generation.quarantine(error.names, str(error))

    def _replace_failed_engines(self) -> None:
        """Also those that the backend found dead since the last refit."""
        if self._generation.replaces_failed_engines and self._generation.failed_engines:
            lost = dict(self._generation.failed_engines)
            start_s = time.perf_counter()
            server = self._policy.cfg.generation.sglang_cfg.sglang_server_config
            new = self._generation.replace_failed(Deadline(server.startup_timeout_s + _ACTOR_START_S))
            logger.warning(
                "replaced %s by %s in %.0f s", ", ".join(lost), ", ".join(new), time.perf_counter() - start_s
            )

    def _connect(self, deadline: Deadline) -> None:
        self._decide_buffer_size(deadline)
        self._policy.connect_sglang_rollout_engines_distributed(
            rollout_engines=self._generation.rollout_engines,
            engine_gpu_counts=self._generation.engine_gpu_counts,
            timeout_s=deadline.require("weight-update group"),
        )
        self._generation.clear_updatable_num_new_engines()
        self._connected = True

    def _transfer(self, deadline: Deadline, *, negated: bool = False, ticket: str | None = None) -> RefitStats:
        self._in_session = True
        self._generation.begin_weight_update(deadline)
        stats = self._policy.update_weights_to_sglang_distributed(
            rollout_engines=self._generation.rollout_engines,
            buffer_size_bytes=self._buffer_size_bytes,
            target_precision="bf16" if self._policy.cfg.precision == "bfloat16" else "fp32",
            negated=negated,
            ticket=ticket,
            timeout_s=deadline.require("refit"),
        )
        self._generation.end_weight_update(deadline)
        self._in_session = False
        return stats

    def _close_failed_session(self) -> None:
        """On engines that are used on: an open session refuses the next update. The first error is the one told."""
        if not self._in_session or not self._generation.rollout_engines:
            return
        self._in_session = False
        try:
            self._generation.end_weight_update(Deadline(_CLOSE_TIMEOUT_S))
        except (RuntimeError, TimeoutError) as error:
            logger.warning("the weight-update session of the failed refit is still open: %s", error)

    def _decide_buffer_size(self, deadline: Deadline) -> None:
        if not self._buffer_size_bytes:
            self._buffer_size_bytes = self._decide_buffer_size_bytes(deadline)
            logger.info("refit buckets of at most %.3f GB", self._buffer_size_bytes / 1e9)

    def _decide_buffer_size_bytes(self, deadline: Deadline) -> int:
        """Once, on the driver: the configured size, or from the least free memory of any trainer rank and engine."""
        if self._refit_buffer_size_gb is not None:
            return max(1, int(self._refit_buffer_size_gb * 1e9))
        free_bytes = min(self._policy.free_memory_bytes(), self._generation.free_memory_bytes(deadline))
        return max(_MIN_BUFFER_BYTES, min(_MAX_BUFFER_BYTES, int(memory_ratio(os.environ) * free_bytes)))


def memory_ratio(environment: Mapping[str, str]) -> float:
    """Part of the free memory that a bucket may take; raises ConfigError when the variable is no such number."""
    text = environment.get(MEMORY_RATIO_VARIABLE, str(_DEFAULT_MEMORY_RATIO))
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0.0 < ratio <= 1.0:
        raise ConfigError([refusal(MEMORY_RATIO_VARIABLE, text, "allowed: a number above 0, at most 1")])
    return ratio
