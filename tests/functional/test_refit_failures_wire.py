"""One real SGLang server and a sender in this process: after a failure the server serves on, and takes the whole model."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl.distributed.weight_transfer.buckets import NamedTensor, iter_named_tensor_buckets, make_header
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.errors import TransferError
from nemo_rl.distributed.weight_transfer.manifest import Manifest, TensorSpec
from nemo_rl.distributed.weight_transfer.process_group import WeightUpdateGroup
from nemo_rl.distributed.weight_transfer.receiver import Receiver
from nemo_rl.distributed.weight_transfer.rollout_engines import (
    connect_rollout_engines_from_distributed,
    disconnect_rollout_engines_from_distributed,
)
from nemo_rl.distributed.weight_transfer.sender import BucketSender
from nemo_rl.models.generation.sglang.access import AccessKeys
from nemo_rl.models.generation.sglang.engine_control import EngineControl
from nemo_rl.models.generation.sglang.receiver import HttpReceiver

logger = logging.getLogger(__name__)

TIMEOUT_S = 60.0
DEAD_URL = "http://127.0.0.1:1"
"""Nobody listens there."""
PROMPT_S = 5.0
"""Within this the server answers again; a scheduler left in a broadcast would answer after half an hour."""


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
    shared_engine: EngineControl, named: list[NamedTensor]
) -> Callable[[HttpReceiver, float, str], None]:
    """Call it after a failure: the server answers within `PROMPT_S` of it, and the whole model brings it back."""
    before = shared_engine.checksums()

    def check(engine: HttpReceiver, failed_s: float, name: str) -> None:
        shared_engine.checksums(PROMPT_S)
        logger.info("served again %.3f s after the failure", time.monotonic() - failed_s)
        assert time.monotonic() - failed_s < PROMPT_S
        shared_engine.end_weight_update()
        shared_engine.begin_weight_update()
        group = connect([engine], name)
        assert send(engine, group, named, 20_000) > 3
        shared_engine.end_weight_update()
        disconnect_rollout_engines_from_distributed(rollout_engines=[engine], group=group, deadline=Deadline(TIMEOUT_S))
        logger.info("whole model sent again %.3f s after the failure", time.monotonic() - failed_s)
        assert shared_engine.checksums() == before

    return check


def test_a_bucket_refused_before_it_is_received(
    shared_engine: EngineControl, named: list[NamedTensor], check_recovers: Callable[..., None]
) -> None:
    """No session is open, so the server answers 400 and never enters the broadcast."""
    engine = HttpReceiver(shared_engine, takes_flattened=True)
    group = connect([engine], "refused")
    start_s = time.monotonic()
    with pytest.raises(
        TransferError, match="engine 0 at .* failed at bucket 0 .* HTTP 400: .*begin_weight_update"
    ) as caught:
        send(engine, group, named, 20_000)
    assert time.monotonic() - start_s < PROMPT_S
    assert caught.value.engines_failed == (engine.name,)
    shared_engine.begin_weight_update()
    check_recovers(engine, time.monotonic(), "after refused")


def test_a_bucket_that_the_engine_cannot_load(
    shared_engine: EngineControl, named: list[NamedTensor], check_recovers: Callable[..., None]
) -> None:
    """Half of the model has new values, then a tensor has a wrong shape: the engine holds parts of both."""
    engine = HttpReceiver(shared_engine, takes_flattened=True)
    shared_engine.begin_weight_update()
    before = shared_engine.checksums()
    spoilt = [(name, tensor + 1.0) for name, tensor in named]
    name, tensor = spoilt[-1]
    spoilt[-1] = (name, torch.zeros(*(2 * size for size in tensor.shape)))
    group = connect([engine], "unloadable")
    with pytest.raises(TransferError, match="engine 0 at .* failed at bucket") as caught:
        send(engine, group, spoilt, 20_000)
    failed_s = time.monotonic()
    assert "The full weights of the ModelRunner are partially updated" in str(caught.value.facts.engine_text)
    assert caught.value.partly_updated
    assert shared_engine.checksums(PROMPT_S) != before
    check_recovers(engine, failed_s, "after unloadable")


def test_a_sender_that_ends_in_mid_broadcast(
    shared_engine: EngineControl, named: list[NamedTensor], check_recovers: Callable[..., None]
) -> None:
    """The engine waits for bytes that never come; torch would let it wait half an hour."""
    engine = HttpReceiver(shared_engine, takes_flattened=True)
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
    shared_engine: EngineControl, check_recovers: Callable[..., None]
) -> None:
    engine = HttpReceiver(shared_engine, takes_flattened=True)
    dead = HttpReceiver(EngineControl("engine 1", DEAD_URL, TIMEOUT_S, AccessKeys.make()), takes_flattened=True)
    start_s = time.monotonic()
    with pytest.raises(
        TransferError, match="engine 1 at .* did not join the weight-update group: .*Connection refused"
    ) as caught:
        connect([engine, dead], "unformed")
    logger.info("connect failed after %.3f s", time.monotonic() - start_s)
    assert caught.value.engines_failed == (dead.name,)
    shared_engine.begin_weight_update()
    check_recovers(engine, start_s, "after unformed")


def test_one_name_serves_twice_when_the_parting_was_orderly(
    shared_engine: EngineControl, named: list[NamedTensor], check_recovers: Callable[..., None]
) -> None:
    engine = HttpReceiver(shared_engine, takes_flattened=True)
    for _ in range(2):
        group = connect([engine], "one name")
        disconnect_rollout_engines_from_distributed(rollout_engines=[engine], group=group, deadline=Deadline(TIMEOUT_S))
    shared_engine.begin_weight_update()
    check_recovers(engine, time.monotonic(), "one name")
