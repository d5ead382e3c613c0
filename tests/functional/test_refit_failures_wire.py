"""One real SGLang server and a sender in this process: after a failure the server serves on, and takes the whole model."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from worker_receiver import WorkerReceiver

from nemo_rl.distributed.weight_transfer.buckets import NamedTensor, iter_named_tensor_buckets, make_header
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.errors import TransferError
from nemo_rl.distributed.weight_transfer.manifest import Manifest, TensorSpec
from nemo_rl.distributed.weight_transfer.process_group import WeightUpdateGroup
from nemo_rl.distributed.weight_transfer.receiver import GroupSpec, Receiver
from nemo_rl.distributed.weight_transfer.rollout_engines import (
    connect_rollout_engines_from_distributed,
    disconnect_rollout_engines_from_distributed,
)
from nemo_rl.distributed.weight_transfer.sender import BucketSender
from nemo_rl.models.generation.sglang.sglang_worker import SGLangGenerationWorker

logger = logging.getLogger(__name__)

TIMEOUT_S = 60.0
PROMPT_S = 5.0
"""Within this the server answers again; a scheduler left in a broadcast would answer after half an hour."""


class DeadReceiver(WorkerReceiver):
    def join(self, group: GroupSpec, rank_offset: int, timeout_s: float) -> Future[None]:
        def refuse() -> None:
            raise RuntimeError("its process has ended")

        return self._pool.submit(refuse)


@pytest.fixture(scope="module")
def named(tiny_model_folder: Path) -> list[NamedTensor]:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float32)
    return [(name, tensor.detach().contiguous()) for name, tensor in model.named_parameters()]


def manifest_of(named: Sequence[NamedTensor]) -> Manifest:
    return Manifest(tuple(TensorSpec(name, tuple(tensor.shape), tensor.dtype, (name,)) for name, tensor in named))


def connect(engines: Sequence[Receiver], name: str) -> WeightUpdateGroup:
    return connect_rollout_engines_from_distributed(
        rollout_engines=engines,
        engine_gpu_counts=[1] * len(engines),
        group_name=name,
        backend="gloo",
        master_address="127.0.0.1",
        deadline=Deadline(TIMEOUT_S),
    )


def send(engine: Receiver, group: WeightUpdateGroup, named: Sequence[NamedTensor], buffer_size_bytes: int) -> int:
    """Number of buckets."""
    manifest = manifest_of(named)
    sender = BucketSender([engine], group, manifest, Deadline(TIMEOUT_S))
    try:
        for bucket in iter_named_tensor_buckets(iter(named), buffer_size_bytes, manifest):
            sender.send(sender.prepare(bucket))
        sender.finish()
    except TransferError:
        sender.abandon()
        raise
    return sender.stats.num_buckets


@pytest.fixture
def check_recovers(
    shared_engine: SGLangGenerationWorker, named: list[NamedTensor]
) -> Callable[[WorkerReceiver, float, str], None]:
    """Call it after a failure: the server answers within `PROMPT_S` of it, and the whole model brings it back."""
    before = shared_engine.check_weights("checksum")

    def check(engine: WorkerReceiver, failed_s: float, name: str) -> None:
        shared_engine.check_weights("checksum", PROMPT_S)
        logger.info("served again %.3f s after the failure", time.monotonic() - failed_s)
        assert time.monotonic() - failed_s < PROMPT_S
        shared_engine.end_weight_update()
        shared_engine.begin_weight_update()
        group = connect([engine], name)
        assert send(engine, group, named, 20_000) > 3
        shared_engine.end_weight_update()
        disconnect_rollout_engines_from_distributed(rollout_engines=[engine], group=group, deadline=Deadline(TIMEOUT_S))
        logger.info("whole model sent again %.3f s after the failure", time.monotonic() - failed_s)
        assert shared_engine.check_weights("checksum") == before

    return check


def test_a_bucket_refused_before_it_is_received(
    shared_engine: SGLangGenerationWorker, named: list[NamedTensor], check_recovers: Callable[..., None]
) -> None:
    """No session is open, so the server answers 400 and never enters the broadcast."""
    engine = WorkerReceiver(shared_engine)
    group = connect([engine], "refused")
    start_s = time.monotonic()
    with pytest.raises(TransferError, match="engine 0 failed at bucket 0 .* HTTP 400: .*begin_weight_update") as caught:
        send(engine, group, named, 20_000)
    assert time.monotonic() - start_s < PROMPT_S
    assert caught.value.engines_failed == ("engine 0",)
    shared_engine.begin_weight_update()
    check_recovers(engine, time.monotonic(), "after refused")


def test_a_bucket_that_the_engine_cannot_load(
    shared_engine: SGLangGenerationWorker, named: list[NamedTensor], check_recovers: Callable[..., None]
) -> None:
    """Half of the model has new values, then a tensor has a wrong shape: the engine holds parts of both."""
    engine = WorkerReceiver(shared_engine)
    shared_engine.begin_weight_update()
    before = shared_engine.check_weights("checksum")
    spoilt = [(name, tensor + 1.0) for name, tensor in named]
    name, tensor = spoilt[-1]
    spoilt[-1] = (name, torch.zeros(*(2 * size for size in tensor.shape)))
    group = connect([engine], "unloadable")
    with pytest.raises(TransferError, match="engine 0 failed at bucket") as caught:
        send(engine, group, spoilt, 20_000)
    failed_s = time.monotonic()
    assert "The full weights of the ModelRunner are partially updated" in str(caught.value.facts.engine_text)
    assert caught.value.partly_updated
    assert shared_engine.check_weights("checksum", PROMPT_S) != before
    check_recovers(engine, failed_s, "after unloadable")


def test_a_sender_that_ends_in_mid_broadcast(
    shared_engine: SGLangGenerationWorker, named: list[NamedTensor], check_recovers: Callable[..., None]
) -> None:
    """The engine waits for bytes that never come; torch would let it wait half an hour."""
    engine = WorkerReceiver(shared_engine)
    shared_engine.begin_weight_update()
    group = connect([engine], "ended")
    sender = BucketSender([engine], group, manifest_of(named), Deadline(TIMEOUT_S))
    answer = engine.announce(make_header(0, named[:2], flattened=True), group.spec.name, TIMEOUT_S)
    time.sleep(1.0)
    assert not answer.done()
    failed_s = time.monotonic()
    sender.abandon()
    error = answer.exception(timeout=PROMPT_S)
    logger.info("the engine answered %.3f s after: %s", time.monotonic() - failed_s, error)
    assert "Failed to receive weights" in str(error)
    check_recovers(engine, failed_s, "after ended")


def test_an_engine_that_waits_for_another_to_join_is_let_go(
    shared_engine: SGLangGenerationWorker, check_recovers: Callable[..., None]
) -> None:
    engine, dead = WorkerReceiver(shared_engine), DeadReceiver(shared_engine)
    dead.name = "engine 1"
    start_s = time.monotonic()
    with pytest.raises(
        TransferError, match="engine 1 did not join the weight-update group: its process has ended"
    ) as caught:
        connect([engine, dead], "unformed")
    logger.info("connect failed after %.3f s", time.monotonic() - start_s)
    assert caught.value.engines_failed == ("engine 1",)
    shared_engine.begin_weight_update()
    check_recovers(engine, start_s, "after unformed")


def test_one_name_serves_twice_when_the_parting_was_orderly(
    shared_engine: SGLangGenerationWorker, named: list[NamedTensor], check_recovers: Callable[..., None]
) -> None:
    engine = WorkerReceiver(shared_engine)
    for _ in range(2):
        group = connect([engine], "one name")
        disconnect_rollout_engines_from_distributed(rollout_engines=[engine], group=group, deadline=Deadline(TIMEOUT_S))
    shared_engine.begin_weight_update()
    check_recovers(engine, time.monotonic(), "one name")
