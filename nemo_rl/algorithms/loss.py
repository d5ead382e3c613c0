"""The clipped policy-gradient loss. GRPO, DAPO's asymmetric clip and dual-clip PPO are settings of it."""

from dataclasses import dataclass

import torch

from nemo_rl.algorithms.kl import MAX_LOG_RATIO, estimate_kl
from nemo_rl.config.schema import LossConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.interfaces import LossNormalizer


@dataclass(frozen=True)
class ClippedPGLoss:
    """A `LossFunction`. Reads from the micro-batch, each `[batch, seq]` and aligned with the input ids:

    `advantages` (or `[batch]`), `prev_logprobs` (the trainer's, before this update), `generation_logprobs` (the
    engine's; only with the importance correction), `reference_logprobs` (only with a KL penalty), `token_mask`; and
    `sample_mask [batch]`.

    Per token, with ratio r = exp(log p - log p_prev) and advantage A:

        max(-A r, -A clip(r, 1 - ratio_clip_min, 1 + ratio_clip_max))      PPO, arXiv:1707.06347, eq. 7
        at most -A ratio_clip_c where A < 0                                dual clip, arXiv:1912.09729, eq. 5
        times min(p_prev / p_engine, truncated_importance_sampling_ratio)  truncated importance sampling
        + penalty * weight * r * KL estimate                               see `kl.py`
    """

    config: LossConfig

    def __call__(
        self, logprobs: torch.Tensor, data: BatchedDataDict, normalizer: LossNormalizer
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See `LossFunction`: log-probs `[batch, seq - 1]`, loss and metrics already divided by the normalizer."""
        mask = (data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1)).to(logprobs.dtype)
        # Padding may hold anything, infinities included; inf * 0 would be NaN, in the gradient too.
        current = _on(mask, logprobs)
        log_ratio = (current - _on(mask, data["prev_logprobs"][:, 1:])).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        advantages = _per_token(data["advantages"], mask)
        weight = self._importance_weight(data, mask)
        kl = self._kl(current, data, mask)

        token_loss = weight * self._policy_gradient(ratio, advantages)
        token_loss = token_loss + self.config.reference_policy_kl_penalty * weight * ratio * kl
        loss = self._reduce(token_loss, mask, normalizer)
        with torch.no_grad():
            metrics = {
                "loss": loss,
                "kl": _token_mean(kl, mask, normalizer),
                "ratio_mean": _token_mean(ratio, mask, normalizer),
                "clip_fraction_low": _token_mean(self._clips_low(ratio, advantages), mask, normalizer),
                "clip_fraction_high": _token_mean(self._clips_high(ratio, advantages), mask, normalizer),
                "importance_weight_mean": _token_mean(weight, mask, normalizer),
                "entropy_proxy": _token_mean(-current, mask, normalizer),
                "approx_kl": _token_mean(ratio - 1.0 - log_ratio, mask, normalizer),
            }
        return loss, {name: value.detach() for name, value in metrics.items()}

    def _policy_gradient(self, ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        low, high = 1.0 - self.config.ratio_clip_min, 1.0 + self.config.ratio_clip_max
        loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
        if self.config.ratio_clip_c is None:
            return loss
        bounded = torch.minimum(loss, -advantages * self.config.ratio_clip_c)
        return torch.where(advantages < 0, bounded, loss)

    def _importance_weight(self, data: BatchedDataDict, mask: torch.Tensor) -> torch.Tensor:
        """p_prev / p_engine of each token, bounded above. No gradient: both are numbers of the past."""
        if not self.config.use_importance_sampling_correction:
            return torch.ones_like(mask)
        log_weight = _on(mask, data["prev_logprobs"][:, 1:]) - _on(mask, data["generation_logprobs"][:, 1:])
        weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        bound = self.config.truncated_importance_sampling_ratio
        return weight if bound is None else weight.clamp(max=bound)

    def _kl(self, current: torch.Tensor, data: BatchedDataDict, mask: torch.Tensor) -> torch.Tensor:
        if self.config.reference_policy_kl_penalty == 0.0:
            return torch.zeros_like(mask)
        reference = _on(mask, data["reference_logprobs"][:, 1:])
        return estimate_kl(current, reference, self.config.reference_policy_kl_type)

    def _reduce(self, values: torch.Tensor, mask: torch.Tensor, normalizer: LossNormalizer) -> torch.Tensor:
        if self.config.token_level_loss:
            return _token_mean(values, mask, normalizer)
        per_sample = (values * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1.0)
        return per_sample.sum() / max(normalizer.num_samples, 1)

    def _clips_low(self, ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """Where the lower edge stops the gradient."""
        return ((ratio < 1.0 - self.config.ratio_clip_min) & (advantages < 0)).to(ratio.dtype)

    def _clips_high(self, ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """Where the upper edge stops the gradient."""
        return ((ratio > 1.0 + self.config.ratio_clip_max) & (advantages > 0)).to(ratio.dtype)


def _on(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.where(mask.bool(), values, 0.0)


def _per_token(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    per_token = advantages[:, 1:] if advantages.dim() == 2 else advantages.unsqueeze(1).expand_as(mask)
    return _on(mask, per_token)


def _token_mean(values: torch.Tensor, mask: torch.Tensor, normalizer: LossNormalizer) -> torch.Tensor:
    return (values * mask).sum() / max(normalizer.num_tokens, 1)
