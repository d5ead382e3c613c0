import math
import pickle
from typing import Any

import pytest
import torch

from nemo_rl.algorithms.kl import estimate_kl
from nemo_rl.algorithms.loss import ClippedPGLoss
from nemo_rl.config.schema import LossConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.interfaces import LossNormalizer

PLAIN = {"reference_policy_kl_penalty": 0.0, "use_importance_sampling_correction": False}


def make_loss(**settings: Any) -> ClippedPGLoss:
    return ClippedPGLoss(LossConfig(**{**PLAIN, **settings}))


def normalizer_of(data: BatchedDataDict) -> LossNormalizer:
    tokens = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1)
    return LossNormalizer(num_tokens=int(tokens.sum()), num_samples=int(data["sample_mask"].sum()))


def one_token(ratio: float, advantage: float, **extra: float) -> tuple[torch.Tensor, BatchedDataDict]:
    """A batch of one sample: one prompt token, one response token with p_prev = 0.5."""
    prev = math.log(0.5)
    data = BatchedDataDict(
        prev_logprobs=torch.tensor([[0.0, prev]]),
        advantages=torch.tensor([advantage]),
        token_mask=torch.tensor([[0.0, 1.0]]),
        sample_mask=torch.ones(1),
        **{name: torch.tensor([[0.0, value]]) for name, value in extra.items()},
    )
    return torch.tensor([[prev + math.log(ratio)]], requires_grad=True), data


def random_batch(num_samples: int = 6, seq: int = 9, spread: float = 0.3) -> tuple[torch.Tensor, BatchedDataDict]:
    generator = torch.Generator().manual_seed(1)
    prev = -torch.rand(num_samples, seq, generator=generator) * 3
    noise = [torch.randn(num_samples, seq, generator=generator) * spread for _ in range(3)]
    lengths = torch.randint(1, seq - 2, (num_samples, 1), generator=generator)
    positions = torch.arange(seq)
    sample_mask = torch.ones(num_samples)
    sample_mask[2] = 0.0
    data = BatchedDataDict(
        prev_logprobs=prev,
        generation_logprobs=prev + noise[0],
        reference_logprobs=prev + noise[1],
        advantages=torch.randn(num_samples, generator=generator),
        token_mask=((positions >= 2) & (positions < 2 + lengths)).float(),
        sample_mask=sample_mask,
    )
    return (prev + noise[2])[:, 1:].requires_grad_(), data


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "has_gradient"),
    [
        (1.0, 2.0, -2.0, True),
        (1.1, 2.0, -2.2, True),
        (1.5, 2.0, -2.56, False),  # 1 + 0.28 caps the gain
        (0.5, 2.0, -1.0, True),
        (0.5, -2.0, 1.6, False),  # 1 - 0.2 caps the other side
        (1.5, -2.0, 3.0, True),
    ],
)
def test_asymmetric_clip_exact(ratio: float, advantage: float, expected: float, has_gradient: bool) -> None:
    logprobs, data = one_token(ratio, advantage)
    loss, metrics = make_loss(ratio_clip_min=0.2, ratio_clip_max=0.28)(logprobs, data, LossNormalizer(1, 1))
    loss.backward()
    assert loss.item() == pytest.approx(expected)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(expected if has_gradient else 0.0)
    assert metrics["loss"].item() == loss.item()
    assert metrics["ratio_mean"].item() == pytest.approx(ratio)
    assert metrics["clip_fraction_high"].item() == float(ratio > 1.28 and advantage > 0)
    assert metrics["clip_fraction_low"].item() == float(ratio < 0.8 and advantage < 0)
    assert metrics["approx_kl"].item() == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-6)
    assert metrics["entropy_proxy"].item() == pytest.approx(-math.log(0.5 * ratio))


def test_dual_clip_exact() -> None:
    loss_fn = make_loss(ratio_clip_c=3.0)
    for ratio, advantage, expected in [(5.0, -2.0, 6.0), (2.0, -2.0, 4.0), (5.0, 2.0, -2.4)]:
        logprobs, data = one_token(ratio, advantage)
        assert loss_fn(logprobs, data, LossNormalizer(1, 1))[0].item() == pytest.approx(expected)


