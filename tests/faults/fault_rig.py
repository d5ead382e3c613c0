"""Real trainer ranks and real engines that can be told to fail, and what is asked of them afterwards."""

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import fault_proxy
import faulty_workers
import psutil
import ray
import torch
from fault_proxy import EngineFault
from faulty_workers import FaultyEngine, FaultyTrainer, RankFault

from nemo_rl import setup
from nemo_rl.algorithms.grpo import Participants, check_versions, prepare_batch, sample
from nemo_rl.config.loader import load_config
from nemo_rl.config.schema import MasterConfig
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.experience.rollouts import Rollout
from nemo_rl.models.generation.interfaces import EnginesFailedError
from nemo_rl.models.generation.sglang.sglang_generation import SGLangGeneration
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.utils.metrics import MetricsLogger
from nemo_rl.utils.run_folder import make_run_folder

# Ray's workers do not have this folder on their path.
for module in (fault_proxy, faulty_workers, sys.modules[__name__]):
    ray.cloudpickle.register_pickle_by_value(module)

ROOT = Path(__file__).parents[2]
REFIT_TIMEOUT_S = 20.0
CALL_TIMEOUT_S = 120.0
_GONE_S = 20.0
_TOLERANCE = "policy.generation.sglang_cfg.sglang_fault_tolerance_config"
_SERVER = "policy.generation.sglang_cfg.sglang_server_config"


class RestartablePolicy(Policy):
    """Ranks that have ended can be started again, with the weights that they started from."""

    def launch(self, cluster: RayVirtualCluster, **arguments: Any) -> None:
        self._launched = cluster, arguments
        super().launch(cluster, **arguments)

    def restart(self) -> None:
        cluster, arguments = self._launched
        super().launch(cluster, **arguments)
        self.wait_ready()


@dataclass
class FaultRig:
    """One run; its first refit is done."""

    config: MasterConfig
    run: Participants
    folder: Path
    batch: Rollout | None = None
    """Sampled from the engines as they are now, to train on."""
    seen: dict[int, psutil.Process] = field(default_factory=dict)
    """Every process that an engine or a rank has had."""

    @property
    def generation(self) -> SGLangGeneration:
        assert isinstance(self.run.generation, SGLangGeneration)
        return self.run.generation

    @property
    def policy(self) -> RestartablePolicy:
        assert isinstance(self.run.policy, RestartablePolicy)
        return self.run.policy

    def engine(self, index: int) -> Any:
        """The actor of the ready engine at this place."""
        return self._actors()[index]

    def _actors(self) -> list[Any]:
        return [engine.actor for engine in self.generation._fleet.ready()]

    def arm_engine(self, index: int, fault: EngineFault) -> None:
        ray.get(self.engine(index).arm.remote(fault), timeout=CALL_TIMEOUT_S)

    def disarm(self) -> bool:
        """Whether a fault was still waiting for its call on an engine that is left."""
        actors = self._actors()
        waiting = ray.get([actor.is_armed.remote() for actor in actors], timeout=CALL_TIMEOUT_S)
        ray.get([actor.arm.remote(None) for actor in actors], timeout=CALL_TIMEOUT_S)
        return any(waiting)

    def arm_rank(self, rank: int, fault: RankFault) -> None:
        per_rank = [(fault if rank == other else None,) for other in range(self.policy.workers.num_ranks)]
        self.policy.workers.run("arm", timeout_s=CALL_TIMEOUT_S, per_rank=per_rank)

    def own_urls(self) -> list[str]:
        return ray.get([actor.own_url.remote() for actor in self._actors()], timeout=CALL_TIMEOUT_S)

    def rollout(self) -> int:
        """Sample a batch; returns the number of samples, every one of the last refit's version."""
        prompts = self.run.train_prompts.next_batch()
        prompts = prompts.repeat_interleave(self.config.grpo.num_generations_per_prompt)
        self.batch = sample(self.run, prompts)
        check_versions(self.batch, self.run.synchronizer.version)
        assert len(self.batch.responses) == prompts.size
        return prompts.size

    def train(self) -> None:
        """One optimizer step on the batch. The model learns nothing: its advantages are drawn, so that weights move."""
        if self.batch is None:
            self.rollout()
        assert self.batch is not None
        batch = prepare_batch(self.config, self.policy, self.batch)
        batch["advantages"] = torch.randn(batch["advantages"].shape)
        self.policy.train(batch, self.run.loss_fn)
        self.run.synchronizer.mark_stale()

    def remove_engine(self) -> None:
        """The last one; the rest is refit."""
        self.generation.remove_engine(self.generation.rollout_engines[-1].name, Deadline(CALL_TIMEOUT_S))
        self.run.synchronizer.sync_weights()
        self.rollout()

    def restart_trainers(self) -> None:
        """New ranks in the place of those that have ended, and a group of theirs with the engines that are left."""
        self.policy.restart()
        self.train()  # another model than the engines', which may hold the first
        with suppress(EnginesFailedError):  # the session of the refit in which the old ranks ended may be open
            self.generation.end_weight_update(Deadline(CALL_TIMEOUT_S))
        self.run.synchronizer.init_communicator()
        self.run.synchronizer.sync_weights()

    def digests_are_those_of_the_export(self) -> bool:
        """Whether every engine holds what it would load from the folder that the trainer exports; it then does."""
        sent = self.generation.weight_checksums(Deadline(CALL_TIMEOUT_S))
        export = self.folder / "export"
        try:
            self.policy.export_hf(str(export))
            self.generation.update_weights_from_disk(str(export), Deadline(CALL_TIMEOUT_S))
        finally:
            shutil.rmtree(export, ignore_errors=True)
        loaded = self.generation.weight_checksums(Deadline(CALL_TIMEOUT_S))
        return len(sent[0]) > 10 and sent == loaded == sent[:1] * len(sent)

    def note_processes(self) -> set[int]:
        """Remember what lives now; returns the process ids of ready engines and of ranks."""
        families = [actor.family.remote() for actor in self._actors()]
        pids = {pid for family in ray.get(families, timeout=CALL_TIMEOUT_S) for pid in family}
        pids |= set(self.policy.workers.run("process_id", timeout_s=CALL_TIMEOUT_S))
        for pid in pids - self.seen.keys():
            with suppress(psutil.NoSuchProcess):
                self.seen[pid] = psutil.Process(pid)
        return pids

    def orphans(self, living: set[int]) -> list[str]:
        """Command lines of processes of engines and ranks that have been replaced, still there 20 s later."""
        dead, limit = [p for pid, p in self.seen.items() if pid not in living], Deadline(_GONE_S)
        while (left := [p for p in dead if _is_there(p)]) and limit.remaining_s():
            time.sleep(0.2)
        return [" ".join(process.cmdline())[:100] for process in left]


