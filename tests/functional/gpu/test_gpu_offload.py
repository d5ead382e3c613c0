"""Where the shards of a policy with `cpu_offload` lie: on the host, after whatever a refit has come to."""

from pathlib import Path

import pytest
import torch
from gpu_stack import SMALL_BATCH, TIMEOUT_S, checksums, make_prompts, send, started, train_once

from nemo_rl.algorithms.grpo import Participants
from nemo_rl.distributed.weight_transfer.errors import TransferError
from nemo_rl.models.model_source import resolve_model

pytestmark = pytest.mark.gpu


def shard_devices(run: Participants) -> set[str]:
    (devices,) = run.policy.workers.run("shard_devices", timeout_s=TIMEOUT_S)
    return devices


def test_shards_in_host_memory_are_there_after_good_and_failed_refits(tmp_path: Path) -> None:
    with started(tmp_path, "policy.dtensor_cfg.cpu_offload=true", *SMALL_BATCH) as run:
        assert shard_devices(run) == {"cpu"}
        first = checksums(run)
        train_once(run)
        assert shard_devices(run) == {"cpu"}
        run.synchronizer.sync_weights()
        assert shard_devices(run) == {"cpu"}
        assert checksums(run) != first
        # Straight after loading.
        assert send(run, resolve_model("smollm2-135m-instruct")) == first
        assert shard_devices(run) == {"cpu"}
        (engine,) = run.generation.rollout_engines
        engine.control.destroy_weights_update_group(run.policy._group_name)
        with pytest.raises(TransferError, match="bucket 0"):
            run.synchronizer.sync_weights()
        assert shard_devices(run) == {"cpu"}
        logprobs = run.policy.get_logprobs(make_prompts(8))["logprobs"]
        assert torch.isfinite(logprobs).all()
        assert shard_devices(run) == {"cpu"}
