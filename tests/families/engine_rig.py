"""Real engines and FSDP2 trainers of 1 and 2 ranks, to which families come one after the other."""

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import psutil
import ray
import torch
from family import Family, write_checkpoint
from transformers import AutoTokenizer
from vision_requests import make_generate_body, make_picture, read_logprobs, read_token_ids

from nemo_rl.config.layout import Layout
from nemo_rl.config.schema import PolicyConfig
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, start_ray
from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.engine_rules import CONSTANT_TENSORS
from nemo_rl.distributed.weight_transfer.manifest import Manifest
from nemo_rl.models.generation.sglang.sglang_generation import SGLangGeneration
from nemo_rl.models.model_source import read_config
from nemo_rl.models.policy.lm_policy import Policy
from nemo_rl.models.policy.parallelize import load_sharded_model
from nemo_rl.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2

# Ray's workers do not have this folder on their path.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

RANK_COUNTS = (1, 2)
BUCKET_BYTES = (1, 2**20, 2**30)
"""One tensor, or what the engine joins; 1 MiB; the whole model."""
TIMEOUT_S = 120.0
Digests = dict[str, str]


class FamilyWorker(DTensorPolicyWorkerV2):
    def load(self, folder: str) -> Manifest:
        """Take another checkpoint in the place of the one that the worker was made with."""
        self.model, self.export_plan = load_sharded_model(folder, self.mesh, self.shard_options)
        return self.export_plan.manifest

    def scale(self, name: str, factor: float) -> None:
        """Multiply one parameter, as training might."""
        with torch.no_grad():
            self.model.get_parameter(name).mul_(factor)

    def resident_bytes(self) -> int:
        return int(psutil.Process().memory_info().rss)


@dataclass(frozen=True)
class Row:
    """What one family showed."""

    family: str
    num_tensors: int
    num_bytes: int
    num_renamed: int
    num_digests: int
    unmoved: tuple[str, ...]
    """Digests that are the same for both checkpoints and so tell nothing, but for constants."""
    num_equal: int
    """Digests equal to those of the checkpoint loaded from disk, in the worst of all refits."""
    num_refits: int
    answers: str
    """What `/generate` was asked and answered as after a load from disk."""
    refit_s: float
    """Of the whole model in one bucket, from 2 ranks."""
    total_s: float