def test_importance_weight_is_truncated() -> None:
    prev = math.log(0.5)
    for engine_p, bound, expected in [(0.4, 2.0, -1.25), (0.1, 2.0, -2.0), (0.1, None, -5.0), (1.0, 2.0, -0.5)]:
        logprobs, data = one_token(1.0, 1.0, generation_logprobs=math.log(engine_p))
        loss_fn = make_loss(use_importance_sampling_correction=True, truncated_importance_sampling_ratio=bound)
        loss, metrics = loss_fn(logprobs, data, LossNormalizer(1, 1))
        assert loss.item() == pytest.approx(expected)
        assert metrics["importance_weight_mean"].item() == pytest.approx(-expected)
    assert prev < 0


@pytest.mark.parametrize(("kind", "expected"), [("k1", 0.3), ("k2", 0.045), ("k3", math.exp(-0.3) - 1 + 0.3)])
def test_kl_estimates_exact(kind: Any, expected: float) -> None:
    estimate = estimate_kl(torch.tensor([-1.0]), torch.tensor([-1.3]), kind)
    assert estimate.item() == pytest.approx(expected)
    logprobs, data = one_token(1.0, 0.0, reference_logprobs=math.log(0.5) - 0.3)
    loss_fn = make_loss(reference_policy_kl_penalty=0.1, reference_policy_kl_type=kind)
    loss, metrics = loss_fn(logprobs, data, LossNormalizer(1, 1))
    assert loss.item() == pytest.approx(0.1 * expected)
    assert metrics["kl"].item() == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_gradient_is_that_of_the_kl(kind: Any) -> None:
    """All tokens of a small vocabulary, weighted by their probability, give the KL's own gradient."""
    logits = torch.tensor([0.2, -1.0, 1.3, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([1.0, 0.5, -0.5, 0.1], dtype=torch.float64).log_softmax(0)
    (exact,) = torch.autograd.grad(torch.sum(logits.softmax(0) * (logits.log_softmax(0) - reference)), logits)

    current = logits.log_softmax(0)
    prev = current.detach()
    estimate = torch.sum(prev.exp() * (current - prev).exp() * estimate_kl(current, reference, kind))
    (sampled,) = torch.autograd.grad(estimate, logits)
    torch.testing.assert_close(sampled, exact)


def test_at_ratio_one_it_is_the_plain_policy_gradient() -> None:
    logprobs, data = random_batch()
    logprobs = data["prev_logprobs"][:, 1:].clone().requires_grad_()
    normalizer = normalizer_of(data)
    loss, metrics = make_loss()(logprobs, data, normalizer)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1)
    torch.testing.assert_close(gradient, -data["advantages"].unsqueeze(1) * mask / normalizer.num_tokens)
    assert metrics["ratio_mean"].item() == pytest.approx(1.0)
    assert metrics["approx_kl"].item() == 0.0


def test_a_wide_clip_is_no_clip() -> None:
    logprobs, data = random_batch()
    normalizer = normalizer_of(data)
    loss, metrics = make_loss(ratio_clip_min=1.0, ratio_clip_max=1e9)(logprobs, data, normalizer)
    mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1)
    ratio = (logprobs - data["prev_logprobs"][:, 1:]).exp()
    torch.testing.assert_close(loss, -(ratio * data["advantages"].unsqueeze(1) * mask).sum() / mask.sum())
    assert metrics["clip_fraction_low"].item() == metrics["clip_fraction_high"].item() == 0.0


def test_advantages_per_token_equal_those_per_sample() -> None:
    logprobs, data = random_batch()
    per_token = BatchedDataDict({**data, "advantages": data["advantages"].unsqueeze(1).expand(-1, 9)})
    normalizer = normalizer_of(data)
    assert make_loss()(logprobs, data, normalizer)[0] == make_loss()(logprobs, per_token, normalizer)[0]


def test_sample_level_mean_weighs_samples_alike() -> None:
    data = BatchedDataDict(
        prev_logprobs=torch.zeros(2, 4),
        advantages=torch.tensor([1.0, -3.0]),
        token_mask=torch.tensor([[0.0, 1, 0, 0], [0, 1, 1, 1]]),
        sample_mask=torch.ones(2),
    )
    logprobs = torch.zeros(2, 3)
    assert make_loss(token_level_loss=True)(logprobs, data, LossNormalizer(4, 2))[0].item() == (-1 + 9) / 4
    assert make_loss(token_level_loss=False)(logprobs, data, LossNormalizer(4, 2))[0].item() == (-1 + 3) / 2


