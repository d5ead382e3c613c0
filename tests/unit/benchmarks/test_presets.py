"""The benchmark's models: what each preset weighs, and that what is written is a checkpoint as the hub has it."""

import sys
from pathlib import Path

import presets
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl.models.model_source import check_model
from nemo_rl.models.policy.checkpoint import check_checkpoint


@pytest.mark.parametrize(
    ("preset", "num_tensors", "total_bytes"),
    [
        ("135m", 272, 269_030_016),
        ("0.6b", 310, 1_192_099_840),
        ("4b", 399, 8_822_848_512),
        ("8b", 399, 16_381_470_720),
        ("moe5k", 5043, 314_372_608),
    ],
)
def test_a_preset_has_its_tensors_and_bytes(preset: str, num_tensors: int, total_bytes: int) -> None:
    shapes = presets.checkpoint_shapes(preset)
    assert len(shapes) == num_tensors
    assert sum(map(presets.num_bytes, shapes.values())) == total_bytes
    assert ("lm_head.weight" in shapes) == (preset not in ("135m", "0.6b"))


def test_experts_have_the_hub_s_names_and_widths_that_engines_like() -> None:
    shapes = presets.checkpoint_shapes("moe5k")
    assert shapes["model.layers.47.mlp.experts.31.gate_proj.weight"] == (128, 256)
    assert shapes["model.layers.47.mlp.experts.31.down_proj.weight"] == (256, 128)
    assert shapes["model.layers.0.mlp.gate.weight"] == (32, 256)


@pytest.mark.parametrize("preset", ["tiny", "tiny-moe"])
def test_a_written_model_loads_whole(preset: str, tmp_path: Path) -> None:
    folder = presets.write_model(preset, tmp_path / preset, seed=3)
    check_checkpoint(folder, torch.bfloat16)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert {name: found for name, found in info.items() if found} == {}
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert model.model.layers[0].input_layernorm.weight.eq(1).all()
    assert model.lm_head.weight.float().std().item() == pytest.approx(presets.WEIGHT_STD, rel=0.02)


def test_a_written_tokenizer_stays_within_the_model_s_vocabulary(tmp_path: Path) -> None:
    folder = presets.write_model("tiny", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "2 + 2 ="}], tokenize=False)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < len(tokenizer) <= presets.make_config("tiny").vocab_size


def test_weights_follow_the_seed_and_shards_their_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_weights(presets.write_model("tiny", tmp_path / "whole", seed=1))
    other = read_weights(presets.write_model("tiny", tmp_path / "other", seed=2))
    monkeypatch.setattr(presets, "MAX_SHARD_BYTES", 500_000)
    folder = presets.write_model("tiny", tmp_path / "cut", seed=1)
    check_checkpoint(folder, torch.bfloat16)
    cut = read_weights(folder)
    assert len(list(folder.glob("*.safetensors"))) == 3
    assert whole.keys() == cut.keys() == presets.checkpoint_shapes("tiny").keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    matrices = [name for name, weight in whole.items() if weight.dim() > 1]
    assert not any(torch.equal(whole[name], other[name]) for name in matrices)


def test_the_command_writes_the_model_of_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["presets.py", "tiny-moe", str(tmp_path / "moe")])
    presets.main()
    assert check_model(tmp_path / "moe") == 2048
    assert read_weights(tmp_path / "moe").keys() == presets.checkpoint_shapes("tiny-moe").keys()


def test_an_unknown_preset_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^preset: got '9b'; allowed: 135m, 0\.6b, 4b, 8b, moe5k, tiny, tiny-moe$"):
        presets.make_config("9b")


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    weights = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            weights |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 it is no mapping
    return weights
