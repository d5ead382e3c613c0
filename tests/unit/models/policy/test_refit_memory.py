"""Resident memory of trainer ranks while they gather a model twenty times as large as a bucket."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3Config, Qwen3ForCausalLM

from nemo_rl.distributed.weight_transfer.buckets import FlatBuffers, bucket_layouts, iter_named_tensor_buckets
from nemo_rl.models.policy.export import dtensor_params_generator
from nemo_rl.models.policy.parallelize import ShardOptions, load_sharded_model

BUCKET_BYTES = 8_000_000
SLACK_BYTES = 4_000_000
"""What the interpreter and gloo take meanwhile."""


def config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=32,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )


def resident_bytes(field: str) -> int:
    """`VmRSS` now, `VmHWM` at its highest."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def measure_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    model, plan = load_sharded_model(f"{folder}/model", mesh, ShardOptions(compute_dtype=torch.bfloat16))
    layouts = bucket_layouts(plan.manifest, BUCKET_BYTES)

    def walk() -> int:
        buffers = FlatBuffers(layouts, torch.device("cpu")) if rank == 0 else None
        tensors = dtensor_params_generator(model, plan, layouts=layouts, buffers=buffers)
        return sum(1 for _ in iter_named_tensor_buckets(tensors, BUCKET_BYTES, plan.manifest))

    walk()  # threads and connections are made
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest starts from here
    num_buckets = walk()
    extra = resident_bytes("VmHWM") - before
    largest = max(spec.num_bytes for spec in plan.manifest.specs)
    seen = {"extra": extra, "buckets": num_buckets, "largest": largest, "bytes": plan.manifest.num_bytes}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, int]]:
    folder = tmp_path_factory.mktemp("memory")
    Qwen3ForCausalLM(config()).bfloat16().save_pretrained(folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        # Otherwise what loading has freed serves the gathers, and nothing is seen.
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
        torch.multiprocessing.spawn(measure_rank, (str(folder),), nprocs=2)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_rank_0_takes_two_buckets_and_the_largest_tensor_at_most(measured: list[dict[str, int]]) -> None:
    seen = measured[0]
    assert seen["bytes"] > 20 * BUCKET_BYTES
    assert seen["buckets"] > 20
    assert BUCKET_BYTES < seen["extra"] <= 2 * BUCKET_BYTES + seen["largest"] + SLACK_BYTES


def test_other_ranks_take_one_bucket_at_most(measured: list[dict[str, int]]) -> None:
    assert measured[1]["extra"] <= BUCKET_BYTES + SLACK_BYTES