@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_micro_batches_add_up(token_level: bool, size: int) -> None:
    loss_fn = make_loss(
        token_level_loss=token_level, reference_policy_kl_penalty=0.1, use_importance_sampling_correction=True
    )
    logprobs, data = random_batch()
    normalizer = normalizer_of(data)
    whole, whole_metrics = loss_fn(logprobs, data, normalizer)
    (whole_gradient,) = torch.autograd.grad(whole, logprobs)

    data["logprobs"] = logprobs
    parts = [loss_fn(part["logprobs"], part, normalizer) for part in data.make_microbatch_iterator(size)]
    total = torch.stack([loss for loss, _ in parts]).sum()
    (gradient,) = torch.autograd.grad(total, logprobs)
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(gradient, whole_gradient)
    for name, value in whole_metrics.items():
        torch.testing.assert_close(torch.stack([metrics[name] for _, metrics in parts]).sum(), value)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_what_stands_outside_the_mask_does_not_count(garbage: float) -> None:
    loss_fn = make_loss(reference_policy_kl_penalty=0.1, use_importance_sampling_correction=True)
    logprobs, data = random_batch()
    normalizer = normalizer_of(data)
    clean, _ = loss_fn(logprobs, data, normalizer)
    outside = (data["token_mask"] * data["sample_mask"].unsqueeze(1)) == 0
    for name in ("prev_logprobs", "generation_logprobs", "reference_logprobs"):
        data[name] = data[name].masked_fill(outside, garbage)
    dirty_logprobs = logprobs.detach().masked_fill(outside[:, 1:], garbage).requires_grad_()
    dirty, metrics = loss_fn(dirty_logprobs, data, normalizer)
    dirty.backward()
    assert dirty_logprobs.grad is not None
    assert dirty.item() == clean.item()
    assert torch.all(dirty_logprobs.grad[outside[:, 1:]] == 0)
    assert all(math.isfinite(value.item()) for value in metrics.values())


@pytest.mark.parametrize("gap", [200.0, -200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_absurd_ratios_stay_finite(gap: float, advantage: float) -> None:
    loss_fn = make_loss(reference_policy_kl_penalty=0.1, use_importance_sampling_correction=True)
    logprobs, data = one_token(1.0, advantage, generation_logprobs=-1.0, reference_logprobs=-gap)
    logprobs = (logprobs.detach() + gap).requires_grad_()
    loss, metrics = loss_fn(logprobs, data, LossNormalizer(1, 1))
    loss.backward()
    assert logprobs.grad is not None
    assert math.isfinite(loss.item())
    assert math.isfinite(logprobs.grad.item())
    assert all(math.isfinite(value.item()) for value in metrics.values())


@pytest.mark.parametrize("token_level", [True, False])
def test_no_tokens_give_zero(token_level: bool) -> None:
    logprobs, data = one_token(1.0, 1.0)
    data["sample_mask"] = torch.zeros(1)
    loss, _ = make_loss(token_level_loss=token_level)(logprobs, data, LossNormalizer(0, 0))
    loss.backward()
    assert loss.item() == 0.0
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0.0


def test_it_reads_no_more_than_its_settings_need() -> None:
    """Without KL and correction neither the reference's nor the engine's log-probs have to be there."""
    logprobs, data = one_token(1.0, 1.0)
    make_loss()(logprobs, data, LossNormalizer(1, 1))
    with pytest.raises(KeyError, match="reference_logprobs"):
        make_loss(reference_policy_kl_penalty=0.1)(logprobs, data, LossNormalizer(1, 1))
    with pytest.raises(KeyError, match="generation_logprobs"):
        make_loss(use_importance_sampling_correction=True)(logprobs, data, LossNormalizer(1, 1))


def test_it_travels_to_other_processes() -> None:
    loss_fn = make_loss(ratio_clip_max=0.28)
    assert pickle.loads(pickle.dumps(loss_fn)) == loss_fn
