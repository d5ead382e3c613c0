"""A tiny vision-language model, batches in which some samples have pictures, and training runs of a rank on them."""

import os
from dataclasses import dataclass
from typing import Any

import policy_cases as cases
import torch
from transformers import Qwen3VLConfig

from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.export import dtensor_params_generator
from nemo_rl.models.policy.parallelize import fsdp_modules
from nemo_rl.models.policy.vision import GRIDS, PIXELS, PictureFormat, Pictures, find_vision_tower
from nemo_rl.models.policy.workers.dtensor_policy_worker_v2 import DTensorPolicyWorkerV2

GRIDS_OF_ROWS: tuple[tuple[tuple[int, int, int], ...], ...] = (
    ((1, 4, 4),), (), ((1, 2, 4), (1, 4, 2)), ((1, 2, 2),), (), (), (), (),
)  # fmt: skip
"""Patches (time, height, width) of each picture of each sample: of two ranks the second has none."""


def make_picture_batch(seed: int, config: Qwen3VLConfig) -> BatchedDataDict:
    """`policy_cases.make_batch`, whose prompts begin with the pictures of the sample, a token of text behind each."""
    form = PictureFormat.of(config)
    text = cases.make_batch(seed, vocab=100)
    pictures = [_draw(grids, form, seed) for grids in GRIDS_OF_ROWS]
    heads = [_head(grids, form) for grids in GRIDS_OF_ROWS]
    width = text["input_ids"].shape[1] + max(len(head) for head in heads)
    lengths = text["input_lengths"] + torch.tensor([len(head) for head in heads])
    batch = BatchedDataDict(text, input_lengths=lengths, multimodal=pictures)
    for name in ("input_ids", "token_mask"):
        rows = text[name]
        batch[name] = rows.new_zeros(len(rows), width)
        for row, head in enumerate(heads):
            whole = torch.cat([head if name == "input_ids" else torch.zeros_like(head), rows[row]])
            batch[name][row, : len(whole)] = whole
    return batch


def _head(grids: tuple[tuple[int, int, int], ...], form: PictureFormat) -> torch.Tensor:
    ids: list[int] = []
    for grid in grids:
        ids += [form.token_id] * form.num_tokens({GRIDS: torch.tensor([grid])}) + [5]
    return torch.tensor(ids, dtype=torch.int64)


def _draw(grids: tuple[tuple[int, int, int], ...], form: PictureFormat, seed: int) -> Pictures:
    if not grids:
        return {}
    num_patches = sum(time * height * width for time, height, width in grids)
    pixels = torch.randn(num_patches, form.patch_dim, generator=torch.Generator().manual_seed(seed))
    return {PIXELS: pixels, GRIDS: torch.tensor(grids)}


@dataclass(frozen=True)
class VisionCase:
    name: str
    folder: str
    port: int
    frozen: bool
    """And with activation checkpointing."""


def train_vision_case(case: VisionCase, rank: int, world_size: int) -> dict[str, Any]:
    """Three steps; returns what this rank saw, and the weights."""
    torch.set_num_threads(1)
    worker = _make_worker(case, rank, world_size)
    batches = [make_picture_batch(seed, worker.model.config) for seed in range(cases.NUM_STEPS)]
    parts = [batch.shard_by_batch_size(world_size)[rank] for batch in batches]
    gathers = _record_gathers(worker)
    before = worker.get_logprobs(parts[0])["logprobs"]
    results = [worker.train(part, cases.WeightedLoss()) for part in parts]
    seen = {
        "before": before,
        "gathers": list(gathers),
        "results": results,
        "weights": {
            name: tensor.clone() for name, tensor in dtensor_params_generator(worker.model, worker.export_plan)
        },
        "frozen_names": set(worker._current_state().frozen()),
        "num_optimized": sum(len(group["params"]) for group in worker.optimizer.param_groups),
        "num_of_tower": len(list(find_vision_tower(worker.model).parameters())),
        "num_parameters": len(list(worker.model.parameters())),
    }
    worker.shutdown()
    return seen


def _make_worker(case: VisionCase, rank: int, world_size: int) -> DTensorPolicyWorkerV2:
    cfg = cases.policy_config(dtensor={"activation_checkpointing": case.frozen}).model_copy(
        update={"freeze_vision_tower": case.frozen}
    )
    return cases.make_worker(case.folder, cfg, rank=rank, world_size=world_size, port=case.port)


def _record_gathers(worker: DTensorPolicyWorkerV2) -> list[str]:
    """Names of sharded modules in the order in which their forward, and with it their gather, begins."""
    names = {module: name for name, module in worker.model.named_modules()}
    order: list[str] = []
    for module in fsdp_modules(worker.model):
        module.register_forward_pre_hook(lambda module, _args: order.append(names[module]), prepend=True)
    return order


def vision_rank_main(rank: int, world_size: int, vision_cases: list[VisionCase], out_dir: str) -> None:
    """Entry point of a spawned rank."""
    seen = {case.name: train_vision_case(case, rank, world_size) for case in vision_cases}
    torch.save(seen, os.path.join(out_dir, f"rank{rank}.pt"))
