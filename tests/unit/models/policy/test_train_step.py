"""Log-probs and one step against plain formulas, in a group of one rank."""

from pathlib import Path
from typing import Any

import policy_cases as cases
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, Gemma2Config, Olmo2Config, PretrainedConfig, PreTrainedModel, XGLMConfig

from nemo_rl.config.schema import OptimizerConfig, SchedulerConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.interfaces import LossNormalizer
from nemo_rl.models.policy.parallelize import ShardOptions, load_sharded_model
from nemo_rl.models.policy.train_step import (
    compute_logprobs,
    global_normalizer,
    make_optimizer,
    make_scheduler,
    token_logprobs,
    train_on_batch,
)
from nemo_rl.models.policy.utils import find_blocks, resolve_device

SMALL: dict[str, Any] = {"hidden_size": 64, "vocab_size": 130, "initializer_range": 0.1, "init_std": 0.1}
FP32 = ShardOptions(compute_dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cases.write_model(tmp_path_factory.mktemp("step") / "model", cases.dense_config(tied=True))


@pytest.fixture
def model(folder: str, mesh: DeviceMesh) -> PreTrainedModel:
    return load_sharded_model(folder, mesh, FP32)[0]


@pytest.mark.parametrize(
    "config",
    [
        Olmo2Config(**SMALL, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4),
        XGLMConfig(**{**SMALL, "d_model": 64}, ffn_dim=96, num_layers=2, attention_heads=4),
    ],
    ids=["float32 angles", "positions in a buffer"],
)
def test_in_bfloat16_log_probs_are_those_of_a_bfloat16_model(
    config: PretrainedConfig, mesh: DeviceMesh, tmp_path: Path
) -> None:
    """What a model keeps in float32 between its blocks stays so, and what it makes in its own dtype is made in it."""
    folder = cases.write_model(tmp_path / "model", config)
    options = ShardOptions(compute_dtype=torch.bfloat16, attention="eager")
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    found, expected = (
        compute_logprobs(model, cases.make_batch(0), micro_batch_size=2, temperature=1.0)
        for model in (load_sharded_model(folder, mesh, options)[0], plain)
    )
    assert torch.equal(found, expected)


def plain_logprobs(folder: str, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """`[batch, seq - 1]` by log_softmax over whole rows, without any mask."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = plain(input_ids=ids).logits.float() / temperature
    return torch.log_softmax(logits[:, :-1], -1).gather(2, ids[:, 1:, None]).squeeze(2)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_logprobs_equal_a_plain_log_softmax(model: PreTrainedModel, folder: str, temperature: float) -> None:
    batch = cases.make_batch(0)
    data = BatchedDataDict(input_ids=batch["input_ids"], input_lengths=batch["input_lengths"])
    got = compute_logprobs(model, data, micro_batch_size=3, temperature=temperature)
    real = torch.arange(got.shape[1]) < batch["input_lengths"][:, None]
    real[:, 0] = False
    assert got.shape == batch["input_ids"].shape
    assert got.dtype == torch.float32
    assert not got[~real].any()
    for row in range(batch.size):
        length = int(batch["input_lengths"][row])
        alone = plain_logprobs(folder, batch["input_ids"][row : row + 1, :length], temperature)[0]
        torch.testing.assert_close(got[row, 1:length], alone, rtol=1e-5, atol=1e-5)


def test_a_token_mask_restricts_what_is_computed(model: PreTrainedModel) -> None:
    batch = cases.make_batch(0)
    everything = BatchedDataDict(input_ids=batch["input_ids"], input_lengths=batch["input_lengths"])
    masked = BatchedDataDict(everything, token_mask=batch["token_mask"])
    whole = compute_logprobs(model, everything, micro_batch_size=8, temperature=1.0)
    part = compute_logprobs(model, masked, micro_batch_size=8, temperature=1.0)
    torch.testing.assert_close(part, whole * batch["token_mask"], rtol=1e-5, atol=1e-6)


def test_padding_has_no_influence(model: PreTrainedModel) -> None:
    batch = cases.make_batch(1)
    wider = BatchedDataDict(batch)
    real = torch.arange(batch["input_ids"].shape[1]) < batch["input_lengths"][:, None]
    ids = torch.where(real, batch["input_ids"], torch.full_like(batch["input_ids"], 77))
    wider["input_ids"] = torch.nn.functional.pad(ids, (0, 9), value=99)
    wider["token_mask"] = torch.nn.functional.pad(batch["token_mask"], (0, 9))
    narrow = compute_logprobs(model, batch, micro_batch_size=2, temperature=1.0)
    padded = compute_logprobs(model, wider, micro_batch_size=8, temperature=1.0)
    torch.testing.assert_close(padded[:, : narrow.shape[1]], narrow, rtol=1e-5, atol=1e-6)
    assert not padded[:, narrow.shape[1] :].any()


def test_gradients_equal_those_of_a_plain_log_softmax(model: PreTrainedModel, folder: str) -> None:
    """Also checks the hand-written backward pass, with a chunk of few rows."""
    batch = cases.make_batch(2)
    selected = batch["token_mask"][:, 1:].bool()
    weights = torch.randn(selected.shape, generator=torch.Generator().manual_seed(5))
    (token_logprobs(model, batch["input_ids"], selected, 0.7) * weights).sum().backward()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits = plain(input_ids=batch["input_ids"]).logits / 0.7
    chosen = torch.log_softmax(logits[:, :-1], -1).gather(2, batch["input_ids"][:, 1:, None]).squeeze(2)
    (chosen * weights * selected).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-5)


def test_rows_in_several_chunks_give_the_same(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = cases.make_batch(2)
    whole = compute_logprobs(model, batch, micro_batch_size=8, temperature=1.0)
    monkeypatch.setattr("nemo_rl.models.policy.train_step.CHUNK_ELEMENTS", 3 * 130)
    chunked = compute_logprobs(model, batch, micro_batch_size=8, temperature=1.0)
    torch.testing.assert_close(chunked, whole, rtol=1e-6, atol=1e-6)


def test_soft_capping_after_the_head_is_kept(tmp_path: Path, mesh: DeviceMesh) -> None:
    config = Gemma2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
        final_logit_softcapping=0.5,
    )
    folder = cases.write_model(tmp_path / "gemma", config)
    ids = torch.arange(1, 13)[None]
    data = BatchedDataDict(input_ids=ids, input_lengths=torch.tensor([12]))
    got = compute_logprobs(load_sharded_model(folder, mesh, FP32)[0], data, micro_batch_size=1, temperature=1.0)
    torch.testing.assert_close(got[:, 1:], plain_logprobs(folder, ids, 1.0), rtol=1e-5, atol=1e-5)


def one_step(folder: str, mesh: DeviceMesh, batch: BatchedDataDict, **kwargs: Any) -> tuple[Any, list[torch.Tensor]]:
    model, _ = load_sharded_model(folder, mesh, FP32)
    optimizer = make_optimizer(model.parameters(), OptimizerConfig.model_validate({"kwargs": cases.ADAMW}))
    settings = {"micro_batch_size": 8, "temperature": 1.0, "max_grad_norm": None, **kwargs}
    result = train_on_batch(model, optimizer, None, batch, cases.WeightedLoss(), **settings)
    return result, [parameter.detach().full_tensor() for parameter in model.parameters()]


@pytest.mark.parametrize("micro_batch_size", [1, 3, 4, 8, 100])
def test_the_split_into_micro_batches_does_not_matter(folder: str, mesh: DeviceMesh, micro_batch_size: int) -> None:
    expected, expected_weights = one_step(folder, mesh, cases.make_batch(0))
    got, weights = one_step(folder, mesh, cases.make_batch(0), micro_batch_size=micro_batch_size)
    assert got.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-6)
    assert got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert got.metrics["mean_logprob"] == pytest.approx(expected.metrics["mean_logprob"], rel=1e-5)
    for ours, theirs in zip(weights, expected_weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("is_on", "coefficient"), [(False, 0.5), (True, 0.0)])
def test_no_auxiliary_loss_is_added_unless_the_config_asks_for_it(
    is_on: bool, coefficient: float, tmp_path: Path, mesh: DeviceMesh
) -> None:
    batch = cases.make_batch(0, vocab=64)
    plain, _ = one_step(cases.write_model(tmp_path / "plain", cases.moe_config()), mesh, batch)
    config = cases.moe_config()
    config.update({"output_router_logits": is_on, "router_aux_loss_coef": coefficient})
    result, _ = one_step(cases.write_model(tmp_path / "model", config), mesh, batch)
    assert result == plain
    assert "aux_loss" not in result.metrics


def test_an_auxiliary_loss_counts_no_padding_and_each_micro_batch_by_its_tokens(
    tmp_path: Path, mesh: DeviceMesh
) -> None:
    config = cases.moe_config()
    config.update({"output_router_logits": True, "router_aux_loss_coef": 0.5, "initializer_range": 0.1})
    folder = cases.write_model(tmp_path / "model", config)
    batch = cases.make_batch(0, vocab=64)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # Alone there is no padding at all.
    lengths = batch["input_lengths"].tolist()
    alone = [model(batch["input_ids"][row : row + 1, :length]).aux_loss for row, length in enumerate(lengths)]
    expected = sum(loss.item() * length for loss, length in zip(alone, lengths, strict=True)) / sum(lengths)
    result, _ = one_step(folder, mesh, batch, micro_batch_size=1)
    assert result.metrics["aux_loss"] == pytest.approx(expected, rel=1e-5)
    real = torch.arange(batch["input_ids"].shape[1]) < batch["input_lengths"][:, None]
    other = BatchedDataDict(batch, input_ids=torch.where(real, batch["input_ids"], 63))
    whole, padded = (one_step(folder, mesh, data)[0] for data in (batch, other))
    assert padded.metrics["aux_loss"] == pytest.approx(whole.metrics["aux_loss"], rel=1e-6)
    assert whole.metrics["aux_loss"] != pytest.approx(expected, rel=1e-3)


def test_a_model_without_the_auxiliary_loss_that_its_config_asks_for_is_refused(
    model: PreTrainedModel, mesh: DeviceMesh
) -> None:
    model.config.update({"output_router_logits": True, "router_aux_loss_coef": 0.5})
    optimizer = make_optimizer(model.parameters(), OptimizerConfig())
    with pytest.raises(ValueError, match=r"policy\.model_name: .*Qwen3ForCausalLM computes no auxiliary loss"):
        train_on_batch(
            model,
            optimizer,
            None,
            cases.make_batch(0),
            cases.WeightedLoss(),
            micro_batch_size=8,
            temperature=1.0,
            max_grad_norm=None,
        )


def test_a_batch_without_response_tokens_has_zero_gradient(folder: str, mesh: DeviceMesh) -> None:
    batch = cases.make_batch(0)
    batch["sample_mask"] = torch.zeros(batch.size)
    result, _ = one_step(folder, mesh, batch, micro_batch_size=3)
    assert result.loss == 0.0
    assert result.grad_norm == 0.0


def test_the_normalizer_counts_unmasked_response_tokens(mesh: DeviceMesh) -> None:
    batch = cases.make_batch(0)
    kept = [row for row in range(batch.size) if row != 3]
    tokens = sum(int(batch["token_mask"][row].sum()) for row in kept)
    assert global_normalizer(batch, torch.device("cpu")) == LossNormalizer(num_tokens=tokens, num_samples=7)


def test_warm_up_is_linear() -> None:
    optimizer = make_optimizer([torch.nn.Parameter(torch.ones(1))], OptimizerConfig())
    config = SchedulerConfig.model_validate({"kwargs": {"start_factor": 0.2, "end_factor": 1.0, "total_iters": 4}})
    scheduler = make_scheduler(optimizer, config)
    assert scheduler is not None
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"] / 5e-6)
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert make_scheduler(optimizer, None) is None


def test_blocks_without_a_declared_class_are_the_longest_list(model: PreTrainedModel) -> None:
    assert find_blocks(model) == list(model.model.layers)
    plain = torch.nn.Module()
    plain._no_split_modules = None
    plain.short = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
    plain.long = torch.nn.ModuleList([torch.nn.Linear(1, 1) for _ in range(3)])
    assert find_blocks(plain) == list(plain.long)


def test_compute_runs_in_bf16_over_float32_shards(folder: str, mesh: DeviceMesh) -> None:
    model, _ = load_sharded_model(folder, mesh, ShardOptions(compute_dtype=torch.bfloat16))
    seen: dict[str, tuple[torch.dtype, torch.dtype]] = {}
    layer = model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda module, args, out: seen.update(up=(module.weight.dtype, out.dtype)))
    compute_logprobs(model, cases.make_batch(0), micro_batch_size=8, temperature=1.0)
    assert seen["up"] == (torch.bfloat16, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_checkpoint_that_lacks_a_weight_is_refused(tmp_path: Path, mesh: DeviceMesh) -> None:
    config = cases.dense_config(tied=False)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = {key: value for key, value in plain.state_dict().items() if "layers.1.mlp.up_proj" not in key}
    plain.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match=r"lacks weights or has them in another shape.*layers\.1.mlp\.up_proj\.weight"):
        load_sharded_model(str(tmp_path), mesh, FP32)


def test_offload_on_cpu_and_unknown_devices_are_refused(folder: str, mesh: DeviceMesh) -> None:
    with pytest.raises(ValueError, match=r"policy\.dtensor_cfg\.cpu_offload: got true"):
        load_sharded_model(folder, mesh, ShardOptions(compute_dtype=torch.float32, cpu_offload=True))
    with pytest.raises(ValueError, match="device: got 'tpu'; allowed 'cpu', 'cuda'"):
        resolve_device("tpu")
