"""A mixture of experts over NCCL and a vision-language model over gloo: weights there and back, on one GPU."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from gpu_stack import ROOT, SERVER, checksums, checksums_of, send, started
from transformers import PretrainedConfig, Qwen2_5_VLConfig, Qwen3MoeConfig

sys.path.append(str(ROOT / "tests/families"))
from family import Family, write_checkpoint
from text_families import TEXT_FAMILIES
from vision_families import VISION_FAMILIES

pytestmark = pytest.mark.gpu

FAMILIES = {family.name: family for family in (*TEXT_FAMILIES, *VISION_FAMILIES)}


def make_moe() -> PretrainedConfig:
    """Heads of 64, as kernels for GPUs have them."""
    return Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype=torch.bfloat16,
    )


def make_vlm() -> PretrainedConfig:
    """The family's own, with heads of 64 in text and vision."""
    config = FAMILIES["Qwen2.5-VL"].make_config().to_dict()
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
    text = config["text_config"] | {"hidden_size": 256, "intermediate_size": 512, "rope_parameters": rope}
    vision = config["vision_config"] | {"hidden_size": 128, "intermediate_size": 256, "out_hidden_size": 256}
    return Qwen2_5_VLConfig(**config | {"text_config": text, "vision_config": vision})


VISION_ARGS = ("--mm-attention-backend=sdpa", "--mm-feature-transport=cpu", "--skip-server-warmup")


@pytest.mark.parametrize(
    ("family", "backend", "server_args"),
    [
        (dataclasses.replace(FAMILIES["Qwen3-MoE"], make_config=make_moe), "nccl", ()),
        (dataclasses.replace(FAMILIES["Qwen2.5-VL"], make_config=make_vlm), "gloo", VISION_ARGS),
    ],
    ids=["experts_nccl", "vision_gloo"],
)
def test_a_family_goes_to_the_gpu_engine_and_back(
    family: Family, backend: str, server_args: tuple[str, ...], tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("w0", "w1")]
    for seed, folder in enumerate(folders):
        write_checkpoint(family, folder, seed=seed)
    with started(
        tmp_path / "logs",
        f"policy.model_name={folders[0]}",
        f"{SERVER}.weight_update_backend={backend}",
        f"{SERVER}.sglang_server_concurrency=8",
        "policy.tokenizer.chat_template=default",
        "data.prompt='{problem} = '",
        server_args=server_args,
    ) as run:
        first = checksums(run)
        sent = send(run, folders[1])
        assert len(first) > 10
        assert sent != first
        out = run.generation.generate(run.train_prompts.next_batch())
        assert torch.isfinite(out["logprobs"]).all()
        assert (out["generation_lengths"] > 0).all()
        assert send(run, folders[0]) == first
        assert checksums_of(run, folders[1]) == sent
