"""Two ranks that share every matrix send to one real SGLang server, five times in a row."""

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_config import make_policy_config

from nemo_rl.config.schema import PolicyConfig
from nemo_rl.models.generation.sglang.engine_control import EngineControl
from nemo_rl.models.generation.sglang.receiver import HttpReceiver
from nemo_rl.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2

NUM_REFITS = 5
BUCKET_BYTES = 100_000


def make_trainer(folder: Path, rank: int, port: int) -> DTensorPolicyWorkerV2:
    cfg = make_policy_config(folder)
    settings = {**cfg.model_dump(by_alias=True), "dtensor_cfg": {"tensor_parallel_size": 2}}
    return DTensorPolicyWorkerV2(
        cfg=PolicyConfig.model_validate(settings),
        loss_needs_reference=False,
        model_folder=str(folder),
        tokenizer_folder=None,
        device="cpu",
        rank=rank,
        world_size=2,
        master_addr="127.0.0.1",
        master_port=port,
        timeout_s=120.0,
        seed=0,
        log_file=os.devnull,
    )


def refit(trainer: DTensorPolicyWorkerV2, engines: list[Any], *, negated: bool = False) -> None:
    trainer.update_weights_to_sglang_distributed(
        rollout_engines=engines, buffer_size_bytes=BUCKET_BYTES, target_precision="fp32", negated=negated
    )


def connect_trainer(trainer: DTensorPolicyWorkerV2, engines: list[Any]) -> None:
    trainer.connect_sglang_rollout_engines_distributed(
        rollout_engines=engines, engine_gpu_counts=[1] * len(engines), group_name="tensor_parallel"
    )


def rank_1(_: int, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    trainer = make_trainer(folder, 1, port)
    connect_trainer(trainer, [])
    for number in range(1 + NUM_REFITS):
        refit(trainer, [], negated=number == 0)
    trainer.disconnect_sglang_rollout_engines_distributed()
    trainer.shutdown()


@pytest.fixture
def other_rank(tiny_model_folder: Path) -> Any:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = torch.multiprocessing.spawn(rank_1, (tiny_model_folder, port), nprocs=1, join=False)
    yield context, port
    for process in context.processes:
        process.kill()


def test_five_refits_from_two_tensor_parallel_ranks_are_what_the_engine_loads_from_disk(
    shared_engine: EngineControl, tiny_model_folder: Path, other_rank: Any, record_property: Any
) -> None:
    context, port = other_rank
    from_disk = shared_engine.checksums()
    trainer, engine = make_trainer(tiny_model_folder, 0, port), HttpReceiver(shared_engine, takes_flattened=True)
    connect_trainer(trainer, [engine])
    for number in range(1 + NUM_REFITS):
        start_s = time.monotonic()
        shared_engine.begin_weight_update()
        refit(trainer, [engine], negated=number == 0)
        shared_engine.end_weight_update()
        record_property(f"refit_{number}_s", round(time.monotonic() - start_s, 3))
        digests = shared_engine.checksums()
        assert digests.keys() == from_disk.keys()
        if number == 0:
            assert any(digests[name] != from_disk[name] for name in digests)
        else:
            assert digests == from_disk
    trainer.disconnect_sglang_rollout_engines_distributed()
    trainer.shutdown()
    assert context.join(timeout=30)