class EngineRig:
    def __init__(self, log_folder: Path):
        self._folder = log_folder
        self._stack = ExitStack()

    def __enter__(self) -> "EngineRig":
        with contextlib.ExitStack() as stack:
            # The health check generates a token, which ends an engine that can only hold weights.
            no_generation = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
            stack.enter_context(mock.patch.dict(os.environ, no_generation))
            start_ray(device="cpu", num_slots=1 + sum(RANK_COUNTS), num_nodes=1)
            stack.callback(ray.shutdown)
            self._engine_slot = self._cluster("engine", 1)
            self.policies = {num: Policy(cfg=self._config(()), worker_class=FamilyWorker) for num in RANK_COUNTS}
            self._started: set[int] = set()
            for policy in self.policies.values():
                stack.callback(policy.shutdown)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def prove(self, family: Family, then: Callable[[SGLangGeneration, Path], None] | None = None) -> Row:
        """Write two checkpoints, start the engine on the first and send both in every way.

        Args:
            then: called with the engine at the end, and with the checkpoint that it holds.

        Raises:
            AssertionError: the engine loads from disk what it then does not hold, or answers otherwise than after a
                load from disk.
        """
        start_s = time.monotonic()
        folder = self._folder / family.architecture / str(int(time.monotonic_ns()))
        folders = [folder / name for name in ("w0", "w1")]
        for seed, target in enumerate(folders):
            write_checkpoint(family, target, seed=seed)
        with self.engine(family, folders[0], folder) as generation:
            row = self._prove(family, generation, folders, start_s)
            if then is not None:
                then(generation, folders[0])
            return row

    def _prove(self, family: Family, generation: SGLangGeneration, folders: list[Path], start_s: float) -> Row:
        first = digests_of(generation)
        generation.update_weights_from_disk(str(folders[1]), Deadline(TIMEOUT_S))
        second, answers = digests_of(generation), ask(family, generation)
        _restore(generation, folders[0], first)
        equal, seconds = [], math.nan
        for num_ranks in RANK_COUNTS:
            manifest = self.load(num_ranks, folders[1])
            self.connect(num_ranks, generation)
            for bucket_bytes in BUCKET_BYTES:
                seconds = self.refit(num_ranks, generation, bucket_bytes)
                equal.append(_num_equal(second, digests_of(generation)))
                assert ask(family, generation) == answers, f"{family.name}: another answer than after a load from disk"
                _restore(generation, folders[0], first)
        generation.update_weights_from_disk(str(folders[1]), Deadline(TIMEOUT_S))
        self.load(2, folders[0])
        self.refit(2, generation, BUCKET_BYTES[1])
        equal.append(_num_equal(first, digests_of(generation)))
        for policy in self.policies.values():
            policy.disconnect_sglang_rollout_engines_distributed()
        return Row(
            family=family.name,
            num_tensors=len(manifest.specs),
            num_bytes=manifest.num_bytes,
            num_renamed=sum((spec.name,) != spec.sources for spec in manifest.specs),
            num_digests=len(first),
            unmoved=tuple(name for name in first if first[name] == second[name] and not CONSTANT_TENSORS.search(name)),
            num_equal=min(equal),
            num_refits=len(equal),
            answers=", ".join(answers),
            refit_s=seconds,
            total_s=time.monotonic() - start_s,
        )

    def load(self, num_ranks: int, folder: Path) -> Manifest:
        policy = self.policies[num_ranks]
        if num_ranks not in self._started:
            policy.launch(
                self._cluster(f"trainers{num_ranks}", num_ranks),
                model_folder=folder,
                device="cpu",
                needs_reference=False,
                seed=0,
                log_folder=self._folder,
            )
            self._started.add(num_ranks)
        manifests = policy.workers.run("load", timeout_s=TIMEOUT_S, folder=str(folder))
        assert all(manifest == manifests[0] for manifest in manifests)
        manifest: Manifest = manifests[0]
        return manifest

    def connect(self, num_ranks: int, generation: SGLangGeneration) -> None:
        self.policies[num_ranks].connect_sglang_rollout_engines_distributed(
            rollout_engines=generation.rollout_engines, engine_gpu_counts=generation.engine_gpu_counts
        )

    def refit(self, num_ranks: int, generation: SGLangGeneration, bucket_bytes: int) -> float:
        """Seconds."""
        deadline = Deadline(TIMEOUT_S)
        generation.pause(deadline)
        start_s = time.monotonic()
        generation.begin_weight_update(deadline)
        self.policies[num_ranks].update_weights_to_sglang_distributed(
            rollout_engines=generation.rollout_engines, buffer_size_bytes=bucket_bytes
        )
        generation.end_weight_update(deadline)
        seconds = time.monotonic() - start_s
        generation.resume(deadline)
        return seconds

    def _cluster(self, name: str, num_bundles: int) -> RayVirtualCluster:
        return RayVirtualCluster(name=name, slots=[1] * num_bundles, device="cpu")

    @contextlib.contextmanager
    def engine_on(self, family: Family, folder: Path) -> Iterator[tuple[SGLangGeneration, Path]]:
        """An engine on a checkpoint of the family, and that checkpoint."""
        write_checkpoint(family, folder / "w0", seed=0)
        with self.engine(family, folder / "w0", folder) as generation:
            yield generation, folder / "w0"

    @contextlib.contextmanager
    def engine(self, family: Family, model_folder: Path, log_folder: Path) -> Iterator[SGLangGeneration]:
        layout = Layout(num_nodes=1, num_train_slots=1, num_engines=1, num_slots_per_engine=1)
        generation = SGLangGeneration(cfg=self._config(family.server_args), layout=layout, device="cpu")
        try:
            generation.launch(
                self._engine_slot,
                model_folder=model_folder,
                tokenizer=AutoTokenizer.from_pretrained(model_folder),
                log_folder=log_folder,
                image_token_id=getattr(read_config(model_folder), "image_token_id", None),
            )
            generation.wait_ready()
            yield generation
        finally:
            generation.shutdown()

    def _config(self, server_args: tuple[str, ...]) -> PolicyConfig:
        server = {"sglang_server_concurrency": 4, "startup_timeout_s": 300.0, "extra_args": list(server_args)}
        return PolicyConfig.model_validate(
            {
                "model_name": "tiny",
                "train_global_batch_size": 2,
                "train_micro_batch_size": 1,
                "max_total_sequence_length": 512,
                "generation": {"max_new_tokens": 16, "sglang_cfg": {"sglang_server_config": server}},
            }
        )


def digests_of(generation: SGLangGeneration) -> Digests:
    (digests,) = generation.weight_checksums(Deadline(TIMEOUT_S))
    return digests


def _restore(generation: SGLangGeneration, folder: Path, expected: Digests) -> None:
    generation.update_weights_from_disk(str(folder), Deadline(TIMEOUT_S))
    assert digests_of(generation) == expected, "loading the first checkpoint again does not restore it"


def _num_equal(expected: Digests, found: Digests) -> int:
    assert expected.keys() == found.keys()
    return sum(expected[name] == found[name] for name in expected)


def ask(family: Family, generation: SGLangGeneration) -> dict[str, Any]:
    """Tokens and log-probs of a greedy answer to a text, and to a picture where the family takes one."""
    if not family.generates:
        return {}
    pictures = {"text": None} | ({"image": make_picture(0)} if family.image_prompt else {})
    url = generation.rollout_engines[0].control.url
    answers = {}
    for kind, picture in pictures.items():
        response = httpx.post(
            f"{url}/generate",
            json=make_generate_body(family, picture=picture),
            headers=generation.keys.headers(admin=False),
            timeout=TIMEOUT_S,
        )
        assert response.status_code == 200, f"{family.name}: {response.text}"
        answer = response.json()
        logprobs = read_logprobs(answer)
        assert torch.isfinite(torch.tensor(logprobs)).all(), f"{family.name}: {logprobs}"
        answers[kind] = (read_token_ids(answer), logprobs)
    return answers
