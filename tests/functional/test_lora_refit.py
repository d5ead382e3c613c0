"""LoRA and one real SGLang server: what the engine holds and answers is the model with its adapters merged."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from engine_config import HOST, make_policy_config

from nemo_rl.config.schema import AdamWKwargs, DTensorConfig, LoRAConfig, OptimizerConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.sglang.engine_control import EngineControl
from nemo_rl.models.generation.sglang.receiver import HttpReceiver
from nemo_rl.models.generation.sglang.sampler import EngineSampler
from nemo_rl.models.policy.interfaces import LossNormalizer
from nemo_rl.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2
from nemo_rl.utils.ports import ReservedPort


@pytest.fixture
def trainer(tiny_model_folder: Path, tmp_path: Path) -> Iterator[DTensorPolicyWorkerV2]:
    """One rank, in this process."""
    settings = {
        "dtensor_cfg": DTensorConfig(lora_cfg=LoRAConfig(enabled=True, dim=4)),
        "optimizer": OptimizerConfig(kwargs=AdamWKwargs(lr=0.05)),
    }
    with ReservedPort(HOST) as reserved:
        port = reserved.number
    worker = DTensorPolicyWorkerV2(
        cfg=make_policy_config(tiny_model_folder).model_copy(update=settings),
        loss_needs_reference=True,
        model_folder=str(tiny_model_folder),
        tokenizer_folder=None,
        device="cpu",
        rank=0,
        world_size=1,
        master_addr=HOST,
        master_port=port,
        timeout_s=60.0,
        seed=0,
        log_file=str(tmp_path / "trainer.log"),
    )
    yield worker
    worker.shutdown()


def batch(num: int = 1, length: int = 24) -> BatchedDataDict:
    ids = torch.randint(4, 100, (num, length), generator=torch.Generator().manual_seed(num))
    masks = {"token_mask": torch.ones(num, length), "sample_mask": torch.ones(num)}
    return BatchedDataDict({"input_ids": ids, "input_lengths": torch.full((num,), length), **masks})


def likelihood(
    logprobs: torch.Tensor, data: BatchedDataDict, normalizer: LossNormalizer
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -logprobs.sum() / normalizer.num_tokens, {}


def refit(trainer: DTensorPolicyWorkerV2, engine: HttpReceiver) -> dict[str, str]:
    """The engine's checksums afterwards."""
    server = engine.control
    server.begin_weight_update()
    trainer.update_weights_to_sglang_distributed(
        rollout_engines=[engine], buffer_size_bytes=50_000, target_precision="fp32"
    )
    server.end_weight_update()
    server.invalidate_kv_cache()
    return server.checksums()


def test_the_engine_holds_the_merged_model_bit_by_bit_and_answers_as_the_trainer_does(
    trainer: DTensorPolicyWorkerV2,
    shared_engine: EngineControl,
    make_generation: Callable[..., EngineSampler],
    tiny_model_folder: Path,
    tmp_path: Path,
) -> None:
    original, engine = shared_engine.checksums(), HttpReceiver(shared_engine, takes_flattened=True)
    trainer.connect_sglang_rollout_engines_distributed(
        rollout_engines=[engine], engine_gpu_counts=[1], group_name="lora"
    )
    try:
        assert refit(trainer, engine) == original
        for number in range(2):
            before = shared_engine.checksums()
            assert trainer.train(batch(), likelihood).grad_norm > 0
            sent = refit(trainer, engine)
            assert {name for name in sent if sent[name] != before[name]} == {name for name in sent if "_proj" in name}
            out = make_generation().generate(batch(4))
            data = BatchedDataDict(input_ids=out["output_ids"], input_lengths=out["unpadded_sequence_lengths"])
            answered = out["logprobs"] != 0
            difference = (trainer.get_logprobs(data)["logprobs"] - out["logprobs"])[answered].abs()
            assert difference.mean() < 1e-3
            trainer.export_hf(str(tmp_path / f"merged{number}"))
            shared_engine.update_weights_from_disk(str(tmp_path / f"merged{number}"))
            assert shared_engine.checksums() == sent
    finally:
        trainer.disconnect_sglang_rollout_engines_distributed()
        shared_engine.update_weights_from_disk(str(tiny_model_folder))
        shared_engine.invalidate_kv_cache()
    assert shared_engine.checksums() == original