def _is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def start_rig(
    folder: Path, *, num_engines: int, refit_timeout_s: float = REFIT_TIMEOUT_S, **keys: Any
) -> Iterator[FaultRig]:
    """Two ranks and the engines of a tiny model, in several buckets; `keys`: of fault tolerance."""
    tolerance = {
        "use_fault_tolerance": True,
        "max_replacements": 1000,
        "health_check_first_wait_s": 0.0,
        "health_check_interval_s": 1.0,
        "health_check_timeout_s": 6.0,
        "health_check_max_failures": 2,
        **keys,
    }
    config = load_config(
        ROOT / "examples/configs/grpo_tiny_cpu.yaml",
        [
            f"logger.log_dir={folder}",
            f"cluster.gpus_per_node={2 + num_engines}",
            f"policy.generation.colocated.resources.gpus_per_node={num_engines}",
            f"{_SERVER}.refit_timeout_s={refit_timeout_s}",
            "policy.refit_buffer_size_gb=0.00006",
            "policy.optimizer.kwargs.lr=1e-3",
            "policy.scheduler.kwargs.total_iters=10000",
            *(f"{_TOLERANCE}.{name}={value}" for name, value in tolerance.items()),
        ],
    )
    run_folder = make_run_folder(config.logger.log_dir)
    faulty = partial(SGLangGeneration, worker_class=FaultyEngine)
    with (
        mock.patch.object(setup, "SGLangGeneration", faulty),
        mock.patch.object(setup, "Policy", RestartablePolicy),
        MetricsLogger(run_folder.path, num_steps=1, tensorboard=False) as metrics,
        setup.start_participants(config, setup.prepare_inputs(config), run_folder, metrics, FaultyTrainer) as run,
    ):
        run.synchronizer.init_communicator()
        run.synchronizer.sync_weights()
        rig = FaultRig(config, run, folder)
        rig.note_processes()
        yield rig
