"""Families on the real engine: experts, vision-language. `prove.py` has all of them.

And what one changed tensor does, tied and untied, and what twenty refits do to memory.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray
import torch
from engine_rig import EngineRig, ask, digests_of
from family import Family, Weights
from picture_parity import check_pictures
from text_families import TEXT_FAMILIES
from transformers import LlamaConfig
from vision_families import VISION_FAMILIES

from nemo_rl.distributed.weight_transfer.deadline import Deadline
from nemo_rl.distributed.weight_transfer.errors import TransferError
from nemo_rl.models.generation.sglang.sglang_generation import SGLangGeneration
from nemo_rl.weight_sync.factory import create_weight_synchronizer

FAMILIES = {family.name: family for family in (*TEXT_FAMILIES, *VISION_FAMILIES)}
NUM_REFITS = 20


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineRig]:
    with EngineRig(tmp_path_factory.mktemp("families")) as rig:
        yield rig


@pytest.mark.parametrize("name", ["Qwen3-MoE", "Qwen2.5-VL"])
def test_every_digest_equals_that_of_the_checkpoint_loaded_from_disk(rig: EngineRig, name: str) -> None:
    def check_head(generation: SGLangGeneration, _: Path) -> None:
        check_one_changed(rig, FAMILIES[name], generation, "lm_head.weight")
        rig.policies[2].disconnect_sglang_rollout_engines_distributed()

    row = rig.prove(FAMILIES[name], then=check_pictures if FAMILIES[name].image_prompt else check_head)
    assert row.num_equal == row.num_digests > 10
    assert row.unmoved == ()
    assert row.num_refits == 7
    assert row.answers == ("text, image" if FAMILIES[name].image_prompt else "text")


def check_one_changed(rig: EngineRig, family: Family, generation: SGLangGeneration, changed: str) -> dict[str, str]:
    """A refit that moves one tensor moves its digest alone, and log-probs follow. Returns the digests after it."""
    rig.connect(2, generation)
    rig.refit(2, generation, 2**24)
    before, answer = digests_of(generation), ask(family, generation)
    rig.policies[2].workers.run("scale", timeout_s=60, name=changed, factor=1.5)
    rig.refit(2, generation, 2**24)
    after = digests_of(generation)
    assert {name for name in before if after[name] != before[name]} == {f"0/{changed}"}
    assert ask(family, generation) != answer
    return after


def larger_llama() -> LlamaConfig:
    """21 million parameters: more than memory moves by itself."""
    return LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )


def with_a_head_on_disk(weights: Weights) -> Weights:
    return {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}


TIED = Family("tied", "LlamaForCausalLM", larger_llama, to_hub_layout=with_a_head_on_disk)


def test_a_tied_head_follows_its_embedding_and_memory_stays_flat(rig: EngineRig, tmp_path: Path) -> None:
    with rig.engine_on(TIED, tmp_path) as (generation, folder):
        manifest = rig.load(2, folder)
        names = [spec.name for spec in manifest.specs]
        assert names.count("model.embed_tokens.weight") == 1
        assert "lm_head.weight" not in names
        sent = check_one_changed(rig, TIED, generation, "model.embed_tokens.weight")
        followed = ask(TIED, generation)
        rig.policies[2].export_hf(str(tmp_path / "exported"))
        generation.update_weights_from_disk(str(tmp_path / "exported"), Deadline(60))
        assert digests_of(generation) == sent
        assert ask(TIED, generation) == followed
        grown = growth_bytes(lambda: rig.refit(2, generation, 2**23), rig, generation)
        # What the allocator of rank 0 keeps varies by two models; a model that leaked would show 17 times.
        assert max(grown.values()) < 4 * manifest.num_bytes, grown
        rig.policies[2].disconnect_sglang_rollout_engines_distributed()


def save_as_in_memory(weights: Weights) -> Weights:
    """Experts of a layer as one stack, which the engine does not know: it skips it, from disk and from the wire."""
    experts: dict[str, list[torch.Tensor]] = {}
    for name in sorted(name for name in weights if ".experts." in name):
        prefix, _, rest = name.partition(".experts.")
        experts.setdefault(f"{prefix}.experts.{rest.split('.')[1]}", []).append(weights[name])
    stacked = {name: torch.stack(parts) for name, parts in experts.items()}
    layers = {name.rpartition(".experts.")[0] for name in stacked}
    fused = {
        f"{layer}.experts.gate_up_proj": torch.cat(
            [stacked[f"{layer}.experts.gate_proj"], stacked[f"{layer}.experts.up_proj"]], dim=1
        )
        for layer in layers
    }
    fused |= {f"{layer}.experts.down_proj": stacked[f"{layer}.experts.down_proj"] for layer in layers}
    return {name: tensor for name, tensor in weights.items() if ".experts." not in name} | fused


def test_experts_that_the_engine_skips_from_disk_and_wire_stop_the_first_refit(rig: EngineRig, tmp_path: Path) -> None:
    family = dataclasses.replace(FAMILIES["Qwen3-MoE"], to_hub_layout=save_as_in_memory)
    with rig.engine_on(family, tmp_path) as (generation, folder):
        assert "model.layers.0.mlp.experts.gate_up_proj" in {spec.name for spec in rig.load(1, folder).specs}
        synchronizer = create_weight_synchronizer(
            policy=rig.policies[1], generation=generation, generation_backend="sglang", colocated=False
        )
        with pytest.raises(
            TransferError, match=r"engine 0 at .*: no weight of the policy reaches 4 of .*experts.w13_weight"
        ):
            synchronizer.sync_weights()
        assert synchronizer.is_stale
        rig.policies[1].disconnect_sglang_rollout_engines_distributed()


def growth_bytes(refit: Callable[[], object], rig: EngineRig, generation: SGLangGeneration) -> dict[str, int]:
    """Resident memory after 20 refits minus that after 3: engine, and each trainer rank."""
    for _ in range(3):
        refit()
    first = resident_bytes(rig, generation)
    for _ in range(NUM_REFITS - 3):
        refit()
    last = resident_bytes(rig, generation)
    return {name: last[name] - first[name] for name in first}


def resident_bytes(rig: EngineRig, generation: SGLangGeneration) -> dict[str, int]:
    supervisor = psutil.Process(ray.get(generation._fleet.ready()[0].actor.pid.remote()))
    engine = sum(process.memory_info().rss for process in supervisor.children(recursive=True))
    ranks = rig.policies[2].workers.run("resident_bytes", timeout_s=60)
    return {"engine": engine} | {f"rank {rank}": size for rank, size in enumerate(ranks)}
