"""A trainer rank and an engine on one GPU, started as a run starts them."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import ray
import torch
from torch.distributed.tensor import DTensor

from nemo_rl.algorithms.grpo import Participants
from nemo_rl.config.loader import load_config
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.models.policy.parallelize import load_sharded_model
from nemo_rl.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2
from nemo_rl.setup import prepare_inputs, start_participants
from nemo_rl.utils.metrics import MetricsLogger
from nemo_rl.utils.run_folder import make_run_folder

# Ray's workers do not have this folder on their path.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "examples/configs/grpo_one_gpu.yaml"
SERVER = "policy.generation.sglang_cfg.sglang_server_config"
# Kernels that every GPU has, no capture of graphs, and a cache so small that several runs fit on one GPU.
SERVER_ARGS = (
    "--attention-backend=triton",
    "--sampling-backend=pytorch",
    "--disable-cuda-graph",
    "--max-total-tokens=32768",
)
TIMEOUT_S = 120.0
VOCAB_SIZE = 49152
"""Of the default model."""
SMALL_BATCH = (
    "policy.train_global_batch_size=8",
    "policy.train_micro_batch_size=4",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=2",
    "policy.optimizer.kwargs.lr=1e-3",
)
"""What `train_once` goes with."""


class ReloadingWorker(DTensorPolicyWorkerV2):
    def load(self, folder: str) -> None:
        """Take other weights; the optimizer keeps the old ones, so nothing may be trained after it."""
        self.model, self.export_plan = load_sharded_model(folder, self.mesh, self.shard_options)

    def shard_devices(self) -> set[str]:
        """Where parameters, gradients and moments lie."""
        parameters = list(self.model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        shards = [*parameters, *gradients, *(value for value in moments if isinstance(value, DTensor))]
        return {shard.to_local().device.type for shard in shards}


def make_overrides(log_dir: Path, *overrides: str, server_args: Sequence[str] = ()) -> list[str]:
    arguments = ",".join(f"'{argument}'" for argument in (*SERVER_ARGS, *server_args))
    return [f"logger.log_dir={log_dir}", f"{SERVER}.extra_args=[{arguments}]", *overrides]


@contextmanager
def started(
    log_dir: Path,
    *overrides: str,
    server_args: Sequence[str] = (),
    worker_class: type[ReloadingWorker] = ReloadingWorker,
) -> Iterator[Participants]:
    """Everything of a run; the first refit is done."""
    config = load_config(CONFIG, make_overrides(log_dir, *overrides, server_args=server_args))
    folder = make_run_folder(config.logger.log_dir)
    with (
        MetricsLogger(folder.path, num_steps=1, tensorboard=False) as metrics,
        start_participants(config, prepare_inputs(config), folder, metrics, worker_class) as run,
    ):
        run.synchronizer.init_communicator()
        run.synchronizer.sync_weights()
        yield run


def checksums(run: Participants) -> dict[str, str]:
    (digests,) = run.generation.weight_checksums(Deadline(TIMEOUT_S))
    return digests


def checksums_of(run: Participants, folder: Path) -> dict[str, str]:
    """Those of the engine after it has loaded a folder from disk."""
    run.generation.update_weights_from_disk(str(folder), Deadline(TIMEOUT_S))
    return checksums(run)


def send(run: Participants, folder: Path) -> dict[str, str]:
    """Load a folder in the trainer and refit; returns the engine's checksums."""
    run.policy.workers.run("load", timeout_s=TIMEOUT_S, folder=str(folder))
    run.synchronizer.sync_weights()
    return checksums(run)


def make_prompts(num: int, length: int = 24) -> BatchedDataDict:
    ids = torch.randint(4, VOCAB_SIZE, (num, length), generator=torch.Generator().manual_seed(num))
    return BatchedDataDict({"input_ids": ids, "input_lengths": torch.full((num,), length)})


def train_once(run: Participants) -> None:
    """One optimizer step."""
    data = make_prompts(8)
    shape = data["input_ids"].shape
    data["token_mask"], data["sample_mask"] = torch.ones(shape), torch.ones(8)
    data["advantages"] = torch.linspace(-1, 1, 8)
    data["prev_logprobs"] = data["generation_logprobs"] = run.policy.get_logprobs(data)["logprobs"]
    data["reference_logprobs"] = run.policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    run.policy.train(data, run.loss_fn)
